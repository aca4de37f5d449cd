"""Measures the microseconds that one frame costs at each end of a link, and how much of it is the tag, the checksum or
the cipher.

Theory of operation. Both ends are in this process and take turns in one thread: one sends a frame into the kernel's
buffers, the other takes it out. Each turn is timed by itself, and the least of many counts, so what else the machine
does hardly shows. The frames of all kinds of link are interleaved. An end of a plain link makes the kernel copy, and
handles the frame; what another kind takes longer is its protection. The library's part of that is measured on the same
bytes, warm in the cache; the rest are calls, Python, and bytes that had left the cache between two passes over them.

A saturated link carries a frame in the time of its slower end, and not less than the kernel needs to pass it from one
core to the other. So with a core for each end, `best_ratio` bounds what an authenticated link can do.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.common import Result
from benchmarks.links_secure.ends import LINKS
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.frames import Frame, FrameType, payload_checksum
from chaos_lightning.transport.handshake import tune
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.sealing import TAG_NBYTES, Level, ProtectedSocket, SealedSession, segment_nbytes

FRAME_NBYTES = 1 << 20
BOUND_SLOWER = 1 / 0.7
"""Authenticated links carry at least 0.7 of what plain ones do, with frames of 1 MiB: at most so much more time."""
_ROUNDS = 40
_FRAMES = 10
"""Frames of each kind in each round."""


class _Turns:
    """Stand-in for the event loop that calls a link's handler only when the benchmark says so."""

    def __init__(self) -> None:
        self.handler: Callable[[int], None] = lambda _: None
        self.wants = 0

    def register(self, _fd: int, events: int, handler: Callable[[int], None]) -> None:
        self.wants, self.handler = events, handler

    def modify(self, _fd: int, events: int) -> None:
        self.wants = events

    def unregister(self, _fd: int) -> None:
        self.wants = 0


class _End:
    """One end of a link, and the frames that it has received."""

    def __init__(self, sock: socket.socket) -> None:
        self.into = memoryview(bytearray(FRAME_NBYTES))
        self.frames = 0
        self.turns = _Turns()
        self.link = Link(cast(IoLoop, self.turns), sock, "other", self)

    def target(self, _peer: str, frame: Frame) -> memoryview:
        return self.into[: frame.length]

    def arrived(self, _peer: str, _frame: Frame, _payload: Any) -> None:
        self.frames += 1

    def broken(self, _peer: str, _link: Link, evidence: str) -> None:
        raise RuntimeError(f"the link broke: {evidence}")


def _ends(kind: str) -> tuple[_End, _End]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socks = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for sock in socks:
        tune(sock)
    if kind not in ("plain", "checksum"):
        said = os.urandom(16)
        socks = [
            ProtectedSocket.around(sock, SealedSession(Level(kind), b"benchmark", said, dialled=dialled))
            for sock, dialled in zip(socks, (True, False), strict=True)
        ]
    one, other = (_End(sock) for sock in socks)
    one.link.sums = other.link.sums = kind == "checksum"
    return one, other


def _frame(one: _End, other: _End, payload: memoryview) -> tuple[float, float]:
    """Sends one frame over a link; returns the seconds that the sender and the receiver need for it."""
    wanted, taking = other.frames + 1, 0.0
    began = time.perf_counter()
    one.link.send(FrameType.DOWN, ViewId(1, 1), 1, 0, (payload,))
    sending = time.perf_counter() - began
    while other.frames < wanted:
        began = time.perf_counter()
        other.turns.handler(select.EPOLLIN)
        taking += time.perf_counter() - began
        if one.turns.wants & select.EPOLLOUT:
            began = time.perf_counter()
            one.turns.handler(select.EPOLLOUT)
            sending += time.perf_counter() - began
    return sending, taking


def frame_costs() -> dict[str, tuple[float, float]]:
    """Returns by kind of link the least microseconds that the sender and the receiver of a frame of
    FRAME_NBYTES need.
    """
    payload = memoryview(bytearray(os.urandom(FRAME_NBYTES)))
    pairs = {kind: _ends(kind) for kind in LINKS}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in LINKS}
    try:
        for _ in range(_ROUNDS):
            for kind, (one, other) in pairs.items():
                taken[kind] += [_frame(one, other, payload) for _ in range(_FRAMES)]
    finally:
        for ends in pairs.values():
            for end in ends:
                end.link.close()
    return {kind: (1e6 * min(s for s, _ in both), 1e6 * min(t for _, t in both)) for kind, both in taken.items()}


def library_costs() -> dict[str, float]:
    """Returns the least microseconds in which one core computes the checksum, the tag or the ciphertext of FRAME_NBYTES
    in its cache.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    aead, nonce = AESGCM(bytes(32)), bytes(12)
    payload = memoryview(bytearray(os.urandom(FRAME_NBYTES)))
    out = memoryview(bytearray(segment_nbytes(Level.ENCRYPTED) + TAG_NBYTES))

    def records(level: Level) -> list[memoryview]:
        step = segment_nbytes(level)
        return [payload[at : at + step] for at in range(0, FRAME_NBYTES, step)]

    clear, secret = records(Level.AUTHENTICATED), records(Level.ENCRYPTED)

    def tag() -> None:
        for part in clear:
            aead.encrypt(nonce, b"", part)

    def encrypt() -> None:
        for part in secret:
            aead.encrypt_into(nonce, part, None, out[: part.nbytes + TAG_NBYTES])

    works: dict[str, Callable[[], object]] = {
        "checksum": lambda: payload_checksum((payload,)),
        "authenticated": tag,
        "encrypted": encrypt,
    }
    least = dict.fromkeys(works, float("inf"))
    for _ in range(_ROUNDS * _FRAMES):
        for kind, work in works.items():
            began = time.perf_counter()
            work()
            least[kind] = min(least[kind], time.perf_counter() - began)
    return {kind: 1e6 * seconds for kind, seconds in least.items()}


def best_ratio(plain_us: float, tag_us: float) -> float:
    """Returns the share of a plain link's throughput that is left if each end also computes a tag of each frame, and
    nothing else.

    Args:
        plain_us: Microseconds in which a saturated plain link carries a frame; both ends' cores are busy all the time.
        tag_us: Microseconds in which a core computes the frame's tag.
    """
    return plain_us / (plain_us + tag_us)


def costs(result: Result, plain_us: float, ratio: float) -> None:
    """Adds figures of the costs of protection for one frame at each end, and explains their ratio in words."""
    of, library = frame_costs(), library_costs()
    case = f"a frame of {FRAME_NBYTES >> 10} KiB"
    plain = of["plain"]
    for kind in LINKS:
        for end, us in zip(("sender", "receiver"), of[kind], strict=True):
            result.add(f"{kind}, {end}'s part of {case}", us, "us")
    for kind, us in library.items():
        result.add(f"{kind}, the library's part of it at either end", us, "us")
        for end, both, without in zip(("sender", "receiver"), of[kind], plain, strict=True):
            result.add(f"{kind}, calls, Python and cold bytes at the {end}", both - without - us, "us")
    tag = library["authenticated"]
    best = best_ratio(plain_us, tag)
    result.add("throughput of authenticated / plain, if each end only made the tag besides", best, "ratio")
    sending, taking = (both - without for both, without in zip(of["authenticated"], plain, strict=True))
    reason = (
        f"authenticated / plain is {ratio:.2f} with frames of {FRAME_NBYTES >> 10} KiB: plain links, which keep a core "
        f"busy at either end, carry one in {plain_us:.0f} us; authentication adds {sending:.0f} us at the sender and "
        f"{taking:.0f} us at the receiver, of which the tag alone takes one core {tag:.0f} us. If each end only made "
        f"the tag besides, the ratio would be {best:.2f}"
    )
    if best < 1 / BOUND_SLOWER:
        reason += f", which is below {1 / BOUND_SLOWER:.2f}: no code around the tag reaches the bound on this machine"
    result.remark(reason)
