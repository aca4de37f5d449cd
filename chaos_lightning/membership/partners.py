"""Keeps the pairs of members that are to have a link with each other, as members come and go.

Theory of operation. A pair is wanted if one end names the other as its neighbour, if both are processes of one node, if
somebody has asked for it (`LinkWish`), or if it was *given*: so members that name nobody get links. Up to `SMALL_JOB`
members every such pair is given. Beyond, a newcomer is given `link_degree` partners, of other nodes first: some that
are near by address, and others that are drawn among all (of two that are drawn, the one with fewer links). So members
have about twice that many links, few hops lead from anybody to anybody, and no node's death parts the rest: where
chance does not see to that, `Partners.secure` does. A member that loses partners is given others, a partner that is not
reached is replaced, and a link that stays down is no path (`Partners.lose`).

What was removed stays away, whoever asks. Members are told apart by id, wishes by name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence

from chaos_lightning.membership.effects import LinkWish
from chaos_lightning.membership.peers import Peer
from chaos_lightning.planning.graph import connected_parts, neighbours, parting_nodes
from chaos_lightning.protocol.types import SMALL_JOB

Pair = frozenset[str]

NEAR = 3
"""Number of a newcomer's partners that are near by address; the others keep the ways short."""
_LOOKED_AT = 32
"""Number of places from its own, in the order of addresses, within which a newcomer's near partners are looked for."""
_BRIDGES = 2
"""Number of pairs that are given between two parts of a graph."""
_TRIED = 16
"""Number of pairs that are looked at for these bridges."""


def pair(one: str, other: str) -> Pair:
    return frozenset((one, other))


def node_of(name: str) -> str:
    """Returns the node part of a member's name if that is NODE-RANK; else the whole name, which counts as a node."""
    node, dash, rank = name.rpartition("-")
    return node if dash and rank.isdigit() else name


def _called(peer: Peer) -> tuple[str, ...]:
    """Returns the words (name, id and node) by which others may name this member as a neighbour."""
    return tuple(dict.fromkeys((peer.member.name, peer.id, node_of(peer.member.name))))


def _address_key(peer: Peer) -> tuple[str, str]:
    """Returns a sort key that places members with similar addresses next to each other."""
    try:
        return f"{int(ipaddress.ip_address(peer.member.address)):040d}", peer.id
    except ValueError:
        return peer.member.address, peer.id


def _drawn(seed: str, among: Sequence[str]) -> Iterator[str]:
    """Yields members of this list in a pseudo-random order that depends only on the seed."""
    for count in itertools.count():
        digest = hashlib.blake2b(f"{seed} {count}".encode(), digest_size=8).digest()
        yield among[int.from_bytes(digest, "big") % len(among)]


class Partners:
    """Pairs of members that are to have a link.

    Args:
        degree: Number of partners that a newcomer is given beyond `SMALL_JOB` members; 0: all.
    """

    def __init__(self, degree: int = 0) -> None:
        self._degree = degree
        self.version = 0
        """Counter that grows when wanted pairs, or those whose links stay down, change."""
        self._secured = -1
        """Version at which no node's loss parted the others, as far as that can be had."""
        self.removed: dict[Pair, str] = {}
        """Reasons for links that stay away, by the names of their ends."""
        self.added: set[Pair] = set()
        """Links that were asked for beyond all else, by the names of their ends."""
        self._peers: dict[str, Peer] = {}
        self._near: dict[str, dict[str, None]] = {}
        """Wanted partners of each member, by id."""
        self._given: dict[str, dict[str, None]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        """Neighbours that each member names, as they count here."""
        self._by_word: dict[str, dict[str, None]] = {}
        """Ids of the members that go by a word."""
        self._naming: dict[str, dict[str, None]] = {}
        """Ids of the members that name a word."""
        self._open: list[str] = []
        """Members that may be given as partners, in no order, ..."""
        self._at: dict[str, int] = {}
        """... the place of each in that list, ..."""
        self._by_address: list[tuple[str, str]] = []
        """... and the same members by address."""
        self._missed: set[Pair] = set()
        """Given pairs whose ends did not reach each other; they are given again only where no others are left."""
        self._replaced: set[str] = set()
        """Newcomers that were given others for partners that they missed, once."""
        self._lost: frozenset[Pair] = frozenset()
        """Wanted pairs whose links stay down: they are no paths."""

    def __contains__(self, member: object) -> bool:
        return member in self._near

    def __iter__(self) -> Iterator[str]:
        return iter(self._near)

    @property
    def sparse(self) -> bool:
        """Whether a newcomer is given links to some members rather than to all."""
        return self._degree > 0 and len(self._near) > SMALL_JOB

    def of(self, member: str) -> Collection[str]:
        """Returns the ids of the members that this one is to have links with."""
        return self._near.get(member, {}).keys()

    def wants(self, one: Peer, other: Peer) -> bool:
        """Returns whether these two are to have a link; also if it was assigned to one of them before the other has
        come.
        """
        names = pair(one.member.name, other.member.name)
        if names in self.removed:
            return False
        if names in self.added or node_of(one.member.name) == node_of(other.member.name):
            return True
        if one.neighbours or other.neighbours:
            return any(w in one.neighbours for w in _called(other)) or any(w in other.neighbours for w in _called(one))
        given = self._given.get(one.id)
        return given is None or other.id in given or other.id not in self._given

    # ------------------------------------------------------------------ who is here

    def seed(self, peers: Sequence[Peer], pairs: Iterable[Pair]) -> None:
        """Adds a view's members and their links, after a scheduler's restart or when a lost chain is rebuilt."""
        for peer in peers:
            if peer.id not in self._near:
                self._enlist(peer)
            self._peers[peer.id] = peer
        for one, other in pairs:
            self._give(one, other)
        for peer in peers:
            self._renew(peer.id)
        for member in list(self._at):  # newcomers that came before, and whose links that view lacks
            self._refill(member)

    def add(self, peer: Peer) -> None:
        """Adds a newcomer and assigns partners to it; for a known member, applies its changed list of neighbours."""
        if peer.id in self._near:
            if self._names[peer.id] == peer.neighbours:
                return
            self._strike_names(peer.id)
            self._close(peer.id)
            self._note_names(peer)
        else:
            self._enlist(peer)
        for other in self._chosen(peer.id, self._degree) if not peer.neighbours else ():
            self._give(peer.id, other)
        self._renew(peer.id)

    def drop(self, member: str) -> None:
        """Removes a member's incarnation that is gone; assigns new partners to those that are left with too few."""
        peer = self._peers.pop(member, None)
        if peer is None:
            return
        self._strike_names(member)
        self._close(member)
        for word in _called(peer):
            self._by_word[word].pop(member, None)
            if not self._by_word[word]:
                del self._by_word[word]
        for other in self._given.pop(member):
            self._given[other].pop(member, None)
        left = list(self._near.pop(member))
        if len(self._near) == SMALL_JOB:  # from now on all have links with each other
            left = list(self._near)
        self.version += 1
        self._replaced.discard(member)
        self._missed = {ends for ends in self._missed if member not in ends}
        self._lost = frozenset(ends for ends in self._lost if member not in ends)
        for other in left:
            self._near[other].pop(member, None)
        for other in left if self.sparse or len(self._near) == SMALL_JOB else ():
            self._refill(other)

    def wished(self, wish: LinkWish) -> None:
        """Notes a granted request to add or remove a link."""
        names = pair(wish.a, wish.b)
        if wish.add:
            self.removed.pop(names, None)
            self.added.add(names)
        else:
            self.removed[names] = wish.why
            self.added.discard(names)
        for member in list(self._by_word.get(wish.a, ())):
            self._renew(member)

    def link_all(self) -> None:
        """Makes every pair of members partners from now on: neighbouring pipeline stages may come to lie on any two of
        them.
        """
        sparse, self._degree = self.sparse, 0
        for member in list(self._at) if sparse else ():
            self._refill(member)

    def replace(self, member: str, lost: Iterable[str]) -> bool:
        """Replaces assigned partners that this member cannot reach, once; returns False if there are no others."""
        if not self.sparse or member in self._replaced:
            return False
        self._replaced.add(member)
        missed = {m for m in lost if m in self._given.get(member, ())}
        self._missed |= {pair(member, m) for m in missed}
        fresh = self._chosen(member, len(missed))
        for other in missed if fresh else ():
            del self._given[member][other], self._given[other][member]
        for other in fresh:
            self._give(member, other)
        self._renew(member)
        return bool(fresh)

    def lose(self, pairs: frozenset[Pair]) -> None:
        """Sets which pairs count as having lost their link, since it stays down though both ends live; replaces all
        earlier ones.

        They are no paths, and a member that was given such a partner is given another one.
        """
        if pairs == self._lost:
            return
        self._lost = pairs
        self.version += 1
        for one, other in sorted(map(sorted, pairs)) if self.sparse else ():
            if other in self._given.get(one, ()):
                self._missed.add(pair(one, other))
                del self._given[one][other], self._given[other][one]
                self._renew(one)
                self._refill(one)
                self._refill(other)

    def bridge(self, parts: Sequence[Sequence[str]]) -> bool:
        """Assigns pairs between the largest of these unconnected groups and each other one; returns whether any was
        possible.
        """
        largest, *others = sorted(parts, key=len, reverse=True)
        given = False
        for part in others if self.sparse else ():
            ends = zip(_drawn(part[0], part), _drawn(part[0], largest), strict=True)
            tried = list(itertools.islice(ends, _TRIED))
            if not any(self._free(a, b) for a, b in tried):
                self._missed.difference_update(pair(a, b) for a, b in tried)  # rather one that was down than none
            for one, other in [(a, b) for a, b in tried if self._free(a, b)][:_BRIDGES]:
                self._give(one, other)
                self._renew(one)
                given = True
        return given

    def secure(self) -> None:
        """Assigns additional pairs where the loss of one node would disconnect the others."""
        if not self.sparse or self._secured == self.version:
            return
        places = {m: p.member.place for m, p in self._peers.items()}
        for node in parting_nodes(places, self._paths(self._near)):
            rest = [m for m, place in places.items() if place != node]
            self.bridge(connected_parts(rest, neighbours(rest, self._paths(rest))))
        self._secured = self.version

    def validate(self) -> None:
        """Asserts that the pairs, which are updated step by step, equal those derived anew from all names, requests and
        assignments.
        """
        nodes: dict[str, set[str]] = {}
        for member, peer in self._peers.items():
            nodes.setdefault(node_of(peer.member.name), set()).add(member)
        named = frozenset().union(*self.added, *self.removed)
        told = {member for member, peer in self._peers.items() if peer.neighbours or peer.member.name in named}
        for one, a in self._peers.items():
            asked = self._peers.keys() if one in told else told  # others have given pairs and those of their node
            wanted = self._given[one].keys() | nodes[node_of(a.member.name)]
            wanted = (wanted - asked) | {other for other in asked if self.wants(a, self._peers[other])}
            wanted.discard(one)
            odd = self._near[one].keys() ^ wanted
            assert not odd, f"{one}: kept and wanted differ in {odd}"
            assert all(one in self._given[other] for other in self._given[one]), one
        for one, other in itertools.combinations(self._open, 2) if not self.sparse else ():
            assert other in self._given[one], f"{one} and {other} are not given to each other in a small job"
        assert sorted(self._open) == sorted(m for m, names in self._names.items() if not names), self._open
        assert sorted(entry[1] for entry in self._by_address) == sorted(self._open), self._by_address

    # ------------------------------------------------------------------ what is kept

    def _enlist(self, peer: Peer) -> None:
        self._peers[peer.id], self._near[peer.id], self._given[peer.id] = peer, {}, {}
        for word in _called(peer):
            self._by_word.setdefault(word, {})[peer.id] = None
        self._note_names(peer)

    def _note_names(self, peer: Peer) -> None:
        self._names[peer.id] = peer.neighbours
        for word in peer.neighbours:
            self._naming.setdefault(word, {})[peer.id] = None
        if not peer.neighbours:
            self._at[peer.id] = len(self._open)
            self._open.append(peer.id)
            insort(self._by_address, _address_key(peer))

    def _strike_names(self, member: str) -> None:
        for word in self._names.pop(member):
            self._naming[word].pop(member, None)
            if not self._naming[word]:
                del self._naming[word]

    def _close(self, member: str) -> None:
        """Makes this member unavailable as a new partner for others."""
        if (at := self._at.pop(member, None)) is None:
            return
        last = self._open.pop()
        if last != member:
            self._open[at], self._at[last] = last, at
        self._by_address = [entry for entry in self._by_address if entry[1] != member]

    def _give(self, one: str, other: str) -> None:
        if one in self._given and other in self._given:
            self._given[one][other] = self._given[other][one] = None

    def _renew(self, member: str) -> None:
        """Derives anew which partners this member is to have."""
        peer = self._peers[member]
        known = dict(self._given[member])
        for word in (*peer.neighbours, node_of(peer.member.name), *self._wished(peer.member.name)):
            known |= self._by_word.get(word, {})
        for word in _called(peer):
            known |= self._naming.get(word, {})
        known.pop(member, None)
        fresh = {m: None for m in known if self.wants(peer, self._peers[m])}
        if fresh.keys() == self._near[member].keys():
            return
        self.version += 1
        for other in self._near[member].keys() - fresh.keys():
            self._near[other].pop(member, None)
        for other in fresh:
            self._near[other][member] = None
        self._near[member] = fresh

    def _paths(self, members: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yields the wanted pairs of these members, without those whose links stay down."""
        return ((a, b) for a in members for b in self._near[a] if not self._lost or pair(a, b) not in self._lost)

    def _wished(self, name: str) -> list[str]:
        return [other for names in self.added if name in names for other in names if other != name]

    def _refill(self, member: str) -> None:
        """Assigns to this member as many partners as a newcomer gets; in a small job all others."""
        missing = self._degree - sum(1 for _ in self._paths([member]))
        if member in self._at and (missing > 0 or not self.sparse):
            for other in self._chosen(member, missing):
                self._give(member, other)
            self._renew(member)

    # ------------------------------------------------------------------ whom a newcomer is given

    def _chosen(self, member: str, count: int) -> list[str]:
        """Returns new partners for this member; all other members, in a job where every pair has a link."""
        if not self.sparse:
            return [m for m in self._open if m != member and m not in self._near[member]]
        me, chosen = self._peers[member], dict[str, None]()

        def fits(other: str) -> bool:
            return other not in chosen and self._free(member, other)

        def elsewhere(other: str) -> bool:
            return self._peers[other].member.place != me.member.place and fits(other)

        for other in filter(elsewhere, self._around(me)):
            if len(chosen) < min(NEAR, count):
                chosen[other] = None
        drawn = _drawn(f"{member} {len(self._near[member])}", self._open)
        for two in itertools.islice(zip(drawn, drawn, strict=True), 4 * count):
            fitting = [m for m in two if elsewhere(m)]
            if fitting and len(chosen) < count:
                chosen[min(fitting, key=lambda m: len(self._near[m]))] = None
        if len(chosen) < count:  # few nodes: processes of one's own are better than none
            rest = [m for m in self._open if fits(m)]
            rest.sort(key=lambda m: self._peers[m].member.place == me.member.place)
            chosen.update(dict.fromkeys(rest[: count - len(chosen)]))
        return list(chosen)

    def _free(self, one: str, other: str) -> bool:
        """Returns whether these two may be assigned to each other, and are not partners yet."""
        if one not in self._at or other not in self._at or one == other or other in self._near[one]:
            return False
        names = pair(self._peers[one].member.name, self._peers[other].member.name)
        return names not in self.removed and pair(one, other) not in self._missed

    def _around(self, me: Peer) -> Iterator[str]:
        """Yields members with similar addresses, the closest ones first, from both sides of this member in turn."""
        place = bisect_left(self._by_address, _address_key(me))
        for step in range(1, _LOOKED_AT):
            for at in (place - step, place + step):
                if 0 <= at < len(self._by_address):
                    yield self._by_address[at][1]
