"""Starts the processes of a benchmark: a forkserver with torch preloaded, pipes to the parent, and a scheduler."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos_lightning.machine.listener import free_port

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "chaos_lightning.member.engine", "benchmarks.members")


def wait_listening(endpoint: str, process: subprocess.Popen[Any], what: str, timeout_s: float = 30.0) -> None:
    """Waits until a process accepts connections.

    Raises:
        RuntimeError: The process has ended, or accepts none in time.
    """
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"{what} did not start at {endpoint} (exit status {process.poll()})")
        time.sleep(0.02)


def at(source: str) -> dict[str, Any]:
    """Returns arguments of Popen with which a Python program uses the product in this folder; "" means this one."""
    return {"cwd": source, "env": {**os.environ, "PYTHONPATH": source}} if source else {}


class Scheduler:
    """A scheduler process on a port of its own.

    Args:
        store: Store of the scheduler's chain; one in a file outlives the process.
        log_dir: Folder of the event log; "" for none.
        plan: Plan by which gradients travel; "" for the default one.
        keys_dir: Folder of keys; "" for none.
        source: Folder of the product that it runs; "" for this one.
        settings: Further rules of the job.
    """

    def __init__(
        self,
        store: str = ":memory:",
        *,
        log_dir: str = "",
        plan: str = "",
        keys_dir: str = "",
        source: str = "",
        **settings: Any,
    ) -> None:
        self._source = source
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._options = ["--listen", self.endpoint, "--store", store]
        self._options += ["--log-dir", log_dir or "none"]
        self._options += ["--plan", plan] if plan else []
        self._options += ["--keys-dir", keys_dir] if keys_dir else []
        self._options += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, min_nodes: int) -> None:
        """Starts the scheduler of a job that needs a number of nodes to begin and to go on; returns when it listens."""
        command = [sys.executable, "-m", "chaos_lightning.cli", "scheduler", *self._options]
        self._process = subprocess.Popen(
            [*command, "--min-nodes", str(min_nodes)], stdout=subprocess.DEVNULL, **at(self._source)
        )
        wait_listening(self.endpoint, self._process, "the scheduler")

    @property
    def pid(self) -> int:
        """Process id, only while the process runs."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends the process at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self.kill()


@contextlib.contextmanager
def scheduler(min_nodes: int, **options: Any) -> Iterator[str]:
    """Runs a scheduler while the block runs; yields its endpoint."""
    made = Scheduler(**options)
    try:
        made.start(min_nodes)
        yield made.endpoint
    finally:
        made.stop()


class Worker:
    """Process that runs `function(pipe, *args)`, with a pipe to the parent; an error in it is sent over the pipe."""

    def __init__(self, context: Any, function: Callable[..., None], *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = 120.0) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"worker {self.process.pid} said nothing for {timeout_s} s")
        message = self.pipe.recv()
        if isinstance(message, Exception):
            raise message
        return message

    def kill(self, patience_s: float = 0.0) -> None:
        """Waits `patience_s` for the process to end, then kills it by SIGKILL."""
        if patience_s:
            self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)


def _work(function: Callable[..., None], pipe: Connection, *args: Any) -> None:
    try:
        function(pipe, *args)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(RuntimeError(f"{function.__module__}, process {os.getpid()}: {error!r}"))
        raise


@contextlib.contextmanager
def several(
    context: Any, function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[Worker]]:
    """Yields a worker for each tuple of arguments; all are ended with the block."""
    made: list[Worker] = []
    try:
        made += [Worker(context, function, *args) for args in arguments]
        yield made
    finally:
        for worker in made:
            worker.kill(5.0 if sys.exc_info()[0] is None else 0.0)


def context(*preload: str) -> Any:
    """Returns a forkserver context that has torch loaded and runs each worker with one thread, as torchrun does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"
    # khugepaged looks through what numpy recommends to it, with the lowest priority and the process's memory locked:
    # where all processors are busy, a process that asks for memory then stands still for seconds (docs/LOG.md).
    os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload([*PRELOAD, *preload])
    return ctx


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaos-bench-") as folder:
        yield Path(folder)


@functools.cache
def restart_s() -> float:
    """Measures a lower bound for restarting a training process, s: a fresh interpreter that imports torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return time.monotonic() - began
