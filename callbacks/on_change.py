"""CheckpointOnChange: writes a checkpoint when, and only when, the members of the job change.

Theory of operation. A checkpoint is written by one member and is a matter of all: each calls `trainer.save_checkpoint`
after the same step. So all must decide alike, without asking each other. Each compares the members that the last step's
header names (protocol.md 10) with those that the step before named; all have the same headers. For those who have not
seen the step before, its members follow from how they came in: a founder compares with the founding view, and for a
member that came later, or came back, its own coming is the change. Views that only alter links or layers have the same
members and change nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.errors import ConfigurationError

log = logging.getLogger("chaos_lightning.callbacks")

FILENAME = "step-{step}-members-{members}"


class CheckpointOnChange(Checkpoint):
    """Callback that writes a checkpoint after the first step that follows a join, a leave or a death.

    Changes between two steps cause one checkpoint together. The members that the job begins with cause none.

    No member is stopped or restarted for it, but it is not free: the training goes on once the file is written, so a
    change costs all members the time that the writer needs. All members must have this callback. Their folders may
    differ; the writer's counts.

    Lightning takes it for a checkpoint callback, so the Trainer does not add a `ModelCheckpoint` by itself. For
    checkpoints at intervals give one, and list it first: `ckpt_path="best"` asks the first checkpoint callback.

    Args:
        folder: Folder of the files; "": `checkpoints` in the Trainer's `default_root_dir`.
        filename: Name of a file without its ending; may have {step} and {members}, the number of members, in it.
        keep: Number of files to keep, the newest ones; 0: all. The file from which the job was resumed stays.
    """

    best_model_path = ""
    """Path that Lightning asks for at `ckpt_path="best"`; empty, since these files are not judged by any metric."""

    def __init__(self, folder: str = "", filename: str = FILENAME, keep: int = 1) -> None:
        try:
            name = filename.format(step=0, members=1)
            flaw = "" if name and name == os.path.basename(name) else "empty" if not name else "with a folder"
        except (LookupError, ValueError, AttributeError) as error:
            flaw = f"{type(error).__name__}: {error}"
        if flaw:
            raise ConfigurationError(
                f"CheckpointOnChange: filename {filename!r} ({flaw}); expected a name without a folder and with no "
                f"other fields than {{step}} and {{members}}, such as {FILENAME!r}"
            )
        if keep < 0:
            raise ConfigurationError(f"CheckpointOnChange: keep {keep}; expected 0 (all files) or more")
        self.folder = folder
        self.filename = filename
        self.keep = keep
        self._files: list[str] = []
        """Names of the files that are kept, the oldest first."""
        self._me = ""
        """Id under which this member is in the job; another one each time that it comes in."""
        self._members: tuple[str, ...] = ()
        """Members that the last step's header named."""
        self._step = 0
        """Number of steps that the job had then."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._me = ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = engine_of(trainer)
        if engine is not None and engine.member_id != self._me:
            self._me, self._members, self._step = engine.member_id, engine.founders, engine.header.step
        elif engine is None and not self._me:
            self._me = "nobody"
            log.warning(
                "CheckpointOnChange: %s has no members that could change, so this callback writes nothing; use it with "
                "strategy='chaos' or 'chaos_pipeline', and ModelCheckpoint with others",
                type(trainer.strategy).__name__,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = engine_of(trainer)
        if engine is None or engine.out or engine.header.step == self._step:
            return  # without members, of one that has left, or within an accumulation
        # A step was committed since this member came in, and its header names a view that this member is in.
        assert engine.ruling_view is not None
        before, self._members, self._step = self._members, engine.ruling_view.ids(), engine.header.step
        reason = _change(before, self._members)
        if reason and not getattr(trainer, "fast_dev_run", False):
            self._save(trainer, reason)

    def _save(self, trainer: Trainer, reason: str) -> None:
        """Writes a checkpoint, together with all members, and then removes files that are too many."""
        folder = self.folder or os.path.join(trainer.default_root_dir, "checkpoints")
        name = self.filename.format(step=trainer.global_step, members=len(self._members)) + ".ckpt"
        self._files = [*(file for file in self._files if file != name), name]  # first: the checkpoint has it, too
        path = os.path.join(folder, name)
        if trainer.is_global_zero:
            log.info("CheckpointOnChange: writes %s, because %s", path, reason)
        trainer.save_checkpoint(path)
        surplus = self._files[: -self.keep] if self.keep else []
        self._files = self._files[len(surplus) :]
        resumed = os.path.abspath(trainer.ckpt_path) if trainer.ckpt_path else ""
        for path in (os.path.join(folder, file) for file in surplus):
            if os.path.abspath(path) != resumed:  # members that come later may be started with it
                trainer.strategy.remove_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of the files, for the member that writes and removes them next."""
        return {"files": list(self._files)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._files = list(state_dict["files"])


def _change(before: Sequence[str], now: Sequence[str]) -> str:
    """Returns how the members have changed, in words; "" if they are the same."""
    came, gone = (sorted(set(a) - set(b)) for a, b in ((now, before), (before, now)))
    return "; ".join(f"{', '.join(who)} {verb}" for who, verb in ((came, "joined"), (gone, "left or died")) if who)
