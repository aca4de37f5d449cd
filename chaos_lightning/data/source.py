"""Facts that the elastic loader needs of the job, and those that it tells about each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chaos_lightning.protocol.types import Header, Span, View


class AssignmentSource(Protocol):
    """The job as the data see it; the engine (or a test) provides it.

    The loader asks at the first micro-batch of an accumulation, when the member has committed everything it contributed
    to, so `header` cannot move while it computes.
    """

    @property
    def header(self) -> Header:
        """The last header committed here."""

    @property
    def view(self) -> View | None:
        """The present view; None before the member is in any."""

    @property
    def ruling_view(self) -> View | None:
        """The view that rules the assignment after `header` (`planning.assignment.ruling_view`).

        None if this member does not know it, which means that it is not in it: nothing is assigned to it until the next
        header.
        """

    @property
    def member_id(self) -> str:
        """This member's id; a new one (after a rejoin) makes the loader assign anew."""

    @property
    def name(self) -> str:
        """This member's name, which stays over incarnations: its own stream's name with mode="local"."""


class BatchFacts(Protocol):
    """Facts about a batch that a loader has handed out, as training loops read them."""

    @property
    def epoch(self) -> int: ...

    @property
    def first(self) -> bool:
        """Whether it is the first batch of an optimizer step."""

    @property
    def last(self) -> bool:
        """Whether it is the last batch of an optimizer step."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Positions of the epoch's order."""

    @property
    def samples(self) -> int: ...

    @property
    def idle(self) -> bool:
        """Whether it has no samples of this member's."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Facts of the loader about the batch that it just yielded."""

    epoch: int
    stream: str
    accumulation: int
    """Accumulations begun before this one in this pass."""
    index: int
    """Place in the accumulation, from 0."""
    first: bool
    last: bool
    """Whether it is the accumulation's last, as far as `view.accumulate` says."""
    spans: tuple[Span, ...]
    """Positions of the epoch's order; empty if idle."""
    samples: int
    """Samples in the batch, the weight of its gradient; 0 if idle."""

    @property
    def idle(self) -> bool:
        """Nothing was assigned: the batch is a dummy whose gradient must weigh nothing."""
        return self.samples == 0


@dataclass(slots=True)
class Stats:
    """Counters of one loader, for the event log and for tests."""

    yielded: int = 0
    """Micro-batches, idle ones included."""
    idle: int = 0
    drawn: int = 0
    """Batches handed to the DataLoader for fetching."""
    discarded: int = 0
    """Batches drawn ahead for an assignment that a header revoked; their samples were assigned again."""
    opened: int = 0
    """Iterators of the user's DataLoader opened."""
