"""Tests the fuzzer on sealed records, bulk frames and the TLS proxy: its seeds are readable, and it finds planted
faults.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from chaos_lightning.replication.pull import StateSink
from chaos_lightning.transport import sealing
from chaos_lightning.transport.sealing import Level, Opener
from lab.fuzz import control, mutate, transfers
from lab.fuzz.control import Deed
from lab.fuzz.drivers import TARGETS
from lab.fuzz.links import Fate, read_stream, travelled
from lab.fuzz.target import FindingError
from lab.fuzz.transfers import DONOR_HOSTILE, bulk_seeds, exchanged


@pytest.mark.parametrize("level", [Level.AUTHENTICATED, Level.ENCRYPTED])
def test_records_that_arrive_well_are_believed_and_others_are_not(level: Level) -> None:
    words = [(0, b"one"), (0, b"two"), (0, b"three")]
    arrives, believed = travelled(level, words, stream=True)
    assert read_stream(level, arrives) == believed == b"onetwothree"
    for fate in list(Fate)[1:]:
        damaged, believed = travelled(level, [(0, b"one"), (fate + len(Fate), b"two"), (0, b"three")], stream=True)
        assert damaged != arrives
        assert read_stream(level, damaged) == believed == (b"onetwo" if fate is Fate.TWICE else b"one")


def test_records_that_two_changes_leave_in_their_place_are_genuine() -> None:
    """The second of four records is swapped with the third, which is lost: the reader gets the first two, and none
    after the gap.
    """
    fates = [(Fate.WELL, b"one"), (Fate.SWAPPED, b"two"), (Fate.LEFT_OUT, b"three"), (Fate.WELL, b"four")]
    arrives, believed = travelled(Level.ENCRYPTED, [(int(fate), word) for fate, word in fates], stream=True)
    assert read_stream(Level.ENCRYPTED, arrives) == believed == b"onetwo"


def test_a_reader_that_believes_what_does_not_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(opener: Any, count: int) -> bool:
        opener._got += count
        return bool(opener._got == opener.nbytes + sealing.TAG_NBYTES)

    swapped = mutate.joined([(Fate.SWAPPED, b"one"), (0, b"two"), (0, b"three")])
    TARGETS["sealed"].run(b"\2" + swapped)
    monkeypatch.setattr(Opener, "took", took)
    with pytest.raises(FindingError, match="not sealed in this place"):
        TARGETS["sealed"].run(b"\2" + swapped)


def test_whole_pulls_are_among_the_seeds_and_succeed() -> None:
    outcomes = [exchanged(seed) for seed in bulk_seeds() if seed[0] & DONOR_HOSTILE]
    assert set(outcomes) == {"pulled"}


def test_a_route_is_among_the_seeds_and_leads_to_the_neighbour() -> None:
    outcomes = [exchanged(seed) for seed in bulk_seeds() if not seed[0] & DONOR_HOSTILE]
    assert outcomes.count("the relay to b~2 ended") == 2
    assert outcomes.count("x closed the connection") == len(outcomes) - 2, outcomes


def test_a_joiner_that_takes_wrong_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in bulk_seeds() if seed[0] == DONOR_HOSTILE)
    at = seed.index(struct.pack("<8f", *[1.0] * 8))  # in the first tensor
    damaged = seed[:at] + b"!" + seed[at + 1 :]
    assert "corrupted" in exchanged(damaged) or "no donor is left" in exchanged(damaged)
    monkeypatch.setattr(StateSink, "landed", lambda *_, **__: [])
    monkeypatch.setattr("chaos_lightning.replication.pull._StatePull._prove", lambda *_: None)
    with pytest.raises(FindingError, match="is here, and it is another one"):
        exchanged(damaged)


def test_a_donor_that_does_not_end_with_its_peer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PATIENCE_S", 0.1)
    kept: list[socket.socket] = []

    def serve(sock: socket.socket, peer: str) -> str:
        kept.append(sock)
        return "it let go of the connection, and did not close it"

    monkeypatch.setattr(transfers._donor().server, "serve", serve)
    with pytest.raises(FindingError, match="a bulk connection whose other end says no more is still open"):
        exchanged(bulk_seeds()[0])
    for sock in kept:
        sock.close()


def test_a_proxy_that_keeps_who_says_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = mutate.joined([(Deed.SAY_AND_WAIT, b"\x16")])
    TARGETS["tls-proxy"].run(slow)
    monkeypatch.setattr(control, "PATIENCE_S", 0.2)
    with pytest.raises(FindingError, match="after SAY_AND_WAIT the TLS proxy keeps a connection open"):
        TARGETS["tls-proxy"].run(slow)


def test_who_is_let_in_and_who_is_not_at_the_fuzzed_proxy() -> None:
    """A member with a valid certificate gets through the fuzzed TLS proxy, and each of four wrong callers is
    refused.
    """
    speaks = mutate.joined([(Deed.SPEAK, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")])
    TARGETS["tls-proxy"].run(speaks)  # whoever an earlier test sent is refused by then
    before = control._tls_proxy().refused
    TARGETS["tls-proxy"].run(speaks)
    assert control._tls_proxy().refused == before
    for who in range(1, 5):
        TARGETS["tls-proxy"].run(mutate.joined([(Deed.SPEAK + len(Deed) * who, b"")]))
    assert control._tls_proxy().refused == before + 4
