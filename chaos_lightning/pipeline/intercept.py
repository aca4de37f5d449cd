"""Intercepts the calls of single modules of a model, so that a substitute function can answer them.

Theory of operation. The module gets a class of its own, derived from its class, with another `__call__`; torch's own
`fully_shard` does the like. Hooks, activation checkpointing and `torch.compile` of the module lie within that call.
Copies and pickles are of the user's class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from torch import nn

from chaos_lightning.errors import ConfigurationError, UnsupportedError

Call = Callable[..., Any]


class Substitute(Protocol):
    """Function that answers a module's calls; `real` is the module's own call."""

    def __call__(self, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_ANSWERS: WeakKeyDictionary[nn.Module, Substitute] = WeakKeyDictionary()


def intercept(module: nn.Module, name: str, answer: Substitute) -> None:
    """Redirects the calls of a module to the function `answer`.

    Args:
        module: The module.
        name: Name of the module in an error.
        answer: Function that answers the calls.

    Raises:
        ConfigurationError: Another function answers the module's calls already.
        UnsupportedError: The module's class cannot be derived from.
    """
    if module in _ANSWERS:
        raise ConfigurationError(f"{name} belongs to a chain already: close that one first")
    try:
        object.__setattr__(module, "__class__", _intercepting(cast(Hashable, type(module))))
    except TypeError as error:
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}, whose calls cannot be intercepted ({error}); give a plain nn.Module"
        ) from error
    _ANSWERS[module] = answer


def release(module: nn.Module) -> None:
    """Ends the interception of a module by restoring its class."""
    del _ANSWERS[module]
    object.__setattr__(module, "__class__", type(module).__mro__[1])


def _made_anew(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    return kind.__new__(kind, *arguments)


@cache
def _intercepting(kind: Any) -> type[nn.Module]:
    """Returns a subclass of `kind` whose calls go to the substitute; copies and pickles of its objects are of class
    `kind`.
    """

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = _ANSWERS.get(self)
        if answer is None:
            return kind.__call__(self, *args, **kwargs)
        return answer(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:
        made, arguments, *more = kind.__reduce_ex__(self, max(protocol, 2))  # type: ignore[misc]
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            made, arguments = _made_anew, (kind, *arguments[1:])
        return (kind if made is type(self) else made), arguments, *more

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"__call__": __call__, "__reduce_ex__": __reduce_ex__, **names})
