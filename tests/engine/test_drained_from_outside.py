"""Tests members of the plain loop that `chaos-lightning drain` sends away, and one whose name is in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_job import Job

from chaos_lightning.control.requests import drain
from chaos_lightning.errors import DepartedError
from chaos_lightning.protocol.types import GENESIS
from chaos_lightning.trainer import Trainer


def test_drained_one_by_one_the_root_first(job: Job) -> None:
    """Three members are drained one after the other, and each waits for its release; also the last one ends without an
    error.
    """
    epochs = 1000  # all are drained before they are over, on whatever machine
    job.start("a", epochs=epochs)
    job.harness.wait_for("welcomed", node="a")
    for name in "bc":
        job.start(name, epochs=epochs)
    job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 3)
    released = None
    for name in "abc":
        assert drain(job.endpoint, name) == (name,)
        assert job.harness.wait_exit(name) == 0
        released = job.harness.wait_for("left", node=name, after=released)
        if name != "c":
            job.harness.wait_for("committed", node="c", after=released)
    a, b, c = job.finish("a", "b", "c")
    assert [r["out"] for r in (a, b, c)] == [True] * 3
    assert a["step"] < b["step"] < c["step"]
    records = job.harness.records
    decisions = [str(r.get("reason")) for r in records if r.name in ("redo", "hand_on")]
    assert [d for d in decisions if not d.startswith("founded by")] == []
    assert {r.name for r in records} & {"prepare", "fenced", "death", "error"} == set()


@pytest.mark.parametrize("step", [5, 60])
def test_only_member_is_drained_between_two_batches_or_after_the_last_one(job: Job, step: int) -> None:
    """The only member is drained between two steps; the scheduler releases it at once, as no header of other members
    can.
    """
    gate = job.gate("a")
    job.start("a", epochs=1, gates={step: gate})
    job.harness.wait_step(step)
    drain(job.endpoint, "a")
    job.harness.wait_for("left", lambda r: r.own, node="a")
    job.open(gate)
    (a,) = job.finish("a")
    assert (a["step"], a["out"]) == (step, step == 5)


def test_sigterm_ends_a_member_that_waits_for_a_step_because_too_few_are_left(job: Job) -> None:
    """SIGTERM ends a member that waits for a step that never comes, so its loop cannot look at the signal by itself."""
    for name in "ab":
        job.start(name, epochs=1000, settings={"min_nodes": 2})
    job.harness.wait_step(5)
    job.harness.kill("a")
    job.harness.wait_for("notice", lambda r: "1 of min_nodes=2" in str(r["text"]), node="b")
    job.harness.terminate("b")
    job.harness.wait_for("left", node="b")
    (b,) = job.finish("b")
    assert b["out"]


def test_released_at_the_rest_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def departed(*_: object) -> None:
        raise DepartedError("let go")

    trainer = Trainer(name="a", endpoint="127.0.0.1:1", log_dir=str(tmp_path))
    try:
        monkeypatch.setattr(trainer, "_state", object())
        monkeypatch.setattr(trainer.engine, "header", replace(GENESIS, boundary=True))
        monkeypatch.setattr(trainer.engine, "boundary", departed)
        trainer.check_state_replication()
        assert trainer.engine.out
    finally:
        trainer.close()


def test_whom_a_header_let_go_waits_for_its_release_before_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(name="a", endpoint="127.0.0.1:1", log_dir=str(tmp_path))
    done: list[str] = []
    monkeypatch.setattr(trainer.engine, "wait_released", lambda: done.append("waited"))
    monkeypatch.setattr(trainer, "close", lambda: done.append("closed"))
    try:
        with trainer:
            monkeypatch.setattr(trainer, "_state", object())
            trainer._member.depart()
    finally:
        monkeypatch.undo()
        trainer.close()
    assert done == ["waited", "closed"]


def test_who_takes_a_name_that_is_taken_is_told_so_once(job: Job) -> None:
    gate = job.gate("a")
    job.start("a", gates={5: gate})
    job.harness.wait_step(5)
    job.start("namesake", member="a")
    first = job.harness.wait_for("refused", node="a")
    job.harness.wait_for("refused", node="a", after=first)
    job.harness.wait_until(lambda: "in the job already" in job.harness.children["namesake"].tail(), "its words")
    job.harness.terminate("namesake")
    assert job.harness.wait_exit("namesake") == 0
    assert job.harness.children["namesake"].tail().count("a is in the job already as a~1") == 1
    job.open(gate)
    a, namesake = job.finish("a", "namesake")
    assert (a["step"], namesake["step"]) == (120, 0)


def test_standby_is_drained_and_ends_in_peace(job: Job) -> None:
    gate = job.gate("a")
    job.start("a", settings={"max_nodes": 1}, gates={5: gate})
    job.harness.wait_step(5)
    job.start("b")
    job.harness.wait_for("notice", lambda r: "standby" in str(r.get("text")), node="b")
    assert drain(job.endpoint, "b") == ("b",)
    assert job.harness.wait_exit("b") == 0
    job.open(gate)
    a, b = job.finish("a", "b")
    assert (a["step"], b["step"], b["out"]) == (120, 0, True)


def test_newcomer_is_drained_while_its_state_is_on_the_way(routed_job: Job) -> None:
    job = routed_job
    job.relay.shape("a", "b", rate_bps=1e6)
    job.start("a", epochs=1000, width=4000)
    job.harness.wait_step(5)
    job.start("b", epochs=1000, width=4000)
    job.harness.wait_for("pull_started", node="b")
    drain(job.endpoint, "b")
    job.relay.shape("a", "b", rate_bps=1e9)
    assert job.harness.wait_exit("b") == 0
    assert job.report("b")["out"]
    released = job.harness.wait_for("left", node="b")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 1, node="a", after=released)
    job.leave("a")
    assert not [r for r in job.harness.records if r.name in ("fenced", "rejoin", "death")]


@pytest.mark.slow
def test_who_comes_in_again_is_drained_meanwhile(job: Job) -> None:
    """A member that was removed after a freeze is drained when it is about to pull the state again; it ends well."""
    gate = job.gate("c")
    for name in "abc":
        job.start(name, epochs=1000, **({"load_gate": gate, "load": 2} if name == "c" else {}))
        job.harness.wait_for("welcomed", node=name)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="c")
    job.harness.stop("c")
    frozen = job.harness.wait_for("fault_injected", lambda r: r["kind"] == "sigstop")
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, node="a", after=frozen)
    job.harness.cont("c")
    again = job.harness.wait_for("rejoin", node="c")
    job.harness.wait_for("notice", lambda r: r["text"] == "about to pull", node="c", after=again)
    drain(job.endpoint, "c")
    job.open(gate)
    assert job.harness.wait_exit("c") == 0
    assert job.report("c")["out"]
    job.leave("a", "b")
