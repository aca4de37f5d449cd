"""Tests the adaptive policy in virtual time, on links that change and die, against a lower bound on the duration.

The work queue and the policy are the real ones; links are arithmetic. A link sends the requests that it was given in
order, at its rate of the moment; a request and its bytes each take the link's latency.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from benchmarks.transfer.policies import policy_of
from chaos_lightning.replication import Job, make_policy
from chaos_lightning.replication.policy import Request, TransferPolicy
from chaos_lightning.replication.work_queue import WorkQueue

TICK_S = 0.001
GRAIN = 1 << 20


@dataclass
class Link:
    """Simulated link; `rate` gives its bytes per second at any time, and the sources know at once when it has died."""

    rate: Callable[[float], float]
    latency_s: float = 0.001
    dies_at: float = float("inf")
    requests: deque[tuple[float, Request]] = field(default_factory=deque)


class Race:
    """Simulated pull of `nbytes` bytes over these links."""

    def __init__(self, nbytes: int, links: dict[str, Link], policy: TransferPolicy, depth: int = 2) -> None:
        self.now = 0.0
        self.links = links
        self.depth = depth
        jobs = [Job(at, min(at + GRAIN, nbytes)) for at in range(0, nbytes, GRAIN)]
        self.work_queue = WorkQueue(jobs, policy, clock=lambda: self.now)
        for name in links:
            self.work_queue.join(name)
        self.work_queue.assign(list(links))
        self.nbytes = nbytes

    def run(self) -> float:
        """Runs the simulated pull; returns the seconds until it is complete."""
        while not self.work_queue.over:
            assert self.now < 1000, "it does not end"
            for name in [n for n, link in self.links.items() if self.now >= link.dies_at]:
                del self.links[name]
                self.work_queue.dismiss(name)
            for name, link in self.links.items():
                self._ask(name, link)
            self.now += TICK_S
            for link in self.links.values():
                self._send(link)
        return self.now

    def _ask(self, name: str, link: Link) -> None:
        while request := self.work_queue.take(name, depth=self.depth, wait=not link.requests, deadline=self.now):
            link.requests.append((self.now, request))

    def _send(self, link: Link) -> None:
        budget = link.rate(self.now) * TICK_S
        while budget > 0 and link.requests and link.requests[0][0] + 2 * link.latency_s <= self.now:
            request = link.requests[0][1]
            part = min(int(budget) + 1, request.job.nbytes - request.got)
            budget -= part
            self.work_queue.arrived(request, part)
            if request.got == request.job.nbytes:
                link.requests.popleft()
                self.work_queue.done(request, [])


def optimum(nbytes: int, links: dict[str, Link]) -> float:
    """Returns the seconds that a pull takes at least: all links are busy until the end, with perfect foresight."""
    now, left = 0.0, float(nbytes)
    while left > 0:
        now += TICK_S
        for link in links.values():
            if 2 * link.latency_s <= now < link.dies_at:
                left -= link.rate(now) * TICK_S
    return now


def constant(mbps: float) -> Callable[[float], float]:
    return lambda now: mbps * 125_000


def falling(mbps: float, at: float, to: float) -> Callable[[float], float]:
    return lambda now: mbps * 125_000 * (1.0 if now < at else to)


def race(
    nbytes: int, links: dict[str, Link], estimates: dict[str, tuple[float, float]] | None
) -> tuple[float, WorkQueue]:
    bound = optimum(nbytes, links)
    run = Race(nbytes, dict(links), make_policy("adaptive", estimates))
    return run.run() / bound, run.work_queue


def three() -> dict[str, Link]:
    return {"a": Link(constant(100)), "b": Link(constant(300)), "c": Link(constant(600))}


def exact(links: dict[str, Link], wrong: dict[str, float] | None = None) -> dict[str, tuple[float, float]]:
    return {m: (k.latency_s, 8 * k.rate(0.0) * (wrong or {}).get(m, 1.0)) for m, k in links.items()}


SIZE = 475 << 20


def test_exact_estimates() -> None:
    links = three()
    ratio, work_queue = race(SIZE, links, exact(links))
    assert ratio <= 1.02
    assert sum(s.duplicated for s in work_queue.everybody().values()) <= 0.01 * SIZE


@pytest.mark.parametrize(
    "wrong", [{"a": 1.5, "b": 0.5, "c": 1.5}, {"a": 0.5, "b": 1.5, "c": 0.5}, {"a": 6.0, "c": 0.1}]
)
def test_wrong_estimates(wrong: dict[str, float]) -> None:
    links = three()
    ratio, _ = race(SIZE, links, exact(links, wrong))
    assert ratio <= 1.03


def test_no_estimates() -> None:
    ratio, _ = race(SIZE, three(), None)
    assert ratio <= 1.03


@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("to", [0.1, 0.01, 0.0])
def test_a_link_that_collapses_in_mid_transfer(victim: str, to: float) -> None:
    links = three()
    links[victim].rate = falling(links[victim].rate(0.0) / 125_000, 2.0, to)
    ratio, work_queue = race(SIZE, links, exact(three()))
    assert ratio <= 1.03
    assert sum(s.duplicated for s in work_queue.everybody().values()) <= 0.02 * SIZE


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_source_that_dies_in_mid_transfer(victim: str) -> None:
    links = three()
    links[victim].dies_at = 2.0
    ratio, work_queue = race(SIZE, links, exact(links))
    assert ratio <= 1.03
    assert work_queue.missing() == []


def test_long_links_are_kept_busy() -> None:
    """A fast link with 50 ms latency carries its share, although two small requests at a time would leave it mostly
    idle.
    """
    links = {"near": Link(constant(200), 0.001), "far": Link(constant(800), 0.05)}
    assert race(SIZE, links, exact(links))[0] <= 1.05
    links = {"near": Link(constant(200), 0.001), "far": Link(constant(800), 0.05)}
    assert race(SIZE, links, None)[0] <= 1.15  # that the link is long has to be found out


@pytest.mark.parametrize("seed", range(12))
def test_links_that_are_never_what_they_seem(seed: int) -> None:
    """With 2 to 8 links, estimates wrong by up to half, and a change of each link's rate during the pull, the policy
    stays near the bound.
    """
    chance = random.Random(seed)
    links = {}
    for i in range(chance.randint(2, 8)):
        mbps = chance.uniform(100, 1000)
        links[f"s{i}"] = Link(falling(mbps, chance.uniform(0.2, 4), chance.uniform(0.2, 2)), chance.uniform(0, 0.02))
    estimates = {m: (k.latency_s, 8 * k.rate(0.0) * chance.uniform(0.5, 1.5)) for m, k in links.items()}
    ratio, work_queue = race(SIZE, links, estimates)
    assert ratio <= 1.06
    assert sum(s.nbytes for s in work_queue.everybody().values()) == SIZE
    assert sum(s.duplicated for s in work_queue.everybody().values()) <= 0.05 * SIZE


@pytest.mark.parametrize("name", ["greedy", "optimal", "even", "single"])
def test_fixed_shares_pay_for_a_collapse(name: str) -> None:
    """A link's collapse, which the adaptive policy hardly notices, makes policies with fixed shares more than twice as
    slow as the bound.
    """
    links = three()
    links["c"].rate = falling(600, 2.0, 0.1)
    bound = optimum(SIZE, links)
    seconds = Race(SIZE, dict(links), policy_of(name, exact(three()))).run()
    assert seconds > 2 * bound
