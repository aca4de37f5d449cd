"""Tests the work queue: which source sends which bytes, and that no source writes into verified memory."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import StateError
from chaos_lightning.replication.memory import DeviceRegion, HostRegion, StridedRegion
from chaos_lightning.replication.policy import Job, Queue, Request, Shares, SourceStats, TransferPolicy
from chaos_lightning.replication.pull import StateSink
from chaos_lightning.replication.table import Piece
from chaos_lightning.replication.work_queue import WorkQueue

SIZE = 8


class Eager(TransferPolicy):
    """Policy that gives all jobs to the first source; other sources steal one job at a time, and duplicate requests
    under way.
    """

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Shares:
        return Shares({sources[0]: list(jobs)}, "all to the first")

    def steal(
        self, thief: str, queues: Mapping[str, Queue], stats: Mapping[str, SourceStats], now: float
    ) -> tuple[str, int] | None:
        return max(queues), 1

    def duplicate(
        self, source: str, requests: Sequence[Request], stats: Mapping[str, SourceStats], now: float
    ) -> Request | None:
        return requests[-1]


class Memory:
    """Joiner's memory: `place` writes copies from duplicate requests, other requests write directly."""

    def __init__(self, count: int) -> None:
        self.cells = [""] * count

    def place(self, job: Job, buffers: list[memoryview]) -> None:
        for index in range(job.start // SIZE, job.stop // SIZE):
            self.cells[index] = bytes(buffers[0]).decode()


def jobs_of(count: int) -> list[Job]:
    return [
        Job(i * SIZE, (i + 1) * SIZE, (Piece(i, 0, SIZE // 2, b"x"), Piece(i, SIZE // 2, SIZE, b"y")))
        for i in range(count)
    ]


def queue_of(count: int, *sources: str, policy: TransferPolicy | None = None) -> tuple[WorkQueue, Memory]:
    memory = Memory(count)
    work_queue = WorkQueue(jobs_of(count), policy or Eager(), memory.place)
    for source in sources:
        work_queue.join(source)
    work_queue.assign(sources)
    return work_queue, memory


def take(work_queue: WorkQueue, source: str, *, wait: bool = True) -> Request | None:
    return work_queue.take(source, depth=9, wait=wait, deadline=time.monotonic())


def flown(work_queue: WorkQueue, source: str) -> Request:
    request = take(work_queue, source)
    assert request is not None
    return request


COPY = [memoryview(b"copy")]


def test_a_copy_waits_until_its_owner_has_ended() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    assert (owner.copy, copy.copy) == (False, True)
    work_queue.arrived(owner, 3)
    work_queue.done(copy, COPY)
    assert work_queue.left_nbytes == 0
    assert memory.cells == [""]  # the owner may still be receiving there
    work_queue.release("a")
    assert memory.cells == ["copy"]
    assert work_queue.stats["a"].duplicated == 3
    assert work_queue.stats["b"].nbytes == SIZE
    assert work_queue.busy() == []


def test_an_owner_that_ends_well_after_its_copy_keeps_its_own_bytes() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.done(copy, COPY)
    work_queue.done(owner, [memoryview(b"mine")])
    work_queue.release("a")
    assert memory.cells == [""]  # in place, and verified, by the owner itself
    assert work_queue.stats["a"].duplicated == SIZE


def test_an_owner_that_received_wrong_bytes_is_overwritten_by_the_copy() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.done(copy, COPY)
    work_queue.wrong(owner, owner.job.pieces[:1])
    assert memory.cells == ["copy"]
    assert work_queue.missing() == []
    assert work_queue.corrupted == 1


def test_a_copy_of_what_waits_again_is_placed_at_once() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    _, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.dismiss("a")
    assert [job.start for job in work_queue.missing()] == [0]
    work_queue.done(copy, COPY)
    assert memory.cells == ["copy"]
    assert work_queue.missing() == []
    assert work_queue.over


def test_a_wrong_copy_changes_nothing_for_the_owner() -> None:
    work_queue, _ = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.wrong(copy, ())
    assert work_queue.left_nbytes == SIZE
    assert owner.task.copies == 0
    work_queue.done(owner, [])
    assert work_queue.over


def test_a_copy_that_comes_too_late_is_counted_and_dropped() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.done(owner, [])
    work_queue.done(copy, COPY)
    assert memory.cells == [""]
    assert work_queue.stats["b"].duplicated == SIZE
    assert work_queue.stats["b"].nbytes == 0


def test_what_is_wrong_of_a_job_comes_back_and_only_that() -> None:
    work_queue, memory = queue_of(1, "a", "b")
    owner, copy = flown(work_queue, "a"), flown(work_queue, "b")
    work_queue.wrong(owner, owner.job.pieces[1:])
    assert work_queue.left_nbytes == SIZE // 2
    work_queue.done(copy, COPY)  # of the whole job: half of it would land in verified memory
    assert memory.cells == [""]
    again = flown(work_queue, "b")
    assert (again.job.start, again.job.stop, again.copy) == (SIZE // 2, SIZE, False)
    work_queue.done(again, [])
    assert work_queue.over


def test_bytes_that_are_always_wrong_end_the_pull() -> None:
    work_queue, _ = queue_of(1, "a")
    for _ in range(5):
        work_queue.wrong(flown(work_queue, "a"), ())
    assert isinstance(work_queue.error, StateError)
    assert take(work_queue, "a") is None


def test_work_of_the_dead_goes_to_others_and_to_nobody_that_failed_with_it() -> None:
    work_queue, _ = queue_of(3, "a", "b", policy=TransferPolicy())
    lost = flown(work_queue, "a")
    work_queue.release("a")
    assert flown(work_queue, "a").job.start == SIZE  # what it lost is offered to others first
    assert flown(work_queue, "b").task is lost.task
    work_queue.dismiss("b")
    assert {flown(work_queue, "a").job.start, flown(work_queue, "a").job.start} == {0, 2 * SIZE}


def test_what_was_planned_for_somebody_who_never_came_is_taken_by_others() -> None:
    work_queue = WorkQueue(jobs_of(2), Eager())
    work_queue.join("b")
    work_queue.assign(["late", "b"])
    work_queue.dismiss("late")
    assert [flown(work_queue, "b").job.start, flown(work_queue, "b").job.start] == [0, SIZE]
    assert work_queue.steals == 0


def test_jobs_of_attached_tensors_go_to_their_holders_only() -> None:
    whole = jobs_of(2)
    jobs = [whole[0], Job(SIZE, 2 * SIZE, whole[1].pieces, only=frozenset({"b"}))]
    work_queue = WorkQueue(jobs, Eager())
    work_queue.join("a")
    work_queue.join("b")
    work_queue.assign(["a", "b"])
    assert flown(work_queue, "a").job.start == 0
    assert take(work_queue, "a", wait=False) is None
    assert flown(work_queue, "b").job.start == SIZE
    work_queue.dismiss("b")
    assert not work_queue.servable()


def test_adjacent_jobs_are_asked_for_together() -> None:
    class Large(Eager):
        def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
            return 3 * SIZE

    work_queue, _ = queue_of(5, "a", policy=Large())
    requests = [flown(work_queue, "a"), flown(work_queue, "a")]
    assert [(f.job.start, f.job.stop, len(f.job.pieces)) for f in requests] == [(0, 24, 6), (24, 40, 4)]


def test_a_policy_that_leaves_everybody_idle_does_not_stop_the_pull() -> None:
    class Nobody(TransferPolicy):
        def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
            return False

    work_queue, _ = queue_of(1, "a", policy=Nobody())
    assert take(work_queue, "a") is not None


class Trial:
    """Random sequence of events: sources deliver, fail, send wrong bytes and die; memory holds garbage while a request
    is under way.
    """

    def __init__(self, seed: int, count: int, sources: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"s{i}" for i in range(sources)]
        self.work_queue, self.memory = queue_of(count, *self.names)
        self.requests: list[Request] = []
        self.verified: set[int] = set()

    def cells(self, request: Request) -> range:
        return range(request.job.start // SIZE, -(-request.job.stop // SIZE))

    def step(self) -> None:
        work_queue, living = self.work_queue, list(self.work_queue.stats)
        source = self.random.choice(living)
        mine = [f for f in self.requests if f.source == source]
        what = self.random.random()
        if what < 0.45 or not mine:
            request = take(work_queue, source, wait=not mine)
            if request is not None:
                self.requests.append(request)
                if not request.copy:
                    for cell in self.cells(request):
                        assert cell not in self.verified or request.job.nbytes < SIZE
                        self.memory.cells[cell] = "garbage"
            return
        request = mine[0]
        if what < 0.85:
            work_queue.arrived(request, request.job.nbytes)
            self.requests.remove(request)
            first = not request.task.done
            if not request.copy:
                for cell in self.cells(request):
                    self.memory.cells[cell] = "good"
            work_queue.done(request, [memoryview(b"good")])
            if first and not request.copy:
                self.verified |= set(self.cells(request))
        elif what < 0.9:
            self.requests.remove(request)
            work_queue.wrong(request, ())
        elif what < 0.97 or len(living) == 1:
            self.requests = [f for f in self.requests if f.source != source]
            work_queue.release(source)
        else:
            self.requests = [f for f in self.requests if f.source != source]
            work_queue.dismiss(source)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_whatever_happens_every_byte_ends_up_verified(seed: int, count: int, sources: int) -> None:
    trial = Trial(seed, count, sources)
    work_queue = trial.work_queue
    for _ in range(10_000):
        if work_queue.over:
            break
        trial.step()
    assert work_queue.over
    if work_queue.error is not None:
        return
    for name in list(work_queue.stats):
        work_queue.release(name)  # the pull cuts what has been overtaken
    assert trial.memory.cells == ["good"] * count
    assert sum(stats.nbytes for stats in work_queue.everybody().values()) == count * SIZE
    assert all(stats.under_way == 0 for stats in work_queue.stats.values())
    assert work_queue.missing() == []


def test_a_rate_follows_what_arrives_and_what_does_not() -> None:
    stats = SourceStats()
    assert stats.rate(0.0) == 0
    stats.asked(10_000_000, 0.0)
    for i in range(1, 101):
        stats.arrived(10_000, i / 100)
    assert stats.rate(1.0) == pytest.approx(1_000_000, rel=0.05)
    assert stats.rate(3.0) < 0.3 * stats.rate(1.0)  # silence counts while something is asked of it
    assert stats.silent_s(3.0) == 2.0
    stats.arrived(stats.under_way, 3.0)
    assert stats.silent_s(9.0) == 0.0


def test_an_estimate_counts_until_something_is_measured() -> None:
    stats = SourceStats()
    stats.expect(0.01, 8e6)
    assert stats.rate(5.0) == pytest.approx(1e6)
    stats.asked(10**9, 10.0)
    for i in range(1, 201):
        stats.arrived(100_000, 10 + i / 100)
    assert stats.rate(12.0) == pytest.approx(1e7, rel=0.05)
    assert stats.needs_s(stats.under_way, 12.0) == pytest.approx((10**9 - 2 * 10**7) / stats.rate(12.0))


@pytest.mark.parametrize("kind", [HostRegion, StridedRegion, DeviceRegion])
def test_a_held_copy_gets_to_its_place_in_any_memory(kind: type[HostRegion | StridedRegion | DeviceRegion]) -> None:
    """A duplicate's bytes are copied to their final place in every kind of region; the accelerator's kind is tried on
    host tensors.
    """
    tensor = torch.zeros(4, 6).t() if kind is StridedRegion else torch.zeros(6, 4)
    place = kind(tensor)
    sink = StateSink([place])
    bytes_ = memoryview(torch.arange(24.0).numpy().tobytes())
    job = Job(16, 80, (Piece(0, 16, 40, b""), Piece(0, 40, 80, b"")))
    sink.place(job, [bytes_[16:40], bytes_[40:80]])
    place.finish()
    assert tensor.flatten().tolist() == [0.0] * 4 + [float(i) for i in range(4, 20)] + [0.0] * 4
