"""Decides when a process that has ended is started again, and whether it is: pauses that grow while it keeps failing.

Theory of operation. A process that ran for long and failed is started again soon. One that fails soon after its start
will mostly do so again, so each further pause is twice as long, up to a bound, and some give up after a number of such
failures. Whoever watches a process asks for the pause; the clock is the watcher's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses between the end of a process and its next start.

    Attributes:
        first_s: First pause, s; each further one is twice as long.
        longest_s: Longest pause, s.
        steady_s: Duration of a run (s) from which on its failure counts as the first one.
        at_once: Number of failures in a row after which there is no pause.
        most: Number of failures in a row after which the process is given up.
    """

    first_s: float
    longest_s: float
    steady_s: float = math.inf
    at_once: int = 0
    most: float = math.inf


class Restarts:
    """Failures of one process.

    Args:
        policy: Pauses and limits.

    Attributes:
        failures: Number of failures in a row, each soon after a start.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.failures = 0

    def failed(self, ran_s: float = 0.0) -> float:
        """Counts a failure after a run of `ran_s` seconds; returns the pause before the next start, s."""
        self.failures = self.failures + 1 if ran_s < self._policy.steady_s else 0
        return self.pause_s

    @property
    def pause_s(self) -> float:
        """Pause before the next start, s."""
        beyond = max(self.failures, 1) - self._policy.at_once
        if beyond <= 0:
            return 0.0
        return min(self._policy.longest_s, self._policy.first_s * 2.0 ** min(beyond - 1, 64))

    @property
    def exhausted(self) -> bool:
        """Whether the process is to be given up."""
        return self.failures >= self._policy.most

    def well(self) -> None:
        """Forgets all failures: the process does what it is for."""
        self.failures = 0
