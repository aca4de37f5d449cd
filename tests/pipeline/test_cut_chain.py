"""Tests models run in stages: the results equal those of the whole bit for bit, or the model is refused with the
reason.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import (
    GPT,
    WIDTH,
    Block,
    Checkpointed,
    Holder,
    Segments,
    assert_equal,
    image_step,
    images,
    run_cut,
    step_of,
    tokens,
)
from torch import Tensor, nn

from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError, WireError
from chaos_lightning.pipeline.absent import is_absent, named_tensors, put, stand_in
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.specs import Specs, read


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------ equal


@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]])
@pytest.mark.parametrize("kind", [GPT, Checkpointed, Segments])
def test_stages_are_equal_to_the_whole(kind: type[GPT], cuts: list[int]) -> None:
    assert_equal(kind(), "blocks", cuts, step_of, tokens())


def test_a_tied_embedding_has_the_gradients_of_both_uses() -> None:
    assert_equal(GPT(tied=True), "blocks", [2], step_of, tokens())


def test_work_between_blocks_belongs_to_the_layer_before() -> None:
    class Between(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            for block, norm in zip(self.blocks, self.norms, strict=True):
                x = norm(block(mask=mask, x=x * 0.9))
            return x

    assert_equal(Between(), "blocks", [1, 3], step_of, tokens())


def test_a_convolutional_net_keeps_the_order_of_its_elements() -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(16, 10),
    ).to(memory_format=torch.channels_last)
    assert_equal(Holder(net=net), "net", [1, 2, 3], image_step, images())


def test_a_first_argument_may_be_a_tuple_or_a_dict() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
            x, more = pair
            x = self.linear(x).tanh()
            return x, {"sum": more["sum"] + x.mean(), "count": more["count"] + 1, "rows": x.shape[0]}

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(Pair() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            x, more = self.net((x, {"sum": torch.zeros(()), "count": torch.zeros((), dtype=torch.long)}))
            assert (int(more["count"]), more["rows"]) == (3, 4)
            return x.sum() + more["sum"]

    assert_equal(Pairs(), "net", [1, 2], lambda model: model, torch.randn(4, WIDTH))


def test_shapes_may_change_from_batch_to_batch() -> None:
    model = GPT()
    chains = [LayerChain(copy.deepcopy(model), "blocks", lambda batch: None) for _ in range(2)]
    for length in (5, 16, 3):
        batch = tokens(length=length)
        steps = [step_of(chain.root) for chain in chains]
        first = chains[0].run(0, 2, batch, call=steps[0])
        last = chains[1].run(2, 4, batch, first.tensors, first.specs, call=steps[1])
        assert torch.equal(last.result, step_of(model)(batch))


def test_a_block_may_write_into_what_it_is_given() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.linear(x)

    model = Holder(net=nn.Sequential(*(InPlace() for _ in range(3))))
    assert_equal(model, "net", [1, 2], lambda m: lambda x: m.net(x.clone()).sum(), torch.randn(4, WIDTH))


def test_a_frozen_block_needs_no_gradient_from_behind() -> None:
    model = GPT()
    for module in (model.token, model.position, model.blocks[0]):
        module.requires_grad_(False)
    assert_equal(model, "blocks", [1, 3], step_of, tokens())


def test_a_parameter_on_the_root_is_real_everywhere() -> None:
    class Learned(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(WIDTH))

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().through(x + self.shift, mask) * self.shift

    assert_equal(Learned(), "blocks", [1, 3], step_of, tokens())


def test_a_module_whose_result_cannot_be_sent_is_replaced_by_its_own_modules() -> None:
    class Embedded:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.norm = nn.Embedding(97, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Embedded:
            return Embedded(self.norm(self.token(x)))

    class Odd(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding()
            del self.token, self.position

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.through(self.embedding(x).x, None))  # type: ignore[arg-type]

    assert_equal(Odd(), "blocks", [1, 3], step_of, tokens())


def test_a_step_that_is_taken_apart_runs_nothing_before_its_stage() -> None:
    class ByHand(GPT):
        looked = 0

        def chaos_before(self, batch: Any) -> tuple[Tensor, Tensor]:
            x = self.token(batch[0])
            self.looked += int(x.max() > -100)
            return x, x

        def chaos_after(self, x: tuple[Tensor, Tensor], batch: Any) -> Tensor:
            return F.cross_entropy(self.head(x[0] + x[1]).flatten(0, 1), batch[1].flatten())

    class Twice(Block):
        def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(both[0], None), both[1]  # type: ignore[arg-type]

    model = ByHand()
    model.blocks = nn.ModuleList(Twice() for _ in range(4))

    def step_for(model: Any) -> Any:
        return lambda batch: model.chaos_after(nn.Sequential(*model.blocks)(model.chaos_before(batch)), batch)

    assert_equal(model, "blocks", [1, 3], step_for, tokens())
    model.chaos_after = None  # type: ignore[assignment, method-assign]
    with pytest.raises(ConfigurationError, match="has chaos_before alone; expected both"):
        LayerChain(model, "blocks", step_for(model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_stages_evaluate_without_gradients(mode: Any) -> None:
    model = GPT(tied=True)
    chain = LayerChain(model, "blocks", lambda batch: None)
    evaluate = lambda batch: model(batch[0])  # noqa: E731
    with mode():
        expected = chain.run(0, 4, tokens(), call=evaluate).result
        first = chain.run(0, 3, tokens(), call=evaluate)
        assert not first.tensors[0].requires_grad
        assert torch.equal(chain.run(3, 4, tokens(), first.tensors, first.specs, call=evaluate).result, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("by_method", [True, False])
def test_compiled_blocks(by_method: bool) -> None:
    def compiled(model: GPT) -> Any:
        for index, block in enumerate(model.blocks):
            if by_method:
                block.compile(backend="eager")
            elif not hasattr(block, "_orig_mod"):
                model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        return step_of(model)

    model = GPT()
    if not by_method:
        compiled(model)
    assert_equal(model, "blocks", [1, 3], step_of if not by_method else compiled, tokens())


# ------------------------------------------------------------------------------------------------ refused


def refused(model: nn.Module, words: str, step_for: Any = step_of, cuts: tuple[int, ...] = (1, 3)) -> None:
    with pytest.raises(UnsupportedError, match=words):
        run_cut(model, "blocks", list(cuts), step_for, tokens())


def through(way: Any, kind: type[GPT] = GPT) -> GPT:
    """Returns a GPT whose blocks are called by the given function."""
    return type("Other", (kind,), {"through": way})()


def test_a_reentrant_checkpoint_is_refused() -> None:
    refused(through(Checkpointed.through, type("R", (GPT,), {"reentrant": True})), r"blocks\.0 .*use_reentrant=False")


def test_a_skip_over_a_border_is_refused() -> None:
    def skip(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x + outputs[0] if i == 3 else x, mask)
            outputs.append(x)
        return x

    refused(through(skip), r"first argument of blocks\.3 depends on blocks\.0, .* layers 1 to 2 run")


def test_another_argument_that_depends_on_the_embedding_is_refused() -> None:
    def values(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        padded = (x.sum(-1) == 0)[:, :1].float().mean()
        for block in self.blocks:
            x = block(x, mask + padded)
        return x

    refused(through(values), r"an argument of blocks\.1 depends on position, token, ")


def test_a_loss_that_looks_at_all_blocks_is_refused() -> None:
    def seen(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        self.seen = []
        for block in self.blocks:
            x = block(x, mask)
            self.seen.append(x.pow(2).mean())
        return x

    refused(
        through(seen),
        r"what the step returns depends on blocks\.0, blocks\.1, blocks\.2, which another stage has",
        lambda model: lambda batch: {"loss": step_of(model)(batch) + sum(model.seen)},
    )


def test_a_logged_value_that_depends_on_a_placeholder_can_be_refused() -> None:
    logged: list[Tensor] = []

    def log(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        logged.append(x.norm())
        return GPT.through(self, x, mask)

    model = through(log)
    chain = LayerChain(model, "blocks", lambda batch: None)

    def step(batch: Any) -> Tensor:
        loss = step_of(model)(batch)
        chain.refuse_placeholders(loss, "'loss'")
        chain.refuse_placeholders(logged[-1], "'norm'")
        return loss

    assert chain.run(0, 4, tokens(), call=step).result.isfinite()
    first = chain.run(0, 2, tokens(), call=step)
    with pytest.raises(UnsupportedError, match="'norm' depends on position, token"):
        chain.run(2, 4, tokens(), first.tensors, first.specs, call=step)


def test_a_placeholder_that_reaches_a_block_unseen_is_refused() -> None:
    class Reads(Block):
        model: Any

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x + self.model[0].start, mask)

    def keep(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        self.start = x
        return GPT.through(self, x, mask)

    def step_for(model: Any) -> Any:
        for block in model.blocks:
            block.model = (model,)
        return step_of(model)

    model = through(keep)
    model.blocks = nn.ModuleList(Reads() for _ in range(4))
    refused(model, r"an argument of blocks\.2 depends on position, token", step_for)


def test_a_look_at_a_value_is_refused_with_its_line() -> None:
    def look(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        if x.max() > 100:
            x = x / 2
        return GPT.through(self, x, mask)

    refused(
        through(look),
        r"looks at values that depend on position, token.*test_cut_chain.py, line \d+: .if x.max\(\) > 100",
    )


def test_shapes_and_types_of_placeholders_are_no_values() -> None:
    def shapes(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        return GPT.through(self, x, mask.to(x.dtype) * -1e9 + torch.zeros_like(x).sum())

    assert_equal(through(shapes), "blocks", [1, 3], step_of, tokens())


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 2, 1, 3), r"blocks\.2 is called where blocks\.1 is due"),
        ((0, 1, 1, 2, 3), r"blocks\.1 is called a second time where blocks\.2 is due"),
        ((0, 1, 2, 3, 0), r"blocks\.0 is called a second time where all blocks have been called"),
        ((0, 1, 2), r"has ended and blocks\.3 was not called"),
        ((), r"has ended and blocks\.0 was not called.*name their list"),
    ],
)
def test_blocks_out_of_order_are_refused(order: tuple[int, ...], words: str) -> None:
    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        for i in order:
            x = self.blocks[i](x, mask)
        return x

    refused(through(way), words)


def test_a_step_that_catches_everything_is_refused() -> None:
    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        try:
            return GPT.through(self, x, mask)
        except BaseException:
            return x

    refused(through(way), "catches BaseException")


def test_a_step_that_calls_other_modules_elsewhere_is_refused() -> None:
    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        if is_absent(self.blocks[0].ln.weight):
            x = x + self.position(torch.arange(x.shape[1]))
        return GPT.through(self, x, mask)

    refused(through(way), "position is called here where the stage before called blocks.0")


def test_a_block_that_returns_something_else_is_refused() -> None:
    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask).values()
        return x

    class Odd(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return {1: super().forward(x, mask)}.values()

    model = GPT()
    model.blocks[0] = Odd()
    refused(model, r"what blocks\.0 returns is or holds a dict_values; expected a tensor")


def test_a_weight_of_another_stage_is_named_when_it_is_used() -> None:
    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        return GPT.through(self, x, mask) @ self.blocks[0].mlp[1].weight[:WIDTH]

    refused(through(way), r"depends on blocks\.0\.mlp\.1\.weight, which another stage has")


def test_a_call_outside_of_units_is_refused_where_a_weight_is_absent() -> None:
    """A hook that calls the model outside of a step is refused at a member without all weights, instead of
    getting NaN.
    """
    model, seen = GPT(), []
    step = step_of(model)
    chain = LayerChain(model, "blocks", lambda batch: seen.append(chain.is_last) or step(batch))
    x, y = tokens()
    assert model(x).isfinite().all()
    first = chain.run(0, 2, (x, y))
    chain.run(2, 4, (x, y), tuple(t.detach() for t in first.tensors), first.specs)
    assert seen == [False, True]
    assert not chain.is_last
    for _, module, name, tensor in named_tensors(model.blocks[2]):
        put(module, name, tensor, stand_in(tensor, tensor.device))
    with pytest.raises(UnsupportedError, match=r"blocks.2 is called outside of .*does not hold its ln.weight"):
        model(x)
    chain.close()
    assert model(x).isnan().any()


def test_a_write_to_what_another_stage_has_is_refused() -> None:
    class Counting(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.zeros(3))

        def through(self, x: Tensor, mask: Tensor) -> Tensor:
            self.counts += 1
            return super().through(x, mask)

    model = Counting()
    model.counts.data = stand_in(model.counts, torch.device("cpu"))
    chain = LayerChain(model, "blocks", step_of(model))
    with pytest.raises(
        UnsupportedError, match="writes to a parameter or buffer that this stage, layers 0 to 1, does not"
    ):
        chain.run(0, 2, tokens())


def test_chains_that_are_none_are_refused() -> None:
    model = GPT()
    same = nn.Linear(2, 2)
    for root, path, words in [
        (model, "layers", r"no chain 'layers'; name .* such as 'blocks'"),
        (model, "head", "is a Linear of no blocks"),
        (Holder(net=nn.Sequential(same, same)), "net", r"net\.1 is the same module"),
        (Holder(model=torch.compile(GPT(), backend="eager")), "model.blocks", "compile its blocks one by one"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            LayerChain(root, path, step_of(root))


# ------------------------------------------------------------------------------------------------ NaN


def test_the_users_own_nan_is_no_refusal() -> None:
    def bad(model: GPT) -> Any:
        return lambda batch: step_of(model)(batch) * float("nan")

    result, _ = run_cut(GPT(), "blocks", [2], bad, tokens())
    assert result.isnan()


def test_a_placeholder_that_shows_in_a_later_pass_is_refused() -> None:
    seen: list[Tensor] = []

    def way(self: GPT, x: Tensor, mask: Tensor) -> Tensor:
        seen[:] = [x]
        return GPT.through(self, x, mask)

    model, late = through(way), [False]
    step = lambda batch: step_of(model)(batch) + (seen[0].mean() if late[0] else 0)  # noqa: E731
    chain = LayerChain(model, "blocks", step)
    for late[0] in (False, True):
        first = chain.run(0, 2, tokens())
        if not late[0]:
            assert chain.run(2, 4, tokens(), first.tensors, first.specs).result.isfinite()
    with pytest.raises(UnsupportedError, match="what the step returns depends on position, token"):
        chain.run(2, 4, tokens(), first.tensors, first.specs)


# ------------------------------------------------------------------------------------------------ the model itself


def test_copies_and_pickles_are_of_the_users_own_classes() -> None:
    model = GPT()
    chain = LayerChain(model, "blocks", step_of(model))
    assert isinstance(model.blocks[0], Block)
    assert repr(model) == repr(GPT())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.blocks[0]) is Block
        assert torch.equal(step_of(other)(tokens()), step_of(model)(tokens()))
    with pytest.raises(ConfigurationError, match="belongs to a chain already"):
        LayerChain(model, "blocks", step_of(model))
    chain.close()
    assert type(model.blocks[0]) is Block
    LayerChain(model, "blocks", step_of(model)).close()


def test_a_backward_pass_belongs_to_its_unit() -> None:
    model = Checkpointed()
    chain = LayerChain(model, "blocks", step_of(model))
    first = chain.run(0, 2, tokens())
    units = [chain.run(2, 4, tokens(), first.tensors, first.specs) for _ in range(2)]
    with pytest.raises(StateError, match=r"blocks\.3 is called in a backward pass that is none of a unit's"):
        units[0].result.backward()
    with units[1].backward_pass():
        units[1].result.backward()
    assert [gradient is not None for gradient in units[1].gradients()] == [True]


def test_what_was_sent_must_fit_its_specs() -> None:
    model = GPT()
    chain = LayerChain(model, "blocks", step_of(model))
    unit = chain.run(0, 2, tokens())
    with pytest.raises(StateError, match=r"layer 2 was sent .* its specs say"):
        chain.run(2, 4, tokens(), [unit.tensors[0][:, 1:]], unit.specs)
    with pytest.raises(WireError, match="cannot be read"):
        chain.run(2, 4, tokens(), unit.tensors, unit.specs[1:])


@pytest.mark.parametrize(
    "border",
    [
        '["tensor", [-1], "float32", true, null]',
        '["tensor", [1], "Tensor", true, null]',
        '["tensor", [2, 2], "float32", true, [0, 0]]',
        '["tensor", [99999999999999], "float32", true, null]',
        '["plain", [1]]',
        '["dict", ["a"], []]',
        '["x"]',
        "7",
        "[" * 3000 + "]" * 3000,
        '["tuple", ' * 99 + '["plain", 1]' + "]" * 99,
    ],
)
def test_a_hostile_text_is_no_specs(border: str) -> None:
    with pytest.raises(WireError):
        read(f'{{"border": {border}, "calls": [], "forms": []}}')
    assert read(Specs(["plain", 1], (("a", ["plain", 2]),)).text()).calls == (("a", ["plain", 2]),)
