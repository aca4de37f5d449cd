"""Tests Lightning's collectives: payloads, reductions, and their effects inside training_step and outside a job."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import ReduceOp
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from chaos_lightning.errors import DisagreementError, StateError, UnsupportedError, WireError
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies import ChaosStrategy
from chaos_lightning.strategies.collectives import Collectives, reduced

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    assert decode_payload(encode_payload(value)) == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (
        torch.arange(6)[: torch.Size(shape).numel()].to(dtype).reshape(shape) if shape else torch.ones((), dtype=dtype)
    )
    back = decode_payload(encode_payload({"a": [tensor], "b": tensor.clone()}))
    for other in (back["a"][0], back["b"]):
        assert other.dtype == dtype
        assert torch.equal(other, tensor)


@given(st.binary(max_size=80))
def test_odd_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_payload(data)


@given(st.data())
def test_damaged_payloads_never_do_worse_than_being_refused(data: st.DataObject) -> None:
    whole = encode_payload({"x": torch.arange(4), "y": "text"})
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    with contextlib.suppress(WireError):
        decode_payload(broken)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(StateError, match="inner"):
        encode_payload({"inner": object()})


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 9.0), ("mean", 3.0), ("avg", 3.0), ("min", 1.0), ("max", 5.0), ("product", 15.0)]
)
def test_reductions(op: str, expected: float) -> None:
    assert reduced([torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([5.0])], op) == torch.tensor([expected])


def test_a_mean_of_integers_is_no_integer() -> None:
    """The mean of integer tensors is a float: Lightning divides two such means, and rounding them would falsify the
    quotient.
    """
    assert reduced([torch.tensor(4), torch.tensor(5)], "mean") == 4.5
    assert reduced([torch.tensor(4), torch.tensor(5)], "sum").dtype == torch.int64


def test_low_precision_is_summed_wide() -> None:
    many = [torch.tensor(1.0, dtype=torch.bfloat16) for _ in range(300)]
    assert reduced(many, "sum").item() == pytest.approx(300, rel=0.01)


def test_shapes_and_operations_that_do_not_fit_are_named() -> None:
    with pytest.raises(DisagreementError, match=r"\(2,\)"):
        reduced([torch.zeros(1), torch.zeros(2)], "sum")
    with pytest.raises(UnsupportedError, match="bxor"):
        reduced([torch.zeros(1)], "bxor")


class Members:
    """Double of the other members, with fixed answers; records the names of collectives."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.names: list[str] = []
        self.gone = False
        self.sent: list[Any] = []

    def gather(self, name: str, payload: bytes, line: str) -> list[tuple[str, bytes]] | None:
        if self.gone:
            return None
        self.names.append(name)
        self.sent.append(decode_payload(payload))
        return [("me", payload), *((f"other{i}", encode_payload(o)) for i, o in enumerate(self.others))]


def collectives(members: Members) -> Collectives:
    return Collectives(members.gather, lambda: torch.device("cpu"), max)


def test_names_say_who_asked() -> None:
    members = Members(True)
    made = collectives(members)
    made.barrier("here")
    made.decide(True, every=True)
    assert members.names == ["barrier here", "decision at test_collectives.py:test_names_say_who_asked"]


def test_answers() -> None:
    assert collectives(Members(5)).broadcast(3, 1) == 5
    assert collectives(Members()).broadcast(3, 1) == 3
    assert collectives(Members(False)).decide(True, every=True) is False
    assert collectives(Members(True)).decide(False, every=False) is True
    assert collectives(Members(torch.tensor([2.0]))).all_gather(torch.tensor([1.0])).tolist() == [[1.0], [2.0]]
    assert collectives(Members(torch.tensor(2.0))).reduce(torch.tensor(1.0), "sum") == 3
    assert collectives(Members()).reduce("text", "sum") == "text"
    with pytest.raises(DisagreementError, match="pad to one shape"):
        collectives(Members(torch.zeros(2))).all_gather(torch.zeros(1))


def test_outside_a_job_everything_is_local() -> None:
    members = Members()
    members.gone = True
    made = collectives(members)
    made.barrier(None)
    assert made.broadcast({"a": 1}, 0) == {"a": 1}
    assert made.reduce(torch.tensor(2.0), "mean") == 2
    assert made.all_gather(torch.zeros(3)).shape == (1, 3)
    assert made.decide(False, every=True) is False


def log(collection: _ResultCollection, made: Collectives, key: str, value: float, **more: Any) -> Any:
    """Logs as `self.log(on_step=True, sync_dist=True)` does; returns the value that Lightning shows for the step."""

    def reduce(value: Any, *, reduce_op: str, group: Any = None) -> Any:
        return made.reduce(value, reduce_op)

    how: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1, "sync_dist": True, **more}
    collection.log("training_step", key, torch.tensor(value), sync_dist_fn=reduce, **how)
    return collection[f"training_step.{key}"]._forward_cache


def said(**values: float) -> dict[str, Any]:
    """Returns the payload of another member that has logged these values."""
    collection, members = _ResultCollection(training=True), Members()
    made = collectives(members)
    made.enter_step("training_step")
    for key, value in values.items():
        log(collection, made, key, value)
    made.leave_step(collection)
    return members.sent[0]


def test_values_logged_in_a_step_are_exchanged_after_it() -> None:
    members = Members(said(k=3.0))
    made, collection = collectives(members), _ResultCollection(training=True)
    made.enter_step("training_step")
    value = log(collection, made, "k", 1.0)
    assert value == 1
    made.leave_step(collection)
    assert value == 2
    assert made.syncs == {"training_step"}
    made.enter_step("training_step")
    made.leave_step(_ResultCollection(training=True))
    assert len(members.names) == 2, "from now on every batch has an exchange, also at a member that had no samples"


def test_each_key_is_the_mean_of_those_who_logged_it() -> None:
    made, collection = collectives(Members(said(b=0.7, c=4.0), said(c=2.0, d=9.0))), _ResultCollection(training=True)
    made.enter_step("training_step")
    mine = {key: log(collection, made, key, value) for key, value in (("c", 3.0), ("a", 0.5))}
    made.leave_step(collection)
    assert {key: value.item() for key, value in mine.items()} == {"c": 3.0, "a": 0.5}
    shown = {item.meta.name: round(item._forward_cache.item(), 6) for item in collection.values()}
    assert shown == {"c": 3.0, "a": 0.5, "b": 0.7, "d": 9.0}
    assert collection.metrics(on_step=True)["log"].keys() == {"a", "b", "c", "d"}


def test_a_key_that_members_reduce_in_different_ways_is_named() -> None:
    made, collection = collectives(Members(said(k=3.0))), _ResultCollection(training=True)
    made.enter_step("training_step")
    log(collection, made, "k", 1.0, reduce_fx=torch.max)
    with pytest.raises(DisagreementError, match=r"'training_step.k' is logged .* \['max', 'mean'\]"):
        made.leave_step(collection)


def test_members_that_reduce_other_numbers_of_values_are_told() -> None:
    theirs = {f"#{n}": ["mean", torch.tensor(3.0), None] for n in range(2)}
    made = collectives(Members(theirs))
    made.enter_step("training_step")
    value = made.reduce(torch.tensor(1.0), "mean")
    with pytest.raises(DisagreementError, match=r"\[1, 2\] values"):
        made.leave_step(_ResultCollection(training=True))
    assert value == 1


def test_a_reduce_of_the_users_own_goes_by_its_place() -> None:
    made = collectives(Members({"#0": ["mean", torch.tensor(3.0), None]}))
    made.enter_step("training_step")
    value = made.reduce(torch.tensor(1.0), "mean")
    made.leave_step(_ResultCollection(training=True))
    assert value == 2


@pytest.mark.parametrize("call", ["barrier", "broadcast", "all_gather", "decide"])
def test_other_collectives_inside_a_step_are_refused_by_name(call: str) -> None:
    made = collectives(Members())
    made.enter_step("training_step")
    arguments: dict[str, tuple[Any, ...]] = {
        "barrier": ("x",), "broadcast": (1, 0), "all_gather": (torch.zeros(1),), "decide": (True, True)
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="inside training_step"):
        getattr(made, call)(*arguments[call])


def test_lightnings_own_reduce_operations_are_understood() -> None:
    strategy = ChaosStrategy()
    seen: list[str] = []
    strategy.collectives.reduce = lambda value, op: seen.append(op)  # type: ignore[method-assign]
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, "mean", None):
        strategy.reduce(torch.zeros(1), reduce_op=op)
    assert seen == ["sum", "mean", "min", "max", "product", "mean", "sum"]


def test_gathering_with_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sync_grads"):
        ChaosStrategy().all_gather(torch.zeros(1, requires_grad=True), sync_grads=True)
