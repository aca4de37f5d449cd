"""Tests the failover demo with real torchrun nodes and etcd servers; its proof must notice altered logs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_support import whole_lines
from until_support import until

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.service.etcd_servers import find_etcd
from chaos_lightning.testing.demo.failover import prove
from chaos_lightning.testing.demo.proof import Evidence

ROOT = Path(__file__).resolve().parents[2]
CODES: dict[str, int | None] = {"edge-1": 0, "edge-2": -9, "edge-3": 0, "edge-4": 0, "edge-5": 0}
Lines = list[dict[str, Any]]


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "chaos_lightning.cli", "demo-failover", "--quick", "--keep", "--dir", str(folder)]


def left_over(folder: Path) -> list[bytes]:
    """Returns the command lines of running processes that have this folder in their command line or environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            process = Path("/proc", entry)
            words = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
            if int(entry) != os.getpid() and str(folder).encode() in words:
                found.append(process.joinpath("cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the demo once; returns its folder, and the ended process with its output."""
    try:
        find_etcd()
    except ConfigurationError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("failover")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command(folder), env=environment, capture_output=True, text=True, timeout=600)
    return folder, done


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_it_proves_its_story_and_leaves_a_report_and_no_process(
    told: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = told
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALL 14 LINES HOLD" in done.stdout
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [c for c in prove(Evidence(folder, CODES)) if not c.ok] == []
    assert left_over(folder) == []


def nobody_led(lines: Lines) -> None:
    """Removes from the logs that a scheduler led after the last kill."""
    kill = max(x["t"] for x in lines if x.get("kind") == "scheduler_sigkill")
    for line in [x for x in lines if x["name"] == "scheduler_started" and x["t"] > kill]:
        lines.remove(line)


def lost_step(lines: Lines) -> None:
    for line in lines:
        if line["name"] == "committed" and line["step"] > 20:
            line["step"] += 1


def waited(lines: Lines) -> None:
    """Changes the logs so that training seems to wait for two seconds after the first kill."""
    kill = next(x["t"] for x in lines if x.get("kind") == "scheduler_sigkill")
    for line in list(lines):
        if line["name"] == "committed" and kill - 0.1 < line["t"] < kill + 2.0:
            line["t"] = kill + 2.0


def one_kill(lines: Lines) -> None:
    lines.remove(next(x for x in lines if x.get("kind") == "scheduler_sigkill"))


def never_joined(lines: Lines, node: str = "edge-4-0") -> None:
    for line in [x for x in lines if x["name"] == "joined" and x.get("node") == node]:
        lines.remove(line)


def second_never_joined(lines: Lines) -> None:
    never_joined(lines, "edge-5-0")


def nothing_written(lines: Lines) -> None:
    """Removes from the logs what was written to the chain after the death of etcd's leader."""
    kill = next(x["t"] for x in lines if x.get("kind") == "etcd_sigkill")
    for line in [x for x in lines if x["name"] == "stored" and x["t"] > kill]:
        lines.remove(line)


def joined_late(lines: Lines) -> None:
    for line in [x for x in lines if x["name"] == "joined" and x.get("node") == "edge-5-0"]:
        line["t"] += 30.0


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (nobody_led, "two leading schedulers get SIGKILL, each time another one leads"),
        (lost_step, "no committed step is lost"),
        (waited, "training waits neither for a scheduler nor for etcd"),
        (one_kill, "joins work again soon after each kill of a scheduler"),
        (never_joined, "the leading scheduler dies as edge-4 knocks, and joins work again"),
        (second_never_joined, "etcd's leader dies as edge-5 knocks, and joins work again"),
        (nothing_written, "etcd's leader dies as edge-5 knocks, and joins work again"),
        (joined_late, "etcd's leader dies as edge-5 knocks, and joins work again"),
    ],
)
def test_its_proof_notices_what_the_logs_do_not_show(
    told: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    tamper: Callable[[Lines], None],
    noticed: str,
) -> None:
    events = tmp_path / "demo" / "events"
    shutil.copytree(told[0] / "events", events)
    files = {path: whole_lines(path) for path in events.glob("*.jsonl")}
    merged = sorted((line for lines in files.values() for line in lines), key=lambda line: line["t"])
    kept = list(merged)
    tamper(kept)
    remaining = {id(line) for line in kept}
    for path, lines in files.items():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if id(line) in remaining))
    assert noticed in {c.what for c in prove(Evidence(tmp_path / "demo", CODES)) if not c.ok}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_everything_and_says_where_the_logs_are(tmp_path: Path) -> None:
    try:
        find_etcd()
    except ConfigurationError as error:
        pytest.skip(str(error))
    folder = tmp_path / "demo"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command(folder), env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "3 machines start" in line:
                break
        until(lambda: list(folder.glob("events/member-*.jsonl")), "the first member's log", 60.0)
        demo.send_signal(signal.SIGINT)
        said = demo.stdout.read()
        assert demo.wait(60.0) == 130
    assert f"interrupted; logs are in\n{folder}" in said
    assert left_over(folder) == []


def test_where_etcd_is_not_installed_it_says_so_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chaos_lightning.service import etcd_servers
    from chaos_lightning.testing.demo.failover import demo_failover

    monkeypatch.setattr(etcd_servers.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match="etcd is not installed: install etcd"):
        demo_failover(directory=tmp_path / "demo", quick=True, keep=False, accelerator="cpu")
    assert list((tmp_path / "demo").glob("events/member-*")) == []
