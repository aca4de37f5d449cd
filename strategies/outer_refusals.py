"""Refuses, before training starts, what a cluster of an outer job does not support; each error names it
(refusals.py).
"""

from __future__ import annotations

import os

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.refusals import Refusal, of_callbacks, of_modules, of_optimizers

INNER = ("auto", "single", "ddp", "chaos")
"""Values of `inner`, beside a strategy of class `DDPStrategy` or `ChaosStrategy`."""
_SHARDED = ("fsdp", "deepspeed", "model_parallel", "xla_fsdp")
_SHARDED_KINDS = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


def refuse_inner(inner: object) -> None:
    """Raises UnsupportedError if `inner` is no way in which a cluster can train.

    Args:
        inner: Value of `inner`, as the user gave it.
    """
    if isinstance(inner, _SHARDED_KINDS) or str(inner).startswith(_SHARDED):
        raise UnsupportedError(
            f"inner={_shown(inner)} is not supported by strategy chaos_diloco: each cluster pushes and adopts whole "
            "parameters, which a sharded strategy has in no process. Use inner='ddp' or 'single', with a model that "
            "fits one device"
        )
    if type(inner) is DDPStrategy:
        _refuse_ddp(inner)
    elif inner not in INNER:
        raise UnsupportedError(
            f"inner={_shown(inner)} is not supported by strategy chaos_diloco: expected one of {', '.join(INNER)}, a "
            "DDPStrategy or a ChaosStrategy"
        )


def _shown(inner: object) -> str:
    return repr(inner) if isinstance(inner, str) else type(inner).__name__


def _refuse_ddp(inner: DDPStrategy) -> None:
    if inner._start_method != "popen":
        raise UnsupportedError(
            f"DDPStrategy(start_method={inner._start_method!r}) is not supported inside strategy chaos_diloco: ranks "
            "are started as Lightning starts scripts. Leave start_method out, and in a notebook use inner='single'"
        )
    if inner._model_averaging_period is not None:
        raise UnsupportedError(
            "DDPStrategy(model_averaging_period=...) is not supported inside strategy chaos_diloco: rank 0 pushes what "
            "all ranks hold, and between two averages they differ. Clusters of one process each do what it does"
        )


def refuse_one_process(devices: int) -> None:
    """Raises UnsupportedError if there are further processes or devices, since with `inner="single"` a cluster is one
    process.

    Args:
        devices: Number of devices that the Trainer found.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: several processes were started, and this Trainer has one device, "
            "so that each would be a cluster of its own. Give it as many devices as there are processes on this "
            "machine, or use torchrun's backend chaos"
        )
    if devices > 1:
        raise UnsupportedError(
            f"the Trainer found {devices} devices, and inner='single' is one process with one device; use inner='ddp'"
        )


def _parts_of_epochs(trainer: Trainer) -> str:
    terms = getattr(trainer.strategy, "outer", None)
    shared = terms.shared if terms is not None else getattr(trainer.strategy, "data", "shared") == "shared"
    if not shared or trainer.fast_dev_run:
        return ""
    found = []
    if trainer.limit_train_batches != 1.0:
        found.append(f"limit_train_batches={trainer.limit_train_batches}")
    if trainer.overfit_batches:
        found.append(f"overfit_batches={trainer.overfit_batches}")
    interval = getattr(trainer, "val_check_interval", 1.0)
    if isinstance(interval, float) and interval != 1.0:
        found.append(f"val_check_interval={interval}")
    return ", ".join(found)


def _fetches_by_itself(trainer: Trainer) -> str:
    shared = getattr(trainer.strategy, "data", "shared") == "shared"
    step = trainer.lightning_module.training_step
    found = shared and is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    return "training_step(dataloader_iter)" if found else ""


_AVERAGES = Refusal(
    "averages of weights",
    "they would average one cluster's weights, while versions are judged; average checkpoints after the job",
    of_callbacks(StochasticWeightAveraging, WeightAveraging),
)
_PARTS_OF_EPOCHS = Refusal(
    "parts of epochs with data='shared'",
    "an epoch ends for all clusters when each sample of it counts; use max_steps, a number of batches for "
    "val_check_interval, a smaller data set, or data='local'",
    _parts_of_epochs,
)
RANKS_TABLE: tuple[Refusal, ...] = (
    Refusal(
        "manual optimization",
        "ranks adopt versions between two steps, and which of several optimizers steps last only the user's code "
        "knows; use automatic optimization, or one process per cluster",
        lambda t: "" if t.lightning_module.automatic_optimization else "automatic_optimization = False",
    ),
    _AVERAGES,
    _PARTS_OF_EPOCHS,
)
"""Refusals for ranks of an elastic cluster, beside those of strategy `chaos`."""
OUTER_TABLE: tuple[Refusal, ...] = (
    Refusal(
        "several nodes",
        "a cluster is on one machine; start this script once per machine, with num_nodes=1, or use inner='chaos'",
        lambda t: f"num_nodes={n}" if (n := t._accelerator_connector._num_nodes_flag) > 1 else "",
    ),
    Refusal(
        "lazy modules",
        "parameters travel before the first batch; run one batch through the module before",
        of_modules(lambda m: any(nn.parameter.is_lazy(p) for p in m.parameters(recurse=False))),
    ),
    Refusal(
        "search callbacks",
        "they train on their own before fit; run the search by itself first",
        lambda t: "" if t.fast_dev_run else of_callbacks(BatchSizeFinder, LearningRateFinder)(t),
    ),
    Refusal(
        "callbacks that change what is trained",
        "what travels is fixed when a job is founded; freeze or prune before fit",
        of_callbacks(BaseFinetuning, ModelPruning),
    ),
    _AVERAGES,
    _PARTS_OF_EPOCHS,
    Refusal(
        "dataloader_iter with data='shared'",
        "which samples a step used must be known after it; take `batch` as an argument",
        _fetches_by_itself,
    ),
    Refusal(
        "no optimizer",
        "there is nothing to train; return one from configure_optimizers",
        of_optimizers(lambda o: isinstance(o, _MockOptimizer)),
        early=False,
    ),
)
