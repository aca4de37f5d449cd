"""Tracks why a server process goes on: the tasks that it depends on, and the reason for which it ends.

Theory of operation. A server is a few tasks in one asyncio loop. One that fails ends the server: without it the others
would only seem to work. What a machine of ours was told is void after an error of ours; the store is not, and whoever
starts anew continues it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

ASK_S = 5.0
"""Seconds within which members or clusters ask to leave that got the same signal as a server."""
LEAVERS_S = 60.0
"""Seconds that a server that was asked to end stays for those who leave, at most."""
_LOOK_S = 0.1


class ServerLife:
    """Tasks of one server process, and the reason for its end. Methods belong to one asyncio loop.

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
        self._asked = False

    def start(self) -> None:
        """Prepares `ended`; must be called in the server's asyncio loop before anything can end the server."""
        self._ended = asyncio.get_running_loop().create_future()

    def begin(self, work: Coroutine[Any, Any, None], where: str) -> None:
        """Starts a task of the server; its failure ends the server, and `where` names it in the event log."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._emit("error", text=f"{type(error).__name__}: {error}", where=where)
                self.end(f"internal error: {type(error).__name__}: {error}", failed=True)

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(look)
        self._tasks.append(task)

    async def ended(self) -> str:
        """Waits until the server is to end; returns the reason."""
        assert self._ended is not None, "start() comes first"
        return await asyncio.shield(self._ended)

    def end(self, reason: str, *, failed: bool = False) -> None:
        """Makes `ended` return the reason; only the first call counts."""
        if self._ended is not None and not self._ended.done():
            self.failed = failed
            self._ending(reason, failed)
            self._ended.set_result(reason)

    def asked(self, reason: str, leaving: Callable[[], Iterable[bool]]) -> None:
        """Ends the server after a signal, once members that got the same signal have left; a second call ends it at
        once.

        A service manager sends a signal to all processes of a unit. Leaving needs a server: somebody must let them go.

        Args:
            reason: Text that says why the server ends.
            leaving: Returns, for each connected member, whether it leaves.
        """
        if self._asked:
            self.end(reason)
        else:
            self._asked = True
            self.begin(self._end_after(reason, leaving), "end")

    async def _end_after(self, reason: str, leaving: Callable[[], Iterable[bool]]) -> None:
        clock = asyncio.get_running_loop().time
        began, seen = clock(), False
        while here := list(leaving()):
            since_s = clock() - began
            if since_s > LEAVERS_S or (not any(here) and (seen or since_s > ASK_S)):
                break
            seen |= any(here)
            await asyncio.sleep(_LOOK_S)
        self.end(reason)

    async def stop(self) -> None:
        """Cancels all tasks of the server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
