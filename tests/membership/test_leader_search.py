"""Tests which scheduler candidates a member asks to find the leading one; each test sets the times and the random
draws.
"""

from __future__ import annotations

import pytest

from chaos_lightning.membership.leader_search import (
    LONGEST_PAUSE_S,
    PULSE_TIMEOUT_S,
    Conversation,
    LeaderSearch,
    hears_s,
)

NOBODY, ANSWERED, SILENT = Conversation(), Conversation(answered=True), Conversation(silent=True)


def names(leader: str) -> Conversation:
    return Conversation(standby=True, leader=leader)


def test_the_only_scheduler_is_asked_ever_more_seldom_and_soon_again_once_it_answers() -> None:
    search = LeaderSearch(["a"])
    rests = [search.ended(NOBODY, 0.0, 1.0) for _ in range(8)]
    assert rests[:3] == [0.1, 0.2, 0.4]
    assert set(rests[3:]) == {LONGEST_PAUSE_S}
    assert (search.endpoint, search.failures) == ("a", 8)
    assert search.ended(ANSWERED, 0.0, 1.0) == 0.05
    assert search.failures == 0
    assert search.ended(NOBODY, 0.0, 0.0) == 0.05  # half of what others rest who have no luck


def test_several_are_asked_in_turn_and_whom_a_standby_names_at_once() -> None:
    search = LeaderSearch(["a", "b", "c"])
    assert search.ended(NOBODY, 0.0, 1.0) > 0
    assert search.endpoint == "b"
    assert search.ended(names("c"), 0.0, 1.0) == 0
    assert search.endpoint == "c"
    assert search.ended(names(""), 0.0, 1.0) > 0  # by now it stands by itself; the turn goes on where it was
    assert search.endpoint == "b"
    assert search.ended(names("b"), 0.0, 1.0) > 0  # it cannot be both
    assert search.endpoint == "c"


def test_a_silent_one_is_left_alone_for_a_while_though_others_name_it() -> None:
    search = LeaderSearch(["a", "b"])
    assert search.answer_timeout_s() == 2.0
    search.ended(SILENT, 10.0, 1.0)
    assert search.endpoint == "b"
    assert search.ended(names("a"), 10.1, 1.0) > 0
    assert search.endpoint == "b", "nobody else is left to ask"
    assert search.ended(names("a"), 10.4, 1.0) == 0
    assert (search.endpoint, search.answer_timeout_s()) == ("a", PULSE_TIMEOUT_S)
    search.ended(SILENT, 11.1, 1.0)  # again: for longer
    assert search.ended(names("a"), 13.0, 1.0) > 0
    assert search.ended(names("a"), 13.2, 1.0) == 0


@pytest.mark.parametrize("attempt", [ANSWERED, names("")], ids=["answers", "stands by"])
def test_a_word_makes_up_for_silence(attempt: Conversation) -> None:
    search = LeaderSearch(["a", "b"])
    search.ended(SILENT, 0.0, 1.0)
    search.ended(names("a"), 1.0, 1.0)
    search.ended(attempt, 1.1, 1.0)
    search.ended(names("a"), 1.2, 1.0)
    assert (search.endpoint, search.answer_timeout_s()) == ("a", 2.0)


def test_the_only_one_is_given_more_time() -> None:
    search = LeaderSearch(["a"])
    search.ended(SILENT, 0.0, 1.0)
    assert (search.endpoint, search.answer_timeout_s()) == ("a", 10.0)


def test_a_new_scheduler_listens_as_long_as_the_last_views_handshakes_take() -> None:
    assert {hears_s(members, several=False) for members in (0, 1, 16, 64, 140)} == {1.2}
    assert {hears_s(members, several=True) for members in (0, 1, 16, 64, 200)} == {1.5}
    assert hears_s(512, several=False) == hears_s(512, several=True) == pytest.approx(3.06)
    assert hears_s(100_000, several=False) == 8.0
