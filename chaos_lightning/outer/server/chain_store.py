"""Writes a leader's chain to its store, and reads it at the start.

Theory of operation. A record of the store is an entry: its kind is the name of what the entry says, its body that in
the bytes of outer/exchange/vocabulary.py. Position and term are the same; what an entry names as its predecessor is the
hash of the entry before, and what a record names is that of the record before. Both stores and chain compare (O1). A
summary is written as a cut: it takes the place of all records before it (O1a). Thread and retries are those of all
services (service/writer.py); clusters train on while a store takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from chaos_lightning.errors import StoreError
from chaos_lightning.outer.exchange.vocabulary import body_bytes, entry_of
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.types import Entry, Summary
from chaos_lightning.service.store import EMPTY, Appended, Store, StoreFactory
from chaos_lightning.service.writer import StoreWriter


def load_chain(store: Store, after: OuterChain | None = None) -> OuterChain:
    """Returns the state of the chain that the store contains.

    Args:
        store: Store of outer sync's chain.
        after: Chain that was read before, to be continued.

    Raises:
        StoreError: The store fails, or holds something else.
        ReadAnewError: The entries that follow `after` are not there any more.
    """
    chain = OuterChain() if after is None else after
    _, records = store.read(chain.position)
    for record in records:
        entry = entry_of(record, chain.hash)
        try:
            chain.follow(entry)
        except (ValueError, KeyError, AssertionError) as error:
            raise StoreError(f"{store.place}: record {record.position} does not follow: {error!r}") from error
    return chain


class ChainStore:
    """Store of a leader's chain. Methods may only be called in one asyncio loop.

    Args:
        open_store: Opens the store; called once, in its thread.
        emit: Takes (event name, fields) for the event log.
    """

    def __init__(self, open_store: StoreFactory, emit: Callable[..., None]) -> None:
        self._open_store = open_store
        self._store: Store | None = None
        self._end = EMPTY
        self._writer = StoreWriter(emit)

    @property
    def place(self) -> str:
        """Where the chain is stored, in words; "" before the store is opened."""
        return self._store.place if self._store is not None else ""

    async def take(self) -> tuple[OuterChain, int]:
        """Makes this the only leader that may write; returns the chain and this leader's term.

        Raises:
            StoreError: The store cannot be used, or holds something else.
        """
        return await self._writer.in_thread(self._take)

    def _take(self) -> tuple[OuterChain, int]:
        self._store = self._open_store()
        self._store.take_term()
        self._end = self._store.end()
        return load_chain(self._store), self._store.term

    async def append(self, entry: Entry) -> Appended:
        """Appends an entry by compare-and-set; if this returns ok, the entry is durable.

        Raises:
            OversizeError: The store takes no record of this size.
            StoreError: The store has taken nothing for some seconds.
            WireError: The entry fits into no record.
        """
        kind = type(entry.body).__name__
        return await self._writer.append(lambda: self._append(entry), kind=kind, number=entry.position)

    def _append(self, entry: Entry) -> Appended:
        assert self._store is not None, "take() comes first"
        assert (entry.position, entry.term) == (self._end.position + 1, self._store.term), "an entry out of turn"
        body, cut = entry.body, isinstance(entry.body, Summary)
        outcome = self._store.append(type(body).__name__, body_bytes(body), self._end, cut=cut)
        if outcome.ok:
            self._end = outcome.end
        return outcome

    async def close(self) -> None:
        """Closes the store, once a write under way is done."""
        await self._writer.close(lambda: self._store.close() if self._store is not None else None)
