"""Tests that all members end with an error if a checkpoint cannot be written, instead of failing as writer one after
another.
"""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_job import Job
from strategy_models import Regression, loader, trainer
from test_members import start_three

from chaos_lightning.errors import FencedError


def test_a_full_disk_ends_all_members_at_one_header(job: Job) -> None:
    """The disk has room for one checkpoint only. At the second one all members end at the same step, and the first
    file stays.
    """
    spec = {"epochs": 4, "samples": 48, "callbacks": ("steps",), "model_args": {"sync": True}, "room": 1}
    job.harness.declare("a", "b", "c")
    start_three(job, spec)
    assert [job.harness.wait_exit(name) for name in "abc"] == [1, 1, 1]
    reports = [job.report(name) for name in "abc"]
    assert [report["step"] for report in reports] == [10, 10, 10]
    here, *there = [report["error"] for report in reports]
    path = job.out / "ckpt" / "step=10.ckpt"
    assert here.startswith("OSError: [Errno 28] No space left on device: the checkpoint")
    assert all(f"a could not write the checkpoint {path}: {here}. Training ends" in words for words in there)
    assert [p.name for p in (job.out / "ckpt").iterdir()] == ["step=5.ckpt"]


@pytest.mark.usefixtures("double")
def test_the_error_says_how_much_is_missing(tmp_path: Path) -> None:
    """Writing fails at a file size limit, in place of a full disk: the error gives the bytes needed, and no
    temporary file is left.
    """

    class Limit(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, filename="{step}")
    try:
        with pytest.raises(
            OSError, match=r"File too large: the checkpoint .*step=2.ckpt needs \d+ bytes, free in"
        ) as got:
            trainer(tmp_path, enable_checkpointing=True, callbacks=[Limit(), kept]).fit(Regression(), loader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert got.value.errno == errno.EFBIG
    assert list((tmp_path / "kept").iterdir()) == []


def test_who_is_put_out_while_it_fails_to_write_joins_again(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that is fenced while it fails to write joins again: the others have a writer of their own, so its
    error ends nobody.
    """
    from chaos_lightning.strategies import saving as module

    failed: list[str] = []

    def write(io: Any, session: Any, checkpoint: Any, path: Any, options: Any) -> None:
        if not failed:
            failed.append(path)
            engine = double.made[0]
            engine.fence_at = len(engine.log)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write", write)
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, filename="{step}")
    fit = trainer(tmp_path, enable_checkpointing=True, callbacks=[kept])
    fit.fit(Regression(), loader())
    assert failed
    assert f"{failed[0]} is not written here" in caplog.text
    assert FencedError.__name__ not in caplog.text
