"""What a timeline holds: lives, views, slots and their commits, pulls, faults. Values without judgement.

Theory of operation. These are the rows of `timeline.py`, apart so that what draws or counts them needs not know how
they were gathered. Times are wall times in s unless a name says otherwise; None means that it did not happen as far
as the logs tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.events.spans import Spans
from chaos_lightning.observe import fields as f

FREEZES = frozenset({"sigstop", "freeze"})
THAWS = frozenset({"sigcont", "thaw"})
KILLS = frozenset({"sigkill", "kill", "crash"})
"""Words of `fault_injected.kind` that stop, resume and end a process (lab/faults.py)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer was when its newcomer told last."""

    nbytes: int = 0
    """So far, those that were there before included."""
    total: int = 0
    """In all; 0: unknown."""
    rate_bps: float = 0.0
    """Bits per second of late; 0: nothing is known yet."""
    remaining_s: float | None = None
    """At this rate; None: nothing is known yet."""
    sources: tuple[tuple[str, int], ...] = ()
    """(donor, bytes), most bytes first."""


@dataclass(slots=True)
class Pull:
    """One newcomer's transfer of the training state."""

    member: str
    started: float
    head: str = ""
    seq: int = 0
    done: float | None = None
    sources: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Donor -> (bytes, seconds)."""
    nbytes: int = 0
    skipped: int = 0
    """Bytes the newcomer held already."""
    progress: Progress = Progress()
    """What was told last while it ran."""
    seconds: float = 0.0
    hash: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second over the whole transfer; 0 while it runs."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Life:
    """One member id from the process's first word (or its rejoin) to its end."""

    member: str
    node: str
    source: str = ""
    born: float = 0.0
    welcomed: float | None = None
    role: str = ""
    joined: float | None = None
    leaving: float | None = None
    ended: float | None = None
    end: str = ""
    """How it ended: "left", "finished", "fenced", "death" (seen by others), "killed" (injected), "" while it lives."""
    why: str = ""
    freezes: list[tuple[float, float | None]] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    way: str = ""
    """"replay" or "pause", as the scheduler chose."""
    why_way: str = ""
    replayed: int = 0
    """Steps of the log that it applied before it came in."""
    last: float = 0.0
    """Its own latest event."""
    last_seq: int = -1
    last_step: int = 0
    state: str = "starting"
    """In a word, for the live view."""


@dataclass(frozen=True, slots=True)
class ViewFact:
    """A view as the first event about it told it."""

    id: str
    members: tuple[str, ...]
    joiners: tuple[str, ...]
    reason: str
    t: float

    @property
    def number(self) -> tuple[int, int]:
        """(term, number)."""
        return f.view_number(self.id)


@dataclass(frozen=True, slots=True)
class Commit:
    """One member's commit of one slot."""

    t: float
    mono: float
    duration_s: float
    wait_s: float
    spent: dict[f.Stream, Spans]


@dataclass(slots=True)
class Slot:
    """One committed slot: a header, and who committed it when."""

    seq: int
    step: int
    kind: str
    header: str
    prev: str
    view: str
    next_view: str
    contributors: tuple[tuple[str, float], ...]
    ledger: dict[f.Stream, Spans]
    commits: dict[str, Commit] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Wall time (s) of its first commit."""
        return min(c.t for c in self.commits.values())

    @property
    def complete(self) -> float:
        """Wall time (s) of its last commit."""
        return max(c.t for c in self.commits.values())

    @property
    def who(self) -> tuple[str, ...]:
        """Ids of the contributors, in rank order."""
        return tuple(member for member, _ in self.contributors)


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, written down before it struck."""

    t: float
    kind: str
    node: str
    member: str
    phase: str
    step: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Flow:
    """What one member's link to another carried lately, and what it can."""

    t: float
    sent_bps: float
    received_bps: float
    rate_bps: float | None
    """Measured, towards the other one; None: nobody measured it."""
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class Note:
    """An event that is shown as a line of text."""

    t: float
    name: str
    member: str
    text: str
