"""Tests a member's footing in its job, and what its host is called for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chaos_lightning.errors import DepartedError, FencedError
from chaos_lightning.member.participation import Footing, Participation


def member(told: list[str], ids: tuple[str, ...] = ("a", "b")) -> Participation:
    engine: Any = SimpleNamespace(role="founder", member_id="a", leaving=True, view=SimpleNamespace(ids=lambda: ids))
    made = Participation(lambda: told.append("put out"), lambda stepped: told.append("left"), engine)
    made.go(Footing.IN)
    return made


@pytest.mark.parametrize(
    ("error", "ids", "expected"),
    [
        (FencedError("frozen"), ("a", "b"), (Footing.VOID, ["put out"])),
        (DepartedError("let go"), ("a", "b"), (Footing.GONE, ["left"])),
        (DepartedError("let go"), ("a",), (Footing.LAST, ["left"])),
    ],
)
def test_a_slot_that_fails_changes_the_footing(error: Exception, ids: tuple[str, ...], expected: object) -> None:
    told: list[str] = []
    made = member(told, ids)
    for _ in range(2):  # the host is told once
        with made.slot():
            raise error
    assert (made.footing, told) == expected


def test_who_has_left_stays_so() -> None:
    made = member([])
    made.depart()
    made.end()
    with made.alone():
        assert made.departed
    with pytest.raises(AssertionError, match="IN after GONE"):
        made.go(Footing.IN)


def test_who_is_asked_to_leave_while_it_waits_has_left() -> None:
    def enter() -> None:
        raise error

    error, told = DepartedError("asked to"), list[str]()
    made = member(told)
    made.end()
    assert made.come_in(enter) is error
    assert told == ["left"]
    made = member(told)
    vars(made.engine)["leaving"] = False
    with pytest.raises(DepartedError):
        made.come_in(enter)
