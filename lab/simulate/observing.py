"""Simulates joining by replay: what members keep for learners, and how these pull and replay it (protocol.md 15-18).

Theory of operation. A `Keeper` is a member's part, as replication/snapshot.py and log.py are a real one's. At the
first header that names a learner it copies the state, if it is a donor: what forward passes change at once, the rest
range by range during the next step's work, and what is left before that step changes the state. Committed slots go into
a bounded log, each a moment after its commit; slots that reduce nothing wait for that, and one whose buffer was used
again by then is left out.

An `Observation` is the newcomer's part, as member/observing.py is a real one's. It pulls the ranges of the copy from
its donors and applies the log, entry by entry, each asked for by the header that it must stand on. Having nothing
left to apply it says `CatchUp`, and follows on up to the header that lets it in. There the ranges are compared with
the members' (puller.py): what is equal is not moved. Whatever goes wrong costs time only: it says why, and is let in
by a pause.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.membership.catching_up import CatchingUp
from chaos_lightning.membership.donors import groups
from chaos_lightning.membership.recovery import needs_bytes
from chaos_lightning.protocol.types import CatchUp, Header, View
from lab.simulate.dataplane import Result, SumEntry
from lab.simulate.fabric import Endpoint
from lab.simulate.job import Job
from lab.simulate.puller import Pull
from lab.simulate.training import State, apply_result

STALL_S = 1.0
"""Seconds of silence after which a source is given up."""
_POLL_S = 0.008
_ROUNDS = 10
"""Number of times that a group of donors is asked before the next one is."""


@dataclass(slots=True)
class Copy:
    """Copy of the training state at one header, as far as it is finished."""

    header: Header
    ranges: dict[int, int]


class Keeper:
    """Keeper of one member's copy of the state and of the log, both for learners.

    Args:
        job: Job whose plan it follows.
        node: Process that has the training state.
    """

    def __init__(self, job: Job, node: Endpoint) -> None:
        self._job = job
        self.node = node
        self.copy: Copy | None = None
        self.entries: dict[int, SumEntry] = {}
        self.gone = -1
        """Last slot of a log that was ended."""
        self.copying = 0
        """Number of slots whose copy for the log is being made."""
        self._observed = False
        self._generation = 0

    @property
    def newest(self) -> int:
        return max(self.entries, default=-1)

    # ------------------------------------------------------------------ what the training thread does

    def settle(self) -> None:
        """Copies all ranges that are not copied yet, since the state is about to change."""
        if self.copy is not None:
            for index in range(len(self.node.state)):
                self._take(self.copy, index)

    def committed(self, before: Header, header: Header) -> None:
        """Handles a slot that this member has committed and applied: logs it, and begins a copy if learners need
        one.
        """
        if self._observed:
            self._log(header)
        if self._observed and not header.learners:
            self.release()
        serving = self.node.machine.serving
        if serving.copies and self.node.spec.memory:
            self.begin_copy(header)
        self._observed = serving.keeps

    def begin_copy(self, header: Header) -> None:
        """Begins to copy the state at `header`."""
        copy = self.copy = Copy(header, {})
        buffers = self._job.program.ranges
        self._take(copy, buffers)  # the next forward pass changes them
        kernel, duration = self.node.kernel, self._job.plan.replaying.copy_s
        for index in [i for i in range(len(self.node.state)) if i != buffers]:
            self.node.timer(kernel.between(0.0, duration), lambda i=index: self._take(copy, i))  # type: ignore[misc]

    def _take(self, copy: Copy, index: int) -> None:
        if copy is self.copy and index not in copy.ranges:
            copy.ranges[index] = self.node.state[index]

    def _log(self, header: Header) -> None:
        node, machine, generation = self.node, self.node.machine, self._generation

        def keep() -> None:
            self.copying -= 1
            results: tuple[Result, ...] | None = None
            if needs_bytes(header):
                done = node.plane.buffer(header.seq).done
                results = tuple(done.get(i, frozenset()) for i in range(self._job.program.ranges))
                if machine.seq > header.seq:
                    return  # too late: the buffer is about to be used again
            if generation == self._generation and machine is node.machine:
                self.entries[header.seq] = SumEntry(header, results)
                while len(self.entries) > self._job.plan.replaying.log_entries:
                    del self.entries[min(self.entries)]

        self.copying += 1
        node.timer(node.kernel.between(0.0, self._job.plan.replaying.log_s), keep)

    def release(self) -> None:
        """Drops the log and the copy, as no learner needs them any more."""
        self.gone = max(self.gone, self.newest)
        self._generation += 1
        self.copy = None
        self.entries.clear()

    # ------------------------------------------------------------------ what learners are given

    def state_at(self, header: Header) -> State | None:
        """Returns the copy of the state at exactly this header; None while it is unfinished.

        Raises:
            LookupError: The copy is not here, and will not be.
        """
        copy = self.copy
        if copy is not None and copy.header.hash == header.hash:
            whole = len(copy.ranges) == len(self.node.state)
            return tuple(copy.ranges[i] for i in range(len(copy.ranges))) if whole else None
        if self.node.machine.seq < header.seq and self.node.training:
            return None
        raise LookupError(f"the state at {header.hash} is not kept here")

    def after(self, at: Header) -> SumEntry | None:
        """Returns the log's entry for the slot after header `at`; None if that slot is not committed yet.

        Raises:
            LookupError: The entry is not here, and will not be.
        """
        entry = self.entries.get(at.seq + 1)
        if entry is not None and entry.header.prev_hash == at.hash:
            return entry
        if at.seq + 1 <= max(self.newest, self.gone) or not self.node.training:
            raise LookupError(f"slot {at.seq + 1} on {at.hash} is not in the log")
        return None


@dataclass(slots=True)
class _Source:
    """Member that a learner asks for the copy of the state and for the log."""

    member: str
    asked_at: float | None = None
    """Moment of the request whose answer has not come yet; None: the source answered last."""
    failed: str = ""


@dataclass(slots=True)
class _Log:
    """Position of a learner in the log."""

    at: Header
    newest: int


class Observation(Pull):
    """Replay by a learner: it pulls a copy of the state, and applies the log to it.

    Args:
        job: Job that it comes to.
        node: Process of the newcomer.
        header: First header that names it.
        view: View that names the sources: its members that are no joiners.
    """

    def __init__(self, job: Job, node: Endpoint, header: Header, view: View) -> None:
        super().__init__(job, node, header)
        self.state: State | None = None
        """State of the job after the last applied entry, in this process's memory; None while it is incomplete."""
        self.catching_up = CatchingUp()
        self.log = _Log(header, header.seq)
        self._attempt = header.learners.count(node.machine.member_id)
        self._sources = [_Source(m.id) for m in view.members if m.id not in view.joiners]
        self._ranges: dict[int, int] = {}
        self._whole: int | None = None
        self._target: Header | None = None
        self._give_up_at = float("inf")
        self._busy = False

    def start(self) -> None:
        self._round()

    # ------------------------------------------------------------------ let in

    def followed(self, target: Header) -> bool:
        """Prepares the learner's admission at this header; returns whether all log entries up to it are applied, or
        will never be.
        """
        now = self.node.kernel.now
        if self._target is None:
            self._target, self._give_up_at = target, now + self.catching_up.final_wait_s
        self._target = target
        over = self.stopped or self.state is None or now >= self._give_up_at
        if over or self.log.at.seq >= target.seq:
            self.stop()
            return True
        return False

    # ------------------------------------------------------------------ the copy

    def _round(self) -> None:
        if self.stopped or self.state is not None:
            return
        living = self._living()
        if not living:
            self._give_up("nobody keeps the state")
            return
        for index in range(len(self.node.state)):
            if index not in self._ranges:
                source = self.node.kernel.random.choice(living)
                self._asked(source)
                self._ask(source.member, lambda node, s=source, i=index: self._serve_copy(node, s, i))  # type: ignore[misc]
        self.node.timer(0.03, self._round)

    def _serve_copy(self, node: Endpoint, source: _Source, index: int) -> None:
        """Serves a range of the copied state; runs in the source's process."""
        try:
            state = node.serve_copy(self.header)
        except LookupError as error:
            words = str(error)
            self._answer(lambda: self._failed(source, words))
            return
        if state is None:
            self._answer(lambda: self._hear(source))
            return
        value, whole = state[index], hash(state)
        if self.node.kernel.random.random() < self.job.plan.damage:
            value ^= 1
        self._answer(lambda: self._take(source, index, value, whole), self.job.plan.replaying.pull_s)

    def _take(self, source: _Source, index: int, value: int, whole: int) -> None:
        self._hear(source)
        if self.state is not None:
            return
        self._ranges.setdefault(index, value)
        self._whole = whole
        if len(self._ranges) < len(self.node.state):
            return
        state: State = tuple(self._ranges[i] for i in range(len(self._ranges)))
        if not self.node.accept_state(hash(state) == self._whole):
            self._ranges.clear()
            return
        self.state = state
        self._next()

    # ------------------------------------------------------------------ the log

    def _next(self) -> None:
        """Asks the oldest source that has not failed for the next log entry."""
        if self.stopped:
            return
        living = self._living()
        if not living:
            self._give_up(f"nobody can give slot {self.log.at.seq + 1} of the log")
            return
        source, at = living[0], self.log.at
        if not self._busy:
            self._asked(source)
            self._ask(source.member, lambda node: self._serve_entry(node, source, at))
        self.node.timer(_POLL_S, self._next)

    def _serve_entry(self, node: Endpoint, source: _Source, at: Header) -> None:
        """Serves a log entry; runs in the source's process."""
        try:
            entry, newest = node.serve_entry(at)
        except LookupError as error:
            words = str(error)
            self._answer(lambda: self._failed(source, words))
            return
        self._answer(lambda: self._entry(source, at, entry, newest))

    def _entry(self, source: _Source, at: Header, entry: SumEntry | None, newest: int) -> None:
        self._hear(source)
        if entry is None or self._busy or at is not self.log.at:
            return
        if self._target is not None and entry.header.seq > self._target.seq:
            return
        self._busy = True
        self.log.newest = max(self.log.newest, newest)
        node = self.node
        duration = self.job.plan.replaying.apply_s * node.spec.pace * node.kernel.between(0.5, 1.5)
        node.timer(duration if entry.results is not None else 0.0, lambda: self._applied(entry))

    def _applied(self, entry: SumEntry) -> None:
        self._busy = False
        if self.stopped:
            return
        log, replaying = self.log, self.job.plan.replaying
        self.apply(entry)
        if self.stopped:
            return
        if entry.results is not None:
            self.catching_up.applied += 1
            if self.node.kernel.random.random() < replaying.impure and self.state is not None:
                self.state = (self.state[0] ^ 1, *self.state[1:])
        log.at = entry.header
        lag = log.newest - log.at.seq
        if self.catching_up.arrives(lag, idle=True):
            self.node.say(CatchUp(log.at.seq, attempt=self._attempt))
        hopeless = self.catching_up.hopeless(lag, self.node.kernel.now)
        if hopeless:
            self._give_up(hopeless)

    def apply(self, entry: SumEntry) -> None:
        """Applies a step of the log to the state, as a pure function of state and results."""
        if entry.results is not None and self.state is not None:
            self.state = apply_result(self.state, [self.job.oracle.gradients(result) for result in entry.results])

    # ------------------------------------------------------------------ sources

    def _living(self) -> list[_Source]:
        now, nodes = self.node.kernel.now, self.job.fabric.nodes
        for source in self._sources:
            node = nodes.get(source.member)
            if node is None or not node.alive or node.machine.member_id != source.member:
                source.failed = source.failed or "its connection is closed"
            elif source.asked_at is not None and now - max(source.asked_at, self.node.thawed_at) > STALL_S:
                source.failed = source.failed or "it is silent"
        return [s for s in self._sources if not s.failed]

    def _asked(self, source: _Source) -> None:
        if source.asked_at is None:
            source.asked_at = self.node.kernel.now

    def _hear(self, source: _Source) -> None:
        source.asked_at = None

    def _failed(self, source: _Source, why: str) -> None:
        source.failed = why

    def _give_up(self, reason: str) -> None:
        """Reports to the scheduler that this learner cannot catch up, unless it is being let in already."""
        if self._target is None:
            self.node.say(CatchUp(self.log.at.seq, able=False, reason=reason, attempt=self._attempt))
        self.stop()


# ------------------------------------------------------------------ let in


class StatePull(Pull):
    """Pull of a joiner's training state at one header, from members that have it.

    Args:
        job: Job that it comes to.
        node: Process of the joiner.
        header: Header at which its state is to be.
        view: View that names the sources (membership/donors.py).
        observation: Observation that it made before, if it comes in by replay.
    """

    def __init__(self, job: Job, node: Endpoint, header: Header, view: View, observation: Observation | None) -> None:
        super().__init__(job, node, header)
        self._observation = observation
        near = [m for m, up in node.machine.neighbours.links.items() if up]
        self._groups = [[m.id for m in group] for group in groups(view, node.machine.member_id, near)]
        self._rounds = 0
        self._ranges: dict[int, int] = {}
        self._hash: int | None = None
        self._held: State | None = None
        self._moved = 0

    def start(self) -> None:
        observation = self._observation
        if observation is not None and not self.stopped:
            if not observation.followed(self.header):
                self.node.timer(0.003, self.start)
                return
            self._held = observation.state
        kept = self.node.kept_ranges(self.header)
        self._ranges.update(kept)
        if len(kept) == len(self.node.state):
            self._complete(self.job.oracle.lineage)
        else:
            self._round()

    def _round(self) -> None:
        if self.stopped:
            return
        node, kernel = self.node, self.node.kernel
        donors = self._groups[self._rounds // _ROUNDS % len(self._groups)]
        self._rounds += 1
        for index in range(len(self.node.state)):
            if index not in self._ranges:
                donor = kernel.random.choice(donors)
                self._ask(donor, lambda source, i=index: self._serve(source, i))  # type: ignore[misc]
        node.timer(0.03, self._round)

    def _serve(self, source: Endpoint, index: int) -> None:
        state = source.serve_state(self.header)
        if state is None:
            return
        value, whole, lineage = state[index], source.served_hash(), source.lineage
        if self.node.kernel.random.random() < self.job.plan.damage:
            value ^= 1
        self._answer(lambda: self._take(index, value, whole, lineage))

    def _take(self, index: int, value: int, whole: int, lineage: str) -> None:
        if index not in self._ranges:
            self._ranges[index] = value
            self._moved += self._held is None or self._held[index] != value  # what is equal is not sent (16)
        self._hash = whole
        if len(self._ranges) == len(self.node.state):
            self._complete(lineage)

    def _complete(self, lineage: str) -> None:
        state: State = tuple(self._ranges[i] for i in range(len(self._ranges)))
        if not self.node.accept_state(hash(state) == self._hash):
            self._ranges.clear()
            return
        self.stop()
        self.node.state_loaded(self.header, state, lineage, self._moved)
