"""Refuses, before training starts, what strategy `chaos_pipeline` does not support; each error names it (refusals.py).

Each member has some layers of the model, so beside most of what strategy `chaos` refuses there is all that needs the
whole model, every gradient or several passes at one place. An optimizer must step each parameter by itself: from that
parameter, its gradient and its state. Those of torch.optim were read for that; others say so by `chaos_by_parameter`.
"""

from __future__ import annotations

import inspect
import warnings

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.pipeline.find_chain import find_chain
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.refusals import TABLE, Refusal, of_callbacks, of_modules, of_optimizers
from chaos_lightning.strategies.replay import own_hooks

BY_PARAMETER = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
    torch.optim.Adafactor, torch.optim.Muon,
)  # fmt: skip
"""Optimizers that step each parameter by itself. Muon and Adafactor look at a whole matrix, which one member has."""
_STEPS = frozenset(inspect.unwrap(kind.step) for kind in BY_PARAMETER)
_REPLACED = frozenset((
    "fractions of an epoch with data='local'", "gradient accumulation that changes", "StochasticWeightAveraging",
    "sharded optimizers",
))  # fmt: skip
"""Names of rows of strategy `chaos` that other rows replace here."""

_LOOKING = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "configure_gradient_clipping")
"""Hooks whose purpose is to look at gradients, or to change them."""


def warn_of_parts(trainer: Trainer) -> None:
    """Warns of the user's hooks that look at gradients: they see those of this member's layers only."""
    if found := [words for words, _ in own_hooks(trainer, _LOOKING)]:
        warnings.warn(
            f"{', '.join(found)}: a hook sees the gradients and weights of the layers that this member owns. Other "
            "parameters have no gradient here, and their values are NaN, so a norm is that of a part of the model. To "
            "clip by the norm of the whole, call self.clip_gradients in configure_gradient_clipping", stacklevel=2,
        )  # fmt: skip


def _steps_by_parameter(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer steps each parameter independently: it says so, or its `step` is in the list of
    known ones.
    """
    return bool(getattr(optimizer, "chaos_by_parameter", False)) or inspect.unwrap(type(optimizer).step) in _STEPS


def _unclear_chain(trainer: Trainer) -> str:
    """Returns why no list of blocks can be chosen as the chain; "" if one can, or if `configure_model` has yet to
    build the model.
    """
    module = trainer.lightning_module
    if is_overridden("configure_model", module):
        return ""
    try:
        find_chain(module, str(getattr(trainer.strategy, "chain", "") or ""))
    except ConfigurationError as error:
        return str(error)
    return ""


def _accumulation(trainer: Trainer) -> str:
    if (number := trainer.accumulate_grad_batches) != 1:
        return f"accumulate_grad_batches={number}"
    return of_callbacks(GradientAccumulationScheduler)(trainer)


def _join_by(trainer: Trainer) -> str:
    config = getattr(getattr(trainer.strategy, "session", None), "config", None)
    options = config or getattr(trainer.strategy, "options", None)
    return "join_by='replay'" if getattr(options, "join_by", None) == "replay" else ""


PIPELINE_TABLE: tuple[Refusal, ...] = (
    *(row for row in TABLE if row.what not in _REPLACED),
    Refusal(
        "the list of layers",
        "stages are cut out of one list of blocks, an nn.Sequential or nn.ModuleList that the step runs in order; the "
        "strategy takes its name as chain=..., the module as an attribute chaos_chain",
        _unclear_chain,
    ),
    Refusal(
        "gradient accumulation",
        "a step has so many of the loader's batches as the strategy's micro_batches=... says; give that, and leave "
        "accumulate_grad_batches out",
        _accumulation,
    ),
    Refusal(
        "manual optimization",
        "a step's forward and backward passes are run stage by stage, in an order that the planner chooses; use "
        "automatic optimization with one optimizer, whose parameter groups may have settings of their own",
        lambda t: "" if t.lightning_module.automatic_optimization else "automatic_optimization = False",
    ),
    Refusal(
        "scaled losses of fp16",
        "a scale would have to change at all stages at once where one of them overflows; use precision='bf16-mixed'",
        lambda t: f"precision={t.precision!r}" if getattr(t.precision_plugin, "scaler", None) is not None else "",
    ),
    Refusal(
        "data='local'",
        "each stage needs the batch, so all members have the same data; leave data out",
        lambda t: "data='local'" if getattr(t.strategy, "data", "shared") == "local" else "",
    ),
    Refusal(
        "averages of weights",
        "a callback would average the layers of one member; average checkpoints after the job",
        of_callbacks(StochasticWeightAveraging, WeightAveraging),
    ),
    Refusal(
        "modules that are parallel already",
        "layers are given to members by this strategy, and parameters are whole there; use the plain module",
        of_modules(
            lambda m: (
                isinstance(m, DataParallel | DistributedDataParallel | FullyShardedDataParallel)
                or any(isinstance(p, DTensor) for p in m.parameters(recurse=False))
            )
        ),
    ),
    Refusal(
        "joins by replay",
        "a newcomer would have to run the optimizer of layers that it does not have yet; use join_by='auto' or 'pause'",
        _join_by,
    ),
    Refusal(
        "optimizers that may mix parameters",
        "each member steps the layers that it has, so a parameter's step must depend on that parameter, its gradient "
        "and its state alone. If that is so, say so: set chaos_by_parameter = True on the optimizer or its class",
        of_optimizers(lambda o: not (_steps_by_parameter(o) or isinstance(o, torch.optim.LBFGS | _MockOptimizer))),
        early=False,
    ),
)
