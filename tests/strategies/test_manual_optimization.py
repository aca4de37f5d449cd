"""Tests manual optimization: whatever a training step does with its gradients, the results are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job
from strategy_models import MANUAL, Manual, data, loader, trainer, weights

import chaos_lightning  # noqa: F401  (registers "chaos")

SAMPLES = 26
"""Number of samples: in batches of 8 the last one has 2, so one of two members with batches of 4 is idle then."""


def alone(tmp_path: Path, kind: str, strategy: str, epochs: int) -> Manual:
    """Trains in one process with the whole batch; returns the model."""
    model = Manual(kind)
    run = trainer(tmp_path, max_epochs=epochs, strategy=strategy)
    run.fit(model, loader(SAMPLES, 8, shuffle=strategy == "chaos"), loader(8))
    return model


@pytest.mark.parametrize("kind", MANUAL)
def test_one_member_is_as_one_process(tmp_path: Path, kind: str, double: Any) -> None:
    plain = Manual(kind)
    trainer(tmp_path, strategy="auto").fit(plain, loader(SAMPLES, 8), loader(8))
    ours = Manual(kind)
    trainer(tmp_path).fit(ours, loader(SAMPLES, 8), loader(8))
    assert torch.allclose(weights(ours), weights(plain), rtol=1e-6, atol=1e-7)
    assert [m > 0 for m in ours.moved] == [m > 0 for m in plain.moved]
    (engine,) = double.made
    sizes = [float(len(x)) for x in ours.seen for _ in range(len(engine.steps) // len(ours.seen))]
    assert [s["weight"] for s in engine.steps] == sizes, "each backward pass weighs what its own batch does"


def test_two_members_are_as_one_process(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members train all kinds of manual training steps in one job: each gives the same weights as in one
    process.
    """
    job.fresh(min_nodes=2)
    epochs = 2 * len(MANUAL)
    spec = {"epochs": epochs, "samples": SAMPLES, "model": "Manual", "model_args": {"kind": "each"}, "min_nodes": 2}
    job.start("a", **spec)
    job.start("b", **spec)
    a, b = job.finish("a", "b")
    from engine_double import EngineDouble

    import chaos_lightning.strategies.session as module

    monkeypatch.setattr(module, "Engine", EngineDouble)
    one = alone(tmp_path, "each", "chaos", epochs)
    assert len(a["ends"]) == len(b["ends"]) == len(one.ends) == len(MANUAL)
    for number, kind in enumerate(MANUAL):
        assert torch.equal(a["ends"][number], b["ends"][number]), kind
        assert torch.allclose(a["ends"][number], one.ends[number], rtol=1e-6, atol=1e-6), kind
    assert [m > 0 for m in a["moved"]] == [m > 0 for m in one.moved]


def test_newcomer_gets_gradients_that_are_kept_beyond_the_batch(job: Job) -> None:
    """A newcomer enters between the two batches of an accumulated step: it gets the gradients of the first one."""
    spec = {"epochs": 1, "samples": 36, "model": "Manual", "model_args": {"kind": "accumulate"}}
    job.start("a", batches={4: job.gate("four")}, **spec)
    job.harness.wait_step(4)
    job.start("b", **spec)
    job.wait_admitted("b")
    job.open("four")
    a, b = job.finish("a", "b")
    assert torch.equal(a["weights"], b["weights"])
    assert (len(a["seen"]), len(b["seen"])) == (7, 2)
    targets = {tuple(x.tolist()): y for x, y in data(36)}
    one = Manual("accumulate")
    optimizer = torch.optim.Adam(one.net.parameters(), one.lr)
    for number, batch in enumerate(a["seen"]):
        x = torch.cat([batch, *b["seen"][number - 5 : number - 4]] if number >= 5 else [batch])
        y = torch.stack([targets[tuple(row.tolist())] for row in x])
        (one.loss((x, y)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(a["weights"], weights(one), rtol=1e-6, atol=1e-6)
