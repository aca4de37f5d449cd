"""The benchmark of many members: its sums, its stand-ins in virtual time, and what it reads out of messages."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from benchmarks.common import Result
from benchmarks.scale import machine, processes, real, reduces, steps
from benchmarks.scale.crowd import carrier, kind_of, view_of
from benchmarks.scale.figures import TooLongError, at_most, exponent
from chaos_lightning.protocol.codec import wrap_to_member
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Fence,
    LinkSpec,
    Member,
    NextView,
    ToMember,
    View,
    ViewId,
)


def test_exponent_is_that_of_a_power() -> None:
    assert exponent({n: 3e-6 * n**1.7 for n in (32, 128, 512, 1024)}) == pytest.approx(1.7)
    assert exponent({32: 0.5, 1024: 0.5}) == pytest.approx(0.0)


def test_a_case_ends_at_its_limit_and_the_next_one_has_its_own() -> None:
    def spin() -> None:
        with at_most(0.05):
            while True:
                pass

    with pytest.raises(TooLongError, match=r"over 0\.05 s"):
        spin()
    with at_most(5.0):
        pass


@pytest.mark.parametrize("graph", list(machine.GRAPHS))
@pytest.mark.parametrize("size", [8, 32])
def test_members_found_a_job_join_leave_and_die(size: int, graph: str) -> None:
    case = machine.Case(size, machine.GRAPHS[graph], seed=1)
    case.found()
    assert set(case.stage.view.ids()) == set(case.stage.members)
    case.change()
    case.stage.machine.validate_state()
    assert len(case.stage.view.members) == size
    assert {kind: len(found) for kind, found in case.seconds.items()} == {
        "founding": 1, "join": 2, "leave": 1, "death": 1,
    }  # fmt: skip
    assert all(s > 0 for found in case.seconds.values() for s in found)
    assert min(case.record_nbytes) > 0
    assert not case.stage.said["Fence"]
    assert case.stage.said["Decide"] >= 2 * size - 1
    assert case.heartbeat_us(16) > 0
    assert case.tick_us() > 0


def test_members_of_a_view_go_through_steps_in_which_all_commit() -> None:
    case = machine.Case(8, 8, seed=1)
    case.found()
    members = steps.Members(case.stage.view)
    members.step()
    members.step()
    assert {m.step for m in members.machines.values()} == {2}
    assert set(members.cpu_s) == set(case.stage.view.ids())


def test_a_case_that_takes_too_long_is_told_and_missed() -> None:
    result = Result("scale")
    args = argparse.Namespace(seed=1, rounds=1, limit_s=0.001)
    assert machine.measure_size(result, 16, "default", args) == {}
    assert result.left_out == ["founding, 16 members, default graph"]
    assert "over 0.001 s of CPU" in result.notes[0]


def test_figures_of_both_graphs_are_told_and_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    args = argparse.Namespace(seed=1, rounds=1, limit_s=60.0, sizes=[8], out=str(out), quick=False, check=False)
    result = Result("scale")
    machine.measure(result, args)
    assert result.finish(args) == 0
    written = json.loads(out.read_text())
    assert set(written["details"]["CPU seconds, default graph"]) == set(machine.KINDS)
    names = [figure["name"] for figure in written["figures"]]
    assert len(names) == len(set(names))
    assert not any(name.startswith("exponent") for name in names)


def test_all_reduces_are_predicted_for_the_graph_that_members_get() -> None:
    view = reduces.founded(17, 1)
    sparse, full = (reduces.links_of(view, 1e9, full=full) for full in (False, True))
    assert len(full) == 17 * 16 // 2
    assert set(sparse) <= set(full)
    found = reduces.plans(view, 1e9, 1 << 20)
    assert found["sparse"].seconds >= found["full"].seconds > 0


def test_connections_are_compared_with_the_links_of_the_view_that_stood() -> None:
    members = tuple(Member(f"{name}~1", name, "host", "127.0.0.1", 1) for name in "abc")
    ring = (LinkSpec("a~1", "b~1"), LinkSpec("b~1", "c~1"))
    views = [View(ViewId(1, 1), NO_VIEW, members), View(ViewId(1, 2), ViewId(1, 1), members, links=ring)]
    samples = [{"a": 2, "b": 4, "c": 2}, {"a": 5, "b": 5}]
    assert real.beyond_links(samples, views) == ([1, 2, 1], [1, 2, 1])


# ------------------------------------------------------------------------------------------------ stand-ins over gRPC


def encoded(message: ToMember) -> bytes:
    data: bytes = wrap_to_member(message).SerializeToString()
    return data


def test_the_number_of_a_view_is_read_without_decoding_it() -> None:
    members = tuple(Member(f"n{i}~{i}", f"n{i}", "host", "10.0.0.1", 1) for i in range(300))
    for number in (ViewId(1, 1), ViewId(1, 300), ViewId(1_000_000, 2)):
        view = View(number, NO_VIEW, members, reason="x" * 1000)
        for kind, message in (("decide", Decide(view, GENESIS)), ("next_view", NextView(view))):
            assert kind_of(encoded(message)) == kind
            assert view_of(encoded(message)) == number
    assert kind_of(encoded(Fence("gone"))) == "fence"
    assert kind_of(b"") == ""


def test_members_know_one_header_for_a_view() -> None:
    assert carrier(ViewId(1, 7)).hash == carrier(ViewId(1, 7)).hash != carrier(ViewId(1, 8)).hash


def test_what_several_crowds_saw_is_put_together() -> None:
    seen = processes.Seen()
    for talk, last, now in ((3, 20, 2), (2, 30, 2)):
        views = [[1, 2, talk, last]]
        seen.add({"talk": talk, "broken": 1, "fenced": [f"m{talk}"], "views": views, "now": [[1, 2]] * now})
    assert (seen.talk, seen.broken, seen.fenced) == (5, 2, ["m3", "m2"])
    assert seen.now == {(1, 2): 4}
    assert seen.told(5, 25) == 30
    assert seen.told(5, 30) == seen.told(6, 0) == 0


def test_a_real_scheduler_founds_a_job_of_stand_ins_and_hears_of_a_death(tmp_path: Path) -> None:
    with processes.job(processes.Kind("plain"), 8, tmp_path) as made:
        assert made.found() > 0
        share, hurt = made.quiet(0.2)
        assert share >= 0
        assert hurt == 0
        since = time.monotonic_ns()
        assert made.death() <= (time.monotonic_ns() - since) / 1e9
        assert made.restart() > 0
        seen = made.look()
    assert seen.fenced == []
    assert seen.talk == made.size == 6
