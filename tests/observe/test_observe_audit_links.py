"""Tests which removals of members the audit takes for justified, and which not, when the run's links were broken on
purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from observe_synthetic import Script

from chaos_lightning.observe.audit import audit, violations


def cut(run: Script, *pairs: tuple[str, str], mended: bool = False) -> None:
    """Writes that the harness cuts (or mends) links between these pairs of nodes."""
    file = "harness-h-1.jsonl"
    if file not in run.lines:
        run.process("h", file, role="harness")
    for node, peer in pairs:
        run.say("", "fault_injected", file=file, node=node, peer=peer, kind="restore" if mended else "cut")


def put_out(members: list[str], *, links: list[list[str]] | None = None) -> Script:
    """Returns a run of four members in which only `members` go on, and the others write that they are fenced."""
    run = Script()
    run.found(["a", "b", "c", "d"])
    for line in [x for lines in run.lines.values() for x in lines if x["name"] == "view" and links]:
        line["links"] = links
    run.steps(5)
    before = run.members
    run.now += 6.0
    run.view(members, "links hold the members together no more")
    for member in set(before) - set(members):
        run.say(member, "fenced", reason="no link leads to those who go on", at=run.now + 0.01)
    run.steps(3)
    return run


def at_the_fifth_step(run: Script, *pairs: tuple[str, str], mended: tuple[tuple[str, str], ...] = ()) -> None:
    """Writes, before the removals, that these links are cut after the fifth step and some mended."""
    fifth = [x for x in run.lines[run.sources["a~1"]] if x["name"] == "committed"][4]
    after, run.now = run.now, fifth["t"] + 0.05
    cut(run, *pairs)
    run.now += 0.5
    cut(run, *mended, mended=True)
    run.now = after


def complaints(run: Script, where: Path) -> list[str]:
    return [x for x in violations(audit(run.write(where))) if "was put out" in x or "without a declared" in x]


def test_5_a_member_is_put_out_though_links_lead_round_the_one_that_was_cut(tmp_path: Path) -> None:
    run = put_out(["b~1", "c~1", "d~1"])
    at_the_fifth_step(run, ("a", "b"))
    assert [x for x in complaints(run, tmp_path) if "a~1 was put out" in x]


@pytest.mark.parametrize("side", ["a", "ab"])
def test_5_the_smaller_side_of_a_graph_that_was_cut_in_two_is_put_out(tmp_path: Path, side: str) -> None:
    rest = [n for n in "abcd" if n not in side]
    run = put_out([f"{n}~1" for n in rest])
    at_the_fifth_step(run, *((a, b) for a in side for b in rest))
    assert not complaints(run, tmp_path)


def test_5_the_larger_side_of_a_graph_that_was_cut_in_two_is_put_out(tmp_path: Path) -> None:
    run = put_out(["a~1"])
    at_the_fifth_step(run, ("a", "b"), ("a", "c"), ("a", "d"))
    assert len(complaints(run, tmp_path)) == 3


def test_5_one_cut_parts_a_chain_of_members(tmp_path: Path) -> None:
    run = put_out(["a~1", "b~1"], links=[["a~1", "b~1"], ["b~1", "c~1"], ["c~1", "d~1"]])
    at_the_fifth_step(run, ("b", "c"))
    assert not complaints(run, tmp_path)


def test_5_links_that_were_mended_in_time_excuse_nobody(tmp_path: Path) -> None:
    run = put_out(["b~1", "c~1", "d~1"])
    pairs = (("a", "b"), ("a", "c"), ("a", "d"))
    at_the_fifth_step(run, *pairs[:1], mended=pairs[:1])
    run.now += 20.0
    at_the_fifth_step(run, *pairs[1:2])
    assert [x for x in complaints(run, tmp_path) if "a~1 was put out" in x]


def test_5_a_newcomer_whose_view_a_recovery_overtook_and_that_is_cut_off_later(tmp_path: Path) -> None:
    """A newcomer was announced but in no view when a recovery without it was decided; that it is fenced later proves
    nothing about that time.
    """
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    founders = list(run.members)
    run.process("d")
    run.welcome("d~1", "member-d-1.jsonl", "joiner")
    # The scheduler announced it, and no header carried the view.
    run.number += 1
    file = "scheduler-s-1.jsonl"
    run.say("", "view", file=file, id=run.view_id, members=[*founders, "d~1"], joiners=["d~1"], reason="d joins")
    run.now += 0.05
    run.view(founders, "the link between a~1 and b~1 was made anew")
    run.steps(1)
    run.slot("boundary")
    run.view([*founders, "d~1"], "d joins", ("d~1",))
    run.say("d~1", "joined", role="joiner", seq=run.seq, step=run.step, view=run.view_id, head=run.head)
    run.steps(5)
    cut(run, ("d", "a"), ("d", "b"), ("d", "c"))
    run.now += 4.0
    run.view(founders, "no link leads to d~1")
    run.say("d~1", "fenced", reason="no link leads to a~1")
    run.steps(3)
    assert not complaints(run, tmp_path)
