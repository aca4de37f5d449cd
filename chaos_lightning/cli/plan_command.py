"""Plans which device computes which layers, how long a step takes, and what to do after a loss (`chaos-lightning
plan`).

Theory of operation. A job comes from a file or a formula (`files.find_job`). Without `--lost` or `--slow` its best
plan is shown. With them, that plan is what runs before; a policy then chooses among the ways to go on (`options`), and
the chosen one is shown with what it moves. Values are made here, `observe.pipelines` draws them; imports that cost time
happen when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaos_lightning.errors import ConfigurationError, PlanError
from chaos_lightning.machine.terminal import print_json
from chaos_lightning.planning.pipelines.job import JobError, TrainingJob, check_number

if TYPE_CHECKING:
    from rich.console import Console

    from chaos_lightning.planning.pipelines.choice import Decision, PlanCandidate
    from chaos_lightning.planning.pipelines.estimate import StepEstimate
    from chaos_lightning.planning.pipelines.job import LinkRate
    from chaos_lightning.planning.pipelines.moves import Moves
    from chaos_lightning.planning.pipelines.options import PlanOptions
    from chaos_lightning.planning.pipelines.places import SharedFate
    from chaos_lightning.planning.pipelines.plan import PipelinePlan
    from chaos_lightning.planning.pipelines.planner import PlannedPipelines, Planner

SURVIVE = ("none", "device", "host")
FREE = 0.02
"""Fraction of a step that a second owner of each layer may cost without being asked for."""


@dataclass(frozen=True)
class PricedPlan:
    """A pipeline plan with its estimated costs."""

    plan: PipelinePlan
    estimate: StepEstimate
    why: str
    exact: bool = False
    gap: float = 0.0
    shared_fate: tuple[SharedFate, ...] = ()
    price: str = ""
    """Price in words: what single losses take along, and what it costs to prevent that."""

    def facts(self, job: TrainingJob) -> dict[str, Any]:
        """Returns the plan and its costs, ready for JSON."""
        e = self.estimate
        return {
            "why": self.why, "price": self.price, "exact": self.exact, "gap": self.gap, "step_s": e.step_s,
            "samples_per_s": samples_per_s(job, e), **rates(job, e), "compute_s": e.compute_s, "reduced_s": e.reduced_s,
            "commit_s": e.commit_s, "optimizer_s": e.optimizer_s, "plan": self.plan.to_dict(),
            "shared_fate": [
                asdict(f) | {"cost_s": f.cost_s if math.isfinite(f.cost_s) else None} for f in self.shared_fate
            ],
            "memory": {name: asdict(use) | {"nbytes": use.nbytes} for name, use in e.memory.items()},
        }  # fmt: skip


def samples_per_s(job: TrainingJob, estimate: StepEstimate) -> float:
    """Returns the samples that the whole fleet trains per second."""
    return job.micro_batches * job.samples / estimate.step_s


def rates(job: TrainingJob, estimate: StepEstimate) -> dict[str, float]:
    """Returns tokens_per_s and mfu: the share of all cards' peak arithmetic that the model itself uses."""
    if job.work is None:
        return {}
    per_s = job.micro_batches / estimate.step_s
    peak = job.work.peak_flops * sum(d.cards * d.speed for d in job.devices)
    return {"tokens_per_s": per_s * job.work.tokens, "mfu": per_s * job.work.flop / peak}


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
    slow: Annotated[
        str, typer.Option(help="Devices that have become slow, with their measured speeds.", metavar="NAME=SPEED[,..]")
    ] = "",
    policy: Annotated[str, typer.Option(help="Who chooses what to do after the loss.")] = "adaptive",
    rate: Annotated[float, typer.Option(help="Losses per device and hour, for that choice.")] = 0.01,
    transition: Annotated[
        float, typer.Option(help="Seconds until another plan runs; more where bytes take longer.")
    ] = 8.2,
    micro_batches: Annotated[int | None, typer.Option(help="So many in a step instead of those in the file.")] = None,
    copies: Annotated[
        int | None, typer.Option(help="So many devices must own each layer, at least.", metavar="N")
    ] = None,
    survive: Annotated[
        str,
        typer.Option(
            help="Which single loss may take no layer along: none, device or host. Default: device, where it makes a "
            "step at most 2% longer.",
            metavar="none|device|host",
        ),
    ] = "",
    priced: Annotated[
        Path | None,
        typer.Option("--plan", help="Price this plan instead, a file of what --json has as `plan`.", metavar="FILE"),
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="The answer that comes at once instead of the best.")] = False,
    estimator: Annotated[str, typer.Option(hidden=True)] = "",
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
    from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner
    from chaos_lightning.planning.pipelines.policies import policy as known_policy

    if schema:
        print_json(files.schema())
        return
    check_number("--rate", rate, least=0)
    check_number("--transition", transition, least=0)
    if micro_batches is not None:
        check_number("--micro-batches", micro_batches, least=1)
    known_policy(policy)
    if estimator:
        raise JobError(
            f"--estimator is {estimator!r}, an option that was removed: steps are always simulated; for the paper's "
            "equations run `python -m benchmarks.paper_equations MODEL --plan FILE` in a checkout"
        )
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
    if survive not in ("", *SURVIVE):
        raise JobError(f"--survive is {survive!r}; expected one of {', '.join(SURVIVE)}")
    if copies is not None:
        check_number("--copies", copies, least=1, most=len(job.devices))
    planner = Planner(job)
    try:
        before = _planned(job, copies, survive, first=first) if priced is None else _priced(job, priced)
    except NoPlanError as error:
        raise NoPlanError(f"{model or formula}: {error}") from None
    gone = lost_devices(job, before.plan, lost) if lost else ()
    speeds = slow_devices(job, gone, slow) if slow else {}
    options = _options(planner, before, gone, speeds, transition, first=first) if gone or speeds else None
    decision = _decided(options, policy, rate) if options else None
    if as_json:
        facts = {"job": title, "devices": len(job.devices), "micro_batches": job.micro_batches} | before.facts(job)
        print_json(facts | (_loss_facts(options, decision) if options and decision else {}))
        return
    console = _console()
    console.print(_head(job, title), style="bold", markup=False)
    _show_answer(console, job, before, explain=explain and not options)
    if options and decision:
        _show_loss(console, options, decision, explain=explain)


def lost_devices(job: TrainingJob, plan: PipelinePlan, text: str) -> tuple[str, ...]:
    """Returns the devices lost with those named: devices and what dies with them, hosts, or a number of units from the
    end.

    Raises:
        JobError: No device or host has such a name, or there are not so many.
    """
    units: dict[str, list[str]] = {}
    hosts: dict[str, list[str]] = {}
    for d in job.devices:
        units.setdefault(d.dies_with, []).append(d.name)
        hosts.setdefault(d.host, []).append(d.name)
    wanted = [x.strip() for x in text.split(",") if x.strip()]
    if not wanted:
        raise JobError(f"--lost is {text!r}; expected names of devices or hosts with commas between, or how many")
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


def slow_devices(job: TrainingJob, lost: Collection[str], text: str) -> dict[str, float]:
    """Parses the measured speeds of slow devices: "NAME=SPEED,...".

    Raises:
        JobError: A name is no device that is left, or a speed is no number above 0.
    """
    speeds: dict[str, float] = {}
    for part in text.split(","):
        name, _, speed = (x.strip() for x in part.partition("="))
        if name not in job.by_name or name in lost:
            known = ", ".join([x for x in job.by_name if x not in lost][:6])
            raise JobError(f"--slow: {name!r} is no device that is left; expected NAME=SPEED for some of {known}")
        try:
            speeds[name] = float(speed)
        except ValueError:
            raise JobError(f"--slow: the speed of {name} is {speed!r}; expected a number above 0") from None
        check_number(f"--slow: the speed of {name}", speeds[name])
    return speeds


def _planned(job: TrainingJob, copies: int | None, survive: str, *, first: bool) -> PricedPlan:
    """Returns the best plan that has the wanted number of owners for each layer, with its costs."""
    from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner

    def answer(least: int, hosts: bool) -> PlannedPipelines:
        planner = Planner(job, copies=least, hosts=hosts)
        return planner.first() if first else planner.exact()

    least = max(copies or 1, 2 if survive in ("device", "host") else 1)
    found, price = answer(least, survive == "host"), ""
    if least > 1:
        free = answer(1, False)
        longer = found.estimate.step_s / free.estimate.step_s - 1
        what = "on two hosts" if survive == "host" else f"on {least} devices"
        price = f"each layer has owners {what}, for {max(0.0, longer):.1%} of a step"
    elif copies is None and not survive and len(found.plan.pipelines) == 1 and len(job.devices) > 1:
        try:
            safe = answer(2, False)
        except NoPlanError:
            price = (
                "every layer has one owner, and so the loss of any device that works loses state; two copies do not fit"
            )
        else:
            longer = safe.estimate.step_s / found.estimate.step_s - 1
            words = f"owners on two devices, for {longer:.1%} of a step"
            if longer <= FREE:
                found, price = safe, f"each layer has {words}"
            else:
                price = f"every layer has one owner: any loss loses state; --survive device gives {words}"
    return PricedPlan(found.plan, found.estimate, found.why, found.exact, found.gap, found.shared_fate, price)


def _priced(job: TrainingJob, path: Path) -> PricedPlan:
    """Reads a plan from the user's file; returns it with its costs for this job.

    Raises:
        JobError: The plan cannot be read, is none, or is not of this job; or it does not fit.
    """
    from chaos_lightning.planning.documents import read_file
    from chaos_lightning.planning.pipelines.estimate import estimate
    from chaos_lightning.planning.pipelines.plan import PipelinePlan

    try:
        about = read_file(path)
        about = about.get("plan", about) if isinstance(about, Mapping) else about
        if not isinstance(about, Mapping):
            raise JobError(f"{path} is no plan: expected what --json has as `plan`")
        plan = PipelinePlan.from_dict(about)
    except (OSError, UnicodeDecodeError, PlanError, ConfigurationError) as error:
        raise JobError(f"--plan {path}: {error}") from None
    unknown = [name for name in plan.devices if name not in job.by_name]
    if unknown or plan.layer_count != job.costs.count or plan.micro_batches != job.micro_batches:
        raise JobError(
            f"--plan {path} has {plan.layer_count} layers, {plan.micro_batches} micro-batches"
            + (f", and devices that the job lacks ({', '.join(unknown[:4])})" if unknown else "")
            + f"; expected {job.costs.count} layers, {job.micro_batches} micro-batches and devices of the job, such as "
            f"{', '.join([*job.by_name][:3])}"
        )
    cost = estimate(job, plan)
    over = cost.over(job)
    name = max(over, key=lambda x: over[x], default="")
    short = f"; {name} lacks {over[name]} bytes, so it does not fit" if over else ""
    return PricedPlan(plan, cost, f"the plan of {path.name}; as given{short}")


def _options(
    planner: Planner,
    before: PricedPlan,
    gone: tuple[str, ...],
    slow: Mapping[str, float],
    transition: float,
    *,
    first: bool,
) -> PlanOptions:
    from chaos_lightning.planning.pipelines.formation import Pauses
    from chaos_lightning.planning.pipelines.history import LossHistory
    from chaos_lightning.planning.pipelines.options import PlanOptions

    return PlanOptions(
        planner=planner, before=before.plan, lost=gone, slow=slow, pauses=Pauses(move_s=transition),
        size_shares=LossHistory().size_shares, first=first,
    )  # fmt: skip


def _decided(options: PlanOptions, policy: str, rate: float) -> Decision:
    """Returns the policy's decision after a loss, if each device is lost `rate` times per hour, some of them
    together.
    """
    from chaos_lightning.planning.pipelines.policies import decide

    at_once = sum(size * share for size, share in options.size_shares.items())
    return decide(policy, options, options.outlook(len(options.left.devices) * rate / at_once / 3600))


# ------------------------------------------------------------------------------------------------ as text


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _head(job: TrainingJob, title: str) -> str:
    from chaos_lightning.machine.terminal import printable
    from chaos_lightning.machine.units import amount

    kinds = sorted({d.memory_nbytes for d in job.devices})
    memory = amount(kinds[0]) if len(kinds) == 1 else f"{amount(kinds[0])} to {amount(kinds[-1])}"
    cards = sum(d.cards for d in job.devices)
    of_cards = f" ({cards} cards)" if cards > len(job.devices) else ""
    return (
        f"{printable(title)}: {len(job.layers)} layers, {len(job.devices)} devices{of_cards} of {memory}, "
        f"{job.micro_batches} micro-batches a step"
    )


def _show_answer(console: Console, job: TrainingJob, answer: PricedPlan, *, explain: bool) -> None:
    from chaos_lightning.cli import plan_picture as pipelines
    from chaos_lightning.machine.units import duration

    e = answer.estimate
    # Which pipelines, then how good that is: a line each.
    which, _, sure = answer.why.partition("; ")
    told = rates(job, e)
    more = f", {told['tokens_per_s']:,.0f} tokens/s, MFU {told['mfu']:.0%}" if told else ""
    console.print(
        f"{which}\na step takes {duration(e.step_s)}, {samples_per_s(job, e):.3g} samples/s{more}\n{sure}", markup=False
    )
    console.print(f"assumed: {_assumptions(job)}", style="dim", markup=False)
    console.print(pipelines.draw_plan(job, answer.plan, e))
    if answer.price:
        console.print(answer.price, style="yellow", markup=False)
    for words in pipelines.fates(answer.shared_fate):
        console.print(words, style="yellow", markup=False)
    console.print(pipelines.draw_step(job, answer.plan, e))
    if explain:
        _explain(console, job, answer.plan, e)


def _assumptions(job: TrainingJob) -> str:
    """Returns a text about those assumptions of the estimate that were not measured."""
    from chaos_lightning.machine.units import duration, rate

    def link(one: LinkRate) -> str:
        speed = rate(one.rate_bps) if math.isfinite(one.rate_bps) else "no limit"
        return f"{speed} and {duration(one.latency_s)}"

    layers = job.work.assumptions if job.work else "times and bytes of layers as the file has them"
    hosts = {d.place for d in job.devices}
    between = f" within hosts, {link(job.between_hosts)} between them" if len(hosts) > 1 else ""
    return f"{layers}; links of {link(job.within_host)}{between}; 1F1B"


def _explain(console: Console, job: TrainingJob, plan: PipelinePlan, e: StepEstimate) -> None:
    from chaos_lightning.cli import plan_picture as pipelines
    from chaos_lightning.machine.units import duration

    for words, table in (
        ("each layer, for one micro-batch", pipelines.layer_table(job)),
        ("each stage", pipelines.stage_table(job, plan)),
        ("memory at the peak", pipelines.memory_table(job, plan, e)),
        ("all-reduce, from the step's start", pipelines.reduce_table(job, e)),
    ):
        console.print(f"\n{words}", style="bold")
        console.print(table)
    console.print(
        f"\nlast backward ends at {duration(e.compute_s)}, last all-reduce at {duration(e.reduced_s)}; "
        f"commit {duration(e.commit_s)}, optimizer {duration(e.optimizer_s)}",
        markup=False,
    )


def _show_loss(console: Console, options: PlanOptions, decision: Decision, *, explain: bool) -> None:
    from chaos_lightning.cli import plan_picture as pipelines

    slow = [f"{name} at speed {speed:g}" for name, speed in options.slow.items()]
    console.print()
    for words, devices in (("lost", list(options.lost)), ("slow", slow)):
        if devices:
            console.print(f"{words}: {pipelines.names(devices)}", style="bold red", markup=False)
    if options.fatal:
        console.print(options.fatal, style="red", markup=False)
    moves = [_moves(options, c) for c in decision.candidates]
    console.print(pipelines.candidate_table(decision, moves))
    console.print(decision.reason, markup=False)
    for who, what in decision.failed:
        console.print(f"policy {who} raised {what}", style="red", markup=False)
    chosen = decision.chosen
    if chosen is None:
        return
    job, cost = options.left, options.cost(chosen.plan)
    console.print()
    console.print(pipelines.draw_plan(job, chosen.plan, cost))
    console.print(pipelines.draw_step(job, chosen.plan, cost))
    used = moves[decision.candidates.index(chosen)]
    if used is not None and used.moves:
        console.print(pipelines.moves_table(used))
    if explain:
        _explain(console, job, chosen.plan, cost)


def _moves(options: PlanOptions, candidate: PlanCandidate) -> Moves | None:
    """Returns which layers' state moves between devices for a candidate; None if all state comes from a checkpoint."""
    from chaos_lightning.planning.pipelines.choice import RESTART

    return None if candidate.kind == RESTART else options.moves(candidate.plan)


def _loss_facts(options: PlanOptions, decision: Decision) -> dict[str, Any]:
    """Returns the losses and the decision after them, ready for JSON."""
    facts = decision.to_dict()
    for about, candidate in zip(facts["candidates"], decision.candidates, strict=True):
        moves = _moves(options, candidate)
        if moves is not None:
            about["moves"] = {
                "nbytes": moves.nbytes, "seconds": moves.seconds, "busiest_source_nbytes": moves.busiest_source_nbytes,
                "list": [list(move) for move in moves.moves],
            }  # fmt: skip
    return {"lost": list(options.lost), "slow": dict(options.slow), "fatal": options.fatal, "decision": facts}
