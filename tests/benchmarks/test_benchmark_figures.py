"""Tests benchmark figures and their bounds, the statistics behind them, and how the parent records members' reports."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import Options, Result
from benchmarks.kill import main as kill_main
from benchmarks.peers import torchft as peers_torchft
from benchmarks.soak.figures import beyond, beyond_line
from benchmarks.steady.__main__ import report_exposed
from benchmarks.steady.blocks import exposed
from benchmarks.survival import Case, report
from benchmarks.world import World

EVERY = (
    "batch",
    "estimator",
    "join",
    "kill",
    "links_secure",
    "outer_convergence",
    "outer_nested",
    "outer_recovery",
    "outer_server",
    "overlay",
    "pipeline_equal",
    "pipeline_policies",
    "pipeline_recovery",
    "pipeline_steady",
    "soak",
    "steady",
    "transfer",
)


@pytest.mark.slow
def test_each_benchmark_tells_its_flags():
    """Each benchmark prints its help as with `python -m`, with all common flags; all run in one process, which imports
    torch once.
    """
    code = (
        "import runpy, sys\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv = [name, '--help']\n"
        "    try:\n"
        "        runpy.run_module(f'benchmarks.{name}', run_name='__main__')\n"
        "    except SystemExit as ended:\n"
        "        print('ended', ended.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *EVERY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *told, rest = done.stdout.split("ended 0\n")
    assert (len(told), rest) == (len(EVERY), "")
    for name, words in zip(EVERY, told, strict=True):
        assert [flag for flag in ("--out", "--quick", "--check") if flag not in words] == [], name


def test_there_is_less_of_everything_with_quick():
    def given(*words: str) -> tuple[int, list[float]]:
        options = Options("")
        options.add_count("--runs", 20, 4, "runs")
        options.add_series("--states-mib", [50.0, 200.0], "states")
        args = options.parse_args([*words])
        return args.runs, args.states_mib

    assert given() == (20, [50.0, 200.0])
    assert given("--quick") == (4, [50.0])
    assert given("--quick", "--runs", "7", "--states-mib", "1.5", "2") == (7, [1.5])


def test_exposed_communication_is_the_step_beyond_the_same_step_alone(capsys):
    times = {"chaos": [0.05, 0.06, 0.09], "ddp": [0.07, 0.08, 0.08], "alone": [0.04, 0.05, 0.05]}
    seconds = exposed(times, "alone")
    assert seconds == pytest.approx({"chaos": 0.01, "ddp": 0.03})
    result = Result("steady")
    report_exposed(result, "world 2, 50 MiB", seconds, "ddp")
    assert {f.name: f.value for f in result.figures}["exposed communication, chaos / ddp, world 2, 50 MiB"] == (
        pytest.approx(1 / 3, abs=1e-6)
    )
    result.finish(Options("").parse_args([]))
    assert "exposed / that of ddp, world 2, 50 MiB: chaos 0.33" in capsys.readouterr().out.splitlines()[-1]


def test_where_ddp_exposes_nothing_there_is_no_ratio_to_it():
    result = Result("steady")
    report_exposed(result, "case", {"chaos": 0.01, "ddp": -0.001}, "ddp")
    assert not any(f.unit == "ratio" for f in result.figures)
    assert "exposes no communication" in result.notes[0]


def test_a_miss_is_said_and_ends_a_check_with_1(tmp_path, capsys):
    result = Result("some")
    result.add("fast enough", 1.0, "s", 2.0)
    result.add("too slow", 3.0, "s", 2.0)
    args = Options("").parse_args(["--check", "--out", str(tmp_path / "out.json")])
    assert result.finish(args) == 1
    assert "1 of 2 bounds held; missed: too slow" in capsys.readouterr().out
    record = json.loads((tmp_path / "out.json").read_text())
    assert [f["ok"] for f in record["figures"]] == [True, False]
    assert set(record["figures"][0]) >= {"name", "value", "unit", "bound", "ok"}


def test_a_small_value_is_not_rounded_to_one_that_holds():
    result = Result("some")
    assert result.add("losses apart", 5e-8, "1", 1e-10).ok is False
    assert result.figures[0].value == 5e-8


def test_the_prediction_interval_has_its_border_at_one():
    values = [1.0, 2.0, 3.0]  # mean 2, deviation 1, quantile 4.303 for two degrees of freedom
    assert beyond(values, 2.0) == 0.0
    assert beyond(values, 2.0 + 4.303 * math.sqrt(4 / 3)) == pytest.approx(1.0)


def test_the_line_s_interval_widens_away_from_the_middle():
    points = [(0.0, 0.1), (1.0, 0.9), (2.0, 2.1), (3.0, 2.9), (4.0, 4.0)]
    near, far = beyond_line(points, 2.0, 3.0), beyond_line(points, 9.0, 10.0)
    assert near > far > 0.0
    assert beyond_line(points, 2.0, 2.0) < 1.0


class Member:
    """Stand-in for a member's worker process, whose reports are written by the test."""

    def __init__(self) -> None:
        self.pipe, self.theirs = multiprocessing.Pipe()
        self.process = SimpleNamespace(pid=0, exitcode=None)

    def kill(self) -> None:
        self.theirs.close()

    def step(self, ns: int, step: int, contributors: int, backwards: int) -> None:
        self.theirs.send(("step", ns, step, step, f"h{step}", contributors, 0, backwards))


@pytest.fixture
def world() -> Any:
    made = World(lambda name: Member(), random.Random(0), patience_s=5.0)
    made.open()
    for seen in made.members.values():
        seen.worker.theirs.send(("in", 1, "id"))
    return made


def test_recovery_ends_when_the_last_survivor_has_a_step_without_the_victim(world):
    one, other, _ = (s.worker for s in world.members.values())
    one.step(1_000_000_010, 7, 3, 1)  # still with the victim: its result was under way
    one.step(1_100_000_000, 8, 2, 2)
    other.step(1_000_000_020, 7, 3, 1)
    other.step(1_250_000_000, 8, 2, 2)
    assert world.recovered("w2", 1_000_000_000) == pytest.approx(0.25)


def test_a_gradient_that_went_into_no_step_is_counted_as_thrown_away(world):
    seen = world.members["w0"]
    seen.worker.step(10, 1, 3, 1)
    seen.worker.step(20, 2, 3, 3)
    world.pump(lambda: len(seen.steps) == 2, "two steps")
    assert [s.thrown for s in seen.steps] == [0, 1]


def test_waiting_in_vain_names_what_for_and_the_last_reports(world):
    world._patience_s = 0.0
    with pytest.raises(TimeoutError, match=r"three steps of 3 members; last reports: .*'w0': 'no step yet'"):
        world.settle()


def test_a_member_that_dies_of_itself_ends_the_wait_at_once(world):
    world.members["w1"].worker.process.exitcode = 1
    with pytest.raises(RuntimeError, match="w1 died of itself"):
        world.pump(lambda: False, "anything")


def test_members_that_drop_out_of_the_pipe_are_no_error(world):
    world.members["w2"].worker.kill()
    world.members["w0"].worker.step(10, 1, 3, 1)
    world.pump(lambda: bool(world.members["w0"].steps) and world.members["w2"].worker.pipe.closed, "one step")


def test_a_member_that_failed_ends_the_wait_with_its_words(world):
    world.members["w1"].worker.theirs.send(RuntimeError("what was wrong"))
    with pytest.raises(RuntimeError, match="what was wrong"):
        world.pump(lambda: False, "anything")


def test_the_report_bounds_what_is_ours_and_not_what_is_the_peer_s(capsys):
    case = Case(seconds=[0.1, 0.1, 0.3], usual=[0.04] * 3, back=[1.0] * 3, ranks=[0, 1, 2], thrown=2)
    ours, peers = Result("ours"), Result("peers")
    report(ours, "kill", case, bound_s=0.15, strict=True)
    report(peers, "kill", case)
    missed = {f.name for f in ours.figures if f.ok is False}
    assert missed == {"kill: slowest / median", "kill: survivors' gradients thrown away"}
    assert all(f.ok is None for f in peers.figures)


def test_a_missing_peer_is_said_with_the_way_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(peers_torchft.importlib.util, "find_spec", lambda name: None)
    result = Result("kill")
    peers_torchft.measure(result, 50, 0.1, SimpleNamespace(quick=True, seed=1))
    assert "pip install torchft" in result.notes[0]
    assert not result.figures


@pytest.mark.slow
def test_kills_freezes_and_forced_hand_ons_of_real_processes(monkeypatch, tmp_path):
    out = tmp_path / "kill.json"
    monkeypatch.setattr(sys, "argv", ["kill", "--quick", "--runs", "1", "--peers", "--out", str(out)])
    kill_main()
    record = json.loads(out.read_text())
    timed = {f["name"] for f in record["figures"] if f["unit"] in ("s", "ratio")}
    assert not set(record["missed"]) - timed  # how fast it is depends on the machine, what is lost does not
    assert len(record["details"]["slots handed on, 50 MiB"]) == 3
