"""Decides which pairs of members a view may link, and which newcomers have the links that they need to come in.

Theory of operation. What is known of each pair of members is in `Topology`. From that follows which pairs the next
view may have (`pairs`), who holds together, and who may come in: a newcomer needs a link to a member, or, where nobody
is in, to the other founders. One that no link leads to keeps no place from others (`strand`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from chaos_lightning.membership.book import Book
from chaos_lightning.membership.desk import Desk, SchedulerPhase
from chaos_lightning.membership.peers import Peer, has_place
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.topology import (
    NEIGHBOUR_PATIENCE_S,
    THIN_DEGREE,
    Net,
    Pair,
    Topology,
    by_member,
    components,
    connected,
    links_of,
    pair,
    ranked,
    thinned,
)
from chaos_lightning.planning.graph import neighbours, removable
from chaos_lightning.protocol import nodes
from chaos_lightning.protocol.types import NO_VIEW, View, ViewId

_NO_LINK = "no link"
"""Key under which a newcomer's `asked` tells since when no link has led to it; no id looks like this."""


class Graph:
    """Graph of the links that views may use. Arguments are scheduler components that it uses."""

    def __init__(self, desk: Desk, book: Book, roster: Roster, topology: Topology) -> None:
        self._desk = desk
        self._settings = desk.settings
        self._book = book
        self._roster = roster
        self._topology = topology
        self._known: dict[ViewId, frozenset[Pair]] = {}
        self._near: tuple[ViewId, dict[str, frozenset[str]]] = (NO_VIEW, {})
        self.thins = False
        """Whether views have only a few of the links (`thinned`), as no store takes a view with all."""

    def of_view(self, view: View) -> frozenset[Pair]:
        """Returns the pairs of members that have a link in this view."""
        if view.id not in self._known:
            here = {v.id: v for v in (*self._book.views[-2:], view)}
            self._known = {i: self._known.get(i) or links_of(v) for i, v in here.items()}
        return self._known[view.id]

    def near(self, view: View, member: str) -> Collection[str]:
        """Returns the members with which this member has a link in the view."""
        if self._near[0] != view.id:
            self._near = view.id, by_member(view.ids(), self.of_view(view))
        return self._near[1].get(member, ())

    def in_force(self, one: str, other: str) -> bool:
        """Returns whether the link between these two belongs to the latest view, or to the one before while members may
        still be in it.
        """
        latest = self._book.latest
        if latest is None:
            return False
        if pair(one, other) in self.of_view(latest):
            return True
        before = self._book.views[-2:-1] if self._book.announced is not None else []
        return any(pair(one, other) in self.of_view(v) and self._stands_in(v, latest) for v in before)

    def _stands_in(self, before: View, latest: View) -> bool:
        """Returns whether some member may still be in the view before the latest one."""
        return any(self._roster.inside(m) and self._roster.peers[m].entered != latest.id for m in before.ids())

    def _usable(self, one: Peer, other: Peer, *, patient: bool = True) -> bool:
        """Returns whether a new view may use the link between these two.

        Args:
            one: A member, or a newcomer that is ready.
            other: Another one.
            patient: A link that the latest view does not use must have stood for long enough.
        """
        if not self._topology.wants(one, other):
            return False
        return self._stands(one, other, patient=patient)

    def _stands(self, one: Peer, other: Peer, *, patient: bool) -> bool:
        """Returns whether a new view may use the link between these two, which is known to be wanted."""
        fact = self._topology.known(one.id, other.id)
        if fact is not None and (fact.down or (patient and fact.idle)):
            return False
        latest = self._book.latest
        if latest is None or latest.find(one.id) is None or latest.find(other.id) is None:
            return True  # whoever is ready vouches for its links
        if pair(one.id, other.id) in self.of_view(latest):
            return not patient or fact is None or fact.failures < 2 or fact.seasoned(self._desk.now)
        if fact is None or not fact.stands:
            return False
        return not patient or fact.seasoned(self._desk.now)

    def _wanted(self, members: Iterable[str]) -> Iterator[tuple[Peer, Peer]]:
        """Yields each pair of these members that is to have a link, once."""
        peers = self._roster.peers
        here = {m: i for i, m in enumerate(members) if m in peers}
        for member, place in here.items():
            for other in self._topology.partners.of(member):
                if here.get(other, -1) > place:
                    yield peers[member], peers[other]

    def pairs(self, members: Iterable[str]) -> frozenset[Pair]:
        """Returns the pairs that a view of these members may use. Links that came up only lately are used only if the
        view would fall apart without them.
        """
        ids = [m for m in members if m in self._roster.peers]
        wanted = list(self._wanted(ids))
        found = frozenset(pair(a.id, b.id) for a, b in wanted if self._stands(a, b, patient=True))
        if not connected(ids, found):
            found = frozenset(pair(a.id, b.id) for a, b in wanted if self._stands(a, b, patient=False))
        return thinned(ids, found) if self.thins else found

    def loose(self, members: Sequence[str], leaving: Sequence[str]) -> list[str]:
        """Returns those of the leaving members that can go while links still connect the others; all if none can."""
        if not leaving:
            return []
        links = ((a.id, b.id) for a, b in self._wanted(members) if self._stands(a, b, patient=False))
        return removable(neighbours(members, links), leaving) or list(leaving)

    def thin(self, view: View) -> bool:
        """Makes later views use fewer links than this view, which is too large for any store; returns False if it has
        few already.
        """
        many = len(view.links) > (THIN_DEGREE + 1) * len(view.members)
        self.thins = self.thins or many
        return many

    def net(self, members: Sequence[str]) -> Net:
        pairs = self.pairs(members)
        return Net(pairs, self._topology.measured(members, pairs))

    def together(self, peers: list[Peer]) -> list[Peer]:
        """Returns the largest group of these peers that links connect."""
        ids = [p.id for p in peers]
        best = frozenset(next(iter(ranked(components(ids, self.pairs(ids)), ids)), ()))
        return [p for p in peers if p.id in best]

    def ready(self) -> list[Peer]:
        """Returns newcomers that can be let in now: they have a link to a member or, if the job has no members yet, to
        each other.
        """
        here = [p for p in self._roster.willing() if not p.stranded]
        if not here:
            return []
        anchors = self._roster.living()
        around = {p.id for p in (*anchors, *here)}
        ready = [p for p in here if not self._speaks_alone(p, around)]
        if not anchors:
            return self.together(ready) if len(ready) > 1 else ready
        return self.led(ready, {m.id for m in anchors})

    def led(self, newcomers: Iterable[Peer], members: Collection[str]) -> list[Peer]:
        """Returns those of the newcomers that can come in over a link to one of these members."""
        peers, partners = self._roster.peers, self._topology.partners
        return [p for p in newcomers if any(m in members and self.leads(p, peers[m]) for m in partners.of(p.id))]

    def leading(self, newcomer: Peer) -> set[str]:
        """Returns the members over whose links this newcomer can come in."""
        peers, partners = self._roster.peers, self._topology.partners
        return {m for m in partners.of(newcomer.id) if m in peers and self.leads(newcomer, peers[m])}

    def staying(self) -> int:
        """Returns the number of the latest view's nodes that are not leaving."""
        return nodes.count(p.member for p in self._roster.members() if not p.leaving)

    def _few(self) -> bool:
        """Returns whether fewer than min_nodes nodes can go on, so that newcomers may come in over any link that stands
        (14).
        """
        return self._desk.phase is SchedulerPhase.HOLDING or self.staying() < max(1, self._settings.min_nodes)

    def leads(self, newcomer: Peer, member: Peer) -> bool:
        """Returns whether the newcomer can come in over its link to this member. A link that carries no data counts
        only if there are too few nodes.
        """
        return self._usable(newcomer, member, patient=not self._few())

    def reachable(self, members: Sequence[str], waiting: Sequence[str] = ()) -> list[Peer]:
        """Returns ready newcomers to which links lead from these members, directly or over other newcomers.

        They come in one after the other, each when somebody is in to whom it has a link.

        Args:
            members: Ids of the members.
            waiting: Ids of newcomers that count, too: a view was to let them in, and no header has carried it.
        """
        here = [p for p in map(self._roster.peers.__getitem__, waiting) if not p.leaving]
        here += [p for p in self._roster.willing() if not p.stranded]
        ids = [*members, *(p.id for p in here)]
        inside = frozenset(members)
        part = frozenset(next((g for g in components(ids, self.pairs(ids)) if not inside.isdisjoint(g)), ()))
        return [p for p in here if p.id in part]

    def strand(self, newcomers: list[Peer], members: list[Peer]) -> None:
        """Takes the places (under max_nodes) of newcomers that no link leads to, and gives places back once a link
        leads to them again.
        """
        if not newcomers:
            return
        anchors, peers = frozenset(self._anchors(newcomers, members)), self._roster.peers
        for peer in newcomers:
            if peer.id in anchors or any(self.leads(peer, peers[m]) for m in anchors.intersection(peer.up)):
                peer.asked.pop(_NO_LINK, None)
                if peer.stranded and has_place(peer.member, self._roster.peers, self._settings):
                    peer.stranded = False
                elif peer.stranded and members:  # founders are told why the job does not begin
                    self._roster.tell(f"on standby: {self._settings.max_nodes} members are in", [peer])
            elif self._desk.now - peer.asked.setdefault(_NO_LINK, self._desk.now) > NEIGHBOUR_PATIENCE_S:
                peer.stranded = True

    def _anchors(self, newcomers: list[Peer], members: list[Peer]) -> Sequence[str]:
        """Returns the ids of processes to one of which a newcomer needs a link in order to come in.

        That is a member; where fewer than min_nodes are in, also another newcomer that is linked to one, over others if
        need be. Who has no place holds nobody together.
        """
        placed = [p for p in newcomers if not p.stranded]
        ids = [m.id for m in members]
        if not members:
            best = self._best_part(newcomers)
            within = frozenset(best)
            return self._best_part([p for p in placed if p.id in within]) or best
        if not self._few():
            return ids
        here = [*members, *placed]
        return [m for g in components([p.id for p in here], self._linked(here)) if set(ids).intersection(g) for m in g]

    def _best_part(self, newcomers: list[Peer]) -> tuple[str, ...]:
        """Returns the largest group of these newcomers that links connect, to found the job."""
        ids = [p.id for p in newcomers]
        return next(iter(ranked(components(ids, self._linked(newcomers)), ids)), ())

    def _linked(self, peers: list[Peer]) -> frozenset[Pair]:
        """Returns the pairs whose link stands, as at least one end says."""
        wanted = self._wanted(p.id for p in peers)
        return frozenset(
            pair(a.id, b.id) for a, b in wanted if (b.id in a.up or a.id in b.up) and self._stands(a, b, patient=False)
        )

    def _speaks_alone(self, peer: Peer, around: Collection[str]) -> bool:
        """Returns whether this peer says that a link stands, while the link's other end has not yet said so.

        That one may be about to accept it: in a view before that, what it sent meanwhile would have gone nowhere. One
        that says nothing for NEIGHBOUR_PATIENCE_S hangs, and is no reason to keep others out.
        """
        alone = False
        for member in self._topology.partners.of(peer.id):
            fact = self._topology.known(peer.id, member) if member in around else None
            since = f"{member} is silent on their link"
            if fact is not None and fact.words == {peer.id: ""} and self._roster.peers[member].conn is not None:
                alone = alone or self._desk.now - peer.asked.setdefault(since, self._desk.now) <= NEIGHBOUR_PATIENCE_S
            else:
                peer.asked.pop(since, None)
        return alone
