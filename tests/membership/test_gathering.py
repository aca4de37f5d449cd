"""Tests that newcomers that come at once are let in at once, and that few newcomers need not wait for more."""

from __future__ import annotations

import pytest
from test_membership_terms import Job, hello

from chaos_lightning.membership.effects import MessageIn, Opened, SchedulerTick
from chaos_lightning.membership.peers import Standing
from chaos_lightning.protocol.types import WHOLE, CatchUp, Entered, Progress, View

PATIENT = {"heartbeat_interval_s": 5.0, "heartbeat_timeout_s": 20.0, "max_nodes": 200}
SETTLES_S = 0.1
"""Seconds from a view's announcement until all its members stand in it."""
STEP_S = 0.05
MEMBERS = 32


class Wave:
    """Running job, and newcomers that come one per `STEP_S` or all together.

    Args:
        members: Number of members to begin with.
        replays: Newcomers offer to come in by replay.
    """

    def __init__(self, members: int, *, replays: bool = False) -> None:
        self.job = Job(min_nodes=members, **PATIENT)
        self.job.machine.validate_state = lambda: None  # type: ignore[method-assign]  # it looks at all pairs
        self.replay = "" if replays else "it did not offer to replay"
        for i in range(members):
            self.job.comes(hello(f"m-{i}", pid=1000 + i))
        for _ in range(2):  # they are told of each other, and are ready: in a large job both waits for a tick
            self.job.feed(SchedulerTick())
        self._stand(self.job.views[-1])
        self.founded = self._seen = len(self.job.views)
        self._due: list[tuple[float, View]] = []

    def _stand(self, view: View) -> None:
        for member in view.members:
            if conn := self.job.conns.get(member.name):
                self.job.feed(MessageIn(conn, Entered(view.id, 5, 5, "h")))

    def come(self, numbers: range) -> None:
        for i in numbers:
            self.job.comes(hello(f"n-{i}", pid=2000 + i, replay=self.replay))

    def passes(self, seconds: float) -> None:
        """Lets time pass, and has each decided view entered by all members `SETTLES_S` later."""
        until = self.job.now + seconds
        while self.job.now < until:
            self._due += [(self.job.now + SETTLES_S, view) for view in self.job.views[self._seen :]]
            self._seen = len(self.job.views)
            self.job.now += STEP_S
            self.job.feed(SchedulerTick())
            while self._due and self._due[0][0] <= self.job.now:
                self._stand(self._due.pop(0)[1])

    def catch_up(self) -> None:
        """Makes learners report that they have caught up, four per `STEP_S`."""
        learners = [p for p in self.job.machine.roster.peers.values() if p.standing is Standing.OBSERVING]
        for i, peer in enumerate(learners):
            assert peer.conn is not None
            self.job.feed(MessageIn(peer.conn, CatchUp(5)))
            if i % 4 == 3:
                self.passes(STEP_S)

    def views(self) -> list[View]:
        """Returns the views that were decided after the founding one."""
        return self.job.views[self.founded :]


def test_a_hundred_newcomers_within_a_second_make_three_views_at_most() -> None:
    wave = Wave(MEMBERS)
    for i in range(0, 100, 5):
        wave.come(range(i, i + 5))
        wave.passes(STEP_S)
    wave.passes(1.5)
    assert len(wave.job.views[-1].members) == MEMBERS + 100
    assert len(wave.views()) <= 3, [v.reason for v in wave.views()]


def test_learners_that_catch_up_one_after_the_other_make_three_views_at_most() -> None:
    wave = Wave(MEMBERS, replays=True)
    wave.come(range(20))
    for _ in range(2):  # the first one observed alone: nobody else was there yet
        wave.catch_up()
        wave.passes(0.6)
    assert len(wave.job.views[-1].members) == MEMBERS + 20
    assert len(wave.views()) <= 3, [v.reason for v in wave.views()]


@pytest.mark.parametrize(("members", "newcomers"), [(MEMBERS, 1), (2, 3)])
def test_one_that_comes_alone_waits_for_nobody_nor_does_a_small_job(members: int, newcomers: int) -> None:
    wave = Wave(members)
    wave.come(range(newcomers))
    for _ in range(2 if members > 16 else 0):
        wave.job.feed(SchedulerTick())
    assert len(wave.views()) == 1


def test_nobody_waits_without_end_for_one_that_does_not_get_ready() -> None:
    """One newcomer does not get ready: those that are ready go in without it after a moment."""
    wave = Wave(MEMBERS)
    for event in (Opened(7), MessageIn(7, hello("late", pid=7))):
        wave.job.machine.on(wave.job.now, event)  # it does not answer OpenLinks
    wave.come(range(1))
    assert not wave.views()
    wave.passes(1.5)
    assert wave.job.views[-1].members[-1].name == "n-0"


def test_a_wave_of_learners_that_is_overdue_comes_in_by_a_pause_at_once() -> None:
    wave = Wave(MEMBERS, replays=True)
    wave.come(range(70))
    wave.passes(1.5)
    observing = [p for p in wave.job.machine.roster.peers.values() if p.standing is Standing.OBSERVING]
    assert len(observing) > 64
    for peer in wave.job.machine.roster.peers.values():
        peer.observes_since -= 1000.0
    wave.passes(2.0)
    assert {p.way for p in observing} == {"pause"}


def test_late_words_of_a_learners_first_attempt_come_to_nothing() -> None:
    """Reports of a learner's first attempt that arrive after it was given new donors are ignored."""
    wave = Wave(MEMBERS, replays=True)
    wave.come(range(1))
    wave.passes(1.5)
    machine = wave.job.machine
    (learner,) = [p for p in machine.roster.peers.values() if p.standing is Standing.OBSERVING]
    machine.learners._begin_again(learner)
    wave.job.says("n-0", CatchUp(5, able=False, reason="nobody can give slot 6 of the log"))
    wave.job.says("n-0", CatchUp(5))
    assert (learner.standing, learner.way, learner.caught_up) == (Standing.OBSERVING, "replay", False)
    wave.job.says("n-0", CatchUp(9, attempt=2))
    assert learner.caught_up
    wave.job.says("n-0", CatchUp(9, able=False, reason="the log was cut", attempt=2))
    assert learner.way == "pause"


def founding(members: int) -> tuple[Job, View]:
    """Returns a job and its first view, in which one member has the state and all others wait for it."""
    job = Job(min_nodes=members, join_timeout_s=10.0, **PATIENT)
    for i in range(members):
        job.comes(hello(f"m-{i}", pid=1000 + i))
    for _ in range(2):
        job.feed(SchedulerTick())
    (founded,) = job.views
    for i, member in enumerate(founded.members):
        job.says(member.name, Entered(founded.id, 0, 0, "h", WHOLE if i == 0 else ()))
    job.machine.validate_state = lambda: None  # type: ignore[method-assign]  # it looks at all pairs
    return job, founded


@pytest.mark.parametrize(("members", "later"), [(MEMBERS, True), (4, False)])
def test_a_large_founding_has_time_as_long_as_somebody_loads_the_state(members: int, later: bool) -> None:
    """Founders load the state one after the other: in a large job each gets `join_timeout_s` from the previous one
    on.
    """
    job, founded = founding(members)
    for member in founded.members[1:4]:
        job.passes(6.0)
        if len(job.views) > 1:
            break
        job.says(member.name, Entered(founded.id, 0, 0, "h"))
    assert (len(job.views) == 1 and not job.machine.desk.reserving) == later


def test_a_large_founding_has_time_as_long_as_the_first_copies_grow() -> None:
    """The first copies of the state are sent all at once and so take long: founders are waited for as long as these
    copies grow.
    """
    job, founded = founding(MEMBERS)
    last = founded.members[-1].name
    for nbytes in (100, 200, 300):
        job.says(last, Progress("pull", nbytes, 1000, 0.0))
        job.passes(6.0)
    assert len(job.views) == 1
    assert not job.machine.desk.reserving
    job.says(last, Progress("pull", 300, 1000, 0.0))
    job.passes(6.0)
    assert job.machine.desk.reserving or len(job.views) > 1, "nothing has come to anybody for 12 s"
