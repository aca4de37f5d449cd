"""Tests a member that is fenced at any slot: within the same fit it drops its state, joins again, and ends as an
undisturbed one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from strategy_models import ClipsAfterBackward, Gan, Regression, loader, trainer, weights

import chaos_lightning  # noqa: F401
from chaos_lightning.errors import FencedError, NotNowError

CASES: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 2},
    "steps": {"max_steps": 9, "max_epochs": -1},
    "accumulation": {"max_epochs": 2, "accumulate_grad_batches": 2},
    "manual": {"max_epochs": 2},
    "hook": {"max_epochs": 2, "accumulate_grad_batches": 2},
}
MODELS: dict[str, Callable[[], Any]] = {"manual": Gan, "hook": lambda: ClipsAfterBackward(sync=True)}


def run(tmp_path: Path, double: Any, case: str, fence_at: int) -> tuple[Any, Any, Any]:
    double.setting.clear()
    double.setting["fence_at"] = fence_at
    double.made.clear()
    model = MODELS.get(case, lambda: Regression(sync=True))()
    callbacks: list[Any] = [ModelCheckpoint(dirpath=tmp_path / f"at{fence_at}", monitor="val_loss", save_last=True)]
    if case != "manual":
        callbacks.append(EarlyStopping("val_loss", patience=9))
    fit = trainer(tmp_path, enable_checkpointing=True, callbacks=callbacks, **CASES[case])
    fit.fit(model, loader(20, 4), loader(8))
    return fit, model, double.made[0]


def places(slots: list[str]) -> list[int]:
    """Returns the positions in `slots` at which to fence: for each pair of successive kinds of slots, the first and
    the last occurrence.
    """
    ways = [(before, name) for before, name in pairwise(slots)]
    return [at + 1 for at, way in enumerate(ways) if way not in ways[:at] or way not in ways[at + 1 :]]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("epochs", marks=pytest.mark.slow),
        pytest.param("steps", marks=pytest.mark.slow),
        "accumulation",
        "manual",
        pytest.param("hook", marks=pytest.mark.slow),
    ],
)
def test_fenced_at_any_slot(tmp_path: Path, double: Any, case: str) -> None:
    plain, reference, engine = run(tmp_path, double, case, -1)
    slots = [header.name for header in engine.log]
    last_training_slot = max(i for i, name in enumerate(slots) if name.startswith("section"))
    for at in places(slots):
        try:
            fit, model, again = run(tmp_path, double, case, at)
        except FencedError:
            # After the loops' end there is no safe point left to join again at; then fit says so.
            assert at > last_training_slot, slots[at]
            continue
        assert again.rejoined == 1, slots[at]
        assert again.closed
        assert (fit.global_step, fit.current_epoch) == (plain.global_step, plain.current_epoch), slots[at]
        assert torch.equal(weights(model), weights(reference)), slots[at]
        count = len(reference.seen)
        assert all(torch.equal(a, b) for a, b in zip(model.seen[-count:], reference.seen, strict=True)), slots[at]
        assert set(fit.callback_metrics) == set(plain.callback_metrics)
        for key, value in plain.callback_metrics.items():
            assert torch.equal(value, fit.callback_metrics[key]), (slots[at], key)


def test_a_drifted_member_pulls_the_state_again(tmp_path: Path, double: Any) -> None:
    """A member whose state hash differs from the majority's acts as if it were fenced: it pulls the state again."""
    _, reference, engine = run(tmp_path, double, "epochs", -1)
    at = [h.seq for h in engine.log if h.kind == "step"][4]
    double.setting["drift_at"] = at
    double.made.clear()
    model = Regression(sync=True)
    trainer(tmp_path, max_epochs=2).fit(model, loader(20, 4), loader(8))
    assert double.made[0].rejoined == 1
    assert torch.equal(weights(model), weights(reference))


def test_boundary_is_run_before_the_next_window(tmp_path: Path, double: Any) -> None:
    """A step's header announces a safe point in the middle of an accumulation: the safe point comes after the
    accumulation's step.
    """
    double.setting["boundary_at"] = 2
    trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(Regression(sync=True), loader(20, 4), loader(8))
    names = [h.name for h in double.made[0].log]
    at = names.index("boundary")
    assert names[:at].count("section 0") == 1
    assert names[at - 1] == "section 0"


def test_a_newcomer_may_come_in_with_a_view_that_no_header_names(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer may enter by a recovery, when too few members are left: then no header names the view that lets it
    in.
    """
    joined, committed = double.join, double._commit

    def let_in(engine: Any, **words: Any) -> Any:
        header = joined(engine, **words)
        engine.ruling_view = None
        return header

    def commit(engine: Any, *words: Any, **more: Any) -> Any:
        engine.ruling_view = engine.view
        return committed(engine, *words, **more)

    monkeypatch.setattr(double, "join", let_in)
    monkeypatch.setattr(double, "_commit", commit)
    trainer(tmp_path, max_epochs=1).fit(Regression(), loader())
    first, second = double.made[0].steps[:2]
    assert (first["weight"], second["weight"]) == (0.0, 4.0)


def test_a_newcomer_that_gets_the_state_of_a_collective_comes_again(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, given = double.gather, []

    def gather(engine: Any, name: str, *words: Any, **more: Any) -> Any:
        given.append((name, engine.state.manifest()))
        engine.state.adopt(given[-1][1])  # whoever is in it, too, goes on
        return gathered(engine, name, *words, **more)

    monkeypatch.setattr(double, "gather", gather)
    trainer(tmp_path, max_epochs=1).fit(Regression(sync=True), loader(), loader(4))
    name, manifest = given[0]
    with pytest.raises(NotNowError, match=re.escape(f"the others are in the collective {name!r}")):
        double.made[0].state.adopt(manifest)
