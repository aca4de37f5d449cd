"""Gathers, for one look of the death detector, whose streams and links are closed, and who can be asked about a
suspect.

Theory of operation. Witnesses of a suspect are asked about it, two at a time. Where the view names its links, only a
neighbour misses its link to the suspect; anybody else never had one, so what it denies counts for nothing as long as a
neighbour can be asked (protocol.md 12). Where every pair has a link, or no neighbour is left, whoever is here is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from heapq import nsmallest
from types import MappingProxyType

from chaos_lightning.membership.peers import Peer
from chaos_lightning.protocol.types import Span

WITNESSES = 2
"""Number of those that are asked about a suspect."""


def _nobody(member: str) -> Collection[str]:
    return ()


def _told(peer: Peer) -> tuple[Span, ...]:
    return peer.parts


class Scene:
    """Members as the death detector finds them at one look; facts that concern many members are computed once.

    Args:
        watched: Living members by id: who is judged.
        newcomers: Others with a stream; they are witnesses only.
        holders: Parts of the training state that each member may hold, as far as anybody knows.
        known: Parts that a member is known to hold.
        neighbours: Tells whose denial of a member's life counts, if not everybody's does.
    """

    def __init__(
        self,
        watched: Mapping[str, Peer],
        newcomers: Mapping[str, Peer] | None = None,
        holders: Mapping[str, tuple[Span, ...]] = MappingProxyType({}),
        neighbours: Callable[[str], Collection[str]] = _nobody,
        known: Callable[[Peer], tuple[Span, ...]] = _told,
    ) -> None:
        self.watched, self.newcomers, self.holders, self.known = watched, newcomers or {}, holders, known
        self._neighbours = neighbours

    def everybody(self) -> Iterator[Peer]:
        yield from (p for m, p in self.newcomers.items() if m not in self.watched)
        yield from self.watched.values()

    @cached_property
    def _left(self) -> int:
        """Number of watched members without a control stream."""
        return sum(p.conn is None for p in self.watched.values())

    @cached_property
    def _closed(self) -> dict[str, list[Peer]]:
        """Peers that have a stream and report their link to some member as closed, by that member's id."""
        found: dict[str, list[Peer]] = {}
        for peer in self.everybody():
            for member in peer.down if peer.conn is not None else ():
                found.setdefault(member, []).append(peer)
        return found

    def is_unheard(self, peer: Peer) -> bool:
        """Returns whether most other members have no control stream, which suggests that the scheduler itself was cut
        off.
        """
        return 2 * (self._left - (peer.conn is None)) > len(self.watched) - 1

    def closed_link(self, member: str, ends: tuple[str, ...] = ("",), *, newcomers: bool = True) -> str:
        """Returns a connected process's report on its closed link to this member that contains one of these `ends`; ""
        if there is none.
        """
        for other in self._closed.get(member, ()):
            if not newcomers and other.id not in self.watched:
                continue
            words = other.down.get(member, "") if other.id != member else ""
            if words and any(end in words for end in ends):
                return f"its link to {other.id}: {words}"
        return ""

    def fact(self, peer: Peer, ends: tuple[str, ...] = ("",), *, newcomers: bool = True) -> str:
        """Returns evidence that both this peer's control stream and a link to it are closed; "" if not."""
        # A stream that a scheduler's restart closed says nothing about its member: that takes a neighbour's word.
        if peer.conn is not None or not peer.known:
            return ""
        link = self.closed_link(peer.id, ends, newcomers=newcomers)
        return f"its control stream is closed, and {link}" if link else ""

    def witnesses(self, member: str, suspects: Collection[str], last: bool) -> list[str]:
        """Returns the peers that are asked whether this member lives.

        Neighbours come first, then those that know of a link to it, suspects last. Newcomers are asked if there is
        nobody else. About the last holder everybody may be asked, and first of all who can read its process table.
        """
        host, near = self.watched[member].member.host, self._neighbours(member)

        def rank(peer: Peer) -> tuple[bool, bool, bool, bool, bool, str]:
            far, elsewhere = peer.id not in near, last and peer.member.host != host
            unlinked = member not in peer.up and member not in peer.down
            return (far and not last, peer.id in suspects, elsewhere, far, unlinked, peer.id)

        others = [self.watched[m] for m in near if m in self.watched and m not in suspects]
        if last or len(others) < WITNESSES:
            others = [p for m, p in self.watched.items() if m != member and p.conn is not None]
            if last or not others:
                others += [p for p in self.newcomers.values() if p.conn is not None]
        return [p.id for p in nsmallest(WITNESSES, others, key=rank)]
