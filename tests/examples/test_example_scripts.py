"""Tests that the example models learn, and that the example scripts run: alone with Lightning's own strategy, and
elastic.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from log_support import whole_lines

from chaos_lightning.machine.listener import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY_GPT = ["--block", "16", "--layers", "1", "--width", "16"]
BRIEF = [
    "trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_checkpointing=false",
]
SCRIPTS = {
    "gpt_text": TINY_GPT,
    "diloco_text": TINY_GPT,
    "fashion_cnn": ["--digits"],
}


def script(tmp_path: Path, *command: str, **extra: str) -> str:
    """Runs an example as a user would, in an empty folder; returns its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_STATE_HOME": str(tmp_path),
        **extra,
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ models


def test_gpt_does_not_look_ahead() -> None:
    from chaos_lightning.examples.models import GPT

    torch.manual_seed(0)
    net = GPT(layers=2, heads=2, width=16, block=12).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    before, after = net(tokens), net(changed)
    assert torch.equal(before[0, :8], after[0, :8])
    assert not torch.equal(before[0, 8], after[0, 8])


@pytest.mark.parametrize("size", [8, 28, 32])
def test_cnn_takes_images_of_any_size(size: int) -> None:
    from chaos_lightning.examples.models import CNNModule

    assert CNNModule(channels=3).net(torch.zeros(2, 3, size, size)).shape == (2, 10)


@pytest.mark.parametrize("name", ["GPTModule", "CNNModule"])
def test_a_model_learns_one_batch_by_heart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.examples import models

    torch.manual_seed(0)
    if name == "GPTModule":
        module = models.GPTModule(layers=1, heads=2, width=32, block=16, lr=1e-2)
        batch = (torch.randint(0, 256, (4, 16)), torch.randint(0, 256, (4, 16)))
    else:
        module = models.CNNModule()
        batch = (torch.randn(16, 1, 8, 8), torch.arange(16) % 10)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    optimizer = module.configure_optimizers()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# ------------------------------------------------------------------------------------------------ scripts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(name).main
    main([*SCRIPTS[name], "--strategy", "auto", "--max-steps", "2", "--quick"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_text", "fashion_cnn"])
def test_script_trains_elastic(name: str, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    said = script(tmp_path, f"{name}.py", *SCRIPTS[name], "--max-steps", "2", "--quick", "--endpoint", endpoint)
    assert "max_steps=2` reached" in said


@pytest.mark.slow
def test_train_composes_and_trains_elastic(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    said = script(tmp_path, "train.py", *BRIEF, "trainer.max_steps=2", f"strategy.endpoint={endpoint}")
    assert "max_steps=2` reached" in said


@pytest.mark.slow
def test_train_sweeps(tmp_path: Path) -> None:
    """With `-m` the example trains once for each of the given settings, in a folder of its own."""
    said = script(
        tmp_path,
        "train.py",
        "-m",
        *BRIEF,
        "model.lr=0.01,0.05",
        "strategy=single",
        "callbacks=none",
        "trainer.max_steps=1",
    )
    assert said.count("max_steps=1` reached") == 2
    assert {p.name for p in tmp_path.glob("multirun/*/*/*") if p.is_dir()} == {"0", "1"}


@pytest.mark.skipif(find_spec("chaos_lightning.trainer") is None, reason="the paper's plain interface is not built in")
def test_plain_loop_trains(tmp_path: Path) -> None:
    said = script(tmp_path, "plain_loop.py", "--epochs", "1", CHAOS_ENDPOINT=f"127.0.0.1:{free_port()}")
    assert "step 20: loss" in said


@pytest.mark.slow
def test_plain_loop_saves_and_resumes(tmp_path: Path) -> None:
    file = str(tmp_path / "digits.pt")
    told = ("plain_loop.py", "--accumulate", "2", "--clip", "0.5", "--bf16", "--save", file)
    script(tmp_path, *told, "--epochs", "1", CHAOS_ENDPOINT=f"127.0.0.1:{free_port()}")
    steps = torch.load(file, weights_only=True)["chaos_lightning"]["step"]
    said = script(tmp_path, *told, "--epochs", "2", "--resume", file, CHAOS_ENDPOINT=f"127.0.0.1:{free_port()}")
    assert f"step {-(-steps // 20) * 20}: loss" in said
    assert "step 20: loss" not in said
    assert torch.load(file, weights_only=True)["chaos_lightning"]["step"] == 2 * steps


@pytest.mark.slow
def test_diloco_loop_trains(tmp_path: Path) -> None:
    said = script(tmp_path, "diloco_loop.py", "--epochs", "1", CHAOS_PS=f"127.0.0.1:{free_port()}")
    assert "of the job: loss" in said


@pytest.mark.slow
def test_a_cluster_of_two_devices_is_started_by_lightning(tmp_path: Path) -> None:
    """An example with two devices: Lightning starts the second rank, rank 0 starts the parameter server, and
    inner="auto" chooses DDP.
    """
    log, server = tmp_path / "log", f"127.0.0.1:{free_port()}"
    brief = ["--max-steps", "12", "--inner-steps", "4", "--batch-size", "4", "--quick"]
    said = script(
        tmp_path, "diloco_text.py", *TINY_GPT, *brief, "--devices", "2", CHAOS_PS=server, CHAOS_LOG_DIR=str(log)
    )
    assert "MEMBER: 2/2" in said
    assert [e["reason"].split(": ")[1] for e in told(log, "cluster_over")] == ["max_steps=12 reached"]
    assert sum(e["steps"] for e in told(log, "inner_steps")) == 12
    assert 12 * 4 < sum(e["samples"] for e in told(log, "inner_steps")) <= 12 * 2 * 4


@pytest.mark.slow
def test_two_typed_lines_train_two_clusters(tmp_path: Path) -> None:
    """The same command is run twice: the first process starts the parameter server, both train as clusters, and both
    end with the same result.
    """
    server, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    command = [sys.executable, str(ROOT / "examples" / "diloco_text.py"), *TINY_GPT]
    command += ["--max-steps", "40", "--inner-steps", "4", "--quick"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "CHAOS_PS": server,
        "CHAOS_LOG_DIR": str(log),
    }  # fmt: skip
    clusters = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        said = [cluster.communicate(timeout=170)[0] for cluster in clusters]
    finally:
        for cluster in clusters:
            cluster.kill()
    assert [cluster.returncode for cluster in clusters] == [0, 0], said
    ends = {e["reason"] for e in told(log, "cluster_over")}
    assert len(ends) == 1
    assert "max_steps=40 reached" in ends.pop()
    assert len({e["incarnation"] for e in told(log, "cluster_welcomed")}) == 2


def told(log: Path, name: str) -> list[dict[str, Any]]:
    """Returns all logged events of this name."""
    return [event for path in log.rglob("*.jsonl") for event in whole_lines(path) if event["name"] == name]


@pytest.mark.slow
def test_readme_line_trains_on_two_nodes(tmp_path: Path) -> None:
    """The README's torchrun line is run twice on one machine: both end with success and take every step together,
    and only one prints.
    """
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--rdzv-backend=chaos", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=log_dir={tmp_path / 'log'}"]
    command += ["--nnodes=2:4", "--max-restarts=1"]
    command += [str(ROOT / "examples" / "gpt_text.py"), *TINY_GPT, "--max-steps", "4", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    nodes = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=170)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("max_steps=4` reached" in words for words in said) == 1, said
    committed: dict[int, list[dict[str, Any]]] = {}
    for event in told(tmp_path / "log", "committed"):
        if event["kind"] == "step":
            committed.setdefault(event["step"], []).append(event)
    assert sorted(committed) == [1, 2, 3, 4]
    for events in committed.values():
        assert len(events) == 2
        assert len({event["header"] for event in events}) == 1
        assert len(events[0]["contributors"]) == 2
