"""Declares what the elastic loader needs to know about the job, and what it states about each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chaos_lightning.protocol.types import Header, Span, View


class AssignmentSource(Protocol):
    """Facts about the job by which data are assigned; the engine (or a test) provides them.

    The loader asks at the first micro-batch of an accumulation, when the member has committed everything it contributed
    to, so `header` cannot move while it computes.
    """

    @property
    def header(self) -> Header:
        """Last header that this member has committed."""

    @property
    def view(self) -> View | None:
        """Present view; None before this member is in one."""

    @property
    def ruling_view(self) -> View | None:
        """View by which data are assigned after `header` (`planning.assignment.ruling_view`).

        None if this member does not know it, which means that it is not in it: nothing is assigned to it until the next
        header.
        """

    @property
    def member_id(self) -> str:
        """Id of this member; when it changes (after a rejoin), the loader assigns anew."""

    @property
    def name(self) -> str:
        """Name of this member, the same in all its incarnations; with mode="local" also its stream's name."""


class BatchFacts(Protocol):
    """Facts about a batch that training loops read."""

    @property
    def epoch(self) -> int: ...

    @property
    def first(self) -> bool:
        """Whether the batch is the first one of an optimizer step."""

    @property
    def last(self) -> bool:
        """Whether the batch is the last one of an optimizer step."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Positions of the batch's samples in the epoch's order."""

    @property
    def samples(self) -> int: ...

    @property
    def idle(self) -> bool:
        """Whether the batch has no samples, so that it is only a stand-in."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Facts about the micro-batch that a loader yielded last."""

    epoch: int
    stream: str
    accumulation: int
    """Number of accumulations begun before this one in this pass."""
    index: int
    """Place in the accumulation, from 0."""
    first: bool
    last: bool
    """Whether the batch is the accumulation's last, as far as `view.accumulate` says."""
    spans: tuple[Span, ...]
    """Positions of the epoch's order; empty if idle."""
    samples: int
    """Number of samples in the batch, the weight of its gradient; 0 if idle."""

    @property
    def idle(self) -> bool:
        """Whether no samples were assigned: the batch is a stand-in, whose gradient must have weight 0."""
        return self.samples == 0


@dataclass(slots=True)
class Stats:
    """Counters of one loader, for the event log and for tests."""

    yielded: int = 0
    """Number of micro-batches, idle ones included."""
    idle: int = 0
    drawn: int = 0
    """Number of batches handed to the DataLoader for fetching."""
    discarded: int = 0
    """Number of batches drawn ahead for an assignment that a header revoked; their samples were assigned again."""
    opened: int = 0
    """Number of iterators of the user's DataLoader opened."""
