"""Tests the messages to a plain loop that forgets a call, is interrupted, or resumes from the wrong file."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategy_models as models
import torch
from engine_double import EngineDouble
from torch import nn, optim

from chaos_lightning import trainer as module
from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.trainer import Trainer, capture_exit_event


@pytest.fixture(autouse=True)
def _alone(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Engine", EngineDouble)


@pytest.fixture
def chaos() -> Iterator[Trainer]:
    with Trainer(name="a") as made:
        yield made


def parts(samples: int = 24, **optimizer: Any) -> tuple[nn.Module, optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **optimizer}), models.loader(samples)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(chaos: Trainer, steps: int, file: Any = None, **arguments: Any) -> nn.Module:
    """Runs a loop of `steps` steps, and saves a checkpoint at the last one if given a file; returns the model."""
    model, optimizer, loader = parts()
    for batch in chaos.prepare(model, optimizer, loader, epochs=2, **arguments):
        chaos.backward(loss_of(model, batch))
        if chaos.update():
            optimizer.zero_grad()
        if chaos.step == steps:
            if file is not None:
                chaos.save(file)
            break
    return model


# --- two runs of a sweep are not one job ---


@pytest.mark.parametrize(
    ("layer", "arguments", "names"),
    [
        (nn.Dropout(0.5), {}, ["layer 1"]),
        (nn.Dropout(0.1), {"hparams": {"model": {"name": "org/b"}, "data_dir": "/b"}}, ["hyperparameter model.name"]),
        (nn.Dropout(0.1), {"hparams": {"mine": 1}, "own_hparams": ["mine"]}, ["hyperparameter model.name"]),
        (nn.Dropout(0.1), {"schedule": optim.lr_scheduler.CosineAnnealingLR}, ["extra state"]),
        (nn.Dropout(0.1), {"samples": slice(1, 24)}, ["data.length", "data.order", "training data"]),
        (torch.compile(nn.Dropout(0.1), backend="eager"), {}, ["compiled"]),
    ],
    ids=["layer", "hyperparameter", "own", "schedule", "data", "compiled"],
)
def test_a_plain_loop_says_what_it_is_as_a_trainer_does(layer: Any, arguments: Any, names: list[str]) -> None:
    found: list[dict[str, str]] = []
    first = {"hparams": {"model": {"name": "org/a"}, "data_dir": "/a"}}
    for made, given in ((nn.Dropout(0.1), first), (layer, {**first, **arguments})):
        rest = dict(given)
        schedule, part = rest.pop("schedule", optim.lr_scheduler.StepLR), rest.pop("samples", slice(0, 24))
        model = nn.Sequential(nn.Linear(4, 1), made)
        optimizer = optim.SGD(model.parameters(), 0.1)
        data = torch.utils.data.TensorDataset(*(t[part] for t in models.data(24).tensors))
        with Trainer(name="a") as chaos:
            extra = {"schedule": schedule(optimizer, 5)}
            chaos.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4), extra=extra, **rest)
        found.append(EngineDouble.made[-1].fingerprint)
    mine, its = found
    assert sorted({name for name, _ in {*mine.items()} ^ {*its.items()}}) == names


# --- each batch has one update ---


def test_a_forgotten_update_is_named(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader)
    loss_of(model, next(batches)).backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"Write `trainer\.update\(\)` after the backward pass"):
        next(batches)


def test_continue_before_update_is_named_and_after_it_is_fine(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    for number, batch in enumerate(chaos.prepare(model, optimizer, loader)):
        optimizer.zero_grad()
        chaos.backward(loss_of(model, batch))
        chaos.update()
        if number:
            continue
    assert chaos.step == 6


def test_break_before_update_is_fine(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    for _ in chaos.prepare(model, optimizer, loader):
        break
    assert chaos.step == 0


@pytest.mark.parametrize(
    ("rule", "arguments", "error", "words"),
    [
        ("fixed:8", {"accumulate": 2}, ConfigurationError, "accumulate=2 beside batch='fixed:8'.*batch=fixed:N"),
        ("fixed:8/3", {}, ConfigurationError, "no whole number of micro-batches"),
        ("fixed", {"data": "local"}, UnsupportedError, "data='local' does not go with a batch of fixed size"),
    ],
)
def test_what_a_fixed_batch_cannot_have_is_named(
    rule: str, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), Trainer(name="a", batch=rule) as chaos:
        chaos.prepare(*parts(), **arguments)


def test_a_second_update_of_a_batch_is_named(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader)
    chaos.backward(loss_of(model, next(batches)))
    chaos.update()
    with pytest.raises(ConfigurationError, match="called twice for one batch"):
        chaos.update()
    with pytest.raises(ConfigurationError, match=r"backward\(\) after update"):
        chaos.backward(loss_of(model, loader.dataset[:4]))


def test_calls_before_prepare_are_named(chaos: Trainer) -> None:
    for call in (
        chaos.update,
        lambda: chaos.backward(torch.zeros(1)),
        lambda: chaos.gather(1),
        lambda: chaos.save("x"),
    ):
        with pytest.raises(ConfigurationError, match=r"prepare\(\)"):
            call()


# --- batches that are left out ---


def test_a_batch_that_is_left_out_weighs_nothing(chaos: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """A loop calls `update` without backward, while `.grad` still holds the last step's average: the samples count
    as used, no weight changes, and a warning comes once.
    """
    model, optimizer, loader = parts()
    for number, batch in enumerate(chaos.prepare(model, optimizer, loader)):
        before = model.weight.detach().clone()
        if number in (2, 3):
            assert chaos.update()
            assert torch.equal(model.weight, before)
            continue
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        chaos.update()
        assert not torch.equal(model.weight, before)
    assert [step["weight"] for step in chaos.engine.steps] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert all(step["spent"] for step in chaos.engine.steps)
    assert chaos.engine.armed == (1.0, 0, False)
    assert caplog.text.count("this batch weighs nothing in its step") == 1


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("out", [{0}, {2}, {1, 2}, {2, 5}, {0, 1, 2}, {9}])
def test_batches_that_are_left_out_of_an_accumulation(chaos: Trainer, out: set[int], scaler: bool) -> None:
    """Some batches of an accumulation have no backward: each step averages the samples of the others."""
    model, optimizer, loader = parts(samples=38, momentum=0.0)
    reference, other, _ = parts(momentum=0.0)
    x, y = loader.dataset.tensors
    for batches in (range(3), range(3, 6), range(6, 9), range(9, 10)):
        counted = [i for b in batches if b not in out for i in range(4 * b, min(4 * b + 4, 38))]
        if counted:
            other.zero_grad()
            loss_of(reference, (x[counted], y[counted])).backward()
            other.step()
    arguments = {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)} if scaler else {}
    for number, batch in enumerate(chaos.prepare(model, optimizer, loader, accumulate=3, **arguments)):
        if number not in out:
            chaos.backward(loss_of(model, batch))
        if chaos.update():
            optimizer.zero_grad()
    assert chaos.step == 4
    torch.testing.assert_close(model.weight, reference.weight)


def test_a_gradient_that_was_assigned_counts(chaos: Trainer) -> None:
    """Gradients that are assigned to `.grad`, as with `torch.func.grad`, count although no backward pass reaches a
    parameter.
    """
    model, optimizer, loader = parts()
    for batch in chaos.prepare(model, optimizer, loader):
        found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        chaos.update()
    assert [step["weight"] for step in chaos.engine.steps] == [1.0] * 6


def test_gradients_of_the_last_step_that_are_changed_in_place_are_no_batch(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader)
    loss_of(model, next(batches)).backward()
    chaos.update()
    next(batches)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigurationError, match=r"without a backward pass: the gradient of 'weight' was written to"):
        chaos.update()
    optimizer.zero_grad(set_to_none=False)
    assert chaos.update()
    assert chaos.engine.steps[-1]["weight"] == 0.0


@pytest.mark.parametrize("zeroed", ["never", "in front", "behind"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_pass_of_ones_own_on_gradients_that_were_not_zeroed(
    chaos: Trainer, zeroed: str, to_none: bool
) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader)
    for number, batch in enumerate(batches):
        if zeroed == "in front":
            optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, batch).backward()
        if zeroed == "never" and number:
            with pytest.raises(UnsupportedError, match="has added to the last step's gradient of 'weight'"):
                chaos.update()
            return
        chaos.update()
        if zeroed == "behind":
            optimizer.zero_grad(set_to_none=to_none)
    assert zeroed != "never"
    assert chaos.step == 6


# --- accumulation ---


def test_accumulation_needs_its_own_backward(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader, accumulate=2)
    loss_of(model, next(batches)).backward()
    with pytest.raises(ConfigurationError, match=r"trainer\.backward\(loss\).*takes the place"):
        chaos.update()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_within_a_step_are_missed(chaos: Trainer, to_none: bool) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader, accumulate=2)
    for _ in range(2):
        batch = next(batches)
        optimizer.zero_grad(set_to_none=to_none)
        if chaos._micro_batches.total > 1:
            with pytest.raises(ConfigurationError, match=r"earlier batches are gone.*if trainer\.update\(\)"):
                chaos.backward(loss_of(model, batch))
            return
        chaos.backward(loss_of(model, batch))
        assert not chaos.update()
    pytest.fail("the second batch was not reached")


def test_gradients_that_are_never_zeroed_are_named(chaos: Trainer) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader, accumulate=2)
    for _ in range(2):
        chaos.backward(loss_of(model, next(batches)))
        chaos.update()
    with pytest.raises(UnsupportedError, match=r"still has a gradient.*if trainer\.update\(\)"):
        chaos.backward(loss_of(model, next(batches)))


def test_gradients_may_be_changed_between_batches_of_a_step(chaos: Trainer) -> None:
    """A loop may change gradients between the batches of a step, for example clip them."""
    model, optimizer, loader = parts()
    for batch in chaos.prepare(model, optimizer, loader, accumulate=2):
        chaos.backward(loss_of(model, batch))
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        if chaos.update():
            optimizer.zero_grad()
    assert chaos.step == 3


def test_an_accumulation_is_the_mean_of_its_samples_and_is_clipped_as_a_whole(chaos: Trainer) -> None:
    """Five batches, accumulated two by two, give three steps, the last one of a single batch; gradients are averaged
    over samples and then clipped.
    """
    model, optimizer, loader = parts(samples=18, momentum=0.0)
    sums = [(8, 0), (16, 8), (18, 16)]
    reference, other, _ = parts(momentum=0.0)
    x, y = loader.dataset.tensors
    for stop, begin in sums:
        other.zero_grad()
        loss_of(reference, (x[begin:stop], y[begin:stop])).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.7)
        other.step()
    for batch in chaos.prepare(model, optimizer, loader, accumulate=2, clip_norm=0.7):
        chaos.backward(loss_of(model, batch))
        if chaos.update():
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference.weight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm=1.0 and clip_value=1.0 were given"),
        ({"clip_norm": 0.0}, "clip_norm=0.0; expected a number above 0"),
        ({"clip_value": -1.0}, "clip_value=-1.0; expected"),
        ({"accumulate": 0}, "accumulate=0; expected 1 or more"),
        ({"scaler": torch.amp.GradScaler("cpu"), "extra": {"scaler": nn.Linear(1, 1)}}, "that name is taken"),
    ],
)
def test_arguments_that_cannot_be_are_named(chaos: Trainer, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        chaos.prepare(*parts(), **arguments)
    chaos.prepare(*parts())  # and nothing has begun


# --- together ---


def test_gather_and_save_belong_before_newcomers_come_in(chaos: Trainer, tmp_path: Path) -> None:
    model, optimizer, loader = parts()
    batches = chaos.prepare(model, optimizer, loader, accumulate=2)
    for number in range(2):
        chaos.backward(loss_of(model, next(batches)))
        if not number:
            with pytest.raises(ConfigurationError, match=r"save\(\) belongs after update\(\)"):
                chaos.save(tmp_path / "a.pt")
        chaos.update()
        assert chaos.gather({"n": number, "t": torch.ones(2)})[0]["n"] == number
        if not number:
            with pytest.raises(ConfigurationError, match=r"save\(\) belongs after update\(\)"):
                chaos.save(tmp_path / "a.pt")
    chaos.save(tmp_path / "a.pt")
    chaos.check_state_replication()
    for call in (lambda: chaos.gather(1), lambda: chaos.save(tmp_path / "b.pt")):
        with pytest.raises(ConfigurationError, match=r"belong before check_state_replication\(\)"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_member_that_has_left_does_not_save(chaos: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(chaos, 2)
    chaos.engine.view = None
    chaos._member.depart()
    chaos.save(tmp_path / "a.pt")
    assert "a has left the job" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_last_member_saves_after_it_has_left(chaos: Trainer, tmp_path: Path) -> None:
    """The last member may save a checkpoint after it has left, since no other member has the state."""
    trained(chaos, 2)
    chaos.request_node_exit()
    assert chaos.engine.out
    chaos.save(tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["chaos_lightning"]["step"] == 2


def test_after_a_rejoin_the_rest_of_the_batch_is_nothing(chaos: Trainer) -> None:
    """A member is fenced in the middle of an accumulation and joins again: the loop's remaining calls for that batch
    have no effect.
    """
    model, optimizer, loader = parts()
    chaos.engine.fence_at = 2
    steps = []
    for batch in chaos.prepare(model, optimizer, loader, accumulate=2):
        chaos.backward(loss_of(model, batch))
        if chaos.gather(1) and chaos.update():
            optimizer.zero_grad()
        steps.append(chaos.step)
        chaos.check_state_replication()
    assert chaos.engine.rejoined == 1
    assert all(param.grad is None for param in model.parameters())
    assert steps[-1] == 3


def test_a_loop_that_was_put_out_ends_if_its_job_is_finished_meanwhile(
    chaos: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes_late(state: Any) -> None:
        chaos.engine.role, chaos.engine.out, chaos.engine.view = "late", True, None

    model, optimizer, loader = parts()
    chaos.engine.fence_at = 2
    monkeypatch.setattr(chaos.engine, "rejoin", comes_late)
    updated = []
    for batch in chaos.prepare(model, optimizer, loader, epochs=2):
        chaos.backward(loss_of(model, batch))
        updated.append(chaos.update())
        optimizer.zero_grad()
    assert updated == [True, True, False]


# --- resume ---


def saved(folder: Path, **arguments: Any) -> Path:
    with Trainer(name="a") as before:
        trained(before, 4, folder / "a.pt", **arguments)
    return folder / "a.pt"


def test_steps_count_on_and_samples_are_used_once(tmp_path: Path) -> None:
    file = saved(tmp_path)
    whole = parts()[0]
    with Trainer(name="a") as before:
        whole = trained(before, 12)
    model, optimizer, loader = parts()
    with Trainer(name="a") as chaos:
        batches = chaos.prepare(model, optimizer, loader, epochs=2, resume=file)
        assert chaos.step == 4
        assert chaos.engine.loaded
        seen = 0
        for batch in batches:
            chaos.backward(loss_of(model, batch))
            seen += chaos.update()
            optimizer.zero_grad()
        assert (chaos.step, seen) == (12, 8)
    torch.testing.assert_close(model.weight, whole.weight, rtol=0, atol=0)


def test_a_checkpoint_is_read_without_running_code(tmp_path: Path) -> None:
    found = torch.load(saved(tmp_path, scaler=torch.amp.GradScaler("cpu")), weights_only=True)
    assert sorted(found) == ["chaos_lightning", "extra", "model", "optimizer"]
    assert found["extra"]["scaler"]["scale"] == 65536.0
    nn.Linear(4, 1).load_state_dict(found["model"])


class Odd:
    """Object whose state only pickle could write."""

    def state_dict(self) -> dict[str, Any]:
        return {"odd": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_could_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be read again"):
        saved(tmp_path, extra={"odd": Odd()})
    assert list(tmp_path.iterdir()) == []


def other_model() -> tuple[Any, ...]:
    model = nn.Linear(4, 2)
    return model, optim.SGD(model.parameters(), 0.1), models.loader()


def other_optimizer() -> tuple[Any, ...]:
    model = nn.Linear(4, 1)
    return model, optim.Adam(model.parameters(), 0.1), models.loader()


def other_data() -> tuple[Any, ...]:
    return *parts()[:2], models.loader(40)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_model, "the model: weight is [1, 4] in the file and [2, 4] here"),
        (other_optimizer, "the optimizer: class is SGD in the file and Adam here"),
        (other_data, "the data's saved state has order"),
        (lambda: (*parts(), {"extra": {"b": nn.Linear(1, 1)}}), "extra: b is absent in the file and there here"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_both_values(
    chaos: Trainer, tmp_path: Path, make: Any, words: str
) -> None:
    with Trainer(name="b") as before:
        trained(before, 4, tmp_path / "a.pt")
    model, optimizer, loader, *more = make()
    was = [param.detach().clone() for param in model.parameters()]
    with Trainer(name="a") as fresh, pytest.raises(ConfigurationError, match=re.escape(words)):
        fresh.prepare(model, optimizer, loader, resume=tmp_path / "a.pt", **(more[0] if more else {}))
    assert all(torch.equal(a, b) for a, b in zip(was, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(8, 2), "extra 'ema': weight is [1, 8] in the file and [2, 8] here"),
        (optim.SGD(nn.Linear(8, 1).parameters(), 0.1), "extra 'ema' does not take its state: "),
    ],
)
def test_an_extra_that_does_not_fit_is_refused_before_anything_is_changed(
    chaos: Trainer, tmp_path: Path, other: Any, words: str
) -> None:
    trained(chaos, 4, tmp_path / "a.pt", extra={"ema": nn.Linear(8, 1)})
    model, optimizer, loader = parts()
    was = [param.detach().clone() for param in model.parameters()]
    with (
        Trainer(name="b") as fresh,
        pytest.raises(ConfigurationError, match=re.escape(f"a.pt' does not fit what is trained here: {words}")),
    ):
        fresh.prepare(model, optimizer, loader, resume=tmp_path / "a.pt", extra={"ema": other})
    assert all(torch.equal(a, b) for a, b in zip(was, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "truncated", "weights", "text"])
def test_a_file_that_is_none_is_named_before_anything_starts(tmp_path: Path, kind: str) -> None:
    file = saved(tmp_path)
    if kind in ("missing", "folder"):
        file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind in ("empty", "truncated"):
        os.truncate(file, 0 if kind == "empty" else file.stat().st_size // 2)
    elif kind == "weights":
        torch.save(parts()[0].state_dict(), file)
    elif kind == "text":
        file.write_text("no checkpoint\n")
    error, words = {
        "missing": (ConfigurationError, "there is no such file"),
        "folder": (ConfigurationError, "there is no such file"),
        "weights": (ConfigurationError, "is no checkpoint of Trainer.save: it holds"),
    }.get(kind, (StateError, "bytes) is damaged, or no checkpoint"))
    with Trainer(name="a") as chaos, pytest.raises(error, match=re.escape(words)) as got:
        chaos.prepare(*parts(), resume=file)
    assert str(file) in str(got.value)
    assert not chaos.engine.role


# --- a notebook ---


def interrupted(chaos: Trainer) -> None:
    """Sends Ctrl+C twice within a loop: the first asks it to stop, the second interrupts it."""
    for _ in chaos.prepare(*parts()):
        signal.raise_signal(signal.SIGINT)
        assert capture_exit_event()
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_loop_ends_its_part_and_the_next_one_works() -> None:
    """After an interrupted loop the next Trainer works, and has no request to stop."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Trainer(name="a") as first:
        interrupted(first)
    assert first.engine.closed
    assert signal.getsignal(signal.SIGINT) is before
    with Trainer(name="a") as second:
        assert not capture_exit_event()
        trained(second, 2)


def test_a_trainer_that_was_never_closed_is_closed_by_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGINT)
    left = Trainer(name="a")
    with pytest.raises(KeyboardInterrupt):
        interrupted(left)
    assert not left.engine.closed
    with caplog.at_level(logging.WARNING, "chaos_lightning"), Trainer(name="a") as second:
        assert "the Trainer of a was never closed" in caplog.text
        assert left.engine.closed
        assert not capture_exit_event()
        trained(second, 2)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ConfigurationError, match="this Trainer is closed; make a new one"):
        left.prepare(*parts())


def test_prepare_run_twice_says_what_to_do(chaos: Trainer) -> None:
    chaos.prepare(*parts())
    with pytest.raises(ConfigurationError, match=r"prepare\(\) was called before.*Make a new Trainer"):
        chaos.prepare(*parts())
