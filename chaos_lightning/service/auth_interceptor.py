"""Checks who makes a gRPC call and whether they may make it, and logs refused calls.

Theory of operation. With keys a TLS proxy with mutual TLS (service/tls_proxy.py) stands before gRPC's own port, so each
call has a caller with a role; without keys the bare token decides. Each service says which roles may make which of its
calls (security/roles.py), and every call is looked at before the service hears of it: a service cannot forget to ask,
and a call that nobody has spoken for is refused. Everybody who is refused is a line in the event log, with who it was
and why, but only a few lines a second.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.few_lines import FewLines
from chaos_lightning.security.access import TOKEN_KEY
from chaos_lightning.security.credentials import Credentials, Secret, known
from chaos_lightning.security.roles import ANYBODY, TOKEN, Right, Rights
from chaos_lightning.service.channel import SERVER_OPTIONS
from chaos_lightning.service.tls_proxy import TlsProxy

import grpc  # isort: skip  (after channel, which sets gRPC's environment)


@dataclass(frozen=True)
class Service:
    """A gRPC service to be served, and which roles may make its calls.

    Attributes:
        name: Full name of the service, as in its .proto.
        rights: Roles that may make a call, by name of the call.
        add: Puts the service's handlers into a gRPC server.
        raw: Calls whose messages are bytes both ways; what attends a stream decodes and encodes them (streams.py).
    """

    name: str
    rights: Mapping[str, Right]
    add: Callable[[Any], None]
    raw: Collection[str] = ()


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg, misc]
    """gRPC interceptor that refuses calls, of any service, from callers who may not make them.

    Args:
        secret: Token or credentials; b"" lets everybody in (loopback only).
        note: Takes (event name, fields) for the event log.
    """

    def __init__(self, secret: Secret, note: Callable[..., None]) -> None:
        self._credentials = Credentials.of(secret)
        self._note = note
        self._few = FewLines()
        self._rights = Rights()
        self._raw: set[str] = set()
        self._tls_proxy: TlsProxy | None = None
        self.inner_port = 0
        """Port at which gRPC listens behind the TLS proxy; 0 without one."""

    async def open(self, host: str, port: int) -> tuple[grpc.aio.Server, int]:
        """Makes a gRPC server on a port, behind a TLS proxy if there are keys; returns the server, and the port that
        clients call.

        Raises:
            ConfigurationError: The port is taken, or the address is not this machine's.
        """
        endpoint, keys = join_endpoint(host, port), self._credentials.keys
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[self])
        try:
            if keys is None:
                return server, int(server.add_insecure_port(endpoint))
            self._tls_proxy = TlsProxy(keys, self.note, self.note_end)
            self.inner_port = int(server.add_insecure_port("127.0.0.1:0"))
            return server, await self._tls_proxy.open(host, port, self.inner_port)
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"cannot listen on {endpoint}: the port is taken or the address is not this machine's ({error}); "
                f"see `chaos-lightning status --endpoint {endpoint}`, or choose another port"
            ) from error

    async def close(self) -> None:
        """Closes the TLS proxy, if there is one."""
        if self._tls_proxy is not None:
            await self._tls_proxy.close()

    def peer(self, context: Any) -> str:
        """Returns the address that a call comes from, with the caller's name if it has a certificate."""
        caller = self._tls_proxy.caller(context.peer()) if self._tls_proxy is not None else None
        return str(caller or context.peer())

    def serve(self, server: Any, service: Service) -> None:
        """Adds a service to the gRPC server; its calls are refused to those without the right."""
        self._rights.register(service.name, service.rights)
        self._raw |= {f"/{service.name}/{call}" for call in service.raw}
        service.add(server)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps a call's handler so that the caller is checked first (interface of gRPC's interceptors)."""
        handler, method = await continuation(details), str(details.method)
        if handler is None:  # there is no such call
            return None
        kind = next(k for k in ("unary_unary", "unary_stream", "stream_unary", "stream_stream") if getattr(handler, k))
        call = getattr(handler, kind)

        async def asked(request: Any, context: Any) -> Any:
            await self._refuse(context, method)
            return await call(request, context)

        async def asked_for_more(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._refuse(context, method)
            async for reply in call(request, context):
                yield reply

        guarded: dict[str, Any] = {kind: asked_for_more if inspect.isasyncgenfunction(call) else asked}
        if method in self._raw:
            guarded |= {"request_deserializer": None, "response_serializer": None}
        return handler._replace(**guarded)

    async def _refuse(self, context: Any, method: str) -> None:
        """Aborts a call if its caller's role may not make it, or if a token is missing or wrong."""
        what = method.rpartition("/")[2]
        role, name = (TOKEN if self._credentials else ANYBODY), "whoever calls"
        if self._tls_proxy is not None:
            caller = self._tls_proxy.caller(context.peer())
            if caller is None:
                reason = "it came to the inner port, without a certificate"
                await self._abort(context, what, grpc.StatusCode.UNAUTHENTICATED, reason, "call the scheduler's port")
                return
            role, name = caller.role, caller.name
        if not self._rights.may(role, method):
            reason = f"{name} is {role}, and {what} is for {self._rights.who_may(method)}"
            advice = "use a folder of keys with that role (`chaos-lightning keys node NAME --role ...`)"
            await self._abort(context, what, grpc.StatusCode.PERMISSION_DENIED, reason, advice)
        await self._check_token(context, what, must=self._rights.must_show_token(role, method))

    async def _check_token(self, context: Any, what: str, *, must: bool) -> None:
        """Aborts a call with a wrong token, or without one where its caller must show one."""
        accepted = self._credentials.tokens()
        values = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        shown = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        if not self._credentials or (not shown and not must):
            return
        if not known(shown, accepted):
            reason = "wrong cluster token" if shown else "missing cluster token"
            advice = "give this job's token by CHAOS_TOKEN_FILE or CHAOS_TOKEN"
            if self._tls_proxy is not None:
                advice = "copy this node's folder of keys again, it is older or newer than the scheduler's"
            await self._abort(context, what, grpc.StatusCode.UNAUTHENTICATED, reason, advice)

    async def _abort(self, context: Any, what: str, code: Any, reason: str, advice: str) -> None:
        self.note(self.peer(context), f"{reason} ({what})")
        await context.abort(code, f"{reason}; {advice}")

    def note(self, peer: str, reason: str) -> None:
        """Logs a refused call, but only a few per second, so that strangers cannot fill the disk."""
        unlogged = self._few.take()
        if unlogged is not None:
            self._note("refused", peer=peer, reason=reason, unlogged=unlogged)

    def note_end(self, peer: str, reason: str) -> None:
        """Logs a connection that the TLS proxy ends; all of them, since only authenticated callers cause such lines."""
        self._note("refused", peer=peer, reason=reason, unlogged=0)
