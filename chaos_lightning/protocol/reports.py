"""What members tell the scheduler about links, transfers and their end: words of the protocol without views."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A learner tells how far it is (protocol.md 17, 18)."""

    seq: int
    """Last slot that is applied to its state."""
    able: bool = True
    """False: it cannot catch up, or lost the log, and asks to be let in by a pause."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    member: str
    nbytes: int
    rate_bps: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A newcomer's transfer, told about once a second."""

    phase: str
    """"pull", "replay" or "prove"."""
    done_nbytes: int
    total_nbytes: int
    rate_bps: float
    lag: int = 0
    """Steps of the log that are not applied yet."""
    sources: tuple[SourceProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a member measured on its link to `peer`, or that the link carries nothing (rate 0)."""

    peer: str
    latency_s: float
    """Half a round trip."""
    rate_bps: float
    """Bits per second that this member can send to the peer."""
    evidence: str
    """"probe" or "transfer", and why it was measured."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """The primitives connect-link and disconnect-link (Chaos, Fig. 4c and 4d), asked for by a member."""

    peer: str
    add: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LinkEvent:
    peer: str
    up: bool
    evidence: str
    """"connected", MADE_ANEW, "closed" (EOF or reset: a fact), "silent", "refused", "timeout"."""


MADE_ANEW = "closed, and connected anew"
"""Of a link that stands, but has not stood all the time since its member entered its view. One word for both: said in
turn, the first would be taken for evidence against a neighbour whose own stream is being replaced just then."""


@dataclass(frozen=True, slots=True)
class Verdict:
    suspect: str
    alive: bool
    evidence: str
    certain: bool = False
    """The process table of the suspect's own machine says that its process is gone or has died."""
    seen: bool = False
    """Said by that process table, whatever it says; else nothing but a link's silence tells."""


@dataclass(frozen=True, slots=True)
class Leave:
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The job's closing header is committed here."""

    seq: int
    step: int
