"""Divides validation during fit among members: every batch is evaluated once, and batches of a dead member again.

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

The steps of validation are divided. Of loaders that follow each other, or of one, a step is a batch; each loader is
divided by itself, with a meeting at its end. Where a CombinedLoader draws from several loaders at once ("max_size",
"min_size", "max_size_cycle"), a step is one of its combined batches, so that each batch has the partners that it has on
one machine; if one of the loaders cannot be assigned, none is.

Lightning asks for a length to know the last batch. Here the last batch is followed by the meeting, which must not come
before that batch has been evaluated; so the length that Lightning's fetcher gets is one more, and ours ends the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from chaos_lightning.data.feeds import alike
from chaos_lightning.data.workers import tie_workers
from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies import results
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.data import themselves
from chaos_lightning.strategies.lightning_types import Trainer

_log = logging.getLogger("chaos_lightning")


def whole(loader: Any) -> Any:
    """Returns a loader over all samples in place of one with a DistributedSampler. That sampler takes its part by a
    rank and world size that change; the strategy divides validation itself.
    """
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        every = SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # which that sampler asked for its length
        return _update_dataloader(loader, every, mode=RunningStage.VALIDATING)
    return loader


def unsharded(loader: Any) -> Any:
    """Returns a loader over all samples for validate, test and predict, where each process evaluates everything.

    Raises:
        UnsupportedError: The loader was cut by a rank and a world size in a way that cannot be undone.
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
    """Returns whether batches of this loader can be divided: all members find the same batch under a number, and can
    draw some without the rest.
    """
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) is SequentialSampler
        and not is_param_in_hook_signature(trainer.lightning_module.validation_step, "dataloader_iter", explicit=True)
    )


class Evaluation:
    """Divides the validation of one fit: knows the members, and the pass that is divided at the moment.

    Args:
        trainer: Trainer of this fit.
        collectives: Collectives by which members meet.
        members: Returns the ids of all members in rank order; none outside the job.
        me: Returns this member's id.

    Attributes:
        assigning: Pass that is being divided at the moment, if any.
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
        self.assigning: DividedPass | None = None

    def step(self, run: Callable[[], Any]) -> Any:
        """Runs the user's validation step. If its loader is divided, values that it logged per step are exchanged
        afterwards.
        """
        if self.assigning is None:
            return run()
        with self.collectives.inside("validation_step"):
            output = run()
        self.collectives.leave_step(self.loop._results, always=self.assigning.may_differ)
        return output

    @property
    def loop(self) -> _EvaluationLoop:
        """The validation loop that Lightning's Trainer runs within fit."""
        return self.trainer.fit_loop.epoch_loop.val_loop

    def divides(self, steps: int) -> bool:
        """Returns whether a validation of `steps` steps would be divided among the present members."""
        members = self.members()
        return len(members) > 1 and steps >= len(members)

    def shares(self, steps: int) -> dict[str, list[int]]:
        """Returns the numbers of the validation steps that each member evaluates."""
        members = self.members()
        return {m: list(range(place, steps, len(members))) for place, m in enumerate(members)}

    def combined_steps(self) -> int:
        """Returns how many combined batches of several loaders are divided among members; 0 if they are not divided."""
        combined = self.loop._combined_loader
        if combined is None or combined._mode == "sequential":
            return 0
        totals = [loader.total if isinstance(loader, EvalLoader) else 0 for loader in combined.flattened]
        steps = (min if combined._mode == "min_size" else max)(totals) if all(totals) else 0
        return steps if self.divides(steps) else 0

    def own(self, steps: int) -> int:
        """Returns how many of `steps` validation steps this member evaluates."""
        return len(self.shares(steps)[self.me()]) if self.divides(steps) else steps


class DividedPass:
    """One pass over validation steps that are divided among members.

    Args:
        evaluation: Evaluation of this fit.
        steps: Steps of the whole job.
        draw: Fetches the batches of these steps of this member's, in order.
        extend: Tells Lightning of so many more steps.

    Attributes:
        steps: Steps of this member so far.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        steps: int,
        draw: Callable[[Sequence[int]], None],
        extend: Callable[[int], None],
    ) -> None:
        self._evaluation = evaluation
        self._draw, self._extend = draw, extend
        self._members = evaluation.members()
        self._share = evaluation.shares(steps)
        self._left = self._rounds = self._uneven = 0
        self.steps = 0
        self._deal(self._share)

    def _deal(self, share: Mapping[str, Sequence[int]]) -> None:
        self._rounds = max(len(numbers) for numbers in share.values())
        # Number of the last steps that some members do not have.
        self._uneven = self._rounds - min(len(numbers) for numbers in share.values())
        mine = share[self._evaluation.me()]
        self._draw(mine)
        self._left = len(mine)

    @property
    def may_differ(self) -> bool:
        """Whether other members may log values in this step although this one logs none: it is the first step, or
        some members have no step now.
        """
        return self.steps == 1 or self._rounds < self._uneven

    def advance(self) -> bool:
        """Moves on to this member's next step; returns False if there is none. After the last one all members meet."""
        while not self._left:
            if not self._meet():
                return False
        self.steps += 1
        self._left -= 1
        self._rounds -= 1
        return True

    def _meet(self) -> bool:
        """Meets the other members after this member's last step; returns True if there are steps of dead members to
        do.
        """
        evaluation, collectives = self._evaluation, self._evaluation.collectives
        collection = evaluation.loop._results
        while self._rounds > 0:
            # Others have one step more, and may reduce what they log in it.
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
        trainer = evaluation.trainer
        results.agree(trainer, collection, collectives.exchange, "validation", trainer.strategy.reduce)
        results.reduce_all(collection)
        return False

    def _assign_again(self, lost: Sequence[str]) -> None:
        """Divides the steps of members that died among the others."""
        numbers = sorted(number for member in lost for number in self._share[member])
        self._members = tuple(m for m in self._members if m not in lost)
        _log.warning("%s died during validation; %d batches are evaluated again", ", ".join(lost), len(numbers))
        again = {m: numbers[place :: len(self._members)] for place, m in enumerate(self._members)}
        for member, share in again.items():
            self._share[member] += share
        for member in lost:
            del self._share[member]
        self._deal(again)
        self._extend(self._left)


def _drawn(loader: DataLoader[Any], numbers: Sequence[int]) -> Iterator[Any]:
    """Returns an iterator over those batches of a loader that have these numbers, in order."""
    assert loader.batch_sampler is not None
    every = list(loader.batch_sampler)
    batches = [every[number] for number in numbers]
    return iter(tie_workers(DataLoader(loader.dataset, batch_sampler=batches, **alike(loader))))


class EvalLoader:
    """Loader that Lightning iterates over in place of the user's validation loader.

    Args:
        loader: Loader for which `can_be_assigned` holds.
        evaluation: Evaluation of this fit.
    """

    def __init__(self, loader: DataLoader[Any], evaluation: Evaluation) -> None:
        self.loader = loader
        self._evaluation = evaluation
        self._division: DividedPass | None = None
        self._batches: Iterator[Any] = iter(())

    # ------------------------------------------------------------------ how much

    @property
    def total(self) -> int:
        """Number of batches that the whole job evaluates, within `limit_val_batches`."""
        limit = self._evaluation.trainer.limit_val_batches
        return int(_parse_num_batches(RunningStage.VALIDATING, len(self.loader), limit))

    @property
    def assigned(self) -> bool:
        """Whether the batches of this loader alone (not combined with other loaders) are divided among members."""
        combined = self._evaluation.loop._combined_loader
        return (combined is None or combined._mode == "sequential") and self._evaluation.divides(self.total)

    def own(self) -> int:
        """Returns how many batches of this loader this member evaluates."""
        return self._evaluation.own(self.total) if self.assigned else self.total

    def __len__(self) -> int:
        return self.own() + 1 if self.assigned else len(self.loader)

    # ------------------------------------------------------------------ a pass

    def __iter__(self) -> Iterator[Any]:
        evaluation = self._evaluation
        evaluation.assigning = self._division = None
        if not self.assigned:
            return iter(() if evaluation.combined_steps() else self.loader)
        evaluation.assigning = self._division = DividedPass(evaluation, self.total, self._draw, self._extend)
        return self

    def __next__(self) -> Any:
        if self._division is None or not self._division.advance():
            raise StopIteration
        return next(self._batches)

    def _draw(self, numbers: Sequence[int]) -> None:
        self._batches = _drawn(self.loader, numbers)

    def _extend(self, more: int) -> None:
        combined, fetcher = self._evaluation.loop._combined_loader, self._evaluation.loop._data_fetcher
        if combined is not None and combined._iterator is not None and fetcher is not None:
            assert combined._iterator.limits is not None
            assert fetcher.length is not None
            place = next(i for i, loader in enumerate(combined.flattened) if loader is self)
            combined._iterator.limits[place] += more
            fetcher.length += more

    def __reduce__(self) -> Any:
        """Makes pickle and copy return the user's own loader: a copy has no part in the job."""
        return themselves, (self.loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class CombinedSteps:
    """Iterator that yields this member's share of the combined batches of several loaders, in place of a
    CombinedLoader's own iterator.

    Args:
        combined: Loader of any mode but "sequential", over loaders that can all be assigned.
        evaluation: Evaluation of this fit.
    """

    def __init__(self, combined: CombinedLoader, evaluation: Evaluation) -> None:
        self.limits = combined.limits
        self._loaders = [loader.loader for loader in combined.flattened]
        self._cycles = combined._mode == "max_size_cycle"
        self._evaluation = evaluation
        self._batches: list[Iterator[Any]] = []
        self._steps: Iterator[int] = iter(())
        self._at = 0
        total = evaluation.combined_steps()
        self._length = evaluation.own(total) + 1
        self._division = evaluation.assigning = DividedPass(evaluation, total, self._draw, self._extend)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> CombinedSteps:
        return self

    def __next__(self) -> tuple[list[Any], int, int]:
        if not self._division.advance():
            raise StopIteration
        step = next(self._steps)
        drawn = [
            next(batches) if self._number(loader, step) is not None else None
            for loader, batches in zip(self._loaders, self._batches, strict=True)
        ]
        self._at += 1
        return drawn, self._at - 1, 0

    def _number(self, loader: DataLoader[Any], step: int) -> int | None:
        """Returns the number of the batch that a loader gives to a combined step; None if the loader is exhausted by
        then.
        """
        length = len(loader)
        return step % length if self._cycles else step if step < length else None

    def _draw(self, steps: Sequence[int]) -> None:
        self._steps = iter(steps)
        self._batches = [
            _drawn(loader, [number for step in steps if (number := self._number(loader, step)) is not None])
            for loader in self._loaders
        ]

    def _extend(self, more: int) -> None:
        self._length += more
        fetcher = self._evaluation.loop._data_fetcher
        if fetcher is not None and fetcher.length is not None:
            fetcher.length += more

    def reset(self) -> None:
        """Ends the pass. CombinedLoader calls it."""
        self._batches = []


def refit_limits(trainer: Trainer, evaluation: Evaluation) -> None:
    """Sets Lightning's batch limits to this member's share before a validation. Lightning counts batches only once,
    when loaders are made.
    """
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
    if steps := evaluation.combined_steps():
        combined._iterator = CombinedSteps(combined, evaluation)  # type: ignore[assignment]
        shown = [evaluation.own(steps)] * len(shown)
        limits = [own + 1 for own in shown]
    val_loop._max_batches = shown
    combined.limits = limits
    if combined._iterator is not None:
        combined._iterator.limits = limits
    fetcher = val_loop._data_fetcher
    if fetcher is not None and fetcher.length is not None:
        fetcher.length = len(combined)
