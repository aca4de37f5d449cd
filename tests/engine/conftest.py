"""The job that the engine tests hurt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_job import Job, end_schedulers

from chaos_lightning.testing.harness import Harness


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    env = {"XDG_STATE_HOME": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with Harness(tmp_path, env=env, deadline_s=60) as harness:
        try:
            yield Job(harness, tmp_path)
        finally:
            end_schedulers(harness.logs)
