"""Tests that a newcomer replays the steps of a real `Trainer.fit` from averages and headers alone, and which fits
cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from engine_double import EngineDouble
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.plugins import MixedPrecision, Precision
from strategy_models import Gan, Regression, Scheduled, WithMetrics, loader, trainer
from torch import Tensor, nn

import chaos_lightning  # noqa: F401  (registers "chaos")
from chaos_lightning.callbacks.faults import FaultInjectorCallback
from chaos_lightning.collectives.gradients import Gradients
from chaos_lightning.collectives.layout import Layout, section_of
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.replication.replay import Replay
from chaos_lightning.strategies.replay import LightningReplay, writes_of


class Enough(Exception):
    """Exception that ends a newcomer's fit once all checks are done."""


class Real(EngineDouble):
    """Double of the engine for one member, with real gradient handling: flat memory, averaged with the header's
    weights.

    As the first member it keeps a log and, at slot `snapshot_at`, a copy of the state. One made with a `log` is the
    newcomer: it takes the state, replays, compares, and ends fit.
    """

    snapshot_at = 0

    def prepare(self, *, sections: Any, buffers: Any = (), part_of: None = None) -> None:
        self.layout = Layout(sections, buffers)
        self.memory = Memory(self.layout)
        self.gradients = Gradients(self.memory, False, lambda cells: None)
        self.entries: list[tuple[Header, bytes]] = []
        self.boundary_at = self.snapshot_at

    def join(self, **given: Any) -> Header:
        first = EngineDouble.made[0]
        if first is self:
            header = super().join(**given)
            self.gradients.settle()
            if not self.snapshot_at:
                self.keep(given["state"])
            return header
        assert isinstance(first, Real)
        self.catch_up(first, given["state"])
        raise Enough

    def keep(self, state: Any) -> None:
        """Keeps a copy of the state, which the newcomer gets."""
        self.kept_at = self.header.seq
        self._keep(state)

    def arm(self, *, coefficient: float, section: int = 0, empty: bool = False) -> None:
        self.gradients.arm(section, coefficient)

    def step(self, *, weight: float, coefficient: float, hyper: str = "", section: int = 0, **given: Any) -> Header:
        self.gradients.arm(section, coefficient)
        presence = self.gradients.flush()
        before = self.header
        self._commit(Kind.STEP, f"section {section}", weight, spent=given["spent"])
        self.header = replace(self.header, presence=presence, hyper=hyper, prev_hash=before.hash)
        self.log[-1] = self.header
        raw = b"".join(self.memory.pieces(0, self.layout.nbytes))
        self.memory.result_bytes[self.header.seq % 2][:] = raw
        self.gradients.apply(self.header)
        self.entries.append((self.header, raw))
        return self.header

    def boundary(self, state: Any) -> Header:
        self.keep(state)
        return super().boundary(state)

    # ------------------------------------------------------------------ the newcomer

    def catch_up(self, first: Real, state: Any) -> None:
        from chaos_lightning.replication.manifest import decode_manifest

        replay = LightningReplay(state._trainer)
        assert isinstance(replay, Replay)
        self.said = replay.replayable()
        state.prepare(decode_manifest(first._manifest, dict(first._tensors)), None)
        kept = dict(first._tensors)
        with torch.no_grad():
            for name, tensor in state.tensors():
                tensor.copy_(kept[name])
        self.gradients.settle()
        self.replayed = 0
        for header, raw in first.entries:
            if header.seq <= first.kept_at:
                continue
            self.gradients.arm(section_of(header), 0.0)
            self.memory.result_bytes[header.seq % 2][:] = raw
            self.gradients.apply(header)
            replay.replay(header)
            self.replayed += 1
        theirs = dict(first.state.tensors())
        mine = dict(state.tensors())
        assert list(mine) == list(theirs)
        self.differ = [n for n, t in mine.items() if not torch.equal(t, theirs[n])]


class AnyOptimizer(Regression):
    def __init__(self, make: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Branches(Regression):
    """Model with parameters that only every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x) if batch_idx % 2 else self.net(x) + self.more(x)
        return nn.functional.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02, weight_decay=0.3)


class VouchedGan(Gan):
    chaos_replay = True


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], pl.LightningModule], at: int, **settings: Any
) -> Real:
    """Runs a whole fit, then a newcomer that replays it from slot `at` on; returns the newcomer's engine."""
    import chaos_lightning.strategies.session as module

    monkeypatch.setattr(module, "Engine", Real)
    monkeypatch.setattr(Real, "snapshot_at", at)
    EngineDouble.made.clear()
    callbacks = settings.pop("callbacks", list)
    trainer(tmp_path, callbacks=callbacks(), **settings).fit(make(), loader(26, 4), loader(8))
    with pytest.raises(Enough):
        trainer(tmp_path, callbacks=callbacks(), **settings).fit(make(), loader(26, 4), loader(8))
    newcomer = EngineDouble.made[-1]
    assert isinstance(newcomer, Real)
    EngineDouble.made.clear()
    return newcomer


SETTINGS: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "Adam": (Regression, {}),
    "BatchNorm": (lambda: Regression(norm=True), {}),
    "AdamW fused": (lambda: AnyOptimizer(lambda p: torch.optim.AdamW(p, 0.05, fused=True)), {}),
    "SGD nesterov": (lambda: AnyOptimizer(lambda p: torch.optim.SGD(p, 0.005, momentum=0.9, nesterov=True)), {}),
    "clipping by norm": (Regression, {"gradient_clip_val": 0.1}),
    "clipping by value": (Regression, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": (Regression, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16-mixed": (Regression, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "bf16-true": (Regression, {"precision": "bf16-true", "gradient_clip_val": 0.1}),
    "64-true": (Regression, {"precision": "64-true", "gradient_clip_val": 0.1}),
    "one cycle": (lambda: Scheduled("onecycle", norm=True), {"gradient_clip_val": 0.1}),
    "lambda": (lambda: Scheduled("lambda"), {}),
    "plateau": (lambda: Scheduled("plateau"), {}),
    "unused parameters": (Branches, {"gradient_clip_val": 0.1}),
    "metrics": (WithMetrics, {}),
    "several optimizers": (VouchedGan, {}),
    "callbacks that watch": (
        Regression, {"callbacks": lambda: [EarlyStopping("val_loss", patience=9), Timer()]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "at"), [*((n, 4) for n in SETTINGS), ("Adam", 0), ("several optimizers", 0)])
def test_a_newcomer_replays_a_fit_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    make, settings = SETTINGS[name]
    newcomer = run(tmp_path, monkeypatch, make, at, **settings)
    assert newcomer.said == ""
    assert newcomer.replayed >= 4
    assert newcomer.differ == []


def test_a_rule_of_clipping_that_is_not_the_members_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that leaves out clipping differs from the members: this test's comparison must notice that."""
    monkeypatch.setattr(LightningReplay, "_clip", lambda self, optimizer: None)
    assert run(tmp_path, monkeypatch, Regression, 0, gradient_clip_val=0.1).differ


# ------------------------------------------------------------------ what can be replayed


class Asked(EngineDouble):
    """Double of the engine that ends fit when it joins, and keeps the reason why the fit cannot be replayed."""

    def join(self, **given: Any) -> Header:
        self.said = LightningReplay(given["state"]._trainer).replayable()
        raise Enough


def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: pl.LightningModule, **settings: Any) -> str:
    """Returns the reason why a fit of this model cannot be replayed; "" if it can."""
    import chaos_lightning.strategies.session as module

    monkeypatch.setattr(module, "Engine", Asked)
    EngineDouble.made.clear()
    with pytest.raises(Enough):
        trainer(tmp_path, **settings).fit(model, loader(), loader(8))
    engine = EngineDouble.made.pop()
    assert isinstance(engine, Asked)
    return engine.said


class OwnStep(Regression):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class OwnClipping(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class ClipsWeights(Regression):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class Norms(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class Zeroes(Regression):
    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad.nan_to_num_(0.0)


class VouchedNorms(Norms):
    chaos_replay = True


class VouchedClipping(OwnClipping):
    chaos_replay = True


class Forbids(Regression):
    chaos_replay = False


class Target(Regression):
    """Model with a method that changes parameters after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow()

    def follow(self) -> None:
        for param in self.net.parameters():
            param.data = param.data * 0.999


class Watches(Regression):
    """Model with hooks that only read parameters and count."""

    count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1
        self.log("norm", sum(p.detach().norm() for p in self.parameters()))

    def on_train_epoch_end(self) -> None:
        self.count = 0


class HookedOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class Shakes(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for param in pl_module.parameters():
                param.add_(1e-6)


class Sifts(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


class VouchedShakes(Shakes):
    chaos_replay = True


class Keeps(pl.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = nn.Linear(2, 2)


class OddPrecision(Precision):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


def scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


def shaking() -> LambdaCallback:
    return LambdaCallback(on_train_batch_end=lambda t, m, *_: torch.nn.init.normal_(m.net[0].weight))


REFUSED: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], dict[str, Any]], str]] = {
    "manual optimization": (Gan, dict, "manual optimization: only training_step knows"),
    "loss scaling": (Regression, scaled, "GradScaler (precision 16-mixed): a scaled step is left out"),
    "precision of its own": (Regression, lambda: {"plugins": [OddPrecision()]}, "OddPrecision.optimizer_step: "),
    "weight averaging": (Regression, lambda: {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging: it averages"),
    "a copy of the model": (Regression, lambda: {"callbacks": [Keeps()]}, "Keeps.copy: a copy of the model"),
    "optimizer_step": (OwnStep, dict, "OwnStep.optimizer_step: it decides itself"),
    "clipping": (OwnClipping, dict, "OwnClipping.configure_gradient_clipping: it decides itself"),
    "on_before_zero_grad": (ClipsWeights, dict, "ClipsWeights.on_before_zero_grad: it runs between"),
    "on_after_backward": (Zeroes, dict, "Zeroes.on_after_backward: it runs between"),
    "on_before_optimizer_step": (Norms, dict, "Norms.on_before_optimizer_step: it runs between"),
    "a callback's": (Regression, lambda: {"callbacks": [Sifts()]}, "Sifts.on_before_optimizer_step: it runs between"),
    "weights written by a callback": (
        Regression, lambda: {"callbacks": [Shakes()]}, "Shakes.on_train_batch_end (add_): it seems to write",
    ),
    "weights written by a lambda": (
        Regression, lambda: {"callbacks": [shaking()]}, "LambdaCallback.on_train_batch_end (normal_): it seems to",
    ),
    "weights written by the module": (Target, dict, "Target.on_train_batch_end (data =): it seems to write"),
    "an optimizer": (HookedOptimizer, dict, "optimizer 0 (Adam): a step post-hook may change"),
    "the module's word": (Forbids, dict, "the module says chaos_replay = False"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, settings, words = REFUSED[name]
    found = said(tmp_path, monkeypatch, make(), **settings())
    assert words in found
    assert ";" not in found, "one reason, and no other"


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (Watches, []),
        (VouchedNorms, []),
        (VouchedClipping, []),
        (VouchedGan, []),
        (Regression, [VouchedShakes()]),
        (Regression, [Timer(), FaultInjectorCallback(), EarlyStopping("val_loss")]),
    ],
    ids=["hooks that watch", "vouched hook", "vouched clipping", "vouched optimizers", "vouched callback", "known"],
)
def test_what_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], pl.LightningModule], callbacks: list[Any]
) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2)
    settings = {"callbacks": [*callbacks, keep], "enable_checkpointing": True}
    assert said(tmp_path, monkeypatch, make(), **settings) == ""


def test_nobody_can_vouch_for_a_scaled_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GradScaler" in said(tmp_path, monkeypatch, VouchedNorms(), **scaled())


def test_all_reasons_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(tmp_path, monkeypatch, OwnStep(), callbacks=[Shakes(), EMAWeightAveraging()])
    assert all(
        words in found for words in ("OwnStep.optimizer_step", "Shakes.on_train_batch_end", "EMAWeightAveraging")
    )


def test_writes_are_found_where_they_are() -> None:
    def reads(trainer: Any, module: Any) -> float:
        return sum(p.data.norm().item() for p in module.parameters())

    def nested(module: Any) -> None:
        def inner() -> None:
            torch._foreach_lerp_(list(module.parameters()), list(module.buffers()), 0.1)

        inner()

    assert list(writes_of(reads)) == []
    assert list(writes_of(nested)) == ["_foreach_lerp_"]
    assert list(writes_of(print)) == []
