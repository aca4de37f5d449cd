"""Tests the soak's checks: each point of the contract is violated once, and the checks name that point."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak import runs as soak
from benchmarks.soak.checks import Freeze, Line, Parting, check, read
from benchmarks.soak.links import Hurt

LENGTH = 12


TABLE: list[dict[str, list[int]] | None] = [
    {"a": [0, 1, 2], "b": [3, 4, 5]},
    {"a": [6, 7, 8], "b": [9, 10, 11]},
    None,  # slot 3, a boundary: c comes in, and the second epoch begins
    {"a": [5, 4], "b": [3, 2], "c": [1, 0]},
    {"a": [11, 10], "b": [9, 8], "c": [7]},
    {"a": [6], "b": [], "c": []},
]
IDS = {"a": "a~1", "b": "b~2", "c": "c~3"}


def history() -> dict[str, list[Line]]:
    """Returns correct journals of members a~1 and b~2, which train two epochs of 12 samples; c~3 joins after
    two steps.
    """
    journals: dict[str, list[Line]] = {"a-1": [], "b-2": [], "c-3": []}
    clock = itertools.count(1)

    def say(name: str, what: str, **fields: Any) -> None:
        source = next(s for s in journals if s.startswith(name))
        journals[source].append({"what": what, "ns": next(clock), **fields})

    def stand(name: str, what: str, seq: int, step: int, kind: str, who: list[list[Any]]) -> None:
        prev = "" if seq == 0 else f"h{seq - 1}"
        state = {"head": f"h{seq}", "prev": prev, "who": who, "sha": f"state {step}"}
        say(name, what, member=IDS[name], seq=seq, step=step, kind=kind, **state)

    step = 0
    for name in "ab":
        stand(name, "entered", 0, 0, "boundary", [])
    for seq, deal in enumerate(TABLE, 1):
        if deal is None:
            who = [[IDS[n], 0.0] for n in "ab"]
            for name in "ab":
                stand(name, "commit", seq, step, "boundary", who)
            stand("c", "entered", seq, step, "boundary", who)
            continue
        for name, indices in deal.items():
            say(name, "draw", member=IDS[name], prev=f"h{seq - 1}", indices=indices)
        step += 1
        for name in deal:
            stand(name, "commit", seq, step, "step", [[IDS[n], len(i) / 3] for n, i in deal.items()])
    return journals


@pytest.fixture
def journals() -> dict[str, list[Line]]:
    return history()


def line(lines: list[Line], what: str, **fields: Any) -> Line:
    return next(x for x in lines if x["what"] == what and all(x[k] == v for k, v in fields.items()))


def violated(journals: dict[str, list[Line]], **more: Any) -> set[int]:
    return {point for point, problems in check(journals, LENGTH, **more).problems.items() if problems}


def test_a_clean_history_violates_nothing_and_was_looked_at(journals):
    verdict = check(journals, LENGTH)
    assert not any(verdict.problems.values()), verdict.problems
    assert verdict.looked_at["steps"] == 5
    assert verdict.looked_at["joins compared with donors"] == 1
    assert verdict.looked_at["headers with several states compared"] == 7
    assert verdict.looked_at["samples"] == 2 * LENGTH


def test_point_1_a_state_that_differs_at_one_header(journals):
    line(journals["b-2"], "commit", seq=5)["sha"] = "other"
    assert violated(journals) == {1}


def test_point_2_a_step_done_again(journals):
    for lines in journals.values():
        for x in lines:
            if x["what"] == "commit" and x["seq"] >= 5:
                x["step"] -= 1
    assert violated(journals) == {2}


def test_point_2_a_header_told_in_two_ways(journals):
    line(journals["b-2"], "commit", seq=4)["who"] = [["a~1", 1.0]]
    assert 2 in violated(journals)


def test_a_newcomer_need_not_know_who_brought_what_to_the_header_that_let_it_in(journals):
    line(journals["c-3"], "entered")["who"] = None
    assert violated({"c-3": journals["c-3"], **journals}) == set()


def test_point_3_a_sample_used_twice(journals):
    draw = [x for x in journals["a-1"] if x["what"] == "draw"]
    draw[1]["indices"] = list(draw[0]["indices"])
    assert violated(journals) == {3}


def test_point_3_samples_left_out_at_the_end(journals):
    draw = [x for x in journals["a-1"] if x["what"] == "draw" and x["indices"]]
    draw[-1]["indices"] = draw[-1]["indices"][:-1]
    assert violated(journals) == {3}


def test_point_3_weight_without_a_draw(journals):
    journals["c-3"] = [x for x in journals["c-3"] if not (x["what"] == "draw" and x["prev"] == "h4")]
    assert 3 in violated(journals)


def test_point_4_a_joiner_with_another_state(journals):
    line(journals["c-3"], "entered", seq=3)["sha"] = "stale"
    assert violated(journals) == {4}


def test_point_5_a_committed_step_that_the_job_lost(journals):
    assert check(journals, LENGTH).looked_at["steps lost"] == 0
    lost = copy.deepcopy(line(journals["b-2"], "commit", seq=6)) | {"head": "lost", "seq": 5, "prev": "h4", "step": 4}
    at = journals["b-2"].index(line(journals["b-2"], "commit", seq=5))
    journals["b-2"].insert(at, lost)
    assert 5 in violated(journals)
    assert check(journals, LENGTH).looked_at["steps lost"] == 1


def test_a_header_that_died_with_its_only_holder_is_no_violation(journals):
    last = copy.deepcopy(line(journals["c-3"], "commit", seq=6)) | {"head": "rival", "sha": "unknown"}
    at = journals["c-3"].index(line(journals["c-3"], "commit", seq=6))
    journals["c-3"] = [*journals["c-3"][:at], last]
    verdict = check(journals, LENGTH)
    assert not any(verdict.problems.values()), verdict.problems
    assert verdict.looked_at["headers known to nobody but their dead"] == 1


def test_a_thawed_root_may_draw_once_more_before_it_hears_that_its_last_header_counts_nowhere(journals):
    last = copy.deepcopy(line(journals["c-3"], "commit", seq=6)) | {"head": "rival", "sha": "unknown"}
    at = journals["c-3"].index(line(journals["c-3"], "commit", seq=6))
    journals["c-3"] = [*journals["c-3"][:at], last]
    journals["c-3"].append({"what": "draw", "ns": last["ns"], "member": "c~3", "prev": "rival", "indices": [0]})
    ns = fence(journals, back=True)
    assert not violated(journals, freezes=[Freeze("c", 3, ns - 900, ns - 100)])


def fence(journals: dict[str, list[Line]], *, back: bool, lasted: int = 0) -> int:
    """Adds c's removal and, with `back`, its return to the journals; returns the time of the removal (ns), `lasted` ns
    after c was last known to be alive.
    """
    ns = journals["c-3"][-1]["ns"] + 1000 + lasted
    journals["c-3"].append({"what": "fenced", "ns": ns, "since": ns - lasted})
    if back:
        journals["c-3"].append(
            copy.deepcopy(line(journals["a-1"], "commit", seq=6)) | {"what": "entered", "ns": ns + 1}
        )
    return ns


def test_point_5_somebody_awake_was_put_out(journals):
    fence(journals, back=True)
    assert violated(journals) == {5}


def test_a_frozen_member_may_be_put_out_if_it_comes_back(journals):
    ns = fence(journals, back=True)
    assert not violated(journals, freezes=[Freeze("c", 3, ns - 900, ns - 100)])


@pytest.mark.parametrize(("lasted", "points"), [(9.5e9, set()), (0, {5})])
def test_coming_in_again_may_take_long_but_being_put_out_may_not_come_late(journals, lasted, points):
    ns = fence(journals, back=True, lasted=int(lasted))
    assert violated(journals, freezes=[Freeze("c", 3, int(ns - 9e9), int(ns - 8e9))]) == points


@pytest.mark.parametrize(("killed", "points"), [((), {5}), (("c-3",), set())])
def test_a_frozen_member_that_is_put_out_comes_back_unless_it_was_killed(journals, killed, points):
    ns = fence(journals, back=False)
    assert violated(journals, freezes=[Freeze("c", 3, ns - 900, ns - 100)], killed=killed) == points


def parting(journals: dict[str, list[Line]], *names: str, undecided: bool = False) -> Parting:
    """Returns the record of a cut of these members from all others that lasts through the second epoch."""
    during = [x["ns"] for x in journals["a-1"] if x["what"] == "commit" and x["seq"] > 3]
    return Parting("split", names, min(during) - 1, max(during) + 2000, undecided)


def without_c(journals: dict[str, list[Line]]) -> dict[str, list[Line]]:
    """Removes c's contributions after its join, as if it had not come back; a uses c's samples instead."""
    journals["c-3"] = journals["c-3"][:1]
    indices = {"h3": [5, 4, 1, 0], "h4": [11, 10, 7]}
    for lines in journals.values():
        for x in lines:
            x["who"] = [w for w in x["who"] if w[0] != "c~3"] if "who" in x else []
            if x["what"] == "draw" and x["member"] == "a~1":
                x["indices"] = indices.get(x["prev"], x["indices"])
    return journals


def test_a_member_that_is_cut_off_may_be_put_out_if_it_comes_back(journals):
    without_c(journals)
    ns = fence(journals, back=True)
    assert not violated(journals, partings=[parting(journals, "c")])
    late = Parting("split", ("c",), ns - 9_000_000_000, ns - 8_000_000_000, undecided=True)
    assert violated(journals, partings=[late]) == {5}


def test_point_5_nobody_goes_on_without_a_member_that_is_cut_off(journals):
    assert violated(journals, partings=[parting(journals, "c")]) == {5}
    assert not violated(journals, partings=[parting(journals, "c", undecided=True)])
    excused = replace(parting(journals, "c"), vouched_for=True)
    assert not violated(journals, partings=[excused])
    counts = check(journals, LENGTH, partings=[excused]).looked_at
    assert counts["members cut off from all that a new scheduler waited for"] == 1


@pytest.mark.parametrize(
    ("kind", "struck", "vouched_for"),
    [
        ("island", [(5_000_000_000, "scheduler_sigstop", "s1")], True),
        ("island", [(6_500_000_000, "scheduler_sigkill", "s1")], True),
        ("island", [(9_000_000_000, "scheduler_sigkill", "s1")], False),
        ("island", [(1_000_000_000, "scheduler_sigkill", "s1")], False),
        ("island", [(21_000_000_000, "scheduler_sigkill", "s1")], False),
        ("island", [(6_500_000_000, "etcd_sigkill", "etcd-1")], False),
        ("split", [(6_500_000_000, "scheduler_sigkill", "s1")], False),
    ],
)
def test_only_a_scheduler_that_never_heard_an_island_may_wait_for_it(kind, struck, vouched_for):
    hurt = Hurt(kind, set(), ("c",), 14.0, 6_000_000_000, 20_000_000_000)
    assert soak.parting(hurt, struck) == Parting(kind, ("c",), hurt.start, hurt.stop, False, vouched_for)


@pytest.mark.parametrize(("lasted_s", "undecided"), [(0.9, False), (5.98, True)])
def test_a_blink_is_judged_by_how_long_it_was(lasted_s, undecided):
    hurt = Hurt("blink", set(), ("c",), 0.62, 6_000_000_000, 6_000_000_000 + int(lasted_s * 1e9))
    declared = Parting("blink", ("c",), hurt.start, hurt.stop, undecided=True)
    assert soak.parting(hurt, []) == (declared if undecided else None)


def test_graphs_cut_in_two_are_counted(journals):
    verdict = check(without_c(journals), LENGTH, partings=[parting(journals, "c")])
    assert verdict.looked_at["graphs cut in two of which one side went on"] == 1


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "a-1.jsonl").write_text('{"what":"draw","ns":1}\n{"what":"comm')
    assert read(tmp_path) == {"a-1": [{"what": "draw", "ns": 1}]}
