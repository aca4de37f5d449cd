"""Helpers for tests of replay: a member that trains and logs its steps, a newcomer that replays them, and many
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from chaos_lightning.collectives.gradients import Gradients
from chaos_lightning.collectives.hyper import hyper_words
from chaos_lightning.collectives.layout import Layout, Section, section_of
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, equal_shares
from chaos_lightning.replication.access import ModuleState
from chaos_lightning.replication.replay import OptimizerReplay, Replay

Clip = Callable[[Optimizer], Any]


class Net(nn.Module):
    """Model with two alternative branches, so that parameters may lack a gradient, and with BatchNorm, whose statistics
    are averaged.
    """

    def __init__(self, seed: int = 0, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.one, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return (self.one, self.other)[branch](self.norm(self.first(x)).relu()).square().mean()


class Matrices(nn.Module):
    """Model whose parameters are all matrices, as the optimizer Muon requires."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(6, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.two(self.one(x).relu()).square().mean()


class Side:
    """Model and optimizers of one process, with the memory of their gradients."""

    def __init__(self, net: nn.Module, optimizers: list[Optimizer]) -> None:
        self.net, self.optimizers = net, optimizers
        names = {id(p): n for n, p in net.named_parameters()}
        sections = [
            Section(f"optimizer {k}", [(names[id(p)], p) for g in o.param_groups for p in g["params"]])
            for k, o in enumerate(optimizers)
        ]
        self.layout = Layout(sections, reduced_buffers(net))
        self.memory = Memory(self.layout)
        self.gradients = Gradients(self.memory, False, lambda cells: None)
        self.state = ModuleState(net, optimizers)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self.state.tensors()


class Member(Side):
    """Member that trains and logs each step: its header and the summed gradients."""

    log: list[tuple[Header, bytes]]

    def __init__(self, net: nn.Module, optimizers: list[Optimizer], clip: Clip | None = None) -> None:
        super().__init__(net, optimizers)
        self.clip = clip
        self.log = []
        self._data = torch.Generator().manual_seed(1)

    def step(self, section: int = 0, branch: int = 0) -> None:
        """Makes one training step with two batches, of 5 and 8 samples, as from two members."""
        seq = len(self.log) + 1
        dtype = next(self.net.parameters()).dtype
        total = bytearray(self.layout.nbytes)
        presence = b""
        for samples in (5, 8):
            self.net.zero_grad(set_to_none=True)
            self.gradients.arm(section, float(samples))
            self.net(torch.randn(samples, 6, generator=self._data).to(dtype), branch).backward()
            presence = self.gradients.flush()
            self._add(total, section)
        raw = bytes(total)
        self.memory.result_bytes[seq % 2][:] = raw
        shares = equal_shares([(5.0, 5.0), (8.0, 8.0)])
        hyper = hyper_words(self.optimizers)
        header = Header(seq, Kind.STEP, seq, NO_VIEW, "", NO_VIEW, f"section {section}", shares, presence, hyper=hyper)
        self.gradients.apply(header)
        if self.clip is not None:
            self.clip(self.optimizers[section])
        self.optimizers[section].step()
        self.log.append((header, raw))

    def empty(self) -> None:
        """Makes a step in which no member has samples."""
        seq = len(self.log) + 1
        header = Header(seq, Kind.STEP, seq, NO_VIEW, "", NO_VIEW, "section 0", equal_shares([(0.0, 0.0)]))
        self.gradients.arm(0, 0.0)
        self.gradients.apply(header)
        self.optimizers[0].step()
        self.log.append((header, bytes(self.layout.nbytes)))

    def _add(self, total: bytearray, section: int) -> None:
        own = bytearray().join(self.memory.pieces(0, self.layout.nbytes))
        for run in self.layout.runs:
            if run.stop > run.start and run.section in (section, len(self.layout.section_slots)):
                part = memoryview(total)[run.start : run.stop]
                into = torch.frombuffer(part, dtype=run.dtype)
                into += torch.frombuffer(memoryview(own)[run.start : run.stop], dtype=run.dtype)


class Newcomer(Side):
    def __init__(self, net: nn.Module, optimizers: list[Optimizer], clip: Clip | None = None) -> None:
        super().__init__(net, optimizers)
        self.replay: Replay = OptimizerReplay(optimizers, clip)

    def receive(self, member: Side) -> None:
        """Copies a member's state, as a pull would."""
        self.state.prepare(member.state.manifest(), None)  # type: ignore[arg-type]
        theirs = dict(member.tensors())
        with torch.no_grad():
            for name, tensor in self.tensors():
                tensor.copy_(theirs[name])
        self.gradients.settle()

    def apply(self, header: Header, raw: bytes) -> None:
        self.gradients.arm(section_of(header), 0.0)
        self.gradients.disarm()
        self.memory.result_bytes[header.seq % 2][:] = raw
        self.gradients.apply(header)
        self.replay.replay(header)


def same(a: Side, b: Side) -> None:
    """Checks that all parameters, buffers and optimizer tensors are equal, bit by bit."""
    mine, theirs = a.tensors(), b.tensors()
    assert [n for n, _ in mine] == [n for n, _ in theirs]
    differ = [n for (n, x), (_, y) in zip(mine, theirs, strict=True) if not torch.equal(x, y)]
    assert not differ, differ


def clipped(kind: str) -> Clip | None:
    def by_norm(o: Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in o.param_groups for p in g["params"]], 0.05)

    def by_value(o: Optimizer) -> None:
        torch.nn.utils.clip_grad_value_([p for g in o.param_groups for p in g["params"]], 0.01)

    return {"none": None, "norm": by_norm, "value": by_value}[kind]


def two_groups(make: Callable[[Any], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """Returns a function that makes an optimizer with two parameter groups, whose learning rates may differ."""

    def made(net: nn.Module) -> Optimizer:
        params = list(net.parameters())
        return make([{"params": params[:2]}, {"params": params[2:]}])

    return made


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: Adam(p, 0.01),
    "Adam loop": lambda p: Adam(p, 0.01, foreach=False, fused=False),
    "Adam foreach": lambda p: Adam(p, 0.01, foreach=True, amsgrad=True),
    "Adam fused": lambda p: Adam(p, 0.01, fused=True),
    "Adam, rate in a tensor": lambda p: Adam(p, torch.tensor(0.01)),
    "AdamW loop": lambda p: AdamW(p, 0.01, foreach=False, fused=False),
    "AdamW foreach": lambda p: AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: AdamW(p, 0.01, fused=True, amsgrad=True),
    "RMSprop": lambda p: RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: Adagrad(p, 0.05, lr_decay=0.01),
    "Adagrad fused": lambda p: Adagrad(p, 0.05, fused=True),
    "NAdam": lambda p: NAdam(p, 0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: RAdam(p, 0.01),
    "Adadelta": lambda p: Adadelta(p, 1.0),
    "Adamax": lambda p: Adamax(p, 0.01),
    "ASGD": lambda p: ASGD(p, 0.05, t0=3.0),
    "Rprop": lambda p: Rprop(p, 0.01),
    "Adafactor": lambda p: Adafactor(p, 0.05),
    "Muon": lambda p: Muon(p, 0.02),
}
