"""The closest peer under the same blows: torchft, one replica group per process, as it comes and tuned.

Every member is a `Manager` with gloo, torchft's DistributedDataParallel and its Optimizer around the same model; the
lighthouse is torchft's own program with its defaults, or tuned: a heartbeat timeout of 1 s and a join window of 100 ms,
and 5 instead of 60 s until a collective is given up, since gloo does not always notice a death by itself.
The blows and the clock are those of benchmarks/survival.py. A step counts as committed when `should_commit` said so; a
gradient that did not go into one is counted as thrown away. A freeze is not measured: gloo notices none before its
timeout. What torchft and gloo print about every survived failure is shown with BENCH_VERBOSE=1 only.
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import Result, compute_alone, median, state_model
from benchmarks.survival import Case, World, blow, report
from benchmarks.victims import BATCH, fingerprint
from benchmarks.workers import Worker, context
from chaos_lightning.machine.listener import free_port

INSTALL = "pip install torchft-nightly==2026.10.26 (in release 0.2.0 survivors die with the killed replica)"
TUNED = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "100")
TUNED_TIMEOUT_S, DEFAULT_TIMEOUT_S = 5, 60
BOUND_AGAINST_TUNED = 1.0
PATIENCE_S, TUNED_PATIENCE_S = 75.0, 20.0
"""Well beyond the time after which torchft gives a collective up: as it comes, and tuned."""


def available() -> str:
    """Empty if torchft can run here, else why not."""
    if importlib.util.find_spec("torchft") is None:
        return f"torchft is not installed; {INSTALL}"
    if _lighthouse() is None:
        return "torchft is installed without its torchft_lighthouse program"
    return ""


def _lighthouse() -> str | None:
    beside = Path(sys.executable).parent / "torchft_lighthouse"
    return str(beside) if beside.exists() else shutil.which("torchft_lighthouse")


def command(port: int, options: tuple[str, ...]) -> list[str]:
    """What starts the lighthouse at this port."""
    program = _lighthouse()
    assert program is not None
    return [program, "--min_replicas", "2", "--bind", f"127.0.0.1:{port}", *options]


@contextlib.contextmanager
def lighthouse(options: tuple[str, ...]) -> Iterator[str]:
    """torchft's coordinator; yields its address."""
    port = free_port()
    started = command(port, options)
    process = subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    spoken: list[str] = []
    address = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            spoken.append(line)
            if "isten" in line:
                address.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        address.wait(10.0)
        if process.poll() is not None:
            raise RuntimeError(f"{started[0]} ended with {process.returncode}: {''.join(spoken)[-500:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that counted: `should_commit` said so."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    step: int
    rank: int | None
    """Among the participants; None: this replica took no part, as when it healed."""
    contributors: int


class Replica:
    """One replica group of one process: torchft around the benchmarks' model and Adam.

    Args:
        pipe: To the benchmark; obeys ("hash", step).
        address: Of the lighthouse.
        name: Of the replica group.
        plain: The model.
        inner: Its optimizer.
        timeout_s: After which torchft and gloo give a collective up, in s.
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
        """Trains without end; one for each step that counted, to be passed to `tell`."""
        import torch

        width = int(next(self._plain.parameters()).shape[1])
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
        """Reports it, and the hash of its state if that was asked for."""
        step, rank = commit.step, -1 if commit.rank is None else commit.rank
        self.pipe.send(("step", commit.at_ns, step, step, "", commit.contributors, rank, self._backwards))
        if step in self._wanted:
            self.pipe.send(("hash", step, "", fingerprint(self._plain, self._inner)))


def model_and_adam(state_mib: float, seed: int) -> tuple[Any, Any]:
    """What a replica trains; quiet unless BENCH_VERBOSE=1. Call it before anything else that needs torchft."""
    import torch

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not os.environ.get("BENCH_VERBOSE"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        logging.disable(logging.CRITICAL)
    compute_alone()
    torch.manual_seed(seed)
    plain = state_model(state_mib)
    return plain, torch.optim.Adam(plain.parameters(), lr=1e-4, fused=True)


def member(pipe: Connection, address: str, name: str, state_mib: float, timeout_s: int) -> None:
    """One replica group of one process, from its start to the end of the pipe."""
    replica = Replica(pipe, address, name, *model_and_adam(state_mib, seed=0), timeout_s)
    pipe.send(("in", time.monotonic_ns(), name))
    with contextlib.suppress(BrokenPipeError, EOFError):
        for commit in replica.commits():
            replica.tell(commit)


@contextlib.contextmanager
def world(state_mib: float, options: tuple[str, ...], rng: random.Random, patience_s: float) -> Iterator[World]:
    """Three members under a lighthouse with these options."""
    timeout_s = TUNED_TIMEOUT_S if options else DEFAULT_TIMEOUT_S
    ctx = context("benchmarks.victims", "torch._dynamo", "chaos_lightning.replication.access")
    with lighthouse(options) as address:
        them = World(lambda name: Worker(ctx, member, address, name, state_mib, timeout_s), rng, patience_s)
        try:
            for _ in range(3):
                them.start()
            yield them
        finally:
            them.close()


def measure(result: Result, state_mib: float, ours_s: float, args: argparse.Namespace) -> None:
    """Adds torchft's figures and the ratio of ours to the tuned one's; says so if torchft cannot run here.

    Args:
        result: Takes the figures.
        state_mib: Parameters and Adam state.
        ours_s: Our median in the same run.
        args: The benchmark's (`quick`, `seed`).
    """
    missing = available()
    if missing:
        result.notes.append(f"no comparison with torchft: {missing}")
        print(f"  torchft: {missing}")
        return
    result.details["torchft"] = " ".join(f"{d} {version(d)}" for d in ("torchft", "torchft-nightly") if version(d))
    rng = random.Random(args.seed)
    ways: list[tuple[str, tuple[str, ...], int, float]] = [("tuned", TUNED, 3 if args.quick else 10, TUNED_PATIENCE_S)]
    if state_mib < 100:
        ways.append(("defaults", (), 1 if args.quick else 5, TUNED_PATIENCE_S if args.quick else PATIENCE_S))
    for name, options, runs, patience_s in ways:
        title = f"torchft {name}, SIGKILL, {state_mib:g} MiB"
        case, hung, shut_out = _runs(title, result, runs, partial(world, state_mib, options, rng, patience_s))
        if hung:
            # What never ended counts with the time that was waited: the median is then too low, in the peer's favour.
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
    """So many blows, in a new world after each failure; how often survivors did not go on, or only the newcomer."""
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
                    result.notes.append(f"{title}, run {index}: {error}")
                    print(f"    {title}, run {index}: {str(error)[:160]}", flush=True)
                    break
    return case, hung, shut_out


def version(distribution: str) -> str:
    """Of an installed distribution; "" if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
