"""Tests the project of docs/hydra.md: overrides, a sweep on two machines, and an interrupted sweep."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from blocks_support import block
from installed_support import LIMIT_S, Installed

pytestmark = pytest.mark.slow

PAGE = "docs/hydra.md"
LONG = " epochs=120"
"""Long enough that others come while a run is trained."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Folder with the files of the page's project."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(block(PAGE, "defaults:\n"))
    (tmp_path / "train.py").write_text(block(PAGE, "import hydra"))
    return tmp_path


class Started:
    """Command that runs in the background; a thread reads its output, so that a full pipe cannot block it."""

    def __init__(self, installed: Installed, folder: Path, command: str) -> None:
        self.text = ""
        self.came = threading.Condition()
        self.process = subprocess.Popen(
            command.split(), cwd=folder, env=installed.environment(folder), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self.came:
                    self.text += line
                    self.came.notify_all()

    def until(self, words: str) -> None:
        with self.came:
            assert self.came.wait_for(lambda: re.search(words, self.text), LIMIT_S), f"no {words!r} in\n{self.text}"

    def end(self) -> str:
        self.process.wait(LIMIT_S)
        self.reader.join(LIMIT_S)
        return self.text


@pytest.fixture
def start(installed: Installed, project: Path):
    """Function that starts a command of the page in the project; commands still running are killed when the test
    ends.
    """
    made: list[Started] = []

    def start(command: str) -> Started:
        made.append(Started(installed, project, command.replace("CHAOS_ENDPOINT=10.0.0.5:29400 ", "").strip()))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def test_overrides_and_what_is_misspelt(installed: Installed, project: Path) -> None:
    said = installed.run(block(PAGE, "python train.py lr=0.01"), project)
    assert "lr 0.01: loss" in said
    assert "job: lr-${lr}" in said.split("lr 0.01: loss")[1]
    said = installed.run("python train.py strategy.options.plna=tree 2>&1 || echo code $?", project)
    assert "Key 'plna' not in 'OptionsConfig'" in said
    assert "code 1" in said
    assert "I am rank" not in said


def test_a_sweep_is_trained_by_whoever_comes(project: Path, start) -> None:
    """Two machines train the same sweep together from its start, and report the same losses."""
    sweep = block(PAGE, "CHAOS_ENDPOINT=10.0.0.5:29400 python train.py -m lr=0.01,0.05").strip() + LONG
    a, b = start(sweep), start(sweep)
    first, second = a.end(), b.end()
    losses = re.findall(r"^lr .*: loss .*", first, re.MULTILINE)
    assert len(losses) == 2
    assert re.findall(r"^lr .*: loss .*", second, re.MULTILINE) == losses
    assert "of 2" in first
    assert [one.process.returncode for one in (a, b)] == [0, 0]


def test_a_sweep_is_run_and_an_interrupted_one_goes_on(installed: Installed, project: Path, start) -> None:
    said = installed.run(block(PAGE, "python train.py -m lr=0.01,0.05\n"), project)
    assert re.findall(r"^lr (\S+): loss", said, re.MULTILINE) == ["0.01", "0.05"]
    command = block(PAGE, "python train.py -m lr=0.01,0.05 hydra.sweep.dir").strip() + LONG
    a = start(command)
    a.until("I am rank 0 of 1")
    a.until("I log events")
    a.process.send_signal(signal.SIGINT)
    said = a.end()
    assert a.process.returncode == 130, said
    assert "#1" not in said
    assert "lr 0.01: loss" not in said
    kept = re.search(r"at step (\d+) is kept", said)
    assert kept, said
    again = installed.run(command, project)
    assert f"at step {kept[1]}" in again or f"step {kept[1]}" in again
    assert re.findall(r"^lr (\S+): loss", again, re.MULTILINE) == ["0.01", "0.05"]
