"""Tests transfer policies: their decisions, and that each moves a state even when sources fail."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from replication_support import (
    HEAD,
    LIMIT_S,
    PATIENT,
    SEQ,
    Proxy,
    cut,
    dial,
    numbered,
    publishing,
    pull,
)

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.protocol.types import Progress
from chaos_lightning.replication import (
    POLICIES,
    Endpoint,
    Job,
    PolicyOptions,
    PullConfig,
    SourceStats,
    TransferPolicy,
    make_policy,
    pull_state,
    state_hash,
)
from chaos_lightning.replication.policies import Adaptive
from chaos_lightning.replication.policy import Estimates, Queue, Request, Task

ESTIMATES = {"a": (0.001, 100e6), "b": (0.001, 300e6)}


# --- each of them moves a state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_moves_the_state(name: str) -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    with publishing(theirs, "a", "b") as started:
        report = pull([d.endpoint for d in started], mine, policy=make_policy(name, ESTIMATES))
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert report.policy == name
    assert report.reason
    assert sum(report.by_source.values()) == 8_000_000 == sum(s.nbytes for s in report.sources.values())
    assert 0 < report.moving_s <= report.seconds
    assert report.failed == {}


def test_progress_tells_bytes_rate_time_and_sources() -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    mine.named[0][1].copy_(theirs.named[0][1])
    told: list[Progress] = []
    with publishing(theirs, "a", "b") as started:
        pull_state(
            [d.endpoint for d in started],
            dial,
            head=HEAD,
            seq=SEQ,
            state=mine,
            config=PATIENT,
            policy=make_policy("adaptive", ESTIMATES),
            progress=told.append,
        )
    assert told[0].done_nbytes == 400_000
    assert told[0].remaining_s == math.inf
    assert told[-1].done_nbytes == told[-1].total_nbytes == 8_000_000
    assert told[-1].remaining_s == 0
    assert [p.done_nbytes for p in told] == sorted(p.done_nbytes for p in told)
    for p in told[1:]:
        assert sum(s.nbytes for s in p.sources) == p.done_nbytes - 400_000
        assert p.rate_bps == pytest.approx(sum(s.rate_bps for s in p.sources))
        assert p.remaining_s == pytest.approx(8 * (p.total_nbytes - p.done_nbytes) / p.rate_bps)


# --- sources that fail ------------------------------------------------------------------------------------------------


def test_a_source_that_stalls_is_robbed_duplicated_and_not_waited_for() -> None:
    """A source stalls and no timeout ends that; the pull ends because the other source takes over its work."""
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    release = threading.Event()

    def stall(data: bytearray, position: int) -> None:
        if position > 2_000_000:
            release.wait(LIMIT_S)

    with publishing(theirs, "a", "b") as started:
        proxy = Proxy(started[0].endpoint, stall)
        policy = make_policy("adaptive", {"a": (0.0, 1e9), "b": (0.0, 1e9)})
        report = pull([proxy.endpoint, started[1].endpoint], mine, policy=policy)
        release.set()
        proxy.close()
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors()) == report.state_hash
    assert report.failed == {}
    assert report.steals > 0
    assert report.sources["b"].stolen > 0
    assert report.by_source["a"] <= 2_000_000
    assert sum(report.by_source.values()) == 16_000_000


def test_without_estimates_a_stalled_source_is_not_waited_for_either() -> None:
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    release = threading.Event()

    def stall(data: bytearray, position: int) -> None:
        if position > 1_000_000:
            release.wait(LIMIT_S)

    with publishing(theirs, "a", "b") as started:
        proxy = Proxy(started[0].endpoint, stall)
        report = pull([proxy.endpoint, started[1].endpoint], mine)
        release.set()
        proxy.close()
    assert report.policy == "adaptive"
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_dead_source_was_to_send_comes_from_others(name: str) -> None:
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    died = threading.Event()
    with publishing(theirs, "a", "b") as started:

        def die(data: bytearray, position: int) -> None:
            if position > 2_000_000:
                died.set()
                proxy.acceptor.listener.close()
                cut()

        proxy = Proxy(started[0].endpoint, die)
        policy = make_policy(name, {"a": (0.0, 1e9), "b": (0.0, 1e9)})
        report = pull([proxy.endpoint, started[1].endpoint], mine, policy=policy)
        proxy.close()
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    # The other one may have taken over all before the death was found out.
    assert list(report.failed) in ([], ["a"] * died.is_set())
    assert report.sources["a"].nbytes + report.sources["b"].nbytes == 16_000_000


def test_a_link_that_is_down_for_a_while_is_dialled_until_it_is_back() -> None:
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    dialled: list[str] = []
    down = 0

    def once(data: bytearray, position: int) -> None:
        nonlocal down
        if position > 3_000_000 and down == 0:
            down = 6
            cut()

    def dial_if_up(endpoint: Endpoint) -> Any:
        nonlocal down
        dialled.append(endpoint.member)
        if down > 1:
            down -= 1
            raise OSError("no route to host")
        return dial(endpoint)

    with publishing(theirs, "a") as started:
        proxy = Proxy(started[0].endpoint, once)
        config = PullConfig(deadline_s=LIMIT_S, stall_timeout_s=LIMIT_S, redial_s=LIMIT_S)
        report = pull_state([proxy.endpoint], dial_if_up, head=HEAD, seq=SEQ, state=mine, config=config)
        proxy.close()
    assert len(dialled) == 7
    assert report.failed == {}
    assert report.retries > 0
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_a_link_that_stays_down_is_given_up() -> None:
    theirs, mine = numbered(40, 100_000), numbered(40, 100_000, seed=1)
    broken = []

    def once(data: bytearray, position: int) -> None:
        if position > 3_000_000:
            broken.append(position)
            cut()

    def dial_if_up(endpoint: Endpoint) -> Any:
        if broken:
            raise OSError("no route to host")
        return dial(endpoint)

    with publishing(theirs, "a") as started:
        proxy = Proxy(started[0].endpoint, once)
        config = PullConfig(deadline_s=LIMIT_S, stall_timeout_s=LIMIT_S, redial_s=0.2)
        with pytest.raises(StateError, match=r"no donor is left.*a: OSError: no route to host"):
            pull_state([proxy.endpoint], dial_if_up, head=HEAD, seq=SEQ, state=mine, config=config)
        proxy.close()


# --- decisions --------------------------------------------------------------------------------------------------------


def stats_of(rate_bps: float, under_way: int = 0, latency_s: float = 0.0) -> SourceStats:
    stats = SourceStats()
    stats.expect(latency_s, rate_bps)
    if under_way:
        stats.asked(under_way, 0.0)
    return stats


def adaptive(estimates: Any = None, **more: Any) -> Adaptive:
    policy = make_policy("adaptive", estimates, PolicyOptions(**more))
    assert isinstance(policy, Adaptive)
    return policy


def test_an_idle_source_steals_in_proportion_to_both_rates() -> None:
    stats = {"fast": stats_of(300e6), "slow": stats_of(100e6)}
    queues = {"slow": Queue(100_000_000, 1_000_000)}
    assert adaptive().steal("fast", queues, stats, 0.0) == ("slow", 75_000_000)


def test_who_would_end_last_is_robbed_first() -> None:
    stats = {"thief": stats_of(100e6), "long": stats_of(500e6), "slow": stats_of(50e6)}
    queues = {"long": Queue(20_000_000, 1), "slow": Queue(10_000_000, 1)}
    grab = adaptive().steal("thief", queues, stats, 0.0)
    assert grab is not None
    assert grab[0] == "slow"
    queues["never came"] = Queue(10, 1)
    assert adaptive().steal("thief", queues, stats, 0.0) == ("never came", 5)


def test_a_source_of_which_nothing_is_known_takes_one_job() -> None:
    stats = {"thief": SourceStats(), "slow": stats_of(1e6)}
    assert adaptive().steal("thief", {"slow": Queue(50_000_000, 7)}, stats, 0.0) == ("slow", 7)


def test_nothing_is_stolen_that_would_end_later_here() -> None:
    stats = {"thief": stats_of(10e6), "other": stats_of(500e6)}
    assert adaptive().steal("thief", {"other": Queue(1_000_000, 1_000_000)}, stats, 0.0) is None
    stats = {"thief": stats_of(500e6), "other": stats_of(10e6)}
    assert adaptive().steal("thief", {"other": Queue(1_000_000, 1_000_000)}, stats, 0.0) == ("other", 1_000_000)


def request(source: str, nbytes: int, **more: Any) -> Request:
    return Request(Task(Job(0, nbytes)), source, False, **more)


def test_the_request_that_would_come_last_is_duplicated() -> None:
    stats = {"idle": stats_of(600e6), "slow": stats_of(100e6), "slower": stats_of(60e6)}
    first, second = request("slow", 1_000_000), request("slow", 1_000_000)
    third = request("slower", 1_000_000, got=900_000)
    assert adaptive().duplicate("idle", [first, second, third], stats, 0.0) is second
    second.task.copies = 2
    assert adaptive().duplicate("idle", [first, second, third], stats, 0.0) is first


def test_a_slower_source_duplicates_nothing() -> None:
    stats = {"idle": stats_of(10e6), "fast": stats_of(600e6)}
    assert adaptive().duplicate("idle", [request("fast", 1_000_000)], stats, 0.0) is None


def test_a_source_of_which_nothing_is_known_is_given_a_moment() -> None:
    stats = {"idle": stats_of(600e6), "new": SourceStats()}
    stats["new"].asked(1_000_000, 0.0)
    late = request("new", 1_000_000)
    assert adaptive().duplicate("idle", [late], stats, 0.1) is None
    assert adaptive().duplicate("idle", [late], stats, 0.5) is late


def test_requests_are_small_on_slow_links_and_enough_of_them_under_way_on_long_ones() -> None:
    policy = adaptive()
    assert policy.request_nbytes(stats_of(100e6), 0.0, 4 << 20) == 250_000
    assert policy.request_nbytes(stats_of(40e9), 0.0, 4 << 20) == 4 << 20
    assert policy.window_nbytes(stats_of(1e9, latency_s=0.05), 0.0) == pytest.approx(26_250_000)


def some_jobs(count: int, nbytes: int = 1 << 20) -> list[Job]:
    return [Job(i * nbytes, (i + 1) * nbytes) for i in range(count)]


def test_members_without_an_estimate_are_taken_for_usual_ones() -> None:
    given = adaptive({"a": (0.0, 100e6), "b": (0.0, 300e6)}).assign(some_jobs(60), ["a", "b", "c"])
    assert {m: len(jobs) for m, jobs in given.jobs.items()} == {"a": 10, "b": 30, "c": 20}
    assert "no estimate of c" in given.reason
    assert adaptive({"x": (0.0, 1e6)}).assign(some_jobs(3), ["a"]).jobs == {}


def test_a_link_that_carries_nothing_gets_nothing() -> None:
    given = adaptive({"a": (0.0, 100e6), "b": (0.0, 0.0)}).assign(some_jobs(6), ["a", "b"])
    assert list(given.jobs) == ["a"]


def test_shares_are_runs_that_cover_everything_once() -> None:
    jobs = some_jobs(101)
    given = adaptive({"a": (0.0, 100e6), "b": (0.0, 300e6), "c": (0.0, 600e6)}).assign(jobs, ["a", "b", "c"])
    assert {m: len(run) for m, run in given.jobs.items()} == {"a": 10, "b": 30, "c": 61}
    assert sorted((j for run in given.jobs.values() for j in run), key=lambda j: j.start) == jobs
    assert all(x.stop == y.start for run in given.jobs.values() for x, y in pairwise(run))


@pytest.mark.parametrize(
    ("name", "estimates", "more", "words"),
    [
        (
            "fastest",
            None,
            {},
            "unknown transfer policy 'fastest': expected one of adaptive, shared, or MODULE:CLASS",
        ),
        ("greedy", None, {}, "unknown transfer policy 'greedy': not in the package"),
        ("no_such_module:Policy", None, {}, "'no_such_module:Policy' cannot be loaded: No module named"),
        ("json:loads", None, {}, "'json:loads' is no class of a policy; expected a subclass of"),
        ("adaptive", {"a": (0.0, -1.0)}, {}, "link to a is estimated"),
        ("adaptive", {"a": (math.nan, 1.0)}, {}, "link to a is estimated"),
        ("adaptive", None, {"ingress_bps": -1.0}, "ingress_bps must be finite"),
    ],
)
def test_odd_settings_are_refused_by_name(name: str, estimates: Any, more: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_policy(name, estimates, PolicyOptions(**more))


class Last(TransferPolicy):
    """Policy that takes everything from the newest donor."""

    name = "last"

    def __init__(self, estimates: Estimates | None = None, options: PolicyOptions | None = None) -> None:
        super().__init__(estimates, options)
        self.known = estimates, options

    def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
        return source == list(stats)[-1]


def test_a_policy_of_the_users_own_is_named_by_its_module() -> None:
    theirs, mine = numbered(20, 100_000), numbered(20, 100_000, seed=1)
    facts = PolicyOptions(layer_nbytes=(400_000,))
    policy = make_policy(f"{__name__}:Last", ESTIMATES, facts)
    assert isinstance(policy, Last)
    assert policy.known == (ESTIMATES, facts)
    with publishing(theirs, "a", "b") as started:
        report = pull([d.endpoint for d in started], mine, policy=policy)
    assert (report.policy, dict(report.by_source)) == ("last", {"b": 8_000_000})
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
