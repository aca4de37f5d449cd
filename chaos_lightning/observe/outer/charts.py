"""Draws pictures of an outer job: clusters over time, rounds, versions, loss. See `charts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos_lightning.machine.terminal import printable
from chaos_lightning.machine.units import duration
from chaos_lightning.observe import charts
from chaos_lightning.observe.charts import BLUE, DONORS, GREEN, GREY, INK, ORANGE, PINK, RED, SKY
from chaos_lightning.observe.outer.fold import FrozenPush
from chaos_lightning.observe.outer.tables import OuterFacts, cluster_of
from chaos_lightning.outer.rules.types import PushAnswer

_ANSWERS = {
    PushAnswer.ACCEPTED: ("o", GREEN, "push accepted"),
    PushAnswer.REJECTED: ("X", RED, "rejected"),
    PushAnswer.VOID: ("D", ORANGE, "void"),
}


def _names(facts: OuterFacts) -> list[str]:
    return list(dict.fromkeys(cluster_of(row.name) for row in facts.clusters))


def _time(ax: Any, facts: OuterFacts) -> float:
    return charts.time_axis(ax, facts.seconds, "the first word")


def draw_clusters(ax: Any, facts: OuterFacts) -> None:
    """Draws one row per cluster: the lives of its incarnations, when pushes were frozen, and when training waited."""
    charts.style(ax, "Clusters")
    names = _names(facts)
    if not names:
        charts.empty(ax, "no cluster in this log")
        return
    charts.name_rows(ax, names)
    scale = _time(ax, facts)
    place = {name: i for i, name in enumerate(names)}
    given = {str(push): one.answer for push, one in facts.chain.standing.items()}
    used: set[PushAnswer] = set()
    waited = False
    for row in facts.clusters:
        y, log = place[cluster_of(row.name)], facts.run.clusters.get(row.name)
        end = row.ended if row.ended is not None else facts.run.stop
        bar = ((row.joined - facts.origin) / scale, (end - row.joined) / scale)
        ax.broken_barh([bar], (y - 0.3, 0.6), facecolors="#cfe3f3", zorder=3)
        if row.ended is not None and facts.chain.ended is None:
            ax.plot([(end - facts.origin) / scale], [y], marker="o", color=INK, markersize=6, zorder=7)
        if log is None:
            continue
        for one in log.adoptions:
            if one.waited_s > 0:
                waited = True
                wait = ((one.t - one.waited_s - facts.origin) / scale, one.waited_s / scale)
                ax.broken_barh([wait], (y - 0.3, 0.6), facecolors=PINK, zorder=4)
        for push in log.pushes.values():
            answer = given.get(push.push)
            if answer is not None:
                used.add(answer)
                _tick(ax, push, answer, y, facts.origin, scale)
    matplotlib = charts.matplotlib_module()
    handles = [matplotlib.patches.Patch(facecolor="#cfe3f3", label="there")]
    if waited:
        handles.append(matplotlib.patches.Patch(facecolor=PINK, label="training waits"))
    handles += [charts.mark_handle(matplotlib.lines, *_ANSWERS[answer]) for answer in _ANSWERS if answer in used]
    charts.legend(ax, len(handles), handles)


def _tick(ax: Any, push: FrozenPush, answer: PushAnswer, y: int, origin: float, scale: float) -> None:
    shape, colour, _ = _ANSWERS[answer]
    size = 6 if answer is PushAnswer.ACCEPTED else 9
    x = (push.t - origin) / scale
    ax.plot([x], [y], marker=shape, color=colour, markersize=size, zorder=6, mec="white", mew=0.6)


def draw_rounds(ax: Any, facts: OuterFacts) -> None:
    """Draws how long each round was open, and the staleness of each push in it."""
    rounds = [row for row in facts.versions if row.kind == "round"]
    charts.style(ax, "Rounds: window, and staleness of their pushes", grid="both")
    if not rounds:
        charts.empty(ax, "no round in this log")
        return
    scale = _time(ax, facts)
    timed = [row for row in rounds if row.window_s is not None]
    ax.plot(
        [(row.t - facts.origin) / scale for row in timed], [row.window_s for row in timed],
        color=BLUE, linewidth=1.2, marker=".", label="window",
    )  # fmt: skip
    ax.yaxis.set_major_formatter(
        charts.matplotlib_module().ticker.FuncFormatter(lambda v, _: duration(v) if v else "0")
    )
    ax.set_ylim(bottom=0)
    other = ax.twinx()
    other.set_frame_on(False)
    points = [((row.t - facts.origin) / scale, stale) for row in rounds for _, _, stale in row.accepted]
    other.scatter([x for x, _ in points], [y for _, y in points], s=18, color=ORANGE, label="staleness (versions)")
    other.set_ylim(-0.3, max([3, *(y for _, y in points)]) + 0.5)
    other.yaxis.set_major_locator(charts.matplotlib_module().ticker.MaxNLocator(4, integer=True))
    other.tick_params(colors=ORANGE, labelsize=9, length=0)
    charts.legend(ax, 2, [*ax.get_lines(), *other.collections])


def draw_versions(ax: Any, facts: OuterFacts) -> None:
    """Draws when each version was decided, computed by all followers, and durable; and the rollbacks."""
    rows = facts.versions
    charts.style(ax, "Versions: decided, computed, durable", grid="both")
    if not rows:
        charts.empty(ax, "no version in this log")
        return
    scale = _time(ax, facts)

    def line(points: list[tuple[float, int]], colour: str, label: str) -> None:
        points.sort()
        xs, ys = [(t - facts.origin) / scale for t, _ in points], [number for _, number in points]
        ax.step(xs, ys, where="post", color=colour, linewidth=1.4, label=label)

    ax.yaxis.set_major_locator(charts.matplotlib_module().ticker.MaxNLocator(5, integer=True))
    line([(row.t, row.version.number) for row in rows], BLUE, "decided")
    line([(row.t + row.computed_s, row.version.number) for row in rows if row.computed_s is not None], SKY, "computed")
    line([(row.t + row.durable_s, row.version.number) for row in rows if row.durable_s is not None], GREEN, "durable")
    back = [row for row in rows if row.kind == "rollback"]
    if back:
        xs, ys = [(row.t - facts.origin) / scale for row in back], [row.version.number for row in back]
        ax.scatter(xs, ys, marker="X", s=70, color=RED, edgecolors="white", label="rollback", zorder=6)
    for leader in facts.run.leaders[1:]:
        ax.axvline((leader.t - facts.origin) / scale, color=GREY, linewidth=1.0, linestyle=":")
    charts.legend(ax, 4)


def draw_loss(ax: Any, facts: OuterFacts) -> None:
    """Draws the loss of the inner steps, one line per cluster."""
    charts.style(ax, "Loss of inner steps", grid="both")
    colours = {name: DONORS[i % len(DONORS)] for i, name in enumerate(_names(facts))}
    shown: set[str] = set()
    scale = 1.0
    for name, log in facts.run.clusters.items():
        points = [(one.t, one.loss) for one in log.inner if one.loss is not None]
        if not points:
            continue
        scale = scale if shown else _time(ax, facts)
        cluster = cluster_of(name)
        label = None if cluster in shown else printable(cluster)
        shown.add(cluster)
        every = max(1, len(points) // 2000)
        xs, ys = [(t - facts.origin) / scale for t, _ in points[::every]], [loss for _, loss in points[::every]]
        ax.plot(
            xs, ys, color=colours.get(cluster, BLUE), linewidth=1.2, label=label, marker="." if len(xs) < 50 else ""
        )
    if not shown:
        charts.empty(ax, "no cluster told its loss")
        return
    charts.legend(ax, min(6, len(shown)))


OUTER_DRAWERS: dict[str, Callable[[Any, OuterFacts], None]] = {
    "clusters": draw_clusters,
    "rounds": draw_rounds,
    "versions": draw_versions,
    "loss": draw_loss,
}


def outer_heights(facts: OuterFacts) -> dict[str, float]:
    """Returns the height of each picture in inches."""
    return {"clusters": 1.1 + 0.36 * max(2, len(_names(facts))), "rounds": 2.6, "versions": 2.6, "loss": 2.9}


def outer_picture(name: str, facts: OuterFacts, *, width: float = 11.0) -> bytes:
    """Returns one picture alone, as PNG bytes; `name` is a key of `OUTER_DRAWERS`."""
    sheet = charts.figure(width, outer_heights(facts)[name])
    OUTER_DRAWERS[name](sheet.subplots(), facts)
    return charts.png(sheet)


def outer_overview(facts: OuterFacts, *, width: float = 12.0) -> bytes:
    """Returns all pictures below each other in one PNG image, as bytes."""
    return charts.one_sheet(facts, outer_heights(facts), OUTER_DRAWERS, width)
