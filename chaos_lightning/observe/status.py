"""Shows a job's status as its scheduler, or else this machine's parameter server, reports it (`chaos-lightning
status`).
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from chaos_lightning.control.commands import AsJson, Endpoint, KeysDir, TokenFile
from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.machine.process_table import short_host
from chaos_lightning.machine.terminal import print_json, printable
from chaos_lightning.machine.units import duration
from chaos_lightning.membership.peers import short
from chaos_lightning.observe.following import outer_job
from chaos_lightning.outer.commands.ps import show_outer
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.settings import DEFAULT_ENDPOINT


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 5.0,
    here: Annotated[
        bool, typer.Option("--here", help="Of the scheduler at this very endpoint, also if another one leads.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Beyond 16 members, too, a line for each member and link, not only for odd ones."),
    ] = False,
) -> None:
    """Show who is in a job, who leads it if several schedulers stand by for each other, and what it waits for.

    Of more than 16 members and newcomers it lists those that are not as they should be, and counts the rest.

    Without --endpoint, where no scheduler is: the outer job of this machine's parameter server, as `ps status` does.
    Exit code 1 if neither answers; training may go on all the same, it needs none between events.
    """
    from chaos_lightning.control.requests import fetch_all, fetch_status

    secret, show = Credentials.load(keys_dir, token_file), _show
    try:
        facts = (fetch_all if everything else fetch_status)(endpoint, secret, timeout, follow=not here)
    except SchedulerUnreachableError:
        outer = outer_job(endpoint, secret, timeout)
        if outer is None:
            raise
        facts, show = outer, show_outer
    if as_json:
        print_json(facts)
        return
    show(printable(facts))


USUAL = {"connected": True, "loaded": True, "way": "", "progress": "", "step_time_s": 0.0}
"""Values of columns that `status` leaves out while every member has this value: a line per member fits 80 columns."""
CUT = ("progress", "runs")
FIRST_TO_GO = ("host", "seq", "view", "step_time", "way", "loaded", "connected", "silent", "speed", "standing")
"""Columns that a narrower terminal does not show; `--json` has them."""
REASONS = ("dead", "leaving")
"""Columns that `status` writes below the table as sentences, since each of them would fill a line."""


def _show(facts: dict[str, Any]) -> None:
    from chaos_lightning.machine.tables import console_of_stdout

    console = console_of_stdout()
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
    if machine.get("pages"):
        console.print(counted(machine))
    elif not rows:
        console.print("nobody is here yet")
        return
    if rows:
        _show_rows(console, rows)
    _show_links(console, machine)


def counted(machine: dict[str, Any]) -> str:
    """Returns in one line how many members, newcomers and links a large job has."""
    counts = machine["counts"]
    words = [f"{counts['members']} members, {counts['members'] - counts['connected']} of them not connected"]
    words += [f"{number} {standing}" for standing, number in counts["others"].items()]
    links = ", ".join(f"{number} {state}" for state, number in counts["links"].items()) or "none"
    return f"{'; '.join(words)}; links: {links}. Lines follow for what is not as it should be; --all lists everything"


def _show_rows(console: Any, rows: list[dict[str, Any]]) -> None:
    from chaos_lightning.machine.tables import FittingTable

    whys = [(row, word) for row in rows for word in REASONS if row.get(word)]
    rows = [row | {"standing": next((word for word in REASONS if row.get(word)), row.get("standing"))} for row in rows]
    columns = [
        key
        for key in dict.fromkeys(key for row in rows for key in row if key not in REASONS)
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
    for row, word in whys:
        console.print(f"{row['id']}: {word}: {row[word]}")


def _show_candidacy(console: Any, facts: dict[str, Any]) -> None:
    """Prints which of several schedulers leads, since when and why, which ones stand by, and what the asked one waits
    for.
    """
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


def _steps_of(machine: dict[str, Any]) -> str:
    """Returns in words how long a step with pipelines takes: as estimated, and as members measured it."""
    measured = [row["step_time_s"] for row in machine.get("members", ()) if row.get("step_time_s")]
    words = [f"estimated at {duration(machine['estimated_step_s'])}"] if machine.get("estimated_step_s") else []
    words += [f"measured {duration(max(measured))}"] if measured else []
    return f"; a step is {', '.join(words)}" if words else ""


def _show_links(console: Any, machine: dict[str, Any]) -> None:
    """Prints the reduction plan, and each link that was measured or is not in normal use."""
    from chaos_lightning.machine.tables import FittingTable

    plan, links = machine.get("plan") or {}, machine.get("links") or ()
    if plan.get("kind"):
        trees = f", {plan['trees']} trees" if plan.get("trees") else ""
        console.print(f"plan: {plan['kind']}{trees}; {plan.get('reason', '')}")
    if machine.get("batch"):
        console.print(f"batch: {machine['batch']}, whoever is there")
    if machine.get("pipelines"):
        console.print(f"pipelines: {machine['pipelines']} (pipelines x stages){_steps_of(machine)}")
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
