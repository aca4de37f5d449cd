"""Tests the lines that show a job's plan before training."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chaos_lightning.pipeline.preview import preview
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.pipeliner import PipelineAnswer, Pipeliner

MIB = 1 << 20
LAYER = Layer(
    name="x", forward_s=0.01, backward_s=0.02, parameter_nbytes=20 * MIB, gradient_nbytes=20 * MIB,
    optimizer_nbytes=40 * MIB, activation_nbytes=MIB, output_nbytes=MIB // 8,
)  # fmt: skip


def job_of(members: int, memory_nbytes: int, layers: int = 12, micro_batches: int = 16) -> TrainingJob:
    return TrainingJob(
        layers=tuple(replace(LAYER, name=f"net.{i}") for i in range(layers)),
        devices=tuple(Device(name=f"m{i}~{i}abc", memory_nbytes=memory_nbytes) for i in range(members)),
        micro_batches=micro_batches,
        samples=4,
    )


def shown(job: TrainingJob, copies: int = 2, *, ends: bool = True) -> list[str]:
    return preview(job, Pipeliner(job, copies=copies).first(job.devices), ends=ends)


def test_eight_members_are_told_in_twelve_lines() -> None:
    job = job_of(8, 600 * MIB)
    lines = shown(job)
    assert len(lines) <= 12
    assert lines[0].startswith("2 pipelines of 4, 4 stages; a step of 16 micro-batches (64 samples) takes about 0.")
    assert lines[1].startswith("fits: least is left at m")
    assert [line.partition(":")[0] for line in lines[2:]] == [
        "  net.0 to net.2", "  net.3 to net.5", "  net.6 to net.8", "  net.9 to net.11",
    ]  # fmt: skip
    named = sorted(name for line in lines[2:] for name in line.partition(": ")[2].split(", ")[:2])
    assert named == [f"m{i}" for i in range(8)]
    assert all(line.endswith(" of 600 MiB") for line in lines[2:])


def test_one_pipeline_is_told_to_end_with_any_loss() -> None:
    lines = shown(job_of(8, 270 * MIB))
    assert lines[0].startswith("1 pipeline of 8 stages")
    assert len(lines) == 11
    assert lines[-1] == "any loss ends this job: no layer has two owners"
    waits = shown(job_of(8, 270 * MIB), ends=False)
    assert waits[:-1] == lines[:-1]
    assert waits[-1] == "any loss stops this job: no layer has two owners"


def test_layers_with_one_owner_are_told() -> None:
    """Warns about members whose loss would end or stop the job, if a layer has no other owner; says nothing if each
    layer has two.
    """
    lines = shown(job_of(5, 900 * MIB, layers=6), copies=1)
    assert not any("ends this job" in line for line in lines)
    rows = (("a", 0, 2), ("b", 2, 4)), (("k", 0, 2), ("", 2, 4))
    text = json.dumps(
        {
            "plan": {
                "layers": 4,
                "pipelines": [{"micro_batches": m, "stages": x} for m, x in zip((16, 0), rows, strict=True)],
            }
        }
    )
    job = replace(job_of(1, 900 * MIB, layers=4), devices=tuple(Device(name=x, memory_nbytes=MIB << 10) for x in "abk"))
    for ends, words in (
        (True, "the loss of b ends this job: some layers have no other owner"),
        (False, "the loss of b stops this job: some layers have no other owner"),
    ):
        assert preview(job, PipelineAnswer(text=text, reason=""), ends=ends)[-1] == words


def test_what_does_not_fit_is_told_with_bytes_and_the_number_that_would() -> None:
    lines = shown(job_of(3, 230 * MIB))
    assert len(lines) == 2
    assert lines[0].startswith("does not fit 3 members: no plan fits 3 devices")
    assert "lacks" in lines[0]
    assert lines[1] == "it takes 12 members such as m0 (230 MiB)"
    hopeless = shown(job_of(3, MIB))
    assert "fits on no device" in hopeless[0]
    assert hopeless[1] == "no number of such members is enough"


def test_a_plan_that_has_no_room_is_told() -> None:
    job = job_of(8, 600 * MIB)
    answer = Pipeliner(job).first(job.devices)
    small = replace(job, devices=tuple(replace(d, memory_nbytes=MIB) for d in job.devices))
    lines = preview(small, answer, ends=True)
    assert lines[1].startswith("does not fit: m")
    assert "bytes (" in lines[1]


@pytest.mark.parametrize("members", [24, 40])
def test_large_jobs_are_cut_short(members: int) -> None:
    lines = shown(job_of(members, 230 * MIB, layers=members, micro_batches=60), copies=1)
    assert len(lines) <= 12
    assert any(" more stages" in line or " more, " in line for line in lines)


def test_members_that_are_idle_are_named() -> None:
    lines = shown(job_of(3, 4 << 30, layers=1, micro_batches=2), copies=1)
    assert any(line.startswith("  idle: m") for line in lines)
