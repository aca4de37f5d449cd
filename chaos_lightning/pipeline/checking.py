"""Compares a model that is run in stages with the whole, once, before training.

Theory of operation. The whole model is here. It runs one micro-batch as one stage, and then in stages, each of which
has only what its owner has: the rest stands in with NaN. Loss, gradients and changed buffers must be the same: on the
CPU bit for bit, but for parameters of several layers, whose gradients are sums in another order; elsewhere as near as
kernels keep to. So what leaves a block by another way than its output, as router losses do, is found. Gradients and
buffers are as before then; what else a step changes, such as metrics, is the caller's to undo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.pipeline.absent import named_tensors, stand_in
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.executor import loss_of
from chaos_lightning.pipeline.parts import ModelParts

SUM_TOLERANCE = 1e-5
"""Largest difference of a sum in another order, by the largest element."""
DEVICE_TOLERANCE = 1e-3
"""Largest difference on an accelerator, by the largest element."""


class _Outcome(NamedTuple):
    loss: Tensor | None
    tensors: dict[str, Tensor]
    """Gradients and buffers, by what they are and the name."""


def check_cut(
    chain: LayerChain, parts: ModelParts, batch: Any, cuts: Sequence[int] | None = None, *, at: tuple[int, int] = (0, 0)
) -> float | None:
    """Compares; returns the loss.

    Args:
        chain: The layers, all of which are real here.
        parts: Parts of the model.
        batch: A micro-batch.
        cuts: First layers of the stages but the first one; None: each layer is a stage.
        at: Step and micro-batch, for random numbers.

    Raises:
        UnsupportedError: The stages give something else; names it.
    """
    bounds = [0, *(range(1, len(chain)) if cuts is None else cuts), len(chain)]
    gradients = {p: p.grad for p in chain.root.parameters()}
    with _buffers(chain.root) as restore:
        try:
            whole = _run(chain, parts, batch, [0, len(chain)], at)
            restore()
            cut = _run(chain, parts, batch, bounds, at)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
    differing = _differing(whole, cut, parts)
    if differing:
        shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise UnsupportedError(
            f"run in {len(bounds) - 1} stages the step gives something else than as a whole: {shown}. Something leaves "
            f"a block of {chain.path} by another way than its output, such as a loss that it keeps, or a hook: return "
            "it with the output, as a tuple of tensors"
        )
    return None if whole.loss is None else float(whole.loss)


def _run(chain: LayerChain, parts: ModelParts, batch: Any, bounds: Sequence[int], at: tuple[int, int]) -> _Outcome:
    for parameter in chain.root.parameters():
        parameter.grad = None
    units = []
    received: tuple[Tensor, ...] = ()
    specs = ""
    for first, end in pairwise(bounds):
        with _alone(chain.root, parts, range(first, end)):
            unit = chain.run(first, end, batch, received, specs, at=at)
        received, specs = tuple(t.detach() for t in unit.tensors), unit.specs
        units.append((unit, range(first, end)))
    loss = loss_of(units[-1][0].result)
    gradients: tuple[Tensor | None, ...] = (None,)
    for unit, layers in reversed(units if loss is not None else []):
        roots = unit.tensors if loss is None else unit.tensors or (loss,)
        with _alone(chain.root, parts, layers):
            gradients = unit.backward(roots, gradients)
    return _Outcome(None if loss is None else loss.detach(), _state(chain.root))


def _state(root: nn.Module) -> dict[str, Tensor]:
    found = {f"gradient of {n}": p.grad.clone() for n, p in root.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": b.clone() for n, b in root.named_buffers()}


def _differing(whole: _Outcome, cut: _Outcome, parts: ModelParts) -> list[str]:
    """Returns in words what differs."""
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
    """Within it all that an owner of these layers has not stands in with NaN."""
    owned = parts.owned_by(layers)
    left = {id(t): (t, t.data) for name, _, _, t in named_tensors(root) if parts.part_of[name] not in owned}
    for tensor, data in left.values():
        tensor.data = stand_in(data, data.device)
    try:
        yield
    finally:
        for tensor, data in left.values():
            tensor.data = data


@contextmanager
def _buffers(root: nn.Module) -> Iterator[Any]:
    """Yields a function that gives buffers their values back, and does so in the end."""
    before = [(module, name, t, t.clone()) for _, module, name, t in named_tensors(root) if name in module._buffers]

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, value in before:
                buffer.copy_(value)
                module._buffers[name] = buffer

    try:
        yield restore
    finally:
        restore()
