"""Tests that loggers, progress bar, summary and files belong to one writer: rank 0, which no newcomer is while it
sets up.
"""

from __future__ import annotations

import csv
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from strategy_models import Counting, Evaluated, Regression, data, loader, trainer, weights
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import chaos_lightning  # noqa: F401
from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.files import RUN_FILE, Call, LogPlace, catch_up, mark, versions
from chaos_lightning.strategies.writer import StableLog, open_loggers

pytestmark = pytest.mark.usefixtures("double")


class Ranks(Callback):
    """Callback that records this process's rank and world size at each hook."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, int]] = {}

    def _note(self, hook: str, trainer: pl.Trainer) -> None:
        assert rank_zero_only.rank == trainer.global_rank
        assert trainer.is_global_zero is (trainer.global_rank == 0)
        self.seen[hook] = (trainer.global_rank, trainer.world_size)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._note(f"setup {stage.value}", trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._note("on_fit_start", trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("on_train_batch_start", trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._note(f"teardown {stage.value}", trainer)


class AsNewcomer:
    """Double of Place: while it sets up, the process is rank 1 of two; when it enters the job, the other member is
    gone.
    """

    rank, world_size = 1, 2

    def __init__(self, config: Any) -> None:
        pass

    def leave(self) -> None:
        pass


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    import chaos_lightning.strategies.strategy as module

    monkeypatch.setattr(module, "Place", AsNewcomer)


def test_who_is_alone_is_the_writer_from_the_start(tmp_path: Path) -> None:
    ranks = Ranks()
    fit = trainer(tmp_path, callbacks=[ranks])
    model = Regression()
    fit.fit(model, loader(), loader(8))
    assert set(ranks.seen) == {"setup fit", "on_fit_start", "on_train_batch_start", "teardown fit"}
    assert set(ranks.seen.values()) == {(0, 1)}
    fit.validate(model, loader(8), verbose=False)
    assert ranks.seen["setup validate"] == (0, 1)


def test_all_trainers_of_a_process_evaluate_and_train_as_one(tmp_path: Path) -> None:
    """Two Trainers of one process evaluate before fit, a third one trains, a fourth one evaluates afterwards: the
    process is the writer in each.
    """
    seen: list[Any] = []
    kept = []
    for hook in ("validate", "test", "fit", "validate"):
        ranks = Ranks()
        run = trainer(tmp_path, callbacks=[ranks])
        model = Evaluated()
        if hook == "fit":
            run.fit(model, loader(), loader(8))
        else:
            getattr(run, hook)(model, loader(8), verbose=False)
        seen.append(set(ranks.seen.values()))
        kept.append(run)
    assert seen == [{(0, 1)}] * 4
    copy = pickle.loads(pickle.dumps(kept[0].strategy))
    assert copy.global_rank == 0


def test_a_loader_that_is_cut_by_rank_is_refused_where_it_cannot_be_made_whole(tmp_path: Path) -> None:
    sharded = DistributedSampler(data(22), num_replicas=2, rank=1)
    with pytest.raises(UnsupportedError, match="shards by rank"):
        trainer(tmp_path).predict(Evaluated(), DataLoader(data(22), 4, sampler=sharded))
    (rows,) = trainer(tmp_path).test(Evaluated(), DataLoader(data(22), 4, sampler=sharded), verbose=False)
    assert rows["test_count"] == 22


@pytest.mark.usefixtures("newcomer")
def test_a_newcomers_rank_is_known_from_the_first_batch_on(tmp_path: Path) -> None:
    ranks = Ranks()
    trainer(tmp_path, callbacks=[ranks]).fit(Regression(), loader())
    assert ranks.seen == {
        "setup fit": (1, 2), "on_fit_start": (1, 2), "on_train_batch_start": (0, 1), "teardown fit": (0, 1)
    }  # fmt: skip


def test_rank_zero_code_runs_before_the_first_batch(tmp_path: Path) -> None:
    """When training starts, hyperparameters are written, and the hooks of rank zero have run."""
    ran: list[str] = []

    class Zero(Callback):
        @rank_zero_only
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            ran.append("on_fit_start")
            trainer.logger.log_hyperparams({"by": "a callback"})

        @rank_zero_only
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            ran.append("on_train_start")
            trainer.logger.save()
            assert "by: a callback" in (tmp_path / "run" / "version_0" / "hparams.yaml").read_text()

    logger = CSVLogger(tmp_path, name="run")
    trainer(tmp_path, logger=logger, callbacks=[Zero()], log_every_n_steps=2).fit(Regression(), loader(), loader(8))
    assert ran == ["on_fit_start", "on_train_start"]


def test_lightnings_warnings_are_heard(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="but have no `val_dataloader`"):
        trainer(tmp_path, max_epochs=1).fit(Regression(), loader())


@pytest.mark.usefixtures("newcomer")
def test_rank_of_a_newcomer_is_no_reason_to_shard(tmp_path: Path) -> None:
    """A user's DistributedSampler of validation was made before the first batch with a newcomer's rank: all data are
    evaluated nevertheless.
    """
    model = Counting()

    def sharded() -> DataLoader:
        held_out = data(22)
        return DataLoader(held_out, 4, sampler=DistributedSampler(held_out, num_replicas=2, rank=1, shuffle=True))

    for given in (True, False):
        fit = trainer(tmp_path, max_epochs=1, use_distributed_sampler=given)
        fit.fit(model, loader(), sharded())
        assert fit.callback_metrics["val_count"] == 22


@pytest.mark.usefixtures("newcomer")
def test_nothing_is_written_before_this_member_is_the_writer(tmp_path: Path) -> None:
    class Looks(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            assert list(tmp_path.iterdir()) == []

    logger = CSVLogger(tmp_path, name="run")
    model = Regression()
    model.save_hyperparameters({"lr": 0.05})
    fit = trainer(tmp_path, logger=logger, callbacks=[Looks()], enable_checkpointing=True, log_every_n_steps=2)
    fit.fit(model, loader())
    assert sorted(os.listdir(tmp_path / "run" / "version_0")) == ["checkpoints", "hparams.yaml", "metrics.csv"]
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]
    assert steps == [1, 3, 5, 7, 9, 11]
    assert "lr: 0.05" in (tmp_path / "run" / "version_0" / "hparams.yaml").read_text()


@pytest.mark.usefixtures("newcomer")
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bar_and_summary_come_late_but_come(
    tmp_path: Path, bar: type, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    callbacks = [bar(refresh_rate=1), ModelSummary()]
    trainer(tmp_path, callbacks=callbacks, enable_progress_bar=True, enable_model_summary=True).fit(
        Regression(), loader(), loader(8)
    )
    shown = "".join(capfd.readouterr())
    assert "Epoch 1" in shown
    assert "6/6" in shown
    assert "Sequential" in caplog.text
    assert "Sanity" not in shown, "nobody is the writer yet while loaders are tried out"


def test_a_second_fit_begins_anew(tmp_path: Path, double: Any) -> None:
    fit = trainer(tmp_path, max_epochs=1)
    model = Regression()
    fit.fit(model, loader())
    before = weights(model)
    fit.fit_loop.max_epochs = 3
    fit.fit(model, loader())
    assert len(double.made) == 2
    assert not torch.equal(before, weights(model))
    assert fit.current_epoch == 3


def test_evaluation_outside_of_fit_is_local(tmp_path: Path, double: Any) -> None:
    class Tests(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    fit, model = trainer(tmp_path), Tests()
    assert len(fit.predict(model, loader(8))) == 2
    (alone,) = fit.test(model, loader(8), verbose=False)
    assert set(alone) == {"test_loss"}
    assert not double.made


def test_a_writer_that_dies_owes_what_two_commits_made_final(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    stable = StableLog(lambda: False)
    stable.hold([logger])
    for step in range(4):
        logger.log_metrics(metrics={}, step=step)
        stable.stable()
    logger.log_metrics(metrics={}, step=4)
    assert [call.kwargs["step"] for call in stable.owed(logger, certain=False)] == [2, 3]
    assert [call.kwargs["step"] for call in stable.owed(logger, certain=True)] == [3]
    stable.stable()
    stable.stable()
    assert stable.owed(logger, certain=True) == stable.owed(CSVLogger(tmp_path), certain=False) == []
    stable.drop()
    assert stable.owed(logger, certain=False) == []


def test_logged_values_wait_for_the_next_commit() -> None:
    written: list[int] = []
    alone = False

    class Log:
        def log_metrics(self, metrics: Any, step: int) -> None:
            written.append(step)

    log, stable = Log(), StableLog(lambda: alone)
    stable.hold([log, log])  # type: ignore[list-item]
    log.log_metrics({}, step=1)
    assert written == []
    stable.stable()
    assert written == [1]
    log.log_metrics({}, step=2)
    stable.drop()
    stable.stable()
    assert written == [1]
    alone = True
    log.log_metrics({}, step=3)
    assert written == [1, 3]
    stable.release()
    assert "log_metrics" not in vars(log)


def metrics(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of metrics.csv in a folder, without empty values."""
    with (folder / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def next_writer(folder: Path, logger: Any, told: LogPlace, *owed: dict[str, Any], let_go: bool = False) -> None:
    """Makes a member the next writer, after one that died or left (`let_go`). Its own logger would begin a new
    version.
    """
    fit = trainer(folder, logger=logger)
    fit.fit_loop.max_epochs = 0
    fit.strategy._lightning_module = Regression()
    if open_loggers(fit, "node-b", fresh=False, told=told, writer="" if let_go else "b")[logger] and not let_go:
        catch_up(logger, [Call(logger, logger.log_metrics, (), call) for call in owed])


def told_by(folder: Path) -> LogPlace:
    """Writes step 0 and the first values of step 1 as an earlier writer; returns that writer's log place."""
    old = CSVLogger(folder, name="run")
    old.log_metrics({"a": 1.0}, step=0)
    old.log_metrics({"a": 1.5}, step=1)
    old.save()
    return LogPlace("a~1", old.log_dir, mark([old], "", "a"), versions([old]))


def test_the_next_writer_goes_on_with_the_files_of_the_one_before(tmp_path: Path) -> None:
    """The next writer adds the missing rows to the previous writer's file, and then rows with further columns."""
    told = told_by(tmp_path)
    new = CSVLogger(tmp_path, name="run")
    next_writer(tmp_path, new, told, *({"metrics": m, "step": 1} for m in ({"a": 1.5}, {"val": 0.5})))
    new.log_metrics({"b": 2.0, "a": 1.0}, step=2)
    new.save()
    assert Path(told.folder, RUN_FILE).read_text() == f"{told.run} b"
    assert os.listdir(tmp_path / "run") == ["version_0"]
    assert metrics(tmp_path / "run" / "version_0") == [
        {"step": "0", "a": "1.0"},
        {"step": "1", "a": "1.5"},
        {"step": "1", "val": "0.5"},
        {"step": "2", "a": "1.0", "b": "2.0"},
    ]


@pytest.mark.parametrize("name", ["run", ""])
def test_the_next_writer_goes_on_in_a_folder_that_is_named_wholly(tmp_path: Path, name: str) -> None:
    old = CSVLogger(tmp_path, name=name, version="")
    old.log_metrics({"a": 1.0}, step=0)
    old.save()
    told = LogPlace("a~1", old.log_dir, mark([old], "", "a"), versions([old]))
    new = CSVLogger(tmp_path, name=name, version="")
    next_writer(tmp_path, new, told, {"metrics": {"a": 2.0}, "step": 1})
    assert [row["a"] for row in metrics(tmp_path / name)] == ["1.0", "2.0"]


@pytest.mark.parametrize("let_go", [False, True])
def test_the_next_writer_writes_what_is_logged_without_a_step(tmp_path: Path, *, let_go: bool) -> None:
    """Values logged without a step get Lightning's own count, which begins at 0 after each save: the next writer
    must not drop them as rows that are already there.
    """
    told = told_by(tmp_path)
    new = CSVLogger(tmp_path, name="run")
    next_writer(tmp_path, new, told, {"metrics": {"a": 1.5}, "step": 1}, let_go=let_go)
    new.log_metrics({"a": 2.0})
    new.save()
    assert [row["a"] for row in metrics(tmp_path / "run" / "version_0")] == ["1.0", "1.5", "2.0"]


@pytest.mark.parametrize("other", ["another run", "no run", ""])
def test_the_next_writer_leaves_a_folder_alone_that_is_not_the_runs(tmp_path: Path, other: str) -> None:
    """The next writer, on another machine, finds a folder of the same version from another run: it leaves that
    alone, and logs to a new one.
    """
    told, here = told_by(tmp_path / "there"), tmp_path / "here"
    if other:
        there_before = told_by(here)
        if other == "no run":
            os.unlink(Path(there_before.folder, RUN_FILE))
    new = CSVLogger(here, name="run")
    next_writer(here, new, told, {"metrics": {"a": 1.5}, "step": 1})
    new.log_metrics({"a": 2.0}, step=2)
    new.save()
    own = "version_0-node-b" if other else "version_0"
    assert metrics(here / "run" / own) == [{"step": "2", "a": "2.0"}]
    if other:
        assert len(metrics(here / "run" / "version_0")) == 2


def test_a_writer_that_was_frozen_finds_the_next_one_in_its_folder(tmp_path: Path) -> None:
    """A frozen writer wakes up after another member has become the writer: it writes nothing more into the folder."""
    logger = CSVLogger(tmp_path, name="run")
    stable = StableLog(lambda: False, "a")
    stable.hold([logger])
    logger.log_metrics({"a": 1.0}, step=1)
    stable.stable()
    told = LogPlace("a~1", str(logger.log_dir), mark([logger], "", "a"), versions([logger]))
    logger.log_metrics({"a": 1.0}, step=2)
    next_writer(tmp_path, CSVLogger(tmp_path, name="run"), told, {"metrics": {"a": 2.0}, "step": 2})
    stable.stable()
    assert metrics(tmp_path / "run" / "version_0") == [{"step": "1", "a": "1.0"}, {"step": "2", "a": "2.0"}]


def test_a_writer_that_was_put_out_writes_no_more(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run")
    stable = StableLog(lambda: False)
    stable.hold([logger])
    for step in (1, 2):
        logger.log_metrics({"a": 1.0}, step=step)
        if step == 1:
            stable.stable()
    logger.experiment.log_metrics({"a": 3.0}, step=3)  # past what waits, as a callback may
    stable.drop()
    stable.stable()
    logger.finalize("success")
    stable.release()
    assert metrics(tmp_path / "run" / "version_0") == [{"step": "1", "a": "1.0"}]


def test_the_next_writer_goes_on_with_the_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next writer continues the previous writer's W&B run. The package wandb is replaced by a double."""
    begun: list[dict[str, Any]] = []

    class Run:
        def __init__(self, **init: Any) -> None:
            begun.append(init)
            self.id = init["id"] or "made-up"
            self.config = types.SimpleNamespace(update=lambda *a, **k: None)

        def define_metric(self, *a: Any, **k: Any) -> None:
            """Accepts the definition of a metric, as W&B does."""

    lib = types.SimpleNamespace(RunDisabled=Run)
    for name, module in {
        "wandb": types.SimpleNamespace(init=Run, run=None),
        "wandb.sdk": types.SimpleNamespace(lib=lib),
        "wandb.sdk.lib": lib,
        "wandb.wandb_run": types.SimpleNamespace(Run=Run),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    writer, heir = WandbLogger(save_dir=tmp_path), WandbLogger(save_dir=tmp_path)
    assert writer.experiment.id == "made-up"
    told = LogPlace("a~1", "", mark([writer], "", "a"), versions([writer]))
    next_writer(tmp_path, heir, told)
    assert heir.experiment.id == heir.version == "made-up"
    assert [(init["id"], init["resume"]) for init in begun] == [(None, "allow"), ("made-up", "allow")]


def test_checkpoints_are_named_by_committed_step(tmp_path: Path, double: Any) -> None:
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer(tmp_path, enable_checkpointing=True, callbacks=[kept]).fit(Regression(), loader())
    steps = [h for h in double.made[0].log if h.kind == "step"]
    for number in (4, 8, 12):
        saved = torch.load(tmp_path / "kept" / f"step={number}.ckpt", weights_only=False)["chaos_lightning"]
        assert saved["head"] == steps[number - 1].hash
        assert saved["step"] == number
    assert not [p for p in (tmp_path / "kept").iterdir() if p.suffix == ".part"]
    names = [h.name for h in double.made[0].log]
    at = names.index("barrier before saving")  # without the path: it may be another one on each member
    assert names[:at].count("section 0") == 4, "the fourth step is stable once this slot has committed"


def test_every_process_of_a_machine_prepares_data_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    locks: list[bool] = []

    class Prepares(Regression):
        def prepare_data(self) -> None:
            locks.append(self.trainer.strategy._turn._file is not None)
            assert self.trainer.local_rank == 0

        def setup(self, stage: str) -> None:
            assert self.trainer.strategy._turn._file is None
            assert self.trainer.local_rank == 1

    trainer(tmp_path, max_epochs=1, strategy=ChaosStrategy(job="turns")).fit(Prepares(), loader())
    assert locks == [True]


@pytest.mark.usefixtures("newcomer")
def test_data_that_were_cut_by_rank_are_refused_by_name(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two founders shard the data by rank in their loaders: the second one is refused with a message, as its
    fingerprint differs.
    """

    class Cut(Regression):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(Subset(data(24), range(self.trainer.global_rank, 24, self.trainer.world_size)), 4)

        def val_dataloader(self) -> DataLoader:
            mine = data(24)[self.trainer.global_rank :: self.trainer.world_size]
            return DataLoader(TensorDataset(*mine), 4)

    for rank in (0, 1, 1):
        monkeypatch.setattr(AsNewcomer, "rank", rank)
        trainer(tmp_path, max_epochs=1).fit(Cut())
    one, two, three = (engine.fingerprint for engine in double.made)
    different = {name for name in one if one[name] != two[name]}
    assert different == {"training data", "validation loader 0 data"}
    assert two == three
