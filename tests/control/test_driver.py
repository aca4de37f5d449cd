"""Batches for the scheduler's machine: each event at once while it is quick, many together while it is slow."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

from chaos_lightning.control import driver
from chaos_lightning.control.driver import Driver
from chaos_lightning.membership import effects as fx

EVENTS = 200


class Recorder:
    """A machine that says nothing, and for which each batch seems to take so long (s)."""

    def __init__(self, took_s: float) -> None:
        self.batches: list[int] = []
        self.busy_s = 0.0
        self._took_s = took_s

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        self.batches.append(len(events))
        self.busy_s += self._took_s
        return []

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        return {}


def batches(took_s: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches in which events are fed that come one by one."""
    machine = Recorder(took_s)
    monkeypatch.setattr(driver.time, "thread_time", lambda: machine.busy_s)

    async def feed_and_drive() -> None:
        fed = Driver(cast(Any, None), print, noted=print, done=print, refused=print)
        fed.machine = machine
        driving = asyncio.ensure_future(fed.drive(cast(Any, None)))
        for number in range(EVENTS):
            fed.feed(fx.Opened(number))
            for _ in range(3):  # the driver could take each event alone
                await asyncio.sleep(0)
        while sum(machine.batches) < EVENTS:
            await asyncio.sleep(0)
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving

    asyncio.run(feed_and_drive())
    return machine.batches


def test_a_quick_machine_gets_each_event_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches(0.0, monkeypatch) == [1] * EVENTS


def test_a_slow_machine_gets_what_comes_meanwhile_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = batches(0.05, monkeypatch)
    assert seen[0] == 1
    assert len(seen) < EVENTS / 2
