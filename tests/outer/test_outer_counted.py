"""The final weights of each cluster contain each sample once, whatever happens to the server and the clusters.

`COUNTED_KILLS`, `COUNTED_STOPS` and `COUNTED_FOLDERS` say how often each is done; by default a few times.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from counted_support import CountedJob

from chaos_lightning.testing.harness import Harness

KILLS = int(os.environ.get("COUNTED_KILLS", "2"))
STOPS = int(os.environ.get("COUNTED_STOPS", "2"))
FOLDERS = int(os.environ.get("COUNTED_FOLDERS", "2"))
PER_JOB = 5
"""Whole-job kills of one job, at most."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, KILLS, PER_JOB))
def test_each_sample_counts_once_though_all_processes_are_killed(tmp_path: Path, first: int) -> None:
    with Harness(tmp_path, deadline_s=120) as harness:
        kills = min(PER_JOB, KILLS - first)
        job = CountedJob(harness, first, clusters=3, samples=1600 * (1 + kills)).start()
        for number in range(kills):
            job.reach((number + job.random.uniform(0.3, 1.0)) / (kills + 0.5))
            if len(job.running) < len(job.names):
                break  # its end has come
            job.kill_all()
            job.start()
        job.judge(job.wait())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STOPS))
def test_who_stood_still_over_the_end_has_the_last_version(tmp_path: Path, seed: int) -> None:
    with Harness(tmp_path, deadline_s=120) as harness:
        job = CountedJob(harness, seed, clusters=3).start()
        job.reach(job.random.uniform(0.75, 1.0))
        if asleep := job.running:
            name = job.random.choice(asleep)
            harness.stop(name)
            for other in set(asleep) - {name}:
                harness.wait_until(lambda other=other: not harness.children[other].running or None, f"{other}'s end")
            harness.cont(name)
        job.judge(job.wait(may_fail=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FOLDERS))
def test_a_server_on_a_wrong_folder_costs_nothing_once_the_right_one_is_back(tmp_path: Path, seed: int) -> None:
    with Harness(tmp_path, deadline_s=120) as harness:
        job = CountedJob(harness, seed).start()
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        kind = ("empty", "another job's", "older")[seed % 3]
        job.reach(0.3)
        if kind == "older":
            job.kill_server()
            job.snapshot(wrong)
            job.restart_server()
        job.reach(job.random.uniform(0.4, 0.9))
        job.kill_server()
        job.snapshot(right)
        if kind == "another job's":
            with Harness(tmp_path / "other") as elsewhere:
                other = CountedJob(elsewhere, seed).start()
                other.reach(0.3)
                other.kill_all()
                other.snapshot(wrong)
        wrong.mkdir(exist_ok=True)
        job.put_back(wrong)
        job.restart_server()
        harness.wait_until(lambda: job.refused() or None, "the clusters' refusal")
        job.kill_server()
        job.put_back(right)
        job.restart_server()
        job.judge(job.wait())
