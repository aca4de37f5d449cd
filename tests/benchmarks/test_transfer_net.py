"""Tests the emulated edge network of `benchmarks.transfer.pulls`: its links, its states and its bounds."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest

from benchmarks.common import MIB
from benchmarks.transfer import pulls as transfer
from benchmarks.transfer.net import Ingress, Network, Shaper, layout_of

SO_MAX_PACING_RATE = 47


def rate_of(sock: socket.socket) -> int:
    """Returns the rate in bits per second to which the kernel limits this socket."""
    return 8 * int(struct.unpack("Q", sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0])


def connected() -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    return near, far


def test_a_link_has_its_rate_however_many_connections_share_it() -> None:
    pairs = [connected() for _ in range(3)]
    near = [n for n, _ in pairs]
    shaper = Shaper({"peer": 8e6})
    for sock in near:
        shaper.add("peer", sock)
    for sock in near:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until it has more to send than the link takes
                sock.send(b"x" * MIB)
    shared = threading.Event()
    while sum(map(rate_of, near)) > 8e6:
        assert not shared.wait(0.005)
    shaper.rate("peer", 16e6)
    assert sum(map(rate_of, near)) == pytest.approx(16e6, abs=100)
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_what_arrives_through_the_ingress_is_what_was_sent() -> None:
    near, far = connected()
    sent = bytes(range(256)) * 4000
    with far:
        shaped = Ingress(800e6).shape(near)
        thread = threading.Thread(target=far.sendall, args=(sent,))
        thread.start()
        got = bytearray(len(sent))
        view, at = memoryview(got), 0
        with shaped:
            while at < len(sent):
                if at % 2:
                    at += shaped.recv_into(view[at : at + 1000])
                else:
                    at += shaped.recvmsg_into([view[at : at + 100_001], view[at + 100_001 :]])[0]
        thread.join()
    assert got == sent


@pytest.mark.parametrize("state_mib", [1.7, 50.0, 178.0, 500.0])
def test_a_layout_has_the_size_it_was_made_for(state_mib: float) -> None:
    layout = layout_of(state_mib)
    assert sum(layout) == pytest.approx(state_mib * MIB, rel=0.01)
    assert all(size > 0 and size % 4 == 0 for size in layout)


@pytest.mark.slow
def test_a_pull_over_the_emulated_edge(tmp_path) -> None:  # type: ignore[no-untyped-def]
    links = {("a", transfer.NEW): 100e6, ("b", transfer.NEW): 200e6, ("b", "c"): 100e6}
    with Network(links, transfer.NEW, disk_bps=0.0, folder=tmp_path) as net:
        bench = transfer.Bench(net, tmp_path, seed=1)
        bench.load(layout_of(16.0))
        assert set(bench.rates) == {"a", "b"}
        case = bench.plain("adaptive", bench.exact())
        assert case.report["by_source"].keys() <= {"a", "b"}
        assert case.report["disagreeing"] == ()
        assert case.bound_s == pytest.approx(8 * bench.newcomer.nbytes / sum(bench.rates.values()))
        assert bench.plain("multi_source", None).report["by_source"].keys() == {"a", "b", "c"}
        assert bench.plain("stop_resume", None).report["by_source"].keys() == {"a"}
        killed = bench.killed()
        assert list(killed.report["failed"]) == ["b"]
        again = bench.plain("even", bench.exact())
        assert again.report["by_source"].keys() == {"a", "b"}  # it was replaced, with the same state
