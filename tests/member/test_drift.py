"""Tests the comparison of members' states: the tensors that it names, and its errors."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chaos_lightning.errors import DepartedError, FencedError, UnsupportedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.drift import StateComparison
from chaos_lightning.protocol.types import GENESIS, DriftedPart, Header, Kind, ViewId


class Held:
    """State of three tensors; the tensor whose name is given as `odd` differs from what other members hold."""

    def __init__(self, odd: str = "") -> None:
        self.odd = odd

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, torch.full((5,), float(name == self.odd))) for name in ("x", "y", "z")]


class Meeting:
    """Stand-in for a job's gather: collects each member's payload."""

    def __init__(self, *members: str) -> None:
        self.members = members
        self.brought: dict[str, bytes] = {}
        self.departs = False

    def member(self, name: str) -> Any:
        def gather(_: str, payload: bytes) -> list[tuple[str, bytes]]:
            if self.departs:
                raise DepartedError("let go")
            self.brought[name] = payload
            return list(self.brought.items())

        return SimpleNamespace(
            member_id=name,
            out=False,
            config=SimpleNamespace(state_hash_every=2),
            header=header(4),
            events=EventLog(None),
            ruling_view=SimpleNamespace(ids=lambda: self.members),
            gather=gather,
        )


def header(step: int, *drifted: str) -> Header:
    number = ViewId(1, 1)
    return Header(
        seq=step,
        kind=Kind.STEP,
        step=step,
        view=number,
        prev_hash=GENESIS.hash,
        next_view=number,
        drifted=tuple(DriftedPart(m, 0) for m in drifted),
    )


def taken(engine: Any, odd: str = "") -> StateComparison:
    comparison = StateComparison(engine)
    comparison.take(Held(odd))  # type: ignore[arg-type]
    return comparison


def test_a_hash_is_due_every_so_many_steps() -> None:
    engine = Meeting("a").member("a")
    comparison = taken(engine)
    assert comparison.hash == taken(engine).hash
    assert comparison.hash != taken(engine, "y").hash
    engine.header = header(5)
    comparison.take(Held())  # type: ignore[arg-type]
    assert comparison.hash == ""


def test_both_sides_name_the_tensors_and_the_others_bring_nothing(caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting("a", "b", "c")
    at = header(5, "c")
    first, second, odd = taken(meeting.member("a")), taken(meeting.member("b")), taken(meeting.member("c"), "y")
    meeting.brought["c"] = taken_digests("y")
    with caplog.at_level(logging.WARNING):
        first.settle(at)
        second.settle(at)
    assert [r.getMessage() for r in caplog.records] == ["the state of c differs at step 5, in 'y'; it joins again"]
    assert meeting.brought["b"] == b""
    with pytest.raises(FencedError, match=r"the state of c differs from the others' at step 5, in 'y'$"):
        odd.settle(at)
    assert meeting.brought["c"] == taken_digests("y")


def taken_digests(odd: str) -> bytes:
    """Returns the digests that a member sends whose tensor `odd` has drifted."""
    meeting = Meeting("a", "c")
    meeting.brought["a"] = b""
    with pytest.raises(FencedError, match=r"at step 5$"):
        taken(meeting.member("c"), odd).settle(header(5, "c"))
    return meeting.brought["c"]


def test_a_tensor_that_differs_again_is_refused_and_another_one_is_not() -> None:
    meeting = Meeting("a", "c")
    taken(meeting.member("a")).settle(header(5, "c"))
    comparison = StateComparison(meeting.member("c"))
    for odd in "yz":
        comparison.take(Held(odd))  # type: ignore[arg-type]
        with pytest.raises(FencedError, match=rf"in '{odd}'"):
            comparison.settle(header(5, "c"))
    comparison.take(Held("y"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"differs again .* in 'y', although .* state_hash_every=0"):
        comparison.settle(header(5, "c"))


def test_nothing_is_gathered_where_none_has_drifted_or_no_other_is_left() -> None:
    meeting = Meeting("c")
    taken(meeting.member("c")).settle(header(5))
    with pytest.raises(FencedError, match=r"at step 5$"):
        taken(meeting.member("c")).settle(header(5, "c"))
    assert not meeting.brought


def test_where_all_leave_the_step_counts_for_those_who_agree() -> None:
    meeting = Meeting("a", "c")
    meeting.departs = True
    taken(meeting.member("a")).settle(header(5, "c"))
    with pytest.raises(FencedError, match=r"at step 5$"):
        taken(meeting.member("c")).settle(header(5, "c"))
