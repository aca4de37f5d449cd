"""Feeds the user's DataLoader with positions leased from a server, so that each cluster trains its own part of the
epoch.

Theory of operation. Clusters that share a data set claim positions of the epoch's order, a batch's worth at a time, and
say after an optimizer step which positions it used (docs/outer.md, O11). The order is the same in all clusters
(`order.py`), and the fetching with all workers and prefetching is `feeds.py`: what is claimed is the forecast. Ahead of
the training loop positions are claimed only as far as they are there; where the forecast ends, the loop waits for
more.

Nobody knows beforehand how many batches of an epoch will be this cluster's. An epoch is over once each of its positions
counts, and only then those of the next one are leased: a claim that waits answers with more of this epoch, with the
next one's, or with nothing, if the epoch is over or this cluster is to train no more. So the last batch that is *known*
(`known`) may turn out to be the pass's last one. Whoever accumulates gradients takes the step with it, says what it
covered (`used`), and then asks whether there is more (`more`): what is not covered ends no epoch.

A cluster of several ranks claims batches of all of them together, so that the ranks' loaders go in step; each loads its
own part.

What was handed out and never used is handed out again in the next pass. After a rejection, or where this process came
in anew, nothing is leased to it any more: `forget`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from chaos_lightning.data.accumulations import Part
from chaos_lightning.data.feeds import MapFeed, Tag
from chaos_lightning.data.order import Orders
from chaos_lightning.data.source import Stats
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning import orders
from chaos_lightning.planning.batches import Batches
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.spans import count, normalise


class LeaseSource(Protocol):
    """Source from which positions of the epoch are leased."""

    def claim(self, positions: int, *, wait: bool, within: int = -1) -> tuple[Tag, ...]:
        """Leases the next positions for this cluster, at most the given number.

        Args:
            positions: Number of positions that are wanted.
            wait: Whether to wait until there are positions, however long it takes.
            within: Number of the epoch whose end ends the wait; -1: the wait does not depend on an epoch.

        Returns:
            Leased positions, each with its epoch, in order. Empty if there are none at the moment, or, with `wait`, if
            the epoch is over or this cluster is to train no more.
        """


class LeasedLoader:
    """Loader of one cluster's batches from data that clusters share. It is its own iterator; one pass covers one epoch.

    Args:
        loader: Loader of the user: a torch DataLoader over a map-style data set.
        seed: Seed of each epoch's order; equal in all clusters.
        source: Source of leased positions.
        who: Name of this cluster; keys its workers' randomness.
        first: Number of the job's first epoch; where a job goes on from a checkpoint, it is not 0.
        part: (rank, ranks) of this process in the cluster. All ranks claim the same positions, and each loads its part
            of a batch of all of them.
        least: Fewest samples of a batch on one rank: 2 for a model with BatchNorm.

    Raises:
        ConfigurationError: With drop_last an epoch has no batch.

    Attributes:
        loader: Loader of the user.
        stats: Counters of what was loaded.
        batch: Number of samples of a batch, of all ranks together.
        begun: Whether the present pass has had a batch.
        epoch: Number of the epoch that the present pass covers.
    """

    def __init__(
        self,
        loader: Any,
        *,
        seed: int,
        source: LeaseSource,
        who: str = "",
        first: int = 0,
        part: tuple[int, int] = (0, 1),
        least: int = 1,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise UnsupportedError(
                f"the training loader is a {type(loader).__name__}, whose samples have no positions that clusters "
                'could share. Use a torch DataLoader over a map-style data set, or data="local" if each cluster has '
                "its own data."
            )
        self.loader = loader
        self.stats = Stats()
        self.first = first
        self.begun = False
        self.epoch = 0
        self._who = f"{who}/{part[0]}" if part[0] else who
        self._source = source
        self._part = part
        self._units = Orders(loader, seed=seed, stream="")
        self._units.warn_where_shared()
        self._least = least
        self._quota, self.batch = self._units.quota * part[1], self._units.batch * part[1]
        self._feed = MapFeed(loader, self._units, seed=seed, stats=self.stats)
        self._ahead: deque[Tag] = deque()
        """Batches of positions that are claimed and not handed out."""
        self._place = 0
        """Place of the first of these batches among all that were ever claimed."""
        self._out: list[Tag] = []
        """Batches of positions that are handed out, and not yet said to be used."""
        self._resync = True
        if self._units.length(0) != self._units.length(1):
            raise UnsupportedError(
                f"the training loader's sampler yields {self._units.length(0)} units in the first epoch and "
                f"{self._units.length(1)} in the second; clusters that share data need epochs of one length"
            )
        if not len(self):
            raise ConfigurationError(
                f"the training loader has {self.length} samples and drop_last=True, and a batch of this cluster has "
                f"{self._quota}; expected at least one batch: use a smaller batch size, or drop_last=False"
            )

    # ------------------------------------------------------------------ a pass

    def __iter__(self) -> LeasedLoader:
        """Begins a pass over the epoch to which the next leased positions belong."""
        self.begun = False
        self._ahead.extendleft(reversed(self._out))
        self._place -= len(self._out)
        self._out.clear()
        return self

    def __next__(self) -> Any:
        if not self.more():
            raise StopIteration
        tag = self._ahead[0]
        if not self.begun:
            self.begun = True
            self.epoch = tag[0]
            self._feed.open(f"{self._who}/{self.epoch + self.first}")
            self._resync = True
        if self._resync:
            self._resync = False
            self._feed.resync(self._forecast())
        try:
            data = self._feed.fetch(self._mine(tag))
        except BaseException:
            self._resync = True
            raise
        self._ahead.popleft()
        self._place += 1
        self._out.append(tag)
        self.stats.yielded += 1
        return data

    def more(self) -> bool:
        """Returns whether this pass has another batch; waits until that is certain."""
        return (bool(self._ahead) or self._claim(wait=True)) and self._is_of_this_pass

    def batches(self, accumulate: int = 1) -> Batches:
        """Returns the batch sizes, in positions, that a cluster trains at once with this loader.

        Args:
            accumulate: Batches of an inner step.
        """
        ranks = self._part[1]
        least = self._quota if self._units.drop_last else min(self._quota, self._least * ranks)
        return Batches(self._quota * accumulate, self._quota, least)

    @property
    def known(self) -> bool:
        """Whether this pass certainly has another batch; does not wait."""
        return (bool(self._ahead) or self._claim(wait=False)) and self._is_of_this_pass

    def __len__(self) -> int:
        """Returns the number of batches in an epoch if no other cluster takes part."""
        whole, rest = divmod(self.length, self._quota)
        return whole + (rest > 0 and not self._units.drop_last)

    # ------------------------------------------------------------------ what became of batches

    def used(self) -> tuple[int, tuple[Tag, ...]]:
        """Returns the number of samples handed out since the last call, and their positions by epoch."""
        samples = sum(self._feed.samples(self._keyed(tag)) for tag in self._out)
        epochs = sorted({epoch for epoch, _ in self._out})
        covers = tuple((e, normalise(span for epoch, part in self._out if epoch == e for span in part)) for e in epochs)
        self._out.clear()
        return samples, covers

    def forget(self) -> None:
        """Drops all claimed positions, because they are not leased to this cluster any more."""
        self._place += len(self._ahead)
        self._ahead.clear()
        self._out.clear()
        self._resync = True
        self._feed.resync(iter(()))

    def inherit(self, other: LeasedLoader) -> None:
        """Takes over the unused claimed positions of another loader of the same data, which this one replaces."""
        self._ahead.extend([*other._out, *other._ahead])
        other.forget()

    def close(self) -> None:
        """Ends the DataLoader's workers, persistent ones too."""
        self._feed.close()

    # ------------------------------------------------------------------ agreement

    @property
    def length(self) -> int:
        """Number of positions in an epoch: samples, or batches if the loader has a custom batch sampler."""
        return self._units.length(0)

    @property
    def words(self) -> dict[str, str]:
        """Settings, by name, that must be equal in all clusters; the batch size is not among them."""
        told = self._units.fingerprint()
        return {"data.order_version": str(orders.VERSION)} | {k: v for k, v in told.items() if k != "data.drop_last"}

    # ------------------------------------------------------------------ inside

    @property
    def _is_of_this_pass(self) -> bool:
        """Whether the next batch belongs to this pass: to its epoch, or to an earlier one that a rollback has
        reopened.
        """
        return not self.begun or self._ahead[0][0] <= self.epoch

    def _keyed(self, tag: Tag) -> Tag:
        """Returns the same positions with the epoch number by which the order of samples is drawn."""
        return (tag[0] + self.first, tag[1])

    def _mine(self, tag: Tag) -> Tag:
        """Returns this rank's part of a batch's positions. If there are fewer positions than ranks, some go to two
        ranks, as in torch's DistributedSampler.
        """
        epoch, spans = self._keyed(tag)
        rank, ranks = self._part
        if ranks == 1:
            return epoch, spans
        size = count(spans)
        start, stop = size * rank // ranks, size * (rank + 1) // ranks
        return epoch, Tape(pieces=spans).positions(((start, max(stop, start + 1)),))

    def _claim(self, *, wait: bool) -> bool:
        """Claims the positions of another batch, a full one if possible; returns False if it got none."""
        quota, size = self._quota, 0
        batch: tuple[int, Part] | None = None
        while size < quota:
            within = self.epoch if self.begun else -1
            got = self._source.claim(quota - size, wait=wait and batch is None, within=within)
            if not got:
                break
            for epoch, spans in got:
                if count(spans) > quota - size:
                    raise ConfigurationError(f"claimed {quota - size} positions and got {count(spans)}")
                if batch is not None and batch[0] != epoch:
                    self._ahead.append(batch)
                    batch, size = None, 0
                batch = (epoch, normalise([*(batch[1] if batch is not None else ()), *spans]))
                size += count(spans)
        if batch is not None:
            self._ahead.append(batch)
        return batch is not None

    def _forecast(self) -> Iterator[Tag]:
        """Yields the coming batches: those claimed, then others for as long as positions can be claimed without
        waiting.
        """
        place = self._place
        while place < self._place + len(self._ahead) or self._claim(wait=False):
            yield self._mine(self._ahead[place - self._place])
            place += 1
        self._resync = True
