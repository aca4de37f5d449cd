"""Tests recoveries of large jobs, where most reports give headers only by hash: headers that were or may have been
committed are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from benchmarks.scale.fake import StandIn
from benchmarks.scale.machine import rules
from benchmarks.scale.standins import Stage, next_header
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership import recovering
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.protocol.types import (
    GENESIS,
    SMALL_JOB,
    Decide,
    FromMember,
    Header,
    Kind,
    Member,
    Prepare,
    Report,
    Span,
    ToMember,
    ViewId,
    Welcome,
)

COUNT = 40


class Job(Stage):
    """Large job of stand-ins for members, whose reports are recorded and may be changed.

    Attributes:
        change: Function that returns what a stand-in sends in place of its report; None: it sends nothing.
        reports: Reports that were sent, in order.
        prepares: Requests for reports, in order: (member, whether a brief report was enough).
        decided: Last decision that a member was sent.
    """

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(replace(rules(count, 8), min_nodes=count // 2))
        self.change: Callable[[StandIn, Report], Report | None] = lambda one, report: report
        self.reports: list[Report] = []
        self.prepares: list[tuple[str, bool]] = []
        self.decided: Decide | None = None
        self.start(count)
        self.wait(lambda: self.settled(count), "the founding")

    def tell(self, one: StandIn, message: ToMember) -> None:
        match message:
            case Prepare():
                self.prepares.append((one.id, message.brief))
            case Decide():
                self.decided = message
        super().tell(one, message)

    def say(self, one: StandIn, message: FromMember) -> None:
        if isinstance(message, Report):
            changed = self.change(one, message)
            if changed is None:
                return
            self.reports.append(message := changed)
        super().say(one, message)

    def comes_back(self, one: StandIn) -> None:
        """Breaks the stream of a stand-in for a member, and makes it say hello on a new one."""
        self._send(fx.Closed(one.number, True), 0.001)
        self.open(one, 0.002)

    def lose(self, place: int, *, of: int = COUNT) -> None:
        """Kills the member of this rank, and waits until the others have entered a view without it."""
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
    """Returns a function that changes reports so that these members have committed one slot more than the others."""
    committed = next_header(job.view, job.header, Kind.STEP)

    def change(one: StandIn, report: Report) -> Report:
        if one.id not in members:
            return report
        last = committed if report.last is not None else None
        return replace(report, seq=committed.seq, head=committed.hash, last=last, held=((0, 8),))

    return change


def waiting(job: Job, members: set[str]) -> Callable[[StandIn, Report], Report]:
    """Returns a function that changes reports so that these members have the next header, and each member has half of
    its bytes.
    """
    header, ids = next_header(job.view, job.header, Kind.STEP), job.view.ids()

    def change(one: StandIn, report: Report) -> Report:
        half = (0, 4) if ids.index(one.id) % 2 else (4, 8)
        report = replace(report, held=(half, (0, 0), (8, 8)))
        if one.id not in members:
            return report
        return replace(report, pending=header if report.last is not None else None, pending_hash=header.hash)

    return change


KNOWN = pytest.mark.parametrize("known", [ahead, waiting], ids=["committed", "pending"])


@KNOWN
def test_a_slot_that_only_brief_reports_name_is_handed_on(known: Callable[..., Callable[..., Report]]) -> None:
    job = Job()
    knows = set(job.view.ids()[-3:])
    job.change = known(job, knows)
    job.lose(0, of=COUNT - 1)
    assert job.decided is not None
    assert job.decided.base.seq == 1
    assert job.decided.hand_on
    assert {s.member for s in job.decided.sources} == (knows if known is ahead else set(job.view.ids()))
    ((again, brief),) = job.prepares[COUNT - 1 :]
    assert again in knows
    assert not brief
    assert [r.last is not None for r in job.reports].count(True) == SMALL_JOB + 1
    assert [r.pending is not None for r in job.reports].count(True) == (known is waiting)


def test_a_pending_header_that_a_whole_report_tells_is_handed_on_and_asked_for_no_more() -> None:
    job = Job()
    job.change = waiting(job, set(job.view.ids()[SMALL_JOB:]))
    job.lose(0, of=COUNT - 1)
    assert job.decided is not None
    assert job.decided.hand_on
    assert len(job.prepares) == COUNT - 1
    assert [r.pending is not None for r in job.reports].count(True) == 1
    assert len([r for r in job.reports if r.pending_hash]) == COUNT - SMALL_JOB


def test_a_brief_report_that_was_under_way_when_the_header_was_asked_for_is_no_answer() -> None:
    job = Job()
    knows = set(job.view.ids()[-3:])
    change, briefly = ahead(job, knows), dict[str, Report]()

    def says_it_again(one: StandIn, report: Report) -> Report:
        if report.last is None:
            briefly[one.id] = report
            job.machine.recovery._briefly[one.id] += 1  # it was asked twice, since its stream was replaced
        elif one.id in briefly:
            super(Job, job).say(one, change(one, briefly[one.id]))
        return change(one, report)

    job.change = says_it_again
    job.lose(0, of=COUNT - 1)
    assert job.decided is not None
    assert job.decided.base.seq == 1
    assert not job.put_out


@pytest.mark.parametrize("place", [1, SMALL_JOB, SMALL_JOB + 1, COUNT - 1])
def test_who_comes_back_during_a_recovery_is_asked_as_before(place: int) -> None:
    """A member whose stream breaks during a recovery is asked again for a whole report only if it was before.

    The oldest living members were, and one that alone reported a header.
    """
    job = Job()
    back, alone = job.view.ids()[place], place == COUNT - 1
    change = ahead(job, {back} if alone else set())
    lost: list[str] = []

    def is_lost_once(one: StandIn, report: Report) -> Report | None:
        if one.id != back or lost or (alone and report.last is None):
            return change(one, report)
        lost.append(one.id)
        job.comes_back(one)
        return None

    job.change = is_lost_once
    job.lose(0, of=COUNT - 1)
    assert lost
    whole = place <= SMALL_JOB
    assert [brief for member, brief in job.prepares if member == back] == (
        [True, False, False] if alone else [not whole] * 2
    )
    assert job.decided is not None
    assert job.decided.base.seq == alone
    assert not job.put_out


@KNOWN
def test_who_was_asked_for_the_header_and_dies_is_replaced_by_another_that_knows_it(
    known: Callable[..., Callable[..., Report]],
) -> None:
    job = Job()
    knows = set(job.view.ids()[-3:])
    change, first = known(job, knows), list[str]()

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
    assert {s.member for s in job.decided.sources} == (knows - set(first) if known is ahead else set(job.view.ids()))


@pytest.mark.parametrize("lie", [{"seq": 9, "head": "f" * 16}, {"pending_hash": "f" * 16}], ids=["last", "pending"])
@pytest.mark.parametrize("place", [1, COUNT - 1], ids=["told whole", "told briefly"])
def test_who_names_a_header_and_does_not_tell_it_is_put_out(place: int, lie: dict[str, Any]) -> None:
    """A member that reports a header by hash but does not send it may lie: it is put out, and the recovery goes on."""
    job = Job()
    liar = job.view.ids()[place]
    job.change = lambda one, report: replace(report, **lie) if one.id == liar else report
    job.lose(0, of=COUNT - 2)
    assert job.view.find(liar) is None
    assert job.decided is not None
    assert job.decided.base == GENESIS


def test_who_answers_briefly_whatever_it_is_asked_is_put_out_at_once() -> None:
    job = Job()
    liar = job.view.ids()[COUNT - 1]
    job.change = lambda one, report: replace(report, last=None, pending_hash="f" * 16) if one.id == liar else report
    began = job.clock.now
    job.lose(0, of=COUNT - 2)
    assert job.view.find(liar) is None
    assert job.clock.now - began < job.machine.settings.hang_timeout_s / 2


def test_a_header_that_is_not_the_one_named_does_not_count() -> None:
    """A member sends another header than the one that it named: it is put out, and the others at the named header
    stay.
    """
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


def decided_by_chance(seed: int) -> tuple[object, ...]:
    """Returns the decision of a recovery with random reports: some members have committed a slot, some have its header,
    and its bytes are scattered.
    """
    random, job = Random(seed), Job(24)
    header, ids = next_header(job.view, job.header, Kind.STEP), job.view.ids()
    other = replace(header, hyper="another attempt")
    others = random.choice(((), (other,)))
    fates: dict[str, tuple[bool, Header | None, tuple[Span, ...]]] = {}
    for member in ids:
        spans = tuple((a, a + 4) for a in (0, 4) if random.random() < 0.2)
        pending = random.choice((None,) * random.choice((1, 12)) + (header, *others))
        fates[member] = (random.random() < 0.1 and seed % 3 == 0, pending, spans)

    def change(one: StandIn, report: Report) -> Report:
        committed, pending, spans = fates[one.id]
        whole = report.last is not None
        if committed:
            return replace(report, seq=header.seq, head=header.hash, last=header if whole else None)
        held = (*spans, (0, 0), (8, 8))
        name = pending.hash if pending is not None else ""
        return replace(report, pending=pending if whole else None, pending_hash=name, held=held)

    job.change = change
    job.lose(0, of=23)
    decided = job.decided
    assert decided is not None
    return decided.base.seq, decided.base.hyper, decided.hand_on, decided.sources, decided.view.ids()


@pytest.mark.parametrize("seed", range(12))
def test_brief_reports_lead_to_what_whole_ones_lead_to(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    briefly = decided_by_chance(seed)
    monkeypatch.setattr(recovering, "SMALL_JOB", 24)
    assert briefly == decided_by_chance(seed)


def test_a_member_leaves_its_headers_out_where_it_may_and_tells_them_when_it_is_asked_again() -> None:
    machine = MemberMachine()
    machine.on(1.0, fx.ControlIn(Welcome(Member("a~1", "a", "h", "127.0.0.1", 1), 1, "joiner", "", 0.1, 0.3)))
    for brief, last in ((True, None), (False, GENESIS), (True, None)):
        effects = machine.on(2.0, fx.ControlIn(Prepare(ViewId(1, 5), "somebody died", brief), ((0, 8),)))
        said = [e.message for e in effects if isinstance(e, fx.ToScheduler)]
        assert said == [Report(ViewId(1, 5), ViewId(), 0, GENESIS.hash, (), False, last=last, held=((0, 8),), owns=())]
    machine.pending = header = replace(GENESIS, seq=1, prev_hash=GENESIS.hash)
    for brief, pending in ((True, None), (False, header)):
        effects = machine.on(3.0, fx.ControlIn(Prepare(ViewId(1, 5), "somebody died", brief)))
        ((told, name),) = [
            (e.message.pending, e.message.pending_hash)
            for e in effects
            if isinstance(e, fx.ToScheduler) and isinstance(e.message, Report)
        ]
        assert (told, name) == (pending, header.hash)
