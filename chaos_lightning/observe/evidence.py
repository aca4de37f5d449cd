"""Collects from the logs what the audit needs as evidence: commits, views, hashes, pulls, faults, deaths, exclusions.

Theory of operation. One pass over the events sorts them by what they can prove. Nothing is judged: where a member
went missing the pass collects what was said about it (a declared fault, a leave, a closed file), and the audit
decides whether that suffices. It shares no code with `timeline.py`, which draws the same events; a slip there cannot
acquit the engine here.
"""

from __future__ import annotations

import itertools
import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from chaos_lightning.events.reader import Record
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.coverage import PartsTold
from chaos_lightning.observe.history import Commit
from chaos_lightning.observe.spans import Spans

_STOPS = frozenset({"sigstop", "freeze"})
_KILLS = frozenset({"sigkill", "kill", "crash"})
_BREAKS = frozenset({"cut", "stall"})
_DETECTION_S = 30.0
"""Seconds after which a fault of a member or a link has been noticed at the latest."""
_MENDING_S = 5.0
"""Seconds that a mended link may take until it is made again."""
_GOODBYES = frozenset({"left", "finished", "closed"})
_TOLD_BY_ANYBODY = frozenset({"opened", "lost", "fault_injected", "death", "leave", "left", "view", "decide"}) | {
    "epoch", "resumed", "checkpoint",
}  # fmt: skip
"""Events that count whoever writes them; of all others only a member's own word does."""


Views = dict[tuple[int, int], tuple[str, ...]]
Ends = frozenset[str]


@dataclass(frozen=True, slots=True)
class Pulled:
    """Pull of the state by a joiner: the header after which the state was taken, and the state's hash."""

    member: str
    head: str
    hash: str


@dataclass(frozen=True, slots=True)
class Loss:
    """Member that was killed or frozen (an injected fault) or found dead by others."""

    t: float
    member: str
    kind: str
    stayed: bool
    """Whether the member thawed before a view excluded it."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Exclusion of a member: it was in one view and not in the next."""

    member: str
    view: tuple[int, int]
    t: float
    why: str
    """Reason in the logs: a fault, a leave, the end of the job; "" for none."""
    silent_s: float | None
    """Seconds since the member's last own event at the time; None if it never wrote one."""
    spoke_later: bool


@dataclass(slots=True)
class Testimony:
    """All evidence from one log directory."""

    commits: list[Commit] = field(default_factory=list)
    views: list[tuple[float, Views]] = field(default_factory=list)
    """Members by view number, and the time (s) since when these hold; a job that began anew counts its views anew."""
    hashes: list[tuple[str, str, str]] = field(default_factory=list)
    """State hashes that members took of their own states, as (header, member, state hash)."""
    pulled_hashes: list[tuple[str, str, str]] = field(default_factory=list)
    """State hashes that members took of a state just pulled, as (header, member, state hash)."""
    pulls: list[Pulled] = field(default_factory=list)
    never_in: set[str] = field(default_factory=set)
    """Members that contributed to nothing: the job or the member ended before the member came in."""
    losses: list[Loss] = field(default_factory=list)
    excluded: list[Exclusion] = field(default_factory=list)
    unexplained: dict[str, str] = field(default_factory=dict)
    """Members whose end nothing explains, with what is odd about it."""
    unawakened: list[str] = field(default_factory=list)
    """Frozen members that were excluded, woke and neither noticed nor came back, in words."""
    gone: set[str] = field(default_factory=set)
    """Members that were killed, frozen, fenced or found dead, or left: they need not have committed their last slot."""
    left_job: list[tuple[str, str]] = field(default_factory=list)
    """Everything written for the outside, as (what, header)."""
    epochs: dict[f.Stream, int] = field(default_factory=dict)
    resumed: list[tuple[float, dict[f.Stream, Spans]]] = field(default_factory=list)
    injected: bool = False
    missing: list[str] = field(default_factory=list)
    """Parts of the logs that are not here, in words: what they would say is not known, and their silence proves
    nothing.
    """
    untold: set[str] = field(default_factory=set)
    """Members whose own words are in a missing part of the logs."""
    parts: dict[str, PartsTold] = field(default_factory=dict)
    """Claims of each member about parts of the state, where layers lie at several members."""

    def views_at(self, t: float) -> Views:
        """Returns the views (members by view number) of the run that was under way at time t (s)."""
        return next((views for start, views in reversed(self.views) if start <= t), {})


@dataclass(slots=True)
class _Witness:
    """Events that one member wrote itself."""

    node: str
    source: str
    times: array[float] = field(default_factory=lambda: array("d"))
    """Wall times (s) of the member's events, in order."""
    ends: list[tuple[float, str]] = field(default_factory=list)
    fenced: float | None = None
    head: str = ""
    founder: bool = False
    joined: float | None = None
    came_with: int = 0
    """Slot at which the member took the state over; it did not commit that slot itself."""

    def came_in_after(self, t: float) -> bool:
        """Returns whether the member joined only after time t."""
        return self.joined is not None and self.joined > t and (self.fenced is None or self.fenced > self.joined)


@dataclass(slots=True)
class EvidenceFold:
    """Collects the evidence in the events of one job: call `take` with each event in order of time, then `conclude`."""

    facts: Testimony = field(default_factory=Testimony)
    who: dict[str, _Witness] = field(default_factory=dict)
    faults: list[tuple[float, str, str, float]] = field(default_factory=list)
    """Faults of processes, as (t, kind, node, seconds)."""
    broken: list[tuple[float, float, Ends]] = field(default_factory=list)
    """Links that were cut or stalled, as (from, to, nodes); infinity in place of `to` until a link was mended."""
    deaths: dict[str, float] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    """Role of each source."""
    view_times: list[dict[tuple[int, int], float]] = field(default_factory=list)
    view_links: list[dict[tuple[int, int], frozenset[Ends]]] = field(default_factory=list)
    """Links of each view as members know them; views of which every pair has a link are missing."""
    ends: dict[str, float] = field(default_factory=dict)
    """Time of the last line of each source."""
    lost: dict[tuple[str, bool], int] = field(default_factory=dict)
    """Number of lost lines, by (source, whether they had been written)."""
    finished: float | None = None
    _values: dict[object, Any] = field(default_factory=dict)
    """Values that many commits have, each kept once."""
    _ledgers: dict[str, tuple[object, dict[f.Stream, Spans]]] = field(default_factory=dict)
    """Ledger field as the last commit of each header had it, and its value."""
    _contributors: dict[str, tuple[object, tuple[str, ...]]] = field(default_factory=dict)
    """Contributors field of the last commit in each file, and its value; the next commit shares the value if the field
    is the same.
    """

    def take(self, r: Record) -> None:
        """Takes one event in."""
        self.ends[r.source] = r.t
        if r.name in _TOLD_BY_ANYBODY:
            self._told(r)
        # A file whose beginning is missing does not say whose it is; members stamp their node.
        if not r.member or r.by != r.member or self.roles.get(r.source, "member" if r.own else "") != "member":
            return
        witness = self.who.get(r.member)
        if witness is None:
            witness = self.who[r.member] = _Witness(r.node, r.source)
        witness.times.append(r.t)
        self._own(r, witness)

    def _told(self, r: Record) -> None:
        """Takes in an event whose meaning does not depend on which process wrote it."""
        facts = self.facts
        if r.name == "opened":
            self.roles[r.source] = str(r.get("role", "member"))
        if r.name == "lost":
            where = (r.source, bool(r.get("gone")))
            self.lost[where] = self.lost.get(where, 0) + f.integer(r.get("count"))
        if r.name == "fault_injected":
            facts.injected = True
            if r.get("peer"):
                self._link(r, frozenset((r.node, str(r["peer"]))))
            else:
                self.faults.append((r.t, str(r.get("kind", "")), r.node, f.number(r.get("seconds"))))
        if r.name == "death":
            self.deaths.setdefault(r.member, r.t)
        if r.name in ("leave", "left"):  # the member's own word, or the scheduler's about it
            self.leaves.add(r.member)
        if r.name in ("view", "decide"):
            self._view(r)
        if r.name == "epoch":
            facts.epochs[str(r.get("stream", "")), f.integer(r.get("epoch"))] = f.integer(r.get("length"))
        if r.name == "resumed":
            facts.resumed.append((r.t, f.spent(r.get("ledger"))))
        if r.name == "checkpoint" and r.get("head"):
            facts.left_job.append((f"checkpoint {r.get('path', '')}", str(r["head"])))

    def _link(self, r: Record, ends: Ends) -> None:
        """Takes in an injected fault of a link, or the end of such a fault."""
        kind = str(r.get("kind", ""))
        if kind in _BREAKS:
            self.broken.append((r.t, float("inf"), ends))
        elif kind == "restore":
            self.broken = [(a, min(b, r.t) if pair == ends else b, pair) for a, b, pair in self.broken]

    def _view(self, r: Record) -> None:
        number = f.view_number(r.get("id"))
        members = f.ids(r.get("members"))
        if not members or number == (0, 0):
            return
        if not self.facts.views or self.facts.views[-1][1].get(number, members) != members:
            self.facts.views.append((r.t, {}))
            self.view_times.append({})
            self.view_links.append({})
        self.facts.views[-1][1].setdefault(number, members)
        self.view_times[-1].setdefault(number, r.t)
        if r.get("links"):
            self.view_links[-1].setdefault(number, frozenset(frozenset(f.ids(link)) for link in f.rows(r["links"])))

    def _own(self, r: Record, witness: _Witness) -> None:
        facts = self.facts
        if r.name == "committed":
            facts.commits.append(commit := self._commit(r))
            if commit.kind == "step" and r.member in facts.parts:
                facts.parts[r.member].steps(commit.view, commit.seq)
            if r.get("kind") == "closing":
                self.finished = r.t if self.finished is None else self.finished
        elif r.name == "state_hash" and r.get("hash"):
            facts.hashes.append((str(r.get("head", "")), r.member, str(r.get("hash", ""))))
        elif r.name == "view" and r.get("owns"):
            told = facts.parts.setdefault(r.member, PartsTold(r.member, witness.founder))
            told.enters(f.view_number(r.get("id")), f.spans(r["owns"]))
        elif r.name == "part_pulled":
            facts.parts.setdefault(r.member, PartsTold(r.member, witness.founder)).gets(f.integer(r.get("number")))
        elif r.name == "resumed_kept" and r.get("parts"):
            facts.parts.setdefault(r.member, PartsTold(r.member, witness.founder)).reads(f.spans(r["parts"]))
        elif r.name == "welcomed":
            witness.founder = r.get("role") == "founder"
        elif r.name == "pull_started":
            witness.head = str(r.get("head", ""))
        elif r.name == "pull_done":
            pulled = Pulled(r.member, witness.head, str(r.get("hash", "")))
            if not r.get("observed"):  # what a learner reads counts for nothing before the pull that lets it in
                facts.pulls.append(pulled)
            if pulled.head and pulled.hash:
                facts.pulled_hashes.append((pulled.head, pulled.member, pulled.hash))
        elif r.name == "joined":
            witness.joined, witness.came_with = r.t, f.integer(r.get("seq"))
            if r.member in facts.parts:
                facts.parts[r.member].joined = not witness.founder
        elif r.name == "fenced":
            witness.fenced = r.t
        if r.name in _GOODBYES:
            witness.ends.append((r.t, r.name))

    def _commit(self, r: Record) -> Commit:
        """Reads a `committed` event; equal values of many commits share one object, to save memory."""
        get, same = r.fields.get, self._values.setdefault
        told, contributors = self._contributors.get(r.source, (None, ()))
        if told is not get("contributors"):
            told = get("contributors")
            contributors = tuple(m for m, _ in f.shares(told))
            contributors = same(contributors, contributors)
            self._contributors[r.source] = told, contributors
        header, prev, kind = str(get("header", "")), str(get("prev", "")), str(get("kind", "step"))
        view = f.view_number(get("view"))
        said, ledger = self._ledgers.get(header, (None, {}))
        if said != get("ledger"):
            said = get("ledger")
            ledger = f.spent(said)
            self._ledgers[header] = said, ledger
        return Commit(
            member=same(r.member, r.member),
            seq=f.integer(get("seq")),
            step=f.integer(get("step")),
            kind=same(kind, kind),
            header=same(header, header),
            prev=same(prev, prev),
            view=same(view, view),
            contributors=contributors,
            used=f.spent(get("spent")),
            ledger=ledger,
            t=r.t,
            micro_batches=f.spans(get("micro_batches")),
            coverage=f.coverage(get("coverage")),
        )

    # ---------------------------------------------------------------------------------------------- conclusions

    def conclude(self) -> Testimony:
        """Draws the conclusions that need all events, and returns the evidence."""
        self._exclusions()
        excluded = {e.member: e for e in self.facts.excluded}
        for t, kind, node, seconds in self.faults:
            member = self._at(node, t)
            if member is None or self.who[member].joined is None:
                continue
            out = excluded.get(member)
            if kind in _KILLS:
                self.facts.losses.append(Loss(t, member, kind, False))
                self.facts.gone.add(member)
            elif kind in _STOPS:
                self.facts.losses.append(Loss(t, member, kind, out is None or out.t < t))
                self.facts.gone.add(member)
                self._awake(member, node, t, seconds, out)
        declared = {loss.member for loss in self.facts.losses}
        for member, t in self.deaths.items():
            witness = self.who.get(member)
            self.facts.gone.add(member)
            if member in declared or witness is None or witness.joined is None:
                continue
            if member not in self.leaves and not witness.ends:
                self.facts.losses.append(Loss(t, member, "death", False))
                if not self._fault_on(witness.node, t) and not self._parted(member, t):
                    self.facts.unexplained[member] = "died without a declared fault"
        self.facts.never_in = {m for m, witness in self.who.items() if witness.joined is None}
        for member, witness in self.who.items():
            # A leaver may be released before it sees the header that lets it go: the others need it no more by then.
            if witness.fenced is not None or member in self.leaves:
                self.facts.gone.add(member)
        self._missing()
        return self.facts

    def _missing(self) -> None:
        """Notes which parts of the logs are missing: lost lines, and members whose log is absent or ends too early."""
        facts = self.facts
        for (source, gone), count in self.lost.items():
            facts.missing.append(f"{count} log lines were lost{' from' if gone else ' to a full disk,'} {source}")
        torn = {source for source, _ in self.lost}
        facts.untold = {m for m, witness in self.who.items() if witness.source in torn}
        last: dict[str, Commit] = {}
        own: dict[str, int] = {}
        places: dict[str, int] = {}
        newest: dict[int, tuple[int, Commit]] = {}
        """Latest commit of each set of contributors, by the set's identity, and its place among all commits."""
        for at, commit in enumerate(facts.commits):
            own[commit.member] = max(own.get(commit.member, 0), commit.seq)
            known = newest.get(id(commit.contributors))
            if known is None or commit.seq > known[1].seq:
                newest[id(commit.contributors)] = at, commit
        for at, commit in newest.values():
            for member in commit.contributors:
                if member not in last or (commit.seq, -at) > (last[member].seq, -places[member]):
                    last[member], places[member] = commit, at
        for member, slot in last.items():
            witness = self.who.get(member)
            told = max(own.get(member, 0), witness.came_with if witness is not None else 0)
            if witness is None:
                facts.missing.append(f"no log of {member} is here")
            elif not witness.ends and self.ends[witness.source] < slot.t and told < slot.seq - 1:
                # A member contributes to no slot before it has committed the one before.
                facts.missing.append(f"the log {witness.source} ends before {member} did")
            else:
                continue
            facts.untold.add(member)

    def _at(self, node: str, t: float) -> str | None:
        """Returns the newest member id of a node at time t; None if the node had none."""
        mine = [(w.times[0], m) for m, w in self.who.items() if w.node == node and w.times[0] <= t]
        return max(mine)[1] if mine else None

    def _fault_on(self, node: str, t: float) -> str:
        """Returns the kind of an injected fault that may still have affected a node's process at t; "" for none."""
        for at, kind, victim, seconds in reversed(self.faults):
            if victim == node and at <= t <= at + seconds + _DETECTION_S:
                return kind
        return ""

    def _parted(self, member: str, t: float) -> bool:
        """Returns whether broken links (injected faults) cut a member off from at least half of all members at t or
        shortly before.

        At least one of the members that went on must be among those that it was cut off from.
        """
        run = sum(start <= t for start, _ in self.facts.views) - 1
        views = self.facts.views[run][1] if run >= 0 else {}
        holding = [number for number in views if member in views[number]]
        if not holding:
            return False
        before = max(holding)
        after = min((number for number in views if number > before), default=before)
        stayed = set(views[after]) - {member}
        # A member with a fault of its own passes nothing on.
        able = {m for m in views[before] if m in stayed or not self._fault_on(self._node(m), t)} | {member}
        links = self.view_links[run].get(before) or {frozenset(p) for p in itertools.combinations(views[before], 2)}
        moments = [a for a, _, _ in self.broken if t - _DETECTION_S <= a <= t]
        sides = [self._reached(member, able, links, at) for at in {*moments, t}]
        return any(stayed - side and 2 * len(side) <= len(able) for side in sides)

    def _reached(self, member: str, able: set[str], links: Collection[Ends], t: float) -> set[str]:
        """Returns the members that a member could reach, directly or through others, over links not broken at t."""
        bad = {ends for begin, end, ends in self.broken if begin <= t <= end + _MENDING_S}
        # Faults name members, or nodes of members that are called NODE-RANK.
        names = {m: {self._node(m), re.sub(r"-\d+$", "", self._node(m))} for m in able}
        reached, edge = {member}, [member]
        while edge:
            here = edge.pop()
            for there in able - reached:
                hurt = any(frozenset((a, b)) in bad for a in names[here] for b in names[there])
                if frozenset((here, there)) in links and not hurt:
                    reached.add(there)
                    edge.append(there)
        return reached

    def _node(self, member: str) -> str:
        witness = self.who.get(member)
        return witness.node if witness is not None else f.node_of(member)

    def _exclusions(self) -> None:
        for (_, views), times in zip(self.facts.views, self.view_times, strict=True):
            for before, after in itertools.pairwise(sorted(views)):
                t, stayed = times[after], set(views[after])
                for member in (m for m in views[before] if m not in stayed):
                    heard = self.who[member].times if member in self.who else array("d")
                    earlier = bisect_right(heard, t)
                    later = earlier < len(heard)
                    silent_s = t - heard[earlier - 1] if earlier else None
                    why = self._why_out(member, t) or ("death" if member in self.deaths and not later else "")
                    self.facts.excluded.append(Exclusion(member, after, t, why, silent_s, later))

    def _why_out(self, member: str, t: float) -> str:
        """Returns why a view decided at t is without a member (other than its death), as far as logs say; "" if they do
        not.
        """
        witness = self.who.get(member)
        if member in self.leaves:
            return "leave"
        if witness is not None and witness.ends:
            return "ended by itself"
        if fault := self._fault_on(self._node(member), t):
            return fault
        if self._parted(member, t):
            return "cut off"
        if witness is not None and witness.joined is None:
            return "never came in"
        if witness is not None and witness.came_in_after(t):
            return "a recovery came first"  # no header carried the view with this newcomer; a later one did
        return ""

    def _awake(self, member: str, node: str, t: float, seconds: float, out: Exclusion | None) -> None:
        """Checks a frozen member that was excluded: once thawed it must notice its exclusion, and join again unless the
        job was over.
        """
        if out is None:
            return
        thaw = t + seconds if seconds else None
        for at, kind, victim, _ in self.faults:
            if victim != node or at <= t:
                continue
            if kind in ("sigcont", "thaw"):
                thaw = at if thaw is None else min(thaw, at)
            elif kind in _KILLS:
                return  # killed in its sleep or after
        witness = self.who[member]
        latest = max(self.ends.values(), default=0.0)
        if thaw is None or thaw >= latest - 5.0 or (self.finished is not None and self.finished <= thaw + 5.0):
            return
        spoke = witness.times[-1] > thaw
        if witness.fenced is None and not any(name in _GOODBYES for _, name in witness.ends):
            again = "and went on writing" if spoke else "and was not heard of again"
            self.facts.unawakened.append(f"{member} was frozen, put out and woke, {again}, but was never fenced")
            return
        back = [w for m, w in self.who.items() if w.node == node and m != member and w.times[0] >= thaw - 0.001]
        if witness.fenced is not None and not back and not witness.ends:
            self.facts.unawakened.append(f"{member} was frozen and fenced when it woke, but did not join again")


def gather(records: Iterable[Record]) -> Testimony:
    """Collects the evidence in the events of one log directory, given in order of time."""
    one = EvidenceFold()
    for record in records:
        one.take(record)
    return one.conclude()
