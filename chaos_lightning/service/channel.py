"""gRPC settings that client and server must share, and blocking clients for calls with a single answer.

Why each option: sockets of ours must not be shared (`so_reuseport`: two schedulers on one port would each get half of
the members), retried at gRPC's leisure (a fresh subchannel pool per channel, because its own back-off starts at a
second), or sent through a web proxy that the environment names for other purposes. Keepalive pings let a member notice
a scheduler's host that vanished without a word. A server sends none: it would close the streams of members that are
silent, and such an end counts as a fact (membership/detector.py), which silence is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

# gRPC's fork handlers hang or crash DataLoader workers; machine/forks.py closes what a child must not hold.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from chaos_lightning.errors import ChaosError, RefusedError, SchedulerUnreachableError
from chaos_lightning.machine.addresses import split_endpoints
from chaos_lightning.protocol.codec import MAX_CONTROL_NBYTES
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.security.credentials import Credentials, Secret, open_channel
from chaos_lightning.security.tls_trouble import tls_trouble

KEEPALIVE_S = 5.0
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)

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
RECONNECT_SOON: Options = [
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
"""Options for servers that others stand in for: etcd's."""
SERVER_OPTIONS: Options = [
    *_SIZES,
    ("grpc.so_reuseport", 0),
    # gRPC would measure how much may be under way by pings beside the heartbeats, a fifth of these' cost. A window of
    # 1 MiB is enough: a report of 8 MB takes 0.3 s over 50 ms there and back.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection that says nothing would hold a descriptor of the scheduler's for two minutes, or for ever.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 10000),
]


END_OF_STREAM: object = vars(grpc.aio)["EOF"]
"""Value that `read` returns at the end of a stream (the type stubs of gRPC do not know it)."""


ENDED = grpc.StatusCode.FAILED_PRECONDITION
"""gRPC status with which a deposed leader closes its streams."""


class StandbyError(SchedulerUnreachableError):
    """Error of a call to a scheduler that waits to lead; `leader` is the leader's endpoint, or empty."""

    def __init__(self, text: str, leader: str) -> None:
        super().__init__(text)
        self.leader = leader


class SilentError(SchedulerUnreachableError):
    """Error of a call to a scheduler that accepts connections and does not answer: it is frozen, or cut off."""


def explain(
    error: grpc.RpcError, endpoint: str, secret: Secret = b"", timeout_s: float = 1.0, what: str = "scheduler"
) -> ChaosError:
    """Returns an exception for a failed gRPC call: the server (`what` in messages) refused it, waits to lead, or is
    unreachable.

    If TLS may be the reason, that is looked into for up to `timeout_s` (0: not at all).
    """
    code, details = error.code(), error.details() or ""
    metadata: Any = error.trailing_metadata() or ()
    leader = next((value for key, value in metadata if key == LEADER_KEY), None)
    if leader is not None:
        return StandbyError(f"at {endpoint}: {details}", str(leader))
    if code in _REFUSALS:
        return RefusedError(f"the {what} at {endpoint} refused: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(f"at {endpoint} another kind of service listens ({details}); choose another port")
    if code == grpc.StatusCode.NOT_FOUND:
        return RefusedError(details)
    if timeout_s and code == grpc.StatusCode.UNAVAILABLE:
        trouble = tls_trouble(endpoint, secret, timeout_s, what)
        if trouble:
            return RefusedError(trouble)
    return SchedulerUnreachableError(f"no {what} answered at {endpoint}: {code.name if code else '?'}: {details}")


def ask_leader(
    endpoint: str,
    token: Secret,
    timeout_s: float,
    method: str,
    request: Any,
    *,
    stub: Callable[[grpc.Channel], Any],
    what: str,
) -> Any:
    """Calls the server at `endpoint`, or of several the one that leads; returns its answer.

    Args:
        endpoint: HOST:PORT, or several with commas.
        token: Cluster token, or credentials.
        timeout_s: Seconds for the whole call, all servers together.
        method: Name of the stub's method.
        request: Request message of the method.
        stub: Makes the service's stub from a channel.
        what: Text that names the server, for errors.

    Raises:
        SchedulerUnreachableError: No server answered in time.
        RefusedError: The server that answered does not accept the credentials (or we not its), or is of another kind.
    """
    deadline = time.monotonic() + timeout_s
    waiting, asked = list(split_endpoints(endpoint)), set[str]()
    failed: ChaosError = SchedulerUnreachableError(f"no {what} answered at {endpoint}")
    while waiting:
        here = waiting.pop(0)
        asked.add(here)
        left = max(0.1, deadline - time.monotonic())
        with open_channel(here, token, CLIENT_OPTIONS) as channel:
            try:
                rpc = getattr(stub(channel), method)
                shown = Credentials.of(token).metadata()
                return rpc(request, timeout=left / (len(waiting) + 1), metadata=shown)
            except grpc.RpcError as error:
                found = explain(error, here, token, min(1.0, max(0.1, deadline - time.monotonic())), what)
        if isinstance(found, RefusedError):
            raise found
        failed = found
        if isinstance(found, StandbyError) and found.leader and found.leader not in asked:
            waiting = [found.leader, *(e for e in waiting if e != found.leader)]
    raise failed


def facts_of_leader(ask: Callable[[str, float], dict[str, Any]], endpoint: str, timeout_s: float) -> dict[str, Any]:
    """Returns the facts of the server that leads; those of a standby if no leader answers.

    Args:
        ask: Takes an endpoint (or several) and how long it may take (s); the facts have `role`, `endpoint` and of a
            standby `leader`.
        endpoint: HOST:PORT, or several with commas.
        timeout_s: Seconds for the whole call, all servers together.
    """
    deadline = time.monotonic() + timeout_s
    facts = ask(endpoint, timeout_s)
    if facts.get("role") != "standby":
        return facts
    asked, waiting = {"", facts["endpoint"]}, [facts.get("leader", ""), *split_endpoints(endpoint)]
    while waiting and (left := deadline - time.monotonic()) > 0:
        if (place := waiting.pop(0)) in asked:
            continue
        asked.add(place)
        with contextlib.suppress(ChaosError):  # it has just died, or is none of ours; what the standby knows is told
            found = ask(place, left / (len(waiting) + 1))
            if found.get("role") != "standby":
                return found
            waiting.insert(0, found.get("leader", ""))
    return facts
