"""Makes jobs on equal devices for the tests of other systems' plans."""

from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, LinkRate, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage


def job_of(devices, micro_batches, layers=8, *, room=10**6, link=None, overheads=None, **about):
    """Returns a job of equal layers with 1 byte of parameters, 1 s forward and 2 s backward, each unless `about`
    overrides it.
    """
    usual = {"forward_s": 1.0, "backward_s": 2.0, "parameter_nbytes": 1} | about
    return TrainingJob(
        layers=tuple(Layer(name=f"l{i}", **usual) for i in range(layers)),
        devices=tuple(Device(name=f"d{i:03}", memory_nbytes=room) for i in range(devices)),
        micro_batches=micro_batches,
        between_hosts=link or LinkRate(),
        overheads=overheads or Overheads(),
        memory=PLAIN_MEMORY,
    )


def plan_of(layers, *rows):
    """Returns a plan with devices in order; each row gives a pipeline's stage lengths (in layers) and micro-batches."""
    pipelines, names = [], (f"d{i:03}" for i in range(1000))
    for lengths, m in rows:
        stages, at = [], 0
        for length in lengths:
            stages.append(PlanStage(next(names), at, at + length))
            at += length
        pipelines.append(Pipeline(tuple(stages), m))
    plan = PipelinePlan(layers, tuple(pipelines))
    plan.check()
    return plan
