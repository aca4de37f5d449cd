"""Tests jobs on simulated fleets of several kinds of devices, with different speeds, memory and links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos_lightning import cli
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.fleet.generator import Chance, generate
from chaos_lightning.planning.fleet.seats import MixedFleet
from chaos_lightning.planning.fleet.simulator import FleetRun, Outcome
from chaos_lightning.planning.fleet.traces import FleetChange, Trace
from chaos_lightning.planning.pipelines.choice import Decision
from chaos_lightning.planning.pipelines.files import to_dict
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.planner import Planner

GIB = 1 << 30
LAYER = Layer(name="", forward_s=0.01, backward_s=0.02, parameter_nbytes=GIB)
FAST = tuple(Device(name=f"new{i}", memory_nbytes=9 * GIB // 2, host="rack0") for i in range(2))
SLOW = tuple(Device(name=f"old{i}", memory_nbytes=5 * GIB // 2, speed=0.5, host="rack1") for i in range(4))
JOB = TrainingJob(
    layers=tuple(replace(LAYER, name=f"l{i}") for i in range(4)),
    devices=FAST + SLOW,
    micro_batches=12,
    memory=PLAIN_MEMORY,
)
"""A new device holds all four layers, an old one two of them."""
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def fleet() -> MixedFleet:
    return MixedFleet(JOB, Pauses(move_s=100.0))


def told(fleet: MixedFleet, policy: str, *changes: FleetChange, hours: float = 2.0) -> tuple[Outcome, list[Decision]]:
    decisions: list[Decision] = []
    trace = Trace(tuple(range(len(JOB.devices))), changes, hours * HOUR_S, "by hand")
    run = FleetRun(fleet, trace, policy, record=True, told=lambda _, d: decisions.append(d))
    out = run.run()
    assert sum(out.seconds.values()) == pytest.approx(hours * HOUR_S)
    assert not out.failed
    return out, decisions


def step_s(lost: str = "") -> float:
    return Planner(JOB).first([d.name for d in JOB.devices if d.name != lost]).estimate.step_s


@pytest.mark.parametrize("policy", ["adaptive", "dynamic", "reroute"])
def test_devices_train_at_their_own_speeds(fleet: MixedFleet, policy: str) -> None:
    out, _ = told(fleet, policy)
    assert out.throughput == pytest.approx(JOB.micro_batches / step_s())
    fast = JOB.with_devices([replace(d, speed=1.0) for d in JOB.devices])
    assert step_s() > 1.2 * Planner(fast).first().estimate.step_s


def test_a_fast_device_is_missed_more_than_a_slow_one(fleet: MixedFleet) -> None:
    for lost in (0, 2):
        out, _ = told(fleet, "dynamic", FleetChange(HOUR_S, "remove", (lost,)))
        assert out.history[-1].throughput == pytest.approx(JOB.micro_batches / step_s(JOB.devices[lost].name))
        assert (out.losses, out.fatal, out.history[-1].active) == (1, 0, 5)
    assert step_s("new0") > step_s("old0")


def test_device_that_is_back_while_its_layers_move_holds_nothing(fleet: MixedFleet) -> None:
    lost, back = FleetChange(HOUR_S, "remove", (0,)), FleetChange(HOUR_S + 10, "add", (0,))
    out, decisions = told(fleet, "dynamic", lost, back)
    assert [d.chosen.kind for d in decisions if d.chosen] == ["move", "move", "move"]
    assert out.history[-1].throughput == pytest.approx(JOB.micro_batches / step_s())
    assert out.seconds["move"] >= 200


def test_newcomer_takes_the_vacant_place_of_its_kind(fleet: MixedFleet) -> None:
    out, decisions = told(fleet, "reroute", FleetChange(HOUR_S, "remove", (0,)), FleetChange(HOUR_S + 600, "add", (0,)))
    assert [d.chosen.kind for d in decisions if d.chosen] == ["move", "keep", "fill"]
    assert out.history[-1].throughput == pytest.approx(JOB.micro_batches / step_s(), rel=0.01)
    assert out.seconds["redo"] < step_s()


def test_loss_of_all_owners_restarts_from_the_checkpoint(fleet: MixedFleet) -> None:
    out, decisions = told(
        fleet, "adaptive", FleetChange(2000.0, "remove", (0, 1, 2, 3, 4)), FleetChange(2600.0, "add", (0,))
    )
    assert out.fatal == 1
    assert decisions[1].chosen is None, "one old device holds half of the model"
    assert decisions[2].chosen is not None
    assert decisions[2].chosen.kind == "restart"
    assert out.seconds["void"] == pytest.approx(200.0)
    assert out.seconds["wait"] == pytest.approx(600.0)


def test_slow_device_is_told_by_the_share_of_its_own_speed(fleet: MixedFleet) -> None:
    out, _ = told(fleet, "reroute", FleetChange(HOUR_S, "slow", (2,), 0.5), FleetChange(1.5 * HOUR_S, "well", (2,)))
    usual, slow, well = (x.throughput for x in out.history if x.throughput)
    assert slow < usual == pytest.approx(well)


def test_hosts_of_the_file_are_lost_as_a_whole() -> None:
    hosts = tuple(d.place for d in JOB.devices)
    trace = generate(Chance(devices=6, hours=9, rate=0, host_rate=0.3, repair_hours=0.1, hosts=hosts), 1)
    lost = {c.devices for c in trace.changes if c.kind == "remove"}
    assert {(0, 1), (2, 3, 4, 5)} <= lost


# ------------------------------------------------------------------------------------------------ the command


def command(tmp_path: Path, *arguments: str, job: TrainingJob = JOB) -> Any:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(to_dict(job)))
    return CliRunner().invoke(cli.app, ["simulate", str(path), *arguments])


def test_command_runs_a_trace_that_begins_with_a_removal_of_a_named_device(tmp_path: Path) -> None:
    trace, to = tmp_path / "trace", tmp_path / "a.json"
    trace.write_text("1800000,remove,new1\n7200000,add,new1\n")
    done = command(tmp_path, "--trace", str(trace), "--policy", "dynamic", "--json", str(to))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "count as" not in done.output
    (run,) = json.loads(to.read_text())["policies"]["dynamic"]["runs"]
    assert next((x["hours"], x["devices"]) for x in run["history"]) == (0.0, 6)
    assert min(x["devices"] for x in run["history"]) == 5
    assert run["losses"] == 1
    rates = {x["throughput"] for x in run["history"]}
    assert any(rate == pytest.approx(JOB.micro_batches / step_s("new1")) for rate in rates)


def test_command_draws_losses_and_repairs(tmp_path: Path) -> None:
    done = command(tmp_path, "--rate", "0.3", "--host-rate", "0.05", "--repair-hours", "0.3", "--hours", "4")
    assert done.exit_code == 0, (done.output, done.exception)
    assert [line.split()[0] for line in done.output.splitlines() if line] == [
        "policy",
        "adaptive",
        "dynamic",
        "reroute",
    ]


def test_command_takes_devices_beside_a_trace_that_begins_with_a_removal(tmp_path: Path) -> None:
    trace, to = tmp_path / "trace", tmp_path / "a.json"
    trace.write_text("600000,remove,x\n3600000,add,x\n")
    done = CliRunner().invoke(
        cli.app,
        ["simulate", "gpt:16,4096", "--trace", str(trace), "--devices", "12", "--policy", "reroute", "--json", str(to)],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    (run,) = json.loads(to.read_text())["policies"]["reroute"]["runs"]
    assert [x["devices"] for x in run["history"]][:2] == [12, 11]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "adaptive,oobleck"], "--policy oobleck plans for devices that are alike, and these are not"),
        (["--arrivals", "1"], "--arrivals: the file's devices are of several kinds"),
        (["--per-host", "2"], "--per-host: the file's devices are of several kinds"),
        (["--devices", "65"], "the fleet has 65 devices of several kinds or links; expected at most 64"),
        (["--trace", "node"], "line 1: 'node-0' is no device of the fleet, which has several kinds"),
        (["--trace", "added", "--devices", "5"], "--trace is given beside --devices, which it replaces"),
        (["--rate", "0", "--hours", "0.00001"], "no policy made a step: a step takes"),
    ],
)  # fmt: skip
def test_command_says_in_one_line_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("node").write_text("500,remove,node-0\n900,add,node-0\n")
    Path("added").write_text("500,add,new0\n900,remove,new0\n")
    job = JOB
    if "65" in arguments:
        arguments = []
        job = replace(JOB, devices=FAST + tuple(replace(SLOW[0], name=f"old{i}") for i in range(63)))
    done = command(tmp_path, *arguments, job=job)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
