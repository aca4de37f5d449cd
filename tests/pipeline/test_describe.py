"""Tests the description of a model for the planner before training, whichever of its parts have memory at this
member.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import GPT, LENGTH, VOCABULARY, WIDTH, step_of, tokens
from torch import Tensor, nn
from torchmetrics import MeanMetric

from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.pipeline import describe as module
from chaos_lightning.pipeline import layer_times
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.describe import describe
from chaos_lightning.pipeline.parts import REST, find_parts
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.recording import Recording
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, NamedLink, TrainingJob

CPU = torch.device("cpu")
LARGE = 1 << 34
HIDDEN = 3 * LENGTH * WIDTH * 4
TABLES = (VOCABULARY + LENGTH) * WIDTH * 4
HEAD = VOCABULARY * WIDTH * 4
NORM = 2 * WIDTH * 4


@contextmanager
def chained(model: nn.Module, step: Any = None, path: str = "blocks") -> Iterator[LayerChain]:
    chain = LayerChain(model, path, step or step_of(model), randomness=Randomness(3))
    try:
        yield chain
    finally:
        chain.close()


def described(
    model: nn.Module, step: Any = None, memory_nbytes: int = LARGE, optimizer: Any = None, **options: Any
) -> TrainingJob:
    batch = options.pop("batch", None) or tokens()
    with chained(model, step) as chain:
        return describe(
            chain, find_parts(chain, batch), batch, [optimizer or torch.optim.AdamW(model.parameters())],
            micro_batches=8, device=CPU, device_memory_nbytes=memory_nbytes, samples=3, **options,
        )  # fmt: skip


def absent(model: nn.Module) -> ModelMemory:
    """Frees all tensors of a model; returns the memory that can make them again."""
    memory = ModelMemory(model, 1, CPU)
    memory.leave_out([name for name, *_ in named_tensors(model)])
    return memory


def block_nbytes(model: GPT) -> int:
    return sum(p.nbytes for p in model.blocks[1].parameters())


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_the_state_are_those_that_one_counts(tied: bool) -> None:
    model = GPT(tied=tied)
    model.register_buffer("mask", torch.zeros(1000))
    job = described(model)
    block, count = block_nbytes(model), len(list(model.blocks[1].parameters()))
    first, *middle, last = job.layers
    assert [x.name for x in job.layers] == [f"blocks.{i}" for i in range(4)]
    assert (job.micro_batches, job.samples, job.tied_nbytes) == (8, 3, HEAD if tied else 0)
    assert job.devices[0].memory_nbytes == LARGE - 4000  # what all members have is no layer's
    for layer, more, tensors in (
        (first, TABLES, 2), *((x, 0, 0) for x in middle), (last, HEAD + NORM, 3),
    ):  # fmt: skip
        assert layer.parameter_nbytes == layer.gradient_nbytes == block + more
        assert layer.optimizer_nbytes == 2 * (block + more) + 4 * (count + tensors)
    assert [x.output_nbytes for x in job.layers] == [HIDDEN, HIDDEN, HIDDEN, 0]


def test_frozen_and_unused_parameters_have_no_optimizer_state() -> None:
    model = GPT()
    model.blocks[1].requires_grad_(False)
    model.add_module("pooler", nn.Linear(4, 4))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    job = described(model, optimizer=optimizer)
    frozen, last = job.layers[1], job.layers[3]
    assert (frozen.gradient_nbytes, frozen.optimizer_nbytes, frozen.optimizer_s) == (0, 0, 0)
    assert last.gradient_nbytes - last.optimizer_nbytes == 80
    assert last.optimizer_s > 0


def test_a_weight_of_several_layers_counts_at_each() -> None:
    model = GPT()
    alone = described(model).layers
    shared = model.blocks[0].mlp[1].weight
    model.blocks[2].mlp[1].weight = shared
    assert [x.parameter_nbytes for x in described(model).layers] == [x.parameter_nbytes for x in alone]


# ------------------------------------------------------------------------------------------------ what is measured


class Clock:
    """Fake clock that advances only when its thread reads it or sleeps.

    Threads that earlier tests left behind sleep as ever.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._owner = threading.get_ident()
        self._sleep = time.sleep

    def perf_counter(self) -> float:
        self._now_s += 1e-4
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._owner:
            self._now_s += seconds
        else:
            self._sleep(seconds)


class Slow(GPT):
    """GPT that sleeps after each block, for different times."""

    SLEEPS_S = (0.0, 0.04, 0.0, 0.06)

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block, sleep_s in zip(self.blocks, self.SLEEPS_S, strict=True):
            x = block(x, mask)
            time.sleep(sleep_s)
        return x


def only_largest(layers: Sequence[Layer]) -> int:
    """Returns bytes of memory enough for any single layer with gradients and activations, but not for all layers."""
    return max(x.parameter_nbytes + x.gradient_nbytes + x.activation_nbytes for x in layers) + 5 * LENGTH * LENGTH


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_times_and_bytes_are_alike_however_they_are_measured(
    real: bool, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "BUDGET_S", 0.3)
    clock = Clock()
    monkeypatch.setattr(layer_times, "time", clock)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    reference = described(Slow()).layers
    model = Slow()
    if not real:
        absent(model)
    memory = only_largest(reference) if one_by_one else LARGE
    runs = spans(monkeypatch)
    job = described(model, memory_nbytes=memory)
    assert {end - first for first, end in runs} == ({1} if one_by_one else {4})
    for i, (layer, other) in enumerate(zip(job.layers, reference, strict=True)):
        assert layer.output_nbytes == other.output_nbytes
        # A stage also has the gradient that it gets.
        assert abs(layer.workspace_nbytes - other.workspace_nbytes) <= 2 * HIDDEN
        # A stage makes its own mask.
        assert abs(layer.activation_nbytes - other.activation_nbytes) <= LENGTH * LENGTH * 5
        assert (layer.forward_s > Slow.SLEEPS_S[i]) is True
        assert layer.forward_s < Slow.SLEEPS_S[i] + 0.045
        assert 0 < layer.backward_s < 0.045
    assert all(is_absent(p) is not real for p in model.parameters())


def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns a list that records each run of consecutive layers with gradients."""
    found: list[tuple[int, int]] = []
    run = LayerChain.run

    def spy(self: LayerChain, first: int, end: int, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            found.append((first, end))
        return run(self, first, end, *args, **kwargs)

    monkeypatch.setattr(LayerChain, "run", spy)
    return found


def test_a_whole_that_keeps_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If parameters and gradients of the whole model fit into memory but its activations do not, layers are measured
    one by one.
    """
    model = GPT()
    layers = described(model).layers
    state = sum(x.parameter_nbytes + x.gradient_nbytes for x in layers)
    runs = spans(monkeypatch)
    job = described(model, memory_nbytes=state + sum(x.activation_nbytes for x in layers) // 2)
    assert runs[0] == (0, 4)
    assert set(runs[1:]) == {(i, i + 1) for i in range(4)}
    assert [x.output_nbytes for x in job.layers] == [x.output_nbytes for x in layers]


def test_memory_is_that_of_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(blocks=6)
    absent(model)
    real: list[int] = []
    run = LayerChain.run

    def spy(self: LayerChain, *args: Any, **kwargs: Any) -> Any:
        real.append(sum(p.nbytes for p in model.parameters() if not is_absent(p)))
        return run(self, *args, **kwargs)

    room = only_largest(described(GPT(blocks=6)).layers)
    monkeypatch.setattr(LayerChain, "run", spy)
    job = described(model, memory_nbytes=room)
    block = block_nbytes(model)
    assert max(real) == max(x.parameter_nbytes for x in job.layers) < 2 * block


def test_layers_that_have_no_room_are_estimated_and_told() -> None:
    model = GPT()
    model.blocks[2].mlp.add_module("wide", nn.Linear(WIDTH, 40_000))
    model.blocks[2].mlp.add_module("back", nn.Linear(40_000, WIDTH))
    room = only_largest(described(GPT()).layers)
    with pytest.warns(UserWarning, match=r"layer blocks\.2 could not be run here: parameters and gradients need .*MiB"):
        job = described(model, memory_nbytes=room)
    first, second, third, last = job.layers
    assert third.forward_s > 20 * second.forward_s
    assert third.activation_nbytes > 20 * second.activation_nbytes > 0
    assert (third.output_nbytes, last.output_nbytes) == (HIDDEN, 0)
    assert last.forward_s < first.forward_s + second.forward_s
    with pytest.warns(UserWarning, match=r"layer blocks\.0 could not be run here"):
        job = described(model, memory_nbytes=1000)
    assert job.layers[2].forward_s > 20 * job.layers[1].forward_s > 0


def test_made_up_values_that_a_step_refuses_are_told() -> None:
    class Careful(GPT):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if float(y.detach().std()) > 0 and bool((self.ln.weight == 1).all()) and self.careful:
                raise ArithmeticError("odd weights")
            return y

    model = Careful()
    model.careful = False
    absent(model)
    with chained(model) as chain:
        parts = find_parts(chain, tokens())
        model.careful = True
        with pytest.warns(
            UserWarning, match="blocks.3 could not be run .*made-up values it raises ArithmeticError: odd"
        ):
            job = describe(
                chain, parts, tokens(), [torch.optim.SGD(model.parameters(), 0.1)], micro_batches=1, device=CPU,
                device_memory_nbytes=LARGE, samples=1,
            )  # fmt: skip
    assert job.layers[3].forward_s > 0


def test_an_error_of_the_users_own_is_raised() -> None:
    model = GPT()

    def step(batch: Any) -> Tensor:
        raise KeyError("mine") if torch.is_grad_enabled() else KeyError("early")

    with chained(model) as chain:
        parts = find_parts(chain, tokens())
    with chained(model, step) as chain, pytest.raises(KeyError, match="mine"):
        describe(
            chain, parts, tokens(), [torch.optim.SGD(model.parameters(), 0.1)], micro_batches=1, device=CPU,
            device_memory_nbytes=LARGE, samples=1,
        )  # fmt: skip


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    class Skips(GPT):
        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            first = x
            for block in self.blocks:
                x = block(x, mask)
            return x + first

    model = Skips()
    with pytest.raises(UnsupportedError, match=r"depends on"):
        described(model, memory_nbytes=only_largest(described(GPT()).layers))


def test_a_model_built_in_configure_model_is_described_before_it_has_memory() -> None:
    recording = Recording(1)
    with recording.recorded():
        model = GPT()
    ModelMemory(model, 1, CPU, recording)
    assert all(is_absent(p) for p in model.parameters())
    job = described(model)
    real = described(GPT())
    assert [x.parameter_nbytes for x in job.layers] == [x.parameter_nbytes for x in real.layers]
    assert [x.activation_nbytes for x in job.layers] == [x.activation_nbytes for x in real.layers]
    assert all(is_absent(p) for p in model.parameters())


def test_a_step_without_a_loss_has_forward_passes_only() -> None:
    model = GPT()
    job = described(model, step=lambda batch: None if model(batch[0]) is not None else 0)
    assert all(x.forward_s > 1e-6 and x.backward_s < 1e-4 for x in job.layers)


def test_autocast_is_entered() -> None:
    job = described(GPT(), around=lambda: torch.autocast("cpu", torch.bfloat16))
    plain = described(GPT())
    assert job.layers[1].activation_nbytes != plain.layers[1].activation_nbytes


# ------------------------------------------------------------------------------------------------ no trace


@pytest.mark.parametrize("one_by_one", [True, False])
def test_nothing_is_left_of_it(one_by_one: bool) -> None:
    torch.manual_seed(0)
    model = GPT(dropout=0.1)
    model.metric, model.count, model.kept = MeanMetric(), 0, []
    model.blocks[1].norm = nn.BatchNorm1d(LENGTH)
    real = model.blocks[1].forward
    model.blocks[1].forward = lambda x, mask: model.blocks[1].norm(real(x, mask))

    def step(batch: Any) -> Tensor:
        loss = step_of(model)(batch)
        model.metric.update(loss.detach())
        model.count += 1
        model.kept.append(loss)
        return loss

    F.mse_loss(model.head.weight, torch.zeros(1, 1).expand_as(model.head.weight)).backward()
    gradient = model.head.weight.grad
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    described(model, step, only_largest(described(model, step).layers) if one_by_one else LARGE, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.count, model.kept, model.metric.update_count) == (0, [], 0)
    assert model.head.weight.grad is gradient
    assert model.token.weight.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
    assert not any(m._forward_pre_hooks for m in model.modules())


# ------------------------------------------------------------------------------------------------ a profile, progress


def test_a_profile_of_this_model_is_taken_and_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT()
    link = LinkRate(rate_bps=1e9)
    devices = tuple(Device(name=name, memory_nbytes=1 << 20) for name in "ab")
    links = (NamedLink(a="a", b="b", rate_bps=1e8),)
    known = described(model)
    profile = replace(known, micro_batches=1, samples=1, devices=devices, between_hosts=link, links=links)
    runs = spans(monkeypatch)
    found = described(model, profile=profile, memory_nbytes=LARGE)
    assert runs == []
    assert found == replace(known, between_hosts=link)


def test_a_profile_of_another_model_is_refused() -> None:
    profile = described(GPT(blocks=3))
    with pytest.raises(
        ConfigurationError, match=r"has 3 layers, 'blocks\.0' to 'blocks\.2'; 'blocks' has 4 blocks\. M"
    ):
        described(GPT(), profile=profile)
    layers = described(GPT()).layers
    other = replace(layers[2], parameter_nbytes=layers[2].parameter_nbytes * 2)
    profile = replace(profile, layers=(*layers[:2], other, layers[3]))
    with pytest.raises(
        ConfigurationError, match=r"layer 'blocks\.2' of the profile has parameters of \d+ bytes; block 2"
    ):
        described(GPT(), profile=profile)


def test_what_all_members_have_must_fit() -> None:
    model = GPT()
    model.register_buffer("mask", torch.zeros(1000))
    with pytest.raises(ConfigurationError, match=r"all members have need 3\.906 KiB; the device's memory is 1000 B"):
        described(model, memory_nbytes=1000)
    assert REST == "rest"


def test_progress_is_said_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    model = GPT()
    described(model, say=said.append)
    assert said == []
    monkeypatch.setattr(module, "TOLD_EVERY_S", -1.0)
    described(model, say=said.append)
    assert said[0] == "the model is measured for the planner: 1 passes of all layers are timed"
    said.clear()
    described(model, memory_nbytes=only_largest(described(GPT()).layers), say=said.append)
    assert said[-1].endswith("4 of 4 layers are measured, one by one")
