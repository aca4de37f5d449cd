"""Copies in other pipelines: whom they go to, what fits, what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_changes import Change, changes, layer, row

from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.keepers import add_keepers
from chaos_lightning.planning.pipelines.lists import kept_nbytes
from chaos_lightning.planning.pipelines.plan import PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.rerouting import reroute


def units_of(job: TrainingJob, plan: PipelinePlan) -> list[set[str]]:
    """By layer: what its owners die with."""
    return [{job.by_name[x].dies_with for x in who} for who in plan.holders()]


@st.composite
def tight(draw: st.DrawFn) -> Change:
    """Each device has what it needs, and room for some more; some die together."""
    change = draw(changes())
    use = estimate(change.job, change.new).memory
    devices = tuple(
        replace(
            d,
            memory_nbytes=1 + (use[d.name].nbytes if d.name in use else 0) + draw(st.integers(0, 60)),
            unit=draw(st.sampled_from(["", "u", "v"])),
        )
        for d in change.job.devices
    )
    return change._replace(job=replace(change.job, devices=devices))


@given(tight())
def test_layers_are_covered_or_named_and_memory_holds(change: Change) -> None:
    job, plan = change.job, change.new
    kept, added_s, uncovered = add_keepers(job, plan)
    kept.check()
    done = estimate(job, kept)
    assert done.over(job) == {}
    assert added_s == pytest.approx(done.step_s - estimate(job, plan).step_s)
    assert tuple(x for x, units in enumerate(units_of(job, kept)) if len(units) == 1) == uncovered
    assert kept.pipelines == plan.pipelines
    assert set(plan.keepers) <= set(kept.keepers)
    assert kept.devices == plan.devices
    for x in uncovered:
        owners = units_of(job, kept)[x]
        for d in job.devices:
            room = d.memory_nbytes - (done.memory[d.name].nbytes if d.name in done.memory else 0)
            assert d.dies_with in owners or room < kept_nbytes(job, PlanStage("", x, x + 1))


@given(tight())
def test_a_copy_is_on_another_host_unless_no_memory_is_left_there(change: Change) -> None:
    job, plan = change.job, change.new
    kept = add_keepers(job, plan).plan
    memory = estimate(job, kept).memory
    for x, (before, after) in enumerate(zip(plan.holders(), kept.holders(), strict=True)):
        hosts = {job.by_name[d].place for d in before}
        if after > before and {job.by_name[d].place for d in after} == hosts:
            units = {job.by_name[d].dies_with for d in before}
            for d in job.devices:
                room = d.memory_nbytes - (memory[d.name].nbytes if d.name in memory else 0)
                assert d.place in hosts or d.dies_with in units or room < kept_nbytes(job, PlanStage("", x, x + 1))


@given(tight())
def test_no_layer_has_more_keepers_than_it_needs(change: Change) -> None:
    job, plan = change.job, change.new
    before, after = plan.holders(), add_keepers(job, plan).plan.holders()
    for x, units in enumerate(units_of(job, plan)):
        assert len(after[x] - before[x]) <= (len(units) == 1)


@given(st.data(), tight())
def test_the_order_of_devices_does_not_matter(data: st.DataObject, change: Change) -> None:
    other = replace(change.job, devices=tuple(data.draw(st.permutations(change.job.devices))))
    assert add_keepers(other, change.new) == add_keepers(change.job, change.new)


# ------------------------------------------------------------------------------------------------ by hand


def job_of(devices: dict[str, tuple[str, int]], rate_bps: float = 240) -> TrainingJob:
    """Devices with their hosts and memory. Layers have 30 bytes of state, 10 of gradients: a copy takes 60."""
    return TrainingJob(
        layers=tuple(layer(f"l{i}", 30, optimizer_s=0.5) for i in range(4)),
        devices=tuple(Device(name=x, host=host, memory_nbytes=nbytes) for x, (host, nbytes) in devices.items()),
        micro_batches=2,
        within_host=LinkRate(rate_bps=rate_bps),
        between_hosts=LinkRate(rate_bps=rate_bps),
    )


ONE = PipelinePlan(4, (row(2, ("a", 0, 2), ("b", 2, 4)),))


def test_the_neighbour_keeps_each_half() -> None:
    job = job_of({"a": ("h", 1000), "b": ("g", 1000)})
    kept, added_s, uncovered = add_keepers(job, ONE)
    assert kept.keepers == (PlanStage("a", 2, 4), PlanStage("b", 0, 2))
    assert uncovered == ()
    assert kept.sole_owners() == {}
    # Two all-reduces of 20 bytes among two, 160 bits at 240 bits per second, one after the other; two more layers to
    # step on each device.
    reduces = estimate(job, kept).reduces
    assert [r.end_s - r.start_s for r in reduces] == [pytest.approx(160 / 240)] * 2
    assert added_s == pytest.approx(reduces[-1].end_s - estimate(job, ONE).compute_s + 2 * 0.5)


def test_another_host_comes_before_another_device_of_the_same() -> None:
    job = job_of({"a": ("h", 1000), "b": ("h", 1000), "c": ("h", 1000), "d": ("g", 200)})
    kept, _, uncovered = add_keepers(job, replace(ONE, idle=("c", "d")))
    # There is room for three copies on the other host, so one of the second run is left.
    assert kept.keepers == (PlanStage("c", 3, 4), PlanStage("d", 0, 3))
    assert (uncovered, kept.idle) == ((), ())


def test_what_fits_nowhere_is_named() -> None:
    job = job_of({"a": ("h", 1000), "b": ("g", 1000)})
    use = estimate(job, ONE).memory["b"].nbytes
    tight = job.with_devices([job.by_name["a"], replace(job.by_name["b"], memory_nbytes=use + 60)])
    kept, _, uncovered = add_keepers(tight, ONE)
    assert kept.keepers == (PlanStage("a", 2, 4), PlanStage("b", 0, 1))
    assert uncovered == (1,)


def test_a_plan_without_sole_owners_stays_as_it_is() -> None:
    job = job_of(dict.fromkeys("abcd", ("", 1000)))
    plan = PipelinePlan(4, (row(1, ("a", 0, 2), ("b", 2, 4)), row(1, ("c", 0, 4))), idle=("d",))
    assert add_keepers(job, plan) == (plan, 0.0, ())


def test_who_dies_with_the_owner_keeps_nothing() -> None:
    job = job_of({"a": ("h", 1000), "b": ("g", 1000)})
    together = job.with_devices([replace(d, unit="u") for d in job.devices])
    assert add_keepers(together, ONE) == (ONE, 0.0, (0, 1, 2, 3))


def test_after_a_loss_the_other_owner_is_not_alone() -> None:
    job = job_of(dict.fromkeys("abcd", ("", 1000)))
    plan = PipelinePlan(4, (row(1, ("a", 0, 2), ("b", 2, 4)), row(1, ("c", 0, 2), ("d", 2, 4))))
    rerouted = reroute(job, plan, ["a"])
    assert rerouted.sole_owners() == {"c": [0, 1]}
    kept, added_s, uncovered = add_keepers(job.without(["a"]), rerouted)
    assert (kept.sole_owners(), uncovered) == ({}, ())
    assert kept.detours == rerouted.detours
    assert added_s > 0
