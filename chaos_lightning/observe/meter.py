"""Goodput as it happens, from one member's own view of the job; what the `Goodput` callback logs.

Theory of operation. The exact accounting is a fold over all logs afterwards (`folds.goodput`); this is its cheap
sibling for a training loop: one call a step, constant memory. The time from one committed step to the next is
compared with the usual one (median of the last clean ones). If the view changed in between, what exceeds the usual is
booked on the cause: a join if the new view has newcomers, a recovery if somebody is missing. All members see the same
views, so they book alike.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAUSES = ("join", "recovery", "leave")


@dataclass(slots=True)
class GoodputMeter:
    """Useful and lost seconds so far."""

    window: int = 51
    """Clean steps that the usual step time is taken from."""
    total_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    steps: int = 0
    last_s: float = 0.0
    """Duration of the latest step."""
    _clean: deque[float] = field(default_factory=deque)
    _at: float | None = None
    _members: tuple[str, ...] | None = None
    _joined_late: bool = False

    def step(self, now: float, members: tuple[str, ...], *, leaving: bool = False) -> None:
        """A step was committed.

        Args:
            now: Monotonic time, s.
            members: Ids of the view's members now, in rank order.
            leaving: Whoever is missing had asked to leave (the view's reason says so).
        """
        before, self._members = self._members, members
        if self._at is None:
            self._at = now
            return
        self.last_s, self._at = now - self._at, now
        self.total_s += self.last_s
        self.steps += 1
        cause = self._cause(before, members, leaving)
        if not cause:
            self._clean.append(self.last_s)
            if len(self._clean) > self.window:
                self._clean.popleft()
            return
        usual = self.usual_s
        self.lost_s[cause] += max(0.0, self.last_s - usual) if usual else 0.0

    @staticmethod
    def _cause(before: tuple[str, ...] | None, now: tuple[str, ...], leaving: bool) -> str:
        if before is None or set(before) == set(now):
            return ""
        if set(before) - set(now):
            return "leave" if leaving else "recovery"
        return "join"

    def pause(self) -> None:
        """Not in the job for a while (fenced, validating): the time until the next step is nobody's."""
        self._at = None

    @property
    def usual_s(self) -> float:
        """Usual step time, s; 0 before the first clean step."""
        return statistics.median(self._clean) if self._clean else 0.0

    @property
    def share(self) -> float:
        """Useful part of the time, 0 to 1."""
        return 1.0 - sum(self.lost_s.values()) / self.total_s if self.total_s > 0 else 1.0

    def state(self) -> dict[str, Any]:
        """Totals, for a checkpoint or for a newcomer that may become the one who logs."""
        return {"total_s": self.total_s, "lost_s": dict(self.lost_s), "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from these totals."""
        self.total_s = float(state.get("total_s", 0.0))
        self.steps = int(state.get("steps", 0))
        self.lost_s = {c: float(dict(state.get("lost_s", {})).get(c, 0.0)) for c in CAUSES}
        self._at = None
