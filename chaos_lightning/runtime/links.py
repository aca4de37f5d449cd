"""The member's side of the network: one listener, one link per neighbour, and who dials whom.

Theory of operation. The member with the younger id dials (newcomers dial the others), the other accepts; handshakes
run in short-lived threads so that a slow stranger never holds up the loop. A link that breaks is reported with its
evidence and dialled again while its peer is wanted, with growing pauses. Messages for a peer whose link is not there
yet wait for it. Both ends ping, so a link on which nothing arrives for `SILENCE_S` is given up and dialled anew: a
path that swallows bytes closes no socket.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.membership.types import NO_VIEW, Member, ViewId
from chaos_lightning.runtime.forks import close_in_children
from chaos_lightning.transport.frames import FrameType
from chaos_lightning.transport.handshake import Greeting, accept, dial
from chaos_lightning.transport.link import Link, Owner
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.reference import Stamp

PING_INTERVAL_S = 0.1
SILENCE_S = 3.0
"""A link on which nothing was heard for so long carries nothing any more, though it was not closed."""
_MAX_HANDSHAKES = 64
_MAX_WAITING_MESSAGES = 4096


def youth(member_id: str) -> tuple[int, str]:
    """Sort key: later incarnations are younger. Of two members the younger one dials."""
    name, _, number = member_id.rpartition("~")
    return (int(number) if number.isdigit() else 0, name)


class Links:
    """All links of this member. Methods belong to the loop's thread unless said otherwise.

    Args:
        loop: The loop that serves the links.
        bind: Address to listen on.
        job: Job name, checked in every handshake.
        token: Cluster token, empty for none.
        owner: Receives frames and broken links.
        changed: Told (peer, up, evidence).
        bulk: Serves an accepted bulk socket in the calling thread.
        refused: Told about strangers (a line for the event log).
    """

    def __init__(
        self,
        loop: IoLoop,
        bind: str,
        job: str,
        token: bytes,
        owner: Owner,
        changed: Callable[[str, bool, str], None],
        bulk: Callable[[socket.socket, str], object],
        refused: Callable[[str], None],
    ) -> None:
        self.me = ""
        self.stamp: Stamp | None = None
        """Set: neighbours on this machine may read chunks out of this process's memory."""
        self._loop = loop
        self._job = job
        self._token = token
        self._owner = owner
        self._changed = changed
        self._bulk = bulk
        self._refused = refused
        self._links: dict[str, Link] = {}
        self._wanted: dict[str, Member] = {}
        self._dialling: set[str] = set()
        self._failures: dict[str, int] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._slots = threading.Semaphore(_MAX_HANDSHAKES)
        self._closed = False
        self._pinged_at = time.monotonic()
        try:
            self._listener = socket.create_server((bind, 0), backlog=128)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {bind!r}: {error}; set bind to an own address") from error
        self.port = int(self._listener.getsockname()[1])
        close_in_children(self._listener.fileno())
        threading.Thread(target=self._accept_all, name="chaos-accept", daemon=True).start()

    # ------------------------------------------------------------------ wanting

    def want(self, peers: tuple[Member, ...]) -> None:
        """Keeps links to exactly these members."""
        self._wanted = {m.id: m for m in peers if m.id != self.me}
        for peer in [p for p in self._links if p not in self._wanted]:
            self._links.pop(peer).close(bye=True)
        self._waiting = {p: m for p, m in self._waiting.items() if p in self._wanted}
        for peer in self._wanted:
            if peer in self._links:
                self._changed(peer, True, "connected")
            else:
                self._dial(peer)

    def also(self, peers: tuple[Member, ...]) -> None:
        """Wants these members too."""
        self.want((*self._wanted.values(), *(p for p in peers if p.id not in self._wanted)))

    def _dial(self, peer: str) -> None:
        if self._closed or peer in self._dialling or peer in self._links or peer not in self._wanted:
            return
        if youth(self.me) < youth(peer):
            return
        self._dialling.add(peer)
        member, me = self._wanted[peer], self.me

        def work() -> None:
            try:
                sock = dial(member.address, member.port, Greeting(self._job, me, peer, "link"), token=self._token)
            except (OSError, ChaosError) as error:
                reason = f"refused ({error})"
                self._loop.call(lambda: self._failed(peer, reason))
            else:
                self._loop.call(lambda: self._dialled(peer, me, sock))

        threading.Thread(target=work, name=f"chaos-dial-{peer}", daemon=True).start()

    def _dialled(self, peer: str, me: str, sock: socket.socket) -> None:
        self._dialling.discard(peer)
        if me != self.me or peer not in self._wanted:
            sock.close()
            return
        self._add(peer, sock)

    def _failed(self, peer: str, reason: str) -> None:
        self._dialling.discard(peer)
        if peer not in self._wanted:
            return
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        if failures in (1, 5) or failures % 50 == 0:
            self._changed(peer, False, reason)
        self._loop.later(min(2.0, 0.05 * 2 ** min(failures, 6)) * random.uniform(0.5, 1.0), lambda: self._dial(peer))

    # ------------------------------------------------------------------ accepting (own threads)

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                self._refused(f"more than {_MAX_HANDSHAKES} handshakes at once; one was closed unheard")
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock,), name="chaos-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            greeting = accept(sock, job=self._job, me=self.me, token=self._token)
        except (ChaosError, OSError) as error:
            self._refused(str(error))
            return
        finally:
            self._slots.release()
        if greeting.purpose == "bulk":
            close_in_children(sock.fileno())
            try:
                self._bulk(sock, greeting.me)
            finally:
                sock.close()
        else:
            self._loop.call(lambda: self._accepted(greeting.me, sock))

    def _accepted(self, peer: str, sock: socket.socket) -> None:
        if self._closed:
            sock.close()
            return
        self._add(peer, sock)

    # ------------------------------------------------------------------ links

    def _add(self, peer: str, sock: socket.socket) -> None:
        old = self._links.pop(peer, None)
        if old is not None:
            old.close()
        self._failures.pop(peer, None)
        close_in_children(sock.fileno())
        link = self._links[peer] = Link(self._loop, sock, peer, self._owner, self.stamp)
        for payload in self._waiting.pop(peer, []):
            link.send(FrameType.MESSAGE, payload=(memoryview(payload),))
        self._changed(peer, True, "connected")

    def broken(self, peer: str, link: Link, evidence: str) -> None:
        """A link has broken; dial again if its peer is still wanted."""
        if self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._changed(peer, False, evidence)
        if peer in self._wanted:
            # After a goodbye the peer is as a rule about to be forgotten here, too.
            self._loop.later(0.5 if evidence == "bye" else 0.05, lambda: self._dial(peer))

    def up(self, peer: str) -> bool:
        return peer in self._links

    def silence_s(self, peer: str, now: float) -> float:
        """Seconds since anything was heard from this peer; infinite without a link."""
        link = self._links.get(peer)
        return float("inf") if link is None else now - link.heard_at

    def message(self, peer: str, payload: bytes) -> None:
        """Sends an encoded PeerMessage, now or when the link stands."""
        link = self._links.get(peer)
        if link is not None:
            link.send(FrameType.MESSAGE, payload=(memoryview(payload),))
        elif peer in self._wanted:
            waiting = self._waiting.setdefault(peer, [])
            if len(waiting) < _MAX_WAITING_MESSAGES:
                waiting.append(payload)

    def chunk(
        self, peer: str, kind: FrameType, view: ViewId, seq: int, start: int, payload: Sequence[memoryview]
    ) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.send(kind, view, seq, start, payload)

    def ping(self) -> None:
        """Shows each peer that this end lives, and gives up links of which nothing was heard for too long."""
        now = time.monotonic()
        gap, self._pinged_at = now - self._pinged_at, now
        for peer, link in list(self._links.items()):
            # Who was frozen itself has heard nobody; that is nobody's silence (PROTOCOL.md 12).
            link.heard_at += gap if gap > SILENCE_S / 2 else 0.0
            if now - link.heard_at > SILENCE_S:
                link.close()
                self.broken(peer, link, f"silent (nothing was heard for {now - link.heard_at:.1f} s)")
            else:
                link.send(FrameType.PING, NO_VIEW)

    def drop(self, view: ViewId) -> None:
        """Diverts and forgets chunks of this and older views on every link."""
        for link in self._links.values():
            link.purge(view)
            link.divert(view)

    def close(self, *, bye: bool = True) -> None:
        self._closed = True
        self._wanted = {}
        for link in list(self._links.values()):
            link.close(bye=bye)
        self._links.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
