"""Tests the refusals of strategy `chaos`: each row of the table, by name, before training starts; and refusals while
it runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from strategy_models import AssignsBuffer, Gan, Regression, data, loader, trainer, weights
from torch import nn

import chaos_lightning  # noqa: F401
from chaos_lightning.declared import options_of
from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.strategies import ChaosOptions, ChaosStrategy
from chaos_lightning.strategies.refusals import TABLE

pytestmark = pytest.mark.usefixtures("double")


def with_net(net: nn.Module) -> Regression:
    model = Regression()
    model.extra = net
    return model


class WithOptimizer(Regression):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Iterates(Regression):
    def training_step(self, dataloader_iter: Any) -> None:
        pass


class Sharded(torch.optim.SGD):
    def consolidate_state_dict(self) -> None:
        pass


CASES: dict[str, tuple[dict[str, Any], Callable[[], pl.LightningModule]]] = {
    "sync_batchnorm": ({"sync_batchnorm": True}, Regression),
    "SyncBatchNorm": ({}, lambda: with_net(nn.SyncBatchNorm(3))),
    "lazy modules": ({}, lambda: with_net(nn.LazyLinear(3))),
    "sparse gradients": ({}, lambda: with_net(nn.Embedding(3, 3, sparse=True))),
    "gradient accumulation that changes": ({"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}, Regression),
    "search callbacks": ({"callbacks": [LearningRateFinder()]}, Regression),
    "callbacks that change what is trained": ({"callbacks": [ModelPruning("l1_unstructured")]}, Regression),
    "StochasticWeightAveraging": ({"callbacks": [StochasticWeightAveraging(0.1)]}, Regression),
    "dataloader_iter": ({}, Iterates),
    "fractions of an epoch with data='local'": (
        {"strategy": ChaosStrategy(data="local"), "limit_train_batches": 0.5}, Regression,
    ),
    "no optimizer": ({}, lambda: WithOptimizer(lambda params: None)),
    "optimizers that evaluate the loss several times in a step": ({}, lambda: WithOptimizer(torch.optim.LBFGS)),
    "sharded optimizers": ({}, lambda: WithOptimizer(lambda params: Sharded(params, 0.1))),
}  # fmt: skip


def test_every_row_is_tested() -> None:
    assert {row.what for row in TABLE} == set(CASES)


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:.*lazy|.*Lazy|.*UninitializedParameter")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize("what", CASES)
def test_refused_before_the_first_batch(tmp_path: Path, double: Any, what: str) -> None:
    settings, make = CASES[what]
    model = make()
    with pytest.raises(UnsupportedError) as caught:
        trainer(tmp_path, **settings).fit(model, loader())
    row = next(row for row in TABLE if row.what == what)
    assert str(caught.value).count(row.what) == 1
    assert row.why in str(caught.value)
    assert not double.made
    assert not getattr(model, "seen", [])


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    callbacks = [StochasticWeightAveraging(0.1), BackboneFinetuning()]
    with pytest.raises(
        UnsupportedError, match=r"(?s)changes? what is trained.*StochasticWeightAveraging|Stochastic.*trained"
    ):
        trainer(tmp_path, callbacks=callbacks).fit(Regression(), loader())


def test_a_search_that_fast_dev_run_leaves_out_is_not_refused(tmp_path: Path) -> None:
    model = Regression()
    with pytest.warns(UserWarning, match="Skipping learning rate finder"):
        trainer(tmp_path, fast_dev_run=1, callbacks=[LearningRateFinder()]).fit(model, loader())
    assert len(model.seen) == 1


@pytest.mark.filterwarnings("ignore:.*train_dataloader yielded None")
def test_a_batch_that_is_none_is_named(tmp_path: Path) -> None:
    """A collate_fn returns None for a batch: Lightning would skip it at this member alone, so fit ends with an
    error.
    """
    nothing = loader(collate_fn=lambda rows: None)
    with pytest.raises(UnsupportedError, match="collate_fn gave None"):
        trainer(tmp_path).fit(Regression(), nothing)


def test_several_training_loaders(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="2 training loaders"):
        trainer(tmp_path).fit(Regression(), [loader(), loader()])


def test_shared_data_without_positions(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match='data="local"'):
        trainer(tmp_path).fit(Regression(), [(torch.zeros(4, 4), torch.zeros(4, 1))] and iter_loader())


def iter_loader() -> Any:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(data(8))

    return torch.utils.data.DataLoader(Stream(), batch_size=4)


class ChangesBuffer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.centre.mul_(0.9).add_(batch[0].mean(0))
        return super().training_step(batch, batch_idx)


def test_buffer_that_a_forward_pass_changes_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"centre changed within training_step.*chaos_buffers"):
        trainer(tmp_path).fit(ChangesBuffer(), loader())
    model = ChangesBuffer()
    model.chaos_buffers = ["centre"]
    trainer(tmp_path).fit(model, loader())
    model.chaos_buffers = ["center"]
    with pytest.raises(StateError, match="center"):
        trainer(tmp_path).fit(model, loader())


def test_buffer_that_is_assigned_anew_is_named_or_averaged(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"centre changed within training_step.*chaos_buffers"):
        trainer(tmp_path).fit(AssignsBuffer(), loader())
    ours, usual = AssignsBuffer(["centre"]), AssignsBuffer()
    trainer(tmp_path).fit(ours, loader())
    assert ours.centre is ours.first
    trainer(tmp_path, strategy="auto").fit(usual, loader())
    assert torch.allclose(ours.centre, usual.centre)
    assert ours.centre.any()


class ClampsLate(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class StepsInBackward(Regression):
    def on_fit_start(self) -> None:
        def step(param: torch.Tensor) -> None:
            param.detach().add_(param.grad, alpha=-0.1)

        self.net[0].weight.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize(("model", "where"), [(ClampsLate, "training_step"), (StepsInBackward, "backward")])
def test_parameter_that_a_batch_changes_is_named(tmp_path: Path, model: type[Regression], where: str) -> None:
    """A parameter that changes within training_step or a hook before the step is refused: a member without samples
    would not change it.
    """
    with pytest.raises(UnsupportedError, match=rf"net\.0\.weight changed within {where}.*on_train_batch_end"):
        trainer(tmp_path).fit(model(), loader())


def test_buffer_that_manual_optimization_changes_is_warned_about_once(tmp_path: Path) -> None:
    class Counts(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.count = self.count + 1
            super().training_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path).fit(Counts(), loader())
    said = [str(w.message) for w in caught if "changed within training_step" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("count changed within training_step")
    assert "chaos_buffers" in said[0]


def test_parameter_that_is_thawed_later_is_named(tmp_path: Path) -> None:
    class Thaws(Regression):
        def on_train_epoch_start(self) -> None:
            self.net[0].weight.requires_grad_(self.current_epoch > 0)

    with pytest.raises(UnsupportedError, match=r"net\.0\.weight"):
        trainer(tmp_path).fit(Thaws(), loader())


def test_optimizer_step_that_is_skipped_is_told_what_to_do(tmp_path: Path) -> None:
    class Skips(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()

    with pytest.raises(UnsupportedError, match=r"must call optimizer\.step"):
        trainer(tmp_path).fit(Skips(), loader())


class KeepsGradients(Regression):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class ZeroesInPlace(Regression):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroesElsewhere(KeepsGradients):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_that_are_kept_over_steps_are_refused(tmp_path: Path, accumulate: int) -> None:
    """Gradients that are not zeroed after a step are refused: a newcomer would not have them."""
    run = trainer(tmp_path, accumulate_grad_batches=accumulate)
    with pytest.raises(UnsupportedError, match=r"net\.0\.weight.*gradients that are kept over steps"):
        run.fit(KeepsGradients(), loader())
    assert run.global_step == 1


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("zeroes", [ZeroesInPlace, ZeroesElsewhere])
def test_gradients_may_be_zeroed_in_any_way(tmp_path: Path, zeroes: type[Regression], accumulate: int) -> None:
    ours, usual = zeroes(), Regression()
    for model in (ours, usual):
        trainer(tmp_path, accumulate_grad_batches=accumulate).fit(model, loader())
    assert torch.equal(weights(ours), weights(usual))


def test_closure_evaluated_twice_is_refused(tmp_path: Path) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    with pytest.raises(UnsupportedError, match="evaluated its closure twice"):
        trainer(tmp_path).fit(WithOptimizer(lambda p: Twice(p, 0.1)), loader())


def test_optimizer_without_closure_is_refused(tmp_path: Path) -> None:
    class Ignores(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    with pytest.raises(UnsupportedError, match="did not call its closure"):
        trainer(tmp_path).fit(WithOptimizer(lambda p: Ignores(p, 0.1)), loader())


def test_weight_that_is_no_weight(tmp_path: Path) -> None:
    model = Regression()
    model.chaos_weight = lambda batch, batch_idx: float("nan")
    with pytest.raises(ConfigurationError, match="chaos_weight returned nan"):
        trainer(tmp_path).fit(model, loader())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match="data='both'"):
        ChaosStrategy(data="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="plam"):
        ChaosStrategy(options={"plam": "tree"})
    with pytest.raises(ConfigurationError, match="expected ChaosOptions or a mapping"):
        options_of(ChaosOptions, 3)  # type: ignore[arg-type]


class AsksEarly(Regression):
    def setup(self, stage: str) -> None:
        assert self.trainer.strategy.broadcast("mine") == "mine"

    def on_fit_start(self) -> None:
        assert self.all_gather(torch.ones(2)).shape == (1, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(self.all_gather(torch.ones(2)))
        return super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.barrier("mine")


@pytest.mark.parametrize("least", [1, 2])
def test_who_asks_the_others_before_the_first_batch_hears_that_it_asked_nobody(tmp_path: Path, least: int) -> None:
    """User code that makes a collective before the first batch gets a warning that it reaches no member; Lightning's
    own collectives get none.
    """
    strategy = ChaosStrategy(endpoint="127.0.0.1:9", min_nodes=least)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, strategy=strategy, max_epochs=1, num_sanity_val_steps=1).fit(AsksEarly(), loader(), loader())
    early = [str(w.message).partition(" asks all members before")[0] for w in told if "asks all" in str(w.message)]
    assert early == ([] if least == 1 else ["test_refusals.py:setup", "test_refusals.py:on_fit_start"])


def test_wrong_endpoint_is_named_when_fit_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        trainer(tmp_path, strategy=ChaosStrategy(endpoint="nowhere:port")).fit(Regression(), loader())


def test_settings_that_are_not_honoured_are_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="num_nodes=3"):
        trainer(tmp_path, num_nodes=3, max_epochs=1).fit(Regression(), loader())
    with pytest.warns(UserWarning, match="2 devices and uses one"):
        trainer(tmp_path, devices=2, max_epochs=1).fit(Regression(), loader())
