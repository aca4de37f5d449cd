"""What a scheduler does that stands by, is elected, and stands by again: its shell and its seat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from served import Facts, serving

from chaos_lightning.membership.types import Settings
from chaos_lightning.runtime.memory_store import MemoryStore
from chaos_lightning.runtime.store import Store


class PlainSeat:
    """A seat whose election is the test: it leads when `elect` is called, or never."""

    def __init__(self) -> None:
        self.elect: Callable[[], None] = lambda: None
        self.present: Callable[[], Any] = set
        self.closed = Facts[str]()
        self.was_led = False

    def contest(self, endpoint: str, on_elected: Any, on_lost: Any, note: Any, present: Any) -> None:
        self.elect, self.present = on_elected, present

    def asked(self, name: str) -> None:
        pass

    def open_store(self) -> Store:
        return MemoryStore()

    def rules(self, given: Settings) -> Settings:
        return given

    def waited(self) -> bool:
        return self.was_led

    def stands_by(self) -> bool:
        return False

    def leader(self) -> str:
        return ""

    def trouble(self) -> str:
        return ""

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed.add("closed")


def test_one_that_never_led_ends_when_nobody_needs_it() -> None:
    with serving(seat=PlainSeat(), idle_timeout_s=0.2) as served:
        assert served.wait_ended() == ("no member for 0.2 s; the chain stays in its store", False)


def test_a_task_that_fails_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.runtime.server import SchedulerServer

    def fail(self: SchedulerServer) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SchedulerServer, "_look_for_idleness", fail)
    with serving() as served:
        assert served.wait_ended() == ("internal error: ZeroDivisionError: planted", True)
