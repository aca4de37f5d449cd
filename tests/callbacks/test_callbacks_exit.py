"""Tests ChaosExit: the first signal makes the member leave, the second ends it, and every other handler is restored
afterwards.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import callback_support
import pytest
from callback_support import FakeEngine, fit, trainer
from lightning.pytorch import Callback, Trainer

from chaos_lightning.callbacks import ChaosExit
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.machine import notice_watch
from chaos_lightning.machine.notices import NoticePlan
from chaos_lightning.testing.harness import Harness


class At(Callback):
    """Callback that calls a function in the middle of the batch with this number."""

    def __init__(self, batch: int, what: Any):
        self.batch, self.what = batch, what

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.batch:
            self.what()


def settled(engine: FakeEngine) -> FakeEngine:
    """Waits until the thread that asks the engine to leave has ended; returns the engine."""
    for thread in threading.enumerate():
        if thread.name == "chaos-leave":
            thread.join()
    return engine


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_one_signal_leaves_after_the_step(tmp_path: Path, name: str) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    engine = FakeEngine()
    leave = ChaosExit()
    raise_it = At(2, lambda: (signal.raise_signal(signal.Signals[name]), settled(engine)))
    made = trainer(engine, leave, raise_it, root=str(tmp_path))
    fit(made)
    assert engine.left == [f"signal {name}"]
    assert made.global_step == 3  # the step it was in is finished, no exception
    assert not made.received_sigterm
    assert {n: signal.getsignal(n) for n in before} == before


def test_repeats_within_the_debounce_are_one_wish(tmp_path: Path) -> None:
    engine = FakeEngine()
    leave = ChaosExit(debounce_s=30)

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        settled(engine)

    fit(trainer(engine, leave, At(1, twice), root=str(tmp_path)))
    assert engine.left == ["signal SIGINT"]


def test_a_second_ctrl_c_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    engine = FakeEngine()
    leave = ChaosExit(debounce_s=1.0)
    times = iter([0.0, 5.0, 7.0])
    leave._clock = lambda: next(times, 9.0)

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:  # Lightning's way with Ctrl+C
        fit(trainer(engine, leave, At(1, twice), root=str(tmp_path)))
    signal.signal(signal.SIGINT, before)
    assert ended.value.code == 1
    settled(engine)


def test_a_flag_file_and_a_time_limit_are_exit_events_too(tmp_path: Path) -> None:
    engine, flag = FakeEngine(), tmp_path / "leave"
    fit(trainer(engine, ChaosExit(flag_file=str(flag)), At(1, flag.touch), root=str(tmp_path)))
    assert settled(engine).left == [f"file {flag}"]

    engine = FakeEngine()
    late = ChaosExit(after_s=60)
    times = iter([0.0, 1.0, 61.0])
    late._clock = lambda: next(times, 99.0)
    made = trainer(engine, late, root=str(tmp_path))
    fit(made)
    assert settled(engine).left == ["time limit of 60 s"]


@pytest.fixture
def _asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all sources of notices be asked often."""
    monkeypatch.setattr(notice_watch, "EVERY_S", dict.fromkeys(notice_watch.EVERY_S, 0.01))


@pytest.mark.usefixtures("_asked_often")
def test_a_notice_is_an_exit_event_too(tmp_path: Path) -> None:
    engine, flag = FakeEngine(), tmp_path / "leave"
    engine.events = EventLog(tmp_path / "events.jsonl")
    fit(trainer(engine, ChaosExit(notice=f"file:{flag}"), At(1, flag.touch), root=str(tmp_path), max_epochs=-1))
    assert settled(engine).left == [f"file {flag}"]
    engine.events.close()
    (taken,) = [r for r in read_events(tmp_path / "events.jsonl") if r.name == "notice_taken"]
    assert taken["reason"] == f"file {flag}"


@pytest.mark.usefixtures("_asked_often")
def test_without_members_a_notice_stops_training(tmp_path: Path) -> None:
    made = trainer(None, ChaosExit(notice="deadline:@1"), root=str(tmp_path), max_epochs=-1)
    fit(made)
    assert made.should_stop


@pytest.mark.usefixtures("_asked_often")
def test_sigterm_with_a_grace_time_is_followed_as_a_notice(tmp_path: Path) -> None:
    """SIGTERM comes two hours before the machine is taken: training goes on, here until a file appears."""
    engine, flag = FakeEngine(), tmp_path / "leave"
    terms = [At(1, lambda: signal.raise_signal(signal.SIGTERM)), At(30, flag.touch)]
    made = trainer(engine, ChaosExit(notice=f"sigterm:2h+file:{flag}"), *terms, root=str(tmp_path), max_epochs=-1)
    fit(made)
    assert settled(engine).left == [f"file {flag}"]
    assert made.global_step > 30


def test_the_strategys_grace_time_is_respected(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.config.notice_plan = NoticePlan.read("sigterm:30s")
    sends = At(1, lambda: (signal.raise_signal(signal.SIGTERM), settled(engine)))
    fit(trainer(engine, ChaosExit(), sends, root=str(tmp_path)))
    assert engine.left == ["followed SIGTERM"]


def test_without_members_training_stops_after_the_step(tmp_path: Path) -> None:
    made = trainer(None, ChaosExit(), At(2, lambda: signal.raise_signal(signal.SIGTERM)), root=str(tmp_path))
    fit(made)
    assert made.global_step == 3


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no signals \['SIGFOO'\]"):
        ChaosExit(signals=["SIGFOO"])
    with pytest.raises(ConfigurationError, match="SIGKILL"):
        ChaosExit(signals=["SIGKILL"])
    with pytest.raises(ConfigurationError, match="negative"):
        ChaosExit(after_s=-1)
    with pytest.raises(ConfigurationError, match="ChaosExit: notice='azure': 'azure' is no source of notices"):
        ChaosExit(notice="azure")


@pytest.mark.slow
def test_a_real_process_leaves_with_exit_code_0_and_dies_at_the_second_signal(tmp_path: Path) -> None:
    with Harness(tmp_path / "polite") as harness:
        (tmp_path / "polite" / "go").touch()
        harness.start_function("a", callback_support.leaver, str(tmp_path / "polite"))
        harness.wait_step(2, 120)
        harness.terminate("a")
        assert harness.wait_exit("a") == 0
        assert harness.wait_for("left")["reason"] == "signal SIGTERM"
    with Harness(tmp_path / "hasty") as harness:
        harness.start_function("a", callback_support.leaver, str(tmp_path / "hasty"))
        harness.wait_step(2, 120)
        harness.terminate("a")
        left = harness.wait_for("leave")
        harness.declare("a")
        # Past the debounce time: the member itself goes on committing meanwhile.
        harness.wait_for("committed", lambda r: r.t > left.t + 0.5)
        harness.terminate("a")
        assert harness.wait_exit("a") == -signal.SIGTERM
