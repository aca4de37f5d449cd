"""Counts the commands and the minutes of waiting from an empty folder to three members that train.

Each way begins in an empty folder, with Python and a copy of the source. For chaos-lightning the commands are those of
docs/install.md and docs/tutorial.md, word for word, with a port of its own; it ends when a committed step has three
contributors. For torchft they are those of its README (a lighthouse with its options, then torchrun for each replica
group). The README's training script lies in torchft's repository and not in its package, and downloads CIFAR-10, which
needs torchvision; here a script with the same calls on random data stands in its place, so two of its commands (to
clone, and to install torchvision) are counted and not run. It ends when a replica counts three participants.

Minutes are those of a machine; reading and typing come on top. Installing depends on the network and on pip's cache, so
it is told apart. With --quick nothing is installed: the environment that runs this is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Options, Result, run
from benchmarks.peers.torchft import INSTALL
from benchmarks.workers import scratch
from chaos_lightning.events.reader import Tail, read_events
from chaos_lightning.machine.listener import free_port

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 180.0
INSTALL_S = 900.0
"""Most seconds for one command that installs."""
LIGHTHOUSE = "torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000"
"""Command by which torchft's README starts its coordinator."""
SCRIPT = """
import os
import time
from datetime import timedelta

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
inner = torch.optim.Adam(model.parameters())
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda s: (model.load_state_dict(s["model"]), inner.load_state_dict(s["optim"])),
    state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
    replica_id=f"train_ddp_{os.environ['REPLICA_GROUP_ID']}",
    timeout=timedelta(seconds=30),
)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
while True:
    optimizer.zero_grad()
    ddp(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    print("participants", manager.num_participants(), flush=True)
    time.sleep(0.01)
"""


@dataclass
class Way:
    """One product's installation and start of three members, in a folder of its own."""

    result: Result
    name: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    counted: int = 0
    installing_s: float = 0.0
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def does(self, command: str, *, installs: bool = True) -> None:
        """Runs a command, and waits for its end."""
        self.counted += 1
        if not installs:
            return
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self._env(), capture_output=True, text=True, timeout=INSTALL_S
        )
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
        self.installing_s += time.monotonic() - began

    def starts(self, command: str, **more: str) -> None:
        """Starts a command in a terminal of its own, and does not wait for it."""
        self.counted += 1
        with (self.folder / f"terminal-{self.counted}.txt").open("wb") as output:
            self.running.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {command}"],
                    cwd=self.folder,
                    env=self._env() | more,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def waits(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not there():
            for process in self.running:
                if process.poll() is not None:
                    raise RuntimeError(f"{self.name}: a terminal ended before {what}; see {self.folder}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: no {what} within {PATIENCE_S:g} s")
            time.sleep(0.05)

    def ends(self) -> None:
        for process in self.running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def tells(self, began: float) -> None:
        """Adds the product's figures: commands, minutes of installing, and seconds from the first start to three
        members.
        """
        total_s = time.monotonic() - began
        self.result.add(f"{self.name}: commands", self.counted, "count")
        if self.installing_s:
            self.result.add(f"{self.name}: installing", self.installing_s / 60, "min")
        self.result.add(f"{self.name}: from the first start to three members", total_s - self.installing_s, "s")
        self.result.headline.append(f"{self.name} {self.counted} commands, {total_s / 60:.2g} min")


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a documentation page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def chaos(result: Result, folder: Path, *, quick: bool) -> None:
    """Installs chaos-lightning and starts three members with the commands of docs/install.md and docs/tutorial.md."""
    way = Way(result, "chaos-lightning", folder)
    endpoint = f"127.0.0.1:{free_port()}"
    way.env = {"CHAOS_ENDPOINT": endpoint, "XDG_STATE_HOME": str(folder / "state"), "CHAOS_LOG_DIR": "auto"}
    began = time.monotonic()
    wheel, install, *_ = blocks("docs/install.md", "bash")
    way.does(f"cd {ROOT} && {wheel.replace('--wheel-dir dist', f'--wheel-dir {folder}')}", installs=not quick)
    *lines, _ = install.strip().splitlines()
    for line in lines:
        way.does(line, installs=not quick)
    way.env["PATH"] = f"{Path(sys.executable).parent if quick else folder / 'venv' / 'bin'}:{os.environ['PATH']}"
    (folder / "train.py").write_text(blocks("docs/tutorial.md", "python")[0])
    start = blocks("docs/tutorial.md", "bash")[0].strip()
    tail = Tail(folder / "state")
    most = 0

    def members(count: int) -> bool:
        nonlocal most
        steps = [r for r in tail.poll() if r.name == "committed" and r.get("kind") == "step"]
        most = max([most, *(len(r["contributors"]) for r in steps)])
        return most >= count

    try:
        for count in (1, 2, 3):
            way.starts(start)
            way.waits(lambda count=count: members(count), f"{count} members")  # type: ignore[misc]
        way.tells(began)
    finally:
        way.ends()
        for record in read_events(folder / "state"):
            if record.name == "opened" and record.get("role") == "scheduler":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(record["pid"]), signal.SIGTERM)


def torchft(result: Result, folder: Path, *, quick: bool) -> None:
    """Installs torchft and starts three replicas with the commands of its README."""
    way = Way(result, "torchft", folder)
    way.counted = 2  # git clone, for its script; pip install torchvision, which that needs
    began = time.monotonic()
    if quick and shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) is None:
        result.leave_out("torchft", INSTALL)
        return
    package = INSTALL.partition(" (")[0].removeprefix("pip install ")
    for line in (
        "python3 -m venv venv",
        'venv/bin/pip install "torch==2.13.*"',
        f"venv/bin/pip install {package} numpy",
    ):
        way.does(line, installs=not quick)
    way.env["PATH"] = f"{Path(sys.executable).parent if quick else folder / 'venv' / 'bin'}:{os.environ['PATH']}"
    port = free_port()
    way.env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    (folder / "train_ft.py").write_text(SCRIPT)
    way.starts(f"{LIGHTHOUSE} --bind 127.0.0.1:{port}")

    def members(count: int) -> bool:
        return any(f"participants {count}" in path.read_text(errors="replace") for path in folder.glob("terminal-*"))

    try:
        for count in (1, 2, 3):
            rank = {"REPLICA_GROUP_ID": str(count - 1), "NUM_REPLICA_GROUPS": "3"}
            way.starts(f"torchrun --master_port={free_port()} --nnodes=1 --nproc_per_node=1 train_ft.py", **rank)
            way.waits(lambda count=count: members(count), f"{count} participants")  # type: ignore[misc]
        way.tells(began)
    finally:
        way.ends()


def main() -> int:
    args = Options(__doc__, raw=True).parse_args()
    result = Result("first_evening")
    with scratch() as folder:
        for name, way in (("chaos", chaos), ("torchft", torchft)):
            (folder / name).mkdir()
            way(result, folder / name, quick=args.quick)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
