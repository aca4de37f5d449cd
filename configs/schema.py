"""Types of the configuration: what Hydra checks the YAML files and the command line against.

Theory of operation. The strategies' types are made from what is declared of their settings, without importing
Lightning. The Trainer's mirror its constructor; `tests/configs` compares them with its signature. `register` puts all
into Hydra's ConfigStore as `*_schema` entries, on which the YAML files of the same group build (`defaults:
[chaos_schema]`). A misspelt or mistyped setting is therefore refused when the configuration is put together, before
any process joins a job.

The groups `model` and `data` are open: they belong to whoever brings a model and data.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from chaos_lightning.declared import optional
from chaos_lightning.errors import needing
from chaos_lightning.outer.cluster import strategy_options as outer
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.settings import ARGUMENTS, ChaosOptions, EngineConfig

with needing("chaos_lightning.configs"):
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING


def _thawed(name: str, options: type) -> Any:
    """The same settings, but not frozen: Hydra would refuse to override what is."""
    hints = get_type_hints(options)
    return make_dataclass(name, [(f.name, hints[f.name], field(default=f.default)) for f in fields(options)])


OptionsConfig = _thawed("OptionsConfig", ChaosOptions)
DiLoCoOptionsConfig = _thawed("DiLoCoOptionsConfig", outer.DiLoCoOptions)

ChaosStrategyConfig = make_dataclass(
    "ChaosStrategyConfig",
    [
        ("_target_", str, field(default="chaos_lightning.strategies.ChaosStrategy")),
        *optional(EngineConfig, names=ARGUMENTS),
        ("data", str, field(default="shared")),
        ("options", OptionsConfig, field(default_factory=OptionsConfig)),
    ],
)
"""`chaos_lightning.strategies.ChaosStrategy`."""

PipelineStrategyConfig = make_dataclass(
    "PipelineStrategyConfig",
    [
        ("_target_", str, field(default="chaos_lightning.strategies.ChaosPipelineStrategy")),
        *optional(PipelineOptions),
        *optional(EngineConfig, names=ARGUMENTS),
        ("options", OptionsConfig, field(default_factory=OptionsConfig)),
    ],
)
"""`chaos_lightning.strategies.ChaosPipelineStrategy`."""

DiLoCoStrategyConfig = make_dataclass(
    "DiLoCoStrategyConfig",
    [
        ("_target_", str, field(default="chaos_lightning.strategies.DiLoCoStrategy")),
        ("inner", str, field(default="auto")),
        *optional(*outer.OWNERS, names=outer.ARGUMENTS),
        ("options", DiLoCoOptionsConfig, field(default_factory=DiLoCoOptionsConfig)),
    ],
)
"""`chaos_lightning.strategies.DiLoCoStrategy`."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Arguments of `lightning.pytorch.Trainer` that groups and experiments set; `+trainer.x=y` adds others."""

    _target_: str = "lightning.pytorch.Trainer"
    _convert_: str = "all"
    accelerator: Any = "cpu"
    """A name, or a mapping with `_target_` (NPU)."""
    devices: Any = 1
    """A count or a list of numbers; one device per process."""
    precision: Any = None
    plugins: Any = None
    max_epochs: int | None = None
    max_steps: int = -1
    min_epochs: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    log_every_n_steps: int = 10
    limit_train_batches: Any = 1.0
    """A fraction (float) or a number of batches (int)."""
    limit_val_batches: Any = 1.0
    val_check_interval: Any = None
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    logger: Any = False
    default_root_dir: str | None = None


@dataclass(kw_only=True)
class TrainConfig:
    """The root, `config.yaml`."""

    seed: int = 1
    monitor: str = "val_loss"
    """Metric that a sweep looks at."""
    device: str = "cpu"
    """Device that the group `accelerator` chose, for strategies that are told one."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: Any = MISSING
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    callbacks: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Tell Hydra about the types. Calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig, provider="chaos_lightning")
    store.store(group="strategy", name="chaos_schema", node=ChaosStrategyConfig, provider="chaos_lightning")
    store.store(group="strategy", name="pipeline_schema", node=PipelineStrategyConfig, provider="chaos_lightning")
    store.store(group="strategy", name="diloco_schema", node=DiLoCoStrategyConfig, provider="chaos_lightning")
