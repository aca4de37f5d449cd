"""Routes messages where not every pair of members has a link: chooses the next neighbour, queues messages, and drops
undeliverable ones.

Theory of operation. A view names its links, so every member computes the same shortest ways from the same list
(`next_hops`): fewest hops, and among equals the neighbour of lowest rank. Each hop brings a routed message one link
nearer, so that routed messages cannot run in circles while all stand in one view. While a view changes two members may
for a moment hold different tables; against that a routed message has a limited number of hops and is never given back
to whom it came from. What cannot go on is dropped, and said: the contributions and headers that travel this way are
sent anew by a recovery.

What cannot go on yet waits here, for a link or for the next view. The caller says which links stand, and carries out
what the router decides (`RouteStep`); so processes and simulated ones drive the same object.

Newcomers are in no view yet. The views that are decided, or that a header names, say with whom they have links; those
are kept beside the ruling one, for addressees that it lacks (`Router.foresee`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from chaos_lightning.errors import WireError
from chaos_lightning.planning.graph import breadth_first, neighbours
from chaos_lightning.protocol.types import MAX_MEMBERS, NO_VIEW, LinkSpec, View, ViewId

MAX_HOPS = MAX_MEMBERS - 1
"""Limit of hops: a routed message starts with as many as its view has members, and with no more than fit into its
head.
"""

MIN_WAITING = 4096
"""Number of messages that may wait for a link or for a view: two of each member of the largest view that is known,
but at least these, since a view that is not known yet may be larger.
"""

_HEAD = struct.Struct("<HHHQQI")
_MAX_ID_NBYTES = 1024


def next_hops(me: str, members: Sequence[str], links: Iterable[LinkSpec]) -> dict[str, str]:
    """Returns, for each other member, the neighbour through which it is reached.

    Args:
        me: Id of the member at which the ways begin.
        members: Ids in rank order, which breaks ties.
        links: Pairs that have a link; none at all means that every pair has one. Links with an end outside `members`
            do not count.

    Returns:
        Neighbours by addressee; members that cannot be reached are missing.
    """
    pairs = [(link.a, link.b) for link in links]
    if not pairs:
        return {member: member for member in members if member != me}
    everybody = members if me in members else [*members, me]
    hops: dict[str, str] = {}
    for member, (before, _) in breadth_first(me, neighbours(everybody, pairs), "").items():
        if member != me:
            hops[member] = member if before == me else hops[before]
    return hops


@dataclass(frozen=True, slots=True)
class RoutedMessage:
    """Encoded PeerMessage that travels over several links."""

    to: str
    source: str
    hops_left: int
    payload: bytes | memoryview
    view: ViewId = NO_VIEW
    """View by whose ways the message goes; NO_VIEW: by those of the view that rules where it is."""

    def packed(self) -> bytes:
        """Returns this message's bytes in a ROUTED frame, which may hold several messages."""
        to, source = self.to.encode(), self.source.encode()
        head = _HEAD.pack(
            self.hops_left, len(to), len(source), self.view.term, self.view.number, memoryview(self.payload).nbytes
        )
        return b"".join((head, to, source, self.payload))


def unpacked(data: memoryview) -> list[RoutedMessage]:
    """Yields the routed messages of a ROUTED frame, one after the other: the reverse of `RoutedMessage.packed`.

    Raises:
        WireError: These bytes are no routed messages.
    """
    found: list[RoutedMessage] = []
    while data.nbytes or not found:
        if data.nbytes < _HEAD.size:
            raise WireError(f"a routed message of {data.nbytes} bytes; expected at least {_HEAD.size}")
        hops_left, to_nbytes, source_nbytes, term, number, nbytes = _HEAD.unpack(data[: _HEAD.size])
        start = _HEAD.size + to_nbytes + source_nbytes
        if not 0 < to_nbytes <= _MAX_ID_NBYTES or not 0 < source_nbytes <= _MAX_ID_NBYTES:
            raise WireError(f"a routed message with names of {to_nbytes} and {source_nbytes} bytes")
        if start + nbytes > data.nbytes:
            raise WireError(f"a routed message of {start + nbytes} bytes, of which {data.nbytes} are here")
        try:
            to = str(data[_HEAD.size : _HEAD.size + to_nbytes], "utf-8")
            source = str(data[_HEAD.size + to_nbytes : start], "utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"a routed message whose names are no text: {error}") from error
        found.append(RoutedMessage(to, source, hops_left, data[start : start + nbytes], ViewId(term, number)))
        data = data[start + nbytes :]
    return found


@dataclass(frozen=True, slots=True)
class Hand:
    """Order to send a message to this neighbour; `bare`: without routing fields, as it is from this member to that
    neighbour.
    """

    peer: str
    routed: RoutedMessage
    bare: bool


@dataclass(frozen=True, slots=True)
class Take:
    """Order to deliver a message whose addressee is this member."""

    routed: RoutedMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """News that a message cannot be delivered; after the next recovery its sender repeats it."""

    routed: RoutedMessage
    reason: str


RouteStep = Hand | Take | Drop


class Router:
    """Router of one member's messages, by the links of the ruling view and of views that are coming.

    Attributes:
        me: This member's id.
        up: Members to which a link stands; the caller's own, so that it is never out of date.
        wanted: Members to which a link is wanted, likewise.
    """

    def __init__(self, me: str = "", up: Container[str] = (), wanted: Container[str] = ()) -> None:
        self.me = me
        self.up = up
        self.wanted = wanted
        self._waiting: deque[tuple[RoutedMessage, str]] = deque()
        """Messages that wait, each with the neighbour that it came from."""
        self._ruling: tuple[View | None, dict[str, str]] = (None, {})
        self._coming: list[tuple[View, dict[str, str]]] = []
        self._former: tuple[View | None, dict[str, str]] = (None, {})

    def rule(self, view: View | None) -> list[RouteStep]:
        """Makes `view` the ruling one (None: this member is in no view), and returns orders for messages that can go on
        now.
        """
        if view is None or self._ruling[0] is None or view.id != self._ruling[0].id:
            self._former = self._ruling
        self._ruling = (view, _ways(self.me, view) if view is not None else {})
        self._coming = [(v, ways) for v, ways in self._coming if view is None or v.id > view.id]
        return self.again()

    def foresee(self, view: View) -> list[RouteStep]:
        """Notes a coming view, decided or named by a header, whose links say how its newcomers are reached."""
        ruling = self._ruling[0]
        if (ruling is None or view.id > ruling.id) and all(view.id != v.id for v, _ in self._coming):
            self._coming = [*self._coming, (view, _ways(self.me, view))][-4:]
        return self.again()

    # ------------------------------------------------------------------ messages

    @property
    def waiting(self) -> int:
        """Number of queued messages."""
        return len(self._waiting)

    def send(self, to: str, payload: bytes | memoryview, view: ViewId) -> list[RouteStep]:
        """Returns orders that send one of this member's own messages along this view's links."""
        return self._post(RoutedMessage(to, self.me, self.hops, payload, view), "")

    def arrived(self, routed: RoutedMessage, came_from: str) -> list[RouteStep]:
        """Handles a routed message that came over the link to this neighbour."""
        if routed.to == self.me:
            return [Take(routed)]
        if routed.hops_left <= 1:
            return [Drop(routed, "it has come over as many links as any way has")]
        return self._post(replace(routed, hops_left=routed.hops_left - 1), came_from)

    def returned(self, routed: RoutedMessage) -> list[RouteStep]:
        """Sends a routed message again, since its link broke before it had been sent."""
        return self._post(routed, "")

    def again(self) -> list[RouteStep]:
        """Returns orders for queued messages that can go on now, as links or routes have changed."""
        waiting, self._waiting = self._waiting, deque()
        return [step for routed, came_from in waiting for step in self._post(routed, came_from)]

    def _post(self, routed: RoutedMessage, came_from: str) -> list[RouteStep]:
        """Forwards, queues or drops a routed message."""
        hop = self.hop(routed.to, routed.view)
        if hop == "" and routed.to in self.up:
            # Only then: a break of a link that the view lacks costs no recovery, and nothing would be sent again.
            hop = routed.to
        if hop and hop == came_from:
            return [Drop(routed, f"{came_from}, where it came from, is the next hop")]
        if hop and hop in self.up:
            return [Hand(hop, routed, bare=hop == routed.to and routed.source == self.me)]
        if hop == "" and routed.to not in self.wanted:
            return [Drop(routed, "no way to it is known")]
        if len(self._waiting) >= max(MIN_WAITING, 2 * self.hops):
            return [Drop(routed, f"{len(self._waiting)} messages wait already")]
        self._waiting.append((routed, came_from))
        return []

    @property
    def neighbours(self) -> frozenset[str]:
        """Members to which this one has a link in the ruling view or in a coming one."""
        ways = (self._ruling[1], *(ways for _, ways in self._coming))
        return frozenset(member for known in ways for member, hop in known.items() if member == hop)

    @property
    def hops(self) -> int:
        """Largest number of links that a routed message may travel over: no route in a known view is longer."""
        known = [view for view, _ in self._coming] + [view for view in self._ruling[:1] if view is not None]
        return min(MAX_HOPS, max([len(view.members) for view in known], default=1))

    def hop(self, to: str, view: ViewId = NO_VIEW) -> str | None:
        """Returns the neighbour on the route to this member in the given view; "" if there is none, None if that view
        is not known yet.

        While a view changes two members stand in different ones for a moment. By the ways of its own view a routed
        message never runs in circles; by those of others it would, and be lost.
        """
        ruling, former = self._ruling[0], self._former[0]
        if ruling is not None and view > ruling.id:
            return next((ways.get(to, "") for v, ways in self._coming if v.id == view), None)
        if former is not None and view == former.id and to in self._former[1]:
            return self._former[1][to]
        found = self._ruling[1].get(to, "")
        for _, ways in reversed(self._coming):
            found = found or ways.get(to, "")
        return found


def _ways(me: str, view: View) -> dict[str, str]:
    return next_hops(me, view.ids(), view.links)
