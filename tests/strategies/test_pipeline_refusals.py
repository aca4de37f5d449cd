"""Tests the refusals of strategy `chaos_pipeline`: each by name, with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from strategy_models import Gan, Regression, loader, trainer
from torch import nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.pipeline_refusals import BY_PARAMETER, PIPELINE_TABLE
from chaos_lightning.strategies.refusals import TABLE, refuse

pytestmark = pytest.mark.usefixtures("double")


class Accepted(Exception):
    """Exception that ends a fit in which nothing was refused."""


class Pipelined(ChaosStrategy):
    """Strategy that refuses the same as `chaos_pipeline`, and then ends fit."""

    def __init__(self, chain: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chain = chain

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        refuse(self.session.trainer, early=True, table=PIPELINE_TABLE, strategy="chaos_pipeline")

    def setup(self, trainer: pl.Trainer) -> None:
        ParallelStrategy.setup(self, trainer)
        refuse(self.session.trainer, early=False, table=PIPELINE_TABLE, strategy="chaos_pipeline")
        raise Accepted


def with_module(module: nn.Module) -> Regression:
    model = Regression()
    model.extra = module
    return model


class WithOptimizer(Regression):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(list(self.parameters()))


class TwoLists(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.one, self.other = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))


class Iterates(Regression):
    def training_step(self, dataloader_iter: Any) -> None:
        pass


class Shampoo(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Parallel(nn.parallel.DataParallel):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


CASES: dict[str, tuple[dict[str, Any], Callable[[], pl.LightningModule], str]] = {
    "sync_batchnorm": ({"sync_batchnorm": True}, Regression, "Trainer(sync_batchnorm=True)"),
    "SyncBatchNorm": ({}, lambda: with_module(nn.SyncBatchNorm(3)), "extra (SyncBatchNorm)"),
    "lazy modules": ({}, lambda: with_module(nn.LazyLinear(3)), "extra (LazyLinear)"),
    "sparse gradients": ({}, lambda: with_module(nn.Embedding(3, 3, sparse=True)), "extra (Embedding)"),
    "search callbacks": (
        {"callbacks": [LearningRateFinder(), BatchSizeFinder()]}, Regression, "LearningRateFinder, BatchSizeFinder",
    ),
    "callbacks that change what is trained": (
        {"callbacks": [ModelPruning("l1_unstructured")]}, Regression, "ModelPruning",
    ),
    "dataloader_iter": ({}, Iterates, "training_step(dataloader_iter)"),
    "no optimizer": ({}, lambda: WithOptimizer(lambda params: None), "_MockOptimizer"),
    "optimizers that evaluate the loss several times in a step": (
        {}, lambda: WithOptimizer(torch.optim.LBFGS), "LBFGS",
    ),
    "the list of layers": ({}, TwoLists, "one (Linear x 3), other (Linear x 3)"),
    "gradient accumulation": ({"accumulate_grad_batches": 4}, Regression, "accumulate_grad_batches=4"),
    "manual optimization": ({}, Manual, "automatic_optimization = False"),
    "scaled losses of fp16": (
        {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}, Regression,
        "precision='16-mixed'",
    ),
    "data='local'": ({"strategy": Pipelined(data="local")}, Regression, "data='local'"),
    "averages of weights": (
        {"callbacks": [EMAWeightAveraging(), StochasticWeightAveraging(0.1)]}, Regression,
        "EMAWeightAveraging, StochasticWeightAveraging",
    ),
    "modules that are parallel already": ({}, lambda: with_module(Parallel()), "extra (Parallel)"),
    "joins by replay": ({"strategy": Pipelined(options={"join_by": "replay"})}, Regression, "join_by='replay'"),
    "optimizers that may mix parameters": ({}, lambda: WithOptimizer(lambda p: Shampoo(p, 0.1)), "Shampoo"),
}  # fmt: skip


def run(tmp_path: Path, model: pl.LightningModule, **settings: Any) -> None:
    trainer(tmp_path, **{"strategy": Pipelined(), **settings}).fit(model, loader())


def test_every_row_is_tested() -> None:
    assert {row.what for row in PIPELINE_TABLE} == set(CASES)
    assert len({row.what for row in PIPELINE_TABLE}) == len(PIPELINE_TABLE)
    left_out = {row.what for row in TABLE} - set(CASES)
    assert left_out == {
        "fractions of an epoch with data='local'", "gradient accumulation that changes", "StochasticWeightAveraging",
        "sharded optimizers",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:.*lazy|.*Lazy|.*UninitializedParameter")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize("what", CASES)
def test_refused_before_the_first_batch(tmp_path: Path, double: Any, what: str) -> None:
    settings, make, given = CASES[what]
    model = make()
    with pytest.raises(UnsupportedError) as caught:
        run(tmp_path, model, **settings)
    row = next(row for row in PIPELINE_TABLE if row.what == what)
    text = str(caught.value)
    assert text.startswith("strategy chaos_pipeline does not support:\n- ")
    assert text.count("\n") == 1, text
    assert given in text
    assert row.why in text
    assert not double.made
    assert not getattr(model, "seen", [])


def test_changing_accumulation_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="GradientAccumulationScheduler: gradient accumulation: a step has so many of"
    ):
        run(tmp_path, Regression(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


@pytest.mark.parametrize("kind", BY_PARAMETER)
def test_torchs_optimizers_that_were_read_are_accepted(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    def make(params: list[nn.Parameter]) -> Any:
        return kind([p for p in params if p.dim() == 2], lr=0.1)  # type: ignore[call-arg]

    with pytest.raises(Accepted):
        run(tmp_path, WithOptimizer(make))


class Named(torch.optim.AdamW):
    """Optimizer class of a user's own, with AdamW's step."""


class Said(Shampoo):
    chaos_by_parameter = True


@pytest.mark.parametrize("kind", [Named, Said])
def test_others_are_accepted_if_their_step_is_known_or_they_say_so(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(Accepted):
        run(tmp_path, WithOptimizer(lambda params: kind(params, 0.1)))


def test_a_chain_that_is_named_is_taken(tmp_path: Path) -> None:
    with pytest.raises(Accepted):
        run(tmp_path, TwoLists(), strategy=Pipelined("one"))
    model = TwoLists()
    model.chaos_chain = "other"
    with pytest.raises(Accepted):
        run(tmp_path, model)
    with pytest.raises(UnsupportedError, match="'three' is no list of blocks of TwoLists; name one"):
        run(tmp_path, TwoLists(), strategy=Pipelined("three"))


class Late(TwoLists):
    """Model whose lists of blocks exist only after `configure_model`."""

    def __init__(self) -> None:
        Regression.__init__(self)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_a_model_that_is_built_later_is_not_judged_yet(tmp_path: Path) -> None:
    with pytest.raises(Accepted):
        run(tmp_path, Late())


def test_several_optimizers_are_told_what_to_do_by_way_of_manual_optimization(tmp_path: Path) -> None:
    """Several optimizers need manual optimization by Lightning's rules, so the refusal of manual optimization also
    says what to do instead of them.
    """
    with pytest.raises(UnsupportedError, match=r"manual optimization.*one optimizer, whose parameter groups"):
        run(tmp_path, Gan())


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        run(
            tmp_path,
            Regression(),
            accumulate_grad_batches=2,
            strategy=Pipelined(data="local"),
            callbacks=[EMAWeightAveraging()],
        )
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "- accumulate_grad_batches=2", "- data='local'", "- EMAWeightAveraging",
    ]  # fmt: skip
