"""Tests that the values that a member has logged and counted in an epoch pass to another member when it is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics as tm
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics.metric import Metric

from chaos_lightning.protocol.types import GENESIS, Header, Kind
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies.handover import Handover, compute_epoch
from chaos_lightning.strategies.metrics import MetricRoute


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Metric] = {"sum": tm.SumMetric()}


class Side:
    """One member's logged values and metrics, without a job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logged = _ResultCollection(training=True)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(_results=self.logged))
        self.trainer: Any = SimpleNamespace(
            lightning_module=Model(), datamodule=None, callbacks=[], training=True, fit_loop=loop,
            strategy=SimpleNamespace(root_device="cpu", reduce=self.reduce),
        )  # fmt: skip
        self.metrics = MetricRoute(self.trainer, self.exchange, lambda: True)
        self.handover = Handover(self.trainer, self.metrics, self.reduce)
        self.sent: list[Any] = []

    @property
    def sum(self) -> Metric:
        return self.trainer.lightning_module.kept["sum"]

    def exchange(self, name: str, value: Any) -> list[Any]:
        self.sent.append(value)
        return [decode_payload(encode_payload(value))]

    def reduce(self, value: Any, **_: Any) -> Any:
        return value

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.metrics.install()
        try:
            yield
        finally:
            self.metrics.remove()

    def trains(self, *values: float, fx: str = "training_step") -> None:
        """Logs and counts each value, as in a training batch."""
        with self.at_work():
            for value in values:
                self.sum.update(torch.tensor(value))
                for key, reduction in (("mean", torch.mean), ("total", torch.sum), ("most", torch.max)):
                    self.logged.log(fx, key, torch.tensor(value), on_step=False, on_epoch=True, batch_size=1,
                                    reduce_fx=reduction)  # fmt: skip

    def shows(self) -> dict[str, float]:
        with self.at_work():
            shown = {item.meta.name: item.compute().item() for item in self.logged.values()}
            return {**shown, "metric": self.sum.compute().item()}


class Members:
    """Several members that make steps together."""

    def __init__(self, names: str = "abc") -> None:
        self.sides = {name: Side(name) for name in names}
        self.slots = 0

    def __getattr__(self, name: str) -> Side:
        return self.sides[name]

    def step(self, *, without: str = "", leaves: str = "") -> None:
        """Makes a step. Members in `without` have died before it; members in `leaves` are released by its header."""
        for name in without:
            del self.sides[name]
        names = sorted(self.sides)
        answers = [
            self.sides[name].handover.says(SimpleNamespace(world_size=len(names), leaving=name in leaves))
            for name in names
        ]
        self.slots += 1
        header = Header(seq=self.slots, kind=Kind.STEP, step=self.slots, view=GENESIS.view, prev_hash="",
                        next_view=GENESIS.view)  # fmt: skip
        for name in leaves:
            del self.sides[name]
        for name, side in self.sides.items():
            side.handover.committed(header, dict(zip(names, answers, strict=True)), tuple(sorted(self.sides)), name)


def shown(*values: float) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "total": sum(values), "most": max(values), "metric": sum(values)}


@pytest.fixture
def members() -> Members:
    made = Members()
    made.a.trains(1.0)
    made.b.trains(20.0, 30.0)
    made.c.trains(400.0)
    made.step()
    return made


@pytest.mark.parametrize("way", ["without", "leaves"])
def test_the_part_of_a_member_that_is_gone_counts_at_the_first_one(members: Members, way: str) -> None:
    members.step(**{way: "b"})
    assert members.a.shows() == shown(1.0, 20.0, 30.0)
    assert members.c.shows() == shown(400.0)


def test_a_leaver_hands_over_what_its_last_step_has(members: Members) -> None:
    members.b.trains(50.0)
    members.step(leaves="b")
    assert members.a.shows() == shown(1.0, 20.0, 30.0, 50.0)


def test_what_no_step_has_committed_is_logged_by_those_who_train_it(members: Members) -> None:
    members.b.trains(50.0)
    members.step(without="b")
    assert members.a.shows() == shown(1.0, 20.0, 30.0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_heir_goes_too(members: Members, steps: int) -> None:
    """Member c dies, and then a, which took over c's values, dies before or after it announced them: each value
    counts once.
    """
    members.step(without="c")
    for _ in range(steps):
        members.step()
    members.step(without="a")
    assert members.b.shows() == shown(1.0, 20.0, 30.0, 400.0)


def test_two_go_at_once(members: Members) -> None:
    members.step(without="ab")
    assert members.c.shows() == shown(400.0, 1.0, 20.0, 30.0)


def test_an_heir_without_samples_gets_the_keys(members: Members) -> None:
    """A member that has logged nothing itself takes over a dead member's values, with their keys."""
    other = Members("ab")
    other.b.trains(7.0)
    other.step()
    other.step(without="b")
    assert other.a.shows() == shown(7.0)


def test_what_is_taken_over_ends_with_the_epoch_and_with_a_reset(members: Members) -> None:
    members.step(without="b")
    with members.a.at_work():
        members.a.sum(torch.tensor(5.0))  # forward resets for a moment
    assert members.a.shows()["metric"] == 56.0
    with members.a.at_work():
        members.a.sum.reset()
        members.a.sum.update(torch.tensor(2.0))
    assert members.a.shows()["metric"] == 2.0


def test_a_death_between_two_epochs_brings_nothing_of_the_last_one(members: Members) -> None:
    for side in members.sides.values():
        with side.at_work():
            side.handover.end_epoch()
            side.logged.reset()
            side.sum.reset()
    members.a.trains(2.0)
    members.step(without="b")
    assert members.a.shows() == shown(2.0)


def test_a_metric_that_is_made_anew_has_nothing_of_the_old_one(members: Members) -> None:
    members.step(without="b")
    members.a.trainer.lightning_module.kept["sum"] = tm.SumMetric()
    members.a.trains(2.0)
    assert members.a.shows()["metric"] == 2.0


def test_a_newcomer_knows_the_parts_of_all(members: Members) -> None:
    newcomer = Side("d")
    newcomer.handover.adopt(decode_payload(encode_payload(members.b.handover.manifest())))
    members.sides["d"] = newcomer
    members.step(without="abc")
    assert newcomer.shows() == shown(1.0, 20.0, 30.0, 400.0)


def test_who_comes_in_anew_begins_with_nothing(members: Members) -> None:
    side = members.c
    side.logged.clear()
    with side.at_work():
        side.handover.forget()
    assert side.handover.says(SimpleNamespace(world_size=3, leaving=False)) == b""


def test_states_that_are_too_large_are_named_and_travel_with_a_leave(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    for side in members.sides.values():
        side.handover.limit = 8
    members.step()
    with caplog.at_level(logging.WARNING):
        members.step(leaves="c")
    assert not caplog.records
    assert members.a.shows() == shown(1.0, 400.0)
    with caplog.at_level(logging.WARNING):
        members.step(without="b")
    assert "b is gone: of this epoch's kept.sum only what the other members have seen is counted" in caplog.text
    assert members.a.shows() == {**shown(1.0, 20.0, 30.0, 400.0), "metric": 401.0}


def test_values_that_are_logged_after_the_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    members = Members("ab")
    members.b.trains(7.0, fx="on_train_batch_end")
    members.step()
    with caplog.at_level(logging.WARNING):
        members.step(without="b")
    assert "b is gone: mean, most, total of this epoch may lack its last batch" in caplog.text


def test_a_death_while_an_epoch_is_computed_has_it_computed_anew() -> None:
    side = Side("a")
    side.trains(3.0)
    asked = side.handover

    def exchange(name: str, value: Any) -> list[Any]:
        if not side.sent:
            asked.gone += 1
        return side.exchange(name, value)

    compute_epoch(side.trainer, asked, exchange)
    assert len(side.sent) == 2
    assert {item.meta.name: item._computed.item() for item in side.logged.values()} == {
        "mean": 3.0, "total": 3.0, "most": 3.0,
    }  # fmt: skip


def test_a_sixteenth_of_the_gradient_travels_within_limits() -> None:
    handover, limits = Side("a").handover, []
    for nbytes in (100, 1 << 20, 1 << 30):
        handover.fits_beside(nbytes)
        limits.append(handover.limit)
    assert limits == [4 << 10, 64 << 10, 256 << 10]
