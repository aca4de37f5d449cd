"""Tests the soak's faults of links: how they are chosen and declared, and how their effects are judged."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.checks import Freeze
from benchmarks.soak.link_checks import Line, LinkVerdict, check_links, read_lines
from benchmarks.soak.links import DECK, Hurt, Links, seconds_of
from chaos_lightning.events.events import EventLog
from chaos_lightning.membership.topology import connected
from chaos_lightning.testing.edge.relay import Way

NAMES = list("abcde")


class Relay:
    """Stand-in for the relay that records its orders."""

    def __init__(self) -> None:
        self.states: dict[frozenset[str], str] = {}
        self.rates: dict[frozenset[str], float] = {}

    def cut(self, one: str, other: str) -> None:
        self.states[frozenset((one, other))] = "cut"

    def stall(self, one: str, other: str) -> None:
        self.states[frozenset((one, other))] = "stall"

    def restore(self, one: str, other: str) -> None:
        self.states[frozenset((one, other))] = "whole"

    def shape(self, one: str, other: str, *, rate_bps: float, latency_s: float = 0.0) -> None:
        self.rates[frozenset((one, other))] = rate_bps


class Log:
    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def emit(self, name: str, **fields: Any) -> None:
        self.said.append({"name": name, **fields})


class Gate:
    """Stand-in for a member's way to the scheduler that only records whether it is open."""

    def __init__(self) -> None:
        self.is_open = True

    def cut(self) -> None:
        self.is_open = False

    def restore(self) -> None:
        self.is_open = True


class Net:
    """The soak's faults of links, with a clock and an operator that the test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 3) -> None:
        self.now = 100.0
        self.asked: list[tuple[str, str, bool]] = []
        monkeypatch.setattr("benchmarks.soak.links.time.monotonic", lambda: self.now)
        monkeypatch.setattr("benchmarks.soak.links.time.monotonic_ns", lambda: int(self.now * 1e9))
        monkeypatch.setattr(
            "chaos_lightning.control.requests.change_link", lambda _, a, b, add: self.asked.append((a, b, add))
        )
        self.relay, self.log = Relay(), Log()
        self.ways: Any = {name: Gate() for name in NAMES}
        self.links = Links(self.relay, self.log, "127.0.0.1:1", self.ways, seed, 3.0)

    def pass_by(self, seconds: float, names: list[str] = NAMES) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            self.links.turn(
                names,
                names,
            )

    def broken(self) -> set[frozenset[str]]:
        return {pair for pair, state in self.relay.states.items() if state != "whole"}


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    return Net(monkeypatch)


def test_every_kind_has_its_turn_and_everything_is_mended(net: Net) -> None:
    net.pass_by(120.0)
    assert set(net.links.counts()) == set(DECK)
    net.links.calm()
    assert not net.broken()
    assert all(rate >= 1e10 for rate in net.relay.rates.values())
    assert all(gate.is_open for gate in net.ways.values())
    assert {(a, b) for a, b, add in net.asked if not add} >= {(a, b) for a, b, add in net.asked if add}


def test_only_a_split_ever_parts_the_members_and_it_is_declared(net: Net) -> None:
    parted: set[tuple[str, ...]] = set()
    removed: set[frozenset[str]] = set()
    for _ in range(3000):
        net.pass_by(0.1)
        removed = {p for h in net.links.hurts if h.kind == "remove" and not h.stop for p in h.pairs}
        whole = {frozenset(p) for p in itertools.combinations(NAMES, 2)} - net.broken() - removed
        away = {name for h in net.links.hurts if h.part and not h.stop for name in h.part}
        assert connected([n for n in NAMES if n not in away], whole)
        if away:
            parted.add(tuple(sorted(away)))
            assert not connected(NAMES, whole)
            assert 2 * len(away) < len(NAMES)
    assert {len(p) for p in parted} == {1, 2}
    cuts = [x for x in net.log.said if x["kind"] == "cut" and x.get("part")]
    assert {x["part"] for x in cuts} == {"blink", "split", "island"}


def test_a_newcomer_is_parted_from_whoever_is_cut_off(net: Net) -> None:
    while not any(h.kind == "split" and not h.stop for h in net.links.hurts):
        net.pass_by(0.1)
    (hurt,) = [h for h in net.links.hurts if h.kind == "split" and not h.stop]
    net.links.came("new")
    assert all(net.relay.states[frozenset(("new", name))] == "cut" for name in hurt.part)
    net.pass_by(hurt.seconds + 0.2)
    assert not any(net.relay.states[frozenset(("new", name))] == "cut" for name in hurt.part)


def test_two_faults_of_one_link_end_with_the_later(net: Net) -> None:
    pair = frozenset("ab")
    first = Hurt("stall", {pair}, (), 1.0, int(net.now * 1e9))
    second = Hurt("split", {pair}, ("a",), 9.0, int(net.now * 1e9))
    net.links.hurts += [first, second]
    net.links._carry_out(pair)
    assert net.relay.states[pair] == "cut"
    net.links._mend(second)
    assert net.relay.states[pair] == "stall"
    net.links._mend(first)
    assert net.relay.states[pair] == "whole"


def test_nobody_may_hang_on_links_that_are_broken(net: Net) -> None:
    assert net.links.holds("abc", "abcd")
    less = [frozenset(p) for p in ("ad", "bd", "cd")]
    assert not net.links.holds("abc", "abcd", less), "d, which is frozen, would find nobody"
    assert net.links.holds("abc", "abcd", less[:2])
    assert not net.links.holds("abd", "abcd", less[:2]), "d would hang on c, which is frozen"
    assert not net.links.holds("a", "a"), "nobody may be left alone"


def test_half_of_the_links_faults_is_longer_than_members_wait() -> None:
    rng = random.Random(1)
    stalls = [seconds_of("stall", rng) for _ in range(200)]
    assert any(s < 3.0 for s in stalls)
    assert any(s > 3.0 for s in stalls)
    assert all(s < 1.0 for s in (seconds_of("blink", rng) for _ in range(200)))
    assert all(s >= 5.0 for s in (seconds_of("island", rng) for _ in range(200)))


# ------------------------------------------------------------------------------------------------ the judge


def line(at: float, name: str, member: str = "", **fields: Any) -> Line:
    return {"mono": at, "member": member, "name": name, **fields}


def view(at: float, number: int, members: str, links: str = "") -> Line:
    ids = [f"{m}~1" for m in members]
    pairs = [[f"{p[0]}~1", f"{p[1]}~1"] for p in links.split()]
    return line(at, "view", ids[0], id=f"1.{number}", members=ids, links=pairs)


def link(at: float, one: str, other: str, *, up: bool) -> list[Line]:
    name = "link_up" if up else "link_down"
    return [line(at, name, f"{a}~1", peer=f"{b}~1") for a, b in ((one, other), (other, one))]


def story(*, back_at: float = 14.0, last: float = 100.0) -> list[Line]:
    """Returns a log of a, b and c in which the link a-b breaks at 10 s, leaves the views at 10.5 s, and returns at
    `back_at`.
    """
    ups = [x for p in ("ab", "ac", "bc") for x in link(1.0, *p, up=True)]
    lines = [*ups, view(2.0, 1, "abc"), *link(10.0, "a", "b", up=False), view(10.5, 2, "abc", "ac bc")]
    lines += [*link(13.0, "a", "b", up=True), line(last, "closed", "a~1")]
    lines += [view(back_at, 3, "abc")] if back_at else []
    return sorted(lines, key=lambda x: x["mono"])


def cut(start: float = 10.0, stop: float = 12.5, kind: str = "cut") -> Hurt:
    return Hurt(kind, {frozenset("ab")}, (), stop - start, int(start * 1e9), int(stop * 1e9))


def judged(lines: list[Line], *hurts: Hurt, freezes: tuple[Freeze, ...] = ()) -> LinkVerdict:
    return check_links(lines, hurts, freezes)


def test_a_link_that_came_back_into_a_view_returned() -> None:
    found = judged(story(), cut())
    assert found.problems == []
    assert found.counts["mended links that returned"] == 1
    assert found.delays_s == [pytest.approx(1.5)]
    assert (found.counts["links that a view gave up"], found.counts["links that a view took in"]) == (1, 1)


def test_a_link_that_stands_and_is_in_no_view_stayed_away() -> None:
    found = judged(story(back_at=0.0), cut())
    assert len(found.problems) == 1
    assert found.counts["mended links that stayed away"] == 1


def test_a_link_that_is_in_a_view_and_does_not_stand_stayed_away() -> None:
    lines = [x for x in story() if not (x["name"] == "link_up" and x["mono"] == 13.0 and x["member"] == "b~1")]
    assert judged(lines, cut()).problems


@pytest.mark.parametrize("why", ["hurt again", "frozen", "the end", "left"])
def test_a_link_that_had_no_time_to_return_is_not_blamed(why: str) -> None:
    lines, hurts, freezes = story(back_at=0.0), [cut()], []
    if why == "hurt again":
        hurts.append(cut(20.0, 99.9))
    elif why == "frozen":
        freezes.append(Freeze("b", 1, int(20e9), int(30e9)))
    elif why == "the end":
        lines = story(back_at=0.0, last=20.0)
    else:
        lines = sorted([*lines, view(20.0, 3, "ac")], key=lambda x: x["mono"])
    found = judged(lines, *hurts, freezes=tuple(freezes))
    assert found.problems == []
    assert found.counts["mended links that were hurt again, or whose end left, before they had to"] >= 1


def test_whoever_is_cut_off_must_say_what_it_waits_for() -> None:
    hurt = cut(10.0, 18.0, "split")
    hurt.part = ("a",)
    notice = line(14.0, "notice", "a~1", text="it comes in when one stands", waiting=True)
    said = sorted([*story(), notice], key=lambda x: x["mono"])
    assert judged(said, hurt).counts["members cut off that said what they wait for"] == 1
    assert [x for x in judged(story(), hurt).problems if "did not say" in x]


@pytest.mark.parametrize(("after", "silent"), [("", False), ("notice", False), ("connected", True)])
def test_whoever_had_no_scheduler_when_it_was_cut_off_has_said_so(after: str, silent: bool) -> None:
    hurt = cut(10.0, 18.0, "split")
    hurt.part = ("a",)
    told = [line(4.0, "scheduler", "a~1", state="lost: no scheduler answered")]
    told += [line(6.0, "notice", "a~1", text="it waits for one", waiting=True)] if after == "notice" else []
    told += [line(8.0, "scheduler", "a~1", state=after)] if after == "connected" else []
    found = judged(sorted([*story(), *told], key=lambda x: x["mono"]), hurt).problems
    assert any("did not say" in x for x in found) == silent


# ------------------------------------------------------------------------------------------------ the way


@pytest.fixture
def echo() -> Iterator[str]:
    """Server that sends back everything that it receives."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    while data := sock.recv(1024):
                        sock.sendall(data)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10.0)


def through(way: Way) -> socket.socket:
    host, _, port = way.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def ended(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"x")
        return sock.recv(1) == b""
    except OSError:
        return True


def refused(way: Way) -> bool:
    try:
        with through(way) as sock:
            return ended(sock)
    except ConnectionError:  # reset before `connect` returned
        return True


def test_a_way_passes_bytes_and_the_end_of_them(echo: str) -> None:
    way = Way(echo)
    with through(way) as sock:
        sock.sendall(b"hello")
        sock.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: sock.recv(16), b"")) == b"hello"
    way.close()


def test_a_way_that_is_cut_resets_what_stands_and_what_comes_until_it_is_restored(echo: str) -> None:
    way = Way(echo)
    with through(way) as sock:
        sock.sendall(b"a")
        assert sock.recv(1) == b"a"
        way.cut()
        assert ended(sock)
    assert refused(way)
    way.restore()
    with through(way) as sock:
        sock.sendall(b"b")
        assert sock.recv(1) == b"b"
    way.close()
    way.close()
    with pytest.raises(ConnectionError):
        through(way)


def test_links_of_who_has_left_do_not_keep_the_others_from_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak waits for a removed link to return only while both its ends are in the job, since a member that has
    left may never return.
    """
    net = Net(monkeypatch)
    net.links.hurts.append(Hurt("remove", {frozenset("ab")}, (), 1.0, int(net.now * 1e9)))
    assert not net.links.calm_now(NAMES)
    assert net.links.calm_now(NAMES[1:])


def test_short_lines_of_the_logs_are_read_whole(tmp_path: Path) -> None:
    with EventLog.in_directory(tmp_path, "a") as log:
        log.identify("a~1")
        for step in range(1, 4):
            views = {"view": "1.1", "next_view": "1.1"}
            log.emit("committed", seq=step, kind="step", step=step, header=f"h{step}", prev=f"h{step - 1}", **views)
    (path,) = tmp_path.iterdir()
    written = path.read_text().splitlines()
    assert any('"name"' not in line for line in written), "none is short"
    found = [(line["name"], line["member"], line["seq"]) for line in read_lines(tmp_path) if "seq" in line]
    assert found == [("committed", "a~1", step) for step in range(1, 4)]
