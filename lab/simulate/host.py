"""Simulates the scheduler's process: the real state machine, a durable store, and control streams to members."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from chaos_lightning.errors import StoreError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.batches import next_batch
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.searching import searched
from chaos_lightning.membership.views import replanned
from chaos_lightning.planning.fleet.kernel import Kernel, Pipe, Process
from chaos_lightning.protocol.types import (
    Decide,
    Fence,
    FromMember,
    NextView,
    Notice,
    Prepare,
    Refused,
    Released,
    Settings,
    Welcome,
)
from lab.simulate.fabric import Stream, Taker
from lab.simulate.store import Store

PATIENCE_S = 5.0
"""Seconds for which a write is tried again (control/scheduler_server.py); then the process ends."""
AGAIN_S = 0.2
_DRAWS_S = 2.0
"""Most seconds that another process takes to draw a plan."""


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Facts about a scheduler's process that its state machine does not know.

    Attributes:
        number: Number of the candidate; each life has a number of its own.
        place: Name of its machine.
        orderly: Whether nothing happens while a write is out, and effects behind it in the list come after it, as in
            control/scheduler_server.py. Else a write takes its time beside everything else, which is more than happens.
    """

    number: int = 1
    place: str = "h0"
    orderly: bool = False
    hears_s: float = 0.0
    """Seconds for which the process listens, before it decides anything, for members that may know more
    (control/scheduler_server.py).
    """
    rebuild: bool = False
    """Whether the process was told to rebuild a lost chain."""
    copies: Callable[[object], int] = lambda message: 1
    """Function that returns the number of times that a message of the process arrives."""


@dataclass(slots=True)
class HostTrap:
    """Trap that acts just before the scheduler's effect (or the store's answer) number `skip` + 1 of a kind."""

    kind: str
    """Kind of effect: "any", "persist", "stored" (the store has it, the machine does not know), "send", "prepare",
    "decide", "next", "fence", "released" or "welcome".
    """
    skip: int
    spring: Callable[[], None]

    def matches(self, what: object) -> bool:
        if isinstance(what, fx.Send):
            name = _KINDS.get(type(what.message), "")
            return self.kind in ("any", "send", name) and not isinstance(what.message, Notice)
        if isinstance(what, fx.Stored):
            return self.kind == "stored"
        return self.kind == "any" or (self.kind == "persist" and isinstance(what, fx.Persist))


_KINDS = {
    Prepare: "prepare", Decide: "decide", NextView: "next", Fence: "fence", Released: "released", Welcome: "welcome"
}  # fmt: skip


class SchedulerHost(Process):
    """Process of a scheduler, from its start to its end.

    Args:
        kernel: Kernel with time and chance.
        store: Store, which outlives this process.
        settings: Rules of the job.
        machine: Function that makes the machine from settings and chain.
        store_s: Longest duration of a write, in seconds.
        check: Function that is called with the machine after every event.
        gone: Function that returns whether the process of a member was on this machine and is no more.
        candidacy: Further facts of the process.
    """

    def __init__(
        self,
        kernel: Kernel,
        store: Store,
        settings: Settings,
        machine: Callable[[Settings, fx.Chain], SchedulerMachine] = SchedulerMachine,
        store_s: float = 0.004,
        check: Callable[[SchedulerMachine], None] | None = None,
        gone: Callable[[str], bool] = lambda member: False,
        candidacy: Candidacy | None = None,
    ) -> None:
        super().__init__(kernel, "scheduler")
        self.store = store
        self.candidacy = candidacy or Candidacy()
        chain = store.open()
        self.seen = store.tip
        """End of the chain as this process saw it last."""
        # No other job begins in this world: who comes after the end is sent away.
        rebuild, hears_s = self.candidacy.rebuild, self.candidacy.hears_s
        self.machine = machine(settings, replace(chain, rebuild=rebuild, hears_s=hears_s, for_good=True))
        self.notes: list[tuple[float, fx.Note]] = []
        self.dialled: list[Stream] = []
        """Streams that were ever opened to this process."""
        self.on_note: Callable[[fx.Note], None] = lambda note: None
        self.slow_write: Callable[[fx.Persist], float] = lambda entry: 0.0
        """Function that returns the seconds of this write; 0: as usual."""
        self.answers: list[tuple[bool, str]] = []
        """Answers to requests for and against links."""
        self.on_answer: Callable[[int, bool], None] = lambda token, granted: None
        self.on_end: Callable[[], None] = lambda: None
        """Function that is called when the process ended by itself, since it was deposed or its store failed."""
        self.traps: list[HostTrap] = []
        self._copies: Callable[[object], int] = self.candidacy.copies
        self.cut_off = False
        """Whether the process cannot reach its store, while others can."""
        self.lost = 0
        """Number of streams that broke when the process died."""
        self._streams: dict[int, Stream] = {}
        self._inbox: deque[fx.SchedulerEvent] = deque()
        self._effects: deque[fx.SchedulerEffect] = deque()
        self._driving = self._writing = False
        self._store_s = store_s
        self._check = check
        self._gone = gone
        self.feed(fx.SchedulerTick())
        self.timer(self.machine.tick_interval_s, self._tick)

    @property
    def finished(self) -> bool:
        return self.machine.phase is SchedulerPhase.FINISHED

    def _tick(self) -> None:
        self.feed(fx.SchedulerTick())
        self.timer(self.machine.tick_interval_s, self._tick)

    def feed(self, event: fx.SchedulerEvent) -> None:
        """Queues one event, and handles all that are queued."""
        self._inbox.append(event)
        self._drive()

    def _drive(self) -> None:
        """Carries out queued effects and events one at a time; the process may stop or die between any two."""
        if self._driving:
            return
        self._driving = True
        try:
            while self.alive and not self.frozen and not self._writing and (self._effects or self._inbox):
                self._move()
        finally:
            self._driving = False

    def _move(self) -> None:
        what = self._effects[0] if self._effects else self._inbox[0]
        trap = next((t for t in self.traps if t.matches(what)), None)
        if trap is not None and trap.skip > 0:
            trap.skip -= 1
        elif trap is not None:
            self.traps.remove(trap)
            trap.spring()
            return
        if self._effects:
            self._apply(self._effects.popleft())
            return
        self._effects.extend(self.machine.on(self.kernel.now, *next_batch(self._inbox)))
        if self._check is not None:
            self._check(self.machine)

    def thaw(self) -> None:
        if self._effects and self.frozen and self.alive:
            self._backlog.insert(0, self._drive)
        super().thaw()

    def _notify(self, pipe: Pipe, notice: object, take: Taker) -> None:
        """Delivers a message meant for people, without drawing random numbers, so that new messages leave all seeds'
        runs unchanged.
        """

        def arrive() -> None:
            if self.kernel.now <= pipe.cut_at:
                take(notice)

        if pipe.open:
            self.kernel.at(max(pipe.last, self.kernel.now + pipe.lag + pipe.low), arrive)

    def _apply(self, effect: fx.SchedulerEffect) -> None:
        match effect:
            case fx.Send(conn, message):
                stream = self._streams.get(conn)
                if stream is not None:
                    send = partial(self._notify, stream.down) if isinstance(message, Notice) else stream.down.send
                    for _ in range(self._copies(message)):
                        send(message, stream.hear)
            case fx.Close(conn):
                stream = self._streams.pop(conn, None)
                if stream is not None:
                    stream.down.end(stream.lost)
            case fx.Persist():
                self._writing = self.candidacy.orderly
                self._write(effect, self.kernel.now)
            case fx.TakeTerm(above, chain):
                self._take_term(above, chain)
            case fx.Look(member):
                if self._gone(member.id):
                    self.timer(0.0, lambda: self.feed(fx.Gone(member.id, "its process is gone")))
            case fx.DrawPlan():
                drawn = fx.PlanDrawn(effect.token, *replanned(effect))
                self.timer(self.kernel.between(0.0, _DRAWS_S), lambda: self.feed(drawn))
            case fx.SearchPipelines():
                found = searched(effect)
                self.timer(self.kernel.between(0.0, _DRAWS_S), lambda: self.feed(found))
            case fx.Note():
                self.notes.append((self.kernel.now, effect))
                self.on_note(effect)
            case fx.Answer(token, accepted, text):
                self.answers.append((accepted, text))
                self.on_answer(token, accepted)
            case fx.SchedulerDone(reason, deposed, again):
                if deposed:
                    self.timer(0.0, self.end)
                elif again:  # no other job begins in this world
                    for stream in self._streams.values():
                        stream.down.send(Refused(reason), stream.hear)

    def _write(self, entry: fx.Persist, since: float) -> None:
        """Writes an entry, again if that fails; a write to a remote store takes effect even if this process dies
        meanwhile.
        """
        delay = self.kernel.between(0.0005, self._store_s)
        if self.store.slow_s:
            delay += self.kernel.between(0.0, self.store.slow_s)
        delay = self.slow_write(entry) or delay
        if self.store.remote:
            self.kernel.after(delay, lambda: self._land(entry, since))
        else:
            self.timer(delay, lambda: self._land(entry, since))

    def _land(self, entry: fx.Persist, since: float) -> None:
        try:
            if self.cut_off:
                self.store.errors += 1
                raise StoreError("etcd cannot be reached from here")
            outcome = self.store.write(self.machine.book.term, entry, self.candidacy.number, self.seen)
        except StoreError:
            self.timer(AGAIN_S, lambda: self._again(entry, since))
            return
        self.seen = self.store.tip if outcome.ok else self.seen
        answer = fx.Stored(entry.token, outcome.ok, outcome.detail)
        self.timer(self.kernel.between(0.0, 0.0005), lambda: self._stored(answer))

    def _again(self, entry: fx.Persist, since: float) -> None:
        if self.kernel.now - since > PATIENCE_S:
            self.end()
        else:
            self._write(entry, since)

    def _take_term(self, above: int, chain: str) -> None:
        try:
            term = self.store.open(above, chain).term
            self.seen = self.store.tip
        except StoreError:
            self.timer(AGAIN_S, lambda: self._take_term(above, chain))
            return
        self.timer(self.kernel.between(0.0005, 0.004), lambda: self.feed(fx.TermTaken(term)))

    def _stored(self, answer: fx.Stored) -> None:
        self._writing = False
        self._inbox.appendleft(answer)
        self._drive()

    def end(self) -> None:
        """Ends a process that is deposed or has lost its store: closes all streams, and calls `on_end`."""
        if self.alive:
            self.crash()
            self.on_end()

    # ------------------------------------------------------------------ streams

    def opened(self, stream: Stream) -> None:
        self._streams[stream.number] = stream
        self.feed(fx.Opened(stream.number))

    def message(self, stream: Stream, message: FromMember) -> None:
        if stream.number in self._streams:
            self.feed(fx.MessageIn(stream.number, message))

    def closed(self, stream: Stream, abrupt: bool) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self.feed(fx.Closed(stream.number, abrupt))

    def crash(self) -> None:
        """Kills the scheduler's process: every stream breaks."""
        self.die()
        self.lost = len(self._streams)
        for stream in self.dialled:
            delay = self.kernel.between(0.0003, 0.005)
            stream.down.cut(self.kernel.now + delay)
            stream.up.cut(self.kernel.now)
            self.kernel.after(delay, stream.lost)
