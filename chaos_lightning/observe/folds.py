"""Computes step times, joins, recoveries, goodput and samples from a timeline, in pure functions (folds).

Theory of operation. The job advances from commit to commit, so the time between two neighbouring commits is the unit
that everything is booked on. An interval in which nothing happened is a *clean* step; the median of the clean ones
under the same number of contributors is the *usual* step time. An interval in which somebody's state was pulled, a
death was recovered, or the job waited below its minimum is booked as one usual step of useful work plus, for the
rest, a loss to that cause. What else makes a step slow (a busy machine) is nobody's fault here and counts as useful.
Goodput is useful seconds over all seconds. Durations come from the members' monotonic clocks, so the skew of wall
clocks between machines cannot enter them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from chaos_lightning.observe.fields import Stream, node_of
from chaos_lightning.observe.spans import Span, Spans, intersect, merge, overlaps, size, subtract
from chaos_lightning.observe.timeline import FREEZES, KILLS, Life, LossFact, ProgressFact, SlotFact, Timeline

T = TypeVar("T")
_GOOD_ENDS = ("left", "finished")
LOSSES_READ = 500
LOSS_FRESH_S, LOSS_FRESH_STEPS = 5.0, 20
"""Seconds and steps after both of which a member's loss is outdated: a member tells its loss once in a second or in ten
steps, whichever is longer.
"""
STEP, COLLECTIVE, JOIN, RECOVERY, WAITING = "step", "collective", "join", "recovery", "waiting"


@dataclass(slots=True)
class Interval:
    """Time from one committed slot to the next, with its cause."""

    slot: SlotFact
    """Slot that ended the interval."""
    start: float
    stop: float
    """Wall times (s) of the interval's start and end."""
    seconds: float
    """Seconds by members' monotonic clocks."""
    cause: str
    """Cause on which the interval is booked: "step", "collective", "join", "recovery" or "waiting"."""
    lost: float = 0.0
    """Seconds beyond one usual step, for the last three causes."""


@dataclass(frozen=True, slots=True)
class Join:
    """Join of one newcomer; wall times in s, None for what has not happened yet."""

    member: str
    node: str
    again: bool
    """Whether the node had been a member before."""
    born: float
    pull_done: float | None
    contributed: float | None
    """Time of the first slot that the newcomer contributed to."""
    sources: tuple[tuple[str, int, float], ...]
    """Donors as (donor, bytes, seconds), most bytes first."""
    nbytes: int
    skipped: int
    seconds: float
    """Seconds of the state transfer."""
    pause: float
    """Seconds that the others lost to the join."""
    way: str = ""
    """Way in which the newcomer came in: "replay" or "pause"."""
    why: str = ""
    """Reason for this way."""
    replayed: int = 0
    """Number of the others' steps that the newcomer applied before it came in."""
    unfinished: ProgressFact | None = None
    """Progress of the transfer that was under way when this newcomer was last heard of; None: the newcomer contributed,
    or no transfer was under way.
    """

    @property
    def rate(self) -> float:
        """Bytes per second of the transfer."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Recovery from a death or freeze, until all survivors have committed the next slot; wall times in s."""

    member: str
    node: str
    kind: str
    """Kind of the injected fault, or "death" when the cause came from outside."""
    phase: str
    at: float
    """Time at which an injected fault struck, or a death was first noticed."""
    noticed: float | None
    decided: float | None
    """Time of the first view without the victim."""
    resumed: float | None
    """Time at which the first survivor held the next slot."""
    recovered: float | None
    """Time at which all survivors held that slot; None if the log ends before."""
    seq: int | None
    """Number of that slot."""
    survivors: int
    how: str
    """Way of the recovery: "hand-on", "redo", "next" (nothing was open) or "stayed" (the victim thawed in time)."""
    waited: float = 0.0
    """Seconds of the recovery in which members were told to wait, as for min_nodes."""

    @property
    def seconds(self) -> float | None:
        """Seconds from the death or freeze until all survivors had committed the next slot."""
        return None if self.recovered is None else self.recovered - self.at


@dataclass(frozen=True, slots=True)
class GoodputAccount:
    """Account of the job's time in seconds: the useful part, and what joins, recoveries and waiting cost."""

    total: float
    useful: float
    lost: dict[str, float]
    """Seconds by cause: "join", "recovery", "waiting"."""
    usual: float
    """Usual step time over the whole run."""
    steps: int
    samples: int

    @property
    def share(self) -> float:
        """Useful part of the time, 0 to 1 (1 for an empty run)."""
        return self.useful / self.total if self.total > 0 else 1.0


@dataclass(slots=True)
class SampleUse:
    """Samples used of one stream in one epoch."""

    used: int = 0
    """Number of positions, counted as often as they were used."""
    distinct: int = 0
    twice: Spans = ()
    """Positions used more than once."""
    length: int | None = None

    @property
    def complete(self) -> bool | None:
        """Whether every sample of the epoch was used; None if the epoch's length is not in the log."""
        return None if self.length is None else self.distinct == self.length


def _once(fold: Callable[[Timeline], T]) -> Callable[[Timeline], T]:
    """Caches a fold's result until the timeline takes in another event, since a report page asks for it again and
    again.
    """

    @functools.wraps(fold)
    def kept(timeline: Timeline) -> T:
        if fold.__name__ not in timeline.folded:
            timeline.folded[fold.__name__] = fold(timeline)
        found: T = timeline.folded[fold.__name__]
        return found

    return kept


# ------------------------------------------------------------------------------------------------ step times


def _between(before: SlotFact, after: SlotFact) -> float:
    """Returns the seconds from one slot's commit to the next, as the median over members that committed both (monotonic
    clocks).
    """
    both = [after.commits[m].mono - before.commits[m].mono for m in after.commits if m in before.commits]
    both = [x for x in both if x >= 0]
    return statistics.median(both) if both else max(0.0, after.first - before.first)


@_once
def intervals(timeline: Timeline) -> list[Interval]:
    """Cuts the run at its commits and returns the intervals, each with its cause (step, join, recovery, waiting)."""
    chain = timeline.chain()
    pulls = [
        (p.started, p.done)
        for life in timeline.lives.values()
        for p in life.pulls
        if p.done is not None and life.role != "founder"
    ]
    recovered = [(r.at, r.resumed) for r in recoveries(timeline) if r.resumed is not None]
    waits = _waits(timeline)

    def touches(windows: Sequence[tuple[float, float]], start: float, stop: float) -> bool:
        return any(a < stop and b > start for a, b in windows)

    cut = []
    for before, after in itertools.pairwise(chain):
        start, stop = before.first, after.first
        cause = STEP if after.kind == "step" else COLLECTIVE
        if touches(waits, start, stop):
            cause = WAITING
        elif touches(recovered, start, stop):
            cause = RECOVERY
        elif touches(pulls, start, stop):
            cause = JOIN
        cut.append(Interval(after, start, stop, _between(before, after), cause))
    _book_losses(cut)
    return cut


def _book_losses(cut: Sequence[Interval]) -> None:
    """Sets `lost` of joins, recoveries and waits: the time beyond the usual step with as many contributors, or else
    beyond the usual step.
    """
    clean: dict[int, list[float]] = defaultdict(list)
    for interval in cut:
        if interval.cause == STEP:
            clean[len(interval.slot.contributors)].append(interval.seconds)
    usual = {n: statistics.median(some) for n, some in clean.items() if len(some) >= 5}
    of_all = statistics.median([x for some in clean.values() for x in some]) if clean else 0.0
    for interval in cut:
        if interval.cause in (JOIN, RECOVERY, WAITING):
            slot = interval.slot
            expected = usual.get(len(slot.contributors), of_all) if slot.kind == "step" else 0.0
            interval.lost = max(0.0, interval.seconds - expected)


def _waits(timeline: Timeline) -> list[tuple[float, float]]:
    """Returns the times (from, to) at which at least one member had to wait because there were fewer than min_nodes."""
    windows: list[tuple[float, float]] = []
    waiting: dict[str, float] = {}
    commits = sorted(s.first for s in timeline.slots.values())
    for t, member, begins in sorted(timeline.waits):
        if begins:
            waiting.setdefault(member, t)
        elif member in waiting:
            windows.append((waiting.pop(member), t))
    for t in waiting.values():  # nobody said that it was over: the next commit does
        windows.append((t, next((c for c in commits if c > t), timeline.stop)))
    return windows


# ------------------------------------------------------------------------------------------------ joins


@_once
def joins(timeline: Timeline) -> list[Join]:
    """Returns the joins of all members that pulled the state from the running job, in order of their start; founders do
    not count.
    """
    first: dict[str, float] = {}
    for slot in timeline.chain():
        for member in slot.who:
            first.setdefault(member, slot.first)
    cut = intervals(timeline)
    seen: set[str] = set()
    found: list[Join] = []
    for life in sorted(timeline.lives.values(), key=lambda x: x.born):
        again = life.node in seen
        seen.add(life.node)
        if life.role == "founder" or (life.role != "joiner" and not life.pulls):
            continue
        done = [p for p in life.pulls if p.done is not None]
        pulling = life.pulls and life.pulls[-1].done is None
        pause = sum(
            i.lost
            for i in cut
            if i.cause == JOIN and any(p.started < i.stop and (p.done or timeline.stop) > i.start for p in life.pulls)
        )
        sources: dict[str, tuple[int, float]] = {}
        for pull in life.pulls:
            for donor, (count, seconds) in pull.sources.items():
                old = sources.get(donor, (0, 0.0))
                sources[donor] = (old[0] + count, old[1] + seconds)
        found.append(
            Join(
                member=life.member,
                node=life.node,
                again=again,
                born=life.born,
                pull_done=done[-1].done if done else None,
                contributed=first.get(life.member),
                sources=tuple(sorted(((d, n, s) for d, (n, s) in sources.items()), key=lambda x: (-x[1], x[0]))),
                nbytes=sum(p.nbytes for p in life.pulls),
                skipped=sum(p.skipped for p in done),
                seconds=sum(p.seconds for p in done),
                pause=pause,
                way=life.way,
                why=life.why_way,
                replayed=life.replayed,
                unfinished=life.pulls[-1].progress if pulling and life.member not in first else None,
            )
        )
    return found


# ------------------------------------------------------------------------------------------------ recoveries


@_once
def recoveries(timeline: Timeline) -> list[RecoveryTimes]:
    """Returns the recovery from each injected kill or freeze and from each observed death, in order of time."""
    chain = timeline.chain()
    found: list[RecoveryTimes] = []
    explained: set[str] = set()
    for fault in timeline.faults:
        if fault.kind not in KILLS | FREEZES:
            continue
        explained.add(fault.member)
        life = timeline.lives.get(fault.member)
        if life is None or life.joined is None:
            continue
        until = fault.t + fault.seconds if fault.kind in FREEZES else None
        found.append(_recovery(timeline, chain, life, fault.kind, fault.phase, fault.t, until))
    for member, t in timeline.deaths.items():
        life = timeline.lives.get(member)
        if member not in explained and life is not None and life.joined is not None and life.end not in _GOOD_ENDS:
            found.append(_recovery(timeline, chain, life, "death", "", _noticed(timeline, member, t), None))
    waits = _waits(timeline)
    found = [replace(r, waited=_overlap(waits, r.at, r.recovered)) for r in found]
    return sorted(found, key=lambda r: r.at)


def _noticed(timeline: Timeline, member: str, death: float) -> float:
    """Returns when the suspicion began (wall time, s) that led to declaring the member dead; cleared suspicions do not
    count.
    """
    alive = max((s.commits[member].t for s in timeline.slots.values() if member in s.commits), default=0.0)
    return max((t for t in timeline.suspects.get(member, ()) if alive < t <= death), default=death)


def _overlap(windows: Sequence[tuple[float, float]], start: float, stop: float | None) -> float:
    """Returns how many seconds from start to stop lie in at least one of the given periods; 0 if stop is None."""
    total, at = 0.0, start
    for begin, end in sorted(windows):
        end = min(end, start if stop is None else stop)
        total += max(0.0, end - max(begin, at))
        at = max(at, end)
    return total


def _recovery(
    timeline: Timeline, chain: list[SlotFact], life: Life, kind: str, phase: str, at: float, thaw: float | None
) -> RecoveryTimes:
    member = life.member
    handed = {seq for t, seq in timeline.hand_ons if t >= at}
    redone = {seq for t, seq in timeline.redos if t >= at}
    without = [v.t for v in timeline.views.values() if v.t >= at and v.members and member not in v.members]
    told = (*timeline.suspects.get(member, ()), timeline.deaths.get(member, 0.0))
    noticed = [t for t in told if t >= at - 0.001]
    after: SlotFact | None = None
    how = "next"
    for slot in chain:
        if slot.complete <= at:
            continue
        if member not in slot.who:
            after, how = slot, "redo" if slot.seq in redone else "next"
            break
        if slot.seq in handed:
            after, how = slot, "hand-on"
            break
        if thaw is not None and slot.first >= thaw and member in slot.commits:
            after, how = slot, "stayed"
            break
    held = {} if after is None else {m: c.t for m, c in after.commits.items() if m != member or how == "stayed"}
    return RecoveryTimes(
        member=member,
        node=life.node or node_of(member),
        kind=kind,
        phase=phase,
        at=at,
        noticed=min(noticed, default=None),
        decided=None if how == "stayed" else min(without, default=None),
        resumed=min((t for t in held.values() if t > at), default=None),
        recovered=max(held.values(), default=None),
        seq=None if after is None else after.seq,
        survivors=0 if after is None else sum(m != member for m in after.who),
        how=how,
    )


# ------------------------------------------------------------------------------------------------ totals


@_once
def goodput(timeline: Timeline) -> GoodputAccount:
    """Divides the time between the first and the last commit into useful and lost time."""
    cut = intervals(timeline)
    lost = {JOIN: 0.0, RECOVERY: 0.0, WAITING: 0.0}
    for interval in cut:
        if interval.cause in lost:
            lost[interval.cause] += interval.lost
    total = sum(i.seconds for i in cut)
    chain = timeline.chain()
    clean = [i.seconds for i in cut if i.cause == STEP]
    return GoodputAccount(
        total=total,
        useful=total - sum(lost.values()),
        lost=lost,
        usual=statistics.median(clean) if clean else 0.0,
        steps=sum(s.kind == "step" for s in chain),
        samples=sum(use.distinct for use in samples(timeline).values()),
    )


@_once
def samples(timeline: Timeline) -> dict[Stream, SampleUse]:
    """Returns the sample positions of each stream and epoch that the committed steps used.

    What members say they used themselves counts; where a contributor died before it could say so, the growth of the
    header's ledger tells its part. A job that went on from a checkpoint takes back what came after it.
    """
    used: dict[Stream, list[tuple[int, int]]] = defaultdict(list)
    before: dict[Stream, Spans] = {}
    last = 0
    for slot in timeline.chain():
        if slot.seq <= last:
            before = _resumed_at(slot)
            for key in used:
                used[key] = [x for span in used[key] for x in intersect((span,), before.get(key, ()))]
        last = slot.seq
        for key, some in _used(slot, before).items():
            used[key].extend(some)
        before |= slot.ledger
    result: dict[Stream, SampleUse] = {}
    for key, some in used.items():
        merged = merge(some)
        result[key] = SampleUse(size(some), size(merged), overlaps(some), timeline.epochs.get(key))
    return dict(sorted(result.items(), key=lambda x: (x[0][1], x[0][0])))


def losses(timeline: Timeline, bins: int = 200) -> list[tuple[float, float]]:
    """Returns (step, mean loss) pairs from members' logs, weighted by samples, averaged to at most `bins` points; NaN
    for a diverged loss.

    A job that went on from a checkpoint takes back what came after it, so the later word on a step counts.
    """
    told: list[LossFact] = []
    reached: dict[str, int] = {}
    for fact in sorted(timeline.losses, key=lambda fact: fact.t):
        if fact.step < reached.get(fact.member, 0):
            told = [before for before in told if before.step < fact.step]
        reached[fact.member] = fact.step
        told.append(fact)
    if not told:
        return []
    first = min(fact.step for fact in told)
    width = max(1.0, (max(fact.step for fact in told) - first + 1) / bins)
    parts: dict[int, list[LossFact]] = defaultdict(list)
    for fact in told:
        parts[int((fact.step - first) / width)].append(fact)
    return [(statistics.mean(fact.step for fact in part), _mean_loss(part)) for _, part in sorted(parts.items())]


def latest_loss(timeline: Timeline) -> float | None:
    """Returns the mean of the members' latest losses, weighted by samples; None if no member has logged one lately."""
    last = {fact.member: fact for fact in timeline.losses[-LOSSES_READ:]}
    if not last:
        return None
    newest = max(last.values(), key=lambda fact: fact.t)
    return _mean_loss(
        [
            fact
            for fact in last.values()
            if newest.t - fact.t < LOSS_FRESH_S or abs(newest.step - fact.step) < LOSS_FRESH_STEPS
        ]
    )


def _mean_loss(facts: Sequence[LossFact]) -> float:
    return sum(fact.loss * fact.weight for fact in facts) / sum(fact.weight for fact in facts)


def samples_since_first(slots: Sequence[SlotFact]) -> int:
    """Returns the number of samples that consecutive slots used, without those of the first slot."""
    pairs = itertools.pairwise(slots)
    return sum(size(merge(spans)) for before, slot in pairs for spans in _used(slot, before.ledger).values())


def _used(slot: SlotFact, before: Mapping[Stream, Spans]) -> dict[Stream, list[Span]]:
    """Returns the positions that a slot used: what members logged, and for silent members what the header's ledger has
    beyond `before`.
    """
    said: dict[Stream, list[Span]] = defaultdict(list)
    for commit in slot.commits.values():
        for key, spans in commit.spent.items():
            said[key].extend(spans)
    for key, spans in slot.ledger.items():
        known = merge([*before.get(key, ()), *said.get(key, ())])
        said[key].extend(subtract(merge(spans), known))
    return said


def _resumed_at(first: SlotFact) -> dict[Stream, Spans]:
    """Returns the ledger of used samples with which a run began: that of its first header without what its first slot
    used.
    """
    own: dict[Stream, Spans] = defaultdict(tuple)
    for commit in first.commits.values():
        for key, spans in commit.spent.items():
            own[key] = merge([*own[key], *spans])
    return {key: subtract(merge(spans), own[key]) for key, spans in first.ledger.items()}
