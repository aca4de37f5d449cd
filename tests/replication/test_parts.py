"""Tests that temporary files of dead writers are removed and those of living ones kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_lightning.replication import parts
from chaos_lightning.replication.kept import write_bytes
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.strategies import saving
from chaos_lightning.testing.emulation import emulating

WRITE = """
import sys
from pathlib import Path
from chaos_lightning.replication.parts import part_of
part = part_of(Path(sys.argv[1]))
part.write_bytes(b"half")
print(part, flush=True)
sys.stdin.read()
"""


class Source:
    head, seq, nbytes = "0" * 16, 1, 4

    def read(self, start: int, stop: int) -> list[memoryview]:
        return [memoryview(b"data")[start:stop]]


@pytest.mark.parametrize("reaped", [True, False])
def test_the_part_of_a_dead_writer_goes_and_that_of_a_living_one_stays(tmp_path: Path, reaped: bool) -> None:
    """A dead writer's temporary file is removed, even while the process is a zombie; a living writer's file stays."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path / "model.ckpt")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        dead, alive = [Path(w.stdout.readline().strip()) for w in writers if w.stdout is not None]
        for path in (dead, alive):
            os.utime(path, (0, 0))  # how old it is says nothing about a writer on this machine
        writers[0].kill()
        os.waitid(os.P_PID, writers[0].pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        mine, foreign = part_of(tmp_path / "other.ckpt"), tmp_path / ".somebody-elses.part"
        for path in (mine, foreign):
            path.write_bytes(b"")
        sweep(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([alive, mine, foreign])
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_the_part_of_a_writer_elsewhere_goes_when_it_is_old(tmp_path: Path) -> None:
    with emulating(host="elsewhere"):
        old, young = part_of(tmp_path / "a"), part_of(tmp_path / "a")
    for path in (old, young):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


@pytest.mark.parametrize("kind", ["kept state", "checkpoint of Lightning"])
def test_the_next_writer_removes_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with monkeypatch.context() as dead:
        dead.setattr(parts, "start_time", lambda pid: 1)  # a process before this one had its number
        left = part_of(tmp_path / "model.ckpt")
    left.write_bytes(b"half")
    if kind == "checkpoint of Lightning":
        name = "model.ckpt"
        saving.write(saving.TorchCheckpointIO(), None, {"a": 1}, tmp_path / name, None)
    else:
        name = write_bytes(tmp_path, Source()).name
    assert [path.name for path in tmp_path.iterdir()] == [name]
