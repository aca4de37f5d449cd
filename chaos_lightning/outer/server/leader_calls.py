"""gRPC service of the leader (outer/exchange/outer.proto); rejects callers that may not make a call.

Theory of operation. Who may call was asked before (service/auth_interceptor.py, by RIGHTS). A process that waits to
lead answers *Facts* for itself; to all others it says who leads.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from chaos_lightning.outer.exchange import outer_pb2
from chaos_lightning.outer.exchange.outer_pb2_grpc import ParameterServerServicer
from chaos_lightning.outer.server.client_streams import ClientStreams
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.security.roles import CLUSTER, FOLLOWER, MEMBER, OBSERVER, OPERATOR, Right

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

RAW = ("Attend", "Follow")
"""Calls whose messages streams decode and encode (service/streams.py)."""
RIGHTS = {
    "Attend": Right((CLUSTER, MEMBER), with_token=(CLUSTER, MEMBER)),
    "Follow": Right((FOLLOWER,), with_token=(FOLLOWER,)),
    "Facts": Right((CLUSTER, MEMBER, FOLLOWER, OBSERVER, OPERATOR)),
    "End": Right((OPERATOR,)),
}
"""Rights to the calls. Clusters and followers prove the token to each other, so who attends must know it. An elastic
cluster's processes are members of their own job.
"""


@dataclass(eq=False, kw_only=True)
class OuterService(ParameterServerServicer):  # type: ignore[misc]
    """Service of a leader, with its calls.

    Attributes:
        streams: Streams of clusters and followers.
        waits: Returns why this process does not lead, and who does ("" if no process does); None: it leads.
        facts: Returns the reply to a Facts call.
        end_job: Ends the job for a reason; returns whether that was done, and words.
        peer: Returns in words which client makes a call.
    """

    streams: ClientStreams
    waits: Callable[[], tuple[str, str] | None]
    facts: Callable[[], Awaitable[dict[str, Any]]]
    end_job: Callable[[str], Awaitable[tuple[bool, str]]]
    peer: Callable[[Any], str]

    async def _send_on(self, context: Any) -> None:
        """Aborts the call while another process leads, and names that process."""
        if (waits := self.waits()) is not None:
            words, leader = waits
            await context.abort(grpc.StatusCode.UNAVAILABLE, words, ((LEADER_KEY, leader),))

    async def Attend(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """Serves a cluster's stream, from its hello to its end."""
        await self._send_on(context)
        await self.streams.attend(context, "Attend", self.peer(context))

    async def Follow(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """Serves a follower's stream, from its hello to its end."""
        await self._send_on(context)
        await self.streams.attend(context, "Follow", self.peer(context))

    async def Facts(self, _request: Any, _context: Any) -> Any:
        return outer_pb2.FactsReply(json=json.dumps(await self.facts()))

    async def End(self, request: Any, context: Any) -> Any:
        """Ends the job for an operator; returns once the job has ended."""
        await self._send_on(context)
        accepted, text = await self.end_job(request.reason or f"asked by {self.peer(context)}")
        return outer_pb2.EndReply(accepted=accepted, text=text)
