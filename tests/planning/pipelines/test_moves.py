"""Tests the assignment of devices to places, and the transfers: against scipy, against all permutations, and by
hand.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_changes import PLENTY, Change, changes, layer, plans, row
from scipy.optimize import linear_sum_assignment, linprog

from benchmarks.moves import busiest as busiest_card
from benchmarks.moves import busiest_link_s, rank_order
from chaos_lightning.planning.pipelines import moves
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.moves import assign, move_list, renamed
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.rerouting import FatalLossError

KEPT_APART = 10**9
"""Cost of a place on a device of another kind, in bytes."""


def layers_of(plan: PipelinePlan, name: str) -> set[int]:
    return {x for s in plan.stages.get(name, ()) for x in s.layers}


def lacks(change: Change, device: str, place: str) -> set[int]:
    """Returns the layers that a device must receive to take another device's place in the new plan."""
    return layers_of(change.new, place) - layers_of(change.old, device)


def cost(change: Change, device: str, place: str) -> int:
    nbytes = sum(change.job.costs.state(x, x + 1) for x in lacks(change, device, place))
    return nbytes + KEPT_APART * (change.job.by_name[device].kind != change.job.by_name[place].kind)


def least_busy(change: Change, placed: PipelinePlan) -> float:
    """Returns the least bytes that the busiest sender must send, by linear programming with fractional bytes."""
    holders = change.old.holders()
    lacking = Counter(x for d in placed.devices for x in layers_of(placed, d) - layers_of(change.old, d))
    demand = {x: n * change.job.costs.state(x, x + 1) for x, n in lacking.items() if change.job.costs.state(x, x + 1)}
    ways = [(x, d) for x in sorted(demand) for d in sorted(holders[x] & set(placed.devices))]
    if not ways:
        return 0.0
    devices = sorted({d for _, d in ways})
    found = linprog(
        [1.0, *(0.0 for _ in ways)],
        A_ub=[[-1.0, *(float(d == device) for _, d in ways)] for device in devices],
        b_ub=[0.0] * len(devices),
        A_eq=[[0.0, *(float(x == wanted) for x, _ in ways)] for wanted in sorted(demand)],
        b_eq=[demand[x] for x in sorted(demand)],
    )
    return float(found.fun)


def cheapest(change: Change) -> Iterator[PipelinePlan]:
    """Yields all plans with the fewest bytes to move, found by trying every permutation of devices."""
    places = change.new.devices
    orders = list(permutations(places))
    costs = [sum(cost(change, d, p) for d, p in zip(order, places, strict=True)) for order in orders]
    for order, nbytes in zip(orders, costs, strict=True):
        if nbytes == min(costs):
            yield renamed(change.new, dict(zip(places, order, strict=True)))


@given(changes(most_devices=9))
def test_no_assignment_moves_fewer_bytes(change: Change) -> None:
    placed = assign(*change)
    placed.check()
    places = change.new.devices
    matrix = [[cost(change, d, p) for p in places] for d in places]
    rows, columns = linear_sum_assignment(matrix)
    assert move_list(change.job, change.old, placed).nbytes == sum(
        matrix[i][j] for i, j in zip(rows, columns, strict=True)
    )


@given(changes())
def test_places_stay_with_their_kind_of_device(change: Change) -> None:
    kinds = {d.name: d.kind for d in change.job.devices}
    placed = assign(*change)
    assert placed.devices == change.new.devices
    for before, after in zip(change.new.pipelines, placed.pipelines, strict=True):
        assert before.cut == after.cut
        assert [kinds[s.device] for s in before.stages] == [kinds[s.device] for s in after.stages]


@given(changes(most_devices=5), st.sampled_from([2, 3, moves.LEVELS]))
def test_among_the_cheapest_the_busiest_card_is_the_least(change: Change, levels: int) -> None:
    """`assign` minimizes the load of the busiest card among the plans with fewest bytes, if that card receives; if it
    sends, the load may be larger.
    """

    def busiest(plan: PipelinePlan) -> tuple[int, int]:
        found = move_list(change.job, change.old, plan)
        return busiest_card(found), found.busiest_source_nbytes

    with patch.object(moves, "LEVELS", levels):
        most, sends = busiest(assign(*change))
    least = min(busiest(plan)[0] for plan in cheapest(change))
    assert most == least or most == sends > least


@given(changes())
def test_the_busiest_source_sends_the_least_that_can_be(change: Change) -> None:
    found = move_list(*change)
    assert found.busiest_source_nbytes == math.ceil(least_busy(change, change.new) - 1e-6)


@given(changes())
def test_each_missing_byte_moves_once_from_one_that_has_it(change: Change) -> None:
    found = move_list(*change)
    come: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for m in found.moves:
        assert m.layer in layers_of(change.old, m.source)
        assert m.source in change.new.devices
        come[m.target, m.layer].append((m.start, m.stop))
    wanted = {
        (name, x): change.job.costs.state(x, x + 1)
        for name in change.new.devices
        for x in lacks(change, name, name)
        if change.job.costs.state(x, x + 1)
    }
    assert come.keys() == wanted.keys()
    for key, ranges in come.items():
        at = 0
        for start, stop in sorted(ranges):
            assert start == at < stop
            at = stop
        assert at == wanted[key]
    assert found.nbytes == sum(wanted.values()) == sum(found.sends.values())


@given(st.data(), changes())
def test_a_plan_moved_onto_itself_moves_nothing(data: st.DataObject, change: Change) -> None:
    job, _, new = change
    assert assign(job, new, new) == new
    assert move_list(job, new, new).moves == ()
    shuffled = data.draw(st.permutations(new.devices))
    elsewhere = renamed(new, dict(zip(new.devices, shuffled, strict=True)))
    if job.alike:
        assert move_list(job, elsewhere, assign(job, elsewhere, new)).nbytes == 0


@given(st.data(), changes())
def test_the_order_of_devices_does_not_matter(data: st.DataObject, change: Change) -> None:
    job, old, new = change
    other = replace(job, devices=tuple(data.draw(st.permutations(job.devices))))
    assert assign(other, old, new) == assign(job, old, new)
    assert move_list(other, old, new) == move_list(job, old, new)


@given(changes(), st.data())
def test_layers_that_nobody_holds_are_named(change: Change, data: st.DataObject) -> None:
    job, old, _ = change
    alone = data.draw(st.sampled_from(range(job.costs.count)))
    sized = replace(job, layers=tuple(replace(x, parameter_nbytes=1) for x in job.layers))
    left = [d.name for d in job.devices if d.name not in old.holders()[alone]]
    if not left:
        return
    smaller = sized.with_devices([sized.by_name[x] for x in left])
    plan = data.draw(plans(left, job.costs.count))
    for tried in (assign, move_list):
        with pytest.raises(FatalLossError, match=r"nobody who is left owns layers? ") as caught:
            tried(smaller, old, plan)
        assert alone in caught.value.layers
        assert all(not old.holders()[x] & set(left) for x in caught.value.layers)


# ------------------------------------------------------------------------------------------------ by hand


def job_of(hosts: dict[str, str], layers: int = 4, nbytes: int = 30) -> TrainingJob:
    return TrainingJob(
        layers=tuple(layer(f"l{i}", nbytes) for i in range(layers)),
        devices=tuple(Device(name=d, memory_nbytes=PLENTY, host=h) for d, h in hosts.items()),
        micro_batches=4,
        within_host=LinkRate(rate_bps=800),
        between_hosts=LinkRate(rate_bps=80),
    )


def test_a_lost_stage_comes_from_two_peers_in_halves() -> None:
    job = job_of({"b": "h", "c": "h", "d": "h", "e": "far", "f": "far", "g": "far"})
    old = PipelinePlan(
        4, (row(2, ("a", 0, 2), ("b", 2, 4)), row(1, ("c", 0, 2), ("d", 2, 4)), row(1, ("e", 0, 4))), idle=("f", "g")
    )
    new = PipelinePlan(4, (row(2, ("f", 0, 2), ("b", 2, 4)), row(2, ("c", 0, 2), ("d", 2, 4))), idle=("e", "g"))
    found = move_list(job, old, new)
    assert found.nbytes == 60
    assert found.sends == {"c": 30, "e": 30}
    assert found.busiest_source_nbytes == 30
    assert found.busiest_source == "c"
    # From the own host at 800 bits per second, from the other at 80; one after the other over the receiver's card.
    assert {(x.source, x.target): x.seconds for x in found.links} == {("c", "f"): 3.0, ("e", "f"): 0.3}
    assert found.seconds == 3.3
    assert busiest_link_s(found) == 3.0
    # With an owner of all layers among the survivors, nothing need move.
    placed = assign(job, old, new)
    assert move_list(job, old, placed).nbytes == 0
    assert placed.pipelines[0].stages[0].device == "e"


def test_who_leaves_serves_and_who_has_not_got_a_layer_yet_does_not() -> None:
    job = job_of({"a": "", "b": "", "c": ""})
    old = PipelinePlan(4, (row(4, ("a", 0, 2), ("b", 2, 4)),), idle=("c",))
    new = PipelinePlan(4, (row(4, ("a", 0, 2), ("c", 2, 4)),))
    with pytest.raises(FatalLossError, match="layers 2, 3"):
        move_list(job, old, new)
    held = {"a": (0, 1), "b": (2, 3)}
    placed = assign(job, old, new, held)
    assert placed == new, "b serves, and takes no place"
    assert {(m.layer, m.source, m.target) for m in move_list(job, old, placed, held).moves} == {
        (2, "b", "c"),
        (3, "b", "c"),
    }
    # By the old plan a has both of its layers; the second one has not come yet.
    found = move_list(job, old, new, {"a": (0,), "b": (1, 2, 3)})
    assert {(m.layer, m.source, m.target) for m in found.moves} == {(1, "b", "a"), (2, "b", "c"), (3, "b", "c")}


def test_rank_order_moves_what_the_best_need_not() -> None:
    job = job_of(dict.fromkeys("bcdefgh", ""), layers=8)
    pairs = ("ab", "cd", "ef", "gh")
    old = PipelinePlan(8, tuple(row(1, (a, 0, 4), (b, 4, 8)) for a, b in pairs))
    three = row(2, ("f", 0, 3), ("g", 3, 6), ("h", 6, 8))
    new = PipelinePlan(8, (row(1, ("b", 0, 4), ("c", 4, 8)), row(1, ("d", 0, 4), ("e", 4, 8)), three))
    ranked = rank_order(old, new)
    assert [s.device for p in ranked.pipelines for s in p.stages] == list("bcdefgh")
    # Only the stage in the middle has to get a layer: its device has the other two.
    assert move_list(job, old, assign(job, old, new)).nbytes == 30
    assert move_list(job, old, ranked).nbytes == 30 * (4 + 4 + 4 + 4 + 3 + 2)


def test_owners_stay_on_different_hosts() -> None:
    """Any two of three devices may own the first half without moves; a pair on two hosts is chosen, not the two on one
    host.
    """
    job = job_of({"a1": "a", "a2": "a", "b1": "b", "c1": "c", "d1": "d", "e1": "e"})
    pairs = (("a1", "c1"), ("a2", "d1"), ("b1", "e1"))
    old = PipelinePlan(4, tuple(row(1, (x, 0, 2), (y, 2, 4)) for x, y in pairs))
    rows = (row(2, ("c1", 0, 2), ("a1", 2, 4)), row(1, ("e1", 0, 2), ("a2", 2, 4)))
    new = PipelinePlan(4, rows, idle=("b1", "d1"))
    placed = assign(job, old, new)
    assert move_list(job, old, placed).nbytes == 0
    assert {job.by_name[x].host for x in placed.owners[0]} == {"a", "b"}


def test_plans_that_do_not_belong_together_are_refused() -> None:
    job = job_of({"a": "", "b": ""})
    plan = PipelinePlan(4, (row(1, ("a", 0, 4)),), idle=("b",))
    with pytest.raises(ValueError, match="devices that the job has not: b"):
        assign(job.without(["b"]), plan, plan)
    with pytest.raises(ValueError, match="the old plan has 3 layers, the new one 4, the job 4"):
        move_list(job, PipelinePlan(3, (row(1, ("a", 0, 3)),)), plan)
