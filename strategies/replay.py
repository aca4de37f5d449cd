"""Replays steps under Lightning: tells which fits can be replayed, and steps as Lightning would have (protocol.md 17).

Theory of operation. After our average Lightning's automatic optimization runs hooks, clips by the precision plugin
with the Trainer's own rule, and steps the optimizer. Replay does the clipping and the step and leaves the hooks out, so
a fit whose hooks do more than watch cannot be replayed. Each entry of `TABLE` looks at one such thing and returns what
it found, in words; the newcomer then comes in by a pause, which serves everything. Nothing that happens before the
average matters here (accumulation, what changes own gradients, autocast), nor do schedulers: each header names its
learning rates.

Between two steps hooks may write weights as well. Whether they do cannot be known before they ran, so their code is
looked at: what calls an in-place operation counts as writing. That may err in both ways. A harmless hook costs a pause,
which `chaos_replay = True` in the module (or callback) spares; a writing one that was not recognised costs the
fetching of what differs, since a replayed state is compared by hash before it counts.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.protocol.types import Header
from chaos_lightning.replication.replay import VOUCH, OptimizerReplay, vouched_by
from chaos_lightning.strategies.lightning_types import Trainer

BETWEEN = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "lr_scheduler_step",
    "optimizer_zero_grad",
)
"""Hooks between one optimizer step and the next accumulation's forward passes."""

_TRUSTED = re.compile(r"(lightning|lightning_fabric|torchmetrics|torch|chaos_lightning)(\.|$)")
"""Packages whose hooks are known: they change nothing that is trained, but for the callbacks that TABLE names."""
_IN_PLACE = re.compile(r"[a-z]\w*[a-z\d]_|_foreach_\w+_")
_WRITERS = ("load_state_dict", "update_parameters", "vector_to_parameters", "swap_tensors")


@dataclass(frozen=True)
class Obstacle:
    """One row of the table of reasons why a fit cannot be replayed.

    Attributes:
        found: Looks at a trainer in fit; returns what it found, or "".
        why: Reason why that cannot be replayed.
        vouchable: Whether `chaos_replay = True` in the module overrules it.
    """

    found: Callable[[Trainer], str]
    why: str
    vouchable: bool = True


class LightningReplay:
    """Replays the steps of one Trainer (implements `Replay`).

    Args:
        trainer: Trainer in fit, set up: its module, optimizers and precision plugin exist.
        scaled_for: As of `OptimizerReplay`.
    """

    def __init__(self, trainer: Trainer, scaled_for: int = 0) -> None:
        self._trainer = trainer
        self._vouched = vouched_by(trainer.lightning_module)
        self._steps = OptimizerReplay(
            trainer.optimizers, self._clip, vouched=self._vouched, within=True, scaled_for=scaled_for
        )

    def replayable(self) -> str:
        """Returns why this fit cannot be replayed; "" if it can."""
        if self._vouched is False:
            return self._steps.replayable()
        rows = (row for row in TABLE if not (row.vouchable and self._vouched))
        found = [f"{words}: {row.why}" for row in rows if (words := row.found(self._trainer))]
        return "; ".join([*found, *filter(None, [self._steps.replayable()])])

    def replay(self, header: Header) -> None:
        """Clips gradients and steps the optimizer as the members did; `.grad` holds the average, and is cleared
        afterwards.
        """
        self._steps.replay(header)

    def _clip(self, optimizer: Optimizer) -> None:
        """Clips gradients as Lightning's `Precision._after_closure` does, without calling the hooks."""
        trainer = self._trainer
        trainer.precision_plugin._clip_gradients(
            trainer.lightning_module,
            optimizer,
            trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )


# --- what is looked at -----------------------------------------------------------------------------------------------


def _parties(trainer: Trainer) -> Iterator[LightningModule | Callback]:
    """Yields the objects whose hooks are examined: the module, and the callbacks that do not declare themselves
    replayable.
    """
    yield trainer.lightning_module
    for callback in trainer.callbacks:
        if not getattr(callback, VOUCH, False):
            yield callback


def own_hooks(trainer: Trainer, names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields name and function of those hooks in `names` that user code overrides."""
    names = tuple(names)
    for party in _parties(trainer):
        parent = LightningModule if isinstance(party, LightningModule) else Callback
        for name in names:
            if hasattr(parent, name) and is_overridden(name, party):
                hook = getattr(party, name)
                if not _TRUSTED.match(getattr(_plain(hook), "__module__", None) or ""):
                    yield f"{type(party).__name__}.{name}", hook


def _overridden(*names: str) -> Callable[[Trainer], str]:
    return lambda trainer: ", ".join(words for words, _ in own_hooks(trainer, names))


def _own_precision(trainer: Trainer) -> str:
    plugin = trainer.precision_plugin
    known = (Precision.optimizer_step, MixedPrecision.optimizer_step)
    return "" if type(plugin).optimizer_step in known else f"{type(plugin).__name__}.optimizer_step"


def _scaler(trainer: Trainer) -> str:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return f"{type(scaler).__name__} (precision {trainer.precision})" if scaler is not None else ""


def _averaging(trainer: Trainer) -> str:
    return ", ".join(
        type(c).__name__ for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging | WeightAveraging)
    )


def _kept_models(trainer: Trainer) -> str:
    return ", ".join(
        f"{type(callback).__name__}.{name}"
        for callback in trainer.callbacks
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module)
        and value is not trainer.lightning_module
        and not isinstance(callback, WeightAveraging)
        and any(True for tensors in (value.parameters(), value.buffers()) for _ in tensors)
    )


def _writing(trainer: Trainer) -> str:
    parties = list(_parties(trainer))
    found = []
    for words, hook in own_hooks(trainer, BETWEEN):
        if writes := sorted(set(writes_of(hook, parties))):
            found.append(f"{words} ({', '.join(writes[:3])})")
    return ", ".join(found)


def writes_of(hook: Callable[..., Any], parties: Iterable[object] = ()) -> Iterator[str]:
    """Yields the in-place operations in a hook's code, and in methods of `parties` that the hook calls."""
    owners = [type(p) for p in parties]
    pending, seen = [_code_of(hook)], set()
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        yield from _writes_in(code)
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]
        pending += [_code_of(getattr(owner, name, None)) for owner in owners for name in code.co_names]


def _plain(value: Any) -> Any:
    """Returns the function inside partials, bound methods and decorators."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return inspect.unwrap(value) if callable(value) else value


def _code_of(value: Any) -> CodeType | None:
    """Returns the code of a user's function; None if it is no function, or a known package defines it."""
    function = _plain(value)
    if not isinstance(function, FunctionType) or _TRUSTED.match(function.__module__ or ""):
        return None
    return function.__code__


def _writes_in(code: CodeType) -> Iterator[str]:
    for name in code.co_names:
        in_place = _IN_PLACE.fullmatch(name) and (hasattr(Tensor, name) or hasattr(nn.init, name) or name[0] == "_")
        if in_place or name in _WRITERS:
            yield name
    if any(i.opname == "STORE_ATTR" and i.argval == "data" for i in dis.get_instructions(code)):
        yield "data ="


TABLE: tuple[Obstacle, ...] = (
    Obstacle(
        lambda t: "" if t.lightning_module.automatic_optimization else "manual optimization",
        "only training_step knows what happens between its optimizers' steps",
    ),
    Obstacle(_scaler, "a scaled step is left out when gradients overflow, and the scale is state of its own", False),
    Obstacle(_own_precision, "what this precision plugin does in a step is not known", False),
    Obstacle(_averaging, "it averages weights after each step, outside of the optimizer", False),
    Obstacle(_kept_models, "a copy of the model that a callback keeps changes outside of the optimizer", False),
    Obstacle(_overridden("optimizer_step", "configure_gradient_clipping"), "it decides itself what is done in a step"),
    Obstacle(
        _overridden("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
        "it runs between the average and the next accumulation, and may change gradients or weights",
    ),
    Obstacle(_writing, "it seems to write tensors between two steps"),
)
"""Everything under Lightning, beside the optimizers themselves, that stands against replay."""
