"""Processes of the join benchmark: hosts that train, a newcomer that waits for its start, and a burner that only uses
CPU.

A newcomer first builds everything that a step needs (model, Adam's state, flat memory, one forward and backward pass),
says "ready" and waits for "go". It then notes time and its own CPU seconds, joins, trains, and notes both again when
the first step to which it contributed is committed. On "leave" it goes politely, so that the hosts are two again.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from benchmarks.members import Trainee, config_of, model_and_adam, train, warm_up


def member(pipe: Connection, endpoint: str, name: str, state_mib: float, join_by: str, logs: str) -> None:
    """Runs one member of this product; `join_by` is "" for a host, else the newcomer's way ("replay" or "pause")."""
    seed = os.getpid() if join_by else 0  # a newcomer's own weights are worth nothing
    model, optimizer = model_and_adam(state_mib, seed)
    warm_up(model, optimizer)
    config = config_of(endpoint=endpoint, name=name, log_dir=logs, join_by=join_by or "auto")
    train(pipe, Trainee(pipe, config, model, optimizer, replay=True), newcomer=bool(join_by))


def burner(pipe: Connection) -> None:
    """Uses as many CPU seconds as each order says; sends when that began and ended (ns)."""
    pipe.send(("ready", time.monotonic_ns()))
    while (cpu_s := pipe.recv()) is not None:
        began, end = time.monotonic_ns(), time.process_time() + cpu_s
        while time.process_time() < end:
            sum(range(1000))
        pipe.send((began, time.monotonic_ns()))
