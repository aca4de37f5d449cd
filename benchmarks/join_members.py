"""Processes of the join benchmark: hosts that train, a guest that waits at the door, and a burner that only costs CPU.

Hosts and guest train the plain loop of benchmarks/victims.py and report each committed step with CLOCK_MONOTONIC. A
guest first builds everything that a step needs (model, Adam's state, flat memory, one forward and backward pass), says
"ready" and waits for "go". It then notes time and its own CPU seconds, joins, trains, and notes both again when the
first step to which it contributed is committed. On "leave" it goes politely, so that the hosts are two again.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import compute_alone, state_model
from benchmarks.victims import BATCH, fingerprint


def warm_up(model: Any, optimizer: Any) -> int:
    """One step on nothing: what it allocates is there when the guest joins. Returns the model's width."""
    import torch

    width = int(next(model.parameters()).shape[1])
    model(torch.zeros(BATCH, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return width


def member(pipe: Connection, endpoint: str, name: str, state_mib: float, join_by: str, logs: str) -> None:
    """One training process of ours; `join_by` is "" for a host, else "replay" or "pause"."""
    import torch

    from chaos_lightning.collectives.layout import Section
    from chaos_lightning.errors import DepartedError
    from chaos_lightning.member.engine import Engine
    from chaos_lightning.member.training import switch_quickly
    from chaos_lightning.replication.access import ModuleState
    from chaos_lightning.replication.replay import ModuleReplay
    from chaos_lightning.settings import EngineConfig

    compute_alone()
    torch.manual_seed(0 if not join_by else os.getpid())  # a guest's own weights are worth nothing
    model = state_model(state_mib)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    state = ModuleState(model, optimizer)
    width = warm_up(model, optimizer)
    draw = torch.Generator().manual_seed(os.getpid())
    engine = Engine(
        EngineConfig(
            endpoint=endpoint,
            name=name,
            host_scheduler=False,
            log_dir=logs,
            join_timeout_s=60,
            step_timeout_s=60,
            join_by=join_by or "auto",
        )
    )
    switch_quickly()
    engine.prepare(sections=[Section("all", list(model.named_parameters()))])
    if join_by:
        pipe.send(("ready", time.monotonic_ns()))
        assert pipe.recv()[0] == "go"
        pipe.send(("going", time.monotonic_ns(), time.process_time()))
    engine.join(fingerprint={}, quota=BATCH, accumulate=1, state=state, replay=ModuleReplay(state))
    pipe.send(("in", time.monotonic_ns(), engine.member_id))
    wanted: set[int] = set()
    fresh, backwards = bool(join_by), 0
    while not engine.out:
        while pipe.poll():
            order, *values = pipe.recv()
            if order == "hash":
                wanted.add(values[0])
            elif order == "leave":
                engine.leave("the benchmark's guest goes")
        optimizer.zero_grad(set_to_none=True)
        engine.arm(coefficient=1.0)
        model(torch.randn(BATCH, width, generator=draw)).square().mean().backward()
        backwards += 1
        try:
            header = engine.step(weight=1.0, coefficient=1.0)
        except DepartedError:
            break
        now = time.monotonic_ns()
        optimizer.step()
        if fresh:
            fresh = False
            pipe.send(("contributed", now, time.process_time()))
        pipe.send(("cpu", header.step, time.process_time()))
        pipe.send(("step", now, header.seq, header.step, header.hash, len(header.contributors), engine.rank, backwards))
        if header.step in wanted:
            pipe.send(("hash", header.step, header.hash, fingerprint(model, optimizer)))
        engine.serve(state)
        if header.boundary and not engine.out:
            engine.boundary(state)
    engine.wait_released()
    engine.close()
    pipe.send(("bye",))


def burner(pipe: Connection) -> None:
    """Burns as many CPU seconds as it is told, again and again; sends when it began and ended (ns)."""
    pipe.send(("ready", time.monotonic_ns()))
    while (cpu_s := pipe.recv()) is not None:
        began, end = time.monotonic_ns(), time.process_time() + cpu_s
        while time.process_time() < end:
            sum(range(1000))
        pipe.send((began, time.monotonic_ns()))
