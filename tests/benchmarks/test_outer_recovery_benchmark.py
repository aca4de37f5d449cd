"""Tests the benchmark of outer recovery: its judgements, and its counts of steps, processor time and exchanges."""

from __future__ import annotations

import os
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import outer_recovery
from benchmarks.common import Result
from benchmarks.outer_clusters import OuterScene, burn, cpu_of
from benchmarks.outer_recovery import CASES, OuterCase, number, report
from benchmarks.peers import torchft_diloco
from benchmarks.peers.torchft_diloco import Crew, Thrown, strike
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import Record


def missed(result: Result) -> list[str]:
    return [f.name for f in result.figures if f.ok is False]


def case(**changed: Any) -> OuterCase:
    times = {"noticed": [0.5, 0.9], "served again": [1.0, 1.9]}
    given = {"times": times, "longest": [0.20, 0.25], "control": [0.19, 0.24], "extra_cpu": [0.5, 0.5]}
    return OuterCase(**{**given, **changed})


def test_late_followers_leaders_and_longer_steps_miss_their_bounds() -> None:
    result = Result("outer_recovery")
    report(result, "sqlite", "follower SIGKILL", case())
    assert missed(result) == []
    late = case(times={"noticed": [0.5, 1.1], "served again": [1.0, 2.1]}, longest=[0.21, 0.26])
    report(result, "sqlite", "follower SIGKILL", late)
    assert missed(result) == [
        "sqlite, follower SIGKILL: noticed, slowest of 2",
        "sqlite, follower SIGKILL: served again, slowest of 2",
    ]
    result = Result("outer_recovery")
    report(result, "sqlite", "follower SIGKILL", case(longest=[0.24, 0.29]))
    assert len(missed(result)) == 2
    result = Result("outer_recovery")
    report(result, "sqlite", "follower SIGKILL", case(longest=[0.25, 0.20], control=[0.19, 0.25]))
    assert missed(result) == ["sqlite, follower SIGKILL: longest inner step beyond its control's, worst of 2"]
    result = Result("outer_recovery")
    report(result, "sqlite", "follower SIGKILL, cold", case(times=late.times))
    assert missed(result) == [], "torch is imported first: given"
    report(result, "sqlite", "follower SIGKILL, cold", case(times=late.times, longest=[9.0, 9.0]))
    assert len(missed(result)) == 2, "training notices nothing of it all the same"
    for scene, slowest, is_late in (("shared", 0.9, 0), ("shared", 1.1, 1), ("apart", 2.9, 0), ("apart", 3.1, 1)):
        result = Result("outer_recovery")
        report(
            result,
            scene,
            "leader SIGKILL",
            case(times={"another leads": [0.5, 9.0], "another decides": [0.5, slowest]}),
        )
        assert missed(result) == [f"{scene}, leader SIGKILL: another decides, slowest of 2"][:is_late]


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("--check", ["shared", "apart", "torchft's DiLoCo"]),
        ("--check --no-peers", ["shared", "apart"]),
        ("--check --no-peers --scenes shared", ["shared"]),
        ("--check --no-peers --scenes sqlite", []),
        ("--check --quick", []),
        ("", []),
    ],
)
def test_a_case_that_cannot_run_here_counts_as_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, left_out: list[str]
) -> None:
    """Former bug: without etcd and torchft, two thirds of the bounds were not tested, and `--check` ended with 0 all
    the same.
    """

    def none() -> str:
        raise ConfigurationError("the program etcd is not installed")

    monkeypatch.setattr(outer_recovery, "find_etcd", none)
    monkeypatch.setattr(outer_recovery, "measure", lambda *given: None)
    monkeypatch.setattr(outer_recovery, "context", lambda *given: None)
    monkeypatch.setattr(torchft_diloco, "missing", lambda result: True)
    monkeypatch.setattr(sys, "argv", ["outer_recovery", *words.split()])
    assert outer_recovery.main() == bool(left_out)
    last = capsys.readouterr().out.splitlines()[-1]
    if "--check" in words:
        assert [case for case in ("shared", "apart", "torchft's DiLoCo") if f"{case}, which" in last] == left_out


def test_every_case_is_in_a_scene_that_says_how_it_strikes() -> None:
    assert {name for cases in CASES.values() for name in cases if "SIG" not in name} == set()
    assert all(callable(strike) for cases in CASES.values() for strike in cases.values())


def scene(**fields: Any) -> OuterScene:
    worker: Any = SimpleNamespace(process=SimpleNamespace(exitcode=None))
    given: Any = {"name": "x", "server": None, "context": None, "told": {}, "watch": SimpleNamespace(records=[])}
    return OuterScene(clusters={"a": worker, "b": worker}, **{**given, **fields})


def test_the_longest_step_is_that_of_a_living_cluster_within_the_time() -> None:
    at = scene(times={"a": [(10, 0.1), (20, 0.2), (40, 0.9)], "b": [(15, 0.3)], "dead": [(15, 5.0)]})
    assert at.longest(5, 30) == 0.3
    assert at.longest(15, 50) == 0.9
    assert at.longest(50, 60) == 0.0


def event(mono: float, name: str, **fields: Any) -> Record:
    return Record(mono, mono, "", name, {"node": "follower-0", **fields})


def test_events_count_from_the_strike_on() -> None:
    watch: Any = SimpleNamespace(records=[event(1.0, "gone"), event(3.5, "gone"), event(3.0, "gone")])
    assert scene(watch=watch).first(2_000_000_000, lambda r: r.name == "gone") == pytest.approx(1.0)
    assert scene(watch=watch).first(4_000_000_000, lambda r: r.name == "gone") == 0.0
    assert number(event(1.0, "version_loaded", version="v17-12ab34")) == 17


def test_processor_time_is_that_of_the_processes_that_are_there() -> None:
    said: list[float] = []
    pipe: Any = SimpleNamespace(send=said.append)
    before = cpu_of({os.getpid(), 2**22 + 1})
    assert list(before) == [os.getpid()]
    burn(pipe, time.process_time() + 0.05)
    assert cpu_of({os.getpid()})[os.getpid()] >= before[os.getpid()] + 0.03
    assert said


def test_only_steps_of_exchanges_that_failed_after_the_blow_are_thrown_away() -> None:
    crew = Crew(None, "", 1.0)
    killed: list[str] = []
    for name in "abc":
        crew.workers[name] = SimpleNamespace(kill=lambda n=name: killed.append(n))  # type: ignore[assignment,misc]
    rounds = iter([("kept", 32, 0.1, 0.0), ("kept", 32, 0.1, 0.0), ("thrown", 32, 4.0, 0.1), ("kept", 32, 0.5, 0.1)])

    def until(ready: Any, what: str) -> None:
        while not ready():
            words = next(rounds)
            crew.said += [(time.monotonic_ns(), name, words) for name in crew.workers]

    crew.until = until  # type: ignore[method-assign]
    crew.start = lambda: None  # type: ignore[method-assign]
    thrown = Thrown()
    next(rounds)
    chance = random.Random(1)
    chance.uniform = lambda a, b: 0.0  # type: ignore[method-assign]
    strike(crew, thrown, chance, exchanging=False)
    assert len(killed) == 1
    assert thrown.steps == [2 * 32]
    assert thrown.exchange == [4.0]
