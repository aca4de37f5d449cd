"""Tests views that are encoded as changes of the view before."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from large_views import sparse_view

from chaos_lightning.errors import WireError
from chaos_lightning.protocol import codec
from chaos_lightning.protocol.changes import change_to, changed
from chaos_lightning.protocol.packing import PackedChange
from chaos_lightning.protocol.types import LinkSpec, PlanSpec, TreeSpec, View, ViewId


def without(view: View, *gone: str, trees: bool = True) -> View:
    """Returns the view after these members have died; in trees their children become the root's."""
    members = tuple(m for m in view.members if m.id not in gone)
    links = tuple(link for link in view.links if link.a not in gone and link.b not in gone)
    made = []
    for tree in view.plan.trees:
        places = [i for i, m in enumerate(tree.members) if m not in gone]
        root = next((tree.members[i] for i in places if not tree.parents[i]), members[0].id)
        parents = tuple(
            "" if tree.members[i] == root else root if tree.parents[i] in ("", *gone) else tree.parents[i]
            for i in places
        )
        made.append(TreeSpec(0, 0, tuple(m.id for m in members), parents, tree.weight))
    plan = replace(view.plan, trees=tuple(made)) if trees else view.plan
    number = ViewId(view.id.term, view.id.number + 1)
    return replace(view, id=number, predecessor=view.id, members=members, links=links, plan=plan, reason="died")


def told(before: View, view: View) -> PackedChange:
    """Encodes the change from `before` to `view`, checks that it can be decoded and applied, and returns it."""
    change = change_to(before, view, "0")
    assert change is not None
    back = codec.decode(PackedChange, codec.encode(change))
    assert back == change
    assert changed(before, back, "0") == view
    return back


def test_deaths_joins_and_links_come_back_as_they_were() -> None:
    chance = Random(7)
    view = sparse_view(24, trees=2)
    newcomers = sparse_view(99).members[50:]
    for round_number in range(40):
        what = chance.randrange(4)
        number = ViewId(1, view.id.number + 1)
        after = replace(view, id=number, predecessor=view.id, joiners=(), reason=f"round {round_number}")
        if what == 0 and len(view.members) > 8:
            after = without(view, *chance.sample(view.ids(), 3))
        elif what == 1:
            come = newcomers[round_number]
            links = (*view.links, LinkSpec(view.members[-1].id, come.id))
            links = tuple(sorted(links, key=lambda x: [(*view.ids(), come.id).index(y) for y in (x.a, x.b)]))
            after = replace(after, members=(*view.members, come), joiners=(come.id,), links=links, plan=PlanSpec())
        elif what == 2 and view.links:
            after = replace(after, links=tuple(chance.sample(view.links, len(view.links) - 1)))
            after = replace(after, links=tuple(sorted(after.links, key=view.links.index)))
        told(view, after)
        view = after


def test_a_death_among_1024_takes_less_than_10_kb() -> None:
    view = sparse_view(1024, trees=4)
    dead = view.members[500].id
    other = replace(view.plan, trees=sparse_view(1024, trees=8).plan.trees[4:])
    after = replace(without(replace(view, plan=other), dead), links=without(view, dead).links[5:])
    assert len(codec.encode(told(view, after))) < 9_000, "all four trees were drawn anew"
    assert len(codec.encode(told(view, replace(after, plan=view.plan)))) < 500


def test_pipelines_are_told_where_they_change_and_leavers_always() -> None:
    view = sparse_view(8)
    text = json.dumps({"plan": "x" * 4000})
    first = replace(without(view, view.members[3].id), pipelines=text, leaving=(view.members[3],))
    assert told(view, first).view.pipelines == text
    second = without(first, view.members[5].id)
    assert len(codec.encode(told(first, second))) < 1000
    for other in ("", "{}"):
        assert told(first, replace(second, pipelines=other)).view.pipelines == other
    odd = replace(told(first, second), keeps_pipelines=False)
    odd = replace(odd, view=replace(odd.view, pipelines=text))
    for before, change in ((first, odd), (view, replace(told(view, first), keeps_pipelines=True))):
        with pytest.raises(WireError, match="whose pipelines are none"):
            changed(before, change, "0")


@pytest.mark.parametrize(
    "odd",
    [
        lambda v: replace(v, members=v.members[::-1]),
        lambda v: replace(v, members=(replace(v.members[0], port=1), *v.members[1:])),
        lambda v: replace(v, links=v.links[::-1]),
        lambda v: replace(v, links=(*v.links, LinkSpec("x", "y"))),
        lambda v: replace(v, predecessor=ViewId(0, 7)),
    ],
)
def test_what_does_not_lead_back_is_told_as_a_whole(odd: Any) -> None:
    view = sparse_view(8)
    after = odd(replace(view, id=ViewId(1, 2), predecessor=view.id))
    assert change_to(view, after, "0") is None


def test_a_change_is_applied_to_its_own_view_alone() -> None:
    view = sparse_view(8)
    after = without(view, view.members[3].id)
    change = told(view, after)
    with pytest.raises(WireError, match=r"a change of view 1\.1 \(0\) is none of view 1\.1 \(1\)"):
        changed(view, change, "1")
    for other in (replace(view, id=ViewId(1, 9)), after):
        with pytest.raises(WireError, match=r"a change of view 1\.1 .* is none of view"):
            changed(other, change, "0")
    assert changed(view, change, "0") == after


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda c: replace(c, gone=(3, 3)), "positions"),
        (lambda c: replace(c, gone=(-1,)), "positions"),
        (lambda c: replace(c, gone=(8,)), "positions"),
        (lambda c: replace(c, lost=(5, 4)), "positions"),
        (lambda c: replace(c, replans=False), "whose plan is none"),
        (lambda c: replace(c, view=replace(c.view, links=(0, 99))), "refers to name"),
        (lambda c: replace(c, view=replace(c.view, words=("x",), links=(1, 7))), "no member"),
    ],
)
def test_odd_changes_are_refused(odd: Any, words: str) -> None:
    view = sparse_view(8)
    change = replace(told(view, without(view, view.members[3].id)))
    if "no member" in words:
        change = replace(change, replans=False, view=replace(change.view, trees=(), kind="rotating"))
    with pytest.raises(WireError, match=words):
        changed(view, odd(change), "0")
