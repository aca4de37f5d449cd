"""Tests that a state's file is complete even with several writers at once, and that failures leave no other files."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos_lightning.errors import StateError
from chaos_lightning.replication.kept import PART_NBYTES, remove, write_bytes

PARTS = 3


class State:
    """State of some MiB of random bytes; readers of its second part wait for each other at the barrier `together`."""

    nbytes = PARTS * PART_NBYTES

    def __init__(self, seq: int, together: threading.Barrier | None = None) -> None:
        self.head, self.seq, self.together = f"{seq:016x}", seq, together
        self.content = os.urandom(self.nbytes)

    def read(self, start: int, stop: int) -> Sequence[memoryview]:
        if self.together is not None and start == PART_NBYTES:
            self.together.wait(30)
        return [memoryview(self.content)[start:stop]]


def test_writers_of_one_state_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    state = State(5, threading.Barrier(4))
    with ThreadPoolExecutor(4) as pool:
        paths = {written.result(30) for written in [pool.submit(write_bytes, tmp_path, state) for _ in range(4)]}
    assert list(tmp_path.iterdir()) == [*paths]
    (file,) = paths
    assert file.read_bytes() == state.content


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"could not be written to .*No space left"):
        write_bytes(tmp_path, State(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_member_removes_at_the_same_time_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # it was there when it was looked for
    remove(tmp_path / "gone")
    assert not list(tmp_path.iterdir())
