"""Converts hyperparameters to texts, which members compare at each step and which replay applies (protocol.md 17,
23).
"""

from __future__ import annotations

import ast
import contextlib
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.collectives.canonical import Words
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.protocol.limits import TEXT_NBYTES, nbytes

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Names of defaults that choose how a step is computed, not which."""
_PLACE = re.compile(r"opt(\d{1,6})\.group(\d{1,6})\.(\w+)")
_INFINITE = "1e999"
"""Literal that Python reads as infinity; it cannot read its own word for it."""


def default_words(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Returns each optimizer's constructor arguments as {"optimizer 0 lr": "0.1", ...}, for the job's fingerprint.

    Schedulers move the groups' values and leave these alone, so a newcomer's are the job's however late it comes.
    Tensors are left out: groups share them, and so schedulers move them, too.
    """
    words = Words(of_machines=False)
    for number, optimizer in enumerate(optimizers):
        for key, value in optimizer.defaults.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if key not in _IMPLEMENTATION and not any(isinstance(part, Tensor) for part in parts):
                words.add(f"optimizer {number}", key, value)
    return words.words


def hyper_words(optimizers: Iterable[Optimizer]) -> str:
    """Returns the parameter groups' numbers, flags and texts, and tuples of these, as one text
    "opt0.group0.lr=0.1;...".

    Callables and tensors with more than one element are left out: they have no short words. `set_hyper` reads this.

    Raises:
        ConfigurationError: The text does not fit into a message.
    """
    words = []
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key in sorted(k for k in group if k != "params" and isinstance(k, str) and k.isidentifier()):
                if text := _literal(group[key]):
                    words.append(f"opt{number}.group{place}.{key}={text}")
    found = ";".join(words)
    if (size := nbytes(found)) > TEXT_NBYTES:
        raise ConfigurationError(
            f"the optimizers' hyperparameters have {size} bytes in words; expected {TEXT_NBYTES} at most: make fewer "
            "parameter groups"
        )
    return found


@torch.no_grad()
def set_hyper(optimizers: Sequence[Optimizer], words: str) -> None:
    """Sets hyperparameters of parameter groups from a text by `hyper_words`; leaves all others as they are.

    A tensor stays the tensor that it is, and is filled: schedulers and groups share it.

    Raises:
        StateError: Words that no `hyper_words` writes, or for a group that is not there.
    """
    for word in words.split(";") if words else ():
        place, _, text = word.partition("=")
        found = _PLACE.fullmatch(place)
        try:
            if found is None or found[3] == "params":
                raise ValueError("it does not say which optimizer, group and key")
            groups = optimizers[int(found[1])].param_groups if int(found[1]) < len(optimizers) else []
            if int(found[2]) >= len(groups):
                raise ValueError(f"there are {len(optimizers)} optimizers here, and {len(groups)} groups in this one")
            group, key = groups[int(found[2])], found[3]
            if key not in group or _literal(group[key]) != text:
                group[key] = _filled(group.get(key), _value(text))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise StateError(f"a committed step's hyperparameter {word[:100]!r} cannot be set here: {error}") from error


@contextlib.contextmanager
def scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Context manager in whose block an optimizer's learning rates are `factor` times what they are before and after.

    Rates that the block itself sets stay. Tensors are replaced for that time, since groups may share one.
    """
    own = [(group, group["lr"]) for group in optimizer.param_groups if factor != 1.0 and "lr" in group]
    used = [rate * factor for _, rate in own]
    for (group, _), rate in zip(own, used, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for (group, before), rate in zip(own, used, strict=True):
            if group["lr"] is rate:
                group["lr"] = before


def _literal(value: object) -> str:
    """Returns the value as a Python literal without ";", the same for equal numbers of any type; "" for unsupported
    values.

    Lists are written as tuples: which of them a configuration file makes is its own business.
    """
    if isinstance(value, Tensor):
        return _literal(value.item()) if value.numel() == 1 else ""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, numbers.Integral):  # of numpy's kind, too
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value)).replace("inf", _INFINITE)
    if isinstance(value, str):
        return repr(str(value)).replace(";", "\\x3b")
    if isinstance(value, tuple | list):
        parts = [_literal(one) for one in value]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})" if all(parts) else ""
    return ""


def _value(text: str) -> object:
    """Parses a literal that `_literal` wrote, without executing anything."""
    value = math.nan if text == "nan" else ast.literal_eval(text)
    if _literal(value) != text:
        raise ValueError(f"{text[:100]!r} is no number, flag, text or tuple of these")
    return value


def _filled(current: object, value: object) -> object:
    """Returns the new value for a hyperparameter; if `current` is a tensor, fills that tensor and returns it."""
    if isinstance(current, Tensor):
        if not isinstance(value, int | float) or current.numel() != 1:
            raise ValueError(f"here it is a tensor of {current.numel()} elements")
        return current.fill_(value)
    if isinstance(current, tuple | list) and isinstance(value, tuple):
        items = value
        if len(current) == len(value):
            items = tuple(_filled(c, v) for c, v in zip(current, value, strict=True))
        return list(items) if isinstance(current, list) else items
    return value
