"""Checks once, before training, that a model run in stages gives the same results as the whole model.

Theory of operation. The whole model runs one micro-batch as one stage, and then in stages, each of which has only what
its owner has: the rest stands in with NaN. Loss, gradients and changed buffers must be the same: on the CPU bit for
bit, but for parameters of several layers, whose gradients are sums in another order; elsewhere as near as kernels keep
to. So what leaves a block by another way than its output, as router losses do, is found.

Where the whole has no room, stretches of four layers, or as many as have room, are compared with two stages: the first
one, the last one, and one for each other row of classes that so many blocks in a row have. Only one stretch has memory
at a time; between stretches the micro-batch passes layer by layer. Values of tensors that are absent are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chaos_lightning.errors import ChaosError, UnsupportedError
from chaos_lightning.pipeline.absent import is_absent, made_up, named_tensors, stand_in
from chaos_lightning.pipeline.base import BaseBuffers
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.executor import loss_of
from chaos_lightning.pipeline.find_chain import kind_of
from chaos_lightning.pipeline.forward import ForwardUnit, some_gradients
from chaos_lightning.pipeline.parts import ModelParts
from chaos_lightning.pipeline.undo import undone
from chaos_lightning.planning.pipelines.job import Costs, TrainingJob

SUM_TOLERANCE = 1e-5
"""Largest difference of a sum in another order, relative to the largest element."""
DEVICE_TOLERANCE = 1e-3
"""Largest difference on an accelerator, relative to the largest element."""
_STRETCH = 4
_UNCOMPARED = "the step in stages was not compared with the whole"
_At = tuple[int, int]


class _Received(NamedTuple):
    """Tensors and specs that the layers before a stage have sent to it."""

    tensors: tuple[Tensor, ...] = ()
    specs: str = ""


class _Outcome(NamedTuple):
    loss: Tensor | None
    tensors: dict[str, Tensor]
    """Gradients, buffers, and tensors that leave the stretch, by their kind and name."""


def check_before_training(chain: LayerChain, parts: ModelParts, batch: Any, job: TrainingJob) -> str:
    """Compares stages with the whole, for as many layers at once as the device's memory allows; returns in words what
    was compared.

    Args:
        chain: The layers; tensors may be absent.
        parts: Parts of the model.
        batch: A micro-batch.
        job: Description of the job (`describe`): costs of layers, and the device.

    Raises:
        UnsupportedError: The stages give something else; names it.
    """
    absent = any(is_absent(tensor) for *_, tensor in named_tensors(chain.root))
    try:
        return _compare_what_fits(chain, parts, batch, job)
    except (torch.OutOfMemoryError, MemoryError) as error:
        why = f"it runs out of memory ({error})"
    except Exception as error:
        if not absent or isinstance(error, ChaosError):
            raise
        why = f"with made-up values it raises {type(error).__name__}: {error}"
    return f"{_UNCOMPARED}: {why}"


def _compare_what_fits(chain: LayerChain, parts: ModelParts, batch: Any, job: TrainingJob) -> str:
    memory_nbytes, costs, count = job.devices[0].memory_nbytes, job.costs, len(chain)
    if _needed_nbytes(costs, range(count)) <= memory_nbytes:
        check_cut(chain, parts, batch)
        return f"the step gives the same in {count} stages as in one"
    for most in range(_STRETCH, 1, -1):
        if all(_needed_nbytes(costs, stretch) <= memory_nbytes for stretch in _stretches(chain, most)):
            number = len(check_stretches(chain, parts, batch, most))
            return f"the step gives the same in stages; compared at {number} borders, as the whole has no room here"
    return f"{_UNCOMPARED}: two layers have no room here"


def _needed_nbytes(costs: Costs, layers: range) -> int:
    """Returns the bytes of memory for a comparison of these layers; gradients count twice, of the whole and of the
    stages.
    """
    sums = ((costs.parameters, 1), (costs.gradients, 2), (costs.activations, 1))
    needed = sum(factor * (found[layers.stop] - found[layers.start]) for found, factor in sums)
    return needed + costs.workspace(layers.start, layers.stop)


def check_cut(
    chain: LayerChain, parts: ModelParts, batch: Any, cuts: Sequence[int] | None = None, *, at: _At = (0, 0)
) -> float | None:
    """Compares a run of the whole model with one in stages; returns the loss.

    Args:
        chain: The layers. There is memory for all of them.
        parts: Parts of the model.
        batch: A micro-batch.
        cuts: First layers of the stages but the first one; None: each layer is a stage.
        at: Step and micro-batch, for random numbers.

    Raises:
        UnsupportedError: The stages give something else; names it.
    """
    bounds = [0, *(range(1, len(chain)) if cuts is None else cuts), len(chain)]
    with undone(chain.root) as restore:
        whole = _compare(chain, parts, batch, bounds, at, _Received(), restore)
    return None if whole.loss is None else float(whole.loss)


def check_stretches(
    chain: LayerChain, parts: ModelParts, batch: Any, most: int = _STRETCH, *, at: _At = (0, 0)
) -> list[range]:
    """Compares some consecutive layers at a time, for a model too large for this machine; returns which ones.

    Args:
        chain: The layers; tensors may be absent.
        parts: Parts of the model.
        batch: A micro-batch.
        most: Layers of a stretch.
        at: Step and micro-batch, for random numbers.

    Raises:
        UnsupportedError: The stages give something else; names it.
    """
    stretches = _stretches(chain, most)
    with undone(chain.root) as restore:
        reached, received = 0, _Received()
        for stretch in stretches:
            for layer in range(reached, stretch.start):
                with _made_up(chain, parts, range(layer, layer + 1), restore):
                    unit = chain.run(layer, layer + 1, batch, *received, at=at)
                received = _Received(tuple(t.detach() for t in unit.tensors), unit.specs)
            reached = stretch.start
            bounds = [stretch.start, stretch.start + max(1, len(stretch) // 2), stretch.stop]
            if len(stretch) > 1:
                _compare(chain, parts, batch, bounds, at, received, restore)
    return stretches


def _stretches(chain: LayerChain, most: int) -> list[range]:
    """Returns the runs of consecutive layers to compare, in order, each of at most `most` layers."""
    kinds = [kind_of(block) for block in chain.blocks]
    last = max(0, len(kinds) - most)
    found, seen = [], set[tuple[str, ...]]()
    for first in range(last + 1):
        row = tuple(kinds[first : first + most])
        if row not in seen or first == last:
            seen.add(row)
            found.append(range(first, min(first + most, len(kinds))))
    return found


def _compare(
    chain: LayerChain,
    parts: ModelParts,
    batch: Any,
    bounds: Sequence[int],
    at: _At,
    received: _Received,
    restore: Callable[[], None],
) -> _Outcome:
    """Runs some layers at once and then in stages; refuses stages whose results differ."""
    with _made_up(chain, parts, range(bounds[0], bounds[-1]), restore) as put_back:
        whole = _run(chain, parts, batch, [bounds[0], bounds[-1]], at, received)
        put_back()
        cut = _run(chain, parts, batch, bounds, at, received)
    differing = _differing(whole, cut, parts)
    if differing:
        shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
        partly = "" if bounds[-1] - bounds[0] == len(chain) else f" (layers {bounds[0]} to {bounds[-1] - 1})"
        raise UnsupportedError(
            f"run in {len(bounds) - 1} stages the step{partly} gives something else than as a whole: {shown}. "
            f"Something leaves a block of {chain.path} by another way than its output, such as a loss that it keeps, "
            "or a hook: return it with the output, as a tuple of tensors"
        )
    return whole


def _run(
    chain: LayerChain, parts: ModelParts, batch: Any, bounds: Sequence[int], at: _At, received: _Received
) -> _Outcome:
    for parameter in chain.root.parameters():
        parameter.grad = None
    units: list[tuple[ForwardUnit, range]] = []
    for first, end in pairwise(bounds):
        with _alone(chain.root, parts, range(first, end)):
            unit = chain.run(first, end, batch, *received, at=at)
        received = _Received(tuple(t.detach() for t in unit.tensors), unit.specs)
        units.append((unit, range(first, end)))
    last = units[-1][0]
    loss = loss_of(last.result) if bounds[-1] == len(chain) else None
    gradients: tuple[Tensor | None, ...] = (None,) if loss is not None else some_gradients(last.tensors)
    for done, layers in reversed(units if gradients else []):
        roots = done.tensors if loss is None else done.tensors or (loss,)
        with _alone(chain.root, parts, layers):
            gradients = done.backward(roots, gradients)
    found = {f"output {i}": t for i, t in enumerate(received.tensors)}
    found |= {f"gradient of input {i}": t for i, t in enumerate(gradients) if t is not None and bounds[0]}
    for name, parameter in chain.root.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    return _Outcome(None if loss is None else loss.detach(), found | _buffers(chain.root))


def _buffers(root: nn.Module) -> dict[str, Tensor]:
    return {f"buffer {name}": buffer.clone() for name, buffer in root.named_buffers() if not is_absent(buffer)}


@contextmanager
def _made_up(
    chain: LayerChain, parts: ModelParts, layers: range, restore: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Gives made-up values to absent tensors that an owner of these layers would have, while the block runs.

    Yields:
        A function that puts buffers and attributes back; that is done at the end, too.
    """
    owned = parts.owned_by(layers)
    with made_up(t for name, _, _, t in named_tensors(chain.root) if parts.part_of[name] in owned):
        buffers = BaseBuffers(chain.root)
        buffers.remember()

        def put_back() -> None:
            restore()
            buffers.restore()

        try:
            yield put_back
        finally:
            put_back()


def _differing(whole: _Outcome, cut: _Outcome, parts: ModelParts) -> list[str]:
    """Returns in words the results that differ between the whole and the stages."""
    found = []
    pairs = {name: (whole.tensors.get(name), cut.tensors.get(name)) for name in {**whole.tensors, **cut.tensors}}
    for name, (one, other) in {"loss": (whole.loss, cut.loss), **pairs}.items():
        part = parts.part_of.get(name.rpartition(" ")[2], "")
        if one is None or other is None:
            if one is not other:
                found.append(f"the {name} is there only {'in stages' if one is None else 'as a whole'}")
            continue
        allowed = SUM_TOLERANCE if part.startswith("shared.") else 0.0
        allowed = DEVICE_TOLERANCE if one.device.type != "cpu" else allowed
        if not _alike(one, other, allowed):
            found.append(f"the {name} is {_shown(other, one)}")
    return found


def _alike(one: Tensor, other: Tensor, allowed: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan()):
        return True
    if not allowed:
        return False
    scale = float(one.abs().max())
    return float((one - other).abs().max()) <= allowed * scale  # false for NaN


def _shown(other: Tensor, one: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"of {other.dtype} and {tuple(other.shape)}, not {one.dtype} and {tuple(one.shape)}"
    if not one.is_floating_point():
        return f"different in {int((one != other).sum())} elements"
    if one.numel() == 1 and other.numel() == 1:
        return f"{float(other):.6g}, not {float(one):.6g}"
    scale = float(one.double().abs().max()) or 1.0
    return f"off by {float((one.double() - other.double()).abs().max()) / scale:.1e} of its largest element"


@contextmanager
def _alone(root: nn.Module, parts: ModelParts, layers: range) -> Iterator[None]:
    """Replaces all tensors that an owner of these layers would lack by NaN stand-ins while the block runs."""
    owned = parts.owned_by(layers)
    left = {id(t): (t, t.data) for name, _, _, t in named_tensors(root) if parts.part_of[name] not in owned}
    for tensor, data in left.values():
        tensor.data = stand_in(data, data.device)
    try:
        yield
    finally:
        for tensor, data in left.values():
            tensor.data = data
