"""Records what `self.log` gets while units of a pipeline run, and logs it once a step at all members.

Theory of operation. Every stage runs the user's own `training_step` for a micro-batch, and the stage with the last
layers alone gets to its end. There `self.log` records its arguments, and metrics (torchmetrics) change. At other stages
a unit leaves no trace in either: it ends before, or would count the micro-batch a second time. The records travel as
`extra` bytes of their micro-batch. When the step is committed, all members `replay` the same records in the same order,
so all have equal values, and nothing needs to be reduced over members.

A step is one call of `self.log` for each name. The value is that of the whole step: means are weighed by batch sizes,
sums, minima and maxima go over all micro-batches. This is where it differs from Lightning with
`accumulate_grad_batches=M`: there a value "on step" is that of the last micro-batch, a part of the step. Values of an
epoch are the same.

A metric is logged by the name of its attribute. The value "on step" is the weighed mean of what its calls returned. The
value of the epoch is computed from the states of all members, as without pipelines (metrics.py); each micro-batch is in
the state of one of them.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _Metadata
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from chaos_lightning.errors import UnsupportedError, WireError
from chaos_lightning.replication.manifest import decode_manifest, encode_manifest
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.metrics import untouched

_ARGUMENTS = inspect.signature(LightningModule.log)
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "rank_zero_only")
_OPTIONS = dict.fromkeys(_FLAGS, bool) | dict.fromkeys(("reduce_fx", "metric_attribute"), str)
"""Arguments of `self.log` that travel if they are given, and their types. `sync_dist` does not: values are equal
everywhere. `metric_attribute` says that the value is a metric."""
_REDUCTIONS = ("mean", "sum", "min", "max")


class LoggedValue(NamedTuple):
    """One value given to `self.log` in a micro-batch.

    Attributes:
        name: Name that was given.
        value: A number; of a metric what its last call returned, None if it was not called.
        size: Samples that a mean counts it for; None: the micro-batch's weight.
        wide: Whether the number is of double precision.
        options: Other arguments, as far as they were given.
    """

    name: str
    value: Any
    size: float | None
    wide: bool
    options: dict[str, Any]


class UnitLogs:
    """Records the values that the units of one fit log, and logs them once a step.

    Args:
        trainer: Trainer in fit.
        collectives: Collectives, which are refused within units.
        refuse: `LayerChain.refuse_placeholders`: refuses a value that depends on what another stage has.
        hook: Name of the user's step.
    """

    def __init__(
        self,
        trainer: Trainer,
        collectives: Collectives,
        refuse: Callable[[Any, str], None],
        hook: str = "training_step",
    ) -> None:
        self._trainer, self._collectives, self._refuse, self._hook = trainer, collectives, refuse, hook
        self._recorded: dict[int, list[LoggedValue]] = {}
        self._aside = False

    # ------------------------------------------------------------------ in a unit

    @contextmanager
    def unit(self, micro_batch: int, last: bool, batch: Any = None) -> Iterator[None]:
        """Records what the user's step logs within this context, as one unit's.

        Args:
            micro_batch: Number of the micro-batch.
            last: Whether the unit runs the last layers. If it has run before in this attempt, it leaves no trace this
                time.
            batch: The micro-batch, for means over an epoch that are logged without `batch_size`.
        """
        module, counts = self._trainer.lightning_module, last and micro_batch not in self._recorded
        before = vars(module).get("log")  # units of a validation run within ones of training
        found: list[LoggedValue] = []

        def log(*args: Any, **given: Any) -> None:
            if counts and not self._aside:
                found.append(self._record(batch, _ARGUMENTS.bind(module, *args, **given).arguments))

        with self._collectives.within_unit(self._hook), nullcontext() if counts else untouched():
            module.log = log  # type: ignore[method-assign]
            try:
                yield
            finally:
                if before is None:
                    del module.log
                else:
                    module.log = before  # type: ignore[method-assign]
        if counts:
            self._recorded[micro_batch] = found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Drops what is logged and counted within this context: this pass only repeats a unit's pass
        (`LayerChain.aside`).
        """
        self._aside = True
        try:
            with untouched():
                yield
        finally:
            self._aside = False

    def forget(self) -> None:
        """Drops all records, at the begin of a new attempt."""
        self._recorded.clear()

    def _record(self, batch: Any, given: dict[str, Any]) -> LoggedValue:
        name, value, size = given["name"], given["value"], given.get("batch_size")
        options: dict[str, Any] = {key: bool(given[key]) for key in _FLAGS if given.get(key) is not None}
        levels = _FxValidator.check_logging_and_get_default_levels(
            self._hook, options.get("on_step"), options.get("on_epoch")
        )
        meta = _Metadata(  # refuses what Lightning refuses
            self._hook, name, on_step=levels[0], on_epoch=levels[1], reduce_fx=given.get("reduce_fx", "mean")
        )
        if not meta.is_mean_reduction:
            options["reduce_fx"] = meta.reduce_fx.__name__
        if isinstance(value, Metric):
            self._refuse([getattr(value, state) for state in value._reductions], f"the metric logged as {name!r}")
            options["metric_attribute"] = given.get("metric_attribute") or self._attribute(name, value)
            value = value._forward_cache
            value = value if isinstance(value, Tensor) and value.numel() == 1 else None
        else:
            _refuse_no_number(name, value)
            if size is None and batch is not None and meta.on_epoch and meta.is_mean_reduction:
                size = extract_batch_size(batch)
        self._refuse(value, f"the value logged as {name!r}")
        kept = value.detach().clone().reshape(()) if isinstance(value, Tensor) else value
        wide = (kept.dtype if isinstance(kept, Tensor) else _get_default_dtype()) == torch.float64
        return LoggedValue(name, kept, None if size is None else _whole(float(size)), wide, options)

    def _attribute(self, name: str, metric: Metric) -> str:
        """Returns the attribute path of a metric within the module."""
        found = (path for path, each in self._trainer.lightning_module.named_modules() if each is metric)
        path = next(found, "")
        if not path:
            raise UnsupportedError(
                f"self.log({name!r}, ...) is given a {type(metric).__name__} that is no attribute of the module, so "
                "the other members do not find theirs; make it one in __init__ (in an nn.ModuleDict if there are many)"
            )
        return path

    # ------------------------------------------------------------------ beside a contribution

    def extra(self, micro_batch: int) -> bytes:
        """Returns the record of a micro-batch as bytes, to be sent; b"" if it logged nothing."""
        found = self._recorded.get(micro_batch)
        if not found:
            return b""
        numbers = _numbers([logged.value for logged in found])
        rows = [
            [each.name, number, each.size, each.wide, each.options] for each, number in zip(found, numbers, strict=True)
        ]
        return encode_manifest(rows).data

    # ------------------------------------------------------------------ after the commit

    def replay(self, extras: Mapping[int, bytes], weights: Mapping[int, float]) -> None:
        """Logs the recorded values of a step. To be called at all members, while the user's step is under way.

        Args:
            extras: Bytes that `extra` returned for each micro-batch, where that ran to its end.
            weights: Weights of micro-batches, by which means without a batch size are weighed.

        Raises:
            WireError: An extra is malformed.
            UnsupportedError: A metric is logged that this member's module does not have.
        """
        step: dict[tuple[str, tuple[tuple[str, Any], ...]], list[tuple[LoggedValue, float | None]]] = {}
        for j in sorted(extras):
            for logged in read_extra(extras[j]):
                size = weights.get(j) if logged.size is None else logged.size
                step.setdefault((logged.name, tuple(sorted(logged.options.items()))), []).append((logged, size))
        module = self._trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, self._hook
        try:
            for (name, options), rows in step.items():
                self._log(module, name, dict(options), rows)
        finally:
            module._current_fx_name = before

    def _log(
        self,
        module: LightningModule,
        name: str,
        options: dict[str, Any],
        rows: Sequence[tuple[LoggedValue, float | None]],
    ) -> None:
        pairs = [(logged.value, size) for logged, size in rows if logged.value is not None]
        dtype = torch.float64 if any(logged.wide for logged, _ in rows) else torch.float32
        number = combined(options.get("reduce_fx", "mean"), pairs) if pairs else None
        sizes = [size for _, size in rows if size is not None]
        total = functools.reduce(operator.add, sizes) if len(sizes) == len(rows) else None
        value: Any = torch.tensor(number, dtype=dtype, device=module.device) if number is not None else None
        if "metric_attribute" in options:
            value = self._metric(name, options["metric_attribute"], value)
        module.log(name, value, batch_size=_whole(total), **options)  # type: ignore[arg-type]

    def _metric(self, name: str, path: str, value: Tensor | None) -> Metric:
        """Returns the module's metric at this path, after setting the value that it shows for the step."""
        metric = dict(self._trainer.lightning_module.named_modules()).get(path)
        if not isinstance(metric, Metric):
            raise UnsupportedError(
                f"{name!r} is logged at its last stage as the metric {path!r}, which this member's module does not "
                "have; make it at all members"
            )
        shown: Any = None if value is None else value.to(metric.device)
        metric._forward_cache = shown
        return metric


def read_extra(data: bytes) -> list[LoggedValue]:
    """Decodes the bytes that `UnitLogs.extra` returned at another member.

    Raises:
        WireError: The bytes are something else.
    """
    rows = decode_manifest(data) if data else []
    if type(rows) is not list or not all(type(row) is list and len(row) == 5 for row in rows):
        raise WireError("malformed record of logged values; expected rows of 5 entries")
    found = [LoggedValue(*row) for row in rows]
    for logged in found:
        if not _is_right(logged):
            raise WireError(f"malformed record of a logged value: {str(logged)[:200]}")
    return found


def _is_right(logged: LoggedValue) -> bool:
    name, value, size, wide, options = logged
    return (
        type(name) is str
        and (type(value) is float or (value is None and type(options) is dict and "metric_attribute" in options))
        and (size is None or (type(size) in (int, float) and 0 <= size < float("inf")))
        and type(wide) is bool
        and type(options) is dict
        and all(type(option) is _OPTIONS.get(key) for key, option in options.items())
        and options.get("reduce_fx", "mean") in _REDUCTIONS
    )


def combined(reduction: str, pairs: Sequence[tuple[float, float | None]]) -> float:
    """Returns a step's value, combined from its micro-batches' values in order, with the same bits on every machine.

    Args:
        reduction: One of "mean", "sum", "min", "max".
        pairs: Values, and the samples that each counts for; None: nobody knows.
    """
    values = [value for value, _ in pairs]
    if len(values) == 1:
        return values[0]
    if reduction in ("min", "max"):
        stacked = torch.tensor(values, dtype=torch.float64)
        return float(stacked.amin() if reduction == "min" else stacked.amax())
    if reduction == "sum":
        return functools.reduce(operator.add, values)
    sizes = [size for _, size in pairs if size is not None]
    if len(sizes) < len(values) or not any(sizes):
        sizes = [1.0] * len(values)
    total = functools.reduce(operator.add, (value * size for value, size in zip(values, sizes, strict=True)))
    return total / functools.reduce(operator.add, sizes)


def _whole(number: float | None) -> float | None:
    """Returns a whole number as an int, since sample counts are ints."""
    return int(number) if number is not None and number == int(number) else number


def _refuse_no_number(name: str, value: object) -> None:
    """Raises ValueError if a logged value is no number, as Lightning does, while the user's line is still in the
    traceback.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) is given a tensor of shape {tuple(value.shape)}; expected one number, such "
                "as its mean()"
            )
    elif not isinstance(value, Number):
        raise ValueError(f"self.log({name!r}, ...) is given a {type(value).__name__}; expected a number or a metric")


def _numbers(values: Sequence[Any]) -> list[float | None]:
    """Returns numbers and one-element tensors as floats; waits for each device only once."""
    found = [None if value is None or isinstance(value, Tensor) else float(value) for value in values]
    for device in dict.fromkeys(value.device for value in values if isinstance(value, Tensor)):
        places = [at for at, value in enumerate(values) if isinstance(value, Tensor) and value.device == device]
        for at, number in zip(places, torch.stack([values[at].double() for at in places]).tolist(), strict=True):
            found[at] = number
    return found
