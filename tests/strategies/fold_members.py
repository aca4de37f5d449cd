"""Runs members whose script calls fit once for each fold; only the fold's data set knows which samples are held out."""

from __future__ import annotations

import warnings
from typing import Any

import strategy_models as models
import torch
from strategy_members import Gates
from torch import nn
from torch.utils.data import DataLoader, Dataset

from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.trainer import Trainer


class Folds(Dataset):  # type: ignore[type-arg]
    """Data set with every third sample held out; all folds have the same length and type."""

    def __init__(self, fold: int) -> None:
        self.rows = [row for number, row in enumerate(models.data(24)) if number % 3 != fold]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def folds(spec: dict[str, Any]) -> None:
    """Trains both folds one after the other, each by a fit of its own.

    Args:
        spec: name, port, out, plain (a plain loop), gates {fold: fifo} at step 2.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for fold in range(2):
        gates = {2: spec["gates"][fold]} if fold in spec.get("gates", {}) else {}
        (_plain if spec.get("plain") else _lightning)(spec, fold, gates)
        print(f"{spec['name']} is through fold {fold}", flush=True)


def _lightning(spec: dict[str, Any], fold: int, gates: dict[int, str]) -> None:
    strategy = ChaosStrategy(
        f"127.0.0.1:{spec['port']}", name=spec["name"], options={"join_timeout_s": 40.0, "step_timeout_s": 40.0}
    )
    run = models.trainer(spec["out"], strategy=strategy, max_epochs=2, callbacks=[Gates(gates, {}, "", {})])
    run.fit(models.Regression(), DataLoader(Folds(fold), 4))


def _plain(spec: dict[str, Any], fold: int, gates: dict[int, str]) -> None:
    module = models.Regression()
    optimizer = module.configure_optimizers()
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", join_timeout_s=40.0) as trainer:
        for x, y in trainer.prepare(module, optimizer, DataLoader(Folds(fold), 4), epochs=2):
            optimizer.zero_grad()
            trainer.backward(nn.functional.mse_loss(module.net(x), y))
            trainer.update()
            trainer.check_state_replication()
            if gate := gates.pop(trainer.step, ""):
                with open(gate) as opened:
                    opened.read()
