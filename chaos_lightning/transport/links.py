"""Keeps a member's connections to its neighbours: one listener, one link per neighbour, and dialling.

Theory of operation. Whom to dial, when again, and who may dial this member, membership/dialling.py decides. Attempts
and handshakes run in short-lived threads, so that a slow stranger never holds up the loop. A link that is not wanted
any more is finished, not cut: the slot that made the change may still have bytes in it. Who dials without being
expected is waited for a moment, since its end may have been told first, and then refused, whatever keys it knows.
Both ends ping, so a link on which nothing arrives for `SILENCE_S` is given up and dialled anew: a path that swallows
bytes closes no socket.

Messages go over the direct link if there is one; else, where the view names its links, as routed messages from
neighbour to neighbour (membership/routing.py). What cannot go on yet waits for a link or for the next view; what has no
way at all is dropped and noted. What each link carries is measured in transport/measuring.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chaos_lightning.errors import ChaosError, WireError
from chaos_lightning.machine.descriptors import allow_descriptors
from chaos_lightning.machine.few_lines import FewLines
from chaos_lightning.machine.forks import close_in_children
from chaos_lightning.machine.listener import open_listener
from chaos_lightning.machine.process_table import Sight, host_identity
from chaos_lightning.membership.dialling import Dial, Dialling, LinkStep, Tell, youth
from chaos_lightning.membership.routing import Drop, Hand, Router, RouteStep, Take, unpacked
from chaos_lightning.membership.topology import neighbours
from chaos_lightning.protocol.types import NO_VIEW, LinkReport, Member, View, ViewId
from chaos_lightning.security.credentials import Credentials, Secret
from chaos_lightning.transport.frames import BORDERS, CHUNKS, MAX_PAYLOAD_NBYTES, Frame, FrameType
from chaos_lightning.transport.handshake import Greeting, LinkKeyring, accept, dial
from chaos_lightning.transport.link import Chunks, Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.measuring import Measuring
from chaos_lightning.transport.medium import installed
from chaos_lightning.transport.reference import Generation, PartialSum
from chaos_lightning.transport.sealing import ProtectedSocket, session_of
from chaos_lightning.transport.watching import Watching

PING_INTERVAL_S = 0.1
SILENCE_S = 3.0
"""Seconds of silence after which a link counts as carrying nothing any more, though it was not closed."""
BUSY_S = 10.0
"""Seconds of silence after which a link is given up whose peer is running, as its machine says: the peer may be busy
rather than cut off.
"""
ASK_S = 1.5 * PING_INTERVAL_S
"""Seconds of silence after which a peer is asked about: the answer is here when the scheduler asks."""
EXPECT_S = 1.0
"""Seconds by which a dialling peer may have been told of this link earlier."""
WATCH_AGAIN_S = 5.0
"""Seconds from a broken or failed connection between watchers until another one is tried."""
BUNDLE_NBYTES = 256 << 10
"""Largest size, bytes, of a frame that routed messages share which go to one neighbour at once."""
FINISH_S = 30.0
"""Seconds in which a link that is not wanted any more may deliver what was queued."""
_MAX_HANDSHAKES = 64
_PER_NEIGHBOUR, _OTHER_DESCRIPTORS = 2, 128
"""Numbers of descriptors: for a neighbour's link, and another connection with it at times; for files and libraries of
the training.
"""
_FULL_PAUSE_S = 0.2
"""Pause, s, before the next attempt where this process has too many files open."""


class Host(Protocol):
    """Owner of a member's links: handles messages, and is told which links come up and go down."""

    def message(self, peer: str, payload: memoryview) -> None:
        """Handles an encoded PeerMessage from this peer, whether it came directly or over several links."""

    def link_changed(self, peer: str, up: bool, evidence: str) -> None:
        """Called when a link has come up, went down or could not be made."""

    def measured(self, report: LinkReport) -> None:
        """Called with a new measurement of a link: latency and rate, or rate 0."""

    def undelivered(self, to: str, source: str, reason: str) -> None:
        """Called when a message was dropped on its way; a recovery makes members send it again."""


@dataclass(frozen=True, slots=True)
class Takers:
    """Receivers of what arrives over links, by kind.

    Attributes:
        host: Receiver of messages, and of what becomes of links.
        chunks: Receiver of gradients.
        bulk: Function that serves an accepted bulk socket in the calling thread.
        borders: Receiver of tensors between stages; None: this job has no pipelines.
    """

    host: Host
    chunks: Chunks
    bulk: Callable[[socket.socket, str], object]
    borders: Chunks | None = None


class Links:
    """All links of this member. Methods belong to the I/O loop's thread unless noted otherwise.

    Args:
        loop: The loop that serves the links.
        job: Job name, checked in every handshake.
        token: Cluster token (empty for none), or credentials.
        refused: Function that is told about strangers (a line for the event log).
        keys: Connections are made, taken and protected by these, if there are any.
        generation: Neighbours on this machine may read chunks out of this process's memory, as long as it says so.
    """

    def __init__(
        self,
        loop: IoLoop,
        job: str,
        token: Secret,
        refused: Callable[[str], None],
        *,
        keys: LinkKeyring | None = None,
        generation: Generation | None = None,
    ) -> None:
        self.port = 0
        """Port at which this member listens; 0 before it does."""
        self.generation = generation
        self._keys = keys
        self._loop = loop
        self._job = job
        self._secret = Credentials.of(token)
        self._tell_refused = refused
        self._takers: Takers | None = None
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._few = FewLines()
        self._told_room = 0
        """Number of open files that was reported as too many for this process."""
        self._links: dict[str, Link] = {}
        self._dialling = Dialling(self._links)
        self._wanted = self._dialling.wanted
        self._told = threading.Condition()
        self._expected: frozenset[str] = frozenset()
        """Members that may dial this one; read by the threads that greet."""
        self._finishing: dict[Link, tuple[str, float, int]] = {}
        """Links that are not wanted any more: peer, since when (monotonic, s), first slot opened after (-1: none)."""
        self._ruling: View | None = None
        self._router = Router("", self._links, self._wanted)
        self._measuring = Measuring(loop.later, lambda report: self._to.host.measured(report), installed().pacer())
        self._host = host_identity()
        self._watching = Watching(loop, refused, self._watch_broke)
        self._bundles: dict[str, list[bytes]] = {}
        """Routed messages that leave at the end of this turn of the loop, by neighbour."""
        self.relayed = 0
        """Number of routed messages of others that were passed on."""
        self._slots = threading.Semaphore(_MAX_HANDSHAKES)
        self._closed = False
        self._pinged_at = time.monotonic()

    def listen(self, bind: str, takers: Takers, ports: Sequence[int] = (0,)) -> None:
        """Starts to listen for connections from other members. To be called before the loop runs.

        Args:
            bind: Address to listen on.
            takers: Receivers of what arrives.
            ports: Ports of which the first free one is taken; 0 is any.

        Raises:
            ConfigurationError: `bind` is no address of this machine, or no port is free.
        """
        listener = open_listener(bind, ports)
        close_in_children(listener.fileno())
        self._takers, self._listener, self.port = takers, listener, int(listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept_all, args=(listener,), name="chaos-accept", daemon=True)
        self._acceptor.start()

    @property
    def _to(self) -> Takers:
        assert self._takers is not None, "nothing comes before this member listens"
        return self._takers

    # ------------------------------------------------------------------ wanting

    @property
    def me(self) -> str:
        """Id of this member; "" before it has one."""
        return self._dialling.me

    @me.setter
    def me(self, member_id: str) -> None:
        with self._told:
            self._dialling.me = self._router.me = member_id
            self._told.notify_all()

    def want(self, peers: tuple[Member, ...]) -> None:
        """Sets the members to which links are wanted: dials new ones, and finishes links to all others."""
        self._send_bundles()  # also over links that are not wanted any more
        before = set(self._wanted)
        self._make_room(len(peers))
        self._dialling.want(peers)
        self._expect()
        for peer in [p for p in self._links if p not in self._wanted]:
            self._finish(peer, self._links.pop(peer))
        for peer in before.difference(self._wanted):
            self._watching.drop(peer)
        self._carry_out(self._router.again())
        self._follow(self._dialling.look())

    def _make_room(self, count: int) -> None:
        needed = _PER_NEIGHBOUR * count + _OTHER_DESCRIPTORS
        limit = allow_descriptors(needed)
        if limit < needed > self._told_room:
            self._told_room = needed
            self._tell_refused(
                f"{count} neighbours need {needed} open files, and this process may have {limit}: some links will not "
                "stand. Raise the hard limit (`ulimit -Hn`), or let members have fewer neighbours (link_degree)"
            )

    def rule(self, view: View | None) -> None:
        """Sets the view along whose links messages are routed; None: this member is in no view."""
        self._ruling = view
        steps = self._router.rule(view)
        self._expect()
        self._carry_out(steps)

    def foresee(self, view: View) -> None:
        """Notes a coming view, along whose links its newcomers are reached already."""
        steps = self._router.foresee(view)
        self._expect()
        self._carry_out(steps)

    def _expect(self) -> None:
        with self._told:
            self._expected = self._dialling.expected(self._router)
            self._told.notify_all()

    def opened(self, seq: int) -> None:
        """Notes that slot `seq` is open: result buffers are reused from now on, so that old links that still send from
        them are closed (protocol.md 3).
        """
        for link, (peer, since, first) in list(self._finishing.items()):
            if first < 0:
                self._finishing[link] = (peer, since, seq)
            elif seq > first and link.queued_nbytes:
                link.close()
                del self._finishing[link]

    def abandon(self) -> None:
        """Forgets all peers and closes all links at once, because this member joins again (protocol.md 11)."""
        for link in [*self._links.values(), *self._finishing]:
            link.close(bye=True)
        for peer, link in self._links.items():
            self._measuring.lost(peer, link)
            self._measuring.forget(peer)
        self._links.clear()
        self._finishing.clear()
        self._bundles.clear()
        for peer in self._wanted:
            self._watching.drop(peer)
        self._dialling.want(())
        self._router = Router(self.me, self._links, self._wanted)
        self._expect()

    def _finish(self, peer: str, link: Link) -> None:
        self._measuring.lost(peer, link)
        self._measuring.forget(peer)
        link.finish()
        if link.open:
            self._finishing[link] = (peer, time.monotonic(), -1)

    # ------------------------------------------------------------------ dialling (attempts in threads of their own)

    def _follow(self, steps: Sequence[LinkStep]) -> None:
        for step in steps:
            match step:
                case Tell(peer, up, evidence):
                    self._to.host.link_changed(peer, up, evidence)
                case Dial(peer, 0.0):
                    self._dial(peer)
                case Dial(peer, after_s):
                    self._loop.later(after_s, lambda p=peer: self._dial(p))  # type: ignore[misc]

    def _dial(self, peer: str) -> None:
        if self._closed or not self._dialling.due(peer):
            return
        member, me = self._wanted[peer], self.me

        def work() -> None:
            try:
                greeting = Greeting(self._job, me, peer, "link")
                sock = dial(member.address, member.port, greeting, token=self._secret.tokens(), keys=self._keys)
            except (OSError, ChaosError) as error:
                reason = str(error)
                self._loop.call(lambda: self._follow(self._dialling.failed(peer, reason, random.random())))
            else:
                self._loop.call(lambda: self._dialled(peer, me, sock))

        threading.Thread(target=work, name=f"chaos-dial-{peer}", daemon=True).start()

    def _dialled(self, peer: str, me: str, sock: socket.socket) -> None:
        if not self._dialling.ended(peer, me):
            sock.close()
            self._dial(peer)  # as who this member is by now
            return
        self._add(peer, sock)
        if self._wanted[peer].host != self._host:
            self._watch(self._wanted[peer], me)

    def _watch(self, member: Member, me: str) -> None:
        """Makes a second connection to a neighbour, for the watchers at both ends, which report whether the processes
        live.
        """

        def work() -> None:
            greeting = Greeting(self._job, me, member.id, "watch")
            try:
                sock = dial(member.address, member.port, greeting, token=self._secret.tokens(), keys=self._keys)
            except (OSError, ChaosError) as error:
                self._refused(f"{member.id} cannot be watched: {error}")
                self._loop.call(lambda: self._watch_broke(member.id))
            else:
                if me != self.me:  # its other end watches who this member was before it began anew
                    sock.close()
                    return
                self._hand_over(member.id, sock, dialled=True)

        threading.Thread(target=work, name=f"chaos-watch-{member.id}", daemon=True).start()

    def _watch_broke(self, peer: str) -> None:
        """Renews a broken connection between watchers, if this member is the one that dials and the link still
        exists.
        """

        def again() -> None:
            if not self._closed and peer in self._links and peer in self._wanted:
                self._watch(self._wanted[peer], self.me)

        if youth(self.me) > youth(peer):
            self._loop.later(WATCH_AGAIN_S, again)

    def _hand_over(self, peer: str, sock: socket.socket, *, dialled: bool) -> None:
        session = session_of(sock)
        self._watching.add(peer, sock, session.watch_key if session is not None else b"", dialled=dialled)

    # ------------------------------------------------------------------ accepting (own threads)

    def _accept_all(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._refused(f"a connection could not be taken: {error.strerror}")
                time.sleep(_FULL_PAUSE_S)
                continue
            if not self._slots.acquire(blocking=False):
                self._refused(f"more than {_MAX_HANDSHAKES} handshakes at once; one was closed unheard")
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock,), name="chaos-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        with self._told:  # who dials may have heard of this member before it has heard who it is
            self._told.wait_for(lambda: self.me or self._closed, EXPECT_S)
        try:
            greeting = accept(
                sock,
                job=self._job,
                me=self.me,
                token=self._secret.tokens(),
                keys=self._keys,
                objection=self._objection,
            )
            sock = ProtectedSocket.around(sock, greeting.session)
        except (ChaosError, OSError) as error:
            self._refused(str(error))
            return
        finally:
            self._slots.release()
        if greeting.purpose == "watch":
            self._hand_over(greeting.me, sock, dialled=False)
        elif greeting.purpose == "bulk":
            close_in_children(sock.fileno())
            watched = self._measuring.begin_bulk(greeting.me, sock)
            if watched:
                self._loop.call(lambda: self._measuring.watch_bulk(greeting.me, sock))
            try:
                self._to.bulk(sock, greeting.me)
            finally:
                if watched:
                    self._loop.call(lambda: self._measuring.end_bulk(greeting.me, sock))
                sock.close()
        else:
            self._loop.call(lambda: self._accepted(greeting, sock))

    def _objection(self, greeting: Greeting) -> str:
        peer = greeting.me
        if greeting.purpose == "park":
            return "a member parks no connections"
        if greeting.purpose in ("link", "watch"):
            with self._told:
                if not self._told.wait_for(lambda: peer in self._expected or self._closed, EXPECT_S):
                    return f"no view has a link of it with {self.me}, and the scheduler has not told of one"
        return ""

    def _refused(self, line: str) -> None:
        unlogged = self._few.take()
        if unlogged is not None:
            self._tell_refused(f"{line} ({unlogged} more were left out)" if unlogged else line)

    def _accepted(self, greeting: Greeting, sock: socket.socket) -> None:
        if self._closed or greeting.peer != self.me:  # it greeted whom this member was before it began anew
            sock.close()
            return
        if greeting.me not in self._expected:
            sock.close()
            self._refused(f"closed a connection of {greeting.me!r}: it was expected a moment ago, and is no more")
            return
        self._add(greeting.me, sock)

    # ------------------------------------------------------------------ links

    def _add(self, peer: str, sock: socket.socket) -> None:
        old = self._links.pop(peer, None)
        if old is not None:
            old.close()
            self._measuring.lost(peer, old)
        self._dialling.made(peer)
        close_in_children(sock.fileno())
        generation = None if self._measuring.emulated(peer) else self.generation
        link = self._links[peer] = Link(self._loop, sock, peer, self, generation)
        self._carry_out(self._router.again())
        if not link.open:
            self.broken(peer, link, "closed (as soon as it was made)")
        elif self._links.get(peer) is link:
            self._to.host.link_changed(peer, True, "connected")
            self._measuring.added(peer, link)

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        """Removes a link that broke; dials again if a link to its peer is still wanted."""
        self._finishing.pop(link, None)
        if self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._watching.ask(peer)
        self._measuring.lost(peer, link)
        self._follow(self._dialling.broken(peer, evidence))
        for data in link.routed():
            self._return(data)

    def up(self, peer: str) -> bool:
        return peer in self._links

    def near(self) -> frozenset[str]:
        """Returns the members to which there is a link now. Any thread."""
        return frozenset(self._links.copy())

    def severed(self) -> tuple[str, ...]:
        """Returns the members to which the ruling view has a link that is down now. Any thread."""
        view = self._ruling
        return tuple(m for m in neighbours(view, self.me) if m not in self._links) if view is not None else ()

    def wanted(self, peer: str) -> Member | None:
        """Returns the member with this id if a link to it is wanted; else None."""
        return self._wanted.get(peer)

    def reads(self, peer: str) -> bool:
        """Returns whether this peer can read this process's memory. Any thread."""
        link = self._links.get(peer)
        return link is not None and link.by_reference

    def silence_s(self, peer: str, now: float) -> float:
        """Returns the seconds since anything came from this peer; infinity without a link."""
        link = self._links.get(peer)
        return float("inf") if link is None else now - link.heard_at

    def sight(self, peer: str) -> Sight:
        """Returns what the watcher on this peer's machine reports about the peer's process, if anything."""
        return self._watching.sight(peer)

    def message(self, peer: str, payload: bytes, view: ViewId = NO_VIEW) -> None:
        """Sends an encoded PeerMessage over one link, or over several along the links of `view`; queues it while no
        path exists.
        """
        self._carry_out(self._router.send(peer, payload, view))

    def _carry_out(self, steps: Sequence[RouteStep]) -> None:
        for step in steps:
            routed = step.routed
            if isinstance(step, Hand) and step.peer not in self._links:  # it broke as the one before was sent
                self._carry_out(self._router.returned(routed))
                continue
            match step:
                case Take():
                    self._to.host.message(routed.source, memoryview(routed.payload))
                case Drop(_, reason):
                    self._to.host.undelivered(routed.to, routed.source, reason)
                case Hand(peer, _, True):
                    self._links[peer].send(FrameType.MESSAGE, payload=(memoryview(routed.payload),))
                case Hand(peer):
                    data = routed.packed()
                    if len(data) > MAX_PAYLOAD_NBYTES:
                        reason = f"{len(data)} bytes are too many for one frame"
                        self._to.host.undelivered(routed.to, routed.source, reason)
                        continue
                    self.relayed += routed.source != self.me
                    if not self._bundles:
                        self._loop.call(self._send_bundles)
                    self._bundles.setdefault(peer, []).append(data)

    def _send_bundles(self) -> None:
        """Sends the routed messages of this turn of the loop, bundled in few frames for each neighbour."""
        bundles, self._bundles = self._bundles, {}
        for peer, messages in bundles.items():
            frames: list[list[bytes]] = []
            room = 0
            for message in messages:
                if not frames or len(message) > room:
                    frames.append([])
                    room = BUNDLE_NBYTES
                frames[-1].append(message)
                room -= len(message)
            for frame in frames:
                data = memoryview(frame[0] if len(frame) == 1 else b"".join(frame))  # a large one is not copied
                if (link := self._links.get(peer)) is not None:
                    link.send(FrameType.ROUTED, payload=(data,))
                else:  # it has broken since
                    self._return(data)

    def _return(self, data: memoryview) -> None:
        """Routes messages anew that were queued on a link that broke."""
        for routed in unpacked(data):
            self._carry_out(self._router.returned(routed))

    # ------------------------------------------------------------------ frames (owner of links)

    def target(self, peer: str, frame: Frame) -> memoryview | None:
        """Returns memory for a frame's payload; None: the payload is discarded."""
        if frame.type in CHUNKS:
            return self._to.chunks.target(peer, frame)
        if frame.type in BORDERS:
            return self._borders(peer).target(peer, frame)
        if frame.type == FrameType.PROBE:
            link = self._links.get(peer)
            return None if link is None else self._measuring.target(link, frame)
        return memoryview(bytearray(frame.length))

    def arrived(self, peer: str, frame: Frame, payload: memoryview | PartialSum) -> None:
        """Passes a received frame to its receiver."""
        if frame.type in CHUNKS:
            self._to.chunks.arrived(peer, frame, payload)
        elif frame.type in BORDERS:
            self._borders(peer).arrived(peer, frame, payload)
        elif isinstance(payload, memoryview):
            self._mine(peer, frame, payload)

    def _borders(self, peer: str) -> Chunks:
        if self._to.borders is None:
            raise WireError(f"{peer} sends a border tensor, and this job has no pipelines")
        return self._to.borders

    def _mine(self, peer: str, frame: Frame, payload: memoryview) -> None:
        link = self._links.get(peer)
        if frame.type == FrameType.MESSAGE:
            self._to.host.message(peer, payload)
        elif frame.type == FrameType.ROUTED:
            for routed in unpacked(payload):
                self._carry_out(self._router.arrived(routed, peer))
        elif frame.type == FrameType.PROBE and link is not None:
            self._measuring.arrived(peer, link, frame, payload)

    # ------------------------------------------------------------------ chunks and pings

    def chunk(
        self, peer: str, kind: FrameType, view: ViewId, seq: int, start: int, payload: Sequence[memoryview]
    ) -> None:
        """Sends a frame of an attempt (a chunk or a border tensor). If there is no link it is lost, and a recovery
        follows.
        """
        link = self._links.get(peer)
        if link is not None:
            link.send(kind, view, seq, start, payload)

    def ping(self) -> None:
        """Sends a ping over each link, and closes links over which nothing came for too long."""
        now = time.monotonic()
        gap, self._pinged_at = now - self._pinged_at, now
        for peer, link in list(self._links.items()):
            # A member that was frozen itself has heard nothing; its peers were not silent (protocol.md 12).
            link.heard_at += gap if gap > SILENCE_S / 2 else 0.0
            silence = now - link.heard_at
            if silence > ASK_S:
                self._watching.ask(peer)
            if silence > SILENCE_S and (silence > BUSY_S or not self.sight(peer).alive):
                link.close()
                self.broken(peer, link, f"silent (nothing was heard for {silence:.1f} s)")
            else:
                link.send(FrameType.PING, NO_VIEW)
        for peer in self._wanted:
            if peer not in self._links:
                self._watching.ask(peer)
        for link, (_, since, _) in list(self._finishing.items()):
            if now - since > FINISH_S or now - link.heard_at > SILENCE_S:
                link.close()
                del self._finishing[link]
        self._measuring.tick(now)

    def drop(self, view: ViewId) -> None:
        """Purges queued chunks and borders of this and older views on every link, and discards those being received."""
        for link in [*self._links.values(), *self._finishing]:
            link.purge(view)
            link.divert(view)

    # ------------------------------------------------------------------ measuring

    def reports(self) -> list[LinkReport]:
        """Returns the latest report on each link that is up, for a scheduler that has none. Any thread."""
        return list(self._measuring.reports.values())

    def estimates(self) -> dict[str, tuple[float, float]]:
        """Returns the measurements of links that are up: {member: (latency in s, rate in bits per second)}. Any
        thread.
        """
        return {r.peer: (r.latency_s, r.rate_bps) for r in self.reports() if r.rate_bps > 0}

    def unmeasured(self) -> set[str]:
        """Returns the peers whose links have no measurement yet. Any thread."""
        return self._measuring.unmeasured()

    def facts(self) -> dict[str, object]:
        """Returns bytes and rates of each link (rates since the last call), and the number of routed messages that were
        relayed and that wait.
        """
        links = self._measuring.facts(time.monotonic())
        return {"links": links, "relayed": self.relayed, "waiting": self._router.waiting}

    def close(self, *, bye: bool = True) -> None:
        self._closed = True
        if self._listener is None:
            return
        self._send_bundles()
        self._dialling.want(())
        self._expect()
        for link in list(self._links.values()):
            link.close(bye=bye)
        for link in self._finishing:
            link.close()
        self._links.clear()
        self._finishing.clear()
        self._watching.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def wait_closed(self, timeout_s: float = 2.0) -> None:
        """Waits, after `close` and in another thread, until the listener's thread has ended."""
        if self._acceptor is not None:
            self._acceptor.join(timeout_s)
