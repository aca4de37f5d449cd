"""Tests how a member is told which links to have: by a full list or by changes."""

from __future__ import annotations

import pytest

from chaos_lightning.membership.effects import Connect
from chaos_lightning.membership.neighbours import Neighbours
from chaos_lightning.protocol.types import NO_VIEW, Member, OpenLinks, View, ViewId


def member(name: str) -> Member:
    return Member(f"{name}~1", name, name, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (OpenLinks((member("d"),)), ["d~1"]),
        (OpenLinks((member("d"),), True), ["b~1", "c~1", "d~1"]),
        (OpenLinks((), True, ("b~1",)), ["c~1"]),
        (OpenLinks((member("d"), member("b")), True, ("c~1", "e~1")), ["b~1", "d~1"]),
        (OpenLinks((member("a"),), True), ["b~1", "c~1"]),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_change_adds_to_what_was_told_and_takes_from_it(told: OpenLinks, wanted: list[str], times: int) -> None:
    neighbours = Neighbours()
    neighbours.asked("a~1", OpenLinks((member("b"), member("c"))))
    for _ in range(times):  # a message that comes twice changes nothing more
        neighbours.asked("a~1", told)
    assert [p.id for p in neighbours.wanted or ()] == wanted


def test_a_change_of_nothing_that_was_told_is_all_there_is() -> None:
    neighbours = Neighbours()
    neighbours.asked("a~1", OpenLinks((member("b"),), True, ("c~1",)))
    assert [p.id for p in neighbours.wanted or ()] == ["b~1"]


def test_links_with_whom_a_view_lets_go_stay_until_all_have_their_parts() -> None:
    neighbours, everybody = Neighbours(), tuple(map(member, "abcd"))
    before = View(ViewId(1, 1), NO_VIEW, everybody)
    view = View(ViewId(1, 2), before.id, everybody[:3], leaving=everybody[3:])
    neighbours.enter(before)
    assert neighbours.connect("a~1", view) == [Connect((everybody[1], everybody[2], everybody[3]))]
    assert neighbours.settle("a~1", view) == [Connect((everybody[1], everybody[2]))]
    assert neighbours.settle("a~1", view) == []
    neighbours.enter(None)
    assert neighbours.connect("a~1", view) == [Connect((everybody[1], everybody[2], everybody[3]))]
