"""Writes the scheduler's decisions to its store, and shortens the chain that they make.

Theory of operation. Thread and retries are those of all services (service/writer.py). The end of a job alone is *owed*
for as long as the process lives, also when it has led no more in between: all members are done by then, and nobody
could decide it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from chaos_lightning.control.job_chain import SUMMARY, JobChain
from chaos_lightning.control.options import Owed
from chaos_lightning.errors import StoreError
from chaos_lightning.membership import effects as fx
from chaos_lightning.service.store import Appended, StoreFactory
from chaos_lightning.service.writer import StoreWriter


class ChainWriter:
    """Writes one scheduler's decisions to its store. Methods belong to one asyncio loop.

    Args:
        open_store: Opens the store that decisions go to; called once, in the store's thread.
        emit: Takes (event name, fields) for the event log.
        owed: End of a job that this process could not store when it led last; None if there is none.
    """

    def __init__(self, open_store: StoreFactory, emit: Callable[..., None], owed: Owed | None = None) -> None:
        self.owed = owed
        """End of the job that its store has not taken yet."""
        self._open_store = open_store
        self._emit = emit
        self._chain: JobChain | None = None
        self._writer = StoreWriter(emit)
        self.in_thread = self._writer.in_thread
        self._uncut = ""
        """Kind of the error for which the chain could not be cut the last time."""

    @property
    def opened(self) -> JobChain | None:
        """The open chain; None as long as this scheduler has not led."""
        return self._chain

    @property
    def chain(self) -> JobChain:
        assert self._chain is not None, "take() comes first"
        return self._chain

    def take(self, taken: Callable[[], None]) -> fx.Chain:
        """Opens the chain, outranks all other schedulers, and appends an end of the job that is still unwritten. Runs
        in the store's thread.

        Args:
            taken: Called when it is this scheduler's, before it is read.

        Raises:
            StoreError: The store cannot be used, or does not take what is owed.
        """
        if self._chain is None:
            self._chain = JobChain(self._open_store())
        self._chain.take_term()
        taken()
        return self._with_owed(self._chain.load())

    def _with_owed(self, found: fx.Chain) -> fx.Chain:
        """Appends the end of the job that this process could not write when it last led; returns the chain with it.

        Where the chain has gone on since, others know better, and it is forgotten.
        """
        if (owed := self.owed) is None:
            return found
        last = str(found.views[-1].id) if found.views else ""
        if not found.finished and (found.id, last) == (owed.chain, owed.view):
            if not (outcome := self.chain.append(owed.effect)).ok:
                raise StoreError(f"the end of the job was not accepted: {outcome.detail}")
            found = replace(found, finished=True)
        self.owed = None
        return found

    async def append(self, effect: fx.Persist, final: Owed | None) -> Appended:
        """Appends one decision to the chain; retries for a while if the store fails.

        Args:
            effect: The decision.
            final: The job's end, which is owed until it is stored; None if the decision is not the end.

        Raises:
            OversizeError: The decision fits into no record.
            StoreError: The store has taken nothing for some seconds.
        """

        def failed(error: StoreError) -> None:
            if final is not None:
                self.owed = replace(final, reason=str(error))

        if final is not None:
            self.owed = final  # from now on: whoever ends meanwhile, as without its lease, hears no answer
        outcome = await self._writer.append(
            lambda: self.chain.append(effect),
            math.inf if final is not None else None,
            failed,
            kind=effect.kind,
            number=effect.number,
        )
        if outcome.ok:
            self.owed = None
            if effect.kind == "view":
                self._writer.soon(self._cut)
        elif final is not None:
            self.owed = replace(final, reason=outcome.detail)
        return outcome

    def _cut(self) -> None:
        """Replaces old records by a summary if there are many. Runs in the store's thread; only the next decision waits
        for it.
        """
        started = time.monotonic()
        try:
            gone = self.chain.cut()
        except Exception as error:  # of any kind: the chain is as good uncut, only longer
            if self._uncut != (kind := type(error).__name__):
                self._emit("error", text=f"the chain is not cut: {error}", where="store")
            self._uncut = kind
            return
        if gone:
            seconds, self._uncut = round(time.monotonic() - started, 6), ""
            self._emit("stored", kind=SUMMARY, ok=True, detail=f"in place of {gone} records", seconds=seconds)

    async def close(self) -> None:
        """Waits for an unfinished write, and closes the chain."""
        await self._writer.close(lambda: self._chain.close() if self._chain is not None else None)
