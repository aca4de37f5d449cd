"""Tests that plain Lightning loads the checkpoint that `ps export` writes, and resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.session import agreement_of
from chaos_lightning.outer.commands import export
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    TICKS,
    Body,
    Counters,
    Cut,
    Durable,
    Factors,
    Founded,
    GateState,
    IncarnationId,
    JobOpened,
    JobProgress,
    Joined,
    Offer,
    PushId,
    Round,
    Weighed,
)
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.strategies.elastic import _hyper_parameters, replica_of

HOME = IncarnationId("home", 1)
STEPS = 41
"""Steps of the job at the version that is exported."""


class Reads(pl.LightningModule):
    """Model of encoder and decoder, which may share a weight; records where its training began and each batch's
    epoch.
    """

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.decoder.weight = self.encoder.weight
        self.epochs: list[int] = []
        self.began: tuple[int, int, dict[str, Tensor]] | None = None

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.epochs.append(self.current_epoch)
        return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def on_train_start(self) -> None:
        weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.began = self.trainer.global_step, self.trainer.current_epoch, weights

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def fitted(folder: Path, model: Reads, max_steps: int, ckpt_path: Path | None = None) -> pl.Trainer:
    made = pl.Trainer(
        accelerator="cpu",
        max_epochs=100,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
    )
    rows = DataLoader(TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1))), 4)
    made.fit(model, rows, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return made


def durable_job(folder: Path, model: Reads) -> dict[str, Tensor]:
    """Makes a job of this model with one durable version; returns the version's parameters by all their names."""
    replica = replica_of(model)
    options = ClusterOptions.build({"block": 64, "data": "local"}, {})
    agreement = agreement_of(replica, options, OuterSettings(), words=_hyper_parameters(model))
    theta = torch.randn(replica.grid(64).elements, generator=torch.Generator().manual_seed(2))
    counters = Counters(samples=100, ticks=STEPS * TICKS)
    first = Offer(PushId(HOME, 1), NO_VERSION, "m", 0, 0)
    with SqliteStore(folder / "chain.sqlite", "default", exclusive=True) as store:
        end = store.take_term()

        def put(*bodies: Body) -> None:
            nonlocal end
            for body in bodies:
                outcome = store.append(type(body).__name__, body_bytes(body), end)
                assert outcome.ok
                end = outcome.end

        put(JobOpened(agreement, "a test"), Joined(HOME, "a test"), Cut(("f0",)), Founded(1, first))
        founded = export.load_chain(store).newest
        weighed = Weighed(Offer(PushId(HOME, 2), founded, "m", 1, 1), 1.0, 0)
        put(Round(2, founded, (weighed,), (), Factors(0.1, 1.0, 0.9), counters, GateState(), ""))
        version = export.load_chain(store).newest
        state = OuterState(replica.grid(64).whole, theta)
        put(Durable(version, (ShardFiles(folder / "f0", "default").save(version, state, counters),)))
    pieces = torch.split(theta, [spec.elements for spec in replica.specs])
    found = {spec.name: piece.view(spec.shape) for spec, piece in zip(replica.specs, pieces, strict=True)}
    return found | {name: found[other] for name, other in replica.tied.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_lightning_loads_an_export_without_any_other_checkpoint(tmp_path: Path, tied: bool) -> None:
    expected, file = durable_job(tmp_path, Reads(tied)), tmp_path / "exported.ckpt"
    assert export.main(["newest", str(file), "--dir", str(tmp_path)]) == 0
    loaded = Reads.load_from_checkpoint(file)
    assert same(loaded.state_dict(), expected)
    assert (loaded.decoder.weight is loaded.encoder.weight) == tied


def test_arguments_that_json_cannot_hold_or_clusters_may_differ_in_are_left_out() -> None:
    class Odd(pl.LightningModule):
        chaos_own_hparams = ("rate",)

        def __init__(self, rate: float, width: int, loss: nn.Module, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["loss"])
            self.hparams_initial["loss"] = loss

    assert _hyper_parameters(Odd(0.1, 8, nn.MSELoss(), (1, 2))) == {"hyper_parameters": '{"width": 8}'}


def test_what_an_export_cannot_do_is_said_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable_job(tmp_path, Reads())
    there = ["newest", str(tmp_path / "none" / "x.ckpt"), "--dir", str(tmp_path)]
    with pytest.raises(ConfigurationError, match=r"there is no folder .*none; make it first"):
        export.main(there)
    (tmp_path / "text").write_text("no checkpoint")
    file = str(tmp_path / "x.ckpt")
    with pytest.raises(ConfigurationError, match=r"--like .*text is no checkpoint"):
        export.main(["newest", file, "--dir", str(tmp_path), "--like", str(tmp_path / "text")])
    with pytest.raises(ConfigurationError, match=r"--server 192.0.2.9:29470: the files of a version lie"):
        export.main(["newest", file, "--server", "192.0.2.9:29470"])
    monkeypatch.setenv("CHAOS_PS", "192.0.2.9:1")
    with pytest.raises(ConfigurationError, match=r"--server 192.0.2.9:1: "):
        export.main(["newest", file])


def test_an_export_that_fails_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable_job(tmp_path, Reads())
    file = tmp_path / "x.ckpt"
    file.write_text("before")

    def full(made: object, where: str) -> None:
        Path(where).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.torch, "save", full)
    with pytest.raises(ConfigurationError, match=r"x.ckpt cannot be written: .*No space left"):
        export.main(["newest", str(file), "--dir", str(tmp_path)])
    assert file.read_text() == "before"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("x.ckpt.")]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_trainer_goes_on_from_an_export_where_the_job_was(tmp_path: Path, tied: bool) -> None:
    like, file = tmp_path / "cluster.ckpt", tmp_path / "exported.ckpt"
    fitted(tmp_path, Reads(tied), 9).save_checkpoint(like)  # three batches into its second epoch
    expected = durable_job(tmp_path, Reads(tied))
    assert export.main(["newest", str(file), "--dir", str(tmp_path), "--like", str(like)]) == 0
    assert same(Reads.load_from_checkpoint(file).state_dict(), expected), "with its own hyperparameters"
    model = Reads(tied)
    trainer = fitted(tmp_path, model, STEPS + 5, file)
    assert model.began is not None
    step, epoch, weights = model.began
    assert (step, epoch) == (STEPS, 0)
    assert same(weights, expected)
    assert trainer.global_step == STEPS + 5
    assert not same(dict(model.state_dict()), expected)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_an_epoch_that_was_not_over_begins_anew(tmp_path: Path) -> None:
    like, file = tmp_path / "cluster.ckpt", tmp_path / "exported.ckpt"
    fitted(tmp_path, Reads(), 9).save_checkpoint(like)
    progress = JobProgress(samples=500, ticks=STEPS * TICKS, epoch=7)
    tensors = dict(Reads().state_dict())
    torch.save(export.checkpoint_of(tensors, progress, torch.load(like, weights_only=False))[0], file)
    model = Reads()
    fitted(tmp_path, model, STEPS + 7, file)
    assert model.began is not None
    assert model.began[:2] == (STEPS, 7)
    assert model.epochs == [7] * 6 + [8]
