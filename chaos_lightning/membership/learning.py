"""Waits for what a newcomer needs to learn by replay: a header that names it, and a view of the members with the state
(protocol.md 15, 17).

Theory of operation. It needs two things before it can ask for bytes, in any order: the header that names it first,
which several members send it, since the root may die in between; and the scheduler's word of who the members are.
"""

from __future__ import annotations

from chaos_lightning.membership.effects import MemberEffect, Observe
from chaos_lightning.protocol.types import Header, Kind, View


class Learning:
    """Preparation of a newcomer to learn by replay: waits for a header that names it and for the members' view."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._view: View | None = None
        self._began = False

    def told(self, view: View | None) -> list[MemberEffect]:
        """Handles the scheduler's message on learners: the view whose members have the state; None: this newcomer is no
        learner (any more).
        """
        if view is None:
            self._header = self._view = None
            self._began = False
            return []
        self._view = view
        return self._begin()

    def consider(self, me: str, header: Header) -> list[MemberEffect]:
        """Checks whether a header is the first that names this waiting newcomer, which then pulls the state at that
        header.

        Who sent that header may be dead and the slot done again, or the next root did not know the list yet: then a
        newer one names this member first, and nobody has the state at the older one.
        """
        if me not in header.learners or header.kind is not Kind.STEP:
            return []  # others repeat the list, as the one that lets it in
        known = self._header
        if known is None or (header.view, header.seq) > (known.view, known.seq):
            self._header, self._began = header, False
            return self._begin()
        return []

    def _begin(self) -> list[MemberEffect]:
        if self._header is None or self._view is None or not self._view.members or self._began:
            return []  # without members: those that it was given are gone, and others are being sought
        self._began = True
        return [Observe(self._header, self._view)]
