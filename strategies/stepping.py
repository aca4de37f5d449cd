"""Turns micro-batches into committed steps: weights them, stands in for missing ones, and averages gradients.

Theory of operation. An *accumulation* is what one optimizer step uses. Every member runs the same number of
micro-batches in it, so that all of Lightning's counters agree; where nothing was assigned to it, it is idle. The
average of a step is

    sum over members and their micro-batches m of (n_m * gradient of m's mean loss) / sum of n_m,

the gradient of the mean over all samples, however they were assigned. Lightning accumulates (1/A) * sum of gradients;
`member/weighing.py` makes up for the difference. By the accumulation's last backward pass all n_m are known, and the
member's coefficient is its weight w = sum of n_m, which also makes reduced buffers a weighted mean.

Averaging comes after the closure and before everything that the precision plugin does with gradients (unscaling,
clipping, `on_before_optimizer_step`), so these see the same averaged gradients on all members. If somebody has
`on_after_backward`, it comes within the closure, after the last backward pass and before that hook, as with DDP. Then
members without samples run the hook, too, since it may change what the optimizer uses.

An idle micro-batch under automatic optimization does not run the user's `training_step`: it gives a loss without graph,
and backward does nothing. Under manual optimization only the user's code knows which optimizers step, so it runs on a
stand-in batch, with weight 0 and without effect on gradients, metrics and logs. What it means there that gradients are
averaged after each backward pass is told in `manual.py`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.collectives.hyper import hyper_words
from chaos_lightning.collectives.layout import Section
from chaos_lightning.data.source import BatchFacts
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.member.drift import StateComparison
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.member.watching import Watch
from chaos_lightning.member.weighing import Weighing, refuse_kept
from chaos_lightning.protocol.types import Header, Kind, Spent
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import batches_begun
from chaos_lightning.strategies.manual import ManualGradients
from chaos_lightning.strategies.results import Untouched

IDLE_KEY = "chaos_idle"
"""Key in `outputs` of `on_train_batch_end`: whether this member had no samples in this micro-batch."""

_CAME_TO_NOTHING = "`training_step` returned `None`. If this was on purpose, ignore this warning..."
"""Lightning's words, said here since Lightning sees a loss without a graph instead."""


def sections_of(module: LightningModule, optimizers: list[Optimizer]) -> list[Section]:
    """Returns one section (a named list of parameters) per optimizer, of the parameters that require a gradient."""
    names = {id(p): n for n, p in module.named_parameters()}
    sections = []
    for number, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        named = [
            (names.get(id(p), f"optimizer {number} parameter {place}"), p)
            for place, p in enumerate(params)
            if p.requires_grad
        ]
        sections.append(Section(f"optimizer {number}", named))
    return sections


def weight_of(module: LightningModule, batch: Any, batch_idx: int, samples: float) -> float:
    """Returns the weight of a batch in a step: its number of samples, or what the module's `chaos_weight` returns.

    Raises:
        ConfigurationError: `chaos_weight` returned no weight.
    """
    own = getattr(module, "chaos_weight", None)
    if own is None:
        return float(samples)
    weight = float(own(batch, batch_idx))
    if not 0 <= weight < float("inf"):
        raise ConfigurationError(f"chaos_weight returned {weight}; expected a finite number that is not negative")
    return weight


class Stepper:
    """Runs one member's optimizer steps in one fit.

    Args:
        engine: Engine that has joined the job.
        trainer: Trainer in fit.
        collectives: Collectives for what is logged in training steps.
        current: Returns what the loader says about the present micro-batch.
        spent: Returns the samples that a contribution made now spends.
        order: Returns words about the order that the epoch's samples have.
        pass_is_over: Manual optimization: takes the slots of the optimizers that a backward pass reached.
        says: Returns what this member says beside a step's gradient.

    Attributes:
        comparison: Comparison of the members' states, every so many steps.
        total_weight: Sum of all members' weights in the last step's average.
        manual: The gradients of manual optimization; None under automatic optimization.
        hooked: Whether the module or a callback has `on_after_backward`, and so sees or changes gradients before the
            step.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        collectives: Collectives,
        current: Callable[[], BatchFacts | None],
        spent: Callable[[], tuple[Spent, ...]],
        order: Callable[[], str],
        pass_is_over: Callable[[], None],
        says: Callable[[], bytes] = bytes,
    ) -> None:
        self._engine = engine
        self.comparison = StateComparison(engine)
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._collectives = collectives
        self._current = current
        self._spent = spent
        self._order = order
        self._says = says
        self.sections = sections_of(self._module, trainer.optimizers)
        self._trained = {id(p) for s in self.sections for _, p in s.params}
        names = getattr(self._module, "chaos_buffers", ())
        self.buffers = reduced_buffers(self._module, names, named_by="chaos_buffers")
        automatic = bool(self._module.automatic_optimization)
        # Under manual optimization training_step itself steps the optimizers.
        self._watch = Watch(self._module, self.buffers, named_by="chaos_buffers", parameters=automatic)
        self._told = False
        self.manual = None if automatic else ManualGradients(self.sections, pass_is_over)
        self._accumulation = Weighing(trainer.accumulate_grad_batches)
        self._present = 0.0
        """Weight of the present micro-batch, under manual optimization."""
        self._skip_backward = False
        self._stepping = False
        self.total_weight = 0.0
        hooks = [self._module, *trainer.callbacks]
        self.hooked = any(is_overridden("on_after_backward", hook) for hook in hooks)

    # ------------------------------------------------------------------ one micro-batch

    def training_step(self, run: Callable[[], Any], batch: Any) -> Any:
        """Runs the user's training step, or a substitute if this member has no samples; then exchanges what was
        logged.
        """
        batch_idx = batches_begun(self._trainer) - 1
        part = self._current()
        idle = part is None or part.idle
        would_sync = False
        with self._collectives.inside("training_step"):
            if self.manual is None:
                output = self._automatic_step(run, None if idle else part, batch, batch_idx)
            else:
                self._present = 0.0 if idle else self._weight(part, batch, batch_idx)
                with self.manual.training_step():
                    if idle:
                        output, would_sync = self._run_idle(run)
                    else:
                        self._watch.begin()
                        output = run()
                        self._tell_of_changes()
                        self._engine.losses.add(_loss_of(output), self._present)
        self._collectives.leave_step(
            self._trainer.fit_loop.epoch_loop._results, always=would_sync, stood_in=idle and self.manual is None
        )
        return output

    def _automatic_step(self, run: Callable[[], Any], part: BatchFacts | None, batch: Any, batch_idx: int) -> Any:
        """Runs the user's training step under automatic optimization. `part`: facts about the batch; None if this
        member has no samples.
        """
        output = None
        if part is not None:
            self._watch.begin()
            output = run()
            self._watch.check("training_step")
        if output is None:
            if part is not None:
                Closure.warning_cache.warn(_CAME_TO_NOTHING)
            self._skip_backward = True
            self._accumulation.add(0.0)
            return {"loss": torch.zeros((), device=self._module.device), IDLE_KEY: part is None}
        self._skip_backward = False
        weight = self._weight(part, batch, batch_idx)
        self._accumulation.add(weight)
        self._engine.losses.add(_loss_of(output), weight)
        return output

    def _run_idle(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs a training step on a stand-in batch at a member without samples; returns its output, and whether it
        logged with sync_dist=True.
        """
        with Untouched(self._trainer) as untouched:
            output = run()
        return output, untouched.synced

    def _weight(self, part: BatchFacts | None, batch: Any, batch_idx: int) -> float:
        assert part is not None
        return weight_of(self._module, batch, batch_idx, part.samples)

    def _tell_of_changes(self) -> None:
        """Warns once of buffers that training_step changed under manual optimization. Members without samples run
        it, too, so such a buffer differs only if it depends on the batch.
        """
        changed = self._watch.changed()
        if changed and not self._told:
            self._told = True
            warnings.warn(
                f"{', '.join(changed[:5])} changed within training_step. If what is written there depends on the "
                "batch, members drift apart: name such buffers in `chaos_buffers = [...]` of the module to have them "
                "averaged with each step",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ backward

    def backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs one backward pass of a loss weighted by its samples; before the accumulation's last pass, tells the
        engine to send.
        """
        if len(self._accumulation) == 1:
            refuse_kept(
                self.sections[0].params,
                "Zero them in optimizer_zero_grad, or use manual optimization, where newcomers get them",
            )
        factor = self._close_accumulation() if self._stepping else self._accumulation.factor()
        if self._skip_backward:
            self._start_scaler(loss)
            return loss
        done = run(loss if factor == 1.0 else loss * factor)
        if self._watch.closely:  # hooks that step an optimizer do so in each batch
            self._watch.check("backward")
        return done

    def _close_accumulation(self) -> float:
        """Closes the accumulation before its last backward pass; returns the factor by which that pass's loss is
        scaled.
        """
        factor, total = self._accumulation.close(p for _, p in self.sections[0].params), self._accumulation.total
        self._engine.arm(coefficient=total, section=0, empty=total == 0)
        return factor

    def _start_scaler(self, loss: Tensor) -> None:
        """Starts the gradient scaler with a loss that is not used, since a scaler that never scaled refuses to
        unscale the other members' gradients.
        """
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(loss)

    # ------------------------------------------------------------------ the step

    @property
    def has_passed(self) -> bool:
        """Whether the present micro-batch gets a backward pass."""
        return not self._skip_backward

    @property
    def is_last(self) -> bool:
        """Whether the last micro-batch of the accumulation is being processed."""
        return self._stepping

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Marks the closure that runs within this context as that of the accumulation's last micro-batch."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def average(self, number: int, *, yields: bool = False) -> Header:
        """Contributes this accumulation (or backward pass) and waits for its commit, after which `.grad` holds the
        average. With `yields`, the header may be that of an earlier collective of the others; then this is to be called
        again.

        Args:
            number: Number of the optimizer.
            yields: See `Engine.step`.
        """
        self._check_layout(self._trainer.optimizers[number])
        self._watch.put_back()
        weight = self._accumulation.total if self.manual is None else self._present
        header = self._engine.step(
            weight=weight,
            coefficient=weight,
            spent=self._spent(),
            section=number,
            hyper=hyper_words(self._trainer.optimizers),
            order=self._order(),
            state_hash=self.comparison.hash,
            yields=yields,
            payload=self._says(),
        )
        if header.kind is not Kind.STEP:
            return header
        self.total_weight = header.total_weight
        self._engine.losses.tell(header.step)
        if self.manual is not None:
            self.manual.averaged(number)
        self.forget_accumulation()
        return header

    # ------------------------------------------------------------------ manual optimization

    def manual_backward(self, run: Callable[[], None]) -> None:
        """Runs one backward pass of `LightningModule.manual_backward`, and averages the gradients that it has
        changed.
        """
        assert self.manual is not None
        self.manual.backward(run, stands_in=self._present == 0.0, unweighed=lambda: self.total_weight <= 0)

    def holds_average(self, number: int) -> bool:
        """Returns whether this optimizer's gradients are an average that has not been used in a step yet. Then it
        steps without a slot.
        """
        return self.manual is not None and self.manual.hold_average(number)

    def must_average(self, number: int) -> bool:
        """Returns whether this optimizer's step needs a slot: its gradients are no average, or user code has
        replaced one of them.
        """
        return self.manual is None or not self.manual.hold_average(number) or self.manual.assigned(number)

    def stepped(self, number: int) -> None:
        """Notes that this optimizer is about to step with its averaged gradients."""
        if self.manual is not None:
            self.manual.stepped(number)

    def gradients(self) -> dict[str, Any]:
        """Returns the averaged gradients that are kept from one batch to the next, for newcomers. To be called at a
        safe point.
        """
        return {} if self.manual is None else self.manual.manifest()

    def adopt_gradients(self, given: Mapping[str, Any]) -> None:
        """Takes over the gradients that `gradients` returned at the donor."""
        if given and self.manual is not None:
            self.manual.adopt(given)

    # ------------------------------------------------------------------ what else may happen

    def put_back(self) -> None:
        """Puts the engine's own tensors back in place of averaged buffers that user code replaced, before the state
        is saved.
        """
        self._watch.put_back()

    def nothing(self) -> Tensor | None:
        """Returns the loss to report if no training step gave one."""
        return torch.zeros((), device=self._module.device) if self.manual is None else None

    def forget_accumulation(self) -> None:
        """Forgets the present accumulation; the next micro-batch begins a new one."""
        self._accumulation.forget()
        self._engine.losses.tell(0)

    def reset(self) -> None:
        """Forgets the present accumulation and manual gradients. To be called when the member joins again."""
        self.forget_accumulation()
        self._watch.put_back()
        if self.manual is not None:
            self.manual.reset()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        if self.manual is not None:
            self.manual.close()

    def number(self, optimizer: Optimizer) -> int:
        for number, mine in enumerate(self._trainer.optimizers):
            if mine is optimizer:
                return number
        raise ConfigurationError(f"{type(optimizer).__name__} steps, but configure_optimizers did not return it")

    def _check_layout(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in self._trained:
                    names = {id(p): n for n, p in self._module.named_parameters()}
                    raise UnsupportedError(
                        f"parameter {names.get(id(param), 'of an added group')!r} has a gradient, but was frozen or "
                        "absent when this member joined; parameters that are trained may not change within a job"
                    )


def _loss_of(output: object) -> object:
    """Returns the loss from a training step's output."""
    return output.get("loss") if isinstance(output, Mapping) else output
