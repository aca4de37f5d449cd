"""Tests reading state and reduced bytes out of a donor's memory, and that changes of these bytes are noticed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from replication_support import HEAD, LIMIT_S, OTHER, SEQ, ThreadDonor, dial, donors, numbered, publishing

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.protocol.types import NO_VIEW
from chaos_lightning.replication import PullConfig, PullReport, StateServerConfig, pull_state
from chaos_lightning.replication import state_reader as reading
from chaos_lightning.replication.bulk import BulkSocket
from chaos_lightning.replication.by_reference import Buffers, MemoryExport, Places
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.snapshot import COPIED, LIVE, Snapshot
from chaos_lightning.replication.state_reader import StateReader
from chaos_lightning.transport.reference import Generation

READER = "joiner"
"""Name by which `ThreadDonor` calls the other end of its connections."""


def lend(server: StateServer, *, to: str = READER, nbytes: int = 4096) -> list[memoryview]:
    """Makes a donor's server lend its memory to the member `to`; returns the server's result buffers."""
    results = [memoryview(bytearray(nbytes)) for _ in range(2)]
    server.memory_export = MemoryExport(lambda peer: peer == to, Generation(), results)
    return results


def hurried(server: StateServer, hold_s: float = LIMIT_S) -> None:
    """Makes the donor's server wait about `hold_s` for readers before it copies a snapshot, by pretending earlier
    steps.
    """
    for _ in range(10):
        server.pace.step(hold_s / 0.6, 0.0)


@contextlib.contextmanager
def lending(*members: str, hold_s: float = LIMIT_S) -> Iterator[list[ThreadDonor]]:
    with donors(*members, config=StateServerConfig(pending_interval_s=0.01)) as started:
        for donor in started:
            lend(donor.server)
            hurried(donor.server, hold_s)
        yield started


def snapshot(donor: ThreadDonor, state: Any, learners: Sequence[str] = (READER,), **options: Any) -> Snapshot:
    return donor.server.snapshot(HEAD, SEQ, state.tensors(), state.manifest(), learners=learners, **options)


class Reading:
    """Reader of donors' memory, with the connections that it handed back."""

    def __init__(self, started: Sequence[ThreadDonor], state: Any, abandoned: Callable[[], bool] = lambda: False):
        self.spares: dict[str, BulkSocket] = {}
        self.kept = threading.Condition()
        self.reader = StateReader(
            [d.endpoint for d in started],
            dial,
            state,
            head=HEAD,
            seq=SEQ,
            config=PullConfig(deadline_s=LIMIT_S, stall_timeout_s=LIMIT_S),
            abandoned=abandoned,
            keep=self._spare,
        )

    def _spare(self, member: str, channel: BulkSocket) -> None:
        with self.kept:
            self.spares[member] = channel
            self.kept.notify_all()

    def run(self, spares: int) -> PullReport | None:
        """Runs the reader, waits until it has handed back so many connections, and closes them."""
        report = self.reader.run()
        with self.kept:
            assert self.kept.wait_for(lambda: len(self.spares) == spares, LIMIT_S)
        for channel in self.spares.values():
            channel.sock.close()
        return report


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_NBYTES", 9000)


@pytest.mark.parametrize("when", ["prepare", "adopt"])
def test_a_state_of_another_program_is_refused_in_words(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    monkeypatch.setattr(mine, when, lambda manifest, *_: manifest["callbacks"])
    with lending("a") as started:
        snapshot(started[0], state)
        with pytest.raises(StateError, match="the donor's manifest does not fit what is trained here"):
            Reading(started, mine).run(0)


def test_a_state_that_stays_still_is_read_and_never_copied() -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    with lending("a", "b") as started:
        copies = [snapshot(donor, state) for donor in started]
        report = Reading(started, mine).run(2)
        assert report is not None
        assert same(state, mine)
        assert report.by_source == {"a": report.nbytes}
        assert mine.adopted == {"step": 1}
        for copy in copies:
            copy.wait(LIMIT_S)  # the hold is as long, so the readers' word ends it
            copy.settle(LIMIT_S)
            assert not copy.whole
        assert not any(d.server.served_nbytes for d in started)


def test_what_was_not_read_before_the_optimizer_writes_is_copied_and_read_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, mine = numbered(5, 5000, seed=1), numbered(5, 5000, seed=2)
    before = [t.clone() for _, t in state.tensors()]
    with lending("a") as (donor,):
        copy = snapshot(donor, state)
        read, take = Places.read, Snapshot.take
        calls, heard = 0, threading.Event()

        def taken(self: Snapshot, reader: str, nbytes: int) -> None:
            take(self, reader, nbytes)
            if nbytes >= 3 * reading.BLOCK_NBYTES:
                heard.set()

        monkeypatch.setattr(Snapshot, "take", taken)

        def overtaken(self: Places, start: int, into: Sequence[memoryview]) -> bool:
            nonlocal calls
            calls += 1
            if calls == 4:  # while the fourth block is being read
                assert heard.wait(LIMIT_S)
                copy.settle(LIMIT_S)
                for _, tensor in state.tensors():
                    tensor.fill_(-1)
            return read(self, start, into)

        monkeypatch.setattr(Places, "read", overtaken)
        report = Reading([donor], mine).run(1)
        assert report is not None
        assert not copy.whole, "what the reader had said to have was not copied"
        assert copy.places()[1][0] == 0
        assert copy.places()[1][-1] != 0
    for (_, tensor), expected in zip(mine.tensors(), before, strict=True):
        assert torch.equal(tensor, expected)


def test_nobody_reads_in_time_and_all_is_copied() -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    before = [t.clone() for _, t in state.tensors()]
    with lending("a", hold_s=0.001) as (donor,):
        copy = snapshot(donor, state)
        copy.settle(LIMIT_S)
        assert copy.whole
        for _, tensor in state.tensors():
            tensor.zero_()
        assert Reading([donor], mine).run(1) is not None
    for (_, tensor), expected in zip(mine.tensors(), before, strict=True):
        assert torch.equal(tensor, expected)


def test_the_next_donor_goes_on_where_one_died(monkeypatch: pytest.MonkeyPatch) -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    with lending("a", "b") as started:
        for donor in started:
            snapshot(donor, state)
        read = Places.read
        calls = 0

        def dying(self: Places, start: int, into: Sequence[memoryview]) -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ProcessLookupError(3, "No such process")
            return read(self, start, into)

        monkeypatch.setattr(Places, "read", dying)
        report = Reading(started, mine).run(1)
    assert report is not None
    assert same(state, mine)
    assert report.by_source == {"a": 18000, "b": report.nbytes - 18000}
    assert "No such process" in report.failed["a"]


def test_who_may_not_read_is_told_so_and_pulls() -> None:
    state, mine = numbered(2, 3000, seed=1), numbered(2, 3000, seed=2)
    with lending("a") as (donor,):
        lend(donor.server, to="somebody else")
        snapshot(donor, state).settle(LIMIT_S)
        reading_ = Reading([donor], mine)
        assert reading_.run(1) is None
        config = PullConfig(deadline_s=LIMIT_S, by_reference=True)
        report = pull_state([donor.endpoint], dial, head=HEAD, seq=SEQ, state=mine, config=config)
        assert report.by_source == {"a": report.nbytes}
        assert donor.server.served_nbytes == {READER: report.nbytes}


@pytest.mark.parametrize("learners", [(READER, "far away"), ()])
def test_a_learner_elsewhere_needs_the_copy(learners: tuple[str, ...]) -> None:
    state, mine = numbered(2, 3000, seed=1), numbered(2, 3000, seed=2)
    with lending("a") as (donor,):
        copy = snapshot(donor, state, learners)
        copy.settle(LIMIT_S)
        assert copy.whole
        assert Reading([donor], mine).run(1) is None


def test_a_state_that_is_no_plain_memory_is_copied() -> None:
    state = numbered(2, 3000, seed=1)
    state.named.append(("strided", torch.arange(12.0).reshape(3, 4).t()))
    with lending("a") as (donor,):
        copy = snapshot(donor, state)
        copy.settle(LIMIT_S)
        assert copy.whole
        assert not copy.readers


def test_what_is_released_is_not_read_any_more() -> None:
    state = numbered(2, 3000, seed=1)
    with lending("a") as (donor,):
        copy = snapshot(donor, state)
        item = donor.server._lent
        assert item is not None
        assert donor.server.memory_export is not None
        places = Places(donor.server.memory_export.places(item, manifest=False))
        into = memoryview(bytearray(100))
        assert places.generation == LIVE
        assert places.read(50, [into])
        assert bytes(into) == bytes(state.tensors()[0][1].numpy().tobytes()[50:150])
        copy.settle(LIMIT_S)
        assert not places.read(50, [into]), "the optimizer may write by now"
        donor.server.release()
        assert not places.read(50, [into])
        assert Places(donor.server.memory_export.places(item, manifest=False)).generation > COPIED


def test_a_lease_that_is_over_ends_what_was_lent() -> None:
    state = numbered(1, 100)
    with lending("a") as (donor,):
        snapshot(donor, state)
        assert not donor.server.expire(0.0)
        assert donor.server.expire(float("inf"))
        assert donor.server._lent is None


def test_reading_stops_when_something_else_was_decided() -> None:
    state, mine = numbered(3, 5000, seed=1), numbered(3, 5000, seed=2)
    with lending("a") as (donor,):
        snapshot(donor, state)
        with pytest.raises(StateError, match="was abandoned: something else was decided"):
            Reading([donor], mine, abandoned=lambda: True).run(0)


def test_who_is_let_in_reads_what_differs_and_has_it_verified() -> None:
    state, mine = numbered(3, 400_000, seed=1), numbered(3, 400_000, seed=2)
    mine.named[1] = ("t1", state.named[1][1].clone())
    with publishing(state, "a", "b") as started:
        for donor in started:
            lend(donor.server)
        config = PullConfig(deadline_s=LIMIT_S, by_reference=True)
        report = pull_state([d.endpoint for d in started], dial, head=HEAD, seq=SEQ, state=mine, config=config)
        assert not any(d.server.served_nbytes for d in started), "nothing was sent"
    assert same(state, mine)
    assert report.skipped == 1_600_000
    assert sum(report.by_source.values()) == 3_200_000


def test_bytes_that_changed_while_they_were_read_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    state, mine = numbered(3, 400_000, seed=1), numbered(3, 400_000, seed=2)
    read = Places.read
    damaged: list[int] = []

    def wrong(self: Places, start: int, into: Sequence[memoryview]) -> bool:
        intact = read(self, start, into)
        if len(damaged) < 2:
            damaged.append(start)
            into[0][7] ^= 1
        return intact

    monkeypatch.setattr(Places, "read", wrong)
    with publishing(state, "a", "b") as started:
        for donor in started:
            lend(donor.server)
        config = PullConfig(deadline_s=LIMIT_S, by_reference=True)
        report = pull_state([d.endpoint for d in started], dial, head=HEAD, seq=SEQ, state=mine, config=config)
    assert same(state, mine)
    assert report.corrupted == 2


def test_places_of_another_slot_are_refused_by_name() -> None:
    state = numbered(1, 100)
    with publishing(state, "a") as (donor,):
        lend(donor.server)
        with pytest.raises(StateError, match="this member serves the state at header"):
            pull_state([donor.endpoint], dial, head=OTHER, seq=SEQ, state=numbered(1, 100))


@pytest.mark.parametrize("data", [b"", b"\0\0\0\2{}", b"\0\0\0\2[]", b"\0\0\0\x09not json!", b"\xff\xff\xff\xff{}"])
def test_odd_places_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="malformed places"):
        Places(data)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"results": 3, "offer": ""}', b'{"results": [], "offer": "x"}'])
def test_odd_buffers_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="malformed buffers"):
        Buffers(data)


def test_sums_are_read_until_the_next_but_one_slot_opens() -> None:
    generation = Generation()
    results = [memoryview(bytearray(range(256)) * 4), memoryview(bytearray(1024))]
    buffers = Buffers(MemoryExport(lambda peer: True, generation, results).buffers())
    raw = memoryview(bytearray(1024))
    for seq, intact in ((8, True), (9, True), (10, False), (0, False)):
        generation.set(NO_VIEW, seq)
        assert buffers.read(8, raw, [(0, 100), (500, 1000)]) is intact
    assert bytes(raw[:100]) == bytes(results[0][:100])
    assert bytes(raw[500:1000]) == bytes(results[0][500:1000])
    assert not any(raw[100:500])
    with pytest.raises(WireError, match="slot 8 has 1024 bytes there"):
        buffers.read(8, memoryview(bytearray(2000)), [(0, 2000)])
