"""Fixtures of the engine tests: jobs of real processes, with links that can be cut, stalled or read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_job import Job, end_schedulers
from middleman import Middleman

from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.harness import Harness


def a_job(folder: Path, relay: LinkRelay | None = None) -> Iterator[Job]:
    env = {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with Harness(folder, env=env, deadline_s=60, relay=relay) as harness:
        job = Job(harness, folder, relay)
        try:
            yield job
        finally:
            job.close()
            end_schedulers(harness)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield from a_job(tmp_path)


@pytest.fixture
def routed_job(tmp_path: Path) -> Iterator[Job]:
    """Job whose links pass through a relay, which can cut and stall them."""
    with LinkRelay() as relay:
        yield from a_job(tmp_path, relay)


@pytest.fixture
def watched_job(tmp_path: Path) -> Iterator[tuple[Job, Middleman]]:
    """Job whose links all pass through a middleman, which can read and change their bytes."""
    with Middleman() as relay:
        for job in a_job(tmp_path, relay):
            yield job, relay
