"""Two processes of a measured connection: one sends frames, the other receives them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LINKS = ("plain", "checksum", "authenticated", "encrypted")
"""Frames of this engine's links: chunks without a checksum, as within a machine, and the three levels."""
SOCKETS = ("socket", "ssl")
"""Blocking sockets as they are, and under Python's ssl."""
WINDOW_NBYTES = 16 << 20
"""So much is on its way, or queued, at most."""
WARM_UP_NBYTES = 16 << 20
"""So much passes each connection before it is measured: libraries are loaded, buffers touched, TCP's windows open."""
TIMEOUT_S = 120.0
Case = tuple[str, int, int]
"""Mode, bytes per frame, frames."""


class _Meter:
    """Meter of the seconds and of this process's CPU seconds between two moments."""

    def __init__(self) -> None:
        self._since = (0.0, 0.0)
        self.measured = (0.0, 0.0)

    def start(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.measured = time.perf_counter() - self._since[0], time.process_time() - self._since[1]


def _warm_up(nbytes: int, every: int) -> int:
    """Returns the number of frames to send before measuring; a multiple of `every`."""
    return -(-WARM_UP_NBYTES // (nbytes * every)) * every


class _Owner:
    """Owner of a link that receives all frames into one buffer, and signals when a given number has arrived."""

    def __init__(self, nbytes: int) -> None:
        self.into = memoryview(bytearray(nbytes))
        self.count = 0
        self.on_frame: Any = lambda: None
        self.failed = ""
        self.over = threading.Event()
        """All that was waited for is here."""
        self.closed = threading.Event()

    def target(self, _peer: str, frame: Any) -> memoryview:
        return self.into[: frame.length]

    def arrived(self, _peer: str, _frame: Any, _payload: Any) -> None:
        self.count += 1
        self.on_frame()

    def broken(self, _peer: str, _link: Any, evidence: str) -> None:
        if not self.over.is_set():
            self.failed = evidence
        self.over.set()
        self.closed.set()


def _window(nbytes: int, frames: int) -> tuple[int, int]:
    """Returns how many frames may be unacknowledged, and after how many frames the receiver acknowledges."""
    window = max(4, WINDOW_NBYTES // nbytes)
    return min(window, frames), max(1, min(window, frames) // 4)


class _Course:
    """Work of one end of a link in its loop's thread: sends frames one after the other, or acknowledges received ones
    in groups.
    """

    def __init__(self, owner: _Owner, loop: Any, sock: socket.socket, case: Case, *, sends: bool) -> None:
        from chaos_lightning.protocol.types import ViewId
        from chaos_lightning.transport.frames import FrameType

        mode, nbytes, frames = case
        self.owner, self.meter = owner, _Meter()
        self.link: Any = None
        self._types, self._view = FrameType, ViewId(1, 1)
        self._made, self._sends = (loop, sock, "other", owner), sends
        self._sums, self._nbytes, self._payload = mode == "checksum", nbytes, memoryview(bytearray(nbytes))
        self._window, self._every = _window(nbytes, frames)
        self._warm_up = _warm_up(nbytes, self._every)
        self._frames = frames // self._every * self._every + self._warm_up
        self._sent = 0

    def begin(self) -> None:
        from chaos_lightning.transport.link import Link

        self.link = Link(*self._made)
        self.link.sums = self._sums
        self.owner.on_frame = self._more if self._sends else self._taken
        for _ in range(self._window if self._sends else 0):
            self._push()

    def _push(self) -> None:
        if self._sent < self._frames:
            self.link.send(self._types.DOWN, self._view, 1, self._sent * self._nbytes, (self._payload,))
            self._sent += 1

    def _more(self) -> None:
        if self.owner.count == self._warm_up // self._every:
            self.meter.start()
        if self.owner.count == self._frames // self._every:
            self._end()
        for _ in range(self._every):
            self._push()

    def _taken(self) -> None:
        if self.owner.count == self._warm_up:
            self.meter.start()
        if self.owner.count % self._every == 0:
            self.link.send(self._types.MESSAGE, payload=(memoryview(b"here"),))
        if self.owner.count == self._frames:
            self._end()

    def _end(self) -> None:
        self.meter.stop()
        self.owner.over.set()


def _over_link(sock: socket.socket, case: Case, *, sends: bool) -> tuple[float, float]:
    from chaos_lightning.transport.handshake import tune
    from chaos_lightning.transport.loop import IoLoop
    from chaos_lightning.transport.sealing import Level, ProtectedSocket, SealedSession

    mode, nbytes, _ = case
    tune(sock)
    if mode not in ("plain", "checksum"):
        said = str(case).encode() + bytes(16)  # each case is run once per connection and round
        sock = ProtectedSocket.around(sock, SealedSession(Level(mode), b"benchmark", said, dialled=sends))
    owner = _Owner(nbytes if not sends else 64)
    loop = IoLoop("benchmark", lambda error: owner.broken("", None, repr(error)))
    loop.start()
    course = _Course(owner, loop, sock, case, sends=sends)
    loop.call(course.begin)
    if not owner.over.wait(TIMEOUT_S) or owner.failed:
        raise RuntimeError(f"{case}: {owner.failed or 'nothing came any more'}")
    if not sends:  # the sender has what it waits for, and ends the connection
        owner.closed.wait(TIMEOUT_S)
    loop.call_and_wait(course.link.close, 5)
    loop.stop()
    return course.meter.measured


def _over_socket(sock: socket.socket, case: Case, certificate: str, *, sends: bool) -> tuple[float, float]:
    from chaos_lightning.transport.handshake import tune

    mode, nbytes, frames = case
    tune(sock)
    if mode == "ssl":
        if sends:
            context = ssl.create_default_context(cafile=certificate)
            sock = context.wrap_socket(sock, server_hostname="localhost")
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            sock = context.wrap_socket(sock, server_side=True)
    data = memoryview(bytearray(nbytes))
    warm_up, meter = _warm_up(nbytes, 1), _Meter()
    with sock:
        if sends:
            for number in range(warm_up + frames):
                if number == warm_up:
                    meter.start()
                sock.sendall(data)
            sock.recv_into(data, 1)
            meter.stop()
            return meter.measured
        for number in range(warm_up + frames):
            if number == warm_up:
                meter.start()
            got = 0
            while got < nbytes:
                count = sock.recv_into(data[got:])
                if not count:
                    raise RuntimeError(f"{case}: the stream ended")
                got += count
        meter.stop()
        sock.sendall(b"\n")
        with contextlib.suppress(OSError):
            sock.recv(1)
    return meter.measured


def carry(pipe: Connection, port: int, cases: list[Case], certificate: str) -> None:
    """Runs one end of all connections, and sends (seconds, CPU seconds) for each; port 0 means the receiver, which
    sends its own port.
    """
    with ExitStack() as stack:
        listener = None
        if not port:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(TIMEOUT_S)
            pipe.send(listener.getsockname()[1])
        results = []
        for case in cases:
            if listener is not None:
                sock = listener.accept()[0]
            else:
                sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
            sock.settimeout(None)
            if case[0] in LINKS:
                results.append(_over_link(sock, case, sends=listener is None))
            else:
                results.append(_over_socket(sock, case, certificate, sends=listener is None))
    pipe.send(results)


def make_certificate(folder: Path) -> str:
    """Writes a file with a key, its certificate for localhost and the authority that signed it; returns the file's
    path.
    """
    from chaos_lightning.security.certificates import certify, new_authority
    from chaos_lightning.security.roles import MEMBER

    authority = new_authority("benchmark")
    certificate, key = certify(authority, "benchmark", "localhost", MEMBER, ["localhost"])
    path = folder / "localhost.pem"
    path.write_text(key + certificate + authority[0])
    path.chmod(0o600)
    return str(path)


def sums_everywhere(contenders: dict[str, Any]) -> None:
    """Turns checksums on for a member's links, which at the level "checksum" send chunks without them within one
    machine.
    """
    for link in contenders["checksum"].engine._links._links.values():
        link.sums = True
