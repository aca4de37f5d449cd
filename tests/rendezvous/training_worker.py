"""Runs a worker for torchrun tests that really trains; it reports its events, one JSON line each.

Its argument is JSON: gates {step: FIFO to wait at}, third (FIFO to wait at after three steps in company), alone (FIFO
to wait at once the others are gone), crash_in (the life, counted from 0, that ends without a word after three steps in
company), late (FIFO to wait at in the second life before it joins), apply (FIFO to wait at in the first life before
the first entry of the log is applied), epochs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.protocol.types import Header
from chaos_lightning.replication.replay import ModuleReplay
from chaos_lightning.replication.table import state_hash
from chaos_lightning.trainer import Trainer, capture_exit_event

warnings.simplefilter("error")
spec = json.loads(sys.argv[1])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
local_rank = int(os.environ["LOCAL_RANK"])


def say(what: str, **more: Any) -> None:
    os.write(
        1,
        (
            json.dumps({"what": what, "pid": os.getpid(), "restarts": restarts, "local_rank": local_rank, **more})
            + "\n"
        ).encode(),
    )


def wait_at(gate: str) -> None:
    with open(gate) as opened:
        opened.read()


torch.set_num_threads(1)
torch.manual_seed(os.getpid())


def hold_the_replay(gate: str) -> None:
    apply = ModuleReplay.replay

    def held(self: ModuleReplay, header: Header) -> None:
        ModuleReplay.replay = apply  # type: ignore[method-assign]
        say("observing")
        wait_at(gate)
        apply(self, header)

    ModuleReplay.replay = held  # type: ignore[method-assign]


def hash_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = list(model.state_dict().items())
    tensors += [(f"opt{i}.{k}", v) for i, s in enumerate(optimizer.state.values()) for k, v in s.items()]
    return state_hash(tensors)


generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(240, 8, generator=generator), torch.randn(240, 4, generator=generator))
gates = {int(step): gate for step, gate in spec.get("gates", {}).items()}
alone = spec.get("alone", "")
company = 0
say("start")
if restarts and "late" in spec:
    wait_at(spec["late"])
if not restarts and "apply" in spec:
    hold_the_replay(spec["apply"])
with Trainer() as trainer:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = trainer.prepare(model, optimizer, DataLoader(data, 4, shuffle=True), epochs=spec.get("epochs", 2))
    say("in", step=trainer.step, hash=hash_of(model, optimizer), role=trainer.engine.role)
    for x, y in batches:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        trainer.update()
        trainer.check_state_replication()
        company += trainer.world_size > 1
        if spec.get("crash_in") == restarts and company == 3 and spec.get("crash_rank", local_rank) == local_rank:
            say("crash", step=trainer.step)
            os._exit(1)
        if gate := gates.pop(trainer.step, ""):
            wait_at(gate)
        if company == 3 and "third" in spec:
            wait_at(spec.pop("third"))
        if company and trainer.world_size == 1 and alone:
            gate, alone = alone, ""
            wait_at(gate)
        if capture_exit_event():
            trainer.request_node_exit()
            break
    say("done", step=trainer.step, hash=hash_of(model, optimizer), company=company, out=trainer.engine.out)
# Torch takes a second to be taken apart; the plain loop among the examples ends as a user's does.
sys.stdout.flush()
os._exit(0)
