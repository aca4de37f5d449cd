"""Tests handshakes with right and wrong tokens, and damaged frame headers."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ChaosError, RefusedError, WireError
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport import handshake
from chaos_lightning.transport.frames import HEADER_NBYTES, FrameType, pack, unpack
from chaos_lightning.transport.handshake import Greeting, accept, dial


def meet(greeting: Greeting, *, dial_token=b"", accept_token=b"", job="j", me="b~2"):
    """Runs both sides of a handshake; returns the outcome of each."""
    server = socket.create_server(("127.0.0.1", 0))
    outcome: dict[str, object] = {}

    def listen() -> None:
        sock, _ = server.accept()
        try:
            outcome["accept"] = accept(sock, job=job, me=me, token=accept_token, deadline_s=5)
            sock.close()
        except ChaosError as error:
            outcome["accept"] = error

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        dial("127.0.0.1", server.getsockname()[1], greeting, token=dial_token, deadline_s=5).close()
        outcome["dial"] = "connected"
    except ChaosError as error:
        outcome["dial"] = error
    thread.join(10)
    server.close()
    return outcome


GOOD = Greeting("j", "a~1", "b~2", "link")


def test_equal_tokens_meet():
    outcome = meet(GOOD, dial_token=b"secret", accept_token=b"secret")
    assert outcome["dial"] == "connected"
    assert outcome["accept"] == GOOD


def test_a_stranger_without_the_token_is_refused_and_told_why():
    outcome = meet(GOOD, dial_token=b"guess", accept_token=b"secret")
    assert isinstance(outcome["dial"], RefusedError)
    assert "token" in str(outcome["dial"])
    assert isinstance(outcome["accept"], RefusedError)


@pytest.mark.parametrize(
    ("dials", "accepts"),
    [
        ([b"new", b"old"], [b"old"]),
        ([b"old"], [b"new", b"old"]),
        ([b"new", b"old"], [b"new", b"old"]),
        ([b"new"], [b"new", b"old"]),
        ([b"new", b"old"], [b"new"]),
        ([], []),
    ],
)
def test_while_tokens_are_rotated_one_that_both_know_is_enough(dials, accepts):
    outcome = meet(GOOD, dial_token=dials, accept_token=accepts)
    assert outcome["dial"] == "connected"
    assert outcome["accept"] == GOOD


@pytest.mark.parametrize(("dials", "accepts"), [([b"old"], [b"new"]), ([b"older", b"old"], [b"new"]), ([], [b"new"])])
def test_tokens_that_are_no_longer_known_are_refused(dials, accepts):
    outcome = meet(GOOD, dial_token=dials, accept_token=accepts)
    assert isinstance(outcome["dial"], RefusedError)
    assert isinstance(outcome["accept"], RefusedError)


HELLO = {"job": "j", "me": "a~1", "peer": "b~2", "purpose": "link", "version": 2, "nonce": "0" * 32}
HELLO |= {"level": "checksum", "keys": []}


def said_by_a_stranger(proof: object) -> bytes:
    body = json.dumps({"hello": json.dumps(HELLO), "proofs": {"": [proof]}}).encode()
    return struct.pack("<I", len(body)) + body


def answered(said: bytes, error: type[ChaosError], words: str) -> None:
    """Sends these bytes as a stranger's hello, and checks that `accept` raises this error with these words."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as theirs,
    ):
        theirs.sendall(said)
        with pytest.raises(error, match=words):
            accept(server.accept()[0], job="j", me="b~2", token=b"secret", deadline_s=5)


@pytest.mark.parametrize("proof", ["\u00e9", "", 3, None, ["x"], {"\u00e9": "\u4e2d"}])
def test_a_proof_that_is_no_ascii_is_refused(proof: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialler's proof that is no ASCII text, or no text at all, is compared and refused without an exception."""
    compared: list[object] = []
    same = handshake._same

    def spy(given: object, expected: str) -> bool:
        compared.append(given)
        return same(given, expected)

    monkeypatch.setattr(handshake, "_same", spy)
    answered(said_by_a_stranger(proof), RefusedError, "wrong or missing cluster token")
    assert compared == [proof]


def test_a_proof_that_is_half_a_character_is_no_text_at_all() -> None:
    answered(said_by_a_stranger("\ud800"), WireError, "no JSON object of texts and numbers")


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (Greeting("other", "a~1", "b~2", "link"), "job 'other'"),
        (Greeting("j", "a~1", "c~3", "link"), "looks for 'c~3'"),
        (Greeting("j", "a~1", "b~2", "coffee"), "purpose 'coffee'"),
        (Greeting("j", "a~1", "b~2", "link", version=3), "speaks version 3 of the protocol, and this side 5: install"),
    ],
)
def test_wrong_greetings_are_refused_by_name(greeting, words):
    outcome = meet(greeting)
    assert words in str(outcome["dial"])


@given(st.sampled_from(list(FrameType)), st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 64 << 20))
def test_headers_survive_the_wire(kind, number, seq, length):
    frame = unpack(bytearray(pack(kind, ViewId(1, number), seq, 4096, length, 7)))
    assert (frame.type, frame.view, frame.seq, frame.start, frame.length) == (
        kind,
        ViewId(1, number),
        seq,
        4096,
        length,
    )


@given(st.integers(0, HEADER_NBYTES - 1), st.integers(1, 255))
def test_a_flipped_byte_anywhere_in_the_header_is_found(place, flip):
    data = bytearray(pack(FrameType.UP, ViewId(1, 2), 3, 4, 5, 6))
    data[place] ^= flip
    with pytest.raises(WireError):
        unpack(data)


def test_a_frame_beyond_the_limit_is_refused_before_anything_is_allocated():
    with pytest.raises(WireError, match="limit"):
        unpack(bytearray(pack(FrameType.UP, ViewId(1, 1), 1, 0, (64 << 20) + 1, 0)))


def heard(hello: Callable[[bytes], bytes]) -> Exception | None:
    """Runs `accept` against a stranger that answers the opening message with `hello(message)`; returns the error, or
    None.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    ended: list[Exception | None] = []

    def take() -> None:
        try:
            accept(near, job="j", me="b~1", deadline_s=5)
            ended.append(None)
        except Exception as error:  # which one is what the test is about
            ended.append(error)

    with near, far:
        thread = threading.Thread(target=take)
        thread.start()
        far.settimeout(5)
        (length,) = struct.unpack("<I", far.recv(4, socket.MSG_WAITALL))
        body = hello(far.recv(length, socket.MSG_WAITALL))
        far.sendall(struct.pack("<I", len(body)) + body)
        thread.join(20)
    return ended[0]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4000,
        '{"hello": ' + "[" * 3900,
        '{"hello": "\\ud800", "proofs": {"": "\\ud800"}}',
        '{"hello": "{\\"job\\": \\"j\\"}", "proofs": {"": "x"}}',
        '{"hello": "' + "[" * 3900 + '"}',
        '{"hello": 3, "proofs": [3]}',
        '{"proofs": {"": "\u00e9"}}',
    ],
)
def test_a_stranger_that_says_odd_things_is_refused_and_nothing_else_happens(text):
    """Hellos that are nested too deeply, have broken characters, or lack fields, are refused and cause no other
    error.
    """
    assert isinstance(heard(lambda _: text.encode()), RefusedError | WireError)


def test_a_hello_that_was_recorded_lets_nobody_in():
    """A recorded hello that is replayed on another connection is refused, because its proof is for another nonce."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            sock, _ = server.accept()
            with sock:
                opening = json.dumps({"nonce": "0" * 32, "version": 2}).encode()
                sock.sendall(struct.pack("<I", len(opening)) + opening)
                (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
                said.append(sock.recv(length, socket.MSG_WAITALL))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(WireError, match="in the middle of the handshake"):
            dial("127.0.0.1", server.getsockname()[1], Greeting("j", "a~1", "b~1", "link"), deadline_s=5)
        thread.join(20)
    error = heard(lambda _: said[0])
    assert isinstance(error, RefusedError)
    assert "wrong or missing cluster token" in str(error)
