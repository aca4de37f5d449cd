"""Tests the benchmark of elastic clusters: the length of a step, the routes of ranks, and the count of bytes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.common import MIB, Result
from benchmarks.outer_nested import INNER_STEPS, between, kills, pace_s, passed, proof, push_part, vain_bound
from benchmarks.outer_ranks import CLUSTER, FAR_BPS, FOLLOWERS, FarLinks, NestedScene
from chaos_lightning.events.events import Record
from chaos_lightning.machine.listener import free_port


def record(name: str, mono: float, **fields: Any) -> Record:
    return Record(t=mono, mono=mono, member="", name=name, fields=fields)


def scene(records: list[Record], ways: dict[tuple[str, str], int] | None = None, ranks: int = 2) -> NestedScene:
    watch, relay = SimpleNamespace(records=records, look=lambda: None), SimpleNamespace(passed=lambda: ways)
    worker: Any = SimpleNamespace(process=SimpleNamespace(exitcode=None))
    given: Any = {"server": None, "context": None, "told": {}, "watch": watch, "relay": relay}
    return NestedScene(CLUSTER, clusters={f"r{n}": worker for n in range(ranks)}, **given)


def test_a_push_takes_half_of_the_steps_of_a_round() -> None:
    push_s = 8 * (24 * MIB / 2) / FAR_BPS
    assert pace_s(24.0) * INNER_STEPS == pytest.approx(2 * push_s)


def test_ranks_reach_followers_alone_through_the_relay() -> None:
    links = FarLinks(f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as near:
        links.connect("127.0.0.1", near.getsockname()[1], me="r1~1", peer="r2~2", timeout_s=5.0).close()
        with pytest.raises(ConnectionRefusedError):
            links.connect("127.0.0.1", near.getsockname()[1], me="home~1", peer=FOLLOWERS[0], timeout_s=5.0)


@pytest.mark.parametrize("code", [0, 128 + signal.SIGTERM, 1])
def test_a_rank_that_leaves_may_end_as_by_its_signal(code: int) -> None:
    script = f"import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = Mock(pid=child.pid, join=lambda timeout_s: child.wait(timeout_s))
        type(process).exitcode = property(lambda _: child.poll())
        asked = scene([])
        asked.clusters["r9"] = Mock(process=process)
        if code == 1:
            with pytest.raises(RuntimeError, match="rank r9 ended with 1 when it was asked to leave"):
                asked.leave_rank("r9")
        else:
            asked.leave_rank("r9")
    assert "r9" not in asked.clusters


def test_bytes_are_told_by_direction() -> None:
    ways = {(CLUSTER, "follower-0"): 3, (CLUSTER, "follower-1"): 4, ("follower-0", CLUSTER): 5, ("x", "y"): 9}
    assert passed(scene([], ways)) == (7, 5)


def test_what_lies_between_two_events_is_counted_up_to_the_last() -> None:
    records = [record("push_frozen", t, push=f"p{t:g}") for t in (1.0, 2.0, 3.0, 4.0)]
    assert between(scene(records), "push_frozen", records[0], records[2]) == records[1:3]
    staged = [record("push_staged", t + 0.25, push=f"p{t:g}") for t in (2.0, 3.0)]
    assert push_part(scene(records + staged), records[1:3], 1.0) == pytest.approx(0.25)


def test_a_proof_is_one_that_all_ranks_told_of() -> None:
    since = record("joined", 1.0)
    told = [(0.5, 3, "old"), (1.5, 4, "a"), (2.0, 5, "b"), (2.1, 5, "c")]
    records = [since, *(record("state_hash", t, seq=seq, hash=found) for t, seq, found in told)]
    assert proof(scene(records), since) == {"b", "c"}


class Killed(NestedScene):
    """Stand-in for a running job with one push, some of whose bytes pass during each wait.

    After the kill so many of them come (`left`), all of which followers verify.
    """

    left = 0
    at = 0

    def until(self, ready: Any, what: str) -> Any:
        while not ready():
            self.at += SIZE // 12
        return True

    def next(self, name: str, since_ns: int, **fields: Any) -> Record:
        made = record(name, 1.0, push="home~1/1", nbytes=SIZE, answer="accepted")
        self.watch.records.append(made)
        return made

    def kill_rank(self, name: str) -> None:
        self.killed_at = self.at
        self.at += self.left

    def staged(self, push: str) -> list[Record]:
        return [record("push_staged", 2.0, push=push, sources={"home~1/a": SIZE})]

    def prepare_rank(self) -> str:
        return "r3"

    def begin_rank(self, name: str) -> None:
        pass

    def rounds(self, count: int) -> None:
        pass


SIZE = 12 * MIB


@pytest.mark.parametrize(("anew", "held"), [(False, True), (True, False)])
def test_a_push_that_is_begun_anew_misses_a_bound(anew: bool, held: bool) -> None:
    """A push may send a third of its bytes in vain when a rank dies; one that starts again sends more, and misses the
    bound.
    """
    at = Killed(
        CLUSTER, clusters={"r1": Any, "r2": Any}, server=None, context=None, told={}, watch=SimpleNamespace(records=[])
    )
    at.relay = SimpleNamespace(passed=lambda: {(CLUSTER, FOLLOWERS[0]): at.at})
    at.left = SIZE if anew else SIZE // 3 + 3 * MIB
    result = Result("outer_nested")
    kills(result, at, "2 ranks", 1)
    assert at.killed_at > SIZE / 2
    figures = {f.name: f for f in result.figures}
    vain = next(f for name, f in figures.items() if "in vain" in name)
    assert vain.ok == held


def test_where_a_rank_is_asked_for_as_much_as_has_passed_there_is_no_bound() -> None:
    assert vain_bound(SIZE) == pytest.approx(4 / 12 + 0.02)
    assert vain_bound(6 * MIB) is None
