"""The audit finds nothing wrong in the good run, and finds every way to break the contract, under the point that it
breaks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from observe_synthetic import Line, Script, story, two_jobs

from chaos_lightning.observe.audit import NOT_SHOWN, OK, VIOLATED, Finding, audit, verdict, violations
from chaos_lightning.protocol.types import GENESIS

STORY = story()


def judged(run: Script, where: Path) -> dict[int, Finding]:
    return {f.point: f for f in audit(run.write(where))}


def broken(tmp_path: Path, change: Callable[[Script], None]) -> list[str]:
    run = copy.deepcopy(STORY)
    change(run)
    return violations(audit(run.write(tmp_path)))


def commits(run: Script, member: str) -> list[Line]:
    return [x for x in run.lines[run.sources[member]] if x["name"] == "committed" and x["member"] == member]


def hashed(run: Script, member: str) -> Line:
    """Returns the first line in which the member writes a hash of its state."""
    return next(x for x in run.lines[run.sources[member]] if x["name"] == "state_hash")


def test_the_good_run_held(tmp_path: Path) -> None:
    findings = judged(STORY, tmp_path)
    assert {p: f.verdict for p, f in findings.items()} == dict.fromkeys(range(1, 6), OK)
    text = verdict(findings.values())
    assert text.endswith("HELD: 5 points")
    assert "epoch 0: 640 samples (whole), each once" in text


def test_an_empty_log_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    findings = audit(tmp_path)
    assert {f.verdict for f in findings} == {NOT_SHOWN}
    assert "NOTHING SHOWN, 5 not shown" in verdict(findings)


def test_a_quiet_run_does_not_claim_more_than_it_shows(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    for _ in range(5):
        run.slot()
    findings = judged(run, tmp_path)
    assert {p: f.verdict for p, f in findings.items()} == {
        1: NOT_SHOWN,
        2: OK,
        3: OK,
        4: NOT_SHOWN,
        5: NOT_SHOWN,
    }


def test_a_leaver_that_was_released_before_its_last_header_came_is_no_violation(tmp_path: Path) -> None:
    def change(run: Script) -> None:
        run.lines[run.sources["alpha~1"]].remove(commits(run, "alpha~1")[-1])

    assert broken(tmp_path, change) == []


def a_state_that_differs(run: Script) -> None:
    hashed(run, "bravo~1")["hash"] = "feedfeedfeedfeed"


def a_fork_that_somebody_went_on_with(run: Script) -> None:
    for line in commits(run, "charlie~1")[-3:]:
        line["header"], line["prev"] = "f" + line["header"][1:], "f" + line["prev"][1:]


def two_headers_for_one_slot(run: Script) -> None:
    commits(run, "delta~1")[-4]["header"] = "f" * 16


def a_slot_that_is_missing_from_the_chain(run: Script) -> None:
    for source in run.lines:
        run.lines[source] = [x for x in run.lines[source] if x.get("seq") != 7 or x["name"] != "committed"]


def a_member_that_commits_twice(run: Script) -> None:
    run.lines[run.sources["bravo~1"]].append(copy.deepcopy(commits(run, "bravo~1")[-1]))


def an_old_member_that_contributes_to_a_newer_view(run: Script) -> None:
    late = commits(run, "delta~1")[-1]["header"]
    for line in (x for member in ("delta~1", "charlie~2") for x in commits(run, member) if x["header"] == late):
        line["contributors"] = [*line["contributors"], ["bravo~1", 8.0]]


def a_survivor_that_misses_a_slot(run: Script) -> None:
    run.lines["member-delta-1.jsonl"].remove(commits(run, "delta~1")[20])


def a_sample_used_by_two_members(run: Script) -> None:
    commits(run, "alpha~1")[3]["spent"] = commits(run, "bravo~1")[3]["spent"]


def a_sample_used_again_later(run: Script) -> None:
    own = commits(run, "alpha~1")
    own[5]["spent"] = own[2]["spent"]


def a_sample_the_ledger_does_not_know(run: Script) -> None:
    commits(run, "alpha~1")[5]["spent"] = [{"stream": "", "epoch": 0, "spans": [[600, 608]]}]


def a_joiner_with_another_state(run: Script) -> None:
    next(x for x in run.lines["member-delta-1.jsonl"] if x["name"] == "pull_done")["hash"] = "0" * 16


def a_joiner_that_entered_at_another_step(run: Script) -> None:
    lines = run.lines["member-delta-1.jsonl"]
    next(x for x in lines if x["name"] == "pull_started")["head"] = commits(run, "alpha~1")[10]["header"]


def a_living_member_that_is_put_out(run: Script) -> None:
    del run.lines["harness-h-1.jsonl"]  # nobody froze charlie ...
    lines = run.lines["member-charlie-1.jsonl"]
    before = next(i for i, x in enumerate(lines) if x["name"] == "fenced")
    decided = next(
        x["t"] for x in run.lines["scheduler-s-1.jsonl"] if x["name"] == "decide" and "silent" in x["reason"]
    )
    alive = {**lines[before], "t": decided - 0.01, "name": "link_up", "peer": "alpha~1"}
    lines.insert(before, alive)  # ... and it was heard 10 ms before


def an_undeclared_death_beside_declared_faults(run: Script) -> None:
    lines = run.lines["member-bravo-1.jsonl"]
    lines[:] = [x for x in lines if x["name"] != "fault_injected"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (a_state_that_differs, r"contract 1: states differ at header .*bravo~1=feedfeedfeedfeed"),
        (a_fork_that_somebody_went_on_with, r"contract 2: fork"),
        (two_headers_for_one_slot, r"delta~1 committed slot .* and went on to slot"),
        (a_slot_that_is_missing_from_the_chain, r"contract 2"),
        (a_member_that_commits_twice, r"committed slot .* twice"),
        (an_old_member_that_contributes_to_a_newer_view, r"contributors: slot .*bravo~1"),
        (a_sample_used_by_two_members, r"contract 3: .*used by two members"),
        (a_sample_used_again_later, r"had been used before"),
        (a_sample_the_ledger_does_not_know, r"used but not entered as spent"),
        (a_joiner_with_another_state, r"contract 4: delta~1 took over state 0000000000000000"),
        (a_joiner_that_entered_at_another_step, r"contract 4: delta~1 took over the state at"),
        (a_living_member_that_is_put_out, r"contract 5: charlie~1 was put out by view .*though it was alive"),
        (an_undeclared_death_beside_declared_faults, r"bravo~1 died without a declared fault"),
        (a_survivor_that_misses_a_slot, r"delta~1 went on past slot"),
    ],
)
def test_what_breaks_the_contract_is_told_by_its_point(
    tmp_path: Path, change: Callable[[Script], None], told: str
) -> None:
    assert [line for line in broken(tmp_path, change) if re.search(told, line)]


def test_2_a_header_only_its_dying_root_knew_is_no_fork(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(10)
    seq, step, used, head = run.seq, run.step, run.used, run.head
    run.slot(only=["a~1"])  # the root commits alone ...
    run.say("a~1", "fault_injected", kind="sigkill", phase="optimizer")
    run.seq, run.step, run.used, run.head = seq, step, used, head
    run.now += 0.02
    run.view(["b~1", "c~1"], "a~1 died")  # ... and the others reduce again
    run.steps(20)
    run.close()
    findings = judged(run, tmp_path)
    assert findings[2].verdict == OK
    assert "1 slots were known to nobody but their dead" in findings[2].text
    assert findings[3].verdict == OK
    assert findings[5].verdict == OK


def test_2_a_checkpoint_of_a_redone_step(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(3)
    seq, step, used, head = run.seq, run.step, run.used, run.head
    lost = run.slot(only=["a~1"])
    run.say("a~1", "checkpoint", path="step=4.ckpt", step=4, head=lost)
    run.say("a~1", "fault_injected", kind="sigkill")
    run.seq, run.step, run.used, run.head = seq, step, used, head
    run.now += 0.02
    run.view(["b~1"], "a~1 died")
    run.steps(3)
    (line,) = violations(audit(run.write(tmp_path)))
    assert "checkpoint step=4.ckpt holds slot 4" in line


def test_3_an_epoch_that_ends_early(tmp_path: Path) -> None:
    findings = {f.point: f for f in audit(STORY.write(tmp_path), lengths={("", 2): 700})}
    assert findings[3].verdict == VIOLATED
    assert findings[3].details == ("epoch 2 of stream '' ended without positions [640, 700) of 700",)


def test_3_exactly_once_across_a_stop_and_resume(tmp_path: Path) -> None:
    run = Script(length=1000)
    run.found(["a", "b"])
    run.steps(10)
    again = Script(length=1000, now=run.now + 5, step=6, used=6 * 16)
    again.lines = run.lines
    again.found(["c", "d"])
    again.say("c~1", "resumed", step=6, ledger=[{"stream": "", "epoch": 0, "spans": [[0, 96]]}])
    again.steps(4)
    findings = judged(again, tmp_path)
    assert findings[2].verdict == OK
    assert "in 2 runs" in findings[2].text
    assert findings[3].verdict == OK
    assert "epoch 0: 160 samples of 1000, each once" in findings[3].details


def test_3_a_resume_that_repeats_samples(tmp_path: Path) -> None:
    run = Script(length=1000)
    run.found(["a", "b"])
    run.steps(10)
    again = Script(length=1000, now=run.now + 5, step=6, used=5 * 16)  # one step's samples are assigned again
    again.lines = run.lines
    again.found(["c", "d"])
    again.say("c~1", "resumed", step=6, ledger=[{"stream": "", "epoch": 0, "spans": [[0, 96]]}])
    again.steps(4)
    assert any("had been used before" in x for x in violations(audit(again.write(tmp_path))))


def test_5_a_newcomer_whose_first_view_no_header_carried_was_not_put_out(tmp_path: Path) -> None:
    run = Script()
    run.found(["alpha", "bravo", "charlie"])
    run.steps(3)
    source = run.process("delta")
    run.welcome("delta~1", source, "joiner")
    old = list(run.members)
    run.view([*old, "delta~1"], "delta joins", ("delta~1",))
    for lines in run.lines.values():  # decided, but charlie dies before a header carries it
        lines[:] = [x for x in lines if not (x["name"] == "view" and x["id"] == run.view_id)]
    run.members = old
    run.kill("charlie~1")
    run.join("delta", source=source)
    run.steps(3)
    assert violations(audit(run.write(tmp_path))) == []


def test_4_a_learner_that_the_end_of_the_job_overtook_owes_no_proof(tmp_path: Path) -> None:
    """A newcomer that was still a learner when the job ended has pulled a state of which no member had to write a hash:
    the audit does not ask for one.
    """
    run = copy.deepcopy(STORY)
    run.process("echo", "member-echo-1.jsonl")
    run.welcome("echo~1", "member-echo-1.jsonl", "joiner")
    head = commits(run, "delta~1")[-2]["header"]
    run.say("echo~1", "pull_started", seq=9, head=head, sources=["delta~1"])
    pulled = run.say("echo~1", "pull_done", nbytes=1, skipped=0, seconds=0.1, hash="unseen", head=head)
    for lines in run.lines.values():
        lines[:] = [x for x in lines if not (x["name"] == "state_hash" and x["head"] == head)]
    finding = judged(run, tmp_path)[4]
    assert finding.verdict == OK
    assert any("echo~1 pulled a state and never came in" in x for x in finding.details)
    run.say("echo~1", "joined", role="joiner", seq=9, step=9, view=run.view_id, head=head, at=pulled["t"] + 0.1)
    assert judged(run, tmp_path / "in")[4].verdict == NOT_SHOWN


def test_a_newcomer_that_is_killed_before_its_first_commit_left_a_whole_log(tmp_path: Path) -> None:
    """A newcomer that is killed before its first commit has a complete log, though it contributed to a slot that only
    the others committed.
    """
    run = Script()
    run.found(["a", "b"])
    run.steps(12)
    who = run.join("c")
    source = run.sources[who]
    run.kill(who)
    *before, last = [x for x in run.lines[source] if x["name"] != "committed"]
    for clock in ("t", "mono"):  # nothing that it says is later than the others' commit
        last[clock] = before[-1][clock]
    run.lines[source] = [*before, last]
    run.steps(12)
    run.close()
    findings = judged(run, tmp_path)
    assert [f.verdict for f in findings.values()] == [OK] * 5, verdict(findings.values())


def test_5_an_expected_death_needs_no_fault_event(tmp_path: Path) -> None:
    run = copy.deepcopy(STORY)
    lines = run.lines["member-bravo-1.jsonl"]
    lines[:] = [x for x in lines if x["name"] != "fault_injected"]
    assert violations(audit(run.write(tmp_path), expected_deaths=["bravo"])) == []


def test_5_real_deaths_are_remarks_when_nothing_was_injected(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    run.kill("b~1")
    run.steps(3)
    run.close()
    run.lines["member-b-1.jsonl"] = [x for x in run.lines["member-b-1.jsonl"] if x["name"] != "fault_injected"]
    findings = judged(run, tmp_path)
    assert findings[5].verdict == OK
    assert findings[5].details == ("b~1 died without a declared fault",)


def test_5_training_that_stops_after_a_death(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    run.now += 0.05
    run.say("b~1", "fault_injected", kind="sigkill", phase="backward")
    run.say("a~1", "notice", text="waiting", waiting=True, at=run.now + 9)
    findings = judged(run, tmp_path)
    assert findings[5].verdict == NOT_SHOWN


def test_5_a_thawed_member_that_never_noticed(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    thaw = run.freeze("b~1", 1.0)
    run.steps(100)
    run.say("b~1", "link_up", peer="a~1", at=thaw + 0.1)
    run.close()
    lines = violations(audit(run.write(tmp_path)))
    assert any("but was never fenced" in x for x in lines)


def test_5_a_fenced_member_that_does_not_come_back(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    thaw = run.freeze("b~1", 1.0)
    run.steps(20)
    run.say("b~1", "fenced", reason="excluded", at=thaw + 0.1)
    run.steps(100)
    run.close()
    lines = violations(audit(run.write(tmp_path)))
    assert any("did not join again" in x for x in lines)


def test_lost_lines_are_told_and_do_not_count_as_gaps(tmp_path: Path) -> None:
    run = Script()
    run.found(["a"])
    run.steps(10)
    own = run.lines["member-a-1.jsonl"]
    del own[6:9]
    own.insert(6, {**own[5], "name": "lost", "count": 3, "since": 0.0})
    findings = judged(run, tmp_path)
    assert {p: f.verdict for p, f in findings.items()} == dict.fromkeys(range(1, 6), NOT_SHOWN)
    assert any("3 log lines were lost" in d for f in findings.values() for d in f.details)


@pytest.mark.parametrize("name", ["a", "scheduler-like"])
def test_roles_come_from_the_opened_event_not_the_file_name(tmp_path: Path, name: str) -> None:
    run = Script()
    run.process("s", "scheduler-s-1.jsonl", role="scheduler")
    source = run.process(name, f"scheduler-{name}.jsonl", role="member")
    run.welcome(f"{name}~1", source, "founder")
    run.view([f"{name}~1"], "founding")
    run.steps(3)
    assert judged(run, tmp_path)[2].verdict == OK


# ------------------------------------------------------------------------------------------------ several jobs


def together(runs: tuple[Script, ...], where: Path) -> list[Finding]:
    for run in runs:
        run.write(where)
    return audit(where)


@pytest.mark.parametrize("finished", [True, False])
def test_the_same_job_twice_in_one_folder_is_two_jobs(tmp_path: Path, finished: bool) -> None:
    findings = together(two_jobs(finished=finished), tmp_path)
    assert violations(findings) == []
    assert findings[1].text.startswith("job 1: 12 steps in ")
    assert "; job 2: 5 steps in " in findings[1].text


def test_a_job_that_begins_while_members_of_the_former_shut_down(tmp_path: Path) -> None:
    first, second = two_jobs()
    late = second.lines["member-a-2.jsonl"][-1]["t"]
    first.say("b~1", "link_down", peer="a~1", at=late - 0.02)
    first.say("b~1", "closed", at=late - 0.01)
    first.lines["member-b-1.jsonl"] = [
        x for x in first.lines["member-b-1.jsonl"] if x["name"] != "closed" or x["t"] > second.now - 1
    ]
    findings = together((first, second), tmp_path)
    assert violations(findings) == []
    assert "job 2: 5 steps" in findings[1].text


def test_a_finished_job_is_followed_by_another_one_of_other_nodes(tmp_path: Path) -> None:
    first, _ = two_jobs()
    second = Script(pid=2, now=first.now + 3)
    second.found(["c"])
    second.steps(4)
    findings = together((first, second), tmp_path)
    assert violations(findings) == []
    assert "job 2: 4 steps" in findings[1].text


def test_one_process_that_trains_twice(tmp_path: Path) -> None:
    first, second = two_jobs()
    for node in ("a", "b"):
        first.lines[f"member-{node}-1.jsonl"] += second.lines.pop(f"member-{node}-2.jsonl")
    findings = together((first, second), tmp_path)
    assert violations(findings) == []
    assert "job 2: 5 steps" in findings[1].text


def test_an_old_member_that_trains_on_beside_the_second_job_is_a_witness(tmp_path: Path) -> None:
    first, second = two_jobs(finished=False)
    gap = second.now - first.now
    first.now = second.now
    first.steps(1)
    assert gap > 0
    assert violations(together((first, second), tmp_path))


def test_a_violation_in_one_of_two_jobs_is_told_with_its_number(tmp_path: Path) -> None:
    first, second = two_jobs()
    own = commits(first, "a~1")
    own[5]["spent"] = own[2]["spent"]
    lines = violations(together((first, second), tmp_path))
    assert lines
    assert all(line.startswith("contract 3: job 1: ") for line in lines)


def test_a_member_of_the_next_job_is_killed(tmp_path: Path) -> None:
    first, second = two_jobs()
    second.kill("b~1")
    second.steps(5)
    findings = together((first, second), tmp_path)
    assert violations(findings) == []
    assert findings[4].verdict == OK


def beside(chain: str, endpoint: str, pid: int) -> Script:
    """Returns a run with the same members and times as others made so, but its own chain, endpoint and pid."""
    run = Script(pid=pid)
    run.found(["a", "b"])
    run.steps(12)
    run.close()
    for lines in run.lines.values():
        for line in lines:
            if line["name"] in ("welcomed", "view"):
                line["chain"] = chain
            if line["name"] == "joined":
                line |= {"job": "default", "endpoint": endpoint}
    return run


def test_two_jobs_that_run_at_the_same_time_are_judged_apart(tmp_path: Path) -> None:
    runs = (beside("one", "127.0.0.1:1", 1), beside("two", "127.0.0.1:2", 2))
    runs[1].now += 0.03
    for lines in runs[1].lines.values():
        for line in lines:  # other weights, and so other headers
            line["t"] += 0.03
            for key in ("header", "prev", "head", "hash"):
                if line.get(key) and line[key] != GENESIS.hash:
                    line[key] = line[key][::-1]
    findings = together(runs, tmp_path)
    assert violations(findings) == []
    assert findings[1].text.startswith("job 1: 12 steps in ")
    assert "; job 2: 12 steps in " in findings[1].text


def test_one_job_that_split_in_two_is_judged_as_one(tmp_path: Path) -> None:
    """Two runs with one endpoint, or one beginning of the chain, are halves of one job: different headers of a slot are
    found.
    """
    runs = (beside("one", "127.0.0.1:1", 1), beside("two", "127.0.0.1:1", 2))
    own = commits(runs[1], "a~1")
    own[5]["header"] = "feedfeedfeedfeed"
    assert violations(together(runs, tmp_path))
