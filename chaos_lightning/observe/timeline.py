"""Builds a run's timeline from events: members' lives, views, committed slots, faults and transfers.

Theory of operation. `Timeline` is a fold: `take` takes one event after the other, in any process's file order, and
only ever adds facts, so the same class serves a finished run (report), a running one (live view) and a test. Nothing
is judged here; `folds.py` derives durations and losses, `audit.py` judges. A *life* is one member id: a process that
is fenced and joins again has several lives on one node's row. Facts that only the outside can tell (a death, an
injected fault) come from other writers' events; what a member did comes from its own. An event that nothing here knows
is shown in words if the room that declares it gives it a note.

Times are wall times in s unless a name says otherwise; None means that it did not happen as far as the logs tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chaos_lightning.events.reader import Record
from chaos_lightning.events.registry import known
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.pipeline_facts import PartPullFact, PipelinesFact, pipelines_of
from chaos_lightning.observe.spans import Spans
from chaos_lightning.planning.batch import Split

FREEZES = frozenset({"sigstop", "freeze"})
THAWS = frozenset({"sigcont", "thaw"})
KILLS = frozenset({"sigkill", "kill", "crash"})
"""Values of `fault_injected.kind` that stop, resume and end a process (testing/faults.py)."""
UNKNOWN_S = 1e9
"""Seconds from which on a remaining time means that it is not known (member/transfer.py)."""


@dataclass(frozen=True, slots=True)
class ProgressFact:
    """Progress of a state transfer, as the newcomer logged it last."""

    nbytes: int = 0
    """Bytes so far, those that were there before included."""
    total: int = 0
    """Bytes in all; 0: unknown."""
    rate_bps: float = 0.0
    """Rate of late in bits per second; 0: not known yet."""
    remaining_s: float | None = None
    """Remaining seconds at this rate; None: not known yet."""
    sources: tuple[tuple[str, int], ...] = ()
    """Donors as (donor, bytes), most bytes first."""


@dataclass(slots=True)
class PullFact:
    """Transfer of the training state to one newcomer."""

    started: float
    head: str = ""
    done: float | None = None
    sources: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds of each donor."""
    nbytes: int = 0
    skipped: int = 0
    """Bytes that the newcomer held already."""
    progress: ProgressFact = ProgressFact()
    """Progress that was told last while the transfer ran."""
    seconds: float = 0.0


@dataclass(slots=True)
class Life:
    """Life of one member id, from the process's first event (or its rejoin) to its end."""

    member: str
    node: str
    source: str = ""
    born: float = 0.0
    role: str = ""
    joined: float | None = None
    leaving: float | None = None
    ended: float | None = None
    end: str = ""
    """End of the life: "left", "finished", "fenced", "death" (seen by others), "killed" (injected), "" while it
    lives.
    """
    why: str = ""
    freezes: list[tuple[float, float | None]] = field(default_factory=list)
    pulls: list[PullFact] = field(default_factory=list)
    way: str = ""
    """Way in, as the scheduler chose: "replay" or "pause"."""
    why_way: str = ""
    replayed: int = 0
    """Steps of the log that the member applied before it came in."""
    last: float = 0.0
    """Wall time (s) of the member's own latest event."""
    last_step: int = 0
    state: str = "starting"
    """State in a word, for the live view."""


@dataclass(frozen=True, slots=True)
class ViewFact:
    """View, as the first event about it describes it."""

    id: str
    members: tuple[str, ...]
    joiners: tuple[str, ...]
    reason: str
    t: float
    split: Split | None = None
    """Division of a batch of fixed size among the members; None if there is no such batch."""

    @property
    def number(self) -> tuple[int, int]:
        """View number as (term, number)."""
        return f.view_number(self.id)


@dataclass(frozen=True, slots=True)
class CommitFact:
    """Commit of one slot by one member."""

    t: float
    mono: float
    duration_s: float
    wait_s: float
    spent: dict[f.Stream, Spans]


@dataclass(slots=True)
class SlotFact:
    """Committed slot: a header, and when each member committed it."""

    seq: int
    step: int
    kind: str
    header: str
    prev: str
    contributors: tuple[tuple[str, float], ...]
    """Contributors as (member id, weight), in rank order."""
    ledger: dict[f.Stream, Spans]
    commits: dict[str, CommitFact] = field(default_factory=dict)
    first: float = float("inf")
    """Wall time (s) of the slot's first commit."""
    complete: float = 0.0
    """Wall time (s) of the slot's last commit."""

    def commit(self, member: str, fact: CommitFact) -> None:
        """Takes in a member's commit; if a member logged several, the first counts."""
        if member not in self.commits:
            self.commits[member] = fact
            self.first, self.complete = min(self.first, fact.t), max(self.complete, fact.t)

    @property
    def who(self) -> tuple[str, ...]:
        """Member ids of the contributors, in rank order."""
        return tuple(member for member, _ in self.contributors)


@dataclass(frozen=True, slots=True)
class FaultFact:
    """Injected fault; its event was written before the fault struck."""

    t: float
    kind: str
    member: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LossFact:
    """Mean loss of the samples that one member used in a step."""

    t: float
    member: str
    step: int
    loss: float
    weight: float
    """Weight of these samples in the step."""


@dataclass(frozen=True, slots=True)
class FlowFact:
    """Traffic of one member on its link to another, and the link's measured rate."""

    t: float
    sent_bps: float
    received_bps: float
    rate_bps: float | None
    """Measured rate (bit/s) towards the other member; None: not measured."""
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class NoteFact:
    """Event that is shown as a line of text."""

    t: float
    name: str
    member: str
    text: str


@dataclass(slots=True)
class Timeline:
    """Fold over all events of one run."""

    start: float = 0.0
    stop: float = 0.0
    lives: dict[str, Life] = field(default_factory=dict)
    views: dict[str, ViewFact] = field(default_factory=dict)
    slots: dict[str, SlotFact] = field(default_factory=dict)
    """Slots by header hash, in the order of their first commit."""
    faults: list[FaultFact] = field(default_factory=list)
    notes: list[NoteFact] = field(default_factory=list)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    """State hashes by header hash and member."""
    deaths: dict[str, float] = field(default_factory=dict)
    """Time at which each dead member was first said to be dead."""
    suspects: dict[str, list[float]] = field(default_factory=dict)
    """Times at which each member was suspected; most suspicions are cleared."""
    hand_ons: list[tuple[float, int]] = field(default_factory=list)
    """Hand-ons as (time, slot number)."""
    redos: list[tuple[float, int]] = field(default_factory=list)
    waits: list[tuple[float, str, bool]] = field(default_factory=list)
    """Waits from `notice` events below min_nodes, as (time, member, whether waiting begins)."""
    flows: dict[str, dict[str, FlowFact]] = field(default_factory=dict)
    """Facts that a member told last about its link to a peer, by member and peer."""
    losses: list[LossFact] = field(default_factory=list)
    pipelines: list[PipelinesFact] = field(default_factory=list)
    part_pulls: list[PartPullFact] = field(default_factory=list)
    epochs: dict[f.Stream, int] = field(default_factory=dict)
    """Number of samples by (stream, epoch)."""
    folded: dict[str, Any] = field(default_factory=dict)
    """Results of folds over all that was taken in so far (`folds.py`)."""
    _newest: str = ""
    _opened: dict[str, float] = field(default_factory=dict)
    _roles: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Timeline:
        """Returns the timeline of these events."""
        timeline = cls()
        for record in records:
            timeline.take(record)
        return timeline

    def next_job(self) -> Timeline:
        """Returns an empty timeline for the next job in the same log directory; it remembers which process writes which
        file.
        """
        return Timeline(_opened=self._opened, _roles=self._roles)

    # ------------------------------------------------------------------------------------------------ adding

    def take(self, record: Record) -> None:
        """Takes one event in."""
        self.folded.clear()
        self.start = record.t if not self.start else min(self.start, record.t)
        self.stop = max(self.stop, record.t)
        if record.name == "opened":
            self._opened[record.source] = record.t
            self._roles[record.source] = str(record.get("role", "member"))
        writer = self._roles.get(record.source, "member")
        if record.member and record.by == record.member and writer == "member":
            life = self._life(record)
            if (own := _OWN.get(record.name)) is not None:
                own(self, record, life)
        if (told := _TOLD.get(record.name)) is not None:
            told(self, record)
        declared = known().get(record.name)
        if declared is not None and declared.note:
            self._note(record, declared.words(record.fields))

    def _life(self, record: Record) -> Life:
        life = self.lives.get(record.member)
        if life is None:
            born = self._opened.pop(record.source, record.t)
            life = self.lives[record.member] = Life(record.member, record.node, record.source, born=born)
        life.last = record.t
        for i, (begin, end) in enumerate(life.freezes):
            # A member that speaks does not sleep: only the injector knows when a freeze was meant to end.
            if end is None and record.t > begin + 0.001 and record.name != "fault_injected":
                life.freezes[i] = (begin, record.t)
        return life

    def _end(self, life: Life, record: Record, how: str, why: str = "") -> None:
        if life.ended is None or life.end == "death":
            life.ended, life.end, life.why = record.t, how, why
            life.state = how

    def _note(self, record: Record, text: str) -> None:
        self.notes.append(NoteFact(record.t, record.name, record.member or record.node, text))

    # -------------------------------------------------------------------------------- what members say of themselves

    def _welcomed(self, record: Record, life: Life) -> None:
        life.role = str(record.get("role", ""))
        life.state = "standby" if life.role == "standby" else "joining"

    def _joined(self, record: Record, life: Life) -> None:
        if life.joined is None:
            life.joined = record.t
            # Founders but the first take over its state, too, and say "joiner"; the welcome knows that they founded.
            life.role = life.role if life.role == "founder" else str(record.get("role", life.role))
            life.state = "training"
            life.last_step = f.integer(record.get("step"))
            if life.pulls and life.pulls[-1].done is None:
                life.pulls[-1].done = record.t  # it came in by parts

    def _left(self, record: Record, life: Life) -> None:
        self._end(life, record, "left", str(record.get("reason", "")))

    def _fenced(self, record: Record, life: Life) -> None:
        self._end(life, record, "fenced", str(record.get("reason", "")))
        self._opened[record.source] = record.t  # the next life of this process begins here
        self._note(record, f"fenced: {record.get('reason', '')}")

    def _finished(self, record: Record, life: Life) -> None:
        self._end(life, record, "finished")

    def _committed(self, record: Record, life: Life) -> None:
        header = str(record.get("header", ""))
        slot = self.slots.get(header)
        if slot is None:
            slot = self.slots[header] = SlotFact(
                seq=f.integer(record.get("seq")),
                step=f.integer(record.get("step")),
                kind=str(record.get("kind", "step")),
                header=header,
                prev=str(record.get("prev", "")),
                contributors=f.shares(record.get("contributors")),
                ledger=f.spent(record.get("ledger")),
            )
        self._newest = header
        times = (record.t, record.mono, f.number(record.get("duration_s")), f.number(record.get("wait_s")))
        slot.commit(record.member, CommitFact(*times, f.spent(record.get("spent"))))
        life.last_step = slot.step
        if life.state in ("joining", "starting", "pulling", "waiting", "recovering"):
            life.state = "training"
        if life.joined is None:
            life.joined = record.t

    def _state_hash(self, record: Record, life: Life) -> None:
        if record.get("hash"):
            self.hashes.setdefault(str(record.get("head", "")), {})[life.member] = str(record["hash"])

    def _replayed(self, record: Record, life: Life) -> None:
        life.replayed += f.integer(record.get("steps"))

    def _redo(self, record: Record, life: Life) -> None:
        if life.joined is not None:  # the founding decision redoes nothing
            self.redos.append((record.t, f.integer(record.get("base")) + 1))

    def _hand_on(self, record: Record, life: Life) -> None:
        self.hand_ons.append((record.t, f.integer(record.get("base"))))

    def _links(self, record: Record, life: Life) -> None:
        flows = self.flows[life.member] = {}
        for row in f.rows(record.get("links")):
            if isinstance(row, Mapping):
                flows[str(row.get("peer", ""))] = FlowFact(
                    record.t,
                    f.number(row.get("sent_bps")),
                    f.number(row.get("received_bps")),
                    f.number(row["rate_bps"]) if "rate_bps" in row else None,
                    f.number(row["latency_s"]) if "latency_s" in row else None,
                )

    def _loss(self, record: Record, life: Life) -> None:
        with contextlib.suppress(TypeError, ValueError):  # a diverged one is written as text
            loss, weight = float(record["loss"]), max(f.number(record.get("weight")), 1e-9)
            self.losses.append(LossFact(record.t, life.member, f.integer(record.get("step")), loss, weight))

    def _part_pulled(self, record: Record, life: Life) -> None:
        self.part_pulls.append(PartPullFact.of(record))
        self._part_arrives(record, life)

    def _parts_read(self, record: Record, life: Life) -> None:
        if record.get("parts"):
            self._part_arrives(record, life)

    def _part_arrives(self, record: Record, life: Life) -> None:
        """Takes in the pull of a part of the state; before the member has joined, the part counts as its pull of the
        state.
        """
        if life.joined is not None:
            return
        seconds = f.number(record.get("seconds"))
        if not life.pulls:
            life.pulls.append(PullFact(record.t - seconds))
        pull = life.pulls[-1]
        pull.nbytes += f.integer(record.get("nbytes"))
        pull.seconds += seconds
        for donor, nbytes in f.amounts(record.get("by_source")):
            before, took = pull.sources.get(donor, (0, 0.0))
            pull.sources[donor] = (before + nbytes, took + seconds)

    # ----------------------------------------------------------------------------------------------- state on its way

    def _pull_started(self, record: Record, life: Life) -> None:
        life.pulls.append(PullFact(record.t, str(record.get("head", ""))))
        life.state = "pulling"

    def _pull_source(self, record: Record, life: Life) -> None:
        if life.pulls:
            source, sources = str(record.get("source", "")), life.pulls[-1].sources
            nbytes, seconds = sources.get(source, (0, 0.0))
            sources[source] = (nbytes + f.integer(record.get("nbytes")), seconds + f.number(record.get("seconds")))

    def _pull_progress(self, record: Record, life: Life) -> None:
        if life.pulls:
            rate_bps, remaining_s = f.number(record.get("rate_bps")), f.number(record.get("remaining_s"), -1.0)
            life.pulls[-1].progress = ProgressFact(
                f.integer(record.get("nbytes")),
                f.integer(record.get("total")),
                rate_bps,
                # Writers put a huge number for "unknown", which JSON has no infinity for.
                remaining_s if rate_bps > 0 and 0 <= remaining_s < UNKNOWN_S else None,
                f.amounts(record.get("sources")),
            )

    def _pull_done(self, record: Record, life: Life) -> None:
        if not life.pulls:
            life.pulls.append(PullFact(record.t - f.number(record.get("seconds"))))
        pull = life.pulls[-1]
        pull.done = record.t
        pull.nbytes = f.integer(record.get("nbytes"))
        pull.skipped = f.integer(record.get("skipped"))
        pull.seconds = f.number(record.get("seconds"), record.t - pull.started)
        if pull.head and record.get("hash"):
            self.hashes.setdefault(pull.head, {})[life.member] = str(record["hash"])
        life.state = "joining"

    # ---------------------------------------------------------------------------------------- what anybody may tell

    def _leave(self, record: Record) -> None:
        life = self.lives.get(record.member)
        if life is not None and life.leaving is None:
            life.leaving, life.state = record.t, "leaving"
            self._note(record, f"asks to leave: {record.get('reason', '')}")

    def _way_in(self, record: Record) -> None:
        if (life := self.lives.get(record.member)) is not None:
            life.way, life.why_way = str(record.get("way", "")), str(record.get("reason", ""))

    def _view(self, record: Record) -> None:
        name = f.view_name(record.get("id"))
        if name and name not in self.views and record.get("members") is not None:
            members, joiners = f.ids(record.get("members")), f.ids(record.get("joiners"))
            self.views[name] = ViewFact(name, members, joiners, str(record.get("reason", "")), record.t)
        if name in self.views and record.get("batch"):  # a decision, which does not tell it, may have come first
            view = self.views[name]
            self.views[name] = replace(view, split=f.split(record.get("batch"), len(view.members)))

    def _pipelines(self, record: Record) -> None:
        found = pipelines_of(record)
        if found is not None and all(found.view != before.view for before in self.pipelines[-1:]):
            self.pipelines.append(found)

    def _death(self, record: Record) -> None:
        dead, evidence = self.lives.get(record.member), str(record.get("evidence", ""))
        if dead is not None and dead.end in ("left", "finished"):
            return  # its process ended as it should; the scheduler saw the stream close
        self.deaths.setdefault(record.member, record.t)
        if dead is not None and dead.ended is None:
            self._end(dead, record, "death", evidence)
        self._note(record, f"dead: {evidence}")

    def _suspect(self, record: Record) -> None:
        self.suspects.setdefault(record.member, []).append(record.t)

    def _notice(self, record: Record) -> None:
        if "waiting" in record.fields:
            waiting = bool(record["waiting"])
            self.waits.append((record.t, record.member, waiting))
            if waiting and record.member in self.lives:
                self.lives[record.member].state = "waiting"

    def _error(self, record: Record) -> None:
        self._note(record, str(record.get("text", f"{record.get('what', '')}: {record.get('reason', '')}")))

    def _fault(self, record: Record) -> None:
        kind, phase = str(record.get("kind", "")), str(record.get("phase", ""))
        seconds = f.number(record.get("seconds"))
        victim = self.living(record.node, record.t)
        member = victim.member if victim is not None else record.member
        self.faults.append(FaultFact(record.t, kind, member, phase, seconds))
        if victim is None:
            return
        if kind in KILLS:
            self._end(victim, record, "killed", phase)
        elif kind in FREEZES:
            victim.freezes.append((record.t, record.t + seconds if seconds > 0 else None))
            victim.state = "frozen"
        elif kind in THAWS:
            victim.freezes = [(a, record.t if b is None else b) for a, b in victim.freezes]

    def _epoch(self, record: Record) -> None:
        self.epochs[str(record.get("stream", "")), f.integer(record.get("epoch"))] = f.integer(record.get("length"))

    # ------------------------------------------------------------------------------------------------ reading

    def living(self, node: str, t: float) -> Life | None:
        """Returns the newest life of a node that had begun by time t (s); None if it had ended by then."""
        mine = [x for x in self.lives.values() if x.node == node and x.born <= t and (x.ended is None or x.ended >= t)]
        return max(mine, key=lambda x: x.born, default=None)

    def chain(self) -> list[SlotFact]:
        """Returns the slots that stayed in the job's history, oldest first: from the last commit back along the
        predecessors' hashes.

        A slot that only its dead committer knew is in `slots` but not here. Where the chain begins anew (a job that
        went on from a checkpoint) the earlier part is put before it.
        """
        rest = sorted(self.slots.values(), key=lambda s: (s.complete, s.seq))
        found: list[SlotFact] = []
        seen: set[str] = set()
        while rest:
            slot: SlotFact | None = rest[-1]
            while slot is not None and slot.header not in seen:
                seen.add(slot.header)
                found.append(slot)
                slot = self.slots.get(slot.prev)
            oldest = found[-1].first
            rest = [s for s in rest if s.header not in seen and s.complete < oldest and s.seq >= 1]
        return found[::-1]

    @property
    def origin(self) -> float:
        """Time at which pictures begin: the first member's start (the scheduler may have waited for hours before)."""
        return min((life.born for life in self.lives.values()), default=self.start)

    def recent(self, count: int) -> list[SlotFact]:
        """Returns the newest slots of the chain, oldest first."""
        slot = self.slots.get(self._newest)
        found: list[SlotFact] = []
        while slot is not None and len(found) < count:
            found.append(slot)
            slot = self.slots.get(slot.prev)
        return found[::-1]

    def prune(self, keep: int) -> None:
        """Drops all but the newest `keep` slots, to bound memory in runs that go on for days."""
        self.folded.clear()
        for header in list(self.slots)[: max(0, len(self.slots) - keep)]:
            del self.slots[header]
            self.hashes.pop(header, None)
        del self.losses[: max(0, len(self.losses) - keep)]

    def nodes(self) -> list[str]:
        """Returns the node names in the order in which they appeared."""
        return list(dict.fromkeys(x.node for x in sorted(self.lives.values(), key=lambda x: x.born)))


_OWN = {
    "welcomed": Timeline._welcomed,
    "joined": Timeline._joined,
    "left": Timeline._left,
    "fenced": Timeline._fenced,
    "finished": Timeline._finished,
    "committed": Timeline._committed,
    "state_hash": Timeline._state_hash,
    "replayed": Timeline._replayed,
    "redo": Timeline._redo,
    "hand_on": Timeline._hand_on,
    "links": Timeline._links,
    "train_loss": Timeline._loss,
    "pull_started": Timeline._pull_started,
    "pull_source": Timeline._pull_source,
    "pull_progress": Timeline._pull_progress,
    "pull_done": Timeline._pull_done,
    "part_pulled": Timeline._part_pulled,
    "resumed_kept": Timeline._parts_read,
}
"""Handlers of events of the member that wrote them: a scheduler's of the same name says less, and a moment earlier."""
_TOLD = {
    "leave": Timeline._leave,
    "way_in": Timeline._way_in,
    "view": Timeline._view,
    "decide": Timeline._view,
    "death": Timeline._death,
    "suspect": Timeline._suspect,
    "notice": Timeline._notice,
    "error": Timeline._error,
    "fault_injected": Timeline._fault,
    "epoch": Timeline._epoch,
    "pipelines": Timeline._pipelines,
}
"""Handlers of events, whichever process wrote them."""
