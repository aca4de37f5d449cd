"""Computes the order of samples in each epoch from the user's DataLoader.

Theory of operation. The unit that is assigned is what the user's loader would draw: a sample (`batch_size=n`), a batch
(a custom `batch_sampler`) or an item (`batch_size=None`). The order of an epoch is the list of these units:

- `shuffle=True`: the keyed permutation of `planning/orders.py`; - `shuffle=False`: 0, 1, 2, ...; - any other
sampler: drawn in full once per epoch, under torch, numpy and random generators that are seeded with (seed, epoch)
for the draw and put back afterwards. `set_epoch` is called first if the sampler has it (under Lightning only on those
that Lightning calls it on, and a batch sampler of the user's is not one of them), and a torch.Generator of its own is
seeded and put back likewise. Since a member that joins in epoch 7 never drew epochs 0 to 6, the order must be a
function of (seed, epoch): a sampler whose second draw of one epoch differs from its first is refused. An order that
depends on state passes that test at first. So an epoch's order is drawn where its first pass begins (the length may be
asked for before the script has told its sampler the epoch) and kept, and each step's contribution says its hash
(protocol.md 25).

What cannot have an order that is equal on all members is refused by name: iterable data sets (see mode="local"),
DistributedSampler (it would shard a second time), samplers without an end.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from chaos_lightning.data.generators import keyed_randomness
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning import orders
from chaos_lightning.protocol.types import Span

_ENDLESS = 64
"""Ratio to the data set's length above which a sampler without a length counts as having no end."""


_KEPT = 2
"""Number of orders that are kept: the present epoch's, and that of the one before or after."""


def fast_permutation(length: int, seed: int, epoch: int, stream: str = "") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Computes `planning.orders.permutation` with numpy; a million samples take a tenth of a second."""
    start = np.uint64(orders.order_key(seed, epoch, stream))
    with np.errstate(over="ignore"):
        value = np.arange(1, length + 1, dtype=np.uint64)
        value *= np.uint64(orders.GAMMA)
        value += start
        value ^= value >> np.uint64(30)
        value *= np.uint64(orders.MULTIPLIER_1)
        value ^= value >> np.uint64(27)
        value *= np.uint64(orders.MULTIPLIER_2)
        value ^= value >> np.uint64(31)
    return np.argsort(value).astype(np.int64, copy=False)


def _chain(sampler: Any) -> list[Any]:
    """Returns a sampler and, in turn, the samplers that it draws from."""
    chain = [sampler]
    while (inner := getattr(chain[-1], "sampler", None)) is not None and len(chain) < 8:
        chain.append(inner)
    return chain


class Orders:
    """Orders of samples in the epochs of one loader.

    Args:
        loader: Loader of the user.
        seed: Seed of all orders.
        stream: The ledger's name of these samples.
        as_lightning: `set_epoch` is called on the samplers that Lightning calls it on, and not on a batch sampler.

    Attributes:
        unit: "sample", "batch" or "item".
        quota: units per micro-batch, as the user's loader has it.
        drop_last: as the user's loader has it.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, stream: str, as_lightning: bool = False) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UnsupportedError(
                f"{type(loader.dataset).__name__} is an IterableDataset: it has no positions that members could share. "
                'Use a map-style dataset, or data="local" if each node has its own data.'
            )
        self._dataset: Any = loader.dataset
        self._seed = seed
        self._stream = stream
        sampler: Any = loader.batch_sampler
        if sampler is None:
            self.unit, self.quota, self.drop_last = "item", 1, False
            sampler = loader.sampler
        elif type(sampler) is BatchSampler:
            self.unit, self.quota, self.drop_last = "sample", int(sampler.batch_size), bool(sampler.drop_last)
            sampler = sampler.sampler
        else:
            self.unit, self.quota, self.drop_last = "batch", 1, False
        self._sampler: Any = sampler
        self._chain = _chain(sampler)
        own = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))  # as its `_set_sampler_epoch` has it
        self._told = [one for one in self._chain if not as_lightning or any(one is other for other in own)]
        self._begun: int | None = None
        self._kind = self._classify(sampler)
        self._orders: dict[int, Sequence[Any] | np.ndarray[Any, Any]] = {}
        """Orders of the epochs that were asked for last. A sampler may give another order when it is asked again."""
        self._hashes: dict[int, str] = {}
        self._words: dict[str, str] | None = None
        if self._kind == "drawn" and self._digest(self._draw(0)) != self._digest(self._draw(0)):
            raise UnsupportedError(
                f"{type(sampler).__name__} draws another order each time, even with the same seed: members could not "
                "agree on the order, and a member that joins later could not find it. Draw from torch's generator (or "
                "numpy's, or random's) at each __iter__, or make the order a function of set_epoch(epoch)."
            )
        if not self.length(0):
            raise ConfigurationError(
                f"the training loader has no samples ({type(self._dataset).__name__}); expected at least one"
            )

    def begin(self, epoch: int) -> None:
        """Begins the first pass over an epoch; its order is drawn with what the script has set on its sampler by
        now.
        """
        if epoch != self._begun and self._kind == "drawn":
            self._orders.pop(epoch, None)
            self._hashes.pop(epoch, None)
        self._begun = epoch

    def length(self, epoch: int) -> int:
        """Returns the number of units (samples, batches or items) in this epoch."""
        return len(self._order(epoch)) if self._kind == "drawn" else len(self._sampler)

    def keys(self, epoch: int, spans: Iterable[Span]) -> list[Any]:
        """Returns the units at these positions, as the user's sampler would have yielded them."""
        order = self._order(epoch)
        out: list[Any] = []
        for start, stop in spans:
            part = order[start:stop]
            out.extend(part.tolist() if isinstance(part, np.ndarray) else part)
        return out

    def warn_where_shared(self) -> None:
        """Warns that clusters share the data without a shuffle, so that each would train on a contiguous part of it."""
        if self._kind == "identity":
            warnings.warn(
                "shuffle=False where clusters share the data: what a cluster is leased are neighbouring samples, so "
                "that it trains on a part of the data and not on a mix of all. Give the DataLoader shuffle=True",
                stacklevel=4,
            )

    @property
    def batch(self) -> int:
        """Number of samples in a micro-batch; with a custom batch sampler, in the first one."""
        return self.samples(self.keys(0, ((0, 1),))) if self.unit == "batch" else self.quota

    def samples(self, keys: Sequence[Any]) -> int:
        """Returns the number of samples in these units."""
        return sum(len(key) for key in keys) if self.unit == "batch" else len(keys)

    def order_hash(self, epoch: int) -> str:
        """Returns a hash of an epoch's order, 16 hex digits."""
        if self._kind == "drawn":
            order = self._order(epoch)
            if epoch not in self._hashes:
                self._hashes[epoch] = self._digest(order)
            return self._hashes[epoch]
        words = (self._kind, orders.VERSION, self.length(epoch), self._seed, epoch, self._stream)
        return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()

    def drawn_hash(self, epoch: int) -> str:
        """Returns the `order_hash` of an order that the user's sampler drew; "" if the order follows from seed and
        epoch.
        """
        return self.order_hash(epoch) if self._kind == "drawn" else ""

    def fingerprint(self) -> dict[str, str]:
        """Returns settings, by name, that must be equal on members that share the data; part of the job's
        fingerprint.
        """
        if self._words is None:  # a sampler may not give its first order again
            self._words = {
                "data.seed": str(self._seed),
                "data.unit": self.unit,
                "data.drop_last": str(self.drop_last),
                "data.length": str(self.length(0)),
                "data.order": self.order_hash(0),
            }
        return self._words

    # ----------------------------------------------------------------------------------------------------------

    def _classify(self, sampler: Any) -> str:
        if isinstance(sampler, DistributedSampler) or isinstance(getattr(sampler, "sampler", None), DistributedSampler):
            raise UnsupportedError(
                f"the training loader uses {type(sampler).__name__}, which shards by rank. The job assigns samples "
                "among whoever is there: give the DataLoader shuffle=True (or a plain sampler) instead."
            )
        if type(sampler) is SequentialSampler:
            return "identity"
        if (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return "keyed"
        return "drawn"

    def _order(self, epoch: int) -> Sequence[Any] | np.ndarray[Any, Any]:
        if epoch not in self._orders:
            order: Sequence[Any] | np.ndarray[Any, Any]
            if self._kind == "identity":
                order = range(len(self._sampler))
            elif self._kind == "keyed":
                order = fast_permutation(len(self._sampler), self._seed, epoch, self._stream)
            else:
                order = self._draw(epoch)
            while len(self._orders) >= _KEPT:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
                self._hashes.pop(oldest, None)
            self._orders[epoch] = order
        self._orders[epoch] = found = self._orders.pop(epoch)  # the last one asked for is the last to go
        return found

    def _draw(self, epoch: int) -> Sequence[Any] | np.ndarray[Any, Any]:
        sampler = self._sampler
        generators = [g for s in self._chain if isinstance(g := getattr(s, "generator", None), torch.Generator)]
        for one in self._told:
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        limit = self._limit(sampler)
        out: list[Any] = []
        with keyed_randomness(orders.key("draw", self._seed, epoch, self._stream), *generators):
            for unit in sampler:
                if len(out) == limit:
                    raise UnsupportedError(
                        f"{type(sampler).__name__} went on after {limit} units, for a data set of length "
                        f"{len(self._dataset)}: a sampler without an end has no epochs to assign. Give it an end."
                    )
                out.append(list(unit) if self.unit == "batch" else unit)
        if out and all(isinstance(unit, int | np.integer) and not isinstance(unit, bool) for unit in out):
            return np.asarray(out, dtype=np.int64)
        return out

    def _limit(self, sampler: Any) -> int:
        try:
            return max(1, len(sampler)) * _ENDLESS
        except TypeError:
            return max(1, len(self._dataset)) * _ENDLESS

    @staticmethod
    def _digest(order: Sequence[Any] | np.ndarray[Any, Any]) -> str:
        data = order.tobytes() if isinstance(order, np.ndarray) else repr(list(order)).encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()
