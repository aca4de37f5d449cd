"""Validation during fit, divided among members: every batch is evaluated once, also if a member dies meanwhile.

Theory of operation. Validation sees constant membership but for deaths. When it begins, batch i of the loader goes to
member i mod W in rank order: the batches are those of one machine, nothing is padded or evaluated twice, and members'
numbers of batches differ by one at most. At the end all members meet; if one is missing, what it had evaluated died
with it, so its batches are divided again among the others, until everybody who is left has met. Before values are
computed, members agree on the keys that were logged, and each number logged per epoch is reduced over members, with
`sync_dist=True` or without: a value of a part of the validation set would send schedulers and early stopping different
ways on different members.

What cannot be assigned this way (iterables, shuffled loaders, subclasses of DataLoader, fewer batches than members) is
evaluated in full by every member, as is everything with `Trainer(use_distributed_sampler=False)`. A loader
with a DistributedSampler of the user's own asks to be divided; all of its data are then, with either setting.

Lightning asks for a length to know the last batch. Here the last batch is followed by the meeting, which must not come
before that batch has been evaluated; so the length that Lightning's fetcher gets is one more, and ours ends the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from chaos_lightning.data.feeds import alike
from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies import results
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.data import themselves
from chaos_lightning.strategies.lightning_types import Trainer

_log = logging.getLogger("chaos_lightning")


def whole(loader: Any) -> Any:
    """A loader over all samples in place of one whose DistributedSampler takes a part of them: that part was drawn by a
    rank and a world size that change, and dividing is what such a sampler is for."""
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        every = SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # which that sampler asked for its length
        return _update_dataloader(loader, every, mode=RunningStage.VALIDATING)
    return loader


def unsharded(loader: Any) -> Any:
    """For validate, test and predict, in which each process works alone: a loader over all samples.

    Raises:
        UnsupportedError: It was cut by a rank and a world size in a way that cannot be undone.
    """
    loader = whole(loader)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(inner, DistributedSampler) and inner.num_replicas > 1:
        raise UnsupportedError(
            "a loader of validate, test or predict uses DistributedSampler, which shards by rank, while each process "
            "works alone on it; give it a plain sampler"
        )
    return loader


def can_be_assigned(loader: Any, trainer: Trainer) -> bool:
    """Whether all members find the same batches at the same places, and one can draw some of them only."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) is SequentialSampler
        and not is_param_in_hook_signature(trainer.lightning_module.validation_step, "dataloader_iter", explicit=True)
    )


class Evaluation:
    """Who takes part in the validation of one fit, and what is being divided.

    Args:
        trainer: Whose fit this is.
        collectives: By which members meet.
        members: Ids of all members in rank order; none outside the job.
        me: This member's id.

    Attributes:
        assigning: The loader that is being divided at the moment.
    """

    def __init__(
        self,
        trainer: Trainer,
        collectives: Collectives,
        members: Callable[[], tuple[str, ...]],
        me: Callable[[], str],
    ) -> None:
        self.trainer = trainer
        self.collectives = collectives
        self.members = members
        self.me = me
        self.assigning: EvalLoader | None = None

    def step(self, run: Callable[[], Any]) -> Any:
        """The user's validation step; what it logged per step is exchanged after it, if this loader is divided."""
        if self.assigning is None:
            return run()
        with self.collectives.inside("validation_step"):
            output = run()
        collection = self.trainer.fit_loop.epoch_loop.val_loop._results
        self.collectives.leave_step(collection, always=self.assigning.may_differ)
        return output


class EvalLoader:
    """What Lightning iterates over instead of the user's validation loader.

    Args:
        loader: One for which `can_be_assigned`.
        evaluation: Of this fit.
    """

    def __init__(self, loader: DataLoader[Any], evaluation: Evaluation) -> None:
        self._loader = loader
        self._trainer = evaluation.trainer
        self._evaluation = evaluation
        self._members: tuple[str, ...] = ()
        self._share: dict[str, list[int]] = {}
        self._left = 0
        self._rounds = 0
        self._uneven = 0
        """How many of the last batches some members do not have."""
        self.steps = 0
        """Batches of this pass so far."""
        self._batches: Iterator[Any] = iter(())

    # ------------------------------------------------------------------ how much

    @property
    def total(self) -> int:
        """Batches that the job evaluates, `limit_val_batches` considered."""
        return int(_parse_num_batches(RunningStage.VALIDATING, len(self._loader), self._trainer.limit_val_batches))

    @property
    def assigned(self) -> bool:
        """Whether a validation that began now would be divided."""
        members = self._evaluation.members()
        return len(members) > 1 and self.total >= len(members)

    def own(self) -> int:
        """Batches of this member in a validation that began now."""
        return len(self._assignment()[self._evaluation.me()]) if self.assigned else self.total

    def __len__(self) -> int:
        return self.own() + 1 if self.assigned else len(self._loader)

    def _assignment(self) -> dict[str, list[int]]:
        members = self._evaluation.members()
        return {m: list(range(place, self.total, len(members))) for place, m in enumerate(members)}

    # ------------------------------------------------------------------ a pass

    def __iter__(self) -> Iterator[Any]:
        self.steps = 0
        self._evaluation.assigning = None
        if not self.assigned:
            return iter(self._loader)
        self._evaluation.assigning = self
        self._members, self._share = self._evaluation.members(), self._assignment()
        self._rounds = max(len(share) for share in self._share.values())
        self._uneven = self._rounds - min(len(share) for share in self._share.values())
        self._draw(self._share[self._evaluation.me()])
        return self

    def __next__(self) -> Any:
        if self._left:
            self.steps += 1
            self._left -= 1
            self._rounds -= 1
            return next(self._batches)
        while self._meet():
            if self._left:
                return next(self)
        raise StopIteration

    @property
    def may_differ(self) -> bool:
        """In this batch members cannot tell from their own log calls whether the others log anything: it is the first
        one, or some members have none."""
        return self.steps == 1 or self._rounds < self._uneven

    def _draw(self, wanted: Sequence[int]) -> None:
        """Fetches these batches, in order."""
        loader = self._loader
        assert loader.batch_sampler is not None
        every = list(loader.batch_sampler)
        batches = [every[number] for number in wanted]
        self._batches = iter(DataLoader(loader.dataset, batch_sampler=batches, **alike(loader)))
        self._left = len(wanted)

    def _meet(self) -> bool:
        """The end of this member's batches. Whether anybody has more of them."""
        collectives = self._evaluation.collectives
        collection = self._trainer.fit_loop.epoch_loop.val_loop._results
        while self._rounds > 0:
            # Others have one batch more, and may reduce what they log in it.
            self._rounds -= 1
            collectives.enter_step("validation_step")
            collectives.leave_step(collection, always=True)
        here = collectives.meet(f"end of validation ({len(self._members)} members)")
        if here is None:
            return False
        lost = [member for member in self._members if member not in here]
        if lost:
            self._assign_again(lost)
            return True
        reduce = self._trainer.strategy.reduce
        results.agree(self._trainer, collection, collectives.exchange, "validation", reduce)
        results.reduce_all(collection)
        return False

    def _assign_again(self, lost: Sequence[str]) -> None:
        """The dead's batches go to those who are left."""
        numbers = sorted(number for member in lost for number in self._share[member])
        self._members = tuple(m for m in self._members if m not in lost)
        _log.warning("%s died during validation; %d batches are evaluated again", ", ".join(lost), len(numbers))
        again = {m: numbers[place :: len(self._members)] for place, m in enumerate(self._members)}
        for member, share in again.items():
            self._share[member] += share
        for member in lost:
            del self._share[member]
        self._rounds = max(len(share) for share in again.values())
        self._uneven = self._rounds - min(len(share) for share in again.values())
        mine = again[self._evaluation.me()]
        self._draw(mine)
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        combined, fetcher = val_loop._combined_loader, val_loop._data_fetcher
        if combined is not None and combined._iterator is not None and fetcher is not None:
            assert combined._iterator.limits is not None
            assert fetcher.length is not None
            place = next(i for i, loader in enumerate(combined.flattened) if loader is self)
            combined._iterator.limits[place] += len(mine)
            fetcher.length += len(mine)

    def __reduce__(self) -> Any:
        """A copy is the user's loader: it has no part in the job."""
        return themselves, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def refit_limits(trainer: Trainer) -> None:
    """Before a validation of fit: limits follow the members. Lightning counts batches once, when loaders are made."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    combined: CombinedLoader | None = val_loop._combined_loader
    if combined is None or trainer.sanity_checking:
        return
    shown = list(val_loop._max_batches)
    limits: list[int | float] = list(shown)
    for place, loader in enumerate(combined.flattened):
        if isinstance(loader, EvalLoader):
            shown[place] = loader.own()
            limits[place] = loader.own() + 1 if loader.assigned else loader.total
    val_loop._max_batches = shown
    combined.limits = limits
    if combined._iterator is not None:
        combined._iterator.limits = limits
    fetcher = val_loop._data_fetcher
    if fetcher is not None and fetcher.length is not None:
        fetcher.length = len(combined)
