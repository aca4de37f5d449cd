"""Sub-commands of `chaos-lightning` around the scheduler, but for the one that is it (scheduler_main.py).

gRPC is imported when one of them needs it.
"""

from __future__ import annotations

import enum
import os
import platform
import signal
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer

from chaos_lightning.control.options import SchedulerOptions, check_settings
from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoints
from chaos_lightning.machine.process_table import short_host
from chaos_lightning.machine.terminal import print_json, printable
from chaos_lightning.membership.peers import short
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.settings import DEFAULT_ENDPOINT, EngineConfig


def _option(name: str, words: str = "", **more: Any) -> Any:
    """What typer makes of a setting of a member's that a command takes as well."""
    made = declared(EngineConfig)[name]
    return typer.Option(help=words or f"{made.help} Or the environment: {made.variable}.", metavar=made.metavar, **more)


TokenFile = Annotated[str, _option("token_file")]
KeysDir = Annotated[str, _option("keys_dir")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for scripts.")]
Endpoint = Annotated[str, _option("endpoint", "The scheduler.", envvar="CHAOS_ENDPOINT", show_default=True)]


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: AsJson = False,
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
        print_json(facts)
        return
    _show(printable(facts))


USUAL = {"connected": True, "loaded": True, "leaving": "", "dead": "", "way": "", "progress": "", "step_time_s": 0.0}
"""Columns that `status` leaves out while every member has this value: a line per member fits 80 columns."""
CUT = ("id", "progress", "leaving")
FIRST_TO_GO = ("host", "seq", "view", "step_time", "way", "loaded", "connected", "standing", "silent")
"""What a narrower terminal does not show; `--json` has it."""


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console

    from chaos_lightning.machine.tables import FittingTable

    console = Console(markup=False, highlight=False)
    machine = facts.get("machine", {})
    if facts.get("owed"):
        console.print(f"owes: {facts['owed']}")
    if facts.get("role") == "standby":
        console.print(f"job {facts['job']} at {facts['endpoint']}: stands by")
        _show_candidacy(console, facts)
        return
    console.print(
        f"job {facts['job']} at {facts['endpoint']}: {machine.get('phase', '?')}, "
        f"view {machine.get('view', '-')} (term {facts['term']}{_chain_of(machine)}), "
        f"{facts['min_nodes']} to {facts['max_nodes']} members",
    )
    if machine.get("reason"):
        console.print(f"because: {machine['reason']}")
    _show_candidacy(console, facts)
    rows = [*machine.get("members", ()), *machine.get("others", ())]
    if not rows:
        console.print("nobody is here yet")
        return
    columns = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if key not in USUAL or any(row.get(key) != USUAL[key] for row in rows)
    ]
    names = [column.removesuffix("_s") for column in columns]
    goes = [name for name in FIRST_TO_GO if name in names]
    table = FittingTable([f"{name}~" if name in CUT else name for name in names], goes, gap=1)
    for row in rows:
        table.add_row(
            *(
                short_host(str(row.get(column) or "")) if column == "host" else _cell(row.get(column))
                for column in columns
            )
        )
    console.print(table)
    _show_links(console, machine)


def _show_candidacy(console: Any, facts: dict[str, Any]) -> None:
    """Of several schedulers: which one leads, since when and why, which stand by, and what this one waits for."""
    if "leader" not in facts:
        return
    leader = facts["leader"]
    if leader:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(facts["led_since"]))
        words = f"leads: {leader}{since}, because {facts['led_because'] or '?'}"
    else:
        words = "leads: nobody"
    console.print(words)
    others = [place for place in facts.get("candidates", ()) if place != leader]
    if facts.get("store_error"):
        console.print(f"stand by: unknown ({facts['store_error']})")
    else:
        console.print(f"stand by: {', '.join(others) or 'nobody'}")
    if facts.get("waits_for"):
        console.print(f"waits for: {facts['waits_for']}")


def _chain_of(machine: dict[str, Any]) -> str:
    chain = machine.get("chain")
    return f", chain {short(chain)}" if chain else ""


def _show_links(console: Any, machine: dict[str, Any]) -> None:
    """The plan, and a line for each link that is not simply there or was measured."""
    from chaos_lightning.machine.tables import FittingTable

    plan, links = machine.get("plan") or {}, machine.get("links") or ()
    if plan.get("kind"):
        trees = f", {plan['trees']} trees" if plan.get("trees") else ""
        console.print(f"plan: {plan['kind']}{trees}; {plan.get('reason', '')}")
    told = [row for row in links if row["state"] != "in use" or row["there_bps"] is not None]
    if not told:
        return
    table = FittingTable(["link~", "Mbps there>", "back>", "ms>", "state~"], ["ms", "state", "back"], gap=1)
    for row in told:
        rates = [f"{row[k] / 1e6:.4g}" if row[k] is not None else "" for k in ("there_bps", "back_bps")]
        latency = f"{row['latency_s'] * 1e3:.3g}" if row["latency_s"] is not None else ""
        table.add_row(_cell(f"{row['a']} {row['b']}"), *rates, latency, _cell(row["state"]))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def drain(
    node: Annotated[str, typer.Argument(help="A member's name or id, or a node's name: then all its members.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: AsJson = False,
) -> None:
    """Ask a node to leave politely.

    Its members finish the step they are in, hand over, and end by themselves; nothing is lost and nobody waits. The
    same as Ctrl+C there.
    """
    from chaos_lightning.control.channel import drain as ask

    asked = ask(endpoint, node, Credentials.load(keys_dir, token_file))
    if as_json:
        print_json({"asked": asked})
        return
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
    as_json: AsJson = False,
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
    _done(reset_job(endpoint, options, Credentials.load(keys_dir, token_file), force=force), as_json)


def _done(words: str, as_json: bool) -> None:
    """What was done, in words."""
    if as_json:
        print_json({"done": words})
    else:
        print(printable(words))


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
    as_json: AsJson = False,
) -> None:
    """Add or remove a link between two members while they train.

    The trees change with the next step; nothing else moves and nobody waits. A link that was removed stays away, also
    when members come and go, until it is added again. One without which the members would fall apart is not removed.
    """
    from chaos_lightning.control.channel import change_link

    token = Credentials.load(keys_dir, token_file)
    _done(change_link(endpoint, a, b, add=action is LinkAction.ADD, token=token), as_json)


def version(as_json: AsJson = False) -> None:
    """Print the versions that a bug report needs."""
    found = {}
    for package in ("chaos-lightning", "torch", "lightning", "grpcio", "protobuf"):
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["python"] = f"{platform.python_version()} ({sys.executable})"
    proc = "proc" if Path("/proc").exists() else "no proc"
    found["system"] = f"{platform.platform()}, {os.cpu_count()} processors, {proc}"
    if as_json:
        print_json(found)
        return
    for name, words in found.items():
        print(f"{name} {words}")


def etcd(
    action: Annotated[str, typer.Argument(help="up: start servers, and end them with Ctrl+C.", metavar="up")],
    servers: Annotated[int, typer.Option(help="How many: 1, 3 or 5.")] = 1,
    folder: Annotated[Path, typer.Option(help="Their data and logs; what lies there is continued.")] = Path("etcd"),
) -> None:
    """Run etcd servers on this machine, for development.

    They listen on loopback, without passwords, on ports that are free. Give what is printed to every scheduler or
    torchrun: --store etcd://... or --rdzv-conf store=etcd://... Ctrl+C ends them; their data stays. A server that
    ends is started again, unless it ends at once three times in a row: then all are ended, with what it said last.
    """
    from chaos_lightning.control.etcd_servers import EtcdServers

    if action != "up":
        raise ConfigurationError(f"etcd {action}: expected `chaos-lightning etcd up`")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with EtcdServers(folder.absolute(), servers) as started:
        print(f"{servers} etcd server{'s' if servers > 1 else ''} in {folder}; Ctrl+C ends them")
        print(f"  chaos-lightning scheduler --store '{started.address}' ...")
        print(
            f"  torchrun --rdzv-backend=chaos --rdzv-conf 'store={started.address.replace(',', '+')}' ...", flush=True
        )
        while not ended.wait(1.0):
            for line in started.tend():
                print(line, flush=True)
