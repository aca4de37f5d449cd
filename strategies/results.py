"""What `self.log` has collected: synced through the job, and with the same keys on all members.

Theory of operation. Two kinds of values need other members at the end of an epoch: numbers logged with
`sync_dist=True`, which Lightning reduces through the strategy, and torchmetrics objects, which by themselves sync
only if torch.distributed runs (then values would silently be local): their functions are replaced, and all states of
a metric travel in one slot. Either happens once per logged key, so members must have the same keys. One that had no
samples in this epoch, or came at its end, has none. So before an epoch's values are computed, members tell each other
what they have logged, and whoever lacks a key makes it, empty: it adds nothing to sums and means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from torchmetrics.utilities import dim_zero_cat

from chaos_lightning.strategies.lightning_types import Trainer

Exchange = Callable[[str, Any], "list[Any] | None"]

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def metrics_of(trainer: Trainer) -> list[tuple[str, Metric]]:
    """torchmetrics of the module and of callbacks, by name."""
    found = [(n, m) for n, m in trainer.lightning_module.named_modules() if isinstance(m, Metric)]
    for place, callback in enumerate(trainer.callbacks):
        for name, value in vars(callback).items():
            if isinstance(value, Metric):
                found.append((f"callback{place}.{name}", value))
    return [(n, m) for n, m in found if not isinstance(m, _ResultMetric)]


def route_metrics(trainer: Trainer, exchange: Exchange, in_job: Callable[[], bool]) -> Callable[[], None]:
    """Makes every metric sync through the job, until the function that is returned is called."""
    before = [(metric, metric.distributed_available_fn) for _, metric in metrics_of(trainer)]
    for name, metric in metrics_of(trainer):
        metric.distributed_available_fn = in_job
        metric._sync_dist = _syncer(name, metric, exchange)  # type: ignore[method-assign]

    def undo() -> None:
        for metric, available in before:
            metric.distributed_available_fn = available
            vars(metric).pop("_sync_dist", None)

    return undo


def _syncer(name: str, metric: Metric, exchange: Exchange) -> Callable[..., None]:
    # A closure, since metrics are copied deeply and a bound method would take the strategy along.
    def sync(dist_sync_fn: Any = None, process_group: Any = None) -> None:
        sync_metric(name, metric, exchange)

    return sync


def count_as_updated(trainer: Trainer) -> None:
    """A member without samples in an epoch has updated no metric, but others have: computing is right there, too."""
    for _, metric in metrics_of(trainer):
        metric._update_count = max(1, metric._update_count)


def sync_metric(name: str, metric: Metric, exchange: Exchange) -> None:
    """All members' states of one metric, reduced as the metric says."""
    mine = {}
    for state, reduction in metric._reductions.items():
        value = getattr(metric, state)
        if isinstance(value, list) and reduction is dim_zero_cat and len(value) > 1:
            value = [dim_zero_cat(value)]
        mine[state] = value
    everybody = exchange(f"metric {name} ({type(metric).__name__})", mine)
    if everybody is None:
        return
    for state, reduction in metric._reductions.items():
        values = [member[state] for member in everybody]
        if isinstance(mine[state], list):
            joined = [tensor for value in values for tensor in value]
            setattr(metric, state, [dim_zero_cat(joined)] if reduction is dim_zero_cat and joined else joined)
            continue
        stacked = torch.stack(values)
        setattr(metric, state, reduction(stacked) if callable(reduction) else stacked)


# --- keys ------------------------------------------------------------------------------------------------------------


def _describe(item: _ResultMetric) -> dict[str, Any]:
    meta = item.meta
    return {
        **{name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__,
        "is_tensor": item.is_tensor,
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.op],
    }


def describe_results(collection: _ResultCollection, *, live_only: bool = True) -> dict[str, dict[str, Any]]:
    """Keys of this epoch and how they were logged."""
    return {
        key: {**_describe(item), "live": not item.has_reset}
        for key, item in collection.items()
        if not (live_only and item.has_reset)
    }


def adopt_results(
    trainer: Trainer, collection: _ResultCollection, keys: Mapping[str, Mapping[str, Any]], reduce: Callable[..., Any]
) -> None:
    """Makes the keys that this member lacks, with nothing in them."""
    for key in keys:
        item = collection.get(key)
        if item is None:
            item = _make(trainer, keys[key], reduce)
            if item is None:
                continue
            collection[key] = item
        if not keys[key].get("live", True):
            item.has_reset = True
        elif item.has_reset or item._update_count == 0:
            item.has_reset = False
            # Else computing would warn that nothing was logged; that is right here, others have logged it.
            item._update_count = 1
            if not item.is_tensor:
                item.value._update_count = max(1, item.value._update_count)
    # All members must sync in one order: that of `keys`, which is the same everywhere.
    ordered = {key: collection[key] for key in keys if key in collection} | dict(collection)
    collection.clear()
    collection.update(ordered)


def _make(trainer: Trainer, given: Mapping[str, Any], reduce: Callable[..., Any]) -> _ResultMetric | None:
    meta = _Metadata(**{name: given[name] for name in _META}, reduce_fx=getattr(torch, given["reduce_fx"]))
    should, rank_zero_only, op = given["sync"]
    meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
    item = _ResultMetric(meta, given["is_tensor"])
    if not given["is_tensor"]:
        metric = _find_metric(trainer.lightning_module, given["metric_attribute"])
        if metric is None:
            return None
        item.value = metric
        item._forward_cache = None
    return item.to(trainer.strategy.root_device)


def _find_metric(module: LightningModule, attribute: str | None) -> Metric | None:
    found = dict(module.named_modules()).get(attribute or "")
    return found if isinstance(found, Metric) else None


def agree(
    trainer: Trainer, collection: _ResultCollection, exchange: Exchange, what: str, reduce: Callable[..., Any]
) -> None:
    """All members have the same keys afterwards."""
    everybody = exchange(f"keys logged in {what}", describe_results(collection))
    if everybody is None:
        return
    union: dict[str, dict[str, Any]] = {}
    for keys in everybody:
        for key, given in keys.items():
            union.setdefault(key, given)
    adopt_results(trainer, collection, union, reduce)


def key_of(collection: _ResultCollection, tensor: Tensor) -> str:
    """The key under which `self.log` keeps this very tensor as its latest value; "" if it does not."""
    return next((key for key, item in collection.items() if item._forward_cache is tensor), "")


def fill(collection: _ResultCollection, key: str, value: Tensor) -> None:
    """The latest value of a key, for a member that had no samples to log it with."""
    item = collection.get(key)
    if item is not None:
        item._forward_cache = value
        item.has_reset = False
        if not item.meta.on_epoch:
            item.value = value


def reduce_all(collection: _ResultCollection) -> None:
    """Computes numbers that are logged per epoch over all members, with `sync_dist=True` or without."""
    for item in collection.values():
        sync = item.meta.sync
        if item.is_tensor and item.meta.on_epoch and not item.has_reset and not sync.rank_zero_only:
            asked, sync.should = sync.should, True
            item.compute()
            sync.should = asked


def collections_manifest(trainer: Trainer) -> dict[str, Any]:
    """Keys of the training epoch and of validation, for newcomers."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        "train": describe_results(epoch_loop._results, live_only=False),
        "val": describe_results(epoch_loop.val_loop._results, live_only=False),
    }


def adopt_collections(trainer: Trainer, manifest: Mapping[str, Any], reduce: Callable[..., Any]) -> None:
    """A newcomer's collections get the donors' keys; what was logged before it came stays with those who logged it."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for collection, name in ((epoch_loop._results, "train"), (epoch_loop.val_loop._results, "val")):
        collection.clear()
        adopt_results(trainer, collection, manifest[name], reduce)


class Untouched:
    """Metrics and log calls inside have no effect: an idle member runs a training step on a stand-in batch.

    Attributes:
        synced: A value was logged per step with sync_dist=True: the others exchange such values now.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.synced = False
        self._kept: list[tuple[Metric, dict[str, Any], int, Any]] = []

    def __enter__(self) -> Untouched:
        for _, metric in metrics_of(self._trainer):
            self._kept.append((metric, metric._copy_state_dict(), metric._update_count, metric._computed))
        self._trainer.lightning_module.log = self._log  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._trainer.lightning_module.log
        for metric, states, count, computed in self._kept:
            for name, value in states.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed

    def _log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        # Within training_step values are logged per step unless the user says otherwise; a metric syncs by itself.
        per_step = options.get("on_step") in (None, True) and not options.get("rank_zero_only", False)
        if options.get("sync_dist", False) and per_step and not isinstance(value, Metric):
            self.synced = True
