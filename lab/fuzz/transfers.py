"""Fuzzes bulk connections (state transfers): a hostile peer asks a donor, or answers a joiner.

Theory of operation. An input's first byte says which end is hostile (1: the donor), whether the connection is sealed
by a key that the hostile end knows, too (2), and whether the joiner has replayed (4); frames follow, with checksums
made good again where something was changed. After each one an honest joiner asks the same donor, which must still
answer; and a joiner that says it has the state must have the very bytes that it names.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from chaos_lightning.errors import ChaosError, RefusedError, WireError
from chaos_lightning.replication import bulk
from chaos_lightning.replication.bulk import BulkFrame, BulkSocket, Type
from chaos_lightning.transport.sealing import Level, ProtectedSocket
from lab.fuzz import mutate
from lab.fuzz.links import a_session
from lab.fuzz.messages import field_of
from lab.fuzz.target import LARGE_NBYTES, PATIENCE_S, FindingError, Target

HEAD = "00112233445566aa"
SEQ = 7
DONOR_HOSTILE, SEALED, REPLAYED = 1, 2, 4
_REDUCED_NBYTES = 4096
_ATTACHED_NBYTES = 1 << 20


class _State:
    """Small state to transfer, with the interface of `StateAccess`."""

    def __init__(self, value: float) -> None:
        import torch

        self.named = [("w", torch.full((40, 30), value)), ("b", torch.arange(7.0) + value)]
        self.values: dict[str, Any] = {"step": 3, "b": self.named[1][1], "moment": torch.full((5,), value)}

    def tensors(self) -> list[tuple[str, Any]]:
        return self.named

    def manifest(self) -> dict[str, object]:
        return self.values

    def prepare(self, manifest: Mapping[str, Any], table: Any) -> None:
        """Does nothing, since the state's tensors exist already."""

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        self.values = dict(manifest)


class _Donor:
    """Donor that can answer every request: it has a state, a reduced result, and a neighbour to forward to."""

    def __init__(self) -> None:
        import torch

        from chaos_lightning.replication.forward import Forwarder
        from chaos_lightning.replication.server import StateServer, StateServerConfig

        state = _State(1.0)
        waits = StateServerConfig(
            publish_timeout_s=0.005, stall_timeout_s=PATIENCE_S, idle_timeout_s=PATIENCE_S, pending_interval_s=0.002
        )
        self.server, self.neighbour = StateServer(waits), StateServer(waits)
        for server in (self.server, self.neighbour):
            server.publish(HEAD, SEQ, state.tensors(), state.manifest())
            server.publish_result(SEQ, HEAD, torch.zeros(_REDUCED_NBYTES, dtype=torch.uint8), [(0, 3000)])
        self.server.forwarder = Forwarder("donor", self._dial, PATIENCE_S, PATIENCE_S)

    def _dial(self, member: str) -> socket.socket:
        if member != "b~2":
            raise RefusedError(f"{member} is no neighbour")
        near, far = socket.socketpair()
        threading.Thread(target=self.neighbour.serve, args=(far, "donor"), daemon=True).start()
        return near

    def check(self) -> None:
        """Checks that the donor still answers an honest joiner."""
        near, far = socket.socketpair()
        served = threading.Thread(target=self.server.serve, args=(far, "well"), daemon=True)
        served.start()
        with near:
            channel = BulkSocket(near, stall_timeout_s=PATIENCE_S)
            channel.send(BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 64))
            try:
                answer = channel.receive_header()
            except OSError as error:
                raise FindingError(f"a donor does not answer an honest joiner any more: {error}") from error
            if answer is None or answer.type is not Type.DATA:
                raise FindingError(f"a donor does not answer an honest joiner any more, but says {answer}")
            channel.receive_into([memoryview(bytearray(answer.length))])
        served.join(PATIENCE_S)
        if served.is_alive():
            raise FindingError("a donor goes on serving a connection that its peer has closed")


@functools.cache
def _donor() -> _Donor:
    return _Donor()


@contextlib.contextmanager
def _hostile(said: bytes, *, sealed: bool) -> Iterator[Callable[[], socket.socket]]:
    """Yields a function that makes connections whose other end sends `said`, falls silent and reads on."""
    speakers: list[threading.Thread] = []
    kept_open: list[BaseException] = []

    def speak(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            sock.settimeout(PATIENCE_S)
            stream = a_session(Level.ENCRYPTED, dialled=True).stream
            try:
                for parts in stream.records([memoryview(said)]) if sealed else [[memoryview(said)]]:
                    sock.sendall(b"".join(parts))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except TimeoutError as error:
                kept_open.append(error)

    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        speakers.append(threading.Thread(target=speak, args=(theirs,), daemon=True))
        speakers[-1].start()
        return ProtectedSocket.around(ours, a_session(Level.ENCRYPTED, dialled=False) if sealed else None)

    yield connect
    for speaker in speakers:
        speaker.join(2 * PATIENCE_S)
        if kept_open or speaker.is_alive():
            raise FindingError("a bulk connection whose other end says no more is still open")


def _feed_bulk(data: bytes) -> None:
    """Plays the input as the hostile end of a bulk connection."""
    exchanged(data)


def exchanged(data: bytes) -> str:
    """Plays the input as the hostile end of a bulk connection; returns "pulled", or why the pull or the donor's
    connection ended.
    """
    mode, said = data[0] if data else 0, data[1:]
    with _hostile(said, sealed=bool(mode & SEALED)) as connect:
        if mode & DONOR_HOSTILE:
            outcome = _pull(connect, replayed=bool(mode & REPLAYED))
        else:
            outcome = _donor().server.serve(connect(), "x")
    _donor().check()
    return outcome


def _pull(connect: Callable[[], socket.socket], *, replayed: bool) -> str:
    from chaos_lightning.replication.client import PullConfig
    from chaos_lightning.replication.pull import pull_state
    from chaos_lightning.replication.source import Endpoint
    from chaos_lightning.replication.table import state_hash

    waits = PullConfig(
        deadline_s=PATIENCE_S,
        stall_timeout_s=PATIENCE_S,
        survey_grace_s=0.05,
        redial_s=0.05,
        request_nbytes=1024,
        max_attached_nbytes=_ATTACHED_NBYTES,
    )
    donor = Endpoint("x~1", "127.0.0.1", 1)
    mine = _State(0.0)
    try:
        report = pull_state(
            [donor], lambda _: connect(), head=HEAD, seq=SEQ, state=mine, config=waits, replayed=replayed
        )
    except ChaosError as error:
        return str(error)
    if state_hash(mine.tensors()) != report.state_hash:
        raise FindingError(f"a pull says that the state {report.state_hash} is here, and it is another one")
    return "pulled"


# ------------------------------------------------------------------ inputs


def _split(data: bytes) -> list[tuple[BulkFrame, bytes]]:
    """Returns the frames at the beginning of the data, with their payloads."""
    found: list[tuple[BulkFrame, bytes]] = []
    at = 0
    while len(data) - at >= bulk.HEADER_NBYTES and len(found) < mutate.MAX_ITEMS:
        try:
            frame = bulk.decode(data[at : at + bulk.HEADER_NBYTES])
        except WireError:
            break
        at += bulk.HEADER_NBYTES
        nbytes = frame.length if frame.type >= bulk.FIRST_REPLY or frame.type is Type.ROUTE else 0
        found.append((frame, data[at : at + nbytes]))
        at += nbytes
    return found


def _joined(frames: list[tuple[BulkFrame, bytes]]) -> bytes:
    """Returns frames and payloads as bytes, with correct checksums."""
    said = []
    for frame, payload in frames:
        checksum = bulk.checksum_of([payload]) if payload and not frame.flags else frame.checksum
        said += [replace(frame, checksum=checksum).encode(), payload]
    return b"".join(said)


@functools.cache
def bulk_seeds() -> list[bytes]:
    """Returns requests of every type, a routed request, and a donor's answers to a whole pull."""
    asked = [BulkFrame(kind, HEAD, SEQ, 0, 512 if kind in bulk.RANGES else 0) for kind in Type if kind < Type.ROUTE]
    way = (BulkFrame(Type.ROUTE, HEAD, SEQ, 0, 7), b'["b~2"]')
    seeds = [_joined([(frame, b"")]) for frame in asked]
    seeds += [_joined([(frame, b"") for frame in asked]), _joined([way, *((frame, b"") for frame in asked[:6])])]
    requests = [bytes([flags]) + said for said in seeds for flags in (0, SEALED)]
    answers = [bytes([DONOR_HOSTILE | flags]) + _answers() for flags in (0, SEALED, REPLAYED, REPLAYED | SEALED)]
    return [*requests, *answers, *answers]


def _answers() -> bytes:
    """Returns the bytes that an honest donor sends when the whole state is pulled."""
    heard = bytearray()
    finished: list[threading.Thread] = []

    def connect() -> socket.socket:
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        finished.append(threading.Thread(target=_donor().server.serve, args=(theirs, "seed"), daemon=True))

        def pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
            with contextlib.suppress(OSError):
                while piece := source.recv(1 << 16):
                    if kept is not None:
                        kept += piece
                    sink.sendall(piece)
                sink.shutdown(socket.SHUT_WR)

        finished.append(threading.Thread(target=pump, args=(near, far, None), daemon=True))
        finished.append(threading.Thread(target=pump, args=(far, near, heard), daemon=True))
        ends.extend((near, far))
        for thread in finished[-3:]:
            thread.start()
        return ours

    ends: list[socket.socket] = []
    _pull(connect, replayed=False)
    for thread in finished:
        thread.join(PATIENCE_S)
    for end in ends:
        end.close()
    return bytes(heard)


_LENGTHS = (0, 1, 1 << 14, 1 << 20, bulk.MAX_RANGE_NBYTES, bulk.MAX_CONTROL_NBYTES, 1 << 40)
_HEADS = (HEAD, "0" * 16, "f" * 16)


def _mutate_bulk(data: bytes, rng: Random) -> bytes:
    """Returns a changed, nearly valid input."""
    mode, said = data[:1] or b"\0", data[1:]
    frames = _split(said)
    if not frames or rng.randint(0, 9) == 0:
        return mode + mutate.bytes_of(said, rng)
    if rng.randint(0, 15) == 0:
        return bytes([rng.randint(0, 7)]) + said
    at = rng.randint(0, len(frames) - 1)
    frame, payload = frames[at]
    what = rng.randint(0, 8)
    if what < 5:
        frame = field_of(frame, rng, length=(*_LENGTHS, len(payload) + 1), head=_HEADS)
    elif what < 7:
        text = what == 5 and payload[:1] in (b"{", b"[")
        payload = mutate.json_of(payload, rng) if text else mutate.bytes_of(payload, rng)
        frame = replace(frame, length=len(payload)) if text or rng.randint(0, 1) else frame
    elif what == 7:
        return mode + _joined([*frames[:at], (frame, payload), *frames[at:]])
    else:
        return mode + _joined([*frames[:at], *frames[at + 1 :]])
    with contextlib.suppress(struct.error):
        return mode + _joined([*frames[:at], (frame, payload), *frames[at + 1 :]])
    return data


TRANSFERS = (
    Target("bulk", "bulk frames, by a donor and by a joiner", bulk_seeds, _feed_bulk, _mutate_bulk, LARGE_NBYTES),
)
