"""Tests consoles of real processes without any logging setup: joins, deaths and leaves are one line each for the other
members.
"""

from __future__ import annotations

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH


def shown(job: Job, name: str, start: str) -> None:
    """Waits until a line of this member's console begins with `start`; checks that there is only one."""

    def found() -> list[str]:
        lines = job.harness.children[name].log.read_text().splitlines()
        return [line for line in lines if line.startswith(start)]

    job.harness.wait_until(lambda: bool(found()), f"{start!r} on {name}'s console")
    assert len(found()) == 1, found()


def test_join_death_and_leave_are_one_line_each_at_the_others(job: Job) -> None:
    job.start("a", epochs=UNTIL_ENOUGH)
    job.harness.wait_step(3)
    for number, name in enumerate("bc", 2):
        job.start(name, epochs=UNTIL_ENOUGH)
        job.harness.wait_for("joined", node=name)
        shown(job, "a", f"chaos: {name}~{number} joins by pause: {number} members")
        shown(job, name, f"chaos: I join by pause: {number} members")
        shown(job, name, f"chaos: I am rank {number - 1} of {number}")
        shown(job, name, "chaos: the training state is here: ")
    shown(job, "a", "chaos: batch=member: a step takes 8 samples now, 4 before; batch=fixed keeps the batch")
    shown(job, "c", "chaos: batch=member: a step takes 12 samples now, 8 before; batch=fixed keeps the batch")
    job.harness.kill("c")
    shown(job, "a", "chaos: c~3 is out (")
    shown(job, "b", "chaos: c~3 is out (")
    job.harness.terminate("b")
    shown(job, "a", "chaos: b~2 left: 1 member")
    job.finish("a", "b")


@pytest.mark.parametrize("way", ["pause", "replay"])
def test_a_newcomer_shows_how_far_it_is(job: Job, way: str) -> None:
    """A newcomer shows the progress of its pull; the pull goes over the network, as one from a neighbour's memory would
    be over at once.
    """
    spec = {"epochs": UNTIL_ENOUGH, "width": 30_000, "step_s": 0.01}
    settings = {"by_reference": False, "join_by": way}
    for name in "ab":
        job.start(name, settings={**settings, "min_nodes": 2}, **spec)
    job.harness.wait_step(3)
    job.start("c", seed=2, tells_all=True, settings=settings, **spec)
    shown(job, "a", f"chaos: c~3 joins by {way}: 3 members")
    job.finish("a", "b", "c")
    said = [line for line in job.harness.children["c"].log.read_text().splitlines() if line.startswith("chaos: ")]
    fetching = [line for line in said if line.startswith("chaos: fetching the training state: ")]
    assert [line for line in fetching if " MiB from " in line], said
    (here,) = [number for number, line in enumerate(said) if line.startswith("chaos: the training state is here: ")]
    joins = next(n for n, line in enumerate(said) if line.startswith(f"chaos: I join by {way}: 3 members"))
    assert (joins < here) == (way == "pause"), "a learner has the state before it is let in"


def test_a_console_that_is_full_and_that_nobody_reads_stops_nobody(job: Job) -> None:
    """A member's console is full and nobody reads it: its lines wait, but not its heartbeats, its training and
    its end.
    """
    for name in "ab":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH, deaf=name == "b")
    job.harness.wait_step(3)
    job.start("c", epochs=UNTIL_ENOUGH)
    shown(job, "a", "chaos: c~3 joins by pause: 3 members")
    job.harness.kill("c")
    shown(job, "a", "chaos: c~3 is out (")
    a, b = job.finish("a", "b")
    assert (a["hash"], a["step"]) == (b["hash"], b["step"])
    records = job.harness.records
    assert not [r for r in records if r.name in ("death", "fenced", "rejoin") and r.member[0] != "c"]
