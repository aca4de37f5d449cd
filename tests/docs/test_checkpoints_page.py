"""Tests the scripts of docs/checkpoints.md: a training that is resumed, and a plain loop that saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blocks_support import block
from installed_support import Installed


@pytest.mark.slow
def test_a_training_is_resumed(installed: Installed, tmp_path: Path) -> None:
    """The page's script trains 100 steps, then resumes from its checkpoint to step 200."""
    (tmp_path / "train.py").write_text(block("docs/tutorial.md", "import lightning"))
    script = block("docs/checkpoints.md", "import sys\n\nimport lightning")
    assert "max_epochs=1" in script
    (tmp_path / "resume.py").write_text(script.replace("max_epochs=1", "max_steps=100"))
    installed.run("python resume.py", tmp_path)
    (tmp_path / "resume.py").write_text(script.replace("max_epochs=1", "max_steps=200"))
    said = installed.run("python resume.py checkpoints/last.ckpt", tmp_path)
    assert "Restored all states from the checkpoint" in said
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 200


@pytest.mark.slow
def test_a_plain_loop_saves_and_goes_on(installed: Installed, tmp_path: Path) -> None:
    script = block("docs/checkpoints.md", "import sys\n\nimport torch.nn")
    (tmp_path / "plain.py").write_text(script)
    said = installed.run("python plain.py", tmp_path)
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "saved at" in line] == ["20", "40", "60", "80"]
    assert "epochs=2" in script
    (tmp_path / "plain.py").write_text(script.replace("epochs=2", "epochs=3"))
    said = installed.run("python plain.py plain.pt", tmp_path)
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "saved at" in line] == ["100", "120"]
