"""Tests the rebuilding of a lost chain by the scheduler: which members it waits for, where the job goes on, and which
are put out (protocol.md 14a).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from membership_script import header_after, pipelines_of
from rebuilding_talk import ABC, ABCD, GRACE_S, HEAD, NAMES, Talk, half_promised, hello, view

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.identity import KNOCKS_S
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.parts import division
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Entered,
    Fence,
    Leave,
    NextView,
    Notice,
    Prepare,
    Ready,
    RebuildReport,
    Recall,
    Refused,
    Released,
    Report,
    Settings,
    ViewId,
    Welcome,
)
from lab.simulate.pipelines import asked
from lab.simulate.training import Program


def test_all_members_report_and_nobody_waits() -> None:
    talk = Talk()
    for name in "abc":
        assert not talk.stored
        talk.reports(name, ABC)
    assert [entry.kind for entry in talk.stored] == ["reserve"]
    for name in "abc":
        assert talk.heard(name, Prepare)
        talk.promises(name, ABC)
    (first,) = talk.views()
    assert first.predecessor == NO_VIEW
    assert first.reason.startswith("rebuilt")
    assert first.ids() == ABC.ids()
    assert all(talk.heard(name, Decide) for name in "abc")
    assert [v.id for v in talk.machine.book.views] == [first.id]


def test_absent_ones_are_waited_for_and_join_again_later() -> None:
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(GRACE_S - 0.3)
    assert not talk.stored
    assert "Missing: c~3 at 127.0.0.1; they are waited for, for 2 s" in talk.reason
    talk.passes(0.5)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")
    talk.comes(hello("c", ABC))
    (fence,) = talk.heard("c", Fence)
    assert fence.rejoin  # type: ignore[attr-defined]


def test_half_of_the_members_wait_however_long() -> None:
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABCD)
    talk.passes(10 * GRACE_S)
    assert not talk.stored
    assert "3 of the 4 members of view 1.4 must report; 2 did (a~1, b~2)" in talk.reason


def test_term_and_number_are_above_all_that_anybody_has_heard_of() -> None:
    talk = Talk()
    talk.term_granted = False
    talk.reports("a", ABC)
    talk.reports("b", ABC, promised=9)
    talk.comes(hello("c", ABC, term=6))
    talk.says("c", RebuildReport(ABC, None, ABC.id))
    assert talk.terms == [6]
    talk.passes(0.5)
    assert talk.terms == [6], "it was asked for once"
    assert not talk.stored
    talk.feed(fx.TermTaken(7))
    (entry,) = talk.stored
    assert entry.number == ViewId(7, 10)


def test_a_view_that_a_header_was_to_carry_counts_nothing_while_all_of_the_one_before_are_here() -> None:
    talk = Talk()
    talk.reports("a", ABC, waiting=ABCD)
    for name in "bc":
        talk.reports(name, ABC)
    for name in "abc":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ABC.ids()


def test_a_view_that_a_header_was_to_carry_counts_while_one_of_the_view_before_is_absent() -> None:
    talk = Talk()
    talk.reports("a", ABC, waiting=ABCD)
    talk.reports("b", ABC)
    talk.passes(10 * GRACE_S)
    assert not talk.stored
    assert "3 of the 4 members of view 1.4" in talk.reason


def test_a_newcomer_that_such_a_view_names_reports_and_comes_in_with_the_header_that_carried_it() -> None:
    talk = Talk()
    carried = header_after(ABC, GENESIS, "boundary", ABCD)
    talk.reports("a", ABCD)
    talk.reports("d", None, waiting=ABCD)
    talk.reports("b", ABC)
    talk.passes(1.1 * GRACE_S)
    talk.promises("a", ABCD, last=carried)
    talk.promises("b", ABC, last=GENESIS)
    talk.promises("d", None, loaded=False, last=GENESIS)
    (first,) = talk.views()
    assert first.ids() == ("a~1", "b~2", "d~4")
    assert first.joiners == ("d~4",)
    assert talk.stored[-1].base == carried


def test_a_newcomer_without_a_view_does_not_begin_the_time_for_which_members_are_waited_for() -> None:
    talk = Talk()
    talk.reports("d", None)
    assert "none is here yet" in talk.reason
    talk.passes(10 * GRACE_S)
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(0.5 * GRACE_S)
    assert not talk.stored
    talk.passes(0.6 * GRACE_S)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")
    assert talk.heard("d", Fence), "it begins anew as a newcomer"


def test_one_that_knows_a_later_view_comes_while_the_others_promise() -> None:
    talk = Talk()
    later = view(5, 3, "cd")
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(1.1 * GRACE_S)
    assert talk.machine.phase is SchedulerPhase.PREPARING
    talk.promises("a", ABC)
    talk.reports("c", later)
    assert talk.machine.phase is SchedulerPhase.REBUILDING
    assert "2 of the 2 members of view 1.5 must report; 1 did (c~3)" in talk.reason
    talk.promises("b", ABC)
    assert not talk.views()
    talk.reports("d", later)
    for name in "cd":
        talk.promises(name, later)
    (first,) = talk.views()
    assert first.ids() == ("c~3", "d~4")
    assert first.id.number > later.id.number
    assert all("later view than its own" in str(talk.heard(name, Fence)) for name in "ab")


def test_a_header_that_was_under_way_carries_a_later_view_while_absent_ones_are_waited_for() -> None:
    """A member that has reported enters a later view by a late header: it is asked to report again."""
    talk = Talk()
    later = view(5, 3, "abd", joiners="d")
    for name in "ab":
        talk.reports(name, ABC)
    talk.says("a", Entered(later.id, 2, 1, HEAD.hash))
    assert len(talk.heard("a", Recall)) == 2
    talk.passes(0.5 * GRACE_S)
    talk.says("a", RebuildReport(later, None, later.id))
    assert "members of view 1.5 must report; 2 did (a~1, b~2). Missing: d~4" in talk.reason
    talk.passes(0.6 * GRACE_S)
    talk.promises("a", later)
    assert not talk.views()
    talk.promises("b", ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")


def test_one_that_moved_when_it_promised_is_asked_before_anything_is_decided() -> None:
    talk = Talk()
    later = view(5, 3, "acd", joiners="d")
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(1.1 * GRACE_S)
    talk.promises("b", ABC)
    talk.says("a", Entered(later.id, 2, 1, HEAD.hash))  # sent before the promise
    talk.promises("a", later)
    assert not talk.views()
    talk.says("a", RebuildReport(later, None, later.id))
    talk.passes(2 * GRACE_S)
    assert not talk.views()
    assert "2 of the 3 members of view 1.5 must report; 1 did (a~1)" in talk.reason


def test_who_came_and_did_not_tell_what_it_knows_is_absent_until_it_comes_again() -> None:
    """A member that said hello but does not report (it froze, for example) counts as absent until it comes again."""
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    silent = talk.comes(hello("c", ABC))
    assert talk.heard("c", Recall)
    del talk.conns["c"]
    talk.passes(1.1 * GRACE_S)
    assert talk.machine.phase is SchedulerPhase.PREPARING
    assert silent in talk.closed
    talk.reports("c", ABC)
    for name in "abc":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ABC.ids()


def test_too_few_are_left_while_they_promise() -> None:
    talk = half_promised()
    talk.feed(fx.Closed(talk.conns.pop("b"), False))
    assert talk.machine.phase is SchedulerPhase.REBUILDING
    assert not talk.views()
    talk.reports("c", ABC)
    for name in "ac":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "c~3")


def test_enough_report_and_too_few_of_them_can_go_on() -> None:
    talk = Talk()
    talk.reports("a", ABC)
    talk.reports("b", ABC)
    talk.passes(1.1 * GRACE_S)
    talk.promises("a", ABC)
    talk.promises("b", ABC, loaded=False, last=GENESIS)
    talk.passes(10.0)
    assert not talk.views()
    assert "of the 3 members of view 1.3 only a~1 can go on" in talk.reason
    assert any("can go on" in m.text for m in talk.heard("b", Notice))  # type: ignore[attr-defined]


def test_no_reporter_holds_the_state_and_no_chain_is_begun_without_it() -> None:
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    talk.comes(hello("d", new=True))
    talk.says("d", Ready())
    talk.passes(1.1 * GRACE_S)
    for name in "ab":
        talk.promises(name, ABC, loaded=False, last=GENESIS)
    talk.passes(2.0)
    assert not talk.views()
    assert not talk.heard("a", Fence)
    assert "only nobody can go on (no survivor holds the training state)" in talk.reason
    talk.reports("c", ABC)  # it holds the state, and did not report in time
    for name in "abc":
        talk.promises(name, ABC, loaded=name == "c", last=HEAD if name == "c" else GENESIS)
    assert not talk.views(), "one of three is no majority"
    for name in "abc":
        talk.comes(hello(name, ABC))
    talk.passes(0.5)
    assert not talk.views()


def test_nobody_founds_a_job_while_one_is_to_be_rebuilt() -> None:
    talk = Talk()
    talk.comes(hello("d", new=True))
    talk.says("d", Ready())
    talk.passes(20.0)
    assert not talk.stored
    assert "none is here yet" in talk.reason


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_newcomer_with_another_program_that_comes_first_does_not_end_the_members(*, rebuild: bool) -> None:
    talk = Talk(rebuild=rebuild)
    talk.comes(replace(hello("d", new=True), fingerprint=(("model", "large"),)))
    talk.says("d", Ready())
    assert talk.heard("d", Welcome)
    for name in "abc":
        talk.comes(hello(name, ABC))
        assert all(m.retry for m in talk.heard(name, Refused))  # type: ignore[attr-defined]
        assert bool(talk.heard(name, Recall)) == rebuild
    if rebuild:
        (refused,) = talk.heard("d", Refused)
        assert "model of d is large, the job's (from a) is small" in refused.reason  # type: ignore[attr-defined]
    else:
        assert "is lost: a~1 in view 1.3, b~2 in view 1.3, c~3" in talk.reason
        assert not talk.stored


def test_a_member_of_another_job_is_sent_away_and_trains_on() -> None:
    """A member meets a scheduler of another job at its own scheduler's address: it is refused, but may try again and
    trains on.
    """
    talk = Talk(rebuild=False)
    talk.comes(replace(hello("a", ABC), job="other"))
    (refused,) = talk.heard("a", Refused)
    assert refused.retry  # type: ignore[attr-defined]
    assert "serves job 'default'" in refused.reason  # type: ignore[attr-defined]
    talk.comes(replace(hello("d", new=True), job="other"))
    (refused,) = talk.heard("d", Refused)
    assert not refused.retry  # type: ignore[attr-defined]


def test_who_asks_to_leave_stays_until_a_view_of_the_rebuilt_chain_lets_it_go() -> None:
    talk = Talk()
    talk.reports("a", ABC)
    talk.says("a", Leave("Ctrl+C"))
    assert not talk.heard("a", Released)
    for name in "bc":
        talk.reports(name, ABC)
    for name in "abc":
        talk.promises(name, ABC)
    (first,) = talk.views()
    assert first.ids() == ABC.ids()
    for name in "abc":
        talk.says(name, Entered(first.id, HEAD.seq, HEAD.step, HEAD.hash))
    assert talk.views()[-1].ids() == ("b~2", "c~3")
    assert all(talk.heard(name, NextView) for name in "abc")


def test_a_newcomer_that_reports_and_asks_to_leave_is_let_go_at_once() -> None:
    talk = Talk()
    talk.reports("d", None, waiting=ABCD)
    talk.says("d", Leave("Ctrl+C"))
    assert talk.heard("d", Released)


def test_a_newcomer_of_a_lost_chain_is_not_put_out_while_members_knock() -> None:
    """A newcomer of the lost chain is refused but not put out while members come: a late header may still let it in."""
    talk = Talk(rebuild=False)
    for _ in range(20):
        talk.comes(hello("a", ABC))
        talk.comes(hello("d"))
        (refused,) = talk.heard("d", Refused)
        assert refused.retry  # type: ignore[attr-defined]
        talk.passes(0.5)
    assert not talk.stored


def test_newcomers_of_a_chain_that_nobody_stands_in_are_welcomed_anew_after_a_moment() -> None:
    """The scheduler restarts on an empty store before the job was founded: newcomers of the old chain are welcomed anew
    after a moment.
    """
    talk = Talk(rebuild=False)
    talk.comes(hello("d"))
    assert talk.heard("d", Refused)
    talk.conns.clear()
    talk.passes(KNOCKS_S + 0.1)
    talk.comes(hello("d"))
    (welcome,) = talk.heard("d", Welcome)
    assert welcome.member.id == "d~1"  # type: ignore[attr-defined]
    talk.says("d", Ready())
    (first,) = talk.views()
    assert first.reason.startswith("founded")


@pytest.mark.parametrize(("number", "known"), [(3, True), (12, False)])
def test_after_a_restart_on_the_rebuilt_chain_older_members_join_again_and_later_ones_are_told(
    number: int, *, known: bool
) -> None:
    first = replace(ABC, id=ViewId(2, 11), predecessor=NO_VIEW, reason="rebuilt from the reports of a~1, b~2, c~3")
    talk = Talk(chain=fx.Chain(3, first.id, (first,)))
    talk.comes(replace(hello("d"), view=ViewId(1 if known else 2, number)))
    assert bool(talk.heard("d", Fence)) == known
    if not known:
        (refused,) = talk.heard("d", Refused)
        assert "older copy" in refused.reason  # type: ignore[attr-defined]


def test_a_newcomer_of_this_very_scheduler_whose_stream_breaks_is_no_reporter() -> None:
    """A newcomer that this scheduler has welcomed reconnects while the chain is rebuilt: it is welcomed again, not
    asked to report.
    """
    talk = Talk()
    talk.comes(hello("d", new=True))
    (welcome,) = talk.heard("d", Welcome)
    talk.feed(fx.Closed(talk.conns["d"], True))
    talk.comes(replace(hello("d"), resume=welcome.member.id))  # type: ignore[attr-defined]
    assert talk.heard("d", Welcome)
    assert not talk.heard("d", Recall)


def test_a_hello_tells_the_id_of_who_waits_for_its_first_view() -> None:
    """The hello of a newcomer that waits for its first view includes its id, by which a coming view may name it."""
    machine = MemberMachine()
    nothing = {"resume": "", "view": NO_VIEW, "term": 0, "chain": "", "known": NO_VIEW}
    assert machine.knowledge() == nothing
    rules = Settings()
    welcome = Welcome(
        NAMES["d"], 3, "joiner", "the job is running", rules.heartbeat_interval_s, rules.heartbeat_timeout_s,
        rules.min_nodes, rules.max_nodes, rules.plan,
    )  # fmt: skip
    machine.on(1.0, fx.ControlIn(welcome))
    assert machine.knowledge() == {**nothing, "resume": "d~4", "term": 3}


def test_who_reports_pipelines_that_cannot_be_read_is_put_out_and_the_others_go_on() -> None:
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    talk.reports("c", replace(ABC, pipelines="nonsense"))
    (fence,) = talk.heard("c", Fence)
    assert isinstance(fence, Fence)
    assert fence.reason.startswith("c~3 is out of the job: it reported view 1.3: a view's pipelines cannot be read")
    talk.passes(1.1 * GRACE_S)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[-1].ids() == ("a~1", "b~2")


@pytest.mark.parametrize("asks", [True, False])
def test_a_chain_of_views_with_pipelines_is_rebuilt_with_what_its_members_ask_for(*, asks: bool) -> None:
    talk = Talk()
    talk.asks = asked(Program(layers=4, micro_batches=2)) if asks else ""
    staged = replace(ABC, pipelines=pipelines_of("a~1:2+b~2:2,c~3:4"))
    for name in "ab":
        talk.reports(name, staged)
    talk.passes(1.1 * GRACE_S)
    for name in "ab":
        parts = division(staged).owned(NAMES[name].id)
        talk.says(
            name, Report(talk.machine.recovery.number, staged.id, HEAD.seq, HEAD.hash, parts, last=HEAD, owns=parts)
        )
    if asks:
        assert [v.ids() for v in talk.views()] == [("a~1", "b~2")]
        assert set(division(talk.views()[0]).owners[0]) <= {"a~1", "b~2"}
    else:
        assert not talk.views()
        (notice,) = [n for n in talk.heard("a", Notice) if "no pipelines fit" in str(n)]
        assert "no member has told what the model is like" in str(notice)
