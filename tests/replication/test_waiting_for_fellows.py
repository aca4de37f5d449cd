"""Tests that newcomers that wait for each other's copies of the state are refused only once no copy grows any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from replication_support import HEAD, LIMIT_S, PATIENT, SEQ, Proxy, ThreadDonor, dial, donors, numbered

from chaos_lightning.errors import NoDonorError
from chaos_lightning.membership.donors import groups
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId
from chaos_lightning.replication import StateServerConfig, server
from chaos_lightning.replication.pull import pull_state
from chaos_lightning.replication.source import Endpoint

TIMEOUT_S = 30.0
FRESH_S = 15.0
"""A range of 256 KiB takes 8 s of the clock that jumps: within so many seconds everybody hears that one came."""
SETTINGS = StateServerConfig(publish_timeout_s=TIMEOUT_S, pending_interval_s=0.02)


class Clock:
    """Clock that the state servers read: it runs as usual, and can be moved ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


class Founders:
    """Founders of a job, each with a state server, and with a thread that fetches the first founder's state."""

    def __init__(self, started: list[ThreadDonor], clock: Clock) -> None:
        self._clock = clock
        self.servers = {d.member: d.server for d in started}
        self.ways = {d.member: d.endpoint for d in started}
        self.states = {d.member: numbered(16, 1 << 16, seed=i) for i, d in enumerate(started)}
        self.failed: dict[str, BaseException] = {}
        self._heard = threading.Condition()
        self._words: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def publish(self, name: str) -> None:
        state = self.states[name]
        self.servers[name].publish(HEAD, SEQ, state.tensors(), state.manifest())

    def load(self, name: str, asked: list[Endpoint]) -> None:
        """Starts to fetch the state from the donors `asked`, and to serve it once it is complete."""
        holders = {"m0"}

        def grew(idle_s: float = 0.0) -> None:
            self.servers[name].grew(idle_s)
            with self._heard:
                self._words[name] += 1
                self._heard.notify_all()

        def run() -> None:
            loading = frozenset(e.member for e in asked if e.member not in holders)
            try:
                pull_state(
                    asked, dial, head=HEAD, seq=SEQ, state=self.states[name], config=PATIENT, loading=loading, grew=grew
                )
            except BaseException as error:
                with self._heard:
                    self.failed[name] = error
                    self._heard.notify_all()
            else:
                self.publish(name)

        self._threads.append(threading.Thread(target=run, name=name))
        self._threads[-1].start()

    def idle_s(self, name: str) -> float:
        return self._clock.monotonic() - self.servers[name]._grew_at

    def until(self, idle_s: float) -> None:
        """Waits until each founder knows that bytes came, there or elsewhere, at most `idle_s` ago."""
        waiting = [n for n in self.servers if n != "m0"]
        with self._heard:
            assert self._heard.wait_for(lambda: all(self.idle_s(n) < idle_s for n in waiting), LIMIT_S)

    def hear(self) -> None:
        """Waits until each founder has got another message, or one was refused."""
        with self._heard:
            before = dict(self._words)
            assert self._heard.wait_for(
                lambda: self.failed or all(self._words[n] > count for n, count in before.items()), LIMIT_S
            )

    def end(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def founders(count: int, clock: Clock) -> Iterator[Founders]:
    with donors(*(f"m{i}" for i in range(count)), config=SETTINGS) as started:
        yield Founders(started, clock)


def sparse(*links: tuple[int, int], count: int) -> View:
    members = tuple(Member(f"m{i}", f"m{i}", f"host-m{i}", "127.0.0.1", 7000) for i in range(count))
    specs = tuple(LinkSpec(f"m{a}", f"m{b}") for a, b in sorted(set(links)))
    return View(ViewId(1, 1), NO_VIEW, members, tuple(m.id for m in members[1:]), links=specs)


def test_eleven_founders_behind_a_slow_one_wait_for_it_and_for_each_other(clock: Clock) -> None:
    """A founder takes four timeouts to fetch the state but makes progress; eleven others, some of which learn of it
    only through others, wait for it.
    """
    count = 12
    links = [(0, 1), *((1, i) for i in range(2, 6)), *((i, i + 4) for i in range(2, 8))]
    links += [(i, 11) for i in range(2, 11)]
    view = sparse(*links, count=count)
    near = {m: {o for link in view.links for o in (link.a, link.b) if m in (link.a, link.b)} - {m} for m in view.ids()}
    passed = 1
    with founders(count, clock) as all_of_them:
        all_of_them.publish("m0")

        def slowly(data: bytearray, position: int) -> None:
            """Moves the clock ahead by 2 s for each 64 KiB, and waits until all founders know of these bytes."""
            nonlocal passed
            while position + len(data) > passed << 16:
                passed += 1
                clock.ahead_s += 2.0
                all_of_them.until(FRESH_S)

        slow = Proxy(all_of_them.ways["m0"], slowly)
        for name in (*view.joiners[1:], "m1"):
            asked = [m.id for m in groups(view, name, near[name])[0]]
            assert name == "m1" or "m0" not in asked
            ways = {**all_of_them.ways, "m0": slow.endpoint}
            all_of_them.load(name, [ways[m] for m in asked if m in near[name]])
        all_of_them.end()
        slow.close()
    assert not all_of_them.failed
    assert clock.ahead_s > 4 * TIMEOUT_S
    wanted = all_of_them.states["m0"]
    for mine in all_of_them.states.values():
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine.tensors(), wanted.tensors(), strict=True))


def test_founders_that_can_only_ask_each_other_are_refused(clock: Clock) -> None:
    """Two founders that report progress only because the other one does are refused in the end, since no bytes came."""
    with founders(3, clock) as three:
        three.servers["m1"].grew()
        three.load("m1", [three.ways["m2"]])
        three.load("m2", [three.ways["m1"]])
        three.until(FRESH_S)
        while not three.failed and clock.ahead_s < 3 * TIMEOUT_S:
            clock.ahead_s += TIMEOUT_S / 3
            three.hear()
        assert three.failed
        clock.ahead_s += TIMEOUT_S
        three.end()
    assert {name: type(error) for name, error in three.failed.items()} == {"m1": NoDonorError, "m2": NoDonorError}
    assert "not published within 30 s" in str(three.failed["m1"])
