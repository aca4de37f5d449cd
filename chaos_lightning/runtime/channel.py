"""gRPC settings that client and server must agree on, and the small synchronous client for Status and Drain.

Why each option: sockets of ours must not be shared (`so_reuseport`: two schedulers on one port would each get half of
the members), retried at gRPC's leisure (a fresh subchannel pool per channel, because its own back-off starts at a
second), or sent through a web proxy that the environment names for other purposes. Keepalive pings let a member notice
a scheduler's host that vanished without a word.
"""

from __future__ import annotations

import json
import os
from typing import Any, cast

# gRPC's fork handlers hang or crash DataLoader workers; runtime/forks.py closes what a child must not hold.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from chaos_lightning.errors import ChaosError, RefusedError, SchedulerUnreachableError
from chaos_lightning.runtime import chaos_pb2
from chaos_lightning.runtime.access import token_metadata
from chaos_lightning.runtime.chaos_pb2_grpc import SchedulerStub
from chaos_lightning.runtime.codec import MAX_CONTROL_NBYTES

KEEPALIVE_S = 5.0

Options = list[tuple[str, Any]]

_SIZES: Options = [
    ("grpc.max_receive_message_length", MAX_CONTROL_NBYTES),
    ("grpc.max_send_message_length", MAX_CONTROL_NBYTES),
]
CLIENT_OPTIONS: Options = [
    *_SIZES,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: Options = [
    *_SIZES,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]


END_OF_STREAM: object = vars(grpc.aio)["EOF"]
"""What `read` returns at the end of a stream (the type stubs of gRPC do not know it)."""


def explain_code(code: grpc.StatusCode | None, details: str | None, endpoint: str) -> ChaosError:
    """Our exception for a call that failed: refused by the scheduler, or none reached."""
    details = details or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return RefusedError(f"the scheduler at {endpoint} refused: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(f"at {endpoint} another kind of service listens ({details}); choose another port")
    if code == grpc.StatusCode.NOT_FOUND:
        return RefusedError(details)
    return SchedulerUnreachableError(f"no scheduler answered at {endpoint}: {code.name if code else '?'}: {details}")


def _call(endpoint: str, token: bytes, timeout_s: float, method: str, request: Any) -> Any:
    with grpc.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
        try:
            rpc = getattr(SchedulerStub(channel), method)
            return rpc(request, timeout=timeout_s, metadata=token_metadata(token))
        except grpc.RpcError as error:
            raise explain_code(error.code(), error.details(), endpoint) from error


def fetch_status(endpoint: str, token: bytes = b"", timeout_s: float = 5.0) -> dict[str, Any]:
    """The scheduler's status as a dictionary (see SchedulerServer.status).

    Raises:
        SchedulerUnreachableError: Nobody answered in time.
        RefusedError: Somebody did, but does not accept the token or is no scheduler.
    """
    reply = _call(endpoint, token, timeout_s, "Status", chaos_pb2.StatusRequest())
    return cast(dict[str, Any], json.loads(reply.json))


def drain(endpoint: str, name: str, token: bytes = b"", timeout_s: float = 5.0) -> tuple[str, ...]:
    """Asks a member, or all members of a node, to leave; returns the names that were asked.

    Raises:
        RefusedError: There is no such member; the message lists those present.
        SchedulerUnreachableError: Nobody answered in time.
    """
    reply = _call(endpoint, token, timeout_s, "Drain", chaos_pb2.DrainRequest(name=name))
    if not reply.asked:
        present = ", ".join(reply.present) or "none"
        raise RefusedError(f"no member or node is called {name!r}; present: {present}")
    return tuple(reply.asked)


def change_link(endpoint: str, a: str, b: str, *, add: bool, token: bytes = b"", timeout_s: float = 5.0) -> str:
    """Asks for a link between two members, or that it goes; returns what will happen.

    Raises:
        RefusedError: It cannot be; the message says why.
        SchedulerUnreachableError: Nobody answered in time.
    """
    reply = _call(endpoint, token, timeout_s, "ChangeLink", chaos_pb2.LinkChangeRequest(a=a, b=b, add=add))
    if not reply.accepted:
        raise RefusedError(str(reply.text))
    return str(reply.text)
