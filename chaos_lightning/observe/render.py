"""Draws the live view with rich, for `top` and `LiveView`: a board with the members and what the job is doing.

Theory of operation. A board is a pure function of facts and the present time. `Dashboard` holds the facts in one shape,
whether they come from event logs (everything, joins with progress, step times, what links carry just now) or from a
scheduler's status (who, rank, step, silence, what links can carry: the scheduler sees no bytes), and `draw` makes a
renderable of it that fits 80 columns.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from chaos_lightning.machine.process_table import short_host
from chaos_lightning.machine.tables import Figures, FittingTable
from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import amount, duration, part, rate
from chaos_lightning.observe import fields as f
from chaos_lightning.observe import folds
from chaos_lightning.observe.timeline import Life, ProgressFact, SlotFact, Timeline
from chaos_lightning.planning.batch import FIXED

_COLOURS = {
    "training": "green",
    "member": "green",
    "pulling": "yellow",
    "joining": "yellow",
    "starting": "dim",
    "standby": "dim",
    "waiting": "magenta",
    "leaving": "cyan",
    "frozen": "blue",
    "silent": "blue",
    "fenced": "magenta",
    "killed": "red",
    "died": "red",
    "dead": "red",
    "left": "dim",
    "finished": "dim",
}
LINKS_SHOWN = 12
"""Number of links that are shown: those that carry most, or else the slowest ones."""
BAR_WIDTH = 10
PULLS_SHOWN = 12
"""Number of transfers that are shown: those with the longest way to go."""
SOURCES_SHOWN = 6
"""Number of donors that are shown of one transfer: those that gave most."""
FLOW_SHOWN_S = 10.0
"""Seconds after which a link's traffic is not shown any more."""
ENDED_SHOWN_S = 30.0
"""Seconds for which an ended member stays on the board."""
JOINED_SHOWN_S = 10.0
"""Seconds for which a newcomer's row says what it joined with."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of one member on the board."""

    name: str
    rank: int | None
    state: str
    step: int | None
    age_s: float | None
    """Seconds since the member was last heard of."""
    step_time_s: float | None = None
    wait_share: float | None = None
    """Part of its step that it waits for others, 0 to 1."""
    progress: ProgressFact | None = None
    """Progress of a state transfer that is under way."""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Row of the link between members a and b on the board; "there" is from a to b; rates in bit/s, None if unknown."""

    a: str
    b: str
    there_bps: float | None = None
    """Rate that the link carries just now, bit/s."""
    back_bps: float | None = None
    can_there_bps: float | None = None
    """Rate that the link was measured to carry, bit/s."""
    can_back_bps: float | None = None
    latency_s: float | None = None
    state: str = ""


@dataclass(slots=True)
class Dashboard:
    """Content of a board."""

    title: str
    view: str = ""
    reason: str = ""
    rows: list[Row] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    """Figures for the head line, as (what, value)."""
    links: list[LinkRow] = field(default_factory=list)
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    """Latest happenings, as (seconds ago, who, words)."""
    waiting: str = ""
    """Reason why the whole job stands still; "" if it does not."""


# ------------------------------------------------------------------------------------------------ from event logs


def from_timeline(timeline: Timeline, now: float, *, title: str = "chaos-lightning", lines: int = 8) -> Dashboard:
    """Returns the board of a run at wall time `now` (s), from its event logs."""
    current = max((v for v in timeline.views.values() if v.members), key=lambda v: v.number, default=None)
    chain = timeline.recent(200)
    board = Dashboard(title, view=current.id if current else "", reason=current.reason if current else "")
    ranks = {m: i for i, m in enumerate(current.members)} if current else {}
    split = current.split if current else None
    recent = chain[-20:]
    for life in sorted(timeline.lives.values(), key=lambda x: (ranks.get(x.member, 1 << 30), x.born)):
        if life.ended is None or now - life.ended <= ENDED_SHOWN_S:
            row = _row(life, ranks, recent, now)
            if timeline.pipelines and row.rank is not None and not row.remark:
                row = replace(row, remark=timeline.pipelines[-1].runs(life.member))
            elif split is not None and row.rank is not None and not row.remark:
                row = replace(row, remark=_share(split.samples()[row.rank]))
            board.rows.append(row)
    board.figures = _figures(timeline, chain, now)
    if split is not None:
        board.figures.append(("batch", f"{FIXED}:{split.rule}"))
    # Members of a slow job tell less often.
    shown_s = max(FLOW_SHOWN_S, recent[-1].first - recent[0].first) if recent else FLOW_SHOWN_S
    board.links = _links(timeline, list(ranks), now - shown_s)
    begun = {m: t for t, m, waiting in timeline.waits if waiting}
    if begun and (not chain or max(begun.values()) > chain[-1].complete):
        board.waiting = next((n.text for n in reversed(timeline.notes) if n.name == "notice"), "waiting")
    board.lines = [(now - n.t, n.member, n.text) for n in sorted(timeline.notes, key=lambda n: n.t)[-lines:] if n.text]
    return board


def _share(samples: int) -> str:
    """Returns in words what a member does of a step whose batch is divided."""
    return f"{samples} sample{'' if samples == 1 else 's'}" if samples else "stands by"


def _row(life: Life, ranks: Mapping[str, int], recent: Sequence[SlotFact], now: float) -> Row:
    name, step = life.member or life.node, life.last_step if life.joined is not None else None
    pull = life.pulls[-1] if life.pulls else None
    remark = life.why if life.ended is not None else ""
    if pull is not None and pull.done is not None and life.joined is not None and life.role == "joiner":
        fresh = now - life.joined < JOINED_SHOWN_S
        remark = remark or (f"joined with {amount(pull.nbytes)} in {duration(pull.seconds)}" if fresh else "")
    if life.ended is not None:
        return Row(name, None, {"death": "died"}.get(life.state, life.state), step, None, remark=remark)
    commits = [slot.commits[life.member] for slot in recent if slot.kind == "step" and life.member in slot.commits]
    times = [c.duration_s for c in commits if c.duration_s > 0]
    frozen = any(begin <= now and (end is None or now < end) for begin, end in life.freezes)
    return Row(
        name,
        ranks.get(life.member),
        "frozen" if frozen else life.state,
        step,
        max(0.0, now - life.last),
        step_time_s=statistics.median(times) if times else None,
        wait_share=min(1.0, sum(c.wait_s for c in commits) / sum(times)) if times else None,
        progress=pull.progress if pull is not None and pull.done is None else None,
        remark=remark,
    )


def _links(timeline: Timeline, members: Sequence[str], since: float) -> list[LinkRow]:
    """Returns the rows of links whose traffic either of its two members logged since a wall time (s)."""
    rows = []
    fresh = {(a, b): flow for a, flows in timeline.flows.items() for b, flow in flows.items() if flow.t >= since}
    for a, b in itertools.combinations(members, 2):
        here, there = fresh.get((a, b)), fresh.get((b, a))
        told = here or there
        if told is None:
            continue
        rows.append(
            LinkRow(
                a,
                b,
                here.sent_bps if here is not None else told.received_bps,
                there.sent_bps if there is not None else told.received_bps,
                here.rate_bps if here is not None else None,
                there.rate_bps if there is not None else None,
                told.latency_s,
            )
        )
    return rows


def _figures(timeline: Timeline, chain: Sequence[SlotFact], now: float) -> list[tuple[str, str]]:
    if not chain:
        return [("step", "-")]
    last = chain[-1]
    steps = [slot for slot in chain if slot.kind == "step"][-20:]
    pace = (steps[-1].first - steps[0].first) / (len(steps) - 1) if len(steps) > 1 else 0.0
    figures = [("step", str(last.step)), ("last commit", f"{duration(max(0.0, now - last.complete))} ago")]
    if pace > 0:
        figures.append(("step time", duration(pace)))
        used = folds.samples_since_first(steps)
        if used:
            figures.append(("samples/s", f"{used / (steps[-1].first - steps[0].first):.3g}"))
    loss = folds.latest_loss(timeline)
    if loss is not None:
        figures.append(("loss", f"{loss:.4g}"))
    good = folds.goodput(timeline)
    if good.total:
        figures.append(("goodput", f"{good.share:.1%}"))
    if timeline.pipelines:
        figures += _pipeline_figures(timeline)
    epoch = max((epoch for _, epoch in last.ledger), default=None)
    if epoch is not None:
        figures.append(("epoch", str(epoch)))
    return figures


def _pipeline_figures(timeline: Timeline) -> list[tuple[str, str]]:
    """Returns figures of the pipelines: shape, estimated step time and idle share, and number of repeated steps."""
    chosen = timeline.pipelines[-1]
    figures = [("pipelines", chosen.shape)]
    if chosen.step_s:
        figures.append(("step estimated", duration(chosen.step_s)))
    if chosen.bubbles is not None:
        figures.append(("bubbles", f"{chosen.bubbles:.0%}"))
    if reruns := len({seq for _, seq in timeline.redos}):
        figures.append(("reruns", str(reruns)))
    return figures


# ------------------------------------------------------------------------------------------------ from a scheduler


def from_status(facts: Mapping[str, Any]) -> Dashboard:
    """Returns the board for a scheduler's status (`chaos-lightning status --json`)."""
    machine = facts.get("machine", {}) or {}
    members = [m for m in machine.get("members", ()) if isinstance(m, Mapping)]
    others = [m for m in machine.get("others", ()) if isinstance(m, Mapping)]
    phase = str(machine.get("phase", ""))
    board = Dashboard(
        title=f"job {facts.get('job', machine.get('job', '?'))} at {facts.get('endpoint', '?')}",
        view=str(machine.get("view", "")),
        reason=str(machine.get("reason", "")),
        waiting={"holding": "too few members", "lost": "nobody holds the training state any more"}.get(phase, ""),
    )
    for rank, member in enumerate(members):
        board.rows.append(_status_row(member, rank))
    board.rows += [_status_row(member, None) for member in others]
    board.links = [_status_link(link) for link in machine.get("links", ()) if isinstance(link, Mapping)]
    # A link that is simply there is not worth a line.
    board.links = [link for link in board.links if link.state or link.can_there_bps is not None]
    steps = [f.integer(m.get("step")) for m in members]
    count = f.integer(machine.get("counts", {}).get("members", len(members)))
    board.figures = [("phase", phase or "-"), ("members", str(count))]
    for what in ("pipelines", "batch"):
        if machine.get(what):
            board.figures.append((what, str(machine[what])))
    if step_s := f.number(machine.get("estimated_step_s")):
        board.figures.append(("step estimated", duration(step_s)))
    if machine.get("pages"):
        board.figures.append(("listed", f"the {len(board.rows)} that are not as they should be"))
    if steps:
        board.figures.insert(0, ("step", str(max(steps))))
    return board


def _status_link(link: Mapping[str, Any]) -> LinkRow:
    def known(key: str) -> float | None:
        return None if link.get(key) is None else f.number(link[key])

    state = str(link.get("state", ""))
    return LinkRow(
        str(link.get("a", "")),
        str(link.get("b", "")),
        can_there_bps=known("there_bps"),
        can_back_bps=known("back_bps"),
        latency_s=known("latency_s"),
        state="" if state == "in use" else state,
    )


def _status_row(member: Mapping[str, Any], rank: int | None) -> Row:
    state = str(member.get("standing", "member"))
    if member.get("dead"):
        state = "dead"
    elif member.get("leaving"):
        state = "leaving"
    elif rank is not None and member.get("loaded") is False:
        state = "joining"
    elif rank is not None:
        state = "training"
    share = _share(f.integer(member["samples"])) if "samples" in member else ""
    return Row(
        name=str(member.get("id", "")),
        rank=rank,
        state=state,
        step=f.integer(member.get("step")) if rank is not None else None,
        age_s=f.number(member.get("silent_s")),
        step_time_s=f.number(member.get("step_time_s")) or None,
        remark=str(member.get("progress") or member.get("runs") or share or short_host(str(member.get("host", ""))))
        + ("" if member.get("connected", True) else " (not connected)"),
    )


def with_logs(board: Dashboard, logged: Dashboard) -> Dashboard:
    """Returns a scheduler's board, completed with what event logs know of the same view (or only of some members)."""
    if not board.view or logged.view != board.view:
        return board
    known = {row.name: row for row in logged.rows}
    for at, row in enumerate(board.rows):
        told = known.get(row.name)
        if told is not None:
            board.rows[at] = replace(row, step_time_s=told.step_time_s or row.step_time_s, wait_share=told.wait_share)
    shown = {what for what, _ in board.figures}
    board.figures += [(what, value) for what, value in logged.figures if what not in shown]
    board.links, board.lines = logged.links or board.links, logged.lines
    return board


# ------------------------------------------------------------------------------------------------ drawing


def draw(board: Dashboard) -> RenderableType:
    """Returns the board as a rich renderable for a terminal."""
    board = printable(board)  # names and reasons are words of others
    parts: list[RenderableType] = []
    head = Text(board.title, style="bold")
    if board.view:
        head.append(f"   view {board.view}", style="default")
    if board.reason:
        head.append(f"   {board.reason}", style="dim")
    head.overflow, head.no_wrap = "ellipsis", True
    parts.append(head)
    if board.figures:
        parts.append(Figures(board.figures))
    if board.waiting:
        parts.append(Text(f"standing still: {board.waiting}", style="bold magenta"))
    parts.append(_member_table(board.rows))
    pulls = [
        (row.name, row.progress) for row in board.rows if row.progress is not None and row.progress != ProgressFact()
    ]
    if pulls:
        parts += [Text(), _progress(pulls)]
    if board.links:
        parts += [Text(), _link_table(board.links)]
    if board.lines:
        parts.append(Text())
        grid = FittingTable(["when>", "who", "words~"], ["when"], gap=1, head=False)
        for ago, who, words in board.lines:
            grid.add_row(Text(f"{duration(max(0.0, ago))} ago", "dim"), Text(who, "cyan"), words)
        parts.append(grid)
    return Group(*parts)


def _member_table(rows: Sequence[Row]) -> RenderableType:
    if not rows:
        return Text("nobody is here yet", style="dim")
    columns = ["rank>", "member~", "state", "step>", "step time>", "waits>", "heard>", "~"]
    table = FittingTable(columns, ["", "waits", "heard", "step time", "rank"])
    for row in rows:
        table.add_row(
            "-" if row.rank is None else str(row.rank),
            row.name,
            Text(row.state, style=_COLOURS.get(row.state, "default")),
            "-" if row.step is None else str(row.step),
            "-" if row.step_time_s is None else duration(row.step_time_s),
            "-" if row.wait_share is None else f"{row.wait_share:.0%}",
            "-" if row.age_s is None else duration(row.age_s),
            row.remark,
        )
    return table


def _link_table(links: Sequence[LinkRow]) -> RenderableType:
    def slowest(row: LinkRow) -> float:
        known = [r for r in (row.can_there_bps, row.can_back_bps) if r is not None]
        return min(known, default=float("inf"))

    def told(*rates_bps: float | None) -> list[str]:
        return ["-" if r is None else rate(r) for r in rates_bps]

    shown = sorted(links, key=lambda r: (-(r.there_bps or 0.0) - (r.back_bps or 0.0), not r.state, slowest(r)))
    shown = shown[:LINKS_SHOWN]
    live = any(row.there_bps is not None for row in shown)
    columns = ["link~", *(("now there>", "now back>") if live else ()), "can there>", "can back>", "latency>", "~"]
    gives_way = ["latency", "can back", "can there", *(("now back",) if live else ()), ""]
    table = FittingTable(columns, gives_way)
    ends = {end for row in shown for end in (row.a, row.b)}
    nodes = Counter(f.node_of(end) for end in ends)
    names = {end: f.node_of(end) if nodes[f.node_of(end)] == 1 else end for end in ends}
    for row in (r for r in links if r in shown):
        table.add_row(
            f"{names[row.a]} {names[row.b]}",
            *(told(row.there_bps, row.back_bps) if live else ()),
            *told(row.can_there_bps, row.can_back_bps),
            "-" if row.latency_s is None else duration(row.latency_s),
            Text(row.state, style="yellow"),
        )
    if len(links) > len(shown):
        return Group(table, Text(f"and {len(links) - len(shown)} more", style="dim"))
    return table


def _progress(pulls: Sequence[tuple[str, ProgressFact]]) -> RenderableType:
    """Returns the transfers under way, each on lines of its own, since member rows have no room left in 80 columns."""
    longest = sorted(pulls, key=lambda x: -(x[1].remaining_s if x[1].remaining_s is not None else float("inf")))
    shown = [x for x in pulls if x in longest[:PULLS_SHOWN]]
    parts: list[RenderableType] = []
    rows = [(escape(name), *_told(now)) for name, now in shown]
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row, (_, now) in zip(rows, shown, strict=True):
        # A grid for each, as wide as the widest, so that its donors can have a whole line below.
        grid = Table.grid(padding=(0, 2, 0, 0))
        for column, width in enumerate(widths):
            grid.add_column(justify="right" if column else "left", no_wrap=True, min_width=width)
            if column == 0:
                grid.add_column(no_wrap=True, min_width=BAR_WIDTH)
        bar = ProgressBar(total=now.total, completed=min(now.nbytes, now.total), width=BAR_WIDTH) if now.total else ""
        grid.add_row(row[0], bar, *row[1:])
        parts.append(grid)
        if any(nbytes > 0 for _, nbytes in now.sources):
            parts.append(Padding(Text(f"from {_donors(now)}", style="dim"), (0, 0, 0, 2)))
    if len(pulls) > len(shown):
        parts.append(Text(f"and {len(pulls) - len(shown)} more", style="dim"))
    return Group(*parts)


def _told(now: ProgressFact) -> tuple[str, str, str]:
    return (
        part(now.nbytes, now.total) if now.total > 0 else amount(now.nbytes),
        f"{amount(now.rate_bps / 8)}/s" if now.rate_bps > 0 else "",
        "" if now.remaining_s is None else f"{duration(now.remaining_s)} left",
    )


def _donors(now: ProgressFact) -> str:
    given = [f"{f.node_of(donor)} {amount(nbytes)}" for donor, nbytes in now.sources if nbytes > 0]
    more = [f"{len(given) - SOURCES_SHOWN} more"] if len(given) > SOURCES_SHOWN else []
    return ", ".join(given[:SOURCES_SHOWN] + more)
