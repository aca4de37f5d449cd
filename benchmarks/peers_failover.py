"""Peers whose coordinator dies: torchrun with its c10d store, and torchft with its lighthouse.

torchrun keeps its rendezvous store in the first agent. Three agents train by DDP; the first agent gets SIGKILL, alone
(the store's process is gone) or with its worker (its host is gone). Measured: how long any worker goes on making steps,
and when and how the other agents end; they are watched for WATCHED_S.

torchft's lighthouse is asked for a quorum at every step. It gets SIGKILL while three replica groups train, is away for
AWAY_S, and comes back at its address. Measured: until when steps go on, how many there are meanwhile, and how long
after its return the first step is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import peers_torchft, peers_torchrun
from benchmarks.common import Result
from benchmarks.survival import World
from benchmarks.workers import Worker, context
from chaos_lightning.machine.listener import free_port

STATE_MIB = 6.0
WATCHED_S, QUICK_WATCHED_S = 120.0, 60.0
AWAY_S = 20.0
BACK_WATCHED_S = 60.0
ENOUGH_STEPS = 30


def measure(result: Result, args: argparse.Namespace) -> None:
    """Adds both peers' figures; says so where one cannot run here.

    Args:
        result: Takes the figures.
        args: The benchmark's (`quick`, `seed`).
    """
    for title, with_worker in (("its process", False), ("its host", True)):
        for _ in range(1 if args.quick else 3):
            torchrun_once(result, f"torchrun c10d, {title} killed", with_worker, args)
    missing = peers_torchft.available()
    if missing:
        result.notes.append(f"no comparison with torchft: {missing}")
        print(f"  torchft: {missing}")
        return
    for _ in range(1 if args.quick else 3):
        torchft_once(result, "torchft, lighthouse killed", args)


# ------------------------------------------------------------------------------------------------ torchrun


def torchrun_once(result: Result, title: str, with_worker: bool, args: argparse.Namespace) -> None:
    """One job, and its end."""
    patience_s = QUICK_WATCHED_S if args.quick else WATCHED_S
    with peers_torchrun.job(STATE_MIB) as them:
        agents = list(them.agents)
        them.wait(agents, 3, 0, ENOUGH_STEPS)
        first, *others = agents
        pid = them.lines(first)[-1].pid
        struck = time.monotonic_ns()
        os.kill(them.agents[first].pid, signal.SIGKILL)
        if with_worker:
            os.kill(pid, signal.SIGKILL)
        ended: dict[str, float] = {}
        end = time.monotonic() + patience_s
        while time.monotonic() < end and len(ended) < len(others):
            for name in others:
                if name not in ended and them.agents[name].poll() is not None:
                    ended[name] = (time.monotonic_ns() - struck) / 1e9
            time.sleep(0.02)
        after = [(line.ns - struck) / 1e9 for name in others for line in them.lines(name) if line.ns > struck]
        codes = {name: them.agents[name].poll() for name in others}
    result.add(f"{title}: other agents that ended within {patience_s:g} s, of {len(others)}", len(ended), "count")
    result.add(f"{title}: to the last step of the others within that time", max(after, default=0.0), "s")
    if ended:
        result.add(f"{title}: until the last of them had ended", max(ended.values()), "s")
    result.details.setdefault(title, []).append({"exit codes": codes, "ended_s": ended, "steps after": len(after)})


# ------------------------------------------------------------------------------------------------ torchft


@dataclass
class Lighthouse:
    """torchft's coordinator at a port of its own, to be killed and started again."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it listens."""
        self.process = subprocess.Popen(
            peers_torchft.command(self.port, peers_torchft.TUNED), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the lighthouse did not start (exit status {self.process.poll()})")
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def replicas(rng: random.Random) -> Iterator[tuple[World, Lighthouse]]:
    """Three replica groups under a lighthouse."""
    ctx = context("benchmarks.victims", "torch._dynamo", "chaos_lightning.replication.access")
    house = Lighthouse(free_port())
    args = (STATE_MIB, peers_torchft.TUNED_TIMEOUT_S)
    world = World(lambda name: Worker(ctx, peers_torchft.member, house.address, name, *args), rng, BACK_WATCHED_S)
    try:
        house.start()
        for _ in range(3):
            world.start()
        yield world, house
    finally:
        world.close()
        house.kill()


def torchft_once(result: Result, title: str, args: argparse.Namespace) -> None:
    """One death of the lighthouse, and its return."""
    with replicas(random.Random(args.seed)) as (world, house):
        try:
            world.settle()
        except (TimeoutError, RuntimeError) as error:
            result.notes.append(f"{title}: never trained: {error}")
            print(f"  {title}: never trained")
            return
        usual = world.usual()
        world.doomed = set(world.members)
        struck = time.monotonic_ns()
        house.kill()
        world.pump(lambda: time.monotonic_ns() - struck > AWAY_S * 1e9, "the lighthouse's absence")
        away = [(s.ns - struck) / 1e9 for m in world.members.values() for s in m.steps if s.ns > struck]
        back = time.monotonic_ns()
        house.start()
        with contextlib.suppress(TimeoutError):
            world.pump(lambda: any(s.ns > back for m in world.members.values() for s in m.steps), "a step")
        again = [(s.ns - back) / 1e9 for m in world.members.values() for s in m.steps if s.ns > back]
        codes = [m.worker.process.exitcode for m in world.members.values()]
    result.add(f"{title}: to the last step in {AWAY_S:g} s without it", max(away, default=0.0), "s")
    result.add(f"{title}: steps of all replicas meanwhile", len(away), "count")
    result.add(f"{title}: of as many as there usually are", len(away) / (3 * AWAY_S / usual), "share")
    result.add(f"{title}: replicas that ended", sum(c is not None for c in codes), "count")
    if again:
        result.add(f"{title}: from its return to the first step", min(again), "s")
    else:
        result.notes.append(f"{title}: no step within {BACK_WATCHED_S:g} s of its return")
        print(f"  {result.notes[-1]}")
    result.details.setdefault(title, []).append({"exit codes": codes, "steps meanwhile": len(away)})
