"""Tests values that units of a pipeline log: all members have them, and they are those of one process."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection, SumMetric

from chaos_lightning.errors import UnsupportedError, WireError
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.replication.manifest import encode_manifest
from chaos_lightning.strategies.collectives import Collectives
from chaos_lightning.strategies.metrics import MetricRoute, packed
from chaos_lightning.strategies.pipeline_fit import LoggedLayers
from chaos_lightning.strategies.pipeline_logs import UnitLogs, combined, read_extra

MICRO_BATCHES, STEPS = 3, 4
TOLERANCE = 1e-12


class Logging(pl.LightningModule):
    """Model that logs in every supported way, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1).double()
        self.mse = MeanSquaredError().set_dtype(torch.float64)
        self.both = MetricCollection({"total": SumMetric(), "error": MeanSquaredError()}).set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.mse_loss(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("on_step", loss)
        self.log("synced", loss * 3, on_epoch=True, on_step=False, sync_dist=True)
        self.log("given", loss * 2, on_epoch=True, batch_size=2 + len(x))
        self.log("quiet", loss, on_epoch=True, on_step=False, logger=False)
        self.log("sum", y.sum(), reduce_fx="sum", on_epoch=True, on_step=True)
        self.log_dict({"low": y.min(), "lower": x.min()}, reduce_fx=torch.min, on_epoch=True, on_step=True)
        self.log("high", y.max(), reduce_fx=max, on_epoch=True, on_step=False)
        self.log("number", float(len(x)), on_epoch=True, on_step=True)
        self.mse(out, y)
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        self.both["total"].update(y)
        self.both["error"].update(out, y)
        self.log_dict(self.both, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Memory(Logger):
    """Logger that keeps all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name, version = "memory", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Ends(pl.Callback):
    """Callback that records metrics at each epoch's end, and the progress bar's names and metrics after each batch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.bars: list[set[str]] = []
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.bars.append(set(trainer.progress_bar_metrics))
        self.steps.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        ends = trainer.callback_metrics.items()
        self.epochs.append({key: float(value) for key, value in ends if not key.endswith("_step")})


def batches() -> list[tuple[Tensor, Tensor]]:
    """Returns micro-batches of different sizes."""
    g = torch.Generator().manual_seed(1)
    sizes = [2 + (7 * j) % 5 for j in range(MICRO_BATCHES * STEPS)]
    return [(torch.randn(n, 4, generator=g).double(), torch.randn(n, 1, generator=g).double()) for n in sizes]


def refused_nowhere() -> Collectives:
    return Collectives(lambda *_: None, lambda: torch.device("cpu"), lambda value, *_: value)


def logs_of(module: Any, refuse: Any = lambda value, what: None) -> UnitLogs:
    return UnitLogs(SimpleNamespace(lightning_module=module), refused_nowhere(), refuse)


class Units(SingleDeviceStrategy):
    """Strategy whose step is a list of micro-batches. Those in `here` run as this member's units, the others on a copy
    of the module in place of another member.

    Args:
        here: Numbers of micro-batches.
        attempts: Each step runs so many times; the last one counts.
    """

    def __init__(self, here: set[int], attempts: int = 1) -> None:
        super().__init__(device="cpu")
        self.here, self.attempts = here, attempts
        self.twin: Any = None

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        self.twin = copy.deepcopy(module)
        self.twin.net = module.net
        self.logs = UnitLogs(trainer, refused_nowhere(), lambda value, what: None)
        self.others = logs_of(self.twin)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        module: Any = self.lightning_module
        base = copy.deepcopy((module.mse, module.both))
        for _ in range(self.attempts):
            for kept, metric in zip(base, (module.mse, module.both), strict=True):
                restore(metric, kept)
            self.logs.forget()
            self.others.forget()
            losses = []
            for j, micro_batch in enumerate(batch):
                runs, logs = (module, self.logs) if j in self.here else (self.twin, self.others)
                with logs.unit(j, True, micro_batch):
                    losses.append(runs.training_step(micro_batch, batch_idx))
            if self.attempts > 1:
                self.twin.mse.reset()
                self.twin.both.reset()
        extras = {j: (self.logs if j in self.here else self.others).extra(j) for j in range(len(batch))}
        self.logs.replay(extras, {j: float(len(b[0])) for j, b in enumerate(batch)})
        return sum(losses) / len(losses)


def restore(metric: Any, kept: Any) -> None:
    """Restores a metric's states, as the engine's undo does in a job."""
    several = isinstance(metric, MetricCollection)
    pairs = zip(metric.values(), kept.values(), strict=True) if several else [(metric, kept)]
    for each, its in pairs:
        for name in each._reductions:
            setattr(each, name, copy.deepcopy(getattr(its, name)))
        each._update_count, each._computed = its._update_count, its._computed


class ForgetsTwin(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.twin.mse.reset()
        trainer.strategy.twin.both.reset()


@contextlib.contextmanager
def routed(trainer: pl.Trainer) -> Iterator[None]:
    """Syncs metrics with the states of the module's copy within this context."""

    def exchange(name: str, value: Any) -> list[Any]:
        path = name.removeprefix("metric ").partition(" ")[0]
        other = trainer.strategy.twin.get_submodule(path)
        return [value, [packed(other)]]

    route = MetricRoute(trainer, exchange, lambda: True)
    route.install()
    try:
        yield
    finally:
        route.remove()


def fit(tmp_path: Any, strategy: Any, data: Any, accumulate: int) -> tuple[Ends, Memory, Logging]:
    ends, memory, module = Ends(), Memory(), Logging()
    callbacks = [ends, ForgetsTwin()] if isinstance(strategy, Units) else [ends]
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, logger=memory,
        callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    if isinstance(strategy, Units):
        with routed(trainer):
            trainer.fit(module, DataLoader(data, batch_size=None))
    else:
        trainer.fit(module, DataLoader(data, batch_size=None))
    return ends, memory, module


def steps() -> list[list[tuple[Tensor, Tensor]]]:
    all_of_them = batches()
    return [all_of_them[at : at + MICRO_BATCHES] for at in range(0, len(all_of_them), MICRO_BATCHES)]


def assert_close(got: dict[str, float], expected: dict[str, float]) -> None:
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert math.isclose(got[key], value, rel_tol=TOLERANCE), key


@pytest.mark.parametrize("here", [{0, 1, 2}, {1}, set()], ids=["all here", "one here", "none here"])
def test_values_of_an_epoch_are_those_of_one_process(tmp_path: Any, here: set[int]) -> None:
    plain, plain_memory, plain_module = fit(tmp_path, "auto", batches(), MICRO_BATCHES)
    units, memory, module = fit(tmp_path, Units(here), steps(), 1)
    assert torch.allclose(module.net.weight, plain_module.net.weight, rtol=TOLERANCE)
    assert len(units.epochs) == 2
    for got, expected in zip(units.epochs, plain.epochs, strict=True):
        assert {"loss", "loss_epoch", "synced", "given_epoch", "sum_epoch", "low", "high", "mse", "error"} <= set(got)
        assert_close(got, expected)
    of_epochs = [[row for row in each.rows if "loss_epoch" in row] for each in (memory, plain_memory)]
    for got, expected in zip(*of_epochs, strict=True):
        assert "quiet" not in got
        assert_close(got, expected)
    assert [bar for bar in units.bars if bar] == [{"loss_step"}] * 4 + [{"loss_step", "loss_epoch"}] * 4


def test_all_members_log_the_same_bits(tmp_path: Any) -> None:
    """Members that run different micro-batches log the same bits, except metrics, which they sync themselves."""
    runs = [fit(tmp_path, Units(here), steps(), 1)[0] for here in ({0, 1, 2}, {1}, set())]
    for other in runs[1:]:
        for got, expected in zip(other.steps + other.epochs, runs[0].steps + runs[0].epochs, strict=True):
            assert set(got) == set(expected)
            assert {k: v for k, v in got.items() if k not in ("total", "error", "mse", "mse_epoch")} == {
                k: v for k, v in expected.items() if k not in ("total", "error", "mse", "mse_epoch")
            }


def test_a_value_of_a_step_is_that_of_all_its_micro_batches(tmp_path: Any) -> None:
    _, memory, _ = fit(tmp_path, Units({0, 2}), steps(), 1)
    module = Logging()
    rows = [row for row in memory.rows if "loss_step" in row]
    assert len(rows) == 2 * STEPS
    sizes = [float(len(x)) for x, _ in steps()[0]]
    losses = [F.mse_loss(module.net(x), y).item() for x, y in steps()[0]]
    mean = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)
    weighed = sum(2 * loss * (n + 2) for loss, n in zip(losses, sizes, strict=True)) / sum(n + 2 for n in sizes)
    expected = {
        "loss_step": mean,
        "on_step": mean,
        "mse_step": mean,
        "given_step": weighed,
        "number_step": float(torch.tensor(sum(n * n for n in sizes) / sum(sizes))),
        "sum_step": float(sum(y.sum() for _, y in steps()[0])),
        "low_step": min(float(y.min()) for _, y in steps()[0]),
        "lower_step": min(float(x.min()) for x, _ in steps()[0]),
        "epoch": 0,
    }
    assert_close(rows[0], expected)


def test_a_step_that_runs_again_counts_once(tmp_path: Any) -> None:
    once, twice = (fit(tmp_path, Units({0, 1, 2}, attempts), steps(), 1)[0] for attempts in (1, 2))
    assert once.epochs == twice.epochs
    assert once.steps == twice.steps


# ------------------------------------------------------------------------------------------------ units


@pytest.fixture
def module() -> Logging:
    made = Logging()
    made._current_fx_name = "training_step"
    return made


def states(module: Logging) -> list[Tensor]:
    return [m.sum_squared_error.clone() for m in (module.mse, module.both["error"])]


def test_a_unit_that_is_not_the_last_one_leaves_no_trace(module: Logging) -> None:
    logs, before = logs_of(module), states(module)
    with logs.unit(0, False, batches()[0]):
        module.training_step(batches()[0], 0)
    assert all(map(torch.equal, states(module), before))
    assert module.mse._update_count == 0
    assert logs.extra(0) == b""
    assert "log" not in vars(module)


def test_a_unit_that_ends_in_its_midst_is_not_logged(module: Logging) -> None:
    logs = logs_of(module)

    def ends() -> None:
        with logs.unit(0, True):
            module.log("x", 1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ends()
    assert logs.extra(0) == b""
    with logs.unit(0, True):
        module.log("x", 2.0)
    assert [logged.value for logged in read_extra(logs.extra(0))] == [2.0]


def test_a_second_pass_of_one_unit_leaves_no_trace(module: Logging) -> None:
    """The chain runs a unit a second time to find out where a NaN comes from: that pass is neither logged nor
    counted.
    """
    logs, after = logs_of(module), []
    for _ in range(2):
        with logs.unit(0, True, batches()[0]):
            module.training_step(batches()[0], 0)
        after.append(states(module))
    assert all(map(torch.equal, *after))
    names = [logged.name for logged in read_extra(logs.extra(0))]
    assert len(names) == len(set(names)) > 5
    logs.forget()
    assert logs.extra(0) == b""


def test_collectives_within_a_unit_are_refused_by_name(module: Logging) -> None:
    collectives = refused_nowhere()
    logs = UnitLogs(SimpleNamespace(lightning_module=module), collectives, lambda value, what: None)
    calls = (
        lambda: collectives.reduce(torch.ones(1), "mean"),
        lambda: collectives.all_gather(torch.ones(1)),
        lambda: collectives.barrier("mine"),
    )
    for call in calls:
        with logs.unit(0, True), pytest.raises(UnsupportedError, match=r"inside training_step.*on_train_batch_end"):
            call()
    assert torch.equal(collectives.reduce(torch.ones(1), "mean"), torch.ones(1))


@pytest.mark.parametrize(
    ("value", "options", "error", "words"),
    [
        (torch.ones(2), {}, ValueError, r"'x'.*shape \(2,\).*mean"),
        ("text", {}, ValueError, "'x'.*a str"),
        ({"a": 1.0}, {}, ValueError, "'x'.*a dict"),
        (SumMetric(), {}, UnsupportedError, "'x'.*SumMetric.*no attribute"),
        (1.0, {"reduce_fx": "median"}, MisconfigurationException, "reduce_fx"),
        (1.0, {"on_step": False, "on_epoch": False}, MisconfigurationException, "not useful|on_step"),
        (1.0, {"no_such": 1}, TypeError, "no_such"),
    ],
)
def test_what_cannot_be_logged_is_refused_in_the_users_line(
    module: Logging, value: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with logs_of(module).unit(0, True), pytest.raises(error, match=words):
        module.log("x", value, **options)


class Staged(pl.LightningModule):
    """Model of layers between an embedding and a head, which are stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.mean = MeanSquaredError()

    def logs(self, embedded: Tensor, out: Tensor) -> None:
        self.log("ok", out.mean())

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        embedded = x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        self.logs(embedded, out)
        return out.sum()


class LogsEmbedding(Staged):
    def logs(self, embedded: Tensor, out: Tensor) -> None:
        self.log("size", embedded.norm())


class CountsEmbedding(Staged):
    def logs(self, embedded: Tensor, out: Tensor) -> None:
        self.mean.update(embedded, embedded)
        self.log("mean", self.mean)


@pytest.mark.parametrize(
    ("kind", "what"), [(Staged, ""), (LogsEmbedding, "logged as 'size'"), (CountsEmbedding, "metric logged as 'mean'")]
)
def test_a_value_that_another_stage_has_is_refused_by_name(kind: type[Staged], what: str) -> None:
    module = kind()
    chain = LayerChain(module, "blocks", module.training_step)
    logs, batch = logs_of(module, chain.refuse_placeholders), torch.randn(3, 4)
    with logs.unit(0, False):
        first = chain.run(0, 1, batch)
    received = tuple(t.detach() for t in first.tensors)
    if what:
        with pytest.raises(UnsupportedError, match=f"{what}.* depends on embed"), logs.unit(0, True):
            chain.run(1, 2, batch, received, first.specs)
        return
    with logs.unit(0, True):
        last = chain.run(1, 2, batch, received, first.specs)
    (logged,) = read_extra(logs.extra(0))
    assert logged.name == "ok"
    assert math.isclose(3 * logged.value, last.result.item(), rel_tol=1e-6)


class Diverges(Staged):
    """Model whose own values are NaN, so that the chain runs a second pass to look for placeholders."""

    def logs(self, embedded: Tensor, out: Tensor) -> None:
        self.log("nan", out.sum() * math.nan)
        self.log("one", 1.0, reduce_fx="sum")
        self.mean.update(torch.ones(1), torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return super().training_step(batch) * math.nan


def test_a_pass_that_looks_for_placeholders_counts_nothing() -> None:
    module = Diverges()
    passes: list[int] = []
    chain = LayerChain(module, "blocks", lambda batch: passes.append(1) or module.training_step(batch))
    logs, batch = logs_of(module, chain.refuse_placeholders), torch.randn(3, 4)
    layers = LoggedLayers(SimpleNamespace(chain=chain), logs)
    first = layers.run(0, 1, batch, (), "", at=(0, 0), call=None)
    passes.clear()
    layers.run(1, 2, batch, tuple(t.detach() for t in first.tensors), first.specs, at=(0, 0), call=None)
    assert len(passes) == 2
    assert [logged.name for logged in read_extra(logs.extra(0))] == ["nan", "one"]
    assert module.mean.total == 1


def test_units_within_units_log_for_themselves(module: Logging) -> None:
    """In a validation round, units that log for validation run within units that log for training: each logs its own
    values.
    """
    outer, inner = logs_of(module), logs_of(module)
    with outer.unit(0, True):
        module.log("outer", 1.0)
        with inner.unit(0, True):
            module.log("inner", 1.0)
            module.mse.update(torch.ones(1).double(), torch.zeros(1).double())
        module.log("again", 1.0)
    assert [logged.name for logged in read_extra(outer.extra(0))] == ["outer", "again"]
    assert [logged.name for logged in read_extra(inner.extra(0))] == ["inner"]
    assert module.mse.total == 1
    assert "log" not in vars(module)


# ------------------------------------------------------------------------------------------------ what travels


def test_records_are_small(module: Logging) -> None:
    logs = logs_of(module)
    with logs.unit(0, True):
        module.log("loss", torch.tensor(0.25), prog_bar=True)
    assert len(logs.extra(0)) < 60


@pytest.mark.parametrize(
    "rows",
    [
        5,
        [5],
        [["x", 1.0, 1, False]],
        [[1, 1.0, 1, False, {}]],
        [["x", "1", 1, False, {}]],
        [["x", None, 1, False, {}]],
        [["x", 1.0, -1, False, {}]],
        [["x", 1.0, float("nan"), False, {}]],
        [["x", 1.0, True, False, {}]],
        [["x", 1.0, 1, 0, {}]],
        [["x", 1.0, 1, False, []]],
        [["x", 1.0, 1, False, {"reduce_fx": "product"}]],
        [["x", 1.0, 1, False, {"prog_bar": 1}]],
        [["x", 1.0, 1, False, {"sync_dist_group": None}]],
    ],
)
def test_other_records_are_refused(rows: Any) -> None:
    with pytest.raises(WireError):
        read_extra(encode_manifest(rows).data)


@given(st.binary(min_size=1, max_size=60))
def test_odd_bytes_are_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert read_extra(data) == []


def test_a_metric_that_this_module_lacks_is_named(module: Logging) -> None:
    logs = logs_of(module)
    rows = encode_manifest([["acc", None, None, False, {"metric_attribute": "accuracy"}]]).data
    with pytest.raises(UnsupportedError, match=r"'acc'.*'accuracy'"):
        logs.replay({0: rows}, {})


@pytest.mark.parametrize(
    ("reduction", "pairs", "expected"),
    [
        ("mean", [(1.0, 1), (4.0, 2)], 3.0),
        ("mean", [(1.0, None), (4.0, 2)], 2.5),
        ("mean", [(1.0, 0.0), (4.0, 0.0)], 2.5),
        ("mean", [(0.1, 3)], 0.1),
        ("sum", [(1.0, 1), (4.0, 2)], 5.0),
        ("min", [(1.0, 1), (-4.0, 2)], -4.0),
        ("max", [(1.0, 1), (-4.0, 2)], 1.0),
        ("max", [(1.0, 1), (math.nan, 2)], math.nan),
        ("mean", [(1.0, 1), (math.inf, 2)], math.inf),
    ],
)
def test_values_of_micro_batches_are_combined(reduction: str, pairs: Any, expected: float) -> None:
    got = combined(reduction, pairs)
    assert got == expected or (math.isnan(got) and math.isnan(expected))
