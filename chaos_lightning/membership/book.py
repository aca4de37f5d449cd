"""Keeps the chain of decided views as the store has it, and the one write that may be on its way there (protocol.md
7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaos_lightning.membership.desk import Desk
from chaos_lightning.membership.effects import Chain, Persist
from chaos_lightning.membership.past import LAST_VIEWS, Past
from chaos_lightning.protocol.types import NO_VIEW, SMALL_JOB, Decide, NextView, Saved, View, ViewId


class Book:
    """Chain of decided views as the store has it, and the one write that may be on its way to the store.

    Args:
        desk: State that all components share.
        chain: Chain as the store holds it.
    """

    def __init__(self, desk: Desk, chain: Chain) -> None:
        self._desk = desk
        self.term = chain.term
        self.chain_id = chain.id
        self.highest = chain.highest
        self.numbers = chain.numbers.copy()
        """All numbers that the store holds."""
        for number in (NO_VIEW, chain.highest, *(v.id for v in chain.views)):
            self.numbers.add(number)
        self.past = chain.past.copy()
        """All decided views, as far as anybody may ask for one."""
        self.views: list[View] = []
        """The last two decided views."""
        self.spreads = False
        """Whether most members of a large job get the state at once, as when it is founded. A recovery does not end
        this.
        """
        for view in chain.views:
            self._add(view, carried=view.id in chain.changes)
        self.ended = chain.ended
        self.reached = chain.step
        """Number of optimizer steps that the job is known to have committed."""
        self.saved: Saved | None = None
        """The newest checkpoint that a member told of."""
        self.decision: Decide | None = None
        self.announced: NextView | None = None
        self.entered_at: float | None = None
        """Time (s) at which the first member stood in the latest view, or in a large job the last one loaded the
        state.
        """
        self.persisting: tuple[int, Callable[[], None]] | None = None
        """Token of the write that is out, and what follows from it."""
        self.writing: View | None = None
        """View that is being written, if the write is one of a view."""
        self.token = 0
        self._refused: deque[View] = deque(maxlen=8)
        """The last views that no store took, without their numbers and reasons."""

    @property
    def latest(self) -> View | None:
        """The last decided view."""
        return self.views[-1] if self.views else None

    def decided(self, number: ViewId) -> View | None:
        """Returns the decided view with this number, if it is one of the last two; else None."""
        return next((v for v in self.views if v.id == number), None)

    def persist(self, entry: Persist, then: Callable[[], None]) -> None:
        """Asks the store to write this entry, under a new token; calls `then` once it is written."""
        self.token += 1
        self.persisting, self.writing = (self.token, then), entry.view
        self.numbers.add(entry.number)
        self._desk.out.append(replace(entry, token=self.token))

    def refuse(self, view: View) -> None:
        """Notes that no store accepts this view, so that it is not written again."""
        self._refused.append(replace(view, id=NO_VIEW, reason=""))

    def refuses(self, view: View) -> bool:
        """Returns whether it is known that no store accepts this view."""
        return bool(self._refused) and replace(view, id=NO_VIEW, reason="") in self._refused

    def lacks(self, number: ViewId | None) -> bool:
        """Returns whether this view number is missing from the store's chain. Numbers before a rebuilt view never count
        as missing.
        """
        if number is None or number in self.numbers:
            return False
        return number >= self.past.rebuilt

    def void_write(self, stored: Callable[[View | None], None]) -> None:
        """Cancels what was to follow the pending write to the store: if it succeeds, only `stored` is called, with the
        view.
        """
        if self.persisting is not None:
            (token, _), view = self.persisting, self.writing
            self.persisting = (token, lambda: stored(view))

    def stored(self, token: int, ok: bool) -> bool:
        """Handles the outcome of a write; returns False if that write was awaited and the store refused it."""
        if self.persisting is None or self.persisting[0] != token:
            return True
        _, then = self.persisting
        self.persisting = None
        if ok:
            then()
        return ok

    def entered(self, view: ViewId, now: float, *, loaded: bool) -> None:
        """Notes the time at which the first member entered the last decided view.

        Args:
            view: The member's.
            now: The time (s).
            loaded: The member has just loaded the state. In a large job others get it from that member next.
        """
        latest = self.latest
        if latest is None or view != latest.id:
            return
        if self.entered_at is None or (loaded and len(latest.members) > SMALL_JOB):
            self.entered_at = now

    def loads(self, member: str, now: float) -> None:
        """Restarts the time limit of joiners, as one of them now gets the state from another member.

        Where most do, the first copies take as long as those that are sent at the same time, and all others wait for
        them.
        """
        if self.latest is not None and self.spreads and self.entered_at is not None and member in self.latest.joiners:
            self.entered_at = now

    def told_saved(self, saved: Saved | None) -> None:
        """Remembers a checkpoint that a member reports, if it is the newest."""
        if saved is not None and (self.saved is None or saved.step >= self.saved.step):
            self.saved = saved

    @property
    def saved_words(self) -> str:
        """Text for people about the newest checkpoint that a member has reported."""
        return f"the newest checkpoint is {self.saved}" if self.saved else "no member has told of a checkpoint"

    def restart(self, past: Past, views: Sequence[View]) -> None:
        """Replaces the decided views: `views` are the last ones, and `past` remembers all of them."""
        self.past, self.views = past, list(views)

    def _add(self, view: View, *, carried: bool) -> None:
        self.past.add(view, carried=carried)
        self.views = [*self.views, view][-LAST_VIEWS:]
        most = len(view.members) > SMALL_JOB and 2 * len(view.joiners) > len(view.members)
        self.spreads = most or (self.spreads and not carried and bool(view.joiners))

    def append(self, view: View, *, carried: bool) -> None:
        """Adds a decided view that is in the store; `carried`: whether a header is to carry it."""
        self._add(view, carried=carried)
        self.entered_at = None
        split = {"batch": view.batch} if view.batch else {}
        told = {"id": str(view.id), "members": view.ids(), "joiners": view.joiners, "reason": view.reason}
        self._desk.note("view", **told, chain=view.chain, **split)
