"""Tests that a member that differs from the job ends before it trains, with a message about the difference, and the
job continues.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import odd_members
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from strategy_job import Job
from strategy_models import Regression, Stream, loader, trainer
from torch.utils.data import DataLoader

from chaos_lightning.membership.peers import JobTerms, difference
from chaos_lightning.protocol.types import Hello
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.fingerprint import advice

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"model_args": {"width": 16}},
        r"layer net\.0 of width is Linear\(in_features=4, out_features=16, bias=True\), the job's \(from a\) is "
        r"Linear\(in_features=4, out_features=8, bias=True\); layer net\.1 .*; "
        r"parameter net\.0\.bias is torch\.float32 \(16,\) instead of torch\.float32 \(8,\); 2 more differ: start",
    ),
    "optimizer": (
        {"model_args": {"optimizer": "SGD"}},
        r"optimizers of optimizer is SGD, the job's \(from a\) is Adam; ",
    ),
    "lr": ({"model_args": {"lr": 0.5}}, r"optimizer 0 lr of lr is 0\.5, the job's \(from a\) is 0\.05: start"),
    "betas": (
        {"model_args": {"betas": (0.5, 0.9)}},
        r"optimizer 0 betas of betas is \(0\.5, 0\.9\), the job's \(from a\) is \(0\.9, 0\.999\): start",
    ),
    "accumulation": (
        {"trainer": {"accumulate_grad_batches": 2}},
        r"accumulate of accumulation is 2, the job's \(from a\) is 1: start",
    ),
    "seed": ({"options": {"seed": 3}}, r"data\.seed of seed is 3, the job's \(from a\) is \d+: start"),
    "length": (
        {"samples": 26},
        r"data\.length of length is 26, the job's \(from a\) is 24; "
        r"training data is tensors \w+ instead of tensors \w+: start",
    ),
    "precision": (
        {"trainer": {"precision": "bf16-mixed"}},
        r"precision of precision is bf16-mixed, the job's \(from a\) is 32-true: start",
    ),
    "validation": (
        {"val_samples": 9},
        r"validation loader 0 batches of validation is 3, the job's \(from a\) is 2; "
        r"validation loader 0 data is tensors \w+ instead of tensors \w+; "
        r"validation loader 0 samples is 9 instead of 8: start",
    ),
    "valbatch": (
        {"val_batch": 5},
        r"validation loader 0 batch size of valbatch is 5, the job's \(from a\) is 4: start",
    ),
    "loaders": (
        {"val_loaders": 2},
        r"validation loaders of loaders is 2, the job's \(from a\) is 1; validation loader 1 is divided",
    ),
    "sampler": (
        {"trainer": {"use_distributed_sampler": False}},
        r"use_distributed_sampler of sampler is False, the job's \(from a\) is True; "
        r"validation loader 0 is evaluated in full by everybody instead of divided; ",
    ),
    "cadence": (
        {"every_n_train_steps": 6},
        r"ModelCheckpoint 0 every_n_train_steps of cadence is 6, the job's \(from a\) is 5: start",
    ),
    "package": ({"package": "0.0.0"}, r"package version of package is 0\.0\.0, the job's \(from a\) is "),
}


def start(job: Job, name: str, **spec: Any) -> None:
    spec = {"name": name, "port": job.port, "out": str(job.out), "epochs": 3, "callbacks": ["steps"], **spec}
    job.harness.start_function(name, odd_members.odd, spec)


def test_who_differs_is_told_where(job: Job) -> None:
    start(job, "a", gates={7: job.gate("a")})
    job.harness.wait_step(7)  # of the second epoch: the scheduler has halved the learning rate
    for name, (spec, _) in CASES.items():
        start(job, name, **spec)
        job.harness.declare(name)
    said = {}
    for name in CASES:
        assert job.harness.wait_exit(name) not in (0, None), name
        said[name] = job.harness.children[name].tail()
    # A member that is like the job is not refused, though the job's learning rate is another by now, and its folder is
    # another.
    start(job, "z", ckpt_dir="elsewhere")
    job.wait_admitted("z")
    job.open("a")
    a, z = job.finish("a", "z")
    assert a["step"] == z["step"]
    assert a["epoch"] == 3
    saved = [p.name for p in (job.out / "ckpt").iterdir()]
    assert sorted(saved) == ["step=10.ckpt", "step=5.ckpt"], "the second one was saved by both, under two names"
    started = {r.node for r in job.harness.records if r.name == "committed"}
    assert started.isdisjoint(CASES)
    for name, (_, words) in CASES.items():
        assert re.search(words, said[name]), said[name]


class Swept(Regression):
    """Model of a sweep, whose runs differ only in arguments of the constructor."""

    def __init__(
        self,
        rate: float = 0.1,
        margin: Any = 1.0,
        batch_size: int = 4,
        data_dir: str = "/a",
        mine: int = 0,
        name: str = "org/a",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net.append(torch.nn.Dropout(rate))
        self.chaos_own_hparams = ["mine"]


class SweptData(pl.LightningDataModule):
    """DataModule that keeps the arguments of its constructor as hyperparameters."""

    def __init__(self, split: Any = 0, data_dir: str = "/a", mine: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.chaos_own_hparams = ["mine"]

    def train_dataloader(self) -> DataLoader:
        return loader()


@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        ({"rate": 0.5}, {}, ["hyperparameter rate", "layer net.3"]),
        ({"margin": 2.0}, {}, ["hyperparameter margin"]),
        ({"margin": {"a": [1, {"b": 2}]}}, {}, ["hyperparameter margin", "hyperparameter margin.a"]),
        ({"margin": torch.ones(3)}, {}, ["hyperparameter margin"]),
        ({"name": "org/b"}, {}, ["hyperparameter name"]),
        ({}, {"split": {"fold": 1}}, ["data hyperparameter split", "data hyperparameter split.fold"]),
        ({"batch_size": 8, "data_dir": "/b", "mine": 1}, {"data_dir": "/b", "mine": 2}, []),
    ],
    ids=["layer", "saved", "nested", "tensor", "name", "data module", "own affairs"],
)
def test_two_runs_of_a_sweep_are_not_one_job(
    tmp_path: Path, double: Any, model: Any, data: Any, names: list[str]
) -> None:
    for settings in (({}, {}), (model, data)):
        fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0, strategy=ChaosStrategy(job="sweep", name="b"))
        fit.fit(Swept(**settings[0]), datamodule=SweptData(**settings[1]))
    a, b = (tuple(sorted(engine.fingerprint.items())) for engine in double.made)
    hello = Hello("sweep", "b", "here", "127.0.0.1", 1, 1, 1, 4, 1, "1.0", b)
    refusal = difference(hello, JobTerms.of(replace(hello, name="a", fingerprint=a)))
    assert sorted({name for name, _ in {*a} ^ {*b}}) == names
    assert bool(refusal) == bool(names)
    for name in names:
        assert name in refusal
        assert f"{dict(b).get(name, '(missing)')}" in refusal
        assert f"{dict(a).get(name, '(missing)')}" in refusal
    assert ("another run, as of a sweep" in advice(refusal, double.made[0].config)) == bool(names)


def test_what_has_no_canonical_form_is_named_once(tmp_path: Path, double: Any) -> None:
    fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0, strategy=ChaosStrategy(job="sweep", name="b"))
    with pytest.warns(UserWarning, match=r"hyperparameter margin\.f \(object\)") as told:
        fit.fit(Swept(margin={"f": object(), "g": 1}), datamodule=SweptData())
    assert len([w for w in told if "canonical" in str(w.message)]) == 1
    assert double.made[0].fingerprint["hyperparameter margin.g"] == "1"


class Idle(Regression):
    """Model with an empty validation step, for any number of loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


DIVIDED = {"": "divided", " samples": "8", " batches": "2", " batch size": "4"}
IN_FULL = {"": "evaluated in full by everybody", " samples": "8", " batches": "2"}
STREAM = {"": "evaluated in full by everybody", " samples": "unknown", " batches": "unknown"}


@pytest.mark.parametrize(
    ("held_out", "data", "expected"),
    [
        (lambda: None, "shared", []),
        (lambda: loader(8), "shared", [DIVIDED]),
        (lambda: loader(8), "local", [DIVIDED]),
        (lambda: loader(8, shuffle=True), "shared", [IN_FULL]),
        (lambda: loader(8, shuffle=True), "local", [{"": "evaluated in full by everybody"}]),
        (lambda: CombinedLoader([loader(8), DataLoader(Stream(8, 5), 4)], "sequential"), "shared", [DIVIDED, STREAM]),
    ],
    ids=["none", "assigned", "assigned-local", "shuffled", "shuffled-local", "combined"],
)
@pytest.mark.filterwarnings("ignore:.*shuffling enabled.*")
def test_loaders_of_validation_are_part_of_the_hello(
    tmp_path: Path, double: Any, held_out: Any, data: Any, expected: list[dict[str, str]]
) -> None:
    fit = trainer(tmp_path, max_epochs=1, strategy=ChaosStrategy(job="hello", data=data))
    fit.fit(Idle(), loader(), held_out())
    said = {name: value for name, value in double.made[0].fingerprint.items() if name.startswith("validation loader ")}
    for n, words in enumerate(expected):
        if " samples" in words:
            assert said.pop(f"validation loader {n} data").startswith("Stream" if words is STREAM else "tensors ")
    assert said == {f"validation loader {n}{key}": v for n, words in enumerate(expected) for key, v in words.items()}
    assert double.made[0].fingerprint["validation loaders"] == str(len(expected))
