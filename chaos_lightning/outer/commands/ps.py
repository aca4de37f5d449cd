"""The command `chaos-lightning ps`: runs the parameter server of outer sync, shows and ends its job.

Sub-commands are imported when they are asked for; none but those that hold parameters imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from chaos_lightning.declared import add_options, declared, read_options
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.terminal import printable
from chaos_lightning.outer.exchange.server_options import DEFAULT_SERVER, VARIABLE
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.main import EXIT_OK, EXIT_USAGE, HelpFormat
from chaos_lightning.settings import EngineConfig

SUBCOMMANDS = {
    "up": (
        "chaos_lightning.outer.commands.server_main:main",
        "Run a leader and followers on this machine, with a warm spare.",
    ),
    "leader": ("chaos_lightning.outer.commands.leader_main:main", "Run a leader in the foreground."),
    "follower": ("chaos_lightning.outer.commands.follower_main:main", "Run a follower in the foreground."),
    "status": ("chaos_lightning.outer.commands.ps:status", "Show clusters, followers, versions and rounds of a job."),
    "export": (
        "chaos_lightning.outer.commands.export:main",
        "Write a durable version as a checkpoint that plain Lightning loads.",
    ),
    "end": ("chaos_lightning.outer.commands.ps:end", "End a job with a version that is durable."),
}
_SECRETS = {name: declared(EngineConfig)[name] for name in ("token_file", "keys_dir")}


def ps(arguments: Sequence[str]) -> None:
    """Runs a sub-command of `chaos-lightning ps`; ends with SystemExit."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        print("Usage: chaos-lightning ps COMMAND ...\n\nThe parameter server of clusters that train one model apart.\n")
        print("\n".join(f"  {known:10}{words}" for known, (_, words) in SUBCOMMANDS.items()))
        sys.exit(EXIT_OK if arguments else EXIT_USAGE)
    if name not in SUBCOMMANDS:
        raise ConfigurationError(f"ps {name}: expected one of {', '.join(SUBCOMMANDS)}")
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(rest))


def _parser(name: str) -> argparse.ArgumentParser:
    """Returns the argument parser of a sub-command that sends a request to a leader."""
    parser = argparse.ArgumentParser(
        prog=f"chaos-lightning ps {name}",
        description=SUBCOMMANDS[name][1],
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--server",
        default=os.environ.get(VARIABLE) or DEFAULT_SERVER,
        metavar="HOST:PORT",
        help=f"the leader, several with commas; or the environment: {VARIABLE} (default: {DEFAULT_SERVER})",
    )
    add_options(parser, _SECRETS)
    return parser


def _secret(given: argparse.Namespace) -> Credentials:
    values = read_options(argparse.Namespace(**{k: v for k, v in vars(given).items() if v is not None}), _SECRETS)
    return Credentials.load(values.get("keys_dir", ""), values.get("token_file", ""))


def status(arguments: Sequence[str]) -> int:
    """Runs `ps status`; returns the exit code."""
    from chaos_lightning.outer.exchange.control_client import fetch_facts

    parser = _parser("status")
    parser.add_argument("--json", action="store_true", help="everything, for scripts")
    parser.add_argument("--here", action="store_true", help="of this very leader, also if another one leads")
    given = parser.parse_args(arguments)
    facts = fetch_facts(given.server, _secret(given), follow=not given.here)
    if given.json:
        print(json.dumps(facts, indent=2))
    else:
        show_outer(printable(facts))
    return EXIT_OK


def end(arguments: Sequence[str]) -> int:
    """Runs `ps end`; returns the exit code."""
    from chaos_lightning.outer.exchange.control_client import ask_end

    parser = _parser("end")
    parser.add_argument("--reason", default="", help="what clusters and logs are told")
    parser.add_argument("--timeout", default=600.0, type=float, metavar="SECONDS", help="how long to wait for the end")
    given = parser.parse_args(arguments)
    print(printable(ask_end(given.server, given.reason, _secret(given), given.timeout)))
    return EXIT_OK


def show_outer(facts: dict[str, Any]) -> None:
    """Prints the facts of an outer job, which a leader has returned."""
    from chaos_lightning.machine.tables import console_of_stdout

    console = console_of_stdout()
    if facts["role"] == "standby":
        console.print(f"job {facts['job']} at {facts['endpoint']}: stands by")
    else:
        because = f": {facts['reason']}" if facts["reason"] else ""
        console.print(f"job {facts['job']} at {facts['endpoint']}: {facts['phase']}{because} (term {facts['term']})")
    if "leader" in facts:
        console.print(f"leads: {facts['leader'] or 'nobody'}, because {facts['led_because'] or '?'}")
        others = [place for place in facts["candidates"] if place != facts["leader"]]
        console.print(f"stand by: {facts.get('store_error') or ', '.join(others) or 'nobody'}")
        if facts["waits_for"]:
            console.print(f"waits for: {facts['waits_for']}")
    if facts["role"] == "standby":
        return
    versions, leases = facts["versions"], facts["leases"]
    console.print(
        f"newest {versions['newest']} ({versions['samples']} samples, {versions['steps']} steps), served "
        f"{versions['served']}, durable {' and '.join(versions['durable']) or 'none'}, {versions['ahead']} ahead of it"
    )
    console.print(
        f"policy {facts['policy']}: {facts['rounds']} rounds, {facts['accepted']} pushes accepted, "
        f"{facts['rejected']} rejected, {facts['void']} void, {facts['rollbacks']} rollbacks"
    )
    if facts["unheeded"]:
        console.print(f"note: {facts['unheeded']}")
    if facts["window"]:
        console.print(f"window: {facts['window']}")
    if leases:
        console.print(f"epoch {leases['epoch']}: {leases['left']} samples left")
        for words in leases["aside"]:
            console.print(f"set aside: {words}")
    _table(console, "cluster", [_cluster(row, leases.get("held", {})) for row in facts["clusters"]])
    for cluster in facts["away"]:
        console.print(f"away: {cluster['name']}~{cluster['incarnation']} at {cluster['place']}")
    _table(console, "follower", [_follower(row) for row in facts["followers"]])
    for words in facts.get("ended_folders", ()):
        console.print(words)


def _cluster(row: dict[str, Any], leased: dict[str, int]) -> dict[str, Any]:
    name = f"{row['name']}~{row['incarnation']}"
    return {
        "cluster": name,
        "place": row["place"],
        "base": _short(row["base"]),
        "late": row["staleness"],
        "rate": row["rate"],
        "steps": row["steps"],
        "leased": leased.get(name, 0),
        "left": row["left"],
        "pending": row["pending"],
        "offers": row["offered"].rpartition("/")[2],
        "in": row["accepted"],
        "out": row["rejected"],
        "void": row["void"],
        "silent": row["silent_s"],
        "refused": row["refused"],
        "state": "" if row["connected"] and not row["leaving"] else "leaves" if row["connected"] else "away",
    }


def _follower(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "follower": row["name"],
        "shard": str(row["shard"]) if row["shard"] >= 0 else "none",
        "endpoint": row["endpoint"],
        "version": _short(row["version"]),
        "saved": _short(row["saved"]),
        "staged": row["staged"],
        "missing": row["missing"],
        "bits": f"differ from {_short(row['bits_differ'])} on" if row["bits_differ"] else "",
        "state": row["trouble"] or ("" if row["connected"] and row["obeys"] else "away"),
    }


def _short(version: str) -> str:
    """Returns the short form of a version's name for tables, such as "v3", without the hash."""
    return version.partition("-")[0] if version.startswith("v") else "none"


def _table(console: Any, what: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table with a line for each row; columns that are empty or 0 everywhere are left out, so that a line fits
    80 columns.
    """
    from rich.table import Table

    if not rows:
        console.print(f"no {what} is here yet")
        return
    columns = [key for key in rows[0] if any(row[key] not in (0, "") for row in rows)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(f"{row[c]:.1f}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    console.print(table)
