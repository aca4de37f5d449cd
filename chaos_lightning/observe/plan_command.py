"""`chaos-lightning plan`: who computes what on a fleet, how long a step takes, and what becomes of it after a loss.

Theory of operation. A job comes from a file (`files.read_job`) or from a formula. Without `--lost` its best plan is
shown. With it, that plan is what runs before; then each way to go on is priced, and the better one is shown with what
it moves. Values are made here, `observe.pipelines` draws them; imports that cost time happen when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaos_lightning.machine.terminal import print_json
from chaos_lightning.planning.pipelines.job import JobError, TrainingJob

if TYPE_CHECKING:
    from rich.console import Console

    from chaos_lightning.planning.pipelines.estimate import Estimate
    from chaos_lightning.planning.pipelines.plan import PipelinePlan
    from chaos_lightning.planning.pipelines.planner import Planner


@dataclass(frozen=True)
class PricedPlan:
    """A plan, what it costs, and what it takes to get there."""

    name: str
    plan: PipelinePlan
    estimate: Estimate
    why: str
    exact: bool = False
    gap: float = 0.0

    def facts(self, job: TrainingJob) -> dict[str, Any]:
        """For scripts."""
        e = self.estimate
        return {
            "name": self.name, "why": self.why, "exact": self.exact, "gap": self.gap, "step_s": e.step_s,
            "samples_per_s": samples_per_s(job, e), "compute_s": e.compute_s, "reduced_s": e.reduced_s,
            "commit_s": e.commit_s, "optimizer_s": e.optimizer_s, "plan": self.plan.to_dict(),
            "memory": {name: asdict(use) | {"nbytes": use.nbytes} for name, use in e.memory.items()},
        }  # fmt: skip


def samples_per_s(job: TrainingJob, estimate: Estimate) -> float:
    """Of the whole fleet."""
    return job.micro_batches * job.samples / estimate.step_s


# ------------------------------------------------------------------------------------------------ the command


def plan(
    model: Annotated[
        str, typer.Argument(help="File of a job and its fleet, YAML or JSON; examples/plans has some.", metavar="MODEL")
    ] = "",
    formula: Annotated[
        str, typer.Option("--model", help="A decoder model by formula instead.", metavar="gpt:LAYERS,WIDTH")
    ] = "",
    devices: Annotated[
        int | None, typer.Option(help="So many devices instead of those in the file: the first, or more of the last.")
    ] = None,
    lost: Annotated[
        str,
        typer.Option(help="What the running plan loses: names of devices or hosts, or how many.", metavar="NAMES|N"),
    ] = "",
    micro_batches: Annotated[int | None, typer.Option(help="So many in a step instead of those in the file.")] = None,
    first: Annotated[bool, typer.Option("--first", help="The answer that comes at once instead of the best.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Times, bytes and memory by layer and stage, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object, for scripts.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="The JSON schema of a file, for editors, and nothing else.")
    ] = False,
) -> None:
    """Say who computes what when a model is split over a fleet, and which plan is best after a loss.

    Shows the pipelines with their layers and memory, and a step on a time line. Exit code 2 if no plan fits.
    """
    from chaos_lightning.planning.pipelines import files
    from chaos_lightning.planning.pipelines.decoder import read_model
    from chaos_lightning.planning.pipelines.planner import Planner

    if schema:
        print_json(files.schema())
        return
    if bool(model) == bool(formula):
        raise JobError(
            "expected the file of a job, or --model gpt:LAYERS,WIDTH; examples/plans has files to start from"
        )
    if formula:
        read_model(formula)
    job = files.find_job(model or formula, devices)
    title = Path(model).stem if model else formula
    if micro_batches is not None:
        job = replace(job, micro_batches=micro_batches)
    planner = Planner(job)
    before = _planned(planner, "plan", None, first=first)
    gone = lost_devices(job, before.plan, lost) if lost else ()
    after = _after(planner, before, gone, first=first) if gone else []
    if as_json:
        facts = {"job": title, "devices": len(job.devices), "micro_batches": job.micro_batches} | before.facts(job)
        print_json(facts | ({"lost": list(gone), "candidates": [x.facts(job) for x in after]} if gone else {}))
        return
    _show(job, title, before, gone, after, explain=explain)


def lost_devices(job: TrainingJob, plan: PipelinePlan, text: str) -> tuple[str, ...]:
    """The devices that go with what was named: a device and what dies with it, a host, or the last so many units.

    Raises:
        JobError: Nobody has such a name, or there are not so many.
    """
    units: dict[str, list[str]] = {}
    hosts: dict[str, list[str]] = {}
    for d in job.devices:
        units.setdefault(d.dies_with, []).append(d.name)
        hosts.setdefault(d.host, []).append(d.name)
    wanted = [x.strip() for x in text.split(",") if x.strip()]
    if len(wanted) == 1 and wanted[0].isdecimal() and wanted[0] not in job.by_name and wanted[0] not in hosts:
        working = [names for names in units.values() if any(name in plan.stages for name in names)]
        if not 1 <= int(wanted[0]) < len(working):
            raise JobError(
                f"--lost is {text}; expected 1 to {len(working) - 1} of {len(working)} that die by themselves"
            )
        return tuple(sorted(name for names in working[-int(wanted[0]) :] for name in names))
    gone: set[str] = set()
    for name in wanted:
        if name in job.by_name:
            gone.update(units[job.by_name[name].dies_with])
        elif name in hosts and name:
            gone.update(*(units[job.by_name[x].dies_with] for x in hosts[name]))
        else:
            known = ", ".join([*list(job.by_name)[:6], *[x for x in hosts if x][:3]])
            raise JobError(f"--lost: {name!r} is no device and no host; expected some of {known}, or how many")
    if len(gone) >= len(job.devices):
        raise JobError(f"--lost is {text}: all {len(job.devices)} devices; expected one to be left")
    return tuple(sorted(gone))


def _planned(planner: Planner, name: str, devices: Sequence[str] | None, *, first: bool) -> PricedPlan:
    found = planner.first(devices) if first else planner.exact(devices)
    return PricedPlan(name, found.plan, found.estimate, found.why, found.exact, found.gap)


def _after(planner: Planner, before: PricedPlan, lost: Sequence[str], *, first: bool) -> list[PricedPlan]:
    """The ways to go on without them, the one with the shortest step first."""
    job = planner.job
    left = [d.name for d in job.without(lost).devices]
    return [_planned(planner, "dynamic", left, first=first)]


# ------------------------------------------------------------------------------------------------ as text


def _show(
    job: TrainingJob, title: str, before: PricedPlan, lost: Sequence[str], after: Sequence[PricedPlan], *, explain: bool
) -> None:
    from rich.console import Console

    from chaos_lightning.observe.pipelines import names

    console = Console(highlight=False)
    console.print(_head(job, title), style="bold", markup=False)
    _show_answer(console, job, before, explain=explain and not after)
    if not after:
        return
    console.print(f"\nlost: {names(lost)}", style="bold red", markup=False)
    _show_answer(console, job, after[0], explain=explain)


def _head(job: TrainingJob, title: str) -> str:
    from chaos_lightning.machine.terminal import printable
    from chaos_lightning.observe.units import amount

    kinds = sorted({d.memory_nbytes for d in job.devices})
    memory = amount(kinds[0]) if len(kinds) == 1 else f"{amount(kinds[0])} to {amount(kinds[-1])}"
    cards = sum(d.cards for d in job.devices)
    of_cards = f" ({cards} cards)" if cards > len(job.devices) else ""
    return (
        f"{printable(title)}: {len(job.layers)} layers, {len(job.devices)} devices{of_cards} of {memory}, "
        f"{job.micro_batches} micro-batches a step"
    )


def _show_answer(console: Console, job: TrainingJob, answer: PricedPlan, *, explain: bool) -> None:
    from chaos_lightning.observe import pipelines
    from chaos_lightning.observe.units import duration

    e = answer.estimate
    near = f"at most {math.ceil(1000 * answer.gap) / 10:g}% from the best plan" if answer.gap else "not proved the best"
    sure = "the best plan" if answer.exact else near
    console.print(
        f"{answer.why}\na step takes {duration(e.step_s)}, {samples_per_s(job, e):.3g} samples/s; {sure}", markup=False
    )
    console.print(pipelines.draw_plan(job, answer.plan, e))
    console.print(pipelines.draw_step(job, answer.plan, e))
    if explain:
        for words, table in (
            ("each layer, for one micro-batch", pipelines.layer_table(job)),
            ("each stage", pipelines.stage_table(job, answer.plan, e)),
            ("memory at the peak", pipelines.memory_table(job, answer.plan, e)),
            ("all-reduce, from the step's start", pipelines.reduce_table(job, e)),
        ):
            console.print(f"\n{words}", style="bold")
            console.print(table)
        rest = (
            f"last backward ends at {duration(e.compute_s)}, last all-reduce at {duration(e.reduced_s)}; "
            f"commit {duration(e.commit_s)}, optimizer {duration(e.optimizer_s)}"
        )
        console.print(f"\n{rest}", markup=False)
