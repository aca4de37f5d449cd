"""Runs members of plain loops whose machines get notices (benchmarks/notices.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.members import BATCH, model_and_adam, width_of

STATE_MIB = 6.0
PACE_S = 0.05
"""Pause in each step, s, for heavier computing that leaves the processors to others."""


def member(pipe: Connection, endpoint: str, name: str, logs: str, notice: str, environment: Mapping[str, str]) -> None:
    """Runs one member by a plain loop until its notice, or the order ("end", step), ends it.

    Args:
        pipe: Connection to the benchmark.
        endpoint: Endpoint of the scheduler.
        name: Name of the member.
        logs: Folder of its event log, beside which the last member keeps the state.
        notice: The setting.
        environment: Additional variables.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from chaos_lightning.trainer import Trainer, capture_exit_event

    os.environ.update(environment)
    model, optimizer = model_and_adam(STATE_MIB)
    data = TensorDataset(torch.randn(64 * BATCH, width_of(model), generator=torch.Generator().manual_seed(1)))
    settings: dict[str, Any] = {"join_timeout_s": 60.0, "step_timeout_s": 60.0, "on_last_exit": f"{logs}-kept"}
    last = 0
    with Trainer(
        name=name, endpoint=endpoint, log_dir=logs, notice=notice, host_scheduler=False, **settings
    ) as trainer:
        batches = trainer.prepare(model, optimizer, DataLoader(data, BATCH), epochs=1_000_000)
        pipe.send(("in", time.monotonic_ns(), trainer.engine.member_id))
        for (x,) in batches:
            optimizer.zero_grad()
            trainer.backward(model(x).square().mean())
            time.sleep(PACE_S)
            if not trainer.update():
                continue
            header = trainer.engine.header
            place = (header.seq, header.step, header.hash, header.contributors, trainer.rank, 0)
            pipe.send(("step", time.monotonic_ns(), *place))
            trainer.check_state_replication()
            while pipe.poll():
                last = pipe.recv()[1]
            if last and header.step >= last:
                break
            if capture_exit_event():
                trainer.request_node_exit()
                break
    pipe.send(("bye", time.monotonic_ns(), trainer.engine.noticed))
