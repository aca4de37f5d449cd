"""What the convergence figures reckon from curves, data and event logs, and one real join under LoRA."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.paper import convergence, convergence_claims, convergence_data, convergence_models
from benchmarks.paper.convergence import Comparison, Schedule
from benchmarks.paper.convergence_claims import curve_claims, knowledge_claim, lora_claims
from benchmarks.paper.convergence_curves import Change, Curve, gap, level, mean_curve, moved, setback, sharpest
from benchmarks.paper.convergence_data import Samples, Stream, deal_kinds, owners, text_blocks
from benchmarks.paper.convergence_members import Run, change_in, contributors_by_step, rewirings, train, transfer_facts
from benchmarks.paper.convergence_models import LoRALinear, add_lora, build_gpt, image_net
from benchmarks.paper.convergence_tasks import GPT2_SMALL, Judge, Problem, Recipe, learned_arrays, loss_of
from benchmarks.paper.figure import FigureResult
from chaos_lightning.observe.reader import Record

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
    shares = deal_kinds(kinds, owned, per_node=80, own=0.8, seed=3)
    assert [len(s) for s in shares] == [80] * 5
    assert len(set(np.concatenate(shares))) == 400
    for mine, share in zip(owned, shares, strict=True):
        counts = np.bincount(kinds[share], minlength=10)
        assert all(counts[k] == (32 if k in mine else 2) for k in range(10))
    together = np.bincount(kinds[np.concatenate(shares)], minlength=10)
    assert set(together) == {40}


def test_shards_that_cannot_be_dealt_are_refused() -> None:
    kinds = np.repeat(np.arange(10), 20)
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        deal_kinds(kinds, owners(10, 5, 0), per_node=81, own=0.8, seed=0)
    with pytest.raises(ValueError, match="has 20 samples"):
        deal_kinds(kinds, owners(10, 5, 0), per_node=80, own=0.8, seed=0)
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


# ---------------------------------------------------------------------------------------------------- event logs


def event(name: str, node: str, **fields: Any) -> Record:
    return Record(t=0.0, mono=0.0, member=f"{node}~1", name=name, fields={"node": node, **fields})


def committed(step: int, weights: list[float], kind: str = "step") -> Record:
    contributors = [[f"node{i}~{i}", w] for i, w in enumerate(weights)]
    return event("committed", "node1", step=step, kind=kind, contributors=contributors)


def test_who_brought_samples_is_counted_from_the_log() -> None:
    records = [
        committed(1, [16, 16]),
        committed(1, [0, 0], kind="boundary"),
        committed(2, [16, 16, 16]),
        committed(3, [16, 0, 16]),
        event("committed", "node2", step=4, kind="step", contributors=[]),
    ]
    counts = contributors_by_step(records, "node1")
    assert counts == {1: 2, 2: 3, 3: 2}
    with pytest.raises(ValueError, match=r"before steps \[2, 3\]"):
        change_in(counts)
    assert change_in({1: 4, 2: 4, 3: 5}) == 3
    assert change_in({1: 4, 2: 4}) == 0


def test_trees_that_changed_before_the_fifth_node_did_are_told_of() -> None:
    def view(t: float, members: list[str], reason: str) -> Record:
        found = event("view", "default", members=members, reason=reason)
        return replace(found, t=t)

    records = [
        view(1.0, ["a~1", "b~2"], "founded"),
        view(3.0, ["a~1", "b~2"], "a link returned"),
        replace(committed(7, [16, 0]), t=5.0),
        view(4.0, ["a~1"], "b~2 leaves"),
        view(6.0, ["a~1"], "a link was slow"),
    ]
    assert rewirings(records, "node1", 7) == ["a link returned"]
    assert rewirings(records, "node1", 0) == ["a link returned", "a link was slow"]


def test_what_a_join_moved_is_read_from_the_newcomers_log() -> None:
    records = [
        event("observing", "node3", seq=1, head="h"),
        event("pull_done", "node3", nbytes=300, skipped=1000, hash="a", seconds=0.1),
        event("pull_done", "node2", nbytes=7, skipped=7, hash="z", seconds=0.1),
        event("replayed", "node3", seq=5, step=5, steps=4, nbytes=80),
        event("pull_done", "node3", nbytes=0, skipped=1300, hash="b", seconds=0.1),
    ]
    facts = transfer_facts(records, "node3")
    assert (facts["way"], facts["log_nbytes"], facts["replayed"]) == ("replay", 80, 4)
    assert [p["nbytes"] for p in facts["pulls"]] == [300, 0]


# ---------------------------------------------------------------------------------------------------- claims

SCHEDULE = Schedule(passes=8, change=4, per_pass=1, after=2.0, last=2.0)
LOW = (50.0, 60.0, 65.0, 70.0, 70.2, 70.0, 70.3, 70.1)
HIGH = (52.0, 64.0, 69.0, 74.0, 74.0, 73.8, 74.1, 74.1)


def comparison(change: Change, first: tuple[float, ...], second: tuple[float, ...], changing: tuple[float, ...]) -> Any:
    runs = []
    for values, how in ((first, ""), (second, ""), (changing, change)):
        run = Run(how, curve(*values), curve(*values), equal=True)  # type: ignore[arg-type]
        run.changed = 42 if how else 0
        runs.append([run])
    return Comparison("vgg", change, 10, SCHEDULE, *runs).as_json()


def agreements(change: Change, *curves: tuple[float, ...]) -> list[bool]:
    return [c.agrees for c in curve_claims([comparison(change, *curves)], change)]


def test_a_curve_that_moves_over_smoothly_agrees() -> None:
    assert agreements("out", LOW, HIGH, (*LOW[:4], 71.5, 73.0, 73.9, 74.0)) == [True, True, True]
    assert agreements("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8)) == [True, True, False]


def test_a_dip_after_the_change_disagrees() -> None:
    assert agreements("out", LOW, HIGH, (*LOW[:4], 60.0, 73.0, 73.9, 74.0)) == [True, True, False]


def test_the_same_to_the_last_bit_is_said_of_states_alone() -> None:
    def row(states: dict[int, str]) -> dict[str, Any]:
        runs = [
            Run("", curve(*LOW), curve(*LOW)),
            Run("", curve(*HIGH), curve(*HIGH)),
            Run("out", curve(*LOW), curve(*LOW)),
        ]
        runs[0].states, runs[2].states, runs[2].changed = {10: "a", 40: "b", 50: "c"}, states, 42
        return Comparison("vgg", "out", 10, SCHEDULE, *([r] for r in runs)).as_json()

    for states, identical in (({10: "a", 40: "b", 50: "x"}, True), ({10: "a", 40: "x"}, False), ({}, False)):
        found = row(states)
        assert found["identical"] is identical
        assert ("to the last bit" in curve_claims([found], "out")[0].ours) is identical


def test_changed_trees_are_the_reason_for_other_bits() -> None:
    found = comparison("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8)) | {"rewired": ["a link returned"]}
    told = curve_claims([found], "in")[0].why
    assert "a link returned" in told
    assert "a link returned" not in curve_claims([found | {"identical": True}], "in")[0].why


def test_a_curve_that_stays_disagrees() -> None:
    assert agreements("out", LOW, HIGH, LOW) == [True, False, True]


def test_a_curve_that_was_elsewhere_before_disagrees() -> None:
    early = (50.0, 60.0, 65.0, 73.0, 73.0, 73.5, 73.9, 74.0)
    assert agreements("out", LOW, HIGH, early)[0] is False


def test_what_is_retained_is_measured_on_the_leavers_kinds() -> None:
    kept = comparison("in", HIGH, LOW, (*HIGH[:4], 73.8, 73.0, 72.5, 71.8))
    lost = comparison("in", HIGH, LOW, (*HIGH[:4], 70.0, 69.0, 69.0, 69.0))
    assert knowledge_claim([kept]).agrees
    assert not knowledge_claim([kept, lost]).agrees


def test_a_repetition_of_the_picture_needs_plain_data_alone(tmp_path: Path) -> None:
    row = comparison("out", LOW, HIGH, (*LOW[:4], 71.5, 73.0, 73.9, 74.0))
    result = FigureResult("11", "title", "how", [], {"change": "out", "models": [row]})
    again = FigureResult.from_json(result.as_json())
    convergence.plot_fig11(again, tmp_path / "fig11.png")
    assert (tmp_path / "fig11.png").read_bytes()[:4] == b"\x89PNG"


def transfer(moved_nbytes: int, *, skipped: int = 1000, base_equal: bool = True) -> dict[str, Any]:
    return {
        "way": "replay",
        "pulls": [{"nbytes": moved_nbytes, "skipped": skipped, "hash": "h"}, {"nbytes": 0, "skipped": 0, "hash": "h"}],
        "log_nbytes": 0,
        "trained_nbytes": 100,
        "optimizer_nbytes": 208,
        "buffers_nbytes": 0,
        "frozen_nbytes": 1000,
        "base_equal": base_equal,
    }


@pytest.mark.parametrize(
    ("join", "agrees"),
    [
        (transfer(308), True),
        (transfer(1308, skipped=0), False),
        (transfer(300), False),
        (transfer(308, base_equal=False), False),
    ],
)
def test_only_what_learns_may_move(join: dict[str, Any], agrees: bool) -> None:
    assert convergence_claims.only_learned_moved(join) is agrees
    assert [c.agrees for c in lora_claims([transfer(308), join], None)] == [agrees]
    full = {"held": join, "bare": transfer(1308, skipped=0)}
    assert [c.agrees for c in lora_claims([transfer(308)], full)] == [True, agrees]


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


def test_a_figure_stops_repeating_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int, str]] = []

    def quick_run(kind: str, scale: Any, seed: int, nodes: int, change: str) -> Run:
        done.append((kind, nodes, change))
        values = HIGH if nodes == 5 else LOW
        return Run(change, curve(*values), curve(*values), changed=41, equal=True)  # type: ignore[arg-type]

    monkeypatch.setattr(convergence, "run_of", quick_run)
    monkeypatch.setattr(convergence, "problem_of", lambda kind, scale, seed: _Fake())
    monkeypatch.setattr(convergence, "image_schedule", lambda scale: SCHEDULE)
    scale = convergence.Scale(quick=False, budget_s=-1.0)
    found, repetitions = convergence.compare("12", ["vgg"], "in", scale, began=0.0)
    assert repetitions == 1
    assert done == [("vgg", 5, ""), ("vgg", 4, ""), ("vgg", 5, "in")]
    assert found[0].levels()[:2] == pytest.approx((74.1, 70.2))


class _Fake:
    steps_per_pass = 10
