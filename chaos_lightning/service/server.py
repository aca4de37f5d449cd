"""ServerFrame of a service's server: it opens its port, leads at once or once elected, and ends for a reason.

Theory of operation. What a server is for is its owner's affair: `lead` takes the store over and starts the machine,
from then on clients are let in. A server that leads alone does so before it answers anybody. A candidate answers at
once, so that whoever comes hears who leads, and leads when it is elected. It ends when it leads no more, and its
process stands for election again (`keep_standing`): what it believed is void, the store is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from chaos_lightning.errors import ChaosError, StoreError
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.security.credentials import Secret, check_bind
from chaos_lightning.service.auth_interceptor import AuthInterceptor, Service
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.server_life import ServerLife

CANNOT_LEAD = "it was elected and cannot lead"
AGAIN_S = 0.2
"""Pause (s) before a process stands for election again."""


@dataclass(frozen=True)
class ListenPlace:
    """Where a server listens, and whom it lets in.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        advertise: HOST:PORT at which others reach it; "" for where it listens.
        secret: Token or credentials; b"" only on loopback.
    """

    host: str
    port: int
    advertise: str = ""
    secret: Secret = field(default=b"", repr=False)


class ServerFrame:
    """Port, candidacy and life of one server. `start` and `stop` may only be called in one asyncio loop.

    Args:
        place: Where it listens.
        emit: Takes (event name, fields) for the event log.
        ended: Name of the event that says why the server ends.
        lead: Takes the store over and starts what serves clients.
        candidacy: Candidacy in an election; None if this server alone can lead.
        present: Names of connected clients, for the election; None if it cannot tell.
    """

    def __init__(
        self,
        place: ListenPlace,
        emit: Callable[..., None],
        ended: str,
        lead: Callable[[], Awaitable[None]],
        *,
        candidacy: Candidacy | None = None,
        present: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.port = place.port
        self.life = ServerLife(emit, lambda why, failed: emit(ended, reason=why, failed=failed))
        self.auth = AuthInterceptor(place.secret, emit)
        self._place = place
        self._emit = emit
        self._lead = lead
        self._candidacy = candidacy
        self._present = present
        self._server: Any = None

    async def start(self, services: Callable[[], Iterable[Service]]) -> int:
        """Opens the port and leads (a candidate: once it is elected); returns the port.

        Args:
            services: Makes the services, once the port is known.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        check_bind(self._place.host, self._place.secret)
        self.life.start()
        self._server, self.port = await self.auth.open(self._place.host, self.port)
        for one in services():
            self.auth.serve(self._server, one)
        if self._candidacy is None:
            await self._lead()
            await self._server.start()
        else:
            await self._server.start()
            self._stand(self._candidacy)
        return self.port

    @property
    def endpoint(self) -> str:
        """Address at which clients and other candidates reach this server."""
        return self._place.advertise or join_endpoint(self._place.host, self.port)

    def _stand(self, candidacy: Candidacy) -> None:
        loop = asyncio.get_running_loop()

        def elected() -> None:
            loop.call_soon_threadsafe(lambda: self.life.begin(self._come_to_lead(), "election"))

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(lambda: self.life.end(f"it leads no more: {reason}", failed=True))

        candidacy.stand(self.endpoint, elected, lost, self._emit, self._present)

    async def _come_to_lead(self) -> None:
        try:
            await self._lead()
        except Exception as error:  # of any kind: the election would go on prolonging a lease in vain
            words = str(error) if isinstance(error, ChaosError) else f"{type(error).__name__}: {error}"
            self.life.end(f"{CANNOT_LEAD}: {words}", failed=True)

    def drive(self, driving: Awaitable[None], where: str) -> None:
        """Starts the task that drives the machine; the server ends with its store."""

        async def drive() -> None:
            try:
                await driving
            except StoreError as error:
                self.life.end(f"the store failed: {error}", failed=True)

        self.life.begin(drive(), where)

    async def stop(self) -> None:
        """Ends all tasks, the candidacy and the port; clients go on without this server."""
        await self.life.stop()
        loop = asyncio.get_running_loop()
        resigned = loop.run_in_executor(None, self._candidacy.close) if self._candidacy is not None else None
        if self._server is not None:
            await self._server.stop(0.1)
            await self.auth.close()
        if resigned is not None:
            await resigned


class Servable(Protocol):
    """Interface of a server that `serve` runs."""

    @property
    def life(self) -> ServerLife:
        """Tasks of the server, and the reason for its end."""

    async def start(self) -> int:
        """Opens the port; returns it."""

    async def stop(self) -> None:
        """Closes the port and the store."""


S = TypeVar("S", bound=Servable)


async def serve(server: S, on_started: Callable[[S], None]) -> tuple[str, bool]:
    """Runs a server until it ends; returns the reason, and whether it is a failure."""
    try:
        await server.start()
        on_started(server)
        return await server.life.ended(), server.life.failed
    finally:
        with contextlib.suppress(ChaosError):
            await server.stop()


def keep_standing(once: Callable[[bool], tuple[str, bool]], again: Callable[[str], bool]) -> tuple[str, bool]:
    """Runs a candidate's server again and again while it ends by failures; returns how the last one ended.

    Args:
        once: Runs the server, given whether this process was a candidate before; returns why it ended, and whether by a
            failure.
        again: Takes the reason of a failure; returns whether to go on.
    """
    followed = False
    while True:
        reason, failed = once(followed)
        if not failed or not again(reason):
            return reason, failed
        followed = True
        time.sleep(AGAIN_S)
