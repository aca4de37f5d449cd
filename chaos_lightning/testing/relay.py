"""A relay between members, through which links can be cut, stalled and restored; no privileges needed.

    with LinkRelay() as relay, Harness(directory, relay=relay) as harness:
        relay.cut("a", "b")        # reset now, refused from now on
        relay.stall("a", "b")      # a black hole: no byte passes, nobody hears of an end
        relay.restore("a", "b")

Theory of operation. A process whose environment has CHAOS_LINK_RELAY=HOST:PORT dials its peers there instead of at
their own addresses, and begins with one line that says who calls whom and where that is (transport/handshake.py). So
one variable routes all links of a job, nobody has to know a port ahead, and the relay tells links apart by the names of
their ends. Behind that line it copies bytes; the members' handshake and its proofs pass from end to end. State that a
newcomer pulls takes the same way: what is cut is the path between two machines. Control streams to the scheduler are no
links and do not pass here. Where only some processes have the variable, only the links that these dial can be hurt; of
two members the younger one dials.

One thread serves all connections by epoll. Each direction holds up to `HELD_NBYTES`, then the sender waits, as on a
wire. An end that closes, or dies, is passed on once all its bytes are; a stalled connection passes on not even that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from chaos_lightning.transport.handshake import RELAY

HELD_NBYTES = 1 << 20
_READ_NBYTES = 1 << 18
_LINE_NBYTES = 4096
_RESET = struct.pack("ii", 1, 0)
_WHOLE, _CUT, _STALLED = "whole", "cut", "stalled"

Pair = frozenset[str]


def pair_of(one: str, other: str) -> Pair:
    """A link by its ends; incarnations ("a~3") stand for their names ("a")."""
    names = frozenset(name.partition("~")[0] for name in (one, other))
    if len(names) != 2:
        raise ValueError(f"a link has two ends, got {one!r} and {other!r}")
    return names


class _End:
    """One of a connection's two sockets, and what is to be written to it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.held = bytearray()
        self.connecting = False
        self.ended = False  # it sends no more
        self.told = False  # it knows that the other end sends no more
        self.mask = 0


class _Connection:
    """A dialler, and the member that it wants once it has said so."""

    def __init__(self, sock: socket.socket) -> None:
        self.dialler = _End(sock)
        self.target: _End | None = None
        self.line = b""
        self.pair: Pair | None = None
        self.address = ("", 0)

    def ends(self) -> list[_End]:
        return [self.dialler] if self.target is None else [self.dialler, self.target]

    def other(self, end: _End) -> _End | None:
        return self.target if end is self.dialler else self.dialler


class LinkRelay:
    """See the module. `cut`, `stall` and `restore` have taken effect when they return; any thread may call them.

    Attributes:
        address: HOST:PORT of the relay.
    """

    def __init__(self, bind: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((bind, 0), backlog=128)
        self._listener.setblocking(False)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._watched: dict[int, tuple[_Connection, _End]] = {}
        self._connections: set[_Connection] = set()
        self._states: dict[Pair | None, str] = {}
        self._running = True
        for fd in (self._listener.fileno(), self._wake):
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="link-relay", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """What makes a process dial through this relay."""
        return {RELAY: self.address}

    def cut(self, one: str, other: str) -> None:
        """Resets what stands between these two nodes, and whatever is dialled until `restore`."""
        self._change(pair_of(one, other), _CUT)

    def stall(self, one: str, other: str) -> None:
        """Nothing passes between these two nodes until `restore`, and neither is told."""
        self._change(pair_of(one, other), _STALLED)

    def restore(self, one: str, other: str) -> None:
        """What stalled goes on; what was cut can be dialled again."""
        self._change(pair_of(one, other), _WHOLE)

    def close(self) -> None:
        """Resets everything and ends the thread. Idempotent."""
        if self._running:
            self._do(self._end)
            self._thread.join(10.0)

    def __enter__(self) -> LinkRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _do(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread and waits for it."""
        done = threading.Event()
        self._calls += (work, done.set)
        os.eventfd_write(self._wake, 1)
        if not done.wait(10.0):
            raise RuntimeError("the relay's thread does not answer; its traceback is on stderr")

    def _run(self) -> None:
        try:
            while self._running:
                for fd, events in self._epoll.poll():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._watched:  # not, if an event before this one has closed it
                        self._serve(*self._watched[fd], events)
                while self._calls:
                    self._calls.popleft()()
        finally:
            self._listener.close()
            self._epoll.close()
            os.close(self._wake)

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

    def _go_on(self, connection: _Connection) -> None:
        """As the state of its link wants it."""
        state = self._states.get(connection.pair, _WHOLE)
        if state == _CUT:
            self._drop(connection)
        elif state == _WHOLE and connection.target is None:
            host, port = connection.address
            end = connection.target = _End(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            end.connecting = True
            if end.sock.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                self._watch(connection)
            else:
                self._drop(connection)
        else:
            self._watch(connection)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection = _Connection(self._listener.accept()[0])
            self._connections.add(connection)
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Asks for the events that can be dealt with now. A socket without any is not watched: its end would be told
        again and again."""
        for end in connection.ends():
            other = connection.other(end)
            full = connection.pair is not None and (other is None or other.connecting or len(other.held) > HELD_NBYTES)
            mask = select.EPOLLOUT if end.connecting or end.held else 0
            mask |= 0 if end.connecting or end.ended or full else select.EPOLLIN
            mask = 0 if self._states.get(connection.pair) == _STALLED else mask
            if mask and end.mask:
                self._epoll.modify(end.sock, mask)
            elif mask:
                self._epoll.register(end.sock, mask)
                self._watched[end.sock.fileno()] = (connection, end)
            elif end.mask:
                self._forget(end)
            end.mask = mask

    def _forget(self, end: _End) -> None:
        if end.mask:
            self._epoll.unregister(end.sock)
            del self._watched[end.sock.fileno()]

    def _drop(self, connection: _Connection, *, reset: bool = True) -> None:
        self._connections.discard(connection)
        for end in connection.ends():
            self._forget(end)
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
            if events & ~select.EPOLLOUT and end.mask & select.EPOLLIN:
                if connection.pair is None:
                    self._hear(connection)
                    return
                self._read(end, connection.other(end))
            if self._pass_on_ends(connection):
                self._drop(connection, reset=False)
                return
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # broken, or no member speaks there
            self._drop(connection)
            return
        self._watch(connection)

    @staticmethod
    def _write(end: _End) -> None:
        if end.held and not end.connecting:
            with contextlib.suppress(BlockingIOError):
                del end.held[: end.sock.send(end.held)]

    def _read(self, end: _End, other: _End | None) -> None:
        assert other is not None
        data = end.sock.recv(_READ_NBYTES)
        end.ended = not data
        other.held += data
        self._write(other)

    @staticmethod
    def _pass_on_ends(connection: _Connection) -> bool:
        """Who has all that the other end ever sent is told so; True once both are."""
        for end in connection.ends():
            other = connection.other(end)
            if other is not None and other.ended and not (end.held or end.told or end.connecting):
                end.sock.shutdown(socket.SHUT_WR)
                end.told = True
        return all(end.told for end in connection.ends())

    def _hear(self, connection: _Connection) -> None:
        """The line with which a dialler begins; what follows belongs to the member that it wants."""
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
        connection.pair = pair_of(said["me"], said["peer"])
        self._go_on(connection)
