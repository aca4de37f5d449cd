"""The equations of the paper on Chameleon as printed, with the error in each, applied to any plan of a job.

"Chameleon: Adaptive Fault Tolerance for Distributed Training via Real-time Policy Selection" gives the time of a step
by Eqs. 9 to 13 and the memory of a device by Eq. 14. All of them are here so that each of its figures can be computed
again. Nothing plans with them, for none knows of hops, all-reduces, the optimizer's time or memory that reroutes need.
Without `--plan` the best plan is priced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common import Options, Result, run
from chaos_lightning.errors import PlanError
from chaos_lightning.planning.documents import read_yaml
from chaos_lightning.planning.pipelines.equal import PlanShape, Shapes
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.files import find_job
from chaos_lightning.planning.pipelines.job import MemoryUse, TrainingJob
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.plan import VACANT, Pipeline, PipelinePlan
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.timing import OneFOneB, PipelineTimes

GIB = 1 << 30


# ------------------------------------------------------------------------------------------------ Eqs. 9 to 14


def eq9(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Returns the step time of equal pipelines by Eq. 9: (N_pp + N_m - 1) (T_f + T_b), in seconds.

    Exact for 1F1B with equal stages and no fault. Hops, all-reduce and optimizer are missing.

    Args:
        stages: N_pp.
        micro_batches: N_m, of one pipeline.
        forward_s: T_f, of one stage and micro-batch.
        backward_s: T_b.
    """
    return (stages + micro_batches - 1) * (forward_s + backward_s)


def eq10(times_s: Iterable[float]) -> float:
    """Returns the step time of unequal pipelines by Eq. 10: that of the slowest one, in seconds.

    The all-reduce, which ties them together, is missing.

    Raises:
        PlanError: There is no pipeline.
    """
    found = max(times_s, default=None)
    if found is None:
        raise PlanError("Eq. 10 is about no pipeline; expected the time of at least one")
    return found


def eq11(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """Returns the step time of a pipeline of unequal stages, in seconds: a unit starts when its stage and its input are
    ready.

    The recurrence is that of `timing`; as printed it has no hops.

    Args:
        forward_s: Seconds of a forward unit, by stage.
        backward_s: Seconds of a backward unit, by stage.
        micro_batches: Number of this pipeline's micro-batches.
    """
    times = PipelineTimes(tuple(forward_s), tuple(backward_s), (0.0,) * (len(forward_s) - 1))
    return max(OneFOneB(times, micro_batches).ends_s)


def eq12(stages: int, micro_batches: int, dp: int, forward_s: float, backward_s: float) -> float:
    """Returns the step time with one device's work rerouted: (N_pp + N_m - 1 + N_m / (N_dp - 1)) (T_f + T_b), in
    seconds.

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
    """Returns the step time with several devices lost: Eq. 12 with a sum over stages of N_m F_i / (N_dp - F_i), in
    seconds.

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
    """Returns the peak memory of a stage by Eq. 14: N_l (m_p + m_o + m_g) + (N_pp - i) N_l m_a, in bytes.

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
    """Returns the step time of a plan by the paper's estimator, in seconds: without hops, all-reduce and optimizer.

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
    """Returns the forward and the backward seconds of each stage; a stage without a device counts as one of speed 1."""
    c = job.costs
    speeds = [job.by_name[s.device].speed if s.device != VACANT else 1.0 for s in pipeline.stages]
    rows = list(zip(pipeline.stages, speeds, strict=True))
    return (
        tuple((c.forward[s.end] - c.forward[s.first]) / v for s, v in rows),
        tuple((c.backward[s.end] - c.backward[s.first]) / v for s, v in rows),
    )


def paper_memory(job: TrainingJob, plan: PipelinePlan) -> dict[str, MemoryUse]:
    """Returns in bytes the memory of each device that has a stage, by Eq. 14 with averages over the model's layers."""
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


# ------------------------------------------------------------------------------------------------ Algorithm 1


def get_execution_plan(shapes: Shapes, devices: int, faults: int, was: PlanShape | None) -> PlanShape | None:
    """Returns the plan that Algorithm 1 as printed chooses: the best one over 1 to `faults` lost devices.

    Plans of different numbers of devices are compared by the time of their steps, so that of one fault tends to win,
    and is of no use after two. That is why policies take `algorithm1`, and this is here for comparison only.
    """
    found = (algorithm1(shapes, devices - i, was) for i in range(1, min(faults, devices - 1) + 1))
    return min((x for x in found if x is not None), key=lambda x: x.charged_s, default=None)


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument(
        "model", nargs="?", default="examples/plans/llama7b.yaml", help="a job's file, or gpt:LAYERS,WIDTH"
    )
    parser.add_argument("--devices", type=int, help="so many devices instead of those in the file")
    parser.add_argument("--plan", type=Path, help="price this plan: what `chaos-lightning plan --json` has as `plan`")
    args = parser.parse_args()
    job = find_job(args.model, args.devices)
    if args.plan is None:
        plan = Planner(job).exact().plan
    else:
        about = read_yaml(args.plan.read_text(encoding="utf-8"), str(args.plan))
        plan = PipelinePlan.from_dict(about.get("plan", about))
    result, simulated, memory = Result("paper_equations"), estimate(job, plan), paper_memory(job, plan)
    printed_s = paper_step_s(job, plan)
    result.add(f"{args.model}: a step by the equations", printed_s, "s")
    result.add(f"{args.model}: a step as simulated", simulated.step_s, "s")
    for name, use in sorted(memory.items()):
        ours = simulated.memory[name].nbytes / GIB
        result.add(f"{name}: peak by Eq. 14 (as simulated {ours:.4g})", use.nbytes / GIB, "GiB")
    result.headline.append(f"the equations say {printed_s / simulated.step_s:.1%} of the simulated step")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
