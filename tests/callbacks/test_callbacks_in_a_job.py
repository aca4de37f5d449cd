"""Tests all callbacks in real members of a real job: members die in every phase, and the audit finds no violation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import callback_support
import pytest
from forked_support import patient, scheduler

from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.observe import folds
from chaos_lightning.testing.faults import FaultPlan
from chaos_lightning.testing.harness import Harness


class Job:
    def __init__(self, harness: Harness, port: int, root: Path):
        self.harness, self.port, self.root = harness, port, root

    def start(self, *names: str, plan: str) -> None:
        """Starts members; the first one founds the job and waits at step 2 until the others are admitted."""
        gate = self.root / "gate"
        os.mkfifo(gate)
        first, *others = names
        self.harness.declare(*FaultPlan.parse(plan).expected_deaths)
        self._member(first, plan, str(gate))
        self.harness.wait_step(2)
        for place, name in enumerate(others):
            self._member(name, plan)
            if not place:
                self.harness.wait_for(
                    "view", lambda r: any(j.startswith(f"{others[0]}~") for j in r.get("joiners") or ())
                )
            else:  # who comes while a view waits for its boundary gets into the next one
                self.harness.wait_for("link_up", lambda r: str(r["peer"]).startswith(f"{first}~"), node=name)
        with open(gate, "w"):
            pass

    def _member(self, name: str, plan: str, gate: str = "") -> None:
        self.harness.start_function(name, callback_support.job_member, name, self.port, str(self.root), plan, gate)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    options = patient(tmp_path)
    with Harness(tmp_path, deadline_s=120.0) as harness:
        started = scheduler(options)
        try:
            yield Job(harness, split_endpoint(options.listen)[1], tmp_path)
        finally:
            started.stop()


@pytest.mark.parametrize(
    "plan",
    [
        "at step 14 in forward: sigkill d\nat step 18 in backward: sigkill c\nat step 22 in allreduce: sigkill b",
        pytest.param(
            "at step 14 in optimizer: sigkill a\nat step 18 in validation: sigkill b\n"
            "at step 30 in checkpoint: sigkill c",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "at step 14 in backward: sigkill rank 0\nat step 18 in optimizer: sigkill rank 0", marks=pytest.mark.slow
        ),
    ],
    ids=["before the commit", "after the commit", "roots"],
)
def test_deaths_in_every_phase_break_nothing(job: Job, plan: str) -> None:
    job.start("a", "b", "c", "d", plan=plan)
    harness = job.harness
    survivors = []
    for name in "abcd":
        code = harness.wait_exit(name)
        assert code in (0, -signal.SIGKILL)
        survivors += [name] if code == 0 else []
    deaths = len(FaultPlan.parse(plan))
    assert len(survivors) == 4 - deaths
    findings = harness.audit()
    assert [f.verdict for f in findings][1:3] == ["ok", "ok"]
    assert findings[4].verdict == "ok", findings[4]
    told = harness.timeline()
    recovered = folds.recoveries(told)
    assert len(recovered) == deaths
    assert all(r.seconds is not None for r in recovered)
    assert {k: (u.used, u.twice) for k, u in folds.samples(told).items()} == {("", e): (48, ()) for e in range(8)}
    assert "useful share" in harness.children[survivors[0]].tail()


@pytest.mark.parametrize("who", [pytest.param("a", marks=pytest.mark.slow), "b"])
def test_a_signal_leaves_with_exit_code_0_and_the_others_go_on(job: Job, who: str) -> None:
    job.start("a", "b", plan="")
    harness = job.harness
    harness.wait_for("committed", lambda r: r["step"] >= 6, node="b")
    harness.terminate(who)
    assert harness.wait_exit("a") == 0
    assert harness.wait_exit("b") == 0
    (left,) = [life for life in harness.timeline().lives.values() if life.end == "left" and life.node == who]
    assert left.member in harness.timeline().lives
    harness.audit()
