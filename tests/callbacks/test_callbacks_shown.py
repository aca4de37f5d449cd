"""Tests UsefulTime and LiveView: what they log and display, and when they show nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from callback_support import FakeEngine, fit, trainer, view
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

from chaos_lightning.callbacks import Goodput, LiveView, UsefulTime
from chaos_lightning.callbacks.useful_time import UsefulTimeMeter
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog


class Kept(Logger):
    """Logger that keeps all logged rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "kept"
    version = "0"

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_meter_books_each_second_on_its_cause() -> None:
    meter = UsefulTimeMeter()
    now = 0.0
    for _ in range(11):
        meter.step(now, ("a", "b"))
        now += 1.0
    meter.step(now + 2.0, ("a", "b", "c"))  # 3 s, 2 of them for a join
    meter.step(now + 3.0, ("a", "b", "c"))
    meter.step(now + 4.5, ("b", "c"))  # 1.5 s: a died
    meter.step(now + 6.0, ("b",), leaving=True)  # 1.5 s: c left
    assert meter.lost_s == pytest.approx({"join": 2.0, "recovery": 0.5, "leave": 0.5})
    assert meter.total_s == pytest.approx(17.0)
    assert meter.share == pytest.approx(1 - 3.0 / 17.0)
    assert meter.usual_s == 1.0


def test_meter_does_not_count_pauses_and_goes_on_from_a_state() -> None:
    meter = UsefulTimeMeter()
    meter.step(0.0, ("a",))
    meter.step(1.0, ("a",))
    meter.pause()
    meter.step(100.0, ("a",))
    meter.step(101.0, ("a",))
    assert meter.total_s == pytest.approx(2.0)
    other = UsefulTimeMeter()
    other.load(json.loads(json.dumps(meter.state())))
    other.step(500.0, ("a",))
    other.step(501.0, ("a",))
    assert (other.total_s, other.steps) == (pytest.approx(3.0), 3)
    assert UsefulTimeMeter().share == 1.0


def test_useful_time_is_logged_by_rank_0_to_all_loggers(tmp_path: Path) -> None:
    engine, logger, useful = FakeEngine(), Kept(), UsefulTime(every_n_steps=2)

    class Dying(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                engine.view = view(2, "a", reason="b~1 died")

    times = iter([0.0, 1.0, 2.0, 5.0, 6.0, 7.0])
    useful._clock = lambda: next(times)
    fit(trainer(engine, Dying(), useful, root=str(tmp_path), logger=logger))
    rows = [row for _, row in logger.rows if "chaos/useful_share" in row]
    assert len(rows) == 5  # steps 1, 2, 4, 6, and the end
    assert rows[-1]["chaos/lost_recovery_s"] == pytest.approx(2.0)
    assert rows[-1]["chaos/useful_share"] == pytest.approx(5 / 7)
    assert (rows[0]["chaos/members"], rows[-1]["chaos/members"]) == (2, 1)


def test_useful_time_tells_a_leave_by_the_header_that_carried_it(tmp_path: Path) -> None:
    engine, useful = FakeEngine(), UsefulTime()

    class Leaving(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                engine.view = view(2, "a")
                engine.header = replace(engine.header, view_change=engine.view)

    times = iter([0.0, 1.0, 2.0, 5.0, 6.0, 7.0])
    useful._clock = lambda: next(times)
    fit(trainer(engine, Leaving(), useful, root=str(tmp_path)))
    assert useful.meter.lost_s == pytest.approx({"join": 0.0, "recovery": 0.0, "leave": 2.0})


def test_useful_time_counts_optimizer_steps_not_batches(tmp_path: Path) -> None:
    useful = UsefulTime()
    fit(trainer(None, useful, root=str(tmp_path), accumulate_grad_batches=3), batches=6)
    assert useful.meter.steps == 1  # two steps, one interval


def test_useful_time_state_survives_a_checkpoint(tmp_path: Path) -> None:
    useful = UsefulTime()
    fit(trainer(FakeEngine(), useful, root=str(tmp_path)))
    again = UsefulTime()
    again.load_state_dict(useful.state_dict())
    assert again.meter.steps == useful.meter.steps == 5


def test_the_old_name_warns_and_logs_as_before(tmp_path: Path) -> None:
    logger = Kept()
    with pytest.warns(FutureWarning, match="another name, UsefulTime"):
        named = Goodput(every_n_steps=1, prefix="job/")
    fit(trainer(FakeEngine(), named, root=str(tmp_path), logger=logger))
    assert [row["job/goodput"] for _, row in logger.rows if "job/goodput" in row][-1] == 1.0
    again = UsefulTime()
    assert again.state_key == named.state_key, "a checkpoint of the old name goes on under the new one"
    again.load_state_dict(named.state_dict())
    assert again.meter.steps == named.meter.steps == 5


def test_live_view_is_silent_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveView()
    fit(trainer(FakeEngine(), live, root=str(tmp_path)))
    assert live._thread is None
    assert capsys.readouterr().out == ""


def test_live_view_and_a_progress_bar_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(ConfigurationError, match="enable_progress_bar=False"):
        fit(trainer(FakeEngine(), LiveView(), root=str(tmp_path), enable_progress_bar=True))


def test_live_view_runs_on_rank_0_only_and_follows_promotions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    engine = FakeEngine(events=EventLog(tmp_path / "logs" / "x.jsonl", node="a"))
    live = LiveView()
    seen: list[bool] = []
    boards: list[Any] = []
    running = threading.Event()

    def watch(board: Any, *, interval_s: float, stop: threading.Event) -> None:
        boards.append(board())
        running.set()
        stop.wait()

    class Ranks(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(live._thread is not None)

    live._watch = watch
    zero = {"now": False}
    made = trainer(engine, live, Ranks(), root=str(tmp_path))
    monkeypatch.setattr(type(made), "is_global_zero", property(lambda self: zero["now"]))

    class Promote(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            zero["now"] = batch_idx in (1, 2)

    made.callbacks.insert(0, Promote())  # type: ignore[attr-defined]
    fit(made)
    assert seen == [False, False, True, True, False, False]
    assert running.wait(10)
    assert boards[0].title.startswith("logs ")
    assert live._thread is None
    engine.events.close()


def test_live_view_asks_the_scheduler_if_there_are_no_logs(tmp_path: Path) -> None:
    engine = FakeEngine()
    board = LiveView()._source(trainer(engine, root=str(tmp_path)))
    assert board is not None
    assert board().title == "scheduler 127.0.0.1:1"
    assert LiveView()._source(trainer(None, root=str(tmp_path))) is None


@pytest.mark.parametrize(
    "make", [lambda: UsefulTime(every_n_steps=-1), lambda: LiveView(interval_s=0)], ids=["useful time", "live"]
)
def test_wrong_arguments_are_named(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        make()
