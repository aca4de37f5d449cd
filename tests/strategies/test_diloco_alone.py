"""Tests DiLoCoStrategy in one process, with a double of the session that needs no server: Lightning's settings apply
to the job.
"""

from __future__ import annotations

import copy
import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import strategy_models as models
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from outer_double import SessionDouble
from strategy_models import Regression, weights
from until_support import until

import chaos_lightning  # noqa: F401
from chaos_lightning.callbacks import ChaosExit
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.rules.types import TICKS, JobProgress
from chaos_lightning.protocol.spans import count
from chaos_lightning.strategies import BySamples, DiLoCoStrategy
from chaos_lightning.strategies.files import RUN_FILE, mark


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SessionDouble]]:
    import chaos_lightning.strategies.diloco as module

    SessionDouble.made.clear()
    SessionDouble.setting.clear()
    monkeypatch.setattr(module, "OuterSession", SessionDouble)
    monkeypatch.setattr(module, "others_in", lambda options: not SessionDouble.setting.get("oldest", True))
    yield SessionDouble
    SessionDouble.made.clear()


def made() -> SessionDouble:
    return SessionDouble.made[-1]


def fitted(tmp_path: Path, model: pl.LightningModule, *args: Any, **kwargs: Any) -> pl.Trainer:
    strategy = DiLoCoStrategy(**kwargs.pop("told", {"inner_steps": 4}))
    return models.fitted(tmp_path, model, *args, **{"strategy": strategy, "max_epochs": 2, **kwargs})


class Watches(Callback):
    """Callback that records, in order, what its hooks see."""

    def __init__(self) -> None:
        self.saw: list[Any] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saw.append(("epoch", trainer.current_epoch))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saw.append(trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.saw.append(("validated", trainer.global_step))

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saw.append(("end", trainer.current_epoch))


def test_two_epochs_use_each_sample_twice_and_end_the_job(tmp_path: Path) -> None:
    model, watches = Regression(), Watches()
    run = fitted(tmp_path, model, models.loader(), models.loader(8), callbacks=[watches])
    assert made().spent == {0: ((0, 24),), 1: ((0, 24),)}
    assert made().calls[0] == "start"
    assert made().calls[-2:] == ["finish: max_epochs=2 reached", "close"]
    assert watches.saw == [
        ("epoch", 0), 1, 2, 3, 4, 5, 6, ("validated", 6), ("end", 0),
        ("epoch", 1), 7, 8, 9, 10, 11, 12, ("validated", 12), ("end", 1),
    ]  # fmt: skip
    assert (run.global_step, run.current_epoch) == (12, 2)
    assert run.state.finished


def test_alone_it_trains_as_one_process_does(tmp_path: Path) -> None:
    """A lone cluster trains the same weights as plain Lightning does."""
    mine, plain = Regression(), Regression()
    fitted(tmp_path, mine, models.loader())
    models.fitted(tmp_path, plain, models.loader(), strategy="auto")
    assert torch.equal(weights(mine), weights(plain))


def test_a_short_accumulation_takes_its_step_at_the_end_of_what_is_dealt(tmp_path: Path) -> None:
    fitted(tmp_path, Regression(), models.loader(20), accumulate_grad_batches=3, max_epochs=1)
    assert [count(each.spans) for each in made().trained] == [12, 8]
    assert dict(made().agreement.settings)["batch"] == "12"


def test_a_batch_that_no_loader_tells_is_demanded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: if no loader gave the batch size, it was silently 32. Now it must be set; a size from the
    environment overrides the loader's.
    """

    def batch(**told: Any) -> str:
        fitted(tmp_path, Regression(), loader, told={"inner_steps": 4, **told})
        return dict(made().agreement.settings)["batch"]

    loader: Any = torch.utils.data.DataLoader([*models.loader()], batch_size=None)
    with pytest.raises(ConfigurationError, match=r"set options\.batch"):
        batch(data="local")
    assert batch(data="local", options={"batch": 4}) == "4"
    loader = models.loader()
    assert batch() == "4"
    monkeypatch.setenv("CHAOS_OUTER_BATCH", "16")
    assert batch() == "16"


def test_the_epoch_goes_on_where_more_of_it_is_dealt(tmp_path: Path) -> None:
    """Samples of a removed cluster are leased again at the end of an epoch: the epoch continues after a batch that
    seemed to be its last.
    """

    class Dies(SessionDouble):
        def _spend(self, *, dry: bool) -> None:
            if dry and self.others.get(0):
                self.others.clear()
                return
            super()._spend(dry=dry)

    SessionDouble.setting["others"] = {0: ((12, 24),)}
    watches = Watches()
    import chaos_lightning.strategies.diloco as module

    module.OuterSession = Dies
    fitted(tmp_path, Regression(), models.loader(), models.loader(8), callbacks=[watches], max_epochs=1)
    assert watches.saw == [("epoch", 0), 1, 2, 3, 4, 5, 6, ("validated", 6), ("end", 0)]
    assert made().spent == {0: ((0, 24),)}


def test_epochs_end_with_the_others(tmp_path: Path) -> None:
    SessionDouble.setting["others"] = {0: ((8, 24),)}
    watches = Watches()
    fitted(tmp_path, Regression(), models.loader(), models.loader(8), callbacks=[watches])
    assert [s for s in watches.saw if isinstance(s, tuple)] == [
        ("epoch", 0), ("validated", 2), ("end", 0), ("epoch", 1), ("validated", 8), ("end", 1)
    ]  # fmt: skip


def test_a_late_joiner_has_the_jobs_parameters_steps_epoch_and_schedule(tmp_path: Path) -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            step = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "interval": "epoch"}]

    newest = [torch.full_like(p, 0.25) for p in Regression().parameters()]
    SessionDouble.setting |= {"progress": JobProgress(240, 30 * TICKS, 3), "takes_over": newest}
    watches, model = Watches(), Scheduled()
    run = fitted(tmp_path, model, models.loader(), max_steps=32, max_epochs=-1, callbacks=[watches])
    assert watches.saw[:3] == [("epoch", 3), 31, 32]
    assert all(torch.equal(v, n) for v, n in zip(made().versions[0], newest, strict=True))
    rates = [config.scheduler.last_epoch for config in run.lr_scheduler_configs]
    assert rates == [32, 3]
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3 * 0.5**3)
    assert made().calls[-2] == "finish: max_steps=32 reached"


def test_a_late_joiner_of_a_job_that_is_through_trains_nothing(tmp_path: Path) -> None:
    SessionDouble.setting["progress"] = JobProgress(240, 30 * TICKS, 3)
    model = Regression()
    fitted(tmp_path, model, models.loader(), max_steps=30)
    assert model.seen == []
    assert made().calls[-2] == "finish: max_steps=30 reached"


def test_epochs_that_went_by_without_this_cluster_are_skipped(tmp_path: Path) -> None:
    """The other clusters train two epochs while this cluster stands still: it skips them, and continues in the job's
    present epoch.
    """

    class Sleeps(SessionDouble):
        def _spend(self, *, dry: bool) -> None:
            super()._spend(dry=dry)
            if self.progress.epoch == 1:
                self.progress = JobProgress(self.progress.samples, self.progress.ticks + 12 * TICKS, 3)

    import chaos_lightning.strategies.diloco as module

    module.OuterSession = Sleeps
    watches = Watches()
    fitted(tmp_path, Regression(), models.loader(), max_epochs=4, callbacks=[watches])
    assert watches.saw == [
        ("epoch", 0),
        1,
        2,
        3,
        4,
        5,
        18,
        ("end", 2),
        ("epoch", 3),
        19,
        20,
        21,
        22,
        23,
        24,
        ("end", 3),
    ]


def test_what_is_validated_and_saved_is_a_version(tmp_path: Path) -> None:
    """Validation and checkpoints use the version adopted last, even in the middle of a round, when the trained
    parameters are ahead of it.
    """

    class Looks(Regression):
        validated: list[torch.Tensor]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.validated = [*getattr(self, "validated", []), weights(self)]

    keeps = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_top_k=-1)
    every = ModelCheckpoint(tmp_path / "every", every_n_train_steps=1, save_top_k=-1)
    model = Looks()
    fitted(
        tmp_path, model, models.loader(), models.loader(8, batch_size=8), val_check_interval=3, max_epochs=1,
        num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[keeps, every],
    )  # fmt: skip
    versions = [torch.cat([t.flatten() for t in v]) for v in made().versions]
    assert torch.equal(model.validated[0], versions[0])
    assert torch.equal(model.validated[1], versions[2])
    for number, path in enumerate(sorted((tmp_path / "every").iterdir(), key=lambda p: p.stat().st_mtime_ns)):
        state = torch.load(path, weights_only=False)
        held = torch.cat([t.flatten() for t in state["state_dict"].values()])
        assert torch.equal(held, versions[0 if number < 3 else 1 if number < 5 else 2]), path
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]


def test_a_rejection_takes_back_what_was_claimed_and_the_optimizers_state(tmp_path: Path) -> None:
    SessionDouble.setting["rejects_at"] = 1
    run = fitted(tmp_path, Regression(), models.loader(), max_epochs=1)
    assert sum(count(each.spans) for each in made().trained) == 16 + 24
    assert made().spent == {0: ((0, 24),)}
    assert run.global_step == 6
    assert [int(state["step"]) for state in run.optimizers[0].state.values()] == [6] * 4


@pytest.mark.parametrize(("ends_at", "data"), [(3, "shared"), (6, "shared"), (3, "local")])
def test_the_jobs_end_in_the_middle_of_an_epoch_ends_fit(tmp_path: Path, ends_at: int, data: str) -> None:
    SessionDouble.setting["ends_at"] = ends_at
    watches, stopping, told = Watches(), EarlyStopping("val_loss"), {"inner_steps": 4, "data": data}
    run = fitted(tmp_path, Regression(), models.loader(), models.loader(8), callbacks=[watches, stopping], told=told)
    assert watches.saw == [("epoch", 0), *range(1, ends_at + 1)]
    assert made().calls[-2] == "finish: the oldest cluster is through"
    assert run.state.finished


@pytest.mark.parametrize("data", ["shared", "local"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_after_the_step(tmp_path: Path, data: str, number: signal.Signals, capfd: Any) -> None:
    class Asked(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                os.kill(os.getpid(), number)

    before, watches = signal.getsignal(number), Watches()
    told = {"inner_steps": 4, "data": data}
    run = fitted(tmp_path, Asked(), models.loader(), models.loader(8), callbacks=[watches], told=told)
    assert watches.saw == [("epoch", 0), 1, 2, 3]
    assert made().calls[-2:] == ["finish: it was asked to leave", "close"]
    assert "leave" in made().calls
    assert run.interrupted
    assert run.received_sigterm is (number == signal.SIGTERM)
    assert signal.getsignal(number) == before
    assert f"{number.name}: leaving the job" in capfd.readouterr().err


def test_a_callback_that_asks_to_leave_makes_the_cluster_leave(tmp_path: Path) -> None:
    """A cluster that ChaosExit ends leaves the job, and does not say that its training is through."""
    flag = tmp_path / "leave"

    class Asked(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                flag.touch()
            if self.trainer.global_step == 4:
                until(lambda: made().leaving, "the wish to leave")

    exits = ChaosExit(flag_file=str(flag))
    run = fitted(tmp_path, Asked(), models.loader(), models.loader(8), callbacks=[exits])
    assert run.global_step == 4
    assert made().calls[-2:] == ["finish: it was asked to leave", "close"]
    assert run.interrupted


def test_a_second_signal_says_what_it_may_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def leave(session: SessionDouble, reason: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    class Asked(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SessionDouble, "finish", leave)
    fitted(tmp_path, Asked(), models.loader())
    assert "To end now may cost 3 inner steps of this cluster" in capfd.readouterr().err


def test_an_exception_leaves_the_job_and_is_the_one_that_is_seen(tmp_path: Path) -> None:
    class Fails(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("of the user's")

    run = models.trainer(tmp_path, strategy="chaos_diloco")
    with pytest.raises(ValueError, match="of the user's"):
        run.fit(Fails(), models.loader())
    assert made().calls == ["start", "close"]


def test_fit_may_be_called_again_and_a_copy_of_the_trainer_has_no_part_in_a_job(tmp_path: Path) -> None:
    class Copies(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            self.copy = copy.deepcopy(self.trainer)

    model = Copies()
    run = fitted(tmp_path, model, models.loader(), max_epochs=1)
    assert model.copy.strategy.fit is None
    assert [type(c).__name__ for c in run.callbacks].count("OuterCompanion") == 0
    run.fit_loop.max_epochs = run.fit_loop.epoch_progress.current.processed + 1
    run.fit(Regression(), models.loader())
    assert len(SessionDouble.made) == 2
    assert made().spent == {0: ((0, 24),)}
    assert run.validate(models.Evaluated(), models.loader(8), verbose=False)[0]["val_count"] == 8


def test_early_stopping_ends_the_job(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    run = fitted(tmp_path, Regression(), models.loader(), models.loader(8), callbacks=[stopping], max_epochs=20)
    assert run.current_epoch < 20
    assert made().calls[-2] == "finish: training was stopped early"


def test_a_checkpoint_founds_a_job_that_goes_on_from_it(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(tmp_path / "kept", save_last=True)
    fitted(tmp_path, Regression(), models.loader(), models.loader(8), enable_checkpointing=True, callbacks=[keeps])
    watches, model = Watches(), Regression()
    strategy = DiLoCoStrategy(inner_steps=4)
    run = models.trainer(tmp_path, strategy=strategy, max_epochs=3, callbacks=[watches])
    run.fit(model, models.loader(), ckpt_path=tmp_path / "kept" / "last.ckpt")
    assert watches.saw == [("epoch", 2), 13, 14, 15, 16, 17, 18, ("end", 2)]
    assert dict(made().agreement.words)["checkpoint (ckpt_path)"] == "of 12 steps, 2 epochs"
    assert made().spent == {0: ((0, 24),)}


def test_a_schedule_by_samples_goes_by_the_jobs(tmp_path: Path) -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            return [optimizer], [BySamples(torch.optim.lr_scheduler.StepLR(optimizer, 10), 8)]

    SessionDouble.setting["progress"] = JobProgress(160, 20 * TICKS, 0)
    run = fitted(tmp_path, Scheduled(), models.loader(), max_epochs=1)
    assert run.lr_scheduler_configs[0].scheduler.steps == (160 + 24) // 8


def test_manual_optimization_counts_what_its_steps_used(tmp_path: Path) -> None:
    run = fitted(tmp_path, models.Gan(), models.loader(), max_epochs=1)
    assert made().spent == {0: ((0, 24),)}
    assert made().progress.steps == 6
    assert run.global_step == 12


def test_own_data_are_the_users_loader(tmp_path: Path) -> None:
    watches = Watches()
    data = torch.utils.data.DataLoader(models.Stream(20, 5), batch_size=4)
    fitted(tmp_path, Regression(), data, callbacks=[watches], told={"inner_steps": 4, "data": "local"})
    assert made().agreement.length == 0
    assert made().progress == JobProgress(40, 10 * TICKS, 0)
    assert [s for s in watches.saw if isinstance(s, tuple)] == [("epoch", 0), ("end", 0), ("epoch", 1), ("end", 1)]


def test_a_seed_that_orders_nothing_is_named(tmp_path: Path) -> None:
    told = {"data": "local", "options": {"seed": 3}}
    with pytest.warns(UserWarning, match=r"options\.seed=3 is not honoured with data='local'"):
        fitted(tmp_path, Regression(), models.loader(), max_epochs=1, told=told)


def test_loaders_that_are_made_anew_go_on_with_what_was_dealt(tmp_path: Path) -> None:
    class Makes(Regression):
        made = 0

        def train_dataloader(self) -> Any:
            self.made += 1
            return models.loader()

    model = Makes()
    fitted(tmp_path, model, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert model.made == 3
    assert made().spent == dict.fromkeys(range(3), ((0, 24),))


def test_buffers_that_are_averaged_stand_behind_parameters(tmp_path: Path) -> None:
    model = Regression(norm=True)
    model.net[0].bias.requires_grad_(False)
    fitted(tmp_path, model, models.loader(), max_epochs=1)
    names = [t.name for t in made().agreement.tensors]
    assert names[-made().agreement.averaged :] == ["net.1.running_mean", "net.1.running_var"]
    assert "net.0.bias" not in names


def test_only_the_oldest_cluster_writes(tmp_path: Path) -> None:
    SessionDouble.setting["oldest"] = False
    keeps = ModelCheckpoint(tmp_path / "kept")
    fitted(tmp_path, Regression(), models.loader(), enable_checkpointing=True, callbacks=[keeps])
    assert not (tmp_path / "kept").exists()


def test_who_becomes_the_oldest_cluster_writes_from_then_on(tmp_path: Path) -> None:
    class Goes(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            made().oldest = trainer.global_step >= 7

    SessionDouble.setting["oldest"] = False
    logger = CSVLogger(tmp_path)
    fitted(tmp_path, Regression(), models.loader(), logger=logger, log_every_n_steps=1, callbacks=[Goes()])
    with open(f"{logger.log_dir}/metrics.csv") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[0] == 7
    assert steps[-1] == 11


def test_who_becomes_the_oldest_cluster_goes_on_in_the_folder_of_the_job(tmp_path: Path) -> None:
    """A cluster that becomes the oldest continues the log folder of its job, in which the former oldest had logged
    further steps; a later folder belongs to another job and is left alone.
    """

    class Goes(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            made().oldest = trainer.global_step >= 7

    for run in ("job", "another job"):
        before = CSVLogger(tmp_path)
        for step in range(9):
            before.log_metrics({"loss_step": 0.0, "epoch": 0}, step)
        before.save()
        mark([before], run, "before")
    SessionDouble.setting["oldest"] = False
    keeps = ModelCheckpoint()
    settings: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 1, "callbacks": [Goes(), keeps]}
    fitted(tmp_path, Regression(), models.loader(), logger=CSVLogger(tmp_path), **settings)
    folder = tmp_path / "lightning_logs"
    assert sorted(path.name for path in folder.iterdir()) == ["version_0", "version_1"]
    with (folder / "version_0" / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]] == list(range(12))
    assert sorted(os.listdir(folder / "version_1")) == [RUN_FILE, "metrics.csv"]
    assert keeps.dirpath == str(folder / "version_0" / "checkpoints")
    assert os.listdir(keeps.dirpath)


def test_evaluation_outside_of_fit_needs_no_job(tmp_path: Path) -> None:
    run = models.trainer(tmp_path, strategy="chaos_diloco")
    assert run.validate(models.Evaluated(), models.loader(8), verbose=False)[0]["val_count"] == 8
    assert SessionDouble.made == []
