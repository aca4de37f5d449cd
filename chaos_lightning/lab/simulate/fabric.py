"""The network of a simulated job: links between members, and control streams to the scheduler.

Theory of operation. Every direction of every connection is FIFO with a latency of its own; different connections
reorder freely against each other. A connection that breaks loses what is in flight; both ends learn of it, each after
a while. Of a killed process what it had sent is either delivered or lost from some message on (never a gap), then
comes the end of the stream. The younger member dials, as in transport/links.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from chaos_lightning.lab.simulate.kernel import Action, Kernel
from chaos_lightning.membership.member import MemberMachine

Payload = object
SILENT_S = 3.0
"""A link on which nothing was heard for so long is given up (transport/links.py)."""
Taker = Callable[[Payload], None]


class Endpoint(Protocol):
    """What the network knows of a member's process."""

    name: str
    alive: bool
    frozen: bool
    machine: MemberMachine
    wanted: frozenset[str]
    outcome: str

    def deliver(self, action: Action) -> None: ...

    def frame(self, peer: str, payload: Payload) -> None: ...

    def stands(self, peer: str) -> None: ...

    def link_changed(self, peer: str, up: bool, evidence: str) -> None: ...

    def link_broken(self, peer: str, evidence: str = ...) -> None: ...

    def link_left(self, peer: str) -> None: ...


E = TypeVar("E", bound=Endpoint)


@dataclass(slots=True)
class Pipe:
    """One direction of a connection: FIFO, lossless until it is cut."""

    kernel: Kernel
    low: float
    high: float
    last: float = 0.0
    lag: float = 0.0
    """Added to each latency, in seconds."""
    open: bool = True
    cut_at: float = float("inf")

    def send(self, payload: Payload, take: Taker) -> None:
        if not self.open:
            return
        arrival = max(self.last, self.kernel.now + self.lag + self.kernel.between(self.low, self.high))
        self.last = arrival

        def arrive() -> None:
            if self.kernel.now <= self.cut_at:
                take(payload)

        self.kernel.at(arrival, arrive)

    def cut(self, at: float) -> None:
        """Nothing that would arrive after `at` arrives; nothing is accepted any more."""
        self.open = False
        self.cut_at = min(self.cut_at, at)

    def end(self, told: Callable[[], None]) -> None:
        """Closed in good order: what was sent arrives, then the end does."""
        if self.open:
            self.open = False
            self.last = max(self.last, self.kernel.now + self.kernel.between(self.low, self.high))
            self.kernel.at(self.last, told)


def youth(member_id: str) -> tuple[int, str]:
    name, _, number = member_id.rpartition("~")
    return (int(number) if number.isdigit() else 0, name)


@dataclass(slots=True)
class Link:
    """A standing link between two incarnations."""

    ends: tuple[str, str]
    pipes: dict[str, Pipe]
    """By sending member id."""


@dataclass(slots=True)
class Fabric(Generic[E]):
    """All links. Nodes are found by their current member id."""

    kernel: Kernel
    nodes: dict[str, E] = field(default_factory=dict)
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    dialling: set[frozenset[str]] = field(default_factory=set)
    slow_links: dict[frozenset[str], float] = field(default_factory=dict)
    """Extra latency by pair of node names."""
    blocked: dict[frozenset[str], tuple[float, float]] = field(default_factory=dict)
    """Since when and until when (virtual s) these two nodes cannot make a link."""

    def block(self, one: str, other: str, seconds: float, noticed_s: float = 0.0) -> None:
        """No link between these two nodes can be made for so long; one that stands notices after `noticed_s`."""
        now = self.kernel.now
        since, until = self.blocked.get(frozenset((one, other)), (now, now))
        since = since if until > now else now + noticed_s
        self.blocked[frozenset((one, other))] = (since, max(until, now + seconds))

    def cut_s(self, one: str, other: str) -> float:
        """For how long these two nodes have been cut off from each other; 0 if they are not."""
        since, until = self.blocked.get(frozenset((one, other)), (0.0, 0.0))
        return self.kernel.now - since if self.kernel.now < until else 0.0

    def open(self, one: str, other: str) -> bool:
        """Whether a link between these two nodes can be made."""
        return self.kernel.now >= self.blocked.get(frozenset((one, other)), (0.0, 0.0))[1]

    def reaches(self, one: str, other: str) -> bool:
        """Whether bytes get from node to node, over others if need be (relayed hop by hop)."""
        if not self.blocked or self.open(one, other):
            return True
        names = {n.name for n in self.nodes.values() if n.alive}
        seen, border = {one}, [one]
        while border:
            here = border.pop()
            near = {n for n in names - seen if self.open(here, n)}
            seen |= near
            border += sorted(near)
        return other in seen

    def wants(self, me: str, wanted: frozenset[str], before: frozenset[str]) -> None:
        """`me` wants links to exactly these."""
        for gone in sorted(before - wanted):
            self.bye(me, gone)
        for peer in sorted(wanted):
            self._dial(me, peer)
            here = self.nodes.get(me)
            if here is not None and frozenset((me, peer)) in self.links and not here.machine.neighbours.links.get(peer):
                # The other end wanted it first. As transport/links.py, which tells what stands whenever it is wanted.
                self.kernel.after(0.0, lambda n=here, p=peer: n.deliver(lambda: self._stands(n, p)))  # type: ignore[misc]

    def _stands(self, here: Endpoint, peer: str) -> None:
        if frozenset((here.machine.member_id, peer)) in self.links and not here.outcome:
            here.link_changed(peer, True, "connected")

    def _dial(self, me: str, peer: str) -> None:
        pair = frozenset((me, peer))
        if pair in self.links or pair in self.dialling or youth(me) < youth(peer):
            return
        self.dialling.add(pair)
        delay = self.kernel.between(0.0005, 0.004)
        self.kernel.after(delay, lambda: self._shake(me, peer, pair))

    def _shake(self, me: str, peer: str, pair: frozenset[str], tries: int = 0) -> None:
        """Both processes must run for the handshake."""
        here, there = self.nodes.get(me), self.nodes.get(peer)
        if here is None or not here.alive or here.machine.member_id != me or peer not in here.wanted:
            self.dialling.discard(pair)
        elif there is not None and not self.open(here.name, there.name):
            if tries in (0, 4):  # as transport/links.py tells it
                here.deliver(lambda: here.link_changed(peer, False, "refused (no route to host)"))
            self.kernel.after(0.02 * 2 ** min(tries, 5), lambda: self._shake(me, peer, pair, tries + 1))
        elif not self._can_meet(here, there, peer):
            self.kernel.after(0.02, lambda: self._shake(me, peer, pair))
        elif there is not None:
            self.dialling.discard(pair)
            self._stand(here, there, pair)

    def _can_meet(self, here: Endpoint, there: Endpoint | None, peer: str) -> bool:
        if there is None or there.machine.member_id != peer or not there.alive or there.frozen or here.frozen:
            return False
        return self.open(here.name, there.name)

    def _stand(self, here: Endpoint, there: Endpoint, pair: frozenset[str]) -> None:
        extra = self.slow_links.get(frozenset((here.name, there.name)), 0.0)
        me, peer = here.machine.member_id, there.machine.member_id
        pipes = {end: Pipe(self.kernel, 0.0002, 0.002 + extra) for end in (me, peer)}
        self.links[pair] = Link((me, peer), pipes)
        for node, other in ((here, peer), (there, me)):
            node.stands(other)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """The network between two nodes is gone for so long: their link breaks and cannot be made again."""
        self.block(one, other, seconds)
        for link in list(self.links.values()):
            if {self.nodes[end].name for end in link.ends} == {one, other}:
                self.snap(*link.ends)

    def mute(self, one: str, other: str, seconds: float, *, both: bool) -> None:
        """What is sent from `one` to `other` (`both`: and back) is swallowed for so long, and no link can be made.

        As with TCP nothing is lost if that ends before an end has given the link up; then it arrives late.
        """
        self.block(one, other, seconds, SILENT_S)
        for link in list(self.links.values()):
            if {self.nodes[end].name for end in link.ends} != {one, other}:
                continue
            muted = [end for end in link.ends if both or self.nodes[end].name == one]
            if seconds >= SILENT_S:
                for end in muted:
                    link.pipes[end].cut(self.kernel.now)
                self.kernel.after(SILENT_S, lambda k=link, m=muted: self._give_up(k, m))  # type: ignore[misc]
                continue
            for end in muted:
                link.pipes[end].last = max(link.pipes[end].last, self.kernel.now + seconds)

    def _give_up(self, link: Link, muted: list[str]) -> None:
        """Who has heard nothing for SILENT_S closes the link; the other end learns it, if anything gets there."""
        if self.links.get(frozenset(link.ends)) is not link:
            return
        del self.links[frozenset(link.ends)]
        for end in link.ends:
            other = link.ends[1] if end == link.ends[0] else link.ends[0]
            node = self.nodes.get(end)
            words = f"silent (nothing was heard for {SILENT_S} s)" if other in muted else "closed (end of stream)"
            link.pipes[other].cut(self.kernel.now)
            if node is not None:
                node.deliver(lambda n=node, o=other, w=words: n.link_broken(o, w))  # type: ignore[misc]

    def send(self, me: str, peer: str, payload: Payload) -> bool:
        """True if a link took it."""
        link = self.links.get(frozenset((me, peer)))
        if link is None:
            return False
        target = self.nodes.get(peer)
        if target is not None:
            link.pipes[me].send(payload, lambda p: target.deliver(lambda: target.frame(me, p)))
        return True

    def bye(self, me: str, peer: str) -> None:
        """Closed in good order by `me`."""
        link = self.links.pop(frozenset((me, peer)), None)
        if link is None:
            return
        other = self.nodes.get(peer)
        link.pipes[peer].cut(self.kernel.now)

        def told() -> None:
            if other is not None:
                other.deliver(lambda: other.link_left(me))

        link.pipes[me].end(told)

    def snap(self, me: str, peer: str, *, dead: str = "") -> None:
        """The link breaks; `dead` names the end whose process is gone."""
        link = self.links.pop(frozenset((me, peer)), None)
        if link is None:
            return
        now, random = self.kernel.now, self.kernel.random
        for end in link.ends:
            other = link.ends[1] if end == link.ends[0] else link.ends[0]
            node = self.nodes.get(other)
            if end == dead and random.random() < 0.5:
                # The kernel still delivers all that the dead process had written, then the end of the stream.
                link.pipes[end].end(self._teller(node, end))
                continue
            told = now + self.kernel.between(0.0003, 0.008)
            # Reset: of what `end` had sent, an arbitrary prefix still arrives.
            link.pipes[end].cut(told if random.random() < 0.5 else self.kernel.between(now, told))
            if other != dead:
                self.kernel.at(told, self._teller(node, end))

    @staticmethod
    def _teller(node: Endpoint | None, end: str) -> Callable[[], None]:
        def tell() -> None:
            if node is not None:
                node.deliver(lambda: node.link_broken(end))

        return tell

    def peers_of(self, me: str) -> list[str]:
        return [a if b == me else b for a, b in (link.ends for link in self.links.values()) if me in (a, b)]


@dataclass(slots=True)
class Stream:
    """A member's control stream to one life of the scheduler."""

    number: int
    up: Pipe
    down: Pipe
    closed: bool = False
