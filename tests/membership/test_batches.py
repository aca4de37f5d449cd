"""Tests which events the scheduler's state machine gets in one batch."""

from __future__ import annotations

from collections import deque

import pytest

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.batches import MOST, next_batch

OPENED = [fx.Opened(number) for number in range(MOST + 1)]


def test_whatever_waits_comes_at_once_up_to_a_bound() -> None:
    waiting = deque[fx.SchedulerEvent](OPENED)
    assert [next_batch(waiting), next_batch(waiting)] == [OPENED[:MOST], OPENED[MOST:]]
    assert not waiting


@pytest.mark.parametrize("alone", [fx.Drain("a"), fx.ChangeLink(1, "a", "b", True), fx.Reset(1), fx.Stored(1, True)])
def test_a_wish_and_an_answer_of_the_store_come_alone(alone: fx.SchedulerEvent) -> None:
    waiting = deque[fx.SchedulerEvent]([*OPENED[:2], alone, alone, OPENED[2]])
    assert [next_batch(waiting) for _ in range(4)] == [OPENED[:2], [alone], [alone], OPENED[2:3]]
