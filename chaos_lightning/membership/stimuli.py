"""Logs the events that a state machine has handled: enough to understand what happened, but no payload.

Theory of operation. Contributions and headers carry what a slot gathers, up to 60 MiB of all members together, and a
header carries its ledger; a decision and a report carry headers. A log that keeps such events whole keeps them alive
long after their slot. So they are remembered in words, which name the slot and how much there was; all other events
are small and are remembered as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos_lightning.membership.effects import (
    Contribute,
    ControlIn,
    MemberEvent,
    MessageIn,
    PeerIn,
    PipelinesFound,
    PlanDrawn,
    SchedulerEvent,
)
from chaos_lightning.protocol.types import Contribution, Decide, Header, Hello, Report, Span

_FEW = 8
"""Number of spans of parts that are remembered of a report."""


@dataclass(frozen=True, slots=True)
class MessageDigest:
    """Short text in place of a large event, for a log."""

    kind: str
    words: str


def of_member(event: MemberEvent) -> MemberEvent | MessageDigest:
    """Returns what a member's log keeps of this event."""
    match event:
        case PeerIn(peer, message):
            return MessageDigest("PeerIn", f"{peer}: {in_words(message)}")
        case Contribute(contribution):
            return MessageDigest("Contribute", in_words(contribution))
        case ControlIn(Decide() as decision):
            hand_on = f"hand on {in_words(decision.base)}" if decision.hand_on else f"redo after {decision.base.seq}"
            return MessageDigest(
                "ControlIn", f"decide {decision.view.id} of {', '.join(decision.view.ids())}, {hand_on}"
            )
        case _:
            return event


def of_scheduler(event: SchedulerEvent) -> SchedulerEvent | MessageDigest:
    """Returns what a scheduler's log keeps of this event."""
    match event:
        case MessageIn(conn, Report() as report):
            named = in_words(report.pending) if report.pending is not None else report.pending_hash
            pending = f", pending {named}" if named else ""
            words = f"{conn}: report for {report.number}, entered {report.entered}, at {report.seq} ({report.head})"
            return MessageDigest("MessageIn", f"{words}, parts {_few(report.parts)}, raw={report.raw}{pending}")
        case PlanDrawn(token, plan, reason):
            drawn = f"{len(plan.trees)} trees" if plan is not None else "none"
            return MessageDigest("PlanDrawn", f"{token}: {drawn}, {reason}")
        case MessageIn(conn, Hello(pipelines=asked) as hello) if asked:
            return MessageIn(conn, replace(hello, pipelines=f"({len(asked)} bytes)"))
        case PipelinesFound(token, plan, reason):
            return MessageDigest("PipelinesFound", f"{token}: {'a plan' if plan else 'none'}, {reason}")
        case _:
            return event


def _few(spans: Sequence[Span]) -> str:
    """Returns the first of these spans, and the number of the others."""
    more = f" and {len(spans) - _FEW} more" if len(spans) > _FEW else ""
    return f"{tuple(spans[:_FEW])}{more}"


def in_words(message: Contribution | Header) -> str:
    """Returns a contribution or header in words, without its payload."""
    common = f"slot {message.seq} of view {message.view}, {message.kind} {message.name!r}, step {message.step}"
    if isinstance(message, Contribution):
        brought = f"{len(message.payload)} bytes, weight {message.weight:g}"
        return f"contribution of {message.member} to {common}, on {message.prev_hash}, {brought}"
    changed = f", next view {message.next_view}" if message.view_change is not None else ""
    error = f", error {message.error[:200]!r}" if message.error else ""
    return f"header of {common}, on {message.prev_hash}, {sum(map(len, message.answers))} bytes{changed}{error}"
