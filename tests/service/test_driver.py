"""Tests the batches for the scheduler's machine: single events while it is quick, many together while it is slow."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.batches import next_batch
from chaos_lightning.protocol.types import NO_VIEW, Heartbeat
from chaos_lightning.service import driver
from chaos_lightning.service.driver import Driver

EVENTS = 200


class Recorder:
    """Machine that has no effects, counts the events of each batch, and seems to need `took_s` seconds for it."""

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


def driver_of(machine: Recorder, *, large: bool = False) -> Driver[fx.SchedulerEvent, fx.SchedulerEffect]:
    """Returns a driver of this machine, as a scheduler's server makes it."""

    def waits(event: fx.SchedulerEvent) -> bool:
        return isinstance(event, fx.MessageIn) and isinstance(event.message, Heartbeat) and large

    made = Driver[fx.SchedulerEvent, fx.SchedulerEffect](fx.SchedulerTick, batch=next_batch, waits=waits)
    made.on = machine.on
    return made


async def nothing(effect: fx.SchedulerEffect) -> list[fx.SchedulerEvent]:
    """Carries out effects of a machine that has none."""
    return []


def batches(took_s: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of the batches that a driver makes of events fed one by one, if each batch takes `took_s`."""
    machine = Recorder(took_s)
    monkeypatch.setattr(driver.time, "thread_time", lambda: machine.busy_s)

    async def feed_and_drive() -> None:
        fed = driver_of(machine)
        driving = asyncio.ensure_future(fed.drive(nothing))
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


@pytest.mark.parametrize("large", [False, True])
def test_heartbeats_of_a_large_job_are_taken_along_by_the_next_event(large: bool) -> None:
    machine = Recorder(0.0)
    beat = fx.MessageIn(1, Heartbeat(NO_VIEW, 0, 0))

    async def feed_and_drive() -> None:
        fed = driver_of(machine, large=large)
        driving = asyncio.ensure_future(fed.drive(nothing))
        for event in (beat, beat, fx.SchedulerTick(), beat, fx.Opened(2)):
            fed.feed(event)
            for _ in range(3):  # the driver could take each event alone
                await asyncio.sleep(0)
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving

    asyncio.run(feed_and_drive())
    assert machine.batches == ([3, 2] if large else [1] * 5)


def test_a_heartbeat_does_not_overtake_what_waits() -> None:
    taken: list[fx.SchedulerEvent] = []

    class Keeper(Recorder):
        def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
            taken.extend(events)
            return super().on(now, *events)

    machine = Keeper(0.0)
    fed: list[fx.SchedulerEvent] = [fx.MessageIn(n, Heartbeat(NO_VIEW, 0, 0)) for n in range(4)]
    fed[2:2] = [fx.Opened(9), fx.SchedulerTick()]

    async def feed_and_drive() -> None:
        driver = driver_of(machine, large=True)
        for event in fed:
            driver.feed(event)
        driving = asyncio.ensure_future(driver.drive(nothing))
        while len(taken) < len(fed):
            await asyncio.sleep(0)
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving

    asyncio.run(feed_and_drive())
    assert taken == fed
