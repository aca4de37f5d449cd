"""Tests clusters whose processes are ranks of Lightning's DDP, as real processes with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_diloco_members import OuterJob, ends, spent, told, went_through

from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.harness import Harness

RANKS = 2


class RanksJob(OuterJob):
    """Outer job with clusters of two processes."""

    def ranks(self, name: str, **spec: Any) -> list[str]:
        """Starts a cluster of two ranks; returns the names of its processes."""
        from diloco_members import ddp

        port, names = free_port(), [f"{name}.{rank}" for rank in range(RANKS)]
        common = {"name": name, "server": self.server, "out": str(self.out), "ranks": RANKS, "port": port, **spec}
        for rank, process in enumerate(names):
            self.harness.start_function(process, ddp, {**common, "rank": rank})
        return names

    def ended(self, name: str) -> list[dict[str, Any]]:
        """Waits until a cluster's processes have ended; returns their reports."""
        for rank in range(RANKS):
            assert self.harness.wait_exit(f"{name}.{rank}") == 0
        return [self.report(f"rank-{rank}/{name}") for rank in range(RANKS)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RanksJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        yield RanksJob(harness, tmp_path)


def exact(job: RanksJob, **told_more: Any) -> dict[str, Any]:
    return {**told(job), "data": "local", "policy": "sync", "codec": "fp32", "overlap": False, **told_more}


def test_a_ddp_cluster_and_a_single_process_train_one_model(ranks: RanksJob) -> None:
    ranks.serve()
    ranks.ranks("many", told=told(ranks, batch=8), step_s=0.02, trainer={"max_epochs": 3})
    ranks.cluster("one", told=told(ranks, batch=8), step_s=0.02, trainer={"max_epochs": 3})
    first, second = ranks.ended("many")
    (one,) = ranks.finish("one")
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["weights"], one["weights"])
    assert spent(ranks) == dict.fromkeys(range(3), 240)
    assert first["lines"] == second["lines"]
    assert went_through(first, 0, 1, 2)
    assert went_through(one, 0, 1, 2)
    assert ends(first)[:2] == ends(one)[:2]


def test_leftovers_of_an_odd_number_of_samples_count_once(ranks: RanksJob) -> None:
    """With an odd number of samples the ranks' last batches differ in size: each sample counts once, also with
    manual optimization.
    """
    ranks.serve()
    ranks.ranks("many", told=told(ranks), samples=61, kind="rough", trainer={"max_epochs": 2})
    first, second = ranks.ended("many")
    assert torch.equal(first["weights"], second["weights"])
    assert spent(ranks) == dict.fromkeys(range(2), 61)
    seen = [len(each["seen"]) for each in (first, second)]
    assert 2 * 61 <= sum(seen) <= 2 * 61 + 4
    rows = torch.cat([first["seen"], second["seen"]]).unique(dim=0)
    assert len(rows) == 61
    assert first["step"] == second["step"]


def test_own_data_accumulation_and_checkpoints_of_versions(ranks: RanksJob) -> None:
    ranks.serve()
    keep = ranks.out / "kept"
    trainer = {"max_epochs": 4, "accumulate_grad_batches": 2, "val_check_interval": 5}
    ranks.ranks("many", told=exact(ranks), samples=80, keep=str(keep), trainer=trainer)
    first, second = ranks.ended("many")
    assert torch.equal(first["weights"], second["weights"])
    assert first["lines"] == second["lines"]
    offers = [each["offer"] for body in ranks.entries("Round") for each in body["accepted"]]
    assert sum(offer["samples"] for offer in offers) == 4 * 80
    assert sum(offer["steps"] for offer in offers) == first["step"] == 4 * 5
    for epoch in range(4):
        rows = torch.cat([each["seen"][40 * epoch : 40 * epoch + 40] for each in (first, second)])
        assert len(rows.unique(dim=0)) == 80
    states = [torch.load(path, weights_only=False)["state_dict"] for path in sorted(keep.iterdir())]
    assert len(states) == 8
    held = [torch.cat([t.flatten() for t in state.values()]) for state in states]
    assert len({tuple(each.tolist()) for each in held}) == 3, "versions: the first one, and those of steps 8 and 16"


@pytest.mark.parametrize("asked", ["many.0", "many.1", "both"])
def test_a_signal_to_any_rank_leaves_once_all_is_durable(ranks: RanksJob, asked: str) -> None:
    ranks.serve()
    names = ranks.ranks("many", told=exact(ranks), step_s=0.03, samples=4000, trainer={"max_epochs": 9})
    ranks.harness.wait_until(lambda: ranks.accepted("many") > 1, "pushes")
    for name in names if asked == "both" else [asked]:
        ranks.harness.terminate(name)
    for name in names:
        ranks.harness.declare(name)
    first, second = ranks.ended("many")
    assert first["over"] == second["over"] == "it was asked to leave"
    assert all("INTERRUPTED" in each["status"] for each in (first, second))
    assert torch.equal(first["weights"], second["weights"])
    steps = sum(each["offer"]["steps"] for body in ranks.entries("Round") for each in body["accepted"])
    assert steps == len([line for line in first["lines"] if line[0] == "step"])


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_group_and_the_others_train_on(ranks: RanksJob) -> None:
    ranks.serve()
    quick = told(ranks, batch=8)
    first, second = ranks.ranks("many", told=quick, step_s=0.03, samples=480, trainer={"max_epochs": 2})
    ranks.cluster("one", told=quick, step_s=0.03, samples=480, trainer={"max_epochs": 2})
    ranks.harness.wait_until(lambda: ranks.accepted("many") > 1 and ranks.accepted("one") > 1, "pushes")
    for name in (first, second):
        ranks.harness.declare(name)
    ranks.harness.kill(second)
    assert [ranks.harness.wait_exit(name) for name in (first, second)].count(0) == 0
    ranks.ranks("many", told=quick, step_s=0.03, samples=480, trainer={"max_epochs": 2})
    again, also = ranks.ended("many")
    (one,) = ranks.finish("one")
    assert torch.equal(one["weights"], again["weights"])
    assert torch.equal(one["weights"], also["weights"])
    assert spent(ranks) == dict.fromkeys(range(2), 480)
    joined = [body["incarnation"]["cluster"] for body in ranks.entries("Joined")]
    assert sorted(joined) == ["many", "many", "one"]


def test_who_is_refused_says_so_at_all_ranks(ranks: RanksJob) -> None:
    ranks.serve()
    ranks.cluster("one", told=told(ranks, batch=8), gates={2: ranks.gate("one")}, trainer={"max_epochs": 1})
    ranks.harness.wait_for("version_adopted", node="one")
    names = ranks.ranks("many", told=told(ranks), kind="another")
    ranks.harness.declare(*names)
    for name in names:
        assert ranks.harness.wait_exit(name) == 1
        assert "many cannot join this job, which one at" in (ranks.out / "out" / f"{name}.0.log").read_text()
    ranks.open("one")
    ranks.finish("one")
