"""Feeds events in batches to the scheduler's state machine, and carries out its effects in order.

Theory of operation. Everything that happens - a stream opens, says something, breaks; a tick; an operator's wish -
becomes an event in one queue, and one task feeds the machine with what lies there (membership/batches.py). So whatever
the machine does once per batch costs the less the more happens. A heartbeat of a large job wakes nobody: the next event
takes it along, a tick at the latest. A Persist is in the store before the effects behind it
are touched and before the machine hears `Stored`. So nothing is ever announced that a restart would not know.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from chaos_lightning.control.chain_writer import ChainWriter
from chaos_lightning.control.drawing import Drawing
from chaos_lightning.control.options import Owed
from chaos_lightning.control.streams import Streams
from chaos_lightning.errors import OversizeError
from chaos_lightning.machine.process_table import rebooted, same_machine_verdict
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.batches import next_batch
from chaos_lightning.protocol.types import Heartbeat, Member, Settings

_ANSWER_TIMEOUT_S = 4.0
"""Seconds that a request waits for the machine, which may be writing to its store."""
_LONG_S, _LONGEST_PAUSE_S = 0.005, 0.05
"""Seconds: a batch that took longer is followed by a pause; and the longest such pause."""


class Machine(Protocol):
    """Interface of the scheduler's state machine: membership.scheduler.SchedulerMachine, or a test double."""

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]: ...

    def snapshot(self, page: int = 0) -> dict[str, Any]: ...


MachineFactory = Callable[[Settings, fx.Chain], Machine]


def real_machine(settings: Settings, chain: fx.Chain) -> Machine:
    from chaos_lightning.membership.scheduler import SchedulerMachine

    return SchedulerMachine(settings, chain)


class Driver:
    """Loop that feeds the scheduler's state machine. Methods belong to one asyncio loop.

    Args:
        writer: Writer that stores decisions.
        emit: Takes (event name, fields) for the event log.
        noted: Told the name of each event that the machine notes.
        done: Told that the machine is done, and why.
        refused: Told why the store did not accept a decision.
        large: Whether there are so many members that a heartbeat need not be a batch of its own.
    """

    def __init__(
        self,
        writer: ChainWriter,
        emit: Callable[..., None],
        *,
        noted: Callable[[str], None],
        done: Callable[[fx.SchedulerDone], None],
        refused: Callable[[str], None],
        large: Callable[[], bool] = lambda: False,
    ) -> None:
        self._writer = writer
        self._emit = emit
        self._noted = noted
        self._done = done
        self._refused = refused
        self._large = large
        self.machine: Machine | None = None
        """State machine that is driven; None while this scheduler does not lead."""
        self._inbox: deque[fx.SchedulerEvent] = deque()
        self._fed = asyncio.Event()
        """Event that is set when something lies there that is not to wait."""
        self._tick_waits = False
        self._took_s = 0.0
        """CPU time (s) that the machine took for the last batch."""
        self._answers: dict[int, asyncio.Future[tuple[bool, str]]] = {}
        self._count = 0
        self._over = False
        self._drawing, self._search = Drawing(self.feed), Drawing(self.feed)
        """Processes that draw trees, and pipelines."""

    def feed(self, event: fx.SchedulerEvent) -> None:
        """Queues an event for the machine; at most one tick waits, and a large job's heartbeats wait for the next other
        event.
        """
        if isinstance(event, fx.SchedulerTick):
            if self._tick_waits:
                return
            self._tick_waits = True
        self._inbox.append(event)
        if not (isinstance(event, fx.MessageIn) and isinstance(event.message, Heartbeat) and self._large()):
            self._fed.set()

    async def ask(self, event: Callable[[int], fx.SchedulerEvent]) -> tuple[bool, str]:
        """Queues an operator's request for the machine; returns its answer: whether it accepts, and a text."""
        self._count += 1
        token = self._count
        waiting = self._answers[token] = asyncio.get_running_loop().create_future()
        self.feed(event(token))
        try:
            return await asyncio.wait_for(waiting, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            return False, f"the scheduler did not get to it within {_ANSWER_TIMEOUT_S:g} s; ask again"
        finally:
            self._answers.pop(token, None)

    async def drive(self, streams: Streams) -> None:
        """Feeds queued events to the machine until `stop` or an error; its messages go to `streams`.

        Raises:
            StoreError: The store failed.
        """
        self._over = False
        try:
            while not self._over:
                pending = [await self._batch()]
                while pending and not self._over:
                    pending += [[outcome] for outcome in await self._on(pending.pop(0), streams)]
        finally:
            await self._drawing.close()
            await self._search.close()

    async def _batch(self) -> list[fx.SchedulerEvent]:
        """Waits for events; returns all that have come, at least one.

        A batch costs the machine about the same however many events it has. One that took long is followed by a pause
        of the same length, in which more come together: else streams that are read one by one would each make a batch.
        """
        await self._fed.wait()
        if self._took_s > _LONG_S:
            await asyncio.sleep(min(self._took_s, _LONGEST_PAUSE_S))
        batch = next_batch(self._inbox)
        if not self._inbox:
            self._fed.clear()
        self._tick_waits = self._tick_waits and not any(isinstance(event, fx.SchedulerTick) for event in batch)
        return batch

    def stop(self) -> None:
        """Ends `drive`. Events that are still queued go to the next machine, which ignores them."""
        self._over = True

    async def _on(self, events: list[fx.SchedulerEvent], streams: Streams) -> list[fx.SchedulerEvent]:
        assert self.machine is not None
        outcomes: list[fx.SchedulerEvent] = []
        began = time.thread_time()
        effects = self.machine.on(time.monotonic(), *events)
        self._took_s = time.thread_time() - began
        for effect in effects:
            match effect:
                case fx.Persist():
                    # All members are done: nobody could decide it again.
                    final = effect.kind == "finish" and not effect.again
                    outcomes.append(await self._persist(effect, final))
                case fx.Send(number, message):
                    streams.send(number, message)
                case fx.Close(number, reason):
                    streams.close(number, reason)
                case fx.Note(name, fields):
                    self._emit(name, **dict(fields))
                    self._noted(name)
                case fx.DrawPlan():
                    self._drawing.draw(effect)
                case fx.SearchPipelines():
                    self._search.draw(effect)
                case fx.Look(member):
                    outcomes += _looked(member)
                case fx.TakeTerm(above, chain):
                    term = await self._writer.in_thread(self._writer.chain.take_term, above, chain)
                    outcomes.append(fx.TermTaken(term))
                case fx.Answer(token, accepted, text):
                    waiting = self._answers.pop(token, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result((accepted, text))
                case fx.SchedulerDone():
                    self._done(effect)
        return outcomes

    async def _persist(self, effect: fx.Persist, final: bool) -> fx.Stored:
        owed = None
        if effect.ending is not None:
            effect = replace(effect, ending=replace(effect.ending, at=time.time()))
        if final:
            assert self.machine is not None
            now = self.machine.snapshot()
            owed = Owed(effect, str(now.get("chain", "")), str(now.get("view", "")))
        try:
            outcome = await self._writer.append(effect, owed)
        except OversizeError as error:
            if not error.fits:
                raise
            return fx.Stored(effect.token, False, str(error), error.fits)
        if not outcome.ok:
            self._refused(f"{effect.kind} {effect.number} was not accepted by the store: {outcome.detail}")
        return fx.Stored(effect.token, outcome.ok, outcome.detail)


def _looked(member: Member) -> list[fx.SchedulerEvent]:
    """Returns events for a member that this machine's process table proves dead; none if it proves nothing."""
    sight = same_machine_verdict(member)
    if sight.certain:
        return [fx.Gone(member.id, sight.evidence)]
    if not sight.evidence and (words := rebooted(member)):
        return [fx.Gone(member.id, words, rebooted=True)]
    return []
