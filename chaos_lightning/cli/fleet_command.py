"""Simulates policies on fleets (`chaos-lightning simulate`)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.fleet.generator import Chance, generate
from chaos_lightning.planning.fleet.seats import MixedFleet, check_policies
from chaos_lightning.planning.fleet.simulator import CAUSES, FleetRun, Outcome, Rules
from chaos_lightning.planning.fleet.traces import Trace, TraceError, begins_complete, read
from chaos_lightning.planning.pipelines.files import find_job
from chaos_lightning.planning.pipelines.formation import EqualFleet, Pauses
from chaos_lightning.planning.pipelines.job import TrainingJob, check_number
from chaos_lightning.planning.pipelines.policies import POLICIES, policy
from chaos_lightning.planning.pipelines.shortage import nearest
from chaos_lightning.planning.quantities import HOUR_S


def simulate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="File of a job, YAML or JSON, or gpt:LAYERS,WIDTH.", metavar="MODEL")],
    devices: Annotated[
        int | None, typer.Option(help="How many there are at the start; by default those of the file, or 32.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Losses per device and hour.")] = 0.1,
    hours: Annotated[float, typer.Option(help="How long; 0: 9, or until the trace ends.")] = 0.0,
    policies: Annotated[
        str, typer.Option("--policy", help=f"One or more of {', '.join(POLICIES)}, or installed ones.")
    ] = "adaptive,dynamic,reroute",
    seeds: Annotated[int, typer.Option(help="How many histories are drawn.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="A history instead of chance: milliseconds,add|remove,node or hours,count.")
    ] = None,
    group: Annotated[int, typer.Option(help="Most devices that are lost at once.")] = 1,
    per_host: Annotated[int, typer.Option(help="Devices of one host.")] = 1,
    host_rate: Annotated[float, typer.Option(help="Losses of a whole host, per host and hour.")] = 0.0,
    repair_hours: Annotated[float, typer.Option(help="Until a lost device is back, on average; 0: never.")] = 0.0,
    arrivals: Annotated[float, typer.Option(help="New devices per hour.")] = 0.0,
    most: Annotated[int, typer.Option(help="No more devices than so many are there; 0: no limit.")] = 0,
    slow_rate: Annotated[float, typer.Option(help="How often a device becomes slow, per device and hour.")] = 0.0,
    slow_hours: Annotated[float, typer.Option(help="How long a slow device is slow, on average.")] = 0.5,
    slow_speed: Annotated[float, typer.Option(help="Of a slow device, beside 1.")] = 0.6,
    transition: Annotated[float, typer.Option(help="Seconds until layers have moved and training goes on.")] = 8.2,
    reload: Annotated[float, typer.Option(help="Seconds to read a checkpoint, beside a transition.")] = 60.0,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between two checkpoints.")] = 30.0,
    risk: Annotated[bool, typer.Option(help="Weigh the chance that the next loss is fatal.")] = True,
    micro_batches: Annotated[int | None, typer.Option(help="So many in a step instead of those of the model.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all of it.", metavar="FILE.json")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the first history.", metavar="FILE.png")] = None,
) -> None:
    """Simulate a job on a fleet whose devices come and go, under several policies.

    For example: chaos-lightning simulate gpt:32,4096 --rate 0.1 --hours 9 --policy adaptive,reroute --seeds 60
    """
    names = [name.strip() for name in policies.split(",")]
    for name in names:
        policy(name)
        if names.count(name) > 1:
            raise ConfigurationError(f"--policy names {name} twice; expected each policy once")
    check_number("--seeds", seeds, least=1)
    if micro_batches is not None:
        check_number("--micro-batches", micro_batches, least=1)
    for option, path in (("--json", as_json), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{option} {path}: {path.parent} is no folder; expected one that is there")
    for option, value in (("--transition", transition), ("--reload", reload)):
        check_number(option, value, least=0)
    check_number("--checkpoint-minutes", checkpoint_minutes)
    if plot is not None:
        from chaos_lightning.cli.fleet_plot import check_kind

        check_kind(plot)
    if trace is not None:
        _check_beside_trace(context, trace)
    pauses = Pauses(move_s=transition, reload_s=reload, checkpoint_s=60 * checkpoint_minutes)
    job = None if model.startswith("gpt:") else _in_steps(find_job(model, devices), micro_batches)
    mixed = None if job is None or job.alike else MixedFleet(job, pauses)
    if mixed is not None:
        check_policies(names)
        _check_beside_kinds(context)
    if devices is None:
        devices = 32 if job is None else len(job.devices)
    chance = Chance(
        devices=devices,
        hours=hours or 9.0,
        rate=rate,
        group=group,
        per_host=per_host,
        host_rate=host_rate,
        repair_hours=repair_hours,
        arrivals=arrivals,
        most=most,
        slow_rate=slow_rate,
        slow_hours=slow_hours,
        slow_speed=slow_speed,
        hosts=() if mixed is None else tuple(d.place for d in mixed.job.devices),
    )

    def drawn(seed: int) -> Trace:
        try:
            if trace is None:
                return generate(chance, seed)
            return read(trace, seed=seed, hours=hours, devices=devices, names=() if mixed is None else mixed.names)
        except TraceError as error:
            raise TraceError(f"{f'seed {seed}: ' if trace is None else ''}{error}") from None

    histories = [drawn(seed) for seed in range(seeds)]
    first = histories[0]
    there = max(count for _, count in first.counts())
    fleet = mixed or EqualFleet(_in_steps(find_job(model, there), micro_batches), pauses)
    outcomes = _runs(fleet, histories, names, Rules(with_risk=risk))
    _check_progress(outcomes, first, fleet)
    console = Console()
    show(outcomes, console)
    if as_json is not None:
        as_json.write_text(to_json(outcomes, about=f"{model}, {first.about}"))
    if plot is not None:
        from chaos_lightning.cli.fleet_plot import plot as draw

        draw(outcomes, plot)


def _runs(
    fleet: EqualFleet | MixedFleet, histories: Sequence[Trace], names: Sequence[str], rules: Rules
) -> dict[str, list[Outcome]]:
    """Simulates each policy on each history; returns the outcomes by policy. The first history's runs are recorded for
    a picture.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(histories) * len(names))
        for seed, history in enumerate(histories):
            for name in names:
                run = FleetRun(fleet, history, name, seed=seed, rules=rules, record=seed == 0)
                outcomes[name].append(run.run())
                progress.advance(task)
    return outcomes


def _in_steps(job: TrainingJob, micro_batches: int | None) -> TrainingJob:
    return replace(job, micro_batches=micro_batches) if micro_batches else job


def _given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Returns those of the named command-line options that the user has given."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [f"--{name.replace('_', '-')}" for name, source in sources if source and source.name != "DEFAULT"]


def _check_beside_kinds(context: typer.Context) -> None:
    """Refuses options that contradict a fleet file that names each device with its kind and host.

    Raises:
        ConfigurationError: Some are given.
    """
    if given := _given(context, ("arrivals", "per_host")):
        raise ConfigurationError(
            f"{', '.join(given)}: the file's devices are of several kinds, and it names each with its host; expected "
            "neither --arrivals (lost devices come back by --repair-hours) nor --per-host"
        )


def _check_beside_trace(context: typer.Context, trace: Path) -> None:
    """Refuses options about random losses and arrivals beside a trace, which fixes these.

    Raises:
        ConfigurationError: Some are given.
    """
    kept = {"hours", "devices"} if begins_complete(trace) else {"hours"}
    if given := _given(context, [f.name for f in fields(Chance) if f.name not in kept]):
        raise ConfigurationError(f"--trace is given beside {', '.join(given)}, which it replaces; expected one of both")


def _check_progress(outcomes: dict[str, list[Outcome]], trace: Trace, fleet: EqualFleet | MixedFleet) -> None:
    """Refuses a fleet on which no policy completes a single step.

    Raises:
        ConfigurationError: No policy has made a step.
    """
    runs = [o for rows in outcomes.values() for o in rows]
    if max(o.steps for o in runs) >= 1:
        return
    there = len(trace.first)
    best_s: float | None = None
    if isinstance(fleet, MixedFleet):
        devices = tuple(fleet.job.devices[d] for d in trace.first) or fleet.job.devices
        if there and (planned := fleet.planned(fleet.named(trace.first))):
            best_s = planned.estimate.step_s
    else:
        one = fleet.job.devices[0]
        devices = (one, *(replace(one, name=f"{one.name} {i}") for i in range(1, there)))
        if there and (plan := fleet.formation("best", there)):
            best_s = fleet.step_s(plan)
    if best_s is None:
        why = nearest(fleet.job.with_devices(devices))
        raise ConfigurationError(f"{trace.about}: no policy made a step: {why}")
    step_s, length_s = best_s, HOUR_S * runs[0].hours
    if not runs[0].losses or length_s < step_s:
        raise ConfigurationError(
            f"{trace.about}: no policy made a step: a step takes {step_s:.3g} s, and the run {length_s:.3g} s; "
            f"expected --hours above {step_s / HOUR_S:.3g}"
        )
    raise ConfigurationError(
        f"{trace.about}: no policy made a step that lasted: {runs[0].losses} losses in {length_s:.3g} s on {there} "
        f"devices, and a step takes {step_s:.3g} s; at --rate {HOUR_S / step_s / there:.3g} there is a loss in each "
        "step, so expected far less than that, --repair-hours, or a smaller model"
    )


def to_json(outcomes: dict[str, list[Outcome]], about: str) -> str:
    """Returns all outcomes as JSON text, which is the same for equal runs."""
    found = {
        "about": about,
        "policies": {
            name: {"throughput": statistics.fmean(o.throughput for o in rows), "runs": [o.to_dict() for o in rows]}
            for name, rows in outcomes.items()
        },
    }
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def show(outcomes: dict[str, list[Outcome]], console: Console) -> None:
    """Prints a table of outcomes, one row for each policy."""
    table = Table("policy", "samples/s", *(f"{c} %" for c in CAUSES), "fatal", box=None, header_style="bold")
    for name, rows in outcomes.items():
        length = sum(o.hours for o in rows) * HOUR_S
        table.add_row(
            name,
            f"{statistics.fmean(o.throughput for o in rows):.4g}",
            *(f"{100 * sum(o.seconds[c] for o in rows) / length:.2f}" for c in CAUSES),
            str(sum(o.fatal for o in rows)),
        )
    console.print(table)
    for name, what in {who: what for rows in outcomes.values() for o in rows for who, what in o.failed.items()}.items():
        console.print(f"policy {name} raised: {what}", markup=False, soft_wrap=True)
