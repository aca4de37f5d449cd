"""Folds the events of an outer job into one log per process.

Theory of operation. `OuterRun` takes the events of one outer job in (`observe/jobs.py` tells which these are), one
after the other, and holds what leaders, followers and clusters say, without comparing them: that is for `audit.py`.

A follower's file begins with `follower_started`. A cluster's events name the incarnation, or the push and so the
incarnation, or stand in the file of who was welcomed as one.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos_lightning.events.reader import Record
from chaos_lightning.events.registry import known
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.jobs import SERVER_GOES
from chaos_lightning.observe.outer.entries import ToldEntry, read_entry
from chaos_lightning.observe.timeline import NoteFact
from chaos_lightning.outer.rules.types import Removed

# ------------------------------------------------------------------------------------------------ accounts


@dataclass(slots=True)
class LeaderTerm:
    """Term during which a process was the leader."""

    source: str
    t: float
    endpoint: str
    job: str
    term: int
    position: int
    store: str
    ended: float | None = None
    reason: str = ""
    failed: bool = False


class SavedShard(NamedTuple):
    """Shard of a version that a follower saved (`version_saved`), or whose file it found intact when it started."""

    t: float
    version: str
    digest: str
    nbytes: int
    seconds: float


class StateStep(NamedTuple):
    """Event at which a follower's state reached a version; `how` is "started", "computed" or "loaded"."""

    t: float
    how: str
    version: str
    seconds: float
    source: str


@dataclass(slots=True)
class FollowerLog:
    """Log of one follower, over all its restarts.

    Attributes:
        name: Name of the follower.
        endpoint: HOST:PORT of its data connections.
        last: Wall time of its last event, s.
        states: Steps of its state in order.
        saved: Saved shards in order.
        staged: Each staging of a push, by push: time, bytes, seconds that it took.
        damaged: Versions whose file differed from what the chain says.
        trouble: Trouble that keeps it from saving now; "" for none.
    """

    name: str
    endpoint: str = ""
    last: float = 0.0
    states: list[StateStep] = field(default_factory=list)
    saved: list[SavedShard] = field(default_factory=list)
    staged: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    trouble: str = ""


class FrozenPush(NamedTuple):
    """Push that was frozen: a `push_frozen` event."""

    t: float
    push: str
    base: str
    steps: int
    samples: int
    nbytes: int
    seconds: float
    """Seconds from the instant that fixed the push's content to its line."""
    manifest: str = ""


class HeardAnswer(NamedTuple):
    """Answer to a push that a cluster heard: a `push_answered` event."""

    t: float
    push: str
    answer: str
    version: str
    reason: str


class Adoption(NamedTuple):
    """Version that a cluster adopted: a `version_adopted` event."""

    t: float
    version: str
    outright: bool
    steps: int
    waited_s: float
    progress_samples: int
    progress_steps: int


class Fetch(NamedTuple):
    """Version that a cluster fetched: a `version_fetched` event."""

    t: float
    version: str
    nbytes: int
    seconds: float


class TookLast(NamedTuple):
    """Last version of the job as a cluster took it: a `last_taken` event."""

    t: float
    version: str
    steps: int


class InnerSteps(NamedTuple):
    """Inner steps that a cluster trained: an `inner_steps` event."""

    t: float
    steps: int
    samples: int
    loss: float | None


Happening = FrozenPush | HeardAnswer | Adoption | Fetch | TookLast | InnerSteps


@dataclass(slots=True)
class ClusterLog:
    """Log of one incarnation of a cluster.

    Attributes:
        name: Name of the incarnation.
        first: Wall time of its first event, s.
        last: Wall time of its last event, s.
        told: Happenings in order, by file; of an elastic cluster each rank writes while it is the first one.
        steps: Inner steps in all.
        answers: Number of times that it heard each answer.
        waited_s: Seconds that training stood still in all.
        over: Time (s) at which it was over, by its own word or the chain's; None: it is not.
        reason: Reason of its end.
        again: Whether the cluster was to come in again.
    """

    name: str
    first: float
    last: float = 0.0
    told: dict[str, list[Happening]] = field(default_factory=dict)
    steps: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    over: float | None = None
    reason: str = ""
    again: bool = False

    def take(self, source: str, one: Happening) -> None:
        """Takes in the next event of one of the incarnation's files."""
        self.told.setdefault(source, []).append(one)
        match one:
            case InnerSteps():
                self.steps += one.steps
            case HeardAnswer():
                self.answers[one.answer] = self.answers.get(one.answer, 0) + 1
            case Adoption():
                self.waited_s += one.waited_s
            case _:
                pass

    @property
    def history(self) -> list[Happening]:
        """All events of the incarnation, from all its processes, in order of time."""
        return list(heapq.merge(*self.told.values(), key=lambda one: one.t))

    @property
    def pushes(self) -> dict[str, FrozenPush]:
        """Frozen pushes by name."""
        found = (one for told in self.told.values() for one in told if isinstance(one, FrozenPush))
        return {one.push: one for one in found}

    @property
    def adoptions(self) -> list[Adoption]:
        """Adoptions in order."""
        return [one for one in self.history if isinstance(one, Adoption)]

    @property
    def inner(self) -> list[InnerSteps]:
        """Reports of inner steps, in order."""
        return [one for one in self.history if isinstance(one, InnerSteps)]

    @property
    def fetched(self) -> int:
        """Bytes of versions that the incarnation's processes fetched in total (each fetches only what it needs)."""
        return sum(one.nbytes for told in self.told.values() for one in told if isinstance(one, Fetch))


@dataclass(slots=True)
class OuterRun:
    """Events of an outer job, folded by process.

    Attributes:
        start: Wall time (s) of the first event.
        stop: Wall time (s) of the last event that is not of a server that goes.
        leaders: Terms of leaders in the order of their starts.
        entries: Entries as they were written, of all leaders.
        followers: Logs of followers by name.
        clusters: Logs of clusters by incarnation.
        streams: Whether each process has a stream to a leader, as the last leader said.
        hosts: Host on which each file was written.
        lost: Lines that did not fit on the disk, by file.
        notes: Events in words, in order.
        stray: Events of no known process, by name.
    """

    start: float = 0.0
    stop: float = 0.0
    leaders: list[LeaderTerm] = field(default_factory=list)
    entries: list[ToldEntry] = field(default_factory=list)
    followers: dict[str, FollowerLog] = field(default_factory=dict)
    clusters: dict[str, ClusterLog] = field(default_factory=dict)
    streams: dict[str, bool] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    notes: list[NoteFact] = field(default_factory=list)
    stray: dict[str, int] = field(default_factory=dict)
    _file_of: dict[str, str] = field(default_factory=dict)
    """Incarnation or follower that writes each file now."""

    def next_job(self) -> OuterRun:
        """Returns an empty run for the next job in the same folder; it remembers which process writes which file."""
        return OuterRun(_file_of=self._file_of)

    def prune(self, kept: int) -> None:
        """Drops all but the latest `kept` entries, notes and events of each file; totals stay."""
        del self.entries[:-kept], self.notes[:-kept]
        for cluster in self.clusters.values():
            for told in cluster.told.values():
                del told[:-kept]
        for follower in self.followers.values():
            del follower.states[:-kept], follower.saved[:-kept]
            follower.staged = dict(list(follower.staged.items())[-kept:])

    def take(self, r: Record) -> None:
        """Takes one event in."""
        self.start = r.t if not self.start else min(self.start, r.t)
        if r.name not in SERVER_GOES:
            self.stop = max(self.stop, r.t)
        match r.name:
            case "opened":
                self.hosts[r.source] = str(r.get("host", ""))
            case "lost":
                self.lost[r.source] = self.lost.get(r.source, 0) + f.integer(r.get("count"))
            case "entry":
                self._entry(read_entry(r))
            case "outer_leader_started" | "outer_leader_ended":
                self._leader(r)
            case "cluster_stream" | "follower_stream":
                if r.get("of"):
                    self.streams[str(r["of"])] = bool(r.get("up"))
            case "follower_started" | "version_computed" | "version_saved" | "version_loaded" | "push_staged":
                self._follower(r)
            case "push_not_fetched" | "file_damaged" | "late_leader" | "disk_trouble":
                self._follower(r)
            case "cluster_welcomed" | "push_frozen" | "push_answered" | "version_fetched" | "version_adopted":
                self._cluster(r)
            case "cluster_over" | "inner_steps" | "last_taken":
                self._cluster(r)
        event = known().get(r.name)
        if event is not None and event.note:
            who = self._file_of.get(r.source) or r.member or r.node or r.source
            self.notes.append(NoteFact(r.t, r.name, who, event.words(r.fields)))

    def _entry(self, told: ToldEntry) -> None:
        self.entries.append(told)
        if told.entry is not None and isinstance(told.entry.body, Removed):
            one = self.clusters.get(str(told.entry.body.incarnation))
            if one is not None and one.over is None:
                one.over, one.reason = told.t, told.entry.body.reason

    def _leader(self, r: Record) -> None:
        if r.name == "outer_leader_started":
            numbers = f.integer(r.get("term")), f.integer(r.get("position"))
            words = str(r.get("endpoint", "")), str(r.get("job", ""))
            self.leaders.append(LeaderTerm(r.source, r.t, *words, *numbers, str(r.get("store", ""))))
            self._file_of[r.source] = f"leader {words[0]}"
            return
        for one in reversed(self.leaders):
            if one.source == r.source and one.ended is None:
                one.ended, one.reason, one.failed = r.t, str(r.get("reason", "")), bool(r.get("failed"))
                return

    def _follower(self, r: Record) -> None:
        if r.name == "follower_started":
            self._file_of[r.source] = str(r.get("follower", ""))
        name = self._file_of.get(r.source) or r.member or r.node
        if not name:
            self.stray[r.name] = self.stray.get(r.name, 0) + 1
            return
        one = self.followers.setdefault(name, FollowerLog(name))
        one.last = r.t
        version, seconds = str(r.get("version", "")), f.number(r.get("seconds"))
        match r.name:
            case "follower_started":
                one.endpoint, one.trouble = str(r.get("endpoint", "")), ""
                one.states.append(StateStep(r.t, "started", "", 0.0, r.source))
                told = {shard.version for shard in one.saved}
                # Its predecessor may have been killed after a file was there and before it said so.
                for file, digest in zip(r.get("files") or (), r.get("digests") or (), strict=False):
                    if str(file) not in told:
                        one.saved.append(SavedShard(r.t, str(file), str(digest), 0, 0.0))
            case "version_computed" | "version_loaded":
                one.states.append(StateStep(r.t, r.name.removeprefix("version_"), version, seconds, r.source))
            case "version_saved":
                one.saved.append(
                    SavedShard(r.t, version, str(r.get("digest", "")), f.integer(r.get("nbytes")), seconds)
                )
            case "push_staged":
                one.staged.setdefault(str(r.get("push", "")), []).append((r.t, f.integer(r.get("nbytes")), seconds))
            case "file_damaged":
                one.damaged.append(version)
            case "disk_trouble":
                one.trouble = str(r.get("reason", ""))

    def _cluster(self, r: Record) -> None:
        if r.name == "cluster_welcomed":
            self._file_of[r.source] = str(r.get("incarnation", ""))
        push = str(r.get("push", ""))
        name = str(r.get("incarnation", "")) or push.rpartition("/")[0] or self._file_of.get(r.source, "")
        if not name:
            self.stray[r.name] = self.stray.get(r.name, 0) + 1
            return
        one = self.clusters.setdefault(name, ClusterLog(name, r.t))
        one.last = r.t
        if r.name == "cluster_over":
            one.over, one.reason, one.again = r.t, str(r.get("reason", "")), bool(r.get("again"))
        elif (happened := _happening(r)) is not None:
            one.take(r.source, happened)


def _happening(r: Record) -> Happening | None:
    """Returns a cluster's event as a typed value; None for other events."""

    def number(key: str) -> int:
        return f.integer(r.get(key))

    version = str(r.get("version", ""))
    match r.name:
        case "push_frozen":
            counts = number("steps"), number("samples"), number("nbytes")
            names = str(r.get("push", "")), str(r.get("base", ""))
            return FrozenPush(r.t, *names, *counts, f.number(r.get("seconds")), str(r.get("manifest", "")))
        case "push_answered":
            return HeardAnswer(r.t, str(r.get("push", "")), str(r.get("answer", "")), version, str(r.get("reason", "")))
        case "version_fetched":
            return Fetch(r.t, version, number("nbytes"), f.number(r.get("seconds")))
        case "version_adopted":
            progress = number("progress_samples"), number("progress_steps")
            waited_s = f.number(r.get("waited_s"))
            return Adoption(r.t, version, bool(r.get("outright")), number("steps"), waited_s, *progress)
        case "last_taken":
            return TookLast(r.t, version, number("steps"))
        case "inner_steps":
            loss = f.number(r.get("loss"), math.nan)
            return InnerSteps(r.t, number("steps"), number("samples"), loss if math.isfinite(loss) else None)
        case _:
            return None
