"""Tests real processes that are asked to end: what becomes of the state, of fit, and of the code after fit
(docs/ends.md).
"""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ending_members
import pytest

from chaos_lightning.control.requests import drain
from chaos_lightning.machine.listener import free_port
from chaos_lightning.strategies.companion import exit_code
from chaos_lightning.testing.harness import Harness
from chaos_lightning.testing.processes import Mark

Terminal = tuple[str, Callable[[], None]]


class Unit:
    """All processes that one start has brought about, also those that outlive it; found by a mark in their
    environment.
    """

    def __init__(self, folder: Path, harness: Harness, mark: Mark) -> None:
        self.folder, self.harness, self.mark = folder, harness, mark
        self.port = free_port()

    def start(self, name: str = "a", **settings: Any) -> None:
        """Starts a plain training script, and waits until it trains."""
        (self.folder / name).mkdir(exist_ok=True)
        self.harness.start_function(name, ending_members.fit, str(self.folder / name), self.port, settings)
        self.trains(name)

    def trains(self, name: str = "a") -> None:
        mark = self.folder / name / "mark"
        self.harness.wait_until(mark.exists, f"training of {name}")
        mark.unlink()

    def behind(self, name: str = "a") -> bool:
        return (self.folder / name / "behind").exists()

    def kept(self) -> int:
        return int(self.harness.wait_for("kept")["step"])


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unit]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    mark = Mark()
    with Harness(tmp_path, deadline_s=90.0, env=mark.environment()) as harness:
        try:
            yield Unit(tmp_path, harness, mark)
        finally:
            mark.end(polite_s=0.1)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Yields the path of a new terminal, and a function that closes it."""
    ours, its = pty.openpty()
    path, opened = os.ttyname(its), [ours, its]

    def close() -> None:
        while opened:
            os.close(opened.pop())

    yield path, close
    close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_terminal_is_a_polite_leave(unit: Unit, terminal: Terminal, workers: int) -> None:
    """The terminal of a training process is closed: the process leaves politely, although the progress bar cannot be
    drawn and SIGHUP comes twice.
    """
    path, close = terminal
    unit.harness.declare("a")
    unit.start(terminal=path, **({"workers": workers} if workers else {}))
    close()
    unit.harness.children["a"].send(signal.SIGHUP)
    assert unit.kept() >= 3
    assert unit.harness.wait_exit("a") == 128 + signal.SIGHUP
    assert not unit.behind()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_for_the_whole_group_ends_no_worker_of_the_loader(unit: Unit, number: signal.Signals) -> None:
    """Ctrl+C or SIGTERM reaches the whole process group: the loader's workers survive, so that the state can be
    saved, and training resumes from it.
    """
    unit.harness.declare("a")
    unit.start(workers=2)
    unit.harness.terminate("a", number=number, group=True)
    kept = unit.kept()
    assert unit.harness.wait_exit("a") == 128 + number
    assert not unit.behind()
    unit.start(workers=2, stops_after=5)
    assert unit.harness.wait_for("resumed_kept")["step"] == kept
    assert unit.harness.wait_exit("a") == 0
    assert (unit.folder / "a" / "behind").read_text() == f"{kept + 5} False"


def test_a_drained_process_does_not_end_as_if_it_had_trained(unit: Unit) -> None:
    unit.harness.declare("a")
    unit.start()
    assert drain(f"127.0.0.1:{unit.port}", "a") == ("a",)
    assert unit.kept() >= 3
    assert unit.harness.wait_exit("a") == os.EX_TEMPFAIL
    assert not unit.behind()


def test_a_validation_that_is_under_way_keeps_its_workers(unit: Unit) -> None:
    """SIGTERM reaches the process group during validation: the validation ends with its workers, and then the state
    is saved, between two batches.
    """
    unit.harness.declare("a")
    unit.start(workers=2, marks="validation")
    unit.harness.terminate("a", group=True)
    assert unit.kept() == 16
    assert unit.harness.wait_exit("a") == 128 + signal.SIGTERM
    assert not unit.behind()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_the_state_belongs_to_its_run(unit: Unit) -> None:
    """Ctrl+C in a Hydra sweep starts no further run. The next sweep in the same folder resumes the state; one in
    another folder does not.
    """

    def start(dated: str) -> None:
        unit.harness.declare("a")
        arguments = ["-m", "+seed=1,2", f"hydra.sweep.dir={unit.folder / dated}"]
        unit.harness.start_function("a", ending_members.sweep, str(unit.folder), unit.port, arguments)
        unit.trains("0")

    def ctrl_c() -> int:
        unit.harness.terminate("a", number=signal.SIGINT)
        assert unit.harness.wait_exit("a") == 128 + signal.SIGINT
        assert not unit.behind("0")
        assert not (unit.folder / "1").exists()
        return [int(record["step"]) for record in unit.harness.records if record.name == "kept"][-1]

    start("monday")
    kept = ctrl_c()
    start("monday")
    assert unit.harness.wait_for("resumed_kept")["step"] == kept, "the folder says that it is the same run"
    ctrl_c()
    start("tuesday")
    assert "is of the run" in unit.harness.children["a"].log.read_text()
    assert len([record for record in unit.harness.records if record.name == "resumed_kept"]) == 1
    ctrl_c()


@pytest.mark.parametrize(
    ("environment", "asked", "code"),
    [
        ({}, signal.SIGINT, 130),
        ({}, signal.SIGTERM, 143),
        ({}, signal.SIGHUP, 129),
        ({}, None, 75),
        ({"TORCHELASTIC_RUN_ID": "x"}, signal.SIGINT, 0),
        ({"LOCAL_RANK": "1"}, signal.SIGTERM, 0),
        ({"SLURM_PROCID": "0"}, None, 0),
        ({"SYSTEMD_EXEC_PID": str(os.getpid())}, signal.SIGTERM, 0),
        ({"SYSTEMD_EXEC_PID": "1"}, signal.SIGTERM, 143),  # of the desktop that the terminal belongs to
    ],
)
def test_the_exit_code_says_that_it_is_no_success_but_to_who_would_take_it_for_a_failure(
    environment: dict[str, str], asked: signal.Signals | None, code: int
) -> None:
    assert exit_code(asked, environment) == code


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chaos", "diloco"])
def test_a_unit_all_of_whose_processes_get_sigterm_leaves_as_one(unit: Unit, kind: str) -> None:
    """All processes get SIGTERM at once, as when systemd stops a service (scheduler or parameter server, watchers,
    workers): the state is kept, nothing is started again, and no process is left.
    """

    def start(**settings: Any) -> None:
        folder = unit.folder / "a"
        folder.mkdir(exist_ok=True)
        program = [sys.executable, ending_members.__file__, str(folder), str(unit.port)]
        as_main = 'SYSTEMD_EXEC_PID=$$ exec "$@"'
        spec = json.dumps({"kind": kind, "workers": 2, **settings})
        unit.harness.start("a", ["sh", "-c", as_main, "sh", *program, spec])
        unit.trains()

    start()
    unit.harness.wait_for("committed" if kind == "chaos" else "version_adopted")
    started = unit.mark.alive()
    assert len(started) >= (4 if kind == "chaos" else 6)
    for pid in started:
        unit.mark.send(pid, signal.SIGTERM)
    assert unit.harness.wait_exit("a") == 0, "systemd takes all else for a failure"
    unit.harness.wait_until(lambda: not unit.mark.alive(), "the end of all processes")
    assert not unit.behind()
    start(stops_after=5)
    assert unit.harness.wait_exit("a") == 0
    assert int((unit.folder / "a" / "behind").read_text().split()[0]) > 5, "it went on from what was kept"


@pytest.mark.slow
def test_a_fit_whose_signals_are_ignored_from_the_start_trains_on(unit: Unit) -> None:
    """A shell has SIGTERM and SIGHUP ignored, as `nohup` does: neither ends the fit; Ctrl+C still does, politely."""
    (unit.folder / "a").mkdir()
    program = [sys.executable, ending_members.__file__, str(unit.folder / "a"), str(unit.port), "{}"]
    unit.harness.declare("a")
    unit.harness.start("a", ["sh", "-c", 'trap "" TERM HUP; exec "$@"', "sh", *program])
    unit.trains()
    for number in (signal.SIGTERM, signal.SIGHUP):
        unit.harness.terminate("a", number=number)
    last = int(unit.harness.wait_for("committed")["step"])
    unit.harness.wait_for("committed", lambda record: record["step"] > last + 20)
    unit.harness.terminate("a", number=signal.SIGINT)
    assert unit.kept() > last
    assert unit.harness.wait_exit("a") == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(("program", "way"), [("torchrun", "closed"), ("torchrun", "nohup"), ("run", "closed")])
def test_an_agent_whose_terminal_is_closed(unit: Unit, terminal: Terminal, program: str, way: str) -> None:
    """The terminal of a torchrun agent is closed: its worker leaves the job, although it prints to that terminal,
    too. Under `nohup` training goes on.
    """
    path, close = terminal
    (unit.folder / "a").mkdir()
    worker = [ending_members.__file__, str(unit.folder / "a"), str(unit.port), "{}"]
    agent = {"program": program, "terminal": path, "nohup": way == "nohup"}
    unit.harness.start_function("agent", ending_members.agent, unit.port, agent, worker)
    unit.trains()
    close()
    unit.harness.children["agent"].send(signal.SIGHUP)
    if way == "nohup":
        last = int(unit.harness.wait_for("committed")["step"])
        unit.harness.wait_for("committed", lambda record: record["step"] > last + 20)
        unit.harness.terminate("agent")
    assert unit.kept() >= 3
    assert unit.harness.wait_exit("agent") == 0
    assert not unit.behind()
