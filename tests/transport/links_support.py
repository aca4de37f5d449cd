"""Helpers for tests with several members' links in one process: real listeners and sockets, but no state machine."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from chaos_lightning.protocol.types import LinkReport, LinkSpec, Member, View, ViewId
from chaos_lightning.transport.frames import Frame
from chaos_lightning.transport.links import Links, Takers
from chaos_lightning.transport.loop import IoLoop

T = TypeVar("T")
DEADLINE_S = 30.0


def pacing_of(sock: socket.socket) -> float:
    """Returns the rate to which the kernel paces this socket, in bits per second (struct tcp_info)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 120)
    return 8.0 * struct.unpack_from("=Q", info, 112)[0]


class Node:
    """Member with links but no state machine, which records what its links report.

    Attributes:
        messages: (source, payload) in the order in which they came.
        chunks: (peer, payload).
        reports: Measurements of links.
        undone: (to, source, reason) of messages that were dropped.
        changes: (peer, up, evidence).
    """

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.messages: list[tuple[str, bytes]] = []
        self.chunks: list[tuple[str, bytes]] = []
        self.reports: list[LinkReport] = []
        self.undone: list[tuple[str, str, str]] = []
        self.changes: list[tuple[str, bool, str]] = []
        self.refused: list[str] = []
        self.bulk: list[tuple[str, socket.socket]] = []
        self.serve_bulk: Callable[[socket.socket, str], object] = lambda sock, peer: None
        self._crash: list[BaseException] = []
        self._happened = threading.Condition()
        self.loop = IoLoop(member_id, self._on_crash)
        self.links = Links(self.loop, "job", b"token", lambda line: self._keep(self.refused, line))
        self.links.listen("127.0.0.1", Takers(self, self, lambda sock, peer: self.serve_bulk(sock, peer)))
        self.links.me = member_id
        self.loop.start()

    @property
    def member(self) -> Member:
        return Member(self.id, self.id.partition("~")[0], "host", "127.0.0.1", self.links.port)

    def _keep(self, where: list[Any], what: Any) -> None:
        with self._happened:
            where.append(what)
            self._happened.notify_all()

    def _on_crash(self, error: BaseException) -> None:
        self._keep(self._crash, error)

    # Host of links, and its chunks ----------------------------------------------

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: Any) -> None:
        self._keep(self.chunks, (peer, bytes(payload)))

    def message(self, peer: str, payload: memoryview) -> None:
        self._keep(self.messages, (peer, bytes(payload)))

    def link_changed(self, peer: str, up: bool, evidence: str) -> None:
        self._keep(self.changes, (peer, up, evidence))

    def measured(self, report: LinkReport) -> None:
        self._keep(self.reports, report)

    def undelivered(self, to: str, source: str, reason: str) -> None:
        self._keep(self.undone, (to, source, reason))

    # for tests ---------------------------------------------------------------

    def do(self, function: Callable[[], T]) -> T:
        """Runs a function in the loop's thread and returns its result."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.loop.call(work)
        return future.result(DEADLINE_S)

    def wait(self, condition: Callable[[], object], what: str = "") -> None:
        """Waits until the condition holds, checked after each event of the links."""
        with self._happened:
            ended = self._happened.wait_for(lambda: self._crash or condition(), DEADLINE_S)
        assert not self._crash, self._crash
        assert ended, (what or "nothing", self.__dict__)

    def wait_up(self, *peers: str) -> None:
        self.wait(lambda: all(self.is_up(p) for p in peers), f"links to {peers}")

    def is_up(self, peer: str) -> bool:
        """Returns whether the link to this peer is up, according to its latest event."""
        return bool([up for p, up, _ in self.changes if p == peer][-1:] == [True])

    def say(self, to: str, payload: bytes) -> None:
        self.do(lambda: self.links.message(to, payload))

    def rule(self, view: View) -> None:
        self.do(lambda: self.links.rule(view))

    def expect(self, *ids: str) -> None:
        """Makes this member expect links from these younger members, which are the ones to dial."""
        more = tuple(Member(i, i[0], "host", "127.0.0.1", 1) for i in ids)
        self.do(lambda: self.links.want((*self.links._wanted.values(), *more)))

    def close(self) -> None:
        self.loop.call(self.links.close)
        self.loop.stop()


Build = Callable[[str], dict[str, Node]]
"""Makes a member of each letter, named by it; see the fixture `build`."""


def connect(nodes: dict[str, Node], pairs: str) -> None:
    """Opens exactly these links, given as pairs of members' letters such as "ab bc", and waits until they are up."""
    beside: dict[str, list[str]] = {name: [] for name in nodes}
    for pair in pairs.split():
        for one, other in (pair, pair[::-1]):
            beside[one].append(other)
    for name, node in nodes.items():
        wanted = tuple(nodes[other].member for other in beside[name])
        node.do(lambda node=node, wanted=wanted: node.links.want(wanted))
    for name, node in nodes.items():
        node.wait_up(*(nodes[other].id for other in beside[name]))


def a_view(number: int, nodes: Iterable[Node], pairs: str) -> View:
    """Returns a view of these members, in this order, with links given as pairs of letters."""
    members = tuple(node.member for node in nodes)
    ids = {m.id[0]: m.id for m in members}
    links = tuple(LinkSpec(ids[pair[0]], ids[pair[1]]) for pair in pairs.split())
    return View(ViewId(1, number), ViewId(1, number - 1), members, links=links)
