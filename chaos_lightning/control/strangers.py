"""Who calls the scheduler, who may, and what is written down about those who may not.

Theory of operation. With keys a door with mutual TLS (control/door.py) stands before gRPC's own port, so each call has
a caller with a role, and the table in security/roles.py says what that role may; without keys the bare token decides.
Everybody who is refused is a line in the event log, with who it was and why, but only a few lines a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from chaos_lightning.control.channel import END_OF_STREAM
from chaos_lightning.control.door import Door
from chaos_lightning.errors import ConfigurationError, WireError
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.few_lines import FewLines
from chaos_lightning.protocol.codec import unwrap_from_member
from chaos_lightning.protocol.types import Hello
from chaos_lightning.security.access import TOKEN_KEY
from chaos_lightning.security.credentials import Credentials, Secret, known
from chaos_lightning.security.roles import ANYBODY, TOKEN, TOKEN_DEMANDED, may, who_may

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

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
    """Refuses calls of those who may not.

    Args:
        secret: Token or credentials; b"" lets everybody in (loopback only).
        note: Takes (event name, fields) for the event log.
    """

    def __init__(self, secret: Secret, note: Callable[..., None]) -> None:
        self._credentials = Credentials.of(secret)
        self._note = note
        self._few = FewLines()
        self._door: Door | None = None
        self.inner_port = 0
        """Where gRPC listens behind the door; 0 without one."""

    async def open(self, server: Any, host: str, port: int) -> int:
        """Gives the gRPC server its port, behind a door if there are keys; returns the port that others call.

        Raises:
            ConfigurationError: It is taken, or the address is not this machine's.
        """
        endpoint, keys = join_endpoint(host, port), self._credentials.keys
        try:
            if keys is None:
                return int(server.add_insecure_port(endpoint))
            self._door = Door(keys, self.note, self.note_end)
            self.inner_port = int(server.add_insecure_port("127.0.0.1:0"))
            return await self._door.open(host, port, self.inner_port)
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"cannot listen on {endpoint}: the port is taken or the address is not this machine's ({error}); "
                f"see `chaos-lightning status --endpoint {endpoint}`, or choose another port"
            ) from error

    async def close(self) -> None:
        """Shuts the door, if there is one."""
        if self._door is not None:
            await self._door.close()

    def peer(self, context: Any) -> str:
        """Where a call comes from, and with keys from whom."""
        caller = self._door.caller(context.peer()) if self._door is not None else None
        return str(caller or context.peer())

    async def refuse(self, context: Any, what: str) -> None:
        """Aborts the call of a stranger; returns to whom it may concern otherwise."""
        if not self._credentials:
            role = ANYBODY
        elif self._door is None:
            role = TOKEN
        else:
            caller = self._door.caller(context.peer())
            if caller is None:
                reason = "it came to the inner port, without a certificate"
                await self._abort(context, what, grpc.StatusCode.UNAUTHENTICATED, reason, "call the scheduler's port")
                return
            role = caller.role
            if not may(role, what):
                reason = f"{caller.name} is {role}, and {what} is for {who_may(what)}"
                advice = "use a folder of keys with that role (`chaos-lightning keys node NAME --role ...`)"
                await self._abort(context, what, grpc.StatusCode.PERMISSION_DENIED, reason, advice)
                return
        await self._check_token(context, what, role)

    async def _check_token(self, context: Any, what: str, role: str) -> None:
        """Who shows a token must show the right one; who must show one, must."""
        accepted = self._credentials.tokens()
        values = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        shown = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        if not self._credentials or (not shown and what not in TOKEN_DEMANDED.get(role, ())):
            return
        if not known(shown, accepted):
            reason = "wrong cluster token" if shown else "missing cluster token"
            advice = "give this job's token by CHAOS_TOKEN_FILE or CHAOS_TOKEN"
            if self._door is not None:
                advice = "copy this node's folder of keys again, it is older or newer than the scheduler's"
            await self._abort(context, what, grpc.StatusCode.UNAUTHENTICATED, reason, advice)

    async def _abort(self, context: Any, what: str, code: Any, reason: str, advice: str) -> None:
        self.note(self.peer(context), f"{reason} ({what})")
        await context.abort(code, f"{reason}; {advice}")

    def note(self, peer: str, reason: str) -> None:
        """A line for the log, but no more than a few a second: a stranger must not fill the disk."""
        unlogged = self._few.take()
        if unlogged is not None:
            self._note("refused", peer=peer, reason=reason, unlogged=unlogged)

    def note_end(self, peer: str, reason: str) -> None:
        """A line for every connection that the door ends: whoever was in cannot fill the disk by knocking."""
        self._note("refused", peer=peer, reason=reason, unlogged=0)
