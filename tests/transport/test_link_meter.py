"""Tests how a link's rate is measured from its traffic: estimates from samples, samples from counters, and a real paced
link.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.transport.link_meter import (
    PART_OF_OUTAGE,
    SAMPLE_NBYTES,
    SOONEST_S,
    Estimate,
    LinkMeter,
    Reading,
    ReprobeSchedule,
    read_counters,
)
from chaos_lightning.transport.pacing import pace

MBIT = 1e6


def fold(estimate: Estimate, *rates_bps: float) -> list[float]:
    """Feeds an estimate with samples of these rates, of 200 ms or more each; returns the rates that it reports."""
    told = [
        estimate.fold(max(SAMPLE_NBYTES, round(r * 0.2 / 8)), max(0.2, SAMPLE_NBYTES * 8 / r), 1.0) for r in rates_bps
    ]
    return [t for t in told if t is not None]


def test_without_a_probe_two_samples_are_the_first_that_is_told() -> None:
    estimate = Estimate()
    assert fold(estimate, 150 * MBIT) == []
    assert fold(estimate, 100 * MBIT) == [pytest.approx(125 * MBIT)]


def test_few_bytes_say_nothing_until_there_are_enough() -> None:
    estimate = Estimate()
    estimate.known(1 * MBIT, 0.0)
    for _ in range(7):
        assert estimate.fold(SAMPLE_NBYTES // 4, 0.03, 1.0) is None
    assert estimate.fold(SAMPLE_NBYTES // 4, 0.03, 1.0) == pytest.approx(SAMPLE_NBYTES * 8 / 0.12)


def test_a_slow_link_is_judged_by_time() -> None:
    estimate = Estimate()
    for _ in range(3):
        assert estimate.fold(20 << 10, 0.6, 1.0) is None
    assert estimate.fold(20 << 10, 0.6, 1.0) == pytest.approx((40 << 10) * 8 / 1.2)


def test_a_link_with_bytes_waiting_that_carries_none_has_rate_zero() -> None:
    estimate = Estimate()
    estimate.known(100 * MBIT, 0.0)
    assert [estimate.fold(0, 1.0, 1.0) for _ in range(4)] == [None, None, None, 0.0]
    assert fold(estimate, 50 * MBIT, 50 * MBIT) == [pytest.approx(50 * MBIT)], "and when it carries again, that is told"


def test_noise_is_not_told() -> None:
    estimate = Estimate()
    estimate.known(100 * MBIT, 0.0)
    assert fold(estimate, *[100 * MBIT * f for f in (1.2, 0.8, 1.1, 0.9, 1.24, 0.76) * 5]) == []
    assert estimate.rate_bps == pytest.approx(100 * MBIT, rel=0.25)


def test_one_odd_sample_is_chance() -> None:
    estimate = Estimate()
    estimate.known(100 * MBIT, 0.0)
    assert fold(estimate, 10 * MBIT, 100 * MBIT, 10 * MBIT, 300 * MBIT, 100 * MBIT) == []
    assert estimate.rate_bps == pytest.approx(100 * MBIT)


def test_two_odd_samples_are_a_new_rate_and_told_once() -> None:
    estimate = Estimate()
    estimate.known(100 * MBIT, 0.0)
    assert fold(estimate, *[10 * MBIT] * 10) == [pytest.approx(10 * MBIT)]
    assert fold(estimate, *[100 * MBIT] * 10) == [pytest.approx(100 * MBIT)]


def test_a_slow_drift_is_told_when_it_has_become_large() -> None:
    estimate = Estimate()
    estimate.known(100 * MBIT, 0.0)
    told = fold(estimate, *[MBIT * (100 - i) for i in range(60)])
    assert told
    assert all(abs(a - b) > 0.2 * b for a, b in zip(told, [100 * MBIT, *told], strict=False))
    assert abs(estimate.rate_bps - 41 * MBIT) < 0.3 * 41 * MBIT


@given(st.lists(st.tuples(st.integers(0, 10**8), st.floats(1e-3, 5.0)), max_size=40), st.floats(0, 1e10))
def test_what_was_told_is_never_far_from_what_is_known(pieces: list[tuple[int, float]], first: float) -> None:
    estimate = Estimate()
    estimate.known(first, 0.0)
    last = first
    for nbytes, seconds in pieces:
        told = estimate.fold(nbytes, seconds, 1.0)
        if told is not None:
            assert abs(told - last) > 0.25 * last or last == 0
            last = told
        assert estimate.rate_bps >= 0
        assert abs(estimate.rate_bps - last) <= 0.25 * last + 1e-6 * last


class Counters:
    """Simulated kernel counters of connections, and a meter that reads them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.of: dict[object, tuple[float, float, float]] = {}
        self.told: list[tuple[str, float]] = []
        self.meter = LinkMeter(lambda peer, rate: self.told.append((peer, rate)), self.read)  # type: ignore[arg-type]

    def read(self, sock: object) -> Reading | None:
        acked, unsent, busy = self.of[sock]
        return Reading(self.now, round(acked), round(unsent), busy)

    def go(self, seconds: float, sock: object, rate_bps: float, unsent: int = 1 << 20, busy: float = 1.0) -> None:
        acked, _, was_busy = self.of[sock]
        self.of[sock] = (acked + rate_bps / 8 * seconds, unsent, was_busy + busy * seconds)

    def tick(self, seconds: float = 0.1, **skip: object) -> bool:
        self.now += seconds
        return self.meter.tick(self.now, **skip)  # type: ignore[arg-type]


def watched(*socks: object, peer: str = "b") -> Counters:
    counters = Counters()
    for sock in socks:
        counters.of[sock] = (0.0, 1 << 20, 0.0)
        counters.meter.watch(peer, sock)  # type: ignore[arg-type]
    counters.tick()
    return counters


def test_a_filled_link_is_measured() -> None:
    counters = watched("s")
    for _ in range(5):
        counters.go(0.1, "s", 80 * MBIT)
        assert counters.tick(), "bytes wait: the next tick should come soon"
    assert counters.told == [("b", pytest.approx(80 * MBIT))]
    assert counters.meter.rate("b") == pytest.approx(80 * MBIT)
    assert not counters.meter.stale("b", counters.now + 10, 60)
    assert counters.meter.stale("b", counters.now + 100, 60)


def test_a_link_that_the_job_does_not_fill_says_nothing() -> None:
    counters = watched("s")
    for _ in range(20):
        counters.go(0.1, "s", 80 * MBIT, unsent=0)
        assert not counters.tick()
    for i in range(20):  # something waits at every other look only
        counters.go(0.1, "s", 80 * MBIT, unsent=(i % 2) << 20)
        counters.tick()
    for _ in range(20):  # something waits at both ends, but the link was idle in between
        counters.go(0.1, "s", 8 * MBIT, busy=0.5)
        counters.tick()
    assert counters.told == []


def test_connections_to_one_peer_share_their_path() -> None:
    counters = watched("link", "bulk")
    for _ in range(5):
        counters.go(0.1, "link", 20 * MBIT, unsent=0)
        counters.go(0.1, "bulk", 60 * MBIT)
        counters.tick()
    assert counters.told == [("b", pytest.approx(80 * MBIT))]


def test_what_a_probe_sends_is_no_traffic() -> None:
    counters = watched("s")
    for _ in range(5):
        counters.go(0.1, "s", 80 * MBIT)
        counters.tick(skip=lambda peer: peer == "b")
    assert counters.told == []


def test_a_connection_that_is_not_watched_any_more_is_not_read() -> None:
    counters = watched("s")
    counters.meter.unwatch("b", "s")  # type: ignore[arg-type]
    counters.of.clear()
    assert not counters.tick()
    counters.meter.forget("b")
    assert counters.meter.rate("b") == 0.0
    assert not counters.meter.stale("b", 1e9, 1.0)


def test_who_has_bytes_to_send_is_known() -> None:
    counters = watched("link", "bulk")
    counters.go(0.1, "link", 20 * MBIT, unsent=0)
    counters.go(0.1, "bulk", 60 * MBIT)
    counters.tick()
    assert counters.meter.waiting("b") == ["bulk"]
    assert counters.meter.waiting("nobody") == []


# ---------------------------------------------------------------------- when to probe again


def watch(reprobe: ReprobeSchedule, from_s: float, until_s: float, rate_bps: float) -> list[float]:
    """Returns the times at which a link of this rate is probed if it is checked ten times a second."""
    probed, heard_at = [], from_s
    for tick in range(round(10 * from_s), round(10 * until_s)):
        if tick / 10 - heard_at > reprobe.pause_s(tick / 10):
            heard_at = tick / 10
            probed.append(heard_at)
            reprobe.heard(rate_bps, heard_at)
    return probed


def test_a_link_that_carries_what_it_did_is_probed_seldom() -> None:
    reprobe = ReprobeSchedule(60.0)
    for at_s, rate_bps in ((0.0, 100 * MBIT), (1.0, 80 * MBIT), (2.0, 300 * MBIT), (3.0, 230 * MBIT)):
        reprobe.heard(rate_bps, at_s)
        assert not reprobe.behind
    assert len(watch(reprobe, 3.0, 303.0, 230 * MBIT)) == 4


@pytest.mark.parametrize("slow_bps", [0.0, 5 * MBIT, 70 * MBIT])
@pytest.mark.parametrize("outage_s", [1.0, 5.0, 20.0, 100.0, 1000.0])
def test_a_recovery_is_noticed_after_a_part_of_the_outage(slow_bps: float, outage_s: float) -> None:
    reprobe = ReprobeSchedule(60.0)
    reprobe.heard(100 * MBIT, 0.0)
    reprobe.heard(slow_bps, 50.0)
    assert reprobe.behind
    back_s = 50.0 + outage_s
    probed = watch(reprobe, 50.0, back_s + 61.0, slow_bps)
    noticed_s = next(at_s for at_s in probed if at_s >= back_s) - back_s
    assert noticed_s <= min(60.2, max(SOONEST_S, PART_OF_OUTAGE * (outage_s + noticed_s)) + 0.2)


def test_a_link_that_stays_slow_costs_few_probes_and_is_then_taken_as_it_is() -> None:
    reprobe = ReprobeSchedule(60.0)
    reprobe.heard(100 * MBIT, 0.0)
    reprobe.heard(10 * MBIT, 0.0)
    probed = watch(reprobe, 0.0, 3600.0, 10 * MBIT)
    assert len([at_s for at_s in probed if at_s < 300]) < 30
    assert len([at_s for at_s in probed if at_s >= 300]) <= 55
    assert not reprobe.behind
    reprobe.heard(5 * MBIT, 3600.0)
    assert reprobe.behind, "it can fall again"


def test_a_link_that_carries_nothing_for_good_is_left_alone() -> None:
    reprobe = ReprobeSchedule(60.0)
    reprobe.heard(0.0, 0.0)
    assert reprobe.behind, "from the start"
    watch(reprobe, 0.0, 400.0, 0.0)
    assert len(watch(reprobe, 400.0, 1000.0, 0.0)) <= 10
    reprobe.heard(100 * MBIT, 1000.0)
    assert not reprobe.behind


def test_a_link_that_recovers_in_part_is_watched_closely_again() -> None:
    reprobe = ReprobeSchedule(60.0)
    reprobe.heard(100 * MBIT, 0.0)
    reprobe.heard(10 * MBIT, 0.0)
    assert reprobe.pause_s(100.0) == 25.0
    reprobe.heard(50 * MBIT, 100.0)
    assert reprobe.pause_s(100.5) == SOONEST_S
    reprobe.heard(80 * MBIT, 102.0)
    assert reprobe.pause_s(102.0) == 60.0


def test_the_kernel_counts_what_a_real_connection_carries() -> None:
    """The meter finds the rate of a real connection that the kernel paces at 40 Mbit/s."""
    total = 3 << 20
    told: list[tuple[str, float]] = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        there, _ = server.accept()
        with there:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            pace(sock, 40 * MBIT)
            first = read_counters(sock)
            assert first is not None
            received: list[int] = []

            def drain() -> None:
                while sum(received) < total:
                    received.append(len(there.recv(1 << 16)))

            reader = threading.Thread(target=drain, daemon=True)
            reader.start()
            meter = LinkMeter(lambda peer, rate: told.append((peer, rate)))
            meter.watch("b", sock)
            sender = threading.Thread(target=sock.sendall, args=(bytes(total),), daemon=True)
            sender.start()
            pause = threading.Event()
            deadline = time.monotonic() + 60
            while reader.is_alive() and time.monotonic() < deadline:
                meter.tick(time.monotonic())
                pause.wait(0.02)
            reader.join(1)
            sender.join(1)
            last = read_counters(sock)
    assert sum(received) == total
    assert last is not None
    assert last.acked_nbytes - first.acked_nbytes >= total - (64 << 10)
    assert told, "3 MiB are several samples"
    assert 10 * MBIT < told[0][1] < 60 * MBIT, told


def test_who_has_no_counters_is_not_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert read_counters(one) is None
    sock = socket.socket()
    sock.close()
    assert read_counters(sock) is None
