"""Tests links of limited rate through the relay: bytes passed and waiting, and refusals. (test_edge_lanes.py tests
rates.)
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from test_relay import DEADLINE_S, Member, broken, exactly, quiet, there_and_back

from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.edge.topology import EdgeNode, Link, Topology
from chaos_lightning.testing.emulation import emulating

NETWORK = Topology((EdgeNode("a"), EdgeNode("b"), EdgeNode("c")), (Link("a", "b", 1e9), Link("b", "c", 1e9)))


@pytest.fixture
def relay() -> Iterator[LinkRelay]:
    with LinkRelay(node_of=NETWORK.node_of, closed=True) as made, emulating(relay=made.address):
        for link in NETWORK.links:
            made.shape(link.a, link.b, rate_bps=link.rate_bps)
        yield made


@pytest.fixture
def members(relay: LinkRelay) -> Iterator[dict[str, Member]]:
    made = {name: Member(name) for name in ("a-0", "a-1", "b-0", "c-0", "x-0")}
    yield made
    for member in made.values():
        member.close()


def stream(source: socket.socket, sink: socket.socket, nbytes: int) -> bool:
    """Sends `nbytes` bytes from one socket to the other; returns whether they arrive unchanged."""
    data = bytes(range(251)) * (nbytes // 251)
    sender = threading.Thread(target=source.sendall, args=(data,), daemon=True)
    sender.start()
    arrived = exactly(sink, len(data))
    sender.join(DEADLINE_S)
    return arrived == data


def test_streams_pass_whole_both_ways_at_once(relay: LinkRelay, members: dict[str, Member]) -> None:
    mine, theirs = members["b-0"].call(members["a-0"])
    relay.shape("b", "a", rate_bps=400e6, latency_s=0.002)
    results: list[bool] = []
    other = threading.Thread(target=lambda: results.append(stream(theirs, mine, 6 << 20)), daemon=True)
    other.start()
    assert stream(mine, theirs, 6 << 20)
    other.join(DEADLINE_S)
    assert results == [True]
    passed = relay.passed()
    assert passed[("a", "b")] > 6_200_000 < passed[("b", "a")]
    assert passed[("b", "c")] == 0


def test_flows_share_links_and_accesses_and_all_arrive(relay: LinkRelay, members: dict[str, Member]) -> None:
    relay.access("b", 300e6)
    pairs = [("b-0", "a-0"), ("b-0", "a-0"), ("b-0", "c-0"), ("c-0", "b-0")]
    ends = [members[one].call(members[other]) for one, other in pairs]
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda mine=mine, theirs=theirs: results.append(stream(mine, theirs, 2 << 20)))
        for mine, theirs in ends
    ]
    for thread in threads:
        thread.start()
    relay.access("b", 600e6)
    relay.shape("a", "b", rate_bps=200e6, latency_s=0.001)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [True] * 4


def test_what_is_under_way_arrives_late_and_nothing_else_waits_for_it(
    relay: LinkRelay, members: dict[str, Member]
) -> None:
    mine, theirs = members["b-0"].call(members["a-0"])
    others = members["c-0"].call(members["b-0"])
    relay.shape("a", "b", rate_bps=1e9, latency_s=3600.0)
    mine.sendall(b"x")
    for _ in range(3):
        there_and_back(*others)
    assert quiet(theirs)
    relay.cut("a", "b")
    assert broken(theirs)


def test_a_link_that_is_nearly_still_holds_up_nobody_else(relay: LinkRelay, members: dict[str, Member]) -> None:
    mine, theirs = members["b-0"].call(members["a-0"])
    others = members["c-0"].call(members["b-0"])
    relay.shape("a", "b", rate_bps=0.001)
    mine.sendall(bytes(100_000))
    for _ in range(3):
        there_and_back(*others)
    assert quiet(theirs)


def test_an_end_is_passed_on_after_all_bytes(relay: LinkRelay, members: dict[str, Member]) -> None:
    mine, theirs = members["b-0"].call(members["a-0"])
    relay.shape("a", "b", rate_bps=50e6, latency_s=0.01)
    mine.sendall(bytes(200_000))
    mine.shutdown(socket.SHUT_WR)
    assert exactly(theirs, 200_000) == bytes(200_000)
    assert theirs.recv(1) == b""


def test_a_stalled_shaped_link_goes_on_where_it_was(relay: LinkRelay, members: dict[str, Member]) -> None:
    mine, theirs = members["b-0"].call(members["a-0"])
    others = members["c-0"].call(members["b-0"])
    relay.shape("a", "b", rate_bps=100e6, latency_s=0.001)
    relay.stall("a", "b")
    sender = threading.Thread(target=mine.sendall, args=(bytes(3 << 20),), daemon=True)
    sender.start()
    there_and_back(*others)
    assert quiet(theirs)
    relay.shape("a", "b", rate_bps=400e6)  # a new rate does not restore it
    there_and_back(*others)
    assert quiet(theirs)
    relay.restore("a", "b")
    assert exactly(theirs, 3 << 20) == bytes(3 << 20)
    sender.join(DEADLINE_S)


def test_a_slow_reader_makes_its_writer_wait(relay: LinkRelay, members: dict[str, Member]) -> None:
    """If a member does not read, its peer's writes block: the relay holds a bounded number of bytes, and none is
    lost.
    """
    mine, theirs = members["b-0"].call(members["a-0"])
    for sock in (mine, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    relay.shape("a", "b", rate_bps=1e9)
    data = bytes(range(256)) * (12 << 12)
    sender = threading.Thread(target=mine.sendall, args=(data,), daemon=True)
    sender.start()
    others = members["c-0"].call(members["b-0"])
    while True:
        before = relay.passed()[("b", "a")]
        for _ in range(20):
            there_and_back(*others)
        if before == relay.passed()[("b", "a")] > 0:
            break
    assert max(end.held for c in relay._connections for end in c.ends()) < 1 << 20
    assert exactly(theirs, len(data)) == data
    sender.join(DEADLINE_S)


def test_pairs_without_a_link_are_refused(relay: LinkRelay, members: dict[str, Member]) -> None:
    assert members["c-0"].refused_by(members["a-0"])
    assert members["a-1"].refused_by(members["c-0"])
    there_and_back(*members["c-0"].call(members["b-0"]))
    relay.shape("a", "c", rate_bps=1e9)
    there_and_back(*members["c-0"].call(members["a-0"]))


def test_members_of_one_node_need_no_link(relay: LinkRelay, members: dict[str, Member]) -> None:
    mine, theirs = members["a-1"].call(members["a-0"])
    assert stream(mine, theirs, 1 << 20)
    assert relay.passed()[("a", "b")] == 0


def test_strangers_are_refused_and_remembered(relay: LinkRelay, members: dict[str, Member]) -> None:
    assert members["x-0"].refused_by(members["a-0"])
    assert members["a-0"].refused_by(members["x-0"])
    assert relay.strangers == {"x-0~1"}


def test_a_rate_of_nothing_is_refused(relay: LinkRelay) -> None:
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected > 0"):
            relay.shape("a", "b", rate_bps=bad)
        with pytest.raises(ValueError, match="expected a positive rate"):
            relay.access("a", bad)
    with pytest.raises(ValueError, match="two ends"):
        relay.shape("a", "a", rate_bps=1.0)
