"""Tests whole jobs against files: a scenario above the dashes, the expected events below. CHAOS_REWRITE=1 rewrites the
events.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.simulate.narrate import narrate
from lab.simulate.script import parse

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
DASHES = "----\n"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_job_goes_as_told(path: Path) -> None:
    scenario, _, told = path.read_text().partition(DASHES)
    lines, outcome = narrate(parse(scenario))
    now = "\n".join(lines) + "\n"
    if os.environ.get("CHAOS_REWRITE"):
        path.write_text(scenario + DASHES + now)
        told = now
    assert outcome.violation == ""
    assert now == told, "if the new course is right, run with CHAOS_REWRITE=1"


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 4
