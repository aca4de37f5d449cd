"""Tests that the planner reads a written file of measurements as it is, for any fleet named in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos_lightning.pipeline.model_profile import (
    LEAST_S,
    ModelProfile,
    estimated_s,
    fleet_of_job,
    this_machine,
    write,
)
from chaos_lightning.planning.pipelines.files import read_job
from chaos_lightning.planning.pipelines.job import Layer, Overheads
from chaos_lightning.planning.pipelines.planner import Planner


def layer(number: int, **more: Any) -> Layer:
    return Layer(
        name=f"net.{number}", forward_s=0.0123456, backward_s=0.025, parameter_nbytes=1_000_003, gradient_nbytes=77,
        optimizer_nbytes=2_000_014, activation_nbytes=5, workspace_nbytes=6, output_nbytes=7, optimizer_s=0.001, **more,
    )  # fmt: skip


PROFILE = ModelProfile(
    chain="net", kind="Block", layers=(layer(0), replace(layer(1), backward_s=LEAST_S)), micro_batches=3,
    samples=8, tied_nbytes=77, step_s=0.1, period_s=0.2, device="cpu", devices=1, memory_nbytes=1 << 30,
    notes=("a note",),
)  # fmt: skip


def link(a: str, b: str, mbps: float | None, back: float | None = None) -> dict[str, Any]:
    there = None if mbps is None else mbps * 1e6
    return {
        "a": a,
        "b": b,
        "state": "in use",
        "latency_s": 0.001,
        "there_bps": there,
        "back_bps": (back or 0) * 1e6 or there,
    }


def job(*links: dict[str, Any]) -> dict[str, Any]:
    members = [{"id": f"m{i}", "host": f"h{i // 2}"} for i in range(4)]
    return {
        "job": "mine",
        "machine": {"members": members, "others": [{"id": "m9", "host": "h9"}], "links": list(links)},
    }


def test_a_profile_travels_as_text() -> None:
    assert ModelProfile.from_json(PROFILE.to_json()) == PROFILE


@pytest.mark.parametrize("name", ["model.yaml", "model.json"])
def test_the_planner_reads_what_was_measured(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, PROFILE, this_machine(PROFILE))
    read = read_job(tmp_path / name)
    assert read.layers == PROFILE.layers
    assert (read.micro_batches, read.samples, read.tied_nbytes) == (3, 8, 77)
    assert [(d.name, d.memory_nbytes) for d in read.devices] == [("d0", 1 << 30)]
    assert len(read_job(tmp_path / name, 5).devices) == 5
    # Three micro-batches pass both layers, then the optimizer runs.
    assert estimated_s(tmp_path / name) == pytest.approx(3 * (2 * 0.0123456 + 0.025) + 0.002, rel=1e-6)


def test_members_of_a_job_are_the_devices_and_share_a_hosts_memory(tmp_path: Path) -> None:
    usual = [link("m0", "m2", 100.0, 90.0), link("m1", "m2", 100.0), link("m1", "m3", 110.0)]
    facts = job(link("m0", "m1", 8000.0), *usual, link("m0", "m3", 10.0), link("m2", "m3", None), link("m0", "m9", 1.0))
    fleet = fleet_of_job(facts, PROFILE)
    assert fleet is not None
    write(tmp_path / "job.yaml", PROFILE, fleet)
    read = read_job(tmp_path / "job.yaml")
    assert [d.name for d in read.devices] == ["m0", "m1", "m2", "m3"]
    assert {d.memory_nbytes for d in read.devices} == {1 << 29}
    assert read.link("m0", "m1").rate_bps == read.link("m2", "m3").rate_bps == 8e9
    assert read.link("m0", "m2").rate_bps == read.link("m1", "m3").rate_bps == 9e7
    assert read.link("m3", "m0").rate_bps == 1e7
    assert [(x.a, x.b) for x in read.links] == [("m0", "m3")]
    assert read.link("m0", "m2").latency_s == 0.001
    assert Planner(read).first().plan.layer_count == 2


NOTHING = {"hop_s": 0.0, "unit_s": 0.0, "commit_s": 0.0}


@pytest.mark.parametrize(
    ("of_job", "period_s", "expected"),
    [
        (None, 0.2, Overheads(commit_s=0.1)),
        (None, 0.09, Overheads()),
        (NOTHING, 0.2, Overheads()),
        ({**NOTHING, "unit_s": 0.003, "commit_s": 0.061}, 0.2, Overheads(unit_s=0.003, commit_s=0.061)),
    ],
)
def test_what_lies_between_two_steps_is_told_of_the_process_where_no_job_has_measured_its_own(
    tmp_path: Path, of_job: dict[str, float] | None, period_s: float, expected: Overheads
) -> None:
    facts, measured = job(), replace(PROFILE, period_s=period_s)
    facts["machine"] |= {} if of_job is None else {"overheads": of_job}
    fleet = fleet_of_job(facts, measured)
    assert fleet is not None
    write(tmp_path / "job.yaml", measured, fleet)
    assert read_job(tmp_path / "job.yaml").overheads == expected
    assert ("beside layers a unit takes" in fleet.words) is (of_job is not None)
    # A step of the process is compared with its layers alone.
    assert estimated_s(tmp_path / "job.yaml") == pytest.approx(3 * (2 * 0.0123456 + 0.025) + 0.002, rel=1e-6)


def test_cards_of_a_job_have_memory_of_their_own() -> None:
    fleet = fleet_of_job(job(), replace(PROFILE, device="cuda"))
    assert fleet is not None
    assert {d["memory_nbytes"] for d in fleet.devices} == {1 << 30}
    assert (fleet.within_host, fleet.between_hosts, fleet.links) == ({}, {}, ())


def test_a_job_without_members_is_no_fleet() -> None:
    assert fleet_of_job({}, PROFILE) is None
    assert fleet_of_job({"machine": {"members": []}}, PROFILE) is None
