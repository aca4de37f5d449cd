"""Trees for members that are not those that they were drawn for."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.graph import breadth_first, connected_parts, neighbours
from chaos_lightning.planning.mending import mended
from chaos_lightning.planning.trees import edges, misfit
from chaos_lightning.protocol.types import PlanSpec, TreeSpec

USUAL = (0.0005, 1e9, 1e9)


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def graph(random: Random, ids: list[str], more: int) -> list[tuple[str, str]]:
    """A tree of these, and further links."""
    links = [(random.choice(ids[:i]), ids[i]) for i in range(1, len(ids))]
    return links + [(one, other) for one, other in (random.sample(ids, 2) for _ in range(more))]


def plan_over(ids: list[str], links: list[tuple[str, str]], roots: list[str]) -> PlanSpec:
    near = neighbours(ids, links)
    above = [breadth_first(root, near, "") for root in roots]
    return PlanSpec("trees", 4096, tuple(TreeSpec(0, 0, tuple(ids), tuple(a[m][0] for m in ids), 1.0) for a in above))


@given(st.integers(0, 10**6))
def test_what_is_mended_fits_and_keeps_the_edges_that_are_there(seed: int) -> None:
    random = Random(seed)
    before = names(random.randrange(20, 60))
    links = graph(random, before, 3 * len(before))
    plan = plan_over(before, links, random.sample(before, 3))
    gone = set(random.sample(before, random.randrange(5)))
    now = [m for m in before if m not in gone] + [f"j{i}" for i in range(random.randrange(4))]
    left = [ends for ends in links if gone.isdisjoint(ends) and random.random() < 0.95]
    left += [(m, random.choice(before)) for m in now if m[0] == "j" for _ in range(3)]
    left = [ends for ends in left if gone.isdisjoint(ends)]
    found = mended(plan, now, dict.fromkeys(left, USUAL))
    assert (found is None) == (len(connected_parts(now, neighbours(now, left))) > 1)
    if found is None:
        return
    assert misfit(found, now, left) == ""
    assert (found.kind, found.chunk_nbytes, len(found.trees)) == ("trees", 4096, 3)
    there = {frozenset(ends) for ends in left}
    for old, new in zip(plan.trees, found.trees, strict=True):
        kept = {frozenset(e) for e in edges(PlanSpec("trees", trees=(old,)), before)} & there
        assert kept <= {frozenset(e) for e in edges(PlanSpec("trees", trees=(new,)), now)}


def test_a_plan_that_fits_is_left_as_it_is() -> None:
    ids = names(20)
    links = graph(Random(1), ids, 30)
    plan = plan_over(ids, links, ids[:2])
    assert mended(plan, ids, dict.fromkeys(links, USUAL)) == plan


def test_where_the_root_is_gone_one_of_those_below_takes_its_place() -> None:
    ids = names(10)
    links = [(ids[0], m) for m in ids[1:]] + list(pairwise(ids[1:]))
    chain = [(a, b) for a, b in links if a != ids[0]] + [(ids[0], ids[5])]
    found = mended(plan_over(ids, chain, [ids[0]]), ids[1:], dict.fromkeys(links, USUAL))
    assert found is not None
    (tree,) = found.trees
    assert tree.members[tree.parents.index("")] == ids[5]


def test_newcomers_are_spread_over_cards_that_have_little_work() -> None:
    ids = names(20)
    ring = [(ids[i], ids[(i + 1) % 20]) for i in range(20)]
    come = [f"j{i}" for i in range(3)]
    links = dict.fromkeys([*ring, *((m, j) for m in ids for j in come)], USUAL)
    found = mended(plan_over(ids, ring, ids[:1]), [*ids, *come], links)
    assert found is not None
    (tree,) = found.trees
    assert len(set(tree.parents[-3:])) == 3


def test_what_came_off_is_hung_up_by_the_links_that_carry_most() -> None:
    ids = names(20)
    row = dict.fromkeys(pairwise(ids), USUAL)
    slow, fast = (0.001, 1e6, 1e6), (0.001, 1e8, 1e8)
    found = mended(plan_over(ids, list(row), ids[:1]), [*ids, "j"], {**row, (ids[0], "j"): slow, (ids[9], "j"): fast})
    assert found is not None
    assert found.trees[0].parents[-1] == ids[9]


def test_where_links_do_not_connect_all_or_a_plan_has_no_trees_there_is_nothing_to_mend() -> None:
    ids = names(20)
    links = dict.fromkeys(graph(Random(2), ids, 40), USUAL)
    assert mended(plan_over(ids, list(links), ids[:2]), [*ids, "j0"], links) is None
    assert mended(PlanSpec("rotating"), ids, links) is None
