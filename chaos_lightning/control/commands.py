"""Sub-commands of `chaos-lightning` around the scheduler. gRPC is imported when one of them needs it."""

from __future__ import annotations

import enum
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer

from chaos_lightning.control.options import MEMORY, SchedulerOptions, change_settings, check_settings
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoints
from chaos_lightning.machine.terminal import printable
from chaos_lightning.membership.peers import short
from chaos_lightning.planning.plans import DEFAULT_PLAN, EXPECTED, read_plan
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Credentials

DEFAULT_ENDPOINT = "127.0.0.1:29400"

TokenFile = Annotated[
    str,
    typer.Option(
        help="File with the cluster token (or the environment: CHAOS_TOKEN_FILE, CHAOS_TOKEN).", metavar="PATH"
    ),
]
KeysDir = Annotated[
    str, typer.Option(help="Folder of keys, made by `chaos-lightning keys` (or CHAOS_KEYS_DIR).", metavar="DIR")
]
Endpoint = Annotated[
    str, typer.Option(envvar="CHAOS_ENDPOINT", help="The scheduler.", metavar="HOST:PORT", show_default=True)
]


def scheduler(
    listen: Annotated[
        str, typer.Option(help="Where to listen; beyond loopback keys or a token are demanded.", metavar="HOST:PORT")
    ] = DEFAULT_ENDPOINT,
    advertise: Annotated[
        str,
        typer.Option(
            help="Where others reach it, if that is not where it listens (0.0.0.0, a container, a relay).",
            metavar="HOST:PORT",
        ),
    ] = "",
    job: Annotated[str, typer.Option(help="Name of the job (torchrun: --rdzv-id).")] = "default",
    min_nodes: Annotated[int, typer.Option(help="Training starts with, and pauses below, so many nodes.")] = 1,
    max_nodes: Annotated[int, typer.Option(help="Further members wait as standbys.")] = 64,
    plan: Annotated[str, typer.Option(help=f"How gradients travel: {EXPECTED}.")] = DEFAULT_PLAN,
    store: Annotated[
        str,
        typer.Option(
            help="The chain's file; default $XDG_STATE_HOME/chaos-lightning/JOB-PORT/chain.sqlite. "
            "Or etcd://HOST:PORT,...: several schedulers stand by for each other then, and one leads. "
            f"{MEMORY} keeps nothing (for tests).",
            metavar="PATH",
        ),
    ] = "",
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    log_dir: Annotated[str, typer.Option(help="Folder for the event log.", metavar="PATH")] = "",
    idle_timeout: Annotated[float, typer.Option(help="End after so many seconds without a member; 0 never.")] = 0.0,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="The chain is lost for good (its machine is gone): begin it anew, on an empty store, from what more "
            "than half of the last view's members report.",
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any other rule, such as heartbeat_timeout_s=1.5 (repeatable).", metavar="NAME=VALUE"
        ),
    ] = None,
) -> None:
    """Run a job's scheduler in the foreground.

    Usually not needed: the first torchrun (or training script) on the endpoint's machine starts one. Run it by hand to
    keep it apart from training, for example under systemd on a small machine that stays. It may be killed and started
    again at any time: training goes on meanwhile, and the chain of decided views is continued from its file.
    """
    from chaos_lightning.control.scheduler_main import run

    given: dict[str, Any] = {"job": job, "min_nodes": min_nodes, "max_nodes": max_nodes}
    for item in setting or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {item}: expected NAME=VALUE")
        given[name.strip()] = value
    settings = check_settings(change_settings(Settings(plan=read_plan(plan)), given))
    code = run(
        SchedulerOptions(
            listen=listen,
            advertise=advertise,
            settings=settings,
            store=store,
            token_file=token_file,
            keys_dir=keys_dir,
            log_dir=log_dir,
            idle_timeout_s=idle_timeout,
            rebuild=rebuild,
        )
    )
    raise typer.Exit(code)


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for scripts.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 5.0,
    here: Annotated[
        bool, typer.Option("--here", help="Of the scheduler at this very endpoint, also if another one leads.")
    ] = False,
) -> None:
    """Show who is in a job, who leads it if several schedulers stand by for each other, and what it waits for.

    Exit code 1 if no scheduler answers; training may go on all the same, it needs none between events.
    """
    from chaos_lightning.control.channel import fetch_status

    facts = fetch_status(endpoint, Credentials.load(keys_dir, token_file), timeout, follow=not here)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    _show(printable(facts))


USUAL = {"connected": True, "loaded": True, "leaving": False, "dead": False}
"""Columns that `status` leaves out while every member has this value: a line per member fits 80 columns."""


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    machine = facts.get("machine", {})
    if facts.get("owed"):
        console.print(f"owes: {facts['owed']}", highlight=False, markup=False)
    if facts.get("role") == "standby":
        console.print(f"job {facts['job']} at {facts['endpoint']}: stands by", highlight=False, markup=False)
        _show_seat(console, facts)
        return
    console.print(
        f"job {facts['job']} at {facts['endpoint']}: {machine.get('phase', '?')}, "
        f"view {machine.get('view', '-')} (term {facts['term']}{_chain_of(machine)}), "
        f"{facts['min_nodes']} to {facts['max_nodes']} members",
        highlight=False,
        markup=False,
    )
    if machine.get("reason"):
        console.print(f"because: {machine['reason']}", highlight=False, markup=False)
    _show_seat(console, facts)
    rows = [*machine.get("members", ()), *machine.get("others", ())]
    if not rows:
        console.print("nobody is here yet")
        return
    columns = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if key not in USUAL or any(row.get(key) is not USUAL[key] for row in rows)
    ]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.removesuffix("_s"), overflow="fold")
    for row in rows:
        table.add_row(*(_host(row.get(column)) if column == "host" else _cell(row.get(column)) for column in columns))
    console.print(table)
    _show_links(console, machine)


def _show_seat(console: Any, facts: dict[str, Any]) -> None:
    """Of several schedulers: which one leads, since when and why, which stand by, and what this one waits for."""
    if "leader" not in facts:
        return
    leader = facts["leader"]
    if leader:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(facts["led_since"]))
        words = f"leads: {leader}{since}, because {facts['led_because'] or '?'}"
    else:
        words = "leads: nobody"
    console.print(words, highlight=False, markup=False)
    others = [place for place in facts.get("candidates", ()) if place != leader]
    if facts.get("store_error"):
        console.print(f"stand by: unknown ({facts['store_error']})", highlight=False, markup=False)
    else:
        console.print(f"stand by: {', '.join(others) or 'nobody'}", highlight=False, markup=False)
    if facts.get("waits_for"):
        console.print(f"waits for: {facts['waits_for']}", highlight=False, markup=False)


def _chain_of(machine: dict[str, Any]) -> str:
    chain = machine.get("chain")
    return f", chain {short(chain)}" if chain else ""


def _show_links(console: Any, machine: dict[str, Any]) -> None:
    """The plan, and a line for each link that is not simply there or was measured."""
    from rich.table import Table

    plan, links = machine.get("plan") or {}, machine.get("links") or ()
    if plan.get("kind"):
        trees = f", {plan['trees']} trees" if plan.get("trees") else ""
        console.print(f"plan: {plan['kind']}{trees}; {plan.get('reason', '')}", highlight=False, markup=False)
    told = [row for row in links if row["state"] != "in use" or row["there_bps"] is not None]
    if not told:
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("link", "Mbps there", "back", "ms", "state"):
        table.add_column(column, overflow="fold")
    for row in told:
        rates = [f"{row[k] / 1e6:.4g}" if row[k] is not None else "" for k in ("there_bps", "back_bps")]
        latency = f"{row['latency_s'] * 1e3:.3g}" if row["latency_s"] is not None else ""
        table.add_row(_cell(f"{row['a']} {row['b']}"), *rates, latency, _cell(row["state"]))
    console.print(table)


def _host(value: object) -> str:
    """Enough of boot id and pid namespace (`process_table.host_identity`) to see who shares them; --json has it all."""
    boot, slash, space = str(value or "").partition("/")
    return _cell(f"{boot[:8]}/{space.rstrip(']')[-4:]}" if slash else boot[:13])


def _cell(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return escape("" if value is None else str(value))


def drain(
    node: Annotated[str, typer.Argument(help="A member's name or id, or a node's name: then all its members.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
) -> None:
    """Ask a node to leave politely.

    Its members finish the step they are in, hand over, and end by themselves; nothing is lost and nobody waits. The
    same as Ctrl+C there.
    """
    from chaos_lightning.control.channel import drain as ask

    asked = ask(endpoint, node, Credentials.load(keys_dir, token_file))
    print(printable(f"asked to leave: {', '.join(asked)}"))


def reset(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    force: Annotated[bool, typer.Option("--force", help="Also while members live, or may live.")] = False,
    job: Annotated[str, typer.Option(help="Name of the job, where no scheduler answers.")] = "default",
    store: Annotated[
        str, typer.Option(help="Its chain, where no scheduler answers; default as for `scheduler`.", metavar="PATH")
    ] = "",
) -> None:
    """End a job on your word, so that the next one by its name can begin.

    For a job whose members are dead and that waits for them, since nobody can prove it. What they trained is lost but
    for checkpoints; the chain of its views is archived. Through its scheduler if one answers, else on the chain's file.
    Refused while members live: ask them to leave by `drain`.
    """
    from chaos_lightning.control.resetting import reset_job

    options = SchedulerOptions(
        listen=split_endpoints(endpoint)[0], settings=check_settings(Settings(job=job)), store=store
    )
    print(printable(reset_job(endpoint, options, Credentials.load(keys_dir, token_file), force=force)))


class LinkAction(enum.StrEnum):
    ADD = "add"
    REMOVE = "remove"


def link(
    action: Annotated[LinkAction, typer.Argument(help="Connect the two, or disconnect them.", metavar="add|remove")],
    a: Annotated[str, typer.Argument(help="A member's name or id.")],
    b: Annotated[str, typer.Argument(help="Another one's.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
) -> None:
    """Add or remove a link between two members while they train.

    The trees change with the next step; nothing else moves and nobody waits. A link that was removed stays away, also
    when members come and go, until it is added again. One without which the members would fall apart is not removed.
    """
    from chaos_lightning.control.channel import change_link

    token = Credentials.load(keys_dir, token_file)
    print(printable(change_link(endpoint, a, b, add=action is LinkAction.ADD, token=token)))


def version() -> None:
    """Print the versions that a bug report needs."""
    for package in ("chaos-lightning", "torch", "lightning", "grpcio", "protobuf"):
        try:
            print(f"{package} {installed(package)}")
        except PackageNotFoundError:
            print(f"{package} not installed")
    print(f"python {platform.python_version()} ({sys.executable})")
    print(
        f"system {platform.platform()}, {os.cpu_count()} processors, {(Path('/proc').exists() and 'proc') or 'no proc'}"
    )
