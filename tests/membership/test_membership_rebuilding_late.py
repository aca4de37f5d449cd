"""Tests the rebuilding of a lost chain with members that come, report or fall silent late, and with those that cannot
go on (protocol.md 14a).
"""

from __future__ import annotations

from rebuilding_talk import ABC, GRACE_S, HEAD, NAMES, Talk, half_promised, hello, view

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.protocol.types import (
    GENESIS,
    Fence,
    LinkEvent,
    Ready,
    RebuildReport,
    Released,
    Welcome,
)


def test_too_few_can_go_on_and_newcomers_up_to_min_nodes_do_not_make_up_for_them() -> None:
    """Enough members report, but too few can go on: none is put out, and the scheduler waits rather than retry for
    ever.
    """
    talk = Talk(min_nodes=3)
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(1.1 * GRACE_S)
    talk.promises("a", ABC)
    talk.promises("b", ABC, loaded=False, last=GENESIS)
    assert [entry.kind for entry in talk.stored] == ["reserve"]
    assert not talk.heard("b", Fence)
    assert "only a~1 can go on" in talk.reason


def test_who_was_put_out_while_newcomers_are_waited_for_is_no_reporter_any_more() -> None:
    talk = Talk(min_nodes=3)
    for name in "abc":
        talk.reports(name, ABC)
    for name in "abc":
        talk.promises(name, ABC, loaded=name != "c", last=HEAD if name != "c" else GENESIS)
    assert talk.heard("c", Fence)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.machine.phase is SchedulerPhase.HOLDING
    talk.feed(fx.Closed(talk.conns.pop("b"), False))
    assert talk.machine.phase is SchedulerPhase.REBUILDING
    assert "1 did (a~1). Missing: b~2 at 127.0.0.1, c~3 at 127.0.0.1" in talk.reason
    talk.reports("b", ABC)
    talk.passes(1.1 * GRACE_S)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.machine.phase is SchedulerPhase.HOLDING
    talk.comes(hello("c", new=True))
    (welcome,) = talk.heard("c", Welcome)
    for name in "ab":
        talk.says("c", LinkEvent(NAMES[name].id, True, "connected"))
        talk.says(name, LinkEvent(welcome.member.id, True, "connected"))  # type: ignore[attr-defined]
    talk.says("c", Ready())
    assert talk.views()[0].ids() == ("a~1", "b~2")


def test_one_that_falls_silent_on_a_stream_that_stands_counts_again_when_it_speaks() -> None:
    talk = half_promised()
    frozen = talk.conns.pop("b")
    talk.passes(talk.machine.settings.hang_timeout_s + 2.0)
    assert talk.machine.phase is SchedulerPhase.REBUILDING
    assert "1 did (a~1)" in talk.reason
    assert len(talk.stored) < 4
    talk.conns["b"] = frozen
    talk.passes(0.1)
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")


def test_one_of_an_older_view_that_comes_with_the_last_promise_is_heard_and_sent_to_join_again() -> None:
    talk = half_promised()
    older = view(2, 1, "abd")
    talk.comes(hello("d", older))
    talk.promises("b", ABC)
    assert not talk.views()
    assert "d~4 must tell what they know" in talk.reason
    talk.says("d", RebuildReport(older, None, older.id))
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")
    assert "later view than its own" in str(talk.heard("d", Fence))


def test_one_that_freezes_before_it_answers_is_sent_to_join_again_when_the_chain_is_begun() -> None:
    talk = Talk()
    for name in "ab":
        talk.reports(name, ABC)
    talk.passes(1.1 * GRACE_S)
    conn = talk.comes(hello("d", view(2, 1, "abd")))
    del talk.conns["d"]
    talk.passes(2 * talk.machine.settings.heartbeat_timeout_s)
    for name in "ab":
        talk.promises(name, ABC)
    assert len(talk.views()) == 1
    assert "before it told what it knows" in str(talk.said[conn][-1])
    assert "d~4" not in talk.machine.roster.peers


def test_one_that_beats_and_does_not_answer_is_waited_for_a_while_and_named() -> None:
    """A member sends heartbeats but does not report: it is named and waited for, but only for report_timeout_s."""
    talk = half_promised()
    talk.comes(hello("d", view(2, 1, "abd")))
    talk.promises("b", ABC)
    limit = talk.machine.settings.report_timeout_s
    talk.passes(limit - 0.3)
    assert not talk.views()
    assert f"d~4 must tell what they know: they were asked, and are waited for, for {limit:g} s" in talk.reason
    talk.passes(0.6)
    assert talk.machine.phase is SchedulerPhase.PREPARING
    talk.comes(hello("d", view(2, 1, "abd")))
    assert talk.machine.phase is SchedulerPhase.PREPARING, "it had its time"
    for name in "ab":
        talk.promises(name, ABC)
    assert talk.views()[0].ids() == ("a~1", "b~2")
    assert talk.heard("d", Fence)


def test_one_that_does_not_answer_and_is_needed_is_named() -> None:
    talk = Talk()
    talk.reports("a", ABC)
    talk.comes(hello("b", ABC))
    talk.passes(talk.machine.settings.report_timeout_s + GRACE_S)
    assert "Missing: b~2 at 127.0.0.1 (it is connected, but does not answer), c~3" in talk.reason
    talk.says("b", RebuildReport(ABC, None, ABC.id))
    assert talk.machine.phase is SchedulerPhase.PREPARING


def test_one_that_is_drained_before_it_has_told_where_it_stands_stays_all_the_same() -> None:
    talk = Talk()
    talk.comes(hello("a", ABC))
    talk.feed(fx.Drain("a"))
    assert not talk.heard("a", Released)
    assert talk.machine.roster.peers["a~1"].leaving
