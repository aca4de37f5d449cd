"""Tests `reload_dataloaders_every_n_epochs` with data that change by the epoch: a newcomer gets the data of the
job's epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job
from strategy_models import Grows, trainer, weights
from test_members import same

SETTINGS: dict[str, Any] = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_who_joins_again_has_the_data_of_the_epoch_that_it_goes_on_in(tmp_path: Path, double: Any, epoch: int) -> None:
    """A fenced member gets back the state of the first epoch, while its own loaders are of a later one: it makes
    them anew for that epoch.
    """
    plain, ours = Grows(), Grows()
    trainer(tmp_path, **SETTINGS).fit(plain)
    steps = [header.seq for header in double.made[0].log if header.name.startswith("section")]
    double.setting["fence_at"] = steps[sum(Grows.batches(e) for e in range(epoch))]
    trainer(tmp_path, **SETTINGS).fit(ours)
    assert double.made[1].rejoined == 1
    assert torch.equal(weights(ours), weights(plain))
    assert all(torch.equal(a, b) for a, b in zip(ours.seen[-len(plain.seen) :], plain.seen, strict=True))
    assert ours.validated[-len(plain.validated) :] == plain.validated


def test_a_newcomer_has_the_data_of_the_jobs_epoch(job: Job) -> None:
    """A newcomer joins in epoch 2, whose data differ from those that it made at its start: it makes its loaders
    anew.
    """
    first = sum(Grows.batches(e) for e in range(2))
    settings: dict[str, Any] = {"model": Grows.__name__, "epochs": 4, "own_data": True, "trainer": SETTINGS}
    job.start("a", gates={first + 1: job.gate("a")}, **settings)
    job.harness.wait_step(first + 1, node="a")
    job.start("b", **settings)
    job.wait_admitted("b")
    job.open("a")
    a, b = job.finish("a", "b")
    same([a, b])
    trained = {tuple(row.tolist()) for x in (*a["seen"], *b["seen"]) for row in x}
    data = {tuple(row.tolist()) for e in range(4) for row in Grows.data(e).tensors[0]}
    assert trained == data
