"""Who greets a member's data port: whom it looked for, and what is written down of strangers."""

from __future__ import annotations

import threading
import time

import pytest
from links_support import DEADLINE_S, Node, until

from chaos_lightning.errors import RefusedError
from chaos_lightning.runtime.few_lines import FewLines
from chaos_lightning.transport.handshake import Greeting, dial


def test_who_greeted_the_member_that_this_one_was_before_gets_no_link() -> None:
    """It begins anew, under another id, between the end of the handshake and the loop's turn."""
    node = Node("b~2")
    go = threading.Event()

    def begin_anew() -> None:
        assert go.wait(DEADLINE_S)
        node.links.abandon()
        node.links.me = "b~7"

    try:
        node.loop.call(begin_anew)
        greeting = Greeting("job", "a~1", "b~2", "link")
        with dial("127.0.0.1", node.links.port, greeting, token=b"token") as sock:
            go.set()
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1) == b""
        node.do(lambda: None)
        assert node.changes == []
    finally:
        go.set()
        node.close()


def test_strangers_at_the_data_port_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines a second, and of the names that they claim a hundred characters."""
    now = [1000.0]
    monkeypatch.setattr("chaos_lightning.runtime.few_lines.time.monotonic", lambda: now[0])
    few = FewLines()
    assert [few.take() for _ in range(8)] == [0] * 5 + [None] * 3
    now[0] += 1.1
    assert [few.take(), few.take()] == [3, 0]
    monkeypatch.undo()
    node = Node("b~2")
    node.links._few = few = FewLines()
    monkeypatch.setattr(few, "_since_s", time.monotonic() + 3600)  # this second does not end

    def knock(me: str) -> None:
        with pytest.raises(RefusedError, match="wrong or missing"):
            dial("127.0.0.1", node.links.port, Greeting("job", me, "b~2", "link"), token=b"guess")

    try:
        for n in range(5):
            knock(f"{n}" + "x" * 2000)
            node.wait(lambda n=n: len(node.refused) == n + 1)
        assert all(len(line) < 300 and "x" * 99 + "...'" in line for line in node.refused)
        for _ in range(3):
            knock("y")
        until(lambda: few._dropped == 3, "the lines that are left out")
        assert len(node.refused) == 5
    finally:
        node.close()
