"""Separates the jobs whose events are in one folder, and passes the events of each job to a fold of its own.

Theory of operation. Which job an event is of may depend on what comes later, so the events are read twice: `_Sorter`
keeps a few facts of each process, concludes, and then names the jobs of each event. A fold of all events is made in the
first reading already. It is the result where the folder holds one job of members, as nearly all do.

*One after the other.* A scheduler counts member ids, views and slots from the start of its chain, so two jobs of the
same nodes have the same ids, and often the very same first headers. What tells them apart is the process: within one
chain an id is given out once. A *stretch* is what one process wrote from one `opened` to the next. A new job begins
with the welcome of a stretch, if

- an id that it or a later one is given belongs to a stretch before it, or a stretch before it had finished the job, and
- no stretch before it says anything afterwards (but goodbyes, if it had finished or left already).

The second condition keeps the cut honest: a member that goes on training is a witness that the job still ran, and an id
given twice or a chain begun anew beside it stays in the evidence and is judged. A job that lost its members and went on
under new ids, from a checkpoint, is one job; `observe/history.py` knows its runs apart. Schedulers and harnesses count
by time: what they began to write after the last word of a job belongs to the next one.

*At the same time.* Members of one job were on one chain at some time. Processes that share neither a chain nor a job's
name and endpoint are no witnesses of each other's job. An event that names no chain and is no member's belongs to each
of the jobs.

*Outer jobs* are jobs of leaders, followers and clusters. A leader that finds an empty chain begins another job than
that whose entries are there already, if no process that wrote of the earlier job writes anything afterwards. Else it is
the same job, whose store was lost, and the two chains disagree, which an audit must see. If there are outer jobs, the
jobs of members are those of elastic clusters, told apart by their chains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Generic, Protocol, TypeVar

from chaos_lightning.events.reader import Logs, Record
from chaos_lightning.observe import fields as f
from chaos_lightning.outer.events import EVENTS
from chaos_lightning.outer.rules.types import JobOpened

OUTER = frozenset(event.name for event in EVENTS)
"""Events of an outer job."""
INNER = frozenset({"welcomed", "committed", "view", "decide", "joined"})
"""Events by which a process is known to be of a job of members."""
_OVER = frozenset({"finished", "left", "closed"})
_AFTERWARDS = frozenset({"finished", "left", "closed", "link_up", "link_down", "link_measured", "links", "lost"})
"""Events that a member may still write when it is over; none of them is training."""
SERVER_GOES = frozenset({"outer_leader_ended", "cluster_stream", "follower_stream"})
"""Events of a server that stays for a while after its job, to answer late questions."""
_OUTER_AFTERWARDS = SERVER_GOES | {"cluster_over"}
"""Events that may still be written when an outer job is over."""


class Fold(Protocol):
    """Fold over the events of one job, given one by one in order of time."""

    def take(self, r: Record, /) -> object:
        """Takes the next event in."""


Members = TypeVar("Members", bound=Fold)
Outer = TypeVar("Outer", bound=Fold)


@dataclass(frozen=True, slots=True)
class FoldedJobs(Generic[Members, Outer]):
    """Results for a folder: one fold for each of its jobs.

    Attributes:
        outer: Folds of the outer jobs, oldest first.
        inner: Label of each elastic cluster, and folds of its jobs, oldest first; "" where there is no outer job.
    """

    outer: list[Outer]
    inner: list[tuple[str, list[Members]]]


def fold_jobs(
    logs: Logs | Sequence[Record], members: Callable[[], Members], outer: Callable[[], Outer] | None = None
) -> FoldedJobs[Members, Outer]:
    """Divides a folder's events by job, and folds the events of each job.

    Args:
        logs: All events of a folder, in order of time.
        members: Makes the fold of a job of members.
        outer: Makes the fold of an outer job; None: all events are taken as those of jobs of members.
    """
    sorter = _Sorter(apart=outer is not None)
    only: Members | None = members()
    for r in logs:
        sorter.take(r)
        if sorter.accounts:
            only = None
        elif only is not None:
            only.take(r)
    sorter.conclude()
    if only is not None and sorter.count == 1:
        return FoldedJobs([], [("", [only])])
    only = None
    found: FoldedJobs[Members, Outer] = FoldedJobs(
        [outer() for _ in range(sorter.outer)] if outer is not None else [],
        [(group.label, [members() for part in group.parts for _ in part.begins]) for group in sorter.groups],
    )
    folds: list[Fold] = [*found.outer, *(one for _, each in found.inner for one in each)]
    for r in logs:
        for number in sorter.jobs_of(r):
            folds[number].take(r)
    return found


# ------------------------------------------------------------------------------------------------ facts of processes


@dataclass(slots=True)
class _Stretch:
    """Events of one process from one `opened` event to the next."""

    first: float
    role: str = "member"
    over: float | None = None
    """Time at which the process had finished, left or closed its file."""
    spoke: float = 0.0
    """Time of the last event that is not one of `_AFTERWARDS`."""
    welcomed: float | None = None
    ids: set[str] = field(default_factory=set)
    finished: bool = False

    def take(self, r: Record) -> bool:
        """Takes in one more event of the process; returns whether it is the first that welcomes the process as a
        member.
        """
        if r.name in _OVER and self.over is None:
            self.over = r.t
        self.finished |= r.name == "finished" or (r.name == "committed" and r.get("kind") == "closing")
        if not (self.over is not None and r.name in _AFTERWARDS):
            self.spoke = r.t
        if r.name == "welcomed" and r.member and r.by == r.member:
            self.ids.add(r.member)
            if self.welcomed is None:
                self.welcomed = r.t
                return self.role == "member"
        return False

    @property
    def ended(self) -> float:
        """Time at which the process was done with its job."""
        return self.spoke if self.over is None else max(self.over, self.spoke)


@dataclass(slots=True)
class _Account:
    """Events about an outer job that one process wrote from one `opened` event to the next."""

    first: float
    ended: float
    entries: bool = False
    begins: bool = False
    """Whether the process led an empty chain."""
    chain: str = ""
    """Id of the chain of the process's job; "": not told."""
    job: int = -1

    def take(self, r: Record) -> None:
        if r.name not in _OUTER_AFTERWARDS:
            self.ended = r.t
        self.entries |= r.name == "entry"
        self.begins |= r.name == "outer_leader_started" and f.integer(r.get("position")) == 0
        opens = r.name == "entry" and r.get("kind") == JobOpened.__name__
        self.chain = self.chain or str(r.get("hash" if opens else "chain") or "")


@dataclass(slots=True)
class _File:
    """Facts that one event file tells about jobs of members."""

    opened: int = 0
    """Number of `opened` events so far."""
    process: object = None
    """Host and process id."""
    inner: bool = False
    chains: set[str] = field(default_factory=set)
    """Chains that events of `INNER` name."""
    chain: str = ""
    """First chain that any event names."""
    places: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (job, endpoint) that members were told."""
    committed: float = 0.0
    committed_last: float = 0.0
    """Times of the first and of the last commit, wall clock, s."""
    fault: float = 0.0
    """Time of the first injected fault."""

    def take(self, r: Record) -> None:
        chain = str(r.get("chain") or "")
        self.chain = self.chain or chain
        if r.name in INNER:
            self.inner = True
            if chain:
                self.chains.add(chain)
        if r.name == "committed":
            self.committed, self.committed_last = self.committed or r.t, r.t
        elif r.name == "opened":
            self.process = (r.get("host", ""), r.get("pid", ""))
        elif r.name == "joined" and r.own and r.get("job"):
            self.places.add((str(r["job"]), str(r.get("endpoint", ""))))
        elif r.name == "fault_injected":
            self.fault = self.fault or r.t


@dataclass(slots=True)
class _Party:
    """Members of one chain, or of several chains that have a member in common."""

    chains: set[str]
    sources: set[str]
    places: set[tuple[str, str]] = field(default_factory=set)
    first: float = 0.0
    last: float = 0.0

    def beside(self, other: _Party) -> bool:
        """Returns whether `other` is certainly another job that ran at the same time."""
        apart = self.places and other.places and not self.places & other.places
        return bool(apart and self.first and self.first <= other.last and other.first <= self.last)


# ------------------------------------------------------------------------------------------------ whose events

_Key = tuple[str, int]
"""Key of a stretch: (file, number of `opened` events so far)."""


@dataclass(slots=True)
class _Part:
    """Jobs whose members logged one after the other.

    Attributes:
        jobs: Job of each stretch of a member.
        begins: Time of each job's first event.
        ends: Time at which each job was done.
    """

    jobs: dict[_Key, int]
    begins: list[float]
    ends: list[float]

    def job_of(self, key: _Key, first: float, t: float) -> int:
        """Returns the number of the job to which an event at time t belongs, written by a process that began at `first`
        (s).
        """
        if len(self.begins) == 1:
            return 0
        if (job := self.jobs.get(key)) is not None:
            return job
        # A process that began to write when a job was over was not there for it; else the members' first words decide.
        after = sum(end <= first for end in self.ends[:-1])
        return max(after, sum(begin <= t for begin in self.begins[1:]))


@dataclass(slots=True)
class _Group:
    """Jobs of one elastic cluster; without an outer job, all jobs of members.

    Attributes:
        sources: Files of the cluster's processes; None: all.
        parts: Parts, one for each of the jobs at the same time.
        whose: Index of the only part that a file belongs to, by file.
    """

    label: str
    sources: set[str] | None
    parts: list[_Part] = field(default_factory=list)
    whose: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Sorter:
    """Sorter of a folder's events by job: takes in all events, finds the jobs, then says to which ones each event
    belongs.

    Attributes:
        apart: Whether outer jobs are told from jobs of members.
        accounts: Accounts of outer jobs.
        outer: Number of outer jobs.
        count: Number of jobs in all.
    """

    apart: bool
    accounts: dict[_Key, _Account] = field(default_factory=dict)
    outer: int = 0
    count: int = 0
    groups: list[_Group] = field(default_factory=list)
    _files: dict[str, _File] = field(default_factory=dict)
    _stretches: dict[_Key, _Stretch] = field(default_factory=dict)
    _welcomed: list[_Key] = field(default_factory=list)
    """Stretches in which a member was welcomed, in order of time."""
    _stood: dict[tuple[str, str], None] = field(default_factory=dict)
    """Chains on which a member stood, as (file, chain), in the order in which they were told last."""
    _labels: dict[object, str] = field(default_factory=dict)
    """Incarnation as which each process was welcomed."""
    _begins: list[float] = field(default_factory=list)
    """Time at which each outer job began."""

    def take(self, r: Record) -> None:
        """Takes the next event in."""
        file, key = self._where(r)
        if self.apart and r.name in OUTER:
            self.accounts.setdefault(key, _Account(r.t, r.t)).take(r)
            if r.name == "cluster_welcomed":
                self._labels[file.process or r.source] = str(r.get("incarnation", ""))
            return
        file.take(r)
        if r.name in ("welcomed", "view") and r.own and (chain := str(r.get("chain") or "")):
            self._stood.pop((r.source, chain), None)
            self._stood[r.source, chain] = None
        stretch = self._stretches.get(key)
        if stretch is None:
            stretch = self._stretches[key] = _Stretch(r.t, str(r.get("role", "member")))
        if stretch.take(r):
            self._welcomed.append(key)

    def _where(self, r: Record) -> tuple[_File, _Key]:
        file = self._files.get(r.source)
        if file is None:
            file = self._files[r.source] = _File()
        file.opened += r.name == "opened"
        return file, (r.source, file.opened)

    def conclude(self) -> None:
        """Finds the jobs after all events were taken in; `jobs_of` then expects the same events again from the first
        on.
        """
        self.groups = self._clusters() if self.accounts else [_Group("", None)]
        self._begins = self._outer_jobs() if self.accounts else []
        self.outer = len(self._begins)
        for group in self.groups:
            self._divide(group)
        self.count = self.outer + sum(len(part.begins) for group in self.groups for part in group.parts)
        for file in self._files.values():
            file.opened = 0

    def jobs_of(self, r: Record) -> Iterator[int]:
        """Yields the numbers of the jobs to which an event belongs, outer jobs first."""
        file, key = self._where(r)
        at = self.outer
        if self.accounts:
            if key in self.accounts and (r.name in OUTER or r.name in ("lost", "opened")):
                yield self.accounts[key].job
            elif r.name == "fault_injected":
                yield max(0, sum(begin <= r.t for begin in self._begins) - 1)
            if r.name in OUTER:
                return
        stretch = self._stretches.get(key)
        for group in self.groups:
            first = stretch.first if stretch is not None else r.t
            there = group.sources is None or r.source in group.sources
            if not there and not file.inner and r.name == "fault_injected":  # an injected fault concerns every job
                there, first = True, file.fault
            for number, part in enumerate(group.parts):
                if there and group.whose.get(r.source, number) == number:
                    yield at + part.job_of(key, first, r.t)
                at += len(part.begins)

    # ------------------------------------------------------------------ jobs of members

    def _clusters(self) -> list[_Group]:
        """Returns one group per elastic cluster: processes whose logs name a common chain are of one cluster."""
        inner = {source: file for source, file in self._files.items() if file.inner}
        groups: list[tuple[set[str], set[str]]] = []
        for source in sorted(inner, key=lambda one: (not inner[one].chains, one)):
            # A process that names no chain is of the one job that logged into its folder.
            folder = PurePosixPath(source).parent
            near = [group for group in groups if any(PurePosixPath(other).parent == folder for other in group[1])]
            mine = inner[source].chains or (near[0][0] if len(near) == 1 else {str(folder)})
            same = [group for group in groups if group[0] & mine]
            groups = [group for group in groups if group not in same]
            groups.append((mine.union(*(g[0] for g in same)), {source}.union(*(g[1] for g in same))))
        found = []
        for number, (_, sources) in enumerate(groups, 1):
            made = {inner[source].process or source for source in sources}  # ranks have two logs
            names = sorted({f.node_of(self._labels[each]) for each in made & self._labels.keys()})
            found.append(_Group(", ".join(names) or str(number), sources))
        return found

    def _divide(self, group: _Group) -> None:
        """Divides a group into its jobs."""
        sources = self._files.keys() if group.sources is None else group.sources
        parties = self._parties(sources)
        welcomed = [key for key in self._welcomed if key[0] in sources]
        if not any(a.beside(b) for a, b in itertools.combinations(parties, 2)):
            group.parts = [self._one_after_the_other(welcomed)]
            return
        parties.sort(key=lambda p: p.first)
        for number, party in enumerate(parties):
            group.whose |= {s: number for s in sources if s not in group.whose and self._files[s].chain in party.chains}
        for number, party in enumerate(parties):
            group.whose |= dict.fromkeys(party.sources, number)
        for number in range(len(parties)):
            mine = [key for key in welcomed if group.whose.get(key[0], number) == number]
            group.parts.append(self._one_after_the_other(mine))

    def _parties(self, sources: Iterable[str]) -> list[_Party]:
        parties: list[_Party] = []
        for source, chain in self._stood:
            if source in sources:
                same = [p for p in parties if chain in p.chains or source in p.sources]
                merged = _Party({chain}.union(*(p.chains for p in same)), {source}.union(*(p.sources for p in same)))
                parties = [p for p in parties if p not in same] + [merged]
        for party in parties:
            files = [self._files[source] for source in party.sources]
            party.places = set().union(*(file.places for file in files))
            party.first = min((file.committed for file in files if file.committed), default=0.0)
            party.last = max(file.committed_last for file in files)
        return parties

    def _one_after_the_other(self, welcomed: Sequence[_Key]) -> _Part:
        groups: list[list[_Key]] = [[]]
        for key in welcomed:
            groups[-1].append(key)
            if at := _cut([self._stretches[each] for each in groups[-1]]):
                groups[-1:] = [groups[-1][:at], groups[-1][at:]]
        if len(groups) == 1:
            return _Part({}, [0.0], [0.0])
        stretches = [[self._stretches[key] for key in group] for group in groups]
        return _Part(
            {key: number for number, group in enumerate(groups) for key in group},
            [min(s.first for s in group) for group in stretches],
            [max(s.ended for s in group) for group in stretches],
        )

    # ------------------------------------------------------------------ outer jobs

    def _outer_jobs(self) -> list[float]:
        """Assigns each account to an outer job; returns when each job begins (s)."""
        groups: list[list[_Account]] = [[]]
        for one in sorted(self.accounts.values(), key=lambda each: each.first):
            groups[-1].append(one)
            if one.begins and (cut := _outer_cut(groups[-1])):
                groups[-1:] = [groups[-1][:cut], groups[-1][cut:]]
        groups = [part for group in groups for part in _by_chain(group)]
        for number, group in enumerate(groups):
            for one in group:
                one.job = number
        return [min(one.first for one in group) for group in groups]


def _cut(group: Sequence[_Stretch]) -> int:
    """Returns the index of the first stretch of a new job if the newest stretch shows that one has begun; 0 if not."""
    newest = group[-1].ids
    if not any(s.finished or s.ids & newest for s in group[:-1]):
        return 0
    for at in range(len(group) - 1, 0, -1):
        before, begun = group[:at], group[at].welcomed or group[at].first
        if any(s.finished or s.ids & newest for s in before) and all(s.ended <= begun for s in before):
            return at
    return 0


def _outer_cut(group: Sequence[_Account]) -> int:
    """Returns the index of the first account of a new job if the newest leader began one; 0 if it went on with the old
    job.
    """
    for at in range(len(group) - 1, 0, -1):
        before = group[:at]
        if any(one.entries for one in before) and all(one.ended <= group[at].first for one in before):
            return at
    return 0


def _by_chain(group: Sequence[_Account]) -> list[list[_Account]]:
    """Divides accounts by the chain that they name; those that name none go with the first chain."""
    first = next((one.chain for one in group if one.chain), "")
    found: dict[str, list[_Account]] = {first: []}
    for one in group:
        found.setdefault(one.chain or first, []).append(one)
    return [*found.values()]


# ------------------------------------------------------------------------------------------------ live


@dataclass(slots=True)
class Live:
    """Detector of a new job for the live view: decides at each event, without knowing later ones, whether another job
    begins.
    """

    _stretches: dict[str, _Stretch] = field(default_factory=dict)
    """Newest stretch of each file."""
    _group: list[_Stretch] = field(default_factory=list)

    def begins(self, r: Record) -> bool:
        """Takes in one event; returns whether it is the first welcome of a member in a new job."""
        one = self._stretches.get(r.source)
        if one is None or r.name == "opened":
            one = self._stretches[r.source] = _Stretch(r.t, str(r.get("role", "member")))
        if not one.take(r):
            return False
        self._group.append(one)
        cut = _cut(self._group)
        self._group = self._group[cut:]
        return cut > 0
