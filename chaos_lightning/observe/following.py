"""What `top` and `metrics` share: the job that is on now, of its events and of what its scheduler answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_lightning.events.reader import Record
from chaos_lightning.observe.jobs import Live
from chaos_lightning.observe.timeline import Timeline

KEPT_SLOTS = 1000
"""So many of the latest slots are kept at least: a run may go on for days, and looking at it must stay cheap."""


@dataclass(slots=True)
class Latest:
    """The timeline of the latest job of those that are logged into one folder; takes events in order.

    Attributes:
        forgets: Called with the timeline before old slots, or those of the job before, go.
    """

    forgets: Callable[[Timeline], None] = lambda _: None
    timeline: Timeline = field(default_factory=Timeline)
    _jobs: Live = field(default_factory=Live)

    def take(self, r: Record) -> bool:
        """One more event; whether another job begins with it."""
        begins = self._jobs.begins(r)
        if begins:
            self.forgets(self.timeline)
            self.timeline = self.timeline.next_job()  # the same ids and views, told anew
        elif len(self.timeline.slots) > 2 * KEPT_SLOTS:
            self.forgets(self.timeline)
            self.timeline.prune(KEPT_SLOTS)
        self.timeline.add(r)
        return begins
