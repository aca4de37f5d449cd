"""Checkpoint files: what is added to them, and how they are written.

A checkpoint says of which committed step it is: the number and the hash of the header (protocol.md 4, 4a). The data's
ledger is in it by the training loader's state, which lies with ours and not where Lightning puts it: with another
strategy the loader has no state, and Lightning refuses a checkpoint that brings one. A local file is written beside its
place under a name with that hash and then moved, so that a reader never sees half a file and two writers (one of them
fenced, without knowing it yet) never write into the same one.

What cannot be written is everybody's error. If the writer alone failed, the next member would become the writer and
fail at the next checkpoint, and so on to the last one. Going on without the file is no way out either: ModelCheckpoint
deletes older files once `save_checkpoint` has returned. So members tell each other how it went, and all of them raise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.strategies import Strategy

from chaos_lightning.errors import ChaosError, StateError
from chaos_lightning.replication.parts import part_of, sweep
from chaos_lightning.strategies.session import FitSession

KEY = "chaos_lightning"
LOADERS = "combined_loader"
"""Where Lightning keeps the states of training loaders."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the loop of fit has put into a checkpoint; nothing, in one of weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def with_loaders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that was read, with the loader's state where Lightning looks for it."""
    if LOADERS in (ours := checkpoint.get(KEY, {})):
        _fit_loop(checkpoint)[LOADERS] = ours.pop(LOADERS)
    return checkpoint


class _Counter:
    """A file that counts what is written to it."""

    nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


def _explained(error: Exception, checkpoint: dict[str, Any], path: str) -> Exception:
    """The error itself, or one that says more where there is no room for the file."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return error
    counter = _Counter()
    torch.save(checkpoint, counter)  # type: ignore[arg-type]
    folder = os.path.dirname(os.path.abspath(path))
    free = "unknown"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(folder).free} bytes"
    more = OSError(
        error.errno,
        f"{os.strerror(error.errno)}: the checkpoint {path} needs {counter.nbytes} bytes, free in {folder}: {free}; "
        "make room (or raise the quota or the limit of a file's size) and resume from the last checkpoint",
    )
    more.__cause__ = error
    return more


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
    while True:  # until a writer has lived to tell: then callbacks note down a file that is there
        failed: Exception | None = None
        if writes := strategy.is_global_zero:
            try:
                write(strategy.checkpoint_io, session, checkpoint, filepath, storage_options)
            except Exception as error:
                failed = _explained(error, checkpoint, str(filepath))
        if session is None and failed is not None:
            raise failed
        if session is None or _agree(session, str(filepath), failed, tried=writes):
            return


def _agree(session: FitSession, path: str, error: Exception | None, *, tried: bool) -> bool:
    """All members learn how the writer fared, and raise if it failed; False if it died before it could tell.

    Where the writer is another cluster's there is nothing to learn.

    Args:
        session: In the job or out of it.
        path: Of the checkpoint.
        error: What kept this member from writing it.
        tried: This member is the writer.
    """
    collectives, name = session.collectives, session.config.name
    mine = "" if error is None else f"{name} could not write the checkpoint {path}: {type(error).__name__}: {error}"
    answers = collectives.exchange("outcome of saving", [mine, tried, session.writes])
    said = next((words for words, *_ in answers or () if words), "")
    if said:
        # Who holds this header knows that all hold the one before: nobody is left who would go on and try it again.
        with contextlib.suppress(ChaosError):
            collectives.barrier("after a checkpoint that failed")
    if error is not None and (session.void or session.gone):
        session.say_unsaved(path)
    elif error is not None:
        raise error
    elif said:
        raise StateError(f"{said}. Training ends on all members")
    return answers is None or any(wrote or not writes for _, wrote, writes in answers)


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
        session.note_checkpoint(str(filepath))
    if ours:
        checkpoint[KEY] = ours
    path = str(filepath)
    if type(io) is not TorchCheckpointIO or not _is_local_file_protocol(path):
        io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        return
    place = Path(path)
    sweep(place.parent)
    beside = str(part_of(place.with_name(f"{place.name}.{mark}")))
    try:
        io.save_checkpoint(checkpoint, beside, storage_options=storage_options)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)
