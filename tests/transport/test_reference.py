"""Tests reading another process's memory: permissions, bytes that changed, and processes that have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos_lightning.errors import WireError
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.reference import (
    Generation,
    NeighbourMemory,
    PartialSum,
    UnreadableError,
    address_of,
    intact,
    pieces_of,
    refer,
)

CHILD = """
import sys
from chaos_lightning.protocol.types import ViewId
from chaos_lightning.transport.reference import Generation, refer
memory = memoryview(bytearray(range(256)) * 64)
generation = Generation()
generation.set(ViewId(3, 7), 41)
print(generation.offer().hex(), refer([memory[100:300], memory[1000:9000]]).hex(), flush=True)
for line in sys.stdin:
    generation.set(ViewId(3, 7), int(line))
    print("set", flush=True)
"""
WHOLE = bytes(range(256)) * 64
EXPECTED = WHOLE[100:300] + WHOLE[1000:9000]
VIEW = ViewId(3, 7)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()


def announced(child: subprocess.Popen[str]) -> tuple[bytes, list[tuple[int, int]]]:
    assert child.stdout is not None
    offer, references = child.stdout.readline().split()
    return bytes.fromhex(offer), pieces_of(memoryview(bytes.fromhex(references)))


def test_bytes_and_generation_come_from_the_other_process(child: subprocess.Popen[str]) -> None:
    offer, pieces = announced(child)
    neighbour = NeighbourMemory(offer)
    into = memoryview(bytearray(len(EXPECTED)))
    assert neighbour.read(pieces, into) == (VIEW, 41)
    assert bytes(into) == EXPECTED


def test_a_part_of_a_chunk_is_found_across_its_pieces(child: subprocess.Popen[str]) -> None:
    offer, pieces = announced(child)
    lost: list[OSError] = []
    reference = PartialSum(NeighbourMemory(offer), pieces, VIEW, 41, lost.append)
    into = memoryview(bytearray(1000))
    reference.read(150, 1150, into)
    assert bytes(into) == EXPECTED[150:1150]
    assert not lost


def test_a_partial_sum_of_a_sender_that_went_on_is_refused(child: subprocess.Popen[str]) -> None:
    offer, pieces = announced(child)
    reference = PartialSum(NeighbourMemory(offer), pieces, VIEW, 41, lambda error: None)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("42\n")
    child.stdin.flush()
    assert child.stdout.readline() == "set\n"
    with pytest.raises(UnreadableError, match="its sender is at"):
        reference.read(0, 100, memoryview(bytearray(100)))


def test_a_process_that_died_is_told(child: subprocess.Popen[str]) -> None:
    offer, pieces = announced(child)
    lost: list[OSError] = []
    reference = PartialSum(NeighbourMemory(offer), pieces, VIEW, 41, lost.append)
    child.kill()
    child.wait(20)
    with pytest.raises(UnreadableError, match="cannot be read"):
        reference.read(0, 100, memoryview(bytearray(100)))
    assert isinstance(lost[0], ProcessLookupError)


def test_memory_that_is_not_there_is_an_error_and_no_crash() -> None:
    generation = Generation()
    neighbour = NeighbourMemory(generation.offer())
    with pytest.raises(OSError, match="Bad address"):
        neighbour.read([(4096, 100)], memoryview(bytearray(100)))


def test_an_offer_with_another_nonce_is_another_process() -> None:
    generation = Generation()
    offer = bytearray(generation.offer())
    assert NeighbourMemory(bytes(offer)).generation() == (ViewId(0, 0), 0)
    offer[-1] ^= 1
    with pytest.raises(ProcessLookupError, match="another one by now"):
        NeighbourMemory(bytes(offer))


def test_a_malformed_offer_is_refused() -> None:
    with pytest.raises(WireError, match="3 bytes"):
        NeighbourMemory(b"abc")


def test_references_name_this_process_and_its_bytes() -> None:
    memory = memoryview(bytearray(b"0123456789"))
    assert pieces_of(memoryview(refer([memory[2:5]]))) == [(address_of(memory) + 2, 3)]
    assert int.from_bytes(Generation().offer()[:8], "little") == os.getpid()


@pytest.mark.parametrize(
    ("up", "now", "still"),
    [
        (True, (VIEW, 41), True),
        (True, (VIEW, 42), False),  # its own gradient may be another one already
        (True, (ViewId(3, 8), 41), False),  # reduced again: partial sums are written over
        (False, (VIEW, 41), True),
        (False, (VIEW, 42), True),  # two results alternate
        (False, (ViewId(3, 8), 42), True),  # the header changed the view as well
        (False, (ViewId(3, 8), 41), False),
        (False, (VIEW, 43), False),
    ],
)
def test_what_was_still_there(up: bool, now: tuple[ViewId, int], still: bool) -> None:
    assert intact(up, VIEW, 41, now) is still
