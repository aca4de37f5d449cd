"""Runs a member of the soak: a plain training loop on scikit-learn's digits, with a journal of what it sees.

The journal is evidence from outside the engine: one line before each step with the indices of the samples that the data
set really handed out, one line after each commit with a SHA-256 of the whole training state. Lines are single writes,
so what was written before a SIGKILL stays. checks.py judges them.

Orders come over the pipe: ("die", phase) kills this process at its next passage of that phase.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.members import fingerprint

QUOTA = 8
HELD_OUT = 297
SAVE_EVERY = 50


def digits() -> tuple[Any, Any]:
    """Returns (images, labels) of scikit-learn's 1797 handwritten digits, as float tensors in [0, 1] and class
    numbers.
    """
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)


def training_length() -> int:
    return len(digits()[1]) - HELD_OUT


def make(seed: int) -> tuple[Any, Any]:
    """Returns a model and its optimizer, equal for equal seeds."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Numbered:
    """Data set that hands out each sample with its index."""

    def __init__(self, images: Any, labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        return self._images[index], self._labels[index], index


class Journal:
    """File in which a member's process writes down what it sees.

    Args:
        root: Folder of all journals and checkpoints.
        name: The member's.
    """

    def __init__(self, root: Path, name: str) -> None:
        (root / "journals").mkdir(parents=True, exist_ok=True)
        (root / "checkpoints").mkdir(exist_ok=True)
        self._root = root
        path = root / "journals" / f"{name}-{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **fields: Any) -> None:
        line = {"what": what, "ns": time.monotonic_ns(), **fields}
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def stand(self, what: str, engine: Any, model: Any, optimizer: Any) -> None:
        """Writes the member's last header and a hash of its state; the hash sometimes to the event log as well."""
        from chaos_lightning.replication.access import ModuleState
        from chaos_lightning.replication.table import state_hash

        header, who = engine.header, engine.contributors
        self.write(
            what,
            member=engine.member_id,
            seq=header.seq,
            step=header.step,
            kind=str(header.kind),
            head=header.hash,
            prev=header.prev_hash,
            # A newcomer knows who has the state, and not who brought what, if some of these have left since.
            who=list(zip(who, header.weights(), strict=True)) if len(who) == len(header.weights()) else None,
            sha=fingerprint(model, optimizer),
        )
        if header.step % 10 == 0 or what != "commit" or str(header.kind) != "step":  # for the audit of the event logs
            value = state_hash(ModuleState(model, optimizer).tensors())
            engine.events.emit("state_hash", seq=header.seq, step=header.step, head=header.hash, hash=value)

    def save(self, label: str, engine: Any, model: Any, optimizer: Any) -> None:
        """Writes a checkpoint, whose name has the header and the member."""
        import torch

        path = self._root / "checkpoints" / f"{label}-{engine.header.hash}-{engine.member_id}.pt"
        part = path.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.rename(path)


def replays(name: str) -> bool:
    """Returns whether a member joins by replay; about every other one does, by its name."""
    return sum(name.encode()) % 2 == 0


class Fate:
    """Kills its own process at the phase of training that the parent names."""

    def __init__(self, pipe: Connection, trainer: Any) -> None:
        self._pipe, self._trainer, self._phase = pipe, trainer, ""

    def at(self, phase: str) -> None:
        """Kills the process if the parent named this phase, which the loop has just reached."""
        if self._pipe.poll():
            self._phase = self._pipe.recv()[1]
            if self._phase == "optimizer" and replays(self._trainer.engine.config.name):
                self._phase = "allreduce"
        if self._phase != phase:
            return
        engine = self._trainer.engine
        engine.events.emit("fault_injected", kind="sigkill", phase=phase, step=engine.header.step)
        if phase == "allreduce":  # somewhere in the exchange that begins now
            threading.Timer(random.uniform(0.0, 0.01), os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def member(
    pipe: Connection, endpoint: str, name: str, folder: str, seed: int, epochs: int, pace_s: float, relay: str = ""
) -> None:
    """Trains until all epochs are over, the member is told to leave, or it is killed; with a relay, its links pass
    through it.
    """
    import torch
    from torch.utils.data import DataLoader

    from chaos_lightning.errors import DepartedError, RefusedError
    from chaos_lightning.testing.emulation import RELAY, install_from
    from chaos_lightning.testing.processes import die_with_parent
    from chaos_lightning.trainer import Trainer

    die_with_parent()
    if relay:
        install_from({RELAY: relay})
        # The reasons for which a member waits, many here, are in the event log as well.
        logging.getLogger("chaos_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    images, labels = digits()
    model, optimizer = make(seed)
    loader = DataLoader(Numbered(images[:-HELD_OUT], labels[:-HELD_OUT]), batch_size=QUOTA, shuffle=True)
    root = Path(folder)
    journal = Journal(root, name)
    trainer = Trainer(endpoint=endpoint, name=name, host_scheduler=False, log_dir=str(root / "events"))
    try:
        with trainer:
            _train(pipe, journal, trainer, model, optimizer, loader, (seed, epochs, pace_s))
            out = trainer.engine.out
        word = "left" if out else "done"
    except (RefusedError, DepartedError) as error:  # the job ended while it waited to come in
        trainer.close()
        journal.write("refused", reason=str(error))
        word = "refused"
    pipe.send((word, trainer.engine.header.step))


def _train(
    pipe: Connection, journal: Journal, trainer: Any, model: Any, optimizer: Any, loader: Any, how: tuple[Any, ...]
) -> None:
    from torch.nn.functional import cross_entropy

    from chaos_lightning.trainer import capture_exit_event

    seed, epochs, pace_s = how
    fate, engine = Fate(pipe, trainer), trainer.engine
    parts = (engine, model, optimizer)

    def back(since: int) -> None:
        """Notes that the member was removed from the job, and has joined again."""
        journal.write("fenced", since=since)
        journal.stand("entered", *parts)
        pipe.send(("back", engine.header.step))

    if not replays(engine.config.name):
        optimizer.register_step_pre_hook(lambda *_: fate.at("optimizer"))
    batches = trainer.prepare(model, optimizer, loader, epochs=epochs, seed=seed)
    journal.stand("entered", *parts)
    pipe.send(("in", engine.header.step))
    for inputs, targets, indices in batches:
        drawn = [] if trainer.idle else indices.tolist()
        journal.write("draw", member=engine.member_id, prev=engine.header.hash, indices=drawn)
        fate.at("forward")
        if pace_s:
            time.sleep(pace_s)
        loss = cross_entropy(model(inputs), targets)
        fate.at("backward")
        loss.backward()
        fate.at("allreduce")
        since = time.monotonic_ns()
        kept = trainer.update()
        optimizer.zero_grad(set_to_none=True)
        if not kept and engine.out:  # it was leaving, and a recovery let it go in mid-step
            journal.write("left")
            break
        if not kept:
            back(since)
            continue
        journal.stand("commit", *parts)
        pipe.send(("step", engine.header.step))
        if engine.header.step % SAVE_EVERY == 0:
            journal.save("step", *parts)
        before, since = (engine.header.hash, engine.member_id), time.monotonic_ns()
        trainer.check_state_replication()
        if engine.member_id != before[1]:
            back(since)
        elif engine.header.hash != before[0]:
            journal.stand("commit", *parts)
        if capture_exit_event():
            trainer.request_node_exit()
            break
    if not engine.out:
        journal.save("final", *parts)
