"""Tests that a pull's progress reports can be encoded from the first one on."""

from __future__ import annotations

from chaos_lightning.protocol.codec import wrap_from_member
from chaos_lightning.protocol.types import Progress
from chaos_lightning.replication.policy import SourceStats
from chaos_lightning.replication.session import PullMeter


def test_progress_before_anything_was_measured() -> None:
    """Former bug: the sum of an empty list of rates was an int, which the codec refuses, so that every pull with
    progress reports failed.
    """
    said: list[Progress] = []
    meter = PullMeter(100, 0, said.append)
    meter(0, {})
    meter(40, {"a~1": SourceStats()})
    for now in said:
        wrap_from_member(now)
    assert [now.done_nbytes for now in said] == [0, 40]
