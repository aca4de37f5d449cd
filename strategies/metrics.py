"""Syncs torchmetrics through the job: replaces torchmetrics' own functions for all metrics of the process.

Theory of operation. A metric syncs in `Metric.sync`, which its wrapped `compute` looks up on the class each time: by
itself only if torch.distributed runs, and else it shows this process's part in silence. For the time of fit the class
has our `sync`, so a metric is known at the moment it is used, whether it is an attribute of the module, stands in a
plain dict, or was made a moment ago. All its states travel in one slot, whose name says which metric it is: a member
that computes one which the others do not compute is told so by name.

A metric that was made with a `distributed_available_fn` or a `dist_sync_fn` of the user's keeps them.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities import dim_zero_cat

from chaos_lightning.errors import DisagreementError, UnsupportedError
from chaos_lightning.member.calls import users_line
from chaos_lightning.strategies.lightning_types import Trainer

Exchange = Callable[[str, Any], "list[Any] | None"]

_DEPTH = 3
"""Depth of containers within containers in which metrics are looked for, to name them."""


class MetricRoute:
    """Replacement of torchmetrics' sync for this process, from `install` to `remove`.

    Args:
        trainer: Trainer in fit.
        exchange: Gathers all members' values under a name.
        in_job: Returns whether `exchange` reaches other members.

    Attributes:
        on_reset: Called with the path of a metric of training that begins anew.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, in_job: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._exchange = exchange
        self._in_job = in_job
        self._before: dict[str, Any] = {}
        self._synced: dict[int, weakref.ref[Metric]] = {}
        self._trained: dict[int, tuple[weakref.ref[Metric], str]] = {}
        """Metrics that this member has updated in training, and their paths."""
        self._inherited: dict[str, tuple[weakref.ref[Metric] | None, list[Any]]] = {}
        """States of members that are gone, by path, for this very metric."""
        self.on_reset: Callable[[str], None] = lambda path: None

    def install(self) -> None:
        """Replaces torchmetrics' functions that sync, reset and update."""
        route = self
        real, real_dist, real_reset, real_set = Metric.sync, Metric._sync_dist, Metric.reset, Metric.__setattr__

        def sync(
            metric: Metric,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            asked = distributed_available or metric.distributed_available_fn
            if asked is not jit_distributed_available or not should_sync or not route._in_job():
                real(metric, dist_sync_fn, process_group, should_sync, distributed_available)
                return
            if process_group is not None or metric.process_group is not None:
                raise UnsupportedError(
                    f"{route.name_of(metric)} has a process_group, and a job has no groups of members; leave it out"
                )
            try:
                real(metric, dist_sync_fn or route.gather, None, True, _always)
            except (RuntimeError, ValueError) as error:
                if "process group" not in str(error):
                    raise
                raise UnsupportedError(
                    f"{route.name_of(metric)} asks torch.distributed itself where it syncs, and a job has no process "
                    f"group ({error}). Compute it after fit, in one process"
                ) from error

        def sync_dist(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
            if dist_sync_fn == route.gather:
                route.sync(metric)
            else:
                real_dist(metric, dist_sync_fn, process_group)

        def update_called(metric: Metric) -> bool:
            # A member without samples has updated nothing, but others have: computing is right there, too.
            return metric._update_count > 0 or route._in_job()

        def reset(metric: Metric) -> None:
            real_reset(metric)
            frame = sys._getframe(1)
            while frame.f_code.co_name == "reset" and frame.f_back is not None:
                frame = frame.f_back
            if not frame.f_code.co_name.startswith("_forward_"):  # which resets for a moment
                route._reset(metric)

        def set_attribute(metric: Metric, name: str, value: Any) -> None:
            real_set(metric, name, value)
            if name == "_update_count" and value and id(metric) not in route._trained:
                route._touch(metric)

        mine: dict[str, Any] = {
            "sync": sync,
            "_sync_dist": sync_dist,
            "update_called": property(update_called),
            "reset": reset,
            "__setattr__": set_attribute,
        }
        self._before = {name: vars(Metric)[name] for name in mine}
        for name, function in mine.items():
            setattr(Metric, name, function)

    def remove(self) -> None:
        """Restores torchmetrics' own functions."""
        for name, function in self._before.items():
            setattr(Metric, name, function)
        self._before = {}

    def forget_computed(self) -> None:
        """Drops cached values. A member without samples would otherwise keep a cached value and make no collective,
        while members with samples compute it anew.
        """
        for key, ref in list(self._synced.items()):
            metric = ref()
            if metric is None:
                del self._synced[key]
            else:
                metric._computed = None

    # ------------------------------------------------------------------ one metric

    def name_of(self, metric: Metric) -> str:
        """Returns a metric's name for messages and slots, which is equal at all members."""
        kind, found = type(metric).__name__, self._path(metric)
        return f"metric {found} ({kind})" if found else f"metric {kind} {_script()}"

    def _path(self, metric: Metric) -> str:
        return next((path for path, other in metrics_of(self._trainer) if other is metric), "")

    def sync(self, metric: Metric) -> None:
        """Gathers all members' states of a metric, and reduces them by the metric's own reductions."""
        self._synced[id(metric)] = weakref.ref(metric)
        name = self.name_of(metric)
        everybody = self._exchange(name, [packed(metric), *self._inherits(metric)])
        if everybody is not None:
            reduce_states(name, metric, [part for member in everybody for part in member])

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Gathers one tensor from all members. Has the signature of torchmetrics' `dist_sync_fn`, for metrics that
        call that themselves.
        """
        everybody = self._exchange(f"tensor of a metric {_script()}", tensor)
        return [tensor] if everybody is None else [other.to(tensor.device) for other in everybody]

    # ------------------------------------------------------------------ those of training

    def _touch(self, metric: Metric) -> None:
        """Records that this member has updated a metric in training, at the metric's first update."""
        if not self._trainer.training or not metric._reductions or not self._in_job():
            return
        path, key = self._path(metric), id(metric)
        if path and any(other == path for _, other in self._trained.values()):
            self.on_reset(path)  # it was made anew
        self._trained = {k: v for k, v in self._trained.items() if v[1] != path or not path}
        self._trained[key] = (weakref.ref(metric, lambda _: self._trained.pop(key, None)), path)

    def _reset(self, metric: Metric) -> None:
        if id(metric) in self._trained:
            path = self._trained[id(metric)][1]
            self._inherited.pop(path, None)
            self.on_reset(path)

    def trained(self, limit: int) -> tuple[dict[str, list[Any]], list[str]]:
        """Returns the states of metrics that were updated in training, by path, and the names of metrics whose states
        are not sent.

        Args:
            limit: Most bytes of all states together; the smallest ones go first.
        """
        states: dict[str, list[Any]] = {}
        left_out: list[str] = []
        found = [(m, path) for ref, path in self._trained.values() if (m := ref()) is not None]
        sized = [(_nbytes(m) + sum(_nbytes_of(p) for p in self._inherits(m)), n) for n, (m, _) in enumerate(found)]
        for nbytes, number in sorted(sized):
            metric, path = found[number]
            limit -= nbytes
            part = [] if limit < 0 else [packed(metric)]
            if limit < 0 or not path:
                left_out.append(path or type(metric).__name__)
            elif parts := [p for p in (*part, *self._inherits(metric)) if not p["empty"]]:
                states[path] = parts
        return states, left_out

    def inherit(self, path: str, states: list[Any]) -> None:
        """Keeps the metric states of a member that is gone; until the metric is reset, they are synced like those of
        one more member.
        """
        metric = next((other for name, other in metrics_of(self._trainer) if name == path), None)
        of, before = self._inherited.get(path, (None, []))
        ref = weakref.ref(metric) if metric is not None else of
        self._inherited[path] = (ref, [*before, *states])

    def _inherits(self, metric: Metric) -> list[Any]:
        for ref, states in self._inherited.values():
            if ref is not None and ref() is metric:
                return states
        return []

    def forget_trained(self) -> None:
        """Resets all metrics of training, since other members have taken over their states."""
        for ref, _ in list(self._trained.values()):
            if (metric := ref()) is not None:
                metric.reset()
        self._inherited = {}


def _always() -> bool:
    return True


def _script() -> str:
    """Returns the script of the calling user code, as `at train.py`; without the line number, since all members must
    name it alike.
    """
    return users_line().rpartition(":")[0]


# --- states ----------------------------------------------------------------------------------------------------------


def _nbytes(metric: Metric) -> int:
    return _nbytes_of({"states": {state: getattr(metric, state) for state in metric._reductions}})


def _nbytes_of(part: Mapping[str, Any]) -> int:
    flat = [t for v in part["states"].values() for t in (v if isinstance(v, list) else [v])]
    return sum(t.nbytes if isinstance(t, Tensor) else 64 for t in flat)


def packed(metric: Metric) -> dict[str, Any]:
    """Returns a metric's states in the form in which they are sent; None for each state if the metric was never
    updated.
    """
    states: dict[str, Any] = {}
    for state, reduction in metric._reductions.items():
        value = getattr(metric, state)
        if isinstance(value, list) and reduction is dim_zero_cat and len(value) > 1:
            value = [dim_zero_cat(value)]
        states[state] = value
    empty = metric._update_count == 0 and all(_same(states[s], metric._defaults[s]) for s in states)
    return {"states": dict.fromkeys(states) if empty else states, "empty": empty}


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, list) or isinstance(default, list):
        return isinstance(value, list) and not value
    return value.shape == default.shape and torch.equal(value, default.to(value.device, value.dtype))


def reduce_states(name: str, metric: Metric, everybody: Sequence[Mapping[str, Any]]) -> None:
    """Sets a metric's states to the reduction of all members' states; members that never updated it are left out."""
    expected = list(everybody[0]["states"])
    if any(list(other["states"]) != expected for other in everybody):
        raise DisagreementError(
            f"{name} has other states at other members ({sorted({s for o in everybody for s in o['states']})} in all); "
            "make it with the same arguments everywhere"
        )
    full = [other["states"] for other in everybody if not other["empty"]]
    if not full:
        warnings.warn(f"{name} is computed before any member has updated it", stacklevel=2)
        return
    for state, reduction in metric._reductions.items():
        mine = getattr(metric, state)
        device = mine.device if isinstance(mine, Tensor) else metric.device
        values = [_moved(states[state], device) for states in full]
        if len({tuple(v.shape) if isinstance(v, Tensor) else None for v in values}) > 1:
            raise DisagreementError(
                f"{name} has a state {state!r} of other shapes at other members "
                f"({sorted({str(list(v.shape)) for v in values if isinstance(v, Tensor)})}); make it with the same "
                "arguments everywhere"
            )
        if isinstance(values[0], list):
            joined = [item for value in values for item in value]
            setattr(metric, state, [dim_zero_cat(joined)] if reduction is dim_zero_cat and joined else joined)
            continue
        stacked = torch.stack(values)
        setattr(metric, state, reduction(stacked) if callable(reduction) else stacked)


def _moved(value: Any, device: Any) -> Any:
    """Returns a value on `device`, where the metric keeps it. Received tensors are on the strategy's device, which
    may be another one.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    return [_moved(item, device) for item in value] if type(value) is list else value


# --- metrics by name -------------------------------------------------------------------------------------------------


def metrics_of(trainer: Trainer) -> list[tuple[str, Metric]]:
    """Returns all torchmetrics of module, datamodule and callbacks with their names, also those in lists and dicts."""
    module = trainer.lightning_module
    owners: list[tuple[str, object]] = [("", module), ("datamodule", trainer.datamodule)]
    owners += [(type(callback).__name__, callback) for callback in trainer.callbacks]
    found: list[tuple[str, Metric]] = []
    seen: set[int] = set()
    for name, owner in owners:
        if owner is not None:
            _collect(name, owner, found, seen, own=True)
    return found


def _collect(
    path: str,
    value: object,
    found: list[tuple[str, Metric]],
    seen: set[int],
    *,
    own: bool = False,
    depth: int = 0,
) -> None:
    if id(value) in seen or isinstance(value, _ResultMetric):
        return
    if isinstance(value, nn.Module):
        for name, module in value.named_modules(prefix=path):
            if id(module) in seen or isinstance(module, _ResultMetric):
                continue
            seen.add(id(module))
            if isinstance(module, Metric):
                found.append((name, module))
            for key, other in vars(module).items():
                if not key.startswith("_") and isinstance(other, dict | list | tuple):
                    _collect(f"{name}.{key}".lstrip("."), other, found, seen, depth=depth + 1)
    elif own:
        seen.add(id(value))
        for key, other in vars(value).items():
            if isinstance(other, nn.Module | dict | list | tuple):
                _collect(f"{path}.{key}", other, found, seen, depth=depth + 1)
    elif isinstance(value, dict | list | tuple) and depth <= _DEPTH:
        for key, other in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(other, nn.Module | dict | list | tuple):
                _collect(f"{path}.{key}", other, found, seen, depth=depth + 1)


def is_metrics(module: nn.Module) -> bool:
    """Returns whether the module is a metric, or contains nothing but metrics."""
    children = list(module.children())
    return isinstance(module, Metric) or (bool(children) and all(is_metrics(child) for child in children))


_Kept = dict[int, tuple[Metric, dict[str, Any], int, Any]]
_kept: list[_Kept] = []
"""States of metrics as they were before, by id; for each `untouched` within another."""


@contextmanager
def watched() -> Iterator[None]:
    """Makes `untouched` cheap within this context: it watches metrics by replacing `Metric.__setattr__`, which is
    slow to replace, so it is done once here.
    """
    real = Metric.__setattr__
    if vars(real).get("watches"):
        yield
        return

    def setattr_(metric: Metric, name: str, value: Any) -> None:
        if _kept and name in ("_computed", "_update_count") and "_update_count" in vars(metric):
            for kept in _kept:
                if id(metric) not in kept:
                    kept[id(metric)] = (metric, metric._copy_state_dict(), metric._update_count, metric._computed)
        real(metric, name, value)

    vars(setattr_)["watches"] = True
    Metric.__setattr__ = setattr_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Metric.__setattr__ = real  # type: ignore[method-assign]


@contextmanager
def untouched() -> Iterator[None]:
    """Restores, at the end of this context, the states of all metrics that were updated within it."""
    with watched():
        _kept.append({})
        try:
            yield
        finally:
            for metric, states, count, computed in _kept.pop().values():
                for name, value in states.items():
                    setattr(metric, name, value)
                metric._update_count, metric._computed = count, computed
