"""Plans of pipelines in the README and in docs/pipelines.md, by the commands that a wheel has installed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from blocks_support import ROOT, block
from installed_support import Installed


def test_the_readme_shows_what_the_command_prints(installed: Installed, tmp_path: Path) -> None:
    """In a terminal of 100 columns. CHAOS_REWRITE=1 writes it again."""
    shutil.copytree(ROOT / "examples" / "plans", tmp_path / "examples" / "plans")
    command = block("README.md", "chaos-lightning plan")
    said = installed.run(command, tmp_path, COLUMNS="100")
    page = (ROOT / "README.md").read_text()
    before, _, rest = page.partition(f"```bash\n{command}```\n\n```text\n")
    shown, _, after = rest.partition("```")
    if os.environ.get("CHAOS_REWRITE"):
        (ROOT / "README.md").write_text(f"{before}```bash\n{command}```\n\n```text\n{said}```{after}")
        shown = said
    assert shown == said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.slow
def test_the_commands_plan_for_the_file(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(block("docs/pipelines.md", "micro_batches: 24"))
    said = installed.run(block("docs/pipelines.md", "chaos-lightning plan"), tmp_path, COLUMNS="100")
    heads = re.findall(r"^(\S+): (\d+) layers, (\d+) devices", said, re.MULTILINE)
    assert heads == [("fleet", "26", "14"), ("fleet", "26", "15"), ("fleet", "26", "14"), ("gpt:32,4096", "34", "64")]
    assert "lost: d3, d7" in said


SCRIPT = """
import sys
import torch
from torch import nn

assert sys.argv[1:] == ["--lr", "0.1"]
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_is_profiled_and_planned_for(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = installed.run(block("docs/pipelines.md", "chaos-lightning profile"), tmp_path, COLUMNS="100")
    assert "8 blocks of Linear in the model" in said
    assert "profile: 8 layers, 8 devices" in said


@pytest.mark.slow
def test_a_model_in_stages_is_trained(installed: Installed, tmp_path: Path) -> None:
    """Each of three processes has memory for half of the model; two found the job, and one speaks of the plan."""
    (tmp_path / "train.py").write_text(block("docs/pipelines.md", "import lightning as L"))
    said = installed.run(block("docs/pipelines.md", "CHAOS_DRY_RUN=1 python train.py"), tmp_path)
    assert "min_nodes=2 assumed" in said
    assert re.search(r"^\d pipelines? of .* stages; a step of 8 micro-batches \(128 samples\) takes about", said, re.M)
    said = installed.run(block("docs/pipelines.md", "for i in 1 2 3; do python train.py & done; wait"), tmp_path)
    assert "chaos: I am rank 2 of 3" in said
    assert len(re.findall(r"^chaos: \d pipelines? of .* stages; a step of 8 micro-batches", said, re.M)) == 1
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in said
