"""Tests the ways to configure DiLoCoStrategy, and the settings that it refuses by name before training starts."""

from __future__ import annotations

import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import strategy_models as models
import torch
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from strategy_models import Regression
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from chaos_lightning.declared import options_of
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.machine.signals import ExitSignals
from chaos_lightning.outer.cluster.strategy_options import build
from chaos_lightning.outer.exchange.lines import SERVING
from chaos_lightning.rendezvous.options import read_options
from chaos_lightning.replication.server import StateServer
from chaos_lightning.strategies import ChaosStrategy, DiLoCoOptions, DiLoCoStrategy
from chaos_lightning.strategies.diloco import ClusterStrategy
from chaos_lightning.strategies.outer_refusals import OUTER_TABLE

# Lightning 2.6 calls an old name of jsonargparse.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


# ------------------------------------------------------------------ how it is asked for


def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *quiet, *arguments])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    return LightningCLI(Regression, run=False, seed_everything_default=0).trainer.strategy


def test_from_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(cli(tmp_path, monkeypatch, "--trainer.strategy=chaos_diloco"), ClusterStrategy)
    one = "--trainer.strategy.init_args."
    made = cli(
        tmp_path, monkeypatch, "--trainer.strategy=chaos_lightning.strategies.DiLoCoStrategy",
        f"{one}server=10.0.0.5:29470", f"{one}inner_steps=8", f"{one}data=local", f"{one}overlap=false",
        f"{one}options.staleness_cap=3", f"{one}options.seed=4",
    )  # fmt: skip
    settings, options = build(made.options, made._given, {})
    assert (settings.inner_steps, settings.staleness_cap, made.options.seed) == (8, 3, 4)
    assert (options.server, options.data, options.overlap) == ("10.0.0.5:29470", "local", False)
    made = cli(
        tmp_path, monkeypatch, "--trainer.strategy=chaos_lightning.strategies.DiLoCoStrategy", f"{one}name=home",
        f"{one}inner=chaos_lightning.strategies.ChaosStrategy", f"{one}inner.init_args.min_nodes=3",
    )  # fmt: skip
    assert isinstance(made, ChaosStrategy)
    assert made.outer is not None
    assert (made.outer.cluster.name, made._given["min_nodes"]) == ("home", 3)


def test_from_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    with initialize_config_module("chaos_lightning.configs", version_base="1.3"):
        chosen = ["trainer.default_root_dir=.", "strategy=chaos_diloco", "data=digits", "model=cnn"]
        config = compose("config", [*chosen, "strategy.codec=fp32", "strategy.options.gate_limit=5"])
        made = instantiate(config.strategy)
        with pytest.raises(ConfigCompositionException):
            compose("config", [*chosen, "strategy.options.gate_limmit=5"])
    assert isinstance(made, ClusterStrategy)
    settings, options = build(made.options, made._given, {})
    assert (settings.gate_limit, options.codec) == (5.0, "fp32")


def test_the_environment_stands_behind_arguments_and_before_defaults() -> None:
    environment = {"CHAOS_INNER_STEPS": "16", "CHAOS_OUTER_LR": "0.5", "CHAOS_PS": "10.0.0.9:29470"}
    environment |= {"CHAOS_JOB": "of-the-ranks", "CHAOS_NAME": "a-rank"}  # as torchrun's backend leaves them
    settings, options = build(DiLoCoOptions(), {"inner_steps": 32}, environment)
    assert options.job == "default"
    assert options.name != "a-rank"
    assert (settings.inner_steps, settings.outer_lr, settings.outer_momentum) == (32, 0.5, 0.8)
    assert options.server == "10.0.0.9:29470"


def test_what_a_launcher_tells_its_members_is_no_setting_of_outer_sync() -> None:
    conf = {"batch": "fixed:64", "overlap": "0", "links": "checksum"}
    launched = read_options(endpoint="127.0.0.1:5", run_id="of-the-ranks", nodes=(1, 4), given=conf, environ={})
    environment = {"CHAOS_OUTER_BATCH": "16", **launched.environment()}
    settings, options = build(DiLoCoOptions(), {}, environment, batch=8)
    assert (settings.batch, options.overlap, options.links, options.job) == (16, True, "auto", "default")
    del environment["CHAOS_OUTER_BATCH"]
    assert build(DiLoCoOptions(), {}, environment, batch=8)[0].batch == 8


def test_construction_has_no_side_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    models.trainer(tmp_path, strategy=DiLoCoStrategy(server="this.is.nowhere:1", options={"log_dir": str(tmp_path)}))
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_options_are_an_instance_a_mapping_or_nothing() -> None:
    options = DiLoCoOptions(seed=3, gate_limit=4.0)
    assert pickle.loads(pickle.dumps(options)) == options == options_of(DiLoCoOptions, {"seed": 3, "gate_limit": 4.0})
    assert options_of(DiLoCoOptions, None) == DiLoCoOptions()
    assert "gate_limit" in (DiLoCoOptions.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "fast"}, "policy='fast': expected one of robust, sync, async, di_ps"),
        ({"data": "mine"}, "data='mine': expected one of shared, local"),
        ({"inner_steps": 0}, "inner_steps=0: expected a number of steps"),
        ({"options": {"gate_limmit": 3}}, "unknown options ['gate_limmit']"),
        ({"options": 5}, "options is a int"),
        ({"options": {"patience_s": 0.0}}, "patience_s=0.0: expected a positive number of seconds"),
    ],
)
def test_what_cannot_be_is_said_where_it_is_written(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        DiLoCoStrategy(**arguments)


def test_fabric_is_told_what_to_use_instead() -> None:
    from lightning.fabric import Fabric

    with pytest.raises(UnsupportedError, match="versions of the model are adopted between two steps"):
        Fabric(accelerator="cpu", devices=1, strategy="chaos_diloco")


class Joins(Exception):
    """Exception that ends these fits at the moment when a cluster would join."""


@pytest.mark.parametrize(("given", "leaves", "seed"), [({}, True, "0"), ({"leave_on_signals": False}, False, "7")])
def test_an_elastic_cluster_is_told_its_options(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], leaves: bool, seed: str
) -> None:
    """Former bug: only the inner strategy's `leave_on_signals` had an effect, and its `seed` where ranks share the
    cluster's own data. The outer strategy's options count now.
    """
    found = list[Any]()

    def join(engine: Any, *, fingerprint: dict[str, str], **_: Any) -> None:
        handles = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), ExitSignals)
        found.extend([handles, fingerprint["data.seed"]])
        raise Joins

    monkeypatch.setattr(double, "join", join)
    double.setting["server"] = StateServer(SERVING)
    options = {**given, "seed": int(seed), "host_server": False, "batch": 4}
    strategy = DiLoCoStrategy(inner=ChaosStrategy(), name="home", data="local", options=options)
    with pytest.raises(Joins):
        models.fitted(tmp_path, Regression(), models.loader(), strategy=strategy)
    assert found == [leaves, seed]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ("fsdp", "whole parameters, which a sharded strategy has in no process"),
        ("deepspeed_stage_2", "whole parameters"),
        ("dpp", "expected one of auto, single, ddp, chaos"),
    ],
)
def test_other_inner_strategies_are_refused_by_name(inner: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"inner='{inner}' is not supported.*{words}"):
        DiLoCoStrategy(inner=inner)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (FSDPStrategy(), "inner=FSDPStrategy is not supported.*whole parameters"),
        (SingleDeviceStrategy(), "inner=SingleDeviceStrategy is not supported.*expected one of auto"),
        (DDPStrategy(start_method="spawn"), r"DDPStrategy\(start_method='spawn'\) is not supported"),
        (DDPStrategy(model_averaging_period=2), r"DDPStrategy\(model_averaging_period=...\) is not supported"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_strategies_that_cannot_be_inner_ones_are_refused_by_name(inner: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        DiLoCoStrategy(inner=inner)


def test_several_devices_take_ddp_unless_told_otherwise(tmp_path: Path) -> None:
    for given in ("chaos_diloco", DiLoCoStrategy(), DiLoCoStrategy(inner="ddp"), DiLoCoStrategy(inner=DDPStrategy())):
        run = models.trainer(tmp_path, strategy=given, devices=2)
        for strategy in (run.strategy, pickle.loads(pickle.dumps(run.strategy))):
            assert (strategy.single, strategy.place, strategy.is_global_zero) == (False, (0, 2), True)
        assert run.num_devices == 2
    alone = models.trainer(tmp_path, strategy="chaos_diloco", devices=1).strategy
    for strategy in (alone, pickle.loads(pickle.dumps(alone))):
        assert (strategy.single, strategy.place, strategy.is_global_zero) == (True, (0, 1), True)


def test_one_process_asks_no_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of one process makes no collective of torch's default process group, whose other processes may be
    other clusters.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("lightning.pytorch.strategies.ddp._distributed_is_initialized", lambda: pytest.fail("asked"))
    run = models.trainer(tmp_path, strategy="chaos_diloco", devices=1, sync_batchnorm=True)
    strategy, one = run.strategy, torch.ones(1)
    strategy.barrier()
    assert strategy.broadcast(one) is strategy.reduce(one) is strategy.all_gather(one) is one
    assert strategy.reduce_boolean_decision(True) is True
    assert (strategy.root_device, run.local_rank, run.world_size, strategy._layer_sync) == (one.device, 0, 1, None)
    run.validate(Regression(), models.loader(), verbose=False)
    assert type(run.val_dataloaders.sampler) is SequentialSampler


def test_ddps_own_settings_stay(tmp_path: Path) -> None:
    inner = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
    run = models.trainer(tmp_path, strategy=DiLoCoStrategy(inner=inner), devices=2)
    assert run.strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert run.strategy.process_group_backend == "gloo"


def test_under_torchruns_backend_chaos_auto_is_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_AGENT", "1:2")
    assert isinstance(DiLoCoStrategy(name="home"), ChaosStrategy)
    with pytest.raises(ConfigurationError, match="needs name="):
        DiLoCoStrategy()
    assert isinstance(pickle.loads(pickle.dumps(DiLoCoStrategy(inner="single"))), ClusterStrategy)


def with_net(net: nn.Module) -> Regression:
    model = Regression()
    model.extra = net
    return model


class Iterates(Regression):
    def training_step(self, dataloader_iter: Any) -> None:
        pass


class NoOptimizer(Regression):
    def configure_optimizers(self) -> None:
        pass


CASES: dict[str, tuple[dict[str, Any], Callable[[], pl.LightningModule]]] = {
    "several nodes": ({"num_nodes": 2}, Regression),
    "lazy modules": ({}, lambda: with_net(nn.LazyLinear(3))),
    "search callbacks": ({"callbacks": LearningRateFinder()}, Regression),
    "callbacks that change what is trained": (
        {"callbacks": [BackboneFinetuning(), ModelPruning("l1_unstructured", amount=0.5)]}, Regression
    ),
    "averages of weights": (
        {"callbacks": [StochasticWeightAveraging(0.1), EMAWeightAveraging(update_every_n_steps=1)]}, Regression
    ),
    "parts of epochs with data='shared'": ({"limit_train_batches": 3, "val_check_interval": 0.5}, Regression),
    "dataloader_iter with data='shared'": ({}, Iterates),
    "no optimizer": ({}, NoOptimizer),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("row", OUTER_TABLE, ids=lambda row: row.what)
def test_what_no_cluster_can_serve_is_named(tmp_path: Path, row: Any) -> None:
    kwargs, make = CASES[row.what]
    run = models.trainer(tmp_path, strategy="chaos_diloco", **kwargs)
    with pytest.raises(UnsupportedError, match="strategy chaos_diloco does not support") as caught:
        run.fit(make(), models.loader())
    assert row.why in str(caught.value)


def test_several_devices_or_processes_that_do_not_fit_the_inner_strategy_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DiLoCoStrategy(inner="single")
    with pytest.raises(UnsupportedError, match="found 2 devices, and inner='single' is one process"):
        models.trainer(tmp_path, strategy=strategy, devices=2).fit(Regression(), models.loader())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="WORLD_SIZE=2: several processes were started"):
        models.trainer(tmp_path, strategy="chaos_diloco", devices=1).fit(Regression(), models.loader())


def test_loaders_that_clusters_cannot_share_are_refused(tmp_path: Path) -> None:
    for loaders, words in (
        ({"a": models.loader(), "b": models.loader()}, "fit got 2 training loaders"),
        (DataLoader(models.Stream(8, 0)), "IterableDataset"),
        ([torch.zeros(2)], "whose samples have no positions"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            models.fitted(tmp_path, Regression(), loaders, strategy="chaos_diloco")
