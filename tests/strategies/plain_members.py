"""Runs member processes of tests of plain loops, with the models and data of the Lightning tests."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import strategy_models as models
import torch
from torch import nn

from chaos_lightning.replication.access import ModuleState
from chaos_lightning.replication.table import state_hash
from chaos_lightning.trainer import Trainer

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def scaler() -> torch.amp.GradScaler:
    """Returns the same gradient scaler as Lightning's members use (`strategy_members`): it first overflows, then
    grows.
    """
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)


def member(spec: dict[str, Any]) -> None:
    """Runs one member that trains by a plain loop.

    Args:
        spec: name, port, out (folder of the report), samples, batch, epochs, precision, prepare (arguments), settings,
            gates {step: fifo}, worlds {members: fifo}, saves {step: file}, stops_at (step), gathers, scaler,
            skips_idle (by `continue`), leaves_at (step: as that batch begins),
            watches (what is averaged where nobody else has samples).
    """
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    module = models.Regression(**spec.get("model_args", {}))
    optimizer = module.configure_optimizers()
    loader = models.loader(spec.get("samples", 24), spec.get("batch", 4), shuffle=True)
    arguments = {"epochs": spec.get("epochs", 3), **spec.get("prepare", {})}
    if spec.get("scaler"):
        arguments["scaler"] = scaler()
    settings = {"join_timeout_s": 40.0, "step_timeout_s": 40.0, "state_hash_every": 4, **spec.get("settings", {})}
    gates, worlds = dict(spec.get("gates", {})), dict(spec.get("worlds", {}))
    gathered, apart, skipped = [], [], 0
    half = AUTOCAST.get(spec.get("precision", ""))
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", **settings) as trainer:
        batches = trainer.prepare(module, optimizer, loader, **arguments)
        began = trainer.step
        for x, y in batches:
            if spec.get("skips_idle") and trainer.idle:
                skipped += 1
                continue
            if trainer.step == spec.get("leaves_at"):
                trainer.request_node_exit()
                break
            if "leaves_at" in spec:
                optimizer.zero_grad()  # and not after the step: what it leaves with is the last average
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                loss = nn.functional.mse_loss(module.net(x), y)
            trainer.backward(loss)
            own = [p.grad.clone() for p in module.parameters()] if spec.get("watches") else []
            if not trainer.update():
                continue
            weights = trainer.engine.header.weights()
            if own and len(weights) > 1 and sum(weight > 0 for weight in weights) == 1:
                apart.append(max((p.grad - g).abs().max() for p, g in zip(module.parameters(), own, strict=True)))
            if "leaves_at" not in spec:
                optimizer.zero_grad()
            if spec.get("gathers"):
                gathered.append(trainer.gather({"who": spec["name"], "idle": trainer.idle, "loss": loss.detach()}))
            if path := spec.get("saves", {}).get(trainer.step):
                trainer.save(path)
            if trainer.step == spec.get("stops_at"):
                break
            trainer.check_state_replication()
            if gate := gates.pop(trainer.step, "") or worlds.pop(trainer.world_size, ""):
                with open(gate) as opened:
                    opened.read()
    torch.save(
        {
            "weights": models.weights(module),
            "hash": state_hash(ModuleState(module, optimizer).tensors()),
            "buffers": [b.clone() for b in module.buffers()],
            "began": began,
            "step": trainer.step,
            "role": trainer.engine.role,
            "out": trainer.engine.out,
            "gathered": gathered,
            "skipped": skipped,
            "apart": apart,
            "scale": arguments["scaler"].state_dict() if spec.get("scaler") else {},
        },
        Path(spec["out"]) / f"{spec['name']}.pt",
    )


def dies_writing(spec: dict[str, Any]) -> None:
    """Runs a member that is killed after its checkpoint was written and before the file was renamed."""
    from chaos_lightning.member import checkpoints

    write = checkpoints.write

    def last(checkpoint: Any, path: str) -> None:
        write(checkpoint, path)
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.write = last  # type: ignore[assignment]
    member(spec)


def fails_writing(spec: dict[str, Any]) -> None:
    """Runs a member, and reports the error that `save` raises."""
    try:
        member(spec)
    except Exception as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, Path(spec["out"]) / f"{spec['name']}.pt")
        raise


def leaves_batches_out(spec: dict[str, Any]) -> None:
    """Runs a member that skips backward in some batches. Its loss is mean(w x) with constant x and lr 1, so each step
    moves w by the mean of x over the samples that count; it reports these moves.

    Args:
        spec: name, port, out, x, and `out_at` {step: "zeroed" or "stale"}: the batches that it leaves out, and whether
            gradients were zeroed before, or still hold the last step's average.
    """
    torch.set_num_threads(1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = torch.utils.data.TensorDataset(torch.full((24, 1), spec["x"]))
    loader, moved = torch.utils.data.DataLoader(data, 4), []
    with Trainer(name=spec["name"], endpoint=f"127.0.0.1:{spec['port']}", join_timeout_s=40.0) as trainer:
        for (x,) in trainer.prepare(model, optimizer, loader, data="local"):
            before = float(model.weight.detach())
            how = spec["out_at"].get(trainer.step)
            if how != "stale":
                optimizer.zero_grad()
            if how is None:
                model(x).mean().backward()
            assert trainer.update()
            moved.append(before - float(model.weight.detach()))
            trainer.check_state_replication()
    torch.save({"moved": moved}, Path(spec["out"]) / f"{spec['name']}.pt")
