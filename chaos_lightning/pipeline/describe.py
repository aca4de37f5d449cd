"""Describes the user's model for the planner before training: times and bytes of each layer on this device.

Theory of operation. Bytes of parameters, gradients and optimizer state are counted. Times and the bytes of activations
are measured: the user's step runs a micro-batch forward and backward, several times. It runs as a whole if the state
and what autograd keeps fit the memory of the device; autograd is watched, and the pass given up when it keeps too much.
Else it runs layer by layer, each layer as a stage of its own, and only that layer has memory. Tensors that are absent
have made-up values meanwhile. If a layer does not fit either, it and those behind it are estimated by their parameters,
and a warning says so. Nothing of this leaves a trace in the model (`undo.undone`).

Buffers that all members have are no layer's: they are taken off the device's memory.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.units import amount
from chaos_lightning.pipeline.absent import is_absent, made_up, named_tensors
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.executor import loss_of
from chaos_lightning.pipeline.forward import some_gradients
from chaos_lightning.pipeline.layer_bytes import PassBytes, StateBytes, StateRow, TooMuchKept, gauge_of
from chaos_lightning.pipeline.layer_times import LayerClock, LayerTimer
from chaos_lightning.pipeline.model_profile import LEAST_S
from chaos_lightning.pipeline.optimizer_bytes import OptimizerCosts
from chaos_lightning.pipeline.parts import REST, ModelParts
from chaos_lightning.pipeline.undo import undone
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob

BUDGET_S = 2.0
"""Most seconds for which passes are timed; one pass is timed at least."""
MOST_PASSES = 7
TOLD_EVERY_S = 5.0
"""Seconds between two lines about the progress."""
TOLERANCE = 0.1
"""Share by which the parameters of a layer may differ from those in a profile."""
_USUAL_S_PER_BYTE = 1e-11
"""Seconds per byte of parameters that a sample's forward pass takes in a layer of which nothing was measured."""


def describe(
    chain: LayerChain,
    parts: ModelParts,
    batch: Any,
    optimizers: Sequence[Optimizer],
    *,
    micro_batches: int,
    device: torch.device,
    device_memory_nbytes: int,
    samples: int,
    profile: TrainingJob | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    say: Callable[[str], None] = lambda line: None,
) -> TrainingJob:
    """Returns the description of the model for the planner, with measured layers and this member's device.

    Args:
        chain: The layers. Tensors may be absent, but none is on the meta device.
        parts: Parts of the model.
        batch: A micro-batch, on the device.
        optimizers: The user's optimizers.
        micro_batches: Number of micro-batches in a step.
        device: Device on which the layers run.
        device_memory_nbytes: Memory of the device.
        samples: Number of samples in a micro-batch.
        profile: Measured job whose layers, link rates, overheads and memory rules are taken instead of measuring; None:
            measure.
        around: Function that returns a context for each forward pass (autocast).
        say: Function that gets lines about the progress, if measuring takes long.

    Raises:
        ConfigurationError: The profile is of another model, or what all members have needs more than the memory.
        UnsupportedError: The model cannot be run in stages; says why.
    """
    with undone(chain.root):
        costs = OptimizerCosts(optimizers)
        state = StateBytes.of(_rows(chain, parts, costs), len(chain), lambda i: f"{chain.path}.{i}")
        rest_nbytes = sum(t.nbytes for name, t in _tensors(chain.root) if parts.part_of[name] == REST)
        if rest_nbytes >= device_memory_nbytes:
            raise ConfigurationError(
                f"buffers that all members have need {amount(rest_nbytes)}; the device's memory is "
                f"{amount(device_memory_nbytes)}. Give it more (device_memory)"
            )
        devices = (Device(name="d", memory_nbytes=device_memory_nbytes - rest_nbytes),)
        if profile is not None:
            _check(profile, chain, state, rest_nbytes)
            return replace(profile, devices=devices, links=(), micro_batches=micro_batches, samples=samples)
        measured = _Measurement(chain, parts, batch, costs, state, device, devices[0].memory_nbytes, around, say)
        measured.run()
    layers = tuple(measured.layers(samples))
    return TrainingJob(
        layers=layers, devices=devices, micro_batches=micro_batches, samples=samples, tied_nbytes=state.tied
    )


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter and buffer once, with the first of its names."""
    seen = set[int]()
    for name, _, _, tensor in named_tensors(root):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _rows(chain: LayerChain, parts: ModelParts, costs: OptimizerCosts) -> Iterator[StateRow]:
    for name, tensor in _tensors(chain.root):
        if (part := parts.part_of[name]) != REST:
            gradient_nbytes = tensor.nbytes if tensor.requires_grad else 0
            steps = tensor.requires_grad and name not in parts.unused
            optimizer_nbytes = costs.nbytes(tensor) if steps else 0
            yield StateRow(name, tensor.nbytes, gradient_nbytes, optimizer_nbytes, parts.users[part])


def _check(profile: TrainingJob, chain: LayerChain, state: StateBytes, rest_nbytes: int) -> None:
    """Refuses a profile that was measured on another model."""
    advice = "Measure this model (chaos-lightning profile -- python train.py), or give no profile"
    if len(profile.layers) != len(chain):
        raise ConfigurationError(
            f"the profile has {len(profile.layers)} layers, {profile.layers[0].name!r} to {profile.layers[-1].name!r}; "
            f"{chain.path!r} has {len(chain)} blocks. {advice}"
        )
    for i, layer in enumerate(profile.layers):
        least, most = (1 - TOLERANCE) * state.parameters[i], (1 + TOLERANCE) * (state.parameters[i] + rest_nbytes)
        if not least <= layer.parameter_nbytes <= most:
            raise ConfigurationError(
                f"layer {layer.name!r} of the profile has parameters of {layer.parameter_nbytes} bytes; block {i} of "
                f"{chain.path!r} has {state.parameters[i]}. {advice}"
            )


_Sent = tuple[tuple[Tensor, ...], str]
"""Border tensors, and the text that travels with them."""


class _NoRoomError(Exception):
    """Error that some layers cannot run in this device's memory; gives the reason."""


class _Measurement:
    """Measurement of the seconds and bytes of the layers that fit into this device's memory.

    Args:
        chain: The layers.
        parts: Parts of the model.
        batch: A micro-batch.
        costs: Costs of the optimizers.
        state: Bytes of the training state.
        device: Device on which the layers run.
        memory_nbytes: Memory for layers.
        around: Function that returns a context for each forward pass.
        say: Function that gets lines about the progress.
    """

    def __init__(
        self,
        chain: LayerChain,
        parts: ModelParts,
        batch: Any,
        costs: OptimizerCosts,
        state: StateBytes,
        device: torch.device,
        memory_nbytes: int,
        around: Callable[[], AbstractContextManager[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._chain, self._parts, self._batch, self._costs, self._state = chain, parts, batch, costs, state
        self._memory_nbytes, self._around, self._say = memory_nbytes, around, say
        self._tensors = dict(_tensors(chain.root))
        self._gauge = gauge_of(chain.root, device)
        self._bytes = PassBytes(len(chain), self._gauge)
        self._timer = LayerTimer(chain.blocks, LayerClock(device), path=chain.path)
        self._told_s = time.monotonic()
        self._measured = 0
        self._sent_kept: list[Tensor] = []
        """Tensors that the last layer has sent and keeps itself; the next layer keeps the same memory."""

    def run(self) -> None:
        """Measures as many of the layers as fit into this device's memory."""
        count = len(self._chain)
        self._timer.attach()
        try:
            with suppress(_NoRoomError):  # and let go of what the pass has kept
                self._stretch(range(count), (), "", BUDGET_S)
                self._measured = count
            if not self._measured:
                self._bytes = PassBytes(count, self._gauge)
                self._timer.drop()
                self._one_by_one(count)
        finally:
            self._timer.detach()

    def _one_by_one(self, count: int) -> None:
        received: tuple[Tensor, ...] = ()
        specs = ""
        for layer in range(count):
            try:
                received, specs = self._stretch(range(layer, layer + 1), received, specs, BUDGET_S / count)
            except _NoRoomError as why:
                behind = "" if layer == count - 1 else ", and those behind it,"
                warnings.warn(
                    f"layer {self._timer.name_of(layer)} could not be run here: {why}. What it costs{behind} is "
                    "estimated by the bytes of parameters; give a profile (chaos-lightning profile) for better plans",
                    stacklevel=2,
                )
                return
            self._measured = layer + 1
            self._bytes.entered[layer + 1] = sum(t.nbytes for t in received)
            self._progress(f"{self._measured} of {count} layers are measured, one by one")

    def _stretch(self, layers: range, received: Sequence[Tensor], specs: str, budget_s: float) -> _Sent:
        """Measures some consecutive layers by running them several times; returns the tensors that they pass on.

        Args:
            layers: Layers to run.
            received: Tensors that the first of these layers receives.
            specs: Text that came with the received tensors.
            budget_s: Seconds that may be spent on timing.

        Raises:
            _NoRoomError: The layers cannot run here; says why.
        """
        owned, state = self._parts.owned_by(layers), self._state
        tensors = [t for name, t in self._tensors.items() if self._parts.part_of[name] in owned]
        needed = sum(state.parameters[i] + state.gradients[i] for i in layers)
        left = self._memory_nbytes - needed
        if left <= 0:
            raise _NoRoomError(f"parameters and gradients need {amount(needed)} of {amount(self._memory_nbytes)}")
        absent = any(map(is_absent, tensors))
        try:
            with made_up(tensors):
                return self._passes(layers, left, received, specs, budget_s)
        except TooMuchKept:
            raise _NoRoomError(f"a micro-batch keeps more than the {amount(left)} that its state leaves") from None
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _NoRoomError(f"it runs out of memory ({error})") from None
        except Exception as error:
            if not absent or isinstance(error, ChaosError):
                raise
            raise _NoRoomError(f"with made-up values it raises {type(error).__name__}: {error}") from None

    def _passes(
        self, layers: range, most_nbytes: int, received: Sequence[Tensor], specs: str, budget_s: float
    ) -> _Sent:
        """Runs some layers repeatedly: first within a limit on kept bytes, then to count bytes, then to measure
        times.
        """
        state = [*self._tensors.values(), *(t for t in received if any(t is x for x in self._sent_kept))]
        guard = PassBytes(len(self._chain), None)
        guard.begin(state, layers.start, most_nbytes)
        try:
            self._pass(layers, received, specs, guard, counts=None)
            self._bytes.begin(state, layers.start)
            self._timer.watch = self._bytes.watch
            sent = self._pass(layers, received, specs, self._bytes, counts=False)
            self._sent_kept = [t for t in sent[0] if self._bytes.keeps(t)]
        finally:
            self._timer.watch = None
            guard.ends()
            self._bytes.ends()
        began = time.monotonic()
        for number in range(MOST_PASSES):
            if number and time.monotonic() - began > budget_s:
                break
            self._pass(layers, received, specs, None, counts=True)
            if len(layers) > 1:
                self._progress(f"{number + 1} passes of all layers are timed")
        return sent

    def _pass(
        self,
        layers: range,
        received: Sequence[Tensor],
        specs: str,
        watching: PassBytes | None,
        counts: bool | None,
    ) -> _Sent:
        """Runs some layers forward and backward once; returns the tensors that they pass on.

        Args:
            layers: Layers to run.
            received: Tensors that the first of these layers receives.
            specs: Text that came with the received tensors.
            watching: Counter of the bytes that autograd keeps.
            counts: Whether the times of this pass count; None: it is not timed.
        """
        timed = None if counts is None else self._timer.begin(layers.start, layers.stop, counts=counts)
        try:
            with self._around():
                unit = self._chain.run(layers.start, layers.stop, self._batch, received, specs)
            if timed is not None:
                timed.forward_ends()
            if watching is not None:
                watching.forward_ends()
            sent = tuple(t.detach() for t in unit.tensors), unit.specs
            loss = loss_of(unit.result) if layers.stop == len(self._chain) else None
            roots = unit.tensors if loss is None else (loss,)
            gradients = some_gradients(roots) if loss is None else (None,)
            if timed is not None:
                timed.backward_begins()
            unit.backward(roots, gradients)
            if timed is not None:
                timed.ends()
            return sent
        finally:
            if timed is not None:
                self._timer.leave(timed)
            for parameter in self._chain.root.parameters():
                parameter.grad = None

    def _progress(self, words: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s > TOLD_EVERY_S:
            self._told_s = now_s
            self._say(f"the model is measured for the planner: {words}")

    # ------------------------------------------------------------------------------------------------ its answer

    def layers(self, samples: int) -> Iterator[Layer]:
        """Yields the costs of each layer.

        Args:
            samples: Number of samples in a micro-batch.
        """
        times, state, bytes_, optimizer_s = self._timer.medians(), self._state, self._bytes, self._optimizer_s()
        known = range(self._measured)
        weights = max(1, sum(state.parameters[i] for i in known))
        seconds = [sum(times[i][k] for i in known) / weights for k in (0, 1)] if known else [0.0, 0.0]
        kept = sum(bytes_.kept[i] for i in known) / weights if known else 1.0
        if not any(seconds):
            seconds = [_USUAL_S_PER_BYTE * samples, 2 * _USUAL_S_PER_BYTE * samples]
        output_nbytes = bytes_.entered[self._measured]
        for i in range(len(self._chain)):
            forward, backward = times[i] if i in known else [rate * state.parameters[i] for rate in seconds]
            last = i == len(self._chain) - 1
            yield Layer(
                name=self._timer.name_of(i), forward_s=max(LEAST_S, forward), backward_s=max(LEAST_S, backward),
                parameter_nbytes=state.parameters[i], gradient_nbytes=state.gradients[i],
                optimizer_nbytes=state.optimizer[i],
                activation_nbytes=bytes_.kept[i] if i in known else round(kept * state.parameters[i]),
                workspace_nbytes=bytes_.workspace[i],
                output_nbytes=0 if last else bytes_.entered[i + 1] if i in known else output_nbytes,
                optimizer_s=optimizer_s[i],
            )  # fmt: skip

    def _optimizer_s(self) -> Mapping[int, float]:
        found = defaultdict[int, float](float)
        for name, tensor in self._tensors.items():
            if tensor.requires_grad and name not in self._parts.unused:
                for layer in self._parts.users[self._parts.part_of[name]]:
                    found[layer] += self._costs.seconds(tensor)
        return found
