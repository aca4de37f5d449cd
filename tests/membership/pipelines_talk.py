"""Provides the scheduler of a job with pipelines, or with a batch of fixed size, and members whose messages a test
chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.pipelining import PipelinerFactory
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Entered,
    FromMember,
    Header,
    Heartbeat,
    Hello,
    Kept,
    Kind,
    Prepare,
    Ready,
    Report,
    Settings,
    Span,
    View,
    Welcome,
)
from lab.simulate.pipelines import RoundRobin, asked
from lab.simulate.training import Program

PROGRAM = Program(layers=4, stages=2, micro_batches=4)


class Talk:
    """Scheduler of a job with pipelines, and members whose messages a test chooses."""

    def __init__(
        self,
        *names: str,
        program: Program = PROGRAM,
        min_nodes: int = 1,
        asks: Callable[[str], str] | None = None,
        pipeliner_for: PipelinerFactory | None = None,
        workers: int = 1,
        batch: str = "",
    ) -> None:
        self.place = {"node": "rack", "workers": workers} if workers > 1 else {}
        """Node of each member: workers of one found a job together."""
        settings = Settings(min_nodes=min_nodes)
        made = pipeliner_for or (lambda requests: RoundRobin(program))
        self.machine = SchedulerMachine(settings, fx.Chain(1, NO_VIEW, id="c"), made)
        self.asks = asks or (lambda name: asked(program))
        """Request of each member for pipelines."""
        self.batch = batch
        """Batch of a step that all members name."""
        self.notes: list[dict[str, Any]] = []
        self.searches: list[fx.SearchPipelines] = []
        self.done: list[fx.SchedulerDone] = []
        self.speeds: dict[str, float] = {}
        """Speed that each member reports in heartbeats, by name."""
        self.steps: dict[str, tuple[float, float]] = {}
        """(seconds of a step, seconds between units of two steps) that each member reports in heartbeats, by name."""
        self.sample_s: dict[str, float] = {}
        """Seconds for a sample that each member reports in heartbeats, by name."""
        self.now = 0.0
        self.conns: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self.heard: dict[str, list[object]] = {}
        self.head: Header = GENESIS
        for name in names:
            self.come(name)
        # The first one founds it, the others join.
        while names and set(self.names(self.view.ids()).split()) != set(names):
            self.all_stand()
            self.wait(0.1)
        if names:
            self.all_stand()

    def feed(self, event: fx.SchedulerEvent) -> None:
        for effect in self.machine.on(self.now, event):
            match effect:
                case fx.Send(conn, message):
                    name = next(n for n, c in self.conns.items() if c == conn)
                    self.heard[name].append(message)
                    if isinstance(message, Welcome):
                        self.ids[name] = message.member.id
                case fx.Persist(token):
                    self.feed(fx.Stored(token, True))
                case fx.Note(name, fields):
                    self.notes.append({"name": name, **dict(fields)})
                case fx.SearchPipelines():
                    self.searches.append(effect)
                case fx.SchedulerDone():
                    self.done.append(effect)
        self.machine.validate_state()

    def say(self, name: str, message: FromMember) -> None:
        self.feed(fx.MessageIn(self.conns[name], message))

    def wait(self, seconds: float) -> None:
        """Lets time pass, while all members with a stream send heartbeats."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            for name in list(self.conns):
                view = self.machine.book.latest
                stands, speed = view.id if view is not None else NO_VIEW, self.speeds.get(name, 0.0)
                step_s, between_s = self.steps.get(name, (0.0, 0.0))
                told = {"speed": speed, "between_s": between_s, "sample_s": self.sample_s.get(name, 0.0)}
                self.say(name, Heartbeat(stands, self.head.seq, self.head.step, step_s, **told))
            self.feed(fx.SchedulerTick())

    def come(self, name: str, kept: Kept | None = None) -> None:
        """Sends a newcomer's hello, and then its message that it is ready."""
        self.pids[name] = self.hello(name, kept=kept, chain="c" if kept else "")
        self.say(name, Ready())

    def come_back(self, name: str) -> None:
        """Sends a known member's hello and its position to a scheduler that was restarted."""
        self.hello(name, resume=self.ids[name], view=self.view.id, term=1, chain="c", pid=self.pids[name])
        self.stand(name)

    def hello(self, name: str, **more: Any) -> int:
        """Sends a hello on a new stream, and returns the stream's number."""
        conn = self.conns[name] = 1 + max(self.conns.values(), default=0)
        self.heard[name] = []
        values: dict[str, Any] = {
            "address": "127.0.0.1",
            "port": 1,
            "pid": conn,
            "pid_start": 1,
            "quota": 1,
            "accumulate": 1,
        }
        values |= {"package": "0", "fingerprint": (), "pipelines": self.asks(name), "batch": self.batch}
        values |= self.place | more
        self.feed(fx.Opened(conn))
        self.say(name, Hello("default", name, f"host-{name}", **values))
        return conn

    def die(self, name: str) -> None:
        """Reports a member's death to the scheduler, as its own machine's process table would show it."""
        conn = self.conns.pop(name)
        self.feed(fx.Closed(conn))
        self.feed(fx.Gone(self.ids[name], "no such process"))

    def last(self, name: str, kind: type) -> object:
        return next((m for m in reversed(self.heard[name]) if isinstance(m, kind)), None)

    @property
    def view(self) -> View:
        view = self.machine.book.latest
        assert view is not None
        return view

    def owned(self, name: str, view: View | None = None) -> tuple[Span, ...]:
        return division(view or self.view).owned(self.ids[name])

    def all_stand(self) -> None:
        for name in self.names(self.view.ids()).split():
            self.stand(name)

    def stand(self, name: str, parts: tuple[Span, ...] | None = None) -> None:
        """Reports that a member has entered the latest view and holds these parts of the state; by default all that it
        owns there.
        """
        held = self.owned(name) if parts is None else parts
        self.say(name, Entered(self.view.id, self.head.seq, self.head.step, self.head.hash, held))

    def commit(self, change: View | None = None) -> None:
        """Records a step that all members have committed; `change` is a view that its header carries."""
        closed = self.view if change is None else self.machine.book.views[-2]
        self.head = Header(
            self.head.seq + 1, Kind.STEP, self.head.step + 1, closed.id, self.head.hash,
            change.id if change is not None else closed.id, view_change=change, reduced=True,
        )  # fmt: skip

    def reports(self, name: str, entered: View, parts: tuple[Span, ...]) -> None:
        prepare = self.last(name, Prepare)
        assert isinstance(prepare, Prepare)
        owns = division(entered).owned(self.ids[name])
        at = self.head
        self.say(name, Report(prepare.number, entered.id, at.seq, at.hash, parts, last=at, owns=owns))

    def names(self, members: tuple[str, ...]) -> str:
        return " ".join(sorted(m.partition("~")[0] for m in members))
