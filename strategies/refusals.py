"""Refuses, before training starts, what strategy `chaos` does not support: one table of features and reasons.

Theory of operation. Every entry looks at one thing and returns what it found, in words, or nothing. All findings are
reported together, so that a user does not meet them one by one. Better a refusal than a run that is silently
something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.member.training import SHARDED, UNSERVED, is_sharded
from chaos_lightning.strategies.lightning_types import Trainer


@dataclass(frozen=True)
class Refusal:
    """One row of the table of refused features.

    Attributes:
        what: The feature, as a user would name it.
        why: Reason why it cannot be served, and what to do instead.
        found: Looks at a trainer in fit, before (`early`) or after its optimizers exist; returns what it found, or "".
        early: Whether it needs no optimizers.
    """

    what: str
    why: str
    found: Callable[[Trainer], str]
    early: bool = True


def of_callbacks(*kinds: type) -> Callable[[Trainer], str]:
    return lambda trainer: ", ".join(type(c).__name__ for c in trainer.callbacks if isinstance(c, kinds))


def of_modules(test: Callable[[nn.Module], bool]) -> Callable[[Trainer], str]:
    return lambda trainer: ", ".join(
        f"{name or 'the module'} ({type(m).__name__})"
        for name, m in trainer.lightning_module.named_modules()
        if test(m)
    )


def of_optimizers(test: Callable[[torch.optim.Optimizer], bool]) -> Callable[[Trainer], str]:
    return lambda trainer: ", ".join(type(o).__name__ for o in trainer.strategy.optimizers if test(o))


def _local_data_fraction(trainer: Trainer) -> str:
    if getattr(trainer.strategy, "data", "shared") != "local":
        return ""
    found = []
    interval = getattr(trainer, "val_check_interval", 1.0)  # absent where it is a time
    if isinstance(interval, float) and interval != 1.0:
        found.append(f"val_check_interval={interval}")
    if isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches != 1.0:
        found.append(f"limit_train_batches={trainer.limit_train_batches}")
    return ", ".join(found)


TABLE: tuple[Refusal, ...] = (
    Refusal(
        "sync_batchnorm",
        "statistics of a forward pass would need all members within it, and one of them may be idle or gone; "
        "plain BatchNorm's "
        "running statistics are averaged with each step",
        lambda t: "Trainer(sync_batchnorm=True)" if getattr(t.strategy, "_layer_sync", None) is not None else "",
    ),
    *(Refusal(kind.what, kind.why, of_modules(kind.found)) for kind in UNSERVED),
    Refusal(
        "gradient accumulation that changes",
        "micro-batches per step are part of what members agree on; use Trainer(accumulate_grad_batches=...)",
        of_callbacks(GradientAccumulationScheduler),
    ),
    Refusal(
        "search callbacks",
        "they train on their own before fit, which others would have to take part in; run the search with one "
        "process first",
        lambda t: "" if t.fast_dev_run else of_callbacks(BatchSizeFinder, LearningRateFinder)(t),
    ),
    Refusal(
        "callbacks that change what is trained",
        "the layout of gradients is fixed when a member joins; freeze or prune before fit",
        of_callbacks(BaseFinetuning, ModelPruning),
    ),
    Refusal(
        "StochasticWeightAveraging",
        "it replaces schedulers and adds an epoch while it runs, which a newcomer cannot take over; use "
        "EMAWeightAveraging",
        of_callbacks(StochasticWeightAveraging),
    ),
    Refusal(
        "dataloader_iter",
        "members come and go before a batch is fetched, and this fetches within training_step; take `batch` as "
        "an argument",
        lambda t: (
            "training_step(dataloader_iter)"
            if is_param_in_hook_signature(t.lightning_module.training_step, "dataloader_iter", explicit=True)
            else ""
        ),
    ),
    Refusal(
        "fractions of an epoch with data='local'",
        "nobody knows how long an epoch will be; give a number of batches",
        _local_data_fraction,
    ),
    Refusal(
        "no optimizer",
        "there is nothing to average; return one from configure_optimizers",
        of_optimizers(lambda o: isinstance(o, _MockOptimizer)),
        early=False,
    ),
    Refusal(
        "optimizers that evaluate the loss several times in a step",
        "each evaluation would be a step of the whole job; use one that evaluates it once",
        of_optimizers(lambda o: isinstance(o, torch.optim.LBFGS)),
        early=False,
    ),
    Refusal(
        "sharded optimizers",
        SHARDED,
        of_optimizers(is_sharded),
        early=False,
    ),
)


SCALED_TABLE: tuple[Refusal, ...] = (
    Refusal(
        "manual optimization",
        "your code decides which optimizer steps when, and at which rate; multiply it by the samples of a step / M0 "
        "there, and leave lr_scaling at none",
        lambda t: "" if t.lightning_module.automatic_optimization else "automatic_optimization = False",
    ),
)
"""Refusals where learning rates follow the samples of a step, beside those of strategy `chaos`."""


def _line(row: Refusal, found: str) -> str:
    """Returns a line of an error: what was found, the feature's name unless already mentioned, and why it is not
    supported.
    """
    feature = "" if row.what in found else f"{row.what}: "
    return f"- {found}: {feature}{row.why}"


def refuse(trainer: Trainer, *, early: bool, table: tuple[Refusal, ...] = TABLE, strategy: str = "chaos") -> None:
    """Raises UnsupportedError with all that this Trainer uses and the strategy does not support."""
    found = [(row, words) for row in table if row.early is early and (words := row.found(trainer))]
    if found:
        lines = [_line(row, words) for row, words in found]
        raise UnsupportedError(f"strategy {strategy} does not support:\n" + "\n".join(lines))


def refuse_loaders(trainer: Trainer, strategy: str = "chaos") -> None:
    """Raises UnsupportedError if there are several training loaders. They are known only after Lightning has made
    them.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is not None and len(combined.flattened) != 1:
        raise UnsupportedError(
            f"fit got {len(combined.flattened)} training loaders; strategy {strategy} assigns the samples of one. "
            "Combine the data "
            "sets (ConcatDataset, or one that returns both), or draw the second one's batches within the "
            "first's collate_fn"
        )


def check_host_version(strategy: str = "chaos") -> None:
    """Raises UnsupportedError unless Lightning has the supported minor version: the strategy uses its private
    fields.
    """
    found = version("lightning")
    if found.split(".")[:2] != ["2", "6"]:
        raise UnsupportedError(
            f"lightning {found} is installed; strategy {strategy} works with lightning>=2.6,<2.7, since it "
            "continues loops whose "
            "counters are private. Install a matching version."
        )


def warn_ignored(trainer: Trainer, devices: int) -> None:
    """Warns of settings that have no effect."""
    nodes = trainer._accelerator_connector._num_nodes_flag
    if nodes > 1:
        warnings.warn(
            f"Trainer(num_nodes={nodes}) is not honoured: members come and go; see min_nodes and max_nodes",
            stacklevel=2,
        )
    if devices > 1:
        warnings.warn(
            f"this process found {devices} devices and uses one (number LOCAL_RANK), since each process is a "
            "member of its own; "
            "start one process per device, for example with torchrun --nproc-per-node",
            stacklevel=2,
        )
