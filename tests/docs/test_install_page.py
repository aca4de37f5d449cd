"""Tests the commands of docs/install.md, from a copy of the source to a program that runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blocks_support import ROOT, block
from installed_support import Installed


@pytest.mark.slow
def test_the_wheel_is_made_installed_and_runs(installed: Installed) -> None:
    """The wheel that the fixture `installed` has made and installed, by the page's commands, has the page's name, size
    and version.
    """
    assert block("docs/install.md", "pip wheel")
    assert block("docs/install.md", "python3 -m venv venv").splitlines()[-1] == "venv/bin/chaos-lightning --version"
    assert installed.wheel.name in block("docs/install.md", "python3 -m venv venv")
    assert "\nchaos-lightning 0.1.0\n" in installed.said
    assert abs(installed.wheel.stat().st_size / 1e6 - 1.9) < 0.2  # as the page says


@pytest.mark.slow
def test_the_pinned_versions_fit(installed: Installed, tmp_path: Path) -> None:
    shutil.copy(installed.wheel, tmp_path)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    assert "already satisfied: torch" in installed.run(
        block("docs/install.md", "pip install -c constraints.txt"), tmp_path
    )
