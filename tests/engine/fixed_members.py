"""Member processes that train a batch of fixed size in a plain loop, and the same training in one process."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.trainer import Trainer, capture_exit_event

CLIP, SEED = 0.5, 3


def parts(samples: int, dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer, Any, TensorDataset]:
    """Returns model, optimizer, schedule and data, in double precision: there another order of the same sums does not
    grow to something that a bound must allow for.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return model, optimizer, schedule, TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def alone(
    samples: int, batch: int, epochs: int, *, micro_batch: int = 0, dropout: float = 0.0
) -> tuple[list[float], list[Tensor]]:
    """Trains in one process; returns the loss of each step, and the parameters.

    Args:
        samples: Samples of an epoch.
        batch: Samples of a step.
        epochs: Passes over the data.
        micro_batch: Samples of a micro-batch, whose random numbers are keyed as a job's; 0: a step is computed at once.
        dropout: Share of values that are dropped.
    """
    model, optimizer, schedule, data = parts(samples, dropout)
    losses: list[float] = []
    for _ in range(epochs):
        for x, y in DataLoader(data, batch):
            optimizer.zero_grad()
            total = 0.0
            cut = micro_batch or batch
            for j, (mine, its) in enumerate(zip(x.split(cut), y.split(cut), strict=True)):
                with Randomness(SEED).stream("step", len(losses) + 1, j):
                    loss = loss_of(model, mine, its) * (len(mine) / len(x))
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            losses.append(total)
    return losses, [p.detach() for p in model.parameters()]


def train(spec: dict[str, Any]) -> None:
    """Runs one member, and reports the losses of its steps.

    Args:
        spec: name, endpoint, report (file), samples, batch (of the loader), epochs, dropout, settings, gates {step:
            fifo}, dies_at (step within which it is killed), exit_at (step after which it leaves without asking first).
    """
    torch.set_num_threads(1)
    model, optimizer, schedule, data = parts(spec["samples"], spec.get("dropout", 0.0))
    settings = {"step_timeout_s": 60.0, "join_timeout_s": 60.0, "state_hash_every": 2, **spec["settings"]}
    gates, losses = dict(spec.get("gates", {})), []
    part: list[tuple[float, int]] = []
    idle = again = 0
    with Trainer(name=spec["name"], endpoint=spec["endpoint"], **settings) as trainer:
        loader = DataLoader(data, spec["batch"])
        extra = {"schedule": schedule}
        for x, y in trainer.prepare(
            model, optimizer, loader, epochs=spec["epochs"], clip_norm=CLIP, extra=extra, seed=SEED
        ):
            loss = loss_of(model, x, y)
            trainer.backward(loss)
            part += [] if trainer.idle else [(loss.item(), len(x))]
            idle += trainer.idle
            if trainer.step == spec.get("dies_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            stepped = trainer.update()
            if trainer.began_again:
                part, again = [], again + 1
            if not stepped:
                continue
            optimizer.zero_grad()
            schedule.step()
            found = [pair for its in trainer.gather(part) for pair in its]
            part = []
            losses.append(sum(value * n for value, n in found) / sum(n for _, n in found) if found else float("nan"))
            trainer.check_state_replication()
            if gate := gates.pop(trainer.step, ""):
                with open(gate) as opened:
                    opened.read()
            if capture_exit_event() or trainer.step == spec.get("exit_at"):
                trainer.request_node_exit()
                break
    parameters = [p.detach() for p in model.parameters()]
    report = {"losses": losses, "parameters": parameters, "idle": idle, "again": again, "step": trainer.step}
    torch.save(report, spec["report"])
