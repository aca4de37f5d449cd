"""Tests the benchmark of many members: its sums, its stand-ins in virtual time, and its decoding of messages."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common import Result
from benchmarks.scale import machine, processes, real, reduces, steps
from benchmarks.scale.fake import StandIn, carrier
from benchmarks.scale.figures import TooLongError, at_most, exponent
from chaos_lightning.membership.past import Past
from chaos_lightning.membership.recovery import rule
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Fence,
    FromMember,
    LinkSpec,
    Member,
    PlanSpec,
    Prepare,
    Refused,
    Released,
    Report,
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
    case.halve()
    case.stage.machine.validate_state()
    if case.stage.view.plan.trees:
        before = case.stage.view
        assert case.redraw() > 0
        assert (case.stage.view.ids(), case.stage.view.links) == (before.ids(), before.links)
        assert case.stage.view.plan != before.plan
        case.stage.machine.validate_state()
    else:
        assert (size, graph) != (32, "default")
    assert len(case.stage.view.members) == size
    assert {kind: len(found) for kind, found in case.seconds.items()} == {
        "founding": 1, "join": 2, "leave": 1, "death": 1, machine.HALF: 1,
    }  # fmt: skip
    assert all(s > 0 for found in case.seconds.values() for s in found)
    assert min(case.record_nbytes) > 0
    assert case.stage.put_out == []
    assert case.stage.meter.said["Decide"] >= 2 * size - 1
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
    assert machine.measure_size(result, 128, "default", args) == {}
    assert result.left_out == ["founding, 128 members, default graph"]
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


def test_an_all_reduce_that_is_slower_over_the_default_graph_is_missed_on_loopback_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, plans = reduces.founded(17, 1), {"sparse": PlanSpec("chain"), "full": PlanSpec()}
    monkeypatch.setattr(reduces, "nodes", lambda *_, **__: contextlib.nullcontext([]))
    monkeypatch.setattr(
        reduces, "all_reduce", lambda _, view, seq: (1.16 if view.plan == plans["sparse"] else 1.0, 1.0)
    )
    for where in (reduces.LOOPBACK, "cards"):
        result = Result("scale")
        reduces.measure_in(result, view, plans, argparse.Namespace(mib=1, reduces=2), where)
        assert [figure.bound for figure in result.figures if figure.ok is False] == [reduces.BOUND]


def test_processes_that_say_nothing_are_left_out_and_the_benchmark_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise TimeoutError("worker 1 said nothing for 120 s")

    monkeypatch.setattr(reduces, "predict", lambda *_: None)
    monkeypatch.setattr(reduces, "cards", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(reduces, "nodes", silent)
    result = Result("scale")
    reduces.measure(result, argparse.Namespace(quick=True, members=17, seed=1, card_mbps=100, mib=1, reduces=2))
    assert result.left_out == ["all-reduces on loopback", "all-reduces in namespaces"]


def test_each_record_of_a_death_is_held_against_its_bound() -> None:
    case, result = machine.Case(machine.BOUNDED_AT, 8, seed=1), Result("scale")
    case.stage.meter.records.append(("view", 1))

    def change() -> None:
        case.record_nbytes += [1, 1, 10_001]
        case.standing_s.append(1.0)
        for kind in machine.KINDS:
            case.seconds[kind].append(0.1)

    case.change = change  # type: ignore[method-assign]
    dict(machine.parts_of(case, result, "", argparse.Namespace(rounds=1)))["a join, a leave and a death"]()
    assert [figure.value for figure in result.figures if figure.ok is False] == [10.001]


def test_connections_are_compared_with_the_links_of_the_view_that_stood() -> None:
    members = tuple(Member(f"{name}~1", name, "host", "127.0.0.1", 1) for name in "abc")
    ring = (LinkSpec("a~1", "b~1"), LinkSpec("b~1", "c~1"))
    views = [View(ViewId(1, 1), NO_VIEW, members), View(ViewId(1, 2), ViewId(1, 1), members, links=ring)]
    samples = [{"a": 2, "b": 4, "c": 2}, {"a": 5, "b": 5}]
    assert real.beyond_links(samples, views) == ([1, 2, 1], [1, 2, 1])


# ------------------------------------------------------------------------------------------------ stand-ins


class Quiet:
    """Environment of stand-ins that stores their messages, and runs delayed calls at once."""

    def __init__(self) -> None:
        self.said: defaultdict[str, list[FromMember]] = defaultdict(list)
        self.put_out: list[str] = []

    def say(self, one: StandIn, message: FromMember) -> None:
        self.said[one.id].append(message)

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        action()

    def lives(self, member: str) -> bool:
        return True

    def welcomed(self, one: StandIn) -> None: ...

    def asked(self, one: StandIn) -> None: ...

    def foretold(self, one: StandIn, view: View) -> None: ...

    def entered(self, one: StandIn, view: View, *, decided: bool) -> None: ...

    def out(self, one: StandIn, message: Fence | Refused | Released) -> None:
        self.put_out.append(message.reason)


def test_a_recovery_puts_nobody_out_whom_the_header_of_a_view_has_not_reached() -> None:
    world = Quiet()
    members = tuple(Member(f"n{i}~{i}", f"n{i}", "host", "10.0.0.1", 1) for i in range(4))
    ids = tuple(m.id for m in members)
    first = View(ViewId(1, 1), NO_VIEW, members[:3], joiners=ids[1:3])
    second = View(ViewId(1, 2), first.id, members, joiners=ids[3:])
    ones = [StandIn(world, m.name, i, id=m.id) for i, m in enumerate(members)]
    for one in ones[:3]:
        one.hear(Decide(first, GENESIS))
    header = carrier(ones[0].header, second)
    for one in ones[:2]:
        one.carried(header, second)
    for one in ones:
        one.hear(Prepare(ViewId(1, 3), "a death"))
        one.carried(header, second)  # too late: it has promised
    reports = {member: said[-1] for member, said in world.said.items()}
    given = {m: report for m, report in reports.items() if isinstance(report, Report)}
    ruling = rule(second, Past.of([first, second]), given)
    assert (ruling.base, ruling.hand_on, ruling.rejoin) == (header, True, ())
    assert (ruling.members, ruling.waiting) == (ids[:3], ids[3:])
    for one in ones[:3]:
        one.hear(Decide(View(ViewId(1, 3), second.id, members[:3]), header, hand_on=True))
    assert {one.header for one in ones[:3]} == {header}
    assert all(one.loaded and one.view == ViewId(1, 3) for one in ones[:3])
    assert world.put_out == []


def test_a_stand_in_goes_on_from_no_header_but_its_own() -> None:
    world = Quiet()
    members = tuple(Member(f"n{i}~{i}", f"n{i}", "host", "10.0.0.1", 1) for i in range(2))
    one = StandIn(world, "n0", 0, id="n0~0")
    one.hear(Decide(View(ViewId(1, 1), NO_VIEW, members), GENESIS))
    other = carrier(carrier(GENESIS, View(ViewId(1, 2), ViewId(1, 1), members)), View(ViewId(1, 3), NO_VIEW, members))
    one.hear(Decide(View(ViewId(1, 4), ViewId(1, 1), members), other))
    assert len(world.put_out) == 1
    assert other.hash in world.put_out[0]


def test_what_several_crowds_saw_is_put_together() -> None:
    seen = processes.Seen()
    for talk, last, now in ((3, 20, 2), (2, 30, 2)):
        views = [[1, 2, 5, True, talk, last], [1, 3, 5, False, talk, 90]]
        seen.add({"talk": talk, "broken": 1, "fenced": [f"m{talk}"], "views": views, "now": [[1, 2]] * now})
    assert (seen.talk, seen.broken, seen.fenced) == (5, 2, ["m3", "m2"])
    assert seen.now == {(1, 2): 4}
    assert seen.told(5, 25) == 30
    assert seen.told(5, 30) == seen.told(6, 0) == 0


def test_only_the_decide_of_a_view_of_just_so_many_counts_as_told() -> None:
    seen = processes.Seen()
    views = [[1, 2, 4, False, 4, 50], [1, 3, 5, True, 4, 60]]
    seen.add({"talk": 4, "broken": 0, "fenced": [], "views": views, "now": []})
    assert seen.told(4, 0) == 0


def test_the_largest_job_has_five_minutes_in_which_nobody_may_be_put_out() -> None:
    args = argparse.Namespace(quick=False, connections=[], keyed=[], minutes=0.0, before="")
    found = processes.cases(args)
    assert [case.size for case in found] == [64, 256, 512, 256]
    assert [case.minutes for case in found] == [0.75, 0.75, 5.0, 0.75]
    args.before = "."
    beside = processes.cases(args)
    assert [case.kind.peer for case in beside] == [False] * 5 + [True] * 4
    assert [case.size for case in beside if case.kind.peer] == [32, 64, 256, 512]


@pytest.mark.slow
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
