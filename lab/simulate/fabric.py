"""Simulates a job's network: links between members, and control streams to the scheduler.

Theory of operation. Every direction of every connection is FIFO with a latency of its own; different connections
reorder freely against each other. A connection that breaks loses what is in flight; both ends learn of it, each after
a while. Of a killed process what it had sent is either delivered or lost from some message on (never a gap), then
comes the end of the stream. The younger member dials, as in transport/links.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chaos_lightning.membership.dialling import BYE, Dial, Dialling, LinkStep
from chaos_lightning.membership.effects import MemberEvent
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.planning.fleet.kernel import Action, Kernel, Pipe
from chaos_lightning.planning.graph import breadth_first
from chaos_lightning.protocol.types import FromMember, Header
from lab.simulate.dataplane import DataPlane, SumEntry
from lab.simulate.plan import NodeSpec
from lab.simulate.training import State

Payload = object
EXPECT_S = 1.0
_POLL_S = 0.02
SILENT_S = 3.0
"""Seconds of silence after which a link is given up (transport/links.py)."""
CLOSED = "closed (end of stream)"
"""Evidence with which a link ends that broke."""
Taker = Callable[[Payload], None]


class Endpoint(Protocol):
    """Interface of a training process for the other parts of a simulated job; `node.Node` implements it."""

    kernel: Kernel
    name: str
    spec: NodeSpec
    alive: bool
    frozen: bool
    busy: bool
    frozen_since: float
    thawed_at: float
    machine: MemberMachine
    dialling: Dialling
    plane: DataPlane
    training: bool
    state: State
    live: State
    lineage: str
    troubled_at: float
    newcomer_since: float
    leaving: str
    asked_at: float
    outcome: str

    def deliver(self, action: Action) -> None: ...

    def timer(self, delay: float, action: Action) -> None: ...

    def feed(self, event: MemberEvent) -> None: ...

    # the network's

    def frame(self, peer: str, payload: Payload) -> None: ...

    def expects(self, peer: str) -> bool: ...

    def follow(self, steps: Sequence[LinkStep]) -> None: ...

    def stands(self, peer: str) -> None: ...

    def link_ended(self, peer: str, evidence: str) -> None: ...

    def measure(self, peer: str, evidence: str) -> None: ...

    # the scheduler's

    def tell(self, message: FromMember) -> None: ...

    def say(self, message: FromMember) -> None: ...

    def break_stream(self) -> None: ...

    # other members'

    def serve_state(self, header: Header) -> State | None: ...

    def served_hash(self) -> int: ...

    def serve_copy(self, header: Header) -> State | None: ...

    def serve_entry(self, at: Header) -> tuple[SumEntry | None, int]: ...

    # its own pulls'

    def kept_ranges(self, header: Header) -> dict[int, int]: ...

    def accept_state(self, equal: bool) -> bool: ...

    def state_loaded(self, header: Header, state: State, lineage: str, moved: int) -> None: ...


@dataclass(slots=True)
class Link:
    """Existing link between two members' incarnations."""

    ends: tuple[str, str]
    pipes: dict[str, Pipe]
    """Pipes by sending member id."""


@dataclass(slots=True)
class Fabric:
    """All links of a simulated job, by the members' current ids."""

    kernel: Kernel
    nodes: dict[str, Endpoint] = field(default_factory=dict)
    processes: dict[str, Endpoint] = field(default_factory=dict)
    """Processes by name, also before they have an id."""
    _unexpected: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    """Handshakes with nodes that do not expect the other end yet, by the node's name."""
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    unheard: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (member, peer): the link between them has ended, and the first does not know yet."""
    slow_links: dict[frozenset[str], float] = field(default_factory=dict)
    """Extra seconds of latency by pair of node names."""
    blocked: dict[frozenset[str], tuple[float, float]] = field(default_factory=dict)
    """Moments (virtual s) from which and until which these two nodes cannot make a link."""

    def block(self, one: str, other: str, seconds: float, noticed_s: float = 0.0) -> None:
        """Prevents links between these two nodes for some seconds; an existing link breaks after `noticed_s`."""
        now = self.kernel.now
        since, until = self.blocked.get(frozenset((one, other)), (now, now))
        since = since if until > now else now + noticed_s
        self.blocked[frozenset((one, other))] = (since, max(until, now + seconds))

    def cut_s(self, one: str, other: str) -> float:
        """Returns the seconds for which these two nodes have been cut off from each other; 0 if they are not."""
        since, until = self.blocked.get(frozenset((one, other)), (0.0, 0.0))
        return self.kernel.now - since if self.kernel.now < until else 0.0

    def open(self, one: str, other: str) -> bool:
        """Returns whether a link between these two nodes can be made."""
        return self.kernel.now >= self.blocked.get(frozenset((one, other)), (0.0, 0.0))[1]

    def reaches(self, one: str, other: str) -> bool:
        """Returns whether bytes can get from one node to the other, directly or relayed by other nodes."""
        if not self.blocked or self.open(one, other):
            return True
        names = {one, *(n.name for n in self.nodes.values() if n.alive)}
        near = {a: [b for b in names if self.open(a, b)] for a in names}
        return other in breadth_first(one, near, "")

    def dial(self, here: Endpoint, peer: str) -> None:
        """Dials a peer from this node, whose `dialling` is told the outcome."""
        me = here.machine.member_id
        at = self.kernel.now + self.kernel.between(0.0005, 0.004)
        self.kernel.at(at, lambda: self._shake(here, me, peer, at + EXPECT_S))

    def told(self, node: Endpoint) -> None:
        """Retries handshakes that wait for this node, as the peers from which it expects calls may have changed."""
        waiting = self._unexpected.pop(node.name, [])
        for again in waiting:
            again()

    def _shake(self, here: Endpoint, me: str, peer: str, give_up_at: float) -> None:
        """Makes a link's handshake; waits while an end is frozen, and a moment for an end that does not expect the call
        yet.
        """
        if not here.alive:
            return
        there = self.processes.get(peer.rpartition("~")[0])
        if there is not None and not self.open(here.name, there.name):
            self._refuse(here, me, peer, "no route to host")
        elif there is None or not there.alive or there.machine.member_id not in ("", peer):
            self._refuse(here, me, peer, "connection refused")
        elif here.frozen or there.frozen:
            self.kernel.after(_POLL_S, lambda: self._shake(here, me, peer, self.kernel.now + EXPECT_S))
        elif there.expects(me):
            here.deliver(lambda: self._meet(here, there, me, peer))
        elif self.kernel.now < give_up_at:
            self._unexpected.setdefault(there.name, []).append(lambda: self._shake(here, me, peer, give_up_at))
            self.kernel.at(give_up_at, lambda: self.told(there))
        else:
            self._refuse(here, me, peer, f"no view has a link of it with {peer}, and the scheduler has not told of one")

    def _refuse(self, here: Endpoint, me: str, peer: str, reason: str) -> None:
        def told() -> None:
            if not here.outcome:
                here.follow(here.dialling.failed(peer, reason, 0.5))

        here.deliver(told)

    def _meet(self, here: Endpoint, there: Endpoint, me: str, peer: str) -> None:
        if here.outcome:
            return
        if not here.dialling.ended(peer, me):
            here.follow([Dial(peer)])
        elif frozenset((me, peer)) not in self.links:
            self._stand(here, there, frozenset((me, peer)))

    def _stand(self, here: Endpoint, there: Endpoint, pair: frozenset[str]) -> None:
        extra = self.slow_links.get(frozenset((here.name, there.name)), 0.0)
        me, peer = here.machine.member_id, there.machine.member_id
        pipes = {end: Pipe(self.kernel, 0.0002, 0.002 + extra) for end in (me, peer)}
        self.links[pair] = Link((me, peer), pipes)
        self.unheard.discard((peer, me))
        for node, other in ((here, peer), (there, me)):
            node.stands(other)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Separates two nodes for some seconds: their link breaks, and no new one can be made."""
        self.block(one, other, seconds)
        for link in list(self.links.values()):
            if {self.nodes[end].name for end in link.ends} == {one, other}:
                self.snap(*link.ends)

    def mute(self, one: str, other: str, seconds: float, *, both: bool) -> None:
        """Delays everything sent from `one` to `other` (`both`: also back) for some seconds, in which no new link can
        be made.

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
        """Closes a link at the ends that have heard nothing for SILENT_S; the other end learns of it unless it is cut
        off.
        """
        if self.links.get(frozenset(link.ends)) is not link:
            return
        del self.links[frozenset(link.ends)]
        for end in link.ends:
            other = link.ends[1] if end == link.ends[0] else link.ends[0]
            words = f"silent (nothing was heard for {SILENT_S} s)" if other in muted else CLOSED
            link.pipes[other].cut(self.kernel.now)
            self._teller(end, other, words)()

    def send(self, me: str, peer: str, payload: Payload) -> bool:
        """Sends a payload to a peer; returns whether a link accepted it."""
        link = self.links.get(frozenset((me, peer)))
        if link is None:
            return False
        target = self.nodes.get(peer)
        if target is not None:
            link.pipes[me].send(payload, lambda p: target.deliver(lambda: target.frame(me, p)))
        return True

    def bye(self, me: str, peer: str) -> None:
        """Closes a link in good order, at the end of `me`."""
        link = self.links.pop(frozenset((me, peer)), None)
        if link is None:
            return
        link.pipes[peer].cut(self.kernel.now)
        link.pipes[me].end(self._teller(peer, me, BYE))

    def snap(self, me: str, peer: str, *, dead: str = "") -> None:
        """Breaks a link; `dead` names the end whose process has died."""
        link = self.links.pop(frozenset((me, peer)), None)
        if link is None:
            return
        now, random = self.kernel.now, self.kernel.random
        for end in link.ends:
            other = link.ends[1] if end == link.ends[0] else link.ends[0]
            if end == dead and random.random() < 0.5:
                # The kernel still delivers all that the dead process had written, then the end of the stream.
                link.pipes[end].end(self._teller(other, end, CLOSED))
                continue
            told = now + self.kernel.between(0.0003, 0.008)
            # Reset: of what `end` had sent, an arbitrary prefix still arrives.
            link.pipes[end].cut(told if random.random() < 0.5 else self.kernel.between(now, told))
            if other != dead:
                self.kernel.at(told, self._teller(other, end, CLOSED))

    def _teller(self, me: str, peer: str, words: str) -> Action:
        """Returns an action that tells a process that its link to a peer has ended, unless that process has a new id or
        a new link by then.

        Until then it takes the link for one that stands.
        """
        node = self.nodes.get(me)
        self.unheard.add((me, peer))

        def heard() -> None:
            stood = (me, peer) in self.unheard
            self.unheard.discard((me, peer))
            if stood and node is not None and node.machine.member_id == me:
                node.link_ended(peer, words)

        return lambda: node.deliver(heard) if node is not None else None

    def standing(self, node: Endpoint) -> Container[str]:
        """Returns a live container of the members to which this node has a link."""
        return _Standing(self, node)

    def peers_of(self, me: str) -> list[str]:
        return [a if b == me else b for a, b in (link.ends for link in self.links.values()) if me in (a, b)]


@dataclass(frozen=True, slots=True)
class _Standing:
    fabric: Fabric
    node: Endpoint

    def __contains__(self, peer: object) -> bool:
        me = self.node.machine.member_id
        return frozenset((me, peer)) in self.fabric.links or (me, peer) in self.fabric.unheard


@dataclass(slots=True)
class Stream:
    """Control stream between a member and one scheduler process."""

    number: int
    up: Pipe
    down: Pipe
    hear: Taker
    """Function with which the member's process gets a message."""
    lost: Action
    """Function with which the member's process sees that the stream broke."""
