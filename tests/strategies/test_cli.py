"""Tests making the strategy from a command line and from Hydra-like mappings: typed arguments, no side effects."""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from strategy_models import Regression

import chaos_lightning  # noqa: F401
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.strategies import ChaosOptions, ChaosPipelineStrategy, ChaosStrategy
from chaos_lightning.strategies.writer import _save_config

# Lightning 2.6 calls an old name of jsonargparse.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "") -> LightningCLI:
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *([command] if command else []), *quiet, *arguments])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    overwrite = {"overwrite": True}
    return LightningCLI(Regression, run=bool(command), seed_everything_default=0, save_config_kwargs=overwrite)


def test_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cli(tmp_path, monkeypatch, "--trainer.strategy=chaos")
    assert isinstance(made.trainer.strategy, ChaosStrategy)


def test_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cli(
        tmp_path,
        monkeypatch,
        "--trainer.strategy=chaos_lightning.strategies.ChaosStrategy",
        "--trainer.strategy.init_args.endpoint=10.0.0.5:29400",
        "--trainer.strategy.init_args.min_nodes=3",
        "--trainer.strategy.init_args.data=local",
        "--trainer.strategy.init_args.options.plan=tree",
        "--trainer.strategy.init_args.options.overlap=false",
    )
    strategy = made.trainer.strategy
    assert isinstance(strategy, ChaosStrategy)
    assert strategy._given["endpoint"] == "10.0.0.5:29400"
    assert strategy._given["min_nodes"] == 3
    assert strategy.data == "local"
    assert strategy.options == ChaosOptions(plan="tree", overlap=False)


def test_with_a_rule_for_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "--trainer.strategy.init_args.options"
    made = cli(
        tmp_path,
        monkeypatch,
        "--trainer.strategy=chaos_lightning.strategies.ChaosStrategy",
        f"{prefix}.batch=fixed:64/8",
        f"{prefix}.fits=16",
        f"{prefix}.lr_scaling=none",
    )
    strategy = made.trainer.strategy
    assert isinstance(strategy, ChaosStrategy)
    config = strategy._config()
    assert (config.batch, config.fits, config.lr_scaling) == ("fixed:64/8", 16, "none")
    made = cli(
        tmp_path,
        monkeypatch,
        "--trainer.strategy=chaos_lightning.strategies.ChaosStrategy",
        f"{prefix}.lr_scaling=linear:4",
    )
    assert made.trainer.strategy._config().lr_scaling == "linear:4"  # type: ignore[attr-defined]


def test_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cli(tmp_path, monkeypatch, "--trainer.strategy=chaos_pipeline")
    assert isinstance(made.trainer.strategy, ChaosPipelineStrategy)
    made = cli(
        tmp_path,
        monkeypatch,
        "--trainer.strategy=chaos_lightning.strategies.ChaosPipelineStrategy",
        "--trainer.strategy.init_args.micro_batches=8",
        "--trainer.strategy.init_args.device_memory=8 GiB",
        "--trainer.strategy.init_args.dry_run=true",
        "--trainer.strategy.init_args.options.plan=tree",
    )
    strategy = made.trainer.strategy
    assert isinstance(strategy, ChaosPipelineStrategy)
    assert strategy.pipeline == PipelineOptions(micro_batches=8, device_memory="8 GiB", dry_run=True)
    assert strategy.options == ChaosOptions(plan="tree")


def test_from_mappings() -> None:
    assert ChaosStrategy(options={"plan": "chain"}).options == ChaosOptions(plan="chain")


def test_construction_has_no_side_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    strategy = ChaosStrategy(endpoint="this.is.nowhere:1", log_dir=str(tmp_path / "log"))
    Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_few_arguments_of_plain_types() -> None:
    parameters = list(inspect.signature(ChaosStrategy.__init__).parameters.values())[1:]
    assert len(parameters) <= 8
    assert all(p.default is not inspect.Parameter.empty for p in parameters)


def test_options_can_be_pickled_and_compared() -> None:
    options = ChaosOptions(plan="tree", seed=3)
    assert pickle.loads(pickle.dumps(options)) == options
    assert "seed" not in options.for_engine()


def test_config_is_saved_by_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Any) -> None:
    import strategy_models as models

    monkeypatch.setattr(Regression, "train_dataloader", lambda self: models.loader(), raising=False)
    arguments = {
        "strategy": "chaos",
        "max_epochs": "1",
        "enable_progress_bar": "false",
        "enable_checkpointing": "false",
        "logger": "CSVLogger",
        "logger.save_dir": str(tmp_path),
    }
    cli(tmp_path, monkeypatch, *(f"--trainer.{k}={v}" for k, v in arguments.items()), command="fit")
    assert list(tmp_path.rglob("config.yaml"))


@pytest.mark.parametrize("seed", ["0", "1"], ids=["the same", "another"])
@pytest.mark.parametrize("members", [2, 1])
def test_a_config_that_another_founder_has_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, members: int, seed: str
) -> None:
    """A configuration file written by another founder, which counted as rank zero during its set-up, is kept. With a
    single member, the file is an earlier run's: an error.
    """
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *quiet])
    made = LightningCLI(Regression, run=False, seed_everything_default=0)
    (saving,) = (c for c in made.trainer.callbacks if isinstance(c, SaveConfigCallback))
    path = tmp_path / "config.yaml"
    made.parser.save(made.config, path, skip_none=False)
    path.write_text(path.read_text().replace("seed_everything: 0", f"seed_everything: {seed}"))
    before = path.read_text()
    monkeypatch.setattr(Trainer, "world_size", members)
    if members == 1:
        with pytest.raises(RuntimeError, match="to NOT exist"):
            _save_config(saving, made.trainer)
    else:
        _save_config(saving, made.trainer)
        assert ("with another configuration than this member's" in caplog.text) == (seed == "1")
        assert saving.already_saved
    assert saving.save_to_log_dir
    assert path.read_text() == before
