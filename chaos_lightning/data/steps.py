"""Loads data for a job with pipelines: the numbered micro-batches of one optimizer step at a time (protocol.md P2).

Theory of operation. Members of such a job share a step's micro-batches by layers. Header s alone says which positions
the M micro-batches of step s+1 have: those that one process of plain Lightning would take with
`accumulate_grad_batches=M`. So `StepLoader` has an `ElasticLoader` assign them that is shown a view of one member
(`_OneOfAll`), and all members find the same positions, also in a rerun and after any change of members. Nothing is
fetched before it is asked for, and each member asks only for what its units need.

How batches are counted. One batch of the training loop is one step: `len`, `limit_train_batches`,
`val_check_interval` and Lightning's batch counters count steps, and Lightning's `accumulate_grad_batches` is 1. A state
counts all micro-batches of a step, and says how many these are, so a file that has one tells who wrote it. When a state
of another strategy is loaded, its steps are counted on; `convert_position` in `strategies/saving.py` does that to the
counters of Lightning's loops.

A step's positions are spent by those that run its first layers: `StepBatch.spent(j)`. What was committed the loader
learns from the next header. With drop_last a rest that makes no whole micro-batch is spent with the last one that is
whole, and an epoch with no other rest is over.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from chaos_lightning.data.accumulations import Part
from chaos_lightning.data.feeds import StepFeed, declared_batch
from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.pieces import Share, SharePiece
from chaos_lightning.data.source import AssignmentSource, MicroBatch, Stats
from chaos_lightning.errors import ConfigurationError, StateError, UnsupportedError
from chaos_lightning.planning import assignment
from chaos_lightning.planning.batch import BatchRule, read_setting
from chaos_lightning.protocol.spans import normalise, subtract
from chaos_lightning.protocol.types import Header, Ledger, Span, Spent, View

MARK = "micro_batches"
"""Key in the state of a loader whose batches are steps; its value is the number of a step's micro-batches."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Micro-batches that this member needs of each step, by their numbers."""

    numbers: tuple[int, ...] = ()

    def parts(self, positions: tuple[Part, ...]) -> tuple[Part, ...]:
        """Returns the positions that are needed of a step whose micro-batches have these."""
        return tuple(positions[j] for j in self.numbers)

    def with_one(self, number: int) -> _Numbers:
        return self if number in self.numbers else _Numbers((*self.numbers, number))


class StepBatch:
    """Micro-batches of one optimizer step, numbered from 0.

    It is no dataclass and no collection, so Lightning passes it on as it is.

    Attributes:
        epoch: Pass over the data.
        index: Number of the step in the epoch.
        micro_batches: Micro-batches of a step.
        positions: Positions of each micro-batch in the epoch's order.
        empty: Numbers of micro-batches without samples; only at the end of an epoch.
        samples: Samples of the step.
        first: Always True: a batch is a whole step.
        last: Always True, as `first`.
        idle: Always False.
    """

    first = last = True
    idle = False

    def __init__(self, loader: StepLoader, index: int, parts: list[MicroBatch], spends: tuple[Spent, ...]) -> None:
        self._loader, self._weights = loader, [part.samples for part in parts]
        self.epoch, self._stream, self.index = parts[0].epoch, parts[0].stream, index
        self.positions = tuple(part.spans for part in parts)
        self._dropped = subtract(chain.from_iterable(entry.spans for entry in spends), normalise(self.spans))
        self.micro_batches, self.samples = len(parts), sum(self._weights)
        self.empty = frozenset(j for j, spans in enumerate(self.positions) if not spans)
        self._kept: dict[Part, Any] = {}
        """Copies of micro-batches that were fetched, by their positions."""
        self._promised: set[Part] = set()
        """Positions of what the feed will give."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Positions of all of the step's micro-batches."""
        return tuple(chain.from_iterable(self.positions))

    def weight(self, j: int) -> float:
        """Returns the number of samples in micro-batch `j`."""
        return float(self._weights[self._known(j)])

    def spent(self, j: int) -> tuple[Spent, ...]:
        """Returns the positions to be named as spent by the member that runs the first layers of micro-batch `j`."""
        last = max(set(range(self.micro_batches)) - self.empty, default=-1)
        spans = normalise((*self.positions[self._known(j)], *(self._dropped if j == last else ())))
        return (Spent(self._stream, self.epoch, spans),) if spans else ()

    def expect(self, numbers: Iterable[int]) -> None:
        """Announces which micro-batches this member will ask for in this and later steps, so that the user's workers
        prefetch them.

        Args:
            numbers: Micro-batches that this member will ask for, in the order in which it needs them. Empty ones, and
                those that it has asked for already, are passed over.
        """
        self._loader._expect(self, _Numbers(tuple(dict.fromkeys(map(self._known, numbers)))))

    def expect_share(self, share: Share) -> None:
        """Announces that this member will ask for its share of this and later steps, as `expect` does for numbers."""
        self._loader._expect(self, share)

    def piece(self, piece: SharePiece, share: Share) -> Any:
        """Returns the samples of a piece of this member's share; one that is asked for again is fetched again.

        Raises:
            StateError: The step is over.
        """
        return self._loader._fetch(self, piece.spans, share)

    def spent_by(self, share: Share) -> tuple[Spent, ...]:
        """Returns the positions to be named as spent by the member with this share: its own, and, where it has the
        step's last unit, those that the epoch drops.
        """
        found = list(chain.from_iterable(share.parts(self.positions)))
        if found and found[-1][1] == self.spans[-1][1]:
            found += self._dropped
        return (Spent(self._stream, self.epoch, normalise(found)),) if found else ()

    def batch(self, j: int) -> Any:
        """Returns micro-batch `j` as it was fetched; may be called repeatedly until the step is over.

        Each call gives an object of its own, so a training step may change its batch: a stage that runs later, or again
        after a recovery, gets what was fetched. A batch that cannot be copied is fetched again.

        Raises:
            ConfigurationError: The micro-batch has no samples.
            StateError: The step is over.
        """
        if self._known(j) in self.empty:
            raise ConfigurationError(f"micro-batch {j} of step {self.index} has no samples, so it has no units")
        spans = self.positions[j]
        if spans in self._kept:
            return copy.deepcopy(self._kept[spans])
        wanted = self._loader._wanted
        data = self._loader._fetch(self, spans, (wanted if isinstance(wanted, _Numbers) else _Numbers()).with_one(j))
        with contextlib.suppress(Exception):  # whatever a user's batch class raises
            self._kept[spans] = copy.deepcopy(data)
        return data

    def _known(self, j: int) -> int:
        if not 0 <= j < self.micro_batches:
            raise ConfigurationError(f"micro-batch {j} was asked for; a step has numbers 0 to {self.micro_batches - 1}")
        return j


class _OneOfAll:
    """Facts about the job as if one process trained all micro-batches of each step."""

    def __init__(self, source: AssignmentSource, loader: StepLoader) -> None:
        self._source, self._loader = source, loader

    @property
    def header(self) -> Header:
        return self._source.header

    @property
    def view(self) -> View | None:
        return self._source.view

    @property
    def ruling_view(self) -> View | None:
        loader = self._loader
        return assignment.step_view(loader.micro_batches, loader.quota, self.header.next_view, self.member_id)

    @property
    def member_id(self) -> str:
        return self._source.member_id

    @property
    def name(self) -> str:
        return self._source.name


class _StepPass:
    """Iterator over one epoch."""

    def __init__(self, next_step: Callable[[Iterator[None]], StepBatch], micro_batches: Iterator[None]) -> None:
        self._next_step, self._micro_batches = next_step, micro_batches

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        return self._next_step(self._micro_batches)


class StepLoader:
    """Loader that yields one optimizer step at a time, for a job with pipelines.

    Iterating yields one `StepBatch` for each step. The next one is asked for when the header of the step is there.

    Args:
        loader: The user's own: a torch DataLoader over a map-style data set.
        mode: "shared"; data of each member's own are refused.
        seed: Seed of the order of every epoch, and of random augmentation; equal on all members.
        source: The job.
        micro_batches: Micro-batches of a step; equal on all members.
        micro_batch: Samples of a micro-batch; 0: the loader's batch size.
        as_lightning: See `Orders`.
        least: Fewest samples that the model trains on at once; equal on all members.

    Raises:
        UnsupportedError: The data have no positions that all members could share.

    Attributes:
        loader: The user's loader.
        micro_batches: Micro-batches of a step.
        stats: Counters.
        current: The present step; None before the first one of a pass.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        mode: Literal["shared", "local"] = "shared",
        seed: int,
        source: AssignmentSource,
        micro_batches: int,
        micro_batch: int = 0,
        as_lightning: bool = False,
        least: int = 1,
    ) -> None:
        if micro_batches < 1:
            raise ConfigurationError(f"micro_batches={micro_batches}; expected at least 1")
        what = "a batch of fixed size" if micro_batch else "pipelines"
        self.loader, self.micro_batches = _positioned(loader, mode, what), micro_batches
        self._micro_batch = micro_batch
        self._seed, self._least = seed, least
        self._assigning = ElasticLoader(
            loader,
            mode="shared",
            seed=seed,
            source=_OneOfAll(source, self),
            as_lightning=as_lightning,
            least=least,
            unfetched=True,
        )
        self.stats = self._assigning.stats
        self.current: StepBatch | None = None
        self._wanted: _Numbers | Share = _Numbers()
        """Parts of each step that this member asks for."""
        self._resync = True

    def __iter__(self) -> Iterator[StepBatch]:
        """Begins a pass over one epoch; does nothing until the first step is requested."""
        return _StepPass(self._next, iter(self._assigning))

    def __len__(self) -> int:
        """Returns the number of steps in this pass, yielded and to come; it does not depend on the members."""
        return len(self._assigning) // self.micro_batches

    def foreseen(self, members: int) -> int:
        """Returns the number of steps in a pass, before the job is joined; it does not depend on the members."""
        return len(self)

    def sample(self, j: int = 0) -> Any:
        """Returns micro-batch `j` of the present epoch's first step, as an example for inspecting the model.

        It is fetched as later ones are, in the user's workers if there are any. Nothing advances, and no generator of
        this process moves.

        Raises:
            ConfigurationError: The data are too short for it.
        """
        units, epoch = self._assigning.units, self.epoch
        first = assignment.assign_micro_batches(
            Ledger(),
            micro_batches=self.micro_batches,
            quota=self.quota,
            epoch=epoch,
            length=units.length(epoch),
            drop_last=units.drop_last,
            least=self._least if units.unit == "sample" else 1,
        )
        if not 0 <= j < self.micro_batches or not first.micro_batches[j]:
            raise ConfigurationError(
                f"micro-batch {j} of an epoch's first step has no samples: the epoch has {units.length(epoch)} "
                f"{units.unit} positions, a micro-batch {self.quota}, a step {self.micro_batches} micro-batches"
            )
        feed = StepFeed(self.loader, units, seed=self._seed, stats=Stats())
        feed.open("sample")
        tag = (epoch, first.micro_batches[j])
        try:
            feed.expect(iter([(tag,)]))
            return feed.fetch(tag)
        finally:
            feed.close()

    def stand_in(self) -> Any:
        """Returns a batch for a member that has no samples of a step, made of the epoch's first ones."""
        return self._assigning.feed.dummy(self.epoch)

    @property
    def uncommitted(self) -> int:
        """Number of steps that were handed out but are not committed yet: 0 or 1."""
        return self._assigning.uncommitted // self.micro_batches

    @property
    def order_fingerprint(self) -> dict[str, str]:
        """Settings of the data, by name, that must be equal on all members; part of the job's fingerprint."""
        own = {"data.micro_batches": str(self.micro_batches), "data.batch_size": str(self.quota)}
        return self._assigning.order_fingerprint | own

    def state_dict(self) -> dict[str, Any]:
        """Returns the data's state in the form of `ElasticLoader.state_dict`, in which a step counts as all its
        micro-batches.
        """
        return self._assigning.state_dict() | {MARK: self.micro_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state as `ElasticLoader` does. The count of steps continues, even if steps had another number of
        micro-batches.
        """
        ruling = state.get("ruling")
        steps = -(-state.get("yielded", 0) // (ruling["accumulate"] if ruling is not None else 1))
        self._assigning.load_state_dict(state | {"yielded": steps * self.micro_batches})
        self.current = None

    def give_up(self) -> None:
        """Ends the pass early: an uncommitted step counts as unused, and the next pass is over the next epoch."""
        self._assigning.give_up()
        self.current = None

    def close(self) -> None:
        """Ends the DataLoader's workers, persistent ones too. A state saved afterwards has the position of the last
        pass.
        """
        self._assigning.close()
        self.current = None

    # --- as `ElasticLoader` has them ---------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        self._assigning.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        return self._assigning.epoch

    @property
    def quota(self) -> int:
        return self._micro_batch or self._assigning.quota

    @property
    def drops(self) -> bool:
        return self._assigning.drops

    @property
    def unit(self) -> str:
        """Unit that the loader's positions number: "sample", "batch" or "item" (see `Orders`)."""
        return self._assigning.units.unit

    @property
    def batch(self) -> int:
        return self._assigning.batch

    @property
    def stream(self) -> str:
        return self._assigning.stream

    @property
    def at_safe_point(self) -> bool:
        return self._assigning.at_safe_point

    @property
    def ledger(self) -> Ledger:
        return self._assigning.ledger

    @property
    def order(self) -> str:
        return self._assigning.order

    def length(self, epoch: int) -> int | None:
        return self._assigning.length(epoch)

    def epoch_spent(self) -> bool:
        return self._assigning.epoch_spent()

    def spent(self) -> tuple[Spent, ...]:
        return self._assigning.spent()

    def check_state(self, state: dict[str, Any]) -> None:
        self._assigning.check_state(state)

    # --- inside ------------------------------------------------------------------------------------------------

    def _next(self, micro_batches: Iterator[None]) -> StepBatch:
        assigning, before = self._assigning, self.current
        if not assigning.at_safe_point:
            raise StateError(
                "the next step's batch was asked for, and the present step has not been committed; each batch of a job "
                "with pipelines is one optimizer step"
            )
        parts = [assigning.current for _ in islice(micro_batches, self.micro_batches)]
        if not parts:
            raise StopIteration
        index = (assigning.yielded - len(parts)) // self.micro_batches
        self.current = step = StepBatch(self, index, [part for part in parts if part], assigning.spent())
        # It may have been expected what was never asked for.
        self._resync |= not assigning.as_forecast or (before is not None and bool(before._promised))
        step._promised = set(filter(None, self._wanted.parts(step.positions)))
        return step

    def _expect(self, step: StepBatch, wanted: _Numbers | Share, *, anew: bool = False) -> None:
        """Makes the feed prefetch what is wanted of this and later steps, unless it does so already."""
        if step is not self.current:
            raise StateError(f"step {step.index} of epoch {step.epoch} is over; its micro-batches are not kept")
        if wanted == self._wanted and not self._resync and not anew:
            return
        self._wanted = wanted

        def tags(positions: tuple[Part, ...], left_out: Iterable[Part]) -> tuple[tuple[int, Part], ...]:
            return tuple((step.epoch, part) for part in wanted.parts(positions) if part and part not in left_out)

        now = tags(step.positions, step._kept)
        later = (tags(positions, ()) for positions in islice(self._assigning.steps(), 1, None))
        self._assigning.feed.expect(chain([now], later))
        step._promised = {part for _, part in now}
        self._resync = False

    def _fetch(self, step: StepBatch, spans: Part, wanted: _Numbers | Share) -> Any:
        """Returns the samples at these positions, which are among what is wanted of this step."""
        self._expect(step, wanted, anew=spans not in step._promised)
        try:
            data = self._assigning.feed.fetch((step.epoch, spans))
        except BaseException:
            self._resync = True
            raise
        step._promised.discard(spans)
        return data


def steps_of(dataloader: Any, setting: str, fits: int = 0, **options: Any) -> tuple[BatchRule, int, StepLoader]:
    """Returns the rule of a batch of fixed size, the samples that this member computes at once, and a loader around the
    user's training loader, each of whose batches is an optimizer step.

    Args:
        dataloader: The user's training loader.
        setting: The setting `batch`, which names a fixed batch.
        fits: The setting of that name.
        options: Arguments of `StepLoader`.

    Raises:
        UnsupportedError: The loader does not count samples.
        ConfigurationError: It would make no step.
    """
    size = declared_batch(dataloader)
    rule = read_setting(setting, max(size, 1))  # a loader that declares no size is refused below
    assert rule is not None, "the setting names a fixed batch"
    micro_batches = rule.units if rule.micro_batch else 1
    loader = StepLoader(
        dataloader, micro_batches=micro_batches, micro_batch=rule.micro_batch or rule.samples, **options
    )
    if size < 1 or loader.unit != "sample":
        raise UnsupportedError(
            f"batch={setting!r} counts samples, and this training loader's batches are made by a batch sampler or by "
            "the data set. Give the DataLoader a batch_size and, if need be, a sampler"
        )
    length = loader.length(0)
    if length is not None and loader.drops and length < loader.quota:
        raise ConfigurationError(
            f"batch={setting!r}: the data have {length} samples, and the loader's drop_last leaves out what makes no "
            f"whole {'micro-batch' if rule.micro_batch else 'step'}, so there would be no step. Take a smaller one, or "
            "drop_last=False"
        )
    if length is not None and length < rule.samples:
        warnings.warn(
            f"batch={setting!r}: the data have {length} samples, so a step is a whole epoch of them", stacklevel=3
        )
    return rule, fits or min(size, rule.samples), loader


def _positioned(loader: Any, mode: str, what: str) -> DataLoader[Any]:
    """Returns the loader unchanged; raises UnsupportedError if its samples have no positions that all members could
    share.
    """
    if mode != "shared":
        raise UnsupportedError(
            f"data={mode!r} does not go with {what}: any member may have to compute any sample of a step, so all need "
            'the same data. Use data="shared"'
        )
    if isinstance(loader, list | tuple | Mapping) or hasattr(loader, "flattened"):
        raise UnsupportedError(
            f"a {type(loader).__name__} of training loaders does not go with {what}: a step numbers the samples of one "
            "loader. Combine the data sets (ConcatDataset, or one that returns both)"
        )
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        data = loader.dataset if isinstance(loader, DataLoader) else loader
        raise UnsupportedError(
            f"the training data are a {type(data).__name__}, whose samples have no positions, so several members could "
            "not load the same ones. Use a torch DataLoader over a map-style data set"
        )
    return loader


JobLoader = ElasticLoader | StepLoader
"""Loader of the samples of a job, with pipelines or without."""
