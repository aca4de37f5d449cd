"""Draws pictures of a run with matplotlib (extra "report"): members, step times, joins, recoveries, goodput.

Theory of operation. Each `draw_*` puts one picture on one pair of axes from a timeline's folds and knows nothing of
pages or files; `overview` sets all of them on one sheet, `picture` renders one alone. Colours are from the Okabe-Ito
set, which stays legible for the colour-blind and in print; every colour that carries meaning is also told by a mark,
a label or the legend. Runs may have millions of steps: step times are then drawn as a band (5th to 95th percentile)
per column.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import amount, duration, time_unit
from chaos_lightning.observe import folds
from chaos_lightning.observe.fields import node_of
from chaos_lightning.observe.timeline import Life, Timeline

Facts = TypeVar("Facts")

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#b9c2cc"
DONORS = (BLUE, ORANGE, GREEN, PINK, SKY, "#8a6d3b", "#6f5fa8", "#F0E442")
CAUSES = {"step": BLUE, "collective": GREY, "join": ORANGE, "recovery": RED, "waiting": PINK}
CAUSE_WORDS = {
    "step": "step",
    "collective": "validation, boundary",
    "join": "while a member joined",
    "recovery": "recovery",
    "waiting": "below min_nodes",
}
HOW = {
    "redo": "slot reduced again",
    "hand-on": "slot handed on",
    "next": "on to the next slot",
    "stayed": "thawed in time",
}
BAND_FROM = 3000
"""Number of clean steps above which they are drawn as a band."""


def missing() -> str:
    """Returns why pictures cannot be drawn, with the command that installs what is missing; "" if they can."""
    if find_spec("matplotlib") is not None:
        return ""
    return 'pictures need matplotlib, which is not installed; run: pip install "chaos-lightning[report]"'


def matplotlib_module() -> Any:
    """Imports matplotlib with the submodules that the pictures use, and returns it."""
    import matplotlib
    import matplotlib.figure
    import matplotlib.ticker

    return matplotlib


def figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure, size in inches, without touching matplotlib's global state (pyplot)."""
    return matplotlib_module().figure.Figure(figsize=(width, height), facecolor="white", layout="constrained")


def png(sheet: Any, dpi: int = 144) -> bytes:
    """Returns a figure as PNG bytes."""
    buffer = io.BytesIO()
    sheet.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def style(ax: Any, title: str, *, grid: str = "x") -> None:
    """Sets a picture's title and style, with grid lines for the given axis ("x", "y" or "both")."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    ax.set_axisbelow(True)
    ax.grid(axis=grid, color=GRID, linewidth=0.8)
    ax.tick_params(colors=MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(GRID)


def legend(ax: Any, columns: int, handles: list[Any] | None = None) -> None:
    """Puts a legend above the right end of the picture."""
    legend = ax.legend(
        **({"handles": handles} if handles else {}),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.4,
    )
    legend.set_zorder(10)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a node may be called "$x"


def name_rows(ax: Any, names: Sequence[str]) -> None:
    """Labels the y axis with one row per name, the first at the top."""
    ax.set_yticks(range(len(names)), printable(list(names)), parse_math=False)
    ax.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    ax.set_ylim(len(names) - 0.45, -0.65)


def _time_axis(ax: Any, timeline: Timeline) -> float:
    return time_axis(ax, timeline.stop - timeline.origin, "the first member came")


def time_axis(ax: Any, seconds: float, begin: str) -> float:
    """Labels the x axis as the time since an event; returns the length of the axis's unit in seconds."""
    scale, unit = time_unit(seconds)
    ax.set_xlim(0, max(seconds / scale, 1e-9))
    ax.set_xlabel(f"time since {begin} ({unit})", fontsize=9, color=MUTED)
    return scale


def empty(ax: Any, text: str) -> None:
    """Draws a text in place of a picture that has nothing to show."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED, fontsize=10)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)


# ------------------------------------------------------------------------------------------------ members


def _segments(life: Life, timeline: Timeline) -> list[tuple[float, float, str]]:
    """Returns a member's life as pieces (start, end, state) in drawing order: later pieces cover earlier ones."""
    stop = timeline.stop
    end = life.ended if life.ended is not None else stop
    pieces: list[tuple[float, float, str]] = []
    joined = life.joined if life.joined is not None else end
    pieces.append((life.born, min(joined, end), "starting"))
    for pull in life.pulls:
        pieces.append((pull.started, min(pull.done if pull.done is not None else end, end), "pulling"))
    if life.joined is not None:
        pieces.append((life.joined, end, "training"))
        if life.end == "fenced":
            out = [v.t for v in timeline.views.values() if v.t > life.joined and life.member not in v.members]
            pieces.append((min(out, default=end), end, "out"))
    # After "out": a frozen member sleeps through its exclusion.
    for begin, thaw in life.freezes:
        pieces.append((begin, min(thaw if thaw is not None else end, end), "frozen"))
    return [(a, b, state) for a, b, state in pieces if b > a]


_STATES = {
    "starting": ("#d9dee4", "", "starting, waiting"),
    "pulling": (ORANGE, "", "pulls the state"),
    "training": (BLUE, "", "training"),
    "frozen": ("#cfeaf8", "////", "frozen"),
    "out": ("#eadcf3", "", "put out"),
}
_ENDS = {
    "killed": ("X", RED, "killed"),
    "death": ("X", RED, "died"),
    "fenced": ("D", "#7a3db8", "fenced"),
    "left": ("o", INK, "left"),
    "finished": (None, GREEN, "finished"),
}


def draw_members(ax: Any, timeline: Timeline) -> None:
    """Draws one row per node: when it was starting, pulling the state, training or frozen, and how each of its lives
    ended.
    """
    matplotlib = matplotlib_module()
    nodes = timeline.nodes()
    style(ax, "Members")
    if not nodes:
        empty(ax, "no members in this log")
        return
    name_rows(ax, nodes)
    scale = _time_axis(ax, timeline)
    row = {node: i for i, node in enumerate(nodes)}
    used: set[str] = set()
    marks: set[str] = set()
    patches, lines = matplotlib.patches, matplotlib.lines
    for life in timeline.lives.values():
        y = row[life.node]
        for start, end, state in _segments(life, timeline):
            colour, hatch, _ = _STATES[state]
            used.add(state)
            ax.broken_barh(
                [((start - timeline.origin) / scale, (end - start) / scale)],
                (y - 0.3, 0.6),
                facecolors=colour,
                edgecolor="#4a90b8" if hatch else "none",
                hatch=hatch or None,
                linewidth=0.5 if hatch else 0,
                zorder=3 if state in ("starting", "training") else 4,
            )
        if life.joined is not None and life.role == "joiner":
            marks.add("joined")
            x = (life.joined - timeline.origin) / scale
            ax.plot(
                [x], [y - 0.42], marker="v", color=GREEN, markersize=7, zorder=6, clip_on=False, mec="white", mew=0.6
            )
        shape, colour, _ = _ENDS.get(life.end, (None, "", ""))
        if shape and life.ended is not None:
            marks.add(life.end)
            x = (life.ended - timeline.origin) / scale
            ax.plot([x], [y], marker=shape, color=colour, markersize=9, zorder=7, clip_on=False, mec="white", mew=1)
    handles: list[Any] = [
        patches.Patch(facecolor=c, hatch=h or None, edgecolor="#4a90b8" if h else "none", label=w)
        for state, (c, h, w) in _STATES.items()
        if state in used
    ]
    if "joined" in marks:
        handles.append(mark_handle(lines, "v", GREEN, "joined"))
    if marks & {"killed", "death"}:
        handles.append(mark_handle(lines, "X", RED, "killed" if "death" not in marks else "died"))
    handles += [
        mark_handle(lines, shape, colour, word)
        for end, (shape, colour, word) in _ENDS.items()
        if end in marks and end not in ("killed", "death") and shape
    ]
    legend(ax, len(handles), handles)


def mark_handle(lines: Any, shape: str, colour: str, word: str) -> Any:
    """Returns the legend entry of a marker."""
    return lines.Line2D([], [], marker=shape, color=colour, linestyle="none", markersize=7, mec="white", label=word)


# ------------------------------------------------------------------------------------------------ step times


def draw_steps(ax: Any, timeline: Timeline) -> None:
    """Draws the time from each commit to the next, coloured by its cause (step, join, recovery or waiting)."""
    matplotlib = matplotlib_module()
    cut = folds.intervals(timeline)
    style(ax, "Time between commits", grid="both")
    if not cut:
        empty(ax, "fewer than two committed slots")
        return
    scale = _time_axis(ax, timeline)
    clean = [i for i in cut if i.cause == "step"]
    if len(clean) > BAND_FROM:
        _band(ax, timeline, clean, scale)
        clean = []
    floor = max(1e-4, min(i.seconds for i in cut) * 0.7)
    for cause in ("collective", "step", "join", "waiting", "recovery"):
        these = [i for i in (clean if cause == "step" else cut) if i.cause == cause]
        if not these:
            continue
        loud = cause not in ("step", "collective")
        ax.scatter(
            [(i.stop - timeline.origin) / scale for i in these],
            [max(i.seconds, floor) for i in these],
            s=34 if loud else 10,
            color=CAUSES[cause],
            edgecolors="white" if loud else "none",
            linewidths=0.6,
            label=CAUSE_WORDS[cause],
            zorder=5 if loud else 3,
        )
    ax.set_yscale("log")
    ax.set_ylim(floor, max(i.seconds for i in cut) * 1.6)
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: duration(v)))
    spread = math.log10(max(i.seconds for i in cut) / floor + 1e-9)
    minor = matplotlib.ticker.LogLocator(subs=(2, 5)) if spread < 2.5 else matplotlib.ticker.NullLocator()
    ax.yaxis.set_minor_locator(minor)
    ax.yaxis.set_minor_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: duration(v)))
    ax.tick_params(axis="y", which="minor", labelsize=8, colors=MUTED, length=0)
    legend(ax, 6)


def _band(ax: Any, timeline: Timeline, clean: Sequence[folds.Interval], scale: float) -> None:
    columns = 400
    width = len(clean) / columns
    xs, low, mid, high = [], [], [], []
    for column in range(columns):
        part = clean[int(column * width) : int((column + 1) * width)]
        if not part:
            continue
        ordered = sorted(i.seconds for i in part)
        xs.append((part[len(part) // 2].stop - timeline.origin) / scale)
        low.append(ordered[int(0.05 * (len(ordered) - 1))])
        mid.append(ordered[len(ordered) // 2])
        high.append(ordered[int(0.95 * (len(ordered) - 1))])
    ax.fill_between(xs, low, high, color=BLUE, alpha=0.2, linewidth=0, label="step, 5 % to 95 %")
    ax.plot(xs, mid, color=BLUE, linewidth=1.2, label="step, median")


# ------------------------------------------------------------------------------------------------ loss


def draw_loss(ax: Any, timeline: Timeline) -> None:
    """Draws the mean loss of each step, as members logged it."""
    style(ax, "Loss of the training steps", grid="both")
    curve = folds.losses(timeline)
    if not curve:
        empty(ax, "nobody told a loss: training_step returned none, or loss.backward() was called without the trainer")
        return
    ax.plot([step for step, _ in curve], [loss for _, loss in curve], color=BLUE, linewidth=1.4)
    finite = [loss for _, loss in curve if math.isfinite(loss)]
    if finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        ax.set_yscale("log")
    ax.set_xlabel("optimizer step", color=MUTED, fontsize=9)
    ax.text(0.995, 0.93, f"last: {curve[-1][1]:.4g}", transform=ax.transAxes, ha="right", fontsize=8.5, color=INK)


# ------------------------------------------------------------------------------------------------ joins


def draw_joins(ax: Any, timeline: Timeline) -> None:
    """Draws for each newcomer how many bytes of the state came from which donor, and how many it had already."""
    rows = [j for j in folds.joins(timeline) if j.pull_done is not None]
    style(ax, "Joins: state by source")
    if not rows:
        empty(ax, "nobody joined by pulling the state")
        return
    shown = rows[-12:]
    donors = list(dict.fromkeys(node_of(d) for j in shown for d, _, _ in j.sources))
    colour = {donor: DONORS[i % len(DONORS)] for i, donor in enumerate(donors)}
    widest = max(j.nbytes + j.skipped for j in shown) or 1
    unit_name, unit = ("MiB", 1 << 20) if widest >= 1 << 20 else ("KiB", 1 << 10)
    labelled: set[str] = set()

    def bar(y: int, left: float, width: float, name: str, fill: str, **more: Any) -> None:
        ax.barh(
            y, width, left=left, height=0.56, color=fill, label=None if name in labelled else printable(name), **more
        )
        labelled.add(name)

    for y, join in enumerate(shown):
        left = 0.0
        for donor, nbytes, _ in join.sources:
            if nbytes:
                node = node_of(donor)
                bar(y, left, nbytes / unit, node, colour[node], edgecolor="white", linewidth=0.8)
                left += nbytes / unit
        if join.skipped:
            bar(y, left, join.skipped / unit, "held already", "#eef1f4", edgecolor=GREY, hatch="...", linewidth=0.5)
            left += join.skipped / unit
        text = f"{duration(join.seconds)}, {amount(join.rate)}/s"
        if join.pause > 0:
            text += f"; others waited {duration(join.pause)}"
        ax.text(left + widest / unit * 0.015, y, text, va="center", fontsize=8.5, color=INK)
    name_rows(ax, [j.node + (" (again)" if j.again else "") for j in shown])
    ax.set_xlim(0, widest / unit * 1.75)
    ax.set_xlabel(unit_name, fontsize=9, color=MUTED)
    legend(ax, 6)


# ------------------------------------------------------------------------------------------------ recoveries


def draw_recoveries(ax: Any, timeline: Timeline) -> None:
    """Draws for each death or freeze the time until it was noticed, a new view decided, and the next slot committed."""
    rows = [r for r in folds.recoveries(timeline) if r.seconds is not None]
    style(ax, "Recovery: from the blow to the next commit on all survivors")
    if not rows:
        empty(ax, "no death and no freeze")
        return
    shown = rows[-12:]
    widest = max(r.seconds or 0.0 for r in shown) or 1e-3
    scale, unit = (1e-3, "ms") if widest < 1 else (1.0, "s")
    labelled: set[str] = set()
    for y, r in enumerate(shown):
        assert r.recovered is not None
        noticed = min(r.noticed if r.noticed is not None else r.at, r.recovered)
        decided = min(max(r.decided if r.decided is not None else noticed, noticed), r.recovered)
        parts = (
            (r.at, noticed, "unnoticed", "#d9dee4"),
            (noticed, decided, "noticed, deciding", ORANGE),
            (decided, r.recovered, "redo / hand-on", GREEN),
        )
        for start, stop, name, fill in parts:
            label = None if name in labelled else name
            labelled.add(name)
            ax.barh(y, (stop - start) / scale, left=(start - r.at) / scale, height=0.56, color=fill, label=label)
        ax.text(
            ((r.seconds or 0.0) + widest * 0.015) / scale,
            y,
            f"{duration(r.seconds or 0.0)}, {HOW[r.how]}",
            va="center",
            fontsize=8.5,
            color=INK,
        )
    name_rows(ax, [f"{r.node}: {r.kind}" + (f" in {r.phase}" if r.phase else "") for r in shown])
    ax.set_xlim(0, widest / scale * 1.35)
    ax.set_xlabel(unit, fontsize=9, color=MUTED)
    legend(ax, 3)


# ------------------------------------------------------------------------------------------------ goodput


def draw_goodput(ax: Any, timeline: Timeline) -> None:
    """Draws one bar: the useful share of the job's time, and the causes of the rest."""
    good = folds.goodput(timeline)
    style(ax, f"Goodput {good.share:.1%}")
    if not good.total:
        empty(ax, "fewer than two committed slots")
        return
    parts = [
        ("useful", good.useful, BLUE),
        ("joins", good.lost["join"], ORANGE),
        ("recovery", good.lost["recovery"], RED),
        ("below min_nodes", good.lost["waiting"], PINK),
    ]
    left = 0.0
    for name, seconds, colour in parts:
        if seconds <= 0 and name != "useful":
            continue
        share = seconds / good.total
        ax.barh(0, share, left=left, height=0.5, color=colour, label=f"{name} {duration(seconds)} ({share:.1%})")
        left += share
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.4, 0.4)
    ax.set_yticks([])
    ax.xaxis.set_major_formatter(matplotlib_module().ticker.PercentFormatter(1.0))
    legend(ax, 4)


# ------------------------------------------------------------------------------------------------ sheets


def heights(timeline: Timeline) -> dict[str, float]:
    """Returns the height of each picture in inches, which depends on its number of rows."""
    joins = min(12, sum(j.pull_done is not None for j in folds.joins(timeline)))
    recoveries = min(12, len(folds.recoveries(timeline)))
    return {
        "members": 1.1 + 0.36 * max(2, len(timeline.nodes())),
        "steps": 2.9,
        "loss": 2.6 if timeline.losses else 0.9,
        "joins": 1.15 + 0.36 * max(1, joins),
        "recoveries": 1.15 + 0.36 * max(1, recoveries),
        "goodput": 1.15,
    }


DRAWERS: dict[str, Callable[[Any, Timeline], None]] = {
    "members": draw_members,
    "steps": draw_steps,
    "loss": draw_loss,
    "joins": draw_joins,
    "recoveries": draw_recoveries,
    "goodput": draw_goodput,
}


def picture(name: str, timeline: Timeline, *, width: float = 11.0) -> bytes:
    """Returns one picture alone, as PNG bytes; `name` is a key of `DRAWERS`."""
    sheet = figure(width, heights(timeline)[name])
    DRAWERS[name](sheet.subplots(), timeline)
    return png(sheet)


def overview(timeline: Timeline, *, width: float = 12.0) -> bytes:
    """Returns all pictures below each other in one PNG image, as bytes."""
    return one_sheet(timeline, heights(timeline), DRAWERS, width)


def one_sheet(
    facts: Facts, rows: Mapping[str, float], drawers: Mapping[str, Callable[[Any, Facts], None]], width: float
) -> bytes:
    """Returns one PNG image with pictures below each other; `rows` maps each picture's name to its height in inches."""
    sheet = figure(width, sum(rows.values()))
    sheet.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    axes = sheet.subplots(len(rows), 1, gridspec_kw={"height_ratios": list(rows.values())})
    for ax, name in zip(axes, rows, strict=True):
        drawers[name](ax, facts)
    return png(sheet)
