"""Tests that processes of one machine prepare data in turn: a waiting process reports which one it waits for, and
gives up at a deadline.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import pytest

import chaos_lightning  # noqa: F401
from chaos_lightning.errors import ConfigurationError, DeadlineError
from chaos_lightning.machine.lock_files import lock_path
from chaos_lightning.strategies.environment import ChaosEnvironment
from chaos_lightning.strategies.preparing import DataTurn


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_holder_is_named_when_the_wait_is_over() -> None:
    first, second = DataTurn(ChaosEnvironment()), DataTurn(ChaosEnvironment(), deadline_s=0.0)
    first.begin("job")
    with pytest.raises(DeadlineError, match=rf"process {os.getpid()} of this machine has been preparing.*'job'"):
        second.begin("job")
    first.end()
    second.begin("job")
    second.end()


def test_a_holder_that_has_not_said_who_it_is_is_another_process() -> None:
    """A process holds the lock but has not yet written its process id: the error calls it "another process"."""
    with lock_path("job").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match=r"^another process of this machine has been preparing data for job"):
            DataTurn(ChaosEnvironment(), deadline_s=0.0).begin("job")


def test_the_turn_comes_when_the_other_is_through(caplog: pytest.LogCaptureFixture) -> None:
    first, second = DataTurn(ChaosEnvironment()), DataTurn(ChaosEnvironment())
    first.begin("job")

    class OnWait(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert str(os.getpid()) in record.getMessage()
            first.end()

    logger, handler = logging.getLogger("chaos_lightning"), OnWait()
    caplog.set_level("INFO", "chaos_lightning")
    logger.addHandler(handler)
    try:
        second.begin("job")
    finally:
        logger.removeHandler(handler)
    assert second._environment.preparing_data
    second.end()
    assert not second._environment.preparing_data


def test_a_process_forked_meanwhile_does_not_keep_the_lock() -> None:
    first, second = DataTurn(ChaosEnvironment()), DataTurn(ChaosEnvironment(), deadline_s=0.0)
    first.begin("job")
    assert first._file is not None
    inherited = os.dup(first._file)
    first.end()
    second.begin("job")
    second.end()
    os.close(inherited)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("kept")
    lock_path("job").symlink_to(victim)
    with pytest.raises(ConfigurationError, match="a link or another user's file there is not used"):
        DataTurn(ChaosEnvironment()).begin("job")
    assert victim.read_text() == "kept"


def test_what_is_no_file_of_this_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(lock_path("fifo"))
    with pytest.raises(ConfigurationError, match="not a file of this user"):
        DataTurn(ChaosEnvironment()).begin("fifo")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match=rf"owner {owner}, expected {owner + 1}"):
        DataTurn(ChaosEnvironment()).begin("job")


def test_a_job_named_like_a_path_stays_in_the_folder(tmp_path: Path) -> None:
    turn = DataTurn(ChaosEnvironment())
    turn.begin("../a/b")
    (made,) = tmp_path.iterdir()
    with made.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    turn.end()
