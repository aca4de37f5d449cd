"""Members of the tests of protected links: they train numbers that an eavesdropper could recognise."""

from __future__ import annotations

import re
import struct
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.trainer import Trainer

GRADIENT, WEIGHT = 1.2345678, 1.7654321
"""Values in [1, 2): a sum of equal ones, over a power of two of samples, has the same digits."""


def pattern(value: float) -> re.Pattern[bytes]:
    """Returns a pattern that matches sixteen floats in a row with the mantissa of this value, whatever their
    exponent.
    """
    low = re.escape(struct.pack("<f", value)[:2])
    return re.compile(b"(?s)(?:" + low + b"..){16}")


def train(spec: dict[str, Any]) -> None:
    """Trains a model whose weights stay as they are, and whose gradient is the same for all weights.

    Args:
        spec: name, endpoint, settings, steps, report (a file).
    """
    torch.set_num_threads(1)
    trainer = Trainer(name=spec["name"], endpoint=spec["endpoint"], step_timeout_s=60.0, **spec["settings"])
    with trainer:
        model = nn.Linear(100, 100, bias=False)
        with torch.no_grad():
            model.weight.fill_(WEIGHT if spec["name"] == "a" else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.zeros(4096, 1)), 4)
        taken = 0
        for _ in trainer.prepare(model, optimizer, loader, epochs=1000):
            optimizer.zero_grad()
            (model.weight * GRADIENT).sum().backward()
            trainer.update()
            trainer.check_state_replication()
            time.sleep(0.005)
            taken += 1
            if taken >= spec["steps"]:
                trainer.request_node_exit()
                break
        torch.save({"weight": float(model.weight.detach().mean()), "steps": taken}, spec["report"])
