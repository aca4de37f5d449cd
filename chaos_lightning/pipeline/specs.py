"""Describes the tensors that stages exchange: their structure, shapes and types, and those of results of earlier
modules.

Theory of operation. A tree of tuples, lists, dicts and plain values is taken apart into its tensors and a *form*, plain
data from which the tree is made again: with tensors that were received, or with placeholders. A placeholder has the
shape and type of what it stands for and the value NaN, or 0 where its type knows no NaN. The text of `Specs` is JSON; a
text that came over a wire is checked before anything is made from it.

A tensor whose elements are dense in another order than the plain one (`channels_last`) keeps its order of dimensions,
since the convolutions behind it are other ones then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chaos_lightning.errors import UnsupportedError, WireError

Form = list[Any]
"""Form of a tree: ["tensor", shape, type, whether it needs a gradient, order of dimensions or null], ["tuple" or
"list", forms], ["dict", names, forms] or ["plain", value].
"""

_MOST_DIMENSIONS, _MOST_BYTES, _DEEPEST = 16, 1 << 40, 32
_PLAIN = (bool, int, float, str, type(None))
_KINDS = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Specs:
    """Description of the tensors that a stage sends, and of the results of modules called before, by which the next
    stage makes placeholders.
    """

    border: Form
    calls: tuple[tuple[str, Form], ...] = ()

    def text(self) -> str:
        """Returns the description as JSON, in which equal forms are stored once."""
        forms: dict[str, int] = {}
        calls = [[name, forms.setdefault(json.dumps(form), len(forms))] for name, form in self.calls]
        return json.dumps({"border": self.border, "calls": calls, "forms": [json.loads(form) for form in forms]})


def read(text: str) -> Specs:
    """Returns the description from its JSON text.

    Raises:
        WireError: The text is none that `Specs.text` makes.
    """
    try:
        found = json.loads(text)
        forms = [_checked(form) for form in found["forms"]]
        calls = tuple((str(name), forms[_index(at, len(forms))]) for name, at in found["calls"])
        return Specs(_checked(found["border"]), calls)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise WireError(f"specs of a border tensor cannot be read: {error!r}") from error


def take_apart(tree: Any, what: str) -> tuple[tuple[Tensor, ...], Form]:
    """Returns the tensors in nested tuples, lists and dicts, and the form (plain data) from which these can be rebuilt.

    Args:
        tree: A tensor, or tuples, lists and dicts of tensors and plain values.
        what: Name of the tree in an error.

    Raises:
        UnsupportedError: The tree holds something else.
    """
    tensors: list[Tensor] = []
    form = _form(tree, tensors, what)
    return tuple(tensors), form


def put_together(form: Form, tensors: Iterator[Tensor]) -> Any:
    """Rebuilds nested tuples, lists and dicts from their form and their tensors in order."""
    kind = form[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return form[1]
    if kind == "dict":
        return dict(zip(form[1], (put_together(each, tensors) for each in form[2]), strict=True))
    return (tuple if kind == "tuple" else list)(put_together(each, tensors) for each in form[1])


def tensor_forms(form: Form) -> list[Form]:
    """Returns the forms of the tensors within a form, in order."""
    if form[0] == "tensor":
        return [form]
    return [each for inner in (form[-1] if form[0] != "plain" else ()) for each in tensor_forms(inner)]


def placeholder(form: Form, device: torch.device) -> Tensor:
    """Returns a tensor with this form's shape and type, filled with NaN, or 0 for types without NaN."""
    kind = _KINDS[form[2]]
    value = math.nan if kind.is_floating_point or kind.is_complex else 0
    return laid_out(torch.full(form[1], value, dtype=kind, device=device), form)


def laid_out(tensor: Tensor, form: Form) -> Tensor:
    """Returns the tensor with the memory layout (order of dimensions) that the form gives."""
    order = form[4]
    if order is None or tensor.is_meta:
        return tensor
    inverse = [order.index(dimension) for dimension in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def fits(tensor: Tensor, form: Form) -> bool:
    """Returns whether a tensor has the shape and type that a form gives."""
    return list(tensor.shape) == form[1] and tensor.dtype == _KINDS[form[2]]


def _form(tree: Any, tensors: list[Tensor], what: str) -> Form:
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.is_quantized:
            raise UnsupportedError(
                f"{what} is a tensor of layout {tree.layout}; only plain dense tensors can be sent on"
            )
        tensors.append(tree)
        return ["tensor", list(tree.shape), str(tree.dtype).removeprefix("torch."), tree.requires_grad, _order(tree)]
    if type(tree) in _PLAIN:
        return ["plain", tree]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, [_form(each, tensors, what) for each in tree]]
    if type(tree) is dict and all(type(key) is str for key in tree):
        return ["dict", list(tree), [_form(each, tensors, what) for each in tree.values()]]
    raise UnsupportedError(
        f"{what} is or holds a {type(tree).__name__}; expected a tensor, or a tuple, list or dict of tensors"
    )


def _order(tensor: Tensor) -> list[int] | None:
    """Returns the dimensions by falling stride if the tensor is dense in that order and not contiguous, such as
    `channels_last`; else None.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return order if tensor.permute(order).is_contiguous() else None


def _index(at: Any, count: int) -> int:
    if type(at) is not int or not 0 <= at < count:
        raise ValueError(f"form {at!r} of {count}")
    return at


def _checked(form: Any, depth: int = 0) -> Form:
    if type(form) is not list or not form or depth > _DEEPEST:
        raise ValueError(f"no form: {str(form)[:80]}")
    match form:
        case ["tensor", list() as shape, str() as kind, bool(), order]:
            _check_tensor(shape, kind, order)
        case ["plain", value] if type(value) in _PLAIN:
            pass
        case ["tuple" | "list", list() as forms]:
            _check_all(forms, depth)
        case ["dict", list() as names, list() as forms] if all(type(n) is str for n in names):
            if len(names) != len(forms):
                raise ValueError(f"{len(names)} names of {len(forms)} values")
            _check_all(forms, depth)
        case _:
            raise ValueError(f"no form: {str(form)[:80]}")
    return form


def _check_all(forms: Sequence[Any], depth: int) -> None:
    for form in forms:
        _checked(form, depth + 1)


def _check_tensor(shape: list[Any], kind: str, order: Any) -> None:
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    if kind not in _KINDS or math.prod(shape) * _KINDS[kind].itemsize > _MOST_BYTES:
        raise ValueError(f"type {kind} and shape {shape}")
    if order is not None and sorted(order) != list(range(len(shape))):
        raise ValueError(f"order {order} of {len(shape)} dimensions")
