"""Tests the pipeline demo with six real torchrun nodes; its proof must notice altered logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_support import whole_lines

from chaos_lightning.testing.demo import ALONE
from chaos_lightning.testing.demo.proof import Evidence
from chaos_lightning.testing.demo.stages import DEVICES, prove

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]
ROOT = Path(__file__).resolve().parents[2]
CODES: dict[str, int | None] = dict.fromkeys((*DEVICES, *(f"{name} before" for name in DEVICES), ALONE), 0)
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the demo once; returns its folder, and the ended process with its output."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = [sys.executable, "-m", "chaos_lightning.cli", "demo-pipeline", "--quick", "--keep", "--dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return folder, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_it_proves_its_story(told: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = told
    assert done.returncode == 0, done.stdout + done.stderr
    checks = prove(Evidence(folder, CODES))
    assert [c for c in checks if not c.ok] == []
    assert f"ALL {len(checks)} LINES HOLD" in done.stdout


def other_loss(lines: Lines) -> None:
    next(x for x in reversed(lines) if x["name"] == "step_loss")["loss"] += 2e-4


def died_elsewhere(lines: Lines) -> None:
    next(x for x in lines if x.get("phase") == "backward")["phase"] = "forward"


def nobody_resumed(lines: Lines) -> None:
    lines[:] = [x for x in lines if x["name"] != "resumed_kept"]


def whole_models(lines: Lines) -> None:
    next(x for x in lines if x["name"] == "pipelines")["layers"] = {"dev-1-0~1": [[0, 6]]}


@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (other_loss, "losses are within 0.0001 of those of one process"),
        (died_elsewhere, "SIGKILL of dev-2 in a backward pass costs no step"),
        (nobody_resumed, "all six leave, keep all layers in files, and go on from there"),
        (whole_models, "six devices train as 3 x 2 a model that none of them has room for"),
    ],
)
def test_its_proof_notices_what_the_logs_do_not_show(
    told: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, tamper: Callable[[Lines], None], noticed: str
) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(told[0], folder)
    files = {path: whole_lines(path) for path in folder.glob("events/*.jsonl")}
    lines = sorted((line for its in files.values() for line in its), key=lambda line: line["t"])
    tamper(lines)
    remaining = set(map(id, lines))
    for path, its in files.items():
        path.write_text("".join(json.dumps(line) + "\n" for line in its if id(line) in remaining))
    assert noticed in {c.what for c in prove(Evidence(folder, CODES)) if not c.ok}
