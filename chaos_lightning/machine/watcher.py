"""Runs a small process beside a member that tells other machines whether the member's process runs, is stopped or is
gone.

Theory of operation. A member that holds the interpreter's lock - a collection, a fork, a long call into C - is as
silent as one that is stopped, and its kernel acknowledges in both cases what it is sent. On the member's own machine
the process table tells one from the other; this process reads it for those on other machines. It has no share in the
member's lock, it outlives a member that is killed, and it is stopped neither by a SIGSTOP of the member nor by a Ctrl+C
on its terminal, since it has a session of its own.

The member hands over one connection per neighbour on another machine, authenticated by the handshake of every link, and
keeps none. Over it the two watchers ask each other (`ask`) and answer; what a neighbour's watcher answered is told to
the own member, which decides what that means (transport/watching.py). Each answer repeats the number of its question
under a keyed hash, so that no older answer and no other connection's can stand for it.

The program uses the standard library alone and is run by its path: it starts in some 20 ms and takes some 8 MiB. It
ends when its member says so, or `LINGER_S` after its member did, or once nobody is left to answer to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from hashlib import blake2b
from pathlib import Path

LINGER_S = 30.0
"""Seconds after its member's end until which the watcher gives proof of it to those that wait for that."""
KEY_NBYTES = 32
_FRAME = struct.Struct("<c8sc16s")
"""Layout of a frame: question or answer, number of the question, state, keyed hash."""
_STATES = {"runs": b"R", "stopped": b"S", "gone": b"G", "": b"?"}
LOST = b"L"
"""Word to the member: the connection to this neighbour's watcher is broken."""
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Keepalive of a connection (s, s, probes), which may carry nothing for hours: firewalls forget idle ones, and dead
ones must show.
"""
STATES = {code: state for state, code in _STATES.items()}
_MAX_MESSAGE = 4096


def stat(pid: int) -> tuple[str, int] | None:
    """Returns a process's state letter and start time (ticks since boot); None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def exists(pid: int) -> bool:
    """Returns whether a process exists, even if /proc hides it from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def process_state(pid: int, pid_start: int) -> str:
    """Returns the state of a process on this machine: "gone", "stopped" or "runs"; "" if it is hidden from this
    user.
    """
    found = stat(pid)
    if found is None:
        return "" if exists(pid) else "gone"
    if pid_start and found[1] != pid_start:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(found[0], "runs")


class _Neighbour:
    """Connection to another member's watcher, for questions and answers in both directions."""

    def __init__(self, peer: bytes, sock: socket.socket, key: bytes, dialled: bool) -> None:
        self.peer = peer
        self.sock = sock
        self._key = key
        self._mine, self._its = (b"d", b"a") if dialled else (b"a", b"d")
        self._asked = b""
        self._buffer = b""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def ask(self) -> None:
        self._asked = os.urandom(8)
        self._send(b"Q", self._asked, b"?")

    def _sum(self, who: bytes, kind: bytes, number: bytes, state: bytes) -> bytes:
        return blake2b(who + kind + number + state, key=self._key, digest_size=16).digest()

    def _send(self, kind: bytes, number: bytes, state: bytes) -> None:
        # A frame that the kernel does not take whole would leave half of one behind: then there is no answer at all.
        with contextlib.suppress(BlockingIOError):
            frame = _FRAME.pack(kind, number, state, self._sum(self._mine, kind, number, state))
            if self.sock.send(frame) != len(frame):
                raise ConnectionError("the neighbour's watcher does not read")

    def read(self, state: bytes) -> bytes:
        """Answers the other watcher's questions with `state`; returns its answer to this one's question, or b"".

        Raises:
            OSError: The connection is of no use any more.
        """
        data = self.sock.recv(_FRAME.size * 16)
        if not data:
            raise ConnectionError("closed")
        self._buffer += data
        answer = b""
        while len(self._buffer) >= _FRAME.size:
            kind, number, said, proof = _FRAME.unpack(self._buffer[: _FRAME.size])
            self._buffer = self._buffer[_FRAME.size :]
            if proof != self._sum(self._its, kind, number, said):
                raise ConnectionError("a frame that the neighbour's watcher did not write")
            if kind == b"Q":
                self._send(b"A", number, state)
            elif number == self._asked:
                answer = said
        return answer


class Watcher:
    """Process that watches one member, and answers other watchers' questions about it.

    Args:
        control: Socket to the member.
        pid: Process id of the member.
        pid_start: Start time of that process, so that a later process with this pid is not taken for it.
    """

    def __init__(self, control: socket.socket, pid: int, pid_start: int) -> None:
        self._control = control
        self._pid, self._pid_start = pid, pid_start
        self._neighbours: dict[bytes, _Neighbour] = {}
        self._by_fd: dict[int, _Neighbour] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._until = float("inf")
        """Time (monotonic) at which the watcher ends, once the member's end has set it."""

    def run(self) -> None:
        while time.monotonic() < self._until and (self._neighbours or self._until == float("inf")):
            for fd, _ in self._poll.poll(1000):
                if fd == self._control.fileno():
                    self._obey()
                elif fd in self._by_fd:
                    self._hear(self._by_fd[fd])

    def _obey(self) -> None:
        """Carries out one order from the watched member: A(dd), Q(uestion), D(rop) or E(nd)."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 1)
        except OSError:
            message, fds = b"", []
        order, rest = message[:1], message[1:]
        if order == b"A" and len(fds) == 1:
            dialled, key, peer = rest[:1] == b"d", rest[1 : 1 + KEY_NBYTES], rest[1 + KEY_NBYTES :]
            self._drop(peer)
            neighbour = _Neighbour(peer, socket.socket(fileno=fds[0]), key, dialled)
            self._neighbours[peer] = self._by_fd[neighbour.sock.fileno()] = neighbour
            self._poll.register(neighbour.sock, select.POLLIN)
        elif order == b"Q" and rest in self._neighbours:
            try:
                self._neighbours[rest].ask()
            except OSError:
                self._lose(rest)
        elif order == b"D":
            self._drop(rest)
        elif order in (b"", b"E"):
            self._poll.unregister(self._control)
            self._control.close()
            self._until = time.monotonic() + (LINGER_S if not order else 0.0)

    def _hear(self, neighbour: _Neighbour) -> None:
        try:
            answer = neighbour.read(_STATES[process_state(self._pid, self._pid_start)])
        except BlockingIOError:
            return
        except OSError:
            self._lose(neighbour.peer)
            return
        if answer:
            self._tell(answer, neighbour.peer)

    def _tell(self, what: bytes, peer: bytes) -> None:
        if self._until == float("inf"):
            with contextlib.suppress(OSError):  # a member that does not read has no use for it
                self._control.send(what + peer, socket.MSG_DONTWAIT)

    def _lose(self, peer: bytes) -> None:
        self._drop(peer)
        self._tell(LOST, peer)

    def _drop(self, peer: bytes) -> None:
        neighbour = self._neighbours.pop(peer, None)
        if neighbour is not None:
            self._poll.unregister(neighbour.sock)
            del self._by_fd[neighbour.sock.fileno()]
            neighbour.sock.close()


def main(fd: int, pid: int, pid_start: int) -> None:
    """Runs the watcher of a process; `fd` connects it with the member."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Watcher(socket.socket(fileno=fd), pid, pid_start).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
