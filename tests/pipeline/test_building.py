"""Tests models built without memory, in which a member makes only the parts that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from pipeline_models import GPT, WIDTH, step_of, tokens
from torch import Tensor, nn

from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.pipeline.absent import is_absent, named_tensors, stand_in
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.parts import ModelParts, find_parts
from chaos_lightning.pipeline.recording import Recording

Build = Callable[[], nn.Module]


def recorded(build: Build, seed: int = 7) -> tuple[Any, ModelMemory]:
    recording = Recording(seed)
    with recording.recorded():
        model = build()
    return model, ModelMemory(model, seed, "cpu", recording)


def on_meta(build: Build, seed: int = 7) -> tuple[Any, ModelMemory]:
    with torch.device("meta"):
        model = build()
    return model, ModelMemory(model, seed, "cpu")


def owning(
    way: Callable[[Build], tuple[Any, ModelMemory]], build: Build, layers: Iterable[int]
) -> tuple[Any, ModelParts]:
    """Returns a model in which only the parts of an owner of these layers have memory, and its parts."""
    model, memory = way(build)
    chain = LayerChain(model, "blocks", step_of(model))
    parts = find_parts(chain, tokens())
    chain.close()
    memory.own([name for part in parts.owned_by(layers) for name in parts.names(part)])
    return model, parts


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, _, _, tensor in named_tensors(model) if not is_absent(tensor)}


@pytest.mark.parametrize("way", [recorded, on_meta])
@pytest.mark.parametrize("tied", [False, True])
def test_each_part_begins_alike_whoever_makes_it(way: Any, tied: bool) -> None:
    state = torch.random.get_rng_state()
    whole, parts = owning(way, lambda: GPT(tied=tied), range(4))
    every = values(whole)
    assert set(every) == set(parts.part_of)
    for layers in ([0], [1, 2], [3]):
        some, _ = owning(way, lambda: GPT(tied=tied), layers)
        mine = values(some)
        assert set(mine) == {name for part in parts.owned_by(layers) for name in parts.names(part)}
        assert [name for name, value in mine.items() if not torch.equal(value, every[name])] == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert step_of(whole)(tokens()).isfinite()
    assert (whole.head.weight is whole.token.weight) == tied
    torch.manual_seed(0)
    plain = values(GPT(tied=tied))
    for name, value in every.items():
        assert float(value.std()) == pytest.approx(float(plain[name].std()), rel=0.3), name


def test_the_users_own_constructor_says_how_weights_begin() -> None:
    class Own(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(WIDTH) * 0.02 + 3)
            self.register_buffer("mask", torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))
            self.register_buffer("steps", torch.tensor([1.0, 2.0]) * torch.arange(2), persistent=False)
            self.table = 1 / 10 ** torch.arange(3.0)
            self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
            self.apply(self.begin)
            nn.init.orthogonal_(self.blocks[1].mlp[3].weight)
            for name, parameter in self.named_parameters():
                if name.endswith("mlp.1.weight"):
                    nn.init.trunc_normal_(parameter, std=1e-3)

        def begin(self, module: nn.Module) -> None:
            if isinstance(module, nn.Embedding):
                module.weight.data.normal_(std=0.5)

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().through(x * self.scale, mask)

    model, _ = owning(recorded, Own, [0, 1])
    assert float(model.scale.detach().mean()) == pytest.approx(3, abs=0.1)
    assert torch.equal(model.mask, torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))
    assert (model.steps.tolist(), model.rates[2]) == ([0.0, 2.0], pytest.approx(0.2))
    assert model.table.tolist() == pytest.approx([1, 0.1, 0.01])
    assert float(model.token.weight.detach().std()) == pytest.approx(0.5, rel=0.1)
    weight = model.blocks[1].mlp[3].weight
    assert torch.allclose(weight @ weight.T, torch.eye(WIDTH), atol=1e-5)
    assert 5e-4 < model.blocks[1].mlp[1].weight.std() < 2e-3
    assert is_absent(model.blocks[2].mlp[1].weight)


@pytest.mark.parametrize("way", [recorded, on_meta])
def test_modules_that_keep_their_tensors_twice(way: Any) -> None:
    class Recurrent(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            if torch.empty(()).device.type != "meta" or way is recorded:
                self.tables = [torch.arange(3.0), (torch.ones(2), "name")]
            self.again = self.token.weight

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().through(self.lstm(x)[0], mask)

    model, _ = owning(way, Recurrent, range(4))
    model(tokens()[0]).sum().backward()
    assert model.lstm.weight_ih_l0.grad is not None
    assert model.again is model.token.weight
    if way is recorded:
        assert model.tables[0].tolist() == [0, 1, 2]


def test_a_constructor_that_looks_at_random_values_is_told_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(2, 3 if torch.rand(()).item() > 0.5 else 2)

    with pytest.raises(UnsupportedError, match="constructor looks at a random value"):
        recorded(Odd)


def test_weights_may_be_loaded_where_the_model_is_built() -> None:
    torch.manual_seed(0)
    loaded = GPT(tied=True).double().state_dict()

    def build() -> nn.Module:
        model = GPT(tied=True)
        model.load_state_dict(loaded)
        return model.double().to("cpu")

    model, _ = owning(recorded, build, [0])
    assert torch.equal(model.head.weight, loaded["token.weight"].float().double())
    assert torch.equal(model.blocks[0].ln.bias, loaded["blocks.0.ln.bias"])
    assert is_absent(model.blocks[1].ln.bias)


def test_the_default_type_is_the_one_of_the_constructor() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return GPT()
        finally:
            torch.set_default_dtype(torch.float32)

    model, _ = owning(recorded, build, [0])
    assert {p.dtype for p in model.parameters()} == {torch.float64}


class Bare(nn.Module):
    """Norm without `reset_parameters`, whose values only its constructor sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class WithBare(GPT):
    """GPT with a norm that only its constructor initializes, before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = Bare()  # type: ignore[assignment]


def test_what_nobody_fills_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"nobody gives values to ln\.weight, ln\.count\. Build it in"):
        owning(on_meta, WithBare, [3])
    model, _ = owning(recorded, WithBare, [3])
    assert (model.ln.weight.sum(), model.ln.count) == (WIDTH, 0)


def test_the_models_own_initializer_fills_what_has_no_record() -> None:
    class Filled(WithBare):
        def init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Bare):
                nn.init.constant_(module.weight, 2)
                module.count.zero_()
            elif isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.out_proj.weight, std=9)

    model, _ = owning(on_meta, Filled, [3])
    assert (model.ln.weight.mean(), model.ln.count) == (2, 0)
    assert model.blocks[3].attention.out_proj.weight.std() > 5
    other, _ = owning(on_meta, Filled, [2])
    assert is_absent(other.ln.weight)


def test_a_model_that_was_built_in_init_keeps_its_values() -> None:
    def real(build: Build) -> tuple[Any, ModelMemory]:
        torch.manual_seed(3)
        model = build()
        return model, ModelMemory(model, 7, "cpu")

    torch.manual_seed(3)
    plain = values(GPT(tied=True))
    before: list[nn.Parameter] = []
    model, _ = owning(real, lambda: before.extend((m := GPT(tied=True)).parameters()) or m, [1, 3])  # type: ignore[func-returns-value]
    mine = values(model)
    assert "head.weight" in mine
    assert "blocks.0.ln.weight" not in mine
    assert all(torch.equal(value, plain[name]) for name, value in mine.items())
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, _, _, t in named_tensors(model)}
    assert sum(storages.values()) < 0.6 * sum(t.nbytes for t in GPT(tied=True).parameters())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1), (1, 3), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_stand_in_is_told_from_the_real_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    real = torch.zeros(shape, dtype=dtype)
    other = stand_in(real, torch.device("cpu"))
    assert (other.shape, other.dtype) == (real.shape, real.dtype)
    assert is_absent(other) == (real.numel() > 0)
    assert not is_absent(real)
    assert not is_absent(torch.zeros(4)[1:2])
    assert other.untyped_storage().nbytes() == 2 * real.itemsize


def test_parts_come_and_go_and_parameters_stay_the_same_objects() -> None:
    model, memory = recorded(GPT)
    assert memory.built_nbytes == 0
    assert ModelMemory(whole := GPT(), 7, "cpu").built_nbytes == sum(p.nbytes for p in whole.parameters())
    parameters = list(model.parameters())
    names = [name for name, *_ in named_tensors(model.blocks[0])]
    full = [f"blocks.0.{name}" for name in names]
    memory.own(full)
    value = model.blocks[0].ln.weight.clone()
    memory.leave_out(full)
    assert is_absent(model.blocks[0].ln.weight)
    memory.room(full)
    assert not is_absent(model.blocks[0].ln.weight)
    memory.leave_out(full)
    memory.own(full)
    assert torch.equal(model.blocks[0].ln.weight, value)
    memory.forget()
    memory.leave_out(full)
    with pytest.raises(
        StateError, match=r"blocks\.0\.ln\.weight, .* was freed since; expected them from another member"
    ):
        memory.own(full)
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
    assert all(p.requires_grad and p.grad is None for p in parameters)
