"""Tests the whole demo with real torchrun nodes; its proof must notice altered logs."""

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

from chaos_lightning.testing.demo.members import prove
from chaos_lightning.testing.demo.proof import Check, Evidence

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CODES: dict[str, int | None] = {
    "edge-1 before": 0, "edge-1": 0, "edge-2": -9, "edge-3": 0, "edge-4 before": 0, "edge-4": 0
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the demo once; returns its folder, and the ended process with its output."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "chaos_lightning.cli", "demo", "--quick", "--keep", "--dir", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return folder, done


def failed(checks: list[Check]) -> set[str]:
    return {check.what for check in checks if not check.ok}


@pytest.mark.timeout(700)
def test_demo_proves_its_story(told: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = told
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALL 30 LINES HOLD" in done.stdout
    assert done.stdout.count("│ ok │") == 30
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    checks = prove(Evidence(folder, CODES))
    assert failed(checks) == set()
    found = {check.what: check.found for check in checks}
    assert "in the same process" in found["edge-3 freezes, is put out, wakes and joins again by itself"]
    assert "; 0 lost" in found["no committed step is lost"]


def test_demo_leaves_no_process(told: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = str(told[0]).encode()
    left = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(entry) != os.getpid() and folder in Path(f"/proc/{entry}/environ").read_bytes():
                left.append(Path(f"/proc/{entry}/cmdline").read_bytes())
        except OSError:
            continue
    assert left == []


def began(path: Path) -> float:
    """Returns the time of a process's first event."""
    return float(json.loads(path.read_text().splitlines()[0])["t"])


Lines = list[dict[str, Any]]


def other_hash(lines: Lines) -> None:
    next(x for x in reversed(lines) if x["name"] == "state_hash")["hash"] = "of another state"


def sample_twice(lines: Lines) -> None:
    used = [x for x in lines if x["name"] == "committed" and x["spent"]]
    used[-1]["spent"] = [*used[-1]["spent"], *used[-2]["spent"]]


def lost_step(lines: Lines) -> None:
    """Adds to one member's log a committed step that no other member has."""
    step = next(x for x in reversed(lines) if x["name"] == "committed" and x["kind"] == "step")
    lines.insert(lines.index(step), {**step, "header": "unknown", "spent": []})


def other_chain(lines: Lines) -> None:
    next(x for x in reversed(lines) if x["name"] == "committed")["header"] = "another"


@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (other_hash, {"state hashes (weights and optimizer) are equal"}),
        (sample_twice, {"every sample exactly once per epoch"}),
        (lost_step, {"no committed step is lost", "all members committed the same headers"}),
        (other_chain, {"all members committed the same headers"}),
    ],
)
def test_proof_notices_logs_that_contradict_it(
    told: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    tamper: Callable[[Lines], None],
    noticed: set[str],
) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(told[0], folder)
    _, path = sorted((folder / "events").glob("member-edge-4-0-*.jsonl"), key=began)
    lines = whole_lines(path)
    tamper(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bad = failed(prove(Evidence(folder, CODES)))
    assert noticed <= bad
    assert any(what.startswith("audit") for what in bad)
