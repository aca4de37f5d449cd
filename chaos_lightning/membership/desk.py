"""State that all components of a scheduler share while they handle an event: settings, time, phase, and effects."""

from __future__ import annotations

import enum

from chaos_lightning.membership.effects import Note, SchedulerEffect
from chaos_lightning.protocol.pace import Pacing
from chaos_lightning.protocol.types import Settings


class SchedulerPhase(enum.StrEnum):
    FOUNDING = "founding"
    REBUILDING = "rebuilding"
    STALE = "stale"
    RUNNING = "running"
    PREPARING = "preparing"
    HOLDING = "holding"
    FINISHED = "finished"
    DEPOSED = "deposed"


class Desk:
    """State that all components of a scheduler share while they handle an event.

    Args:
        settings: The job's rules.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pacing = Pacing(settings)
        """Interval at which members say that they live, and the silence after which they are suspected."""
        self.phase = SchedulerPhase.FOUNDING
        self.clock: float | None = None
        """Time of the last event (s); None before the first."""
        self.out: list[SchedulerEffect] = []
        """Effects of the present event, in the order in which they must happen."""
        self.waits = ""
        """Reason for which the job waits, in words; "" if it does not wait."""
        self.lost = ""
        """Reason why nobody holds the training state any more, until others found the job again; "" otherwise."""

    @property
    def now(self) -> float:
        assert self.clock is not None
        return self.clock

    def note(self, name: str, **fields: object) -> None:
        self.out.append(Note(name, tuple(fields.items())))

    @property
    def shown_phase(self) -> str:
        """Phase as shown to people: a job that lost its state and waits for founders is "lost", not "founding"."""
        return "lost" if self.lost and self.phase is SchedulerPhase.FOUNDING else str(self.phase)

    @property
    def reserving(self) -> bool:
        return self.phase in (SchedulerPhase.PREPARING, SchedulerPhase.HOLDING)
