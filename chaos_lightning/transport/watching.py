"""Asks watcher processes on other machines (machine/watcher.py) whether this member's neighbours there are alive.

Theory of operation. The own watcher is started with the first neighbour on another machine; on one machine the process
table is at hand. Whoever greets hands the neighbour's connection over (`add`) and keeps none. When a link falls
silent its neighbour is asked about (`ask`); the answer counts for `FRESH_S`. Where there is no watcher - it cannot be
started, it was killed, its connection broke - there is no answer, and silence is all there is (protocol.md 12). Who
greeted is told of a broken connection, so that it makes another.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from chaos_lightning.machine import watcher
from chaos_lightning.machine.forks import close_in_children
from chaos_lightning.machine.process_table import SIGHTS, Sight, start_time
from chaos_lightning.transport.loop import IoLoop

FRESH_S = 0.5
END_S = 1.0
"""Seconds in which a watcher that was told to end must end."""
_TOLD = {state: s._replace(evidence=f"its machine says that {s.evidence}") for state, s in SIGHTS.items() if state}
"""Sights of a process, as a neighbour's watcher told them."""


class Watching:
    """Connection to this member's own watcher, which asks those of neighbours. `add` may be called by any thread, all
    else by the loop's.

    Args:
        loop: Loop that reads what the watcher tells.
        failed: Function that is told why there is no watcher.
        broken: Function that is told, by the loop, to whose watcher there is no connection any more.
    """

    def __init__(self, loop: IoLoop, failed: Callable[[str], None], broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._failed = failed
        self._broken = broken
        self._handed: set[str] = set()
        """Neighbours whose connections the own watcher has, as far as is known."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        """Whether no watcher is to be started (any more)."""
        self._said: dict[str, tuple[str, float]] = {}
        """State of each neighbour, and when (monotonic, s) it was told."""

    def add(self, peer: str, sock: socket.socket, key: bytes, *, dialled: bool) -> None:
        """Hands a connection to a neighbour's watcher over to this member's own watcher; `sock` is closed here.

        Args:
            peer: The neighbour.
            sock: Authenticated, with nothing sent on it since.
            key: Known to both ends of this connection alone; b"" where links have no keys.
            dialled: Whether this end dialled.
        """
        order = b"A" + (b"d" if dialled else b"a") + key.ljust(watcher.KEY_NBYTES, b"\0") + peer.encode()
        with sock, self._lock:
            control = self._started()
            if control is not None:
                self._handed.add(peer)
                with contextlib.suppress(OSError):
                    socket.send_fds(control, [order], [sock.fileno()])

    def _started(self) -> socket.socket | None:
        if self._control is not None or self._over:
            return self._control
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.getpid()
        command = [sys.executable, "-I", "-S", watcher.__file__, str(its.fileno()), str(pid), str(start_time(pid))]
        nothing = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[its.fileno()],
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                start_new_session=True,
            )
        except OSError as error:
            self._over = True
            mine.close()
            self._failed(f"no watcher: {error}; other machines cannot tell this process from a stopped one")
            return None
        finally:
            its.close()
        close_in_children(mine.fileno())
        mine.setblocking(False)
        self._control = mine

        def register() -> None:
            if mine.fileno() >= 0:  # else closed since
                self._loop.register(mine.fileno(), select.EPOLLIN, lambda _: self._hear(mine))

        self._loop.call(register)
        return mine

    def _hear(self, control: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while control.fileno() >= 0:
                try:
                    message = control.recv(4096)
                except BlockingIOError:
                    raise
                except OSError:
                    message = b""
                if not message:
                    self._lost(control)
                    return
                peer = message[1:].decode(errors="replace")
                if message[:1] == watcher.LOST:
                    self._handed.discard(peer)
                    self._broken(peer)
                else:
                    self._said[peer] = (watcher.STATES.get(message[:1], ""), time.monotonic())

    def _lost(self, control: socket.socket) -> None:
        """Forgets the own watcher process, which has ended; the next connection starts another one."""
        self._loop.unregister(control.fileno())
        with self._lock:
            control.close()
            self._control = None
            if self._process is not None:
                self._process.poll()
            handed, self._handed = self._handed, set()
        for peer in handed:
            self._broken(peer)

    def _order(self, order: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(order)

    def ask(self, peer: str) -> None:
        """Asks a neighbour's watcher about the neighbour; the answer, if any, comes soon and is read by `sight`."""
        self._order(b"Q" + peer.encode())

    def drop(self, peer: str) -> None:
        """Forgets a neighbour that is not one any more."""
        self._said.pop(peer, None)
        self._handed.discard(peer)
        self._order(b"D" + peer.encode())

    def sight(self, peer: str) -> Sight:
        """Returns the latest report of a neighbour's watcher about the neighbour; an empty one if it is too old."""
        state, at = self._said.get(peer, ("", 0.0))
        if not state or time.monotonic() - at > FRESH_S:
            return Sight(False, "")
        return _TOLD[state]

    def close(self) -> None:
        """Ends this member's own watcher process."""
        with self._lock:
            self._over, control, self._control = True, self._control, None
        if control is None:
            return
        self._loop.unregister(control.fileno())
        with contextlib.suppress(OSError):
            control.send(b"E")
        control.close()
        assert self._process is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
