"""Writes and reads checkpoints of plain training loops, from which a job can resume.

Theory of operation. The file is a dictionary by `torch.save` that `torch.load(path, weights_only=True)` reads: "model"
and "optimizer" are their `state_dict()`, "extra" the same of what newcomers receive beside them, and "chaos_lightning"
says of which step it is and where the data stand (protocol.md 27). Reading it runs no code of the file's.

A job that goes on from a checkpoint begins with header 0 and an empty ledger, like any other. From which step it goes
on, and which samples were spent before, is therefore part of the training state that newcomers receive (`Start`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.member.keeping import LoadedCheckpoint, SavedCheckpoints, remembered
from chaos_lightning.replication.access import ModuleState

KEY = "chaos_lightning"
"""Key of our part of a checkpoint's file, and of `Start` among the extra state."""
_VERSION = 1
_PARTS = {KEY, "model", "optimizer", "extra"}


class Start:
    """Start of a job: the checkpoint, if any, from which it began; constant as long as the job runs, except for the
    list of saved checkpoints.

    Attributes:
        step: Step of the checkpoint; 0 if the job began from none.
        data: State of the data, as `ElasticLoader.state_dict` says it; None if the job began from none.
        checkpoints: Checkpoints that the state goes on from; more come while the job runs.
    """

    def __init__(self, checkpoints: SavedCheckpoints) -> None:
        self.step = 0
        self.data: dict[str, Any] | None = None
        self.checkpoints = checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "data": self.data, "checkpoints": self.checkpoints.heads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.data = state["step"], state["data"]
        self.checkpoints.heads = list(state.get("checkpoints", ()))


def content(state: ModuleState, loader: JobLoader, job: str, step: int, head: str) -> dict[str, Any]:
    """Returns the content of a checkpoint of the present state.

    Args:
        state: State of a loop, between two steps.
        loader: Loader of that loop.
        job: Name of the job.
        step: Number of optimizer steps, those before the job's own start included.
        head: Hash of the last step's header.
    """
    (optimizer,) = state.optimizers
    ours = {"version": _VERSION, "job": job, "step": step, "head": head, "optimizer": type(optimizer).__qualname__}
    ours["checkpoints"] = remembered(state.extra[KEY].state_dict()["checkpoints"], head)
    return {
        KEY: {**ours, "data": loader.state_dict()},
        "model": state.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "extra": {name: value.state_dict() for name, value in state.extra.items() if name != KEY},
    }


def write(checkpoint: Mapping[str, Any], path: str) -> None:
    """Writes a checkpoint to this path.

    Raises:
        StateError: The file could not be read again.
    """
    torch.save(checkpoint, path)
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise StateError(
            f"what was saved cannot be read again without running code of the file's: {error}; states of extra= must "
            "be plain values and tensors"
        ) from error


def read(path: Path) -> dict[str, Any]:
    """Reads a checkpoint that `write` wrote.

    Raises:
        ConfigurationError: There is no such file, or `write` has not written it, or a version did that this one cannot
            read.
        StateError: The file is damaged.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"resume={str(path)!r}: there is no such file. Give one that Trainer.save has written. A member that joins "
            "a job that runs needs none: it gets the others' state"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"resume={str(path)!r}: the file ({path.stat().st_size} bytes) is damaged, or no checkpoint of "
            f"Trainer.save: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    if not isinstance(found, dict) or not found.keys() >= _PARTS:
        holds = sorted(map(str, found))[:5] if isinstance(found, dict) else type(found).__name__
        raise ConfigurationError(
            f"resume={str(path)!r} is no checkpoint of Trainer.save: it holds {holds}, expected {sorted(_PARTS)}. Load "
            "other files yourself, before prepare(loaded=True)"
        )
    if found[KEY].get("version") != _VERSION:
        raise ConfigurationError(
            f"resume={str(path)!r} has version {found[KEY].get('version')!r}, this release reads {_VERSION}"
        )
    return found


def restore(checkpoint: Mapping[str, Any], path: Path, state: ModuleState, loader: JobLoader) -> LoadedCheckpoint:
    """Replaces the state by a checkpoint's, after checking that all of it fits.

    Args:
        checkpoint: Result of `read`.
        path: Path of its file, for messages.
        state: State of the loop that goes on, its `Start` included.
        loader: Loader of that loop. It is told its place only once it is known whether the job starts from this
            checkpoint.

    Returns:
        Step and header hash of the checkpoint.

    Raises:
        ConfigurationError: The checkpoint is of another model, optimizer or data.
    """
    ours, (optimizer,) = checkpoint[KEY], state.optimizers
    extra = {name: value for name, value in state.extra.items() if name != KEY}
    found = [
        _difference("the model", _shapes(checkpoint["model"]), _shapes(state.module.state_dict())),
        _difference("the optimizer", {"class": ours["optimizer"]}, {"class": type(optimizer).__qualname__}),
        _difference("the optimizer", _groups(checkpoint["optimizer"]), _groups(optimizer.state_dict())),
        _difference("extra", dict.fromkeys(checkpoint["extra"], "there"), dict.fromkeys(extra, "there")),
        *(
            _difference(f"extra {name!r}", _shapes(checkpoint["extra"][name]), _shapes(value.state_dict()))
            for name, value in extra.items()
            if isinstance(value, nn.Module) and name in checkpoint["extra"]
        ),
    ]
    if words := "; ".join(filter(None, found)):
        raise ConfigurationError(f"resume={str(path)!r} does not fit what is trained here: {words}")
    try:
        loader.check_state(ours["data"])
    except ConfigurationError as error:
        raise ConfigurationError(f"resume={str(path)!r} does not fit what is trained here: {error}") from error
    for name, value in extra.items():
        try:
            value.load_state_dict(checkpoint["extra"][name])
        except Exception as error:  # an object that is no model checks for itself what fits
            raise ConfigurationError(
                f"resume={str(path)!r} does not fit what is trained here: "
                f"extra {name!r} does not take its state: {error}"
            ) from error
    state.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    state.extra[KEY].load_state_dict(ours)
    return LoadedCheckpoint(ours["step"], ours["head"])


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(t.shape) if isinstance(t, Tensor) else "there" for name, t in tensors.items()}


def _groups(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"group {number}": f"of {len(group['params'])} parameters"
        for number, group in enumerate(optimizer["param_groups"])
    }


def _difference(what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Describes the first name whose values differ between file and process, with both values; "" if there is none."""
    for name in [*theirs, *mine]:
        values = [values.get(name, "absent") for values in (theirs, mine)]
        if values[0] != values[1]:
            return f"{what}: {name} is {values[0]} in the file and {values[1]} here"
    return ""
