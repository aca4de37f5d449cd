"""Member processes of the engine tests: a plain training loop on the paper's API, and a report of how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaos_lightning.errors import DisagreementError
from chaos_lightning.member import telling as telling_module
from chaos_lightning.member import transfer as transfer_module
from chaos_lightning.protocol.types import Header
from chaos_lightning.replication import by_reference as by_reference_module
from chaos_lightning.replication import log as log_module
from chaos_lightning.replication.log import SlotLog
from chaos_lightning.replication.replay import ModuleReplay
from chaos_lightning.replication.table import state_hash
from chaos_lightning.testing.processes import hold_the_lock
from chaos_lightning.trainer import Trainer, capture_exit_event

UNTIL_ENOUGH = 0
"""So many epochs: a job trains on until its test has seen all that it waits for."""
ASKED_EVERY = 20
"""Steps."""


def network(width: int = 32) -> nn.Sequential:
    """Returns the model that all members train."""
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def train(spec: dict[str, Any]) -> None:
    """Runs one member of the engine tests, as its specification says.

    Args:
        spec: name, endpoint, report (file), samples, batch, epochs (UNTIL_ENOUGH: until the file `enough` is there),
            width, settings, gates {step: fifo},
            drift_at (step), die_at {"when": "after_first_header", "world": members}, load_gate (fifo), load (which of
            its pulls waits there), apply_gate (fifo), step_s (what a step computes beside its own little work), kept
            {field of the state server's ServerConfig: value}, late_log (it never copies a slot in time for its log),
            busy {step: seconds in which it holds the interpreter's lock},
            exit_at (step after which it leaves), fails_at (step), gather_at (step), gather_nbytes (its payload then),
            tells_all (of the progress of its pulls), deaf (its stderr is a full pipe that nobody reads), by_wire (it
            reads no state out of the memory of others).
    """
    if spec.get("tells_all"):
        transfer_module.TOLD_EVERY_S = telling_module.PROGRESS_EVERY_S = 0.0
    if spec.get("by_wire"):
        by_reference_module._places_of = lambda donor: None
    if spec.get("deaf"):
        fill_stderr()
    torch.set_num_threads(1)
    torch.manual_seed(spec.get("seed", 7))
    generator = torch.Generator().manual_seed(1)
    samples, width = spec.get("samples", 240), spec.get("width", 32)
    data = TensorDataset(torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator))
    # Tests that hold members at gates need joins that wait for them; replay has tests of its own.
    settings = {"step_timeout_s": 60.0, "join_timeout_s": 60.0, "join_by": "pause", **spec.get("settings", {})}
    trainer = Trainer(name=spec["name"], endpoint=spec["endpoint"], **settings)
    gates = dict(spec.get("gates", {}))
    die_at = spec.get("die_at", {})
    if "load_gate" in spec:
        hold_the_load(trainer, spec["load_gate"], spec.get("load", 1))
    if "apply_gate" in spec:
        hold_the_replay(trainer, spec["apply_gate"])
    server = trainer.engine._transfer.server
    server.config = replace(server.config, **spec.get("kept", {}))
    server.log.cap_nbytes = server.config.log_cap_nbytes
    if spec.get("late_log"):
        copy_too_late(server.log)
    with trainer:
        model = network(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(data, spec.get("batch", 4), shuffle=True, num_workers=spec.get("workers", 0))
        for x, y in trainer.prepare(model, optimizer, loader, epochs=spec.get("epochs", 2) or 1_000_000):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            time.sleep(spec.get("step_s", 0.0))
            if trainer.step in (busy := spec.get("busy", {})):
                hold_the_lock(busy[trainer.step])
            if die_at and die_at["when"] == "after_first_header" and trainer.world_size == die_at["world"]:
                die_after_first_header(trainer)
            if spec.get("fails_at") == trainer.step:
                raise RuntimeError("a mistake in the script")
            if spec.get("drift_at") == trainer.step:
                with torch.no_grad():
                    model[0].weight += 1e-3
            stepped = trainer.update()
            # Before a newcomer can come in, which would not be asked at this step; nor is who has just come in again.
            enough = stepped and asks(spec, trainer.step) and is_enough(trainer, spec["enough"])
            trainer.check_state_replication()
            if enough:
                break
            if stepped and spec.get("gather_at") == trainer.step:
                try:
                    trainer.engine.gather("all_gather", bytes(spec["gather_nbytes"]))
                except DisagreementError as error:
                    torch.save({"error": str(error)}, spec["report"])
                    raise
            gate = gates.pop(trainer.step, None)
            if gate is not None:
                with open(gate) as opened:
                    opened.read()
            if capture_exit_event() or trainer.step == spec.get("exit_at"):
                trainer.request_node_exit()
                break
        tensors = [(n, t) for n, t in model.state_dict().items()]
        tensors += [(f"opt{i}.{k}", v) for i, s in enumerate(optimizer.state.values()) for k, v in s.items()]
        report = {
            "name": spec["name"],
            "hash": state_hash(tensors),
            "step": trainer.step,
            "pid": os.getpid(),
            "out": trainer.engine.out,
        }
    torch.save(report, spec["report"])


def asks(spec: dict[str, Any], step: int) -> bool:
    return spec.get("epochs") == UNTIL_ENOUGH and step % ASKED_EVERY == 0


def is_enough(trainer: Trainer, file: str) -> bool:
    """Returns whether any member has seen the file that ends the test; all members get the same answer."""
    seen = b"enough" if os.path.exists(file) else b""
    return any(answer for _, answer in trainer.engine.gather("all_gather", seen))


def hold_the_load(trainer: Trainer, gate: str, load: int) -> None:
    """Makes a newcomer report that it is about to pull for the `load`-th time, and wait until its gate is open."""
    transfer = trainer.engine._transfer
    fetch = transfer.fetch

    def held(*args: Any, **more: Any) -> bool:
        nonlocal load
        load -= 1
        if load:
            return fetch(*args, **more)
        transfer.fetch = fetch  # type: ignore[method-assign]
        trainer.engine.events.emit("notice", text="about to pull")
        with open(gate) as opened:
            opened.read()
        return fetch(*args, **more)

    transfer.fetch = held  # type: ignore[method-assign]


def hold_the_replay(trainer: Trainer, gate: str) -> None:
    """Makes a newcomer report that it is about to apply the first entry of the log, and wait until its gate is open."""
    apply = ModuleReplay.replay

    def held(self: ModuleReplay, header: Header) -> None:
        ModuleReplay.replay = apply  # type: ignore[method-assign]
        trainer.engine.events.emit("notice", text="about to apply")
        with open(gate) as opened:
            opened.read()
        apply(self, header)

    ModuleReplay.replay = held  # type: ignore[method-assign]


def fill_stderr() -> None:
    """Replaces stderr by a full pipe whose other end stays open, so that a write to it never returns."""
    _, into = os.pipe()
    os.set_blocking(into, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(into, bytes(4096))
    os.set_blocking(into, True)
    os.dup2(into, 2)


def copy_too_late(log: SlotLog) -> None:
    """Makes a member's buffers be reused before its log has copied them, as with large models that do other work
    between steps.
    """
    keep = log.keep
    log_module.AT_ONCE_NBYTES = 0

    def late(header: Header, encoded: bytes, raw: Any, spans: Any, still: Any, **more: Any) -> None:
        keep(header, encoded, raw, spans, lambda: False, **more)

    log.keep = late  # type: ignore[method-assign]


def die_after_first_header(trainer: Trainer) -> None:
    """Kills the commit root when it has sent its header to one member only, which alone has the result of the step
    then.
    """
    links = trainer.engine._links
    send = links.message

    def once(peer: str, *routed: Any) -> None:
        send(peer, *routed)
        # Sockets are closed by the kernel in order, what was written before still arrives.
        os.kill(os.getpid(), signal.SIGKILL)

    links.message = once  # type: ignore[method-assign]


def read(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))
