"""Tests what newcomers are told of a finished job, and when they begin it anew (protocol.md 14d)."""

from __future__ import annotations

import pytest
from test_membership_terms import Job, hello

from chaos_lightning.membership.effects import Answer, Chain, Gone, Persist, RecordedEnd, Reset, SchedulerDone
from chaos_lightning.membership.peers import FIT, JobTerms
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Finished,
    Header,
    Hello,
    Kept,
    Kind,
    Member,
    Refused,
    Released,
    ToldEnd,
    View,
    ViewId,
)


def finished(*names: str, **rules: object) -> Job:
    """Returns a job that these members have finished together, with the scheduler's last messages."""
    job = Job(min_nodes=len(names), **rules)
    for name in names:
        job.comes(hello(name))
    for name in names:
        job.enters(name)
    for name in names:
        job.says(name, Finished(9, 7))
    for name in names:
        assert job.heard(name, Released)
        job.closes(name, abrupt=False)
    return job


def begun_again(job: Job) -> bool:
    return any(isinstance(done, SchedulerDone) and done.again for done in job.done)


def test_who_comes_after_the_end_of_a_job_of_two_is_told() -> None:
    job = finished("a", "b", finished_s=60.0)
    job.comes(hello("c"))
    (over,) = job.heard("c", ToldEnd)
    assert over.view.ids() == ("a~1", "b~2")  # type: ignore[union-attr]
    job.passes(59.0)
    job.comes(hello("d"))
    assert job.heard("d", ToldEnd)
    assert not begun_again(job)
    job.passes(2.0)
    job.comes(hello("e"))
    assert job.heard("e", Refused)
    assert begun_again(job), "its time is over"


@pytest.mark.parametrize(
    "other",
    [hello("c", large=True), hello("c", fingerprint=(("model", "small"), (FIT, "2"))), hello("c", package="0.2")],
    ids=["program", "fit", "version"],
)
def test_another_program_or_fit_begins_anew_at_once(other: Hello) -> None:
    job = finished("a", "b")
    job.comes(other)
    (refused,) = job.heard("c", Refused)
    assert refused.retry, "it comes again, to the next job"  # type: ignore[union-attr]
    assert begun_again(job)


@pytest.mark.parametrize(("names", "rules"), [("a", {}), ("ab", {"finished_s": 0.0})], ids=["alone", "switched off"])
def test_a_job_that_nobody_is_told_of_begins_anew_at_once(names: str, rules: dict[str, object]) -> None:
    job = finished(*names, **rules)
    job.comes(hello("c"))
    assert not job.heard("c", ToldEnd)
    assert begun_again(job)


def test_a_standby_is_told_of_the_end_also_where_one_member_had_the_job_alone() -> None:
    job = Job(max_nodes=1)
    job.comes(hello("a"))
    job.enters("a")
    job.comes(hello("b"))
    assert job.roles("b") == ["standby"]
    job.says("a", Finished(9, 7))
    assert job.heard("b", ToldEnd)
    assert not job.heard("b", Released)


@pytest.mark.parametrize(("left_s", "for_good", "told"), [(5.0, False, True), (0.0, False, False), (0.0, True, None)])
def test_a_scheduler_that_starts_on_the_finished_chain_tells_for_the_rest_of_the_time(
    left_s: float, for_good: bool, told: bool | None
) -> None:
    view = View(ViewId(1, 1), NO_VIEW, (Member("a~1", "a", "here", "", 0), Member("b~2", "b", "here", "", 0)))
    ending = RecordedEnd(JobTerms.of(hello("c")).digest, 7, 1000.0)
    chain = Chain(2, ViewId(1, 2), (view,), finished=True, ending=ending, tells_s=left_s, for_good=for_good)
    job = Job(chain)
    job.comes(hello("c"))
    assert bool(job.heard("c", ToldEnd)) is (told is not False)
    assert begun_again(job) is (told is False)
    job.comes(hello("d", large=True))
    assert [r.retry for r in job.heard("d", Refused)] == [not for_good]  # type: ignore[union-attr]


def test_the_store_keeps_the_end_of_a_job_of_two() -> None:
    job = Job(min_nodes=2)
    kept = []
    machine = job.machine
    real = machine.on

    def on(now: float, event: object) -> list[object]:
        effects = real(now, event)  # type: ignore[arg-type]
        kept.extend(e for e in effects if isinstance(e, Persist) and e.kind == "finish")
        return effects  # type: ignore[return-value]

    machine.on = on  # type: ignore[method-assign, assignment]
    for name in "ab":
        job.comes(hello(name))
    for name in "ab":
        job.enters(name)
        job.says(name, Finished(9, 7))
    assert [e.ending for e in kept] == [RecordedEnd(JobTerms.of(hello("z")).digest, 7)]


def test_members_elsewhere_make_the_scheduler_stay() -> None:
    """The scheduler of a finished job stays if members were on other machines, since newcomers there could not start
    one.
    """
    job = finished("c", "d", finished_s=60.0)  # of one machine
    assert [d.tells_s for d in job.done if isinstance(d, SchedulerDone)] == [0.0]
    job = finished("a", "c", finished_s=60.0)
    assert [d.tells_s for d in job.done if isinstance(d, SchedulerDone)] == [60.0]


def test_an_operator_makes_a_finished_job_begin_anew() -> None:
    job = finished("a", "b")
    job.feed(Reset(5))
    assert next(d for d in job.done if isinstance(d, Answer)).accepted
    assert begun_again(job)


def test_a_founder_with_the_final_state_tells_a_scheduler_that_missed_the_end() -> None:
    view = View(
        ViewId(1, 1), NO_VIEW, (Member("a~1", "a", "here", "", 0), Member("b~2", "b", "here", "", 0)), chain="x"
    )
    job = Job(Chain(2, ViewId(1, 1), (view,), id="x"))
    for member in view.ids():
        job.feed(Gone(member, "its process is gone"))
    closing = Header(9, Kind.CLOSING, 7, view.id, "head", view.id)
    job.comes(hello("c", kept=Kept(closing, "a~1", "x")))
    job.passes(3.0)
    assert job.heard("c", ToldEnd)
    assert not job.views, "nobody founds it again"


def test_a_newcomer_that_no_header_has_let_in_is_told_like_one_that_waits() -> None:
    """The job ends when a view names a newcomer but no header has let it in: it is told of the end, not released as a
    member.
    """
    job = Job()
    job.comes(hello("a"))
    job.enters("a")
    job.comes(hello("b"))
    assert job.names() == ["a", "b"]
    job.says("a", Finished(9, 7))
    assert job.heard("b", ToldEnd)
    assert not job.heard("b", Released)
    assert job.heard("a", Released)
