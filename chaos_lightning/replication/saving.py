"""Saves checkpoints: one member writes the file, all learn whether that succeeded.

Theory of operation. A local file is written beside its place under a name with the hash of its step's header and then
moved, so that a reader never sees half a file and two writers (one of them fenced, without knowing it yet) never write
into the same one.

What cannot be written is everybody's error. If the writer alone failed, the next member would become the writer and
fail at the next checkpoint, and so on to the last one. Going on without the file is no way out either: who saves may
delete older files once it has returned. So members tell each other how it went, and all of them raise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from chaos_lightning.errors import ChaosError, StateError
from chaos_lightning.replication.parts import part_of, sweep

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def put_in_place(path: Path, mark: str, write: Callable[[str], None]) -> None:
    """Writes a file under a temporary name and then moves it to `path`.

    Args:
        path: Path of the file.
        mark: Text for the temporary name that identifies the step at which the file is written.
        write: Function that writes to the path that it is given.
    """
    sweep(path.parent)
    beside = str(part_of(path.with_name(f"{path.name}.{mark}")))
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)


def save_for_all(
    path: str,
    nbytes: Callable[[], int],
    name: str,
    *,
    is_writer: Callable[[], bool],
    write: Callable[[], None],
    exchange: Callable[[str, Any], list[Any] | None],
    stays_unsaved: Callable[[], bool],
    writes_here: bool = True,
) -> None:
    """Has one member write the checkpoint, and tells all members whether that succeeded.

    Args:
        path: Path of the checkpoint.
        nbytes: Function that returns the size of the file; called where there is no room for it.
        name: Name of this member.
        is_writer: Whether this member writes; asked at all members before each attempt: anew where a writer has died.
        write: Function that writes the checkpoint.
        exchange: Function that returns everybody's value under a name, in rank order; None if this member is not in the
            job.
        stays_unsaved: Asked where this member could not write: whether it is out of the job, where nobody waits for
            its file.
        writes_here: Whether a member of this job writes files; else there is nothing to learn.

    Raises:
        StateError: Another member was to write the file, and could not.
    """
    while True:  # until a writer has lived to tell: then who saves notes down a file that is there
        failed: Exception | None = None
        if tried := is_writer():
            try:
                write()
            except Exception as error:
                failed = _explained(error, nbytes, path)
        mine = (
            "" if failed is None else f"{name} could not write the checkpoint {path}: {type(failed).__name__}: {failed}"
        )
        answers = exchange("outcome of saving", [mine, tried, writes_here])
        said = next((words for words, *_ in answers or () if words), "")
        if said:
            # A member with this header knows that all hold the one before: none is left that would go on and try it
            # again.
            with contextlib.suppress(ChaosError):
                exchange("barrier after a checkpoint that failed", None)
        if failed is not None and not stays_unsaved():
            raise failed
        if failed is None and said:
            raise StateError(f"{said}. Training ends on all members")
        if answers is None or any(wrote or not writes for _, wrote, writes in answers):
            return


def saved_nbytes(checkpoint: Mapping[str, Any]) -> int:
    """Returns the size in bytes of the file that `torch.save` writes."""
    counter = _Counter()
    torch.save(checkpoint, counter)  # type: ignore[arg-type]
    return counter.nbytes


class _Counter:
    """File that counts the bytes that are written to it."""

    nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


def _explained(error: Exception, nbytes: Callable[[], int], path: str) -> Exception:
    """Returns the error itself, or one that states the space needed and free if the disk is full."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return error
    folder = os.path.dirname(os.path.abspath(path))
    free = "unknown"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(folder).free} bytes"
    more = OSError(
        error.errno,
        f"{os.strerror(error.errno)}: the checkpoint {path} needs {nbytes()} bytes, free in {folder}: {free}; "
        "make room (or raise the quota or the limit of a file's size) and resume from the last checkpoint",
    )
    more.__cause__ = error
    return more
