"""Tests torchmetrics in a job: they sync wherever they were made, with other members' states, or are refused."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics as tm
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torchmetrics.metric import Metric

from chaos_lightning.errors import DisagreementError, UnsupportedError
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies.metrics import MetricRoute, is_metrics, metrics_of, packed, untouched
from chaos_lightning.strategies.results import adopt_results, describe_results


class Others:
    """Double of the other members, with their states of the next metric that is computed."""

    def __init__(self) -> None:
        self.packed: list[Any] = []
        self.names: list[str] = []
        self.inside = True

    def exchange(self, name: str, value: Any) -> list[Any] | None:
        self.names.append(name)
        return [decode_payload(encode_payload(part)) for part in (value, *self.packed)]

    def has(self, metric: Metric) -> None:
        self.packed.append([packed(metric)])


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"inner": [tm.MeanMetric()]}
        self.child = nn.Sequential(nn.Linear(1, 1))
        self.child.beside = [tm.SumMetric()]
        self.group = tm.MetricCollection({"sum": tm.SumMetric()})


class Watching(pl.Callback):
    def __init__(self) -> None:
        self.metric, self.more = tm.MaxMetric(), [tm.MinMetric()]


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def fit(others: Others) -> Iterator[SimpleNamespace]:
    """Trainer whose metrics sync with the double `others`."""
    trainer = SimpleNamespace(lightning_module=Model(), datamodule=None, callbacks=[Watching()], training=True)
    route = MetricRoute(trainer, others.exchange, lambda: others.inside)  # type: ignore[arg-type]
    route.install()
    yield SimpleNamespace(trainer=trainer, route=route)
    route.remove()


def updated(metric: Metric, *values: float) -> Metric:
    for value in values:
        metric.update(torch.tensor(value))
    return metric


def test_one_made_a_moment_ago_that_no_attribute_leads_to(fit: SimpleNamespace, others: Others) -> None:
    others.has(updated(tm.MeanMetric(), 7.0, 8.0))
    mine = updated(tm.MeanMetric(), 12.0)
    assert mine.compute() == 9.0
    assert others.names == ["metric MeanMetric at test_torchmetrics.py"]
    assert mine.mean_value == 12.0


def test_places_are_named(fit: SimpleNamespace) -> None:
    assert {name for name, _ in metrics_of(fit.trainer)} == {
        "kept.inner.0", "child.beside.0", "group.sum", "Watching.metric", "Watching.more.0",
    }  # fmt: skip


def test_a_metric_in_a_dict_is_named_by_it(fit: SimpleNamespace, others: Others) -> None:
    metric = fit.trainer.lightning_module.kept["inner"][0]
    others.has(updated(tm.MeanMetric(), 1.0))
    assert updated(metric, 3.0).compute() == 2.0
    assert others.names == ["metric kept.inner.0 (MeanMetric)"]


@pytest.mark.parametrize("reduction", [None, "cat"])
def test_lists_need_not_be_equally_long(fit: SimpleNamespace, others: Others, reduction: str | None) -> None:
    class Kept(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", [], dist_reduce_fx=reduction)

        def update(self, row: Tensor) -> None:
            self.rows.append(row)

        def compute(self) -> Tensor:
            return torch.stack([row.sum() for row in self.rows]).sum()

    theirs, mine = Kept(), Kept()
    theirs.update(torch.tensor([1.0, 2.0]))
    theirs.update(torch.tensor([3.0]))
    others.has(theirs)
    others.has(Kept())
    mine.update(torch.tensor([10.0]))
    assert mine.compute() == 16.0
    assert len(mine.rows) == 1


def test_who_has_no_samples_computes_what_the_others_have(fit: SimpleNamespace, others: Others) -> None:
    """A member without samples computes the others' value, without a warning; its initial state, which may have
    another shape, is not added.
    """
    theirs = tm.MeanSquaredError(num_outputs=1)
    theirs.update(torch.tensor([1.0]), torch.tensor([3.0]))
    others.has(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tm.MeanSquaredError(num_outputs=1).compute() == 4.0


def test_nobody_has_samples(fit: SimpleNamespace, others: Others) -> None:
    others.has(tm.MeanMetric())
    with pytest.warns(UserWarning, match="MeanMetric at .* before any member has updated it"):
        assert tm.MeanMetric().compute().isnan()


def test_a_cached_value_is_computed_anew_after_the_next_slot(fit: SimpleNamespace, others: Others) -> None:
    """A metric's cached value is dropped after each slot: otherwise a member without samples would make no
    collective where the others do.
    """
    metric = updated(tm.SumMetric(), 1.0)
    for _ in range(2):
        metric.compute()
    assert len(others.names) == 1
    fit.route.forget_computed()
    metric.compute()
    assert len(others.names) == 2


def test_outside_of_the_job_and_after_fit_it_is_torchmetrics_own(fit: SimpleNamespace, others: Others) -> None:
    others.inside = False
    others.has(updated(tm.SumMetric(), 5.0))
    assert updated(tm.SumMetric(), 1.0).compute() == 1.0
    functions = [vars(Metric)[name] for name in ("sync", "_sync_dist", "update_called")]
    fit.route.remove()
    assert not set(map(id, functions)) & {id(vars(Metric)[name]) for name in ("sync", "_sync_dist", "update_called")}
    others.inside = True
    assert updated(tm.SumMetric(), 1.0).compute() == 1.0
    assert others.names == []


def test_copies_of_every_kind_sync(fit: SimpleNamespace, others: Others) -> None:
    others.has(updated(tm.SumMetric(), 5.0))
    metric = updated(tm.SumMetric(), 1.0)
    for other in (metric.clone(), deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert other.compute() == 6.0


def test_functions_of_the_user_stay(fit: SimpleNamespace, others: Others) -> None:
    others.has(updated(tm.SumMetric(), 5.0))
    assert updated(tm.SumMetric(distributed_available_fn=lambda: False), 1.0).compute() == 1.0
    assert updated(tm.SumMetric(sync_on_compute=False), 1.0).compute() == 1.0
    assert updated(tm.SumMetric(dist_sync_fn=lambda tensor, group=None: [tensor, tensor]), 1.0).compute() == 2.0
    assert others.names == []


def test_sync_and_unsync_by_hand(fit: SimpleNamespace, others: Others) -> None:
    others.has(updated(tm.SumMetric(), 5.0))
    metric = updated(tm.SumMetric(), 1.0)
    metric.sync()
    assert metric.sum_value == 6.0
    metric.unsync()
    assert metric.sum_value == 1.0


def test_one_that_gathers_by_itself_is_given_the_job(fit: SimpleNamespace, others: Others) -> None:
    class Own(tm.SumMetric):
        def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
            self.sum_value = sum(dist_sync_fn(self.sum_value, group=process_group))

    others.packed.append(torch.tensor(5.0))
    assert updated(Own(), 1.0).compute() == 6.0


def test_one_that_asks_torch_distributed_is_refused(fit: SimpleNamespace) -> None:
    class Asks(tm.SumMetric):
        def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
            torch.distributed.barrier(group=process_group)

    with pytest.raises(UnsupportedError, match=r"metric Asks at .* asks torch\.distributed itself"):
        updated(Asks(), 1.0).compute()


def test_a_process_group_is_refused(fit: SimpleNamespace) -> None:
    with pytest.raises(UnsupportedError, match="process_group"):
        updated(tm.SumMetric(process_group=object()), 1.0).compute()


def other_states() -> Metric:
    return updated(tm.MaxMetric(), 1.0)


def other_shape() -> Metric:
    metric = tm.ConfusionMatrix(task="multiclass", num_classes=3)
    metric.update(torch.tensor([1]), torch.tensor([2]))
    return metric


@pytest.mark.parametrize(("theirs", "words"), [(other_states, "other states"), (other_shape, "other shapes")])
def test_one_that_others_made_with_other_arguments_is_named(
    fit: SimpleNamespace, others: Others, theirs: Callable[[], Metric], words: str
) -> None:
    others.has(theirs())
    mine = tm.ConfusionMatrix(task="multiclass", num_classes=2)
    mine.update(torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(DisagreementError, match=f"metric MulticlassConfusionMatrix at .*{words}"):
        mine.compute()


def test_a_stand_in_step_leaves_all_metrics_as_they_were() -> None:
    mean, kept, group = tm.MeanMetric(), tm.CatMetric(), tm.MetricCollection([tm.MeanSquaredError()])
    updated(mean, 1.0)
    updated(kept, 1.0)
    before = mean.compute()
    with untouched():
        mean(torch.tensor(9.0))
        updated(kept, 2.0, 3.0)
        group.update(torch.ones(1), torch.zeros(1))
        made = updated(tm.SumMetric(), 4.0)
    assert (mean._update_count, kept._update_count, group["MeanSquaredError"]._update_count) == (1, 1, 0)
    assert mean.compute() == before
    assert kept.compute() == 1.0
    assert group["MeanSquaredError"].total == 0
    assert made._update_count == 0
    updated(mean, 3.0)
    assert mean.compute() == 2.0


def test_what_callbacks_average_is_no_metric() -> None:
    assert is_metrics(tm.MeanMetric())
    assert is_metrics(nn.ModuleList([tm.MetricCollection([tm.MeanMetric()])]))
    assert not is_metrics(nn.Linear(1, 1))
    assert not is_metrics(nn.ModuleList([nn.Linear(1, 1), tm.MeanMetric()]))


def test_a_logged_metric_that_this_member_lacks_is_refused_by_name() -> None:
    trainer: Any = SimpleNamespace(lightning_module=Model(), strategy=SimpleNamespace(root_device="cpu"))
    logged = _ResultCollection(training=False)
    logged.log("on_validation_epoch_end", "acc", updated(tm.MeanMetric(), 1.0), on_step=False, on_epoch=True,
               reduce_fx=torch.mean, metric_attribute="acc")  # fmt: skip
    with pytest.raises(
        UnsupportedError, match=r"acc' is logged by others as the metric 'acc', which this member's Model"
    ):
        adopt_results(trainer, _ResultCollection(training=False), describe_results(logged), max)
