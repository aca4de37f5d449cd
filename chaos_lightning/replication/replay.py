"""Replays committed steps: a newcomer takes the optimizer steps again with the logged averages (protocol.md 17).

Theory of operation. A newcomer that holds the state at header s and gets the raw sums of s+1, s+2, ... reaches the
members' state without a forward pass, because what an optimizer does is a pure function of its state, the averaged
gradients, its hyperparameters and the clipping rule. For each header the engine first writes the averages into `.grad`
and into reduced buffers (None where nobody had a gradient); a `Replay` then does the rest: it sets the
hyperparameters that the header names, clips, and steps the optimizer whose section the header is about. Learning
rates thus follow the members' schedulers, though the newcomer's own do not run; schedulers, counters and callbacks come
from a donor's manifest afterwards.

What is no such function cannot be replayed, and `replayable` says so in words before anybody is kept waiting: then the
newcomer comes in by a pause. Optimizers are judged by their exact class, since a subclass may do anything. A module may
vouch for what this page does not know by `chaos_replay = True`, and may forbid replay by `chaos_replay = False`. A
mistake costs time, never correctness: a replayed state is compared by hash with the members', and what differs is
fetched (protocol.md 19).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
    optimizer,
)

from chaos_lightning.collectives.hyper import scaled, set_hyper
from chaos_lightning.collectives.layout import section_of
from chaos_lightning.errors import StateError
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.replication.access import ModuleState

PURE: frozenset[type[Optimizer]] = frozenset(
    (SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop, ASGD, Adafactor, Muon)
)
"""Optimizers whose step is a pure function of state, gradient and hyperparameters, in each of their implementations."""
NEVER: dict[type[Optimizer], str] = {
    LBFGS: "it evaluates the loss several times in a step",
    SparseAdam: "its gradients are sparse, and reduced ones are dense",
}
"""Optimizers that no module can vouch for, and why."""

VOUCH = "chaos_replay"
"""Name of the attribute of the user's module."""


@runtime_checkable
class Replay(Protocol):
    """Replayer, which takes committed optimizer steps again outside of training."""

    def replayable(self) -> str:
        """Returns the reason why this process cannot join by replay; "" if it can."""
        ...

    def replay(self, header: Header) -> None:
        """Takes the header's optimizer step again, with the step's average in `.grad`; then clears `.grad`."""
        ...


class OptimizerReplay:
    """Replays the steps of torch optimizers; section n of the gradient layout belongs to optimizer n.

    Args:
        optimizers: Optimizers, in the order of the layout's sections.
        clip: Function that clips the gradients of the optimizer that is about to step, as the members did.
        vouched: Value of the module's attribute `chaos_replay`: True: optimizers beyond `PURE` can be replayed, too;
            False: none can; None: it has no such attribute.
        within: Whether to clip inside the closure that `step` is given, as Lightning does; else before `step()`.
        scaled_for: Samples of a step for which learning rates were chosen (`lr_scaling`); 0: they are not scaled.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        clip: Callable[[Optimizer], None] | None = None,
        *,
        vouched: bool | None = None,
        within: bool = False,
        scaled_for: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._clip = clip
        self._vouched = vouched
        self._within = within
        self._scaled_for = scaled_for

    def replayable(self) -> str:
        if self._vouched is False:
            return f"the module says {VOUCH} = False"
        found = [
            f"optimizer {number} ({type(one).__name__}): {why}"
            for number, one in enumerate(self._optimizers)
            if (why := impurity(one, vouched=self._vouched is True))
        ]
        return "; ".join(found)

    def replay(self, header: Header) -> None:
        if header.kind is not Kind.STEP:
            return
        if header.error:
            raise StateError(f"step {header.step} (slot {header.seq}) was refused ({header.error}): nobody applied it")
        number = section_of(header)
        if number >= len(self._optimizers):
            raise StateError(
                f"step {header.step} (slot {header.seq}) is of optimizer {number}; "
                f"this member has {len(self._optimizers)}; start it with the same script"
            )
        stepping = self._optimizers[number]
        set_hyper(self._optimizers, header.hyper)
        with scaled(stepping, header.lr_factor(self._scaled_for)):
            if self._within:
                stepping.step(lambda: self._clipped(stepping))
            else:
                self._clipped(stepping)
                stepping.step()
        for group in stepping.param_groups:
            for param in group["params"]:
                param.grad = None

    def _clipped(self, stepping: Optimizer) -> float:
        """Clips the gradients of the stepping optimizer; returns 0.0 as the loss that a closure must return."""
        if self._clip is not None:
            self._clip(stepping)
        return 0.0


def impurity(given: Optimizer, *, vouched: bool = False) -> str:
    """Returns the reason why this optimizer's steps cannot be replayed; "" if they can."""
    for kind, why in NEVER.items():
        if isinstance(given, kind):
            return why
    if vouched:
        return ""
    if type(given) not in PURE:
        return (
            "it is not known to be a pure function of state and gradient; if it is, without randomness of its own, "
            f"say {VOUCH} = True in the module"
        )
    replaced = vars(given).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return "its step() was replaced on this instance"
    hooks = (
        (given._optimizer_step_pre_hooks, "a step pre-hook"),
        (given._optimizer_step_post_hooks, "a step post-hook"),
        (optimizer._global_optimizer_pre_hooks, "a step pre-hook for all optimizers"),
        (optimizer._global_optimizer_post_hooks, "a step post-hook for all optimizers"),
    )
    changing = (words for registered, words in hooks if not all(map(_only_looks, registered.values())))
    return "; ".join(f"{words} may change gradients or weights" for words in changing)


def _only_looks(hook: Callable[..., Any]) -> bool:
    """Returns whether an optimizer hook declares (`only_looks`) that it changes nothing, as the profiler's does."""
    return bool(getattr(hook, "only_looks", False))


class ModuleReplay:
    """Replay for a plain training loop that does nothing between averaging and `optimizer.step()` except clipping.

    Args:
        state: Its training state. A model among the extra state is a copy that the loop averages by itself: no replay.
        clip: Clips the gradients of the optimizer that is about to step, as the members did.
        scaled_for: As of `OptimizerReplay`.
    """

    def __init__(
        self, state: ModuleState, clip: Callable[[Optimizer], None] | None = None, *, scaled_for: int = 0
    ) -> None:
        self._state = state
        self._steps = OptimizerReplay(state.optimizers, clip, vouched=vouched_by(state.module), scaled_for=scaled_for)

    def replayable(self) -> str:
        found = [
            f"extra state {name!r} is a model that changes outside of the optimizer"
            for name, value in self._state.extra.items()
            if isinstance(value, nn.Module)
        ]
        found += [
            f"extra state {name!r} scales the loss, and may leave a step out"
            for name, value in self._state.extra.items()
            if hasattr(value, "unscale_")
        ]
        return "; ".join([*found, *filter(None, [self._steps.replayable()])])

    def replay(self, header: Header) -> None:
        self._steps.replay(header)


def vouched_by(module: nn.Module) -> bool | None:
    """Returns the module's attribute `chaos_replay`: True, False, or None if it has none."""
    said = getattr(module, VOUCH, None)
    return said if said is None else bool(said)
