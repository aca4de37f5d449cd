"""Tests links that are let go while bytes are queued, and measurements of links, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from links_support import DEADLINE_S, Build, Node, connect, pacing_of
from until_support import until

from chaos_lightning.protocol.types import ViewId
from chaos_lightning.testing.emulation import IDLE_PART, emulating
from chaos_lightning.transport.frames import FrameType
from chaos_lightning.transport.handshake import Greeting, dial
from chaos_lightning.transport.link import Link
from chaos_lightning.transport.measuring import RENEW_S
from chaos_lightning.transport.probe import Probes
from chaos_lightning.transport.reference import Generation

VIEW = ViewId(1, 1)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulating():
        yield


def let_go(node: Node) -> None:
    """Makes this member want no links any more."""
    node.do(lambda: node.links.want(()))


def send_chunk(node: Node, to: str, payload: bytes) -> None:
    node.do(lambda: node.links.chunk(to, FrameType.DOWN, VIEW, 1, 0, (memoryview(payload),)))


def test_what_was_queued_on_a_link_still_arrives_when_it_is_let_go(build: Build) -> None:
    """A link that is no longer wanted still delivers what was queued, and then ends without counting as a failure."""
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    payload = bytes(range(256)) * (96 << 10)  # 24 MiB: more than the kernel takes while nobody reads
    reads = threading.Event()
    b.loop.call(lambda: reads.wait(DEADLINE_S))
    send_chunk(a, b.id, payload)
    a.say(b.id, b"header")
    assert a.do(lambda: a.links._links[b.id].queued_nbytes) > 0
    let_go(a)
    assert not a.do(lambda: a.links.up(b.id))
    reads.set()
    b.wait(lambda: b.messages)
    assert [p for p, _ in b.chunks] == [a.id]
    assert b.chunks[0][1] == payload
    assert b.messages == [(a.id, b"header")]
    b.wait(lambda: not b.is_up(a.id))
    assert b.changes[-1] == (a.id, False, "bye"), "and it is no failure"


def test_a_link_that_was_let_go_still_takes_what_the_peer_had_sent(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    speaks = threading.Event()

    def say_before_reading() -> None:
        assert speaks.wait(DEADLINE_S)
        b.links.message(a.id, b"last words")  # in one turn of its loop: nothing is read in between

    b.loop.call(say_before_reading)
    send_chunk(a, b.id, bytes(24 << 20))
    let_go(a)
    speaks.set()
    b.wait(lambda: b.chunks)
    a.wait(lambda: a.messages)
    assert a.messages == [(b.id, b"last words")]
    b.wait(lambda: not b.is_up(a.id))
    until(lambda: not a.do(lambda: a.links._finishing), "the link that a let go has ended", DEADLINE_S)
    assert not [c for c in a.changes if c[1] is False], "whom it let go itself it reports nothing about"


def test_a_link_that_was_let_go_ends_when_its_bytes_are_overwritten(build: Build) -> None:
    """A link that was let go but cannot send its bytes is closed two slots later, when their buffer is reused
    (protocol.md 3).
    """
    nodes = build("a")
    a = nodes["a"]
    a.expect("x~9")
    greeting = Greeting("job", "x~9", a.id, "link")
    with dial("127.0.0.1", a.links.port, greeting, token=b"token", deadline_s=DEADLINE_S) as stuck:
        a.wait_up("x~9")
        send_chunk(a, "x~9", bytes(64 << 20))
        let_go(a)
        for seq in (2, 2):  # the next slot opens, and is opened again by a recovery
            a.do(lambda seq=seq: a.links.opened(seq))
        assert a.do(lambda: len(a.links._finishing)) == 1
        a.do(lambda: a.links.opened(3))
        assert a.do(lambda: len(a.links._finishing)) == 0
        stuck.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            while stuck.recv(1 << 20):  # the deadline would be an error
                pass


def test_a_link_that_was_let_go_does_not_outlive_its_deadline(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.transport.links.FINISH_S", -1.0)
    nodes = build("a")
    a = nodes["a"]
    a.expect("x~9")
    greeting = Greeting("job", "x~9", a.id, "link")
    with dial("127.0.0.1", a.links.port, greeting, token=b"token", deadline_s=DEADLINE_S):
        a.wait_up("x~9")
        send_chunk(a, "x~9", bytes(64 << 20))
        let_go(a)
        assert a.do(lambda: len(a.links._finishing)) == 1
        a.do(a.links.ping)
        assert a.do(lambda: len(a.links._finishing)) == 0


def test_chunks_of_an_old_view_are_taken_out_of_links_that_were_let_go(build: Build) -> None:
    nodes = build("a")
    a = nodes["a"]
    a.expect("x~9")
    greeting = Greeting("job", "x~9", a.id, "link")
    with dial("127.0.0.1", a.links.port, greeting, token=b"token", deadline_s=DEADLINE_S):
        a.wait_up("x~9")
        for _ in range(4):
            send_chunk(a, "x~9", bytes(32 << 20))
        let_go(a)
        (link,) = a.do(lambda: list(a.links._finishing))
        before = link.queued_nbytes
        a.do(lambda: a.links.drop(VIEW))
        assert link.queued_nbytes <= before - 2 * (32 << 20)


def test_a_member_can_be_linked_again_while_its_old_link_ends(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    payload = bytes(24 << 20)
    send_chunk(a, b.id, payload)
    let_go(a)
    a.do(lambda: a.links.want((b.member,)))
    b.wait(lambda: b.chunks)
    a.wait_up(b.id)
    b.wait(lambda: len([c for c in b.changes if c[1]]) >= 2, "a second link")
    a.say(b.id, b"over the new one")
    b.wait(lambda: b.messages)
    assert b.chunks[0][1] == payload


# ---------------------------------------------------------------------- measuring


def emulate(nodes: dict[str, Node], rate_bps: float) -> None:
    for node in nodes.values():
        others = {name: rate_bps for name in nodes if name != node.id[0]}
        node.do(lambda node=node, others=others: node.links._measuring._pacer.change(others))


def measured(build: Build, rate_bps: float) -> dict[str, Node]:
    """Returns two members on an emulated network of this rate, after both have measured their link."""
    nodes = build("ab")
    emulate(nodes, rate_bps)
    connect(nodes, "ab")
    for node in nodes.values():
        node.wait(lambda node=node: node.reports)
    return nodes


def beat(nodes: dict[str, Node]) -> None:
    """Makes members ping and read counters regularly, as a member's shell does."""
    for node in nodes.values():
        node.do(partial(_beat, node))


def _beat(node: Node) -> None:
    node.links.ping()
    node.loop.later(0.05, partial(_beat, node))


def test_a_link_is_measured_by_both_ends_when_it_is_made(build: Build) -> None:
    nodes = build("ab")
    emulate(nodes, 40e6)
    connect(nodes, "ab")
    for node, other in zip(nodes.values(), reversed(nodes.values()), strict=True):
        node.wait(lambda node=node: node.reports)
        report = node.reports[0]
        assert report.peer == other.id
        assert report.evidence == "probe (link made)"
        assert 0 < report.rate_bps < 60e6, "the kernel lets no more through"
        assert report.latency_s > 0
        assert node.do(node.links.reports) == node.reports[:1]


def test_a_link_whose_first_probe_came_to_nothing_is_probed_again_soon(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Former bug: a link whose first probe gave no result stayed unmeasured for a minute; it is probed again soon
    now.
    """
    measure = Probes.measure

    def all_but_the_first(self: Probes, peer: str, link: Link, why: str) -> None:
        if why != "link made":
            measure(self, peer, link, why)

    monkeypatch.setattr(Probes, "measure", all_but_the_first)
    nodes = build("ab")
    emulate(nodes, 40e6)
    connect(nodes, "ab")
    beat(nodes)
    for node in nodes.values():
        node.wait(lambda node=node: node.reports, "a second probe")
        assert node.reports[0].evidence.startswith("probe (not measured yet")


def test_links_within_a_machine_are_not_measured(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    a.do(lambda: a.links._measuring.tick(time.monotonic() + 2 * RENEW_S))
    a.say(b.id, b"x")
    b.wait(lambda: b.messages)
    assert a.reports == b.reports == []


def test_a_link_that_fell_behind_is_probed_until_it_has_recovered(build: Build) -> None:
    """A link that became slow is probed until it has recovered, although the job sends nothing over it."""
    nodes = measured(build, 200e6)
    a, b = nodes.values()
    emulate(nodes, 10e6)
    beat(nodes)

    def shown() -> bool:
        if a.do(lambda: a.links._links[b.id].queued_nbytes) < 128 << 10:
            send_chunk(a, b.id, bytes(256 << 10))
        return a.reports[-1].rate_bps < 15e6

    before = a.reports[0].rate_bps
    until(shown, "traffic that shows the fall")
    a.wait(lambda: a.reports[-1].evidence.startswith("probe"), "a probe that finds it as slow as before")
    assert a.reports[-1].rate_bps < 15e6
    emulate(nodes, 200e6)
    a.wait(lambda: a.reports[-1].rate_bps > 30e6, "a probe that finds it recovered")
    assert a.reports[-1].evidence.startswith(f"probe (it carried {before / 1e6:.3g} Mbit/s before")


def test_a_link_and_the_transfers_beside_it_share_one_rate(build: Build) -> None:
    """The paced rates of a link and of bulk transfers to the same peer add up to the emulated rate, whichever of them
    has bytes to send.
    """
    nodes = measured(build, 80e6)
    a, b = nodes.values()
    served: list[socket.socket] = []
    payload = bytes(1 << 20)

    def serve(sock: socket.socket, peer: str) -> None:
        served.append(sock)
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(payload)

    b.serve_bulk = serve
    seen: list[list[float]] = []

    def bounds() -> tuple[float, float]:
        """Returns the paced rates of the link and of the transfer, after receiving some of the transfer's bytes."""
        sock.recv(1 << 16)
        seen.append(b.do(lambda: [pacing_of(s) for s in (b.links._links[a.id].sock, *served)]))
        return seen[-1][0], sum(seen[-1][1:])

    def both() -> bool:
        if b.do(lambda: b.links._links[a.id].queued_nbytes) < 1 << 20:
            send_chunk(b, a.id, payload)
        return bounds() == (40e6, 40e6)

    beat(nodes)
    greeting = Greeting("job", a.id, b.id, "bulk")
    with dial("127.0.0.1", b.links.port, greeting, token=b"token", deadline_s=DEADLINE_S) as sock:
        sock.settimeout(DEADLINE_S)
        until(lambda: bounds() == (80e6 * IDLE_PART, 80e6 * (1 - IDLE_PART)), "a link with nothing to send")
        until(both, "equal parts")
        assert max(map(sum, seen)) <= 80e6
        emulate(nodes, 20e6)
        assert sum(bounds()) <= 20e6
    until(lambda: b.do(lambda: pacing_of(b.links._links[a.id].sock)) == 20e6, "all of it for the link again")


def test_a_network_can_have_rates_from_the_beginning(build: Build) -> None:
    with emulating(rates={"a": 3e7, "b": 3e7}):
        nodes = build("ab")
    connect(nodes, "ab")
    a = nodes["a"]
    a.wait(lambda: a.reports)
    assert a.reports[0].rate_bps < 45e6


def test_a_report_ends_with_its_link(build: Build) -> None:
    nodes = build("ab")
    emulate(nodes, 40e6)
    connect(nodes, "ab")
    a, b = nodes.values()
    a.wait(lambda: a.reports)
    b.close()
    a.wait(lambda: not a.is_up(b.id))
    assert a.do(a.links.reports) == []


def test_traffic_shows_that_a_link_has_changed(build: Build) -> None:
    nodes = measured(build, 200e6)
    a, b = nodes.values()
    emulate(nodes, 20e6)
    before = a.reports[-1]

    beat(nodes)
    for _ in range(3):
        send_chunk(a, b.id, bytes(1 << 20))
    a.wait(lambda: any(r.evidence.startswith("transfer") for r in a.reports))
    report = next(r for r in a.reports if r.evidence.startswith("transfer"))
    assert report.rate_bps < 0.75 * before.rate_bps
    assert report.latency_s == before.latency_s
    assert a.do(a.links.reports) == [a.reports[-1]]


def test_a_bulk_transfer_beside_the_link_counts_as_well(build: Build) -> None:
    nodes = measured(build, 200e6)
    a, b = nodes.values()
    emulate(nodes, 20e6)
    payload = bytes(3 << 20)
    b.serve_bulk = lambda sock, peer: (sock.sendall(payload), sock.recv(1))

    beat(nodes)
    greeting = Greeting("job", a.id, b.id, "bulk")
    with dial("127.0.0.1", b.links.port, greeting, token=b"token", deadline_s=DEADLINE_S) as sock:
        sock.settimeout(DEADLINE_S)
        got = 0
        while got < len(payload):
            got += len(sock.recv(1 << 16))
    b.wait(lambda: any(r.evidence.startswith("transfer") for r in b.reports))
    report = next(r for r in b.reports if r.evidence.startswith("transfer"))
    assert report.peer == a.id
    assert report.rate_bps < 50e6


@pytest.mark.parametrize("how", ["rates", "relay"])
def test_emulated_links_send_nothing_by_reference(build: Build, how: str) -> None:
    """An emulated link sends no chunks by reference, because those bytes would bypass the emulation."""
    with emulating(relay="127.0.0.1:1" if how == "relay" else ""):
        nodes = build("ab")
    if how == "rates":
        emulate(nodes, 200e6)
    for node in nodes.values():
        node.links.generation = Generation()
    connect(nodes, "ab")
    a, b = nodes.values()
    for node in (a, b):
        node.wait(lambda node=node: node.reports)
        assert not node.do(lambda node=node: any(link.by_reference for link in node.links._links.values()))


def test_facts_tell_bytes_and_rates_per_link(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    (before,) = a.do(a.links.facts)["links"]
    assert before["sent_bps"] == 0, "since when?"
    b.do(b.links.facts)
    send_chunk(a, b.id, bytes(5 << 20))
    b.wait(lambda: b.chunks)
    facts = a.do(a.links.facts)
    (here,), (there,) = facts["links"], b.do(b.links.facts)["links"]
    assert (here["peer"], there["peer"]) == (b.id, a.id)
    assert here["sent_nbytes"] >= 5 << 20
    assert there["received_nbytes"] >= 5 << 20
    assert here["sent_bps"] > 0
    assert here["queued_nbytes"] == 0
    assert "rate_bps" not in here
    assert (facts["relayed"], facts["waiting"]) == (0, 0)
    b.close()
    a.wait(lambda: not a.is_up(b.id))
    assert a.do(a.links.facts)["links"] == []


def test_facts_tell_what_was_measured(build: Build) -> None:
    nodes = build("ab")
    emulate(nodes, 40e6)
    connect(nodes, "ab")
    a = nodes["a"]
    a.wait(lambda: a.reports)
    (row,) = a.do(a.links.facts)["links"]
    assert row["rate_bps"] == round(a.reports[0].rate_bps)
    assert row["latency_s"] == a.reports[0].latency_s


def test_bytes_of_a_peer_are_counted_over_all_its_links(build: Build) -> None:
    nodes = build("ab")
    connect(nodes, "ab")
    a, b = nodes.values()
    send_chunk(a, b.id, bytes(1 << 20))
    b.wait(lambda: len(b.chunks) == 1)
    a.do(lambda: a.links._links[b.id]._sock.shutdown(socket.SHUT_RDWR))
    a.wait(lambda: [up for _, up, _ in a.changes] == [True, False, True], "the link made anew")
    send_chunk(a, b.id, bytes(1 << 20))
    b.wait(lambda: len(b.chunks) == 2)
    (row,) = a.do(a.links.facts)["links"]
    assert row["sent_nbytes"] >= 2 << 20
