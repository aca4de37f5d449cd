"""A server process's reason to go on: the tasks that it lives by, and why it ends.

Theory of operation. A server is a few tasks in one asyncio loop. One that fails ends the server: without it the others
would only seem to work. What a machine of ours was told is void after an error of ours; the store is not, and whoever
starts anew continues it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class ServerLife:
    """See the module. Methods belong to one asyncio loop.

    Args:
        emit: Takes (event name, fields) for the event log.
        ending: Told why the server ends, and whether that is a failure, when it is known.

    Attributes:
        failed: Whether it ends by a failure (store lost, deposed, error of ours).
    """

    def __init__(self, emit: Callable[..., None], ending: Callable[[str, bool], None]) -> None:
        self.failed = False
        self._emit, self._ending = emit, ending
        self._ended: asyncio.Future[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """From now on it can end."""
        self._ended = asyncio.get_running_loop().create_future()

    def begin(self, work: Coroutine[Any, Any, None], where: str) -> None:
        """A task that `stop` ends; `where` names it in the event log."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._emit("error", text=f"{type(error).__name__}: {error}", where=where)
                self.end(f"internal error: {type(error).__name__}: {error}", failed=True)

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(look)
        self._tasks.append(task)

    async def ended(self) -> str:
        """Waits until there is no reason to go on; returns why it ends."""
        assert self._ended is not None, "start() comes first"
        return await asyncio.shield(self._ended)

    def end(self, reason: str, *, failed: bool = False) -> None:
        """Makes `ended` return; the first reason counts."""
        if self._ended is not None and not self._ended.done():
            self.failed = failed
            self._ending(reason, failed)
            self._ended.set_result(reason)

    async def stop(self) -> None:
        """Ends all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
