"""Real processes without any logging setup: joins, deaths and leaves are one line each on the others' consoles."""

from __future__ import annotations

from engine_job import Job
from engine_members import UNTIL_ENOUGH


def shown(job: Job, name: str, start: str) -> None:
    """Waits until a line of this member's console begins so; there is one."""

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
        shown(job, name, f"chaos: I am rank {number - 1} of {number}")
    job.harness.kill("c")
    shown(job, "a", "chaos: c~3 is out (")
    shown(job, "b", "chaos: c~3 is out (")
    job.harness.terminate("b")
    shown(job, "a", "chaos: b~2 left: 1 member")
    job.finish("a", "b")
