"""Carries out the effects of the scheduler's state machine: what is stored, sent, drawn, looked at and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from chaos_lightning.control.chain_writer import ChainWriter
from chaos_lightning.control.drawing import Drawing
from chaos_lightning.control.member_streams import MemberStreams
from chaos_lightning.control.options import Owed
from chaos_lightning.errors import OversizeError
from chaos_lightning.machine.process_table import rebooted, same_machine_verdict
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Member

_ANSWER_TIMEOUT_S = 4.0
"""Seconds that a request waits for the machine, which may be writing to its store."""


class SchedulerLife(Protocol):
    """Interface of the scheduler's server, for what concerns its life."""

    def snapshot(self) -> dict[str, Any]:
        """Returns the machine's facts."""

    def noted(self, name: str) -> None:
        """Takes the name of each event that the machine notes."""

    def machine_is_done(self, effect: fx.SchedulerDone) -> None:
        """Takes that the machine is done, and why."""

    def refused(self, why: str) -> None:
        """Takes why the store did not accept a decision."""


class SchedulerEffects:
    """Effects of a scheduler's machine. Methods may only be called in one asyncio loop.

    Args:
        writer: Writer that stores decisions.
        streams: Streams of members.
        feed: Takes events for the machine.
        emit: Takes (event name, fields) for the event log.
        server: Told what concerns the server's life.
    """

    def __init__(
        self,
        writer: ChainWriter,
        streams: MemberStreams,
        feed: Callable[[fx.SchedulerEvent], None],
        emit: Callable[..., None],
        server: SchedulerLife,
    ) -> None:
        self._writer = writer
        self._streams = streams
        self._feed = feed
        self._emit = emit
        self._server = server
        self._answers: dict[int, asyncio.Future[tuple[bool, str]]] = {}
        self._count = 0
        self._drawing, self._search = Drawing(feed), Drawing(feed)
        """Processes that draw trees, and pipelines."""

    async def ask(self, event: Callable[[int], fx.SchedulerEvent]) -> tuple[bool, str]:
        """Queues an operator's request for the machine; returns its answer: whether it accepts, and a text."""
        self._count += 1
        token = self._count
        waiting = self._answers[token] = asyncio.get_running_loop().create_future()
        self._feed(event(token))
        try:
            return await asyncio.wait_for(waiting, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            return False, f"the scheduler did not get to it within {_ANSWER_TIMEOUT_S:g} s; ask again"
        finally:
            self._answers.pop(token, None)

    async def carry_out(self, effect: fx.SchedulerEffect) -> list[fx.SchedulerEvent]:
        """Carries out one effect; returns what the machine hears next.

        Raises:
            StoreError: The store failed.
        """
        match effect:
            case fx.Persist():
                # All members are done: nobody could decide it again.
                return [await self._persist(effect, final=effect.kind == "finish" and not effect.again)]
            case fx.Send(number, message):
                self._streams.send(number, message)
            case fx.Close(number, reason):
                self._streams.close(number, reason)
            case fx.Note(name, fields):
                self._emit(name, **dict(fields))
                self._server.noted(name)
            case fx.DrawPlan():
                self._drawing.draw(effect)
            case fx.SearchPipelines():
                self._search.draw(effect)
            case fx.Look(member):
                return _looked(member)
            case fx.TakeTerm(above, chain):
                return [fx.TermTaken(await self._writer.in_thread(self._writer.chain.take_term, above, chain))]
            case fx.Answer(token, accepted, text):
                waiting = self._answers.pop(token, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((accepted, text))
            case fx.SchedulerDone():
                self._server.machine_is_done(effect)
        return []

    async def close(self) -> None:
        """Ends the processes that draw."""
        await self._drawing.close()
        await self._search.close()

    async def _persist(self, effect: fx.Persist, *, final: bool) -> fx.Stored:
        owed = None
        if effect.ending is not None:
            effect = replace(effect, ending=replace(effect.ending, at=time.time()))
        if final:
            now = self._server.snapshot()
            owed = Owed(effect, str(now.get("chain", "")), str(now.get("view", "")))
        try:
            outcome = await self._writer.append(effect, owed)
        except OversizeError as error:
            if not error.fits:
                raise
            return fx.Stored(effect.token, False, str(error), error.fits)
        if not outcome.ok:
            self._server.refused(f"{effect.kind} {effect.number} was not accepted by the store: {outcome.detail}")
        return fx.Stored(effect.token, outcome.ok, outcome.detail)


def _looked(member: Member) -> list[fx.SchedulerEvent]:
    """Returns events for a member that this machine's process table proves dead; none if it proves nothing."""
    sight = same_machine_verdict(member)
    if sight.certain:
        return [fx.Gone(member.id, sight.evidence)]
    if not sight.evidence and (words := rebooted(member)):
        return [fx.Gone(member.id, words, rebooted=True)]
    return []
