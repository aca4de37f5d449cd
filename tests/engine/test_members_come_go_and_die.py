"""Tests real processes that join, leave and die: all end with bitwise equal states, and no step and no sample
is lost.
"""

from __future__ import annotations

import signal
from typing import Any

import engine_members
import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.events.reader import read_events
from chaos_lightning.observe import folds
from chaos_lightning.observe.timeline import Timeline


def same(reports: list[dict[str, Any]]) -> None:
    assert len({r["hash"] for r in reports}) == 1, reports
    assert len({r["step"] for r in reports}) == 1, reports


@pytest.mark.parametrize(
    ("plan", "by_reference"),
    [
        ("rotating", True),
        ("tree", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rotating", False), ("chain", True), ("chain", False), ("tree", True))
        ),
    ],
)
def test_three_founders_end_alike(job: Job, plan: str, by_reference: bool) -> None:
    for name in "abc":
        job.start(name, settings={"min_nodes": 3, "plan": plan, "by_reference": by_reference}, width=200)
    reports = job.finish("a", "b", "c")
    same(reports)
    assert reports[0]["step"] == 40
    epochs = folds.samples(Timeline.of(read_events(job.harness.logs)))
    assert [use.complete for use in epochs.values()] == [True, True]


def test_newcomers_initial_weights_do_not_matter(job: Job) -> None:
    job.start("a", seed=1, gates={5: job.gate("a")})
    job.harness.wait_step(5)
    job.start("b", seed=2)
    job.admitted("b")
    job.open(str(job.folder / "a.gate"))
    same(job.finish("a", "b"))


@pytest.mark.slow
def test_two_newcomers_at_once(job: Job) -> None:
    gate = job.gate("a")
    job.start("a", gates={5: gate}, epochs=UNTIL_ENOUGH)
    job.harness.wait_step(5)
    job.start("b", epochs=UNTIL_ENOUGH)
    job.start("c", epochs=UNTIL_ENOUGH)
    job.harness.wait_for("welcomed", node="b")
    job.harness.wait_for("welcomed", node="c")
    job.open(gate)
    same(job.finish("a", "b", "c"))


@pytest.mark.parametrize("victim", ["root", "leaf"])
def test_sigkill_of_one_of_three(job: Job, victim: str) -> None:
    job.start("a", settings={"min_nodes": 3}, epochs=UNTIL_ENOUGH)
    job.harness.wait_for("welcomed", node="a")
    for name in "bc":
        job.start(name, settings={"min_nodes": 3}, epochs=UNTIL_ENOUGH)
    # Deaths inside the members are told to the harness by name; the first welcomed is the root.
    dead, alive = ("a", "bc") if victim == "root" else ("c", "ab")
    job.harness.wait_step(3)
    job.harness.kill(dead)
    job.harness.wait_for("death", lambda r: r.member.startswith(f"{dead}~"))
    job.start("d", epochs=UNTIL_ENOUGH)
    same(job.finish(*alive, "d"))


@pytest.mark.slow
def test_two_of_four_die_at_once(job: Job) -> None:
    gate = job.gate("a")
    for name in "abcd":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH, gates={60: gate} if name == "a" else {})
    job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 4)
    job.harness.wait_step(3)
    job.harness.kill("b")
    job.harness.kill("c")
    for name in "ef":
        job.start(name, epochs=UNTIL_ENOUGH)
    for name in "ef":
        job.harness.wait_for("welcomed", node=name)
    job.open(gate)
    same(job.finish("a", "d", "e", "f"))


@pytest.mark.slow
def test_root_dies_after_its_header_reached_one_member(job: Job) -> None:
    """The commit root dies after its header reached one survivor, which hands it on unchanged to the other one
    (protocol.md 9).
    """
    job.start("a", settings={"min_nodes": 2}, die_at={"when": "after_first_header", "world": 3}, epochs=UNTIL_ENOUGH)
    job.harness.declare("a")
    job.harness.wait_for("welcomed", node="a")
    for name in "bc":
        job.start(name, epochs=UNTIL_ENOUGH)
    handed = job.harness.wait_for("hand_on")
    assert handed.get("base") is not None
    same(job.finish("b", "c"))


def test_frozen_member_is_fenced_and_joins_again_in_the_same_process(job: Job) -> None:
    for name in "abc":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a")  # nobody is still loading
    pid = job.harness.children["b"].pid
    job.harness.stop("b")
    death = job.harness.wait_for("death", lambda r: r.member.startswith("b~"))
    job.harness.wait_for("committed", node="a", after=death)
    job.harness.cont("b")
    again = job.harness.wait_for("rejoin", node="b")
    job.harness.wait_for("joined", node="b", after=again)
    reports = job.finish("a", "b", "c")
    same(reports)
    assert reports[1]["pid"] == pid


def test_only_member_is_frozen_while_a_newcomer_waits(job: Job) -> None:
    """The only member is frozen, and may wake up with the state: a newcomer waits for it instead of founding the job
    anew (protocol.md 12a).
    """
    gate, hang_s = job.gate("a"), 2.0  # on a busy machine a newcomer that loads may be silent for half a second
    job.start("a", seed=1, gates={5: gate}, rules={"hang_timeout_s": hang_s})
    job.harness.wait_step(5)
    job.harness.stop("a")
    job.start("b", seed=2)
    told = job.harness.wait_for("notice", lambda r: "nobody else holds" in str(r.get("text")), node="b")
    assert "kill -CONT" in str(told.get("text"))
    job.harness.wait_until(lambda: job.silence_s("a") > 2 * hang_s, "a silence of more than hang_timeout_s")
    job.harness.cont("a")
    job.admitted("b")
    job.open(gate)
    reports = job.finish("a", "b")
    same(reports)
    assert reports[0]["step"] > 5
    assert job.foundings() == ["founded by a~1"]


@pytest.mark.parametrize("heir", ["a newcomer that waits", "itself, started again"])
def test_only_member_is_killed(job: Job, heir: str) -> None:
    """The only member is killed, which the process table proves: another process founds the job anew, though every
    timeout exceeds the test's deadline.
    """
    rules = {"hang_timeout_s": 600, "reconnect_grace_s": 600, "last_holder_timeout_s": 600}
    job.start("a", gates={5: job.gate("a")}, rules=rules)
    job.harness.wait_step(5)
    if heir == "a newcomer that waits":
        job.start("b")
        job.harness.wait_for("welcomed", node="b")
    job.harness.kill("a")
    if heir != "a newcomer that waits":
        job.harness.wait_exit("a")
        job.start("a")
    name = "b" if heir == "a newcomer that waits" else "a"
    assert job.harness.wait_exit(name) == 0
    assert engine_members.read(job.folder / f"{name}.pt")["step"] == 120  # no step of it was empty
    assert len(job.foundings()) == 2


def test_sigterm_leaves_after_the_step_with_exit_code_0(job: Job) -> None:
    for name in "abc":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a")
    job.harness.terminate("b", number=signal.SIGINT)
    assert job.harness.wait_exit("b") == 0
    same(job.finish("a", "c"))


@pytest.mark.parametrize("leaver", ["root", "leaf"])
def test_who_leaves_after_the_last_step_ends_with_the_others(job: Job, leaver: str) -> None:
    """A member asks to leave after the last step: it takes part in the slot in which the others end the job, and ends
    with them.
    """
    leaves = {"exit_at": 30}
    job.start("a", epochs=1, settings={"min_nodes": 2}, **(leaves if leaver == "root" else {}))
    job.harness.wait_for("welcomed", node="a")
    job.start("b", epochs=1, settings={"min_nodes": 2}, **(leaves if leaver == "leaf" else {}))
    reports = job.finish("a", "b")
    same(reports)
    assert reports[0]["step"] == 30


@pytest.mark.slow
def test_who_leaves_hands_newcomers_the_state_that_the_others_have(job: Job) -> None:
    """A member that leaves takes one more step without its script, so the state that a newcomer pulls from it equals
    that of the others.
    """
    gate = job.gate("a")
    job.start("a", epochs=UNTIL_ENOUGH, settings={"min_nodes": 2}, gates={5: gate}, exit_at=5)
    job.harness.wait_for("welcomed", node="a")
    job.start("b", epochs=UNTIL_ENOUGH, settings={"min_nodes": 2})
    job.harness.wait_step(5)
    job.start("c", epochs=UNTIL_ENOUGH)
    job.admitted("c")
    job.open(gate)
    reports = job.finish("a", "b", "c")
    same(reports[1:])
    assert reports[0]["out"]


@pytest.mark.slow
def test_leaver_is_the_writer_and_root(job: Job) -> None:
    job.start("a", epochs=UNTIL_ENOUGH)
    job.harness.wait_for("welcomed", node="a")
    job.start("b", epochs=UNTIL_ENOUGH)
    job.harness.wait_for("view", lambda r: len(r.get("members") or ()) == 2)
    job.harness.terminate("a")
    assert job.harness.wait_exit("a") == 0
    job.finish("b")


def test_last_member_leaves_at_once(job: Job) -> None:
    """The last member is told to leave: no other member can commit a step with it, so it ends without one."""
    job.start("a", epochs=200)
    job.harness.wait_step(5)
    job.harness.terminate("a", number=signal.SIGINT)
    assert job.harness.wait_exit("a", deadline_s=15) == 0


def test_joiner_dies_while_others_wait_for_it(job: Job) -> None:
    gate = job.gate("a")
    job.start("a", gates={5: gate}, settings={"min_nodes": 2}, epochs=3)
    job.harness.wait_for("welcomed", node="a")  # or b may host the scheduler, and begin without a
    job.start("b", epochs=3)
    job.harness.wait_step(5)
    job.start("c", epochs=3)
    job.admitted("c")
    job.harness.kill("c")
    job.open(gate)
    same(job.finish("a", "b"))


@pytest.mark.slow
def test_workers_of_a_killed_member_do_not_hide_its_death(job: Job) -> None:
    """DataLoader workers, which inherit sockets, outlive a killed member: the survivors notice its death at once all
    the same.
    """
    for name in "abc":
        job.start(name, settings={"min_nodes": 2}, epochs=4, workers=1, samples=480)
    job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, node="a")
    job.harness.kill("b")
    death = job.harness.wait_for("death", lambda r: r.member.startswith("b~"), deadline_s=5)
    assert "closed" in str(death.get("evidence"))
    same(job.finish("a", "c"))


@pytest.mark.slow
def test_member_whose_state_drifts_pulls_it_again(job: Job) -> None:
    """One member's state differs after a bit flip: the comparison of hashes finds it, and the member joins again
    (protocol.md 24).
    """
    settings = {"min_nodes": 3, "state_hash_every": 5}
    for name in "ab":
        job.start(name, settings=settings, epochs=20)
    job.start("c", settings=settings, epochs=20, drift_at=22)
    job.harness.wait_for("rejoin", node="c")
    for name in "abc":
        assert job.harness.wait_exit(name) == 0
    reports = [engine_members.read(job.folder / f"{name}.pt") for name in "abc"]
    same(reports)


@pytest.mark.parametrize("nbytes", [(40 << 20, 40 << 20), (8, 80 << 20)])
def test_gathering_more_than_fits_into_a_message_ends_all_members_with_the_same_words(
    job: Job, nbytes: tuple[int, int]
) -> None:
    for name, mine in zip("ab", nbytes, strict=True):
        job.start(name, settings={"min_nodes": 2}, gather_at=3, gather_nbytes=mine)
    job.harness.declare("a", "b")
    for name in "ab":
        assert job.harness.wait_exit(name) == 1
    errors = [job.report(name)["error"] for name in "ab"]
    assert errors[0] == errors[1]
    assert "'all_gather'" in errors[0]
    assert "the limit is" in errors[0]
