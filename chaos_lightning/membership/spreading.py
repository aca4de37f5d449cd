"""Forwards headers down a tree from the root of the view; every member computes the same tree (protocol.md 2).

Theory of operation. In a small view the root sends a header to all others itself. In a larger one the tree is
breadth-first from the root over the view's links, and each member has a few below it, as long as all are reached that
way; where every pair has a link the members follow each other in rank order. An edge of the tree is a link of the view.
So whatever keeps a header from those below, a death or a broken link, is followed by a recovery, whose ruling hands it
on to them (9).

Newcomers are in no tree yet. Members that have a link to a newcomer send it the header that concerns it; where every
pair has a link, the oldest do.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from chaos_lightning.membership.effects import MemberEffect, ToPeer
from chaos_lightning.planning.graph import neighbours
from chaos_lightning.protocol.types import SMALL_JOB, Header, View

GREETERS = 4
"""Number of members that send a newcomer the header that concerns it where every pair has a link: one may die."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Shape of the tree along which headers are forwarded; the same at all members.

    Attributes:
        direct: Number of members up to which the root sends to all.
        width: Number of members that each one sends to in a larger view.
    """

    direct: int = SMALL_JOB
    width: int = 8


class Spreading:
    """Choice of the members to which one member forwards headers."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self._known: tuple[View | None, tuple[str, ...]] = (None, ())

    def hand_on(self, header: Header, view: View, me: str) -> list[MemberEffect]:
        """Returns effects that forward a header to the members below this one in the view's tree."""
        return [ToPeer(member, header) for member in self.below(view, me)]

    def below(self, view: View, me: str) -> tuple[str, ...]:
        """Returns the members to which this one forwards a header of `view`."""
        if self._known[0] is not view:
            self._known = (view, self._below(view, me))
        return self._known[1]

    def _below(self, view: View, me: str) -> tuple[str, ...]:
        if len(view.members) <= self.spread.direct:
            return tuple(m for m in view.ids() if m != me) if me == view.root else ()
        if view.links:
            return tuple(self._tree(view)[me])
        order = [view.root, *(m for m in view.ids() if m != view.root)]
        first = order.index(me) * self.spread.width + 1
        return tuple(order[first : first + self.spread.width])

    def _tree(self, view: View) -> dict[str, list[str]]:
        """Returns the members below each member: at most `width`, unless some can only be reached through a member that
        has more.
        """
        near = neighbours(view.ids(), [(link.a, link.b) for link in view.links])
        order, below = [view.root], {view.root: list[str]()}
        for width in (self.spread.width, len(near)):
            for name in order:  # it grows meanwhile
                for other in near[name]:
                    if len(below[name]) >= width:
                        break
                    if other not in below:
                        below[name].append(other)
                        below[other] = []
                        order.append(other)
        return below

    def joiners(self, view: View, me: str) -> tuple[str, ...]:
        """Returns the joiners of `view` to which this member sends the header that carries it."""
        if len(view.members) <= self.spread.direct:
            return view.joiners
        if not view.links:
            return view.joiners if _greets(view, me) else ()
        near: dict[str, set[str]] = {joiner: set() for joiner in view.joiners}
        for link in view.links:
            for one, other in ((link.a, link.b), (link.b, link.a)):
                if one in near and other not in near:
                    near[one].add(other)
        return tuple(j for j, old in near.items() if me in old or not old)  # linked with newcomers alone: all send

    def learners(self, view: View, me: str, learners: tuple[str, ...], linked: Container[str]) -> tuple[str, ...]:
        """Returns the learners to which this member of `view` sends the header that names them first.

        Args:
            view: The header's.
            me: This member.
            learners: Learners that the header names and the one before it did not.
            linked: Members and newcomers to which this one has a link.
        """
        if len(view.members) <= self.spread.direct:
            return learners
        if view.links:
            return tuple(learner for learner in learners if learner in linked)
        return learners if _greets(view, me) else ()


def _greets(view: View, me: str) -> bool:
    joiners = frozenset(view.joiners)
    return me in [m for m in view.ids() if m not in joiners][:GREETERS]
