"""Tests that log entries damaged in transit are never applied: other donors provide them, or reading ends with an
error.
"""

from __future__ import annotations

import pytest
from replication_support import LIMIT_S, Proxy, donors
from test_log import chain, keep, read, reader_of, reduced

from chaos_lightning.replication import log_reader
from chaos_lightning.replication.server import StateServerConfig

AT = 600
"""Byte of the first donor's stream that is changed: in its first answers, whichever way the bytes travel."""


class Damage:
    """Proxy's damage that flips one bit of the stream, once."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, data: bytearray, position: int) -> None:
        if not self.done and position <= AT < position + len(data):
            data[AT - position] ^= 4
            self.done = True


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 16], ids=["apart", "inline"])
@pytest.mark.parametrize("others", ["bc", ""])
def test_a_damaged_entry_is_never_applied(others: str, inline_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "INLINE_NBYTES", inline_nbytes)
    headers, damage = chain(12), Damage()
    with donors("a", *others, config=StateServerConfig(pending_interval_s=0.01)) as started:
        for donor in started:
            for header in headers:
                keep(donor.server.log, header)
        proxy = Proxy(started[0].endpoint, damage)
        reader = reader_of([proxy, *started[1:]])  # type: ignore[list-item]
        reader.start()
        if others:
            assert read(reader, 12) == headers
        else:
            found = 0
            while (entry := reader.take(LIMIT_S)) is not None:
                assert entry.header == headers[found]
                assert entry.raw is None or bytes(entry.raw) == bytes(reduced(entry.header))
                found += 1
                reader.give_back(entry)
            assert found < 12
            assert "nobody" in reader.error, reader.error
            assert "a: " in reader.error, reader.error
        reader.close()
        proxy.close()
    assert damage.done
