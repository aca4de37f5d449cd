"""From micro-batches to committed steps: weights, idle micro-batches, averaging.

Theory of operation. A *window* is what one optimizer step uses. Every member runs the same number of micro-batches in
it, so that all of Lightning's counters agree; where nothing was dealt to it, it is idle. The average of a step is

    sum over members and their micro-batches m of (n_m * gradient of m's mean loss) / sum of n_m,

the gradient of the mean over all samples, however they were dealt. Lightning accumulates (1/A) * sum of gradients, so
each loss is scaled by n_m relative to the window's first one, and before the window's last backward pass, when all
n_m are known, the rest of the factor is made up for: by then the member's coefficient is its weight w = sum of n_m,
which also makes reduced buffers a weighted mean. For full windows all these factors are 1 and nothing is touched.

Averaging comes after the closure and before everything that the precision plugin does with gradients (unscaling,
clipping, `on_before_optimizer_step`), so these see the same averaged gradients on all members.

An idle micro-batch under automatic optimization does not run the user's `training_step`: it gives a loss without graph,
and backward does nothing. Under manual optimization only the user's code knows which optimizers step, so it runs on a
stand-in batch, with weight 0 and without effect on gradients, metrics and logs.

Under manual optimization nobody knows after which backward pass the user looks at `.grad`, clips it or steps. So each
pass ends with the average, as with DDP: one slot for each optimizer whose parameters it reached, weighted by the
micro-batch that it is of. What had been accumulated before is an average already, the same on all members, and stays
what it is. The optimizer then steps without a slot. A plain `loss.backward()` within training_step ends so, too: its
first gradient asks autograd to call back when the pass is over. Only gradients that came about in another way (assigned
by hand, or outside of training_step) are averaged when their optimizer steps. One that was assigned may have been made
of the average; then it is the same on all members, and its average is itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from chaos_lightning.collectives.hyper import hyper_words
from chaos_lightning.collectives.layout import Section
from chaos_lightning.data.source import MicroBatch
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.member.engine import Engine
from chaos_lightning.protocol.types import Header, Kind, Spent
from chaos_lightning.replication.table import state_hash
from chaos_lightning.strategies.results import Untouched
from chaos_lightning.strategies.state import LightningState, reduced_buffers

IDLE_KEY = "chaos_idle"
"""In `outputs` of `on_train_batch_end`: this member had no samples in this micro-batch."""

_CAME_TO_NOTHING = "`training_step` returned `None`. If this was on purpose, ignore this warning..."
"""Lightning's words, said here since Lightning sees a loss without a graph instead."""


def sections_of(module: LightningModule, optimizers: list[Optimizer]) -> list[Section]:
    """One section per optimizer, with the parameters that are trained now."""
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


class Stepper:
    """One member's steps.

    Args:
        engine: Joined.
        trainer: In fit.
        state: For state hashes.
        current: What the loader says about the present micro-batch.
        spent: What a contribution made now spends.
        pass_is_over: Manual optimization: takes the slots of the optimizers that a backward pass `reached`.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        state: LightningState,
        current: Callable[[], MicroBatch | None],
        spent: Callable[[], tuple[Spent, ...]],
        pass_is_over: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._state = state
        self._current = current
        self._spent = spent
        self._pass_is_over = pass_is_over
        self._awaits_pass = False
        """Manual optimization: whether the next gradient is a plain pass's first one."""
        self.sections = sections_of(self._module, trainer.optimizers)
        self._trained = {id(p) for s in self.sections for _, p in s.params}
        reduced = reduced_buffers(self._module)
        self.buffers = reduced
        self._watched = [(n, b) for n, b in self._module.named_buffers() if id(b) not in {id(r) for _, r in reduced}]
        self._watch_params = 2
        self._window: list[float] = []
        self._unit = 0.0
        self._present = 0.0
        """Manual optimization: what the present micro-batch weighs."""
        self._reached: set[int] = set()
        """Manual optimization: optimizers whose gradients have changed since they were averaged."""
        self._averaged: set[int] = set()
        """Manual optimization: optimizers whose gradients have been averaged since they stepped."""
        self._averages: dict[int, Tensor] = {}
        """Manual optimization: the last average of each parameter's gradient, by the parameter's id."""
        self._hooks = [] if self.automatic else self._watch_gradients()
        self._skip_backward = False
        self._stepping = False
        self.stood_in = False
        """This member was idle and did not run the last training step."""
        self.would_sync = False
        """It was idle and ran the last training step on a stand-in batch, which logged with sync_dist=True."""
        self._hash = ""
        hooks = [self._module, *trainer.callbacks]
        self._late = any(is_overridden("on_after_backward", hook) for hook in hooks)
        """Someone changes gradients after backward: they must not be sent before."""

    @property
    def automatic(self) -> bool:
        return bool(self._module.automatic_optimization)

    # ------------------------------------------------------------------ one micro-batch

    def training_step(self, run: Callable[[], Any], batch: Any, batch_idx: int) -> Any:
        """The user's training step, or what an idle member does instead."""
        part = self._current()
        idle = part is None or part.idle
        self.stood_in = idle and self.automatic
        self.would_sync = False
        if not self.automatic:
            self._present = 0.0 if idle else self._weight(part, batch, batch_idx)
            self._awaits_pass = True
            try:
                return self._run_idle(run) if idle else run()
            finally:
                self._awaits_pass = False
        output = None
        if not idle:
            with self._watch():
                output = run()
        if output is None:
            if not idle:
                Closure.warning_cache.warn(_CAME_TO_NOTHING)
            self._skip_backward = True
            self._window.append(0.0)
            return {"loss": torch.zeros((), device=self._module.device), IDLE_KEY: idle}
        self._skip_backward = False
        self._window.append(self._weight(part, batch, batch_idx))
        return output

    def _run_idle(self, run: Callable[[], Any]) -> Any:
        with Untouched(self._trainer) as untouched:
            output = run()
        self.would_sync = untouched.synced
        return output

    def _weight(self, part: MicroBatch | None, batch: Any, batch_idx: int) -> float:
        assert part is not None
        own = getattr(self._module, "chaos_weight", None)
        if own is None:
            return float(part.samples)
        weight = float(own(batch, batch_idx))
        if not 0 <= weight < float("inf"):
            raise ConfigurationError(f"chaos_weight returned {weight}; expected a finite number that is not negative")
        return weight

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """What forward passes change must be averaged, or members drift apart."""
        watched = list(self._watched)
        if self._watch_params > 0:
            self._watch_params -= 1
            watched += list(self._module.named_parameters())
        before = [t._version for _, t in watched]
        yield
        changed = [n for (n, t), v in zip(watched, before, strict=True) if t._version != v]
        if changed:
            raise UnsupportedError(
                f"{', '.join(changed[:5])} changed within training_step; members see different batches (or "
                "none), so they "
                "would drift apart. Name buffers in `chaos_buffers = [...]` of the module to have them "
                "averaged with each "
                "step, or change them in on_train_batch_end, which runs on all members"
            )

    # ------------------------------------------------------------------ backward

    def backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Scales the loss by what its samples count, tells the engine before the window's last pass, and runs it."""
        if len(self._window) == 1:
            self._refuse_kept()
        weight = self._window[-1]
        self._unit = self._unit or weight
        factor = weight / self._unit if self._unit else 1.0
        if self._stepping:
            factor = self._close_window(weight)
        if self._skip_backward:
            self._start_scaler(loss)
            return loss
        return run(loss if factor == 1.0 else loss * factor)

    def _refuse_kept(self) -> None:
        """Before a window's first pass: what the last step left must have been put away or zeroed. A newcomer would not
        have it, so the others' part of the coming average would shrink.

        Raises:
            UnsupportedError: A parameter still has a gradient other than zero.
        """
        left = [(name, param.grad) for name, param in self.sections[0].params if param.grad is not None]
        if left and torch.stack([grad.any() for _, grad in left]).any():  # waits for the device once
            name = next(name for name, grad in left if grad.any())
            raise UnsupportedError(
                f"parameter {name!r} still has a gradient when the next step's first backward pass begins; gradients "
                "that are kept over steps are not supported, since newcomers would not have them. Zero them in "
                "optimizer_zero_grad, or use manual optimization, where newcomers get them"
            )

    def _close_window(self, weight: float) -> float:
        """Before the last pass: earlier gradients get the factor that was not known then. Returns the last one's."""
        total = sum(self._window)
        parts = self._trainer.accumulate_grad_batches
        late = parts * self._unit / total if total else 1.0
        if late != 1.0 and len(self._window) > 1:
            with torch.no_grad():
                for _, param in self.sections[0].params:
                    if param.grad is not None:
                        param.grad.mul_(late)
        with self._engine.hold() if self._late else contextlib.nullcontext():
            self._engine.arm(coefficient=total, section=0, empty=total == 0)
        return parts * weight / total if total else 1.0

    def _start_scaler(self, loss: Tensor) -> None:
        """A scaler that never scaled refuses to unscale the gradients that the others bring."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(loss)

    # ------------------------------------------------------------------ the step

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """The closure inside belongs to the window's last micro-batch."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def average(self, number: int, *, yields: bool = False) -> Header:
        """Contributes this window, or backward pass, and waits for its commit; `.grad` holds the average afterwards. If
        it yields, the header may be of what the others do first; then it is to be called again.

        Args:
            number: The optimizer's.
            yields: See `Engine.step`.
        """
        self._check_layout(self._trainer.optimizers[number])
        weight = sum(self._window) if self.automatic else self._present
        header = self._engine.step(
            weight=weight,
            coefficient=weight,
            spent=self._spent(),
            section=number,
            hyper=hyper_words(self._trainer.optimizers),
            state_hash=self._hash,
            yields=yields,
        )
        if header.kind is not Kind.STEP:
            return header
        self._hash = ""
        self._reached.discard(number)
        self._averaged.add(number)
        self._note_averages(number)
        self.forget_window()
        return header

    # ------------------------------------------------------------------ manual optimization

    def _watch_gradients(self) -> list[Any]:
        """Hooks that tell which optimizers a backward pass reached."""

        def reaches(number: int) -> Callable[[Tensor], None]:
            return lambda _: self._reaches(number)

        return [
            param.register_post_accumulate_grad_hook(reaches(number))  # type: ignore[no-untyped-call]
            for number, section in enumerate(self.sections)
            for _, param in section.params
        ]

    def _reaches(self, number: int) -> None:
        """A backward pass has come to a parameter of this optimizer."""
        self._reached.add(number)
        if self._awaits_pass:
            self._awaits_pass = False
            Variable._execution_engine.queue_callback(self._plain_pass_is_over)  # type: ignore[attr-defined]

    def _plain_pass_is_over(self) -> None:
        self._awaits_pass = True
        self._pass_is_over()

    @property
    def reached(self) -> tuple[int, ...]:
        """Manual optimization: optimizers whose gradients have changed since they were averaged, in order."""
        return tuple(sorted(self._reached))

    def manual_backward(self, run: Callable[[], None]) -> None:
        """One backward pass of `LightningModule.manual_backward`, and the average of what it reached."""
        kept = None
        if self._present == 0.0:
            # What a stand-in batch gives must not add to what is there; nor is anything else there if nobody has more.
            kept = [(p, p.grad) for s in self.sections for _, p in s.params]
            for param, _ in kept:
                param.grad = None
        awaited, self._awaits_pass = self._awaits_pass, False
        try:
            run()
        finally:
            self._awaits_pass = awaited
        self._pass_is_over()
        if kept is not None:
            unweighed = self._engine.header.total_weight <= 0
            for param, grad in kept:
                if unweighed or param.grad is None:
                    param.grad = grad
            for number in self._averaged:
                self._note_averages(number)

    def holds_average(self, number: int) -> bool:
        """Whether this optimizer's gradients are an average that it has not stepped with."""
        return number in self._averaged and number not in self._reached and not self.automatic

    def assigned(self, number: int) -> bool:
        """Whether somebody has put another gradient in the place of an average."""
        return any(
            param.grad is not None and param.grad is not self._averages.get(id(param))
            for _, param in self.sections[number].params
        )

    def _note_averages(self, number: int) -> None:
        if not self.automatic:
            self._averages |= {id(p): p.grad for _, p in self.sections[number].params if p.grad is not None}

    def stepped(self, number: int) -> None:
        """This optimizer steps: gradients that are assigned to it from here on are this member's own."""
        self._averaged.discard(number)

    def gradients(self) -> dict[str, Any]:
        """At rest: gradients that are kept beyond the batch. All members have the same ones, so newcomers get them."""
        if self.automatic:
            return {}
        kept = {
            name: param.grad.detach().clone()
            for number, section in enumerate(self.sections)
            for name, param in section.params
            if param.grad is not None and number not in self._reached
        }
        return {"grads": kept, "averaged": sorted(self._averaged)}

    def adopt_gradients(self, given: Mapping[str, Any]) -> None:
        """Takes over what `gradients` gave at the donor."""
        if not given:
            return
        for section in self.sections:
            for name, param in section.params:
                grad = given["grads"].get(name)
                param.grad = grad.to(param.device) if grad is not None else None
        self._averaged, self._reached = set(given["averaged"]), set()
        for number in self._averaged:
            self._note_averages(number)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def nothing(self) -> Tensor | None:
        """What a closure returns that came to nothing."""
        return torch.zeros((), device=self._module.device) if self.automatic else None

    def forget_window(self) -> None:
        """The next micro-batch begins a new one."""
        self._window, self._unit = [], 0.0

    def reset(self) -> None:
        """The member joined again: nothing is open."""
        self.forget_window()
        self._reached.clear()
        self._averaged.clear()

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

    def prove(self) -> None:
        """Every so many steps, at rest (a forward pass would change reduced buffers): the hash of the replicated state,
        to be compared with the others' in the coming step (PROTOCOL.md 24)."""
        every, header = self._engine.config.state_hash_every, self._engine.header
        self._hash = ""
        if every and header.step and header.step % every == 0:
            self._hash = state_hash(self._state.tensors())
            self._engine.events.emit("state_hash", seq=header.seq, step=header.step, head=header.hash, hash=self._hash)
