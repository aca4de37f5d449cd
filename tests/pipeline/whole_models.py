"""Makes a model for the tests of checkpoints: members with only some of its parts, and one with all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.pipeline.absent import named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.parts import REST, ModelParts
from chaos_lightning.pipeline.whole_file import PartialModel, partial_state_dict
from chaos_lightning.replication.part_state import PartState


class Model(nn.Module):
    """Model of three layers, with a tied weight that has two names, buffers, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 30)
        self.norm = nn.BatchNorm1d(30)
        self.middle = nn.Linear(30, 6, dtype=torch.bfloat16)
        self.last = nn.Linear(6, 30)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.linspace(0, 1, 30), requires_grad=False)
        self.register_buffer("mask", torch.ones(6))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.arange(5), persistent=False)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x * self.mask))) + self.frozen
        return self.last(self.middle(x.bfloat16()).float())


_TENSORS = {
    "layer.0": (
        *("first.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("norm.num_batches_tracked", "scratch"),
    ),
    "layer.1": ("middle.weight", "middle.bias", "frozen", "flags"),
    "layer.2": ("last.bias",),
    REST: ("mask", "empty"),
    "shared.first.weight": ("first.weight", "last.weight"),
}
PARTS = ModelParts(
    3,
    {name: part for part, names in _TENSORS.items() for name in names},
    {"layer.0": (0,), "layer.1": (1,), "layer.2": (2,), REST: (0, 1, 2), "shared.first.weight": (0, 2)},
)
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}


class Holder:
    """Model and its optimizer at one member, which may hold only some parts."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model = model
        # Two groups, whose numbers are not in the order of the model.
        decay = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": others}, {"params": decay, "lr": 0.02}]
        self.optimizer = OPTIMIZERS[kind](groups)

    @property
    def here(self) -> PartialModel:
        return PartialModel(self.model, PARTS, [self.optimizer])

    def part(self, name: str) -> PartState:
        return PartState(name, self.model, PARTS.names(name), [self.optimizer])

    def checkpoint(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint that Lightning would make at this member."""
        return {
            "epoch": 1,
            "global_step": 3,
            "state_dict": partial_state_dict(self.model),
            "callbacks": {"best": torch.tensor(0.25), "worst": torch.tensor([1.0, 2.0])[1]},
            "optimizer_states": [self.optimizer.state_dict()],
            "hyper_parameters": {"width": 30},
            **more,
        }


def trained(kind: str = "adamw", steps: int = 3) -> Holder:
    """Returns a model with all parts, after some training steps."""
    torch.manual_seed(0)
    found = Holder(Model(), kind)
    train(found, steps)
    return found


def train(holder: Holder, steps: int, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        holder.optimizer.zero_grad()
        holder.model(torch.randn(8, 6, generator=draw)).square().mean().backward()
        holder.optimizer.step()


def holding(whole: Holder, kind: str, layers: Collection[int], seed: int = 5) -> Holder:
    """Returns a model with only the parts of an owner of these layers, and the values of `whole`."""
    model = copy.deepcopy(whole.model)
    found = Holder(model, kind)
    found.optimizer.load_state_dict(whole.optimizer.state_dict())
    owned = PARTS.owned_by(layers)
    memory = ModelMemory(model, seed, "cpu")
    for part in PARTS.users:
        if part not in owned:
            found.part(part).forget()
            memory.leave_out(PARTS.names(part))
    return found


class FromOwners:
    """Source of parts that reads them from a whole model.

    Attributes:
        asked: Parts whose tensors were asked for.
    """

    def __init__(self, whole: Holder) -> None:
        self._whole = whole
        self.asked: list[str] = []

    def manifest(self, part: str) -> Mapping[str, Any]:
        return self._whole.part(part).manifest()

    def tensors(self, part: str) -> list[tuple[str, Tensor]]:
        self.asked.append(part)
        return [(name, t.detach().clone()) for name, t in self._whole.part(part).tensors()]


def same(a: Any, b: Any, path: str = "") -> None:
    """Asserts that two values are equal, including types, order of keys, and bits of tensors."""
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad), path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{index}")
    else:
        assert a == b, path


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, _, _, t in named_tensors(model)}
