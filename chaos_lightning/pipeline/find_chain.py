"""Finds the model that an optimizer trains, and its chain: the list of blocks that can be divided into stages.

Theory of operation. Nobody names the model to a profiler, so it is the largest module of the process that has
parameters of the optimizer. Its chain is the longest nn.Sequential or nn.ModuleList whose blocks are of one class and
have weights; lists within a block, such as the experts of a layer, do not count. Where that is not clear, the user is
asked.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.pipeline.chain import chain_blocks

MOST_LISTED = 8


@dataclass(frozen=True)
class FoundChain:
    """Chain of a model: its list of blocks and the list's path."""

    path: str
    blocks: tuple[nn.Module, ...]

    @property
    def kind(self) -> str:
        return " and ".join(sorted(set(map(kind_of, self.blocks))))


def kind_of(block: nn.Module) -> str:
    """Returns the class name of a block, also of one wrapped by `torch.compile`."""
    return type(getattr(block, "_orig_mod", block)).__name__


def compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def model_of(optimizer: Optimizer) -> nn.Module:
    """Returns the largest module in this process that contains parameters of the optimizer."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # A type is asked, since isinstance would run code of proxies.
    modules: list[nn.Module] = [
        m for m in gc.get_objects() if issubclass(type(m), nn.Module) and "_parameters" in vars(m)
    ]
    ours = [m for m in modules if any(id(p) in wanted for p in m.parameters())]
    if not ours:
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps parameters of no torch.nn.Module; expected a model that is one"
        )
    return max(ours, key=lambda m: sum(1 for _ in m.modules()))


def find_chain(root: nn.Module, path: str = "") -> FoundChain:
    """Returns a model's chain: at the given path, at the model's own `chaos_chain`, or the longest list of blocks of
    one class.

    Lists within a block of a list do not count.

    Raises:
        ConfigurationError: There is no such list, or there are several of which each could be meant.
        UnsupportedError: The chain cannot be cut into stages.
    """
    path = path or str(getattr(root, "chaos_chain", ""))
    lists = dict(_lists(root))
    outer = {name: blocks for name, blocks in lists.items() if not _within(name, lists)}
    if path:
        if path not in lists:
            raise ConfigurationError(f"{path!r} is no list of blocks of {type(root).__name__}; {_listed(outer)}")
        return FoundChain(path, tuple(chain_blocks(root, path)))
    alike = {name: b for name, b in outer.items() if len(set(map(kind_of, b))) == 1 and _has_weights(b)}
    longest = max(map(len, alike.values()), default=0)
    found = [name for name, blocks in alike.items() if len(blocks) == longest] or list(outer)
    if len(found) != 1:
        several = f"{len(found)} lists of blocks that could be its chain" if found else "no list of blocks"
        raise ConfigurationError(f"{type(root).__name__} has {several}; {_listed(outer)}")
    return FoundChain(found[0], tuple(chain_blocks(root, found[0])))


def _lists(root: nn.Module) -> Iterable[tuple[str, tuple[nn.Module, ...]]]:
    for name, module in root.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1:
            yield name, tuple(module)


def _within(name: str, lists: dict[str, tuple[nn.Module, ...]]) -> bool:
    """Returns whether a list lies within a block of another list, all of whose blocks have one class."""
    return any(
        name.startswith(f"{other}." if other else "") and len(set(map(kind_of, blocks))) == 1
        for other, blocks in lists.items()
        if other != name
    )


def _has_weights(blocks: Sequence[nn.Module]) -> bool:
    return all(any(True for _ in block.parameters()) for block in blocks)


def _listed(lists: dict[str, tuple[nn.Module, ...]]) -> str:
    rows = [
        f"{name or '(the model itself)'} ({FoundChain(name, blocks).kind} x {len(blocks)})"
        for name, blocks in lists.items()
    ]
    if not rows:
        return "expected an nn.Sequential or an nn.ModuleList of two blocks or more: write the model so"
    more = [f"and {len(rows) - MOST_LISTED} more"] if len(rows) > MOST_LISTED else []
    return f"name one, by --chain PATH or chain=: {', '.join([*rows[:MOST_LISTED], *more])}"


def check_model(root: nn.Module, optimizer: Optimizer) -> None:
    """Refuses a model or optimizer that cannot run in a pipeline.

    Raises:
        UnsupportedError: The model or the optimizer cannot run; says which, and what to do instead.
    """
    if any(isinstance(p, DTensor) for p in root.parameters()):
        name = type(root).__name__
        raise UnsupportedError(f"parameters of {name} are sharded (DTensor); measure it in one process, unsharded")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS runs the model several times a step; expected an optimizer such as AdamW or SGD")
