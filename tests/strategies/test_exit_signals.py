"""Tests signals that ask a process to end: the first one makes it leave, the second one ends it, and old handlers
are restored.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from chaos_lightning.machine.signals import HANGUP_S, POLITE, ExitSignals, aside, ends, say


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in POLITE}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_one_is_a_keyboard_interrupt_and_then_all_is_as_before() -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it is replaced")

    came: list[str] = []
    signal.signal(signal.SIGTERM, mine)
    before = signal.getsignal(signal.SIGINT)
    signals = ExitSignals(lambda number, frame: came.append(number.name))
    assert signals.install() == list(POLITE)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert came == ["SIGTERM"]
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is before
    signals.restore()


def test_who_has_taken_a_signal_over_meanwhile_keeps_it() -> None:
    def theirs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("nobody sends it")

    signals = ExitSignals(lambda number, frame: None)
    signals.install()
    signal.signal(signal.SIGINT, theirs)
    signals.restore()
    assert signal.getsignal(signal.SIGINT) is theirs


def test_it_is_taken_over_again_from_whom_it_is_to_be_taken() -> None:
    def theirs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it is replaced")

    again: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    signals = ExitSignals(lambda number, frame: None, [signal.SIGINT], again=lambda number, frame: again.append(number))
    signals.install()
    signal.signal(signal.SIGINT, theirs)
    assert signals.install(lambda handler: handler is not theirs) == []
    assert signals.install(lambda handler: handler is theirs) == [signal.SIGINT]
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    assert again == [signal.SIGINT] * 2
    signals.restore()
    assert signal.getsignal(signal.SIGINT) is before


def test_who_cannot_say_that_it_leaves_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose terminal is closed cannot print that it leaves; it leaves all the same."""

    def closed(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, "closed")

    left: queue.Queue[str] = queue.Queue()

    def leave(number: signal.Signals, frame: FrameType | None) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", closed)
            say("leaving")
        aside(left.put, f"signal {number.name}")

    ExitSignals(leave).install()
    signal.raise_signal(signal.SIGINT)
    assert left.get(timeout=30.0) == "signal SIGINT"


def test_a_hangup_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `nohup` SIGHUP stays ignored, even if another handler was installed later, as by torchrun."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = ExitSignals(lambda number, frame: None)
    assert signals.install() == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert ends() == [signal.SIGINT, signal.SIGTERM]
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals.restore()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


IGNORED = """
import os, signal
from chaos_lightning.machine.signals import ExitSignals
signal.signal(signal.SIGTERM, lambda number, frame: print("Lightning's"))
signals = ExitSignals(lambda number, frame: print(number.name))
print([number.name for number in signals.install()])
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    os.kill(os.getpid(), number)
signals.restore()
os.kill(os.getpid(), signal.SIGTERM)
print("survived")
"""


def test_what_is_ignored_when_the_process_starts_stays_so() -> None:
    """A shell has SIGTERM and SIGHUP ignored (`trap`, `nohup`), and Lightning puts a handler in place all the same:
    they change nothing, and Ctrl+C still asks to leave.
    """
    script = ["sh", "-c", 'trap "" TERM HUP; exec "$0" -c "$1"', sys.executable, IGNORED]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["['SIGINT']", "SIGINT", "survived"]), done.stderr


@pytest.mark.parametrize("polite", [False, True], ids=["ends by default", "has more to say"])
@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_the_shell_and_the_kernel_and_a_session_manager_say_it_all(first: signal.Signals, polite: bool) -> None:
    """Closing a terminal sends several signals: a SIGHUP never counts as the second signal, nor does a signal right
    after a SIGHUP; a later one does.
    """
    came: list[str] = []
    again: list[str] = []
    now = [100.0]
    signals = ExitSignals(
        lambda number, frame: came.append(number.name),
        again=(lambda number, frame: again.append(number.name)) if polite else None,
        clock=lambda: now[0],
    )
    signals.install()
    signal.raise_signal(first)
    for _ in range(3):
        signal.raise_signal(signal.SIGHUP)
    if first == signal.SIGHUP:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        now[0] += HANGUP_S
    now[0] += 0.1
    if polite:
        signal.raise_signal(signal.SIGINT)
        assert again == ["SIGINT"]
    else:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
    assert came == [first.name]
    signals.restore()


def test_one_that_somebody_else_serves_is_not_stood_down() -> None:
    """If user code installed a handler of its own for SIGTERM, a SIGINT that makes the process leave does not
    replace it.
    """
    mine: list[int] = []
    signals = ExitSignals(lambda number, frame: None)
    signals.install()
    signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert mine == [signal.SIGTERM]
    signals.restore()
