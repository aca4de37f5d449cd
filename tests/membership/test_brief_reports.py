"""Reports of a large job name the header that they stand on, and few tell it: what was committed is found anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.scale.fake import StandIn
from benchmarks.scale.machine import rules
from benchmarks.scale.standins import Stage, next_header
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.protocol.types import (
    GENESIS,
    SMALL_JOB,
    Decide,
    FromMember,
    Kind,
    Member,
    Prepare,
    Report,
    ViewId,
    Welcome,
)

COUNT = 40


class Job(Stage):
    """Stand-ins whose reports are kept, and may be changed.

    Attributes:
        change: What a member says in place of its report; None: nothing.
        reports: What was said, in order.
        prepares: Who was asked for a report, in order, and whether a brief one was enough.
        decided: The last decision.
    """

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(replace(rules(count, 8), min_nodes=count // 2))
        self.change: Callable[[StandIn, Report], Report | None] = lambda one, report: report
        self.reports: list[Report] = []
        self.prepares: list[tuple[str, bool]] = []
        self.decided: Decide | None = None
        self.start(count)
        self.wait(lambda: self.settled(count), "the founding")

    def _carry_out(self, effects: Sequence[fx.SchedulerEffect]) -> list[Sequence[fx.SchedulerEvent]]:
        for effect in effects:
            match effect:
                case fx.Send(number, Prepare() as prepare):
                    self.prepares.append((self._streams[number].id, prepare.brief))
                case fx.Send(_, Decide() as decision):
                    self.decided = decision
        return super()._carry_out(effects)

    def say(self, one: StandIn, message: FromMember) -> None:
        if isinstance(message, Report):
            changed = self.change(one, message)
            if changed is None:
                return
            self.reports.append(message := changed)
        super().say(one, message)

    def lose(self, place: int, *, of: int = COUNT) -> None:
        """The member of this rank dies; goes on until the others stand in a view."""
        self.kill(self.members[self.view.ids()[place]])
        self.wait(self.calm, "a view without it")
        self.machine.validate_state()
        assert len(self.view.members) == of


def test_of_many_reports_a_few_tell_the_header() -> None:
    job = Job()
    job.lose(0, of=COUNT - 1)
    assert [r.last is not None for r in job.reports].count(True) == SMALL_JOB
    assert len(job.reports) == COUNT - 1


def test_in_a_small_job_all_reports_tell_it() -> None:
    job = Job(SMALL_JOB)
    job.lose(3, of=SMALL_JOB - 1)
    assert len([r for r in job.reports if r.last is not None]) == len(job.reports) == SMALL_JOB - 1


def ahead(job: Job, members: set[str]) -> Callable[[StandIn, Report], Report]:
    """These members have committed a slot more than the others."""
    committed = next_header(job.view, job.header, Kind.STEP)

    def change(one: StandIn, report: Report) -> Report:
        if one.id not in members:
            return report
        last = committed if report.last is not None else None
        return replace(report, seq=committed.seq, head=committed.hash, last=last, held=((0, 8),))

    return change


def test_a_slot_that_only_brief_reports_name_is_handed_on() -> None:
    job = Job()
    knows = set(job.view.ids()[-3:])
    job.change = ahead(job, knows)
    job.lose(0, of=COUNT - 1)
    assert job.decided is not None
    assert job.decided.base.seq == 1
    assert job.decided.hand_on
    assert {s.member for s in job.decided.sources} == knows
    ((again, brief),) = job.prepares[COUNT - 1 :]
    assert again in knows
    assert not brief
    assert [r.last is not None for r in job.reports].count(True) == SMALL_JOB + 1


def test_who_was_asked_for_the_header_and_dies_is_replaced_by_another_that_knows_it() -> None:
    job = Job()
    knows = set(job.view.ids()[-3:])
    change, first = ahead(job, knows), list[str]()

    def dies_when_asked(one: StandIn, report: Report) -> Report | None:
        if one.id in knows and report.last is not None and not first:
            first.append(one.id)
            job.kill(one)
            return None
        return change(one, report)

    job.change = dies_when_asked
    job.lose(0, of=COUNT - 2)
    assert first
    assert job.decided is not None
    assert job.decided.base.seq == 1
    assert job.decided.hand_on
    assert {s.member for s in job.decided.sources} == knows - set(first)


@pytest.mark.parametrize("place", [1, COUNT - 1], ids=["told whole", "told briefly"])
def test_who_names_a_header_and_does_not_tell_it_is_put_out(place: int) -> None:
    """It may lie, and ends no scheduler."""
    job = Job()
    liar = job.view.ids()[place]
    job.change = lambda one, report: replace(report, seq=9, head="f" * 16) if one.id == liar else report
    job.lose(0, of=COUNT - 2)
    assert job.view.find(liar) is None
    assert job.decided is not None
    assert job.decided.base == GENESIS


def test_a_header_that_is_not_the_one_named_does_not_count() -> None:
    """The others that stand on that header do not go with the one that told a wrong one."""
    job = Job()
    knows = job.view.ids()[-3:]
    change, wrong = ahead(job, set(knows)), next_header(job.view, job.header, Kind.CLOSING)

    def lies(one: StandIn, report: Report) -> Report:
        changed = change(one, report)
        return replace(changed, last=wrong) if one.id == knows[0] else changed

    job.change = lies
    job.lose(0, of=COUNT - 2)
    assert job.decided is not None
    assert job.decided.base.kind is Kind.STEP
    assert {s.member for s in job.decided.sources} == set(knows[1:])


def test_a_member_leaves_its_header_out_where_it_may_and_tells_it_when_it_is_asked_again() -> None:
    machine = MemberMachine()
    machine.on(1.0, fx.ControlIn(Welcome(Member("a~1", "a", "h", "127.0.0.1", 1), 1, "joiner", "", 0.1, 0.3)))
    for brief, last in ((True, None), (False, GENESIS), (True, None)):
        effects = machine.on(2.0, fx.ControlIn(Prepare(ViewId(1, 5), "somebody died", brief), ((0, 8),)))
        said = [e.message for e in effects if isinstance(e, fx.ToScheduler)]
        assert said == [Report(ViewId(1, 5), ViewId(), 0, GENESIS.hash, False, False, last=last, held=((0, 8),))]
