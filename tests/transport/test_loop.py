"""Tests the wake-up of the I/O loop: no call may be left waiting for another event."""

from __future__ import annotations

import os
import threading

import pytest

from chaos_lightning.transport import loop as module
from chaos_lightning.transport.loop import IoLoop

DEADLINE_S = 20.0


def test_a_call_that_comes_while_the_loop_wakes_up_does_not_end_all_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: a call between the reset of the loop's awake flag and the reading of its eventfd left the flag set,
    so that no later call woke the loop.
    """
    crashes: list[BaseException] = []
    loop = IoLoop("test", crashes.append)
    read, write = os.eventfd_read, module._wake_up
    intruded, ran = threading.Event(), threading.Event()
    written: list[int] = []

    def intruding_read(fd: int) -> int:
        if not intruded.is_set():
            intruded.set()
            loop.call(lambda: None)  # as another thread would, right here
        return read(fd)

    def counting_write(fd: int, value: int) -> None:
        written.append(fd)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_read", intruding_read)
    monkeypatch.setattr(module, "_wake_up", counting_write)
    loop.start()
    try:
        loop.call(ran.set)
        assert ran.wait(DEADLINE_S)
        assert intruded.wait(DEADLINE_S)
        settled = threading.Event()
        loop.call(lambda: loop.later(0.0, settled.set))
        assert settled.wait(DEADLINE_S)
        before = len(written)
        later = threading.Event()
        loop.call(later.set)
        assert later.wait(DEADLINE_S)
        assert len(written) == before + 1, "the loop was not woken: the call ran only because something else did"
    finally:
        loop.stop()
    assert not crashes
