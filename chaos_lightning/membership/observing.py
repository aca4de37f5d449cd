"""A member's part in replay joins: naming observers in headers, and observing itself (PROTOCOL.md 15, 17).

Theory of operation. Every member knows the scheduler's list of observers; whoever is the commit root when a step is
closed writes it into that step's header. All other headers repeat the one before, so the list changes with steps only,
and a newcomer's first header is that of a step. Every member sends that header to the newcomer, since the root may die
in between. The newcomer needs two things before it can ask for bytes, in any order: that header, and the scheduler's
word of who the members are.
"""

from __future__ import annotations

from chaos_lightning.membership.effects import Observe, ToPeer
from chaos_lightning.membership.member_state import MemberState, Phase
from chaos_lightning.protocol.types import Header, Kind, Observers


class Observing(MemberState):
    """See the module."""

    def _on_observers(self, message: Observers) -> None:
        self.observers = message.ids
        if self.phase is not Phase.WAITING:
            return
        if self.member_id in message.ids:
            self._observed_view = message.view
            self._observe()
        else:
            self._observe_anew()

    def _observers_for(self, kind: Kind) -> tuple[str, ...]:
        """What the header of a slot of this kind says; asked at the root."""
        return self.observers if kind is Kind.STEP else self.header.observers

    def _greet_observers(self, before: tuple[str, ...]) -> None:
        """The header that was just committed goes to whom it names first."""
        for observer in self.header.observers:
            if observer not in before and observer != self.member_id:
                self._emit(ToPeer(observer, self.header))

    def _consider_observing(self, header: Header) -> None:
        """A header for a newcomer that waits: the state to pull is the one at the header that names it first.

        Who sent that header may be dead and the slot done again, or the next root did not know the list yet: then a
        newer one names this member first, and nobody has the state at the older one.
        """
        if self.member_id not in header.observers or header.kind is not Kind.STEP:
            return  # others repeat the list, as the one that lets it in
        known = self._observed
        if known is None or (header.view, header.seq) > (known.view, known.seq):
            self._observed, self._observes = header, False
            self._observe()

    def _observe(self) -> None:
        if self._observed is not None and self._observed_view is not None and not self._observes:
            self._observes = True
            self._emit(Observe(self._observed, self._observed_view))

    def _observe_anew(self) -> None:
        """Another id, or another generation: what was observed before counts no more."""
        self._observed = self._observed_view = None
        self._observes = False
