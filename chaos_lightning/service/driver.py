"""Feeds events to a service's state machine, and carries out its effects in order.

Theory of operation. Everything that happens - a client says something, a stream ends, time passes, an operator's wish -
becomes an event in one queue, and one task feeds the machine from it. It calls `carry_out` for each effect and waits
for it, so a record is in the store before the effects behind it are touched. What comes of an effect, such as the
store's answer, the machine hears next, before anything else in the queue. So nothing is ever announced that a restart
would not know.

A machine that handles many events at about the cost of one says which of those that wait it takes together (`batch`).
A batch that took long is then followed by a pause of the same length, in which more come together: else streams that
are read one by one would each make a batch. Events that need no attention of their own (`waits`) wake nobody: the next
other event takes them along.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

E = TypeVar("E")
"""Events of a service's machine."""
F = TypeVar("F")
"""Effects of a service's machine."""

_LONG_S, _LONGEST_PAUSE_S = 0.005, 0.05
"""Seconds: a batch that took longer is followed by a pause; and the longest such pause."""


def one_by_one(inbox: deque[E]) -> list[E]:
    """Takes one event: the batch of a machine that hears them one by one."""
    return [inbox.popleft()]


class Driver(Generic[E, F]):
    """Loop that feeds a machine. Methods may only be called in one asyncio loop.

    Args:
        ticks: Class of the events that time has passed; at most one waits.
        batch: Takes from the waiting events those that the machine hears together, at least one.
        waits: Returns whether an event may wait for the next other one.
    """

    def __init__(
        self,
        ticks: type,
        *,
        batch: Callable[[deque[E]], list[E]] = one_by_one,
        waits: Callable[[E], bool] = lambda event: False,
    ) -> None:
        self._ticks = ticks
        self._take = batch
        self._waits = waits
        self.on: Callable[..., Sequence[F]] | None = None
        """The machine's entrance: takes the time (monotonic, s) and a batch of events; returns what is to be done, in
        order. The same events give the same effects. None while this process does not lead.
        """
        self.deaf = False
        """Whether the machine has decided its last, and hears nothing more."""
        self._inbox: deque[E] = deque()
        self._fed = asyncio.Event()
        """Event that is set when something lies there that is not to wait."""
        self._tick_waits = False
        self._took_s = 0.0
        """CPU time (s) that the machine took for the last batch."""
        self._over = False

    def feed(self, event: E) -> None:
        """Queues an event for the machine."""
        if isinstance(event, self._ticks):
            if self._tick_waits:
                return
            self._tick_waits = True
        self._inbox.append(event)
        if not self._waits(event):
            self._fed.set()

    async def drive(
        self,
        carry_out: Callable[[F], Awaitable[Sequence[E]]],
        settled: Callable[[Sequence[E]], None] = lambda events: None,
    ) -> None:
        """Feeds queued events to the machine and carries out its effects, until `stop` or an error.

        Args:
            carry_out: Carries out an effect; returns events that came of it. Each is a batch of its own.
            settled: Called after each batch, once all that came of it is carried out.
        """
        self._over = False
        while not self._over:
            batch = await self._batch()
            pending = [batch]
            while pending and not (self._over or self.deaf):
                outcomes: list[E] = []
                for effect in self._on(pending.pop(0)):
                    outcomes += await carry_out(effect)
                pending += [[outcome] for outcome in outcomes]
            settled(batch)

    def stop(self) -> None:
        """Ends `drive`. Events that are still queued go to the next machine, which ignores them."""
        self._over = True

    async def _batch(self) -> list[E]:
        """Waits for events; returns all that the machine takes together."""
        await self._fed.wait()
        if self._took_s > _LONG_S and self._take is not one_by_one:
            await asyncio.sleep(min(self._took_s, _LONGEST_PAUSE_S))
        batch = self._take(self._inbox)
        if not self._inbox:
            self._fed.clear()
        self._tick_waits = self._tick_waits and not any(isinstance(event, self._ticks) for event in batch)
        return batch

    def _on(self, events: list[E]) -> Sequence[F]:
        assert self.on is not None, "nobody leads here"
        began = time.thread_time()
        effects = self.on(time.monotonic(), *events)
        self._took_s = time.thread_time() - began
        return effects
