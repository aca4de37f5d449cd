"""Tests how the paper is repeated: shapes of states, growing clusters, pulls in virtual time, and sizes scaled back."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from benchmarks.paper import clusters, sweep, virtual
from benchmarks.paper.assignment import best_size_s, checks, enumerated_s, gaps
from benchmarks.paper.emulated import Factors
from benchmarks.paper.hosts import beyond
from benchmarks.paper.idle import idle_s
from benchmarks.paper.states import ALEXNET, GPT2, GPT2_LARGE, GPT2_MEDIUM, IMAGES, MIB, RESNET101, TEXTS, VGG11
from benchmarks.paper.sweep import Plan, Point
from benchmarks.transfer.plans import greedy, optimal
from benchmarks.world import Step
from chaos_lightning.planning.shards import Neighbour, bound_s

SEED = 7


def join_of(size: int, seed: int = SEED) -> clusters.Join:
    return next(join for join in clusters.growth(seed, size) if join.size == size)


# ---------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (ALEXNET, 61_100_840),
        (VGG11, 132_863_336),
        (RESNET101, 44_549_160),
        (GPT2, 124_439_808),
        (GPT2_MEDIUM, 354_823_168),
        (GPT2_LARGE, 774_030_080),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_models_have_as_many_parameters_as_published(model: object, count: int) -> None:
    assert model.count == count  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", [*IMAGES, *TEXTS], ids=lambda model: model.name)
@pytest.mark.parametrize("smaller", [1, 8, 128])
def test_a_smaller_state_keeps_its_tensors_and_their_proportions(model: object, smaller: int) -> None:
    layout = model.layout(model.nbytes / smaller)  # type: ignore[attr-defined]
    assert len(layout) == len(model.shapes)  # type: ignore[attr-defined]
    assert sum(layout) == pytest.approx(model.nbytes / smaller, rel=0.01)  # type: ignore[attr-defined]
    assert all(size >= 4 and size % 4 == 0 for size in layout)


# -------------------------------------------------------------------------------------------------- clusters


def test_a_history_is_the_same_each_time_and_only_grows() -> None:
    first, again = list(clusters.growth(SEED, 11)), list(clusters.growth(SEED, 11))
    assert first == again
    assert first != list(clusters.growth(SEED + 1, 11))
    assert [join.size for join in first] == list(range(6, 12))
    for before, after in itertools.pairwise(first):
        assert set(before.topology.links) < set(after.topology.links)
        assert before.at_s < after.at_s
    longer = list(clusters.growth(SEED, 15))[: len(first)]
    assert longer == first, "a longer history begins with the shorter one"


@pytest.mark.parametrize("size", [6, 11, 23, 47])
def test_a_newcomer_has_several_neighbours_with_links_in_the_papers_range(size: int) -> None:
    join = join_of(size)
    assert len(join.near) == clusters.several(size)
    assert clusters.FEWEST <= len(join.near) <= clusters.MOST
    assert all(100e6 <= rate <= 1000e6 for rate in join.rates().values())


def test_rates_change_every_three_minutes() -> None:
    join = join_of(8)
    after_s = join.changes_after_s(0.0)
    assert 0 < after_s <= clusters.CHANGE_S
    assert join.rates() == join.rates(after_s * 0.99) != join.rates(after_s)


def test_a_pair_never_changes() -> None:
    assert clusters.pair(200e6).changes_after_s(0.0) == math.inf


def test_a_shrinking_history_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 <= first <= last"):
        list(clusters.growth(SEED, 3, first=6))


# ---------------------------------------------------------------------------------------------- virtual time


def test_flows_on_a_common_link_get_equal_parts_and_the_rest_goes_to_others() -> None:
    ways = {"a": [("x", "y")], "b": [("x", "y"), ("y", "z")], "c": [("y", "z")]}
    assert virtual.fair_rates(ways, {("x", "y"): 2.0, ("y", "z"): 10.0}) == {"a": 1.0, "b": 1.0, "c": 9.0}


@pytest.mark.parametrize("policy", ["adaptive", "greedy", "optimal"])
@pytest.mark.parametrize("size", [6, 11, 23])
def test_planned_pulls_take_about_what_the_closed_form_says(policy: str, size: int) -> None:
    join = join_of(size)
    bound = virtual.bound_s(join, RESNET101.nbytes)
    pulled = virtual.pull(join, RESNET101.nbytes, policy, layer_nbytes=RESNET101.layout(RESNET101.nbytes))
    assert sum(pulled.nbytes.values()) == RESNET101.nbytes
    assert bound * 0.999 <= pulled.seconds <= bound * 1.3 + 0.05


def test_one_source_takes_its_bytes_over_its_rate() -> None:
    join = clusters.pair(200e6)
    pulled = virtual.pull(join, 100 * MIB, "single")
    assert pulled.seconds == pytest.approx(100 * MIB * 8 / 200e6, rel=0.001)
    assert pulled.served_s["n0"] == pytest.approx(pulled.seconds)


def test_equal_shares_wait_for_the_slowest_link() -> None:
    join = join_of(11)
    slowest = min(rate for _, rate in join.estimates().values())
    pulled = virtual.pull(join, RESNET101.nbytes, "even")
    assert pulled.seconds == pytest.approx(RESNET101.nbytes / len(join.near) * 8 / slowest, rel=0.05)


def test_relays_share_the_links_that_they_have_in_common() -> None:
    """All routes to the newcomer end in its own links, so a multi-source pull cannot be faster than all of these links
    together.
    """
    join = join_of(11)
    pulled = virtual.pull(join, RESNET101.nbytes, "multi_source")
    assert set(pulled.nbytes) == set(join.topology.names) - {join.newcomer}
    assert pulled.seconds >= virtual.bound_s(join, RESNET101.nbytes) * 0.999
    assert virtual.hop_by_hop_s(join, RESNET101.nbytes) >= pulled.seconds * 0.9


def test_a_change_of_rates_in_mid_pull_counts() -> None:
    join = join_of(6)
    until_s = join.changes_after_s(0.0)
    near = dict(join.estimates())
    rate = max(rate for _, rate in near.values())
    nbytes = int(rate / 8 * until_s * 1.5)  # the fastest link alone is at it until after the change
    pulled = virtual.pull(join, nbytes, "single")
    fastest = max(near, key=lambda n: near[n][1])
    later = dict(join.rates(until_s))
    after = later.get((fastest, join.newcomer)) or later[join.newcomer, fastest]
    expected = until_s + (nbytes - rate / 8 * until_s) * 8 / after
    assert pulled.seconds == pytest.approx(expected, rel=0.01)


# -------------------------------------------------------------------------------------------------- factors


def test_seconds_here_are_brought_back_to_the_papers_size() -> None:
    assert Factors().paper_s(5.0, 4.0, 0.5) == 5.0
    # 2 s of moving bytes stand for 4, 0.1 s of hashing for 0.8, 0.2 s of words for themselves.
    assert Factors(smaller=8, slower=4).paper_s(2.3, 2.0, 0.1) == pytest.approx(4 + 0.8 + 0.2)
    assert Factors(smaller=8, slower=4).paper_s(2.05, 2.0, 0.1) == pytest.approx(4 + 0.4), "no more than the rest"


def test_a_stop_and_resume_has_every_node_read_the_checkpoint() -> None:
    assert sweep.stop_resume_s(100_000_000, 6, 2.0, 3.0) == pytest.approx(2.0 + 6 * 1.0 + 3.0)


# ---------------------------------------------------------------------------------------------------- points


def point(system: str, seconds: float, **changes: object) -> Point:
    given = {"kind": "scaled down", "model": "m", "size": 6, "repeat": 0, "serving_s": 1.5, "near": 3, "bound_s": 1.0}
    return Point(system=system, seconds=seconds, **{**given, **changes})  # type: ignore[arg-type]


def test_comparisons_are_made_join_by_join() -> None:
    points = [
        point("a", 1.0),
        point("b", 2.0),
        point("a", 3.0, repeat=1),
        point("b", 2.0, repeat=1),
        point("a", 9, size=7),
    ]
    assert sweep.share(points, "a", "b") == (1, 2)
    assert sweep.share(points, "a", "b", 2.0) == (2, 2)


def test_growth_compares_the_largest_clusters_with_the_smallest() -> None:
    points = [point("a", float(seconds), size=size) for size, seconds in ((6, 1), (7, 1), (8, 5), (11, 2), (47, 2))]
    assert sweep.growth_of(points, system="a") == 2.0


def test_executed_and_simulated_joins_are_compared_where_both_exist() -> None:
    points = [point("a", 1.1), point("a", 1.0, kind="simulated"), point("a", 7.0, size=8), point("Pollux", 5.0)]
    assert sweep.fidelity(points) == pytest.approx(1.1)
    assert math.isnan(sweep.fidelity(points, "real"))


def test_simulated_points_cover_all_that_was_planned() -> None:
    plan = Plan((RESNET101,), (6, 8), ("EDL+", "Autoscaling", "adaptive"), 2, Factors(), SEED)
    points = sweep.simulate(plan, lambda text: None)
    assert {(p.size, p.repeat, p.system) for p in points} == {
        (size, repeat, system)
        for size in (6, 8)
        for repeat in (0, 1)
        for system in ("EDL+", "Autoscaling", sweep.HOP_BY_HOP, "adaptive")
    }
    assert all(p.seconds >= p.bound_s * 0.999 for p in points)


def test_idle_time_is_the_delay_of_whoever_waits() -> None:
    assert idle_s(point("EDL+", 4.0)) == 24.0
    assert idle_s(point("Chaos", 4.0)) == 1.5
    assert idle_s(point("adaptive", 4.0)) == 0.0


def test_time_beyond_usual_steps_counts_up_to_the_second_joint_step() -> None:
    moments = [0, 10, 20, 30, 70, 90, 110, 130]  # ms; one step of 40 ms, then joint ones of 20
    members = [2, 2, 2, 2, 2, 3, 3, 3]
    steps = [
        Step(int(ms * 1e6), i, i, "", contributors, 0, 0)
        for i, (ms, contributors) in enumerate(zip(moments, members, strict=True))
    ]
    idle, calm, count = beyond(steps, int(25e6), 2, {2: 0.010, 3: 0.015})
    assert idle == pytest.approx(0.030 + 0.005 + 0.005)
    assert calm == pytest.approx(0.0)
    assert count == 4


# ------------------------------------------------------------------------------------------------ assignment


def test_brute_force_on_two_neighbours() -> None:
    near = [Neighbour("a", 0.0, 1.0), Neighbour("b", 0.0, 3.0)]
    assert enumerated_s(4, 1, near) == 3.0  # three from a, one from b


def test_greedy_is_what_brute_force_finds() -> None:
    assert checks(SEED, 30) == (30, pytest.approx(0.0, abs=1e-9))


def test_no_shard_size_beats_the_bound_and_some_come_close() -> None:
    chance = random.Random(SEED)
    excesses = []
    for _ in range(10):
        near = [Neighbour(f"n{i}", chance.uniform(0, 0.1), 8 / chance.uniform(1e8, 1e9)) for i in range(3)]
        layers = RESNET101.layout(RESNET101.nbytes)
        least, bound = best_size_s(sum(layers), near, layers, 40), bound_s(sum(layers), near)
        assert least >= bound * (1 - 1e-9)
        excesses.append(least / bound - 1)
    assert statistics.median(excesses) < 0.01


def test_plans_of_a_join_are_in_order() -> None:
    found = gaps(join_of(9), RESNET101, random.Random(SEED), 40)
    assert found["bound"] <= found["P2"] * (1 + 1e-9)
    assert found["P2"] <= found["greedy"] * (1 + 1e-9)
    assert found["P3"] == pytest.approx(found["greedy"], rel=1e-6)
    assert found["greedy"] <= found["even"]


def test_the_papers_assignment_at_a_given_size_is_exact() -> None:
    near = [Neighbour("a", 0.01, 8 / 3e8), Neighbour("b", 0.2, 8 / 9e8)]
    nbytes = 123 * MIB
    assert greedy(nbytes, near, shard_nbytes=MIB).seconds == pytest.approx(optimal(nbytes, near).seconds)
