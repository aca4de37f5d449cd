"""Draws small jobs, plans, and losses after which every layer still has a holder, for hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

PLENTY = 1 << 40


def layer(name: str, nbytes: int = 12, **more: Any) -> Layer:
    """Returns a layer with `nbytes` of weights and optimizer state, a third of it weights."""
    sizes = {"parameter_nbytes": nbytes // 3, "optimizer_nbytes": nbytes - nbytes // 3, "gradient_nbytes": nbytes // 3}
    return Layer(name=name, **({"forward_s": 0.01, "backward_s": 0.02} | sizes | more))


def row(micro_batches: int, *stages: tuple[str, int, int]) -> Pipeline:
    return Pipeline(tuple(PlanStage(*s) for s in stages), micro_batches)


class Change(NamedTuple):
    """Change from an old plan to a new one, with the job of the surviving devices."""

    job: TrainingJob
    old: PipelinePlan
    new: PipelinePlan


@st.composite
def plans(draw: st.DrawFn, devices: list[str], layers: int) -> PipelinePlan:
    """Draws plans: pipelines with any number of stages and any cuts; some devices are idle."""
    left = list(draw(st.permutations(devices)))
    pipelines = []
    while left and (not pipelines or draw(st.booleans())):
        stages = draw(st.integers(1, min(len(left), layers)))
        inner = (
            draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)) if layers > 1 else []
        )
        cut = [0, *sorted(inner), layers]
        at = zip(left[:stages], cut, cut[1:], strict=False)
        pipelines.append(row(draw(st.integers(1, 4)), *at))
        left = left[stages:]
    return PipelinePlan(layers, tuple(pipelines), idle=tuple(sorted(left)))


@st.composite
def changes(draw: st.DrawFn, most_devices: int = 6, kinds: int = 2) -> Change:
    """Draws a change of plan after a loss, with a job of only the surviving devices, in any order."""
    count = draw(st.integers(1, 6))
    layers = tuple(layer(f"layer {i}", draw(st.integers(0, 20))) for i in range(count))
    names = [f"d{i}" for i in range(draw(st.integers(2, most_devices)))]
    hosts, speeds = st.sampled_from(["", "a", "b", "c"]), st.integers(1, kinds)
    devices = [Device(name=x, memory_nbytes=PLENTY, host=draw(hosts), speed=draw(speeds)) for x in names]
    old = draw(plans(names[draw(st.integers(0, 1)) :], count))  # the first one may be new
    lost = draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    left = [d for d in devices if d.name not in lost]
    holders = old.holders()
    assume(all(holders[i] - lost for i, x in enumerate(layers) if x.parameter_nbytes + x.optimizer_nbytes))
    job = TrainingJob(
        layers=layers,
        devices=tuple(draw(st.permutations(left))),
        micro_batches=4,
        within_host=LinkRate(rate_bps=800, latency_s=0.5),
        between_hosts=LinkRate(rate_bps=80, latency_s=1),
    )
    return Change(job, old, draw(plans([d.name for d in left], count)))
