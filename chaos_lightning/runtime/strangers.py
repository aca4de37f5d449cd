"""Who calls the scheduler, who may, and what is written down about those who may not."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Any

from chaos_lightning.errors import WireError
from chaos_lightning.membership.types import Hello
from chaos_lightning.runtime.access import TOKEN_KEY
from chaos_lightning.runtime.channel import END_OF_STREAM
from chaos_lightning.runtime.codec import unwrap_from_member

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_MAX_LINES_PER_S = 5
_HELLO_S = 0.5


async def name_of_caller(context: Any) -> str:
    """Of a member that attends: from its Hello, if that comes at once; else "". The Hello is gone then."""
    with contextlib.suppress(TimeoutError, WireError):
        envelope = await asyncio.wait_for(context.read(), _HELLO_S)
        hello = unwrap_from_member(envelope) if envelope is not END_OF_STREAM else None
        if isinstance(hello, Hello):
            return hello.name
    return ""


class Strangers:
    """Refuses calls without the cluster token.

    Args:
        token: b"" lets everybody in (loopback only).
        note: Takes (event name, fields) for the event log.
    """

    def __init__(self, token: bytes, note: Callable[..., None]) -> None:
        self._token = token
        self._note = note
        self._budget = (0.0, 0, 0)

    async def refuse(self, context: Any, what: str) -> None:
        """Aborts the call of a stranger; returns to whom it may concern otherwise."""
        if not self._token:
            return
        given = next((v for k, v in context.invocation_metadata() or () if k == TOKEN_KEY), b"")
        if isinstance(given, str):
            given = given.encode()
        if hmac.compare_digest(given, self._token):
            return
        reason = "wrong cluster token" if given else "missing cluster token"
        self.note(context.peer(), f"{reason} ({what})")
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"{reason}; give this job's token by CHAOS_TOKEN_FILE or CHAOS_TOKEN"
        )

    def note(self, peer: str, reason: str) -> None:
        """A line for the log, but no more than a few a second: a stranger must not fill the disk."""
        since, lines, dropped = self._budget
        now = time.monotonic()
        if now - since > 1.0:
            since, lines = now, 0
        if lines >= _MAX_LINES_PER_S:
            self._budget = (since, lines, dropped + 1)
            return
        self._budget = (since, lines + 1, 0)
        self._note("refused", peer=peer, reason=reason, unlogged=dropped)
