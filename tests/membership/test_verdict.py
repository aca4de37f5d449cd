"""Tests a member's answer on whether another one lives: by process table, by link, by the other machine's report."""

from __future__ import annotations

import math

import pytest

from chaos_lightning.membership.verdict import UNSEEN, Sight, verdict
from chaos_lightning.protocol.types import Verdict

RUNS: Sight = (True, "it runs", False)
STOPPED: Sight = (False, "it is stopped", False)
GONE: Sight = (False, "it is gone", True)


@pytest.mark.parametrize(
    ("here", "there", "silence_s", "excused", "expected"),
    [
        (GONE, RUNS, 0.0, True, Verdict("a~1", False, "it is gone", True, True)),
        (RUNS, UNSEEN, math.inf, False, Verdict("a~1", True, "it runs", False, True)),
        (UNSEEN, GONE, 0.2, False, Verdict("a~1", True, "last heard 200 ms ago")),
        (UNSEEN, STOPPED, 0.4, False, Verdict("a~1", False, "it is stopped", False, True)),
        (UNSEEN, RUNS, math.inf, False, Verdict("a~1", True, "it runs", False, True)),
        (UNSEEN, UNSEEN, 0.4, False, Verdict("a~1", False, "last heard 400 ms ago")),
        (UNSEEN, GONE, 0.4, True, Verdict("a~1", True, "last heard 400 ms ago")),
        (UNSEEN, UNSEEN, math.inf, False, Verdict("a~1", False, "no link")),
    ],
)
def test_who_knows_best_is_believed(
    here: Sight, there: Sight, silence_s: float, excused: bool, expected: Verdict
) -> None:
    assert verdict("a~1", here, there, silence_s=silence_s, limit_s=0.3, excused=excused) == expected
