"""Writes and reads checkpoints of a fit with pipelines: Lightning's own files of the whole model, under any plan.

Theory of operation. A strategy hands these hooks of Lightning on to here; each takes the parts of the model that are at
this member. Saving: the state dict holds stand-ins for what is elsewhere, all members serve their parts at the header
before the file is written, and the writer puts the parts into the file one by one (pipeline/whole_file.py). Its plugin
is the user's only where that writes something else than one local file: then the whole is handed to it, from a file of
its own, with a warning that says how large it is. Loading: the file is mapped, and each member reads what it owns.

A fit with pipelines counts one batch for each optimizer step, however many micro-batches that has
(`saving.convert_position`). Plain Lightning that goes on from its file takes steps for batches. At the end of an epoch
that makes no difference. Within one, with `accumulate_grad_batches=M`, it takes S batches for trained where S x M were,
and trains that many more in this epoch.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline.loaded import LoadedParts, read_whole
from chaos_lightning.pipeline.whole_file import PartialModel, PartSource, WholeFile, partial_state_dict
from chaos_lightning.strategies import saving
from chaos_lightning.strategies.session import FitSession

_log = logging.getLogger("chaos_lightning")

# ------------------------------------------------------------------------------------------------ saving


def lightning_module_state_dict(module: LightningModule) -> dict[str, Any]:
    """Returns the whole model's state dict; parts that other members own are placeholders."""
    return partial_state_dict(module)


def save_checkpoint(
    strategy: Strategy,
    session: FitSession | None,
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any,
    model: PartialModel,
) -> None:
    """Writes a checkpoint of the whole model. Called after the barrier, in place of `saving.save`.

    Args:
        strategy: Strategy, which knows the writer and has the plugin that writes.
        session: Part of this fit in the job; None outside of fit.
        checkpoint: Content that Lightning wants to be written.
        filepath: Path of the file.
        storage_options: Options of the plugin.
        model: Parts of the model that are at this member.

    Raises:
        StateError: Another member was to write the file, and could not; or parts are elsewhere, and their owners cannot
            be asked.
    """
    if session is None or not session.in_job:
        if not strategy.is_global_zero or not (lacking := model.lacking()):
            saving.save(strategy, session, checkpoint, filepath, storage_options)
            return
        words = (
            f"{filepath} is not written: {_some(lacking)} of the model are at other members, which answer within fit "
            "only; save in fit, by ModelCheckpoint or in a hook"
        )
        if sys.exception() is None:
            raise StateError(words)
        _log.error(words)  # the exception that ends fit is the one to be seen
        return
    running = session
    source: list[PartSource] = []

    def begin() -> None:
        source[:] = [running.engine.share_parts()]

    io = _PartsIO(strategy.checkpoint_io, str(filepath), model, lambda: source[0])
    saving.save(strategy, session, checkpoint, filepath, storage_options, io, begin)


class _PartsIO(saving.PartsIO):
    """Checkpoint plugin that writes all members' parts of the model into the file.

    Args:
        io: The strategy's plugin.
        path: Path of the file.
        model: Parts of the model that are at this member.
        source: Returns the source of the other parts.
    """

    def __init__(self, io: CheckpointIO, path: str, model: PartialModel, source: Callable[[], PartSource]) -> None:
        self._io, self._model, self._source = io, model, source
        self.is_file = _writes_files(io) and _is_local_file_protocol(path)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.is_file and storage_options is not None:
            raise TypeError("TorchCheckpointIO takes no storage_options; give the Trainer a CheckpointIO that does")
        whole = WholeFile(checkpoint, self._model, self._source())
        self.nbytes = whole.nbytes
        if self.is_file:
            if isinstance(self._io, AsyncCheckpointIO):
                rank_zero_warn(
                    "AsyncCheckpointIO: members with parts of the model write checkpoints while training waits, for "
                    "parts are given to the writer at one step"
                )
            os.makedirs(os.path.dirname(path), exist_ok=True)
            whole.write(Path(path))
            return
        with tempfile.TemporaryDirectory() as folder:
            rank_zero_warn(
                f"{type(self._io).__name__} gets a checkpoint of the whole model for {path}: {whole.nbytes} bytes in "
                f"{folder} of this member, and as much memory as the plugin takes. A local file and Lightning's own "
                "TorchCheckpointIO need neither"
            )
            file = Path(folder, "whole.ckpt")
            whole.write(file)
            # Written here a moment ago, so it holds what this process has put into it.
            mapped = torch.load(file, map_location=lambda storage, _: storage, mmap=True, weights_only=False)
            self._io.save_checkpoint(mapped, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self._io.remove_checkpoint(path)


def _writes_files(io: CheckpointIO) -> bool:
    """Returns whether a plugin writes and reads each checkpoint as one file, as torch.save does."""
    return type(io.checkpoint_io if type(io) is AsyncCheckpointIO else io) is TorchCheckpointIO


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ------------------------------------------------------------------------------------------------ loading


def load_checkpoint(io: CheckpointIO, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns a checkpoint whose tensors are read from the file only when they are used; if that is impossible, they
    are read at once.

    Args:
        io: The strategy's plugin.
        path: Path of the checkpoint.
        weights_only: Lightning's argument of that name.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if _writes_files(io) and _is_local_file_protocol(path):
        local = Path(get_filesystem(path)._strip_protocol(str(path)))
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if (mapped := read_whole(local, weights_only=weights_only)) is not None:
            return mapped
    read: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only)
    nbytes = sum(t.nbytes for t in tree_iter(read) if isinstance(t, Tensor))
    _log.warning(
        "the checkpoint %s cannot be mapped: its tensors were read, %d bytes, and stay in this member's memory until "
        "training begins. Of a local file as torch.save writes it, a member reads its own parts only", path, nbytes,
    )  # fmt: skip
    return read


def load_model_state_dict(loaded: LoadedParts, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
    """Loads those parts of the model that this member owns; mismatches are reported as torch reports them."""
    loaded.load_model(checkpoint["state_dict"], strict=strict)


def load_optimizer_state_dict(
    loaded: LoadedParts, optimizers: Iterable[Optimizer], device: torch.device, checkpoint: Mapping[str, Any]
) -> None:
    """Loads the optimizers' state of those parameters that this member owns."""
    loaded.load_optimizers(
        optimizers, checkpoint["optimizer_states"], lambda optimizer: _optimizer_to_device(optimizer, device)
    )
