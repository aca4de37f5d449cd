"""Runs the units of one member in order: forward and backward passes of micro-batches through its stages.

Theory of operation. One path, whether or not the step runs again. For each unit the executor waits for the tensors
that another member sends (`Exchange`), runs the layers, and sends on what they made. A forward unit is kept until its
backward unit, which lets go of everything; the tensors that were sent are looked at then: one that was written to
meanwhile is refused, as what its receiver got nobody knows. Gradients of parameters add up in `.grad` in the order of
the units, so equal lists give equal bits. The last stage multiplies each loss by its micro-batch's weight; whoever has
the step's sum divides by all weights.

An attempt ends at a recovery: the exchange then raises `AttemptOverError`, between units or in a wait, and `drop`
undoes what the attempt has done. The executor knows no network and no Lightning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from chaos_lightning.errors import AttemptOverError, ConfigurationError, StateError, UnsupportedError
from chaos_lightning.pipeline.base import BaseBuffers
from chaos_lightning.pipeline.kept import KeptBytes
from chaos_lightning.pipeline.layer_times import LayerClock, Mark
from chaos_lightning.pipeline.tensors import Border
from chaos_lightning.planning.pipelines.units import FORWARD, BorderKey, StepUnit, closing, coverage
from chaos_lightning.protocol.types import LayersCovered, ViewId


class SlotAttempt(NamedTuple):
    """Number of an attempt: slot and view. Tensors are valid in their own attempt only."""

    view: ViewId
    seq: int

    def __str__(self) -> str:
        return f"slot {self.seq} under view {self.view}"


class Exchange(Protocol):
    """Interface that sends border tensors to other members and waits for theirs."""

    def send(self, attempt: SlotAttempt, to: str, key: BorderKey, border: Border) -> None:
        """Sends border tensors, which must not change until they are on their way.

        Raises:
            AttemptOverError: The attempt has ended.
        """

    def there(self, attempt: SlotAttempt, key: BorderKey) -> bool:
        """Returns whether `take` would return without waiting."""

    def take(self, attempt: SlotAttempt, key: BorderKey) -> Border:
        """Waits for border tensors and returns them.

        Raises:
            AttemptOverError: The attempt has ended, or ends meanwhile.
        """

    def check(self, attempt: SlotAttempt) -> None:
        """Raises AttemptOverError if the attempt has ended.

        Raises:
            AttemptOverError: The attempt has ended.
        """


class Pass(Protocol):
    """Interface to a finished forward pass of some layers, kept for its backward pass."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that the next layer receives; empty after the last layer."""

    @property
    def specs(self) -> str:
        """Text that describes the tensors and is sent with them."""

    @property
    def result(self) -> Any:
        """Result of the user's step, after the last layer."""

    def let_go(self) -> Sequence[Tensor | GradientEdge]:
        """Releases `tensors`; returns the graph edges at which the backward pass begins (for tensors without one, the
        tensors).
        """

    def backward(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Runs the backward pass; returns the gradients of the tensors that were received."""


class Layers(Protocol):
    """Interface to the layers of a model, any consecutive ones of which can run by themselves."""

    def __len__(self) -> int: ...

    def run(
        self,
        first: int,
        end: int,
        batch: Any,
        received: Sequence[Tensor],
        specs: str,
        *,
        at: tuple[int, int],
        call: Callable[[Any], Any] | None,
    ) -> Pass:
        """Runs the layers [first, end) of a micro-batch.

        Args:
            first: First layer.
            end: Layer behind the last one.
            batch: The micro-batch.
            received: Tensors that layer `first` takes.
            specs: Text that came with the received tensors.
            at: Numbers of the step and of the micro-batch in it.
            call: The user's step, if it is another one than that of training.
        """


class Finishing(Protocol):
    """Listener that hears when layers have finished their backward passes of a step."""

    def closing(self, layers: Sequence[int]) -> None:
        """Announces that the next backward pass is the last one of these layers."""

    def layer_done(self, layer: int) -> None:
        """Announces that this layer's gradients are complete at this member."""


@dataclass(frozen=True)
class StepWork:
    """Units that one member runs in one attempt, with the functions that give their data.

    Attributes:
        attempt: See `SlotAttempt`.
        step: Number of the optimizer step.
        units: Units in the order in which they run.
        batch: Function that returns a micro-batch, given its number in the step.
        weight: Function that returns the weight of a micro-batch, given its number; called at the last stage.
        call: A step of the user's for evaluation. The units are forward passes then, and nothing is kept of them.
    """

    attempt: SlotAttempt
    step: int
    units: Sequence[StepUnit]
    batch: Callable[[int], Any]
    weight: Callable[[int], float]
    call: Callable[[Any], Any] | None = None


class UnitTime(NamedTuple):
    """Unit that has run, with the marks of its start and end on the device.

    Attributes:
        began: Mark before the first operation, once the unit's tensors and micro-batch were there.
        ended: Mark after the last operation, before anything was sent.
    """

    unit: StepUnit
    began: Mark
    ended: Mark


@dataclass
class StepSums:
    """Results of one member's units; the gradient sums themselves are in `.grad`.

    Attributes:
        times: Units that ran, in order.
        weights: Weight of each micro-batch whose last layers ran here.
        losses: Loss of each micro-batch whose last layers ran here, unweighted; None where the user's step returned
            None.
        results: Result of the user's step for each micro-batch whose last layers ran here, without the graph.
        peak_nbytes: Most bytes of tensors kept at once between units, if they are counted.
    """

    times: list[UnitTime] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor | None] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    peak_nbytes: int = 0

    @property
    def covered(self) -> tuple[LayersCovered, ...]:
        """Micro-batches whose gradients are in the sums, by layers."""
        return coverage(t.unit for t in self.times)


class _Sent(NamedTuple):
    """Record of a sent tensor, without its memory, by which later writes to the tensor are detected.

    Attributes:
        counter: Tensor without memory that shares the sent tensor's count of writes.
        version: Count of writes when it was sent.
    """

    counter: Tensor
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> _Sent:
        counter = tensor.detach()
        counter.data = counter.new_empty(0)  # leaves its count of writes, which the tensor shares
        return _Sent(counter, tensor._version, tensor.dtype, tuple(tensor.shape))


class _Forward(NamedTuple):
    """Forward pass that waits for its backward pass."""

    done: Pass
    roots: Sequence[Tensor | GradientEdge]
    sent: tuple[_Sent, ...]
    """Tensors that were sent, by root; none behind the last layer."""


class PipelineExecutor:
    """Executor that runs the units of one member in their order: takes tensors, computes, sends tensors on.

    Args:
        root: The model, whose parameters and buffers the units change.
        layers: The model's layers.
        exchange: Exchange of border tensors with other members.
        finishing: Listener that hears when layers have finished their backward passes.
        around: Function that returns a context for each forward pass (autocast).
        device: Device that the layers are on.
        counted: Tensors that units keep are counted. It costs time, and torch then overlooks writes to kept tensors.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Layers,
        exchange: Exchange,
        finishing: Finishing | None = None,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        device: torch.device | str = "cpu",
        counted: bool = False,
    ) -> None:
        self._root, self._layers, self._exchange, self._finishing = root, layers, exchange, finishing
        self._around = around
        self._device = torch.device(device)
        self.clock = LayerClock(self._device)
        self._buffers = BaseBuffers(root)
        self._forwards: dict[tuple[int, int, int], _Forward] = {}
        self._coming: deque[int] = deque()
        """Micro-batches of forward units that have not run yet."""
        self._fetched: list[Any] = []
        """Batch of the first of `_coming`, if it was fetched; else empty."""
        self.kept = KeptBytes(root) if counted else None
        self.begun: set[int] = set()
        """Micro-batches of which units have run since the last header."""

    def remember_base(self) -> None:
        """Saves the buffers as of the last committed header, before the first attempt of a step or evaluation round."""
        self.begun = set()
        self._buffers.remember()

    def drop(self) -> None:
        """Undoes everything that the attempt has done, so that units can run anew."""
        self._fetched = []
        self._begin()
        self._buffers.restore()

    def _begin(self) -> None:
        self._forwards.clear()
        if self.kept is not None:
            self.kept.clear()
        for parameter in self._root.parameters():
            parameter.grad = None

    def run(self, work: StepWork) -> StepSums:
        """Runs the units and returns their results; gradient sums start from zero.

        Raises:
            AttemptOverError: The attempt has ended; what it did was dropped.
            Exception: Whatever a layer raised, with a note that names the unit.
        """
        if work.call is None:
            self._begin()
        self.begun = set()
        self._coming, self._fetched = deque(u.micro_batch for u in work.units if u.kind == FORWARD), []
        sums = StepSums()
        try:
            for unit, last in zip(work.units, closing(work.units), strict=True):
                self._exchange.check(work.attempt)
                sums.times.append(self._run_unit(work, unit, last, sums))
            self._exchange.check(work.attempt)
        except AttemptOverError:
            self.drop()
            raise
        sums.peak_nbytes = 0 if self.kept is None else self.kept.peak_nbytes
        return sums

    def _run_unit(self, work: StepWork, unit: StepUnit, last: Sequence[int], sums: StepSums) -> UnitTime:
        if unit.taken is not None and not self._exchange.there(work.attempt, unit.taken):
            self._fetch(work)
        batch = self._next_batch(work) if unit.kind == FORWARD else None
        received = Border(()) if unit.taken is None else self._exchange.take(work.attempt, unit.taken)
        self.begun.add(unit.micro_batch)
        try:
            began = self.clock.mark()
            if work.call is not None:
                sent = self._evaluate(work, unit, batch, received, sums)
            elif unit.kind == FORWARD:
                sent = self._forward(work, unit, batch, received, sums)
            else:
                if self._finishing is not None and last:
                    self._finishing.closing(last)
                sent = self._backward(unit, received)
        except Exception as error:
            error.add_note(f"This happened in {unit} (step {work.step}).")
            raise
        ended = self.clock.mark()
        if unit.sent is not None:
            self._exchange.send(work.attempt, unit.to, unit.sent, sent)
        if self._finishing is not None:
            for layer in last:
                self._finishing.layer_done(layer)
        return UnitTime(unit, began, ended)

    def _fetch(self, work: StepWork) -> None:
        """Loads the micro-batch of the next forward pass in advance, for example while tensors are on their way."""
        if self._coming and not self._fetched:
            self._fetched.append(work.batch(self._coming[0]))

    def _next_batch(self, work: StepWork) -> Any:
        self._fetch(work)
        self._coming.popleft()
        return self._fetched.pop()

    # ------------------------------------------------------------------ forward

    def _forward(self, work: StepWork, unit: StepUnit, batch: Any, received: Border, sums: StepSums) -> Border:
        j, key = unit.micro_batch, (unit.micro_batch, unit.first, unit.end)
        entered = self._here(received, "activations")
        with nullcontext() if self.kept is None else self.kept.during(key, entered):
            done = self._pass(work, unit, batch, entered, received.specs)
        if unit.end < len(self._layers):
            border = Border(tuple(t.detach() for t in done.tensors), done.specs)
            sent = tuple(map(_Sent.of, done.tensors))
            self._forwards[key] = _Forward(done, done.let_go(), sent)
            return border
        loss, weight = loss_of(done.result), work.weight(j)
        sums.losses[j] = None if loss is None else loss.detach()
        sums.weights[j] = 0.0 if loss is None else weight
        sums.results[j] = _detached(done.result)
        self._forwards[key] = _Forward(done, () if loss is None else (loss * weight,), ())
        return Border(())

    @torch.no_grad()
    def _evaluate(self, work: StepWork, unit: StepUnit, batch: Any, received: Border, sums: StepSums) -> Border:
        done = self._pass(work, unit, batch, self._here(received, "activations"), received.specs)
        if unit.end == len(self._layers):
            sums.results[unit.micro_batch] = _detached(done.result)
        return Border(done.tensors, done.specs)

    def _pass(self, work: StepWork, unit: StepUnit, batch: Any, entered: Sequence[Tensor], specs: str) -> Pass:
        at = work.step, unit.micro_batch
        with self._around():
            return self._layers.run(unit.first, unit.end, batch, entered, specs, at=at, call=work.call)

    def _here(self, border: Border, what: str) -> tuple[Tensor, ...]:
        if None in border.tensors:
            raise StateError(f"{what} came without tensor {border.tensors.index(None)}; expected all of them")
        return tuple(t.to(self._device) for t in border.tensors if t is not None)

    # ------------------------------------------------------------------ backward

    def _backward(self, unit: StepUnit, received: Border) -> Border:
        key = (unit.micro_batch, unit.first, unit.end)
        forward = self._forwards.pop(key)
        gradients: Sequence[Tensor | None] = (None,) * len(forward.roots)
        if unit.end < len(self._layers):
            _refuse_written(unit, forward)
            gradients = self._fitting(received, forward.sent)
        if self.kept is not None:
            self.kept.add(key, [g for g in gradients if g is not None])
        found = forward.done.backward(forward.roots, gradients)
        if self.kept is not None:
            self.kept.remove(key)
        return Border(found)

    def _fitting(self, received: Border, tensors: Sequence[_Sent]) -> tuple[Tensor | None, ...]:
        got = [None if g is None else (g.dtype, tuple(g.shape)) for g in received.tensors]
        sent = [(t.dtype, t.shape) for t in tensors]
        if len(got) != len(sent) or any(g is not None and g != s for g, s in zip(got, sent, strict=True)):
            raise StateError(f"gradients of {got} came for tensors of {sent}; expected the same types and shapes")
        return tuple(None if g is None else g.to(self._device) for g in received.tensors)


def _detached(result: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)


def _refuse_written(unit: StepUnit, forward: _Forward) -> None:
    for at, sent in enumerate(forward.sent):
        if sent.counter._version != sent.version:
            raise UnsupportedError(
                f"tensor {at} that layer {unit.end - 1} passes to layer {unit.end} was written to in place after the "
                "step had gone on; the next stage may have got either value. Write to a copy of it: x = x.clone()"
            )


def loss_of(result: Any) -> Tensor | None:
    """Returns the loss in the result of a user's step; None if the step gives none for this micro-batch.

    Raises:
        ConfigurationError: The result has none, or one of several numbers.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if loss is None and result is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigurationError(
            f"the training step returned {given} for a loss; expected a tensor of one number, a dict with one as "
            "'loss', or None"
        )
    return loss.reshape(())
