"""Keeps data connections between clusters and followers: a follower listens, and a cluster only ever dials outwards.

Theory of operation. A cluster often stands behind a firewall or NAT that lets nobody in, yet followers ask it for its
pushes. So each process of a cluster keeps a few connections *parked* at each follower (purpose "park"): it dials, and
then serves its own states on them, as if it had been dialled. A follower takes one when it wants something, and the
cluster parks another one at once. For versions a cluster dials with purpose "bulk", and the follower serves.

Ranks of an elastic cluster park under one name, that of their incarnation, with a mark behind it that each process
draws ("home~3/5c81d2aa"). So a follower can have each of them send a part of a push (`donors`).

An idle connection may die without a word: a NAT forgets it, a machine goes. Both ends have the kernel ask after
`IDLE_S`, and it ends what has not answered `PATIENCE_S` later. Who dials an address where nobody answers waits longer
each time, up to `MOST_PAUSE_S`.

Strangers are refused by the handshake and noted, a few lines a second. Where control connections are secret, the leader
hands a key to each pair (line_keys.py), and a connection without one is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from chaos_lightning.errors import ChaosError, RefusedError
from chaos_lightning.machine.addresses import join_endpoint, split_endpoint
from chaos_lightning.machine.few_lines import FewLines
from chaos_lightning.machine.forks import close_in_children
from chaos_lightning.machine.listener import open_listener
from chaos_lightning.outer.exchange.line_keys import LineKeyring, incarnation_of
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type, named_head
from chaos_lightning.replication.server import StateServer, StateServerConfig
from chaos_lightning.replication.source import Endpoint, reason_of
from chaos_lightning.security.credentials import Credentials, Secret, check_bind
from chaos_lightning.transport.handshake import Greeting, LinkKeyring, accept, dial, keep_alive, stands
from chaos_lightning.transport.pacing import pace
from chaos_lightning.transport.sealing import ProtectedSocket

IDLE_S = 10
"""Seconds without a byte after which the kernel asks whether the other end is there."""
PATIENCE_S = 3
"""Seconds after which the kernel ends a connection whose other end has not answered."""
MOST_PAUSE_S = 1.0
"""Longest pause, s, between two attempts to park a connection."""
TAKE_S = 2.0
"""Seconds for which a follower waits for a connection of a cluster that has none parked: the cluster is dialling."""
SERVING = StateServerConfig(publish_timeout_s=2.0, idle_timeout_s=86400.0)
"""Options of the state servers of clusters and followers: a state that is asked for is there, or gone; and parked
connections idle.
"""
_LEAST_PAUSE_S = 0.01
_DEADLINE_S = 3.0
"""Time limit, s, of connecting, and of each handshake."""
_JOIN_S = 5.0
_MAX_HANDSHAKES = 64
_MAX_PARKED = 64
"""Largest number of parked connections of one peer, over all its processes; the oldest one goes."""
_FULL_PAUSE_S = 0.2

Note = Callable[..., None]
"""Function that writes an event: its name, and fields by name."""


def _kept_alive(sock: socket.socket) -> socket.socket:
    keep_alive(sock, idle_s=IDLE_S, patience_s=PATIENCE_S)
    close_in_children(sock.fileno())
    return sock


def _cut(socks: Sequence[socket.socket]) -> None:
    """Shuts these sockets down, which wakes the threads that wait on them; each thread closes its own socket."""
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class DataListener:
    """Follower's listener for data connections, with those that clusters have parked. Any thread may call methods.

    Args:
        host: Address to listen at.
        port: Port to listen at; 0: any free one.
        job: Name of the job.
        me: Name of the follower.
        secret: Token or credentials.
        server: Serves clusters that connect to fetch versions.
        note: Told of strangers.
        keys: Keys that this follower shares with clusters' processes; None where connections have none.

    Raises:
        ConfigurationError: The follower cannot listen at this address, or that would let anyone in.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str,
        me: str,
        secret: Secret,
        server: StateServer,
        note: Note,
        keys: LinkKeyring | None = None,
    ) -> None:
        check_bind(host, secret)
        self._job, self._me, self._secret, self._keys = job, me, Credentials.of(secret), keys
        self._server, self._note = server, note
        self._few = FewLines()
        self._slots = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._changed = threading.Condition()
        self._parked: dict[str, list[socket.socket]] = {}
        """Parked connections by incarnation, oldest first."""
        self._whose: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()
        """Incarnation and mark of the process that parked each connection, as it said them."""
        self._open: set[socket.socket] = set()
        """Connections that a thread of this listener greets or serves."""
        self._closed = False
        self._listener = open_listener(host, [port])
        close_in_children(self._listener.fileno())
        self.endpoint = join_endpoint(host, int(self._listener.getsockname()[1]))
        """HOST:PORT at which the follower listens, as bound."""
        self._threads = {threading.Thread(target=self._accept_all, name="chaos-lines-accept", daemon=True)}
        next(iter(self._threads)).start()

    def take(self, peer: str, timeout_s: float) -> socket.socket:
        """Removes and returns the newest parked connection of this peer; the caller must close it.

        Args:
            peer: An incarnation. If it has none, one of another start of its cluster will do: that may hold what this
                one pushed. With a mark behind it: that process and no other.
            timeout_s: Seconds to wait for one.

        Raises:
            TimeoutError: There is none, and none came.
        """
        until, only = time.monotonic() + timeout_s, peer if incarnation_of(peer) != peer else ""
        with self._changed:
            while True:
                self._forget_dead()
                waiting = self._waiting(incarnation_of(peer))
                if found := next((s for s in reversed(waiting) if not only or self._whose[s] == only), None):
                    waiting.remove(found)
                    return found
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    raise TimeoutError(f"{peer} has parked no connection at {self._me} for {timeout_s:g} s")
                self._changed.wait(left)

    def _waiting(self, peer: str) -> list[socket.socket]:
        """Returns the parked connections of this incarnation; if it has none, those of the latest incarnation of the
        same cluster that has some.
        """
        if found := self._parked.get(peer):
            return found
        cluster = peer.rpartition("~")[0]
        others = [waiting for other, waiting in self._parked.items() if waiting and other.rpartition("~")[0] == cluster]
        return others[-1] if cluster and others else []

    def donors(self, peer: str) -> list[Endpoint]:
        """Returns the endpoints for `dial` from which an incarnation's pushes can be fetched: its processes that have
        parked connections, or, if none has, the incarnation.
        """
        with self._changed:
            self._forget_dead()
            whose = dict.fromkeys(self._whose[sock] for sock in self._waiting(peer))
        return [Endpoint(who, "", 0) for who in whose or (peer,)]

    def dial(self, endpoint: Endpoint) -> socket.socket:
        """Returns a parked connection, since clusters cannot be dialled; has the signature of
        `replication.source.Dial`, but of the endpoint only the name counts.

        Raises:
            RefusedError: The named process has no connection parked here.
        """
        try:
            return self.take(endpoint.member, TAKE_S)
        except TimeoutError as error:
            raise RefusedError(str(error)) from error

    def close(self) -> None:
        """Ends all connections and the listener, and waits for the listener's threads."""
        with self._changed:
            self._closed = True
            parked = [sock for waiting in self._parked.values() for sock in waiting]
            self._parked.clear()
            threads = list(self._threads)
            _cut([self._listener, *self._open])
            self._changed.notify_all()
        self._listener.close()
        for sock in parked:
            sock.close()
        until = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # --- in threads of its own ------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
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
            thread = threading.Thread(target=self._attend, args=(sock,), name="chaos-lines-greet", daemon=True)
            with self._changed:
                self._threads.add(thread)
                thread.start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            greeted = self._greet(sock)
            if greeted is not None:
                sock, greeting = greeted
                if greeting.purpose == "park":
                    self._park(greeting.me, sock)
                else:
                    self._serve(greeting.me, sock)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _greet(self, sock: socket.socket) -> tuple[socket.socket, Greeting] | None:
        try:
            if not self._opened(sock):
                return None
            greeting = accept(
                sock,
                job=self._job,
                me=self._me,
                token=self._secret.tokens(),
                deadline_s=_DEADLINE_S,
                keys=self._keys,
                objection=lambda g: (
                    "" if g.purpose in ("bulk", "park") else f"a follower has no {g.purpose} connections"
                ),
            )
            with self._changed:
                self._open.discard(sock)
            return _kept_alive(ProtectedSocket.around(sock, greeting.session)), greeting
        except (ChaosError, OSError) as error:
            self._refused(str(error))
            return None
        finally:
            with self._changed:
                self._open.discard(sock)
            self._slots.release()

    def _opened(self, sock: socket.socket) -> bool:
        """Registers a connection so that `close` cuts it; if the listener is closed already, closes the connection and
        returns False.
        """
        with self._changed:
            if not self._closed:
                self._open.add(sock)
                return True
        sock.close()
        return False

    def _park(self, peer: str, sock: socket.socket) -> None:
        with self._changed:
            self._forget_dead()
            if self._closed:
                sock.close()
                return
            waiting = self._parked.setdefault(incarnation_of(peer), [])
            waiting.append(sock)
            self._whose[sock] = peer
            if len(waiting) > _MAX_PARKED:
                waiting.pop(0).close()
            self._changed.notify_all()

    def _serve(self, peer: str, sock: socket.socket) -> None:
        if self._opened(sock):
            try:
                self._server.serve(sock, peer)
            finally:
                with self._changed:
                    self._open.discard(sock)

    def _forget_dead(self) -> None:
        for peer in list(self._parked):
            living = []
            for sock in self._parked[peer]:
                if stands(sock):
                    living.append(sock)
                else:
                    sock.close()
            self._parked[peer] = living
            if not living:
                del self._parked[peer]

    def _refused(self, line: str) -> None:
        unlogged = self._few.take()
        if unlogged is not None:
            self._note("refused", reason=line, unlogged=unlogged)


class ParkedLines:
    """Cluster's end of data connections: keeps some open at each follower, and serves the requests that come on them.
    Any thread.

    Args:
        server: Server of this process's pushes.
        job: Name of the job.
        me: Returns the name of this process, such as "home~3".
        secret: Token or credentials.
        note: Told when connections to a follower stand, and when they cannot be made.
        count: Number of connections at each follower: while one is used, another one is there.
        links: Rule for the protection of connections (line_keys.LineKeyring).
        rate_bps: Bits a second that may be used each way, over all followers and by all processes of the cluster
            (`share`); 0.0: as much as there is.
    """

    def __init__(
        self,
        server: StateServer,
        *,
        job: str,
        me: Callable[[], str],
        secret: Secret,
        note: Note,
        count: int = 2,
        links: str = "auto",
        rate_bps: float = 0.0,
    ) -> None:
        self._keys = LineKeyring(secret, links)
        self._most_bps = self._rate_bps = rate_bps
        self._followers = self._processes = 1
        self._mark = os.urandom(4).hex()
        self.server, self._job, self._me, self._secret = server, job, me, Credentials.of(secret)
        self._note, self._count = note, count
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str, str], list[_Line]] = {}
        """Connections by follower, endpoint, and this process's name when they were made."""
        self._standing: dict[str, int] = {}
        self._told: dict[str, bool] = {}

    def follow(self, holders: Sequence[Holder]) -> None:
        """Keeps connections parked at these followers, and at no others, from now on; a follower that is away keeps the
        connections it has.
        """
        me = self._me()
        self._keys.meet(holders)
        with self._lock:
            self._followers = max(1, len(holders))
            kept = {(h.name, h.endpoint, me) for h in holders}
            away = {h.name for h in holders if not h.endpoint}
            over = [key for key in self._lines if key not in kept and not (key[0] in away and key[2] == me)]
            ended = [line for key in over for line in self._lines.pop(key)]
            made = []
            for key in sorted(kept - self._lines.keys()):
                if key[1]:
                    made += [_Line(self, *key, number=n) for n in range(self._count)]
                    self._lines[key] = made[-self._count :]
            for name in self._told.keys() - {h.name for h in holders}:
                del self._told[name]
        for line in ended:
            line.hang_up()
        for line in made:
            line.start()

    def dial(self, endpoint: Endpoint) -> socket.socket:
        """Returns a connection to a follower, on which the follower serves versions; has the signature of
        `replication.source.Dial`.

        Raises:
            ChaosError, OSError: There is none.
        """
        sock = self._connect(endpoint.member, endpoint.address, endpoint.port, self._me(), "bulk")
        if self._rate_bps:  # a version comes to one process, whatever others there are
            told = BulkFrame(Type.PACE, named_head(""), 0, max(1, round(self._rate_bps / (8 * self._followers))))
            BulkSocket(sock, stall_timeout_s=_DEADLINE_S).send(told)
        return sock

    def share(self, processes: int) -> None:
        """Divides the sending rate by the number of the cluster's processes, which all send at once from now on."""
        with self._lock:
            self._processes = processes
        self._pace_all()

    def spread(self, rate_bps: float) -> None:
        """Limits sending to the rate that suffices (bits/s, to all followers together; 0.0 if unknown), but never to
        more than the setting allows.

        Pushes under way go on at this rate, versions that are fetched later begin with it.
        """
        with self._lock:
            self._rate_bps = min((rate for rate in (rate_bps, self._most_bps) if rate), default=0.0)
        self._pace_all()

    @property
    def share_bps(self) -> float:
        """Bits a second for each connection: an equal share, since each follower fetches a shard of about equal size on
        one connection to each process.
        """
        return self._rate_bps / (self._followers * self._processes)

    def _pace_all(self) -> None:
        with self._lock:
            standing = [line for lines in self._lines.values() for line in lines]
        for line in standing:
            line.pace(self.share_bps)

    def close(self) -> None:
        """Closes all connections, and waits for the threads that keep them."""
        with self._lock:
            ended = [line for lines in self._lines.values() for line in lines]
            self._lines.clear()
        for line in ended:
            line.hang_up()
        until = time.monotonic() + _JOIN_S
        for line in ended:
            line.join(max(0.0, until - time.monotonic()))

    def _connect(self, name: str, address: str, port: int, me: str, purpose: str) -> socket.socket:
        greeting = Greeting(self._job, me, name, purpose)
        tokens = self._secret.tokens()
        return _kept_alive(dial(address, port, greeting, token=tokens, deadline_s=_DEADLINE_S, keys=self._keys))

    def park(self, name: str, endpoint: str, me: str) -> socket.socket:
        """Opens a connection to this follower and leaves it waiting there; called in a thread that keeps one
        connection.

        Raises:
            ChaosError, OSError: There is none.
        """
        return self._connect(name, *split_endpoint(endpoint), f"{me}/{self._mark}", "park")

    def tell(self, name: str, change: int, reason: str = "") -> None:
        """Counts a connection to a follower that was opened (1), lost (-1) or could not be opened (0); called in the
        thread that keeps it.
        """
        with self._lock:
            self._standing[name] = standing = self._standing.get(name, 0) + change
            news = standing > 0 if change >= 0 else None
            if news is None or self._told.get(name) is news:
                return
            self._told[name] = news
        self._note("data_line", peer=name, up=news, reason=reason)


class _Line(threading.Thread):
    """Thread that keeps one connection to a follower: dials it, serves requests on it until it ends, and dials
    again.
    """

    def __init__(self, lines: ParkedLines, follower: str, endpoint: str, me: str, number: int) -> None:
        super().__init__(name=f"chaos-line-{follower}-{number}", daemon=True)
        self._lines, self._follower, self._endpoint, self._as = lines, follower, endpoint, me
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def hang_up(self) -> None:
        """Ends the connection, and soon after the thread."""
        self._over.set()
        with self._lock:
            if self._sock is not None:
                _cut([self._sock])

    def pace(self, rate_bps: float) -> None:
        """Limits the bits a second that are sent from now on; 0.0 means no limit."""
        with self._lock:
            if self._sock is not None:
                pace(self._sock, rate_bps or None)

    def run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            longer = min(MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * pause))
            try:
                sock = self._lines.park(self._follower, self._endpoint, self._as)
            except (ChaosError, OSError) as error:
                if not self._over.is_set():
                    self._lines.tell(self._follower, 0, reason_of(error))
                pause = longer
                continue
            pause = 0.0 if self._serve(sock) else longer

    def _serve(self, sock: socket.socket) -> bool:
        """Serves a parked connection until it ends; returns whether it served anything or lasted for a while: if not,
        the next dial is delayed.
        """
        with self._lock:
            if self._over.is_set():
                sock.close()
                return False
            self._sock = sock  # From here on a new rate reaches it, so none is lost between reading it and this.
            pace(sock, self._lines.share_bps or None)
        served, began = self._lines.server.served_nbytes, time.monotonic()
        before = served.get(self._follower, 0)
        self._lines.tell(self._follower, 1)
        try:
            self._lines.server.serve(sock, self._follower)
        finally:
            with self._lock:
                self._sock = None
            self._lines.tell(self._follower, -1)
        return served.get(self._follower, 0) > before or time.monotonic() - began > MOST_PAUSE_S
