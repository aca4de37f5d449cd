"""The board: who owns which bytes, and that nobody writes into verified memory again."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import StateError
from chaos_lightning.replication.board import Board
from chaos_lightning.replication.memory import DeviceRegion, HostRegion, StridedRegion
from chaos_lightning.replication.policy import Assignment, Flight, Job, Queue, SourceStats, TransferPolicy
from chaos_lightning.replication.pull import StateSink
from chaos_lightning.replication.table import Piece

SIZE = 8


class Eager(TransferPolicy):
    """Everything to the first source; others steal one job at a time, and duplicate whatever is under way."""

    def assign(self, jobs: Sequence[Job], sources: Sequence[str]) -> Assignment:
        return Assignment({sources[0]: list(jobs)}, "all to the first")

    def steal(
        self, thief: str, queues: Mapping[str, Queue], stats: Mapping[str, SourceStats], now: float
    ) -> tuple[str, int] | None:
        return max(queues), 1

    def duplicate(
        self, source: str, flights: Sequence[Flight], stats: Mapping[str, SourceStats], now: float
    ) -> Flight | None:
        return flights[-1]


class Memory:
    """What the joiner has: `place` writes held copies, owners write in place."""

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


def board_of(count: int, *sources: str, policy: TransferPolicy | None = None) -> tuple[Board, Memory]:
    memory = Memory(count)
    board = Board(jobs_of(count), policy or Eager(), memory.place)
    for source in sources:
        board.join(source)
    board.assign(sources)
    return board, memory


def take(board: Board, source: str, *, wait: bool = True) -> Flight | None:
    return board.take(source, depth=9, wait=wait, deadline=time.monotonic())


def flown(board: Board, source: str) -> Flight:
    flight = take(board, source)
    assert flight is not None
    return flight


COPY = [memoryview(b"copy")]


def test_a_copy_waits_until_its_owner_has_ended() -> None:
    board, memory = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    assert (owner.copy, copy.copy) == (False, True)
    board.arrived(owner, 3)
    board.done(copy, COPY)
    assert board.left_nbytes == 0
    assert memory.cells == [""]  # the owner may still be receiving there
    board.release("a")
    assert memory.cells == ["copy"]
    assert board.stats["a"].duplicated == 3
    assert board.stats["b"].nbytes == SIZE
    assert board.busy() == []


def test_an_owner_that_ends_well_after_its_copy_keeps_its_own_bytes() -> None:
    board, memory = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    board.done(copy, COPY)
    board.done(owner, [memoryview(b"mine")])
    board.release("a")
    assert memory.cells == [""]  # in place, and verified, by the owner itself
    assert board.stats["a"].duplicated == SIZE


def test_an_owner_that_received_wrong_bytes_is_overwritten_by_the_copy() -> None:
    board, memory = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    board.done(copy, COPY)
    board.wrong(owner, owner.job.pieces[:1])
    assert memory.cells == ["copy"]
    assert board.missing() == []
    assert board.corrupted == 1


def test_a_copy_of_what_waits_again_is_placed_at_once() -> None:
    board, memory = board_of(1, "a", "b")
    _, copy = flown(board, "a"), flown(board, "b")
    board.dismiss("a")
    assert [job.start for job in board.missing()] == [0]
    board.done(copy, COPY)
    assert memory.cells == ["copy"]
    assert board.missing() == []
    assert board.over


def test_a_wrong_copy_changes_nothing_for_the_owner() -> None:
    board, _ = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    board.wrong(copy, ())
    assert board.left_nbytes == SIZE
    assert owner.task.copies == 0
    board.done(owner, [])
    assert board.over


def test_a_copy_that_comes_too_late_is_counted_and_dropped() -> None:
    board, memory = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    board.done(owner, [])
    board.done(copy, COPY)
    assert memory.cells == [""]
    assert board.stats["b"].duplicated == SIZE
    assert board.stats["b"].nbytes == 0


def test_what_is_wrong_of_a_job_comes_back_and_only_that() -> None:
    board, memory = board_of(1, "a", "b")
    owner, copy = flown(board, "a"), flown(board, "b")
    board.wrong(owner, owner.job.pieces[1:])
    assert board.left_nbytes == SIZE // 2
    board.done(copy, COPY)  # of the whole job: half of it would land in verified memory
    assert memory.cells == [""]
    again = flown(board, "b")
    assert (again.job.start, again.job.stop, again.copy) == (SIZE // 2, SIZE, False)
    board.done(again, [])
    assert board.over


def test_bytes_that_are_always_wrong_end_the_pull() -> None:
    board, _ = board_of(1, "a")
    for _ in range(5):
        board.wrong(flown(board, "a"), ())
    assert isinstance(board.error, StateError)
    assert take(board, "a") is None


def test_work_of_the_dead_goes_to_others_and_to_nobody_that_failed_with_it() -> None:
    board, _ = board_of(3, "a", "b", policy=TransferPolicy())
    lost = flown(board, "a")
    board.release("a")
    assert flown(board, "a").job.start == SIZE  # what it lost is offered to others first
    assert flown(board, "b").task is lost.task
    board.dismiss("b")
    assert {flown(board, "a").job.start, flown(board, "a").job.start} == {0, 2 * SIZE}


def test_what_was_planned_for_somebody_who_never_came_is_taken_by_others() -> None:
    board = Board(jobs_of(2), Eager())
    board.join("b")
    board.assign(["late", "b"])
    board.dismiss("late")
    assert [flown(board, "b").job.start, flown(board, "b").job.start] == [0, SIZE]
    assert board.steals == 0


def test_jobs_of_attached_tensors_go_to_their_holders_only() -> None:
    whole = jobs_of(2)
    jobs = [whole[0], Job(SIZE, 2 * SIZE, whole[1].pieces, only=frozenset({"b"}))]
    board = Board(jobs, Eager())
    board.join("a")
    board.join("b")
    board.assign(["a", "b"])
    assert flown(board, "a").job.start == 0
    assert take(board, "a", wait=False) is None
    assert flown(board, "b").job.start == SIZE
    board.dismiss("b")
    assert not board.servable()


def test_adjacent_jobs_are_asked_for_together() -> None:
    class Large(Eager):
        def request_nbytes(self, stats: SourceStats, now: float, limit: int) -> int:
            return 3 * SIZE

    board, _ = board_of(5, "a", policy=Large())
    flights = [flown(board, "a"), flown(board, "a")]
    assert [(f.job.start, f.job.stop, len(f.job.pieces)) for f in flights] == [(0, 24, 6), (24, 40, 4)]


def test_a_policy_that_leaves_everybody_idle_does_not_stop_the_pull() -> None:
    class Nobody(TransferPolicy):
        def may_take(self, source: str, stats: Mapping[str, SourceStats]) -> bool:
            return False

    board, _ = board_of(1, "a", policy=Nobody())
    assert take(board, "a") is not None


class Trial:
    """Sources that deliver, fail, lie and die at random; owners leave garbage in memory until they are done."""

    def __init__(self, seed: int, count: int, sources: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"s{i}" for i in range(sources)]
        self.board, self.memory = board_of(count, *self.names)
        self.flights: list[Flight] = []
        self.verified: set[int] = set()

    def cells(self, flight: Flight) -> range:
        return range(flight.job.start // SIZE, -(-flight.job.stop // SIZE))

    def step(self) -> None:
        board, living = self.board, list(self.board.stats)
        source = self.random.choice(living)
        mine = [f for f in self.flights if f.source == source]
        what = self.random.random()
        if what < 0.45 or not mine:
            flight = take(board, source, wait=not mine)
            if flight is not None:
                self.flights.append(flight)
                if not flight.copy:
                    for cell in self.cells(flight):
                        assert cell not in self.verified or flight.job.nbytes < SIZE
                        self.memory.cells[cell] = "garbage"
            return
        flight = mine[0]
        if what < 0.85:
            board.arrived(flight, flight.job.nbytes)
            self.flights.remove(flight)
            first = not flight.task.done
            if not flight.copy:
                for cell in self.cells(flight):
                    self.memory.cells[cell] = "good"
            board.done(flight, [memoryview(b"good")])
            if first and not flight.copy:
                self.verified |= set(self.cells(flight))
        elif what < 0.9:
            self.flights.remove(flight)
            board.wrong(flight, ())
        elif what < 0.97 or len(living) == 1:
            self.flights = [f for f in self.flights if f.source != source]
            board.release(source)
        else:
            self.flights = [f for f in self.flights if f.source != source]
            board.dismiss(source)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_whatever_happens_every_byte_ends_up_verified(seed: int, count: int, sources: int) -> None:
    trial = Trial(seed, count, sources)
    board = trial.board
    for _ in range(10_000):
        if board.over:
            break
        trial.step()
    assert board.over
    if board.error is not None:
        return
    for name in list(board.stats):
        board.release(name)  # the pull cuts what has been overtaken
    assert trial.memory.cells == ["good"] * count
    assert sum(stats.nbytes for stats in board.everybody().values()) == count * SIZE
    assert all(stats.under_way == 0 for stats in board.stats.values())
    assert board.missing() == []


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
    """The accelerator's way works on host tensors as well."""
    tensor = torch.zeros(4, 6).t() if kind is StridedRegion else torch.zeros(6, 4)
    place = kind(tensor)
    sink = StateSink([place])
    bytes_ = memoryview(torch.arange(24.0).numpy().tobytes())
    job = Job(16, 80, (Piece(0, 16, 40, b""), Piece(0, 40, 80, b"")))
    sink.place(job, [bytes_[16:40], bytes_[40:80]])
    place.finish()
    assert tensor.flatten().tolist() == [0.0] * 4 + [float(i) for i in range(4, 20)] + [0.0] * 4
