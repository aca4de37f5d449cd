"""Tests, with real processes, that a batch of fixed size is trained as in one process, whoever comes, goes or dies."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_models import Gan, Regression, data, loader, trainer
from test_refusals import iter_loader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.fixed_fit import warn_unused_fits


def start(job: Any, name: str, rule: str, **spec: Any) -> None:
    from pipeline_members import member

    options = {"batch": rule, **spec.pop("options", {})}
    about = {"name": name, "port": job.port, "out": str(job.out), "options": options, **spec}
    job.harness.start_function(name, member, about)


def alone(**spec: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the same model with plain Lightning; returns the loss of each step, and the parameters."""
    from pipeline_members import quiet, trained

    quiet()
    parts = spec.pop("parts", 1)
    module, rows = trained("auto", spec, [], accumulate_grad_batches=parts)
    means = [sum(rows.losses[i : i + parts]) for i in range(0, len(rows.losses), parts)]
    return means, {n: p.detach() for n, p in module.named_parameters()}


def check_equal(
    reports: list[dict[str, Any]], losses: list[float], parameters: dict[str, torch.Tensor], rel: float = 1e-5
) -> None:
    for report in reports:
        assert len(report["losses"]) <= len(losses)
        assert report["losses"] == pytest.approx(losses[-len(report["losses"]) :], rel=rel)
        assert report["logged"] == pytest.approx(report["losses"], rel=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(report["parameters"][name], value, rtol=1e-4, atol=1e-5)
    assert len(reports[0]["losses"]) == len(losses)


def test_two_members_share_micro_batches_as_one_process_accumulates(job: Any) -> None:
    job.fresh(min_nodes=2)
    for name in "ab":
        start(job, name, "fixed:16/4")
    check_equal(job.finish("a", "b"), *alone(batch=4, parts=4))


@pytest.mark.parametrize("names", ["a", "abc"])
def test_members_share_the_loaders_batch_as_one_process_has_it(job: Any, names: str) -> None:
    job.fresh(min_nodes=len(names))
    for name in names:
        start(job, name, "fixed", batch=10, options={"fits": 3})
    check_equal(job.finish(*names), *alone(batch=10))


def three(job: Any, rule: str, way: str, *, dies_at: int, epochs: int) -> dict[str, Any]:
    """Starts two members, and a third one that comes in this way and dies within a step; returns what they train."""
    job.fresh(min_nodes=2)
    job.harness.declare("c")
    # In double precision another order of the same sums does not grow to something that a bound must allow for.
    spec = {"batch": 4 if "/" in rule else 16, "epochs": epochs, "precision": "64-true"}
    start(job, "a", rule, gates={1: job.gate("one")}, **spec)
    start(job, "b", rule, **spec)
    job.harness.wait_step(1, node="b")  # else the third one might be a founder
    start(job, "c", rule, dies=(dies_at, 0, 0), options={"join_by": way}, **spec)
    job.harness.wait_for("way_in", lambda r: r.member.startswith("c~"))
    job.open("one")
    return spec


@pytest.mark.parametrize("rule", ["fixed:16/4", pytest.param("fixed:16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["pause", "replay"])
def test_a_newcomer_and_a_death_within_a_step_change_no_step(job: Any, rule: str, way: str) -> None:
    """A member comes in and dies within a step: the losses are those of one process."""
    spec = three(job, rule, way, dies_at=7 if way == "pause" else 60, epochs=3 if way == "pause" else 15)
    reports = job.finish("a", "b")
    check_equal(reports, *alone(parts=4 if "/" in rule else 1, **spec), rel=1e-10)
    assert job.harness.wait_exit("c") == -9
    assert [r for r in job.harness.records if r.name == "replayed"] == [] or way == "replay"


def fixed(rule: str = "fixed", **strategy: Any) -> ChaosStrategy:
    return ChaosStrategy(options={"batch": rule}, **strategy)


class Pairs(BatchSampler):
    """Batch sampler of the user's own, of whose batches nothing is known."""


def batches() -> Any:
    found = data(12)
    return DataLoader(found, batch_sampler=Pairs(SequentialSampler(found), 4, drop_last=False))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("options", "module", "loaded", "words"),
    [
        ({"accumulate_grad_batches": 2}, Regression, loader, "accumulate_grad_batches=2.*batch=fixed:N"),
        ({}, Gan, loader, "automatic_optimization = False.*batch=member"),
        ({}, Regression, batches, "counts samples.*Give the DataLoader a batch_size"),
        ({}, Regression, iter_loader, "have no positions"),
        ({"strategy": fixed(data="local")}, Regression, loader, "data='local' does not go with a batch of fixed size"),
        ({}, Regression, lambda: [loader(), loader()], "training loaders"),
    ],
)
def test_what_a_fixed_batch_cannot_have_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], module: type, loaded: Any, words: str
) -> None:
    fit = trainer(tmp_path, **{"strategy": fixed(), **options})
    with pytest.raises(UnsupportedError, match=f"(?s){words}"):
        fit.fit(module(), loaded())


@pytest.mark.parametrize("rule", ["fixed:", "fixed:0", "fixed:8/3", "fixed:8/0", "8", "mean"])
def test_a_rule_that_is_none_is_refused_with_what_is_expected(rule: str) -> None:
    with pytest.raises(ConfigurationError, match=f"batch={rule!r}.*(expected|take N|N and B)"):
        fixed(rule)._config()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("rule", "batch", "words"),
    [("fixed:32", 4, "no whole step"), ("fixed", 32, "step"), ("fixed:64/32", 4, "micro-batch")],
)
def test_a_batch_beyond_data_whose_rest_is_dropped_is_refused(
    tmp_path: Path, rule: str, batch: int, words: str
) -> None:
    fit = trainer(tmp_path, strategy=fixed(rule))
    with pytest.raises(
        ConfigurationError, match=rf"batch='{rule}': the data have 24 samples.*{words}.*drop_last=False"
    ):
        fit.fit(Regression(), loader(24, batch, drop_last=True))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rule", ["fixed:32", "fixed:32/8"])
def test_a_batch_beyond_the_data_is_a_whole_epoch_with_a_warning(tmp_path: Path, rule: str) -> None:
    fit = trainer(tmp_path, strategy=fixed(rule))
    with (
        pytest.warns(
            UserWarning, match=f"batch='{rule}': the data have 24 samples, so a step is a whole epoch of them"
        ),
        pytest.raises(AssertionError, match="the double divides no batch"),
    ):
        fit.fit(Regression(), loader(24, 4))


@pytest.mark.parametrize(
    ("rule", "words"),
    [("member", "the loader's batch is computed at once"), ("fixed:8/4", "a micro-batch is computed at once"),
     ("fixed:8", None), ("fixed", None)],
)  # fmt: skip
def test_what_fits_is_said_to_be_unused_where_another_setting_decides(rule: str, words: str | None) -> None:
    with pytest.warns(UserWarning, match="^fits=3 is not honoured") if words else contextlib.nullcontext() as told:
        warn_unused_fits(EngineConfig(batch=rule, fits=3))
    warn_unused_fits(EngineConfig(batch=rule))
    assert [words in str(w.message) for w in told or ()] == ([True] if words else [])


def test_a_negative_number_fits_nowhere() -> None:
    with pytest.raises(ConfigurationError, match="fits=-1: expected a number of samples, or 0 for the loader's batch"):
        EngineConfig(fits=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("fixed:16", "fixed:24/4"), ("member", "fixed:16"), ("fixed:12", "member")]
)
def test_a_checkpoint_of_another_rule_and_world_goes_on_with_what_is_left(
    job: Any, tmp_path: Path, before: str, after: str
) -> None:
    """Three steps of one member under one rule, then the rest of the epoch under another with two members."""
    start(job, "a", before, samples=60, epochs=1, saves=str(tmp_path / "kept"))
    (whole,) = job.finish("a")
    job.again(min_nodes=2)
    spec = {"samples": 60, "epochs": 2, "ckpt_path": str(tmp_path / "kept" / "step=3.ckpt")}
    for name in "bc":
        start(job, name, after, **spec)
    reports = job.finish("b", "c")
    taken = 3 * {"fixed:16": 16, "fixed:12": 12, "member": 4}[before]
    each = {"fixed:24/4": 24, "fixed:16": 16, "member": 8}[after]
    steps = -(-(60 - taken) // each) + -(-60 // each)
    assert len(whole["losses"]) == -(-60 // (taken // 3))
    assert [len(r["losses"]) for r in reports] == [steps, steps]
