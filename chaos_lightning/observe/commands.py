"""Shows a job live in a terminal, reports what happened, and audits the contract (`chaos-lightning top`, `report`,
`audit`).

Theory of operation. `watch` redraws a board some times a second until Ctrl+C; where the facts come from is a function
that returns a board. Following a log directory needs no server and works after the fact, too; asking the scheduler
works from any machine that reaches it. Heavy imports (matplotlib, gRPC) happen inside, so that help stays instant.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaos_lightning.control.commands import AsJson, Endpoint, KeysDir, TokenFile
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.events.reader import Tail, log_files
from chaos_lightning.machine.terminal import print_json, printable
from chaos_lightning.observe.following import AskedJob, Latest
from chaos_lightning.observe.outer.board import OuterBoard
from chaos_lightning.observe.render import Dashboard, draw, from_status, from_timeline, with_logs
from chaos_lightning.service.options import default_log_folders, state_folder
from chaos_lightning.settings import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from chaos_lightning.observe.audit import Finding

Logs = Annotated[
    Path | None,
    typer.Argument(
        help="Log directory of a run (log_dir), or one event file; default: of the latest job on this machine."
    ),
]


def latest_logs(given: Path | None) -> Path:
    """Returns the given log folder, or else the default folder into which a job on this machine wrote last.

    Raises:
        ConfigurationError: No job did, or this user has no home.
    """
    if given is not None:
        return given
    ages = [(path.stat().st_mtime, folder) for folder in default_log_folders() for path in log_files(folder)]
    if not ages:
        root = state_folder("", 0).parent
        raise ConfigurationError(f"no job has logged events in {root}; name the folder that it was given as log_dir")
    folder = max(ages)[1]
    typer.echo(f"logs in {folder}", err=True)
    return folder


def follow(logs: Path, since: float = 0.0) -> Callable[[], Dashboard]:
    """Returns a function that reads new events of a log directory and returns the board as of now; the directory may
    appear later.
    """
    tail, latest, outer = Tail(logs, since), Latest(), OuterBoard()

    def board() -> Dashboard:
        for record in tail.new():
            if outer.take(record):
                latest.take(record)
        timeline = latest.timeline
        # A log whose last word is an hour old is of the past: its ages would all read an hour.
        stop = max(timeline.stop, outer.run.stop)
        now = stop if stop and time.time() - stop > 3600 else time.time()
        members = from_timeline(timeline, now, title=f"logs {logs}")
        return outer.draw(now, title=members.title, members=members) if outer.there else members

    return board


def ask(
    endpoint: str, token_file: str = "", timeout_s: float = 2.0, *, keys_dir: str = "", must_answer: bool = False
) -> Callable[[], Dashboard]:
    """Returns a function that asks a scheduler for its status and returns it as a board.

    The board also shows what members of this machine log in the default folder. An unreachable scheduler is a line on
    the board, or an error if it `must_answer`.
    """
    from chaos_lightning.security.credentials import Credentials

    asked = AskedJob(endpoint, Credentials.load(keys_dir, token_file), timeout_s, follow)
    last = Dashboard(title=f"scheduler {endpoint}")

    def board() -> Dashboard:
        nonlocal last
        try:
            last = from_status(asked.facts())
            if asked.logged is not None:
                last = with_logs(last, asked.logged())
        except ChaosError as error:
            outer = asked.outer()
            if outer is not None:
                return outer
            if must_answer:
                raise
            last.lines = [(0.0, "scheduler", f"{error} (training needs none between events)")]
        return last

    return board


def watch(board: Callable[[], Dashboard], *, interval_s: float, stop: threading.Event | None = None) -> None:
    """Redraws the board until `stop` is set or Ctrl+C; prints it only once if stdout is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console.print(draw(board()))
        return
    ended = stop or threading.Event()
    with contextlib.suppress(KeyboardInterrupt), Live(draw(board()), console=console, auto_refresh=False) as live:
        while not ended.wait(interval_s):
            live.update(draw(board()), refresh=True)


def top(
    logs: Annotated[Path | None, typer.Option(help="Follow this log directory (log_dir).", metavar="DIR")] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one board and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One board as a JSON object, for scripts.")] = False,
) -> None:
    """Watch a job live: members, ranks, steps, step times, joins with their progress; clusters and followers.

    With --once or --json the exit code is 2 if there are no event logs, 1 if no scheduler answers.
    """
    from rich.console import Console

    once = once or as_json or not Console().is_terminal
    if once and logs is not None and not log_files(logs):
        raise ConfigurationError(
            f"no event log in {logs}: expected the folder that the job was given as log_dir, with *.jsonl files"
        )
    board = follow(logs) if logs is not None else ask(endpoint, token_file, keys_dir=keys_dir, must_answer=once)
    if as_json:
        print_json(asdict(board()))
        return
    if once:
        Console().print(draw(board()))
        return
    watch(board, interval_s=max(0.05, interval))


def report(
    logs: Logs = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html and report.png; default: the log directory.")
    ] = None,
    title: Annotated[str, typer.Option(help="Headline; default: the directory's name.")] = "",
    job: Annotated[
        int, typer.Option(help="If several jobs were logged here one after the other: which, from 1; 0 the latest.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page (and a PNG) about a run, and one for each elastic cluster of an outer job."""
    from chaos_lightning.observe import charts
    from chaos_lightning.observe.outer.report import write_reports

    try:
        written = write_reports(latest_logs(logs), out, title=title, job=job)
    except (FileNotFoundError, ConfigurationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if why := charts.missing():
        typer.echo(f"note: {why}", err=True)
    if as_json:
        print_json({"reports": [asdict(one) for one in written]})
        return
    for one in written:
        typer.echo(printable(one.summary))
        for line in one.violations:
            typer.echo(printable(f"VIOLATED  {line}"))
        typer.echo("\n".join(str(path) for path in (one.page, one.picture) if path is not None))


def audit(
    logs: Logs = None,
    expect: Annotated[
        list[str] | None, typer.Option(help="Node whose death or exclusion was planned; may be given several times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the contract from the event logs alone: points 1 to 5 of a job of members, 6 to 11 of an outer job.

    Jobs that were logged into the folder one after the other are judged each on its own, and so are an outer job and
    its elastic clusters. Exit code 1 if a point is violated, 2 if there are no logs or they show nothing.
    """
    from chaos_lightning.observe.audit import NOT_SHOWN, verdict, violations
    from chaos_lightning.observe.outer.audit import audit_folder

    try:
        judged = audit_folder(latest_logs(logs), expected_deaths=expect or None)
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        print_json({"jobs": [{"title": one.title, "findings": [_finding(f) for f in one.findings]} for one in judged]})
    for one in judged if not as_json else ():
        for line in [*([f"{one.title}:"] if one.title else []), *verdict(one.findings).splitlines()]:
            typer.echo(printable(line))
    findings = [finding for one in judged for finding in one.findings]
    if violations(findings):
        raise typer.Exit(1)
    if all(f.verdict == NOT_SHOWN for f in findings):
        typer.echo(
            f"error: the logs{f' in {logs}' if logs else ''} show nothing about the contract: no slot was committed",
            err=True,
        )
        raise typer.Exit(2)


def _finding(finding: Finding) -> dict[str, Any]:
    """Returns a finding as a dictionary for JSON."""
    from chaos_lightning.observe.audit import POINTS

    return {**asdict(finding), "promise": POINTS[finding.point]}
