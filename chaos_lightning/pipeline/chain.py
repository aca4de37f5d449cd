"""Runs some consecutive layers of a model by running the user's own step with all other layers replaced.

Theory of operation. A *chain* is a model's blocks in order, an `nn.Sequential` or an `nn.ModuleList`. *Layer* i is its
block i with what the step does between the calls of block i and block i + 1; layer 0 has what runs before the chain,
too, and the last layer what runs after it. A *stage* runs the layers [first, end) for one micro-batch:

- blocks before `first`, and other modules with parameters that are called before block `first` is, return placeholders;
- block `first` takes what the stage before has sent in place of its first argument. Its other arguments are computed
  here, from the batch;
- the step ends where block `end` is called: its first argument is what is sent on. The last stage runs to the end.

A module with `chaos_before(batch)` and `chaos_after(x, batch)` is run by those instead: a stage then runs nothing that
stands before it, and needs no placeholders.

Modules are intercepted once for all stretches, at their outermost calls. Blocks count their calls in forward passes
only: activation checkpointing calls them again in backward.

The stages before saw which placeholders a stage makes, and of what shapes: that travels as `Specs`. Placeholders are
NaN. In the first pass of a stretch a `Taint` follows them and refuses what depends on them. Later only values are
looked at: NaN in what is sent on or returned has the unit run again under a `Taint`, which tells NaN of the user's own
from that of placeholders.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointFunction

from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.forward import ForwardUnit
from chaos_lightning.pipeline.intercept import Call, intercept, release
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.specs import Form, Specs, placeholder, put_together, read, take_apart, tensor_forms
from chaos_lightning.pipeline.taint import Taint, has_nan, listed

Step = Callable[[Any], Any]

_ADVICE = (
    "A stage gets nothing from the stages before but the first argument of its first block: pass what later layers "
    "need in that argument, as a tuple of tensors; or give chaos_before(batch) and chaos_after(x, batch)"
)


class _Place(NamedTuple):
    """Module whose calls are intercepted, with its place in the chain of blocks."""

    name: str
    block: int | None
    """Number of the block; None: the module is outside of the chain."""
    argument: str = ""
    """Name of the first argument that a block takes."""


class _Left(BaseException):
    """Exception that ends a step where the next stage's first block is called; user code's `except Exception` does not
    catch it.
    """


class LayerChain:
    """Layers of a model, any consecutive ones of which can run by themselves.

    Args:
        root: The user's module.
        path: Name of the chain within it.
        call: Runs the user's step on one micro-batch.
        randomness: Gives each layer its own random numbers; None: they are drawn as they come.

    Raises:
        ConfigurationError: There is no chain of that name.
        UnsupportedError: The chain cannot be run in stretches; says why.
    """

    def __init__(self, root: nn.Module, path: str, call: Step, *, randomness: Randomness | None = None) -> None:
        self.root, self.path = root, path
        self.blocks = chain_blocks(root, path)
        self._call = call
        self._hands = _hands(root)
        self._randomness = randomness
        self._unit: ForwardUnit | None = None
        self._proven: set[tuple[Step, int, int]] = set()
        self._own: set[tuple[Step, int, int]] = set()
        """Stretches whose NaN was found to be the user's own."""
        self._intercepted: list[nn.Module] = []
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context that is entered around a pass that only repeats another one, to look at it: user code must leave no
        trace there.
        """
        for index, block in enumerate(self.blocks):
            self._intercept(block, _Place(f"{path}.{index}", index, _first_parameter(block)))
        for name, module in outside_modules(root, path):
            self._intercept(module, _Place(name, None))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def layer_under_way(self) -> int:
        """Number of the layer whose part of the step is running."""
        return 0 if self._unit is None else max(self._unit.due - 1, 0)

    @property
    def is_last(self) -> bool:
        """Whether the running unit includes the last layer, so that the user's step runs to its end."""
        return self._unit is not None and self._unit.end == len(self.blocks)

    def close(self) -> None:
        """Ends the interception of the model's modules."""
        for module in self._intercepted:
            release(module)
        self._intercepted.clear()

    def run(
        self,
        first: int,
        end: int,
        batch: Any,
        received: Sequence[Tensor] = (),
        specs: str = "",
        *,
        at: tuple[int, int] = (0, 0),
        call: Step | None = None,
    ) -> ForwardUnit:
        """Runs the layers [first, end) of one micro-batch.

        Args:
            first: First layer; other than 0, it takes what was received.
            end: Layer behind the last one that runs.
            batch: The micro-batch, as each stage has it.
            received: The tensors that a unit of the layers before has made, on this device.
            specs: Text that came with the received tensors.
            at: Numbers of the step and of the micro-batch in it, for random numbers.
            call: Step of another kind than training's, such as a validation's; the same object each time.

        Raises:
            UnsupportedError: The step cannot be run so; names the blocks.
            StateError: The received tensors do not fit their specs.
            WireError: The specs cannot be read.
        """
        if not 0 <= first < end <= len(self.blocks):
            raise ConfigurationError(f"layers {first} to {end - 1} of {self.path}, which has {len(self.blocks)}")
        call = call or self._call
        sent = read(specs) if first else Specs(["plain", None])
        span = (call, first, end)
        partly = end - first < len(self)
        watched = partly and span not in self._proven
        unit = self._pass(span, batch, received, sent, at, self._taint(deep=False) if watched else None)
        self._proven.add(span)
        out = unit.tensors if unit.left else unit.result
        if partly and span not in self._own and not has_nan(received) and has_nan(out):
            with torch.no_grad(), self.aside():
                self._pass(span, batch, received, sent, at, self._taint(deep=True))
            self._own.add(span)
        return unit

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Returns a context in which random numbers come from a stream of their own; after it, the generators are as
        before.
        """
        return (self._randomness or Randomness(0)).stream(name)

    @contextmanager
    def under_way(self, unit: ForwardUnit) -> Iterator[None]:
        """Assigns the calls of blocks to this unit while the block of code runs."""
        before, self._unit = self._unit, unit
        try:
            yield
        finally:
            self._unit = before

    def refuse_placeholders(self, value: Any, what: str) -> None:
        """Refuses a value, called `what` in the error, if it depends on placeholders for other stages' results; checked
        in a stage's first pass.
        """
        if self._unit is not None:
            self._refuse_tainted(self._unit, value, what)

    def _pass(
        self,
        span: tuple[Step, int, int],
        batch: Any,
        received: Sequence[Tensor],
        specs: Specs,
        at: tuple[int, int],
        taint: Taint | None,
    ) -> ForwardUnit:
        call, first, end = span
        unit = ForwardUnit(self.under_way, first, end, at)
        if first:
            unit.enter(received, specs)
        unit.taint, by_hand = taint, self._hands is not None and call is self._call
        with self.under_way(unit), self._stream(unit, ""), taint or nullcontext():
            try:
                unit.result = self._by_hand(unit, batch) if by_hand else call(batch)
            except _Left:
                pass
            except RuntimeError as error:
                if "refers to a single memory location" not in str(error):
                    raise
                raise UnsupportedError(
                    f"the step writes to a parameter or buffer that this stage, layers {first} to {end - 1}, does not "
                    f"have: {error}. Write to it in a module that is called, or behind the chain"
                ) from error
            else:
                self._refuse_unfinished(unit)
                self._refuse_tainted(unit, unit.result, "what the step returns")
        if unit.left:
            unit.specs = Specs(unit.border, tuple(unit.calls)).text()
        unit.taint, unit.calls = None, unit.calls[: unit.given]
        return unit

    def _intercept(self, module: nn.Module, place: _Place) -> None:
        intercept(module, place.name, partial(self._called, place))
        self._intercepted.append(module)

    def _by_hand(self, unit: ForwardUnit, batch: Any) -> Any:
        """Runs a step that the user has split into `chaos_before` and `chaos_after`, from this stage's first
        block on.
        """
        assert self._hands is not None
        before, after = self._hands
        unit.due, unit.given = unit.first, len(unit.calls)
        x = None if unit.first else before(batch)
        for block in self.blocks[unit.first :]:
            x = block(x)
        return after(x, batch)

    def _taint(self, *, deep: bool) -> Taint:
        """Returns a mode that finds out which results depend on tensors that this member does not own."""
        taint = Taint(deep=deep)
        for name, _, _, tensor in named_tensors(self.root):
            if is_absent(tensor) and not tensor.is_meta:
                taint.mark(tensor, frozenset((name,)))
        return taint

    # --- calls of modules

    def _called(self, place: _Place, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of an intercepted module: runs it, returns a placeholder, or ends the step."""
        unit = self._unit
        if unit is None and torch._C._current_graph_task_id() != -1:
            raise StateError(
                f"{place.name} is called in a backward pass that is none of a unit's, so it would not know what it was "
                "sent; expected ForwardUnit.backward, or backward_pass around it"
            )
        if unit is None:
            self._refuse_absent(place)
        if unit is None or unit.inside:
            return real(*args, **kwargs)
        if unit.again:
            return self._call_again(unit, place, real, args, kwargs)
        if place.block is None:
            return self._call_outside(unit, place.name, real, args, kwargs)
        self._count(unit, place.block)
        if place.block == unit.end:
            self._leave(unit, place, args, kwargs)
        if place.block < unit.first:
            return self._placeholder(unit, place.name)
        return self._call_block(unit, place, real, args, kwargs)

    def _call_block(
        self, unit: ForwardUnit, place: _Place, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if _in_reentrant_checkpoint():
            raise UnsupportedError(
                f"{place.name} is called within a reentrant torch.utils.checkpoint.checkpoint, which has no gradient "
                "for what another stage sends; call it with use_reentrant=False"
            )
        if place.block == unit.first and unit.first:
            self._refuse_uncalled(unit)
            _, args, kwargs = _first_argument(place, args, kwargs, unit.entered)
        self._refuse_tainted(unit, (args, kwargs), f"an argument of {place.name}")
        unit.inside += 1
        try:
            with self._stream(unit, place.name):
                out = self._real(unit, real, args, kwargs)
        except Exception as error:
            error.add_note(f"This was raised in {place.name}.")
            raise
        finally:
            unit.inside -= 1
        if unit.end < len(self.blocks):
            unit.calls.append((place.name, take_apart(out, f"what {place.name} returns")[1]))
        return out

    def _call_outside(
        self, unit: ForwardUnit, name: str, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handles a call of a module outside of the chain: runs it if it comes after the stage's first block or in the
        first stage, else returns a placeholder.
        """
        if unit.first and unit.due <= unit.first:
            following = unit.calls[unit.given][0] if unit.given < len(unit.calls) else ""
            if following.startswith(f"{name}."):
                return real(*args, **kwargs)  # what it returned could not be sent on, but what its own modules did
            return self._placeholder(unit, name)
        number = unit.counts[name] = unit.counts.get(name, 0) + 1
        begin = len(unit.calls)
        with self._stream(unit, name, number):
            out = self._real(unit, real, args, kwargs)
        if unit.end < len(self.blocks):
            try:
                unit.calls[begin:] = [(name, take_apart(out, f"what {name} returns")[1])]
            except UnsupportedError:
                if len(unit.calls) == begin:
                    raise
        return out

    def _real(self, unit: ForwardUnit, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if unit.taint is None:
            return real(*args, **kwargs)
        return unit.taint.through((args, kwargs), lambda: real(*args, **kwargs))

    def _call_again(
        self, unit: ForwardUnit, place: _Place, real: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handles a call that activation checkpointing repeats within a backward pass."""
        if place.block is None:
            forms = dict(unit.calls)
            return self._made(unit, place.name, forms[place.name]) if place.name in forms else real(*args, **kwargs)
        if place.block < unit.first:
            return self._made(unit, place.name, dict(unit.calls)[place.name])
        if place.block >= unit.end:
            raise UnsupportedError(
                f"{place.name} is called in a backward pass of layers {unit.first} to {unit.end - 1}: activation "
                "checkpointing of several blocks at once needs early_stop; checkpoint each block by itself"
            )
        if place.block == unit.first and unit.first:
            _, args, kwargs = _first_argument(place, args, kwargs, unit.entered)
        with self._stream(unit, place.name):
            return real(*args, **kwargs)

    def _leave(self, unit: ForwardUnit, place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, tree = place.name, _first_argument(place, args, kwargs)[0]
        unit.tensors, unit.border = take_apart(tree, f"the first argument of {name}")
        unit.left = True
        if not unit.tensors:
            raise UnsupportedError(f"the first argument of {name} has no tensor; a stage sends tensors on")
        self._refuse_tainted(unit, tree, f"the first argument of {name}")
        raise _Left

    def _count(self, unit: ForwardUnit, index: int) -> None:
        if index != unit.due:
            due = f"{self.path}.{unit.due} is due" if unit.due < len(self.blocks) else "all blocks have been called"
            twice = " a second time" if index < unit.due else ""
            raise UnsupportedError(
                f"{self.path}.{index} is called{twice} where {due}: the step must call the blocks of {self.path} once "
                "each, in their order"
            )
        unit.due += 1

    def _placeholder(self, unit: ForwardUnit, name: str) -> Any:
        """Returns the placeholder for a module's result; refuses a module if the previous stage called another one at
        this point.
        """
        if unit.given == len(unit.calls) or unit.calls[unit.given][0] != name:
            due = unit.calls[unit.given][0] if unit.given < len(unit.calls) else "none"
            raise UnsupportedError(
                f"{name} is called here where the stage before called {due}: a step must call the same modules in the "
                "same order wherever it runs"
            )
        unit.given += 1
        return self._made(unit, name, unit.calls[unit.given - 1][1])

    def _made(self, unit: ForwardUnit, name: str, form: Form) -> Any:
        made = [placeholder(each, unit.device) for each in tensor_forms(form)]
        if unit.taint is not None:
            unit.taint.mark(made, frozenset((name,)))
        return put_together(form, iter(made))

    def _stream(self, unit: ForwardUnit, *names: object) -> AbstractContextManager[None]:
        return nullcontext() if self._randomness is None else self._randomness.stream(*unit.at, *names)

    # --- refusals

    def _refuse_absent(self, place: _Place) -> None:
        """Refuses a call outside of a step to a module whose weights are not all here; it would return NaN."""
        module = self.root.get_submodule(place.name)
        absent = next((name for name, _, _, tensor in named_tensors(module) if is_absent(tensor)), None)
        if absent is not None:
            raise UnsupportedError(
                f"{place.name} is called outside of training_step and validation_step, and this member does not hold "
                f"its {absent}, for other stages run it. Call it in one of these steps, or after fit in a process that "
                "has loaded a checkpoint of the whole model (strategy='auto')"
            )

    def _refuse_tainted(self, unit: ForwardUnit, tree: Any, what: str) -> None:
        names = frozenset() if unit.taint is None else unit.taint.names(tree)
        if names:
            last = unit.end - 1
            layers = f"layer {last}" if unit.first == last else f"layers {unit.first} to {last}"
            raise UnsupportedError(
                f"{what} depends on {listed(names)}, which another stage has, while {layers} run here. {_ADVICE}"
            )

    def _refuse_uncalled(self, unit: ForwardUnit) -> None:
        if unit.given < len(unit.calls):
            raise UnsupportedError(
                f"the stage before called {unit.calls[unit.given][0]}, which is not called here: a step must call the "
                "same modules in the same order wherever it runs"
            )

    def _refuse_unfinished(self, unit: ForwardUnit) -> None:
        if unit.left:
            raise UnsupportedError(
                f"the step goes on behind {self.path}.{unit.end}, whose call ends it in this stage: it catches "
                "BaseException; let it catch Exception"
            )
        if unit.due < len(self.blocks):
            raise UnsupportedError(
                f"the step has ended and {self.path}.{unit.due} was not called: it must call the blocks of {self.path} "
                f"once each, in their order{'' if unit.due else '. If it calls other modules, name their list'}"
            )


def chain_blocks(root: nn.Module, path: str) -> list[nn.Module]:
    """Returns the blocks of the chain at this path in the model.

    Raises:
        ConfigurationError: The path leads to no list of blocks.
        UnsupportedError: The blocks cannot be told apart, or are compiled as a whole.
    """
    module: Any = root
    for name in ["", *path.split(".")]:
        module = getattr(module, name, None) if name else module
        if not isinstance(module, nn.Module):
            lists = [n for n, m in root.named_modules() if isinstance(m, nn.Sequential | nn.ModuleList) and len(m) > 1]
            raise ConfigurationError(
                f"the model has no chain {path!r}; name its nn.Sequential or nn.ModuleList"
                + (f", such as {', '.join(map(repr, lists[:4]))}" if lists else "")
            )
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{type(module).__name__}, which holds the chain {path!r}, is compiled as a whole; compile its blocks "
                "one by one: for block in blocks: block.compile()"
            )
    if not isinstance(module, nn.Sequential | nn.ModuleList) or not len(module):
        raise ConfigurationError(
            f"the chain {path!r} is a {type(module).__name__} of no blocks; expected an nn.Sequential or an "
            "nn.ModuleList of at least one"
        )
    blocks = list(module)
    twice = [i for i, block in enumerate(blocks) if any(block is other for other in blocks[:i])]
    if twice:
        raise UnsupportedError(
            f"{path}.{twice[0]} is the same module as an earlier block; each must be a module of its own"
        )
    return blocks


def _hands(root: nn.Module) -> tuple[Step, Call] | None:
    """Returns the user's methods `chaos_before` and `chaos_after`; None if the module has neither."""
    before, after = getattr(root, "chaos_before", None), getattr(root, "chaos_after", None)
    if (before is None) != (after is None):
        raise ConfigurationError(
            f"{type(root).__name__} has {'chaos_after' if before is None else 'chaos_before'} alone; expected both: "
            "chaos_before(batch) returns what the first block takes, chaos_after(x, batch) the loss"
        )
    return None if before is None or after is None else (before, after)


def outside_modules(root: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules beside the chain (neither in it nor around it) that have parameters or change buffers."""
    chain = root.get_submodule(path)
    inside = {id(module) for module in chain.modules()}
    return [
        (name, module)
        for name, module in root.named_modules()
        if id(module) not in inside
        and not any(each is chain for each in module.modules())
        and any(next(m.parameters(recurse=False), None) is not None or changes_buffers(m) for m in module.modules())
    ]


def changes_buffers(module: nn.Module) -> bool:
    """Returns whether a module is a norm that keeps statistics in buffers."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def _first_parameter(block: nn.Module) -> str:
    """Returns the name of the first argument of a block's forward method; "" if its signature does not show it."""
    try:
        parameters = inspect.signature(getattr(block, "_orig_mod", block).forward).parameters.values()
    except (TypeError, ValueError):
        return ""
    return next((p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)), "")


def _first_argument(
    place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any], instead: Any = None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the first argument of a call, and the call's arguments with `instead` in its place."""
    if args:
        return args[0], (instead, *args[1:]), kwargs
    if not kwargs:
        raise UnsupportedError(f"{place.name} is called without an argument; expected what the block before has made")
    first = place.argument if place.argument in kwargs else next(iter(kwargs))
    return kwargs[first], args, {**kwargs, first: instead}


def _in_reentrant_checkpoint() -> bool:
    """Returns whether the current call comes from the forward pass of a reentrant checkpoint, which runs without
    gradients.
    """
    frame = sys._getframe() if not torch.is_grad_enabled() else None
    code = CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
