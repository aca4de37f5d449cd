"""Checkpoints that donors write for newcomers: once each, whole, and not for ever."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos_lightning.errors import StateError
from chaos_lightning.replication.checkpoint import KEPT_FILES, PART_NBYTES, CheckpointWriter, file_name

PARTS = 3


class State:
    """State of some MiB; a reader of its second part waits for `gate`."""

    nbytes = PARTS * PART_NBYTES

    def __init__(self, seq: int, gate: threading.Event | None = None) -> None:
        self.head, self.seq, self.gate = f"{seq:016x}", seq, gate
        self.content = os.urandom(self.nbytes)
        self.reads = 0

    def read(self, start: int, stop: int) -> Sequence[memoryview]:
        self.reads += 1
        if self.gate is not None and start:
            assert self.gate.wait(30)
        return [memoryview(self.content)[start:stop]]


def test_newcomers_that_ask_at_once_get_one_whole_file(tmp_path: Path) -> None:
    gate = threading.Event()
    state, writer, ticks = State(5, gate), CheckpointWriter(tmp_path), threading.Semaphore(0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(writer.save, state, ticks.release) for _ in range(4)]
        for _ in range(6):  # those that wait say that they live
            assert ticks.acquire(timeout=30)
        gate.set()
        told = [json.loads(future.result(30)) for future in asked]
    assert told == [{"name": file_name(state.head, 5), "nbytes": state.nbytes}] * 4
    assert state.reads == PARTS
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == state.content


def test_the_last_few_are_kept_and_one_that_is_gone_is_written_again(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    states = [State(seq) for seq in range(KEPT_FILES + 2)]
    for state in states:
        writer.save(state, lambda: None)
    names = [file_name(s.head, s.seq) for s in states]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[-KEPT_FILES:])
    (tmp_path / names[-1]).unlink()
    writer.save(states[-1], lambda: None)
    assert (tmp_path / names[-1]).read_bytes() == states[-1].content


def test_what_cannot_be_deleted_is_no_reason_to_refuse_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path)

    def stale(self: Path, missing_ok: bool = False) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", stale)
    for seq in range(KEPT_FILES + 1):
        assert json.loads(writer.save(State(seq), lambda: None))["nbytes"] == State.nbytes


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"could not be written to .*No space left"):
        CheckpointWriter(tmp_path).save(State(1), lambda: None)
    assert list(tmp_path.iterdir()) == []
