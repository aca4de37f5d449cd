"""Tests the log of committed slots: how members keep it and learners read it, when either side is slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replication_support import LIMIT_S, ThreadDonor, dial, donors

from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Span
from chaos_lightning.replication import log as log_module
from chaos_lightning.replication import log_reader
from chaos_lightning.replication.by_reference import MemoryExport
from chaos_lightning.replication.log import SlotLog
from chaos_lightning.replication.log_reader import LogReader, _shares
from chaos_lightning.replication.server import StateServerConfig
from chaos_lightning.transport.reference import Generation

NBYTES = 4096


@pytest.fixture(autouse=True, params=[0, 1 << 16], ids=["apart", "inline"])
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the largest size of reduced bytes that travel with their header: 0, or more than a slot has."""
    nbytes = int(request.param)
    monkeypatch.setattr(log_reader, "INLINE_NBYTES", nbytes)
    return nbytes


WHOLE: tuple[Span, ...] = ((0, NBYTES),)


def chain(length: int) -> list[Header]:
    """Returns a chain of headers: two steps, a gather, two steps, and so on."""
    headers, prev = [], GENESIS
    for number in range(1, length + 1):
        kind = Kind.GATHER if number % 3 == 0 else Kind.STEP
        prev = Header(number, kind, number, NO_VIEW, prev.hash, NO_VIEW, "section 0")
        headers.append(prev)
    return headers


def reduced(header: Header) -> memoryview:
    return memoryview(np.random.default_rng(header.seq).bytes(NBYTES))


def scope(header: Header) -> Sequence[Span]:
    return WHOLE if header.kind is Kind.STEP else ()


def keep(log: SlotLog, header: Header, still: bool = True) -> None:
    step = header.kind is Kind.STEP
    log.keep(header, encode(header), reduced(header) if step else None, scope(header), lambda: still)


def reader_of(started: Sequence[ThreadDonor], *, buffers: int = 3, by_reference: bool = False) -> LogReader:
    return LogReader(
        [d.endpoint for d in started],
        dial,
        GENESIS,
        decode=lambda data: decode(Header, data),
        scope=scope,
        buffers=[memoryview(bytearray(NBYTES)) for _ in range(buffers)],
        by_reference=by_reference,
        stall_timeout_s=LIMIT_S,
    )


@pytest.fixture
def three() -> Iterator[list[ThreadDonor]]:
    with donors("a", "b", "c", config=StateServerConfig(pending_interval_s=0.01)) as started:
        yield started


def read(reader: LogReader, count: int) -> list[Header]:
    """Reads `count` entries, checks their reduced bytes, and returns their headers."""
    found = []
    for _ in range(count):
        entry = reader.take(LIMIT_S)
        assert entry is not None, reader.error
        if entry.header.kind is Kind.STEP:
            assert entry.raw is not None
            assert bytes(entry.raw) == bytes(reduced(entry.header))
        reader.give_back(entry)
        found.append(entry.header)
    return found


def test_entries_come_in_order_with_their_bytes(three: list[ThreadDonor], inline: int) -> None:
    headers = chain(12)
    for donor in three:
        for header in headers:
            keep(donor.server.log, header)
    reader = reader_of(three)
    reader.start()
    assert read(reader, 12) == headers
    reader.close()
    assert reader.newest == 12
    shared = {d.member for d in three if d.server.served_nbytes.get("joiner")}
    assert shared == (set() if inline else {"a", "b", "c"})


def test_what_was_told_about_the_members_grows_old(three: list[ThreadDonor], monkeypatch: pytest.MonkeyPatch) -> None:
    """While no buffer is free, the reader asks for nothing; it must estimate how far the members went on meanwhile,
    from their pace before.
    """
    now = 100.0
    monkeypatch.setattr(log_reader, "time", SimpleNamespace(monotonic=lambda: now))
    for header in chain(4):
        keep(three[0].server.log, header)
    three[0].server.log.settle(LIMIT_S)
    reader = reader_of(three[:1], buffers=1)
    now = 101.0
    reader.start()
    first = reader.take(LIMIT_S)
    assert first is not None
    assert (reader.newest, reader.behind(4), reader.behind(1)) == (4, 0.0, 3.0)
    now = 103.0
    assert reader.behind(4) == 8.0, "four slots a second, for two seconds"
    reader.close()


def test_what_is_not_committed_yet_is_waited_for(three: list[ThreadDonor]) -> None:
    headers = chain(2)
    reader = reader_of(three)
    reader.start()
    assert reader.take(0.05) is None
    for header in headers:
        for donor in three:
            keep(donor.server.log, header)
    assert read(reader, 2) == headers
    reader.close()


def test_a_member_that_dies_costs_time_only(three: list[ThreadDonor]) -> None:
    headers = chain(8)
    for header in headers[:4]:
        for donor in three:
            keep(donor.server.log, header)
    reader = reader_of(three)
    reader.start()
    read(reader, 4)
    three[0].close()
    for header in headers[4:]:
        for donor in three[1:]:
            keep(donor.server.log, header)
    assert read(reader, 4) == headers[4:]
    assert not reader.error
    reader.close()


def test_an_entry_that_one_member_lacks_comes_from_another(
    three: list[ThreadDonor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "AT_ONCE_NBYTES", 0)  # as if these were large
    headers = chain(4)
    for header in headers:
        keep(three[0].server.log, header, still=header.seq != 2)  # its buffer was used again while it was copied
        keep(three[1].server.log, header)
        keep(three[2].server.log, header)
    reader = reader_of(three)
    reader.start()
    assert read(reader, 4) == headers
    reader.close()
    assert three[0].server.log.late == 1


def test_a_small_slot_is_copied_before_its_buffer_can_be_used_again(three: list[ThreadDonor]) -> None:
    header = chain(1)[0]
    buffer = bytearray(reduced(header))
    three[0].server.log.keep(header, encode(header), memoryview(buffer), WHOLE, lambda: False)
    buffer[:] = bytes(NBYTES)  # the next slot but one, a millisecond later
    reader = reader_of(three[:1])
    reader.start()
    assert read(reader, 1) == [header]
    reader.close()


def test_a_log_that_was_cut_ends_the_reading_in_words(three: list[ThreadDonor]) -> None:
    headers = chain(20)
    for donor in three:
        donor.server.log.cap_nbytes = 3 * NBYTES
        for header in headers:
            keep(donor.server.log, header)
    with three[0].server._changed:
        assert three[0].server._changed.wait_for(lambda: three[0].server.log.newest == 20, LIMIT_S)
    reader = reader_of(three[:1])
    reader.start()
    assert reader.take(LIMIT_S) is None
    assert "it reaches to slot 20 and was cut before" in reader.error
    reader.close()


def test_a_header_of_another_chain_is_refused(three: list[ThreadDonor]) -> None:
    forked = Header(1, Kind.GATHER, 0, NO_VIEW, "ffffffffffffffff", NO_VIEW)
    keep(three[0].server.log, forked)
    with three[0].server._changed:
        assert three[0].server._changed.wait_for(lambda: three[0].server.log.newest == 1, LIMIT_S)
    reader = reader_of(three[:1])
    reader.start()
    assert reader.take(LIMIT_S) is None
    assert "slot 1 after header" in reader.error
    reader.close()


def test_a_slow_learner_asks_for_no_more_than_its_buffers_hold(three: list[ThreadDonor]) -> None:
    headers = chain(40)
    for header in headers:
        keep(three[0].server.log, header)
    reader = reader_of(three[:1], buffers=2)
    reader.start()
    first = reader.take(LIMIT_S)
    second = reader.take(LIMIT_S)
    assert first is not None
    assert second is not None
    assert reader.received_nbytes <= 2 * NBYTES
    reader.give_back(first)
    reader.give_back(second)
    read(reader, 38)
    reader.close()


def test_closing_ends_a_reader_that_waits(three: list[ThreadDonor]) -> None:
    reader = reader_of(three)
    reader.start()
    done = threading.Event()
    threading.Thread(target=lambda: (reader.close(), done.set()), daemon=True).start()
    assert done.wait(LIMIT_S)


def test_the_end_of_a_log_forgets_it(three: list[ThreadDonor]) -> None:
    log = three[0].server.log
    for header in chain(3):
        keep(log, header)
    with three[0].server._changed:
        assert three[0].server._changed.wait_for(lambda: log.newest == 3, LIMIT_S)
        assert log.after(GENESIS.hash, 1) is not None
    log.end()
    assert (log.newest, log.gone) == (-1, 3)
    with three[0].server._changed:
        assert log.after(GENESIS.hash, 1) is None


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 1.0, 3.5, 1e9]), min_size=1, max_size=6),
)
def test_shares_cover_everything_once(lengths: list[int], rates: list[float]) -> None:
    spans, at = [], 0
    for length in lengths:
        spans.append((at * 64, (at + length) * 64))
        at += length + 3
    parts = _shares(spans, rates)
    assert len(parts) == len(rates)
    pieces = sorted(p for part in parts for p in part)
    assert sum(b - a for a, b in pieces) == sum(b - a for a, b in spans)
    assert all(b <= c for (_, b), (c, _) in pairwise(pieces))
    assert all(any(a >= start and b <= stop for start, stop in spans) for a, b in pieces)


# --- read in place ---------------------------------------------------------------------------------------------------


class Lending:
    """Donor whose two result buffers, used by slots in turn, can be read by the learner."""

    def __init__(self, donor: ThreadDonor) -> None:
        self.log = donor.server.log
        self.results = [memoryview(bytearray(NBYTES)) for _ in range(2)]
        self.generation = Generation()
        self.open = 0
        donor.server.memory_export = MemoryExport(lambda peer: peer == "joiner", self.generation, self.results)

    def commit(self, header: Header, hold_s: float = LIMIT_S) -> None:
        """Reduces a slot and keeps it in the log."""
        self.begin(header.seq)
        raw = self.results[header.seq % 2]
        step = header.kind is Kind.STEP
        if step:
            raw[:] = reduced(header)
        self.log.keep(
            header,
            encode(header),
            raw if step else None,
            scope(header),
            lambda: self.open <= header.seq + 1,
            readers=("joiner",),
            hold_s=hold_s,
        )

    def begin(self, seq: int) -> None:
        """Opens the attempt at this slot, so that the readers see another generation."""
        self.open = seq
        self.generation.set(NO_VIEW, seq)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes even small slots count as large, so that their bytes are neither copied at once nor sent with the
    header.
    """
    monkeypatch.setattr(log_module, "AT_ONCE_NBYTES", 0)
    monkeypatch.setattr(log_reader, "INLINE_NBYTES", 0)


def no_copy(log: SlotLog, seq: int) -> bool:
    """Returns whether the log has the entry of this slot without a copy of its bytes."""
    with log._changed:
        entry = log._entries.get(seq)
        return entry is not None and entry.raw is None


def copied(log: SlotLog, header: Header) -> bool:
    """Returns whether the log has a copy of this slot's bytes, if the slot has any."""
    return header.kind is not Kind.STEP or log._entries[header.seq].raw is not None


@pytest.mark.usefixtures("large")
def test_sums_are_read_where_they_lie_and_nobody_copies_or_sends_them(three: list[ThreadDonor]) -> None:
    lending = [Lending(donor) for donor in three]
    reader = reader_of(three, by_reference=True)
    for keeper in reader._keepers:  # whoever is connected later hears of later slots only
        reader._connect(keeper)
    reader.start()
    for header in chain(7):
        for one in lending:
            one.commit(header)
        assert read(reader, 1) == [header]
    steps = [h.seq for h in chain(7) if h.kind is Kind.STEP]

    def taken(log: SlotLog) -> bool:
        return all(log._taken.get(seq) for seq in steps)

    for one in lending:
        with one.log._changed:
            assert one.log._changed.wait_for(partial(taken, one.log), LIMIT_S)
        assert all(no_copy(one.log, seq) for seq in range(1, 8))
    reader.close()
    assert not any(d.server.served_nbytes for d in three)
    assert reader.received_nbytes == NBYTES * sum(h.kind is Kind.STEP for h in chain(7))


@pytest.mark.usefixtures("large")
def test_sums_that_nobody_took_in_time_are_copied_and_sent(three: list[ThreadDonor]) -> None:
    one = Lending(three[0])
    headers = chain(5)
    for header in headers:
        one.commit(header, hold_s=0.0)
        with one.log._changed:
            assert one.log._changed.wait_for(partial(copied, one.log, header), LIMIT_S)
    reader = reader_of(three[:1], by_reference=True)
    reader.start()
    assert read(reader, 5) == headers  # slots 1 and 2 are overwritten, 4 and 5 are still there
    reader.close()
    assert three[0].server.served_nbytes == {"joiner": 2 * NBYTES}


@pytest.mark.usefixtures("large")
def test_who_reads_no_more_is_not_waited_for(three: list[ThreadDonor]) -> None:
    one = Lending(three[0])
    headers = chain(3)
    reader = reader_of(three[:1], by_reference=True)
    reader.start()
    one.commit(headers[0])
    assert read(reader, 1) == headers[:1]
    reader.close()
    with one.log._changed:
        one.begin(2)
    one.commit(headers[1])  # wakes the thread that serves it, which finds its connection closed
    with one.log._changed:
        assert one.log._changed.wait_for(lambda: "joiner" in one.log._sated, LIMIT_S)
    one.commit(headers[2])
    assert no_copy(one.log, 2)


@pytest.mark.usefixtures("large")
def test_entries_by_value_and_in_place_leave_no_gap(three: list[ThreadDonor], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    copy = log_module._copy

    def slow(source: memoryview, spans: Sequence[Span]) -> memoryview:
        assert gate.wait(LIMIT_S)
        return copy(source, spans)

    monkeypatch.setattr(log_module, "_copy", slow)
    one = Lending(three[0])
    headers = chain(4)
    keep(one.log, headers[0])  # a learner elsewhere was served, too
    for header in headers[1:]:
        one.commit(header, hold_s=0.0)
    assert one.log.newest == -1, "what comes later must not be there sooner"
    reader = reader_of(three[:1])
    reader.start()
    gate.set()
    assert read(reader, 1) == headers[:1]
    reader.close()
