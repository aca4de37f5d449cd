"""Makes the fingerprint of a job: values that must be equal on all members. A newcomer is refused if one differs,
and told which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.timer import Interval

from chaos_lightning.collectives.canonical import plain_name, run_words
from chaos_lightning.collectives.hyper import default_words
from chaos_lightning.data.parts import part_of
from chaos_lightning.data.steps import JobLoader
from chaos_lightning.planning.ledger import SHARED
from chaos_lightning.replication.access import module_tensors
from chaos_lightning.replication.table import layout_hash
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.evaluation import EvalLoader
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.schedules import name_of


def seed_of(seed: int | None) -> int:
    """Returns the seed of the sample order: the option, else the seed given to `seed_everything`, else 0."""
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def fingerprint_of(trainer: Trainer, loader: JobLoader, *, assigns_validation: bool) -> dict[str, str]:
    """Returns the values that must be equal on all members, by name: versions, model, optimizers, data, and settings
    that decide the number of steps and collectives.

    Args:
        trainer: Trainer in fit, with all loaders of fit made (those of validation are, from
            `ChaosStrategy.on_train_start` on).
        loader: The training loader.
        assigns_validation: Whether loaders of validation are divided where that can be.
    """
    module = trainer.lightning_module
    by_time = trainer._val_check_time_interval
    interval = trainer.val_check_interval if by_time is None else f"{by_time:g} s"
    # Where loaders are made anew, data may grow: a newcomer makes those of the job's epoch, and then they are compared.
    moving = ("data.length", "data.order") if trainer.reload_dataloaders_every_n_epochs else ()
    deciding = [c for c in trainer.callbacks if isinstance(c, Checkpoint | EarlyStopping | Timer)]
    return {
        "lightning": ".".join(version("lightning").split(".")[:2]),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "model": layout_hash([(plain_name(name), tensor) for name, tensor in module_tensors(module)]),
        "optimizers": ", ".join(type(o).__name__ for o in trainer.optimizers),
        "schedulers": ", ".join(
            f"{name_of(c.scheduler)} each {c.frequency} {c.interval}" for c in trainer.lr_scheduler_configs
        ),
        "optimization": "automatic" if module.automatic_optimization else "manual",
        "precision": str(trainer.precision),
        "limits": f"epochs {trainer.min_epochs}-{trainer.max_epochs}, steps {trainer.min_steps}-{trainer.max_steps}, "
        f"train batches {trainer.limit_train_batches}, val batches {trainer.limit_val_batches}",
        "validation": f"every {trainer.check_val_every_n_epoch} epochs at {interval}",
        "clipping": f"{trainer.gradient_clip_algorithm} {trainer.gradient_clip_val}",
        "checkpoint and stopping callbacks": ", ".join(type(c).__name__ for c in deciding),
        **{
            f"{type(c).__name__} {number} {name}": value
            for number, c in enumerate(deciding)
            for name, value in _cadence(c).items()
        },
        **_validation(trainer, loader.stream, assigns_validation=assigns_validation),
        **(
            {"training data": part_of(getattr(loader.loader, "dataset", None))}
            if loader.stream == SHARED and not moving
            else {}
        ),
        **default_words(trainer.optimizers),
        **words_of_run(trainer),
        **{name: words for name, words in loader.order_fingerprint.items() if name not in moving},
    }


def words_of_run(trainer: Trainer, *, warns: bool = True) -> dict[str, str]:
    """Returns the layers' settings and the hyperparameters that `save_hyperparameters` kept, without the names in
    `chaos_own_hparams`.

    Args:
        trainer: Trainer in fit.
        warns: Whether to warn of what is not compared.
    """
    found: dict[str, Mapping[str, Any]] = {"hyperparameter": trainer.lightning_module.hparams}
    if trainer.datamodule is not None:
        found["data hyperparameter"] = trainer.datamodule.hparams
    given = (getattr(part, "chaos_own_hparams", ()) for part in (trainer.lightning_module, trainer.datamodule))
    return run_words(trainer.lightning_module, found, {name for names in given for name in names}, warns=warns)


def advice(refusal: str, config: EngineConfig) -> str:
    """Returns advice for a refusal because of a hyperparameter: this may be another run that met the job by
    accident.
    """
    if not re.search(r"\b(hyperparameter|layer|optimizer \d+) \S+ (of \S+ )?is ", refusal):
        return ""
    return (
        f". If this is another run, as of a sweep, it met job {config.job!r} at {config.endpoint} by accident: give it "
        "a job name and an endpoint of its own (job and endpoint of the strategy, or CHAOS_JOB and CHAOS_ENDPOINT)"
    )


def _cadence(callback: Callback) -> dict[str, str]:
    """Returns the settings that decide when a callback makes a collective; without its folder, which may differ
    between members.
    """
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
            settings["mode"] = callback.mode  # decides which values are worth a file
    elif isinstance(callback, EarlyStopping):
        settings = {"monitor": callback.monitor, "check_on_train_epoch_end": callback._check_on_train_epoch_end}
    elif isinstance(callback, Timer):
        # The writer's clock decides for all, so durations may differ; but without one it never asks.
        settings = {"duration given": callback._duration is not None, "interval": Interval(callback._interval).value}
    return {name: str(value) for name, value in settings.items()}


def _validation(trainer: Trainer, stream: str, *, assigns_validation: bool) -> dict[str, str]:
    """Returns facts about the validation loaders: their number, which are divided, and their lengths.

    Each member assigns by the length of its own loader, so another one would leave batches out or evaluate them twice.
    """
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    words = {"validation loaders": str(len(loaders))}
    if combined is not None and len(loaders) > 1:
        words["validation loaders are combined"] = combined._mode
    if loaders:
        words["use_distributed_sampler"] = str(assigns_validation)
    for number, loader in enumerate(loaders):
        assigned = isinstance(loader, EvalLoader)
        words[f"validation loader {number}"] = "divided" if assigned else "evaluated in full by everybody"
        if not assigned and stream != SHARED:
            continue  # each member evaluates data of its own
        words[f"validation loader {number} samples"] = _length(getattr(loader, "dataset", None))
        words[f"validation loader {number} data"] = part_of(getattr(loader, "dataset", None))
        words[f"validation loader {number} batches"] = _length(loader)
        if assigned:
            words[f"validation loader {number} batch size"] = str(loader.batch_sampler.batch_size)
    return words


def _length(data: Any) -> str:
    length = sized_len(data)
    return "unknown" if length is None else str(length)
