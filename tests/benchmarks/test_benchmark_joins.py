"""Tests the figures that the join benchmark computes from the reports of hosts and newcomer."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from silent_worker import Silent

from benchmarks.common import Result
from benchmarks.join import __main__ as main
from benchmarks.join import visits as join
from benchmarks.join.visits import House, Visit, Visits
from benchmarks.world import CALM, Seen, Step

MS = 1_000_000


def steps(times_ms: list[tuple[float, int]], first_ms: float = 0.0) -> list[Step]:
    """Returns consecutive steps with these lengths (ms) and numbers of contributors."""
    at = first_ms
    found = [Step(round(at * MS), 0, 0, "h0", 2, 0, 0)]
    for number, (length, size) in enumerate(times_ms, 1):
        at += length
        found.append(Step(round(at * MS), number, number, f"h{number}", size, 0, 0))
    return found


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    """Two hosts with steps of 10 ms and a newcomer that calls at 400 ms; then one step of 36 ms, and joint ones of 27,
    16 and 15 ms.
    """
    lengths = [(10.0, 2)] * 42 + [(36.0, 2)] + [(27.0, 3), (16.0, 3)] + [(15.0, 3)] * 60
    made = House(lambda name, guest: Silent(), random.Random(0))  # type: ignore[arg-type, return-value]
    made.hosts = ["w0", "w1"]
    for host in made.hosts:
        made.members[host] = Seen(Silent(), steps(lengths))  # type: ignore[arg-type]
        # 4 ms of CPU in usual steps, 6 in those of three, 5 more in the long one, 3 more in the first joint one.
        costs = [0.0] + [4.0] * 42 + [9.0] + [9.0, 6.0] + [6.0] * 60
        made.cpu[host] = {n: c / 1e3 for n, c in enumerate(itertools.accumulate(costs))}
    monkeypatch.setattr(made, "calm", lambda size, count=CALM: None)
    monkeypatch.setattr(made, "pump", lambda ready, what: None)
    monkeypatch.setattr(made, "hashes", lambda: {("h", "same")})

    def invite(name: str) -> None:
        words = {"going": [(400 * MS, 1.0)], "contributed": [(483 * MS, 1.25)]}
        made.members[name] = Seen(Silent(), words=words)  # type: ignore[arg-type]

    monkeypatch.setattr(made, "invite", invite)
    usual = {2: 0.010, 3: 0.015}
    monkeypatch.setattr(made, "usual_of", lambda size: usual[size])
    return made


def test_a_join_is_booked_by_the_hosts_steps(house: House) -> None:
    found = join.visit(house)
    assert found.to_contribution == pytest.approx(0.083)
    assert found.longest == pytest.approx(0.026)
    assert found.joint == pytest.approx(0.012)
    assert found.calm == pytest.approx(0.0)
    assert found.steps == 3
    assert found.cpu == pytest.approx(0.25)
    assert found.hosts_cpu == pytest.approx(2 * 0.008)
    assert found.equal
    assert set(house.members) == {"w0", "w1"}
    assert house.past[-1].worker.sent == [("go",), ("leave",)]  # type: ignore[attr-defined]


def test_states_that_differ_are_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "hashes", lambda: {("h", "one"), ("h", "other")})
    visits = Visits([join.visit(house)])
    result = Result("join")
    join.report(result, "replay, 50 MiB", visits, 50.0, bounded=True)
    (figure,) = (f for f in result.figures if "states differ" in f.name)
    assert (figure.value, figure.ok) == (1, False)


def test_who_cannot_leave_may_die(house: House) -> None:
    join.visit(house, leave=False)
    assert any(name.startswith("g") for name in house.doomed)
    assert house.past[-1].worker.sent == [("go",)]  # type: ignore[attr-defined]


def test_the_usual_step_is_of_as_many_members() -> None:
    made = House(lambda name, guest: Silent(), random.Random(0))  # type: ignore[arg-type, return-value]
    made.hosts = ["w0"]
    made.members["w0"] = Seen(Silent(), steps([(10.0, 2)] * 5 + [(20.0, 3)] * 5))  # type: ignore[arg-type]
    assert made.usual_of(2) == pytest.approx(0.010)
    assert made.usual_of(3) == pytest.approx(0.020)


def test_what_a_guest_says_is_kept_beside_what_members_say() -> None:
    made = House(lambda name, guest: Silent(), random.Random(0))  # type: ignore[arg-type, return-value]
    made.members["g"] = Seen(Silent())  # type: ignore[arg-type]
    for words in (("going", 5, 0.5), ("cpu", 7, 0.75), ("in", 6, "g~1")):
        made._hear("g", *words)
    assert made.members["g"].said("going") == (5, 0.5)
    assert made.cpu["g"] == {7: 0.75}
    assert made.members["g"].entries == [6]


def visited(**more: Any) -> Visit:
    values = {
        "to_contribution": 0.4, "longest": 0.05, "joint": 0.02, "calm": 0.01, "usual": 0.04, "usual_joint": 0.06,
        "steps": 5, "cpu": 0.2, "hosts_cpu": 0.1, "equal": True, "control": 0.04,
    }  # fmt: skip
    return Visit(**{**values, **more})


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ({}, []),
        ({"to_contribution": 0.51}, ["to its first contribution"]),
        ({"longest": 0.061, "control": 0.06}, ["hosts' longest step beyond usual, median"]),
        ({"control": 0.039}, ["longest / control"]),
        ({"joint": 0.061}, ["first joint step"]),
    ],
)
def test_bounds_are_those_of_the_size(more: dict[str, float], missed: list[str]) -> None:
    result = Result("join")
    join.report(result, "replay, 50 MiB", Visits([visited(**more)] * 3), 50.0, bounded=True)
    found = [f.name for f in result.figures if f.ok is False]
    assert len(found) == len(missed)
    assert all(words in name for words, name in zip(missed, found, strict=True))
    larger = Result("join")
    join.report(larger, "replay, 200 MiB", Visits([visited(**more)] * 3), 200.0, bounded=True)
    assert sum(f.bound is not None for f in larger.figures) == sum(f.bound is not None for f in result.figures)


def test_what_has_no_bound_misses_none() -> None:
    result = Result("join")
    join.report(result, "pause, 50 MiB", Visits([visited(longest=9.0, joint=9.0, equal=False)]), 50.0, bounded=False)
    assert all(f.ok is None for f in result.figures)


def test_the_table_has_a_line_for_each_kind_that_came() -> None:
    rows = {"replay, 50 MiB": Visits([visited()]), "torchft, 50 MiB": Visits([visited(control=None)]), "none": Visits()}
    lines = join.table(rows)
    assert len(lines) == 3
    assert "400 ms" in lines[1]
    assert lines[2].split()[7] == "-"
    assert len({len(line) for line in lines}) == 1


@pytest.mark.slow
def test_a_small_join_from_end_to_end() -> None:
    for way in ("replay", "pause"):
        (one,) = main.ours(1.0, way, 1, random.Random(0)).kept
        assert one.equal
        assert one.steps >= 1
        assert one.to_contribution > 0
