"""Tests rounds of all-reduces: against networkx, against every colouring, and for three ways of sending by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pipeline_changes import PLENTY, Change, changes, layer, row

from benchmarks.rounds import (
    Vertex,
    at_once,
    colour,
    neighbours_of,
    one_by_one,
    rounds_s,
    step_s,
    vertices,
)
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.plan import PipelinePlan


def shortest_s(all_of: list[Vertex]) -> float:
    """Returns the least seconds of all possible divisions into rounds (graph colourings)."""
    near = neighbours_of(all_of)

    def rest(i: int, rounds: list[list[int]]) -> float:
        if i == len(all_of):
            return sum(max(all_of[j].seconds for j in r) for r in rounds)
        free = [k for k, r in enumerate(rounds) if not near[i] & set(r)]
        tried = [rest(i + 1, [r + [i] * (k == j) for j, r in enumerate(rounds)]) for k in free]
        return min([*tried, rest(i + 1, [*rounds, [i]])])

    return rest(0, [])


def most_on_one(all_of: list[Vertex]) -> int:
    return max(Counter(name for v in all_of for name in v.owners).values(), default=0)


@given(changes(most_devices=8), st.booleans())
def test_a_round_shares_no_owner_and_all_are_in_one(change: Change, single: bool) -> None:
    all_of = vertices(change.job, change.new, single_layers=single)
    rounds = colour(all_of)
    assert Counter(v for r in rounds for v in r) == Counter(all_of)
    for r in rounds:
        assert max(Counter(name for v in r for name in v.owners).values()) == 1


@given(changes(most_devices=8), st.booleans())
def test_every_layer_with_several_owners_is_in_one_vertex(change: Change, single: bool) -> None:
    all_of = vertices(change.job, change.new, single_layers=single)
    holders = change.new.holders()
    assert sorted(x for v in all_of for x in v.layers) == [x for x, who in enumerate(holders) if len(who) > 1]
    for v in all_of:
        assert all(v.owners == holders[x] for x in v.layers)
    assert single or len({v.owners for v in all_of}) == len(all_of)


@given(changes(most_devices=8), st.booleans())
def test_there_are_as_few_rounds_as_by_networkx_and_as_can_be(change: Change, single: bool) -> None:
    """With equal weights there are no more rounds than networkx finds, and no more than the busiest device needs."""
    all_of = [v._replace(seconds=1.0) for v in vertices(change.job, change.new, single_layers=single)]
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(all_of)))
    graph.add_edges_from((i, j) for i, near in enumerate(neighbours_of(all_of)) for j in near)
    theirs = networkx.greedy_color(graph, strategy="DSATUR")
    assert len(colour(all_of)) <= len(set(theirs.values()))
    assert len(colour(all_of)) == most_on_one(all_of)


@given(changes(most_devices=8))
def test_no_colouring_of_a_small_plan_is_much_shorter(change: Change) -> None:
    all_of = vertices(change.job, change.new)
    assume(len(all_of) <= 8)
    assert shortest_s(all_of) * (1 - 1e-9) <= rounds_s(colour(all_of)) <= shortest_s(all_of) * 1.1


def test_by_weight_alone_is_taken_where_it_is_shorter() -> None:
    """Three rounds, of which two are short, beat two rounds that both wait for a heavy vertex, on a path of four
    vertices with heavy ends.
    """
    weights = (8.0, 1.0, 1.0, 8.0)
    all_of = [Vertex((i,), frozenset({f"d{i}", f"d{i + 1}"}), 0.0, w) for i, w in enumerate(weights)]
    assert len(colour([v._replace(seconds=1.0) for v in all_of])) == 2
    assert rounds_s(colour(all_of)) == shortest_s(all_of) == 10.0


# ------------------------------------------------------------------------------------------------ ways of sending


def vertex(owners: str, seconds: float, ready_s: float = 0.0) -> Vertex:
    return Vertex((), frozenset(owners), ready_s, seconds)


@pytest.mark.parametrize(
    ("all_of", "ends_s"),
    [
        ([vertex("ab", 2.0)], 2.0),
        ([vertex("ab", 2.0), vertex("cd", 3.0)], 3.0),
        # Half of the card of b each; the longer one has it alone when the other has ended, at 2.
        ([vertex("ab", 1.0), vertex("bc", 3.0)], 4.0),
        # A third each on b. So d has two thirds left for the last, which ends at 3.
        ([vertex("ab", 1.0), vertex("bc", 1.0), vertex("bd", 1.0), vertex("de", 2.0)], 3.0),
        ([vertex("ab", 1.0), vertex("ac", 2.0, ready_s=0.5)], 3.0),
        ([vertex("ab", 1.0), vertex("ac", 2.0, ready_s=5.0)], 7.0),
    ],
)
def test_cards_are_shared_fairly(all_of: list[Vertex], ends_s: float) -> None:
    assert at_once(all_of) == pytest.approx(ends_s)


@given(changes(most_devices=8), st.lists(st.floats(0, 3), min_size=6, max_size=6))
def test_no_way_beats_the_busiest_card_nor_is_longer_than_a_row(change: Change, ready: list[float]) -> None:
    all_of = [v._replace(ready_s=ready[v.layers[0]]) for v in vertices(change.job, change.new)]
    busy: dict[str, float] = defaultdict(float)
    for v in all_of:
        for name in v.owners:
            busy[name] += v.seconds
    least = max([*busy.values(), *(v.ready_s + v.seconds for v in all_of)], default=0.0)
    in_a_row = one_by_one([(v,) for v in all_of])
    for ends in (one_by_one(colour(all_of)), at_once(all_of), in_a_row):
        assert ends >= least * (1 - 1e-9)
    last = max((v.ready_s for v in all_of), default=0.0)
    assert at_once(all_of) <= last + sum(v.seconds for v in all_of) * (1 + 1e-9)
    assert in_a_row <= last + sum(v.seconds for v in all_of) * (1 + 1e-9)


def test_a_round_waits_for_the_one_before_and_for_its_last_member() -> None:
    first, second, third = vertex("ab", 1.0), vertex("cd", 2.0), vertex("bc", 1.0, ready_s=2.5)
    assert one_by_one([(first, second), (third,)]) == 3.5
    assert one_by_one([(third,), (first, second)]) == 3.5
    assert one_by_one([(third, first), (second,)]) == 3.5


def uneven(rate_bps: float) -> tuple[TrainingJob, PipelinePlan]:
    job = TrainingJob(
        layers=tuple(layer(f"l{i}", 30) for i in range(6)),
        devices=tuple(Device(name=x, memory_nbytes=PLENTY) for x in "abcde"),
        micro_batches=4,
        between_hosts=LinkRate(rate_bps=rate_bps),
    )
    return job, PipelinePlan(6, (row(2, ("a", 0, 3), ("b", 3, 6)), row(2, ("c", 0, 2), ("d", 2, 4), ("e", 4, 6))))


def test_layers_as_vertices_need_more_rounds() -> None:
    job, plan = uneven(800)
    groups, layers = vertices(job, plan), vertices(job, plan, single_layers=True)
    assert [v.layers for v in sorted(groups)] == [(0, 1), (2,), (3,), (4, 5)]
    assert (len(colour(groups)), len(colour(layers))) == (2, 3)


def test_a_step_is_shorter_in_rounds_than_in_a_row() -> None:
    job, plan = uneven(8)
    row_s, by_colour = step_s(job, plan, "row"), step_s(job, plan, "rounds")
    # Rounds of 20, 10, 10 and 20 seconds: all in a row, or two by two, of which one is long each time.
    assert row_s - by_colour == pytest.approx(20, rel=0.02)
    assert step_s(job, plan, "at once") <= by_colour
    # As it is estimated, links are never idle while something is ready.
    assert estimate(job, plan).step_s <= by_colour
    # Without overlap all begins when the last backward unit has ended.
    assert step_s(job, plan, "row", overlap=False) == pytest.approx(estimate(job, plan).compute_s + 60)
    free = replace(job, between_hosts=LinkRate())
    assert math.isclose(step_s(free, plan, "row"), step_s(free, plan, "at once"))
