"""Tests the README's first commands, run from an installed wheel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks_support import block
from installed_support import Installed
from test_tutorial import Terminals, terminals

__all__ = ["terminals"]


def test_the_line_that_changes(installed: Installed, tmp_path: Path) -> None:
    line = block("README.md", "trainer = L.Trainer")
    script = f"import lightning as L\nimport chaos_lightning\n{line}print(type(trainer.strategy).__name__)\n"
    (tmp_path / "line.py").write_text(script)
    assert "ChaosStrategy" in installed.run("python line.py", tmp_path)


@pytest.mark.slow
def test_torchrun_from_the_wheel(terminals: Terminals) -> None:
    """Two terminals run torchrun as two nodes of one job; members are named after their nodes."""
    endpoint = terminals.installed.environment(terminals.folder)["CHAOS_ENDPOINT"]
    command = block("README.md", "torchrun").replace("HOST:29400", endpoint)
    terminals.type("one", command, node="one-0")
    terminals.type("two", command, node="two-0")
    terminals.harness.wait_step(10, node="two-0")


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    """The README's demo runs from the installed wheel, and all its checks hold."""
    install, demo = (line.partition("  #")[0].strip() for line in block("README.md", "pip install").splitlines())
    assert install == 'pip install ".[lightning]"'
    said = installed.run(demo, tmp_path)
    assert re.fullmatch(r"ALL \d+ LINES HOLD", said.splitlines()[-1])
