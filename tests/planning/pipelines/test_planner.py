"""Tests cuts, shapes and plans against enumeration, and properties that hold for every job."""

import math
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.planner import enumerated_s, enumerated_unequal_s, placed_s, small_fleet, small_hosts, small_job
from chaos_lightning.planning.pipelines.cuts import Cutter, DeviceRow, LayerCut, evenest_s
from chaos_lightning.planning.pipelines.equal import Shapes
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.files import find_job
from chaos_lightning.planning.pipelines.job import Device, LinkRate, NamedLink, TrainingJob
from chaos_lightning.planning.pipelines.places import spread
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner
from chaos_lightning.planning.pipelines.split import Splitter
from chaos_lightning.planning.pipelines.unequal import Mixed

seeds = st.integers(0, 10**6)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def job_of(seed: int, devices: int = 5) -> TrainingJob:
    draw = Random(seed)
    return small_job(draw, draw.randint(2, 9), draw.randint(2, devices), draw.randint(1, 10))


def cutter_of(job: TrainingJob) -> Cutter:
    return Cutter(job, job.devices[0], job.within_host, job.between_hosts)


def plan_of(planner: Planner) -> PipelinePlan | None:
    try:
        return planner.exact().plan
    except NoPlanError:
        return None


@MANY
@given(seeds, st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_what_is_charged_is_simulated_where_all_are_cut_alike_and_else_a_bound(
    seed: int, stages: int, pipelines: int, alike: bool
) -> None:
    draw = Random(seed)
    job = small_job(draw, draw.randint(4, 8), 16, 4 * pipelines)
    # Each runs its optimizer when all are through: one that is as long everywhere is charged as it is simulated.
    job = replace(job, layers=tuple(replace(x, optimizer_s=0.0) for x in job.layers), between_hosts=job.within_host)
    lengths = [stages if alike else draw.randint(1, 4) for _ in range(pipelines)]
    cuts = [(0, *sorted(draw.sample(range(1, job.costs.count), p - 1)), job.costs.count) for p in lengths]
    cuts = [cuts[0]] * pipelines if alike else cuts
    names, rows = iter(sorted(job.by_name)), []
    for at in cuts:
        rows.append(Pipeline(tuple(PlanStage(next(names), x, y) for x, y in pairwise(at)), 4))
    plan = PipelinePlan(job.costs.count, tuple(rows), idle=tuple(names), in_flight_extra=job.memory.in_flight_extra)
    cutter = cutter_of(job)
    charged_s = max(cutter.row(len(at) - 1).charge(at, 4, pipelines).charged_s for at in cuts)
    simulated = estimate(job, plan)
    if alike:
        assert charged_s == pytest.approx(simulated.reduced_s, rel=1e-12)
    assert charged_s <= simulated.reduced_s * (1 + 1e-12)
    for at in cuts:
        row = cutter.row(len(at) - 1)
        assert row.floor_s(4, pipelines) <= row.relaxed_s(4, pipelines) * (1 + 1e-12)
        if row.fits(at, 4):
            assert row.relaxed_s(4, pipelines) <= row.bound_s(4, pipelines) * (1 + 1e-12)
            assert row.bound_s(4, pipelines) <= simulated.reduced_s * (1 + 1e-12)


@MANY
@given(st.lists(st.floats(0, 2) | st.just(1.0), min_size=1, max_size=9), st.integers(1, 9))
def test_no_cut_is_more_even_than_the_evenest(layers: list[float], stages: int) -> None:
    stages, sums = min(stages, len(layers)), [0.0, *accumulate(layers)]
    cuts = ((0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), stages - 1))
    least = min(max(sums[y] - sums[x] for x, y in pairwise(at)) for at in cuts)
    found = evenest_s(sums, stages)
    assert found == pytest.approx(least, rel=1e-9, abs=1e-300)
    assert found <= least


@MANY
@given(seeds, st.integers(1, 6), st.integers(1, 3), st.floats(0.5, 40))
def test_a_pipeline_does_no_more_than_its_floor_lets_it(seed: int, stages: int, pipelines: int, time_s: float) -> None:
    row = cutter_of(job_of(seed)).row(stages)
    most = row.most(time_s, pipelines)
    assert row.floor_s(most + 1, pipelines) > time_s
    if most:
        assert row.floor_s(most, pipelines) <= time_s * (1 + 1e-9)


def test_lengths_that_no_plan_takes_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, search = [], DeviceRow._search

    def counted(row: DeviceRow, m: int, pipelines: int) -> LayerCut | None:
        searched.append((row.stages, m, pipelines))
        return search(row, m, pipelines)

    monkeypatch.setattr(DeviceRow, "_search", counted)
    planned = Planner(find_job("examples/plans/llama7b.yaml", 64)).exact()
    assert planned.gap < 0.01
    assert max(len(p.stages) for p in planned.plan.pipelines) < 8
    assert 0 < len(searched) < 300  # of more than 1,000 lengths and numbers


# ------------------------------------------------------------------------------------------------ cuts


@MANY
@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_the_best_cut_is_that_of_all_cuts(seed: int, stages: int, m: int, pipelines: int) -> None:
    job = job_of(seed)
    row = cutter_of(job).row(stages)
    cuts = ((0, *inner, job.costs.count) for inner in combinations(range(1, job.costs.count), stages - 1))
    tried = [row.charge(at, m, pipelines) for at in cuts if row.fits(at, m)]
    found = row.best(m, pipelines)
    if not tried:
        assert found is None
        return
    least = min(x.charged_s for x in tried)
    assert found is not None
    assert found.charged_s == pytest.approx(least, rel=1e-12)
    assert found.bound_s <= least * (1 + 1e-9)
    assert row.fits(found.at, m)


@MANY
@given(seeds, st.integers(2, 5), st.integers(1, 10))
def test_a_cut_found_at_once_fits_and_is_no_better_than_the_best(seed: int, stages: int, m: int) -> None:
    row = cutter_of(job_of(seed)).row(stages)
    at, best = row.quick(m), row.best(m, 2)
    if at is not None:
        assert row.fits(at, m)
        assert best is not None
        assert row.charge(at, m, 2).charged_s >= best.charged_s * (1 - 1e-12)


@MANY
@given(seeds, st.integers(1, 5), st.integers(1, 9))
def test_a_micro_batch_more_makes_no_pipeline_shorter(seed: int, stages: int, m: int) -> None:
    row = cutter_of(job_of(seed)).row(stages)
    one, more = row.best(m, 2), row.best(m + 1, 2)
    if more is not None:
        assert one is not None
        assert more.charged_s >= one.charged_s * (1 - 1e-12)


def test_where_no_stage_can_be_shorter_the_search_of_a_cut_ends() -> None:
    job = replace(job_of(1), devices=(Device(name="d", memory_nbytes=10**9),))
    layer = replace(job.layers[0], forward_s=0.1, backward_s=0.2)
    job = replace(job, layers=tuple(replace(layer, name=f"l{i}") for i in range(32)))
    assert cutter_of(job).best(4, 16, 4) is not None


# ------------------------------------------------------------------------------------------------ splits and shapes


def test_a_kind_that_never_fits_gets_nothing() -> None:
    splitter = Splitter(lambda kind, m, pipelines: math.inf if kind == "no" else float(m), 6)
    found = splitter.over(["no", "yes", "yes"])
    assert found is not None
    assert found.pairs == (("yes", 3), ("yes", 3))
    assert found.time_s == found.bound_s == 3.0
    assert splitter.over(["no"]) is None


@FEW
@given(seeds)
def test_the_exact_shape_is_that_of_enumeration(seed: int) -> None:
    job = job_of(seed)
    shapes, n = Planner(job).shapes, len(job.devices)
    best_s, found = enumerated_s(shapes, n), shapes.exact(n)
    if math.isinf(best_s):
        assert found is None
        return
    assert found is not None
    assert found.exact
    assert found.gap == 0.0
    assert found.charged_s == pytest.approx(best_s, rel=1e-9)
    assert sum(m for _, m in found.pairs) == job.micro_batches
    assert found.used <= n
    first = shapes.first(n)
    if first is not None:
        assert first.charged_s >= found.charged_s * (1 - 1e-9)


@MANY
@given(seeds)
def test_more_devices_or_memory_never_make_the_exact_step_longer(seed: int) -> None:
    job = job_of(seed, devices=7)
    shapes = Planner(job).shapes
    steps = [math.inf if (x := shapes.exact(n)) is None else x.charged_s for n in range(1, len(job.devices) + 1)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps))
    roomy = replace(job, devices=tuple(replace(d, memory_nbytes=2 * d.memory_nbytes) for d in job.devices))
    found = Planner(roomy).shapes.exact(len(job.devices))
    assert (math.inf if found is None else found.charged_s) <= steps[-1] * (1 + 1e-9)


def test_a_large_fleet_says_by_how_much_its_shape_may_miss() -> None:
    job = small_job(Random("large"), 12, 1, 700)
    roomy = replace(job, devices=(Device(name="d", memory_nbytes=10**9),))
    shapes = Shapes(cutter_of(roomy), 700)
    found = shapes.exact(200)
    assert found is not None
    assert found.exact or 0 < found.gap < 0.01
    assert found.bound_s <= found.charged_s
    first = shapes.first(200)
    assert first is not None
    assert first.charged_s <= 1.025 * found.charged_s


# ------------------------------------------------------------------------------------------------ plans


@MANY
@given(seeds, st.randoms(use_true_random=False))
def test_a_plan_covers_all_fits_and_is_a_function_of_its_input(seed: int, random: Random) -> None:
    job = job_of(seed)
    plan = plan_of(Planner(job))
    mixed = list(job.devices)
    random.shuffle(mixed)
    assert plan_of(Planner(replace(job, devices=tuple(mixed)))) == plan
    if plan is None:
        return
    plan.check()
    assert plan.micro_batches == job.micro_batches
    assert plan.devices == tuple(sorted(d.name for d in job.devices))
    for j in range(plan.micro_batches):
        assert [layer for s in plan.route(j) for layer in s.layers] == list(range(job.costs.count))
    cost = estimate(job, plan)
    assert cost.over(job) == {}
    assert PipelinePlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@FEW
@given(seeds)
@example(77)  # two devices on a host of which one alone was looked at before
def test_plans_for_unequal_devices_are_near_the_best_and_above_their_bound(seed: int) -> None:
    draw = Random(seed)
    job = small_fleet(draw, seed)
    job = replace(job, devices=job.devices[:5])
    best_s, mixed = enumerated_unequal_s(job), Mixed(job)
    found = mixed.search()
    if math.isinf(best_s):
        assert not found
        return
    assert mixed.bound_s() <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= found[0][0] <= 1.15 * best_s
    assert [s for s, _ in found] == sorted(s for s, _ in found)
    for _, plan in found:
        plan.check()
        assert estimate(job, plan).over(job) == {}


@pytest.mark.parametrize(
    "case", [pytest.param(("on hosts", 0), id="owners of a stage"), pytest.param(("unequal, on hosts", 38), id="alone")]
)
def test_all_reduces_stay_within_a_host_where_they_weigh_more_than_hops(case: tuple[str, int]) -> None:
    title, number = case
    job = small_hosts(Random(f"1:{title}:{number}"), unequal=title.startswith("unequal"))
    planned = Planner(job).exact()
    assert planned.estimate.step_s == pytest.approx(placed_s(job), rel=1e-9)
    assert planned.estimate == estimate(job, planned.plan)
    together = [r for r, owners in zip(planned.plan.groups, planned.plan.owners, strict=True)
                if len({job.by_name[n].host for n in owners}) == 1]  # fmt: skip
    assert [(f.first, f.end) for f in planned.shared_fate] == [(r.start, r.stop) for r in together]
    assert together


@FEW
@given(seeds)
def test_no_plan_is_called_better_than_it_is_with_latencies_and_without_gradients(seed: int) -> None:
    draw = Random(seed)
    job = small_hosts(draw)
    within, between = (LinkRate(rate_bps=80.0, latency_s=draw.choice([0.0, 0.1, 1.0])) for _ in range(2))
    layers = tuple(replace(x, gradient_nbytes=draw.choice([0, x.gradient_nbytes])) for x in job.layers)
    job = replace(job, layers=layers, devices=job.devices[:4], within_host=within, between_hosts=between)
    best_s = placed_s(job)
    if math.isinf(best_s):
        return
    planned = Planner(job).exact()
    assert planned.estimate.step_s * (1 - planned.gap) <= best_s * (1 + 1e-9)
    assert planned.estimate.step_s <= Planner(job).first().estimate.step_s * (1 + 1e-9)
    if planned.exact:
        assert planned.estimate.step_s == pytest.approx(best_s, rel=1e-8)


@pytest.mark.slow
@FEW
@given(seeds)
def test_plans_for_more_unequal_devices_with_little_memory_fit(seed: int) -> None:
    draw = Random(seed)
    job = small_job(draw, draw.randint(8, 12), 1, draw.choice([8, 24, 48]))
    kinds = [(draw.choice([0.5, 1.0, 2.0]), draw.choice([300, 600, 2000])) for _ in range(3)]
    fleet = tuple(
        Device(name=f"d{i}", speed=kinds[i % 3][0], memory_nbytes=kinds[i % 3][1], host=f"h{i // 4}")
        for i in range(draw.randint(4, 14))
    )
    job = replace(job, devices=fleet)
    for way in (Planner.first, Planner.exact):
        planned, refused = None, ""
        try:
            planned = way(Planner(job))
        except NoPlanError as error:
            refused = str(error)
        assert " lacks -" not in refused
        assert " lacks 0 " not in refused
        if planned is not None:
            planned.plan.check()
            assert planned.estimate.over(job) == {}


def test_a_fleet_that_has_become_alike_is_planned_as_such() -> None:
    job = small_job(Random(3), 6, 5, 8)
    odd = replace(job, devices=(replace(job.devices[0], speed=0.3), *job.devices[1:]))
    left = [d.name for d in job.devices[1:]]
    assert Planner(odd).exact(left) == Planner(job.with_devices(job.devices[1:])).exact()


@pytest.mark.slow
def test_fast_devices_on_one_host_are_not_held_up_by_slow_links_to_others() -> None:
    steps_s = [Planner(find_job("examples/plans/edge.yaml", n)).exact().estimate.step_s for n in (11, 16, 24)]
    assert steps_s == sorted(steps_s, reverse=True)
    desks = [f"desk{i}" for i in range(13)]
    # 24 devices have 15 desks in one home: what 13 of them do by themselves is no worse than all.
    alone = Planner(find_job("examples/plans/edge.yaml", 24)).exact(desks)
    assert steps_s[-1] <= alone.estimate.step_s * 1.02


def test_a_slow_device_is_idle_where_it_would_only_hold_up_others() -> None:
    job = small_job(Random(3), 6, 4, 8)
    speeds = (1.0, 1.0, 1.0, 0.01)
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=10**9, speed=v) for i, v in enumerate(speeds))
    planned = Planner(replace(job, devices=fleet)).exact()
    assert planned.plan.idle == ("d3",)
    assert "1 device idle" in planned.why
    assert not planned.exact
    assert 0 < planned.gap < 1


def test_a_slow_link_is_not_used_for_hops() -> None:
    job = small_job(Random(3), 8, 4, 8)
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=260, host=f"h{i}") for i in range(4))
    links = tuple(NamedLink(a=f"h{a}", b=f"h{b}", rate_bps=1.0) for a in (0, 1) for b in (2, 3))
    planned = Planner(
        replace(job, devices=fleet, links=links, within_host=LinkRate(), between_hosts=LinkRate())
    ).exact()
    sides = [{s.device in ("d0", "d1") for s in p.stages} for p in planned.plan.pipelines]
    assert all(len(side) == 1 for side in sides)


def test_hops_between_hosts_are_charged_where_pipelines_need_them() -> None:
    # Six devices on two hosts of three: two pipelines of three fill the hosts, three of two do not.
    job = small_job(Random(11), 12, 6, 12)
    job = replace(job, layers=tuple(replace(x, gradient_nbytes=0) for x in job.layers))
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=500, host=f"h{i // 3}") for i in range(6))
    fast, slow = LinkRate(rate_bps=1e9), LinkRate(rate_bps=10.0)
    planner = Planner(replace(job, devices=fleet, within_host=fast, between_hosts=slow))
    planned = planner.exact()
    assert all(len({planner.job.by_name[s.device].host for s in p.stages}) == 1 for p in planned.plan.pipelines)
    if planned.exact:
        assert planned.gap == 0.0


def test_few_roomy_devices_among_many_small_ones_are_found() -> None:
    job = small_job(Random(12), 6, 12, 4)
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=10**9 if i == 5 else 10) for i in range(12))
    planned = Planner(replace(job, devices=fleet, links=(NamedLink(a="d0", b="d1", rate_bps=1.0),))).exact()
    assert [s.device for p in planned.plan.pipelines for s in p.stages] == ["d5"]


def test_a_host_that_many_layers_share_is_told_when_the_tries_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.planning.pipelines.places.EXCHANGES", 0)
    job = small_job(Random(5), 4, 6, 8)
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=10**9, host="far" if i == 5 else "near") for i in range(6))
    job = replace(job, devices=fleet)
    stages = [[PlanStage("d0", 0, 2), PlanStage("d1", 2, 4)], [PlanStage("d2", 0, 2), PlanStage("d3", 2, 4)]]
    plan = PipelinePlan(4, tuple(Pipeline(tuple(x), 4) for x in stages), idle=("d4", "d5"))
    same, _, fates = spread(job, plan)
    assert same == plan
    assert [(x.first, x.end, x.host, x.cost_s) for x in fates] == [(0, 2, "near", math.inf), (2, 4, "near", math.inf)]


@MANY
@given(seeds)
def test_what_an_exchange_of_devices_costs_is_never_negative(seed: int) -> None:
    planned = Planner(small_hosts(Random(seed)))
    try:
        fates = planned.exact().shared_fate
    except NoPlanError:
        return
    assert all(x.cost_s > 0 for x in fates)


def test_owners_of_a_layer_are_on_different_hosts() -> None:
    job = replace(small_job(Random(5), 8, 8, 16), within_host=LinkRate(), between_hosts=LinkRate())
    fleet = tuple(Device(name=f"d{i}", memory_nbytes=260, host=f"h{i // 4}") for i in range(8))
    job = replace(job, devices=fleet)
    planned = Planner(job).exact()
    assert len(planned.plan.pipelines) > 1
    for owners in planned.plan.owners:
        assert len({job.by_name[n].host for n in owners}) > 1 or planned.shared_fate


# ------------------------------------------------------------------------------------------------ none fits


def test_a_layer_that_fits_nowhere_is_named_with_what_it_lacks() -> None:
    job = small_job(Random(2), 4, 3, 4)
    job = replace(job, devices=tuple(replace(d, memory_nbytes=10) for d in job.devices))
    with pytest.raises(NoPlanError, match=r"layer 0 \('l0'\) fits on no device: .* bytes more than 'd0' has") as error:
        Planner(job).first()
    assert "\n" not in str(error.value)


def test_the_closest_plan_says_which_stage_lacks_how_much() -> None:
    job = small_job(Random(2), 6, 2, 4)
    job = replace(job, devices=tuple(replace(d, memory_nbytes=130) for d in job.devices))
    with pytest.raises(
        NoPlanError, match=r"closest is one pipeline of 2 stages, whose stage \d \(layers .* lacks \d+ bytes"
    ):
        Planner(job).exact()


def test_tables_of_times_hold_whatever_the_end_of_a_step_costs_and_not_whatever_a_unit_does() -> None:
    planner = Planner(job_of(3))
    tables = planner.shapes
    for cost, kept in (("commit_s", True), ("unit_s", False)):
        job = replace(planner.job, overheads=replace(planner.job.overheads, **{cost: 1.0}))
        other = planner.on(job)
        assert (other.shapes is tables) is kept
        assert plan_of(other) == plan_of(Planner(job))
