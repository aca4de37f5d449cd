"""Tests the costs of a restart by torchrun, computed from the step files of its workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.peers import torchrun_pipeline as peer
from benchmarks.peers.torchrun import Job

STEP_NS = 10_000_000


def wrote(folder: Path, start: int, first: int, last: int, from_ns: int, pid: int) -> None:
    """Writes the step files of six workers as of torchrun's start number `start`."""
    for rank in range(peer.WORKERS):
        lines = (f"{from_ns + STEP_NS * (n - first)} {n} {peer.WORKERS}\n" for n in range(first, last + 1))
        (folder / f"{start}-{rank}.{pid + rank}.steps").write_text("".join(lines))


def test_a_restart_costs_the_steps_since_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        """Ends all workers, and writes the steps of six new ones, which begin after the checkpoint of step 20 half a
        second later.
        """
        killed.append(pid)
        wrote(tmp_path, len(killed), 21, 60, time.monotonic_ns() + 500_000_000, 1000 * (1 + len(killed)))

    monkeypatch.setattr(os, "kill", kill)
    wrote(tmp_path, 0, 1, 30, time.monotonic_ns(), 1000)
    (death,) = peer.deaths(Job(tmp_path), 1)
    assert killed == [1000]
    assert death.redone == 10  # steps 21 to 30
    assert death.first_s == pytest.approx(0.5, abs=0.1)
    assert death.newer_s - death.first_s == pytest.approx(10 * STEP_NS / 1e9)
    assert death.step_s == pytest.approx(STEP_NS / 1e9)


def test_deaths_are_spread_between_checkpoints_and_hit_one_worker_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        n = len(killed)
        saved = peer.SAVE_EVERY * n
        wrote(
            tmp_path, n, saved + 1, saved + peer.SAVE_EVERY * (n + 5) // 4, time.monotonic_ns() + 10_000_000, 1000 * n
        )

    monkeypatch.setattr(os, "kill", kill)
    wrote(tmp_path, 0, 1, 25, time.monotonic_ns(), 9000)
    assert [death.redone for death in peer.deaths(Job(tmp_path), 3)] == [5, 10, 15]
    assert killed == [9000, 1001, 2002]


def test_a_checkpoint_counts_once_both_stages_are_saved(tmp_path: Path):
    assert peer.newest(tmp_path) == 0
    for name in ("20-0.pt", "20-1.pt", "40-1.pt", "40-0.part", "0-0.7.steps"):
        (tmp_path / name).touch()
    assert peer.newest(tmp_path) == 20
