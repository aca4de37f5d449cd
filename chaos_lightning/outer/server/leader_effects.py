"""Carries out the effects of the leader's state machine: what is stored, sent, ended and noted."""

from __future__ import annotations

from collections.abc import Callable

from chaos_lightning.errors import OversizeError, WireError
from chaos_lightning.outer.rules.effects import (
    Done,
    EntryStored,
    HangUp,
    LeaderEffect,
    LeaderEvent,
    OuterNote,
    SendTo,
    StoreEntry,
)
from chaos_lightning.outer.rules.types import Entry
from chaos_lightning.outer.server.chain_store import ChainStore
from chaos_lightning.outer.server.client_streams import ClientStreams


class LeaderEffects:
    """Effects of a leader's machine. Methods may only be called in one asyncio loop.

    Args:
        store: Store of the chain, which gets the entries.
        streams: Streams of clusters and followers.
        emit: Takes (event name, fields) for the event log.
        done: Called when the machine decides nothing more.
    """

    def __init__(
        self, store: ChainStore, streams: ClientStreams, emit: Callable[..., None], done: Callable[[Done], None]
    ) -> None:
        self._store = store
        self._streams = streams
        self._emit = emit
        self._done = done

    async def carry_out(self, effect: LeaderEffect) -> list[LeaderEvent]:
        """Carries out one effect; returns what the machine hears next: an entry is in the store before that (O1).

        Raises:
            StoreError: The store failed.
        """
        if isinstance(effect, StoreEntry):
            return [await self._keep(effect.entry)]
        self.answer(effect)
        return []

    def answer(self, effect: LeaderEffect) -> None:
        """Carries out an effect that stores nothing."""
        match effect:
            case SendTo(conn, message):
                self._streams.send(conn, message)
            case HangUp(conn, reason):
                self._streams.hang_up(conn, reason)
            case OuterNote(name, fields):
                self._emit(name, **dict(fields))
            case Done():
                self._done(effect)

    async def _keep(self, entry: Entry) -> EntryStored:
        try:
            outcome = await self._store.append(entry)
        except (OversizeError, WireError, TypeError) as error:
            self._emit("error", text=str(error), where="store")
            return EntryStored(False, str(error), unfit=True)
        return EntryStored(outcome.ok, outcome.detail)
