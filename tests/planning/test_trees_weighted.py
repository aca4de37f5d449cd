"""Tests plans of kind "trees": how weights become byte ranges, and how plans are checked against links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trees import check_tree

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.trees import (
    ALIGNMENT,
    SMALLEST_CHUNK,
    check_plan,
    chunk_of,
    edges,
    expand,
    fewest_hops,
    misfit,
    plan_for,
    shares,
)
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

NAMES = ("a", "b", "c", "d")
SHAPES = (("", "a", "b", "c"), ("b", "", "d", "b"), ("d", "d", "d", ""), ("", "a", "a", "a"))


def trees(*weights, chunk=0):
    return PlanSpec(
        "trees", chunk, tuple(TreeSpec(0, 0, NAMES, SHAPES[i % 4], weight) for i, weight in enumerate(weights))
    )


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6),
    st.lists(st.integers(0, 3_000_000), max_size=5),
    st.sampled_from([0, 64, 4096, 65536]).filter(lambda c: c != 64),
)
def test_every_byte_is_in_one_chunk_and_every_tree_gets_its_weight(weights, lengths, chunk):
    sections, at = [], 0
    for length in lengths:
        sections.append((at, at + length))
        at += length
    spec = trees(*weights, chunk=chunk)
    found = expand(spec, NAMES, at, sections)
    assert [t.start for t in found] == [0, *(t.stop for t in found[:-1])][: len(found)]
    assert (found[-1].stop if found else 0) == at
    ends = {stop for _, stop in sections}
    for tree in found:
        assert 0 < tree.nbytes <= chunk_of(spec, at) + ALIGNMENT
        assert tree.stop % ALIGNMENT == 0 or tree.stop in ends
        assert any(low <= tree.start and tree.stop <= high for low, high in sections)
    for tree in {id(t.shape): t for t in found}.values():
        check_tree(tree, NAMES)
    # No tree is ever owed more than a smallest chunk, or has more than a whole section's change too much.
    slack = len(weights) * SMALLEST_CHUNK + (len(sections) + 1) * ALIGNMENT * len(weights)
    by_shape = {}
    for tree in found:
        by_shape[id(tree.shape)] = by_shape.get(id(tree.shape), 0) + tree.nbytes
    wanted = {}
    for shape, part in shares(spec, NAMES):
        wanted[id(shape)] = wanted.get(id(shape), 0.0) + part * at
    for shape, nbytes in wanted.items():
        assert abs(by_shape.get(shape, 0) - nbytes) <= slack


def test_trees_take_turns_over_the_whole_section():
    """Chunks of the trees are interleaved over the whole buffer, so that links of the last tree do not idle at
    first.
    """
    found = expand(trees(3.0, 1.0), NAMES, 1 << 24, ())
    light = [t for t in found if t.root == "b"]
    assert sum(t.nbytes for t in light) == 1 << 22
    for quarter in range(4):
        low, high = quarter << 22, (quarter + 1) << 22
        part = sum(min(t.stop, high) - max(t.start, low) for t in light if t.start < high and t.stop > low)
        assert abs(part - (1 << 20)) <= chunk_of(trees(1.0), 1 << 24)


def test_chunks_are_small_where_the_buffer_is_and_never_below_64_kib():
    spec = trees(1.0)
    assert [chunk_of(spec, n << 20) >> 10 for n in (0, 1, 16, 32, 64, 256, 4096)] == [64, 64, 64, 128, 256, 1024, 1024]
    assert chunk_of(trees(1.0, chunk=4096), 1 << 30) == 4096
    assert {t.nbytes for t in expand(spec, NAMES, 1 << 25, ())} == {1 << 17}


def test_chunks_of_many_members_are_a_64th_of_the_buffer_up_to_256_kib():
    def kib(count):
        names = tuple(f"n{i}" for i in range(count))
        spec = PlanSpec("trees", trees=(TreeSpec(0, 0, names, ("", *names[:-1]), 1.0),))
        return [chunk_of(spec, n << 20) >> 10 for n in (1, 4, 8, 16, 32, 64, 128, 4096)]

    assert kib(16) == [64, 64, 64, 64, 128, 256, 512, 1024]
    assert kib(17) == [64, 64, 128, 256, 256, 256, 512, 1024]


def test_a_tiny_section_is_one_chunk_and_is_made_up_for_later():
    sections = [(0, 1000), (1000, 1064), (1064, 1 << 20)]
    found = expand(trees(1.0, 1.0), NAMES, 1 << 20, sections)
    assert [(t.start, t.stop) for t in found[:2]] == [(0, 1000), (1000, 1064)]
    share = sum(t.nbytes for t in found if t.root == "a")
    assert abs(share - (1 << 19)) <= 128


def test_links_and_shares_are_those_of_the_trees():
    spec = trees(2.0, 1.0)
    assert edges(spec, NAMES) == {("a", "b"), ("b", "c"), ("c", "d"), ("b", "d")}
    assert [round(part, 3) for _, part in shares(spec, NAMES)] == [0.667, 0.333]
    assert [part for _, part in shares(PlanSpec(), NAMES)] == [0.25] * 4
    user = PlanSpec("user", trees=(TreeSpec(0, 64, NAMES, SHAPES[0]), TreeSpec(64, 256, NAMES, SHAPES[1])))
    assert [part for _, part in shares(user, NAMES)] == [0.25, 0.75]
    assert shares(PlanSpec("user", trees=(TreeSpec(0, 0, NAMES, SHAPES[0]),)), NAMES)[0][1] == 1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PlanSpec("trees"), "plan 'trees' has no trees"),
        (trees(0.0), "tree 0 of plan 'trees' has weight 0.0; expected a number above 0"),
        (trees(1.0, -1.0), "tree 1 of plan 'trees' has weight -1.0"),
        (trees(float("inf")), "weight inf"),
        (trees(float("nan")), "weight nan"),
        (PlanSpec("trees", 0, (TreeSpec(0, 64, NAMES, SHAPES[0], 1.0),)), r"has the range \[0, 64\)"),
        (PlanSpec("trees", 0, (TreeSpec(0, 0, NAMES, ("a",) * 4, 1.0),)), "has 0 roots"),
        (PlanSpec("auto"), "has no trees before the scheduler has drawn them"),
    ],
)
def test_weighted_trees_that_do_not_fit(spec, words):
    with pytest.raises(PlanError, match=words):
        expand(spec, NAMES, 4096, ())
    assert misfit(spec, NAMES)
    if spec.kind == "trees":
        with pytest.raises(PlanError, match=words):
            check_plan(spec)


def test_kinds_that_the_scheduler_draws_pass_the_check_before():
    for kind in ("auto", "widest", "packed", "star", "fapt", "local", "spread", "my.module:planner"):
        check_plan(PlanSpec(kind))
    check_plan(trees(1.0, 2.0))
    with pytest.raises(PlanError, match="at least 2 children"):
        check_plan(PlanSpec("tree:1"))


def test_a_plan_gives_way_where_a_link_is_missing():
    chain = [("a", "b"), ("c", "b"), ("c", "d")]
    spec = trees(1.0)
    assert plan_for(spec, NAMES, chain) == (spec, "trees as configured")
    assert plan_for(PlanSpec("chain"), NAMES, chain)[0].kind == "chain"
    plan, reason = plan_for(PlanSpec(chunk_nbytes=4096), NAMES, chain)
    assert edges(plan, NAMES) == {("a", "b"), ("b", "c"), ("c", "d")}
    assert plan.chunk_nbytes == 4096
    assert "plan 'rotating' needs links that are not there: a-c, a-d, b-d" in reason
    every = [(x, y) for x in NAMES for y in NAMES if x < y]
    assert plan_for(trees(1.0), ("a", "b", "c"), every)[0].kind == "rotating"


def test_the_tree_of_fewest_hops_is_as_low_as_can_be():
    star = [("c", "a"), ("c", "b"), ("d", "c"), ("a", "b")]
    plan = fewest_hops(NAMES, star)
    assert dict(zip(NAMES, plan.trees[0].parents, strict=True)) == {"a": "c", "b": "c", "c": "", "d": "c"}
    with pytest.raises(PlanError, match=r"the parts are: a, c \| b \| d\."):
        fewest_hops(NAMES, [("a", "c")])
