"""Tests what a learner is told about a log entry that a member could not copy in time, and about a log that was
ended.
"""

from __future__ import annotations

import threading

import pytest
from replication_support import LIMIT_S, donors
from test_log import chain, keep, read, reader_of

from chaos_lightning.replication import log as log_module
from chaos_lightning.replication.log import SlotLog
from chaos_lightning.replication.server import StateServerConfig


@pytest.mark.parametrize("last", [4, 2])
def test_whoever_asks_for_an_entry_that_was_left_out_hears_why(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that asks for an entry that was not copied in time is refused at once, even if it is the log's last
    one.
    """
    monkeypatch.setattr(log_module, "AT_ONCE_NBYTES", 0)  # as if slots were large
    with donors("a", config=StateServerConfig(pending_interval_s=0.01)) as started:
        for header in chain(last):
            keep(started[0].server.log, header, still=header.seq != 2)
        reader = reader_of(started)
        reader.start()
        read(reader, 1)
        assert reader.take(LIMIT_S) is None
        reader.close()
    assert "a: slot 2 after header" in reader.error
    assert "its bytes were used again before they were copied" in reader.error


@pytest.mark.parametrize("readers", [(), ("z",)])
def test_who_settles_has_the_last_slot_copied_at_once(
    readers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`settle` makes the log copy a slot's bytes although a reader that has not come could still be waited for."""
    monkeypatch.setattr(log_module, "AT_ONCE_NBYTES", 0)  # as if slots were large
    log = SlotLog(threading.Condition())
    header, used_again = chain(1)[-1], threading.Event()
    raw = memoryview(bytearray(b"sum."))
    log.keep(header, b"", raw, [(0, 4)], lambda: not used_again.is_set(), readers=readers, hold_s=10 * LIMIT_S)
    log.settle(LIMIT_S)
    used_again.set()
    raw[:] = b"next"
    entry = log.after(header.prev_hash, header.seq)
    assert entry is not None
    assert entry.raw is not None
    assert bytes(entry.raw) == b"sum."
    log.close()


def test_whoever_asks_a_log_that_was_ended_hears_so() -> None:
    with donors("a", config=StateServerConfig(pending_interval_s=0.01)) as started:
        server = started[0].server
        for header in chain(3):
            keep(server.log, header)
        with server._changed:
            assert server._changed.wait_for(lambda: server.log.newest == 3, LIMIT_S)
        server.log.end()
        reader = reader_of(started)
        reader.start()
        assert reader.take(LIMIT_S) is None
        reader.close()
    assert "the log was ended at slot 3, as nobody observed any more" in reader.error
