"""Tests the measurement of a model in a user's loop: bytes exactly, and times by large ratios."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.find_chain import find_chain
from chaos_lightning.pipeline.layer_times import LayerClock, LayerTimer
from chaos_lightning.pipeline.model_profile import ModelProfile
from chaos_lightning.pipeline.profile import ModelProfiler, Outcome

WIDTH, WORDS, BATCH, LENGTH = 64, 50, 8, 16
FLOATS = 4
LINEAR = (WIDTH * WIDTH + WIDTH) * FLOATS
HIDDEN = BATCH * LENGTH * WIDTH * FLOATS
TOKENS = BATCH * LENGTH * 8
TABLE = WORDS * WIDTH * FLOATS
SLEEP_S = 0.1
COUNTER = 4
"""AdamW's `step` of each parameter."""


COMPILING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""torch's compiler hides this warning by a filter that gives way to pytest's."""


class Block(nn.Module):
    """Linear layer with ReLU, which may sleep in its forward pass."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.linear, self.sleep_s = nn.Linear(WIDTH, WIDTH), sleep_s

    def forward(self, x: Tensor) -> Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.relu(self.linear(x))


class Text(nn.Module):
    """Model of an embedding, blocks, and a head that may share the embedding's weight."""

    def __init__(self, *blocks: nn.Module, tied: bool = False, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.net = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.run is not None:
            x = self.run(self.net, x)
        else:
            for block in self.net:
                x = block(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH))


def loss_of(model: nn.Module) -> Tensor:
    tokens = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> None:
    """Makes one optimizer step of a plain training loop."""
    optimizer.zero_grad()
    for _ in range(accumulate):
        loss_of(model).backward()
    optimizer.step()


@pytest.fixture
def measured() -> Iterator[Callable[..., Outcome]]:
    """Yields a function that measures a model in the caller's loop; afterwards checks that no hook is left."""
    real = torch.autograd.backward
    profilers: list[ModelProfiler] = []

    def run(model: nn.Module | None, step: Callable[[], None], steps: int = 6, chain: str = "") -> Outcome:
        found: list[Outcome] = []
        profiler = ModelProfiler(report=found.append, steps=steps, chain=chain, root=model)
        profilers.append(profiler)
        profiler.attach()
        for _ in range(1 + 4 + steps):
            if found:
                break
            step()
        assert found, profiler.done_steps
        return found[0]

    yield run
    for profiler in profilers:
        profiler.detach()
    assert torch.autograd.backward is real
    assert not nn.modules.module._global_forward_pre_hooks


def profile_of(outcome: Outcome) -> ModelProfile:
    assert isinstance(outcome, ModelProfile), outcome
    return outcome


def about_the_model(profile: ModelProfile) -> list[str]:
    """Returns a profile's notes, except the one that appears when the machine is busy."""
    return [note for note in profile.notes if "half of the steps differ" not in note]


def refusal(outcome: Outcome) -> str:
    assert isinstance(outcome, ConfigurationError), outcome
    return str(outcome)


# ------------------------------------------------------------------------------------------------ bytes


def test_bytes_are_those_that_one_counts_by_hand(measured: Any) -> None:
    model = Text()
    optimizer = adam(model)
    first, middle, last = profile_of(measured(model, lambda: train(model, optimizer))).layers
    assert [x.name for x in (first, middle, last)] == ["net.0", "net.1", "net.2"]
    for layer, more, tensors in ((first, TABLE, 3), (middle, 0, 2), (last, TABLE, 3)):
        assert layer.parameter_nbytes == layer.gradient_nbytes == LINEAR + more
        assert layer.optimizer_nbytes == 2 * (LINEAR + more) + tensors * COUNTER
    # The words' places, the linear layer's input, and ReLU's output, which is the next one's input.
    assert first.activation_nbytes == TOKENS + 2 * HIDDEN
    assert middle.activation_nbytes == HIDDEN
    # The loss keeps logarithms of probabilities, and the weight of all targets.
    assert last.activation_nbytes == HIDDEN + BATCH * LENGTH * WORDS * FLOATS + 4
    assert (first.output_nbytes, middle.output_nbytes, last.output_nbytes) == (HIDDEN, HIDDEN, 0)
    # The linear layer's output is gone when ReLU's is there.
    assert middle.workspace_nbytes == HIDDEN


def test_tied_weights_are_at_both_ends_and_told(measured: Any) -> None:
    model = Text(tied=True)
    optimizer = adam(model)
    profile = profile_of(measured(model, lambda: train(model, optimizer)))
    assert profile.tied_nbytes == TABLE
    assert profile.layers[0].parameter_nbytes == profile.layers[2].parameter_nbytes == LINEAR + TABLE
    assert about_the_model(profile) == []


def test_frozen_layers_have_no_gradients_and_no_backward_pass(measured: Any) -> None:
    model = Text()
    for module in (model.words, model.net[0], model.head):
        module.requires_grad_(False)
    optimizer = adam(model)
    first, middle, last = profile_of(measured(model, lambda: train(model, optimizer))).layers
    assert (first.parameter_nbytes, first.gradient_nbytes, first.optimizer_nbytes) == (LINEAR + TABLE, 0, 0)
    assert first.activation_nbytes == 0
    assert first.backward_s < 1e-8
    assert middle.gradient_nbytes == LINEAR
    assert (last.parameter_nbytes, last.gradient_nbytes) == (LINEAR + TABLE, LINEAR)
    assert first.optimizer_s == 0 < middle.optimizer_s == last.optimizer_s


def test_blocks_without_weights_have_no_bytes_of_state(measured: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = adam(model)

    def step() -> None:
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()

    profile = profile_of(measured(None, step))
    assert [x.parameter_nbytes for x in profile.layers] == [0, LINEAR, 0]
    assert (profile.chain, profile.kind, profile.samples) == ("", "Flatten and Linear and ReLU", BATCH)


def test_buffers_count_with_parameters(measured: Any) -> None:
    model = Text(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    middle = profile_of(measured(model, lambda: train(model, optimizer))).layers[1]
    assert middle.gradient_nbytes == LINEAR + 2 * LENGTH * FLOATS
    assert middle.parameter_nbytes == middle.gradient_nbytes + 2 * LENGTH * FLOATS + 8  # mean, variance, and a counter
    assert middle.optimizer_nbytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_inputs_and_computes_again(measured: Any, reentrant: bool) -> None:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    model = Text(Block(), Block(SLEEP_S), Block(), run=run)
    optimizer = adam(model)
    first, middle, last = profile_of(measured(model, lambda: train(model, optimizer))).layers
    assert middle.activation_nbytes == HIDDEN
    assert middle.gradient_nbytes == LINEAR
    assert middle.backward_s > SLEEP_S > 2 * max(first.backward_s, last.backward_s)


# ------------------------------------------------------------------------------------------------ times and steps


def test_a_layer_that_sleeps_takes_the_time(measured: Any) -> None:
    model = Text(Block(), Block(SLEEP_S), Block())
    optimizer = adam(model)
    profile = profile_of(measured(model, lambda: train(model, optimizer)))
    first, middle, last = profile.layers
    assert middle.forward_s > SLEEP_S > 2 * max(first.forward_s, last.forward_s, middle.backward_s)
    assert profile.step_s > SLEEP_S


def test_work_between_two_blocks_belongs_to_the_first_of_them(measured: Any) -> None:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x = blocks[0](x)
        x = blocks[1](x)
        time.sleep(SLEEP_S)
        return blocks[2](x)

    model = Text(run=run)
    optimizer = adam(model)
    first, middle, last = profile_of(measured(model, lambda: train(model, optimizer))).layers
    assert middle.forward_s > SLEEP_S > 2 * max(first.forward_s, last.forward_s)


def test_accumulation_is_told_and_times_are_of_one_micro_batch(measured: Any) -> None:
    model = Text(Block(), Block(SLEEP_S), Block())
    optimizer = adam(model)
    profile = profile_of(measured(model, lambda: train(model, optimizer, accumulate=3)))
    assert (profile.micro_batches, profile.samples) == (3, BATCH)
    assert SLEEP_S < profile.layers[1].forward_s < 2 * SLEEP_S
    assert profile.step_s > 3 * SLEEP_S


def test_validation_and_other_models_do_not_count(measured: Any) -> None:
    model, other = Text(), Text()
    optimizer, others = adam(model), adam(other)

    def step() -> None:
        train(model, optimizer)
        with torch.no_grad():
            loss_of(model)
        model.eval()
        loss_of(model)
        model.train()
        others.step()

    assert profile_of(measured(model, step)).micro_batches == 1


def test_the_model_is_found_by_its_optimizer(measured: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Text()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens)

    model = Wrapper()
    average = copy.deepcopy(model)
    optimizer = adam(model)
    assert profile_of(measured(None, lambda: train(model, optimizer))).chain == "inner.net"
    assert isinstance(average, Wrapper)


@COMPILING
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_that_are_compiled_one_by_one_are_measured(measured: Any, in_place: bool) -> None:
    model = Text()
    for i, block in enumerate(model.net):
        if in_place:
            block.compile(backend="eager")
        else:
            model.net[i] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    optimizer = adam(model)
    profile = profile_of(measured(model, lambda: train(model, optimizer)))
    assert profile.kind == "Block"
    assert profile.layers[1].activation_nbytes == HIDDEN
    assert "workspace" in about_the_model(profile)[-1]


# ------------------------------------------------------------------------------------------------ refusals and notes


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return blocks[2](blocks[1](blocks[0](blocks[0](x))))


def backwards(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return blocks[1](blocks[2](blocks[0](x)))


def short(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return blocks[1](blocks[0](x))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (twice, "block net.0 is called a second time in one micro-batch, where net.1 is due"),
        (backwards, "block net.2 is called where net.1 is due"),
        (short, "block net.2 was not called before the backward pass began"),
    ],
)
def test_what_is_no_chain_is_refused(measured: Any, run: Any, words: str) -> None:
    model = Text(run=run)
    optimizer = adam(model)
    assert words in refusal(measured(model, lambda: train(model, optimizer)))


def test_two_forward_passes_for_one_backward_pass_are_refused(measured: Any) -> None:
    model = Text()
    optimizer = adam(model)

    def step() -> None:
        (loss_of(model) + loss_of(model)).backward()
        optimizer.step()

    assert "block net.0 is called a second time in one micro-batch, where the chain is at its end" in refusal(
        measured(model, step)
    )


def test_two_backward_passes_for_one_forward_pass_are_refused(measured: Any) -> None:
    model = Text()
    optimizer = adam(model)

    def step() -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    assert "a backward pass began without a forward pass of Text before it" in refusal(measured(model, step))


def test_two_optimizers_are_refused(measured: Any) -> None:
    model = Text()
    one, other = torch.optim.SGD(model.net.parameters(), 0.1), torch.optim.AdamW(model.head.parameters())

    def step() -> None:
        train(model, one)
        other.step()

    assert "SGD and AdamW both step parts of the model" in refusal(measured(model, step))


@COMPILING
def test_models_that_hide_their_blocks_are_refused(measured: Any) -> None:
    whole: Any = torch.compile(Text(), backend="eager")
    optimizer = adam(whole)
    assert "compiled as a whole" in refusal(measured(None, lambda: train(whole, optimizer)))
    in_place = Text()
    in_place.compile(backend="eager")
    its = adam(in_place)
    assert "compiled as a whole" in refusal(measured(in_place, lambda: train(in_place, its)))


def test_a_block_that_is_there_twice_is_refused(measured: Any) -> None:
    block = Block()
    model = Text(block, block)
    optimizer = adam(model)
    assert "net.1 is the same module as an earlier block" in refusal(measured(model, lambda: train(model, optimizer)))


def test_lbfgs_is_refused(measured: Any) -> None:
    model = Text()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert "LBFGS" in refusal(measured(model, lambda: optimizer.step(closure) and None))


def test_a_skip_over_a_border_is_noted(measured: Any) -> None:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        early = blocks[0](x)
        return blocks[2](blocks[1](early) + early)

    def late(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        early = blocks[0](x)
        return blocks[2](blocks[1](early)) + early

    for how, notes in ((run, 0), (late, 1)):
        model = Text(run=how)
        optimizer = adam(model)
        profile = profile_of(measured(model, lambda m=model, o=optimizer: train(m, o)))
        assert len(about_the_model(profile)) == notes
        assert all("net.2 get something of earlier layers" in note for note in about_the_model(profile))
        assert profile.tied_nbytes == 0


def test_weights_that_several_layers_use_are_noted(measured: Any) -> None:
    model = Text()
    model.net[1].linear.weight = model.net[2].linear.weight
    optimizer = adam(model)
    profile = profile_of(measured(model, lambda: train(model, optimizer)))
    words = "net.1.linear.weight is used by net.1, net.2, and counts at each"
    assert about_the_model(profile) == [words]


# ------------------------------------------------------------------------------------------------ the chain


def test_the_longest_list_of_alike_blocks_is_the_chain() -> None:
    experts = [nn.ModuleList([nn.Linear(4, 4) for _ in range(8)]) for _ in range(3)]
    model = nn.Module()
    model.blocks, model.tail = (
        nn.ModuleList(experts),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()),
    )
    assert find_chain(model).path == "blocks"
    assert find_chain(model, "tail").path == "tail"
    model.chaos_chain = "tail"
    assert find_chain(model).path == "tail"


def test_lists_within_blocks_are_not_offered() -> None:
    model = nn.Module()
    for name in ("encoder", "decoder"):
        model.add_module(name, nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]))
    with pytest.raises(ConfigurationError) as error:
        find_chain(model)
    assert str(error.value).endswith("chain=: encoder (Sequential x 3), decoder (Sequential x 3)")


def test_the_only_list_is_the_chain_whatever_is_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert (find_chain(model).path, find_chain(model).kind) == ("", "Linear and ReLU")


@pytest.mark.parametrize(
    ("lists", "path", "words"),
    [
        ((), "", "Module has no list of blocks; expected an nn.Sequential or an nn.ModuleList of two blocks or more"),
        ((2, 2), "", "2 lists of blocks that could be its chain; name one, by --chain PATH or chain=: "),
        (
            (2, 3),
            "list2",
            "'list2' is no list of blocks of Module; name one, by --chain PATH or chain=: list0 (Linear x 2), ",
        ),
    ],
)
def test_a_chain_that_is_not_clear_is_asked_for(lists: tuple[int, ...], path: str, words: str) -> None:
    model = nn.Module()
    for i, count in enumerate(lists):
        model.add_module(f"list{i}", nn.ModuleList([nn.Linear(4, 4) for _ in range(count)]))
    with pytest.raises(ConfigurationError) as error:
        find_chain(model, path)
    assert words in str(error.value)


# ------------------------------------------------------------------------------------------------ the timer by itself


def test_passes_of_stages_are_timed_though_they_overlap() -> None:
    """Overlapping passes are timed right: the second micro-batch's forward pass comes before the first one's backward
    pass, as in 1F1B.
    """
    blocks = [Block(), Block(SLEEP_S), Block()]
    timer = LayerTimer(blocks, LayerClock(torch.device("cpu")))
    timer.attach()
    kept = []
    for _ in range(2):
        timed = timer.begin(1, 3)
        x = torch.ones(4, WIDTH)
        for block in blocks[1:]:
            x = block(x)
        timed.forward_ends()
        kept.append((timed, x))
    for timed, x in kept:
        timed.backward_begins()
        x.sum().backward()
        timed.ends()
    times = timer.medians()
    assert sorted(times) == [1, 2]
    assert times[1][0] > SLEEP_S > 2 * times[2][0]
    timer.detach()
    assert not any(block._forward_pre_hooks for block in blocks)
    blocks[2](torch.ones(4, WIDTH))  # nobody counts it


def test_stages_of_a_cut_model_are_timed() -> None:
    """Each stage's layers are timed when a model runs in stages; the first micro-batch, which may run twice, does not
    count.
    """
    model = Text(Block(), Block(SLEEP_S), Block())
    chain = LayerChain(model, "net", lambda tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    timer = LayerTimer(chain.blocks, LayerClock(torch.device("cpu")), refuse=lambda error: None)
    timer.attach()

    def unit(first: int, end: int, *received: Any) -> tuple[Any, Any]:
        timed = timer.begin(first, end)
        done = chain.run(first, end, tokens, *received)
        timed.forward_ends()
        return timed, done

    for _ in range(4):
        tokens = batch()
        early, front = unit(0, 2)
        late, back = unit(2, 3, tuple(t.detach() for t in front.tensors), front.specs)
        late.backward_begins()
        gradients = back.backward([back.result], [None])
        late.ends()
        early.backward_begins()
        front.backward(front.tensors, gradients)
        early.ends()
    times = timer.medians()
    assert sorted(times) == [0, 1, 2]
    assert times[1][0] > SLEEP_S > 2 * max(times[0][0], times[2][0])
    assert all(backward > 0 for _, backward in times.values())
    timer.detach()
    chain.close()


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch.accelerator finds no device here")
def test_an_accelerators_stream_and_allocator_are_asked(measured: Any) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = Text().to(device)
    optimizer = adam(model)

    def step() -> None:
        optimizer.zero_grad()
        tokens = batch().to(device)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    profile = profile_of(measured(model, step))
    assert profile.device == device.type
    assert profile.layers[1].activation_nbytes == HIDDEN
    assert profile.layers[1].workspace_nbytes >= HIDDEN
    assert 0 < sum(layer.forward_s + layer.backward_s for layer in profile.layers) < 2 * profile.step_s
