"""Tests the scheduler's views with pipelines: when members are let go, which newcomers come in by a recovery, how all
members leave (P8-P14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from membership_script import member, pipelines_of
from pipelines_talk import PROGRAM, Talk

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.pipelining import PipelineChoice, Pipelining, ViewPipeliner
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Finished,
    Header,
    Kept,
    Kind,
    Leave,
    Member,
    NextView,
    Notice,
    Prepare,
    Released,
    Report,
    Span,
    View,
    ViewId,
    kept_header,
)


def everything(talk: Talk, *names: str) -> tuple[Span, ...]:
    return union(span for name in names for span in talk.owned(name))


def test_founders_make_the_state_together_and_each_owns_a_part() -> None:
    talk = Talk("a", "b", "c", "d", min_nodes=4)
    assert (talk.view.joiners, talk.names(talk.view.ids())) == ((), "a b c d")
    assert everything(talk, "a", "b", "c", "d") == ((0, 5),)
    assert talk.owned("a") != ((0, 5),)
    assert talk.machine.roster.settled


def test_a_view_is_settled_when_its_members_hold_what_they_own() -> None:
    talk = Talk("a", "b", "c", "d", min_nodes=4)
    talk.stand("b", ((4, 5),))
    assert not talk.machine.roster.settled
    talk.stand("b")
    assert talk.machine.roster.settled


def leave(talk: Talk, name: str) -> tuple[View, View]:
    """Makes this member leave; returns the views before and after a header has let it go."""
    before = talk.view
    talk.say(name, Leave("Ctrl+C"))
    talk.wait(1.2)
    after = talk.view
    assert after.id > before.id
    assert isinstance(talk.last(name, NextView), NextView)
    talk.commit(after)
    return before, after


def test_a_leaver_serves_until_all_members_hold_what_they_own() -> None:
    talk = Talk("a", "b")
    before, after = leave(talk, "a")
    assert (talk.names(after.ids()), [m.id for m in after.leaving]) == ("b", [talk.ids["a"]])
    talk.stand("b", talk.owned("b", before))
    talk.wait(10.0)
    assert talk.last("a", Released) is None
    talk.stand("b")
    talk.wait(0.1)
    assert isinstance(talk.last("a", Released), Released)
    assert talk.machine.roster.leavers() == []


def test_a_leave_that_moves_parts_waits_for_the_leaves_of_others() -> None:
    talk = Talk("a", "b", "c", program=replace(PROGRAM, stages=3))
    first = talk.view
    talk.say("a", Leave("Ctrl+C"))
    talk.wait(0.5)
    talk.say("b", Leave("Ctrl+C"))
    assert talk.view is first
    talk.wait(0.6)
    assert talk.names(talk.view.ids()) == "c"
    assert talk.names(tuple(m.id for m in talk.view.leaving)) == "a b"


def test_a_decision_asks_leavers_and_names_them_again() -> None:
    talk = Talk("a", "b", "c", program=replace(PROGRAM, stages=3))
    before, after = leave(talk, "a")
    held = {name: talk.owned(name, before) for name in "abc"}
    talk.stand("b", held["b"])
    talk.stand("c", held["c"])
    talk.say("b", Leave("Ctrl+C"))
    talk.feed(fx.Closed(talk.conns.pop("b")))
    talk.feed(fx.Gone(talk.ids["b"], "no such process"))
    assert isinstance(talk.last("a", Prepare), Prepare)
    talk.reports("a", before, union((*held["a"], *held["b"])))  # it had the other's, too, from a view before
    talk.reports("c", after, held["c"])
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert talk.names(decision.view.ids()) == "c"
    assert talk.names(tuple(m.id for m in decision.view.leaving)) == "a"
    assert talk.last("a", Released) is None
    talk.stand("c")
    talk.wait(0.1)
    assert isinstance(talk.last("a", Released), Released)


def test_newcomers_come_in_with_a_decision_where_no_plan_fits_those_who_go_on() -> None:
    talk = Talk("a", "b", "c", program=replace(PROGRAM, stages=1, least=3))
    talk.commit()
    whole = talk.owned("a")
    talk.die("c")
    for name in "ab":
        talk.reports(name, talk.view, whole)
    notice = talk.last("a", Notice)
    assert isinstance(notice, Notice)
    assert "no pipelines fit those that are here: 2 members are here, and a plan needs 3" in notice.text
    assert talk.machine.phase is SchedulerPhase.HOLDING
    talk.come("d")
    decision = talk.last("d", Decide)
    assert isinstance(decision, Decide)
    assert (talk.names(decision.view.ids()), decision.view.joiners) == ("a b d", (talk.ids["d"],))
    assert decision.base == talk.head


def test_newcomers_that_no_header_has_let_in_come_in_with_a_decision() -> None:
    talk = Talk("a", "b", program=replace(PROGRAM, stages=1, least=2), min_nodes=2)
    founded = talk.view
    talk.come("c")
    talk.wait(1.0)
    assert talk.names(talk.view.ids()) == "a b c"
    assert talk.view.joiners == (talk.ids["c"],)
    talk.die("a")
    talk.reports("b", founded, talk.owned("b", founded))
    prepare = talk.last("c", Prepare)
    assert isinstance(prepare, Prepare)
    talk.say("c", Report(prepare.number, NO_VIEW, 0, GENESIS.hash, (), last=GENESIS))
    decision = talk.last("c", Decide)
    assert isinstance(decision, Decide)
    assert (talk.names(decision.view.ids()), decision.view.joiners) == ("b c", (talk.ids["c"],))
    assert decision.base == talk.head


def test_members_go_with_the_closing_header_though_no_plan_fits_those_who_are_left() -> None:
    talk = Talk("a", "b", "c", program=replace(PROGRAM, stages=1, least=3))
    talk.commit()
    whole = talk.owned("a")
    talk.head = Header(talk.head.seq + 1, Kind.CLOSING, 1, talk.view.id, talk.head.hash, talk.view.id)
    talk.die("c")
    for name in "ab":
        talk.reports(name, talk.view, whole)
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert decision.base == talk.head
    assert (decision.view.ids(), talk.names(tuple(m.id for m in decision.view.leaving))) == ((), "a b")
    talk.say("a", Finished(talk.head.seq, talk.head.step))
    talk.wait(0.1)
    assert talk.last("a", Released) is None
    talk.say("b", Finished(talk.head.seq, talk.head.step))
    assert talk.machine.phase is SchedulerPhase.FINISHED
    assert isinstance(released := talk.last("b", Released), Released)
    assert released.reason == "the job is finished"


def parted(talk: Talk) -> View:
    """Makes all members of the job leave; returns the view before."""
    before = talk.view
    first, *_ = talk.conns
    talk.stand(first, ((4, 5),))  # nobody is let go before the view is settled
    for name in list(talk.conns):
        talk.say(name, Leave("Ctrl+C"))
    talk.stand(first)
    assert (talk.view.ids(), len(talk.view.leaving)) == ((), len(before.members))
    talk.commit(talk.view)
    return before


def kept_of(talk: Talk, name: str, before: View) -> Kept:
    return Kept(kept_header(talk.head, before.id), talk.ids[name], "c", talk.owned(name, before))


def tells(talk: Talk, name: str, before: View) -> Kept:
    """Makes a member report that it has written its parts to a file; returns this report."""
    kept = kept_of(talk, name, before)
    talk.say(name, kept)
    return kept


def test_all_part_at_one_header_and_stay_until_all_have_told() -> None:
    talk = Talk("a", "b")
    before = parted(talk)
    tells(talk, "a", before)
    talk.wait(0.5)
    assert talk.last("a", Released) is None
    tells(talk, "b", before)
    talk.wait(0.1)
    assert isinstance(talk.last("a", Released), Released)
    assert isinstance(talk.last("b", Released), Released)
    assert talk.machine.phase is SchedulerPhase.FOUNDING


def test_whoever_could_write_nothing_down_has_told_so_and_nobody_waits_for_its_file() -> None:
    talk = Talk("a", "b")
    before = parted(talk)
    for name in "ab":
        talk.say(name, replace(kept_of(talk, name, before), parts=()))
    talk.wait(0.1)
    assert isinstance(talk.last("a", Released), Released)
    for name in list(talk.conns):
        talk.feed(fx.Closed(talk.conns.pop(name), abrupt=False))
    for name in "ab":
        talk.come(name)
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert decision.base == GENESIS


def test_a_death_while_all_part_begins_a_recovery_unless_its_parts_are_written_down() -> None:
    talk = Talk("a", "b")
    before = parted(talk)
    tells(talk, "a", before)
    talk.die("a")
    assert talk.last("b", Prepare) is None
    talk = Talk("a", "b", "c", "d", min_nodes=4)
    before = parted(talk)
    tells(talk, "b", before)
    talk.die("b")
    talk.die("a")
    for name in "cd":
        talk.reports(name, before, talk.owned(name, before))
    decision = talk.last("c", Decide)
    assert isinstance(decision, Decide)
    assert (decision.view.ids(), talk.names(tuple(m.id for m in decision.view.leaving))) == ((), "c d")


def test_a_founding_takes_the_newest_header_at_which_files_have_every_part() -> None:
    talk = Talk("a", "b")
    before = parted(talk)
    kept = {name: tells(talk, name, before) for name in "ab"}
    talk.wait(0.1)
    for name in list(talk.conns):
        talk.feed(fx.Closed(talk.conns.pop(name), abrupt=False))
    talk.come("a", kept["a"])
    talk.come("c")
    talk.wait(0.5)
    notice = talk.last("a", Notice)
    assert isinstance(notice, Notice)
    assert f"kept by {talk.ids['b']}" in notice.text
    assert talk.last("a", Decide) is None
    talk.come("b", kept["b"])
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert decision.base == kept["a"].header
    assert decision.view.joiners == (talk.ids["c"],)


def test_lost_parts_are_named_and_nobody_guesses() -> None:
    talk = Talk("a", "b")
    talk.commit()
    talk.die("a")
    talk.reports("b", talk.view, talk.owned("b"))
    notice = talk.last("b", Notice)
    assert isinstance(notice, Notice)
    assert "layer." in notice.text
    assert "are at no member that lives" in notice.text
    assert talk.machine.phase is SchedulerPhase.HOLDING
    talk.come("c")
    talk.wait(1.0)
    assert talk.last("c", Decide) is None


def test_who_is_to_leave_while_parts_are_lost_is_let_go_at_once() -> None:
    talk = Talk("a", "b", "c", min_nodes=3, program=replace(PROGRAM, stages=3))
    before = talk.view
    talk.commit()
    talk.die("a")
    for name in "bc":
        talk.reports(name, before, talk.owned(name))
    notice = talk.last("b", Notice)
    assert isinstance(notice, Notice)
    assert "`chaos-lightning reset --force`" in notice.text
    talk.say("b", Leave("Ctrl+C"))
    released = talk.last("b", Released)
    assert isinstance(released, Released)
    assert (released.asked, released.keep) == (True, True)
    assert talk.last("c", Released) is None
    talk.reports("c", before, talk.owned("c"))
    assert talk.machine.phase is SchedulerPhase.HOLDING
    talk.feed(fx.Drain("c"))
    assert isinstance(talk.last("c", Released), Released)
    for name in "bc":
        talk.feed(fx.Closed(talk.conns.pop(name), abrupt=False))
    assert talk.machine.phase is SchedulerPhase.FOUNDING


def test_a_leave_that_was_asked_for_before_parts_were_lost_is_granted_then() -> None:
    talk = Talk("a", "b")
    before = parted(talk)
    talk.die("a")  # it has not written its parts down
    talk.reports("b", before, talk.owned("b", before))
    released = talk.last("b", Released)
    assert isinstance(released, Released)
    assert (released.asked, released.keep) == (True, True)


def test_an_only_holder_of_a_part_is_waited_for_though_others_hold_the_rest() -> None:
    talk = Talk("a", "b")
    talk.commit()
    conn = talk.conns.pop("a")
    talk.feed(fx.Closed(conn))
    talk.wait(3.0)
    assert talk.last("b", Prepare) is None
    assert talk.machine.detector.suspicions[talk.ids["a"]].last


def test_brief_reports_from_before_slot_1_have_its_header() -> None:
    """Members without parts before slot 1 report only the hash of its base header, and go on from there all the same
    (P14).
    """
    talk = Talk("a", "b")
    reporters = talk.machine.roster.living()
    for peer in reporters:
        peer.report = Report(ViewId(1, 9), talk.view.id, 0, GENESIS.hash, ())
    told = talk.machine.recovery.with_headers(reporters)
    assert told is not None
    assert [report.last for report in told.values()] == [GENESIS, GENESIS]


def test_a_joiner_that_gets_some_of_its_parts_and_not_the_others_goes_out_again() -> None:
    rest = ((4, 5),)
    for name in "cdefgh":
        talk = Talk("a", "b", program=replace(PROGRAM, stages=3))
        talk.come(name)
        talk.wait(0.1)
        if talk.owned(name) != rest:
            break
    assert talk.view.joiners == (talk.ids[name],)
    talk.machine.settings = replace(talk.machine.settings, join_timeout_s=1.0)
    for other in "ab":
        talk.stand(other)
    talk.stand(name, rest)
    talk.wait(0.9)
    assert talk.last("a", Prepare) is None
    talk.wait(0.3)
    prepare = talk.last("a", Prepare)
    assert isinstance(prepare, Prepare)
    assert f"{talk.ids[name]}: it did not load the state within join_timeout_s=1" in prepare.reason


class Careless(ViewPipeliner):
    """Pipeliner that always returns the same pipelines, whatever links there are."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reroute(self, before: str, members: Sequence[Member], **more: object) -> PipelineChoice:
        return PipelineChoice(text=self._text, reason="as always")


def test_pipelines_whose_owners_of_a_layer_no_links_connect_do_not_fit() -> None:
    machine = Talk("a").machine
    them = tuple(map(member, ("a~1", "b~2", "c~3")))
    made = Careless(pipelines_of("a~1:2+c~3:2,b~2:4"))
    shared = (machine.desk, machine.book, machine.roster, machine.graph, machine.topology)
    pipelining = Pipelining(*shared, lambda requests: made)
    ab, ac, bc = (frozenset(ends) for ends in (("a~1", "b~2"), ("a~1", "c~3"), ("b~2", "c~3")))
    text, why = pipelining.of(them, frozenset({ac, bc}))
    assert text is None
    assert why == "no links connect a~1, b~2 with each other, which own layer.0"
    assert pipelining.of(them, frozenset({ab, bc}))[0]
