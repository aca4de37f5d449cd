"""Relays links between members, so that tests can slow, cut, stall and restore them; needs no privileges.

    with LinkRelay() as relay, Harness(directory, relay=relay) as harness:
        relay.shape("a", "b", rate_bps=300e6, latency_s=0.02)
        relay.cut("a", "b")        # reset now, refused from now on
        relay.stall("a", "b")      # a black hole: no byte passes, nobody hears of an end
        relay.restore("a", "b")

Theory of operation. A process whose environment has CHAOS_LINK_RELAY=HOST:PORT dials its peers there instead of at
their own addresses, and begins with one line that says who calls whom and where that is (testing/emulation.py). So one
variable routes all links of a job, nobody has to know a port ahead, and the relay tells links apart by the names of
their ends. Behind that line it copies bytes; the members' handshake and its proofs pass from end to end. State that a
newcomer pulls takes the same way: what is cut is the path between two machines. Control streams to the scheduler are no
links and do not pass here: processes that dial without that line use a `Way` to one server, which tells them apart.
Where only some processes have the variable, only the links that these dial can be hurt; of two members the younger one
dials.

One thread serves all connections by epoll. Each direction holds up to `HELD_NBYTES`, then the sender waits, as on a
wire. An end that closes, or dies, is passed on once all its bytes are; a stalled connection passes on not even that.

Shaped links (`shape`, `access`) read in pieces, no sooner than the wire is free, and write each piece when it would
have arrived (lanes.py): a flow that waits for its wire is not watched but woken by a timer. All connections
between two nodes share their link, all links of a node its access. TCP's own windows are not emulated: one flow fills
a link.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.testing.edge.lanes import AHEAD_S, Lane, Meter, Wire
from chaos_lightning.testing.emulation import RELAY
from chaos_lightning.testing.processes import owner_of

HELD_NBYTES = 1 << 20
BUFFER_NBYTES = 256 << 10
"""Bytes of buffer of the relay's own sockets; bytes that wait there do not wait for a wire."""
_READ_NBYTES = 1 << 18
_LINE_NBYTES = 4096
_RESET = struct.pack("ii", 1, 0)
_WHOLE, _CUT, _STALLED = "whole", "cut", "stalled"

Pair = frozenset[str]


def pair_of(one: str, other: str) -> Pair:
    """Returns a link as the set of its two ends' names; an incarnation ("a~3") is turned into its name ("a")."""
    names = frozenset(name.partition("~")[0] for name in (one, other))
    if len(names) != 2:
        raise ValueError(f"a link has two ends, got {one!r} and {other!r}")
    return names


class _End:
    """One of a connection's two sockets, and the bytes that are still to be written to it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.coming: deque[tuple[float, memoryview]] = deque()
        """Pieces to write here, each with its time of arrival; an empty piece is the end of the stream."""
        self.held = 0
        self.lane: Lane | None = None
        """Lane of the bytes that are read here; None: they pass as fast as they come."""
        self.waits = False
        """Whether there was more to read when the wire was not free."""
        self.read_at = self.write_at = 0.0
        """Times at which to read and to write here next; 0: no timer."""
        self.connecting = False
        self.ended = False  # it sends no more
        self.told = False  # it knows that the other end sends no more
        self.mask = 0


class _Connection:
    """Connection from a dialling member, and the relay's own connection to the member it asked for, once it has
    asked.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.dialler = _End(sock)
        self.target: _End | None = None
        self.line = b""
        self.pair: Pair | None = None
        self.names = ("", "")
        """Names of the dialling end and the other one."""
        self.address = ("", 0)

    def ends(self) -> list[_End]:
        return [self.dialler] if self.target is None else [self.dialler, self.target]

    def other(self, end: _End) -> _End | None:
        return self.target if end is self.dialler else self.dialler


class LinkRelay:
    """Relay of links between members. A method that changes a link returns once the change has taken effect; any thread
    may call it.

    Args:
        bind: Address to listen on.
        node_of: Returns the node of a member's name or id; None for a stranger, who is refused. By default each name
            without its incarnation is a node. Members of one node need no link and are not shaped.
        closed: Whether pairs are refused until they are shaped or restored.
        introduce: Sets pair, names and address of a new connection; None: the dialler's first line does.

    Attributes:
        address: HOST:PORT of the relay.
        strangers: Members that were refused because they are of no node.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1",
        *,
        node_of: Callable[[str], str | None] | None = None,
        closed: bool = False,
        introduce: Callable[[_Connection], None] | None = None,
    ) -> None:
        self._listener = socket.create_server((bind, 0), backlog=128)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)  # inherited, before any window
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.strangers: set[str] = set()
        self._node_of, self._introduce = node_of, introduce
        self._state_of_others = _CUT if closed else _WHOLE
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._watched: dict[int, tuple[_Connection, _End]] = {}
        self._connections: set[_Connection] = set()
        self._states: dict[Pair | None, str] = {}
        self._wires: dict[tuple[str, str], Wire] = {}
        self._accesses: dict[str, tuple[Meter, Meter]] = {}
        """Meters of each node's shared access: out, in."""
        self._timers: list[tuple[float, float, int, _Connection, _End, bool]] = []
        self._count = itertools.count()
        self._running = True
        for fd in (self._listener.fileno(), self._wake):
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="link-relay", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that make a process dial other members through this relay."""
        return {RELAY: self.address}

    def cut(self, one: str, other: str) -> None:
        """Resets all connections between two nodes, and each new one until `restore`."""
        self._change(pair_of(one, other), _CUT)

    def stall(self, one: str, other: str) -> None:
        """Stalls the link between two nodes: no byte passes until `restore`, and neither node gets an error."""
        self._change(pair_of(one, other), _STALLED)

    def restore(self, one: str, other: str) -> None:
        """Restores a link: stalled connections continue, and cut ones can be dialled again."""
        self._change(pair_of(one, other), _WHOLE)

    def shape(self, one: str, other: str, *, rate_bps: float, latency_s: float = 0.0) -> None:
        """Gives a link a rate and a latency, each way, from now on; opens it if the relay refused its connections so
        far.

        Args:
            one, other: Nodes at its ends.
            rate_bps: Bits of payload per second; must be positive (for none, `cut` or `stall`).
            latency_s: Latency one way, s.
        """
        pair = pair_of(one, other)
        if not (rate_bps > 0 and latency_s >= 0):
            raise ValueError(f"{one} - {other}: rate {rate_bps} bps and latency {latency_s} s; expected > 0 and >= 0")

        def work() -> None:
            now = time.monotonic()
            for ends in itertools.permutations(pair):
                wire = self._wires.setdefault((ends[0], ends[1]), Wire(rate_bps, latency_s))
                wire.meter.change(rate_bps, now)
                wire.latency_s = latency_s
            self._states.setdefault(pair, _WHOLE)
            for connection in [c for c in self._connections if c.pair == pair]:
                self._assign_lanes(connection)
                self._go_on(connection)

        self._do(work)

    def access(self, node: str, rate_bps: float) -> None:
        """Sets the rate that all shaped links of a node share from now on, each way, bit/s."""

        def work() -> None:
            now = time.monotonic()
            for meter in self._accesses.setdefault(node, (Meter(rate_bps), Meter(rate_bps))):
                meter.change(rate_bps, now)
            for connection in [c for c in self._connections if c.pair and node in c.pair]:
                self._assign_lanes(connection)
                self._go_on(connection)

        if not rate_bps > 0:
            raise ValueError(f"access of {node}: {rate_bps} bps; expected a positive rate")
        self._do(work)

    def passed(self) -> dict[tuple[str, str], int]:
        """Returns the number of bytes that have entered each direction of each shaped link."""
        return {ends: wire.nbytes for ends, wire in list(self._wires.items())}

    def close(self) -> None:
        """Resets all connections and ends the relay's thread. Idempotent."""
        if self._running:
            self._do(self._end)
            self._thread.join(10.0)
            # Not by the thread: it may have ended before `_do` has rung for it.
            os.close(self._wake)

    def __enter__(self) -> LinkRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _do(self, work: Callable[[], None]) -> None:
        """Runs `work` in the relay's thread, and waits until it is done."""
        done = threading.Event()
        self._calls += (work, done.set)
        os.eventfd_write(self._wake, 1)
        if not done.wait(10.0):
            raise RuntimeError("the relay's thread does not answer; its traceback is on stderr")

    def _run(self) -> None:
        try:
            while self._running:
                for fd, events in self._wait():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._watched:  # not, if an event before this one has closed it
                        self._serve(*self._watched[fd], events)
                self._ring()
                while self._calls:
                    self._calls.popleft()()
        finally:
            self._listener.close()
            self._epoll.close()

    def _wait(self) -> list[tuple[int, int]]:
        """Waits for events of sockets, no longer than until the next timer is due; returns them."""
        if not self._timers:
            return self._epoll.poll()
        left = self._timers[0][0] - AHEAD_S - time.monotonic()
        # epoll counts milliseconds, which is a whole piece on a fast link; select counts microseconds.
        if left > 0 and self._epoll.fileno() < 1024:
            select.select([self._epoll], [], [], left)
            left = 0.0
        return self._epoll.poll(max(0.0, left))

    def _ring(self) -> None:
        """Reads and writes on all sockets whose timers are due."""
        soon = time.monotonic() + AHEAD_S
        while self._timers and self._timers[0][0] <= soon:
            when, _, _, connection, end, reading = heapq.heappop(self._timers)
            if when == (
                end.read_at if reading else end.write_at
            ):  # else the timer was set anew, or its socket is closed
                if reading:
                    end.read_at = 0.0
                else:
                    end.write_at = 0.0
                self._serve(connection, end, select.EPOLLIN if reading else 0)

    def _set_timer(self, connection: _Connection, end: _End, when: float, *, reading: bool) -> None:
        if when == (end.read_at if reading else end.write_at):
            return
        if reading:
            end.read_at = when
        else:
            end.write_at = when
        turn = end.lane.served_at if reading and end.lane is not None else 0.0
        heapq.heappush(self._timers, (when, turn, next(self._count), connection, end, reading))

    def _end(self) -> None:
        self._running = False
        for connection in list(self._connections):
            self._drop(connection)

    def _change(self, pair: Pair, state: str) -> None:
        def work() -> None:
            self._states[pair] = state
            for connection in [c for c in self._connections if c.pair == pair]:
                self._go_on(connection)

        self._do(work)

    def _state(self, pair: Pair | None) -> str:
        """Returns a link's state; connections within one node, and those that have not named their peer yet, are never
        disturbed.
        """
        if pair is None or len(pair) == 1:
            return _WHOLE
        return self._states.get(pair, self._state_of_others)

    def _go_on(self, connection: _Connection) -> None:
        """Drops, completes or watches a connection, as the state of its link demands."""
        state = self._state(connection.pair)
        if state == _CUT:
            self._drop(connection)
        elif state == _WHOLE and connection.target is None:
            host, port = connection.address
            end = connection.target = _End(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)
            end.connecting = True
            self._assign_lanes(connection)
            if end.sock.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                self._watch(connection)
            else:
                self._drop(connection)
        else:
            self._watch(connection)

    def _assign_lanes(self, connection: _Connection) -> None:
        """Sets the rate limits for the bytes that each end of a connection sends."""
        if connection.target is None or len(connection.pair or ()) != 2:
            return
        for end, (source, sink) in (
            (connection.dialler, connection.names),
            (connection.target, connection.names[::-1]),
        ):
            wire = self._wires.get((source, sink))
            if wire is not None:
                own, its = self._accesses.get(source), self._accesses.get(sink)
                last = end.lane.arrives_at if end.lane is not None else 0.0
                end.lane = Lane(wire, [*([own[0]] if own else []), *([its[1]] if its else [])])
                end.lane.arrives_at = last

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection = _Connection(self._listener.accept()[0])
            self._connections.add(connection)
            if self._introduce is None:
                self._watch(connection)
                return
            try:
                self._introduce(connection)
            except OSError:  # the dialler is gone again
                self._drop(connection)
            else:
                self._go_on(connection)

    def _watch(self, connection: _Connection) -> None:
        """Registers a connection's sockets for the events that can be handled now, or sets timers; a socket without
        either is unregistered, since epoll would report its end again and again.
        """
        stalled = self._state(connection.pair) == _STALLED
        soon = time.monotonic() + AHEAD_S
        for end in connection.ends():
            mask = 0
            if stalled:
                end.read_at = end.write_at = 0.0
            else:
                if end.connecting or (end.coming and end.coming[0][0] <= soon):
                    mask |= select.EPOLLOUT
                elif end.coming:
                    self._set_timer(connection, end, end.coming[0][0], reading=False)
                if not end.connecting and not end.ended and not self._full(connection, end):
                    if end.waits and end.lane is not None:
                        self._set_timer(connection, end, end.lane.free_at, reading=True)
                    else:
                        mask |= select.EPOLLIN
                else:
                    end.waits = False  # it does not wait for the wire
                    end.read_at = 0.0
            if mask == end.mask:
                continue
            if mask and end.mask:
                self._epoll.modify(end.sock, mask)
            elif mask:
                self._epoll.register(end.sock, mask)
                self._watched[end.sock.fileno()] = (connection, end)
            else:
                self._forget(end)
            end.mask = mask

    @staticmethod
    def _full(connection: _Connection, end: _End) -> bool:
        """Returns whether reading from `end` must pause because the other end has too many bytes to take already."""
        if connection.pair is None:
            return False
        other = connection.other(end)
        if other is None or other.connecting:
            return True
        limit = HELD_NBYTES if end.lane is None else BUFFER_NBYTES + end.lane.in_flight_nbytes
        return other.held > limit

    def _forget(self, end: _End) -> None:
        if end.mask:
            self._epoll.unregister(end.sock)
            del self._watched[end.sock.fileno()]

    def _drop(self, connection: _Connection, *, reset: bool = True) -> None:
        self._connections.discard(connection)
        for end in connection.ends():
            self._forget(end)
            end.mask = 0
            end.read_at = end.write_at = 0.0
            if reset:
                end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.sock.close()

    # ------------------------------------------------------------------ bytes

    def _serve(self, connection: _Connection, end: _End, events: int) -> None:
        try:
            if end.connecting and events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                end.connecting = False
                error = end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
            self._write(end)
            if events & ~select.EPOLLOUT and (end.mask & select.EPOLLIN or end.waits):
                if connection.pair is None:
                    self._hear(connection)
                    return
                self._read(end, connection.other(end))
            if self._pass_on_ends(connection):
                self._drop(connection, reset=False)
                return
        except BlockingIOError:
            end.waits = False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # broken, or no member speaks there
            self._drop(connection)
            return
        self._watch(connection)

    @staticmethod
    def _write(end: _End) -> None:
        soon = time.monotonic() + AHEAD_S
        with contextlib.suppress(BlockingIOError):
            while end.coming and end.coming[0][0] <= soon and not end.connecting:
                when, piece = end.coming[0]
                sent = end.sock.send(piece) if piece else 0
                end.held -= sent
                if sent == piece.nbytes:
                    end.coming.popleft()
                else:
                    end.coming[0] = (when, piece[sent:])

    def _read(self, end: _End, other: _End | None) -> None:
        assert other is not None
        lane, now = end.lane, time.monotonic()
        if lane is None:
            data, when = end.sock.recv(_READ_NBYTES), 0.0
            if other.coming:
                when = other.coming[-1][0]
        elif lane.free_at > now + AHEAD_S:
            end.waits = True
            return
        else:
            most = lane.piece_nbytes
            data = end.sock.recv(most)
            when = lane.take(len(data), now, waited=end.waits)
            end.waits = len(data) == most
        end.ended = not data
        other.held += len(data)
        other.coming.append((when, memoryview(data)))
        self._write(other)

    @staticmethod
    def _pass_on_ends(connection: _Connection) -> bool:
        """Closes the sending side towards each end that has got all bytes of the other one; returns True once both are
        closed.
        """
        for end in connection.ends():
            other = connection.other(end)
            if other is not None and other.ended and not (end.coming or end.told or end.connecting):
                end.sock.shutdown(socket.SHUT_WR)
                end.told = True
        return all(end.told for end in connection.ends())

    def _hear(self, connection: _Connection) -> None:
        """Reads the first line of a connection, in which the dialling member names its peer; later bytes belong to the
        peer.
        """
        sock = connection.dialler.sock
        seen = sock.recv(_LINE_NBYTES, socket.MSG_PEEK)
        line, newline, _ = seen.partition(b"\n")
        connection.line += sock.recv(len(line + newline))
        if not newline:
            if not seen or len(connection.line) >= _LINE_NBYTES:
                raise ValueError("no line")
            return
        said = json.loads(connection.line)
        connection.address = (str(said["address"]), int(said["port"]))
        connection.pair = self._pair(str(said["me"]), str(said["peer"]))
        connection.names = (self._node(said["me"]), self._node(said["peer"]))
        self._go_on(connection)

    def _node(self, member: str) -> str:
        name = member.partition("~")[0] if self._node_of is None else self._node_of(member)
        if name is None:
            self.strangers.add(member)
            raise ValueError(f"{member} is of no node")
        return name

    def _pair(self, one: str, other: str) -> Pair:
        if self._node_of is None:
            return pair_of(one, other)
        return frozenset((self._node(one), self._node(other)))


_SERVER = "the server"


class Way:
    """Relay in front of one server that needs no change in its clients; each client process can be cut or stalled
    alone.

    Args:
        target: HOST:PORT of the server.
        pids: Returns names of processes of this machine, by id; every other process is called "".

    Attributes:
        endpoint: HOST:PORT to dial instead.
    """

    def __init__(self, target: str, pids: Callable[[], Mapping[int, str]] = dict) -> None:
        self._target, self._pids = split_endpoint(target), pids
        self._relay = LinkRelay(introduce=self._introduce)
        self.endpoint = self._relay.address

    def _introduce(self, connection: _Connection) -> None:
        pids = dict(self._pids())  # a copy: others may change theirs while this thread reads it
        connection.names = (owner_of(connection.dialler.sock, pids) if pids else "", _SERVER)
        connection.pair, connection.address = pair_of(*connection.names), self._target

    def cut(self, name: str = "") -> None:
        """Resets all connections of a process, and each new one until `restore`."""
        self._relay.cut(name, _SERVER)

    def stall(self, name: str = "") -> None:
        """Stalls all connections of a process: no byte passes until `restore`, and neither end gets an error."""
        self._relay.stall(name, _SERVER)

    def restore(self, name: str = "") -> None:
        """Restores a process's connections: stalled ones continue, and cut ones can be dialled again."""
        self._relay.restore(name, _SERVER)

    def close(self) -> None:
        """Resets all connections and ends the relay. Idempotent."""
        self._relay.close()
