"""Measures torchft, the closest other system, under the same faults: one replica group per process, by default and
tuned.

Every member is a `Manager` with gloo, torchft's DistributedDataParallel and its Optimizer around the same model; the
lighthouse is torchft's own program with its defaults, or tuned: a heartbeat timeout of 1 s and a join window of 100 ms,
and 5 instead of 60 s until a collective is given up, since gloo does not always notice a death by itself.
The blows and the clock are those of benchmarks/survival.py and of benchmarks/join. A step counts as committed when
`should_commit` said so; a gradient that did not go into one is counted as thrown away. A freeze is not measured: gloo
notices none before its timeout. What torchft and gloo print about every survived failure is shown with BENCH_VERBOSE=1
only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import Result, median
from benchmarks.members import BATCH, fingerprint, model_and_adam, wait_at_the_door, warm_up, width_of
from benchmarks.survival import Case, blow, report
from benchmarks.workers import Worker, context, wait_listening
from benchmarks.world import World
from chaos_lightning.machine.listener import free_port

INSTALL = "pip install torchft-nightly==2026.10.26 (in release 0.2.0 survivors die with the killed replica)"
TUNED = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "100")
TUNED_TIMEOUT_S, DEFAULT_TIMEOUT_S = 5, 60
BOUND_AGAINST_TUNED = 1.0
PATIENCE_S, TUNED_PATIENCE_S = 75.0, 20.0
"""Well beyond the time after which torchft gives a collective up: as it comes, and tuned."""


def available() -> str:
    """Returns why torchft cannot run on this machine; empty if it can."""
    if importlib.util.find_spec("torchft") is None:
        return f"torchft is not installed; {INSTALL}"
    if _lighthouse() is None:
        return "torchft is installed without its torchft_lighthouse program"
    return ""


def _lighthouse() -> str | None:
    beside = Path(sys.executable).parent / "torchft_lighthouse"
    return str(beside) if beside.exists() else shutil.which("torchft_lighthouse")


class Lighthouse:
    """torchft's coordinator at a port of its own, which can be killed and restarted; a context manager that starts it.

    Args:
        options: Additional options of the coordinator's command line.
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        self._port, self._options = free_port(), options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts the coordinator; returns when it listens."""
        program = _lighthouse()
        assert program is not None
        place = f"127.0.0.1:{self._port}"
        command = [program, "--min_replicas", "2", "--bind", place, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_listening(place, self._process, "torchft's lighthouse", 10.0)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def __enter__(self) -> Lighthouse:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass(frozen=True, slots=True)
class Commit:
    """One step that torchft's `should_commit` accepted."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    step: int
    rank: int | None
    """Among the participants; None: this replica took no part, as when it healed."""
    contributors: int


class Replica:
    """One torchft replica group of one process, with the benchmarks' model and Adam.

    Args:
        pipe: Connection to the benchmark; its orders ("hash", step) are obeyed.
        address: Address of the lighthouse.
        name: Name of the replica group.
        plain: The model.
        inner: Optimizer of the model.
        timeout_s: Seconds after which torchft and gloo give a collective up.
    """

    def __init__(self, pipe: Connection, address: str, name: str, plain: Any, inner: Any, timeout_s: int) -> None:
        import torchft
        from torch.distributed import TCPStore

        self.pipe = pipe
        self._plain, self._inner = plain, inner
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)),
            timeout=timedelta(seconds=timeout_s),
            load_state_dict=lambda s: (plain.load_state_dict(s["model"]), inner.load_state_dict(s["optimizer"])),
            state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=2,
            replica_id=name,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=address,
            hostname="127.0.0.1",
        )
        self._store = store  # the manager knows only its port
        self._model = torchft.DistributedDataParallel(self._manager, plain)
        self._optimizer = torchft.Optimizer(self._manager, inner)
        self._wanted: set[int] = set()
        self._backwards = 0

    def commits(self) -> Iterator[Commit]:
        """Yields each step that `should_commit` accepted; trains without end."""
        import torch

        width = width_of(self._plain)
        draw = torch.Generator().manual_seed(os.getpid())
        manager = self._manager
        while True:
            while self.pipe.poll():
                order, *values = self.pipe.recv()
                if order == "hash":
                    self._wanted.add(values[0])
            self._optimizer.zero_grad()
            self._model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
            self._backwards += 1
            before = manager.current_step()
            self._optimizer.step()
            step, now = manager.current_step(), time.monotonic_ns()
            if step != before:
                yield Commit(now, step, manager.participating_rank(), manager.num_participants())

    def tell(self, commit: Commit) -> None:
        """Reports a committed step, and the hash of the replica's state if the benchmark asked for it."""
        step, rank = commit.step, -1 if commit.rank is None else commit.rank
        self.pipe.send(("step", commit.at_ns, step, step, "", commit.contributors, rank, self._backwards))
        if step in self._wanted:
            self.pipe.send(("hash", step, "", fingerprint(self._plain, self._inner)))


def member(pipe: Connection, address: str, name: str, state_mib: float, timeout_s: int, newcomer: bool = False) -> None:
    """Runs one replica group of one process until the pipe ends; quiet unless BENCH_VERBOSE=1.

    A newcomer's own weights are worth nothing. It has built its `Manager` too, which talks to the lighthouse already,
    when it waits for its word; its first quorum begins then. It contributes when a step counts it among three
    participants: torchft lets a newcomer heal during a step that it does not take part in.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not os.environ.get("BENCH_VERBOSE"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable(logging.CRITICAL)
    model, optimizer = model_and_adam(state_mib, seed=os.getpid() if newcomer else 0)
    replica = Replica(pipe, address, name, model, optimizer, timeout_s)
    if newcomer:
        warm_up(model, optimizer)
        wait_at_the_door(pipe)
    pipe.send(("in", time.monotonic_ns(), name))
    fresh = newcomer
    with contextlib.suppress(BrokenPipeError, EOFError):
        for commit in replica.commits():
            if fresh and commit.rank is not None and commit.contributors == 3:
                fresh = False
                pipe.send(("contributed", commit.at_ns, time.process_time()))
            pipe.send(("cpu", commit.step, time.process_time()))
            replica.tell(commit)


def spawning(lighthouse: Lighthouse, state_mib: float, timeout_s: int = TUNED_TIMEOUT_S) -> Callable[..., Worker]:
    """Returns a function that starts a member under this lighthouse, given its name and whether it is a newcomer that
    waits.
    """
    ctx = context("benchmarks.peers.torchft")
    return lambda name, newcomer=False: Worker(ctx, member, lighthouse.address, name, state_mib, timeout_s, newcomer)


@contextlib.contextmanager
def world(state_mib: float, options: tuple[str, ...], rng: random.Random, patience_s: float) -> Iterator[World]:
    """Yields three members under a lighthouse with these options."""
    timeout_s = TUNED_TIMEOUT_S if options else DEFAULT_TIMEOUT_S
    with (
        Lighthouse(options) as lighthouse,
        World(spawning(lighthouse, state_mib, timeout_s), rng, patience_s) as them,
    ):
        them.open()
        yield them


def missing(result: Result) -> bool:
    """Returns whether torchft cannot run on this machine, and notes why; otherwise notes its version."""
    if why := available():
        result.remark(f"no comparison with torchft: {why}")
        return True
    found = [f"{d} {v}" for d in ("torchft", "torchft-nightly") if (v := version(d))]
    result.details["torchft"] = " ".join(found)
    return False


def measure(result: Result, state_mib: float, ours_s: float, args: argparse.Namespace) -> None:
    """Adds torchft's figures, and the ratio of our times to those of the tuned torchft; notes it if torchft cannot run.

    Args:
        result: Takes the figures.
        state_mib: Parameters and Adam state.
        ours_s: Our median in the same run.
        args: The benchmark's (`quick`, `seed`).
    """
    if missing(result):
        return
    rng = random.Random(args.seed)
    ways: list[tuple[str, tuple[str, ...], int, float]] = [("tuned", TUNED, 3 if args.quick else 10, TUNED_PATIENCE_S)]
    if state_mib < 100:
        ways.append(("defaults", (), 1 if args.quick else 5, TUNED_PATIENCE_S if args.quick else PATIENCE_S))
    for name, options, runs, patience_s in ways:
        title = f"torchft {name}, SIGKILL, {state_mib:g} MiB"
        case, hung, shut_out = _runs(title, result, runs, partial(world, state_mib, options, rng, patience_s))
        if hung:
            # A run that never ended counts with the time that was waited: the median is then too low, in the peer's
            # favour.
            case.seconds += [patience_s] * hung
        result.add(f"{title}: runs that did not survive it, or not within {patience_s:g} s, of {runs}", hung, "count")
        result.add(f"{title}: newcomers without a step within {patience_s:g} s, of {runs}", shut_out, "count")
        report(result, title, case)
        if name == "tuned" and case.seconds:
            ratio = ours_s / median(case.seconds)
            result.add(f"ours / torchft tuned, SIGKILL, {state_mib:g} MiB", ratio, "ratio", BOUND_AGAINST_TUNED)


def _runs(
    title: str, result: Result, runs: int, make: Callable[[], contextlib.AbstractContextManager[World]]
) -> tuple[Case, int, int]:
    """Kills members in `runs` runs, in a new job after each failure; counts also the runs whose survivors or newcomer
    did not go on.
    """
    case, hung, shut_out, index = Case(), 0, 0, 0
    while index < runs:
        with make() as them:
            while index < runs:
                index += 1
                before = len(case.seconds)
                try:
                    blow(them, case, index % 3, "kill")
                except (TimeoutError, RuntimeError) as error:
                    if len(case.seconds) == before:
                        hung += 1
                    else:
                        shut_out += 1
                    result.remark(f"{title}, run {index}: {error}")
                    break
    return case, hung, shut_out


def version(distribution: str) -> str:
    """Returns the version of a distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
