"""Provides a scheduler that is to rebuild a lost chain, and members that report to it
(test_membership_rebuilding.py).
"""

from __future__ import annotations

from dataclasses import replace

from membership_script import header_after

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    WHOLE,
    Entered,
    FromMember,
    Header,
    Heartbeat,
    Hello,
    LinkEvent,
    Member,
    RebuildReport,
    Recall,
    Report,
    Settings,
    View,
    ViewId,
)

GRACE_S = 2.0
NAMES = {n: Member(f"{n}~{i}", n, "host", "127.0.0.1", 1, pid=i, pid_start=7) for i, n in enumerate("abcd", 1)}


def view(number: int, predecessor: int, members: str, *, joiners: str = "") -> View:
    before = ViewId(1, predecessor) if predecessor else NO_VIEW
    them = tuple(NAMES[n] for n in members)
    return View(ViewId(1, number), before, them, tuple(NAMES[n].id for n in joiners))


ABC = view(3, 2, "abc")
ABCD = view(4, 3, "abcd", joiners="d")
HEAD = header_after(ABC, GENESIS, "step")


def hello(name: str, stands: View | None = None, *, term: int = 1, new: bool = False) -> Hello:
    member = NAMES[name]
    return Hello(
        "default", name, "host", "127.0.0.1", 1, member.pid, member.pid_start, 1, 1, "0.1", (("model", "small"),),
        resume="" if new else member.id, view=stands.id if stands is not None else NO_VIEW, term=term,
    )  # fmt: skip


class Talk:
    """Scheduler with a store whose answers a test chooses, and with records of the messages that it sends."""

    def __init__(self, *, rebuild: bool = True, min_nodes: int = 1, chain: fx.Chain | None = None) -> None:
        rules = Settings(min_nodes=min_nodes, reconnect_grace_s=GRACE_S)
        self.machine = SchedulerMachine(rules, chain or fx.Chain(1, NO_VIEW, rebuild=rebuild))
        self.now = 1.0
        self.stored: list[fx.Persist] = []
        self.terms: list[int] = []
        self.closed: list[int] = []
        self.said: dict[int, list[object]] = {}
        self.conns: dict[str, int] = {}
        self.streams = 0
        self.term_granted = True
        self.asks = ""
        """Request of each member for pipelines."""
        self.feed(fx.SchedulerTick())

    def feed(self, event: fx.SchedulerEvent) -> None:
        todo: list[fx.SchedulerEvent] = [event]
        before = len(self.stored)
        while todo:
            assert len(self.stored) < before + 20, f"it writes without end: {[str(e.number) for e in self.stored[-4:]]}"
            for effect in self.machine.on(self.now, todo.pop(0)):
                match effect:
                    case fx.Send(conn, message):
                        self.said.setdefault(conn, []).append(message)
                    case fx.Close(conn):
                        self.closed.append(conn)
                    case fx.Persist(token):
                        self.stored.append(effect)
                        todo.append(fx.Stored(token, True, ""))
                    case fx.TakeTerm(above):
                        self.terms.append(above)
                        todo += [fx.TermTaken(above + 1)] if self.term_granted else []
                    case _:
                        pass
            self.machine.validate_state()

    def comes(self, who: Hello) -> int:
        """Sends a hello on a new stream; returns the stream's number."""
        self.streams += 1
        conn = self.conns[who.name] = self.streams
        self.feed(fx.Opened(conn))
        self.feed(fx.MessageIn(conn, who))
        return conn

    def says(self, name: str, message: FromMember) -> None:
        self.feed(fx.MessageIn(self.conns[name], message))

    def reports(self, name: str, stands: View | None, waiting: View | None = None, promised: int = 0) -> None:
        """Makes a member come back and report its view, its waiting view and its promise."""
        self.comes(replace(hello(name, stands), pipelines=self.asks))
        assert self.heard(name, Recall)
        if stands is not None:
            self.says(name, Entered(stands.id, HEAD.seq, HEAD.step, HEAD.hash))
            for other in "abcd":
                if other != name:
                    self.says(name, LinkEvent(NAMES[other].id, True, "connected"))
        self.says(name, RebuildReport(stands, waiting, ViewId(1, promised)))

    def promises(self, name: str, entered: View | None, *, loaded: bool = True, last: Header = HEAD) -> None:
        number = self.machine.recovery.number
        stands = entered.id if entered is not None else NO_VIEW
        self.says(name, Report(number, stands, last.seq, last.hash, WHOLE if loaded else (), last=last))

    def passes(self, seconds: float) -> None:
        """Lets time pass, with ticks and with heartbeats of all connected members."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for conn in self.conns.values():
                self.feed(fx.MessageIn(conn, Heartbeat(NO_VIEW, 1, 1)))
            self.feed(fx.SchedulerTick())

    def heard(self, name: str, kind: type) -> list[object]:
        """Returns the messages that this member got on its present stream."""
        return [m for m in self.said.get(self.conns[name], []) if isinstance(m, kind)]

    def views(self) -> list[View]:
        return [entry.view for entry in self.stored if entry.view is not None]

    @property
    def reason(self) -> str:
        return str(self.machine.snapshot()["reason"])


def half_promised() -> Talk:
    """Returns a scheduler that rebuilds a chain with members a and b, without c: both have reported, and a has
    promised.
    """
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(1.1 * GRACE_S)
    talk.promises("a", ABC)
    return talk
