"""`chaos-lightning report` and `chaos-lightning audit`: what happened, and whether the contract held.

Theory of operation. Plain functions with typer annotations; `cli.py` registers them. Heavy imports (matplotlib)
happen inside, so that the command's help stays instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.machine.terminal import printable


def report(
    logs: Annotated[Path, typer.Argument(help="Log directory of a run (log_dir), or one event file.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html and report.png; default: the log directory.")
    ] = None,
    title: Annotated[str, typer.Option(help="Headline; default: the directory's name.")] = "",
    job: Annotated[
        int, typer.Option(help="If several jobs were logged here one after the other: which, from 1; 0 the latest.")
    ] = 0,
) -> None:
    """Write one self-contained HTML page (and a PNG) about a run."""
    from chaos_lightning.errors import ConfigurationError
    from chaos_lightning.observe.report import write_report

    try:
        written = write_report(logs, out, title=title, job=job)
    except (FileNotFoundError, ConfigurationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(printable(written.summary))
    for line in written.violations:
        typer.echo(printable(f"VIOLATED  {line}"))
    typer.echo(f"{written.page}\n{written.picture}")


def audit(
    logs: Annotated[Path, typer.Argument(help="Log directory of a run (log_dir), or one event file.")],
    expect: Annotated[
        list[str] | None, typer.Option(help="Node whose death or exclusion was planned; may be given several times.")
    ] = None,
) -> None:
    """Check points 1 to 5 of the contract from the event logs alone.

    Jobs that were logged into the folder one after the other are judged each on its own. Exit code 1 if a point is
    violated, 2 if there are no logs or they show nothing.
    """
    from chaos_lightning.observe.audit import NOT_SHOWN, verdict, violations
    from chaos_lightning.observe.audit import audit as check

    try:
        findings = check(logs, expected_deaths=expect or None)
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for line in verdict(findings).splitlines():
        typer.echo(printable(line))
    if violations(findings):
        raise typer.Exit(1)
    if all(f.verdict == NOT_SHOWN for f in findings):
        typer.echo(f"error: the logs in {logs} show nothing about the contract: no slot was committed", err=True)
        raise typer.Exit(2)
