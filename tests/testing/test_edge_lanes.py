"""Tests the arithmetic of emulated links in virtual time: rates, sharing, lateness, latency."""

from __future__ import annotations

import heapq
import random

import pytest

from chaos_lightning.testing.edge.lanes import LATE_S, MAX_PIECE_NBYTES, MIN_PIECE_NBYTES, Lane, Meter, Wire

MBPS = 1e6


def run(lanes: list[Lane], until_s: float, *, late_s: float = 0.0, seed: int = 1) -> list[int]:
    """Simulates byte streams that always have data until `until_s`, with wake-ups up to `late_s` late; returns the
    bytes that each sent.
    """
    rng = random.Random(seed)
    sent = [0] * len(lanes)
    queue = [(0.0, 0.0, i) for i in range(len(lanes))]
    while queue[0][0] < until_s:
        when, _, i = heapq.heappop(queue)
        now = when + rng.uniform(0, late_s)
        lane = lanes[i]
        if lane.free_at <= now:
            lane.take(lane.piece_nbytes, now, waited=True)
            sent[i] += lane.piece_nbytes
        heapq.heappush(queue, (max(lane.free_at, when), lane.served_at, i))
    return sent


def rate(nbytes: int, seconds: float) -> float:
    return nbytes * 8 / seconds


@pytest.mark.parametrize("late_s", [0.0, 0.004, LATE_S / 2])
@pytest.mark.parametrize("mbps", [1, 100, 1000, 10_000])
def test_a_link_carries_its_rate_however_late_its_keeper_wakes(mbps: int, late_s: float) -> None:
    seconds = 1.0 if mbps > 1000 else 20.0
    sent = run([Lane(Wire(mbps * MBPS, 0.0))], seconds, late_s=late_s)
    assert rate(sent[0], seconds) == pytest.approx(mbps * MBPS, rel=0.03)


def test_who_slept_too_long_does_not_make_up_for_it() -> None:
    lane = Lane(Wire(8 * MBPS, 0.0))
    lane.take(10_000, 0.0, waited=False)
    assert lane.take(10_000, 5.0, waited=True) == pytest.approx(5.0 - LATE_S + 0.01)


def test_who_had_nothing_to_send_begins_when_it_has() -> None:
    lane = Lane(Wire(8 * MBPS, 0.0))
    assert lane.take(1_000_000, 0.0, waited=False) == pytest.approx(1.0)
    assert lane.take(500_000, 3.0, waited=False) == pytest.approx(3.5)


def test_a_message_is_late_by_its_length_and_the_latency() -> None:
    lane = Lane(Wire(100 * MBPS, 0.02))
    assert lane.take(125_000, 7.0, waited=False) == pytest.approx(7.0 + 0.01 + 0.02)
    assert lane.free_at == pytest.approx(7.01)


def test_bytes_do_not_overtake_each_other_when_the_latency_falls() -> None:
    wire = Wire(100 * MBPS, 0.5)
    lane = Lane(wire)
    first = lane.take(1000, 0.0, waited=False)
    wire.latency_s = 0.0
    assert lane.take(1000, 0.1, waited=False) == first
    assert lane.take(1000, 2.0, waited=False) == pytest.approx(2.0, abs=0.001)


def test_flows_of_one_link_share_it_evenly() -> None:
    wire = Wire(300 * MBPS, 0.0)
    sent = run([Lane(wire) for _ in range(3)], 5.0, late_s=0.001)
    assert [rate(n, 5.0) for n in sent] == pytest.approx([100 * MBPS] * 3, rel=0.03)
    assert wire.nbytes == sum(sent)


def test_links_of_one_access_share_it_evenly() -> None:
    """Three links share an access of 200 Mbps: it is fully used, the slow link gets its own rate, the two fast ones
    equal parts.
    """
    access = Meter(200 * MBPS)
    lanes = [Lane(Wire(mbps * MBPS, 0.0), [access]) for mbps in (1000, 300, 20)]
    sent = run(lanes, 10.0)
    assert rate(sum(sent), 10.0) == pytest.approx(200 * MBPS, rel=0.02)
    assert rate(sent[2], 10.0) == pytest.approx(20 * MBPS, rel=0.1)
    assert rate(sent[0], 10.0) == pytest.approx(rate(sent[1], 10.0), rel=0.1)


def test_directions_do_not_share() -> None:
    forth, back = Wire(50 * MBPS, 0.0), Wire(50 * MBPS, 0.0)
    sent = run([Lane(forth), Lane(back)], 4.0)
    assert [rate(n, 4.0) for n in sent] == pytest.approx([50 * MBPS] * 2, rel=0.02)


def test_a_change_of_rate_counts_for_what_is_still_to_be_sent() -> None:
    meter = Meter(8 * MBPS)
    lane = Lane(Wire(1e12, 0.0), [meter])
    lane.take(1_000_000, 0.0, waited=False)
    meter.change(80 * MBPS, 0.5)
    assert meter.free_at == pytest.approx(0.55)
    meter.change(8 * MBPS, 3.0)
    assert meter.free_at == pytest.approx(0.55)


def test_pieces_are_short_in_time_and_bounded_in_size() -> None:
    sizes = {mbps: Lane(Wire(mbps * MBPS, 0.0)).piece_nbytes for mbps in (0.01, 100, 100_000)}
    assert sizes == {0.01: MIN_PIECE_NBYTES, 100: 25_000, 100_000: MAX_PIECE_NBYTES}
    assert Lane(Wire(1000 * MBPS, 0.1)).in_flight_nbytes > 12_500_000
