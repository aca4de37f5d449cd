"""Tests that a connection reset between its handshake and its first use ends only its own link."""

from __future__ import annotations

import select
import socket
import struct
import threading

from chaos_lightning.protocol.types import NO_VIEW
from chaos_lightning.transport.frames import Frame, FrameType
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.locality import on_this_machine
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.reference import Generation

DEADLINE_S = 20.0


def reset_pair() -> socket.socket:
    """Returns one end of a TCP connection that the other end has reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    assert on_this_machine(here)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    poll = select.poll()
    poll.register(here, select.POLLIN)
    assert poll.poll(DEADLINE_S * 1e3)
    return here


class Owner:
    def __init__(self) -> None:
        self.evidence = ""
        self.told = threading.Event()

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        raise AssertionError("nothing arrives")

    def arrived(self, peer: str, frame: Frame, payload: object) -> None:
        raise AssertionError("nothing arrives")

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        self.evidence = evidence
        self.told.set()


def test_it_has_no_addresses_any_more_and_is_no_error() -> None:
    with reset_pair() as sock:
        assert not on_this_machine(sock)


def test_its_link_is_told_to_be_broken_and_the_loop_goes_on() -> None:
    crashes: list[BaseException] = []
    loop, owner, went_on = IoLoop("reset", crashes.append), Owner(), threading.Event()
    sock, generation = reset_pair(), Generation()

    def make() -> None:
        link = Link(loop, sock, "peer", owner, generation)
        link.send(FrameType.MESSAGE, NO_VIEW, 0, 0, (memoryview(b"word"),))

    loop.call(make)
    loop.start()
    try:
        assert owner.told.wait(DEADLINE_S)
        loop.call(went_on.set)
        assert went_on.wait(DEADLINE_S)
    finally:
        loop.stop()
    assert "reset" in owner.evidence or "pipe" in owner.evidence
    assert not crashes
