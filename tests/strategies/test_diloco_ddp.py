"""Clusters whose processes are ranks of Lightning's DDP, as real processes, with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_diloco_members import OuterJob, ends, epochs, marks, spent, told

from chaos_lightning.lab.harness import Harness
from chaos_lightning.machine.listener import free_port

RANKS = 2


class RanksJob(OuterJob):
    """With clusters of two processes."""

    def ranks(self, name: str, **spec: Any) -> list[str]:
        """Starts one; the names of its processes."""
        from diloco_members import ddp

        port, names = free_port(), [f"{name}.{rank}" for rank in range(RANKS)]
        common = {"name": name, "server": self.server, "out": str(self.out), "ranks": RANKS, "port": port, **spec}
        for rank, process in enumerate(names):
            self.harness.start_function(process, ddp, {**common, "rank": rank})
        return names

    def ended(self, name: str) -> list[dict[str, Any]]:
        """What its processes have reported."""
        for rank in range(RANKS):
            assert self.harness.wait_exit(f"{name}.{rank}") == 0
        return [self.report(f"rank-{rank}/{name}") for rank in range(RANKS)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RanksJob]:
    with Harness(tmp_path, deadline_s=90.0) as harness:
        yield RanksJob(harness, tmp_path)


def test_a_ddp_cluster_and_a_single_process_train_one_model(ranks: RanksJob) -> None:
    ranks.serve()
    ranks.ranks("many", told=told(ranks, batch=8), step_s=0.02, trainer={"max_epochs": 3})
    ranks.cluster("one", told=told(ranks, batch=8), step_s=0.02, trainer={"max_epochs": 3})
    first, second = ranks.ended("many")
    (one,) = ranks.finish("one")
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["weights"], one["weights"])
    assert spent(ranks) == dict.fromkeys(range(3), 240)
    assert marks(first) == marks(second) == marks(one) == epochs(0, 1, 2)
    assert first["lines"] == second["lines"]
    assert ends(first) == ends(one)
