"""Measures plain torchrun under the same fault: three agents with one DDP worker each, a checkpoint every 20 steps,
restarts.

One agent and its worker get SIGKILL (not the agent that holds the rendezvous store: that would end the job). The
others' workers fail in their all-reduce, torchrun restarts them, waits for its rendezvous to close and reloads the last
checkpoint. The figure is the time from the blow until both survivors have done a step again, on CLOCK_MONOTONIC; steps
between the checkpoint and the blow are done a second time and are counted. Each run is a job of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Result, median
from benchmarks.members import BATCH, model_and_adam, width_of
from benchmarks.workers import scratch, wait_listening
from chaos_lightning.machine.listener import free_port

SAVE_EVERY = 20
PATIENCE_S = 180.0


def worker(folder: Path, state_mib: float) -> None:
    """Runs one DDP worker under torchrun; appends "ns step world" to its file after every step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    plain, optimizer = model_and_adam(state_mib)
    model = DistributedDataParallel(plain)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    width = width_of(plain)
    draw = torch.Generator().manual_seed(os.getpid())
    out = os.open(folder / f"{os.environ['BENCH_AGENT']}.{os.getpid()}.steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
        optimizer.step()
        step += 1
        os.write(out, f"{time.monotonic_ns()} {step} {dist.get_world_size()}\n".encode())
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            part = saved.with_suffix(".part")
            torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            part.rename(saved)


@dataclass(frozen=True)
class Line:
    """One step of one worker, as written to its file."""

    ns: int
    step: int
    world: int
    pid: int


class Job:
    """torchrun's agents, each in a session of its own, and the folder with their workers' files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str, module: str, words: Sequence[str], **env: str) -> None:
        """Starts an agent with these options; its workers run a module with the folder and `words` as arguments."""
        command = [
            sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts", "10",
            "-m", module, str(self.folder), *words,
        ]  # fmt: skip
        about = {"BENCH_AGENT": name, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.agents[name] = subprocess.Popen(
                command, env={**os.environ, **about}, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self, agent: str) -> list[Line]:
        """Returns all steps of this agent's workers, in time order."""
        found = []
        for path in self.folder.glob(f"{agent}.*.steps"):
            pid = int(path.name.split(".")[1])
            for text in path.read_text().splitlines():
                numbers = [int(x) for x in text.split()]
                if len(numbers) == 3:
                    found.append(Line(*numbers, pid))
        return sorted(found, key=lambda x: x.ns)

    def wait(self, agents: list[str], world: int, after_ns: int, steps: int) -> list[Line]:
        """Waits until each agent has done `steps` steps in a world of this size after an instant (ns); returns the last
        of them.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            done = []
            for agent in agents:
                later = [x for x in self.lines(agent) if x.ns > after_ns and x.world == world]
                done += later[steps - 1 : steps]
            if len(done) == len(agents):
                return done
            if time.monotonic() > end:
                said = "".join(path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.log"))
                raise TimeoutError(f"torchrun: no step of {world} workers within {PATIENCE_S:g} s; it said: {said}")
            time.sleep(0.05)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.terminate()  # its workers are in sessions of their own, and it ends them
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(10)
        for path in self.folder.glob("*.steps"):
            _kill_worker(int(path.name.split(".")[1]))


def _kill_worker(pid: int) -> None:
    """Kills a worker by SIGKILL, if its process id still belongs to a worker of this benchmark."""
    with contextlib.suppress(OSError):
        if b"benchmarks.peers.torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running() -> Iterator[Job]:
    """Yields a job in a scratch folder, without any agent yet."""
    with scratch() as folder:
        them = Job(folder)
        try:
            yield them
        finally:
            them.close()


@contextlib.contextmanager
def job(state_mib: float) -> Iterator[Job]:
    """Yields three agents with one worker each."""
    port = free_port()
    options = ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    with running() as them:
        for name in ("a0", "a1", "a2"):
            there = f"127.0.0.1:{port}"
            them.start(name, *options, there, module="benchmarks.peers.torchrun", words=[str(state_mib)])
            if name == "a0":
                wait_listening(there, them.agents[name], "torchrun's rendezvous store", 60.0)
        yield them


def one_run(state_mib: float, rng: random.Random) -> tuple[float, int]:
    """Runs one job and kills one agent; returns (seconds to the survivors' next step, steps done again)."""
    with job(state_mib) as them:
        agents = list(them.agents)
        them.wait(agents, 3, 0, SAVE_EVERY + rng.randrange(1, SAVE_EVERY))
        victim, *survivors = agents[::-1]
        pid = them.lines(victim)[-1].pid
        struck = time.monotonic_ns()
        os.kill(them.agents[victim].pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        first = them.wait(survivors, 2, struck, 1)
        before = max(x.step for a in survivors for x in them.lines(a) if x.world == 3)
        return (max(x.ns for x in first) - struck) / 1e9, before - (first[0].step - 1)


def measure(result: Result, state_mib: float, ours_s: float, args: argparse.Namespace) -> None:
    """Adds plain torchrun's figures and the ratio of our times to them; left out with --quick (a run takes a
    minute).
    """
    if args.quick:
        result.remark("no comparison with stock torchrun under --quick: each of its recoveries takes half a minute")
        return
    title = f"stock torchrun, SIGKILL, {state_mib:g} MiB"
    seconds, redone = [], []
    rng = random.Random(args.seed)
    for _ in range(3):
        try:
            taken, again = one_run(state_mib, rng)
        except TimeoutError as error:
            result.remark(f"{title}: {error}")
            continue
        seconds.append(taken)
        redone.append(again)
    result.details[title] = {"seconds": seconds, "redone": redone}
    if seconds:
        result.add(f"{title}: to the survivors' next step, median of {len(seconds)}", median(seconds), "s")
        result.add(f"{title}: steps done again, median", median(redone), "steps")
        result.add(f"ours / stock torchrun, SIGKILL, {state_mib:g} MiB", ours_s / median(seconds), "ratio", 1.0)


if "TORCHELASTIC_RUN_ID" in os.environ and __name__ == "__main__":  # torchrun starts this module as its worker
    worker(Path(sys.argv[1]), float(sys.argv[2]))
