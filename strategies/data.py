"""Puts a loader between Lightning and the job: it yields batches, and lets the session act at the safe point before
each.

Theory of operation. No strategy hook lies between two steps, but Lightning fetches the next batch exactly there, when
all its counters are at rest. So `TrainLoader.__next__` first lets the session do what may only be done at rest
(join, let others in, join again after being fenced, stop after leaving) and then takes a micro-batch of the elastic
loader. Length and attributes are the elastic loader's and the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import UnsupportedError
from chaos_lightning.member.engine import Engine
from chaos_lightning.protocol.types import GENESIS, Header, View
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import epoch_of, stopped_within_epoch


def themselves(loader: Any) -> Any:
    """Returns the loader itself. Loaders that wrap a user's loader are pickled as a call of this, so a copy is the
    user's loader.
    """
    return loader


class EngineSource:
    """The job as the elastic loader sees it (`data.source.AssignmentSource`); works before there is an engine, too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.engine: Engine | None = None

    @property
    def header(self) -> Header:
        return self.engine.header if self.engine is not None else GENESIS

    @property
    def view(self) -> View | None:
        return self.engine.view if self.engine is not None else None

    @property
    def ruling_view(self) -> View | None:
        return self.engine.ruling_view if self.engine is not None else None

    @property
    def member_id(self) -> str:
        return self.engine.member_id if self.engine is not None else ""

    @property
    def name(self) -> str:
        return self._name


class Fed(Protocol):
    """The fit that a training loader feeds: the methods that the loader calls."""

    def safe_point(self) -> None:
        """Lets the fit act at the safe point before each batch; raises StopIteration if there are no more batches."""

    def begin_pass(self, epoch: int) -> None:
        """Notes that the loader begins an epoch."""

    def length(self) -> int:
        """Returns the number of micro-batches of this epoch, as far as it is known."""


class TrainLoader:
    """Loader that Lightning iterates over in place of the user's training loader.

    Args:
        elastic: Elastic loader, which assigns samples to members.
        trainer: Trainer of this fit.
        fit: Fit, which is asked before each batch.
    """

    def __init__(self, elastic: JobLoader, trainer: Trainer, fit: Fed) -> None:
        self.elastic = elastic
        self._trainer = trainer
        self._fit = fit
        self._batches: Iterator[Any] | None = None
        self._placed = False
        """Whether a checkpoint has told where the data stood."""

    def __iter__(self) -> TrainLoader:
        self._batches = None
        return self

    def __next__(self) -> Any:
        self._fit.safe_point()
        batch = next(self.begin())
        if batch is None:
            raise UnsupportedError(
                "the training loader's collate_fn gave None, and Lightning passes such a batch over, while the others "
                "wait for this member's part in the step. Leave such samples out of the data set, or return None from "
                "training_step"
            )
        return batch

    @property
    def under_way(self) -> bool:
        """Whether a pass over the data has begun that Lightning continues."""
        return self._batches is not None

    def begin(self) -> Iterator[Any]:
        """Begins a pass over the data for Lightning's present epoch, unless one is under way; returns its batches."""
        if self._batches is None:
            epoch = epoch_of(self._trainer)
            self.elastic.set_epoch(epoch)
            self._fit.begin_pass(epoch)
            self._batches = iter(self.elastic)
        return self._batches

    def __len__(self) -> int:
        return self._fit.length()

    def restart(self) -> None:
        """Ends the present pass: the member has taken over a state from another position in the data."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Returns which samples are used up, for checkpoints (protocol.md 27)."""
        return self.elastic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.elastic.load_state_dict(state)
        self._batches = None
        self._placed = True

    def warn_of_lost_place(self) -> None:
        """Warns before the first batch if training resumes within an epoch from a checkpoint without this loader's
        position.
        """
        if self._trainer.ckpt_path is not None and not self._placed and stopped_within_epoch(self._trainer):
            rank_zero_warn(
                "You're resuming from a checkpoint that ended before the epoch ended, and that was not written with "
                "chaos: it does not say which samples were used. The rest of this epoch trains on its first samples.",
                category=PossibleUserWarning,
            )

    def __reduce__(self) -> Any:
        """Makes pickle and copy return the user's own loader: a copy has no part in the job."""
        return themselves, (self.elastic.loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "elastic":
            raise AttributeError(name)
        loader = self.elastic.loader
        if name == "dataset" and isinstance(getattr(loader, "dataset", None), IterableDataset):
            # Lightning would warn about its length, which it does not need here.
            raise AttributeError("dataset")
        return getattr(loader, name)
