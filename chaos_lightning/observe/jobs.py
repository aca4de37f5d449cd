"""Cuts a log directory into jobs, if one job after the other was logged into it.

Theory of operation. A scheduler counts member ids, views and slots from the start of its chain, so two jobs of the same
nodes have the same ids, and often the very same first headers. What tells them apart is the process: within one chain
an id is given out once. A *stretch* is what one process wrote from one `opened` to the next. A new job begins with the
welcome of a stretch, if

- an id that it or a later one is given belongs to a stretch before it, or a stretch before it had finished the job, and
- no stretch before it says anything afterwards (but goodbyes, if it had finished or left already).

The second condition keeps the cut honest: a member that goes on training is a witness that the job still ran, and an id
given twice or a chain begun anew beside it stays in the evidence and is judged. A job that lost its members and went on
under new ids, from a checkpoint, is one job; `observe/history.py` knows its runs apart.

Two jobs that were logged here at the same time are told apart before: members of one job stood on one chain at some
time, and where neither chain nor job and endpoint are the same, nobody is a witness of the other's. What names no chain
and is no member's belongs to each of them.

Schedulers and harnesses count by time: what they began to write after the last word of a job belongs to the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chaos_lightning.events.reader import Record

_OVER = frozenset({"finished", "left", "closed"})
_AFTERWARDS = frozenset({"finished", "left", "closed", "link_up", "link_down", "link_measured", "links", "lost"})
"""Events that a member may still write when it is over; none of them is training."""


@dataclass(slots=True)
class _Stretch:
    """Events of one process in one job."""

    first: float
    role: str = "member"
    over: float | None = None
    """When it had finished, left or closed its file."""
    spoke: float = 0.0
    """Its last word that is not one of `_AFTERWARDS`."""
    welcomed: float | None = None
    ids: set[str] = field(default_factory=set)
    finished: bool = False
    job: int = -1

    def take(self, r: Record) -> bool:
        """One more event of it; whether it is its first welcome."""
        if r.name in _OVER and self.over is None:
            self.over = r.t
        self.finished |= r.name == "finished" or (r.name == "committed" and r.get("kind") == "closing")
        if not (self.over is not None and r.name in _AFTERWARDS):
            self.spoke = r.t
        if r.name == "welcomed" and r.member and r.by == r.member:
            self.ids.add(r.member)
            if self.welcomed is None:
                self.welcomed = r.t
                return True
        return False

    @property
    def ended(self) -> float:
        """When it was done with its job."""
        return self.spoke if self.over is None else max(self.over, self.spoke)


def _stretch(r: Record, current: dict[str, _Stretch]) -> tuple[_Stretch, bool]:
    """The stretch that an event belongs to, of those that are written to each file; whether it welcomes it."""
    one = current.get(r.source)
    if one is None or r.name == "opened":
        one = current[r.source] = _Stretch(r.t, str(r.get("role", "member")))
    return one, one.take(r)


def jobs(records: Iterable[Record]) -> list[list[Record]]:
    """The events of each job, oldest first; one list (perhaps an empty one) if there was but one.

    Args:
        records: All events of a log directory, in order of time.
    """
    return [job for part in _at_once(list(records)) for job in _one_after_the_other(part)]


@dataclass(slots=True)
class _Party:
    """Members that stood on one chain, or on several that one of them stood on."""

    chains: set[str]
    sources: set[str]
    places: set[tuple[str, str]] = field(default_factory=set)
    """(job, endpoint) as its members were told."""
    first: float = 0.0
    last: float = 0.0
    """Time of its last commit, wall clock, s."""

    def beside(self, other: _Party) -> bool:
        """Whether this is surely another job, which ran at the same time."""
        apart = self.places and other.places and not self.places & other.places
        return bool(apart and self.first and self.first <= other.last and other.first <= self.last)


def _at_once(everything: list[Record]) -> list[list[Record]]:
    """The events of each of several jobs that ran at the same time; else all of them as they are."""
    parties: list[_Party] = []
    chain_of: dict[str, str] = {}
    for r in everything:
        chain = str(r.get("chain") or "")
        if chain:
            chain_of.setdefault(r.source, chain)
        if chain and r.own and r.name in ("welcomed", "view"):
            same = [p for p in parties if chain in p.chains or r.source in p.sources]
            merged = _Party({chain}.union(*(p.chains for p in same)), {r.source}.union(*(p.sources for p in same)))
            parties = [p for p in parties if p not in same] + [merged]
    of = {source: party for party in parties for source in party.sources}
    for r in everything:
        party = of.get(r.source)
        if party is not None and r.own and r.name == "joined" and r.get("job"):
            party.places.add((str(r["job"]), str(r.get("endpoint", ""))))
        elif party is not None and r.name == "committed":
            party.first, party.last = party.first or r.t, r.t
    if not any(a.beside(b) for a, b in itertools.combinations(parties, 2)):
        return [everything]
    parties.sort(key=lambda p: p.first)
    by_chain = {chain: party for party in parties for chain in party.chains}
    whose = {source: of.get(source) or by_chain.get(chain) for source, chain in chain_of.items()}
    return [[r for r in everything if whose.get(r.source) in (None, party)] for party in parties]


def _one_after_the_other(everything: list[Record]) -> list[list[Record]]:
    current: dict[str, _Stretch] = {}
    of, welcomed = [], []
    for r in everything:
        one, welcomes = _stretch(r, current)
        of.append(one)
        if welcomes and one.role == "member":
            welcomed.append(one)
    groups: list[list[_Stretch]] = [[]]
    for one in welcomed:
        groups[-1].append(one)
        cut = _cut(groups[-1])
        if cut:
            groups[-1:] = [groups[-1][:cut], groups[-1][cut:]]
    if len(groups) == 1:
        return [everything]
    for number, group in enumerate(groups):
        for one in group:
            one.job = number
    begins = [min(s.first for s in group) for group in groups]
    ends = [max(s.ended for s in group) for group in groups]
    found: list[list[Record]] = [[] for _ in groups]
    for r, one in zip(everything, of, strict=True):
        job = one.job
        if job < 0:
            # A process that began to write when a job was over was not there for it; else the members' first words
            # decide.
            after = sum(end <= one.first for end in ends[:-1])
            job = max(after, sum(begin <= r.t for begin in begins[1:]))
        found[job].append(r)
    return found


def _cut(group: Sequence[_Stretch]) -> int:
    """Returns the index of the first stretch of another job, which the newest stretch shows to have begun; 0: there
    is none.
    """
    newest = group[-1].ids
    if not any(s.finished or s.ids & newest for s in group[:-1]):
        return 0
    for at in range(len(group) - 1, 0, -1):
        before, begun = group[:at], group[at].welcomed or group[at].first
        if any(s.finished or s.ids & newest for s in before) and all(s.ended <= begun for s in before):
            return at
    return 0


def latest(found: Sequence[Sequence[Record]]) -> int:
    """Index of the last job that committed a step; of the last one if none did."""
    for index in range(len(found) - 1, -1, -1):
        if any(r.name == "committed" and r.get("kind", "step") == "step" for r in found[index]):
            return index
    return len(found) - 1


@dataclass(slots=True)
class Live:
    """Tells from one event after the other when another job begins; sees no future, so for showing only."""

    _stretches: dict[str, _Stretch] = field(default_factory=dict)
    _group: list[_Stretch] = field(default_factory=list)

    def begins(self, r: Record) -> bool:
        """Take one event in; True if it is the first welcome of another job than what came before."""
        one, welcomes = _stretch(r, self._stretches)
        if not welcomes or one.role != "member":
            return False
        self._group.append(one)
        cut = _cut(self._group)
        self._group = self._group[cut:]
        return cut > 0
