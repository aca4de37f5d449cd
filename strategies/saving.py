"""Checkpoint files: what is added to them, and how they are written.

A checkpoint says of which committed step it is: the number and the hash of the header (protocol.md 4, 4a). The data's
ledger is in it by the training loader's state, which lies with ours and not where Lightning puts it: with another
strategy the loader has no state, and Lightning refuses a checkpoint that brings one. How members write a file together
is told in `replication/saving.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.strategies import Strategy

from chaos_lightning.replication.saving import put_in_place, save_for_all
from chaos_lightning.strategies.session import FitSession

KEY = "chaos_lightning"
LOADERS = "combined_loader"
"""Where Lightning keeps the states of training loaders."""


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the loop of fit has put into a checkpoint; nothing, in one of weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def with_loaders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that was read, with the loader's state where Lightning looks for it."""
    if LOADERS in (ours := checkpoint.get(KEY, {})):
        _fit_loop(checkpoint)[LOADERS] = ours.pop(LOADERS)
    return checkpoint


def save(
    strategy: Strategy, session: FitSession | None, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
) -> None:
    """The writer writes a checkpoint of a step that is stable, and all members learn how it fared.

    Args:
        strategy: Says who the writer is, and has the plugin that writes.
        session: This fit's part in the job; None outside of fit.
        checkpoint: What Lightning wants to be written.
        filepath: Where to.
        storage_options: For the plugin.

    Raises:
        StateError: Another member was to write the file, and could not.
    """
    path = str(filepath)
    save_for_all(
        path,
        checkpoint,
        session.config.name if session is not None else "",
        is_writer=lambda: strategy.is_global_zero,
        write=lambda: write(strategy.checkpoint_io, session, checkpoint, filepath, storage_options),
        exchange=session.collectives.exchange if session is not None else lambda name, value: None,
        stays_unsaved=lambda: session is not None and session.says_unsaved(path),
        writes_here=session is None or session.writes,
    )
    if session is not None and session.entered and not (session.void or session.gone):
        session.checkpoints.heads = session.checkpoints.at(session.stepped[1])


def write(
    io: CheckpointIO, session: FitSession | None, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
) -> None:
    """Writes a file; the caller has made sure that its step is stable and that this member is the writer."""
    mark = "final"
    # What is written a second time has the loaders' states with ours already.
    ours = dict(checkpoint.get(KEY, {}))
    if LOADERS in (loop := _fit_loop(checkpoint)):
        ours[LOADERS] = loop.pop(LOADERS)
    if session is not None and session.entered:
        step, head = session.stepped
        mark = f"{step}-{head}"
        ours |= {"step": step, "head": head, "view": str(session.engine.header.next_view)}
        ours["checkpoints"] = session.checkpoints.at(head)
        session.note_checkpoint(str(filepath))
    if ours:
        checkpoint[KEY] = ours
    path = str(filepath)
    if type(io) is not TorchCheckpointIO or not _is_local_file_protocol(path):
        io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        return
    put_in_place(
        Path(path), mark, lambda beside: io.save_checkpoint(checkpoint, beside, storage_options=storage_options)
    )
