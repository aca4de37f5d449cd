"""Tests parts of demos without training: the folder, the proof of an empty run, and that only own processes are
ended.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from chaos_lightning.errors import ConfigurationError, DeadlineError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.testing.demo import acts, failover, fixed, members, nodes, stages
from chaos_lightning.testing.demo.members import QUICK, Size, demo
from chaos_lightning.testing.demo.nodes import MARK, Cast, NodeDied
from chaos_lightning.testing.demo.proof import Check, Evidence
from chaos_lightning.testing.demo.stage import Pace, Scenario, Screen, Stage, judge, play, tidy
from chaos_lightning.testing.edge.runner import prepare
from chaos_lightning.testing.faults import FaultPlan
from chaos_lightning.testing.harness import Harness
from lab.simulate.fault_plans import PlannedWorld, job
from lab.simulate.narrate import narrate

NODE = """
import os, subprocess, sys, time
# As a worker of torchrun: in a session of its own.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(worker.pid, flush=True)
time.sleep(60)
"""


class Sleepers(Cast):
    """Nodes whose processes only sleep."""

    program = NODE

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-c", self.program]


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[Sleepers]:
    nodes = Sleepers(tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Harness by which tests wait; it starts no processes."""
    with Harness(tmp_path / "waits", deadline_s=30.0) as made:
        yield made


def worker_of(nodes: Cast, name: str, harness: Harness) -> int:
    return int(harness.wait_until(lambda: nodes.nodes[name].log.read_text().strip() or None, "the worker's pid"))


def tell(nodes: Cast, *, start_deadline_s: float) -> None:
    """Plays all acts of the demo without showing them."""
    scenario = members.scenario(nodes, Size(pace=Pace(start_deadline_s=start_deadline_s)))
    stage = Stage(scenario, Screen(Console(file=io.StringIO())))
    for act in scenario.acts:
        act(stage)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ processes


def test_close_ends_nodes_and_workers_and_nobody_else(sleepers: Sleepers, harness: Harness) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, MARK: "no"})
    try:
        sleepers.start("edge-1")
        worker = worker_of(sleepers, "edge-1", harness)
        os.kill(worker, signal.SIGSTOP)  # frozen ones, too
        assert sleepers.close() == 2
        assert not runs(worker)
        assert not sleepers.nodes["edge-1"].running
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_close_does_not_wait_for_ever(sleepers: Sleepers, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "POLITE_S", 0.1)
    monkeypatch.setattr(Sleepers, "program", "import signal; signal.signal(15, signal.SIG_IGN); print(1)\n" + NODE)
    sleepers.start("edge-1")
    harness.wait_until(lambda: len(sleepers.nodes["edge-1"].log.read_text().split()) == 2, "both")
    sleepers.close()
    assert sleepers.exit_codes() == {"edge-1": -9}


def test_kill_is_for_agent_and_worker_and_is_written_down_before(sleepers: Sleepers, harness: Harness) -> None:
    sleepers.start("edge-2")
    worker = worker_of(sleepers, "edge-2", harness)
    sleepers.kill("edge-2", worker)
    harness.wait_until(lambda: not runs(worker) and sleepers.exit_codes()["edge-2"] == -9, "both deaths")
    (fault,) = [r for r in read_events(sleepers.events) if r.name == "fault_injected"]
    assert (fault["kind"], fault.node) == ("sigkill", "edge-2-0")
    sleepers.check()  # it was meant


def test_a_stranger_is_never_signalled(sleepers: Sleepers) -> None:
    with pytest.raises(NodeDied, match="is not there any more"):
        sleepers.freeze("edge-1", os.getpid(), 1.0)


def test_a_node_that_ends_by_itself_with_an_error_breaks_the_story_off(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sleepers, "program", "raise SystemExit('no disk')")
    with pytest.raises(NodeDied, match="no disk"):
        tell(sleepers, start_deadline_s=30.0)


def test_a_wait_ends_with_what_it_waited_for(sleepers: Sleepers) -> None:
    with pytest.raises(DeadlineError, match="'joined' of edge-1"):
        tell(sleepers, start_deadline_s=0.1)


def test_what_happens_is_a_plan_that_can_be_read_back_and_simulated() -> None:
    made = typer.Typer()
    made.command()(demo)
    printed = CliRunner().invoke(made, ["--quick", "--plan"])
    assert printed.exit_code == 0, printed.output
    faults = FaultPlan.parse(printed.output)
    assert faults == QUICK.plan
    world = PlannedWorld(job(faults), faults)
    _, outcome = narrate(job(faults), given=world)
    assert outcome.violation == ""
    assert world.undone == []


# ------------------------------------------------------------------------------------------------ folder and proof


def test_folder_must_be_empty(tmp_path: Path) -> None:
    assert prepare(tmp_path / "new", "demo") == tmp_path / "new"
    (tmp_path / "new" / "old.jsonl").touch()
    with pytest.raises(ConfigurationError, match="logs of two runs must not mix"):
        prepare(tmp_path / "new", "demo")
    with pytest.raises(ConfigurationError):
        prepare(tmp_path / "new" / "old.jsonl", "demo")


@pytest.mark.parametrize("prove", [members.prove, fixed.prove, failover.prove, stages.prove])
def test_nothing_is_proved_by_empty_logs(tmp_path: Path, prove: Callable[[Evidence], list[Check]]) -> None:
    EventLog.in_directory(tmp_path / "events", "demo", role="harness").close()
    checks = prove(Evidence(tmp_path, {}))
    assert [check.what for check in checks if check.ok] == []
    said = io.StringIO()
    assert not judge(Console(file=said, width=120), tmp_path, checks, "", 1.0, "demo")
    assert f"all logs are in\n{tmp_path}" in said.getvalue()


def test_the_story_fits_80_columns(sleepers: Sleepers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The story's lines fit into 80 columns, except single long words such as paths, and commands stay complete."""
    monkeypatch.chdir(tmp_path.parent)
    out = io.StringIO()
    screen, command = Screen(Console(file=out, width=80)), sleepers.words("edge-1")
    assert f",store={tmp_path.name}/chain.sqlite " in command
    screen.say("do", f"3 machines start: {command}")
    screen.say("bad", f"waited 9 s for a path; the last events were:\n  {tmp_path / ('x' * 70)}\n  {'word ' * 30}")
    lines = out.getvalue().splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
    assert command in " ".join(" ".join(lines).split())
    assert str(tmp_path / ("x" * 70)) in [line.strip() for line in lines]

    checks, said = members.prove(Evidence(tmp_path, {})), io.StringIO()
    EventLog.in_directory(tmp_path / "events", "demo", role="harness").close()
    judge(Console(file=said, width=80), tmp_path, checks, "nobody came " * 10, 1.0, "demo")
    assert [line for line in said.getvalue().splitlines() if len(line) > 80 and len(line.split()) > 2] == []


class Codes:
    """Stands for a demo's nodes, and knows only their exit codes."""

    def __init__(self, folder: Path) -> None:
        self.events = folder / "events"

    def poll(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        """Finds nothing wrong, as no node runs."""

    def exit_codes(self) -> dict[str, int | None]:
        return {"edge-1": 0}


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_demo_proves_what_it_told_and_ends_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, breaks_off: bool
) -> None:
    done: list[str] = []

    def act(stage: Stage[Codes]) -> None:
        assert done == ["begun"]
        stage.say("do", "once upon a time")
        if breaks_off:
            raise DeadlineError("nobody came")

    def prove(e: Evidence) -> list[Check]:
        assert done == ["begun", "ended"], "the logs are whole"
        return [Check("it ends well", str(e.codes), e.codes == {"edge-1": 0})]

    folder = tmp_path / "demo"
    (folder / "etcd").mkdir(parents=True)
    EventLog.in_directory(folder / "events", "demo", role="harness").close()
    scenario = Scenario(
        name="demo",
        nodes=Codes(folder),
        acts=(act,),
        prove=prove,
        begin=lambda: done.append("begun"),
        endings=(lambda: done.append("ended"),),
    )
    with pytest.raises(typer.Exit) as caught:
        play(scenario, folder)
    said = capsys.readouterr().out
    assert caught.value.exit_code == int(breaks_off)
    assert "> once upon a time" in said
    assert ("! nobody came" in said) == ("the story broke off: nobody came" in said) == breaks_off
    assert ("ALL 1 LINES HOLD" in said) == (not breaks_off)
    assert (folder / "etcd").exists() == breaks_off, "who must look for the reason needs all that is there"


def test_what_cannot_begin_is_ended_too(tmp_path: Path) -> None:
    ended: list[str] = []

    def begin() -> None:
        raise DeadlineError("etcd did not answer")

    endings = (lambda: ended.append("ended"),)
    scenario = Scenario(name="demo", nodes=Codes(tmp_path), acts=(), prove=lambda e: [], begin=begin, endings=endings)
    with pytest.raises(DeadlineError, match="etcd did not answer"):
        play(scenario, tmp_path)
    assert ended == ["ended"]


def test_a_process_that_has_not_begun_is_told_when_to_stop(tmp_path: Path) -> None:
    acts.enough(tmp_path / "alone", 3)
    assert [p.name for p in (tmp_path / "alone").iterdir()] == ["enough"]
    assert (tmp_path / "alone" / "enough").read_text() == "3"


def test_tidy_keeps_logs_and_report(tmp_path: Path) -> None:
    gone = ("out/edge-1.log", "checkpoints/last.ckpt", "alone/checkpoints/last.ckpt", "chain.sqlite", "enough")
    for name in ("events/a.jsonl", "report.html", *gone):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    tidy(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a.jsonl", "report.html"]
