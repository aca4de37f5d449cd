"""Tests validation in rounds: hooks, loggers and metrics get the same values at every member as in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from round_members import (
    BLOCKS,
    Endless,
    Heard,
    Measures,
    Memory,
    Model,
    Validates,
    fit,
    fit_in_rounds,
    loader,
    samples,
)
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from chaos_lightning.errors import DepartedError, FencedError, StateError, UnsupportedError, WireError
from chaos_lightning.member.participation import Footing, Participation
from chaos_lightning.pipeline.absent import named_tensors, stand_in
from chaos_lightning.replication.payload import encode_payload
from chaos_lightning.strategies.pipeline_evaluation import (
    MAX_OUTPUTS_NBYTES,
    PipelineEvaluation,
    RoundBatch,
    RoundFeed,
    content_hash,
    refuse_freed,
    same_everywhere,
)
from chaos_lightning.strategies.session import gather_by_units

# ------------------------------------------------------------------------------------------------ rounds


def fetched(*counts: int) -> Iterator[tuple[Any, int, int]]:
    """Yields the given number of batches of each loader, one loader after the other."""
    return ((f"{loader}.{n}", n, loader) for loader, count in enumerate(counts) for n in range(count))


def rounds_of(feed: RoundFeed) -> list[list[str]]:
    """Takes all batches of the feed as Lightning does; returns them by round."""
    found: list[list[str]] = []
    for batch, _, _ in feed:
        due = feed.due.popleft()
        assert due.batch == batch
        if due is due.round[0]:
            found.append([each.batch for each in due.round])
    return found


def test_rounds_have_as_many_batches_as_a_step_and_end_with_their_loader() -> None:
    assert rounds_of(RoundFeed(fetched(5, 2, 0, 1), 3)) == [
        ["0.0", "0.1", "0.2"],
        ["0.3", "0.4"],
        ["1.0", "1.1"],
        ["3.0"],
    ]
    assert rounds_of(RoundFeed(fetched(), 3)) == []


def test_no_batch_beyond_the_limit_is_fetched() -> None:
    """With a limit of five batches the feed fetches exactly five: an iterator that is shared must not lose a sixth."""
    source = fetched(9)
    feed = RoundFeed(source, 4, left=5)
    assert rounds_of(feed) == [["0.0", "0.1", "0.2", "0.3"], ["0.4"]]
    assert next(source)[0] == "0.5"


def test_batches_that_were_fetched_before_are_of_the_first_round() -> None:
    source = fetched(5)
    begun = [next(source)]
    feed = RoundFeed(source, 3, begun=begun)
    assert [each.batch for each in feed.due] == ["0.0"]
    assert [each.batch for each in feed.due[0].round] == ["0.0", "0.1", "0.2"]
    assert next(feed)[0] == "0.1"
    assert [each.batch for each in feed.due] == ["0.0", "0.1"]


# ------------------------------------------------------------------------------------------------ in Lightning

LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "one": (lambda: loader(13), {}),
    "less than a round": (lambda: loader(3), {}),
    "two": (lambda: [loader(9), loader(5, seed=4)], {}),
    "two and a limit": (lambda: [loader(9), loader(9, seed=4)], {"limit_val_batches": 2}),
    "nobody knows its length": (lambda: DataLoader(Endless(13), batch_size=2), {}),
    "nobody knows its length, and a limit": (
        lambda: DataLoader(Endless(23), batch_size=2),
        {"limit_val_batches": 4},
    ),
    "combined": (lambda: CombinedLoader({"a": loader(9), "b": loader(5, seed=4)}, "max_size_cycle"), {}),
    "combined, and a limit": (
        lambda: CombinedLoader({"a": loader(9), "b": loader(5, seed=4)}, "max_size"),
        {"limit_val_batches": 4},
    ),
}


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def assert_heard(got: tuple[Heard, Memory], expected: tuple[Heard, Memory]) -> None:
    assert len(expected[0].batches) > 1
    assert_same(got[0].batches, expected[0].batches)
    assert_same(got[0].ends, expected[0].ends)
    assert_same(got[0].bars, expected[0].bars)
    assert_same(got[1].rows, expected[1].rows)


@pytest.mark.parametrize("cut", [(0, BLOCKS), (0, 2, BLOCKS), (0, 1, 2, BLOCKS)], ids=["1 member", "2", "3"])
@pytest.mark.parametrize("loaders", LOADERS)
def test_every_member_hears_what_one_process_hears(tmp_path: Any, loaders: str, cut: tuple[int, ...]) -> None:
    make, settings = LOADERS[loaders]
    expected = fit(tmp_path / "plain", Validates(), make(), "auto", **settings)
    found = fit_in_rounds(tmp_path, Validates, make, cut, **settings)
    assert len(found) == len(cut) - 1
    for heard, memory, _ in found.values():
        assert_heard((heard, memory), expected)


@pytest.mark.parametrize("unit", [0, 1, 2])
@pytest.mark.parametrize("member", ["a", "b"])
def test_a_round_that_runs_again_counts_once(tmp_path: Any, member: str, unit: int) -> None:
    expected = fit(tmp_path / "plain", Validates(), loader(9), "auto")
    found = fit_in_rounds(tmp_path, Validates, lambda: loader(9), failing=[(member, 2, unit), (member, 3, 0)])
    for heard, memory, ends in found.values():
        assert_heard((heard, memory), expected)
        assert [name for name, _ in ends.rounds][:2] == ["validation batches 0 to 2", "validation batches 3 to 4"]


@pytest.mark.parametrize("failing", [(), [("a", 1, 2), ("a", 4, 1)]], ids=["once", "again"])
def test_metrics_are_those_of_one_process(tmp_path: Any, failing: Any) -> None:
    expected = fit(tmp_path / "plain", Measures(), loader(9), "auto")
    found = fit_in_rounds(tmp_path, Measures, lambda: loader(9), (0, BLOCKS), failing=failing)
    assert {"mse", "mse_epoch", "late"} <= set(expected[0].ends[0])
    assert_heard(found["a"][:2], expected)


class ChangesItsBatch(Validates):
    """Model that changes its batch in place, in hooks and in validation_step."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0] *= 2
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[1] += 1
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batch[0].mul_(3)
        return super().validation_step(batch, batch_idx, dataloader_idx)


def test_each_unit_has_a_batch_of_its_own(tmp_path: Any) -> None:
    """Model code changes its batch in place: each unit still begins with the loader's batch, also if it runs again
    or at a further stage.
    """
    expected = fit(tmp_path / "plain", ChangesItsBatch(), loader(9), "auto", max_epochs=1)
    for cut in ((0, BLOCKS), (0, 2, BLOCKS)):
        found = fit_in_rounds(tmp_path, ChangesItsBatch, lambda: loader(9), cut, failing=[("a", 1, 2)], max_epochs=1)
        assert_heard(found["a"][:2], expected)


class TakesNoNumber(Model):
    def validation_step(self, batch: Any) -> None:
        self.log("mean", self(batch[0]).mean())


def test_a_step_that_takes_the_batch_alone(tmp_path: Any) -> None:
    expected = fit(tmp_path / "plain", TakesNoNumber(), loader(9), "auto")
    assert_heard(fit_in_rounds(tmp_path, TakesNoNumber, lambda: loader(9))["b"][:2], expected)


# ------------------------------------------------------------------------------------------------ refusals


class Generates(Model):
    def generate(self, x: Tensor) -> Tensor:
        return self(self(x).expand(-1, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.generate(batch[0]).mean())


class RunsAtTheEnd(Validates):
    def on_validation_epoch_end(self) -> None:
        self(torch.zeros(1, 3).double())


class Gathers(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.trainer.strategy.evaluation._logs._collectives.barrier("mine")
        self.log("mean", out.mean())


@pytest.mark.parametrize("cut", [(0, BLOCKS), (0, 2, BLOCKS)])
def test_a_model_that_is_called_twice_is_refused_with_advice(tmp_path: Any, cut: Any) -> None:
    with pytest.raises(UnsupportedError, match="a second time") as caught:
        fit_in_rounds(tmp_path, Generates, lambda: loader(4), cut)
    notes = "\n".join(caught.value.__notes__)
    assert "generate()" in notes
    assert "Trainer(strategy='auto').validate" in notes


def test_a_call_of_the_whole_model_in_a_hook_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"(blocks\.2|embed) is called outside of training_step"):
        fit_in_rounds(tmp_path, RunsAtTheEnd, lambda: loader(4))
    fit_in_rounds(tmp_path, RunsAtTheEnd, lambda: loader(4), (0, BLOCKS))


def test_a_collective_in_validation_step_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"barrier mine.*inside validation_step"):
        fit_in_rounds(tmp_path, Gathers, lambda: loader(4), (0, BLOCKS))


class Iterates(Model):
    def validation_step(self, dataloader_iter: Any) -> None: ...


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_a_step_that_fetches_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match="dataloader_iter"):
        fit_in_rounds(tmp_path, Iterates, lambda: loader(4), (0, BLOCKS))


class Starts(Validates):
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


def test_a_hook_that_comes_late_is_told_of_once(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match="on_validation_batch_start") as caught:
        fit_in_rounds(tmp_path, Starts, lambda: loader(8), (0, BLOCKS))
    assert len([w for w in caught if "on_validation_batch_start" in str(w.message)]) == 1


class ReturnsMuch(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", self(batch[0]).mean())
        return torch.zeros(MAX_OUTPUTS_NBYTES // 8) if batch_idx % 2 else object() if batch_idx == 2 else batch_idx


def test_outputs_that_do_not_travel_are_none_for_all(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match="returns what is not sent") as caught:
        found = fit_in_rounds(tmp_path, ReturnsMuch, lambda: loader(10), max_epochs=1)
    for heard, _, _ in found.values():
        assert [output for _, _, output in heard.batches] == [0, None, None, None, 4]
    texts = " ".join(str(w.message) for w in caught)
    assert "object" in texts
    assert "bytes" in texts


def test_members_that_see_other_batches_disagree(tmp_path: Any) -> None:
    """Members whose batches differ in anything give different hashes, by which the root refuses the slot."""
    x = [torch.ones(2, 3), {"a": torch.zeros(1, dtype=torch.bfloat16), "b": "text"}]
    same = [x[0].clone(), {"a": x[1]["a"].clone(), "b": "text"}]
    assert content_hash(x) == content_hash(same)
    others = (
        [x[0] * 2, x[1]],
        [x[0].reshape(3, 2), x[1]],
        [x[0].double(), x[1]],
        [x[0], {"a": x[1]["a"], "b": "words"}],
    )
    assert len({content_hash(other) for other in (x, *others)}) == 5
    rounds = [
        fit_in_rounds(tmp_path, Validates, lambda seed=seed: loader(4, seed=seed), (0, BLOCKS))["a"][2].rounds
        for seed in (3, 4)
    ]
    assert [name for name, _ in rounds[0]] == [name for name, _ in rounds[1]]
    assert all(one[1] != other[1] for one, other in zip(*rounds, strict=True))


# ------------------------------------------------------------------------------------------------ answers


def evaluation() -> tuple[PipelineEvaluation, list[RoundBatch]]:
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        lightning_module=Measures(), datamodule=None, callbacks=[],
    )  # fmt: skip
    made = PipelineEvaluation(trainer, None, None, None, None, None)  # type: ignore[arg-type]
    these: list[RoundBatch] = []
    these += [RoundBatch(None, j, 0, these) for j in range(2)]
    return made, these


def answers(*numbers: Any) -> bytes:
    return encode_payload({j: [b"", f"out {j}", ""] for j in numbers})


NAME = "validation batches 0 to 1"


def test_answers_of_several_members_are_put_together() -> None:
    made, these = evaluation()
    made._take(these, NAME, {"a": b"", "b": answers(1), "c": answers(0)})
    assert [each.answer.output for each in these] == ["out 0", "out 1"]


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"a": answers(0, 1), "b": answers(1)}, WireError, "b answers for batch 1"),
        ({"a": answers(0, 2)}, WireError, "a answers for batch 2"),
        ({"a": answers(0, -1)}, WireError, "a answers for batch -1"),
        ({"a": answers(0)}, StateError, r"nobody answers for batches \[1\]"),
        ({"a": answers("0")}, WireError, "malformed results"),
        ({"a": encode_payload([1])}, WireError, "malformed results"),
        ({"a": encode_payload({0: 1})}, WireError, "malformed results"),
        ({"a": encode_payload({0: ["", None, ""]})}, WireError, "malformed results"),
        ({"a": b"what is this"}, WireError, "payload"),
    ],
)
def test_answers_that_do_not_fit_are_refused(said: dict[str, bytes], error: type[Exception], words: str) -> None:
    made, these = evaluation()
    with pytest.raises(error, match=words):
        made._take(these, NAME, said)


def test_who_dies_takes_its_counts_along_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made, these = evaluation()
    made._take(these, NAME, {"a": answers(1), "b": answers(0)})
    _, following = evaluation()
    with caplog.at_level(logging.WARNING, "chaos_lightning"):
        made._take(following, NAME, {"a": answers(0, 1)})
        _, following = evaluation()
        made._take(following, NAME, {"a": answers(0, 1)})
    assert [r.getMessage() for r in caplog.records if "died during validation" in r.getMessage()] == [
        "b died during validation: metrics that validation_step updates miss the 1 batches that it had counted; what "
        "is logged as a number misses nothing"
    ]


# ------------------------------------------------------------------------------------------------ around fit


def test_loaders_that_draw_by_chance_are_refused() -> None:
    kept = loader(4)
    assert same_everywhere(kept) is kept
    rows = samples(4)
    for sampler in (RandomSampler(rows), WeightedRandomSampler([1.0] * 4, 4)):
        with pytest.raises(UnsupportedError, match=f"{type(sampler).__name__}.*shuffle=False"):
            same_everywhere(DataLoader(rows, sampler=sampler))
    with pytest.raises(UnsupportedError, match="RandomSampler"):
        same_everywhere(DataLoader(rows, shuffle=True))


def test_nothing_is_validated_before_training_nor_in_inference_mode(tmp_path: Any) -> None:
    """Validation runs neither before training nor in inference mode, in which parts that are received could not be
    trained afterwards.
    """
    modes: list[bool] = []

    class Looks(Validates):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            assert not torch.is_grad_enabled()
            modes.append(torch.is_inference_mode_enabled())
            return super().validation_step(batch, batch_idx, dataloader_idx)

    heard, _, _ = fit_in_rounds(tmp_path, Looks, lambda: loader(4), (0, BLOCKS), num_sanity_val_steps=2)["a"]
    assert modes == [False] * 4
    assert len(heard.ends) == 2


def test_a_member_that_is_out_of_the_job_ends_its_validation(tmp_path: Any) -> None:
    """A member that is put out of the job during validation ends it at once, and evaluates no batch by itself."""
    heard, _, ends = fit_in_rounds(tmp_path, Validates, lambda: loader(9), (0, BLOCKS), out_after=1)["a"]
    assert [batch_idx for batch_idx, _, _ in heard.batches] == [0, 1, 2]
    assert len(ends.rounds) == 1
    assert len(heard.ends) == 2


def test_a_model_without_all_layers_is_not_evaluated_alone() -> None:
    module = Validates()
    refuse_freed(module, "test")
    for name, owner, own_name, tensor in list(named_tensors(module)):
        if name.startswith("blocks.1"):
            owner._parameters[own_name].data = stand_in(tensor, torch.device("cpu"))  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"trainer\.test .*blocks\.1\.weight.*checkpoint"):
        refuse_freed(module, "test")


class Gathering:
    """Double of the engine, whose collectives by units raise `error`, if given."""

    contributors, role = ("a", "b"), ""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def gather_by_units(self, name: str, attempt: Any, *, order: str) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(answers=[name.encode(), order.encode()])


@pytest.mark.parametrize(
    ("error", "told", "expected"),
    [
        (None, ["observed"], {"a": b"round", "b": b"content"}),
        (FencedError("put out"), ["fenced"], None),
        (DepartedError("let go"), ["departed"], None),
    ],
)
def test_a_session_takes_part_in_rounds_as_in_other_collectives(
    error: Exception | None, told: list[str], expected: dict[str, bytes] | None
) -> None:
    heard: list[str] = []
    engine: Any = Gathering(error)
    member = Participation(lambda: heard.append("fenced"), lambda stepped: heard.append("departed"), engine)
    member.go(Footing.IN)
    session: Any = SimpleNamespace(
        in_job=True,
        state=SimpleNamespace(),
        member=member,
        engine=engine,
        observe=lambda: heard.append("observed"),
    )
    assert gather_by_units(session, "round", None, "content") == expected
    assert heard == told
    session.in_job = False
    assert gather_by_units(session, "round", None, "content") is None
    assert heard == told
