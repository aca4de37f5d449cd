"""Writes a page about an outer job, and pages about its elastic clusters, in the style of `report.py`.

Theory of operation. `write_reports` writes whatever the folder holds: a job of members alone gets the page it always
got. An outer job gets `report.html`, and each elastic cluster beside it a page of its own, `report-NAME.html`, which
the first one names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.reader import Logs
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import report
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer import charts as outer_charts
from chaos_lightning.observe.outer.audit import audit_outer
from chaos_lightning.observe.outer.fold import OuterRun
from chaos_lightning.observe.outer.tables import ClusterRow, OuterFacts, lost_in, spent_share
from chaos_lightning.observe.report import WrittenReport, at, escaped, notes, table
from chaos_lightning.outer.rules.types import PushAnswer


def write_reports(
    where: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, title: str = "", job: int = 0
) -> list[WrittenReport]:
    """Writes pages and pictures about all jobs in a log directory; returns what was written.

    Args:
        where: Log directory (or one event file).
        out: Folder to write to; default: the log directory.
        title: Headline; default: the directory's name.
        job: Number of the job, from 1, if several were logged here one after the other; 0: the latest. Counts outer
            jobs, if there are any.

    Raises:
        FileNotFoundError: There is no such directory, or no event log in it.
        ConfigurationError: There is no such job.
    """
    source = Path(where)
    jobs = fold_jobs(Logs(source), report.JobFacts, OuterRun)
    target = Path(out) if out is not None else source if source.is_dir() else source.parent
    title, count = title or source.resolve().name, len(jobs.outer)
    if not jobs.outer:
        ((_, found),) = jobs.inner
        return [report.write_job(found, target, title=title, job=job)]
    if not 0 <= job <= count:
        raise ConfigurationError(f"{source}: there is no outer job {job}; expected 1 to {count}, or 0 for the latest")
    target.mkdir(parents=True, exist_ok=True)
    run = jobs.outer[job - 1 if job else -1]
    facts, findings = OuterFacts.of(run), audit_outer(run)
    short = outer_summary(facts)
    if count > 1:
        short = f"outer job {job or count} of {count} in these logs: {short}"
    inner = []
    for label, each in jobs.inner:
        stem = f"report-{re.sub(r'[^A-Za-z0-9._-]', '_', label)}"
        inner.append(report.write_job(each, target, title=f"{title}: {label}", stem=stem))
    picture = report.overview_at(target / "report.png", lambda: outer_charts.outer_overview(facts))
    page = target / "report.html"
    page.write_text(render_outer(facts, findings, title=title, short=short, inner=inner), encoding="utf-8")
    return [WrittenReport(page, picture, short, tuple(auditing.violations(findings))), *inner]


def outer_summary(facts: OuterFacts) -> str:
    """Returns a summary of the job in one line."""
    rounds = [row for row in facts.versions if row.kind == "round"]
    rejected = sum(len(row.rejected) for row in rounds)
    text = (
        f"{len(rounds)} rounds of {sum(len(row.accepted) for row in rounds)} pushes, {facts.samples} samples, "
        f"{len(facts.clusters)} incarnations, {len(facts.run.followers)} followers in {duration(facts.seconds)}"
    )
    if rejected or facts.voids:
        text += f"; {rejected} pushes rejected, {len(facts.voids)} void"
    if facts.chain.rollbacks:
        text += f"; {len(facts.chain.rollbacks)} rollbacks"
    return text


def render_outer(
    facts: OuterFacts,
    findings: Sequence[auditing.Finding],
    *,
    title: str,
    short: str = "",
    inner: Sequence[WrittenReport] = (),
) -> str:
    """Returns the page as HTML; `inner` are the elastic clusters' pages in the same folder, which it links to."""
    parts = [
        _cards(facts),
        "<h2>Contract</h2>",
        report.contract(findings),
        *(_link(one) for one in inner),
        "<h2>Pictures</h2>",
        *report.pictures(outer_charts.OUTER_DRAWERS, lambda name: outer_charts.outer_picture(name, facts)),
        "<h2>Clusters</h2>",
        _clusters(facts),
        "<h2>Versions</h2>",
        _versions(facts),
        "<h2>Rejected and void pushes</h2>",
        _unaccepted(facts),
        "<h2>Rollbacks</h2>",
        _rollbacks(facts),
        "<h2>Leases</h2>",
        _leases(facts),
        "<h2>Server</h2>",
        _leaders(facts),
        _followers(facts),
        "<h2>Events in words</h2>",
        notes(facts.run.notes, facts),
    ]
    return report.page_of(title, short or outer_summary(facts), parts)


def _link(one: WrittenReport) -> str:
    return f'<p>An elastic cluster: <a href="{escaped(one.page.name)}">{escaped(one.summary)}</a></p>'


def _took(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _cards(facts: OuterFacts) -> str:
    rounds = [row for row in facts.versions if row.kind == "round"]
    stale = [stale for row in rounds for _, _, stale in row.accepted]
    windows = sorted(row.window_s for row in rounds if row.window_s is not None)
    durable = facts.chain.durable[-1].version if facts.chain.durable else None
    cards = [
        (duration(facts.seconds), "from the first word to the last"),
        (str(facts.chain.newest), f"newest version; durable: {durable or 'none'}"),
        (f"{facts.samples:,}", "samples of accepted pushes"),
        (f"{facts.ticks:.0f}", "inner steps of a synchronous job"),
        (f"{sum(stale) / len(stale):.2f}" if stale else "-", "versions stale, on average"),
        (duration(windows[len(windows) // 2]) if windows else "-", "usual window"),
        (duration(max((row.waited_s for row in facts.clusters), default=0.0)), "longest that a cluster waited in all"),
        (str(len(facts.chain.rollbacks)), "rollbacks"),
    ]
    return report.card_row(cards)


def _clusters(facts: OuterFacts) -> str:
    rows = [
        (
            escaped(row.name) + (f" <span class=small>{escaped(row.place)}</span>" if row.place else ""),
            at(row.joined, facts),
            at(row.ended, facts),
            escaped(row.why) if row.ended is not None else "there at the log's end",
            f"{row.steps:,}",
            f"{row.counted:,} of {row.samples:,}",
            _answers(row),
            amount(row.pushed),
            amount(row.fetched),
            duration(row.waited_s) + _share(row, facts),
            "-" if row.loss is None else f"{row.loss:.4g}",
        )
        for row in facts.clusters
    ]
    head = (
        "incarnation", "joined", "ended", "how", "inner steps", "samples counted", "pushes", "pushed", "fetched",
        "training waited", "loss",
    )  # fmt: skip
    return table(head, rows, numbers=(1, 2, 4, 5, 7, 8, 9, 10), empty="no cluster in this log")


def _answers(row: ClusterRow) -> str:
    said = [f"{row.answers[answer]} {answer.value}" for answer in PushAnswer if row.answers.get(answer)]
    return ", ".join([*said, *([f"{row.open} open"] if row.open else [])]) or "-"


def _share(row: ClusterRow, facts: OuterFacts) -> str:
    there = (row.ended if row.ended is not None else facts.run.stop) - row.joined
    return f" ({row.waited_s / there:.1%})" if there > 0 else ""


def _versions(facts: OuterFacts) -> str:
    rows = []
    for row in facts.versions:
        pushes = ", ".join(
            f"{escaped(push)} <span class=small>{factor:.2f}{f', {stale} stale' if stale else ''}</span>"
            for push, factor, stale in row.accepted
        )
        pushes += "".join(f" <span class='tag violated'>{escaped(push)}</span>" for push, _ in row.rejected)
        rows.append(
            (
                escaped(row.version) + ("" if row.stands else " <span class=small>(taken back)</span>"),
                at(row.t, facts),
                row.kind,
                pushes or "-",
                f"{row.samples:,}",
                _took(row.window_s),
                "moves" if row.momentum else "-",
                _took(row.computed_s),
                _took(row.durable_s),
                escaped(row.reason),
            )
        )
    head = (
        "version", "decided", "by", "pushes (weight)", "samples", "window", "momentum", "computed after",
        "durable after", "why",
    )  # fmt: skip
    return table(head, rows, numbers=(1, 4, 5, 7, 8), empty="no version in this log")


def _unaccepted(facts: OuterFacts) -> str:
    rows = [
        (row.t, push, "rejected", escaped(row.version), why) for row in facts.versions for push, why in row.rejected
    ]
    rows += [(t, str(offer.push), "void", "-", why) for t, offer, why in facts.voids]
    cells = [(at(t, facts), escaped(push), what, by, escaped(why)) for t, push, what, by, why in sorted(rows)]
    return table(("at", "push", "answer", "by", "why"), cells, numbers=(0,), empty="every push was accepted")


def _rollbacks(facts: OuterFacts) -> str:
    rows = []
    for one in facts.chain.rollbacks:
        gone, again = lost_in(one)
        rows.append(
            (
                at(one.told.t, facts),
                escaped(one.told.entry.version if one.told.entry is not None else ""),
                escaped(one.body.to),
                str(len(one.versions)),
                escaped(", ".join(str(push) for push in one.body.lost) or "-"),
                f"{gone:,}",
                f"{again:,}",
                escaped(one.body.reason),
            )
        )
    head = ("at", "makes", "content of", "versions undone", "pushes lost", "samples lost", "offered again", "why")
    return table(head, rows, numbers=(0, 3, 5, 6), empty="no rollback")


def _leases(facts: OuterFacts) -> str:
    if not facts.chain.leases.length:
        return '<p class="small">each cluster has its own data</p>'
    rows = [
        (escaped(row.name), f"{row.leased:,}", f"{row.counted:,}", f"{row.held:,}")
        for row in facts.clusters
        if row.leased
    ]
    epochs = [
        f"epoch {epoch}: {count:,} of {length:,} samples counted" + (" (whole)" if count == length else "")
        for epoch, count, length in spent_share(facts.chain)
    ]
    shown = epochs if len(epochs) <= 6 else [*epochs[:3], "...", *epochs[-3:]]
    told = "".join(f"<li>{escaped(line)}</li>" for line in shown)
    head = ("incarnation", "leased", "counted", "still leased")
    return table(head, rows, numbers=(1, 2, 3), empty="nothing was leased") + f'<ul class="small">{told}</ul>'


def _leaders(facts: OuterFacts) -> str:
    rows = []
    for one in facts.run.leaders:
        how = f"{'failed: ' if one.failed else ''}{one.reason}" if one.ended is not None else "its log just ends"
        rows.append(
            (
                escaped(one.endpoint), str(one.term), at(one.t, facts), str(one.position), at(one.ended, facts),
                escaped(how), escaped(one.store),
            )
        )  # fmt: skip
    head = ("leader", "term", "from", "found entries", "to", "how", "store")
    return table(head, rows, numbers=(1, 2, 3, 4), empty="no leader in this log")


def _followers(facts: OuterFacts) -> str:
    rows = []
    for one in sorted(facts.run.followers.values(), key=lambda each: each.name):
        starts = sum(step.how == "started" for step in one.states)
        computed = [step.seconds for step in one.states if step.how == "computed"]
        staged = [each for times in one.staged.values() for each in times]
        rows.append(
            (
                escaped(one.name), escaped(one.endpoint), str(starts), str(len(computed)),
                _took(sum(computed) / len(computed) if computed else None),
                str(len(one.saved)), amount(sum(nbytes for _, nbytes, _ in staged)),
                escaped(next((step.version for step in reversed(one.states) if step.version), "-")),
                escaped(one.trouble or (f"damaged: {', '.join(one.damaged)}" if one.damaged else "")),
            )
        )  # fmt: skip
    head = ("follower", "at", "starts", "computed", "each in", "saved", "pushes fetched", "stands at", "trouble")
    return table(head, rows, numbers=(2, 3, 4, 5, 6), empty="no follower in this log")
