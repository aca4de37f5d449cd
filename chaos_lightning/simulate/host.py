"""The scheduler's process in a simulated job: the real machine, a durable store, and streams to members."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import Phase, SchedulerMachine
from chaos_lightning.membership.types import NO_VIEW, FromMember, Notice, Settings, View, ViewId
from chaos_lightning.simulate.kernel import Kernel, Process

if TYPE_CHECKING:
    from chaos_lightning.simulate.connected import Connected
    from chaos_lightning.simulate.fabric import Pipe, Stream, Taker


class Store:
    """A file on the scheduler's host: durable, compare-and-set on term and predecessor (PROTOCOL.md 7, 14a)."""

    def __init__(self) -> None:
        self.term = 0
        self.highest: ViewId = NO_VIEW
        self.views: list[View] = []
        self.wishes: list[fx.LinkWish] = []
        self.done = False

    def open(self) -> fx.Chain:
        """A scheduler starts: its term outranks every older one."""
        self.term += 1
        return fx.Chain(self.term, self.highest, tuple(self.views), self.done, tuple(self.wishes))

    def write(self, term: int, entry: fx.Persist) -> tuple[bool, str]:
        """(ok, why not)"""
        if term != self.term:
            return False, f"term {term} is over, {self.term} rules"
        if entry.kind == "link":
            assert entry.wish is not None
            self.wishes.append(entry.wish)
            return True, ""
        if entry.number.number <= self.highest.number and entry.kind != "view":
            return False, f"{entry.number} was issued before, up to {self.highest}"
        if entry.kind == "view":
            assert entry.view is not None
            last = self.views[-1].id if self.views else NO_VIEW
            if entry.view.predecessor != last:
                return False, f"the last view is {last}, not {entry.view.predecessor}"
            self.views.append(entry.view)
        self.done = self.done or entry.kind == "finish"
        self.highest = max(self.highest, entry.number)
        return True, ""


class SchedulerHost(Process):
    """One life of the scheduler.

    Args:
        kernel: Time and chance.
        store: What outlives this process.
        settings: The job's rules.
        machine: Makes the machine from settings and chain.
        store_s: Longest duration of a write, in seconds.
        check: Called with the machine after every event.
        gone: Whether the process of this member was on this machine and is no more.
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
    ) -> None:
        super().__init__(kernel, "scheduler")
        self.store = store
        self.machine = machine(settings, store.open())
        self.notes: list[tuple[float, fx.Note]] = []
        self.dialled: list[tuple[Stream, Connected]] = []
        """All streams ever opened to this process."""
        self.on_note: Callable[[fx.Note], None] = lambda note: None
        self.slow_write: Callable[[fx.Persist], float] = lambda entry: 0.0
        """How long this write takes (s); 0: as usual."""
        self.answers: list[tuple[bool, str]] = []
        """To requests for and against links."""
        self.on_answer: Callable[[int, bool], None] = lambda token, granted: None
        self._streams: dict[int, tuple[Stream, Connected]] = {}
        self._store_s = store_s
        self._check = check
        self._gone = gone
        self.feed(fx.SchedulerTick())
        self.timer(self.machine.tick_interval_s, self._tick)

    @property
    def finished(self) -> bool:
        return self.machine.phase is Phase.FINISHED

    def _tick(self) -> None:
        self.feed(fx.SchedulerTick())
        self.timer(self.machine.tick_interval_s, self._tick)

    def feed(self, event: fx.SchedulerEvent) -> None:
        for effect in self.machine.on(self.kernel.now, event):
            self._apply(effect)
        if self._check is not None:
            self._check(self.machine)

    def _notify(self, pipe: Pipe, notice: object, take: Taker) -> None:
        """Words for people, on which no machine acts: they draw no chance, so that new ones change no seed's course."""

        def arrive() -> None:
            if self.kernel.now <= pipe.cut_at:
                take(notice)

        if pipe.open:
            self.kernel.at(max(pipe.last, self.kernel.now + pipe.lag + pipe.low), arrive)

    def _apply(self, effect: fx.SchedulerEffect) -> None:
        match effect:
            case fx.Send(conn, message):
                entry = self._streams.get(conn)
                if entry is not None:
                    stream, node = entry
                    send = partial(self._notify, stream.down) if isinstance(message, Notice) else stream.down.send
                    send(message, lambda m: node.deliver(lambda: node.control(stream, m)))
            case fx.Close(conn):
                entry = self._streams.pop(conn, None)
                if entry is not None:
                    stream, node = entry
                    stream.down.end(lambda: node.stream_lost(stream))
            case fx.Persist():
                delay = self.kernel.between(0.0005, self._store_s)
                self.timer(self.slow_write(effect) or delay, lambda: self._write(effect))
            case fx.Look(member):
                if self._gone(member.id):
                    self.timer(0.0, lambda: self.feed(fx.Gone(member.id, "its process is gone")))
            case fx.Note():
                self.notes.append((self.kernel.now, effect))
                self.on_note(effect)
            case fx.Answer(token, accepted, text):
                self.answers.append((accepted, text))
                self.on_answer(token, accepted)
            case fx.SchedulerDone():
                pass

    def _write(self, entry: fx.Persist) -> None:
        ok, detail = self.store.write(self.machine.term, entry)
        self.timer(self.kernel.between(0.0, 0.0005), lambda: self.feed(fx.Stored(entry.token, ok, detail)))

    # ------------------------------------------------------------------ streams

    def opened(self, stream: Stream, node: Connected) -> None:
        self._streams[stream.number] = (stream, node)
        self.feed(fx.Opened(stream.number))

    def message(self, stream: Stream, message: FromMember) -> None:
        if stream.number in self._streams:
            self.feed(fx.MessageIn(stream.number, message))

    def closed(self, stream: Stream, abrupt: bool) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self.feed(fx.Closed(stream.number, abrupt))

    def crash(self) -> None:
        """The process dies: every stream breaks."""
        self.die()
        for stream, node in self.dialled:
            delay = self.kernel.between(0.0003, 0.005)
            stream.down.cut(self.kernel.now + delay)
            stream.up.cut(self.kernel.now)
            self.kernel.after(delay, lambda s=stream, n=node: n.stream_lost(s))  # type: ignore[misc]
