"""Handles the scheduler's gRPC calls (control/service.proto), and declares which roles may make them.

Theory of operation. Who may call was asked before (service/auth_interceptor.py, by RIGHTS). A scheduler that waits to
lead answers two calls for itself: *Status*, and *Claim*, whose numbers are its machine's, whoever leads. To all others
it says who leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from chaos_lightning.control.claims import Claims
from chaos_lightning.control.member_streams import MemberStreams, read_from_member
from chaos_lightning.control.scheduler_effects import SchedulerEffects
from chaos_lightning.control.service_pb2_grpc import SchedulerServicer
from chaos_lightning.errors import WireError
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.types import Hello
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.security.roles import MEMBER, OBSERVER, OPERATOR, Right
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.channel import END_OF_STREAM
from chaos_lightning.service.driver import Driver

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

RIGHTS = {
    "Attend": Right((MEMBER,), with_token=(MEMBER,)),
    "Status": Right((MEMBER, OBSERVER, OPERATOR)),
    "Drain": Right((OPERATOR,)),
    "ChangeLink": Right((OPERATOR,)),
    "Reset": Right((OPERATOR,)),
    "Claim": Right((MEMBER,), with_token=(MEMBER,)),
}
"""Rights to the calls. Members prove the token to each other, so a caller that attends must know it; observers and
operators are not given it.
"""
RAW = ("Attend",)
"""Calls whose messages streams decode and encode (service/streams.py)."""
_HELLO_S = 0.5


@dataclass(eq=False, kw_only=True)
class SchedulerService(SchedulerServicer):  # type: ignore[misc]
    """Handlers of the scheduler's gRPC calls.

    Attributes:
        streams: MemberStreams of members.
        driver: Driver of the scheduler's state machine.
        effects: Effects of the machine, with its answers to operators.
        claims: Numbers that processes hold while they set up.
        candidacy: Candidacy in the election of a leader; None where this scheduler alone can lead.
        status: Returns facts of the server; of a large job, those of a page, or for page 0 what is odd.
        peer: Returns a text that names the caller of a call.
        emit: Takes (event name, fields) for the event log.
        port: Port on which the scheduler listens.
    """

    streams: MemberStreams
    driver: Driver[fx.SchedulerEvent, fx.SchedulerEffect]
    effects: SchedulerEffects
    claims: Claims
    candidacy: Candidacy | None
    status: Callable[[int], dict[str, Any]]
    peer: Callable[[Any], str]
    emit: Callable[..., None]
    port: int

    async def _send_on(self, context: Any, *, attends: bool = False) -> None:
        """Aborts a call to a scheduler that does not lead, and names the leader."""
        if self.driver.on is not None or self.candidacy is None:
            return
        if attends:
            self.candidacy.asked(await _name_of_caller(context))
        words, leader = self.candidacy.waits("scheduler")
        await context.abort(grpc.StatusCode.UNAVAILABLE, words, ((LEADER_KEY, leader),))

    async def Attend(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """Serves one member's stream, from its Hello to its end."""
        await self._send_on(context, attends=True)
        await self.streams.attend(context, self.peer(context))

    async def Status(self, request: Any, context: Any) -> Any:
        led: dict[str, Any] = {}
        if self.candidacy is not None:
            led = await asyncio.get_running_loop().run_in_executor(None, self.candidacy.facts)
            if self.driver.on is None and led.get("waits_for") == "":
                led["waits_for"] = "its store: it was elected, and takes the chain"
        return chaos_pb2.StatusReply(json=json.dumps({**self.status(request.page), **led}, default=str))

    async def Drain(self, request: Any, context: Any) -> Any:
        await self._send_on(context)
        names, wanted = self.streams.names(), request.name
        asked = [n for n in names if n == wanted] or [
            n for n in names if n.rpartition("-")[0] == wanted and n.rpartition("-")[2].isdigit()
        ]
        for name in asked:
            self.emit("drain", of=name, by=self.peer(context))
            self.driver.feed(fx.Drain(name))
        return chaos_pb2.DrainReply(asked=asked, present=names)

    async def ChangeLink(self, request: Any, context: Any) -> Any:
        """Adds or removes a link for an operator; the machine's answer says whether it will."""
        await self._send_on(context)
        accepted, text = await self.effects.ask(lambda token: fx.ChangeLink(token, request.a, request.b, request.add))
        return chaos_pb2.LinkChangeReply(text=text, accepted=accepted)

    async def Reset(self, request: Any, context: Any) -> Any:
        """Ends the job for an operator; the machine's answer says whether it may be ended."""
        await self._send_on(context)
        self.emit("reset_asked", by=self.peer(context), force=request.force)
        accepted, text = await self.effects.ask(lambda token: fx.Reset(token, request.force))
        return chaos_pb2.ResetReply(text=text, accepted=accepted)

    async def Claim(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """Holds a number for a process that is setting up, until its stream ends; a standby scheduler does so too."""
        await self.claims.hold(context, self.port)


async def _name_of_caller(context: Any) -> str:
    """Reads the Hello of a member that has just opened its stream; returns the member's name, or "" if no Hello comes
    at once.
    """
    with contextlib.suppress(TimeoutError, WireError):
        data = await asyncio.wait_for(context.read(), _HELLO_S)
        hello = read_from_member(data) if data is not END_OF_STREAM else None
        if isinstance(hello, Hello):
            return hello.name
    return ""
