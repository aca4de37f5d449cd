"""Tests frames on a bulk socket: malformed ones are refused before memory is allocated, and no wait is endless."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replication_support import HEAD, LIMIT_S, SEQ, Acceptor, dial, numbered, publishing

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication import PullConfig, StateServer, StateServerConfig, pull_state, state_hash
from chaos_lightning.replication.bulk import _LIMITS as LIMITS
from chaos_lightning.replication.bulk import (
    HEADER_NBYTES,
    MAX_CONTROL_NBYTES,
    MAX_RANGE_NBYTES,
    UNSUMMED,
    BulkFrame,
    BulkSocket,
    Type,
    decode,
    reply,
)

CONTROL = [Type.DIGEST, Type.TABLE, Type.MANIFEST]
FRAMES = st.builds(
    BulkFrame,
    type=st.sampled_from(Type),
    head=st.binary(min_size=8, max_size=8).map(bytes.hex),
    seq=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**40),
    length=st.just(0) | st.integers(0, 100),
    flags=st.just(0),
    checksum=st.integers(0, 2**64 - 1),
).filter(lambda frame: frame.length <= LIMITS[frame.type])


def forge(
    *, magic: bytes = b"CLRB", version: int = 1, kind: int = 20, flags: int = 0, length: int = 0, offset: int = 0
):  # type: ignore[no-untyped-def]
    """Returns a frame header with a right checksum, and other fields as given, right or wrong."""
    fields = struct.pack("!4sBBHQ8sQQQ", magic, version, kind, flags, 0, b"12345678", offset, length, 0)
    return fields + xxhash.xxh3_64_digest(fields)


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@settings(deadline=None)
@given(FRAMES)
def test_a_header_comes_back(frame: BulkFrame) -> None:
    assert decode(frame.encode()) == frame


@settings(deadline=None)
@given(FRAMES, st.integers(0, HEADER_NBYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_in_a_header_is_noticed(frame: BulkFrame, at: int, bit: int) -> None:
    data = bytearray(frame.encode())
    data[at] ^= 1 << bit
    with pytest.raises(WireError):
        decode(data)


@settings(deadline=None)
@given(st.binary(max_size=2 * HEADER_NBYTES) | st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (forge(magic=b"HTTP"), "no bulk frame"),
        (forge(version=2), "version 2"),
        (forge(kind=99), "unknown type 99"),
        (forge(flags=2), "unknown flags 0x2"),
        (forge(kind=17, flags=UNSUMMED), "DIGEST with unknown flags"),
        (forge(length=MAX_RANGE_NBYTES + 1), "DATA of 67108865 bytes, the limit is 67108864"),
        (forge(kind=18, length=MAX_CONTROL_NBYTES + 1), "TABLE of"),
        (forge(kind=1, length=1), "GET_DIGEST of 1 bytes, the limit is 0"),
        (forge(length=1, offset=2**63), "reaches byte"),
        (b"", "has 56 bytes, got 0"),
    ],
)
def test_limits_are_checked_before_anything_is_allocated(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(data)


@pytest.mark.parametrize("head", ["", "xyz", "0123456789abcde", "0123456789ABCDEF", "g" * 16])
def test_a_head_is_a_headers_hash(head: str) -> None:
    with pytest.raises(ValueError, match="hex"):
        BulkFrame(Type.DATA, head, 0).encode()


def test_memory_grows_with_what_arrives_and_not_with_what_is_claimed() -> None:
    with pair() as (near, far):
        far.sendall(BulkFrame(Type.TABLE, HEAD, SEQ, 0, MAX_CONTROL_NBYTES).encode() + b"x" * 100)
        far.close()
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        frame = channel.receive_header()
        assert frame is not None
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionError, match="within a payload"):
                channel.receive_payload(frame)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_a_damaged_payload_is_noticed() -> None:
    with pair() as (near, far):
        frame, payload = reply(Type.DIGEST, HEAD, SEQ, b"hello")
        far.sendall(frame.encode() + b"hellp")
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        received = channel.receive_header()
        assert received == frame
        assert payload == (b"hello",)
        with pytest.raises(WireError, match="DIGEST arrived corrupted"):
            channel.receive_payload(received)


def test_a_stream_that_ends_within_a_header() -> None:
    with pair() as (near, far):
        far.sendall(forge()[:10])
        far.close()
        with pytest.raises(WireError, match="after 10 of 56 bytes"):
            BulkSocket(near, stall_timeout_s=LIMIT_S).receive_header()


def test_silence_and_deadline_end_a_wait() -> None:
    with pair() as (near, _):
        with pytest.raises(TimeoutError):
            BulkSocket(near, stall_timeout_s=0.01).receive_header()
        with pytest.raises(TimeoutError, match="deadline"):
            BulkSocket(near, stall_timeout_s=LIMIT_S, deadline=0.0).receive_header()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=40))
def test_many_buffers_at_once(sizes: list[int]) -> None:
    whole = bytes(range(256)) * (sum(sizes) // 256 + 1)
    parts, targets, at = [], [], 0
    for size in sizes:
        parts.append(memoryview(whole)[at : at + size])
        targets.append(bytearray(size))
        at += size
    with pair() as (near, far):
        frame = BulkFrame(Type.DATA, HEAD, SEQ, 0, at)
        sender = threading.Thread(target=lambda: BulkSocket(far, stall_timeout_s=LIMIT_S).send(frame, parts))
        sender.start()
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        assert channel.receive_header() == frame
        channel.receive_into([memoryview(t) for t in targets])
        sender.join(LIMIT_S)
    assert b"".join(targets) == whole[:at]


# --- a peer that speaks nonsense -------------------------------------------------------------------------------------

NONSENSE = st.lists(
    st.binary(max_size=200)
    | FRAMES.map(BulkFrame.encode)
    | st.builds(lambda f, tail: f.encode() + tail, FRAMES, st.binary()),
    max_size=5,
).map(b"".join)


@settings(max_examples=60, deadline=None)
@given(NONSENSE)
def test_a_server_survives_a_peer_that_speaks_nonsense(data: bytes) -> None:
    server = StateServer(StateServerConfig(publish_timeout_s=0.01, idle_timeout_s=LIMIT_S, stall_timeout_s=LIMIT_S))
    state = numbered(2, 10)
    server.publish(HEAD, SEQ, state.tensors(), {})
    near, far = socket.socketpair()
    with near:
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(server.serve(far, "peer")))
        thread.start()
        with contextlib.suppress(OSError):
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while near.recv(1 << 16):
                pass
        thread.join(LIMIT_S)
    assert len(ended) == 1
    assert far.fileno() == -1


def answering(script: Callable[[socket.socket], object]) -> Acceptor:
    def handle(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            script(sock)
        sock.close()

    return Acceptor(handle)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NONSENSE, st.integers(0, 3))
def test_a_joiner_survives_a_donor_that_speaks_nonsense(data: bytes, honest: int) -> None:
    """A donor answers some requests properly, then sends random bytes; the joiner ends with an error or a right
    state.
    """
    theirs, mine = numbered(2, 10), numbered(2, 10, seed=1)
    with publishing(theirs, "real") as started:

        def script(sock: socket.socket) -> None:
            near, far = BulkSocket(sock, stall_timeout_s=LIMIT_S), dial(started[0].endpoint)
            with far:
                behind = BulkSocket(far, stall_timeout_s=LIMIT_S)
                for _ in range(honest):
                    request = near.receive_header()
                    if request is None:
                        return
                    behind.send(request)
                    answer = behind.receive_header()
                    assert answer is not None
                    payload = bytearray(answer.length)
                    behind.receive_into([memoryview(payload)])
                    near.send(answer, [payload])
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

        fake = answering(script)
        config = PullConfig(deadline_s=LIMIT_S, stall_timeout_s=LIMIT_S)
        try:
            pull_state([fake.endpoint("fake")], dial, head=HEAD, seq=SEQ, state=mine, config=config)
        except StateError:
            pass
        else:  # it was dialled again whenever it broke off, and was honest for long enough
            assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
        fake.close()


def test_a_donor_that_answers_for_another_header() -> None:
    def script(sock: socket.socket) -> None:
        channel = BulkSocket(sock, stall_timeout_s=LIMIT_S)
        while channel.receive_header() is not None:
            channel.send(*reply(Type.DIGEST, "0" * 16, SEQ, b"{}"))

    fake = answering(script)
    with pytest.raises(StateError, match=f"answered for header {'0' * 16}"):
        pull_state([fake.endpoint("fake")], dial, head=HEAD, seq=SEQ, state=numbered(1, 1))
    fake.close()


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"state":1,"attached":"","manifest":"","nbytes":0}', b"[" * 9999]
)
def test_a_malformed_digest(text: bytes) -> None:
    def script(sock: socket.socket) -> None:
        channel = BulkSocket(sock, stall_timeout_s=LIMIT_S)
        while channel.receive_header() is not None:
            channel.send(*reply(Type.DIGEST, HEAD, SEQ, text))

    fake = answering(script)
    with pytest.raises(StateError, match="malformed digest"):
        pull_state([fake.endpoint("fake")], dial, head=HEAD, seq=SEQ, state=numbered(1, 1))
    fake.close()


# --- the serving side ------------------------------------------------------------------------------------------------


def ask(server: StateServer, *requests: BulkFrame) -> list[tuple[BulkFrame, bytes]]:
    """Sends requests to a server all at once; returns all replies."""
    near, far = socket.socketpair()
    with near:
        thread = threading.Thread(target=server.serve, args=(far, "peer"))
        thread.start()
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        for request in requests:
            channel.send(request)
        near.shutdown(socket.SHUT_WR)
        replies = []
        while (frame := channel.receive_header()) is not None:
            payload = bytearray(frame.length)
            channel.receive_into([memoryview(payload)])
            replies.append((frame, bytes(payload)))
        thread.join(LIMIT_S)
    return replies


def test_pipelined_requests_are_answered_in_order() -> None:
    server = StateServer()
    state = numbered(3, 100)
    server.publish(HEAD, SEQ, state.tensors(), {"x": 1})
    whole = b"".join(t.numpy().tobytes() for _, t in state.tensors())
    replies = ask(
        server,
        BulkFrame(Type.GET_STATE, HEAD, SEQ, 390, 420),
        BulkFrame(Type.GET_MANIFEST, HEAD, SEQ),
        BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 1200),
    )
    assert [frame.type for frame, _ in replies] == [Type.DATA, Type.MANIFEST, Type.DATA]
    assert replies[0][1] == whole[390:810]
    assert replies[1][1] == b'{"x":1}'
    assert replies[2][1] == whole
    assert server.served_nbytes == {"peer": 1620}


def test_ranges_outside_are_refused_and_the_connection_goes_on() -> None:
    server = StateServer()
    state = numbered(1, 100)
    server.publish(HEAD, SEQ, state.tensors(), {})
    server.publish_result(SEQ, HEAD, torch.arange(100, dtype=torch.uint8), [(0, 10), (10, 20), (50, 60)])
    replies = ask(
        server,
        BulkFrame(Type.GET_STATE, HEAD, SEQ, 390, 20),
        BulkFrame(Type.GET_STATE, HEAD, SEQ, 0, 0),
        BulkFrame(Type.GET_RESULT, HEAD, SEQ, 15, 10),
        BulkFrame(Type.GET_RESULT, HEAD, SEQ, 5, 10),
    )
    assert [frame.type for frame, _ in replies] == [Type.REFUSED] * 3 + [Type.DATA]
    assert b"outside the 400 bytes" in replies[0][1]
    assert b"[15, 25) of slot 7 are not completely reduced here" in replies[2][1]
    assert replies[3][1] == bytes(range(5, 15))


def test_results_of_the_last_slots_are_kept_and_withdrawn() -> None:
    server = StateServer(StateServerConfig(results_kept=2))
    heads = [f"{i:016x}" for i in range(4)]
    for seq in (1, 2, 3):
        server.publish_result(seq, heads[seq], torch.full((4,), seq, dtype=torch.uint8), [(0, 4)])
    gets = [BulkFrame(Type.GET_RESULT, heads[seq], seq, 0, 4) for seq in (1, 2, 3)]
    assert [payload[:1] for _, payload in ask(server, *gets)][1:] == [b"\2", b"\3"]
    server.withdraw(before=3)
    replies = ask(server, *gets)
    assert [frame.type for frame, _ in replies] == [Type.REFUSED, Type.REFUSED, Type.DATA]
    assert b"this member serves the result at header 0000000000000003 (slot 3)" in replies[1][1]
    server.withdraw()
    assert b"this member withdrew its last result, that of slot 3" in ask(server, gets[2])[0][1]


def test_closing_wakes_a_waiting_peer_and_ends_its_thread() -> None:
    server = StateServer(StateServerConfig(publish_timeout_s=LIMIT_S, pending_interval_s=0.02))
    near, far = socket.socketpair()
    with near:
        thread = threading.Thread(target=server.serve, args=(far, "peer"))
        thread.start()
        channel = BulkSocket(near, stall_timeout_s=LIMIT_S)
        channel.send(BulkFrame(Type.GET_DIGEST, HEAD, SEQ))
        pending = channel.receive_header()
        assert pending is not None
        assert pending.type is Type.PENDING
        server.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    late, end = socket.socketpair()
    with late:
        assert server.serve(end, "late") == "this member's state server is closed"


def test_a_peer_that_never_asks_is_dropped() -> None:
    server = StateServer(StateServerConfig(idle_timeout_s=0.01))
    near, far = socket.socketpair()
    with near:
        assert server.serve(far, "peer") == "peer was silent for too long"


def test_replies_in_place_of_requests_are_refused() -> None:
    near, far = socket.socketpair()
    with near:
        near.sendall(BulkFrame(Type.PENDING, HEAD, SEQ).encode())
        assert "sent PENDING where a request was expected" in StateServer().serve(far, "peer")


def test_odd_results_are_refused() -> None:
    server = StateServer()
    with pytest.raises(ValueError, match="flat contiguous uint8"):
        server.publish_result(SEQ, HEAD, torch.zeros(4), [(0, 4)])
    with pytest.raises(ValueError, match="not within the 4"):
        server.publish_result(SEQ, HEAD, torch.zeros(4, dtype=torch.uint8), [(0, 5)])
    for wrong in ({"idle_timeout_s": 0}, {"results_kept": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StateServerConfig(**wrong)  # type: ignore[arg-type]
