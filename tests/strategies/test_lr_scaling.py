"""Tests that learning rates follow the samples of a step, and only while optimizers step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_job import Job
from strategy_models import Gan, Regression, data, loader, trainer, weights
from torch import Tensor, nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies import ChaosOptions, ChaosStrategy

SAMPLES = 100
"""Samples of an epoch that has no short step: 4 of one member, then 8 of two, then 4 of one."""


class Falling(Regression):
    """Model with a schedule, which records the rates that hooks see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rates: dict[str, list[float]] = {}

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        return [made], [torch.optim.lr_scheduler.ExponentialLR(made, 0.5)]

    def note(self, hook: str) -> None:
        self.rates.setdefault(hook, []).append(self.optimizers().param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("batch end")


def scaling(rule: str, **options: Any) -> ChaosStrategy:
    return ChaosStrategy(options=ChaosOptions(lr_scaling=rule, **options))


@pytest.mark.parametrize(
    ("extra", "part"), [({}, 4), ({"accumulate_grad_batches": 2}, 2), ({"gradient_clip_val": 0.05}, 4)]
)
def test_a_smaller_step_has_a_part_of_the_rate(tmp_path: Path, double: Any, extra: dict[str, Any], part: int) -> None:
    """A step of 4 or 8 samples of 16 has a quarter or a half of the rate; all else has the script's rate."""
    model = Falling()
    run = trainer(tmp_path, strategy=scaling("linear:16"), enable_checkpointing=True, **extra)
    run.fit(model, loader())
    plain = Falling(lr=0.05 / part)
    trainer(tmp_path, strategy="auto", **extra).fit(plain, loader())
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert model.rates["before step"] == pytest.approx(plain.rates["before step"])
    assert model.rates["batch end"] == pytest.approx([part * rate for rate in plain.rates["batch end"]])
    assert all(".lr=0.05" in s["hyper"] or ".lr=0.025" in s["hyper"] for s in double.made[0].steps)
    (kept,) = tmp_path.rglob("*.ckpt")
    assert torch.load(kept, weights_only=False)["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.0125)
    assert double.made[0].fingerprint["lr_scaling"] == "linear:16"


def test_the_rate_is_the_scripts_by_default(tmp_path: Path, double: Any) -> None:
    model = Falling()
    trainer(tmp_path, strategy=scaling("none")).fit(model, loader())
    assert model.rates["before step"] == pytest.approx([0.05] * 6 + [0.025] * 6)
    assert "lr_scaling" not in double.made[0].fingerprint


@pytest.mark.usefixtures("double")
def test_manual_optimization_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"(?s)lr_scaling.*automatic_optimization = False.*samples of a step / M0"
    ):
        trainer(tmp_path, strategy=scaling("linear:2")).fit(Gan(), loader())


def by_hand(batches: list[list[Tensor]], chosen_for: int) -> list[Tensor]:
    """Trains on these batches of members, step by step, with a rate that follows their samples; returns the weights."""
    model, (x, y) = Regression(), data(SAMPLES).tensors
    optimizer = model.configure_optimizers()
    for parts in batches:
        taken = torch.cat(parts)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * len(taken) / chosen_for
        targets = torch.stack([y[(x == row).all(1)][0] for row in taken])
        optimizer.zero_grad()
        nn.functional.mse_loss(model.net(taken), targets).backward()
        optimizer.step()
    return weights(model)


def test_the_rate_follows_the_batch(job: Job) -> None:
    """Two members train, one leaves, and the other goes on: the parameters are those of a computation by hand."""
    spec = {"options": {"lr_scaling": "linear:12"}, "samples": SAMPLES, "epochs": 1}
    job.start("a", gates={1: job.gate("a")}, **spec)
    job.harness.wait_step(1)
    job.start("b", leaves_at=5, **spec)
    job.wait_admitted("b")
    job.open("a")
    a, b = job.finish("a", "b")
    steps = {r.get("step"): r.get("contributors") for r in job.harness.records if r.name == "committed"
             and r.member.startswith("a~") and r.get("kind") == "step"}  # fmt: skip
    seen = {"a": iter(a["seen"]), "b": iter(b["seen"])}
    batches = [[next(seen[member[0]]) for member, _ in steps[number]] for number in sorted(steps)]
    assert sum(len(parts) == 2 for parts in batches) > 2
    assert len(batches[0]) == len(batches[-1]) == 1
    assert sum(len(part) for parts in batches for part in parts) == SAMPLES
    for mine, theirs in zip(a["weights"], by_hand(batches, 12), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert all("lr [0.05]" in line for line in a["trace"] if "batch" in line)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_a_newcomer_replays_the_scaled_steps(job: Job, plain: bool) -> None:
    """Former steps were made by two members, so the newcomer replays them with the rate of two."""
    from plain_members import member

    job.fresh(min_nodes=2)
    told = {"lr_scaling": "linear:4", "state_hash_every": 1}

    def start(name: str, **more: Any) -> None:
        way = told | {"join_by": "replay"} if name == "c" else told
        spec = {"epochs": 40, "samples": 48, **more}
        if plain:
            about = {"name": name, "port": job.port, "out": str(job.out), "settings": way, **spec}
            job.harness.start_function(name, member, about)
        else:
            job.start(name, options=way, **spec)

    start("a", gates={1: job.gate("a")})
    start("b")
    admitted = job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 2)
    start("c")
    job.harness.wait_for("way_in", lambda r: r.member.startswith("c~"), after=admitted)
    job.open("a")
    a, _, c = job.finish("a", "b", "c")
    assert [r for r in job.harness.records if r.name == "replayed"]
    pulled = [int(r.get("nbytes")) for r in job.harness.records if r.name == "pull_done" and r.member.startswith("c~")]
    assert pulled[-1] < 200, "counters may differ, weights and moments may not"
    for mine, theirs in zip(a["weights"], c["weights"], strict=True):
        assert torch.equal(mine, theirs)
