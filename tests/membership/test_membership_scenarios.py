"""Tests state machines against scenario files: their events and the expected effects, word by word (see
membership_script.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from membership_script import MemberScript, SchedulerScript, replay

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_machine_does_what_the_scenario_says(path: Path) -> None:
    make = MemberScript if path.stem.startswith("member") else SchedulerScript
    written, now = replay(path, make)
    assert now == written, "if the new effects are right, run with CHAOS_REWRITE=1"


def test_there_are_scenarios_for_both_machines() -> None:
    assert {p.stem.split("_")[0] for p in FILES} == {"member", "scheduler"}
