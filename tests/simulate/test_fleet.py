"""Tests simulated jobs on fleets of devices under each policy: their use of time, the samples trained, and the
command.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.fleet import write_events, write_steps
from chaos_lightning import cli
from chaos_lightning.cli import fleet_plot as plot
from chaos_lightning.cli.fleet_command import to_json
from chaos_lightning.errors import ConfigurationError, MissingExtraError, PlanError
from chaos_lightning.planning.fleet.generator import Chance, generate
from chaos_lightning.planning.fleet.simulator import FleetRun, Outcome, Rules
from chaos_lightning.planning.fleet.traces import FleetChange, Trace, TraceError
from chaos_lightning.planning.pipelines import policies
from chaos_lightning.planning.pipelines.choice import Decision
from chaos_lightning.planning.pipelines.files import to_dict
from chaos_lightning.planning.pipelines.formation import EqualFleet, Pauses
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob

DEVICES = 16
GIB = 1 << 30
LAYER = Layer(name="", forward_s=0.01, backward_s=0.02, parameter_nbytes=GIB)
JOB = TrainingJob(
    layers=tuple(replace(LAYER, name=f"l{i}") for i in range(8)),
    devices=tuple(Device(name=f"d{i}", memory_nbytes=5 * GIB // 2) for i in range(DEVICES)),
    micro_batches=32,
    memory=PLAIN_MEMORY,
)
"""Two layers fit on a device, so that pipelines have four stages."""
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def fleet() -> EqualFleet:
    return EqualFleet(JOB, Pauses(move_s=100.0))


def losing(*lost: tuple[float, tuple[int, ...]], hours: float = 2.0) -> Trace:
    changes = tuple(FleetChange(at_s, "remove", devices) for at_s, devices in lost)
    return Trace(tuple(range(DEVICES)), changes, hours * HOUR_S, "by hand")


def told(fleet: EqualFleet, trace: Trace, policy: str, **more: Any) -> tuple[Outcome, list[Decision]]:
    decisions: list[Decision] = []
    run = FleetRun(fleet, trace, policy, record=True, told=lambda _, d: decisions.append(d), **more)
    return run.run(), decisions


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("policy", list(policies.POLICIES))
def test_fleet_without_losses_trains_all_the_time(fleet: EqualFleet, policy: str) -> None:
    out, decisions = told(fleet, losing(), policy)
    begun = decisions[0].chosen
    assert begun is not None
    assert out.throughput == pytest.approx(begun.throughput)
    assert out.seconds["train"] == pytest.approx(2 * HOUR_S)
    assert out.steps == pytest.approx(2 * HOUR_S / begun.step_s)


@pytest.mark.parametrize("policy", list(policies.POLICIES))
@pytest.mark.parametrize("group", [1, 6])
def test_causes_of_time_add_up_to_the_run(fleet: EqualFleet, policy: str, group: int) -> None:
    chance = Chance(devices=DEVICES, hours=9, rate=0.4, group=group, repair_hours=0.5, slow_rate=0.1)
    for seed in range(3):
        out = FleetRun(fleet, generate(chance, seed), policy, seed=seed).run()
        assert sum(out.seconds.values()) == pytest.approx(9 * HOUR_S)
        assert min(out.seconds.values()) >= 0
        assert out.samples > 0


def test_equal_seeds_give_equal_bytes(fleet: EqualFleet) -> None:
    def text() -> str:
        trace = generate(Chance(devices=DEVICES, hours=9, rate=0.2, group=6, repair_hours=1.0), 4)
        fresh = EqualFleet(fleet.job, fleet.pauses)
        return to_json({"adaptive": [FleetRun(fresh, trace, "adaptive", seed=4, record=True).run()]}, "a test")

    assert text() == text()


def test_move_pauses_for_half_a_step_and_the_transition(fleet: EqualFleet) -> None:
    out, decisions = told(fleet, losing((HOUR_S, (3,))), "dynamic")
    before, moved = decisions[0].chosen, decisions[1].chosen
    assert before is not None
    assert moved is not None
    assert out.seconds["move"] == pytest.approx(100.0)
    assert out.seconds["redo"] == pytest.approx(before.step_s / 2)
    assert [s.throughput > 0 for s in out.history] == [True, False, True]
    assert [s.devices for s in out.history] == [16, 15, 15]


def test_second_loss_within_a_recovery_begins_it_anew(fleet: EqualFleet) -> None:
    out, decisions = told(fleet, losing((HOUR_S, (3,)), (HOUR_S + 60, (7,))), "dynamic")
    assert out.losses == 2
    assert 100 < out.seconds["move"] < 200
    last = decisions[-1].chosen
    assert last is not None
    assert last.plan == fleet.formation("best", 14)


def test_who_comes_within_a_recovery_waits_for_its_end(fleet: EqualFleet) -> None:
    trace = losing((HOUR_S, (3,)))
    back = FleetChange(HOUR_S + 50, "add", (3,))
    out, decisions = told(fleet, Trace(trace.first, (*trace.changes, back), trace.end_s), "dynamic")
    assert out.seconds["move"] == pytest.approx(200.0)
    assert len(decisions) == 3
    assert out.history[-1].active == 16


def test_loss_of_all_owners_is_fatal_and_what_was_trained_since_the_checkpoint_is_void(fleet: EqualFleet) -> None:
    begun = fleet.formation("best", DEVICES)
    assert begun is not None
    (row,) = begun.shape.rows
    first_stages = tuple(q * row.stages for q in range(row.times))
    out, decisions = told(fleet, losing((HOUR_S + 600, first_stages)), "adaptive")
    assert out.fatal == 1
    assert out.seconds["void"] == pytest.approx(600.0)
    assert out.seconds["reload"] == pytest.approx(160.0)
    last = decisions[-1].chosen
    assert last is not None
    assert last.policy == "otherwise"


def test_checkpoint_that_is_due_in_a_pause_is_written_at_its_end(fleet: EqualFleet) -> None:
    left, moved = [d for d in range(DEVICES) if d != 3], fleet.formation("best", DEVICES - 1)
    assert moved is not None
    rows = zip(moved.starts, moved.shape.rows, strict=False)
    first_stages = tuple(left[start + q * row.stages] for start, row in rows for q in range(row.times))
    out, decisions = told(fleet, losing((1700.0, (3,)), (3500.0, first_stages)), "dynamic")
    assert decisions[1].chosen is not None
    assert out.fatal == 1
    assert out.seconds["void"] == pytest.approx(3500.0 - 1700.0 - decisions[1].chosen.pause_s)


def test_job_waits_while_no_plan_fits(fleet: EqualFleet) -> None:
    all_but_one = tuple(range(1, DEVICES))
    trace = Trace(
        tuple(range(DEVICES)),
        (FleetChange(HOUR_S, "remove", all_but_one), FleetChange(HOUR_S + 900, "add", all_but_one)),
        2 * HOUR_S,
    )
    out, _ = told(fleet, trace, "adaptive")
    assert out.seconds["wait"] == pytest.approx(900.0)
    assert out.history[-1].throughput > 0


def test_newcomers_take_vacant_places(fleet: EqualFleet) -> None:
    trace = losing((HOUR_S, (3, 7)))
    back = FleetChange(HOUR_S + 600, "add", (3, 7))
    out, decisions = told(fleet, Trace(trace.first, (*trace.changes, back), trace.end_s), "reroute")
    assert [d.chosen.kind for d in decisions if d.chosen] == ["move", "keep", "fill"]
    assert out.history[-1].throughput == pytest.approx(out.history[0].throughput)


def test_slow_device_is_left_out_until_it_is_well(fleet: EqualFleet) -> None:
    changes = (FleetChange(HOUR_S, "slow", (3,), 0.1), FleetChange(HOUR_S + 1800, "well", (3,)))
    out, decisions = told(fleet, Trace(tuple(range(DEVICES)), changes, 2 * HOUR_S), "adaptive")
    kinds = [d.chosen.kind for d in decisions if d.chosen]
    assert kinds[0] == "move"
    assert "keep" not in kinds
    assert out.history[-1].throughput == pytest.approx(out.history[0].throughput)


def test_plan_does_not_flutter_for_a_device_that_is_hardly_slow(fleet: EqualFleet) -> None:
    changes = tuple(
        FleetChange(HOUR_S + 60 * i, kind, (3,), 0.99) for i, kind in enumerate(["slow", "well"] * 10)
    )  # fmt: skip
    trace = Trace(tuple(range(DEVICES)), changes, 2 * HOUR_S)
    out = FleetRun(fleet, trace, "adaptive", rules=Rules(threshold=0.05)).run()
    assert out.decisions == {"move": 1, "keep": 20}
    assert out.seconds["move"] == 0


def test_adaptive_is_as_good_as_the_better_of_two() -> None:
    traces = [generate(Chance(devices=DEVICES, hours=9, rate=0.1), seed) for seed in range(8)]
    for move_s in (8.2, 600.0):
        fleet = EqualFleet(JOB, Pauses(move_s=move_s))
        total = {
            name: sum(FleetRun(fleet, trace, name).run().samples for trace in traces)
            for name in ("adaptive", "dynamic", "reroute")
        }
        assert total["adaptive"] >= 0.99 * max(total["dynamic"], total["reroute"])


# ------------------------------------------------------------------------------------------------ the command


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", "gpt:16,4096", *arguments])


def test_command_tells_policies_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    to = tmp_path / "a.json"
    done = command("--devices", "16", "--seeds", "2", "--policy", "adaptive,reroute", "--json", str(to),
                   "--plot", str(tmp_path / "a.png"))  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert [r[0] for r in rows if r] == ["policy", "adaptive", "reroute"]
    about = json.loads(to.read_text())
    assert about["about"] == "gpt:16,4096, --devices 16 --rate 0.1 --hours 9"
    runs = about["policies"]["adaptive"]["runs"]
    assert [run["seed"] for run in runs] == [0, 1]
    assert runs[0]["history"][0]["devices"] == 16
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_command_takes_the_number_of_devices_from_the_file(tmp_path: Path) -> None:
    path, to = tmp_path / "job.json", tmp_path / "a.json"
    path.write_text(json.dumps(to_dict(JOB)))
    for arguments, devices in (([], DEVICES), (["--devices", "15"], 15)):
        done = CliRunner().invoke(
            cli.app, ["simulate", str(path), "--rate", "0", "--policy", "reroute", "--json", str(to), *arguments]
        )
        assert done.exit_code == 0, done.output
        (run,) = json.loads(to.read_text())["policies"]["reroute"]["runs"]
        assert run["history"][0]["devices"] == devices


def test_command_says_which_layer_fits_on_no_device() -> None:
    done = CliRunner().invoke(cli.app, ["simulate", "gpt:32,400000", "--rate", "0"])
    assert isinstance(done.exception, ConfigurationError)
    assert "no policy made a step: layer 0 ('embedding') fits on no device: alone with one" in str(done.exception)
    assert "\n" not in str(done.exception)


def test_command_looks_at_the_kind_of_picture_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: FleetRun) -> Outcome:
        raise AssertionError("it runs")

    monkeypatch.setattr(FleetRun, "run", run)
    done = command("--plot", "a.unknown")
    assert isinstance(done.exception, ConfigurationError), done.exception
    monkeypatch.setattr(plot, "missing", lambda: "no matplotlib")
    assert isinstance(command("--plot", "a.png").exception, MissingExtraError)


@pytest.mark.parametrize("write", [write_events, write_steps])
def test_command_runs_a_trace(tmp_path: Path, write: Callable[[Trace, Path], None]) -> None:
    path = tmp_path / "trace"
    write(generate(Chance(devices=16, hours=3, rate=0.2, repair_hours=0.2), 1), path)
    done = command("--trace", str(path), "--policy", "adaptive")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--policy", "best"], PlanError, "policy 'best' is unknown; expected one of adaptive, "),
        (["--rate", "nan"], ConfigurationError, "--rate is nan; expected a finite number at least 0"),
        (["--devices", "2", "--rate", "9"], TraceError, "no device is there from hour"),
        (["--json", "/nowhere/a"], ConfigurationError, "--json /nowhere/a: /nowhere is no folder"),
        (["--plot", "a.unknown"], ConfigurationError, "--plot a.unknown: no pictures are of kind 'unknown'; expected"),
        (["--trace", "/nowhere"], TraceError, "/nowhere: cannot be read as text"),
        (
            ["--devices", "16", "--rate", "3000", "--repair-hours", "0.0002", "--hours", "0.05"],
            ConfigurationError,
            "there is a loss in each step, so expected far less than that, --repair-hours, or a smaller model",
        ),
        (
            ["--devices", "16", "--rate", "0", "--hours", "0.0001"],
            ConfigurationError,
            "no policy made a step: a step takes 1.93 s, and the run 0.36 s; expected --hours above 0.000537",
        ),
        (["--devices", "1", "--rate", "0"], ConfigurationError, "no policy made a step: no plan fits 1 devices"),
        (["--policy", "reroute,adaptive, reroute"], ConfigurationError, "--policy names reroute twice; expected each"),
        (["--micro-batches", "0"], ConfigurationError, "--micro-batches is 0; expected a finite number at least 1"),
        (["--devices", "0"], ConfigurationError, "--devices is 0; expected a finite number at least 1"),
        (["--slow-hours", "0"], ConfigurationError, "--slow-hours is 0.0; expected a finite number above 0"),
        (
            ["--devices", "4", "--rate", "0.2", "--seeds", "3"],
            TraceError,
            "seed 1: --devices 4 --rate 0.2 --hours 9: no",
        ),
        (
            ["--trace", "a", "--devices", "8", "--host-rate", "1"],
            ConfigurationError,
            "--trace is given beside --devices, --host-rate, which it replaces; expected one of both",
        ),
    ],
)
def test_command_says_in_one_line_what_cannot_be(arguments: list[str], kind: type[Exception], words: str) -> None:
    done = command(*arguments)
    assert isinstance(done.exception, kind)
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
