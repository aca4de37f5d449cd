"""Measures other systems whose coordinator is killed: torchrun with its c10d store, and torchft with its lighthouse.

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
import time

from benchmarks.common import Result
from benchmarks.peers import torchft, torchrun
from benchmarks.world import World

STATE_MIB = 6.0
WATCHED_S, QUICK_WATCHED_S = 120.0, 60.0
AWAY_S = 20.0
BACK_WATCHED_S = 60.0
ENOUGH_STEPS = 30


def measure(result: Result, args: argparse.Namespace) -> None:
    """Adds the figures of both systems; notes it if one cannot run on this machine.

    Args:
        result: Takes the figures.
        args: The benchmark's (`quick`, `seed`).
    """
    for title, with_worker in (("its process", False), ("its host", True)):
        for _ in range(1 if args.quick else 3):
            torchrun_once(result, f"torchrun c10d, {title} killed", with_worker, args)
    if torchft.missing(result):
        return
    for _ in range(1 if args.quick else 3):
        torchft_once(result, "torchft, lighthouse killed", args)


# ------------------------------------------------------------------------------------------------ torchrun


def torchrun_once(result: Result, title: str, with_worker: bool, args: argparse.Namespace) -> None:
    """Runs one torchrun job, kills its first agent, and adds figures of how the job ended."""
    patience_s = QUICK_WATCHED_S if args.quick else WATCHED_S
    with torchrun.job(STATE_MIB) as them:
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


def torchft_once(result: Result, title: str, args: argparse.Namespace) -> None:
    """Kills torchft's lighthouse once, restarts it, and adds figures of the replicas without it and after it."""
    rng = random.Random(args.seed)
    with (
        torchft.Lighthouse(torchft.TUNED) as house,
        World(torchft.spawning(house, STATE_MIB), rng, BACK_WATCHED_S) as world,
    ):
        world.open()
        try:
            world.settle()
        except (TimeoutError, RuntimeError) as error:
            result.remark(f"{title}: never trained: {error}")
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
        result.remark(f"{title}: no step within {BACK_WATCHED_S:g} s of its return")
    result.details.setdefault(title, []).append({"exit codes": codes, "steps meanwhile": len(away)})
