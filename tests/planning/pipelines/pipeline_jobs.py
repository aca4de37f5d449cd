"""Makes jobs and plans for tests of pipelines: equal and random ones, with and without memory limits."""

from itertools import pairwise
from typing import Any

from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, MemoryRules, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.lists import PlanLists, coupled, plan_lists, run_coupled
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

AMPLE = 10**9


def equal_job(pipelines, stages, micro_batches, memory_nbytes=AMPLE, hop_s=0.0):
    """Returns a job with one layer per stage (1 s forward, 2 s backward, 10 bytes kept); `micro_batches` is the number
    for each pipeline.
    """
    layers = tuple(
        Layer(name=f"l{k}", forward_s=1.0, backward_s=2.0, activation_nbytes=10, output_nbytes=1) for k in range(stages)
    )
    return TrainingJob(
        layers=layers,
        devices=tuple(
            Device(name=at(q, k), memory_nbytes=memory_nbytes) for q in range(pipelines) for k in range(stages)
        ),
        micro_batches=micro_batches * pipelines,
        overheads=Overheads(hop_s=hop_s),
        memory=PLAIN_MEMORY,
    )


def at(pipeline, stage):
    """Returns the name of the device at a stage of a pipeline."""
    return f"p{pipeline}s{stage}"


def plan_of(job, cuts, micro_batches, **more):
    """Returns a plan with the job's devices in order; `cuts` gives the stage borders of each pipeline, `micro_batches`
    its number of micro-batches.
    """
    names = iter(d.name for d in job.devices)
    rows = tuple(
        Pipeline(tuple(PlanStage(next(names), a, b) for a, b in pairwise(cut)), m)
        for cut, m in zip(cuts, micro_batches, strict=True)
    )
    plan = PipelinePlan(job.costs.count, rows, idle=tuple(sorted(names)), **more)
    plan.check()
    return plan


def equal_plan(job, pipelines, **more):
    """Returns a plan of pipelines with equal cuts and equal numbers of micro-batches."""
    stages = range(job.costs.count + 1)
    return plan_of(job, [tuple(stages)] * pipelines, [job.micro_batches // pipelines] * pipelines, **more)


def random_job(random):
    """Returns a job of unequal layers and devices, with random cuts and numbers of micro-batches for its pipelines."""
    count = random.randint(1, 6)
    cuts, micro_batches = [], []
    for _ in range(random.randint(2, 4)):
        inner = random.sample(range(1, count), random.randint(0, count - 1))
        cuts.append((0, *sorted(inner), count))
        micro_batches.append(random.randint(0, 5))
    micro_batches[0] += 1
    layers = tuple(
        Layer(
            name=f"l{i}",
            forward_s=random.uniform(0.5, 2),
            backward_s=random.uniform(1, 4),
            parameter_nbytes=random.randint(1, 9),
            gradient_nbytes=random.randint(1, 9),
            optimizer_nbytes=random.randint(1, 9),
            activation_nbytes=random.randint(1, 9),
            workspace_nbytes=random.randint(0, 3),
            output_nbytes=random.randint(1, 3),
        )
        for i in range(count)
    )
    devices = tuple(
        Device(name=f"d{i:02}", memory_nbytes=random.choice([AMPLE, 150, 300]), speed=random.choice([1.0, 1.0, 2.0]))
        for i in range(sum(map(len, cuts)) - len(cuts) + 1)
    )
    job = TrainingJob(
        layers=layers,
        devices=devices,
        micro_batches=sum(micro_batches),
        overheads=Overheads(hop_s=random.choice([0.0, 0.0, 0.3]), unit_s=random.choice([0.0, 0.1])),
        memory=random.choice([MemoryRules(boundaries=True), PLAIN_MEMORY]),
    )
    return job, plan_of(job, cuts, micro_batches)


def lists_of(job: TrainingJob, plan: PipelinePlan, **how: Any) -> PlanLists:
    """Returns the instruction lists of a plan; `how` holds options for the run of pipelines that share
    micro-batches.
    """
    return plan_lists(plan, *run_coupled(job, plan, coupled(plan), **how))
