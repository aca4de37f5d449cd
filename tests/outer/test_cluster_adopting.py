"""When a cluster adopts a version, with and without overlap, and at the job's end."""

from __future__ import annotations

import pytest

from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules.cluster import ClusterMachine
from chaos_lightning.outer.rules.effects import Connected, Disconnected, Say, TimePassed, Told
from chaos_lightning.outer.rules.messages import (
    Beat,
    Dismissed,
    Holder,
    Holders,
    JobFinished,
    Offered,
    OnDisk,
    PushAnswered,
    Reopened,
    Served,
    Welcomed,
)
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    TICKS,
    Agreement,
    IncarnationId,
    JobProgress,
    PushAnswer,
    PushId,
    TensorSpec,
    VersionId,
)

WHO = IncarnationId("home", 1)
V1, V2, V3, V4 = (VersionId(number, f"hash {number}") for number in (1, 2, 3, 4))
RULES = OuterSettings(inner_steps=2, batch=1)


def training(*, overlap: bool, ahead_steps: int = 0) -> ClusterMachine:
    """Returns the state machine of a cluster that has adopted the first version and trained one step on it."""
    agreement = Agreement((TensorSpec("w", "float32", (4,)),), settings=RULES.words)
    machine = ClusterMachine("home", "here", "nonce", agreement, overlap=overlap, ahead_steps=ahead_steps)
    machine.on(Connected())
    assert fetched(machine.on(Told(Welcomed(1, WHO, 1, V1, True, JobProgress())))) == [V1]
    assert cl.Adopt(V1, True) in machine.on(cl.Got(V1))
    machine.on(cl.Trained(1))
    return machine


def fetched(effects: list[cl.ClusterEffect]) -> list[VersionId]:
    return [effect.version for effect in effects if isinstance(effect, cl.FetchVersion)]


def adopted(effects: list[cl.ClusterEffect]) -> list[VersionId]:
    return [effect.version for effect in effects if isinstance(effect, cl.Adopt)]


def offered(effects: list[cl.ClusterEffect]) -> list[PushId]:
    said = (effect.message for effect in effects if isinstance(effect, Say))
    return [message.offer.push for message in said if isinstance(message, Offered)]


def answered(machine: ClusterMachine, answer: PushAnswer, version: VersionId) -> list[cl.ClusterEffect]:
    """Freezes the cluster's first push and answers it; returns the effects of the answer."""
    push = PushId(WHO, 1)
    assert any(effect == cl.Freeze(push, V1) for effect in machine.on(cl.Trained(1)))
    machine.on(cl.Frozen(push, "manifest"))
    return machine.on(Told(PushAnswered(1, push, answer, version, "why")))


def test_with_overlap_a_newer_version_is_taken_in_the_middle_of_a_round() -> None:
    machine = training(overlap=True)
    assert fetched(machine.on(Told(Served(1, V2, JobProgress())))) == [V2]
    assert adopted(machine.on(cl.Got(V2))) == [V2]
    assert machine.unpushed.steps == 1


def test_a_fetch_that_is_under_way_goes_on_though_newer_versions_come() -> None:
    """Former bug: with each new version a cluster began its fetch anew, so that a fetch slower than a round never
    ended.
    """
    machine = training(overlap=True)
    (version,) = fetched(effects := machine.on(Told(Served(1, V2, JobProgress()))))
    assert version == V2
    assert [e.message.fetching for e in effects if isinstance(e, Say) and isinstance(e.message, Beat)] == [V2], (
        "the leader has followers serve it until it is here"
    )
    assert fetched(machine.on(Told(Served(1, V3, JobProgress())))) == []
    effects = machine.on(cl.Got(V2))
    assert adopted(effects) == [V2]
    assert fetched(effects) == [V3]


def test_what_is_here_is_adopted_before_a_newer_version_is_fetched() -> None:
    """Former bug: heartbeats named a version that was not fetched yet, so a summary of the chain left out the one that
    the cluster then adopted.
    """
    machine = training(overlap=True)
    machine.on(Told(Served(1, V2, JobProgress())))
    machine.on(cl.Got(V2), resting=False)
    assert fetched(machine.on(Told(Served(1, V3, JobProgress())), resting=False)) == []
    assert machine.hello().fetching == V2
    effects = machine.on(cl.AtRest())
    assert adopted(effects) == [V2]
    assert fetched(effects) == [V3]


def test_in_place_of_a_version_that_nobody_serves_any_more_the_newest_is_fetched() -> None:
    machine = training(overlap=True)
    machine.on(Told(Served(1, V2, JobProgress())))
    machine.on(Told(Served(1, V3, JobProgress())))
    assert fetched(machine.on(cl.Missed(V2))) == [V3]
    assert fetched(machine.on(cl.Missed(V2))) == [], "that is old news"
    assert fetched(machine.on(cl.Missed(V3))) == [V3], "there is no other one"


def test_a_fetch_of_what_is_too_old_after_an_answer_is_given_up() -> None:
    machine = training(overlap=True)
    machine.on(Told(Served(1, V2, JobProgress())))
    answered(machine, PushAnswer.ACCEPTED, V3)
    assert fetched(machine.on(Told(Served(1, V3, JobProgress())))) == [V3]


def test_without_overlap_a_version_is_taken_between_two_rounds_alone() -> None:
    """A version that is adopted in the middle of a round would discard steps that the next push claims to cover."""
    machine = training(overlap=False)
    assert fetched(machine.on(Told(Served(1, V2, JobProgress())))) == []
    assert fetched(answered(machine, PushAnswer.ACCEPTED, V3)) == []
    assert machine.waits
    assert fetched(machine.on(Told(Served(1, V3, JobProgress())))) == [V3]
    assert adopted(machine.on(cl.Got(V3))) == [V3]
    assert machine.base == V3
    assert machine.may_train


def ahead(machine: ClusterMachine, steps: int) -> ClusterMachine:
    """Freezes the cluster's first push, and trains this number of steps without an answer to it."""
    push = PushId(WHO, 1)
    assert any(effect == cl.Freeze(push, V1) for effect in machine.on(cl.Trained(1)))
    machine.on(cl.Frozen(push, "manifest"))
    for _ in range(steps):
        assert machine.may_train
        machine.on(cl.Trained(1))
    return machine


@pytest.mark.parametrize(("given", "most"), [(0, 2), (1, 1), (5, 5)])
def test_beyond_a_push_it_trains_so_many_steps_and_then_waits_for_the_version(*, given: int, most: int) -> None:
    """Former bug: a cluster with steps of a millisecond trained hundreds of steps before it adopted the next version
    (O9a).
    """
    machine = ahead(training(overlap=True, ahead_steps=given), most)
    assert not machine.may_train
    assert machine.waits_for == f"the next version: it is {most} steps ahead of its last push (ahead_steps)"
    machine.on(Told(PushAnswered(1, PushId(WHO, 1), PushAnswer.ACCEPTED, V2, "why")))
    assert not machine.may_train, "the answer is there, and its version is not"
    machine.on(Told(Served(1, V2, JobProgress())))
    assert adopted(machine.on(cl.Got(V2))) == [V2]
    assert machine.may_train


@pytest.mark.parametrize(
    ("goes", "comes"),
    [
        (Disconnected(), Told(Welcomed(2, WHO, 2, V1, True, JobProgress()))),
        (Told(Holders(1, (Holder("f0", ""),))), Told(Holders(1, (Holder("f0", "127.0.0.1:1"),)))),
        (Told(Served(1, V4, JobProgress())), Told(OnDisk(1, V2))),
    ],
    ids=["leader", "follower", "room on a disk"],
)
def test_while_the_server_lacks_something_it_trains_on(*, goes: cl.ClusterEvent, comes: cl.ClusterEvent) -> None:
    machine = ahead(training(overlap=True), 2)
    assert not machine.may_train
    machine.on(goes)
    for _ in range(10):
        assert machine.may_train
        machine.on(cl.Trained(1))
    machine.on(comes)
    assert not machine.may_train
    assert machine.anew().ahead_steps == machine.ahead_steps


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_void_the_next_push_has_a_newer_base(*, overlap: bool) -> None:
    """A push that is too stale becomes void; from the same base, the next push, which has its progress, would be too
    stale, too.
    """
    machine = training(overlap=overlap)
    machine.on(Told(Served(1, V2, JobProgress())))
    effects = answered(machine, PushAnswer.VOID, NO_VERSION)
    assert not any(isinstance(effect, cl.Freeze) for effect in effects)
    machine.on(Told(Served(1, V2, JobProgress())))
    assert V2 in adopted(machine.on(cl.Got(V2)))
    assert machine.base == V2
    assert machine.unpushed.steps == 0, "what the void push covered is frozen again, with the new base"
    assert machine.covering.steps == 2


def test_the_end_of_the_job_takes_back_what_its_last_version_lacks() -> None:
    machine = training(overlap=True)
    over = machine.on(Told(JobFinished(1, V1, "it ends")), resting=False)
    assert over == [], "the model is being trained"
    assert machine.on(cl.AtRest()) == [cl.TakeLast(V1, 1, 1), cl.Over("it ends", again=False)]
    assert machine.since_base == (0, 0)


def test_at_the_end_of_the_job_its_last_version_is_fetched_also_with_an_open_push() -> None:
    machine = training(overlap=True)
    machine.on(cl.Trained(1))
    machine.on(cl.Frozen(PushId(WHO, 1), "manifest"))
    machine.on(cl.Trained(1))
    assert machine.on(Told(JobFinished(1, V3, "it ends"))) == [cl.FetchVersion(V3)]
    assert not machine.may_train
    assert machine.on(cl.Got(V3)) == [cl.TakeLast(V3, 3, 3), cl.Over("it ends", again=False)]
    assert machine.base == V3


def test_the_last_version_lacks_what_a_rollback_opened_again() -> None:
    """Former bug: at the end of a job the number of lost inner steps left out those of a push that a rollback had
    reopened.
    """
    machine = training(overlap=True)
    answered(machine, PushAnswer.ACCEPTED, V2)
    machine.on(Told(Served(1, V2, JobProgress())))
    machine.on(cl.Got(V2))
    machine.on(Told(Reopened(1, V3, (PushId(WHO, 1),))))
    machine.on(Told(JobFinished(1, V3, "it ends")))
    assert machine.on(cl.Got(V3)) == [cl.TakeLast(V3, 2, 2), cl.Over("it ends", again=False)]


def test_while_a_push_is_frozen_nothing_is_offered_that_a_rollback_opened_again() -> None:
    """If the reopened push were rejected, the residual would be dropped, and a rank that joins before all ranks have
    encoded the frozen push would encode other values.
    """
    machine = training(overlap=True)
    answered(machine, PushAnswer.ACCEPTED, V2)
    machine.on(Told(Served(1, V2, JobProgress())))
    machine.on(cl.Got(V2))
    assert cl.Freeze(PushId(WHO, 2), V2) in machine.on(cl.Trained(2, steps=2))
    told = machine.on(Told(Reopened(1, V3, (PushId(WHO, 1),)))) + machine.on(TimePassed())
    assert offered(told) == []
    assert offered(machine.on(cl.Frozen(PushId(WHO, 2), "manifest"))) == [PushId(WHO, 1)]


def test_a_last_version_that_nobody_gives_is_waited_for_a_while() -> None:
    machine = training(overlap=True)
    machine.on(Told(JobFinished(1, V3, "it ends")))
    beats = 0
    while not machine.gone:
        beats += 1
        (*_, last) = machine.on(TimePassed()) or [None]
    assert beats == cl.LAST_S / RULES.heartbeat_s
    assert isinstance(last, cl.Over)
    assert last.failed
    assert f"Its last version, {V3}, could not be had" in last.reason


def test_who_was_away_at_the_end_of_the_job_takes_its_last_version() -> None:
    """Former bug: a cluster that rejoined after the job's end was told of the end, and succeeded with its own weights
    instead of the job's.
    """
    before = training(overlap=True)
    assert before.on(Told(Dismissed(1, "it was silent", again=True))) == [cl.Over("it was silent", again=True)]
    machine = before.anew()
    machine.on(Connected())
    machine.on(Told(Served(1, V3, JobProgress(9, 9 * TICKS))))
    assert machine.on(Told(JobFinished(1, V3, "it ends"))) == [cl.FetchVersion(V3)]
    assert machine.on(cl.Got(V3)) == [cl.TakeLast(V3, 0, 0), cl.Over("it ends", again=False)]
    assert machine.base == V3
    assert machine.job.samples == 9


@pytest.mark.parametrize(
    "told", [Dismissed(1, "the name is taken", again=False), JobFinished(1, NO_VERSION, "it lost its first version")]
)
def test_an_end_without_the_jobs_last_version_is_no_success(told: Dismissed | JobFinished) -> None:
    (over,) = training(overlap=True).on(Told(told))
    assert isinstance(over, cl.Over)
    assert over.failed


def test_who_has_had_no_part_in_a_job_does_not_end_with_its_last_version() -> None:
    """A cluster without a part in the job may be the next fit of a script whose server is still the previous fit's: it
    must fail.
    """
    machine = ClusterMachine("home", "here", "nonce", training(overlap=True).agreement)
    machine.on(Connected())
    (over,) = machine.on(Told(JobFinished(1, V3, "it ends")))
    assert isinstance(over, cl.Over)
    assert over.failed


def test_who_is_asked_to_leave_within_a_step_says_goodbye_after_it() -> None:
    """Former bug: a cluster that was asked to leave in the middle of a step left at once, so that no push contained
    that step.
    """
    machine = training(overlap=True)
    answered(machine, PushAnswer.ACCEPTED, V2)
    machine.on(Told(Served(1, V2, JobProgress())))
    machine.on(cl.Got(V2))
    machine.on(Told(OnDisk(1, V2)))
    machine.on(cl.LeaveAsked(), resting=False)
    assert not machine.gone
    frozen = [effect for effect in machine.on(cl.Trained(1)) if isinstance(effect, cl.Freeze)]
    assert frozen == [cl.Freeze(PushId(WHO, 2), V2)]


def test_the_clock_does_not_stand_still_between_a_round_and_its_version() -> None:
    """Former bug: between a round and the adoption of its version nobody counted the accepted steps, so that a job went
    beyond its last step.
    """
    machine = training(overlap=True)
    answered(machine, PushAnswer.ACCEPTED, V2)
    machine.on(cl.Trained(1))
    assert (machine.reckoned.steps, machine.reckoned.samples) == (3, 3)
    machine.on(Told(Served(1, V2, JobProgress(2, 2 * TICKS))))
    assert V2 in adopted(machine.on(cl.Got(V2)))
    assert (machine.reckoned.steps, machine.reckoned.samples) == (3, 3)


def test_who_is_let_in_as_another_incarnation_than_it_knows_begins_anew() -> None:
    """A cluster whose hello came late gets a second incarnation, as the first was removed; pushes under the first name
    would be ignored.
    """
    machine = training(overlap=True)
    (over,) = (e for e in machine.on(Told(Welcomed(2, IncarnationId("home", 2), 1, V1, True, JobProgress()))) if e)
    assert over == cl.Over("home~1 was removed, and let in again as home~2", again=True)
    again = machine.anew()
    again.on(Connected())
    assert fetched(again.on(Told(Welcomed(2, IncarnationId("home", 2), 1, V1, True, JobProgress())))) == [V1]
