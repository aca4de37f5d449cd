"""Fetches batches through the user's own DataLoader, which is made to load the assigned samples.

Theory of operation. `MapFeed` clones the user's loader with all its settings (workers, prefetch, pinning,
collate_fn) but with a sampler of ours. The sampler draws from a *forecast*: the member's coming micro-batches if
every step commits as assigned. It never blocks; where the forecast ends, it ends. What the DataLoader draws is
remembered in a queue of tags (epoch, positions), in the order in which batches come out. At the beginning of an
accumulation that is not as forecast, `resync` compares the queue with the new forecast: what no longer fits is marked
stale and thrown away when it comes out, and the sampler goes on with what the truth demands next. If the
DataLoader's iterator has ended, because an epoch seemed to be over and was not, another one is opened (protocol.md
25, 26). So a sample is delivered exactly when its tag is asked for.

With num_workers=0 nothing is ahead: the sampler is asked when the batch is.

`StepFeed` does the same for the numbered micro-batches of a step of pipelines, which are asked for in any order. What
was drawn by one forecast stays good if the next one has it anywhere near.

`IterableFeed` walks a node's own iterable in order, one batch ahead, since only an iterable's end says how long it
was. Batches that were handed out but not committed are kept: they cannot be drawn a second time.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from chaos_lightning.data.accumulations import Part
from chaos_lightning.data.generators import keyed_randomness
from chaos_lightning.data.keyed import KeyedSamples, MicroBatchKey, keyed_settings
from chaos_lightning.data.order import Orders
from chaos_lightning.data.source import Stats
from chaos_lightning.data.taped import TapeOrders
from chaos_lightning.data.workers import tie_workers
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning import orders

Tag = tuple[int, Part]
"""Epoch and positions, which name a micro-batch."""


@dataclass(slots=True)
class _Drawn:
    tag: Tag
    live: bool = True


class _Sampler:
    """Sampler of the cloned DataLoader; all its iterators draw from one forecast of assigned micro-batches."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        return _Draws(self._draw)


class _Draws:
    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._draw()


def alike(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns DataLoader arguments that reproduce the given loader, except for the choice of samples."""
    kwargs: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        kwargs["prefetch_factor"] = loader.prefetch_factor
        kwargs["multiprocessing_context"] = loader.multiprocessing_context
    return kwargs


class MapFeed:
    """Feed of batches from a map-style data set, each requested by its positions in the epoch's order."""

    def __init__(self, loader: DataLoader[Any], units: Orders | TapeOrders, *, seed: int, stats: Stats) -> None:
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise UnsupportedError(
                f"{type(loader).__name__} has an __iter__ of its own, which assigning samples would pass over. Use a "
                "torch DataLoader with that logic in its collate_fn or data set."
            )
        if loader.num_workers and not loader.in_order:
            warnings.warn(
                "in_order=False is not honoured: batches must come in the order in which they were assigned",
                stacklevel=3,
            )
        self._units = units
        self._seed = seed
        self._stats = stats
        self._queue: deque[_Drawn] = deque()
        self._forecast: Iterator[Tag] = iter(())
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()
        self._sampler = _Sampler(self._draw)
        self._inner = tie_workers(self._clone(loader))
        self._dummy: Any = None
        self._has_dummy = False
        self._who = ""
        self._opened = 0

    def open(self, who: str) -> None:
        """Begins a new pass over the data; `who` seeds the workers' randomness."""
        self._forget()
        self._forecast = iter(())
        self._who = who
        self._opened = 0

    def close(self) -> None:
        """Ends the DataLoader's workers, also persistent ones."""
        self._forget()
        if self._inner._iterator is not None:
            _dismiss(self._inner._iterator)
            self._inner._iterator = None

    def resync(self, forecast: Iterator[Tag]) -> None:
        """Replaces the forecast of coming micro-batches; batches already drawn that do not fit it are discarded
        later.
        """
        expected = next(forecast, None)
        for drawn in self._queue:
            if not drawn.live:
                continue
            if drawn.tag == expected:
                expected = next(forecast, None)
            else:
                drawn.live = False
        self._forecast = _chain(expected, forecast)

    def fetch(self, tag: Tag) -> Any:
        """Returns the batch of this micro-batch, which must be the next one in the forecast."""
        drawn, data = self._next_live(tag)
        if drawn.tag != tag:
            raise RuntimeError(f"the DataLoader gave positions {drawn.tag}; expected {tag}")
        return data

    def _next_live(self, wanted: Tag) -> tuple[_Drawn, Any]:
        """Returns the next batch from the DataLoader that is not stale; `wanted` is named in error messages."""
        fruitless = 0
        while True:
            if self._iterator is None:
                self._iterator = self._open()
            try:
                data = next(self._iterator)
            except StopIteration:
                self._iterator = None
                fruitless += 1
                if fruitless > 1:
                    raise RuntimeError(
                        f"the DataLoader gave no batch for positions {wanted}; the forecast ended"
                    ) from None
                continue
            except BaseException:
                self._forget()  # the queue no longer tells what would come out next
                raise
            drawn = self._queue.popleft()
            if not drawn.live:
                self._stats.discarded += 1
                fruitless = 0
                continue
            return drawn, data

    def dummy(self, epoch: int) -> Any:
        """Returns a stand-in batch for an idle micro-batch: a copy of one made of the epoch's first samples."""
        if not self._has_dummy:
            self._dummy = self._make_dummy(epoch)
            self._has_dummy = True
        try:
            return copy.deepcopy(self._dummy)
        except Exception:  # whatever a user's batch class raises
            return self._make_dummy(epoch)

    def samples(self, tag: Tag) -> int:
        return self._units.samples(self._units.keys(*tag))

    # ----------------------------------------------------------------------------------------------------------

    def _clone(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        kwargs = self._settings(loader)
        if self._units.unit == "item":
            return DataLoader(loader.dataset, batch_size=None, sampler=self._sampler, **kwargs)
        return DataLoader(loader.dataset, batch_sampler=self._sampler, **kwargs)

    def _settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        return alike(loader) | {"generator": self._generator, "persistent_workers": loader.persistent_workers}

    def _open(self) -> Iterator[Any]:
        # One number per (job, member, epoch, iterator) is where torch derives its workers' seeds from (protocol.md 22).
        seed = orders.key("workers", self._seed, self._who, self._opened)
        self._generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        self._queue.clear()  # an iterator that ended has delivered everything it drew
        self._opened += 1
        self._stats.opened += 1
        return iter(self._inner)

    def _forget(self) -> None:
        self._stats.discarded += len(self._queue)
        self._queue.clear()
        if self._iterator is not None and not self._inner.persistent_workers:
            _dismiss(self._iterator)
        self._iterator = None

    def _draw(self) -> Any:
        tag = next(self._forecast)
        self._queue.append(_Drawn(tag))
        self._stats.drawn += 1
        return self._index(tag)

    def _index(self, tag: Tag) -> Any:
        """Returns the index with which the DataLoader's fetcher is to load this micro-batch."""
        return self._flat(self._units.keys(*tag))

    def _flat(self, units: list[Any]) -> Any:
        """Converts the units of a micro-batch to the index that the DataLoader's fetcher expects."""
        if self._units.unit == "item":
            if len(units) != 1:
                raise ConfigurationError(
                    f"a loader with batch_size=None takes 1 item at a time; was assigned {len(units)}"
                )
            return units[0]
        return [key for unit in units for key in unit] if self._units.unit == "batch" else units

    def _make_dummy(self, epoch: int) -> Any:
        size = min(self._units.quota, self._units.length(epoch))
        keys = self._flat(self._units.keys(epoch, ((0, size),)))
        dataset: Any = self._inner.dataset
        collate: Any = self._inner.collate_fn
        with keyed_randomness(orders.key("dummy", self._seed)):
            if self._units.unit == "item":
                return collate(dataset[keys])
            if callable(many := getattr(dataset, "__getitems__", None)):
                return collate(many(keys))
            return collate([dataset[key] for key in keys])


def _dismiss(iterator: object) -> None:
    """Ends a DataLoader iterator's workers at once, since the garbage collector might do so in a forked child."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def _chain(first: Tag | None, rest: Iterator[Tag]) -> Iterator[Tag]:
    if first is not None:
        yield first
        yield from rest


class StepFeed(MapFeed):
    """Feed of batches from a map-style data set, for a loader that knows which micro-batches coming steps need."""

    def __init__(self, loader: DataLoader[Any], units: Orders | TapeOrders, *, seed: int, stats: Stats) -> None:
        super().__init__(loader, units, seed=seed, stats=stats)
        self._early: dict[Tag, Any] = {}
        """Micro-batches that came out before they were asked for."""

    def expect(self, steps: Iterator[tuple[Tag, ...]]) -> None:
        """Sets the forecast: the micro-batches that this and later steps will ask for.

        Args:
            steps: Micro-batches of the present step that are to be asked for, then of each later step. A later step
                has one at least, but for the last step of an epoch.
        """
        drawn = [one for one in self._queue if one.live]
        # Drawn micro-batches are no further ahead than so many steps.
        near = list(islice(steps, len(drawn) + len(self._early) + 2))
        wanted = set(chain.from_iterable(near))
        for one in drawn:
            one.live = one.tag in wanted
        stale = self._early.keys() - wanted
        self._stats.discarded += len(stale)
        for tag in stale:
            del self._early[tag]
        have = self._early.keys() | {one.tag for one in drawn if one.live}
        self._forecast = (
            tag for tag in chain(chain.from_iterable(near), chain.from_iterable(steps)) if tag not in have
        )
        if wanted and self._iterator is None and self._inner.num_workers:
            self._iterator = self._open()  # they load while other stages compute

    def fetch(self, tag: Tag) -> Any:
        """Returns one of the expected micro-batches; keeps those that the DataLoader yields before it for later."""
        while tag not in self._early:
            drawn, data = self._next_live(tag)
            self._early[drawn.tag] = data
        return self._early.pop(tag)

    def _forget(self) -> None:
        super()._forget()
        self._stats.discarded += len(self._early)
        self._early.clear()

    def _clone(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        samples = KeyedSamples(loader.dataset, loader.collate_fn, self._units.unit, self._seed)
        settings = self._settings(loader) | keyed_settings(loader)
        return DataLoader(samples, batch_size=None, sampler=self._sampler, **settings)

    def _index(self, tag: Tag) -> MicroBatchKey:
        return (*tag, self._units.keys(*tag))

    def _make_dummy(self, epoch: int) -> Any:
        size = min(self._units.quota, self._units.length(epoch))
        return self._inner.dataset[self._index((epoch, ((0, size),)))]


class IterableFeed:
    """Feed of batches from an iterable, each requested by its number in the pass."""

    def __init__(self, loader: Iterable[Any], *, seed: int, stats: Stats) -> None:
        self._loader = loader
        self._seed = seed
        self._stats = stats
        self._iterator: Iterator[Any] | None = None
        self._buffer: dict[int, Any] = {}
        self._next = 0
        self._dummy: Any = None
        self._has_dummy = False
        self._generator: torch.Generator | None = None
        self.length: int | None = None
        """Number of batches in this epoch, once the iterable has run dry."""
        if isinstance(loader, DataLoader):
            tie_workers(loader)
            if loader.generator is None:
                self._generator = loader.generator = torch.Generator()

    def open(self, who: str) -> None:
        """Begins a new pass from the iterable's beginning; `who` seeds the workers' randomness."""
        self._buffer.clear()
        self._next = 0
        self.length = None
        if self._iterator is not None and not getattr(self._loader, "persistent_workers", False):
            _dismiss(self._iterator)
        if self._generator is not None:
            self._generator.manual_seed(orders.key("workers", self._seed, who) & 0x7FFFFFFFFFFFFFFF)
        self._stats.opened += 1
        self._iterator = iter(self._loader)

    def close(self) -> None:
        if self._iterator is not None:
            _dismiss(self._iterator)
        self._iterator = None
        self._buffer.clear()

    def fetch(self, number: int, committed: int) -> Any:
        """Returns batch `number`, or raises IndexError beyond the end; forgets batches below `committed`.

        Afterwards `length` is set if it was the last.
        """
        for old in [n for n in self._buffer if n < committed]:
            del self._buffer[old]
        self._pull(number + 1, committed)
        if number not in self._buffer:
            raise IndexError(number)
        return _shell(self._buffer[number])

    def dummy(self, epoch: int) -> Any:
        """Returns a stand-in batch for an idle micro-batch: a copy of the first batch ever drawn."""
        if not self._has_dummy:
            self._pull(0, self._next)
        if not self._has_dummy:
            raise ConfigurationError(
                f"the training loader yielded nothing in epoch {epoch}; expected at least one batch, if only as a "
                "stand-in while others have data and this node has none"
            )
        return copy.deepcopy(self._dummy)

    def _pull(self, upto: int, keep: int) -> None:
        while self._next <= upto and self.length is None:
            assert self._iterator is not None
            try:
                data = next(self._iterator)
            except StopIteration:
                self.length = self._next
                return
            self._stats.drawn += 1
            if not self._has_dummy:
                self._dummy = copy.deepcopy(data)
                self._has_dummy = True
            if self._next >= keep:
                self._buffer[self._next] = data
            self._next += 1


def _shell(data: Any) -> Any:
    """Copies the containers of a batch but not its tensors, so that a training step may remove or replace entries."""
    if type(data) is dict:
        return {key: _shell(value) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_shell(value) for value in data)
    return data


def declared_batch(loader: Any) -> int:
    """Returns the batch size that a loader or its batch sampler declares; 0 if neither does."""
    for each in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(each, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 0


def batch_length(data: Any) -> int:
    """Guesses the number of samples in a batch: the first tensor's first dimension, a list's length, else 1."""
    if isinstance(data, torch.Tensor):
        return int(data.shape[0]) if data.dim() else 1
    if isinstance(data, dict):
        return next((batch_length(value) for value in data.values()), 1)
    if isinstance(data, tuple | list) and data:
        return batch_length(data[0]) if not isinstance(data[0], str | bytes | int | float) else len(data)
    return 1
