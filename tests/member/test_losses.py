"""Tests the log of losses, to which a member writes a step's loss only now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.member.losses import Losses


@pytest.mark.parametrize(("step_s", "told"), [(1 / 128, [1, 129, 257, 385]), (0.35, list(range(1, 401, 10)))])
def test_losses_are_a_small_part_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, told: list[int]
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with EventLog(tmp_path / "x.jsonl", member="a~1", node="a") as log:
        losses = Losses(log)
        before = (tmp_path / "x.jsonl").stat().st_size
        for step in range(1, 401):
            losses.add(torch.tensor(1 / step), 32.0)
            losses.tell(step)
            now += step_s
        assert (tmp_path / "x.jsonl").stat().st_size - before < 400 * 15
    records = [r for r in read_events(tmp_path) if r.name == "train_loss"]
    assert [r["step"] for r in records] == told
    assert [(r["loss"], r["weight"], r.member) for r in records] == [(float(f"{1 / s:.6g}"), 32.0, "a~1") for s in told]


def test_a_step_that_came_to_nothing_tells_no_loss(tmp_path: Path) -> None:
    with EventLog(tmp_path / "x.jsonl") as log:
        losses = Losses(log)
        for step in (0, 0, 7):
            losses.add(torch.tensor(float(step)), 1.0)
            losses.tell(step)
    assert [(r["step"], r["loss"]) for r in read_events(tmp_path) if r.name == "train_loss"] == [(7, 7.0)]
