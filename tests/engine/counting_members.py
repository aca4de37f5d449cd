"""Members whose weights count samples: theta[e, i] grows by 1 when sample i is trained in epoch e.

So the final weights say by themselves what was trained, whatever logs and chains claim: all ones, and nothing was lost
or trained twice.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from chaos_lightning.trainer import Trainer, capture_exit_event


class Numbers(Dataset[int]):
    """Data set in which each sample is its own index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> int:
        return number


class Count(nn.Module):
    """Model with one weight for each sample of each epoch."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(epochs, samples))

    def forward(self, epoch: int, samples: Tensor) -> Tensor:
        """Returns a loss whose gradient is the same for each sample of a step, and twice as much for a sample that
        occurs twice.
        """
        return -self.theta[epoch, samples].mean()


class Counting(torch.optim.Optimizer):
    """Optimizer that adds to each weight the number of times that its sample occurred in the step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (used := p.grad < 0).any():
                    p.add_(torch.round(p.grad / p.grad[used].max()))


def member(spec: dict[str, Any]) -> None:
    """Runs one member until its job is over, then writes its final weights to a file.

    Args:
        spec: name, port, out (folder), samples, batch, epochs, saves_every (steps), pace_s (of a step), settings.
    """
    torch.set_num_threads(1)
    out = Path(spec["out"])
    model = Count(spec["epochs"], spec["samples"])
    optimizer = Counting(model.parameters())
    loader = DataLoader(Numbers(spec["samples"]), spec["batch"], shuffle=True)
    file, pace = out / "checkpoint.pt", threading.Event()
    settings = {"join_timeout_s": 60.0, "step_timeout_s": 60.0, "state_hash_every": 5, **spec.get("settings", {})}
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", **settings) as trainer:
        resume = file if file.exists() else None
        for samples in trainer.prepare(model, optimizer, loader, epochs=spec["epochs"], resume=resume):
            optimizer.zero_grad()
            if not trainer.idle:
                trainer.backward(model(trainer._loader.epoch, samples))  # type: ignore[union-attr]
            trainer.update()
            if trainer.step % spec["saves_every"] == 0:
                trainer.save(file)
            trainer.check_state_replication()
            pace.wait(spec["pace_s"])
            if capture_exit_event():
                trainer.request_node_exit()
                return
    part = out / f"part.{spec['name']}.{os.getpid()}"
    torch.save(model.theta.detach(), part)
    part.replace(out / f"final.{spec['name']}.{os.getpid()}.pt")
