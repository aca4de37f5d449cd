"""Tests plans for fleets with several kinds of cards: pipelines that mix kinds, and their cuts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mixed_fleets import fleets
from chaos_lightning.planning.pipelines.at_once import plan_at_once
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.places import on_one_host
from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner
from chaos_lightning.planning.pipelines.unequal import Mixed, _blocks, _counts, _in_turn, _set_partitions


def fleet(micro_batches: int) -> TrainingJob:
    """Returns a job of 13 billion parameters on 16 fast cards on two hosts and 8 slow cards on a third."""
    return replace(fleets()[0][1], micro_batches=micro_batches)


def test_rows_mix_kinds_where_memory_asks_for_it() -> None:
    """Both kinds of cards are mixed in each pipeline, and a step takes less than 45 s; two pipelines of 8 fast and 4
    slow cards, cut by hand, take 65.8 s.
    """
    job = fleet(256)
    planned = Planner(job).exact()
    assert planned.estimate.step_s < 45
    assert estimate(job, planned.plan).over(job) == {}
    for pipeline in planned.plan.pipelines:
        assert {job.by_name[stage.device].speed for stage in pipeline.stages} == {1.0, 0.4}


def test_a_loss_leaves_few_of_them_idle() -> None:
    job = fleet(128)
    left = [d.name for d in job.devices if d.name != "a100-3"]
    planned = Planner(job).exact(left)
    assert planned.estimate.step_s < 24.5
    assert len(planned.plan.idle) <= 3


@pytest.mark.parametrize("m", [60, 96, 97, 128])
def test_a_cut_of_unlike_devices_is_no_longer_than_the_quick_one(m: int) -> None:
    job = fleet(192)
    devices = [replace(d, speed=2.2) if d.host == "a100--1" else d for d in job.devices]
    mixed = Mixed(job.with_devices(devices))
    names = (*(f"a40-{i}" for i in range(4)), *(f"a100-{i}" for i in range(4)), *(f"a100-{i}" for i in range(8, 12)))
    row = mixed.row(names, mixed.reduce([names]))
    best, quick = row.best(m, 2), row.quick(m)
    assert best is not None
    assert quick is not None
    assert best.charged_s <= row.charge(quick, m, 2).charged_s


@pytest.mark.parametrize("deal", [_blocks, _in_turn])
@pytest.mark.parametrize("count", range(1, 9))
def test_dealing_gives_each_device_one_row_and_rows_equal_shares(deal: object, count: int) -> None:
    assert callable(deal)
    classes = [[Device(name=f"{kind}{i}", memory_nbytes=1) for i in range(n)] for kind, n in (("a", 7), ("b", 5))]
    rows = deal(classes, count)
    names = [d.name for row in rows for d in row]
    assert sorted(names) == sorted(d.name for devices in classes for d in devices)
    for kind in "ab":
        shares = [sum(d.name.startswith(kind) for d in row) for row in rows]
        assert max(shares) - min(shares) <= 1
    lengths = [len(row) for row in rows]
    assert max(lengths) - min(lengths) <= 1


def test_sides_of_a_plan_are_all_set_partitions_of_all_subsets() -> None:
    found = [{frozenset(part) for part in parts} for parts in _set_partitions((0, 1, 2))]
    assert len(found) == 14  # the Bell number of 4, less the empty one
    assert all(found.count(x) == 1 for x in found)


def test_numbers_of_rows_are_all_or_spread() -> None:
    assert _counts(5) == [1, 2, 3, 4, 5]
    many = _counts(1000)
    assert (many[0], many[-1]) == (1, 1000)
    assert len(many) <= 40


@pytest.mark.slow
def test_owners_on_two_hosts_where_all_slow_cards_are_on_one() -> None:
    """Each layer can have owners on two hosts, although all slow cards are on one host: a pipeline runs over the hosts
    in reverse order, and a step takes at most 8% longer.
    """
    job = fleet(256)
    free = Planner(job).exact()
    assert on_one_host(job, free.plan)
    apart = Planner(job, hosts=True).exact()
    assert on_one_host(job, apart.plan) == []
    assert free.estimate.step_s <= apart.estimate.step_s < 1.08 * free.estimate.step_s


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alike", [True, False])
def test_each_layer_has_as_many_owners_as_asked(copies: int, alike: bool) -> None:
    """Each layer has the required number of owners, even if slow links between owners would make a single long pipeline
    best.
    """
    layers = tuple(Layer(name=f"l{i}", forward_s=1, backward_s=2, gradient_nbytes=10**9) for i in range(12))
    devices = [Device(name=f"d{i}", memory_nbytes=10**12, speed=1.0 if alike or i % 2 else 0.5) for i in range(6)]
    link = LinkRate(rate_bps=8e7)
    job = TrainingJob(layers=layers, devices=tuple(devices), micro_batches=60, within_host=link, between_hosts=link)
    assert len(Planner(job).exact().plan.pipelines) == 1
    planned = Planner(job, copies=copies).exact()
    assert all(len(owners) >= copies for owners in planned.plan.owners)
    assert Planner(job, copies=copies).first().plan.owners


def test_copies_that_no_plan_has_are_refused() -> None:
    job = fleet(128)
    with pytest.raises(NoPlanError, match=r"owners on 6 devices: .* ask for less \(--copies"):
        Planner(job, copies=6).exact()
    one = [replace(d, host="one") for d in job.devices]
    with pytest.raises(NoPlanError, match="owners on two hosts"):
        Planner(job.with_devices(one), hosts=True).exact()


@given(st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_plans_at_once_fit_and_none_is_shorter_than_the_bound(random: Random) -> None:
    layers = tuple(
        Layer(
            name=f"l{i}",
            forward_s=random.uniform(0.5, 2),
            backward_s=random.uniform(1, 4),
            parameter_nbytes=random.randint(0, 9),
            gradient_nbytes=random.randint(0, 9),
            activation_nbytes=random.randint(0, 9),
            workspace_nbytes=random.randint(0, 9),
        )
        for i in range(random.randint(1, 6))
    )
    devices = tuple(
        Device(name=f"d{i}", memory_nbytes=random.choice([40, 80, 200]), speed=random.choice([1.0, 2.0, 3.0]))
        for i in range(random.randint(1, 9))
    )
    job = TrainingJob(layers=layers, devices=devices, micro_batches=random.randint(1, 9))
    copies = random.randint(1, 2)
    found = plan_at_once(job, copies)
    if found is None:
        return
    cost, plan = found
    plan.check()
    assert plan.devices == tuple(sorted(job.by_name))
    assert plan.micro_batches == job.micro_batches
    assert estimate(job, plan) == cost
    assert cost.over(job) == {}
    assert min(map(len, plan.owners)) >= copies
    assert cost.step_s >= Mixed(job).bound_s() * (1 - 1e-9)
    assert Planner(job, copies=copies).at_once().estimate.step_s > 0


def unlike(micro_batches: int, *devices: tuple[float, int]) -> TrainingJob:
    """Returns a job of eight layers (10 bytes, 1 s forward, 2 s backward) on devices given as (speed, bytes)."""
    return TrainingJob(
        layers=tuple(Layer(name=f"l{i}", forward_s=1.0, backward_s=2.0, parameter_nbytes=10) for i in range(8)),
        devices=tuple(Device(name=f"d{i}", speed=v, memory_nbytes=nbytes) for i, (v, nbytes) in enumerate(devices)),
        micro_batches=micro_batches,
    )


def test_plans_at_once_share_work_by_speed_and_cut_by_memory() -> None:
    for job in (
        unlike(24, (1.0, 1000), (0.5, 1000), (0.25, 1000)),
        unlike(24, *[(1.0, 45), (0.5, 45)] * 3),
        unlike(24, (1.0, 20), (0.5, 65), (1.0, 20), (0.5, 65)),
    ):
        found = plan_at_once(job)
        assert found is not None
        assert found[0].step_s <= 1.1 * Planner(job).first().estimate.step_s
