"""Draws the live board of an outer job, with clusters and followers as the rows of a board of `render.py`.

Theory of operation. `OuterBoard` takes events in as they are written and tells those of the outer job from those of
elastic clusters' members, whose rows go below. It sees no future: a leader that finds an empty chain begins another job
on the board, even where an audit would say that a store was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.events.reader import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.jobs import INNER, OUTER
from chaos_lightning.observe.outer.fold import Adoption, ClusterLog, FrozenPush, HeardAnswer, OuterRun
from chaos_lightning.observe.render import ENDED_SHOWN_S, Dashboard, Row
from chaos_lightning.outer.rules.types import Durable, PushAnswer, RolledBack, Round

KEPT = 2000
"""Least number of latest entries, and of happenings of each file, that a live board keeps."""
_RECENT = 20
"""Number of a cluster's happenings over which its pace is measured."""


@dataclass(slots=True)
class OuterBoard:
    """Live board of an outer job (see the module)."""

    run: OuterRun = field(default_factory=OuterRun)
    _outer: set[str] = field(default_factory=set)
    _inner: set[str] = field(default_factory=set)

    @property
    def there(self) -> bool:
        """Whether the logs tell of an outer job."""
        return bool(self._outer)

    def take(self, r: Record) -> bool:
        """Takes in one event; returns whether the board of members needs it, too."""
        if r.name in INNER:
            self._inner.add(r.source)
        if r.name not in OUTER:
            if r.name == "lost" and r.source in self._outer:
                self.run.take(r)
            return r.source in self._inner or r.source not in self._outer
        self._outer.add(r.source)
        if r.name == "outer_leader_started" and f.integer(r.get("position")) == 0 and self.run.entries:
            self.run = self.run.next_job()
        self.run.take(r)
        if len(self.run.entries) > 2 * KEPT:
            self.run.prune(KEPT)
        return False

    def draw(self, now: float, *, title: str, members: Dashboard | None = None, lines: int = 8) -> Dashboard:
        """Returns the board at wall time `now` (s): clusters and followers, and below them the members of elastic
        clusters.
        """
        run = self.run
        leader = run.leaders[-1] if run.leaders else None
        board = Dashboard(title, figures=_figures(run, now))
        if leader is not None and leader.ended is None:
            board.reason = f"led from {leader.endpoint} in term {leader.term}"
        for cluster in sorted(run.clusters.values(), key=lambda one: one.first):
            if cluster.over is None or now - cluster.over <= ENDED_SHOWN_S:
                board.rows.append(_cluster_row(cluster, now))
        for follower in sorted(run.followers.values(), key=lambda one: one.name):
            at = next((step.version for step in reversed(follower.states) if step.version), "no version")
            away = run.streams.get(follower.name) is False
            state = "waiting" if follower.trouble else "silent" if away else "follower"
            remark = f"stands at {at}" + (f"; disk: {follower.trouble}" if follower.trouble else "")
            board.rows.append(Row(follower.name, None, state, None, max(0.0, now - follower.last), remark=remark))
        if leader is not None and leader.ended is not None and leader.failed:
            board.waiting = f"no leader: {leader.reason}"
        words = [(n.t, n.member, n.text) for n in run.notes[-lines:]] + _decided(run, lines)
        board.lines = [(now - t, who, text) for t, who, text in sorted(words)[-lines:]]
        if members is not None and members.rows:
            board.rows += members.rows
            board.links = members.links
            board.lines = sorted([*board.lines, *members.lines], reverse=True)[-lines:]
        return board


def _cluster_row(log: ClusterLog, now: float) -> Row:
    told = log.history
    recent = log.inner[-_RECENT:]
    steps = sum(one.steps for one in recent[1:])
    base = next((one for one in reversed(told) if isinstance(one, Adoption)), None)
    pushes = next((one for one in reversed(told) if isinstance(one, FrozenPush | HeardAnswer)), None)
    remark = [base.version if base is not None else "no version"]
    if isinstance(pushes, FrozenPush):
        remark.append(f"{pushes.push.rpartition('/')[2]} open for {duration(max(0.0, now - pushes.t))}")
    elif pushes is not None:
        remark.append(f"push {pushes.push.rpartition('/')[2]} {pushes.answer}")
    if rejected := log.answers.get(PushAnswer.REJECTED.value):
        remark.append(f"{rejected} rejected")
    loss = next((one.loss for one in reversed(recent) if one.loss is not None), None)
    if loss is not None:
        remark.append(f"loss {loss:.4g}")
    there = (log.over if log.over is not None else now) - log.first
    over = log.over is not None
    return Row(
        log.name,
        None,
        "left" if over else "training" if base is not None else "joining",
        log.steps or None,
        None if over else max(0.0, now - log.last),
        step_time_s=(recent[-1].t - recent[0].t) / steps if steps else None,
        wait_share=min(1.0, log.waited_s / there) if there > 0 and base is not None else None,
        remark=log.reason if over else ", ".join(remark),
    )


def _figures(run: OuterRun, now: float) -> list[tuple[str, str]]:
    made = next((told for told in reversed(run.entries) if told.entry is not None and told.entry.version.number), None)
    if made is None or made.entry is None:
        return [("version", "-")]
    figures = [("version", str(made.entry.version)), ("decided", f"{duration(max(0.0, now - made.t))} ago")]
    bodies = [told.entry.body for told in reversed(run.entries) if told.entry is not None]
    mark = next((body for body in bodies if isinstance(body, Durable)), None)
    figures.append(("durable", str(mark.version) if mark is not None else "none"))
    decided = next((body for body in bodies if isinstance(body, Round)), None)
    if decided is not None:
        figures.append(("samples", f"{decided.counters.samples:,}"))
    there = sum(one.over is None for one in run.clusters.values())
    return [*figures, ("clusters", str(there))]


def _decided(run: OuterRun, lines: int) -> list[tuple[float, str, str]]:
    """Returns the latest rounds and rollbacks as (time, kind, text), newest first."""
    found: list[tuple[float, str, str]] = []
    for told in reversed(run.entries):
        if len(found) == lines or told.entry is None:
            break
        match told.entry.body:
            case Round() as body:
                found.append((told.t, "round", f"{told.entry.version}: {body.reason}"))
            case RolledBack() as rolled:
                found.append((told.t, "rollback", f"{told.entry.version}: {rolled.reason}"))
            case _:
                pass
    return found
