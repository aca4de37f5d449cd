"""Worker processes for benchmarks: a forkserver with torch preloaded, pipes back to the parent, an own scheduler."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos_lightning.machine.listener import free_port


@contextlib.contextmanager
def scheduler(min_nodes: int, *, log_dir: str = "", plan: str = "", **settings: Any) -> Iterator[str]:
    """A real scheduler process on a free port; yields its endpoint."""
    port = free_port()
    command = [
        sys.executable, "-m", "chaos_lightning.cli", "scheduler",
        "--listen", f"127.0.0.1:{port}", "--min-nodes", str(min_nodes), "--store", ":memory:",
    ]  # fmt: skip
    if log_dir:
        command += ["--log-dir", log_dir]
    if plan:
        command += ["--plan", plan]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the scheduler did not start (exit status {process.poll()})")
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait(5)


class Worker:
    """One worker process with a pipe; `function(pipe, *args)` runs in it."""

    def __init__(self, context: Any, function: Callable[..., None], *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = 120.0) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"worker {self.process.pid} said nothing for {timeout_s} s")
        message = self.pipe.recv()
        if isinstance(message, BaseException):
            raise message
        return message

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)


def context(*preload: str) -> Any:
    """A forkserver that has torch loaded and runs each worker with one thread, as torchrun does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"
    # khugepaged looks through what numpy recommends to it, with the lowest priority and the process's memory locked:
    # where all processors are busy, a process that asks for memory then stands still for seconds (docs/LOG.md).
    os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(["torch", "torch.distributed", "chaos_lightning.member.engine", *preload])
    return ctx


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaos-bench-") as folder:
        yield Path(folder)
