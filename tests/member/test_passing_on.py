"""Tests bulk connections that one member dials on behalf of another."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.errors import RefusedError
from chaos_lightning.member import shell
from chaos_lightning.member.shell import Shell
from chaos_lightning.protocol.types import Member, View, ViewId
from chaos_lightning.replication.source import Endpoint


class Passing:
    """Stand-in for the parts of a shell that dialling for others needs."""

    def __init__(self) -> None:
        self.machine = SimpleNamespace(view=None, member_id="b~2")
        self.dialled: list[Endpoint] = []
        self.transfer = SimpleNamespace(dial=self.dialled.append)

    def dial(self, member_id: str) -> None:
        Shell.dial(cast(Any, self), member_id)


def test_a_request_that_comes_before_the_view_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passing, asked = Passing(), threading.Event()
    monkeypatch.setattr(shell.time, "sleep", lambda _: asked.set())
    thread = threading.Thread(target=passing.dial, args=("a~1",))
    thread.start()
    assert asked.wait(30.0)
    assert not passing.dialled
    passing.machine.view = View(ViewId(1, 1), ViewId(), (Member("a~1", "a", "host", "127.0.0.1", 4),))
    thread.join(30.0)
    assert passing.dialled == [Endpoint("a~1", "127.0.0.1", 4)]


def test_a_stranger_is_refused_when_no_view_with_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "VIEW_PATIENCE_S", 0.0)
    with pytest.raises(RefusedError, match="x~9 is no member of the view that b~2 is in"):
        Passing().dial("x~9")
