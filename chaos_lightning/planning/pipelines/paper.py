"""The formulas of the paper on Chameleon as printed, with what is wrong in each, and its search for a plan.

Theory of operation. "Chameleon: Adaptive Fault Tolerance for Distributed Training via Real-time Policy Selection" gives
the time of a step by Eqs. 9 to 13 and the memory of a device by Eq. 14, and searches plans by Algorithm 1. All of it is
here so that each of its figures can be computed again (`ESTIMATORS`); nothing of it is what this package plans with
(`estimate`, `equal`), for none of it knows of hops, all-reduces, the optimizer's time or memory that reroutes need.
Where the paper leaves something open, its text on complexity decides: pipelines of up to 16 stages, and "tens to
hundreds" of candidates (section IV-A).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, combinations, islice, pairwise
from weakref import WeakKeyDictionary

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.cuts import Cutter, DeviceRow, LayerCut
from chaos_lightning.planning.pipelines.equal import Alike, PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import MemoryUse, TrainingJob
from chaos_lightning.planning.pipelines.plan import VACANT, Pipeline, PipelinePlan
from chaos_lightning.planning.pipelines.schedules import in_flight
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes

DEEPEST = 16
"""Stages of a pipeline at most (section IV-A: "typically small, e.g. <= 16")."""
PARTITIONS = 500
"""Ways to share out the devices that are tried for one number of pipelines; where there are more, only the most even
one is (section IV-A: as many candidates as the number of devices has divisors)."""
PLACEMENTS = 1000
"""Places of the remaining layers that are tried, early stages first (section IV-A: "tens to hundreds")."""


# ------------------------------------------------------------------------------------------------ Eqs. 9 to 14


def eq9(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Step of equal pipelines: (N_pp + N_m - 1) (T_f + T_b), in seconds.

    Exact for 1F1B with equal stages and no fault. Hops, all-reduce and optimizer are missing.

    Args:
        stages: N_pp.
        micro_batches: N_m, of one pipeline.
        forward_s: T_f, of one stage and micro-batch.
        backward_s: T_b.
    """
    return (stages + micro_batches - 1) * (forward_s + backward_s)


def eq10(times_s: Iterable[float]) -> float:
    """Step of unequal pipelines: that of the slowest one, in seconds.

    The all-reduce, which ties them together, is missing.

    Raises:
        PlanError: There is no pipeline.
    """
    found = max(times_s, default=None)
    if found is None:
        raise PlanError("Eq. 10 is about no pipeline; expected the time of at least one")
    return found


def eq11(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """One pipeline of unequal stages: each unit starts when its stage and what it needs are ready; in seconds.

    The recurrence is that of `timing`; as printed it has no hops.

    Args:
        forward_s: By stage.
        backward_s: By stage.
        micro_batches: Of this pipeline.
    """
    times = PipelineTimes(tuple(forward_s), tuple(backward_s), (0.0,) * (len(forward_s) - 1))
    return max(OneFOneB(times, micro_batches).ends_s)


def eq12(stages: int, micro_batches: int, dp: int, forward_s: float, backward_s: float) -> float:
    """Step with one device lost and its work rerouted: (N_pp + N_m - 1 + N_m / (N_dp - 1)) (T_f + T_b), in seconds.

    Too slow where bubbles take part of the work, too fast (by up to 38%) where memory does not allow the activations
    of what is rerouted. With one pipeline nobody is left to take it: infinite.

    Args:
        stages: N_pp.
        micro_batches: N_m, of one pipeline before the loss.
        dp: N_dp, how many pipelines there were.
        forward_s: T_f, of one stage and micro-batch.
        backward_s: T_b.
    """
    return eq13(stages, micro_batches, dp, [1], forward_s, backward_s)


def eq13(
    stages: int, micro_batches: int, dp: int, lost_by_stage: Sequence[int], forward_s: float, backward_s: float
) -> float:
    """Step with several devices lost: Eq. 12 with a sum over stages of N_m F_i / (N_dp - F_i), in seconds.

    As Eq. 12, and the sum overstates losses in several stages: they work at once, so the busiest one sets the pace. As
    printed only F_i > N_dp ends the job, which cannot be; at F_i = N_dp, which does, the formula divides by zero. Here
    both are infinite.

    Args:
        stages: N_pp.
        micro_batches: N_m, of one pipeline before the loss.
        dp: N_dp, how many pipelines there were.
        lost_by_stage: F_i; stages that are left out have lost nobody.
        forward_s: T_f, of one stage and micro-batch.
        backward_s: T_b.
    """
    if any(f >= dp for f in lost_by_stage):
        return math.inf
    extra = sum(micro_batches * f / (dp - f) for f in lost_by_stage if f > 0)
    return (stages + micro_batches - 1 + extra) * (forward_s + backward_s)


def eq14(
    layers: float,
    stages: int,
    stage: int,
    parameter_nbytes: float,
    optimizer_nbytes: float,
    activation_nbytes: float,
    gradient_nbytes: float | None = None,
) -> float:
    """Peak memory of a stage: N_l (m_p + m_o + m_g) + (N_pp - i) N_l m_a, in bytes.

    In flight are min(N_pp - i, N_m), so few micro-batches need less. Embedding, head, workspace, boundary tensors and
    what is rerouted are missing; m_g = m_p fails for gradients in fp32, and m_o depends on N_dp under ZeRO.

    Args:
        layers: N_l, of this stage.
        stages: N_pp.
        stage: i, from 0.
        parameter_nbytes: m_p, of one layer on average.
        optimizer_nbytes: m_o.
        activation_nbytes: m_a, of one layer and micro-batch.
        gradient_nbytes: m_g; None: as printed, m_p.
    """
    gradients = parameter_nbytes if gradient_nbytes is None else gradient_nbytes
    return layers * (parameter_nbytes + optimizer_nbytes + gradients) + (stages - stage) * layers * activation_nbytes


# ------------------------------------------------------------------------------------------------ whole plans


def paper_step_s(job: TrainingJob, plan: PipelinePlan) -> float:
    """Returns the step of a plan by the paper's estimator, in seconds: no hops, no all-reduce, no optimizer.

    Pipelines that are alike and have equal stages take Eq. 9, others Eqs. 10 and 11. Where places are vacant it is
    Eq. 13, of the mean stage and the pipeline with most micro-batches; who takes the work does not matter to it.

    Raises:
        PlanError: Places are vacant and pipelines are cut differently, which no formula of the paper covers.
    """
    if plan.vacant:
        return _rerouted_s(job, plan)
    rows = {(*_stage_times(job, p), p.micro_batches) for p in plan.pipelines if p.micro_batches}
    if len(rows) == 1:
        forward, backward, m = next(iter(rows))
        if len(set(forward)) == len(set(backward)) == 1:
            return eq9(len(forward), m, forward[0], backward[0])
    return eq10(eq11(*row) for row in rows)


def _rerouted_s(job: TrainingJob, plan: PipelinePlan) -> float:
    cuts = {p.cut for p in plan.pipelines}
    if len(cuts) > 1:
        raise PlanError("Eq. 13 is about pipelines that are cut alike; this plan's differ and have vacant places")
    stages = len(plan.pipelines[0].stages)
    lost = Counter(i for _, i in plan.vacant)
    rows = [_stage_times(job, p) for p in plan.pipelines]
    forward, backward = (sum(sum(row[x]) for row in rows) / (stages * len(rows)) for x in (0, 1))
    m = max(p.micro_batches for p in plan.pipelines)
    return eq13(stages, m, len(plan.pipelines), [lost[i] for i in range(stages)], forward, backward)


def _stage_times(job: TrainingJob, pipeline: Pipeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds by stage; a vacant place is taken as a device of speed 1."""
    c = job.costs
    speeds = [job.by_name[s.device].speed if s.device != VACANT else 1.0 for s in pipeline.stages]
    rows = list(zip(pipeline.stages, speeds, strict=True))
    return (
        tuple((c.forward[s.end] - c.forward[s.first]) / v for s, v in rows),
        tuple((c.backward[s.end] - c.backward[s.first]) / v for s, v in rows),
    )


def paper_memory(job: TrainingJob, plan: PipelinePlan) -> dict[str, MemoryUse]:
    """Returns the memory of each device that has a stage by Eq. 14, in bytes, with the model's averages of one
    layer.
    """
    c = job.costs
    p, o, a = (sums[-1] / c.count for sums in (c.parameters, c.optimizer, c.activations))

    def use(layers: int, stages: int, stage: int) -> MemoryUse:
        state = eq14(layers, stages, stage, p, o, 0)
        return MemoryUse(state=round(state), activations=round(eq14(layers, stages, stage, p, o, a) - state))

    return {
        s.device: use(s.end - s.first, len(row.stages), i)
        for row in plan.pipelines
        for i, s in enumerate(row.stages)
        if s.device != VACANT
    }


def paper_estimate(job: TrainingJob, plan: PipelinePlan) -> StepEstimate:
    """A step by the paper's formulas, in the form of `estimate`: what they do not know of is 0.

    Raises:
        PlanError: No formula of the paper covers the plan.
    """
    step_s = paper_step_s(job, plan)
    return StepEstimate(step_s, step_s, step_s, 0.0, 0.0, paper_memory(job, plan))


ESTIMATORS: dict[str, Callable[[TrainingJob, PipelinePlan], StepEstimate]] = {
    "simulated": estimate,
    "paper": paper_estimate,
}
"""By the name that a command takes; the first one is the default, and what plans are searched with."""


# ------------------------------------------------------------------------------------------------ Algorithm 1


def algorithm1(shapes: Shapes, devices: int, was: PlanShape | None, deepest: int = DEEPEST) -> PlanShape | None:
    """Algorithm 1 for one number of devices: the best of its candidates, None where none fits.

    All devices are used, also where fewer would do better. The number of pipelines differs by less than 2 from that
    before; after several losses the best plan may be further away. Micro-batches go by the number of stages, so short
    pipelines, whose bubbles are shorter, wait for long ones. A candidate is charged as `cuts` does, hops and
    all-reduce included, with the layers split as `split_layers` does.

    Args:
        shapes: Of such devices.
        devices: That are left.
        was: The shape before the loss; None: any number of pipelines is tried.
        deepest: Stages of a pipeline at most.
    """
    cutter, total = shapes.cutter, shapes.total
    work_s = cutter.row(1).fastest.both[-1]
    deepest = min(deepest, cutter.count, devices)
    shallow = next((p for p in range(1, deepest + 1) if split_layers(cutter, p, 1, 1)), deepest + 1)
    near = range(1, devices + 1) if was is None else range(max(1, was.pipelines - 1), was.pipelines + 2)
    candidates = []
    for pipelines in near:
        if pipelines <= min(total, devices):
            for lengths in integer_partition(devices, pipelines, shallow, deepest):
                rows = Counter(zip(lengths, distribute_batch(total, lengths), strict=True))
                candidates.append((max(m / p for p, m in rows) * work_s, pipelines, rows))
    candidates.sort(key=lambda x: x[0])
    best: PlanShape | None = None
    for least, pipelines, rows in candidates:
        if best is not None and least >= best.charged_s:
            break  # The mean stage alone works as long, here and in all that follow.
        found = [split_layers(cutter, p, m, pipelines) for p, m in rows]
        cuts = [cut.charged_s for cut in found if cut is not None]
        if len(cuts) == len(rows) and (best is None or max(cuts) < best.charged_s):
            lines = tuple(Alike(p, m, k) for (p, m), k in sorted(rows.items(), reverse=True))
            best = PlanShape(devices, lines, max(cuts), 0.0, False)
    return best


def get_execution_plan(shapes: Shapes, devices: int, faults: int, was: PlanShape | None) -> PlanShape | None:
    """Algorithm 1 as printed: one best plan over 1 to `faults` lost devices.

    Plans of different numbers of devices are compared by the time of their steps, so that of one fault tends to win,
    and is of no use after two. That is why policies take `algorithm1`, and this is here for comparison only.
    """
    found = (algorithm1(shapes, devices - i, was) for i in range(1, min(faults, devices - 1) + 1))
    return min((x for x in found if x is not None), key=lambda x: x.charged_s, default=None)


def integer_partition(devices: int, pipelines: int, shallow: int, deepest: int) -> list[tuple[int, ...]]:
    """Lengths of pipelines that use all devices, longest first: all, or where those are too many the most even ones."""
    if not shallow * pipelines <= devices <= deepest * pipelines:
        return []
    found = list(islice(_partitions(devices, pipelines, shallow, deepest), PARTITIONS + 1))
    if len(found) > PARTITIONS:
        each, longer = divmod(devices, pipelines)
        return [(each + 1,) * longer + (each,) * (pipelines - longer)]
    return found


def _partitions(devices: int, pipelines: int, low: int, high: int) -> Iterator[tuple[int, ...]]:
    """Takes as many of the longest length as can be, down to as few; each way to begin can be ended."""
    if low == high or not pipelines:
        yield (low,) * pipelines
        return
    # With x of length `high` the others, of low to high - 1, must be able to make up the rest.
    least = max(0, devices - pipelines * (high - 1))
    most = (devices - pipelines * low) // (high - low)
    for x in range(min(most, pipelines), least - 1, -1):
        for rest in _partitions(devices - x * high, pipelines - x, low, high - 1):
            yield (high,) * x + rest


def distribute_batch(micro_batches: int, lengths: Sequence[int]) -> list[int]:
    """Section IV-A: in proportion to the devices, then one by one to all; who has none gets one of whoever has most."""
    devices = sum(lengths)
    found = [micro_batches * p // devices for p in lengths]
    for i in range(micro_batches - sum(found)):
        found[i % len(found)] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return found


_SPLITS: WeakKeyDictionary[Cutter, dict[tuple[int, int, int], LayerCut | None]] = WeakKeyDictionary()


def split_layers(cutter: Cutter, stages: int, m: int, pipelines: int) -> LayerCut | None:
    """Section IV-A: equally many layers for each stage, and the best places for those that remain.

    Layers that differ (embedding, head) are counted alike, which is what the better cuts of `cuts` gain on it.

    Args:
        cutter: Of these devices.
        stages: Of the pipeline.
        m: Its micro-batches.
        pipelines: How many there are, for the all-reduce.

    Returns:
        None where none of the first `PLACEMENTS` places fits into memory, or there are fewer layers than stages.
    """
    if stages > cutter.count:
        return None
    known = _SPLITS.setdefault(cutter, {})
    key = (stages, m, pipelines)
    if key not in known:
        best: LayerCut | None = None
        row = cutter.row(stages)
        each, more = divmod(row.count, stages)
        for longer in islice(combinations(range(stages), more), PLACEMENTS):
            at = (0, *accumulate(each + (k in longer) for k in range(stages)))
            if best is not None and _bound(row, at, m) >= best.charged_s:
                continue
            if row.fits(at, m):
                cut = row.charge(at, m, pipelines)
                best = cut if best is None or cut.charged_s < best.charged_s else best
        known[key] = best
    return known[key]


def _bound(row: DeviceRow, at: Sequence[int], m: int) -> float:
    """No pipeline of this cut is faster, by two of the bounds of `cuts` without hops: through, and after first."""
    s, total = row.fastest, row.fastest.both[-1]
    found = 0.0
    for k, (x, y) in enumerate(pairwise(at)):
        forward, backward = s.forward[y] - s.forward[x], s.backward[y] - s.backward[x]
        after = total + (m - 1) * backward + (m - in_flight(row.stages, k, m, row.extra)) * forward
        found = max(found, s.both[x] + m * (forward + backward), after)
    return found
