"""Runs the leader's state machine: feeds it one event at a time, and carries out its effects in order.

Theory of operation. Everything that happens - a client says something, a stream ends, time passes, an operator's wish -
becomes an event in one queue, and one task feeds the machine from it. An entry is in the store before the effects
behind it are touched and before the machine hears of it (O1). A machine that is done hears nothing more; who comes to a
job that has ended is told so from here, while the leader is still about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from chaos_lightning.errors import OversizeError, WireError
from chaos_lightning.outer.exchange.line_keys import LineKeyIssuer
from chaos_lightning.outer.rules.effects import (
    Done,
    EntryStored,
    HangUp,
    Heard,
    LeaderEffect,
    LeaderEvent,
    OuterNote,
    SendTo,
    StoreEntry,
    StreamClosed,
    TimePassed,
)
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import ClusterHello, FollowerHello
from chaos_lightning.outer.rules.types import Entry
from chaos_lightning.outer.server.chain_store import ChainStore
from chaos_lightning.outer.server.streams import ClientStreams


class OuterDriver:
    """Driver of a leader's state machine. Methods may only be called in one asyncio loop.

    Args:
        store: Store of the chain, which gets the entries.
        keys: Tells both ends of data connections their keys.
        emit: Takes (event name, fields) for the event log.
    """

    def __init__(self, store: ChainStore, keys: LineKeyIssuer, emit: Callable[..., None]) -> None:
        self._store = store
        self._keys = keys
        self._emit = emit
        self.machine: LeaderMachine | None = None
        """State machine of the leader; None while this process does not lead."""
        self.done: Done | None = None
        """Reason for which the machine decides nothing more."""
        self._inbox: asyncio.Queue[LeaderEvent] = asyncio.Queue()
        self._time_waits = False

    def feed(self, event: LeaderEvent) -> None:
        """Queues an event for the machine; of TimePassed events at most one waits in the queue."""
        if isinstance(event, TimePassed):
            if self._time_waits:
                return
            self._time_waits = True
        self._inbox.put_nowait(event)

    async def drive(self, streams: ClientStreams, done: Callable[[Done], None]) -> None:
        """Feeds events to the machine and carries out its effects, until it is cancelled.

        Args:
            streams: Take the messages that the machine sends.
            done: Called when the machine decides nothing more.

        Raises:
            StoreError: The store failed.
        """
        assert self.machine is not None
        while True:
            event = await self._inbox.get()
            match event:
                case TimePassed():
                    self._time_waits = False
                case Heard(conn, message):
                    self._keys.heard(conn, message)
                case StreamClosed(conn):
                    self._keys.closed(conn)
            pending = [event]
            while pending and self.done is None:
                for effect in self.machine.on(time.monotonic(), pending.pop(0)):
                    if isinstance(effect, StoreEntry):
                        pending.append(await self._keep(effect.entry))
                    else:
                        self._carry_out(effect, streams, done)
            if self.done is not None:
                self._tell_the_end(event, streams, done)

    async def _keep(self, entry: Entry) -> EntryStored:
        try:
            outcome = await self._store.append(entry)
        except (OversizeError, WireError, TypeError) as error:
            self._emit("error", text=str(error), where="store")
            return EntryStored(False, str(error), unfit=True)
        return EntryStored(outcome.ok, outcome.detail)

    def _carry_out(self, effect: LeaderEffect, streams: ClientStreams, done: Callable[[Done], None]) -> None:
        match effect:
            case SendTo(conn, message):
                for to, what in self._keys.with_keys(conn, message):
                    streams.send(to, what)
            case HangUp(conn, reason):
                streams.hang_up(conn, reason)
            case OuterNote(name, fields):
                self._emit(name, **dict(fields))
            case Done():
                self.done = effect
                done(effect)

    def _tell_the_end(self, event: LeaderEvent, streams: ClientStreams, done: Callable[[Done], None]) -> None:
        assert self.machine is not None
        if isinstance(event, Heard) and isinstance(event.message, ClusterHello | FollowerHello):
            for effect in self.machine.farewell(event.conn, event.message):
                self._carry_out(effect, streams, done)
