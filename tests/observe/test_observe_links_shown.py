"""Links on the live board: their traffic and rates, and broken links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from observe_synthetic import Script
from test_observe_shown import lines_of

from chaos_lightning.events.events import read_events
from chaos_lightning.machine.units import rate
from chaos_lightning.observe.render import LINKS_SHOWN, Dashboard, LinkRow, from_status, from_timeline
from chaos_lightning.observe.timeline import Timeline


def test_board_tells_what_links_carry_and_can_carry(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(3)
    slow = {"sent_bps": 4_000_000, "received_bps": 5_000_000, "rate_bps": 10_000_000, "latency_s": 0.02}
    run.say("a~1", "links", links=[{"peer": "b~1", **slow, "sent_bps": 1}], relayed=0, waiting=0)
    quick = {"sent_bps": 2_500_000_000, "received_bps": 0}
    run.say("a~1", "links", links=[{"peer": "b~1", **slow}, {"peer": "c~1", **quick}], relayed=0, waiting=0)
    fast = {"sent_bps": 6_000_000, "received_bps": 0, "rate_bps": 300_000_000, "latency_s": 0.02}
    run.say("b~1", "links", links=[{"peer": "a~1", **fast}, {"peer": "gone~1", **fast}], relayed=0, waiting=0)
    run.say("c~1", "links", links="nonsense")
    timeline = Timeline.of(read_events(run.write(tmp_path)))
    board = from_timeline(timeline, run.now + 1)
    assert board.links == [
        LinkRow("a~1", "b~1", 4e6, 6e6, 10e6, 300e6, 0.02),
        LinkRow("a~1", "c~1", 2.5e9, 0.0, None, None, None),
    ]
    text = lines_of(board, width=80)
    assert re.search(r"a b +4 Mbps +6 Mbps +10 Mbps +300 Mbps +20 ms", text)
    assert re.search(r"a c +2.5 Gbps +0 bps +- +- +-", text)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert from_timeline(timeline, run.now + 60).links == [], "nobody has told anything lately"


def test_links_of_a_slow_job_stay_on_the_board(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(10)
    run.say("a~1", "links", links=[{"peer": "b~1", "sent_bps": 1, "received_bps": 1}], relayed=0, waiting=0)
    for _ in range(10):
        run.now += 60
        run.steps(1)
    assert from_timeline(Timeline.of(read_events(run.write(tmp_path))), run.now).links == [
        LinkRow("a~1", "b~1", 1.0, 1.0)
    ]


def test_board_from_a_status_tells_what_links_can_carry_and_which_are_missing() -> None:
    used = {"a": "a~1", "b": "b~1", "state": "in use", "latency_s": 0.001, "there_bps": 3e8, "back_bps": 1e6}
    down = {"a": "a~1", "b": "c~1", "state": "down: a~1: [closed]", "latency_s": None, "there_bps": None}
    plain = {"a": "b~1", "b": "c~1", "state": "in use", "latency_s": None, "there_bps": None, "back_bps": None}
    board = from_status({"machine": {"links": [used, down, plain, "nonsense"]}})
    assert board.links == [
        LinkRow("a~1", "b~1", can_there_bps=3e8, can_back_bps=1e6, latency_s=0.001),
        LinkRow("a~1", "c~1", state="down: a~1: [closed]"),
    ]
    text = lines_of(board)
    assert "now there" not in text
    assert re.search(r"a b +300 Mbps +1 Mbps +1 ms", text)
    assert re.search(r"a c +- +- +- +down: a~1: \[closed\]", text)


def test_board_shows_the_links_that_matter_most() -> None:
    links = [LinkRow("a", f"b{i}", 1e6 * i, 0.0) for i in range(LINKS_SHOWN + 5)]
    text = lines_of(Dashboard("t", links=links))
    assert "and 5 more" in text
    assert f"a b{LINKS_SHOWN + 4} " in text
    assert "a b4 " not in text
    links = [LinkRow("a", f"b{i}", can_there_bps=1e6 * (i + 1), can_back_bps=1e9) for i in range(LINKS_SHOWN + 1)]
    links.append(LinkRow("a", "c", state="not there yet"))
    text = lines_of(Dashboard("t", links=links))
    assert "not there yet" in text
    assert "a b0 " in text
    assert f"a b{LINKS_SHOWN} " not in text


@pytest.mark.parametrize(
    ("bits_per_s", "words"),
    [
        (0, "0 bps"),
        (999, "999 bps"),
        (1500, "1.5 kbps"),
        (999_600, "1 Mbps"),
        (12.34e6, "12.3 Mbps"),
        (25e12, "25000 Gbps"),
    ],
)
def test_rates_in_words(bits_per_s: float, words: str) -> None:
    assert rate(bits_per_s) == words
