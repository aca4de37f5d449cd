"""Fetches whole micro-batches with random augmentation that depends only on a sample's position, not on the process.

Theory of operation. Another member may run a micro-batch when its step runs again, or another stage of it. So random
augmentation draws by (seed, epoch, position), whichever process fetches (protocol.md 22, P16): before each sample the
generators of torch, numpy and random are seeded by its position, and collate_fn goes on with the last sample's. A data
set with `__getitems__` (a Subset, say) draws all samples of a micro-batch in one go, seeded by the first one's
position. A generator that a data set keeps for itself is not seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from chaos_lightning.data.generators import keyed_randomness, seed_generators
from chaos_lightning.planning import orders
from chaos_lightning.protocol.types import Span

MicroBatchKey = tuple[int, tuple[Span, ...], list[Any]]
"""Epoch, positions, and the units that lie there in the epoch's order."""


class KeyedSamples(Dataset[Any]):
    """Data set of whole micro-batches that wraps the user's. Picklable if the user's data set and collate_fn are.

    Args:
        dataset: Data set of the user.
        collate: Function that makes a batch of samples, or converts an item.
        unit: See `Orders`.
        seed: Seed of the job.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], unit: str, seed: int) -> None:
        self.dataset, self._collate, self._unit, self._seed = dataset, collate, unit, seed

    def __getitem__(self, micro_batch: MicroBatchKey) -> Any:
        epoch, spans, units = micro_batch
        positions = [position for start, stop in spans for position in range(start, stop)]
        with keyed_randomness(orders.key("sample", self._seed, epoch, positions[0], 0)):
            if self._unit == "item":
                (key,) = units
                return self._collate(self.dataset[key])
            batches = units if self._unit == "batch" else [[unit] for unit in units]
            if callable(many := getattr(self.dataset, "__getitems__", None)):
                return self._collate(many(list(chain.from_iterable(batches))))
            draws = type(self.dataset) is not TensorDataset  # which draws nothing; to seed takes longer than to read it
            samples = []
            for position, keys in zip(positions, batches, strict=True):
                for place, key in enumerate(keys):
                    if draws:
                        seed_generators(orders.key("sample", self._seed, epoch, position, place))
                    samples.append(self.dataset[key])
            return self._collate(samples)


class _OwnDataset:
    """Worker initializer that makes `get_worker_info` show the user's own data set, then calls the user's
    initializer.
    """

    def __init__(self, user: Callable[[int], object] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedSamples):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._user is not None:
            self._user(worker)


def _as_it_is(batch: Any) -> Any:
    return batch


def keyed_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the DataLoader arguments for `KeyedSamples` that replace the user's."""
    return {"collate_fn": _as_it_is, "worker_init_fn": _OwnDataset(loader.worker_init_fn)}
