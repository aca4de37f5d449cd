"""Tests the scheduler's splits of a batch of fixed size: by times that members have told, with a view of their own, and
not too often (B2, B4).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pipelines_talk import Talk

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.book import Book
from chaos_lightning.membership.peers import JobTerms
from chaos_lightning.membership.roster import Roster
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.sharing import PAUSE_STEPS, Sharing
from chaos_lightning.observe.render import from_status
from chaos_lightning.protocol.types import Decide, Leave, NextView, Notice, Refused, Settings, View


def talk_of(*names: str, batch: str = "12") -> Talk:
    """Returns a settled job of these members, whose steps have this batch."""
    talk = Talk(*names, asks=lambda name: "", batch=batch)
    assert talk.machine.roster.settled
    return talk


def go_on(talk: Talk, steps: int) -> None:
    """Commits so many steps; all members tell of each."""
    for _ in range(steps):
        talk.commit()
        talk.wait(0.1)


def enter(talk: Talk) -> View:
    """Lets a header carry the latest view, which all members enter."""
    talk.commit(talk.view)
    talk.all_stand()
    assert talk.machine.roster.settled
    return talk.view


def test_members_of_whom_nothing_is_known_share_a_batch_alike() -> None:
    assert talk_of("a", "b", "c").view.batch == "12:4x3"
    assert talk_of("a", "b", batch="12/2").view.batch == "12/2:3x2"
    assert talk_of("a", "b", "c", batch="2").view.batch == "2:1x2,0"


def test_jobs_whose_members_add_batches_of_their_own_have_no_split() -> None:
    talk = talk_of("a", "b", batch="")
    view = talk.view
    talk.sample_s = {"a": 1.0, "b": 9.0}
    go_on(talk, 2 * PAUSE_STEPS)
    assert talk.view is view
    assert view.batch == ""


def test_a_slow_member_gets_less_with_a_view_of_the_same_members() -> None:
    talk = talk_of("a", "b", "c")
    founded = talk.view
    talk.sample_s = {"a": 1.0, "b": 1.0, "c": 4.0}
    go_on(talk, PAUSE_STEPS - 1)
    assert talk.view is founded, "times are to be measured first"
    go_on(talk, 1)
    assert (talk.view.ids(), talk.view.joiners, talk.view.batch) == (founded.ids(), (), "12:6,5,1")
    a, b, c = founded.ids()
    assert talk.view.reason == f"samples of a step by measured speed: {a} 6, {b} 5, {c} 1"
    assert [talk.last(name, NextView) for name in "abc"] == [NextView(talk.view)] * 3


def test_the_status_tells_the_rule_each_share_and_why() -> None:
    talk = talk_of("a", "b", "c")
    talk.sample_s = {"a": 1.0, "b": 1.0, "c": 4.0}
    go_on(talk, PAUSE_STEPS)
    said = cast(Any, talk.machine.snapshot())
    assert said["batch"] == "fixed:12"
    assert [(row["id"], row["samples"]) for row in said["members"]] == list(
        zip(talk.view.ids(), (6, 5, 1), strict=True)
    )
    assert said["reason"].startswith("samples of a step by measured speed: ")
    board = from_status({"machine": said})
    assert ("batch", "fixed:12") in board.figures
    assert [row.remark for row in board.rows] == ["6 samples", "5 samples", "1 sample"]
    plain = cast(Any, talk_of("a", "b", batch="").machine.snapshot())
    assert "batch" not in plain
    assert all("samples" not in row for row in plain["members"])


def test_members_are_not_given_another_split_soon_after_one() -> None:
    talk = talk_of("a", "b")
    talk.sample_s = {"a": 1.0, "b": 3.0}
    go_on(talk, PAUSE_STEPS)
    go_on(talk, 10)  # no header carries it yet, and nobody heeds what follows
    assert enter(talk).batch == "12:9,3"
    talk.sample_s = {"a": 1.0, "b": 1.0}
    go_on(talk, PAUSE_STEPS - 1)
    assert talk.view.batch == "12:9,3"
    go_on(talk, 1)
    assert talk.view.batch == "12:6x2"


def test_small_changes_change_nothing() -> None:
    talk = talk_of("a", "b")
    view = talk.view
    talk.sample_s = {"a": 1.0, "b": 1.1}
    go_on(talk, 3 * PAUSE_STEPS)
    assert talk.view is view


def test_a_split_waits_until_all_members_with_a_share_have_told_a_time() -> None:
    talk = talk_of("a", "b", "c", batch="2")
    talk.sample_s = {"a": 1.0}
    go_on(talk, 2 * PAUSE_STEPS)
    assert talk.view.batch == "2:1x2,0"
    talk.sample_s = {"a": 1.0, "b": 9.0}  # c has no share, so nothing to measure, and counts as the median
    go_on(talk, 1)
    assert talk.view.batch == "2:1,0,1"


def test_a_scheduler_that_is_restarted_keeps_the_split_until_members_have_told() -> None:
    """Former bug: it knew no times, so took all members for equal, and divided the batch alike."""
    talk = talk_of("a", "b")
    talk.sample_s = {"a": 1.0, "b": 3.0}
    go_on(talk, PAUSE_STEPS)
    view = enter(talk)
    talk.machine = SchedulerMachine(Settings(min_nodes=1), fx.Chain(2, view.id, (view,), id="c"))
    talk.now, talk.sample_s = talk.now + 1.0, {}
    for name in "ab":
        talk.come_back(name)
    go_on(talk, 2 * PAUSE_STEPS)
    assert talk.view is view
    talk.sample_s = {"a": 1.0, "b": 3.0}
    go_on(talk, PAUSE_STEPS // 2)
    assert talk.view is view
    talk.sample_s = {"a": 3.0, "b": 1.0}
    go_on(talk, PAUSE_STEPS)
    assert talk.view.batch == "12:3,9"


def test_those_who_go_on_after_a_death_share_by_what_they_have_told() -> None:
    talk = talk_of("a", "b", "c")
    talk.sample_s = {"a": 1.0, "b": 2.0, "c": 1.0}
    go_on(talk, 2)
    whole = talk.owned("a")
    talk.die("c")
    for name in "ab":
        talk.reports(name, talk.view, whole)
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert decision.view.batch == "12:8,4"


def test_those_who_stay_when_one_leaves_share_by_what_they_have_told() -> None:
    talk = talk_of("a", "b", "c")
    talk.sample_s = {"a": 1.0, "b": 2.0, "c": 1.0}
    go_on(talk, 2)
    talk.say("c", Leave("Ctrl+C"))
    talk.wait(0.1)
    assert (talk.names(talk.view.ids()), talk.view.batch) == ("a b", "12:8,4")


def test_a_newcomer_counts_as_the_median_of_the_others() -> None:
    talk = talk_of("a", "b")
    talk.sample_s = {"a": 1.0, "b": 4.0}
    go_on(talk, 2)
    talk.come("c")
    talk.wait(0.1)
    assert (talk.names(talk.view.ids()), talk.view.batch) == ("a b c", "12:6,1,5")


def test_members_that_stay_keep_their_split_in_a_recovery() -> None:
    talk = talk_of("a", "b")
    talk.sample_s = {"a": 1.0, "b": 3.0}
    go_on(talk, PAUSE_STEPS)
    view = enter(talk)
    assert talk.machine.sharing.of(view.members, view) == view.batch == "12:9,3"


@pytest.mark.parametrize("batch", ["0", "12/5", "many"])
def test_a_newcomer_with_a_batch_that_is_none_is_refused(batch: str) -> None:
    talk = talk_of("a")
    talk.hello("b", batch=batch)
    refused = talk.last("b", Refused)
    assert isinstance(refused, Refused)
    assert "is no rule; expected N or N/B" in refused.reason


@pytest.mark.parametrize(("batch", "words"), [("24", "fixed:24"), ("12/2", "fixed:12/2"), ("", "member")])
def test_a_newcomer_with_another_batch_is_refused_by_name(batch: str, words: str) -> None:
    talk = talk_of("a")
    talk.hello("b", batch=batch)
    told = [m for m in talk.heard["b"] if isinstance(m, Refused | Notice)]
    assert any("batch" in str(m) and words in str(m) and "fixed:12" in str(m) for m in told), talk.heard["b"]


def test_a_job_that_is_founded_again_has_the_batch_that_its_members_name() -> None:
    terms = JobTerms(name="a", package="", accumulate=1, fingerprint=(), batch="12/4")
    roster = SimpleNamespace(reference=terms, peers={}, members=list)
    sharing = Sharing(cast(Book, SimpleNamespace(reached=0)), cast(Roster, roster))
    view = talk_of("a", "b").view
    assert sharing.of(view.members) == "12/4:2,1"
    assert sharing.of((), view) == ""
