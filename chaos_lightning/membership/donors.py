"""Chooses the few members (donors) that give a newcomer the training state and the log.

Theory of operation (protocol.md 15). All members hold the same state, so a newcomer needs few of them, and the others
need not hear of it. In a large job each newcomer has an order of its own over the members, by a hash of both names, so
that many newcomers spread over all; members that it has links with come first, and some of its own machine before
these. A view that lacks a member or has one more changes at most one place of that order.

The donors of a *learner* copy the state and keep the log, so they must know: the scheduler names them (`of_learner`)
once, and tells each member whether it is one (`Serving`). A joiner by *pause* finds the state at all members and
chooses for itself, group after group (`groups`).

At a founding one member has the state, or few have it. There joiners also ask others that came before them, which
answer as soon as they have loaded: the copies spread as a tree, and no member serves more than `PULLS` at a time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.protocol.types import SMALL_JOB, Header, Member, ServeLearners, View

DONORS = 8
"""Number of donors of a newcomer: together they outrun its access link, and hardly die all within one pull."""
PULLS = 4
"""Number of newcomers to which a member sends its state at a time; more would only make all of them late."""


def spread(newcomer: str, members: Iterable[Member]) -> list[Member]:
    """Returns these members in a pseudo-random order that depends on the newcomer."""

    def place(member: Member) -> bytes:
        return hashlib.blake2b(f"{newcomer} {member.id}".encode(), digest_size=8).digest()

    return sorted(members, key=place)


def _first(newcomer: Member, holders: Sequence[Member], linked: Collection[str]) -> list[Member]:
    """Returns all holders of the state, in the order in which the newcomer is to ask them."""
    order = spread(newcomer.id, holders)
    near = [m for m in order if m.id in linked]
    beside = [m for m in near or order if newcomer.host and m.host == newcomer.host]
    return list(dict.fromkeys([*beside[: DONORS // 2], *near, *order]))


def of_learner(newcomer: Member, holders: Sequence[Member], linked: Collection[str]) -> tuple[str, ...]:
    """Returns the ids of the members of a large job that give this learner the state and the log.

    Args:
        newcomer: The learner.
        holders: Members that hold the state.
        linked: Ids of members that it has a link with; others are its donors only if it has none.
    """
    reached = [m for m in holders if m.id in linked] or holders
    return tuple(m.id for m in _first(newcomer, reached, linked)[:DONORS])


def copiers(view: View, host: str, learners: int) -> int:
    """Returns how many members of one machine may copy the state at the same header, as they share its free memory.

    Args:
        view: The one that rules.
        host: The machine.
        learners: Number of newcomers that are served, each by `DONORS` members of a large job.
    """
    here = sum(m.host == host for m in view.members)
    return min(here, DONORS * learners) if len(view.members) > SMALL_JOB else here


def groups(view: View, me: str, near: Collection[str], *, fellows: bool = True) -> list[list[Member]]:
    """Returns the groups of members that a joiner asks for the state, one after the other until one of them gives it,
    in rank order.

    Args:
        view: The view that lets it in.
        me: The joiner.
        near: Ids of members that it has links with.
        fellows: Whether other joiners may be among them, in the first group: they answer once they have loaded.
    """
    joiners, rank = set(view.joiners), {m: i for i, m in enumerate(view.ids())}
    holders = [m for m in view.members if m.id not in joiners]
    newcomer = view.find(me)
    found = [holders]
    if newcomer is not None and len(view.members) > SMALL_JOB:
        order = _first(newcomer, holders, near if view.links else ())
        found = [order[i : i + DONORS] for i in range(0, len(order), DONORS)]
    if fellows and newcomer is not None and len(joiners) > PULLS * len(holders):
        first = _before(view, me, holders, near)
        found = [[m for m in view.members if m.id in first], *found]
    return [sorted(group, key=lambda m: rank[m.id]) for group in found]


def _before(view: View, me: str, holders: Sequence[Member], near: Collection[str]) -> set[str]:
    """Returns the ids of the members from which this joiner gets the state; at least one of them has the state before
    this joiner has it.

    Where links are few these are its neighbours, the nearest to a holder first: all have one that is nearer than they
    are. Else the line of joiners behind the holders is a tree in which each has `PULLS` children; a joiner asks its
    parent and that one's parent, and in a small job all that come before it.
    """
    if view.links and near:
        graph = neighbours(view.ids(), [(link.a, link.b) for link in view.links])
        ways = breadth_first("", {**graph, "": [m.id for m in holders]}, "")
        nearest = [m for m in ways if m in near and m != me]  # in the order in which they are reached
        return set(nearest[:DONORS])
    line = [*(m.id for m in holders), *view.joiners]
    place, first = line.index(me), len(holders)
    if len(line) <= SMALL_JOB:
        return set(line[:place][-DONORS:])
    parents: set[str] = set()
    while place >= first and len(parents) < 2:
        place = (place - first) // PULLS
        parents.add(line[place])
    return parents


def named_more(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Returns the learners that the new list names more often than the old one: these begin, or begin again, at the new
    list's header.
    """
    return tuple(Counter(now) - Counter(before))


class Serving:
    """Role of this member as a donor: whether it keeps the state and the log for the present learners (protocol.md 15,
    18).

    Attributes:
        keeps: Whether it keeps the log.
        copies: Whether it copies the state at the last header.
    """

    def __init__(self) -> None:
        self.keeps = self.copies = False
        self._told: tuple[tuple[str, ...], bool] = ((), False)

    def told(self, me: str, message: ServeLearners) -> None:
        """Handles the scheduler's list of learners: this member is a donor if the view in that message names it."""
        self._told = message.ids, message.view.find(me) is not None

    def committed(self, before: Header, header: Header, view: View, links: Mapping[str, bool]) -> None:
        """Handles the commit of a header: decides whether to keep the log, and whether to copy the state at this
        header.

        Newcomers that this member has not heard of count if it has a link with them: to keep too much is harmless.

        Args:
            before: The header before it.
            header: A header, which may name learners.
            view: The view that rules here.
            links: Whether each link of this member stands, by its other end.
        """
        new, kept = set(named_more(before.learners, header.learners)), self.keeps
        if not header.learners or len(view.members) <= SMALL_JOB:
            self.keeps = bool(header.learners)
        elif new:
            ids, donor = self._told
            unheard = new.intersection(named_more(ids, header.learners))
            chosen = (donor and unheard != new) or any(links.get(m) for m in unheard)
            self.keeps = chosen or (self.keeps and bool(before.learners))
        # Others may still need the copy that it has: it makes no second one.
        goes_on = kept and bool(set(before.learners).intersection(header.learners) - new)
        self.copies = self.keeps and bool(new) and not goes_on
