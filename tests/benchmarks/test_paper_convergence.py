"""Tests the convergence figures computed from curves, data and event logs, and one real join under LoRA."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.paper.convergence import claims as convergence_claims
from benchmarks.paper.convergence import data as convergence_data
from benchmarks.paper.convergence import models as convergence_models
from benchmarks.paper.convergence.curves import Curve, gap, level, mean_curve, moved, setback, sharpest
from benchmarks.paper.convergence.data import Samples, Stream, assign_kinds, owners, text_blocks
from benchmarks.paper.convergence.models import (
    GPT2_SMALL,
    Judge,
    LoRALinear,
    Problem,
    Recipe,
    add_lora,
    build_gpt,
    image_net,
    learned_arrays,
    loss_of,
)
from benchmarks.paper.convergence.training import train

TINY = {"vocabulary": 256, "context": convergence_data.BLOCK, "layers": 1, "heads": 2, "width": 16}


# ---------------------------------------------------------------------------------------------------- curves


def curve(*values: float, every: int = 10) -> Curve:
    return Curve(tuple(every * (i + 1) for i in range(len(values))), values)


def test_curves_are_compared_at_the_steps_both_have() -> None:
    one, other = curve(1.0, 2.0, 3.0), Curve((10, 30), (1.5, 7.0))
    assert gap(one, other) == 4.0
    assert gap(one, other, until=29) == 0.5
    with pytest.raises(ValueError, match="no step up to 5"):
        gap(one, other, until=5)


def test_a_curve_must_be_measured_in_order() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        Curve((10, 10), (1.0, 2.0))
    with pytest.raises(ValueError, match="1 values"):
        Curve((10, 20), (1.0,))


def test_the_mean_needs_the_same_steps() -> None:
    assert mean_curve([curve(1.0, 2.0), curve(3.0, 6.0)]).values == (2.0, 4.0)
    with pytest.raises(ValueError, match="the same steps"):
        mean_curve([curve(1.0), curve(1.0, 2.0)])


def test_moved_is_the_part_of_the_way() -> None:
    first, second = curve(1.0, 1.0, 1.0), curve(1.0, 3.0, 3.0)
    assert moved(curve(1.0, 1.0, 2.5), first, second, since=20) == pytest.approx(0.75)
    assert moved(second, first, second, since=10) == 1.0
    assert np.isnan(moved(second, first, first, since=10))
    with pytest.raises(ValueError, match="after step 30"):
        level(first, 30)


def test_a_change_counts_where_it_ends() -> None:
    jagged = curve(5.0, 9.0, 8.0, 8.5, 4.5)
    assert sharpest(jagged, 0) == 4.0
    assert sharpest(jagged, 20, 40) == 1.0
    assert setback(jagged, +1, 0, 40) == 1.0
    assert setback(jagged, -1, 20, 40) == 0.5
    assert setback(curve(1.0, 2.0), +1, 0) == 0.0
    with pytest.raises(ValueError, match="better=0"):
        setback(jagged, 0, 0)


# ---------------------------------------------------------------------------------------------------- data


def test_shards_are_disjoint_equal_and_skewed() -> None:
    kinds = np.repeat(np.arange(10), 50)
    owned = owners(10, 5, seed=3)
    assert sorted(itertools.chain(*owned)) == list(range(10))
    shares = assign_kinds(kinds, owned, per_node=80, own=0.8, seed=3)
    assert [len(s) for s in shares] == [80] * 5
    assert len(set(np.concatenate(shares))) == 400
    for mine, share in zip(owned, shares, strict=True):
        counts = np.bincount(kinds[share], minlength=10)
        assert all(counts[k] == (32 if k in mine else 2) for k in range(10))
    together = np.bincount(kinds[np.concatenate(shares)], minlength=10)
    assert set(together) == {40}


def test_shards_that_cannot_be_assigned_are_refused() -> None:
    kinds = np.repeat(np.arange(10), 20)
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        assign_kinds(kinds, owners(10, 5, 0), per_node=81, own=0.8, seed=0)
    with pytest.raises(ValueError, match="has 20 samples"):
        assign_kinds(kinds, owners(10, 5, 0), per_node=80, own=0.8, seed=0)
    with pytest.raises(ValueError, match="9 kinds"):
        owners(9, 5, 0)


def images(count: int) -> Samples:
    pixels = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), dtype=np.uint8)
    return Samples(pixels, np.arange(count, dtype=np.int64) % 10)


def test_a_stream_goes_on_and_uses_each_sample_once_a_pass() -> None:
    stream = Stream(images(12), batch=4, seed=7)
    six = list(itertools.islice(stream, 6))
    passes = [torch.cat([b[0][:, 0, 0, 0] for b in six[i : i + 3]]) for i in (0, 3)]
    assert all(len(torch.unique(p)) == 12 for p in passes)
    assert not torch.equal(passes[0], passes[1])
    again = next(iter(stream))
    assert torch.equal(six[0][0], again[0])
    with pytest.raises(ValueError, match="12 samples in batches of 5"):
        Stream(images(12), batch=5, seed=7)


def test_text_is_cut_into_train_and_test_without_overlap() -> None:
    texts = [bytes([65 + sort]) * 4000 + bytes([97 + sort]) * 1000 for sort in range(2)]
    train_blocks, test_blocks = (text_blocks(texts, 10, 1, test=test) for test in (False, True))
    assert train_blocks.kinds.tolist() == [0] * 10 + [1] * 10
    assert set(np.unique(train_blocks.inputs)) == {65, 66}
    assert set(np.unique(test_blocks.inputs)) == {97, 98}
    inputs, targets = train_blocks.tensors()
    assert inputs.shape == targets.shape == (20, convergence_data.BLOCK)
    with pytest.raises(ValueError, match="text 0 has 15 blocks"):
        text_blocks(texts, 16, 1, test=True)


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = Samples(np.arange(65, dtype=np.uint8)[None], np.zeros(1, dtype=np.int64)).tensors()
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert targets[0, -1] == 64


def test_images_that_are_not_installed_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        convergence_data.fashion_images("train", tmp_path)


def test_idx_files_are_read_and_checked(tmp_path: Path) -> None:
    pixels = np.arange(3 * 4 * 5, dtype=np.uint8)
    head = bytes((0, 0, 8, 3)) + np.array([3, 4, 5], dtype=">u4").tobytes()
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(head + pixels.tobytes()))
    labels = bytes((0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    read = convergence_data.fashion_images("t10k", tmp_path)
    assert read.inputs.shape == (3, 4, 5)
    assert read.inputs[2, 3, 4] == 59
    assert read.kinds.tolist() == [7, 8, 9]
    convergence_data.fashion_images.cache_clear()
    file.write_bytes(gzip.compress(head + pixels[:-1].tobytes()))
    with pytest.raises(ValueError, match="no IDX file"):
        convergence_data.fashion_images("t10k", tmp_path)


def test_every_sort_of_source_code_is_there() -> None:
    blocks = text_blocks(convergence_data.source_texts(), 480, 0, test=False)
    assert np.bincount(blocks.kinds).tolist() == [480] * 5


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", convergence_models.IMAGE_NETS)
def test_image_networks_learn_one_batch(name: str) -> None:
    recipe = Recipe(name, 0.03, 8, seed=1)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    inputs, targets = images(8).tensors()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="no image network 'lenet'"):
        image_net("lenet")


def test_the_gpt_does_not_look_ahead() -> None:
    net = build_gpt(1, **TINY)
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 12:] += 50
    before, after = net(tokens), net(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.equal(before[0, 12:], after[0, 12:])


def test_a_seed_draws_the_same_base_everywhere() -> None:
    one, same, other = (build_gpt(seed, **TINY).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["token.weight"], other["token.weight"])


def test_lora_begins_at_the_frozen_map_and_only_adapters_learn() -> None:
    plain = build_gpt(1, **TINY)
    tokens, targets = torch.arange(16)[None], torch.arange(1, 17)[None]
    expected = plain(tokens).detach()
    recipe = Recipe("gpt", 1e-2, 1, seed=5, sizes=TINY, rank=2, base_seed=1)
    model = recipe.model()
    assert torch.equal(model(tokens), expected)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    learning = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert set(learning) == {f"blocks.0.{m}.{x}" for m in ("qkv", "out", "up", "down") for x in "ab"}
    optimizer = recipe.optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens, targets).backward()
        optimizer.step()
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in frozen.items())
    assert all(not torch.equal(now[n], p) for n, p in learning.items())
    assert set(learned_arrays(model)) == set(learning)


def test_lora_is_a_low_rank_addition() -> None:
    base = nn.Linear(6, 4)
    layer = LoRALinear(base, rank=2, alpha=8.0, draw=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.b.normal_()
    x = torch.randn(3, 6)
    whole = base.weight + 4.0 * layer.b @ layer.a
    assert torch.allclose(layer(x), x @ whole.T + base.bias, atol=1e-6)
    with pytest.raises(ValueError, match="no linear map called qkv"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), ["qkv"], 2, 0)


def test_gpt2_small_and_its_adapters_have_the_papers_sizes() -> None:
    with torch.device("meta"):
        net = convergence_models.GPT(**GPT2_SMALL)
    assert sum(p.numel() * 4 for p in net.parameters()) / 2**20 == pytest.approx(475, abs=1)
    rank, width = 4, GPT2_SMALL["width"]
    with_adam = 3 * 4 * GPT2_SMALL["layers"] * rank * (width + 3 * width)
    assert with_adam / 2**20 == pytest.approx(1.7, abs=0.05)


def test_the_judge_counts_kinds_apart() -> None:
    samples = images(20)
    problem = Problem(Recipe("vgg", 0.03, 4, seed=0), (samples,), samples, samples.kinds == 3)
    model = problem.recipe.model()
    with torch.no_grad():
        last = model[-1]
        last.weight.zero_()  # type: ignore[union-attr, operator]
        last.bias.copy_(torch.eye(10)[3])  # type: ignore[union-attr, operator]
    assert Judge(problem)(learned_arrays(model)) == (10.0, 100.0)


def test_the_judge_of_text_gives_nats_per_byte() -> None:
    blocks = text_blocks([bytes(range(256)) * 40] * 5, 4, 0, test=True)
    problem = Problem(Recipe("gpt", 1e-3, 1, 0, TINY), (blocks,), blocks, blocks.kinds == 4)
    flat = {n: np.zeros_like(v) for n, v in learned_arrays(problem.recipe.model()).items()}
    assert Judge(problem)(flat) == pytest.approx((np.log(256), np.log(256)))


# ---------------------------------------------------------------------------------------------------- real processes


@pytest.mark.parametrize("bare", [False, True])
def test_a_frozen_base_moves_only_to_a_node_that_lacks_it(bare: bool, tmp_path: Path) -> None:
    blocks = text_blocks([bytes(range(256)) * 40] * 5, 4, 0, test=True)
    shares = tuple(blocks.take(np.arange(4) + 4 * i) for i in range(3))
    recipe = Recipe("gpt", 1e-3, 2, 0, TINY, rank=2, base_seed=1)
    other = Recipe("gpt", 1e-3, 2, 0, TINY, rank=2, base_seed=2)
    problem = Problem(recipe, shares, blocks, blocks.kinds == 2)
    run = train(
        problem,
        "out",
        nodes=2,
        change_at=4,
        last=12,
        every=4,
        folder=tmp_path,
        joiner_recipe=other if bare else None,
    )
    assert run.equal
    assert run.changed > 4
    assert run.curve.steps[:3] == (4, 8, 12)
    assert len(set(run.states.values())) == len(run.curve.steps)
    frozen = sum(p.numel() * 4 for p in recipe.model().parameters() if not p.requires_grad)
    assert run.transfer["frozen_nbytes"] == frozen
    assert run.transfer["base_equal"]
    assert convergence_claims.only_learned_moved(run.transfer) is not bare
    extra = convergence_claims.moved_nbytes(run.transfer) - convergence_claims.learned_nbytes(run.transfer)
    # Biases are zero and LayerNorm is one whatever the seed: also those are recognised.
    same = sum(
        a.nbytes
        for (_, a), (_, b) in zip(sorted(_frozen(recipe.model())), sorted(_frozen(other.model())), strict=True)
        if np.array_equal(a, b)
    )
    assert extra == (frozen - same if bare else 0)


@pytest.mark.slow
def test_a_node_that_leaves_takes_its_samples_and_the_others_go_on(tmp_path: Path) -> None:
    blocks = text_blocks([bytes(range(256)) * 40] * 5, 4, 0, test=True)
    shares = tuple(blocks.take(np.arange(4) + 4 * i) for i in range(3))
    problem = Problem(Recipe("gpt", 1e-3, 2, 0, TINY, rank=2), shares, blocks, blocks.kinds == 2)
    run = train(problem, "in", nodes=3, change_at=8, last=16, every=4, folder=tmp_path)
    assert run.equal
    assert run.changed > 8
    assert run.contributors[8] == 3
    assert run.contributors[max(run.contributors)] == 2
    assert run.curve.steps[:4] == (4, 8, 12, 16)


def _frozen(model: nn.Module) -> list[tuple[str, np.ndarray]]:
    return [(n, p.detach().numpy()) for n, p in model.named_parameters() if not p.requires_grad]


def test_a_change_between_two_measurements_is_refused(tmp_path: Path) -> None:
    blocks = text_blocks([bytes(range(256)) * 40] * 5, 4, 0, test=True)
    problem = Problem(Recipe("gpt", 1e-3, 2, 0, TINY, rank=2), (blocks,) * 3, blocks, blocks.kinds == 2)
    with pytest.raises(ValueError, match="every 4 steps"):
        train(problem, "out", nodes=2, change_at=6, last=12, every=4, folder=tmp_path)
