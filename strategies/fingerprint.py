"""What must be equal on all members, by name: a newcomer that differs is refused with the name and both values."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.timer import Interval

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.hyper import default_words
from chaos_lightning.replication.access import module_tensors
from chaos_lightning.replication.table import layout_hash
from chaos_lightning.strategies.evaluation import EvalLoader
from chaos_lightning.strategies.options import ChaosOptions

if TYPE_CHECKING:
    from chaos_lightning.strategies.strategy import ChaosStrategy


def seed_of(options: ChaosOptions) -> int:
    """Keys the sample order: the option, else what `seed_everything` left behind, else 0."""
    return options.seed if options.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def fingerprint_of(trainer: Trainer, loader: ElasticLoader) -> dict[str, str]:
    """Versions, model, optimizers, data and those settings that decide how many steps and collectives there are.

    Args:
        trainer: In fit, with all loaders of fit made (those of validation are, from `ChaosStrategy.on_train_start` on).
        loader: The training loader.
    """
    module = trainer.lightning_module
    deciding = [c for c in trainer.callbacks if isinstance(c, Checkpoint | EarlyStopping | Timer)]
    return {
        "lightning": ".".join(version("lightning").split(".")[:2]),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "model": layout_hash(module_tensors(module)),
        "optimizers": ", ".join(type(o).__name__ for o in trainer.optimizers),
        "schedulers": ", ".join(
            f"{type(c.scheduler).__name__} each {c.frequency} {c.interval}" for c in trainer.lr_scheduler_configs
        ),
        "optimization": "automatic" if module.automatic_optimization else "manual",
        "precision": str(trainer.precision),
        "limits": f"epochs {trainer.min_epochs}-{trainer.max_epochs}, steps {trainer.min_steps}-{trainer.max_steps}, "
        f"train batches {trainer.limit_train_batches}, val batches {trainer.limit_val_batches}",
        "validation": f"every {trainer.check_val_every_n_epoch} epochs at {trainer.val_check_interval}",
        "clipping": f"{trainer.gradient_clip_algorithm} {trainer.gradient_clip_val}",
        "checkpoint and stopping callbacks": ", ".join(type(c).__name__ for c in deciding),
        **{
            f"{type(c).__name__} {number} {name}": value
            for number, c in enumerate(deciding)
            for name, value in _cadence(c).items()
        },
        **_validation(trainer),
        **default_words(trainer.optimizers),
        **loader.order_fingerprint,
    }


def _cadence(callback: Callback) -> dict[str, str]:
    """What decides when this callback calls for a collective. Where it writes to is every member's own affair."""
    settings: dict[str, Any] = {}
    if isinstance(callback, ModelCheckpoint):
        settings = {
            "monitor": callback.monitor,
            "every_n_train_steps": callback._every_n_train_steps,
            "every_n_epochs": callback._every_n_epochs,
            "train_time_interval": callback._train_time_interval,
            "save_on_train_epoch_end": callback._save_on_train_epoch_end,
            "save_top_k": callback.save_top_k,
            "save_last": callback.save_last,
            # Whether a file of that name exists is asked of the writer: one broadcast per name that is tried.
            "enable_version_counter": callback._enable_version_counter,
        }
        if callback.monitor is not None:
            settings["mode"] = callback.mode  # which of equal values is worth a file
    elif isinstance(callback, EarlyStopping):
        settings = {"monitor": callback.monitor, "check_on_train_epoch_end": callback._check_on_train_epoch_end}
    elif isinstance(callback, Timer):
        # The writer's clock decides for all, so durations may differ; but without one it never asks.
        settings = {"duration given": callback._duration is not None, "interval": Interval(callback._interval).value}
    return {name: str(value) for name, value in settings.items()}


def _validation(trainer: Trainer) -> dict[str, str]:
    """How many loaders of validation there are, which of them are dealt out, and how long they are.

    Each member deals by the length of its own loader, so another one would leave batches out or evaluate them twice.
    """
    strategy = cast("ChaosStrategy", trainer.strategy)
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    words = {"validation loaders": str(len(loaders))}
    if loaders:
        words["use_distributed_sampler"] = str(strategy.deals_validation)
    for number, loader in enumerate(loaders):
        dealt = isinstance(loader, EvalLoader)
        words[f"validation loader {number}"] = "dealt out" if dealt else "evaluated in full by everybody"
        if not dealt and strategy.data == "local":
            continue  # each member evaluates data of its own
        words[f"validation loader {number} samples"] = _length(getattr(loader, "dataset", None))
        words[f"validation loader {number} batches"] = _length(loader)
        if dealt:
            words[f"validation loader {number} batch size"] = str(loader.batch_sampler.batch_size)
    return words


def _length(data: Any) -> str:
    length = sized_len(data)
    return "unknown" if length is None else str(length)
