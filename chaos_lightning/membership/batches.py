"""Chooses which waiting events the scheduler's state machine gets in one batch, in a real process and in a simulation
alike."""

from __future__ import annotations

from collections import deque

from chaos_lightning.membership.effects import ChangeLink, Drain, Reset, SchedulerEvent, Stored

MOST = 256
"""Number of events in a batch at most: what the machine says meanwhile waits until it is through."""
_ALONE = (Drain, ChangeLink, Reset, Stored)
"""Events that are a batch of their own: an operator's wish, and the store's answer, on which all else waits."""


def next_batch(waiting: deque[SchedulerEvent]) -> list[SchedulerEvent]:
    """Removes and returns the next batch, one event or more, from the queue of waiting events, oldest first."""
    batch = [waiting.popleft()]
    while waiting and len(batch) < MOST and not isinstance(batch[-1], _ALONE) and not isinstance(waiting[0], _ALONE):
        batch.append(waiting.popleft())
    return batch
