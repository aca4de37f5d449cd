"""Tests the command `chaos-lightning profile` with users' scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_lightning.planning.pipelines.files import read_job

MODEL = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--optimizers", type=int, default=1)
given = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
LOOP = (
    MODEL
    + """
if __name__ == "__main__":
    model = Net()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(given.optimizers)]
    for _ in range(given.steps):
        x, y = torch.randn(8, 32), torch.randint(0, 2, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    print("trained to the end")
"""
)
LIGHTNING = (
    MODEL
    + """
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(0, 2, (64,))), 8)
    trainer = L.Trainer(
        max_epochs=100, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Module(), data, data)
    print("trained to the end")
"""
)
STRATEGY = (
    MODEL
    + """
import lightning as L
from torch.utils.data import DataLoader, TensorDataset
from chaos_lightning.strategies import ChaosPipelineStrategy, ChaosStrategy, DiLoCoStrategy

strategies = {
    "chaos_pipeline": lambda: ChaosPipelineStrategy(
        micro_batches=4, min_nodes=2, device_memory="1 MiB", chain="net.blocks", endpoint="127.0.0.1:1", job="real"
    ),
    "chaos": lambda: ChaosStrategy(min_nodes=2, endpoint="127.0.0.1:1", job="real"),
    "chaos_diloco": lambda: DiLoCoStrategy(server="127.0.0.1:1"),
}


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(4))

    def configure_model(self):
        self.net = Net()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters())


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(0, 2, (64,))), 8)
    L.Trainer(
        strategy=strategies[given.strategy](), max_epochs=100, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    ).fit(Module(), data)
    print("trained to the end")
"""
).replace("given = ", 'parser.add_argument("--strategy")\ngiven = ')
PLAIN = (
    MODEL
    + """
from torch.utils.data import DataLoader, TensorDataset
from chaos_lightning.trainer import Trainer

if __name__ == "__main__":
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.randn(64, 32), torch.randint(0, 2, (64,))), 8)
    with Trainer(min_nodes=2, endpoint="127.0.0.1:1", job="real") as trainer:
        for x, y in trainer.prepare(model, optimizer, data, epochs=100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            trainer.update()
            trainer.check_state_replication()
"""
)
PARAMETERS = (32 * 32 + 32) * 4


def chaos(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaos_lightning", *words]
    env = os.environ | {"CHAOS_ENDPOINT": "127.0.0.1:1"} | environment  # nobody is there, and that is no error
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, env=env)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "lightning_train.py").write_text(LIGHTNING)
    (tmp_path / "strategy_train.py").write_text(STRATEGY)
    (tmp_path / "plain_train.py").write_text(PLAIN)
    return tmp_path


@pytest.mark.slow
def test_a_plain_loop_is_profiled_and_planned_for(folder: Path) -> None:
    done = chaos(folder, "profile", "--steps", "4", "--", "python", "train.py", "--steps", "500")
    assert done.returncode == 0, done.stderr
    assert "trained to the end" not in done.stdout
    assert "4 blocks of Block in blocks; 8 steps to come" in done.stderr
    assert "estimated from the layers" in done.stdout
    job = read_job(folder / "profile.yaml")
    assert [layer.name for layer in job.layers] == [f"blocks.{i}" for i in range(4)]
    assert [layer.parameter_nbytes for layer in job.layers] == [*[PARAMETERS] * 3, PARAMETERS + (32 * 2 + 2) * 4]
    assert (job.micro_batches, job.samples) == (1, 8)
    planned = chaos(folder, "plan", "profile.yaml", "--devices", "2", "--micro-batches", "4")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("profile: 4 layers, 2 devices")
    simulated = chaos(folder, "simulate", "profile.yaml", "--devices", "3", "--hours", "0.1")
    assert simulated.returncode == 0, simulated.stderr
    again = chaos(folder, "profile", "--", "python", "train.py")
    assert again.returncode == 2
    assert "profile.yaml is there already; give --force to write over it" in again.stderr


def test_a_lightning_script_is_profiled_without_a_changed_line(folder: Path) -> None:
    done = chaos(folder, "profile", "--steps", "4", "--out", "model.json", "--", "python", "lightning_train.py")
    assert done.returncode == 0, done.stderr
    assert "trained to the end" not in done.stdout
    job = read_job(folder / "model.json")
    assert [layer.name for layer in job.layers] == [f"net.blocks.{i}" for i in range(4)]
    assert [layer.optimizer_nbytes for layer in job.layers][:3] == [2 * PARAMETERS + 2 * 4] * 3
    assert (job.micro_batches, job.samples) == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "who", "micro_batches"),
    [
        (("strategy_train.py", "--strategy", "chaos_pipeline"), "strategy chaos_pipeline", 4),
        pytest.param(("strategy_train.py", "--strategy", "chaos"), "strategy chaos", 1, marks=pytest.mark.slow),
        pytest.param(
            ("strategy_train.py", "--strategy", "chaos_diloco"), "strategy chaos_diloco", 1, marks=pytest.mark.slow
        ),
        (("plain_train.py",), "chaos_lightning.trainer.Trainer", 1),
    ],
)
def test_a_script_that_waits_for_others_trains_alone(
    folder: Path, script: tuple[str, ...], who: str, micro_batches: int
) -> None:
    """Under `profile`, a script that would wait for other members trains alone, starts no scheduler, and leaves no
    files of the job.
    """
    state = folder / "state"
    chain = ("--chain", "net.blocks") if micro_batches == 1 and len(script) > 1 else ()
    words = ("profile", "--steps", "4", *chain, "--", "python", *script)
    done = chaos(folder, *words, XDG_STATE_HOME=str(state), CHAOS_MIN_NODES="3", CHAOS_JOB="real")
    assert done.returncode == 0, done.stderr
    assert f"chaos-lightning profile: {who} trains alone here, whatever min_nodes is" in done.stderr
    assert "trained to the end" not in done.stdout
    job = read_job(folder / "profile.yaml")
    assert (len(job.layers), job.micro_batches, job.samples) == (4, micro_batches, 8)
    assert job.layers[0].name == ("net." if len(script) > 1 else "") + "blocks.0"
    assert not list(state.rglob("*real*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--steps", "40"), 1, "python train.py ended with code 0 after 35 of 40 measured steps; let it train longer"),
        (("--chain", "tail"), 2, "'tail' is no list of blocks of Net; name one, by --chain PATH or chain=: blocks"),
    ],
)
def test_what_ends_a_measurement_is_told(folder: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = chaos(folder, "profile", *words, "--", "train.py", "--steps", "40")
    assert done.returncode == code
    assert said.replace("python ", f"{sys.executable} " if code == 1 else "python ") in done.stderr
    assert not (folder / "profile.yaml").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--steps", "3", "--", "true"), 2, "--steps is 3; expected at least 4"),
        (("--out", "no/x.yaml", "--", "true"), 2, "there is no folder"),
        (("--endpoint", "127.0.0.1:1", "--", "true"), 1, "no scheduler answered at 127.0.0.1:1"),
        (("--", "no-such-program"), 2, "no-such-program cannot be run"),
        (("--", "true"), 1, "true ended with code 0, and no optimizer of torch stepped in it, so nothing was measured"),
        (("--", "false"), 1, "false ended with code 1 before an optimizer stepped; its own words are above"),
    ],
)
def test_what_cannot_be_measured_is_told(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = chaos(tmp_path, "profile", *words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_another_sitecustomize_is_still_imported(folder: Path) -> None:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('site of theirs')\n")
    path = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    done = chaos(folder, "profile", "--", "python", "-c", "pass", PYTHONPATH=path)
    assert "site of theirs" in done.stdout
    assert done.returncode == 1
