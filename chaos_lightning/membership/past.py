"""Remembers the parts of old decided views that may still be asked about (protocol.md 7).

Theory of operation. A view names, places and links all its members, and a chain has a view for each change. Little is
asked of an old one: whether it was of this chain, who stood in it, and whether a member that it lacks had asked to go.
So a `Past` keeps the number of each view, and of each member the numbers of the views with which it came and went. The
scheduler has it in place of all but the last two views, whether or not its store was cut: so nothing that is decided
depends on where it was cut. A record that sums up holds it, too (control/summing.py).

Members that have gone are forgotten when `MOST_GONE` others went after them. No rule about members of the last view
asks for them. A process that comes back after so long is told that it was put out, whether or not it had asked to go:
one that had asked ends all the same, and one that was drained joins again. A state that it kept still counts, if
it names a view of the chain from before that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from chaos_lightning.protocol.types import NO_VIEW, View, ViewId

LAST_VIEWS = 2
"""Number of views, the last ones, that stay as they are: members may stand in either."""
MOST_GONE = 4096
"""Number of members that have gone of which it is known when: about 40 bytes of a record for each."""
REBUILT = "rebuilt"
"""Beginning of the reason of a rebuilt chain's first view."""


@dataclass(slots=True)
class Numbers:
    """Set of view numbers, stored as consecutive runs.

    Attributes:
        runs: Term, first number and last number of each run, in the order in which they came.
    """

    runs: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, numbers: Iterable[ViewId]) -> Numbers:
        found = cls()
        for number in numbers:
            found.add(number)
        return found

    def add(self, number: ViewId) -> None:
        if number in self:
            return
        term, first, last = self.runs[-1] if self.runs else (-1, 0, 0)
        if (term, last + 1) == (number.term, number.number):
            self.runs[-1] = (term, first, number.number)
        else:
            self.runs.append((number.term, number.number, number.number))

    def __contains__(self, number: ViewId) -> bool:
        return any(term == number.term and a <= number.number <= b for term, a, b in reversed(self.runs))

    def __len__(self) -> int:
        return sum(last - first + 1 for _, first, last in self.runs)

    def below(self, number: ViewId) -> ViewId:
        """Returns the highest of these numbers that is below this one; NO_VIEW if there is none."""
        lower = [run for run in self.runs if run[:2] < (number.term, number.number)]
        ends = (ViewId(t, b if t < number.term else min(b, number.number - 1)) for t, _, b in lower)
        return max(ends, default=NO_VIEW)

    def forget(self, before: ViewId) -> None:
        """Removes runs that end before this number."""
        self.runs = [run for run in self.runs if (run[0], run[2]) >= (before.term, before.number)]

    def copy(self) -> Numbers:
        return Numbers(list(self.runs))


@dataclass(slots=True)
class Past:
    """Decided views of a chain, as far as questions about them may still come.

    Attributes:
        views: Numbers of all views of the chain.
        let_go: Numbers of views that a header was to carry and that lack members of the view before, which had asked
            to leave or were drained.
        members: Views at which each member came and went, by member: the first view with it, the first one after
            that without it, and so on. The member that came or went last is last.
        forgotten: The last view with which a member went that is no longer in `members`.
        rebuilt: The last view with which a lost chain was rebuilt.
        incarnation: The highest number that a member's id ends with.
        together: Whether any view has several members.
        hosts: Two of the members' machines, or the only one.
        plan_reason: Reason of the last view that tells of its plan.
        inside: Members of the last view.
        leaving: Members that the last view lets go and that are needed until it is settled (P9).
    """

    views: Numbers = field(default_factory=Numbers)
    let_go: Numbers = field(default_factory=Numbers)
    members: dict[str, tuple[ViewId, ...]] = field(default_factory=dict)
    forgotten: ViewId = NO_VIEW
    rebuilt: ViewId = NO_VIEW
    incarnation: int = 0
    together: bool = False
    hosts: tuple[str, ...] = ()
    plan_reason: str = ""
    inside: frozenset[str] = frozenset()
    leaving: frozenset[str] = field(default=frozenset(), compare=False)  # the last view has it: no record needs it

    @classmethod
    def of(cls, views: Iterable[View]) -> Past:
        """Returns a `Past` of these views, given oldest first."""
        found = cls()
        for view in views:
            found.add(view)
        return found

    def add(self, view: View, *, carried: bool = False) -> None:
        """Adds the view that follows the last one; `carried`: whether a header was to carry it."""
        ids, leaving = frozenset(view.ids()), frozenset(m.id for m in view.leaving)
        gone, fresh = self.inside - ids, [m for m in view.members if m.id not in self.inside]
        for member in (*sorted(gone), *(m.id for m in fresh)):
            moves = self.members.pop(member, ())
            # A leaver that goes on as a member (P9) was needed all the time: it counts as if it had never gone.
            stays = member in self.leaving and member in ids
            self.members[member] = (moves[:-1] or (view.id,)) if stays else (*moves, view.id)
        self.views.add(view.id)
        if gone and (carried or gone <= leaving):
            self.let_go.add(view.id)
        if view.reason.startswith(REBUILT):
            self.rebuilt = view.id
        if "plan" in view.reason:
            self.plan_reason = view.reason
        used = [int(number) for m in fresh if (number := m.id.rpartition("~")[2]).isdecimal()]
        self.incarnation = max([self.incarnation, *used])
        self.together = self.together or len(ids) > 1
        self.hosts = tuple(dict.fromkeys((*self.hosts, *(m.host for m in fresh))))[:2]
        self.inside, self.leaving = ids, leaving
        self._forget()

    def _forget(self) -> None:
        """Forgets the members that left first, once too many that have left are remembered."""
        needed = self.inside | self.leaving
        many = len(self.members) - len(needed) - MOST_GONE
        if many > 0:
            for member in list(islice((m for m in self.members if m not in needed), many)):
                self.forgotten = self.members.pop(member)[-1]
            self.let_go.forget(self.forgotten)

    def copy(self) -> Past:
        """Returns an independent copy, which later changes of this object do not affect."""
        return replace(self, views=self.views.copy(), let_go=self.let_go.copy(), members=dict(self.members))

    def _moves(self, member: str, view: ViewId) -> int:
        """Returns how often this member had come or gone up to this view."""
        return sum(at <= view for at in self.members.get(member, ()))

    def stood_in(self, member: str, view: ViewId) -> bool:
        """Returns whether this view of the chain had this member, or is so old that its members are forgotten."""
        moves = self._moves(member, view)
        return view in self.views and (moves % 2 == 1 or (not moves and view < self.forgotten))

    def in_all_after(self, member: str, view: ViewId) -> bool:
        """Returns whether every later view has this member, or names it as one that the view lets go (P9)."""
        if member in self.inside:
            return self.views.below(self.members[member][-1]) <= view
        # Once no view names it, it comes in no more; so each view since the one that lets it go has named it.
        moves = self.members.get(member, ())
        since = moves[-2] if len(moves) > 1 else NO_VIEW
        return member in self.leaving and self.views.below(since) <= view

    def let_go_by(self, member: str, view: ViewId) -> ViewId | None:
        """Returns the view that let this member of `view` go; None if the member is still in, or was put out."""
        moves, count = self.members.get(member, ()), self._moves(member, view)
        without = moves[count] if count % 2 == 1 and count < len(moves) else None
        return without if without is not None and without in self.let_go else None
