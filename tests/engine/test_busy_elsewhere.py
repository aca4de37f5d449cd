"""Tests members that count as on machines of their own (CHAOS_HOST): a busy one is never removed, a stopped one
soon.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH
from test_members_come_go_and_die import same

from chaos_lightning.events.events import Record

OUT = ("death", "fenced", "rejoin", "prepare")
STOPPED = "its machine says that its process is stopped"


def start_apart(job: Job, names: str, busy: dict[str, dict[int, float]], min_nodes: int = 3, **spec: Any) -> None:
    """Starts the scheduler and members, each as on a machine of its own, so that none sees another's process table or
    memory.
    """
    # Otherwise the scheduler would stay to tell newcomers of other machines that the job is finished.
    job.serve(min_nodes=min_nodes, finished_s=0.0, **spec.pop("rules", {}))
    for name in names:
        begin(job, name, busy=busy.get(name, {}), **spec)


def begin(job: Job, name: str, **spec: Any) -> None:
    settings = {"by_reference": False, "host_scheduler": False}
    job.start(name, env={"CHAOS_HOST": name}, settings=settings, **spec)


def end(job: Job, names: str) -> None:
    same(job.finish(*names))
    assert job.harness.wait_exit("scheduler") == 0


def watchers(job: Job, name: str) -> list[int] | None:
    """Returns the ids of the processes that watch this member on behalf of others; None if there are none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if (
                any(w.endswith(b"machine/watcher.py") for w in words)
                and str(job.harness.children[name].pid).encode() in words
            ):
                found.append(int(entry.name))
    return found or None


def connected(job: Job, name: str) -> bool:
    """Returns whether a watcher of this member is connected to a neighbour's watcher, besides its own member."""
    for pid in watchers(job, name) or ():
        with contextlib.suppress(OSError):
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            if sum(file.startswith("socket:") for file in files) > 1:
                return True
    return False


def left_out(job: Job, name: str, after: Record | None = None) -> Record:
    """Waits until the other members train without this one; returns the event of its death."""
    death = job.harness.wait_for("death", lambda r: r.member.startswith(f"{name}~"), after=after)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a", after=death)
    return death


@pytest.mark.parametrize("name", [pytest.param("a", marks=pytest.mark.slow), "c"])
def test_member_that_holds_the_interpreters_lock_on_another_machine_is_not_put_out(job: Job, name: str) -> None:
    """A member on another machine that holds the interpreter lock for 0.7 s several times is not removed, as commit
    root or as another member.
    """
    start_apart(job, "abc", {name: dict.fromkeys(range(5, 25, 4), 0.7)})
    end(job, "abc")
    assert not [r for r in job.harness.records if r.name in OUT]


@pytest.mark.slow
def test_member_that_is_busy_for_longer_than_any_silence_is_seen_to_run_by_its_machine(job: Job) -> None:
    start_apart(job, "abc", {"b": {10: 3.3}})
    end(job, "abc")
    assert not [r for r in job.harness.records if r.name in OUT]


def test_stopped_member_on_another_machine_is_told_by_its_machine_and_not_by_its_silence(job: Job) -> None:
    """A stopped member is removed in time because its watcher reports the stop; the timeouts for silence exceed the
    test's deadline.
    """
    start_apart(
        job,
        "abc",
        {},
        min_nodes=2,
        rules={"silence_timeout_s": 600, "hang_timeout_s": 600, "last_holder_timeout_s": 600},
        epochs=UNTIL_ENOUGH,
    )
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a")
    job.harness.stop("b")
    assert STOPPED in str(left_out(job, "b")["evidence"])
    job.harness.cont("b")
    again = job.harness.wait_for("rejoin", node="b")
    job.harness.wait_for("joined", node="b", after=again)
    end(job, "abc")


def test_where_no_machine_tells_silence_does(job: Job) -> None:
    """Without a member's watcher only silence counts: a short hold of the interpreter lock is no death, a stop
    is one.
    """
    start_apart(job, "abc", {"b": {20: 0.9}}, min_nodes=2, epochs=UNTIL_ENOUGH)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a")
    (watcher,) = job.harness.wait_until(lambda: watchers(job, "b"), "a watcher beside b")
    os.kill(watcher, signal.SIGKILL)
    held = job.harness.wait_for("committed", lambda r: r["step"] > 21, node="b")
    assert not [r for r in job.harness.records if r.name in OUT]
    job.harness.stop("b")
    assert "last heard" in str(left_out(job, "b", held)["evidence"])
    job.harness.cont("b")
    again = job.harness.wait_for("rejoin", node="b")
    job.harness.wait_for("joined", node="b", after=again)
    end(job, "abc")


def test_only_member_is_killed_and_its_machine_proves_it(job: Job) -> None:
    """When the only member is killed, a newcomer on another machine founds the job anew at once, though every timeout
    exceeds the test's deadline.
    """
    rules = {"hang_timeout_s": 600, "reconnect_grace_s": 600, "last_holder_timeout_s": 600}
    start_apart(job, "a", {}, min_nodes=1, rules=rules, gates={5: job.gate("a")})
    job.harness.wait_step(5)
    begin(job, "b")
    for name in "ab":
        job.harness.wait_until(lambda name=name: connected(job, name), f"a connection of the watcher beside {name}")
    job.harness.kill("a")
    assert job.harness.wait_exit("b") == 0
    assert len(job.foundings()) == 2
    assert job.harness.wait_exit("scheduler") == 0


def test_no_watcher_outlives_its_member_for_long(job: Job) -> None:
    start_apart(job, "ab", {}, min_nodes=2, epochs=UNTIL_ENOUGH)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a")
    for name in "ab":
        job.harness.wait_until(lambda name=name: watchers(job, name), f"a watcher beside {name}")
    job.harness.kill("a")
    job.leave("b")
    job.harness.wait_until(lambda: not watchers(job, "a") and not watchers(job, "b"), "the end of all watchers")
