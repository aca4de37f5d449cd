"""Tests which members a member dials, when it retries, and from which ones it accepts links."""

from __future__ import annotations

import pytest

from chaos_lightning.membership.dialling import AFTER_GOODBYE_S, AGAIN_S, BYE, LONGEST_S, Dial, Dialling, Tell, youth
from chaos_lightning.membership.routing import Router
from chaos_lightning.protocol.types import LinkSpec, Member, View, ViewId


def member(member_id: str) -> Member:
    return Member(member_id, member_id.partition("~")[0], "h", "127.0.0.1", 1)


def dialling(me: str, *wanted: str, up: set[str] | None = None) -> Dialling:
    made = Dialling(up if up is not None else set())
    made.me = me
    made.want([member(m) for m in wanted])
    return made


def test_the_younger_of_two_dials_and_the_older_waits() -> None:
    assert dialling("b~2", "a~1").due("a~1")
    assert not dialling("a~1", "b~2").due("b~2")
    assert dialling("a~10", "b~9").due("b~9"), "numbers are compared as numbers"
    assert youth("x~3") == (3, "x")
    assert youth("x") == (0, "")


def test_a_peer_is_dialled_once_at_a_time_and_only_if_wanted_and_missing() -> None:
    up: set[str] = set()
    b = dialling("b~2", "a~1", up=up)
    assert b.due("a~1")
    assert not b.due("a~1"), "under way"
    assert b.ended("a~1", "b~2")
    assert b.due("a~1")
    b.ended("a~1", "b~2")
    up.add("a~1")
    assert not b.due("a~1"), "a link stands"
    assert not b.due("x~1"), "nobody wants it"


def test_a_link_that_was_made_under_a_former_id_or_for_who_is_not_wanted_any_more_is_not_used() -> None:
    b = dialling("b~2", "a~1")
    assert b.due("a~1")
    assert not b.ended("a~1", "b~1")
    assert b.due("a~1"), "it may be dialled again at once"
    b.want([])
    assert not b.ended("a~1", "b~2")


def test_nobody_wants_itself() -> None:
    assert dialling("b~2", "a~1", "b~2").wanted.keys() == {"a~1"}


def test_who_is_wanted_is_dialled_or_told_of() -> None:
    assert dialling("c~3", "a~1", "b~2", up={"b~2"}).look() == [Dial("a~1"), Tell("b~2", True, "connected")]


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_pauses_between_attempts_grow_up_to_a_bound(chance: float) -> None:
    b = dialling("b~2", "a~1")
    pauses = []
    for _ in range(9):
        b.due("a~1")
        pauses += [step.after_s for step in b.failed("a~1", "refused", chance) if isinstance(step, Dial)]
    share = 0.5 + chance / 2
    assert pauses[0] == pytest.approx(2 * AGAIN_S * share)
    assert pauses[1] == pytest.approx(4 * AGAIN_S * share)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(min(LONGEST_S, 64 * AGAIN_S) * share)
    b.made("a~1")
    (again,) = [step for step in b.failed("a~1", "refused", chance) if isinstance(step, Dial)]
    assert again.after_s == pytest.approx(pauses[0]), "a link that was made ends the count"


def test_failures_are_told_at_first_and_then_now_and_again() -> None:
    b = dialling("b~2", "a~1")
    told = [n for n in range(1, 101) if any(isinstance(s, Tell) for s in b.failed("a~1", "no route", 0.0))]
    assert told == [1, 5, 50, 100]
    b.want([])
    assert b.failed("a~1", "no route", 0.0) == []


def test_a_link_that_broke_is_dialled_again_soon_and_later_after_a_goodbye() -> None:
    b = dialling("b~2", "a~1")
    assert b.broken("a~1", "closed") == [Tell("a~1", False, "closed"), Dial("a~1", AGAIN_S)]
    assert b.broken("a~1", BYE) == [Tell("a~1", False, BYE), Dial("a~1", AFTER_GOODBYE_S)]
    assert b.broken("x~1", "closed") == [Tell("x~1", False, "closed")]


def test_who_is_linked_by_a_view_is_let_in_before_the_scheduler_says_so() -> None:
    router = Router("a~1")
    members = tuple(member(m) for m in ("a~1", "b~2", "c~3"))
    router.rule(View(ViewId(1, 1), ViewId(1, 0), members, links=(LinkSpec("a~1", "b~2"), LinkSpec("b~2", "c~3"))))
    assert dialling("a~1", "d~4").expected(router) == {"b~2", "d~4"}
