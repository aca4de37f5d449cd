"""Tests trees for parts of the gradient buffer: each spans the part's owners only, by the view's plan if that fits
them.
"""

from __future__ import annotations

import pytest

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.trees import OwnedSpans, expand, expand_owned
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

MIB = 1 << 20
NAMES = ("m0", "m1", "m2", "m3")


@pytest.mark.parametrize("kind", ["rotating", "chain", "tree"])
def test_one_part_that_all_own_has_the_trees_of_the_whole(kind):
    sections = ((0, MIB), (MIB, 3 * MIB))
    spec = PlanSpec(kind, 65536)
    found = expand_owned(spec, NAMES, 3 * MIB, [OwnedSpans(NAMES, sections)])
    assert [(t.start, t.stop, t.root, dict(t.parent)) for t in found] == [
        (t.start, t.stop, t.root, dict(t.parent)) for t in expand(spec, NAMES, 3 * MIB, sections)
    ]


def test_sections_of_the_same_owners_share_one_plan_wherever_they_lie():
    """Parts with the same owners count as one for the rotation of roots, even if other parts lie between them."""
    small = 32768
    owned = [
        OwnedSpans(("m2", "m1"), ((0, small),)),
        OwnedSpans(("m0",), ((small, 2 * small),)),
        OwnedSpans(("m1", "m2"), ((2 * small, 3 * small),)),
    ]
    found = expand_owned(PlanSpec("rotating", 16384), NAMES, 3 * small, owned)
    assert [(t.start, t.stop) for t in found] == [(a, a + 16384) for a in range(0, small, 16384)] + [
        (small, small + 16384), (small + 16384, 2 * small)
    ] + [(a, a + 16384) for a in range(2 * small, 3 * small, 16384)]  # fmt: skip
    assert [t.root for t in found] == ["m1", "m2", "m0", "m0", "m1", "m2"]
    assert [dict(t.parent) for t in found[:3]] == [{"m2": "m1"}, {"m1": "m2"}, {}]


def test_a_plan_that_names_other_members_is_replaced_by_one_over_the_owners_links():
    chain = PlanSpec("trees", trees=(TreeSpec(0, 0, NAMES, ("", "m0", "m1", "m2"), 1.0),))
    links = [("m0", "m1"), ("m1", "m2"), ("m2", "m3")]
    owned = [OwnedSpans(NAMES, ((0, MIB),)), OwnedSpans(("m1", "m2", "m3"), ((MIB, 2 * MIB),))]
    found = expand_owned(chain, NAMES, 2 * MIB, owned, links)
    assert {t.root for t in found if t.start < MIB} == {"m0"}
    assert {(t.root, *sorted(t.parent.items())) for t in found if t.start >= MIB} == {
        ("m2", ("m1", "m2"), ("m3", "m2"))
    }


@pytest.mark.parametrize(
    ("owners", "links", "words"),
    [
        (("m0", "m2"), [("m0", "m1"), ("m1", "m2")], "no link leads between m0, m2"),
        (("m0", "m1", "m2"), [("m0", "m1"), ("m2", "m3")], "m2"),
        (("m0", "x"), [], "'x'.*no members"),
        ((), [], "no owner among 4 members"),
    ],
)
def test_owners_that_cannot_reduce_are_named(owners, links, words):
    with pytest.raises(PlanError, match=words):
        expand_owned(PlanSpec("rotating"), NAMES, MIB, [OwnedSpans(owners, ((0, MIB),))], links)


@pytest.mark.parametrize("spans", [(), ((0, MIB // 2),), ((0, MIB), (MIB // 2, MIB))])
def test_spans_that_do_not_tile_the_buffer_are_the_callers_mistake(spans):
    with pytest.raises(ValueError, match="section"):
        expand_owned(PlanSpec("rotating"), NAMES, MIB, [OwnedSpans(("m0",), spans)])


def test_a_buffer_of_no_bytes_has_no_trees():
    assert expand_owned(PlanSpec("rotating"), NAMES, 0, []) == ()
