"""Computes the length of an epoch: an estimate before this member is in the job, the job's own number afterwards.

Theory of operation. A process that makes a schedule of `trainer.estimated_stepping_batches` asks for the loader's
length while it sets up, when nobody knows how many members there will be. All members that will ever be must find the
same number then, so it is counted for `min_nodes`. In the job the length is what the elastic loader foresees for the
present members, and it changes with them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, MultiplicativeLR, SequentialLR

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import batches_begun, epoch_of
from chaos_lightning.strategies.schedules import BySamples

_log = logging.getLogger("chaos_lightning")


class Lengths:
    """Lengths of epochs, in micro-batches per member.

    Args:
        trainer: Trainer in fit.
        min_nodes: `min_nodes` of the job.
        local: Whether each member has data of its own.
    """

    def __init__(self, trainer: Trainer, min_nodes: int, *, local: bool) -> None:
        self._trainer = trainer
        self._min_nodes = min_nodes
        self._local = local
        self._estimating = False
        self._estimated = 0
        """Micro-batches of an epoch as foreseen, if optimizers or schedulers were made by that number."""

    @property
    def _foreseen(self) -> int:
        """Estimated number of members before this one is in the job: min_nodes times the workers per node. All
        members compute the same.
        """
        return self._min_nodes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def total(self, elastic: JobLoader, *, entered: bool) -> float:
        """Returns the number of micro-batches of this epoch; inf while unknown, as when each member has data of its
        own.
        """
        if self._local:
            # Before the pass has begun, the loader still speaks of the one before.
            current = entered and elastic.epoch == epoch_of(self._trainer)
            over = current and elastic.epoch_spent()
            return batches_begun(self._trainer) if over else math.inf
        if not entered:
            # All members that will ever be must find the same number here.
            return elastic.foreseen(self._foreseen)
        return len(elastic)

    # ------------------------------------------------------------------ estimated_stepping_batches

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """Records the training lengths asked for within this context, where optimizers and schedulers are made: code
        that makes a training loader there does so for `trainer.estimated_stepping_batches`.
        """
        self._estimating = True
        try:
            yield
        finally:
            self._estimating = False

    def asked(self, total: float, *, follows: bool) -> None:
        """Records the length of a training loader that was made while optimizers and schedulers are made.

        Args:
            total: The length.
            follows: Whether it changes with the members.
        """
        if self._estimating and follows and not math.isinf(total):
            self._estimated = int(total)

    def words(self) -> dict[str, str]:
        """Returns the estimated number of members, for the fingerprint, if a schedule of the user's own was made by
        it: such schedules are equal only if all members estimated the same. Torch's schedules take their numbers
        from the donors' state.
        """
        kept = (LambdaLR, MultiplicativeLR, SequentialLR, ChainedScheduler)
        schedulers = [c.scheduler for c in self._trainer.lr_scheduler_configs]
        own = [s for s in schedulers if isinstance(s, kept) or not type(s).__module__.startswith("torch.optim.")]
        if not self._estimated or not [s for s in own if not isinstance(s, BySamples)]:
            return {}
        return {"estimated_stepping_batches": f"counted for {self._foreseen} members"}

    def check(self, members: int) -> None:
        """Warns once if the number of members differs from the estimate by which schedules were made."""
        foreseen = self._foreseen
        if not self._estimated or members == foreseen:
            return
        counted, self._estimated = self._estimated, 0
        _log.warning(
            "trainer.estimated_stepping_batches was read before this member was in the job, and counted with %d "
            "members (min_nodes=%d), that is %d batches an epoch; the job has %d members now. A schedule made of that "
            "number walks %s of its way while they are so many. BySamples goes by samples instead (docs/schedules.md)",
            foreseen, self._min_nodes, counted, members, f"{foreseen / members:.0%}",
        )  # fmt: skip
