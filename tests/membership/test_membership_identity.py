"""Tests a scheduler whose store is another job's or an old copy, when members connect to it (protocol.md 7, 14a)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rebuilding_talk import ABC, GRACE_S, HEAD, NAMES, Talk, hello, view

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.past import Numbers
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Entered,
    Fence,
    Heartbeat,
    Hello,
    Prepare,
    Ready,
    RebuildReport,
    Recall,
    Refused,
    Released,
    Settings,
    View,
    ViewId,
    Welcome,
)

X, Y = "0123456789abcdef", "fedcba9876543210"
HARM = (Fence, Released, Prepare, Decide)


def of(chain: str, given: View) -> View:
    return replace(given, chain=chain)


def stored(*views: View, chain: str = Y, term: int = 2, hears_s: float = 0.0, **more: object) -> fx.Chain:
    """Returns the content of a store with these views, opened under this term."""
    numbers = Numbers.of(v.id for v in views)
    return fx.Chain(
        term, views[-1].id, tuple(of(chain, v) for v in views), id=chain, numbers=numbers, hears_s=hears_s,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def says_hello(name: str, stands: View | None, chain: str = X, *, known: ViewId | None = None, term: int = 1) -> Hello:
    at = stands.id if stands is not None else NO_VIEW
    return replace(hello(name, stands, term=term), chain=chain, known=known or at)


A = view(1, 0, "a")
AB = view(2, 1, "ab", joiners="b")


# ------------------------------------------------------------------------------------------------ another chain


@pytest.mark.parametrize("stands", [A, AB, ABC])
def test_a_leftover_of_another_chain_puts_out_and_releases_nobody(stands: View) -> None:
    """The store is an earlier job's, with the same names, ids and numbers: members are refused for now, and none is put
    out or released.
    """
    talk = Talk(
        rebuild=False,
        chain=replace(stored(A, AB, replace(A, id=ViewId(1, 3), predecessor=AB.id)), changes=(ViewId(1, 3),)),
    )
    for name in (m.name for m in stands.members):
        talk.comes(says_hello(name, stands))
        (refused,) = talk.heard(name, Refused)
        assert refused.retry  # type: ignore[attr-defined]
        assert X[:8] in refused.reason  # type: ignore[attr-defined]
        assert Y[:8] in refused.reason  # type: ignore[attr-defined]
        assert not any(talk.heard(name, kind) for kind in (*HARM, Welcome))
    talk.passes(2.0)
    assert not talk.stored
    assert X[:8] in talk.reason


def test_beside_members_of_another_chain_nothing_is_founded_once_the_leftovers_own_are_gone() -> None:
    talk = Talk(rebuild=False, chain=stored(A))
    talk.feed(fx.Gone("a~1", "its process is gone"))
    talk.comes(says_hello("b", AB))
    talk.comes(replace(hello("d", new=True), term=0))
    talk.passes(1.0)
    assert not talk.stored
    (told,) = (m for m in talk.said[talk.conns["d"]] if type(m).__name__ == "Notice")
    assert "no job is founded" in told.text  # type: ignore[attr-defined]


def test_a_finished_leftover_sends_no_member_of_another_chain_home() -> None:
    talk = Talk(rebuild=False, chain=replace(stored(A), finished=True))
    talk.comes(says_hello("a", A))
    assert talk.heard("a", Refused)
    assert not talk.heard("a", Released)


def test_a_newcomer_that_another_chains_view_lets_in_is_dropped_and_not_put_out() -> None:
    """A newcomer is welcomed here, and then a header of another chain lets it in: this scheduler refuses it, and does
    not put it out.
    """
    talk = Talk(rebuild=False, chain=stored(A))
    talk.comes(replace(hello("d", new=True), term=0))
    talk.says("d", Entered(AB.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
    assert talk.heard("d", Refused)
    assert not any(talk.heard("d", kind) for kind in HARM)
    assert not [p for p in talk.machine.roster.peers.values() if p.member.name == "d"]


def test_a_newcomer_forgets_the_numbers_of_the_chain_before() -> None:
    """A newcomer that is welcomed by another chain forgets its former promises; otherwise it would wait for a higher
    number for ever.
    """
    machine = MemberMachine()
    rules = Settings()
    beats = (rules.heartbeat_interval_s, rules.heartbeat_timeout_s)
    machine.on(1.0, fx.ControlIn(Welcome(NAMES["d"], 5, "joiner", "", *beats, chain=X)))
    machine.on(1.1, fx.ControlIn(Prepare(ViewId(5, 9), "")))
    assert machine.knowledge() == {
        "resume": "d~4", "view": NO_VIEW, "term": 5, "chain": X, "known": ViewId(5, 9)
    }  # fmt: skip
    machine.on(1.2, fx.ControlIn(Welcome(replace(NAMES["d"], id="d~1"), 1, "joiner", "", *beats, chain=Y)))
    assert machine.knowledge() == {"resume": "d~1", "view": NO_VIEW, "term": 1, "chain": Y, "known": NO_VIEW}


# ------------------------------------------------------------------------------------------------ an older copy


def test_who_was_put_out_comes_again_and_still_knows_what_was_in_the_jobs_store() -> None:
    """A member that was put out and joins again still reports the job's numbers; otherwise a scheduler on an old copy
    would found a second job.
    """
    machine = MemberMachine()
    rules = Settings()
    beats = (rules.heartbeat_interval_s, rules.heartbeat_timeout_s)
    machine.on(1.0, fx.ControlIn(Welcome(NAMES["a"], 2, "founder", "", *beats, chain=X)))
    machine.on(1.1, fx.ControlIn(Decide(of(X, A), GENESIS, reason="founded")))
    machine.on(1.2, fx.ControlIn(Prepare(ViewId(2, 3), "")))
    machine.on(1.3, fx.ControlIn(Fence("a~1 is out of the job")))
    again = machine.anew()
    assert again.knowledge() == {"resume": "", "view": NO_VIEW, "term": 2, "chain": X, "known": ViewId(2, 3)}
    assert again.promised == NO_VIEW
    talk = Talk(rebuild=False, chain=stored(A, chain=X, term=3))
    talk.comes(replace(hello("a", new=True), **again.knowledge()))
    assert talk.machine.phase is SchedulerPhase.STALE
    again.on(2.0, fx.ControlIn(Welcome(NAMES["d"], 1, "joiner", "", *beats, chain=Y)))
    assert again.knowledge()["known"] == NO_VIEW, "it is of another chain now"


def test_a_member_of_the_last_stored_view_that_stands_in_a_later_one_stops_everything() -> None:
    """The store has a view of A alone, and A comes in a later view: the scheduler knows that its store is old, and
    decides nothing.
    """
    talk = Talk(rebuild=False, chain=stored(A, chain=X))
    talk.comes(says_hello("a", view(3, 1, "abc")))
    assert talk.machine.phase is SchedulerPhase.STALE
    (refused,) = talk.heard("a", Refused)
    assert refused.retry  # type: ignore[attr-defined]
    for word in ("a~1", "view 1.3", X[:8], "view 1.1", "--rebuild"):
        assert word in talk.reason
    talk.passes(10 * GRACE_S)
    assert not talk.stored
    assert not any(talk.heard("a", kind) for kind in HARM)


@pytest.mark.parametrize("known", [ViewId(1, 4), ViewId(2, 3)])
def test_a_number_that_a_member_was_told_of_or_has_promised_is_as_good_as_a_view(known: ViewId) -> None:
    talk = Talk(rebuild=False, chain=stored(A, AB, chain=X, term=3))
    talk.comes(says_hello("a", AB, known=known))
    assert talk.machine.phase is SchedulerPhase.STALE


def test_a_recovery_that_is_under_way_stops_when_somebody_knows_more() -> None:
    talk = Talk(rebuild=False, chain=stored(A, AB, chain=X))
    for name in "ab":
        talk.comes(says_hello(name, AB))
        talk.says(name, Entered(AB.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
    talk.feed(fx.Gone("b~2", "its process is gone"))
    assert talk.machine.phase is SchedulerPhase.PREPARING
    before = len(talk.stored)
    talk.comes(says_hello("c", view(5, 4, "bcd")))
    assert talk.machine.phase is SchedulerPhase.STALE
    talk.says("a", Heartbeat(AB.id, HEAD.seq, HEAD.step, chain=X))
    talk.passes(10 * GRACE_S)
    assert len(talk.stored) == before
    assert talk.heard("a", Refused)


@pytest.mark.parametrize("by", ["heartbeat", "entered"])
def test_what_a_member_learns_later_counts_as_well(by: str) -> None:
    """A member that is already back learns of a view that the store lacks: the scheduler then knows that its store is
    old.
    """
    talk = Talk(rebuild=False, chain=stored(A, AB, chain=X))
    talk.comes(says_hello("a", AB))
    later = ViewId(1, 3)
    told = (
        Heartbeat(AB.id, 2, 1, chain=X, known=later) if by == "heartbeat" else Entered(later, 2, 1, HEAD.hash, chain=X)
    )
    talk.says("a", told)
    assert talk.machine.phase is SchedulerPhase.STALE
    assert "view 1.3" in talk.reason


def test_a_term_that_another_scheduler_took_before_shows_a_copy() -> None:
    talk = Talk(rebuild=False, chain=stored(A, chain=X, term=2))
    talk.comes(says_hello("a", A, term=2))
    assert talk.machine.phase is SchedulerPhase.STALE
    again = Talk(rebuild=False, chain=stored(A, chain=X, term=2))
    again.comes(says_hello("a", A, term=1))
    again.comes(says_hello("a", A, term=2))  # it has heard of it here, and its stream broke
    assert again.machine.phase is SchedulerPhase.RUNNING


# ------------------------------------------------------------------------------------------------ hearing first


def test_a_scheduler_that_has_just_started_decides_nothing_before_all_could_come() -> None:
    """A new scheduler on an old copy of the store hears only A at first: it decides nothing until others could come,
    which show that the copy is old.
    """
    talk = Talk(rebuild=False, chain=stored(A, AB, chain=X, hears_s=1.0))
    talk.comes(says_hello("a", AB))
    talk.feed(fx.Gone("b~2", "its process is gone"))
    talk.passes(0.8)
    assert not talk.stored
    assert talk.said.get(talk.conns["a"], []) == []
    assert "listens" in talk.reason
    talk.comes(says_hello("c", view(4, 3, "bcd")))
    assert talk.machine.phase is SchedulerPhase.STALE
    assert talk.heard("a", Refused)


def test_when_nobody_knows_more_who_was_held_back_is_heard() -> None:
    talk = Talk(rebuild=False, chain=stored(A, AB, chain=X, hears_s=1.0))
    talk.comes(says_hello("a", AB))
    talk.comes(says_hello("b", A))
    talk.passes(1.2)
    assert talk.heard("a", Welcome)
    assert talk.heard("b", Welcome)


def test_on_an_empty_store_newcomers_are_welcomed_and_found_nothing_before_all_could_come() -> None:
    talk = Talk(rebuild=False, chain=fx.Chain(1, NO_VIEW, id=Y, hears_s=1.0))
    talk.comes(replace(hello("d", new=True), term=0))
    (welcome,) = talk.heard("d", Welcome)
    assert welcome.chain == Y  # type: ignore[attr-defined]
    talk.says("d", Ready())
    talk.passes(0.8)
    assert not talk.stored
    talk.passes(0.4)
    (founded,) = talk.views()
    assert founded.chain == Y


# ------------------------------------------------------------------------------------------------ rebuilding


def test_a_stale_store_is_rebuilt_on_the_operators_word_and_keeps_what_it_has() -> None:
    later = of(X, view(6, 5, "bcd"))
    talk = Talk(chain=stored(A, AB, chain=X, rebuild=True))
    talk.comes(says_hello("b", later))
    assert talk.machine.phase is SchedulerPhase.REBUILDING
    assert talk.conns["b"] in talk.closed
    for name in "bcd":
        talk.comes(says_hello(name, later))
        assert talk.heard(name, Recall)
        talk.says(name, Entered(later.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
        talk.says(name, RebuildReport(later, None, ViewId(1, 7)))
    for name in "bcd":
        talk.promises(name, later)
    (first,) = talk.views()
    assert first.ids() == later.ids()
    assert first.predecessor == AB.id
    assert first.id.number > 7
    assert first.chain == X
    assert [v.id for v in talk.machine.book.views] == [AB.id, first.id]
    talk.comes(says_hello("a", A))  # whom the copy knows, and the others do not
    assert talk.heard("a", Fence)


@pytest.mark.parametrize("holds_views", [False, True])
def test_a_member_of_a_chain_that_an_operator_ended_is_let_go_and_nobody_waits_for_it(*, holds_views: bool) -> None:
    """A member whose control stream was down when an operator ended its job is released when it comes back, and a new
    job does not wait for it.
    """
    chain = stored(A) if holds_views else fx.Chain(2, NO_VIEW, id=Y)
    talk = Talk(rebuild=False, chain=replace(chain, ended=(X,)))
    talk.comes(says_hello("b", AB))
    (released,) = talk.heard("b", Released)
    words = f"the job that it was in is ended, by an operator or as it could not go on, chain {X[:8]}"
    assert released == Released(words, asked=True)
    assert not talk.heard("b", Refused)
    if not holds_views:
        talk.comes(replace(hello("d", new=True), term=0))
        talk.says("d", Ready())
        assert [v.members[0].name for v in talk.views()] == ["d"]


def test_who_was_in_no_view_of_a_chain_that_an_operator_ended_founds_the_next_job() -> None:
    talk = Talk(rebuild=False, chain=fx.Chain(2, NO_VIEW, id=Y, ended=(X,)))
    talk.comes(says_hello("b", None))
    assert not talk.heard("b", Released)
    talk.passes(4.0)
    talk.comes(says_hello("b", None))
    talk.says("b", Heartbeat(NO_VIEW, 0, 0, chain=X))  # it has not read its welcome yet
    talk.says("b", Ready())
    assert not talk.heard("b", Released)
    assert [v.members[0].name for v in talk.views()] == ["b"]


def test_the_operators_word_is_used_up_once_the_job_goes_on_by_the_chain_as_it_is() -> None:
    """The chain needed no rebuilding after all: a member that later comes with a newer view must not start a rebuild
    that puts others out.
    """
    talk = Talk(chain=stored(A, AB, chain=X, rebuild=True))
    for name in "ab":
        talk.comes(says_hello(name, AB))
        talk.says(name, Entered(AB.id, 50, 50, HEAD.hash, chain=X))
    talk.passes(5.0)
    talk.comes(says_hello("d", view(9, 2, "d")))
    assert talk.machine.phase is SchedulerPhase.STALE
    assert "an older copy, or another scheduler leads: d~4 knows of view 1.9" in talk.reason
    assert not any(talk.heard(name, kind) for name in "ab" for kind in HARM)
    assert all(talk.heard(name, Refused) for name in "ab")


def test_the_operators_word_is_used_up_by_the_rebuilt_chain() -> None:
    talk = Talk(chain=stored(A, chain=X, rebuild=True))
    talk.comes(says_hello("b", AB))
    for name in "ab":
        talk.comes(says_hello(name, AB))
        talk.says(name, Entered(AB.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
        talk.says(name, RebuildReport(AB, None, AB.id))
    for name in "ab":
        talk.promises(name, AB)
    (rebuilt,) = talk.views()
    for name in "ab":
        talk.says(name, Entered(rebuilt.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
    talk.comes(says_hello("d", replace(view(9, 2, "d"), id=ViewId(7, 9)), term=7))
    assert talk.machine.phase is SchedulerPhase.STALE
    assert not any(talk.heard(name, Fence) for name in "ab")


def test_an_empty_store_takes_the_id_of_the_chain_that_is_rebuilt() -> None:
    talk = Talk(chain=fx.Chain(1, NO_VIEW, rebuild=True, id=Y))
    abc = of(X, ABC)
    for name in "abc":
        talk.comes(says_hello(name, abc))
        talk.says(name, Entered(abc.id, HEAD.seq, HEAD.step, HEAD.hash, chain=X))
        talk.says(name, RebuildReport(abc, None, NO_VIEW))
    for name in "abc":
        talk.promises(name, abc)
    assert talk.machine.book.chain_id == X
    assert talk.views()[0].chain == X


def test_members_of_two_chains_are_not_mixed() -> None:
    talk = Talk(chain=fx.Chain(1, NO_VIEW, rebuild=True, id="00000000"))
    for name, chain in (("a", X), ("b", Y), ("c", X)):
        talk.comes(says_hello(name, of(chain, ABC), chain))
        talk.says(name, RebuildReport(of(chain, ABC), None, NO_VIEW))
    talk.passes(5 * GRACE_S)
    assert not talk.stored
    assert X[:8] in talk.reason
    assert Y[:8] in talk.reason


def test_what_lies_before_a_rebuilt_view_is_over_and_not_lacking() -> None:
    first = replace(ABC, id=ViewId(2, 11), predecessor=AB.id, reason="rebuilt from the reports of a~1, b~2, c~3")
    talk = Talk(rebuild=False, chain=stored(A, AB, first, chain=X, term=3))
    talk.comes(says_hello("d", view(9, 8, "d")))
    assert talk.heard("d", Fence)
    assert talk.machine.phase is SchedulerPhase.RUNNING
