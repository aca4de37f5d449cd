"""Tests the clean-up of the tests themselves: a scheduler that it ends does not count as a death."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from engine_job import end_schedulers

from chaos_lightning.testing.harness import Harness

JUST_ENDING = """
import json, os, sys, time
# As a scheduler between the last turn of its loop, whose end takes its handlers of signals along, and its exit.
print(json.dumps({"name": "opened", "pid": os.getpid()}), file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""


def test_a_scheduler_that_the_clean_up_hits_as_it_ends_has_not_died_undeclared(tmp_path: Path) -> None:
    with Harness(tmp_path, deadline_s=30.0) as harness:
        log = harness.logs / "scheduler-default-1.jsonl"
        child = harness.start("scheduler", [sys.executable, "-c", JUST_ENDING, str(log)])
        harness.wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "its event log")
        end_schedulers(harness)
        harness.wait_until(lambda: not child.running, "its end")
        assert child.poll() == -signal.SIGTERM
