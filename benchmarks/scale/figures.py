"""Fits how a cost grows with the number of members, and limits the CPU time of one case."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
from collections.abc import Iterator, Mapping


class TooLongError(Exception):
    """Error: a case took more CPU time than it may."""


def exponent(costs: Mapping[int, float]) -> float:
    """Returns the exponent k for which members^k fits a cost best (least squares on logarithms).

    Args:
        costs: Costs by number of members, for at least two numbers; all above 0.
    """
    slope = statistics.linear_regression([math.log(n) for n in costs], [math.log(c) for c in costs.values()]).slope
    return float(slope)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises an error once the block has used this many seconds of this process's CPU time. Works in the main thread
    only.

    While it runs the kernel keeps the process's clock in ticks; time with `time.thread_time`, which stays exact.

    Raises:
        TooLongError: The block has used that much.
    """

    def over(*_: object) -> None:
        raise TooLongError(f"over {seconds:g} s of CPU")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
