"""What the logs testify, gathered for the audit: commits, views, hashes, pulls, faults, deaths, exclusions.

Theory of operation. One pass over the events sorts them by what they can prove. Nothing is judged: where a member
went missing the pass collects what was said about it (a declared fault, a leave, a closed file), and the audit
decides whether that suffices. It shares no code with `timeline.py`, which draws the same events; a slip there cannot
acquit the engine here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos_lightning.observe import fields as f
from chaos_lightning.observe.reader import Record
from chaos_lightning.observe.spans import Spans
from chaos_lightning.testing.history import Commit

_STOPS = frozenset({"sigstop", "freeze"})
_KILLS = frozenset({"sigkill", "kill", "crash"})
_CUTS = frozenset({"cut"})
_GOODBYES = frozenset({"left", "finished", "closed"})


Views = dict[tuple[int, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A joiner took a state over."""

    member: str
    head: str
    hash: str


@dataclass(frozen=True, slots=True)
class Loss:
    """A member was killed or frozen (declared), or found dead (observed)."""

    t: float
    member: str
    kind: str
    stayed: bool
    """It thawed before anybody put it out."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A member was in one decided view and not in the next."""

    member: str
    view: tuple[int, int]
    t: float
    why: str
    """What the logs know as reason: a fault, a leave, the end of the job; "" for none."""
    silent_s: float | None
    """Seconds since its last own event at the time; None if it never wrote one."""
    spoke_later: bool


@dataclass(slots=True)
class Facts:
    """All testimony of one log directory."""

    commits: list[Commit] = field(default_factory=list)
    views: list[tuple[float, Views]] = field(default_factory=list)
    """(from when on, view number -> members); a job that began anew counts its views anew."""
    hashes: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(header, member, state hash, "commit" | "said" | "pull")."""
    pulls: list[Pulled] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    excluded: list[Exclusion] = field(default_factory=list)
    unexplained: dict[str, str] = field(default_factory=dict)
    """Members whose end nothing explains -> what is odd."""
    unawakened: list[str] = field(default_factory=list)
    """Frozen members that were put out, woke and neither noticed nor came back, in words."""
    gone: set[str] = field(default_factory=set)
    """Members that were killed, frozen, fenced or found dead, or left: they need not have committed their last slot."""
    left_job: list[tuple[str, str]] = field(default_factory=list)
    """(what, header) of everything written for the outside."""
    epochs: dict[f.Stream, int] = field(default_factory=dict)
    resumed: list[tuple[float, dict[f.Stream, Spans]]] = field(default_factory=list)
    lost: int = 0
    injected: bool = False
    gaps_allowed: bool = False
    """A member's file is missing, so slots may be, too."""

    def views_at(self, t: float) -> Views:
        """The views of the run that was under way at time t (s)."""
        return next((views for start, views in reversed(self.views) if start <= t), {})


@dataclass(slots=True)
class _Witness:
    """One member id's own words."""

    node: str
    source: str
    times: list[float] = field(default_factory=list)
    ends: list[tuple[float, str]] = field(default_factory=list)
    fenced: float | None = None
    head: str = ""
    last_name: str = ""
    joined: float | None = None


@dataclass(slots=True)
class _Pass:
    facts: Facts = field(default_factory=Facts)
    who: dict[str, _Witness] = field(default_factory=dict)
    faults: list[tuple[float, str, str, float]] = field(default_factory=list)
    """(t, kind, node, seconds)."""
    deaths: dict[str, float] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    """Source -> role."""
    view_times: list[dict[tuple[int, int], float]] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    """Source -> time of its last line."""
    finished: float | None = None

    def take(self, r: Record) -> None:
        facts, own = self.facts, r.by == r.member
        self.ends[r.source] = r.t
        if r.name == "opened":
            self.roles[r.source] = str(r.get("role", "member"))
        if r.name == "lost":
            facts.lost += f.integer(r.get("count"))
        if r.name == "fault_injected":
            facts.injected = True
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
        if not (r.member and own) or self.roles.get(r.source, "member") != "member":
            return
        witness = self.who.setdefault(r.member, _Witness(r.node, r.source))
        witness.times.append(r.t)
        witness.last_name = r.name
        self._own(r, witness)

    def _view(self, r: Record) -> None:
        number = f.view_number(r.get("id", r.get("view")))
        members = f.ids(r.get("members"))
        if not members or number == (0, 0):
            return
        if not self.facts.views or self.facts.views[-1][1].get(number, members) != members:
            self.facts.views.append((r.t, {}))
            self.view_times.append({})
        self.facts.views[-1][1].setdefault(number, members)
        self.view_times[-1].setdefault(number, r.t)

    def _own(self, r: Record, witness: _Witness) -> None:
        facts = self.facts
        if r.name == "committed":
            facts.commits.append(_commit(r))
            if r.get("state_hash"):
                facts.hashes.append((str(r["header"]), r.member, str(r["state_hash"]), "commit"))
            if r.get("kind") == "closing":
                self.finished = r.t if self.finished is None else self.finished
        elif r.name in ("state_hash", "published"):
            head = str(r.get("head", r.get("header", "")))
            if head and r.get("hash"):
                facts.hashes.append((head, r.member, str(r["hash"]), "said"))
        elif r.name == "pull_started":
            witness.head = str(r.get("head", ""))
        elif r.name == "pull_done":
            head = str(r.get("head", "") or witness.head)
            facts.pulls.append(Pulled(r.member, head, str(r.get("hash", ""))))
            if head and r.get("hash"):
                facts.hashes.append((head, r.member, str(r["hash"]), "pull"))
        elif r.name == "joined":
            witness.joined = r.t
        elif r.name == "fenced":
            witness.fenced = r.t
        if r.name in _GOODBYES:
            witness.ends.append((r.t, r.name))

    # ---------------------------------------------------------------------------------------------- conclusions

    def conclude(self) -> Facts:
        """What needs all events to be seen first."""
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
                if not self._fault_on(witness.node, t):
                    self.facts.unexplained[member] = "died without a declared fault"
        for member, witness in self.who.items():
            # A leaver may be released before it sees the header that lets it go: the others need it no more by then.
            if witness.fenced is not None or member in self.leaves:
                self.facts.gone.add(member)
        self.facts.gaps_allowed = any(
            m not in self.who for _, views in self.facts.views for members in views.values() for m in members
        )
        return self.facts

    def _at(self, node: str, t: float) -> str | None:
        """The member id of this node that was current at t."""
        mine = [(w.times[0], m) for m, w in self.who.items() if w.node == node and w.times[0] <= t]
        return max(mine)[1] if mine else None

    def _fault_on(self, node: str, t: float) -> str:
        """A declared fault on this node up to t (with its duration and half a minute for detection)."""
        for at, kind, victim, seconds in reversed(self.faults):
            if victim == node and at <= t <= at + seconds + 30.0:
                return kind
        return ""

    def _exclusions(self) -> None:
        for (_, views), times in zip(self.facts.views, self.view_times, strict=True):
            self._excluded_in(views, times)

    def _excluded_in(self, views: Views, times: dict[tuple[int, int], float]) -> None:
        order = sorted(views)
        for before, after in itertools.pairwise(order):
            kept = set(views[after])
            t = times[after]
            for member in views[before]:
                if member in kept:
                    continue
                witness = self.who.get(member)
                why = ""
                silent: float | None = None
                later = False
                if witness is not None:
                    earlier = [x for x in witness.times if x <= t]
                    silent = t - earlier[-1] if earlier else None
                    later = any(x > t for x in witness.times)
                    why = "ended by itself" if witness.ends else ""
                if member in self.leaves:
                    why = "leave"
                node = witness.node if witness is not None else f.node_of(member)
                why = why or self._fault_on(node, t)
                if not why and witness is not None and witness.joined is None:
                    why = "never came in"
                if not why and witness is not None and witness.fenced is None and (witness.joined or t) > t:
                    why = "a recovery came first"  # no header carried the view with this newcomer; a later one did
                if not why and member in self.deaths and not later:
                    why = "death"
                self.facts.excluded.append(Exclusion(member, after, t, why, silent, later))

    def _awake(self, member: str, node: str, t: float, seconds: float, out: Exclusion | None) -> None:
        """A frozen member that was put out: after its thaw it must notice, and come back unless the job was over."""
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
        spoke = [x for x in witness.times if x > thaw]
        if witness.fenced is None and not any(name in _GOODBYES for _, name in witness.ends):
            again = "and went on writing" if spoke else "and was not heard of again"
            self.facts.unawakened.append(f"{member} was frozen, put out and woke, {again}, but was never fenced")
            return
        back = [w for m, w in self.who.items() if w.node == node and m != member and w.times[0] >= thaw - 0.001]
        if witness.fenced is not None and not back and not witness.ends:
            self.facts.unawakened.append(f"{member} was frozen and fenced when it woke, but did not join again")


def _commit(r: Record) -> Commit:
    return Commit(
        member=r.member,
        seq=f.integer(r.get("seq")),
        step=f.integer(r.get("step")),
        kind=str(r.get("kind", "step")),
        header=str(r.get("header", "")),
        prev=str(r.get("prev", "")),
        view=f.view_number(r.get("view")),
        contributors=tuple(m for m, _ in f.shares(r.get("contributors"))),
        used=f.spent(r.get("spent")),
        ledger=f.spent(r.get("ledger")),
        t=r.t,
    )


def gather(records: Iterable[Record]) -> Facts:
    """Sort the events of one log directory (in time order) by what they prove."""
    one = _Pass()
    for record in records:
        one.take(record)
    return one.conclude()
