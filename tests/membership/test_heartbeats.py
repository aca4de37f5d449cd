"""Tests that heartbeats become less frequent as the number of members grows (protocol.md 12)."""

from __future__ import annotations

from typing import Any

import pytest
from membership_script import member, stored

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.past import Numbers
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.protocol.pace import (
    HEARTBEAT_COST_S,
    HEARTBEAT_SHARE,
    Pacing,
    heartbeat_interval_s,
    heartbeat_timeout_s,
)
from chaos_lightning.protocol.types import HeartbeatPace, Hello, Settings, View, ViewId, Welcome

RULES = Settings()


@pytest.mark.parametrize("count", [0, 1, 2, 16, 64])
def test_small_jobs_keep_what_the_settings_say(count: int) -> None:
    assert heartbeat_interval_s(RULES, count) == RULES.heartbeat_interval_s
    assert heartbeat_timeout_s(RULES, count) == RULES.heartbeat_timeout_s


@pytest.mark.parametrize("count", [1, 64, 256, 512, 1024, 10_000])
@pytest.mark.parametrize("rules", [RULES, Settings(heartbeat_interval_s=1.0, heartbeat_timeout_s=2.0)])
def test_the_bounds_hold_at_any_size(rules: Settings, count: int) -> None:
    interval_s, timeout_s = heartbeat_interval_s(rules, count), heartbeat_timeout_s(rules, count)
    assert interval_s <= max(rules.heartbeat_interval_s, rules.silence_timeout_s / 4)
    assert timeout_s >= 2 * interval_s
    if count <= 512:
        assert count * HEARTBEAT_COST_S / interval_s <= HEARTBEAT_SHARE


def test_timeouts_grow_before_intervals_and_shrink_after_them() -> None:
    pacing, later = Pacing(RULES), Pacing.FASTER_AFTER_S
    assert not pacing.follow(0.0, 64)
    assert pacing.follow(1.0, 1000)
    slow = heartbeat_interval_s(RULES, 1000), heartbeat_timeout_s(RULES, 1000)
    assert (pacing.interval_s, pacing.timeout_s) == slow
    assert not pacing.follow(2.0, 8)
    assert not pacing.follow(2.0 + later / 2, 8)
    assert pacing.follow(2.0 + later, 8)
    assert (pacing.interval_s, pacing.timeout_s) == (RULES.heartbeat_interval_s, slow[1])
    assert not pacing.follow(2.0 + 2 * later, 8)
    assert (pacing.interval_s, pacing.timeout_s) == (RULES.heartbeat_interval_s, RULES.heartbeat_timeout_s)


def test_members_that_come_back_meanwhile_are_waited_for() -> None:
    pacing, later = Pacing(RULES), Pacing.FASTER_AFTER_S
    pacing.follow(0.0, 1000)
    pacing.follow(1.0, 8)
    pacing.follow(1.0 + later, 8)
    assert pacing.follow(2.0 + later, 512)
    assert pacing.interval_s == heartbeat_interval_s(RULES, 512)
    assert pacing.timeout_s == heartbeat_timeout_s(RULES, 1000)


def said(name: str, **fields: object) -> Hello:
    return Hello(
        "default", name, f"host-{name}", "127.0.0.1", 7000, 1, 1, 1, 1, "1", (), **fields  # type: ignore[arg-type]
    )  # fmt: skip


def messages(effects: list[fx.SchedulerEffect], kind: type) -> dict[int, Any]:
    return {e.conn: e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, kind)}


def test_a_scheduler_that_takes_a_large_job_over_welcomes_with_its_pace() -> None:
    names = [f"m{i}~{i}" for i in range(1, 513)]
    view = stored(View(ViewId(1, 1), ViewId(), tuple(member(m) for m in names), chain="c"))
    machine = SchedulerMachine(RULES, fx.Chain(2, view.id, (view,), id="c", numbers=Numbers.of([view.id])))
    machine.on(0.0, fx.Opened(1))
    hello = said("m1", resume=names[0], view=view.id, term=1, chain="c")
    effects = machine.on(0.0, fx.MessageIn(1, hello))
    (welcome,) = messages(effects, Welcome).values()
    assert welcome.heartbeat_interval_s == heartbeat_interval_s(RULES, 512)
    assert welcome.heartbeat_timeout_s == RULES.heartbeat_timeout_s  # what members compare with their own setting
    assert not messages(effects, HeartbeatPace)


def test_all_are_told_once_when_the_job_outgrows_its_pace() -> None:
    rules = Settings(heartbeat_interval_s=0.003, heartbeat_timeout_s=0.009, min_nodes=9)
    machine = SchedulerMachine(rules, fx.Chain(1, ViewId()))
    told: list[dict[int, Any]] = []
    for conn in range(1, 6):
        machine.on(0.0, fx.Opened(conn))
        told.append(messages(machine.on(0.0, fx.MessageIn(conn, said(f"m{conn}"))), HeartbeatPace))
    four, five = HeartbeatPace(heartbeat_interval_s(rules, 4)), HeartbeatPace(heartbeat_interval_s(rules, 5))
    assert told == [{}, {}, dict.fromkeys((1, 2, 3), four), {}, dict.fromkeys((1, 2, 3, 4, 5), five)]
