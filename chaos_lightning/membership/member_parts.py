"""Tracks the parts of the training state at one member: which it owns, holds, pulls and drops (P4, P8, P13, P14).

Theory of operation. The view says which parts a member owns (parts.py). It holds those that it made at GENESIS, that
lay in its file, or that other members sent; it pulls the others that it owns. It contributes once it holds all that it
owns. It drops a part that it no longer owns with the first header that was closed under such a view; a part that has
drifted it counts as missing. A view without pipelines has one part, which all members own.
"""

from __future__ import annotations

from chaos_lightning.membership.effects import DropParts, MemberEffect, PullParts, StateLoaded
from chaos_lightning.membership.parts import common, division
from chaos_lightning.membership.slots import by_units
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import GENESIS, WHOLE, Contribution, Header, Kept, Kind, Span, View, ViewId


def is_let_go(member: str, view: View) -> bool:
    """Returns whether this view lets the member go, which then still serves its parts of the state until it is released
    (P9).
    """
    return any(m.id == member for m in view.leaving)


class MemberParts:
    """Parts of the training state that one member owns, and those that it holds.

    Attributes:
        held: Parts that it holds at its header, as normal spans.
        owned: Parts that it owns in its view, as normal spans.
        kept: The state in a file that its hello offers, as far as it is one of a job with pipelines.
        serves: Whether a view names it as leaving: others may still need its parts (P9).
    """

    def __init__(self) -> None:
        self.held: tuple[Span, ...] = ()
        self.owned: tuple[Span, ...] = ()
        self.kept: Kept | None = None
        self.serves = False

    @property
    def missing(self) -> tuple[Span, ...]:
        """Parts of the training state that the member owns in its view but does not hold."""
        return subtract(self.owned, self.held)

    def stand_in(self, me: str, view: View, seq: int) -> None:
        """Sets what the member owns once it has entered a view, and before slot 1 also what it holds (P14).

        Args:
            me: The member.
            view: The view.
            seq: Slot that the member has committed.
        """
        parts = division(view)
        self.owned = parts.owned(me)
        if view.pipelines and seq == GENESIS.seq:
            self.held = parts.made(me)

    def in_file(self, base: Header, view: View) -> tuple[Span, ...]:
        """Returns the parts of the state in this member's file, if the job is founded on the state that was kept there
        (14c, P13).
        """
        kept = self.kept if view.pipelines else None
        return kept.parts if kept is not None and kept.header.hash == base.hash else ()

    def found(self, base: Header, view: View) -> None:
        """Sets what the member holds once the job is founded on this header: the whole state, or the parts that it kept
        in a file.
        """
        self.held = self.in_file(base, view) if view.pipelines else WHOLE

    def may_contribute(self, view: View, contribution: Contribution, complete: tuple[ViewId, int] | None) -> bool:
        """Returns whether all owned parts of the state are held and, for a STEP that units ran for, their gradients
        reduced (P4).

        Args:
            view: The view that rules.
            contribution: The member's own, to the open slot.
            complete: View and slot of the attempt that is reduced; None if the open slot has none.
        """
        reduces = by_units(view, contribution) and contribution.kind is Kind.STEP
        return not self.missing and (not reduces or complete == (view.id, contribution.seq))

    def pull(self, header: Header, view: View) -> list[MemberEffect]:
        """Asks other members for the missing parts of the state at this header."""
        return [PullParts(header, view, missing)] if (missing := self.missing) else []

    def take(self, loaded: StateLoaded, header: Header, view: View) -> bool:
        """Adds arrived parts of the state that were missing to those held; returns whether there were any.

        Before slot 1 each view has a state of its own, made by the oldest owners in it (P14).

        Args:
            loaded: Parts that came.
            header: The header on which the member stands.
            view: Its view.
        """
        came = common(self.missing, loaded.parts)
        other = header.seq == GENESIS.seq and bool(view.pipelines) and loaded.view != view.id
        if not came or other or loaded.head != header.hash:
            return False
        self.held = union((*self.held, *came))
        return True

    def committed(self, me: str, header: Header, view: View, *, handed_on: bool) -> list[MemberEffect]:
        """Drops parts of the state that only others own, once a header was closed under a view that says so (P8).

        A recovery that hands on a header which steps nothing may count on what they hold (P5).

        Args:
            me: The member.
            header: The header that it commits.
            view: The view in which that was closed.
            handed_on: Whether a recovery hands it on.
        """
        if handed_on and not (header.kind is Kind.STEP and not header.error):
            return []
        gone, here = subtract(self.held, self.owned), common(self.held, self.owned)
        if view.pipelines:  # without them it joins again, as a whole (24)
            here = subtract(here, union((d.part, d.part + 1) for d in header.drifted if d.member == me))
        self.held = here
        return [DropParts(gone)] if gone else []
