"""The run as it can be drawn: who lived when, which views ruled, which slots were committed by whom, what moved.

Theory of operation. `Timeline` is a fold: `add` takes one event after the other, in any process's file order, and
only ever adds facts, so the same class serves a finished run (report), a running one (live view) and a test. Nothing
is judged here; `folds.py` derives durations and losses, `audit.py` judges. A *life* is one member id: a process that
is fenced and joins again has several lives on one node's row. Facts that only the outside can tell (a death, an
injected fault) come from other writers' events; what a member did comes from its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.events.reader import Record
from chaos_lightning.events.registry import known
from chaos_lightning.observe import fields as f
from chaos_lightning.observe.facts import (
    FREEZES,
    KILLS,
    THAWS,
    Commit,
    Fault,
    Flow,
    Life,
    Note,
    Progress,
    Pull,
    Slot,
    ViewFact,
)

__all__ = ["FREEZES", "KILLS", "THAWS", "Commit", "Fault", "Life", "Note", "Pull", "Slot", "Timeline", "ViewFact"]

UNKNOWN_S = 1e9
"""A remaining time from here on means that nobody knows it (member/transfer.py)."""


@dataclass(slots=True)
class Timeline:
    """Fold of all events of one run."""

    start: float = 0.0
    stop: float = 0.0
    lives: dict[str, Life] = field(default_factory=dict)
    views: dict[str, ViewFact] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    """By header hash, in the order of their first commit."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Header hash -> member -> state hash."""
    deaths: dict[str, float] = field(default_factory=dict)
    """Member -> when somebody first said that it is dead."""
    suspects: dict[str, float] = field(default_factory=dict)
    decided: dict[str, float] = field(default_factory=dict)
    """View id -> when the scheduler decided it."""
    hand_ons: list[tuple[float, int, str]] = field(default_factory=list)
    """(time, seq, member)."""
    redos: list[tuple[float, int, str]] = field(default_factory=list)
    waits: list[tuple[float, str, bool]] = field(default_factory=list)
    """(time, member, waiting begins) from `notice` events below min_nodes."""
    flows: dict[tuple[str, str], Flow] = field(default_factory=dict)
    """(member, peer) -> what the member told last about its link to the peer."""
    epochs: dict[f.Stream, int] = field(default_factory=dict)
    """(stream, epoch) -> samples."""
    schedulers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Scheduler file -> (first, last event)."""
    lost: int = 0
    """Lines that a full disk swallowed."""
    _newest: str = ""
    _opened: dict[str, float] = field(default_factory=dict)
    _roles: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Timeline:
        """The timeline of these events."""
        timeline = cls()
        for record in records:
            timeline.add(record)
        return timeline

    def next_job(self) -> Timeline:
        """An empty timeline for the job that begins in the same log directory; it knows who writes which file."""
        return Timeline(_opened=self._opened, _roles=self._roles)

    # ------------------------------------------------------------------------------------------------ adding

    def add(self, record: Record) -> None:
        """Take one event in."""
        self.start = record.t if not self.start else min(self.start, record.t)
        self.stop = max(self.stop, record.t)
        role = self._roles.get(record.source, "")
        if record.name == "opened":
            self._opened[record.source] = record.t
            self._roles[record.source] = role = str(record.get("role", "member"))
        if role == "scheduler":
            first = self.schedulers.get(record.source, (record.t, record.t))[0]
            self.schedulers[record.source] = (first, record.t)
        life: Life | None = None
        if record.member and record.by == record.member and role not in ("scheduler", "harness", "agent"):
            life = self._life(record)
        handler = _HANDLERS.get(record.name)
        if handler is not None:
            handler(self, record, life)
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
            # Who speaks does not sleep: only the injector knows when a freeze was meant to end.
            if end is None and record.t > begin + 0.001 and record.name != "fault_injected":
                life.freezes[i] = (begin, record.t)
        return life

    def living(self, node: str, t: float) -> Life | None:
        """The life of this node at time t (s): the latest born by then, unless it ended before."""
        mine = [x for x in self.lives.values() if x.node == node and x.born <= t and (x.ended is None or x.ended >= t)]
        return max(mine, key=lambda x: x.born, default=None)

    def _end(self, life: Life | None, record: Record, how: str, why: str = "") -> None:
        if life is not None and (life.ended is None or life.end == "death"):
            life.ended, life.end, life.why = record.t, how, why
            life.state = how

    def _note(self, record: Record, text: str) -> None:
        self.notes.append(Note(record.t, record.name, record.member or record.node, text))

    # ------------------------------------------------------------------------------------------------ handlers

    def _welcomed(self, record: Record, life: Life | None) -> None:
        if life is not None:
            life.welcomed, life.role = record.t, str(record.get("role", ""))
            life.state = "standby" if life.role == "standby" else "joining"

    def _joined(self, record: Record, life: Life | None) -> None:
        if life is not None and life.joined is None:
            life.joined = record.t
            # Founders but the first take over its state, too, and say "joiner"; the welcome knows that they founded.
            life.role = life.role if life.role == "founder" else str(record.get("role", life.role))
            life.state = "training"
            life.last_seq, life.last_step = f.integer(record.get("seq")), f.integer(record.get("step"))

    def _leave(self, record: Record, life: Life | None) -> None:
        life = life or self.lives.get(record.member)  # the scheduler tells it, too
        if life is not None and life.leaving is None:
            life.leaving, life.state = record.t, "leaving"
            self._note(record, f"asks to leave: {record.get('reason', '')}")

    def _left(self, record: Record, life: Life | None) -> None:
        self._end(life, record, "left", str(record.get("reason", "")))

    def _fenced(self, record: Record, life: Life | None) -> None:
        self._end(life, record, "fenced", str(record.get("reason", "")))
        if life is not None:
            self._opened[record.source] = record.t  # the next life of this process begins here
            self._note(record, f"fenced: {record.get('reason', '')}")

    def _finished(self, record: Record, life: Life | None) -> None:
        self._end(life, record, "finished")

    def _view(self, record: Record, life: Life | None) -> None:
        name = f.view_name(record.get("id", record.get("view")))
        if not name:
            return
        if name not in self.views and record.get("members") is not None:
            self.views[name] = ViewFact(
                name,
                f.ids(record.get("members")),
                f.ids(record.get("joiners")),
                str(record.get("reason", "")),
                record.t,
            )
        if record.name == "decide":
            self.decided.setdefault(name, record.t)

    def _committed(self, record: Record, life: Life | None) -> None:
        header = str(record.get("header", ""))
        slot = self.slots.get(header)
        if slot is None:
            slot = self.slots[header] = Slot(
                seq=f.integer(record.get("seq")),
                step=f.integer(record.get("step")),
                kind=str(record.get("kind", "step")),
                header=header,
                prev=str(record.get("prev", "")),
                view=f.view_name(record.get("view")),
                next_view=f.view_name(record.get("next_view")),
                contributors=f.shares(record.get("contributors")),
                ledger=f.spent(record.get("ledger")),
            )
        self._newest = header
        slot.commits.setdefault(
            record.member,
            Commit(
                record.t,
                record.mono,
                f.number(record.get("duration_s")),
                f.number(record.get("wait_s")),
                f.spent(record.get("spent")),
            ),
        )
        if record.get("state_hash"):
            self.hashes.setdefault(header, {})[record.member] = str(record["state_hash"])
        if life is not None:
            life.last_seq, life.last_step = slot.seq, slot.step
            if life.state in ("joining", "starting", "pulling", "waiting", "recovering"):
                life.state = "training"
            if life.joined is None:
                life.joined = record.t

    def _state_hash(self, record: Record, life: Life | None) -> None:
        head = str(record.get("head", record.get("header", "")))
        if head and record.get("hash"):
            self.hashes.setdefault(head, {})[record.member] = str(record["hash"])

    def _way_in(self, record: Record, life: Life | None) -> None:
        if life is not None:
            life.way, life.why_way = str(record.get("way", "")), str(record.get("reason", ""))

    def _replayed(self, record: Record, life: Life | None) -> None:
        if life is not None:
            life.replayed += f.integer(record.get("steps"))

    def _pull_started(self, record: Record, life: Life | None) -> None:
        if life is not None:
            life.pulls.append(
                Pull(life.member, record.t, str(record.get("head", "")), seq=f.integer(record.get("seq")))
            )
            life.state = "pulling"

    def _pull_source(self, record: Record, life: Life | None) -> None:
        if life is not None and life.pulls:
            source, pull = str(record.get("source", "")), life.pulls[-1]
            before = pull.sources.get(source, (0, 0.0))
            pull.sources[source] = (
                before[0] + f.nbytes(record.fields),
                before[1] + f.number(record.get("seconds")),
            )

    def _pull_progress(self, record: Record, life: Life | None) -> None:
        if life is not None and life.pulls:
            rate_bps, remaining_s = f.number(record.get("rate_bps")), f.number(record.get("remaining_s"), -1.0)
            life.pulls[-1].progress = Progress(
                f.nbytes(record.fields),
                f.integer(record.get("total")),
                rate_bps,
                # Writers put a huge number for "unknown", which JSON has no infinity for.
                remaining_s if rate_bps > 0 and 0 <= remaining_s < UNKNOWN_S else None,
                f.amounts(record.get("sources")),
            )

    def _pull_done(self, record: Record, life: Life | None) -> None:
        if life is None:
            return
        if not life.pulls:
            life.pulls.append(Pull(life.member, record.t - f.number(record.get("seconds"))))
        pull = life.pulls[-1]
        pull.done = record.t
        pull.nbytes = f.nbytes(record.fields) or sum(n for n, _ in pull.sources.values())
        pull.skipped = f.integer(record.get("skipped"))
        pull.seconds = f.number(record.get("seconds"), record.t - pull.started)
        pull.hash = str(record.get("hash", ""))
        pull.head = pull.head or str(record.get("head", ""))
        if pull.head and pull.hash:
            self.hashes.setdefault(pull.head, {})[life.member] = pull.hash
        life.state = "joining"

    def _published(self, record: Record, life: Life | None) -> None:
        self._state_hash(record, life)

    def _death(self, record: Record, life: Life | None) -> None:
        dead, evidence = self.lives.get(record.member), str(record.get("evidence", record.get("reason", "")))
        if dead is not None and dead.end in ("left", "finished"):
            return  # its process ended as it should; the scheduler saw the stream close
        self.deaths.setdefault(record.member, record.t)
        if dead is not None and dead.ended is None:
            self._end(dead, record, "death", evidence)
        self._note(record, f"dead: {evidence}")

    def _suspect(self, record: Record, life: Life | None) -> None:
        self.suspects.setdefault(record.member, record.t)

    def _hand_on(self, record: Record, life: Life | None) -> None:
        self.hand_ons.append((record.t, f.integer(record.get("seq", record.get("base"))), record.member))

    def _redo(self, record: Record, life: Life | None) -> None:
        if life is None or life.joined is not None:  # the founding decision redoes nothing
            self.redos.append(
                (record.t, f.integer(record.get("seq", f.integer(record.get("base")) + 1)), record.member)
            )

    def _notice(self, record: Record, life: Life | None) -> None:
        if "waiting" in record.fields:
            waiting = bool(record["waiting"])
            self.waits.append((record.t, record.member, waiting))
            if life is not None and waiting:
                life.state = "waiting"

    def _error(self, record: Record, life: Life | None) -> None:
        self._note(record, str(record.get("text", f"{record.get('what', '')}: {record.get('reason', '')}")))

    def _fault(self, record: Record, life: Life | None) -> None:
        kind, node = str(record.get("kind", "")), record.node
        victim = self.living(node, record.t)
        step = record.get("step")
        self.faults.append(
            Fault(
                t=record.t,
                kind=kind,
                node=node,
                member=victim.member if victim is not None else record.member,
                phase=str(record.get("phase", "")),
                step=None if step is None else f.integer(step),
                seconds=f.number(record.get("seconds")),
            )
        )
        if victim is None:
            return
        if kind in KILLS:
            self._end(victim, record, "killed", str(record.get("phase", "")))
        elif kind in FREEZES:
            seconds = f.number(record.get("seconds"))
            victim.freezes.append((record.t, record.t + seconds if seconds > 0 else None))
            victim.state = "frozen"
        elif kind in THAWS:
            victim.freezes = [(a, record.t if b is None else b) for a, b in victim.freezes]

    def _links(self, record: Record, life: Life | None) -> None:
        rows = record.get("links")
        self.flows = {ends: flow for ends, flow in self.flows.items() if ends[0] != record.member}
        for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
            if isinstance(row, Mapping):
                self.flows[record.member, str(row.get("peer", ""))] = Flow(
                    record.t,
                    f.number(row.get("sent_bps")),
                    f.number(row.get("received_bps")),
                    f.number(row["rate_bps"]) if "rate_bps" in row else None,
                    f.number(row["latency_s"]) if "latency_s" in row else None,
                )

    def _epoch(self, record: Record, life: Life | None) -> None:
        self.epochs[str(record.get("stream", "")), f.integer(record.get("epoch"))] = f.integer(record.get("length"))

    def _lost(self, record: Record, life: Life | None) -> None:
        self.lost += f.integer(record.get("count"))

    # ------------------------------------------------------------------------------------------------ reading

    def chain(self) -> list[Slot]:
        """The slots that stayed: from the last committed one back along the predecessors' hashes, oldest first.

        A slot that only its dead committer knew is in `slots` but not here. Where the chain begins anew (a job that
        went on from a checkpoint) the earlier part is put before it.
        """
        rest = sorted(self.slots.values(), key=lambda s: (s.complete, s.seq))
        found: list[Slot] = []
        seen: set[str] = set()
        while rest:
            slot: Slot | None = rest[-1]
            while slot is not None and slot.header not in seen:
                seen.add(slot.header)
                found.append(slot)
                slot = self.slots.get(slot.prev)
            oldest = found[-1].first
            rest = [s for s in rest if s.header not in seen and s.complete < oldest and s.seq >= 1]
        return found[::-1]

    @property
    def origin(self) -> float:
        """Where pictures begin: the first member's birth (a scheduler may have waited for hours before)."""
        return min((life.born for life in self.lives.values()), default=self.start)

    def recent(self, count: int) -> list[Slot]:
        """The newest slots of the chain, oldest first."""
        slot = self.slots.get(self._newest)
        found: list[Slot] = []
        while slot is not None and len(found) < count:
            found.append(slot)
            slot = self.slots.get(slot.prev)
        return found[::-1]

    def prune(self, keep: int) -> None:
        """Forget all but the newest `keep` slots: for a view of a run that goes on for days."""
        for header in list(self.slots)[: max(0, len(self.slots) - keep)]:
            del self.slots[header]
            self.hashes.pop(header, None)

    def nodes(self) -> list[str]:
        """Node names in the order they appeared."""
        return list(dict.fromkeys(x.node for x in sorted(self.lives.values(), key=lambda x: x.born)))


_HANDLERS = {
    "welcomed": Timeline._welcomed,
    "joined": Timeline._joined,
    "leave": Timeline._leave,
    "left": Timeline._left,
    "fenced": Timeline._fenced,
    "finished": Timeline._finished,
    "view": Timeline._view,
    "decide": Timeline._view,
    "committed": Timeline._committed,
    "state_hash": Timeline._state_hash,
    "pull_started": Timeline._pull_started,
    "way_in": Timeline._way_in,
    "replayed": Timeline._replayed,
    "pull_source": Timeline._pull_source,
    "pull_progress": Timeline._pull_progress,
    "pull_done": Timeline._pull_done,
    "published": Timeline._published,
    "death": Timeline._death,
    "suspect": Timeline._suspect,
    "hand_on": Timeline._hand_on,
    "redo": Timeline._redo,
    "notice": Timeline._notice,
    "error": Timeline._error,
    "fault_injected": Timeline._fault,
    "links": Timeline._links,
    "epoch": Timeline._epoch,
    "lost": Timeline._lost,
}
