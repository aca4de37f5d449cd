"""Writes checkpoint files, with the additional state from which a job resumes.

A checkpoint says of which committed step it is: the number and the hash of the header (protocol.md 4, 4a). The data's
ledger is in it as part of the training loader's state. That lies in our part of the file and not where Lightning puts
it: with another strategy the loader has no state, and Lightning refuses a checkpoint that brings one.
`replication/saving.py` tells how members write a file together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.strategies import Strategy

from chaos_lightning.data.steps import MARK
from chaos_lightning.member.participation import Footing
from chaos_lightning.replication.saving import put_in_place, save_for_all, saved_nbytes
from chaos_lightning.strategies.session import FitSession

KEY = "chaos_lightning"
LOADERS = "combined_loader"
"""Key of the states of training loaders in a checkpoint of Lightning."""
PROGRESS = "epoch_loop.batch_progress"
"""Key of the count of an epoch's batches in a checkpoint of Lightning."""


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of fit's loop in a checkpoint; an empty one if the checkpoint holds weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def with_loaders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint with the loader's state moved from our own key to the one where Lightning looks for it."""
    if LOADERS in (ours := checkpoint.get(KEY, {})):
        _fit_loop(checkpoint)[LOADERS] = ours.pop(LOADERS)
    return checkpoint


class PartsIO(CheckpointIO):
    """Base class of a checkpoint plugin that also writes parts owned by other members (pipeline_files.py).

    Attributes:
        is_file: Whether the plugin writes one local file, as `torch.save` does.
        nbytes: Size of the last file that was laid out, in bytes.
    """

    is_file = False
    nbytes = 0


def convert_position(checkpoint: dict[str, Any], micro_batches: int, accumulate: int = 1) -> dict[str, Any]:
    """Converts a checkpoint's position in the epoch to the unit that this fit's loop counts: micro-batches or optimizer
    steps.

    The loop of a job with pipelines counts optimizer steps. Others, plain Lightning too, count micro-batches, of which
    a step accumulates several. A file of a job with pipelines says so in its loader's state. Which samples are used
    does not change: the ledger counts positions. Micro-batches that were accumulated for a step that did not take place
    count no more, since their gradient is lost.

    Args:
        checkpoint: Checkpoint as it was read, with the loader's state in place; changed.
        micro_batches: Micro-batches of a step of this job's pipelines; 0 if it has no pipelines.
        accumulate: Micro-batches of a step of a job without pipelines.

    Returns:
        The checkpoint.
    """
    loaders = [state for state in _fit_loop(checkpoint).get(LOADERS, ()) if isinstance(state, dict)]
    counts_steps = any(MARK in state for state in loaders)
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    if counts_steps == bool(micro_batches) or PROGRESS not in loops:
        return checkpoint
    each = 1 if micro_batches else accumulate
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for scope in ("current", "total"):
        counts = loops[PROGRESS][scope]
        moved = steps[scope]["completed"] * each - counts["ready"]
        counts.update({name: number + moved for name, number in counts.items()})
    for state in loaders:
        if micro_batches_then := state.pop(MARK, 0):  # a loader of steps converts what it is given by itself
            state["yielded"] = state["yielded"] // micro_batches_then * accumulate
    return checkpoint


def save(
    strategy: Strategy,
    session: FitSession | None,
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any,
    io: CheckpointIO | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Saves a checkpoint of a step that can no longer be undone: the writer writes it, and all members learn whether
    that succeeded.

    Args:
        strategy: Strategy, which knows the writer and has the plugin that writes.
        session: Part of this fit in the job; None outside of fit.
        checkpoint: Content that Lightning wants to be written.
        filepath: Path of the file.
        storage_options: Options of the plugin.
        io: Plugin that writes the file instead of the strategy's.
        begin: Function that is called at all members before each attempt to write.

    Raises:
        StateError: Another member was to write the file, and could not.
    """
    path, plugin = str(filepath), io or strategy.checkpoint_io

    def is_writer() -> bool:
        begin()
        return bool(strategy.is_global_zero)

    save_for_all(
        path,
        lambda: plugin.nbytes if isinstance(plugin, PartsIO) else saved_nbytes(checkpoint),
        session.config.name if session is not None else "",
        is_writer=is_writer,
        write=lambda: write(plugin, session, checkpoint, filepath, storage_options),
        exchange=session.collectives.exchange if session is not None else lambda name, value: None,
        stays_unsaved=lambda: session is not None and session.says_unsaved(path),
        writes_here=session is None or session.hooks.writes,
    )
    if session is not None and session.entered and session.member.footing not in (Footing.VOID, Footing.GONE):
        session.member.saved()


def write(
    io: CheckpointIO, session: FitSession | None, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
) -> None:
    """Writes a checkpoint file. The caller ensures that this member is the writer, and that the step can no longer
    be undone.
    """
    mark = "final"
    # A checkpoint that is written a second time has the loaders' states with ours already.
    ours = dict(checkpoint.get(KEY, {}))
    if LOADERS in (loop := _fit_loop(checkpoint)):
        ours[LOADERS] = loop.pop(LOADERS)
    if session is not None and session.entered:
        step, head = session.member.stepped
        mark = f"{step}-{head}"
        ours |= {"step": step, "head": head, "view": str(session.engine.header.next_view)}
        ours["checkpoints"] = session.member.checkpoints.at(head)
        session.engine.events.emit("checkpoint", path=str(filepath), step=step, head=head)
    if ours:
        checkpoint[KEY] = ours
    path = str(filepath)
    is_file = io.is_file if isinstance(io, PartsIO) else type(io) is TorchCheckpointIO
    if not is_file or not _is_local_file_protocol(path):
        io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        return
    put_in_place(
        Path(path), mark, lambda beside: io.save_checkpoint(checkpoint, beside, storage_options=storage_options)
    )
