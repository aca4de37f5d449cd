"""Defines the fuzzer's targets and findings: an unexpected exception, a hang, or memory use above the limit.

Theory of operation. A target reads one input and returns; what its readers refuse by their own errors it swallows.
`guarded` runs it under an alarm, and with Python's allocations traced: an input of a few bytes that makes a reader
allocate megabytes is a finding, whatever becomes of it. What C allocates is bounded per process (`limit_memory`).
"""

from __future__ import annotations

import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any

HANG_S = 10.0
"""Seconds after which an input is a finding."""
PATIENCE_S = 5.0
"""Seconds after which an answer, or the close of a connection that has ended, will not come."""
LARGE_NBYTES = 140 << 20
"""Bytes of memory beyond which reading is a finding: a frame of 64 MiB may be announced and is then waited for; twice
that while it is checked.
"""


MOST_EFFECTS = 20_000
"""Largest number of effects of one event; more would be a machine that can be made to flood others."""


class FindingError(AssertionError):
    """Error that reports a finding: a reader did what it must not do."""


class EndedError(Exception):
    """Signal that a machine has ended in good order, so the rest of the input is not read."""


@dataclass(frozen=True)
class Target:
    """Target of the fuzzer: one kind of reader, with seeds, a mutator and memory limits.

    Attributes:
        name: Name on the command line.
        about: Bytes that are read, and their reader, in words.
        seeds: Valid inputs.
        run: Function that reads one input; any exception is a finding.
        mutate: Function that returns a nearly valid input, made of a valid one.
        spare_nbytes: Bytes that reading may allocate beside `per_byte` times the input.
        per_byte: Bytes that reading may allocate for each byte; Python objects are larger than what they are read from.
    """

    name: str
    about: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes]
    spare_nbytes: int = 4 << 20
    per_byte: int = 400


def guarded(target: Target, data: bytes, *, traced: bool = True) -> None:
    """Runs a target on an input, within limits on time and memory.

    Raises:
        FindingError: The target took too long or too much memory.
        Exception: The target raised it.
    """
    with _alarm(HANG_S):
        if not traced:
            target.run(data)
            return
        tracemalloc.start()
        try:
            target.run(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    limit = target.spare_nbytes + target.per_byte * len(data)
    if peak > limit:
        raise FindingError(
            f"{target.name}: reading {len(data)} bytes took {peak} bytes of memory, the limit is {limit}"
        )


def settle(on: Callable[[Any], Iterable[Any]], event: Any, answer: Callable[[Any], Any] = lambda effect: None) -> None:
    """Feeds an event to a machine, then the answers to its effects, until no answer is left.

    Args:
        on: The machine; returns its effects.
        event: The event.
        answer: Returns what comes of an effect; None: nothing.
    """
    waiting, count = [event], 0
    while waiting:
        effects = list(on(waiting.pop(0)))
        waiting += [found for effect in effects if (found := answer(effect)) is not None]
        count += len(effects)
        if count > MOST_EFFECTS:
            raise FindingError(f"{event} has {count} effects, such as {effects[-1:]}")


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises an error in the main thread if the block takes too long; an outer timer goes on after it."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise FindingError(f"still busy after {seconds:g} s")

    before: Any = signal.signal(signal.SIGALRM, ring)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, again)


def limit_memory(more_nbytes: int) -> None:
    """Limits this process to `more_nbytes` beyond its present memory; further allocations raise MemoryError."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
