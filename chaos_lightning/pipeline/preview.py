"""Describes in a few lines, before training, how the planner would run a job: whether it fits into memory, and which
member runs which layers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from chaos_lightning.control.requests import fetch_all
from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.units import amount, duration, part
from chaos_lightning.planning.pipelines.estimate import StepEstimate, estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.pipeliner import PipelineAnswer, Pipeliner
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import View
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.settings import EngineConfig

MOST_ROWS = 8
MOST_NAMES = 4
_ANSWER_TIMEOUT_S = 5.0


def preview(job: TrainingJob, answer: PipelineAnswer, *, ends: bool, memory: bool = True) -> list[str]:
    """Returns lines for the console about a planned job: at most four, plus one for each stage up to `MOST_ROWS`.

    Args:
        job: Layers and micro-batches; its devices are the members, by their ids.
        answer: The planner's, for these members.
        ends: Whether the job ends when the last owner of a layer is lost; else it waits.
        memory: Whether the memory of each device is known, and so told.
    """
    if answer.text is None:
        return _no_plan(job, answer)
    plan = ViewPipelines.from_json(answer.text).plan
    cost = estimate(job, plan)
    rows = _rows(job, plan, cost if memory else None)
    hidden = len(rows) - MOST_ROWS
    if hidden > 0:
        rows[MOST_ROWS - 1 :] = [f"  and {hidden + 1} more stages"]
    return [_head(job, plan, cost), *([_fit(job, cost)] if memory else []), *rows, *risk(plan, ends=ends)]


def dry_run(request: PipelineRequest, config: EngineConfig) -> list[str]:
    """Returns lines on how a job of the members at the endpoint would run; if there are none, a job of `min_nodes`
    members like this one.

    Args:
        request: Request of this process; each member's device is taken to be like this one's.
        config: Settings that name endpoint and job.
    """
    facts: dict[str, object] = {}
    with contextlib.suppress(ChaosError):
        facts = fetch_all(config.endpoint, Credentials.load(config.keys_dir, config.token_file), _ANSWER_TIMEOUT_S)
    machine = facts.get("machine") if facts.get("job") == config.job else None
    rows = [*machine["members"], *machine["others"]] if isinstance(machine, dict) else []
    if rows:
        words = f"{_counted(len(rows), 'process')} of job {config.job} at {config.endpoint}"
        ends = [(str(row["id"]), str(row["host"])) for row in rows]
    else:
        words = f"no member of job {config.job} is at {config.endpoint}; min_nodes={config.min_nodes} assumed"
        ends = [(f"process{i}", f"host{i}") for i in range(config.min_nodes)]
    job = _on(request, ends)
    answer = Pipeliner(job, request.policy, copies=request.copies, shared=request.shared).first(job.devices)
    alike = f"each taken to be like this one, with {amount(request.device.memory_nbytes)} of memory for layers"
    return [f"dry run: {words}, {alike}", *preview(job, answer, ends=request.ends_without_parts)]


def preview_of_view(request: PipelineRequest, view: View) -> list[str]:
    """Returns lines on which layers the members of a view run, with times as this member measured them, without
    memory.
    """
    job = _on(request, [(m.id, m.host or m.address) for m in view.members])
    answer = PipelineAnswer(text=view.pipelines, reason="")
    return preview(job, answer, ends=request.ends_without_parts, memory=False)


def _on(request: PipelineRequest, ends: Iterable[tuple[str, str]]) -> TrainingJob:
    """Returns the requested job on the given members (id, host), with devices like that of this process."""
    devices = [replace(request.device, name=name, host=f"machine {host}") for name, host in ends]
    return replace(request.job, devices=tuple(devices))


def _no_plan(job: TrainingJob, answer: PipelineAnswer) -> list[str]:
    roomy = max(job.devices, key=lambda d: d.memory_nbytes)
    count = answer.least_members
    more = f"it takes {count} members such as {_name(roomy.name)} ({amount(roomy.memory_nbytes)})"
    return [
        f"does not fit {_counted(len(job.devices), 'member')}: {answer.reason}",
        more if count is not None else "no number of such members is enough",
    ]


def _head(job: TrainingJob, plan: PipelinePlan, cost: StepEstimate) -> str:
    samples = job.micro_batches * job.samples
    lengths = ", ".join(str(len(p.stages)) for p in plan.pipelines[:MOST_NAMES])
    more = f" and {len(plan.pipelines) - MOST_NAMES} more" if len(plan.pipelines) > MOST_NAMES else ""
    return (
        f"{_counted(len(plan.pipelines), 'pipeline')} of {lengths}{more} stages; a step of "
        f"{_counted(job.micro_batches, 'micro-batch')} ({samples} samples) takes about {duration(cost.step_s)}"
    )


def _fit(job: TrainingJob, cost: StepEstimate) -> str:
    over = cost.over(job)
    if over:
        name = max(over, key=lambda x: over[x])
        return f"does not fit: {_name(name)} lacks {over[name]} bytes ({amount(over[name])}), the most of {len(over)}"
    name = min(cost.memory, key=lambda x: job.by_name[x].memory_nbytes - cost.memory[x].nbytes)
    left = job.by_name[name].memory_nbytes - cost.memory[name].nbytes
    return f"fits: least is left at {_name(name)}, {amount(left)}"


def _rows(job: TrainingJob, plan: PipelinePlan, cost: StepEstimate | None) -> list[str]:
    """Returns a line for each run of layers with its owners, with memory if it is known, and a line for idle
    members.
    """
    owners: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, stages in plan.stages.items():
        for stage in stages:
            owners[stage.first, stage.end].append(name)
    found = []
    for (first, end), names in sorted(owners.items()):
        layers = job.layers[first].name + (f" to {job.layers[end - 1].name}" if end - first > 1 else "")
        found.append(f"  {layers}: {_few(names)}{_fullest(job, names, cost) if cost is not None else ''}")
    return found + ([f"  idle: {_few(plan.idle)}"] if plan.idle else [])


def _fullest(job: TrainingJob, names: list[str], cost: StepEstimate) -> str:
    fullest = max(names, key=lambda x: cost.memory[x].nbytes / job.by_name[x].memory_nbytes)
    return f", {part(cost.memory[fullest].nbytes, job.by_name[fullest].memory_nbytes)}"


def risk(plan: PipelinePlan, *, ends: bool) -> list[str]:
    """Returns a line about members whose loss would take the last owner of a layer; no line if each layer has two
    owners.

    Args:
        plan: The pipelines of the members.
        ends: Whether the job ends then; else it waits.
    """
    alone = [g for g, owners in zip(plan.groups, plan.owners, strict=True) if len(owners) == 1]
    if not alone:
        return []
    does = "ends" if ends else "stops"
    if len(alone) == len(plan.groups):
        return [f"any loss {does} this job: no layer has two owners"]
    names = {owners[0] for owners in plan.owners if len(owners) == 1}
    return [f"the loss of {_few(sorted(names))} {does} this job: some layers have no other owner"]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "es" if word.endswith(("ch", "s")) else "s")


def _few(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(map(_name, names[:MOST_NAMES]))
    return shown + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _name(member: str) -> str:
    """Returns a member's name without the part that marks its incarnation."""
    return member.partition("~")[0]
