"""What must be equal on all members, by name: a newcomer that differs is refused with the name and both values."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer

from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.hyper import default_words
from chaos_lightning.replication.access import module_tensors
from chaos_lightning.replication.table import layout_hash
from chaos_lightning.strategies.options import ChaosOptions


def seed_of(options: ChaosOptions) -> int:
    """Keys the sample order: the option, else what `seed_everything` left behind, else 0."""
    return options.seed if options.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def fingerprint_of(trainer: Trainer, loader: ElasticLoader) -> dict[str, str]:
    """Versions, model, optimizers, data and those settings that decide how many steps and collectives there are."""
    module = trainer.lightning_module
    deciding = [type(c).__name__ for c in trainer.callbacks if isinstance(c, Checkpoint | EarlyStopping | Timer)]
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
        "checkpoint and stopping callbacks": ", ".join(deciding),
        **default_words(trainer.optimizers),
        **loader.order_fingerprint,
    }
