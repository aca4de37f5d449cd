"""Tests the example of a GPT in stages, started as its page shows: by hand, under torchrun, and under
`chaos-lightning run`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_support import whole_lines
from until_support import until

from chaos_lightning.machine.listener import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "gpt_pipeline.py")
RUN = [sys.executable, "-m", "chaos_lightning", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=chaos"]
LIMIT_S = 170


class Started:
    """Processes started in one folder and for one job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.endpoint = folder, f"127.0.0.1:{free_port()}"
        self.log = folder / "log"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder), "CUDA_VISIBLE_DEVICES": "",
            "CHAOS_ENDPOINT": self.endpoint, "CHAOS_LOG_DIR": str(self.log), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.processes.append(
            subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return self.processes[-1]

    def ends(self, code: int = 0) -> list[str]:
        """Waits until all processes have ended with this exit code; returns their outputs."""
        said = [process.communicate(timeout=LIMIT_S)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [code] * len(said), "\n\n".join(said)
        return said

    def told(self, name: str) -> list[dict[str, Any]]:
        return [e for path in self.log.rglob("*.jsonl") for e in whole_lines(path) if e["name"] == name]

    def stepped(self, step: int) -> None:
        """Waits until the job has committed this many steps."""
        until(lambda: any(e["step"] >= step for e in self.told("committed")), f"step {step}", LIMIT_S)

    def pid(self, rank: int) -> int:
        """Returns the process id of the member that had this rank in the first view."""
        view = next(e for e in self.told("view") if len(e["members"]) > rank)
        member = view["members"][rank]
        logs = map(whole_lines, self.log.rglob("member-*.jsonl"))
        mine = next(lines for lines in map(list, logs) if any(e.get("member") == member for e in lines))
        return int(next(e["pid"] for e in mine if e["name"] == "opened"))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.mark.filterwarnings("ignore")
def test_it_is_a_plain_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    importlib.import_module("gpt_pipeline").main(["--plain", "--max-steps", "2"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_three_processes_train_it_and_one_is_killed(started: Started) -> None:
    for _ in range(3):
        started.start(sys.executable, SCRIPT, "--min-nodes", "2", "--max-steps", "120")
    until(lambda: len(started.told("joined")) == 3, "three members", LIMIT_S)
    started.stepped(5)
    victim = started.pid(2)
    os.kill(victim, signal.SIGKILL)
    dead = next(p for p in started.processes if p.pid == victim)
    dead.wait(LIMIT_S)
    started.processes.remove(dead)
    said = "".join(started.ends())
    assert dead.communicate()[0] is not None
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    chosen = [len(e["layers"]) for e in started.told("pipelines") if e["view"]]
    assert 3 in chosen
    assert chosen[-1] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(RUN, id="run"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)]
)
def test_a_launcher_starts_it(started: Started, command: list[str]) -> None:
    launcher = [*command, "--nproc-per-node=2", f"--rdzv-endpoint={started.endpoint}", "--nnodes=1:2"]
    started.start(*launcher, f"--rdzv-conf=log_dir={started.log}", SCRIPT, "--max-steps", "4")
    started.ends()
    assert max(e["step"] for e in started.told("committed")) == 4
    assert {len(e["contributors"]) for e in started.told("committed") if e["kind"] == "step"} == {2}


@pytest.mark.slow
def test_run_starts_a_dead_stage_again(started: Started) -> None:
    launcher = [*RUN, "--nproc-per-node=3", f"--rdzv-endpoint={started.endpoint}"]
    started.start(*launcher, f"--rdzv-conf=log_dir={started.log}", SCRIPT, "--max-steps", "150")
    started.stepped(5)
    os.kill(started.pid(2), signal.SIGKILL)
    (said,) = started.ends()
    assert "worker" in said
    assert max(e["step"] for e in started.told("committed")) == 150
    assert len(started.told("joined")) == 4


@pytest.mark.slow
def test_a_loss_under_the_policy_restart_ends_all_and_run_starts_them_from_the_checkpoint(started: Started) -> None:
    launcher = [*RUN, "--nproc-per-node=3", f"--rdzv-endpoint={started.endpoint}"]
    options = ["--policy", "restart", "--checkpoints", "files", "--max-steps", "40"]
    started.start(*launcher, f"--rdzv-conf=log_dir={started.log}", SCRIPT, *options)
    started.stepped(13)
    os.kill(started.pid(2), signal.SIGKILL)
    (said,) = started.ends()
    assert said.count("ended (exit code 79); it is started again") == 2
    assert "the newest checkpoint is " in said
    assert re.search(r"Restoring states from the checkpoint path at .*files/last", said)
    assert said.count("step 10: loss") == 1
    assert "step 40: loss" in said
