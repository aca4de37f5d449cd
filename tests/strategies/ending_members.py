"""Runs a fit as users start it, which trains until a test ends it, and reports whether code after fit has run."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked_support
import lightning.pytorch as pl
import strategy_models as models
import torch

from chaos_lightning.machine.signals import POLITE
from chaos_lightning.strategies import ChaosStrategy, DiLoCoStrategy

ENDLESS = 10_000


class Marks(pl.Callback):
    """Callback that creates a file once this process trains, and may stop training early."""

    def __init__(self, mark: Path, spec: dict[str, Any]) -> None:
        self.mark, self.stops_after = mark, spec.get("stops_after", 0)
        self.validates = spec.get("marks") == "validation"
        self.steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps += 1
        if self.steps == 3 and not self.validates:
            self.mark.touch()
        trainer.should_stop |= self.steps == self.stops_after

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if self.validates and not trainer.sanity_checking and batch_idx == 1:
            self.mark.touch()


def on_terminal(path: str) -> None:
    """Makes this process the leader of a session on this terminal, with the default signal handlers of a shell's
    child.
    """
    for number in POLITE:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if os.getpid() != os.getsid(0):
        os.setsid()
    terminal = os.open(path, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)


def fit(folder: str, port: int, spec: dict[str, Any]) -> None:
    """Trains with the server at this port. In `folder`, the file `mark` shows that training has begun, `behind` that
    fit has returned.

    Args:
        folder: Folder of both files.
        port: Port of the scheduler or the parameter server.
        spec: terminal (path), workers (of the loader), kind ("chaos", "diloco"), stops_after (steps), marks
            ("validation": the mark says that it validates).
    """
    if "terminal" in spec:
        on_terminal(spec["terminal"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = Path(folder)
    strategy: Any
    if spec.get("kind", "chaos") == "chaos":
        strategy = ChaosStrategy(endpoint=f"127.0.0.1:{port}", name="a")
    else:
        strategy = DiLoCoStrategy(server=f"127.0.0.1:{port}", name="a", inner_steps=5)
    trainer = models.trainer(
        out,
        max_epochs=ENDLESS,
        strategy=strategy,
        callbacks=[Marks(out / "mark", spec)],
        enable_progress_bar=True,
    )
    # A child of the tests' fork server has that for its default, and the server gets a group's signals, too.
    workers = {"num_workers": spec.get("workers", 0)} | (
        {"multiprocessing_context": "fork"} if "workers" in spec else {}
    )
    train = models.loader(64, 4, shuffle=True, **workers)
    trainer.fit(models.Regression(), train, models.loader(400, 4, **workers))
    print("behind fit")
    (out / "behind").write_text(f"{trainer.global_step} {trainer.interrupted}")


def sweep(folder: str, port: int, arguments: Sequence[str]) -> None:
    """Runs a Hydra script with these command line arguments; its run number N trains in `folder`/N."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    def main(config: Any) -> None:
        out = Path(folder) / str(HydraConfig.get().job.get("num", 0))
        out.mkdir(exist_ok=True)
        fit(str(out), port, {})

    sys.argv = ["app.py", *arguments, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    hydra.main(version_base="1.3", config_path=folder)(main)()


def agent(port: int, spec: dict[str, Any], worker: Sequence[str]) -> None:
    """Runs an agent of torchrun or `chaos-lightning run`, with one worker, on a terminal of its own."""
    on_terminal(spec["terminal"])
    if spec["nohup"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ours = ["--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}"]
    if spec["program"] == "run":
        forked_support.run("chaos_lightning.cli", ["run", *ours, *worker])
    forked_support.run(forked_support.TORCHRUN, ["--rdzv-backend=chaos", *ours, *worker])


if __name__ == "__main__":
    fit(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
