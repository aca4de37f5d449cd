"""Tests a member that makes a collective which the others do not make: the one that is put out is told the call, the
line, and a remedy.
"""

from __future__ import annotations

import inspect
from typing import Any

import odd_members
import pytest
from strategy_job import Job


def line_of(function: Any, words: str) -> str:
    """Returns file and line, as `odd_members.py:31`, of the line in this function that contains `words`."""
    lines, first = inspect.getsourcelines(function)
    return f"odd_members.py:{first + next(i for i, line in enumerate(lines) if words in line)}"


def told(job: Job, run: Any, asks: str) -> str:
    """Runs two members of one script that disagree about a collective; returns the message to the younger one, which
    is put out while the other continues.
    """
    for name in "ab":
        gates = {2: job.gate("a")} if name == "a" else {}
        spec = {"name": name, "port": job.port, "out": str(job.out), "asks": asks, "gates": gates}
        job.harness.start_function(name, run, spec)
        if name == "a":
            job.harness.wait_step(2)
    job.wait_admitted("b")
    job.open("a")
    job.harness.declare("b")
    assert [job.harness.wait_exit(name) for name in "ab"] == [0, 1]
    words = next(
        line for line in job.harness.children["b"].tail().splitlines() if " is put out of the job: slot " in line
    )
    remedy = (
        "decide to stop by a value that all" if asks in ("break", "stop") else "move the call out of `if rank == 0:`"
    )
    assert remedy in words
    return words


def test_who_saves_alone_in_a_plain_loop(job: Job) -> None:
    words = told(job, odd_members.saves_alone, "save")
    assert (
        f"makes the collective 'barrier before saving' (save() at {line_of(odd_members.saves_alone, '.save(')})"
        in words
    )
    update = line_of(odd_members.saves_alone, "trainer.update()")
    assert f"goes on to its next step (update() at {update})" in words


@pytest.mark.slow
def test_who_breaks_alone_out_of_a_plain_loop(job: Job) -> None:
    words = told(job, odd_members.saves_alone, "break")
    assert "has ended its training (at odd_members.py:" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "function", "line"),
    [
        ("save_checkpoint", odd_members.Alone.on_train_batch_end, "self.trainer.save_checkpoint("),
        ("log", odd_members.Alone.training_step, "self.log("),
    ],
)
def test_who_asks_alone_under_lightning(job: Job, asks: str, function: Any, line: str) -> None:
    assert f"({asks}() at {line_of(function, line)})" in told(job, odd_members.alone, asks)


@pytest.mark.slow
def test_who_stops_alone_under_lightning(job: Job) -> None:
    """One of two members sets `trainer.should_stop = True`: the message says that it has ended its training."""
    assert "has ended its training, and b" in told(job, odd_members.alone, "stop")
