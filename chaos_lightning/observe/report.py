"""Writes a report about one run: a self-contained HTML page, and its overview picture as a PNG.

Theory of operation. The page is folds in tables and charts in base64, set in plain HTML without scripts, fonts or
anything from a network, so that it can be mailed, archived or opened on a machine without internet. The audit's
verdict comes first: pictures of a run that broke its contract should not be admired before that is known.
"""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.reader import Record
from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import amount, duration, part
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import charts, folds
from chaos_lightning.observe.evidence import EvidenceFold
from chaos_lightning.observe.fields import node_of
from chaos_lightning.observe.pipeline_facts import periods
from chaos_lightning.observe.timeline import Life, NoteFact, Timeline

_STYLE = """
:root { color-scheme: light dark; --page: #f5f7f9; --sheet: #fff; --ink: #1f2933; --soft: #5f6b78; --line: #e4e8ec; }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; color: var(--ink);
  background: var(--page); margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 34px 0 10px; }
.sub { color: var(--soft); margin: 0 0 20px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.card { flex: 1 1 120px; background: var(--sheet); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px; }
.card b { display: block; font-size: 22px; line-height: 1.25; } .card span { color: var(--soft); font-size: 13px; }
figure { background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; margin: 12px 0; padding: 12px;
  overflow-x: auto; }
figure img { width: 100%; min-width: 720px; height: auto; display: block; }
.scroll { overflow-x: auto; background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td:first-child { white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tag { display: inline-block; border-radius: 4px; padding: 1px 8px; font-size: 12.5px; font-weight: 600;
  white-space: nowrap; }
.ok { background: #d8f3e6; color: #00573f; } .violated { background: #fde0d2; color: #8f3500; }
.dark { background: #e8ecf0; color: #4a5560; }
.small { color: var(--soft); font-size: 13px; } ul { margin: 4px 0 0; padding-left: 18px; }
@media (max-width: 520px) { main { padding: 16px 10px 40px; } th, td { padding: 6px 8px; } figure { padding: 6px; } }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --sheet: #1c2229; --ink: #e3e8ee; --soft: #9aa7b4; --line: #313a44; }
  /* The charts are drawn on white: turned round in brightness, and back in hue. */
  figure img { filter: invert(.88) hue-rotate(180deg); }
  .ok { background: #0d3b2c; color: #8fe3c0; } .violated { background: #4d1f08; color: #ffb48f; }
  .dark { background: #2c343d; color: #b5c0cb; }
}
"""


class Begun(Protocol):
    """Facts of a job that know at which wall time (s) the pictures and tables begin."""

    @property
    def origin(self) -> float:
        """Wall time (s) at which the pictures and tables begin."""


_TAGS = {auditing.OK: "ok", auditing.VIOLATED: "violated", auditing.NOT_SHOWN: "dark"}
MAX_ROWS = 200
"""Largest number of rows of a table; of longer ones the middle is left out."""


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """Paths of a written report, and its summary; `picture` is None if none could be drawn."""

    page: Path
    picture: Path | None
    summary: str
    violations: tuple[str, ...]


@dataclass(slots=True)
class JobFacts:
    """Folds over a job of members: the timeline for the page, and the evidence for the audit."""

    timeline: Timeline = field(default_factory=Timeline)
    evidence: EvidenceFold = field(default_factory=EvidenceFold)
    trained: bool = False
    """Whether some member committed a step."""

    def take(self, r: Record) -> None:
        """Takes one event in."""
        self.timeline.take(r)
        self.evidence.take(r)
        self.trained |= r.name == "committed" and r.get("kind", "step") == "step"


def write_job(found: list[JobFacts], target: Path, *, title: str, job: int = 0, stem: str = "report") -> WrittenReport:
    """Writes the page and the picture of one of a folder's jobs to files named by `stem`.

    Empties the list: pictures of a large job need the memory that its evidence has.

    Args:
        found: Jobs that were logged one after the other.
        target: Folder to write to.
        title: Headline.
        job: Number of the job, from 1; 0: the latest that trained.
        stem: Name of the files.

    Raises:
        ConfigurationError: There is no such job.
    """
    if not 0 <= job <= len(found):
        raise ConfigurationError(f"{title}: there is no job {job}; expected 1 to {len(found)}, or 0 for the latest")
    trained = [number for number, one in enumerate(found, 1) if one.trained]
    chosen, count = job or max(trained, default=len(found)), len(found)
    timeline = found[chosen - 1].timeline
    findings = auditing.judge(found[chosen - 1].evidence.conclude())
    found.clear()
    short = summary(timeline)
    if count > 1:
        short = f"job {chosen} of {count} in these logs: {short}"
    target.mkdir(parents=True, exist_ok=True)
    picture = overview_at(target / f"{stem}.png", lambda: charts.overview(timeline))
    page = target / f"{stem}.html"
    page.write_text(render(timeline, findings, title=title, short=short), encoding="utf-8")
    return WrittenReport(page, picture, short, tuple(auditing.violations(findings)))


def summary(timeline: Timeline) -> str:
    """Returns a summary of the run in one line."""
    good = folds.goodput(timeline)
    joins, recoveries, slowest = _counts(timeline)
    text = (
        f"{good.steps} steps, {good.samples} samples, {len(timeline.nodes())} nodes in "
        f"{duration(timeline.stop - timeline.origin)}; goodput {good.share:.1%}; {joins} joins"
    )
    if recoveries:
        text += f"; {recoveries} deaths and freezes"
        if slowest is not None:
            text += f", recovered within {_lasted(slowest)}"
    return text


def _counts(timeline: Timeline) -> tuple[int, int, folds.RecoveryTimes | None]:
    """Returns the number of joins, the number of deaths and freezes, and the slowest recovery."""
    joins = sum(j.pull_done is not None for j in folds.joins(timeline))
    recoveries = folds.recoveries(timeline)
    ended = [r for r in recoveries if r.seconds is not None]
    return joins, len(recoveries), max(ended, key=lambda r: r.seconds or 0.0, default=None)


def _lasted(recovery: folds.RecoveryTimes) -> str:
    if recovery.seconds is None:
        return "not in this log"
    waited = f" ({duration(recovery.waited)} of it waiting)" if recovery.waited else ""
    return f"{duration(recovery.seconds)}{waited}"


def render(timeline: Timeline, findings: Sequence[auditing.Finding], *, title: str, short: str = "") -> str:
    """Returns the whole page as text; `short` is the line below the headline (default: the summary)."""
    parts = [
        _cards(timeline),
        "<h2>Contract</h2>",
        contract(findings),
        "<h2>Pictures</h2>",
        *pictures(charts.DRAWERS, lambda name: charts.picture(name, timeline)),
        "<h2>Members</h2>",
        _members(timeline),
        "<h2>Joins</h2>",
        _joins(timeline),
        "<h2>Deaths and freezes</h2>",
        _recoveries(timeline),
        *_pipelines(timeline),
        "<h2>Samples</h2>",
        _samples(timeline),
        "<h2>Views</h2>",
        _views(timeline),
        "<h2>Events in words</h2>",
        notes(sorted(timeline.notes, key=lambda n: n.t), timeline),
    ]
    return page_of(title, short or summary(timeline), parts)


def page_of(title: str, short: str, parts: Sequence[str]) -> str:
    """Returns an HTML page with a headline (`title`), a line below it (`short`) and the given pieces of HTML."""
    body = "\n".join([f"<h1>{escaped(title)}</h1>", f'<p class="sub">{escaped(short)}</p>', *parts])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}: chaos-lightning report</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


# ------------------------------------------------------------------------------------------------ pieces


def escaped(text: object) -> str:
    """Returns untrusted text with HTML and terminal control characters made harmless."""
    return html.escape(printable(" ".join(str(text).splitlines())))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), empty: str) -> str:
    """Returns an HTML table; cells are HTML already, the columns in `numbers` are right-aligned."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{c}</{tag}>" for i, c in enumerate(row))

    kept = list(rows)
    left_out = len(kept) - MAX_ROWS
    if left_out > 0:
        kept[MAX_ROWS // 2 : -MAX_ROWS // 2] = [(f"... {left_out} more ...", *[""] * (len(head) - 1))]
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in kept)
    if not body:
        return f'<p class="small">{escaped(empty)}</p>'
    head_row = cells("th", [escaped(h) for h in head])
    return f'<div class="scroll"><table><thead><tr>{head_row}</tr></thead><tbody>{body}</tbody></table></div>'


def _cards(timeline: Timeline) -> str:
    good = folds.goodput(timeline)
    joins, recoveries, slowest = _counts(timeline)
    cards = [
        (duration(timeline.stop - timeline.origin), "from the first member to the last event"),
        (str(good.steps), "committed steps"),
        (f"{good.samples:,}", "samples, each once per epoch"),
        (duration(good.usual), "usual step"),
        (f"{good.share:.1%}", "goodput"),
        (str(joins), "joins"),
        (str(recoveries), "deaths and freezes"),
        ("-" if slowest is None else _lasted(slowest), "slowest recovery, to the next commit of all survivors"),
    ]
    return card_row(cards)


def card_row(cards: Iterable[tuple[str, str]]) -> str:
    """Returns an HTML row of cards, from (value, label) pairs."""
    inner = "".join(
        f'<div class="card"><b>{escaped(value)}</b><span>{escaped(what)}</span></div>' for value, what in cards
    )
    return f'<div class="cards">{inner}</div>'


def contract(findings: Sequence[auditing.Finding]) -> str:
    """Returns the audit's verdicts as an HTML table."""
    rows = []
    for f in findings:
        details = "".join(f"<li>{escaped(line)}</li>" for line in f.details[:20])
        if len(f.details) > 20:
            details += f"<li>and {len(f.details) - 20} more</li>"
        rows.append(
            (
                str(f.point),
                f'<span class="tag {_TAGS[f.verdict]}">{escaped(f.verdict)}</span>',
                f"{escaped(auditing.POINTS[f.point])}<div class=small>{escaped(f.text)}"
                + (f"<ul>{details}</ul>" if details else "")
                + "</div>",
            )
        )
    return table(("point", "verdict", "what must hold, and what the logs show"), rows, empty="no verdict")


def overview_at(path: Path, draw: Callable[[], bytes]) -> Path | None:
    """Writes the overview picture to a path; returns the path, or None if pictures cannot be drawn."""
    if charts.missing():
        return None
    path.write_bytes(draw())
    return path


def pictures(names: Iterable[str], draw: Callable[[str], bytes]) -> Iterable[str]:
    """Returns the pictures as HTML to embed in the page, or a line that says why there are none."""
    if why := charts.missing():
        return [f'<p class="small">{escaped(why)}</p>']
    return (_image(name, draw(name)) for name in names)


def _image(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<figure><img alt="{escaped(name)}" src="data:image/png;base64,{data}"></figure>'


def at(t: float | None, facts: Begun) -> str:
    """Returns a wall time as text, in seconds since the job's origin; "-" for None."""
    return "-" if t is None else f"{t - facts.origin:.2f} s"


def _members(timeline: Timeline) -> str:
    contributed: dict[str, int] = {}
    waited: dict[str, float] = {}
    for slot in timeline.chain():
        for member, commit in slot.commits.items():
            contributed[member] = contributed.get(member, 0) + (slot.kind == "step")
            waited[member] = waited.get(member, 0.0) + commit.wait_s
    rows = []
    for life in sorted(timeline.lives.values(), key=lambda x: (x.born, x.member)):
        rows.append(
            (
                escaped(life.member),
                escaped(life.role or "-"),
                at(life.born, timeline),
                at(life.joined, timeline),
                at(life.ended, timeline),
                escaped(_ended(life)),
                str(contributed.get(life.member, 0)),
                duration(waited.get(life.member, 0.0)),
            )
        )
    return table(
        ("member", "role", "born", "joined", "ended", "how", "steps", "waited for others"),
        rows,
        numbers=(2, 3, 4, 6, 7),
        empty="no members in this log",
    )


def _ended(life: Life) -> str:
    return f"{life.end}: {life.why}" if life.end and life.why else life.end or "alive at the log's end"


def _joins(timeline: Timeline) -> str:
    rows = []
    for j in folds.joins(timeline):
        now = j.unfinished
        given = now.sources if now is not None and now.sources else [(d, n) for d, n, _ in j.sources]
        sources = ", ".join(f"{escaped(node_of(d))} {amount(n)}" for d, n in given if n) or "-"
        speed = now.rate_bps / 8 if now is not None else j.rate
        moved_nbytes = sum(p.nbytes for p in timeline.part_pulls if p.member == j.member) - j.nbytes
        pulled = part(now.nbytes, now.total) if now is not None and now.total else amount(j.nbytes)
        rows.append(
            (
                escaped(j.member) + (" <span class=small>(again)</span>" if j.again else ""),
                f"replay of {j.replayed} steps" if j.replayed else escaped(j.way or "pause"),
                at(j.born, timeline),
                at(j.contributed, timeline),
                pulled + (f", then {amount(moved_nbytes)}" if moved_nbytes > 0 else ""),
                amount(j.skipped),
                _took(j),
                f"{amount(speed)}/s" if speed else "-",
                sources,
                duration(j.pause),
            )
        )
    head = ("member", "by", "born", "contributes", "pulled", "held already", "in", "rate", "sources", "others waited")
    return table(head, rows, numbers=(2, 3, 4, 5, 6, 7, 9), empty="nobody joined by pulling the state")


def _took(join: folds.Join) -> str:
    if join.unfinished is not None and join.unfinished.remaining_s is not None:
        return f"not done, {duration(join.unfinished.remaining_s)} left"
    return duration(join.seconds) if join.pull_done is not None and join.unfinished is None else "not done"


def _recoveries(timeline: Timeline) -> str:
    rows = []
    for r in folds.recoveries(timeline):
        rows.append(
            (
                escaped(r.member),
                escaped(r.kind + (f" in {r.phase}" if r.phase else "")),
                at(r.at, timeline),
                duration(r.noticed - r.at) if r.noticed is not None else "-",
                duration(r.decided - r.at) if r.decided is not None else "-",
                _lasted(r),
                escaped(charts.HOW[r.how]) + (f" ({r.seq})" if r.seq is not None else ""),
                str(r.survivors),
            )
        )
    head = ("member", "what", "at", "noticed after", "decided after", "recovered after", "how (slot)", "survivors")
    return table(head, rows, numbers=(2, 3, 4, 5, 7), empty="no death and no freeze")


def _pipelines(timeline: Timeline) -> list[str]:
    """Returns HTML tables of all pipelines of the job, and of the layers that members run in the last ones; none for a
    job without pipelines.
    """
    if not timeline.pipelines:
        return []
    steps = [
        (slot.first, statistics.median(c.duration_s for c in slot.commits.values()))
        for slot in timeline.chain()
        if slot.kind == "step"
    ]
    reruns = {seq: t for t, seq in reversed(timeline.redos)}
    rows = [
        (escaped(p.chosen.view), at(p.chosen.t, timeline), *map(escaped, p.cells), escaped(p.chosen.reason))
        for p in periods(timeline.pipelines, steps, [*reruns.values()], timeline.part_pulls)
    ]
    head = ("view", "at", "pipelines x stages", "way", "steps", "step, estimated", "measured", "bubbles", "moved")
    chosen = timeline.pipelines[-1]
    routes = [
        (
            str(i),
            " &rarr; ".join(
                escaped(m) + " <span class=small>" + escaped(chosen.runs(m)) + "</span>" if m else "vacant" for m in row
            ),
        )
        for i, row in enumerate(chosen.routes)
    ]
    busy = [(escaped(m), escaped(chosen.runs(m)), f"{share:.0%}") for m, share in chosen.busy.items()]
    return [
        "<h2>Pipelines</h2>",
        table((*head, "reruns", "why"), rows, numbers=(1, 4, 5, 6, 7, 8, 9), empty="none was chosen"),
        f"<p>The last ones, of view {escaped(chosen.view)}:</p>",
        table(("pipeline", "stages"), routes, numbers=(0,), empty="no pipeline"),
        table(("member", "owns", "computes"), busy, numbers=(2,), empty="no estimates"),
    ]


def _samples(timeline: Timeline) -> str:
    rows = []
    for (stream, epoch), use in folds.samples(timeline).items():
        verdict = {True: "whole", False: f"{use.distinct} of {use.length}", None: "length not in the log"}[use.complete]
        once = "each once" if not use.twice else f"{use.used - use.distinct} repeats"
        rows.append((escaped(stream or "(shared)"), str(epoch), f"{use.distinct:,}", escaped(verdict), escaped(once)))
    return table(
        ("stream", "epoch", "samples", "whole?", "use"), rows, numbers=(1, 2), empty="no samples were committed"
    )


def _views(timeline: Timeline) -> str:
    rows = []
    shared = any(view.split is not None for view in timeline.views.values())
    for view in sorted(timeline.views.values(), key=lambda v: (v.t, v.number)):
        names = ", ".join(
            f"{escaped(m)} <span class=small>(joins)</span>" if m in view.joiners else escaped(m) for m in view.members
        )
        words = f"{view.split.rule}: {', '.join(map(str, view.split.samples()))}" if view.split is not None else "-"
        split = (escaped(words),) if shared else ()
        rows.append(
            (escaped(view.id), at(view.t, timeline), str(len(view.members)), names, *split, escaped(view.reason))
        )
    head = ("view", "at", "size", "members", *(("batch: samples of each",) if shared else ()), "reason")
    return table(head, rows, numbers=(1, 2), empty="no view was decided")


def notes(told: Iterable[NoteFact], facts: Begun) -> str:
    """Returns events with their texts as an HTML table."""
    rows = [(at(n.t, facts), escaped(n.member or "-"), escaped(n.name), escaped(n.text)) for n in told]
    return table(("at", "who", "event", "words"), rows, numbers=(0,), empty="nothing was said")
