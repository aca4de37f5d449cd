"""Writes a service's records to its store, in a thread of its own, and retries writes that failed.

Theory of operation. A record is on the disk, or on etcd's majority, before anybody hears of it; streams are read
meanwhile, for the store has its own thread. A store that takes nothing is asked again for some seconds, and then fails
the service: a process that starts anew knows all that was stored.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from chaos_lightning.errors import OversizeError, StoreError
from chaos_lightning.service.store import Appended

T = TypeVar("T")

PATIENCE_S = 5.0
"""Seconds after which a store that takes nothing fails the service."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Pause (s) before a write is tried again; of one that is tried for ever it grows."""


class StoreWriter:
    """Thread that works on a store. Methods may only be called in one asyncio loop.

    Args:
        emit: Takes (event name, fields) for the event log.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="chaos-store")

    async def in_thread(self, work: Callable[..., T], *given: Any) -> T:
        """Runs a function in the store's thread; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *given)

    def soon(self, work: Callable[[], None]) -> None:
        """Runs a function in the store's thread; only the next record waits for it."""
        self._disk.submit(work)

    async def append(
        self,
        write: Callable[[], Appended],
        patience_s: float | None = None,
        failed: Callable[[StoreError], None] = lambda error: None,
        **told: Any,
    ) -> Appended:
        """Appends a record by compare-and-set; retries for a while if the store fails. It is durable if the outcome is
        ok.

        Args:
            write: Appends the record, in the store's thread. Called again, it must append the very same one.
            patience_s: Seconds after which a failure is raised; by default PATIENCE_S.
            failed: Takes each failure.
            told: Fields of the event `stored`: the record's kind and number.

        Raises:
            OversizeError: The store takes no record of this size.
            StoreError: The store has taken nothing for `patience_s`.
        """
        patience_s = PATIENCE_S if patience_s is None else patience_s
        started, pause_s, last = time.monotonic(), _PAUSE_S, ""
        while True:
            try:
                outcome = await self.in_thread(write)
                break
            except OversizeError:
                raise
            except StoreError as error:
                if str(error) != last:
                    last = str(error)
                    self._emit("error", text=last, where="store")
                failed(error)
                if time.monotonic() - started > patience_s:
                    raise
                await asyncio.sleep(pause_s)
                if patience_s == math.inf:
                    pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        seconds = round(time.monotonic() - started, 6)
        self._emit("stored", **told, ok=outcome.ok, detail=outcome.detail, seconds=seconds)
        return outcome

    async def close(self, close: Callable[[], None] = lambda: None) -> None:
        """Runs `close` in the store's thread once unfinished work is done, and ends the thread."""
        await self.in_thread(close)
        self._disk.shutdown(wait=False)
