"""Keeps the stream of a cluster or follower to the leader of outer sync open; also has the two single calls to a
leader: fetch facts, end the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from chaos_lightning.errors import RefusedError
from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerStub
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, FROM_FOLLOWER, TO_CLUSTER, TO_FOLLOWER
from chaos_lightning.protocol.codec import Envelope
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.channel import ask_leader, facts_of_leader
from chaos_lightning.service.client import ServiceClient, StreamCall

WHAT = "parameter server"
SERVICE = "chaos_lightning.outer.v1.ParameterServer"
"""Name of the service in outer/exchange/outer.proto."""


def _read(to_client: Envelope) -> Callable[[bytes], Any]:
    return lambda data: to_client.decode(data) if data else None


_CALLS = {
    "Attend": StreamCall(f"/{SERVICE}/Attend", WHAT, FROM_CLUSTER.encode, _read(TO_CLUSTER)),
    "Follow": StreamCall(f"/{SERVICE}/Follow", WHAT, FROM_FOLLOWER.encode, _read(TO_FOLLOWER)),
}


def control_client(
    endpoints: Sequence[str], secret: Secret, *, call: Literal["Attend", "Follow"], **callbacks: Any
) -> ServiceClient:
    """Returns a client of a leader, which makes all callbacks in its thread, one at a time.

    Args:
        endpoints: HOST:PORT of the leader, or of all leaders that stand by for each other.
        secret: Cluster token (b"" for none), or credentials.
        call: "Attend" for a cluster, "Follow" for a follower.
        callbacks: Those of `ServiceClient`.
    """
    return ServiceClient(endpoints, secret, _CALLS[call], **callbacks)


def fetch_facts(endpoints: str, secret: Secret, timeout_s: float = 5.0, *, follow: bool = True) -> dict[str, Any]:
    """Asks a leader for facts about itself and its job (outer/follower/snapshot.py).

    Args:
        endpoints: HOST:PORT of the leader; several with commas.
        secret: Cluster token, or credentials.
        timeout_s: Seconds for the whole call.
        follow: Whether to ask the acting leader, if that is another one and it answers.

    Raises:
        SchedulerUnreachableError: No server answered in time.
        RefusedError: A server answered that does not accept the credentials, whose credentials are not accepted here,
            or that is no parameter server.
    """

    def facts(place: str, left_s: float) -> dict[str, Any]:
        reply = ask_leader(
            place, secret, left_s, "Facts", outer_pb2.FactsRequest(), stub=ParameterServerStub, what=WHAT
        )
        return cast(dict[str, Any], json.loads(reply.json))

    return facts_of_leader(facts, endpoints, timeout_s) if follow else facts(endpoints, timeout_s)


def ask_end(endpoints: str, reason: str, secret: Secret, timeout_s: float) -> str:
    """Asks a leader to end the job once its newest version is durable; returns the leader's words about it.

    Raises:
        RefusedError: The job cannot end now; the message says why.
        SchedulerUnreachableError: No server answered in time.
    """
    request = outer_pb2.EndRequest(reason=reason)
    reply = ask_leader(endpoints, secret, timeout_s, "End", request, stub=ParameterServerStub, what=WHAT)
    if not reply.accepted:
        raise RefusedError(str(reply.text))
    return str(reply.text)
