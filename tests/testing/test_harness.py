"""Tests the process harness with real processes: events wake it, deaths must be declared, and no process outlives
it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import harness_targets
import pytest

from chaos_lightning.errors import DeadlineError
from chaos_lightning.testing.faults import FaultInjector, FaultPlan
from chaos_lightning.testing.harness import Child, Harness, UndeclaredDeath

TARGETS = str(Path(harness_targets.__file__))


def command(name: str, steps: int = 3, end: str = "finish") -> list[str]:
    return [sys.executable, TARGETS, name, str(steps), end]


def ends(pid: int, deadline_s: float = 20) -> bool:
    """Waits until a process that is not this one's child has ended; returns whether it has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], deadline_s)[0])
    finally:
        os.close(handle)


def test_waits_on_events_and_ends(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 4))
        assert harness.wait_step(4)["header"] == "h4"
        assert harness.wait_for("committed", lambda r: r["seq"] == 2)["step"] == 2  # past events count
        assert harness.wait_exit("a") == 0
        harness.wait_all()
        assert harness.children["a"].tail() == "a did 4 steps"


def test_an_undeclared_death_fails_the_test_and_shows_why(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 2, "crash"))
        with pytest.raises(UndeclaredDeath) as failure:
            harness.wait_for("left", deadline_s=30)
        harness.declare("a")
    text = str(failure.value)
    assert "a (pid " in text
    assert "ended with exit code 1" in text
    assert "the dog ate the gradients" in text
    assert "a~1 committed" in text  # the last events


def test_a_declared_victim_that_ended_with_an_error_is_shown_where_a_wait_was_in_vain(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.declare("a")
        harness.start("a", command("a", 2, "crash"))
        assert harness.wait_exit("a") == 1
        with pytest.raises(DeadlineError, match="the dog ate the gradients"):
            harness.wait_for("left", deadline_s=0.05)


def test_an_undeclared_death_that_nobody_waited_for_fails_at_the_end(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    child = harness.start("a", command("a", 1, "wait"))
    harness.wait_for("joined")
    os.kill(child.pid, signal.SIGKILL)  # behind the harness's back
    assert ends(child.pid)
    with pytest.raises(UndeclaredDeath, match="signal SIGKILL"):
        harness.__exit__(None, None, None)


def test_kill_is_declared_and_told_before_it_happens(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 1, "wait"))
        harness.wait_for("joined", node="a")
        harness.kill("a")
        assert harness.wait_exit("a") == -signal.SIGKILL
        fault = harness.wait_for("fault_injected", node="a")
        assert (fault["kind"], fault.node) == ("sigkill", "a")
        assert harness.timeline().lives["a~1"].end == "killed"


def test_who_was_killed_is_gone_before_the_next_one_starts(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 1, "wait"))
        harness.wait_step(1)
        harness.kill("a")
        harness.start("b", command("b"))
        assert harness.children["a"].poll() == -signal.SIGKILL
        assert harness.wait_exit("b") == 0


def test_a_frozen_process_thaws_by_itself_and_ends_politely(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        child = harness.start("a", command("a", 1, "wait"))
        harness.wait_for("joined")
        harness.stop("a", 0.2)
        harness.terminate("a")  # pending until it is continued
        assert child.frozen
        assert harness.wait_exit("a", 30) == 0
        kinds = [r["kind"] for r in harness.records if r.name == "fault_injected"]
        assert kinds == ["sigstop", "sigterm", "sigcont"]


def test_deadline_says_what_was_expected_and_what_there_was(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 1, "wait"))
        harness.start_function("f", harness_targets.member, "f", 1, "wait")
        for name in "af":
            harness.wait_for("committed", node=name)
        with pytest.raises(DeadlineError) as failure:
            harness.wait_for("fenced", node="b", deadline_s=0.05)
        text = str(failure.value)
        assert "event 'fenced' of b did not come within 0.05 s" in text
        assert "a (pid" in text
        assert "is running" in text
        assert TARGETS in text.partition("stacks of f")[2], "where the function stands"
        harness.terminate("f")
        assert harness.wait_exit("f") == 0


def test_nothing_outlives_the_harness(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        # A child that starts a child of its own, frozen to boot.
        script = f"import subprocess, sys; subprocess.run([sys.executable, {TARGETS!r}, 'grand', '1', 'wait'])"
        parent = harness.start("a", [sys.executable, "-c", script])
        grand = int(harness.wait_for("opened", lambda r: r.source.startswith("member-grand"))["pid"])
        harness.stop("a")
    assert not parent.running
    assert ends(grand)


def test_a_name_is_free_again_after_its_end(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 1, "wait"))
        harness.wait_for("joined")
        with pytest.raises(ValueError, match="runs already"):
            harness.start("a", command("a"))
        harness.kill("a")
        first = harness.children["a"]
        second = harness.start("a", command("a", 1))
        assert harness.wait_exit("a") == 0
        assert first.log != second.log


def test_functions_run_in_a_forkserver(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start_function("a", harness_targets.member, "a", 2)
        harness.wait_all()
        assert "a did 2 steps" in harness.children["a"].tail()


def test_the_forkserver_has_modules_preloaded(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        # In a process of its own: there is one fork server a process, and the first call decides what it has loaded.
        harness.start("outer", [sys.executable, TARGETS, str(tmp_path / "inner"), "0", "preload"])
        assert harness.wait_exit("outer") == 0, harness.children["outer"].tail()
        assert harness.children["outer"].tail() == "json.tool,xml.dom.minidom"


def test_a_crash_in_a_forkserver_child_shows_its_traceback(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start_function("a", harness_targets.member, "a", 1, "crash")
        with pytest.raises(UndeclaredDeath, match="the dog ate the gradients"):
            harness.wait_all()
        harness.declare("a")


def test_drive_carries_out_a_plan(tmp_path: Path) -> None:
    def start(harness: Harness, name: str) -> Child:
        return harness.start(name, command(name, 1, "wait"))

    plan = FaultPlan.parse(
        """
        at step 2: join b            # once a has committed two steps
        on joined b: sigstop a for 0.1 s
        after 0.05 s: leave c
        on fault_injected a: sigkill b
        """
    )
    with Harness(tmp_path, plan=plan, start=start) as harness:
        harness.start("a", command("a", 3, "wait"))
        harness.start("c", command("c", 1, "wait"))
        harness.wait_for("joined", node="c")
        harness.wait_for("joined", node="a")
        harness.declare("c")  # it knows no SIGINT, so it may end by it
        left = harness.drive(lambda: "b" in harness.children and not harness.children["b"].running, 40)
        assert left.open == ()
        assert harness.wait_exit("b") == -signal.SIGKILL
        harness.wait_for("fault_injected", lambda r: r["kind"] == "sigcont", node="a")
        harness.terminate("a")
        assert harness.wait_exit("a") == 0


def test_drive_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        with pytest.raises(ValueError, match=r"cannot hurt links \(at step 1: cut a b\).*LinkRelay"):
            harness.drive(lambda: True, plan=FaultInjector().cut_at("a", "b", 1).plan())
        with pytest.raises(ValueError, match="give the harness a `start` function"):
            harness.drive(lambda: False, plan=FaultPlan.parse("after 0 s: join x"))
        with pytest.raises(ValueError, match="no member has rank 3"):
            harness.drive(lambda: False, plan=FaultPlan.parse("after 0 s: sigkill rank 3"))
        with pytest.raises(KeyError, match="no process is named"):
            harness.kill("nobody")


def test_children_die_with_the_test_runner(tmp_path: Path) -> None:
    runner = (
        "import sys, os, signal\n"
        f"sys.path.insert(0, {os.path.dirname(TARGETS)!r})\n"
        "from chaos_lightning.testing.harness import Harness\n"
        f"h = Harness({str(tmp_path / 'inner')!r})\n"
        f"h.start('a', {command('a', 1, 'wait')!r})\n"
        "h.wait_for('joined')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Harness(tmp_path) as harness:
        harness.declare("runner")
        harness.start("runner", [sys.executable, "-c", runner])
        assert harness.wait_exit("runner", 40) == -signal.SIGKILL
        inner = Harness(tmp_path / "inner")
        pid = int(inner.wait_for("opened", lambda r: r.get("role") == "member")["pid"])
        inner.close()
        assert ends(pid)


def test_audit_fails_loudly(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start("a", command("a", 3))
        harness.wait_all()
        with pytest.raises(AssertionError, match="VIOLATED"):
            harness.audit()  # the made-up headers stand on no genesis
