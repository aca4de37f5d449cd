"""Tests which members a newcomer asks for the state in a sparse graph."""

from __future__ import annotations

import pytest

from chaos_lightning.member.choice import endpoint, endpoints
from chaos_lightning.protocol.types import NO_VIEW, LinkSpec, Member, View, ViewId


def member(name: str) -> Member:
    return Member(f"{name}~1", name, "host", f"{name}.example", 7000 + ord(name))


def view(members: str, *links: str) -> View:
    """Returns a view of one-letter members, with links given as pairs of letters."""
    specs = tuple(LinkSpec(f"{a}~1", f"{b}~1") for a, b in links)
    return View(ViewId(1, 1), NO_VIEW, tuple(member(m) for m in members), links=specs)


def ids(text: str) -> set[str]:
    return {f"{m}~1" for m in text}


def test_in_a_complete_graph_all_are_asked_directly() -> None:
    found = endpoints([member("a"), member("b")], view("abj"), ids("a"))
    assert [(e.member, e.address, e.route) for e in found] == [("a~1", "a.example", ()), ("b~1", "b.example", ())]


def test_neighbours_are_enough() -> None:
    found = endpoints([member("a"), member("b"), member("c")], view("abcj", "ab", "bc", "cj"), ids("c"))
    assert [(e.member, e.route) for e in found] == [("c~1", ())]


def test_who_has_no_neighbour_among_them_asks_through_others() -> None:
    (found,) = endpoints([member("a")], view("abcj", "ab", "bc", "cj"), ids("c"))
    assert found.member == "a~1"
    assert found.address == "c.example"
    assert found.route == ("c~1", "b~1", "a~1")


def test_the_fewest_hops_are_taken() -> None:
    ring = view("abcdj", "ab", "bc", "cd", "da", "jb", "jd")
    assert len(endpoint(member("a"), ring, ids("bd")).route) == 2


@pytest.mark.parametrize("near", ["", "c"])
def test_without_a_way_dialling_says_what_is_wrong(near: str) -> None:
    found = endpoint(member("a"), view("abcj", "ab", "cj"), ids(near))
    assert (found.member, found.address, found.route) == ("a~1", "a.example", ())
