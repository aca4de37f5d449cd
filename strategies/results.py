"""Syncs the values that `self.log` has collected, under the same keys at all members.

Theory of operation. Two kinds of values need other members at the end of an epoch: numbers logged with
`sync_dist=True`, which Lightning reduces through the strategy, and torchmetrics objects, which sync themselves
(metrics.py). Either happens once per logged key, so members must have the same keys. One that had no samples in this
epoch, or came at its end, has none. So before an epoch's values are computed, members tell each other what they have
logged, and a member that lacks a key makes it, empty: it adds nothing to sums and means.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

from chaos_lightning.errors import UnsupportedError
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.metrics import Exchange, untouched

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


# --- keys ------------------------------------------------------------------------------------------------------------


def described(item: _ResultMetric) -> dict[str, Any]:
    meta = item.meta
    return {
        **{name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__,
        "is_tensor": item.is_tensor,
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.op],
    }


def describe_results(collection: _ResultCollection, *, live_only: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the keys that were logged in this epoch, each with how it was logged."""
    return {
        key: {**described(item), "live": not item.has_reset}
        for key, item in collection.items()
        if not (live_only and item.has_reset)
    }


def adopt_results(
    trainer: Trainer, collection: _ResultCollection, keys: Mapping[str, Mapping[str, Any]], reduce: Callable[..., Any]
) -> None:
    """Adds the keys that this member lacks, without values, and orders all keys as at the other members."""
    for key in keys:
        item = collection.get(key)
        if item is None:
            item = collection[key] = _make(trainer, key, keys[key], reduce)
        if not keys[key].get("live", True):
            item.has_reset = True
        elif item.has_reset or item._update_count == 0:
            item.has_reset = False
            # Else computing would warn that nothing was logged; that is right here, others have logged it.
            item._update_count = 1
    # All members must sync in one order: that of `keys`, which is the same everywhere.
    ordered = {key: collection[key] for key in keys if key in collection} | dict(collection)
    collection.clear()
    collection.update(ordered)


def _make(trainer: Trainer, key: str, given: Mapping[str, Any], reduce: Callable[..., Any]) -> _ResultMetric:
    item = _item(given, reduce)
    if not given["is_tensor"]:
        metric = _find_metric(trainer.lightning_module, given["metric_attribute"])
        if metric is None:
            raise UnsupportedError(
                f"{key!r} is logged by others as the metric {given['metric_attribute']!r}, which this member's "
                f"{type(trainer.lightning_module).__name__} does not have; make it on all ranks, as under ddp"
            )
        item.value = metric
        item._forward_cache = None
    return item.to(trainer.strategy.root_device)


def _item(given: Mapping[str, Any], reduce: Callable[..., Any]) -> _ResultMetric:
    meta = _Metadata(**{name: given[name] for name in _META}, reduce_fx=getattr(torch, given["reduce_fx"]))
    should, rank_zero_only, op = given["sync"]
    meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
    return _ResultMetric(meta, given["is_tensor"])


def _find_metric(module: LightningModule, attribute: str | None) -> Metric | None:
    found = dict(module.named_modules()).get(attribute or "")
    return found if isinstance(found, Metric) else None


def agree(
    trainer: Trainer, collection: _ResultCollection, exchange: Exchange, what: str, reduce: Callable[..., Any]
) -> None:
    """Makes members agree on the keys of logged values: each adds those that only others have logged."""
    everybody = exchange(f"keys logged in {what}", describe_results(collection))
    if everybody is None:
        return
    union: dict[str, dict[str, Any]] = {}
    for keys in everybody:
        for key, given in keys.items():
            union.setdefault(key, given)
    adopt_results(trainer, collection, union, reduce)


def found(collection: _ResultCollection, tensor: Tensor) -> tuple[str, dict[str, Any] | None]:
    """Returns the key whose latest logged value is this tensor object, and how it was logged; ("", None) if there is
    none.
    """
    for key, item in collection.items():
        if item._forward_cache is tensor:
            return key, described(item)
    return "", None


def fill(
    collection: _ResultCollection, key: str, given: Mapping[str, Any], value: Tensor, reduce: Callable[..., Any]
) -> None:
    """Sets a key's latest value at a member that did not log it: it had no samples, or logged other keys."""
    item = collection.get(key)
    if item is None:
        item = collection[key] = _item(given, reduce).to(value.device)
    item._forward_cache = value
    item.has_reset = False
    if not item.meta.on_epoch:
        item.value = value


def epoch_numbers(collection: _ResultCollection) -> dict[str, _ResultMetric]:
    """Returns the logged values of an epoch that are plain numbers, reduced over all members."""
    return {
        key: item
        for key, item in collection.items()
        if item.is_tensor and item.meta.on_epoch and not item.has_reset and not item.meta.sync.rank_zero_only
    }


def reduce_all(collection: _ResultCollection) -> None:
    """Computes the epoch's logged values over all members, with `sync_dist=True` or without."""
    for item in epoch_numbers(collection).values():
        sync = item.meta.sync
        asked, sync.should = sync.should, True
        item._computed = None
        item.compute()
        sync.should = asked


def packed_numbers(items: Iterable[_ResultMetric]) -> bytes:
    """Returns each value's sum so far and its sample count, as pairs of float64."""
    numbers: list[Any] = []
    for item in items:
        numbers += item.value, item.cumulated_batch_size if item.meta.is_mean_reduction else 0
    if any(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers):
        # All numbers at once, so that the device is waited for once.
        numbers = torch.stack([torch.as_tensor(number, dtype=torch.float64) for number in numbers]).tolist()
    return struct.pack(f"<{len(numbers)}d", *map(float, numbers))


def add_numbers(collection: _ResultCollection, keys: Sequence[str], numbers: bytes) -> None:
    """Adds the sums and counts that another member had accumulated under these keys."""
    for key, (value, count) in zip(keys, struct.iter_unpack("<2d", numbers), strict=True):
        item = collection[key]
        item._computed, more = None, torch.tensor(value, device=item.value.device, dtype=item.value.dtype)
        if item.meta.is_max_reduction or item.meta.is_min_reduction:
            item.value = item.meta.reduce_fx(item.value, more)
            continue
        item.value = item.value + more
        if item.meta.is_mean_reduction:
            item.cumulated_batch_size = item.cumulated_batch_size + int(count)


def numbers_manifest(trainer: Trainer) -> list[Any]:
    """Returns the numbers that were logged in this training epoch, for newcomers where all members log the same."""
    live = epoch_numbers(trainer.fit_loop.epoch_loop._results)
    wide = [key for key, item in live.items() if item.value.dtype == torch.float64]
    return [list(live), packed_numbers(live.values()), wide]


def adopt_numbers(trainer: Trainer, manifest: Sequence[Any]) -> None:
    """Gives a newcomer, which has the keys, the numbers that `numbers_manifest` returned at the donor."""
    collection, (keys, numbers, wide) = trainer.fit_loop.epoch_loop._results, manifest
    for key in wide:
        collection[key].value = collection[key].value.double()
    add_numbers(collection, keys, numbers)


def collections_manifest(trainer: Trainer) -> dict[str, Any]:
    """Returns the keys that were logged in training and in validation, which newcomers take over."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        "train": describe_results(epoch_loop._results, live_only=False),
        "val": describe_results(epoch_loop.val_loop._results, live_only=False),
    }


def adopt_collections(trainer: Trainer, manifest: Mapping[str, Any], reduce: Callable[..., Any]) -> None:
    """Gives a newcomer the keys that donors have logged, without values: those remain with the members that logged
    them.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for collection, name in ((epoch_loop._results, "train"), (epoch_loop.val_loop._results, "val")):
        collection.clear()
        adopt_results(trainer, collection, manifest[name], reduce)


class Untouched:
    """Context in which metrics and `self.log` have no effect, for an idle member that runs a training step on a
    stand-in batch.

    Attributes:
        synced: Whether a value was logged per step with sync_dist=True: the others exchange such values now.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.synced = False
        self._metrics = untouched()

    def __enter__(self) -> Untouched:
        self._metrics.__enter__()
        self._trainer.lightning_module.log = self._log  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        del self._trainer.lightning_module.log
        self._metrics.__exit__(*error)

    def _log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        # Within training_step values are logged per step unless the user says otherwise; a metric syncs by itself.
        per_step = options.get("on_step") in (None, True) and not options.get("rank_zero_only", False)
        if options.get("sync_dist", False) and per_step and not isinstance(value, Metric):
            self.synced = True
