"""Steps replayed from their averages alone give every bit of the state that training gave; what cannot be is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
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
    SparseAdam,
)
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from chaos_lightning.collectives.gradients import Gradients, cells_of
from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import StateError
from chaos_lightning.hyper import hyper_words
from chaos_lightning.membership.types import NO_VIEW, Header, Kind, Share
from chaos_lightning.replication.access import ModuleState
from chaos_lightning.replication.replay import PURE, ModuleReplay, OptimizerReplay, Replay, section_of
from chaos_lightning.trainer import norm_buffers

Clip = Callable[[Optimizer], Any]


class Net(nn.Module):
    """Two branches, so that a parameter may have no gradient, and BatchNorm, whose statistics are reduced."""

    def __init__(self, seed: int = 0, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.one, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return (self.one, self.other)[branch](self.norm(self.first(x)).relu()).square().mean()


class Matrices(nn.Module):
    """What Muon takes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(6, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.two(self.one(x).relu()).square().mean()


class Side:
    """One process: model, optimizers by section, and their gradients' memory."""

    def __init__(self, net: nn.Module, optimizers: list[Optimizer]) -> None:
        self.net, self.optimizers = net, optimizers
        names = {id(p): n for n, p in net.named_parameters()}
        sections = [
            Section(f"optimizer {k}", [(names[id(p)], p) for g in o.param_groups for p in g["params"]])
            for k, o in enumerate(optimizers)
        ]
        wanted = norm_buffers(net)
        self.layout = Layout(sections, [(n, b) for n, b in net.named_buffers() if n in wanted])
        self.memory = Memory(self.layout, pinned=False)
        grid = cells_of(self.layout, 0)
        self.gradients = Gradients(self.layout, self.memory, grid, torch.device("cpu"), False, lambda cells: None)
        self.state = ModuleState(net, optimizers)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self.state.tensors()


class Member(Side):
    """Trains, and keeps of each step what a log keeps: the header and the raw sums."""

    log: list[tuple[Header, bytes]]

    def __init__(self, net: nn.Module, optimizers: list[Optimizer], clip: Clip | None = None) -> None:
        super().__init__(net, optimizers)
        self.clip = clip
        self.log = []
        self._data = torch.Generator().manual_seed(1)

    def step(self, section: int = 0, branch: int = 0) -> None:
        """One step of two members' batches, 5 and 8 samples."""
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
        shares = (Share("a", 5.0, 5.0), Share("b", 8.0, 8.0))
        hyper = hyper_words(self.optimizers)
        header = Header(seq, Kind.STEP, seq, NO_VIEW, "", NO_VIEW, f"section {section}", shares, presence, hyper=hyper)
        self.gradients.apply(header)
        if self.clip is not None:
            self.clip(self.optimizers[section])
        self.optimizers[section].step()
        self.log.append((header, raw))

    def empty(self) -> None:
        """A step that nobody had samples for."""
        seq = len(self.log) + 1
        header = Header(seq, Kind.STEP, seq, NO_VIEW, "", NO_VIEW, "section 0", (Share("a", 0.0, 0.0),))
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
        """The state as a pull leaves it."""
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
    """All parameters, buffers and optimizer tensors, bit by bit."""
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
    """Groups with rates of their own, which schedulers move apart."""

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

TOGETHER = ("SGD fused",)
"""torch 2.13's step fails if parameters get their first gradient in different steps."""


def test_every_optimizer_that_counts_as_pure_is_tried_here() -> None:
    net = Matrices()
    assert {type(make(list(net.parameters()))) for make in OPTIMIZERS.values()} == PURE


@pytest.mark.parametrize(("clip", "start"), [("none", 0), ("norm", 3), ("value", 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_are_those_that_were_trained(name: str, clip: str, start: int) -> None:
    """With rates that a scheduler moves, and steps in which parameters have no gradient."""
    kind = Matrices if name == "Muon" else Net
    make = two_groups(OPTIMIZERS[name])
    nets = kind(), kind(seed=9)
    member, newcomer = (
        Member(nets[0], [make(nets[0])], clipped(clip)),
        Newcomer(nets[1], [make(nets[1])], clipped(clip)),
    )
    scheduler = StepLR(member.optimizers[0], 2, 0.7)
    for index in range(8):
        if index == start:
            newcomer.receive(member)
        if index:
            scheduler.step()
        member.step(branch=index % 3 == 2 and name not in TOGETHER)
    for entry in member.log[start:]:
        newcomer.apply(*entry)
    same(member, newcomer)
    rate, kept = (s.optimizers[0].param_groups[1]["lr"] for s in (member, newcomer))
    assert isinstance(rate, Tensor) is isinstance(kept, Tensor)


def test_rates_of_the_header_decide() -> None:
    """The same without them ends elsewhere: the test above would see a rate that was not followed."""
    nets = Net(), Net()
    member = Member(nets[0], [SGD(nets[0].parameters(), 0.1, momentum=0.9)])
    newcomer = Newcomer(nets[1], [SGD(nets[1].parameters(), 0.1, momentum=0.9)])
    newcomer.receive(member)
    scheduler = OneCycleLR(member.optimizers[0], 0.2, total_steps=20)
    for _ in range(5):
        member.step()
        scheduler.step()
    for header, raw in member.log:
        newcomer.apply(replace(header, hyper=""), raw)
    assert not torch.equal(nets[0].one.weight, nets[1].one.weight)


def test_momentum_that_a_scheduler_moves() -> None:
    nets = Net(), Net(seed=2)
    made = [SGD(n.parameters(), 0.01, momentum=0.9) for n in nets]
    scheduler: LRScheduler = OneCycleLR(made[0], 0.2, total_steps=20)
    OneCycleLR(made[1], 0.2, total_steps=20)
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    for _ in range(6):
        member.step()
        scheduler.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert made[1].param_groups[0]["momentum"] != 0.9


def test_a_parameter_that_nobody_had_a_gradient_for_does_not_decay() -> None:
    nets = Net(), Net(seed=2)
    made = [AdamW(n.parameters(), 0.01, weight_decay=0.5) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    before = nets[1].other.weight.clone()
    for _ in range(3):
        member.step(branch=0)
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert torch.equal(nets[1].other.weight, before)
    assert nets[1].other.weight not in made[1].state


def test_nothing_is_left_in_grad() -> None:
    nets = Net(), Net()
    member, newcomer = (kind(n, [Adam(n.parameters())]) for kind, n in zip((Member, Newcomer), nets, strict=True))
    newcomer.receive(member)
    member.step()
    newcomer.apply(*member.log[0])  # type: ignore[attr-defined]
    assert all(p.grad is None for p in nets[1].parameters())


def test_statistics_of_batchnorm_are_those_of_the_members() -> None:
    nets = Net(), Net(seed=4)
    made = [SGD(n.parameters(), 0.1) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    for _ in range(4):
        member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    assert torch.equal(nets[0].norm.running_var, nets[1].norm.running_var)
    assert not torch.equal(nets[1].norm.running_mean, torch.zeros(16))
    same(member, newcomer)


def test_a_step_without_any_samples_changes_nothing() -> None:
    nets = Net(), Net(seed=4)
    made = [Adam(n.parameters(), 0.1) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.receive(member)
    member.step()
    member.empty()
    member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert made[1].state[nets[1].one.weight]["step"] == 2


@pytest.mark.parametrize("clip", ["none", "norm"])
def test_each_step_is_that_of_its_own_optimizer(clip: str) -> None:
    def made(net: Net) -> list[Optimizer]:
        return [AdamW([*net.first.parameters(), *net.norm.parameters()], 0.01), SGD(net.one.parameters(), 0.1, 0.9)]

    nets = Net(), Net(seed=3)
    for net in nets:
        net.other.requires_grad_(False)
    member, newcomer = Member(nets[0], made(nets[0]), clipped(clip)), Newcomer(nets[1], made(nets[1]), clipped(clip))
    newcomer.receive(member)
    for section in (0, 1, 1, 0, 1):
        member.step(section)
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
    assert newcomer.optimizers[0].state[nets[1].first.weight]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_other_number_types(dtype: torch.dtype, fused: bool) -> None:
    nets = Net(norm=False).to(dtype), Net(seed=3, norm=False).to(dtype)
    made = [AdamW(n.parameters(), 0.01, fused=fused) for n in nets]
    member, newcomer = Member(nets[0], [made[0]], clipped("norm")), Newcomer(nets[1], [made[1]], clipped("norm"))
    for index in range(6):
        if index == 2:
            newcomer.receive(member)
        member.step(branch=index % 2)
    for entry in member.log[2:]:
        newcomer.apply(*entry)
    same(member, newcomer)


def test_other_slots_are_passed_over() -> None:
    net = Net()
    before = {n: p.clone() for n, p in net.named_parameters()}
    for kind in (Kind.GATHER, Kind.BOUNDARY, Kind.CLOSING):
        OptimizerReplay([SGD(net.parameters(), 0.1)]).replay(Header(1, kind, 0, NO_VIEW, "", NO_VIEW, "anything"))
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"name": "validate"}, "named 'validate'; expected 'section N'"),
        ({"name": "section 1"}, "is of optimizer 1; this member has 1"),
        ({"name": "section 0", "error": "lr differs"}, "was refused \\(lr differs\\)"),
        ({"name": "section 0", "hyper": "opt0.group7.lr=0.1"}, "group7.lr=0.1"),
        ({"name": "section 0", "hyper": "opt0.group0.params=()"}, "params=\\(\\)"),
        ({"name": "section 0", "hyper": "opt0.group0.lr=__import__('os').getpid()"}, "cannot be set here"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_stepped(header: dict[str, Any], words: str) -> None:
    net = Net()
    before = net.one.weight.clone()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(StateError, match=words):
        OptimizerReplay([SGD(net.parameters(), 0.1)]).replay(Header(4, Kind.STEP, 4, NO_VIEW, "", NO_VIEW, **header))
    assert torch.equal(net.one.weight, before)


# ------------------------------------------------------------------ what can be replayed


class Own(Adam):
    """A subclass may do anything."""


class ClosureFirst(Optimizer):
    """Wants its closure, as third-party optimizers may."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(group["lr"] * param.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_known_optimizers_can(name: str) -> None:
    assert OptimizerReplay([OPTIMIZERS[name](list(Matrices().parameters()))]).replayable() == ""


def test_what_cannot_is_named_with_its_number() -> None:
    net = Net()
    said = OptimizerReplay([Adam(net.first.parameters()), Own(net.one.parameters())]).replayable()
    assert said.startswith("optimizer 1 (Own): it is not known to be a pure function")
    assert "chaos_replay = True" in said


def test_a_module_vouches_for_what_is_not_known() -> None:
    assert OptimizerReplay([Own(Net().parameters())], vouched=True).replayable() == ""


def test_a_module_forbids_what_is_known() -> None:
    said = OptimizerReplay([Adam(Net().parameters())], vouched=False).replayable()
    assert said == "the module says chaos_replay = False"


@pytest.mark.parametrize("vouched", [None, True])
@pytest.mark.parametrize(("kind", "words"), [(LBFGS, "several times in a step"), (SparseAdam, "sparse")])
def test_nobody_can_vouch_for_some(kind: type[Optimizer], words: str, vouched: bool | None) -> None:
    assert words in OptimizerReplay([kind(list(Net().parameters()))], vouched=vouched).replayable()


def test_hooks_of_an_optimizer_count() -> None:
    for register, words in (("register_step_pre_hook", "pre-hook"), ("register_step_post_hook", "post-hook")):
        hooked = Adam(Net().parameters())
        handle = getattr(hooked, register)(lambda *_: None)
        assert words in OptimizerReplay([hooked]).replayable()
        assert OptimizerReplay([hooked], vouched=True).replayable() == ""
        handle.remove()
        assert OptimizerReplay([hooked]).replayable() == ""


def test_hooks_of_all_optimizers_count() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "post-hook for all optimizers" in OptimizerReplay([Adam(Net().parameters())]).replayable()
    finally:
        handle.remove()


def test_a_step_that_was_replaced_counts_and_a_schedulers_wrapper_does_not() -> None:
    scheduled, replaced = Adam(Net().parameters()), Adam(Net().parameters())
    StepLR(scheduled, 2)
    assert "step" in vars(scheduled)
    assert OptimizerReplay([scheduled]).replayable() == ""
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert "replaced on this instance" in OptimizerReplay([replaced]).replayable()


def test_clipping_happens_within_the_closure_where_asked_for() -> None:
    net = Net(norm=False)
    optimizer = ClosureFirst(net.parameters())
    replay = OptimizerReplay([optimizer], clipped("value"), vouched=True, within=True)
    assert isinstance(replay, Replay)
    before = net.one.weight.clone()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    replay.replay(Header(1, Kind.STEP, 1, NO_VIEW, "", NO_VIEW, "section 0"))
    assert torch.equal(net.one.weight, before - 0.1 * torch.full_like(before, 0.01))


# ------------------------------------------------------------------ plain loops


class Says(Net):
    chaos_replay = False


@pytest.mark.parametrize(
    ("net", "extra", "words"),
    [
        (Net, {}, ""),
        (Net, {"schedule": StepLR(SGD(Net().parameters()), 2)}, ""),
        (Net, {"ema": Net()}, "extra state 'ema' is a model that changes outside of the optimizer"),
        (Net, {"scaler": torch.amp.GradScaler("cpu")}, "extra state 'scaler' scales the loss"),
        (Says, {}, "the module says chaos_replay = False"),
    ],
)
def test_a_plain_loop_says_why_it_cannot(net: type[Net], extra: dict[str, Any], words: str) -> None:
    model = net()
    said = ModuleReplay(ModuleState(model, Adam(model.parameters()), extra)).replayable()
    assert said.startswith(words) if words else said == ""


def test_a_plain_loop_is_replayed() -> None:
    nets = Net(), Net(seed=3)
    made = [AdamW(n.parameters(), 0.01) for n in nets]
    member, newcomer = Member(nets[0], [made[0]]), Newcomer(nets[1], [made[1]])
    newcomer.replay = ModuleReplay(newcomer.state)
    newcomer.receive(member)
    for _ in range(3):
        member.step()
    for entry in member.log:
        newcomer.apply(*entry)
    same(member, newcomer)
