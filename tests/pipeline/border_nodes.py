"""Runs members that have only links and border tensors (those that stages exchange); each can be a process of
its own.
"""

from __future__ import annotations

import threading
from functools import partial

from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.protocol.types import LinkReport, Member
from chaos_lightning.transport.links import Links, Takers
from chaos_lightning.transport.loop import IoLoop

DEADLINE_S = 60.0


class BorderNode:
    """Node of a test: a listener, links and a border exchange; events of the links are recorded.

    Attributes:
        exchange: Exchange for an executor.
        chunks: Receiver of chunks of gradients; None: there are none.
        broken: (peer, evidence) of links that stand no more.
    """

    def __init__(self, member_id: str, limit_nbytes: int = 1 << 30) -> None:
        self.id = member_id
        self.up: set[str] = set()
        self.broken: list[tuple[str, str]] = []
        self._crashes: list[BaseException] = []
        self._changed = threading.Condition()
        self.loop = IoLoop(member_id, self._crashes.append)
        self.links = Links(self.loop, "job", b"token", lambda line: None)
        self.exchange = BorderExchange(self._send, limit_nbytes)
        self.chunks = None
        self.links.listen("127.0.0.1", Takers(self, self, lambda sock, peer: None, self.exchange))
        self.links.me = member_id
        self.loop.start()

    def _send(self, *frame) -> None:
        self.loop.call(partial(self.links.chunk, *frame))

    @property
    def member(self) -> Member:
        return Member(self.id, self.id.partition("~")[0], "host", "127.0.0.1", self.links.port)

    def connect(self, *others: Member) -> None:
        """Opens links to these members, and waits until they are up."""
        self.loop.call(lambda: self.links.want(others))
        names = {m.id for m in others}
        with self._changed:
            assert self._changed.wait_for(lambda: self._crashes or names <= self.up, DEADLINE_S)
        assert not self._crashes, self._crashes

    def wait_broken(self) -> str:
        """Waits for a link to break; returns the evidence given for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._crashes or self.broken, DEADLINE_S)
        assert not self._crashes, self._crashes
        return self.broken[0][1]

    def close(self) -> None:
        self.loop.call(self.links.close)
        self.loop.stop()

    # what links tell ------------------------------------------------------------------

    def link_changed(self, peer: str, up: bool, evidence: str) -> None:
        with self._changed:
            (self.up.add if up else self.up.discard)(peer)
            if not up:
                self.broken.append((peer, evidence))
            self._changed.notify_all()

    def message(self, peer: str, payload: memoryview) -> None: ...

    def measured(self, report: LinkReport) -> None: ...

    def undelivered(self, to: str, source: str, reason: str) -> None: ...

    def target(self, peer, frame):
        assert self.chunks is not None, "no chunks here"
        return self.chunks.target(peer, frame)

    def arrived(self, peer, frame, payload):
        self.chunks.arrived(peer, frame, payload)
