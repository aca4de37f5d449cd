"""Tests Ctrl+C and SIGTERM at a real torchrun agent: if its workers leave with success, so does the agent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_support import TORCHRUN, run
from torch.distributed.elastic.multiprocessing.api import SignalException, _terminate_process_handler

from chaos_lightning.machine.orphan import VARIABLE
from chaos_lightning.machine.signals import POLITE
from chaos_lightning.rendezvous.polite import PoliteExit, workers_of
from chaos_lightning.testing.harness import Harness

HERE = Path(__file__).resolve().parent


class Agent:
    """A torchrun agent without a scheduler, whose workers write the signals that they get."""

    def __init__(self, harness: Harness, folder: Path, end: str, *arguments: str) -> None:
        self.harness = harness
        self.folder = folder
        command = ["--rdzv-backend=chaos", "--nnodes=1:2", *arguments]
        command += ["--rdzv-endpoint=127.0.0.1:29499", "--rdzv-conf=host_scheduler=0"]
        command += [str(HERE / "polite_worker.py"), str(folder / "worker"), end]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
        harness.declare("agent")  # torchrun may end badly here, and says how
        self.process = harness.start_function("agent", run, TORCHRUN, command, environment, logging.INFO)

    def words(self, rank: int = 0) -> list[str]:
        path = self.folder / f"worker.{rank}"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> set[int]:
        lines = [line for path in self.folder.glob("worker.*") for line in path.read_text().splitlines()]
        return {int(line.split()[1]) for line in lines}

    def ready(self, workers: int = 1) -> None:
        """Waits until these workers run."""
        self.harness.wait_until(lambda: all("start" in self.words(rank) for rank in range(workers)), "a worker")

    def end(self) -> int:
        return self.harness.wait_exit("agent")

    def log(self) -> str:
        return self.process.log.read_text()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, deadline_s=60.0) as made:
        yield made


@pytest.fixture
def agent(tmp_path: Path, harness: Harness) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def start(*arguments: str) -> Agent:
        started.append(Agent(harness, tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.send(signal.SIGKILL)
        one.end()
        for pid in one.pids():
            try:
                if b"polite_worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


# ------------------------------------------------------------------------------------------------ real agents


def test_torchrun_ends_well_if_its_workers_do(agent: Callable[..., Agent]) -> None:
    one = agent("leave", "--nproc-per-node=2")
    one.ready(2)
    asked = polite_signal(one, signal.SIGINT)
    assert one.end() == 0, one.log()
    assert one.words(0) == one.words(1) == ["start", "SIGINT", "end"]
    assert asked in one.log()


def test_a_second_signal_is_torchs_own_way(agent: Callable[..., Agent]) -> None:
    one = agent("stay", "--max-restarts=3")
    one.ready()
    polite_signal(one, signal.SIGINT)
    one.process.send(signal.SIGINT)
    assert one.end() != 0
    assert one.words() == ["start", "SIGINT", "SIGINT", "end"]
    assert "SignalException" in one.log()


def test_a_worker_that_fails_on_its_way_out_is_not_started_again(agent: Callable[..., Agent]) -> None:
    one = agent("fail", "--max-restarts=3")
    one.ready()
    polite_signal(one, signal.SIGINT)
    assert one.end() != 0
    assert one.words() == ["start", "SIGINT", "end"]


def polite_signal(one: Agent, number: signal.Signals) -> str:
    """Waits until our own handlers have replaced torch's, then sends a signal; returns the beginning of the agent's
    answer.
    """
    one.harness.wait_until(lambda: f"{number.name} is passed on" in one.log(), "the polite handlers")
    one.process.send(number)
    one.harness.wait_until(lambda: number.name in one.words(), "the signal at the worker")
    return f"{number.name}: asking"


# ------------------------------------------------------------------------------------------------ one at a time


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in POLITE}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_torchs_way_comes_back_after_the_patience(harness: Harness) -> None:
    for number in POLITE:
        signal.signal(number, _terminate_process_handler)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    try:
        one = PoliteExit("mark", 0.0, lambda mark: [child.pid])
        one.watch()
        os.kill(os.getpid(), signal.SIGTERM)
        assert one.asked is signal.SIGTERM
        with pytest.raises(SignalException):
            harness.wait_until(one.watch, "the end of patience")
        assert signal.getsignal(signal.SIGTERM) is _terminate_process_handler
    finally:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("handlers")
def test_without_workers_there_is_nothing_to_be_polite_about() -> None:
    signal.signal(signal.SIGINT, _terminate_process_handler)
    PoliteExit("mark", 60.0, lambda mark: []).watch()
    with pytest.raises(SignalException):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handlers")
def test_somebody_elses_handler_stays() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError("nobody sends a signal here")

    signal.signal(signal.SIGINT, mine)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    PoliteExit("mark", 60.0).watch()
    assert signal.getsignal(signal.SIGINT) is mine
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_workers_are_children_that_bear_the_mark() -> None:
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    children = [
        subprocess.Popen(wait, stdin=subprocess.PIPE, env={**os.environ, VARIABLE: mark}) for mark in ("ours", "theirs")
    ]
    try:
        assert workers_of("ours") == [children[0].pid]
        assert workers_of("ours", parent=children[0].pid) == []
    finally:
        for child in children:
            child.communicate()
    assert workers_of("ours") == []
