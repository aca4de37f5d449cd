"""Tests `chaos-lightning run` alone: real workers, a rendezvous that the test controls, and signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.run import config_from_args
from until_support import until

from chaos_lightning.rendezvous import run

WORKER = Path(__file__).with_name("polite_worker.py")
Act = Callable[[], object]


class Rendezvous:
    """Double of the rendezvous handler. `acts` are functions to be called at its first, second, ... call."""

    use_agent_store = False
    patience_s = 5.0
    """Only a worker that was not asked to leave takes so long."""

    def __init__(self, **acts: Act) -> None:
        self.calls = self.looks = 0
        self.seeks = False
        self._acts = acts

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls += 1
        self.seeks = True
        try:
            self._acts.get(f"call_{self.calls}", lambda: None)()
        finally:
            self.seeks = False
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 29500))

    def look_after_scheduler(self) -> None:
        assert not self.seeks, "it is being looked for already"
        self.looks += 1


class Room:
    """A node with workers that report. The test itself runs in a thread, since the node needs the main thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.over = threading.Event()
        self._folder = folder
        self._patch = monkeypatch
        monkeypatch.setattr(run, "FIRST_PAUSE_S", 0.01)

    def words(self, rank: int) -> list[str]:
        return [word for word, _ in self._told(rank)]

    def _told(self, rank: int) -> list[tuple[str, int]]:
        path = self._folder / f"worker.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(word, int(pid)) for word, pid in map(str.split, lines)]

    def started(self, rank: int, count: int = 1) -> None:
        until(lambda: self.words(rank).count("start") == count, f"worker {rank}")

    def kill(self, rank: int) -> None:
        os.kill(self._told(rank)[-1][1], signal.SIGKILL)

    def hears(self, text: str) -> None:
        until(lambda: any(text in said for said in self.said), f"{text!r} in {self.said}")

    def run(self, handler: Rendezvous, play: Act, *arguments: str) -> int:
        """Runs the node until `play` has ended and the node was asked to end by SIGINT; returns its exit code."""
        self._patch.setattr(run, "create_handler", lambda parameters: handler)
        given = run.parser().parse_args([*arguments, str(WORKER), str(self._folder / "worker"), "leave"])
        given.master_port = 29500
        config, entrypoint, command = config_from_args(given)
        node = run.NodeWorkers(config, given, entrypoint, command)
        node._say = self.said.append  # type: ignore[method-assign]
        errors: list[BaseException] = []

        def act() -> None:
            try:
                play()
            except BaseException as error:
                errors.append(error)
            if not self.over.is_set() and not any("asking" in said for said in self.said):
                os.kill(os.getpid(), signal.SIGINT)

        player = threading.Thread(target=act)
        player.start()
        try:
            return node.run()
        finally:
            self.over.set()
            player.join()
            if errors:
                raise errors[0]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(tmp_path, monkeypatch)


def fail() -> None:
    raise RendezvousConnectionError("disk full")


def test_a_worker_that_cannot_be_started_again_takes_no_sibling_along(room: Room) -> None:
    def play() -> None:
        room.started(0)
        room.started(1)
        room.kill(1)
        room.hears("worker 1 could not be started (disk full); it is started again in 0.02 s (restart 2 of 9); 1 other")
        room.started(1, 2)
        assert room.words(0) == ["start"]

    assert room.run(Rendezvous(call_3=fail), play, "--nproc-per-node=2") == 0
    assert room.words(0) == ["start", "SIGINT", "end"]


def test_the_scheduler_is_looked_after_while_workers_run(room: Room) -> None:
    rendezvous = Rendezvous()

    def play() -> None:
        room.started(0)
        before = rendezvous.looks
        until(lambda: rendezvous.looks > before, "another look")

    assert room.run(rendezvous, play) == 0


def test_a_worker_that_can_never_be_started_again_is_given_up(room: Room) -> None:
    def play() -> None:
        room.started(0)
        room.started(1)
        room.kill(1)
        room.hears("worker 1 failed after 1 restarts; the others train on (disk full)")

    code = room.run(Rendezvous(call_3=fail), play, "--nproc-per-node=2", "--max-restarts=1")
    assert (code, room.words(0)) == (1, ["start", "SIGINT", "end"])


def closed() -> None:
    raise RendezvousClosedError("the job is finished")


def test_a_worker_that_failed_as_its_job_ended_is_no_success(room: Room) -> None:
    def play() -> None:
        room.started(0)
        room.kill(0)
        room.hears("worker 0 is not started again: the job is finished")

    assert room.run(Rendezvous(call_2=closed), play) == 128 + signal.SIGKILL


def test_a_node_whose_first_worker_cannot_be_started_says_why(room: Room) -> None:
    handlers = [signal.getsignal(number) for number in run._SIGNALS]
    with pytest.raises(RendezvousConnectionError, match="disk full"):
        room.run(Rendezvous(call_1=fail), room.over.wait)
    assert [signal.getsignal(number) for number in run._SIGNALS] == handlers


def test_others_are_looked_after_while_a_worker_waits_for_its_scheduler(room: Room) -> None:
    found = threading.Event()

    def play() -> None:
        try:
            room.started(0)
            room.started(1)
            room.kill(1)
            until(lambda: handler.calls == 3, "the wait for a scheduler")
            room.kill(0)
            room.hears("worker 0 ended (signal SIGKILL)")
        finally:
            found.set()
        room.started(0, 2)
        room.started(1, 2)

    handler = Rendezvous(call_3=lambda: found.wait(60.0))
    assert room.run(handler, play, "--nproc-per-node=2") == 0


def test_who_ends_the_node_while_a_worker_is_about_to_start_starts_none(room: Room) -> None:
    found = threading.Event()

    def play() -> None:
        try:
            until(lambda: handler.calls == 1, "the wait for a scheduler")
            os.kill(os.getpid(), signal.SIGINT)
            room.hears("SIGINT: asking 0 worker(s)")
        finally:
            found.set()

    handler = Rendezvous(call_1=lambda: found.wait(60.0))
    assert room.run(handler, play) == 0
    assert room.words(0) == []


def test_a_worker_that_starts_as_the_node_is_asked_to_end_is_asked_too(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run.start_processes

    def start(**arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        context = original(**arguments)
        room.started(0)
        return context

    monkeypatch.setattr(run, "start_processes", start)
    assert room.run(Rendezvous(), lambda: room.hears("asking 0 worker(s)")) == 0
    assert room.words(0) == ["start", "SIGINT", "end"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_whoever_closes_the_terminal_lets_workers_leave(room: Room, number: signal.Signals) -> None:
    """Closing the terminal reaches workers as SIGTERM, which makes them leave; SIGHUP itself would end them at once."""
    before = signal.signal(number, signal.SIG_DFL)  # one that was ignored at the start stays so

    def play() -> None:
        room.started(0)
        os.kill(os.getpid(), number)
        room.hears(f"{number.name}: asking 1 worker(s)")

    try:
        assert room.run(Rendezvous(), play) == 0
    finally:
        signal.signal(number, before)
    assert room.words(0) == ["start", "SIGTERM", "end"]
