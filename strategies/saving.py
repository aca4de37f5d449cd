"""Checkpoint files: what is added to them, and how they are written.

A checkpoint says of which committed step it is: the number and the hash of the header (PROTOCOL.md 4, 4a). The data's
ledger is in it by the training loader's state. A local file is written beside its place under a name with that hash
and then moved, so that a reader never sees half a file and two writers (one of them fenced, without knowing it yet)
never write into the same one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol

if TYPE_CHECKING:
    from chaos_lightning.strategies.strategy import ChaosStrategy

KEY = "chaos_lightning"


def save(strategy: ChaosStrategy, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
    """Writes a checkpoint; the caller has made sure that its step is stable and that this member is the writer."""
    session = strategy.session
    mark = "final"
    if session is not None and session.entered:
        step, head = session.stepped
        mark = f"{step}-{head}"
        checkpoint[KEY] = {"step": step, "head": head, "view": str(session.engine.header.next_view)}
        session.note_checkpoint(str(filepath))
    path = str(filepath)
    io = strategy.checkpoint_io
    if type(io) is not TorchCheckpointIO or not _is_local_file_protocol(path):
        io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        return
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{mark}.{os.getpid()}.part")
    try:
        io.save_checkpoint(checkpoint, beside, storage_options=storage_options)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)
