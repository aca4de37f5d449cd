"""Tests that the summary of old views gives the same answers as the views themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.membership.past import REBUILT, Numbers, Past
from chaos_lightning.protocol.types import NO_VIEW, Member, View, ViewId

IDS = ("a~1", "b~2", "c~3", "d~12", "e")


@st.composite
def chains(draw: st.DrawFn) -> list[View]:
    """Returns random chains of views: members come again, numbers are left out, terms begin."""
    views: list[View] = []
    number = NO_VIEW
    for _ in range(draw(st.integers(1, 9))):
        number = ViewId(number.term + draw(st.integers(0, 1)), number.number + draw(st.integers(1, 3)))
        ids = draw(st.lists(st.sampled_from(IDS), unique=True, min_size=1))
        members = tuple(Member(m, m, f"host-{m[0] if m < 'c' else 'c'}", "127.0.0.1", 7000) for m in ids)
        reason = draw(st.sampled_from(["because", "plan: as drawn", f"{REBUILT} from reports"]))
        views.append(View(number, views[-1].id if views else NO_VIEW, members, reason=reason))
    return views


def around(views: list[View]) -> list[ViewId]:
    """Returns the views' numbers, and some numbers between, before and behind them."""
    return [ViewId(v.id.term + t, v.id.number + n) for v in views for t in (0, 1) for n in (-1, 0, 1)] + [NO_VIEW]


@given(chains(), st.data())
def test_a_past_answers_what_its_views_would(views: list[View], data: st.DataObject) -> None:
    carried = data.draw(st.sets(st.sampled_from([v.id for v in views])))
    past = Past()
    for view in views:
        past.add(view, carried=view.id in carried)
    last = views[-1]
    assert past.inside == frozenset(last.ids())
    assert len(past.views) == len(views)
    assert past.together == any(len(v.members) > 1 for v in views)
    hosts = {m.host for v in views for m in v.members}
    assert set(past.hosts) <= hosts
    assert len(past.hosts) == min(2, len(hosts))
    assert past.plan_reason == next((v.reason for v in reversed(views) if "plan" in v.reason), "")
    assert past.rebuilt == max((v.id for v in views if v.reason.startswith(REBUILT)), default=NO_VIEW)
    assert past.incarnation == max((int(m.partition("~")[2] or 0) for v in views for m in v.ids()), default=0)
    for number in around(views):
        assert (number in past.views) == any(v.id == number for v in views)
        assert past.views.below(number) == max((v.id for v in views if v.id < number), default=NO_VIEW)
        for member in IDS:
            here = next((v for v in views if v.id == number), None)
            assert past.stood_in(member, number) == (here is not None and here.find(member) is not None)
            if last.find(member) is not None:
                later = takewhile(lambda v: v.id > number, reversed(views))  # noqa: B023
                assert past.in_all_after(member, number) == all(v.find(member) is not None for v in later)
            if here is not None and here.find(member) is not None:  # who stands in a view asks who let it go
                without = next((v for v in views if v.id > number and v.find(member) is None), None)
                let_go = without.id if without is not None and without.id in carried else None
                assert past.let_go_by(member, number) == let_go


@given(chains(), st.integers(0, 3), st.data())
def test_those_that_went_long_ago_are_forgotten_and_nobody_else_is_judged_otherwise(
    views: list[View], most: int, data: st.DataObject
) -> None:
    carried = data.draw(st.sets(st.sampled_from([v.id for v in views])))
    whole, short = Past(), Past()
    with pytest.MonkeyPatch.context() as patch:
        for view in views:
            whole.add(view, carried=view.id in carried)
        patch.setattr("chaos_lightning.membership.past.MOST_GONE", most)
        for view in views:
            short.add(view, carried=view.id in carried)
    assert len(short.members.keys() - short.inside) <= most
    for number, member in product(around(views), IDS):
        stood = whole.stood_in(member, number)
        assert short.stood_in(member, number) >= stood, "a kept state counts"
        assert short.let_go_by(member, number) in (whole.let_go_by(member, number), None)
        if number >= short.forgotten:
            assert short.stood_in(member, number) == stood
            assert not stood or short.let_go_by(member, number) == whole.let_go_by(member, number)
        if member in whole.inside:
            assert short.in_all_after(member, number) == whole.in_all_after(member, number)


@given(chains())
def test_a_copy_does_not_change_with_its_original(views: list[View]) -> None:
    past = Past.of(views)
    copy = past.copy()
    past.add(replace(views[-1], id=ViewId(99, 1), members=()), carried=True)
    assert copy == Past.of(views) != past


def test_numbers_without_gaps_are_one_run() -> None:
    numbers = Numbers.of([ViewId(1, 1), ViewId(1, 2), ViewId(1, 2), ViewId(1, 4), ViewId(2, 5), ViewId(1, 2)])
    assert numbers.runs == [(1, 1, 2), (1, 4, 4), (2, 5, 5)]


def view(number: int, ids: str, leaving: str = "") -> View:
    members, gone = (tuple(Member(m, m, "host", "127.0.0.1", 7000) for m in names.split()) for names in (ids, leaving))
    return View(ViewId(1, number), ViewId(1, number - 1) if number > 1 else NO_VIEW, members, leaving=gone)


def test_whom_a_view_lets_go_counts_while_later_views_name_it() -> None:
    past = Past.of([view(1, "a b c"), view(2, "b c", "a"), view(3, "b", "a")])
    assert past.leaving == {"a"}
    assert past.in_all_after("a", ViewId(1, 1))
    assert not past.in_all_after("c", ViewId(1, 1))
    past.add(view(4, "b"))
    assert not past.in_all_after("a", ViewId(1, 1))


def test_a_leaver_that_stays_counts_as_if_it_had_never_gone() -> None:
    past = Past.of([view(1, "a b"), view(2, "b", "a"), view(3, "b a")])
    assert past.in_all_after("a", ViewId(1, 1))
    assert past.stood_in("a", ViewId(1, 3))
    past.add(view(4, "b"), carried=True)
    assert past.let_go_by("a", ViewId(1, 1)) == ViewId(1, 4)


def test_a_leaver_that_has_gone_is_known_to_have_been_let_go() -> None:
    """A view decided by a recovery that only drops a leaver counts as one that let it go; not if another member was put
    out.
    """
    past = Past.of([view(1, "a b c"), view(2, "", "a b c")])
    assert past.let_go_by("a", ViewId(1, 1)) == ViewId(1, 2)
    assert Past.of([view(1, "a b c"), view(2, "b", "a")]).let_go_by("c", ViewId(1, 1)) is None


def test_a_leaver_whose_views_as_a_member_are_lost_counts() -> None:
    """A rebuilt chain begins with a view that lets a member go: its earlier membership counts although those views are
    lost.
    """
    past = Past.of([view(2, "b", "a")])
    assert past.in_all_after("a", ViewId(1, 1))
    past.add(view(3, "b a"))
    assert past.stood_in("a", ViewId(1, 3))
    assert past.in_all_after("a", ViewId(1, 2))
