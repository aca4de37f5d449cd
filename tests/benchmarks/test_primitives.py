"""Tests the benchmark of scaling primitives: its computations on step times, and its following of real members."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from silent_worker import Silent

from benchmarks.common import Result, percentile
from benchmarks.primitives import __main__ as main
from benchmarks.primitives import events as primitives
from benchmarks.primitives.crew import Change, Crew, ring
from benchmarks.primitives.events import Log, Outcome, Sample, links, report
from benchmarks.primitives.member import Work
from benchmarks.primitives.samples import (
    Block,
    Exposure,
    block_of,
    charged,
    control_of,
    exposed,
    median_interval,
)
from benchmarks.world import Seen
from chaos_lightning.membership.topology import connected

MS = 1_000_000


def series(*durations_ms: float, first: int = 1) -> dict[int, float]:
    return {first + i: d / 1e3 for i, d in enumerate(durations_ms)}


# ---------------------------------------------------------------------- what is charged


def test_a_change_is_charged_from_its_request_until_two_steps_past_its_header() -> None:
    assert charged(10, 11, settled=0) == (10, 11, 12, 13)
    assert charged(11, 11, settled=0) == (11, 12, 13)


def test_what_is_still_there_keeps_the_account_open() -> None:
    assert charged(10, 11, settled=15) == tuple(range(10, 17))


def test_the_time_in_which_a_new_link_stands_unused_is_not_charged() -> None:
    assert charged(10, 40, settled=0, stood=12) == (10, 11, 12, 13, 39, 40, 41, 42)
    assert charged(10, 40, settled=0, stood=9) == (10, 11, 39, 40, 41, 42), "it stood before the step was over"
    assert charged(10, 13, settled=0, stood=11) == (10, 11, 12, 13, 14, 15), "nothing lies in between"


# ---------------------------------------------------------------------- what is exposed


def test_a_delay_in_any_charged_step_is_seen_in_full() -> None:
    for late in range(4, 8):
        times = dict(series(*[10.0] * 12))
        times[late] += 0.005
        found = exposed({"a": times}, ["a"], block_of((4, 5, 6, 7), 5, 3))
        assert found.total == pytest.approx(0.005)
        assert found.longest == pytest.approx(0.005)
        assert found.steps == 4


def test_a_world_that_becomes_faster_hides_no_delay() -> None:
    # 20 ms before, 12 ms after; the first step after the header takes 4 ms longer than those that follow.
    times = series(20, 20, 20, 20, 16, 12, 12, 12, 12)
    found = exposed({"a": times}, ["a"], block_of((4, 5, 6), 4, 3))
    assert found.total == pytest.approx(0.004)
    assert found.longest == pytest.approx(0.004)
    assert found.against_before == pytest.approx(-0.012)
    assert found.against_after == pytest.approx(0.012)
    assert found.against_slower == pytest.approx(-0.012)
    assert found.usual_before == pytest.approx(0.020)
    assert found.usual_after == pytest.approx(0.012)


def test_a_world_that_becomes_slower_is_not_charged_for_it() -> None:
    found = exposed({"a": series(12, 12, 12, 12, 21, 20, 20, 20, 20)}, ["a"], block_of((4, 5, 6), 4, 3))
    assert found.total == pytest.approx(0.001)


def test_a_step_that_makes_up_for_another_counts_in_the_sum_alone() -> None:
    found = exposed({"a": series(10, 10, 10, 16, 5, 10, 10, 10)}, ["a"], block_of((4, 5), 4, 3))
    assert found.total == pytest.approx(0.001)
    assert found.longest == pytest.approx(0.006)


def test_the_worst_member_counts() -> None:
    calm, late = series(*[10.0] * 8), series(10, 10, 10, 13, 10, 10, 10, 10)
    assert exposed({"a": calm, "b": late}, ["a", "b"], block_of((4, 5), 4, 3)).total == pytest.approx(0.003)
    assert exposed({"a": calm, "b": late}, ["a"], block_of((4, 5), 4, 3)).total == pytest.approx(0.0)
    assert exposed({"a": calm, "b": late, "c": calm}, "abc", block_of((4, 5), 4, 3)).middle == pytest.approx(0.0)


def test_a_duration_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="b reported no duration of step 7"):
        exposed({"b": series(*[10.0] * 6)}, ["b"], block_of((4,), 4, 3))


def test_a_block_stands_between_what_it_is_compared_with() -> None:
    with pytest.raises(ValueError, match="before must end"):
        Block((4, 5), 4, (3, 4), (6,))
    with pytest.raises(ValueError, match="at least one step"):
        Block((), 4, (3,), (6,))


# ---------------------------------------------------------------------- controls


def test_a_control_has_the_event_s_form_and_stays_within_its_stretch() -> None:
    event = block_of((20, 21, 22, 23, 24), 21, 3)
    places = set()
    for seed in range(200):
        control = control_of(event, (100, 115), 3, random.Random(seed))
        assert len(control.steps) == 5
        assert sum(s <= control.ruled for s in control.steps) == 2
        assert (control.before[0] >= 100, control.after[-1] <= 115) == (True, True)
        assert (len(control.before), len(control.after)) == (3, 3)
        places.add(control.steps[0])
    assert places == set(range(103, 109)), "every place that fits comes up"


def test_a_gap_in_an_event_is_none_in_its_control() -> None:
    event = block_of((10, 11, 39, 40, 41, 42), 40, 3)
    control = control_of(event, (100, 111), 3, random.Random(0))
    assert control.steps == (103, 104, 105, 106, 107, 108)
    assert control.ruled == 106


def test_a_stretch_that_is_too_short_is_said() -> None:
    with pytest.raises(ValueError, match="needs 10 undisturbed ones; steps 100 to 108 are 9"):
        control_of(block_of((20, 21, 22, 23), 21, 3), (100, 108), 3, random.Random(0))


# ---------------------------------------------------------------------- statistics


def test_percentiles_lie_between_the_values() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [percentile(values, q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="percentile 101 of 1 values"):
        percentile([1.0], 101)


def test_the_interval_of_a_median_is_the_binomial_one() -> None:
    # Tables for the sign test, 95 %: n=10 has the 2nd and 9th value, n=20 the 6th and 15th, n=50 the 18th and 33rd.
    for count, low, high in ((10, 2, 9), (20, 6, 15), (50, 18, 33)):
        assert median_interval(list(range(1, count + 1))) == (low, high)
    assert median_interval([5.0, 1.0]) == (1.0, 5.0)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(2000):
        low, high = median_interval([rng.expovariate(1.0) for _ in range(15)])
        covered += low <= 0.6931 <= high
    assert 0.95 <= covered / 2000 < 0.99


# ---------------------------------------------------------------------- graphs


def test_a_crew_begins_connected_and_never_with_every_link() -> None:
    for size in range(3, 8):
        names = [f"w{i}" for i in range(size)]
        base = ring(size)
        assert connected(names, base)
        assert len(base) < size * (size - 1) // 2
    assert not connected(["w0", "w1", "w2"], frozenset({frozenset(("w0", "w1"))}))


@pytest.fixture
def quiet_crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    """Four members with links in a ring, whose reports are written by the test."""
    made = object.__new__(Crew)
    made.rng, made.size, made.links = random.Random(1), 4, ring(4)
    made.members = {f"w{i}": Seen(Silent()) for i in range(4)}  # type: ignore[arg-type]
    made.marks, made.views, made._gone, made._going = {}, {}, {}, {}
    made.past, made.doomed, made._patience_s = [], set(), 5.0
    return made


def test_links_are_chosen_that_keep_everybody_together(quiet_crew: Crew) -> None:
    assert {quiet_crew.absent() for _ in range(40)} == {frozenset(("w0", "w2")), frozenset(("w1", "w3"))}
    assert {quiet_crew.spare() for _ in range(80)} == ring(4)
    quiet_crew.links = ring(4) - {frozenset(("w0", "w1"))} | {frozenset(("w0", "w2"))}
    for _ in range(40):
        chosen = quiet_crew.spare()
        assert connected(list(quiet_crew.members), quiet_crew.links - {chosen})
        assert chosen != frozenset(("w1", "w2")), "w1 hangs on this one alone"


def told(crew: Crew, step: int, ns: int, *, view: Any = None, near: tuple[str, ...] = ()) -> None:
    """Reports a step of all members at a time (ns), of member i at i microseconds later."""
    for i, name in enumerate(crew.members):
        note = (ns + i * 1000, step, step, f"h{step}", 4, i, view, near, step * 0.004)
        crew._hear(name, "steps", [note])


def test_a_link_that_comes_is_booked_by_what_members_report(quiet_crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew, pair = quiet_crew, frozenset(("w0", "w2"))
    around = [(f"w{a}~1", f"w{b}~1") for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))]
    asked: list[tuple[frozenset[str], bool]] = []
    crew._operator = SimpleNamespace(link=lambda p, add: asked.append((p, add)))  # type: ignore[assignment]
    told(crew, 1, 10 * MS)
    told(crew, 2, 20 * MS)
    monkeypatch.setattr(crew, "_moment", lambda: 25 * MS)
    for step in range(3, 20):
        near = ("w0~1", "w2~1") if step >= 5 else ()
        view = (7, [f"w{i}~1" for i in range(4)], [*around, ("w0~1", "w2~1")]) if step == 15 else None
        told(crew, step, step * 10 * MS, view=view, near=near)
    monkeypatch.setattr(crew, "_carried", lambda known, names, what: (crew.views[7], crew.marks["w0"][15]))
    found = crew.change_link(pair, add=True)
    assert asked == [(pair, True)]
    assert (found.requested, found.ruled) == (3, 15)
    assert found.steps == (3, 4, 5, 6, 14, 15, 16, 17)
    assert found.waited_s == pytest.approx((150.003 - 25) / 1e3)
    assert crew.links == ring(4) | {pair}
    assert crew.cpu()["w3"][7] == pytest.approx(0.004)
    assert crew.durations()["w3"][7] == pytest.approx(0.010)


def test_a_view_that_nobody_asked_for_ends_the_run(quiet_crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = quiet_crew
    crew._operator = SimpleNamespace(link=lambda p, add: None)  # type: ignore[assignment]
    told(crew, 1, 10 * MS, view=(7, [f"w{i}~1" for i in range(4)], [("w0~1", "w1~1")]))
    monkeypatch.setattr(crew, "_moment", lambda: 5 * MS)
    monkeypatch.setattr(crew, "_carried", lambda known, names, what: (1, crew.marks["w0"][1]))
    with pytest.raises(RuntimeError, match="the next view has the links w0-w1, not"):
        crew.change_link(frozenset(("w0", "w2")), add=True)


# ---------------------------------------------------------------------- the course of a run


def test_each_event_gets_a_control_on_either_side_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    log = Log(SimpleNamespace(last_step=lambda: 0, reach=reached.append))  # type: ignore[arg-type]
    log.rest()
    firsts = (60, 124, 188, 252)
    for first in firsts:
        steps = tuple(range(first, first + 4))
        log.changed("scale-in", Change(first, first + 1, steps, ("a",), 0.01))
        assert reached[-1] >= steps[-1] + 2 * primitives.WIDTH + 4, first
    stretches: list[tuple[int, int]] = []

    def noted(event: Block, stretch: tuple[int, int], width: int, rng: random.Random) -> Block:
        stretches.append(stretch)
        return control_of(event, stretch, width, rng)

    monkeypatch.setattr(primitives, "control_of", noted)
    durations = dict.fromkeys(range(1, 400), 0.010)
    for first in firsts:
        durations[first + 2] += 0.002
    cpu = {s: d / 2 for s, d in durations.items()}
    late = log.outcomes({"a": durations}, {"a": cpu}, random.Random(0))["scale-in"]
    assert [s.beyond for s in late.samples] == [pytest.approx(0.002)] * 4
    assert [s.event_cpu - s.control_cpu for s in late.samples] == [pytest.approx(0.001)] * 4
    assert [stretch[0] > first for stretch, first in zip(stretches, firsts, strict=True)] == [True, True, False, False]
    assert stretches[2] == (128, 187), "from the end of the event before"


def exposure(total: float, longest: float = 0.0) -> Exposure:
    return Exposure(total, total, longest, total, total, total, 0.03, 0.03, 5)


@pytest.mark.parametrize(("event", "missed"), [(0.0012, 0), (0.0016, 1)])
def test_the_bound_is_on_what_an_event_costs_beyond_its_control(event: float, missed: int) -> None:
    samples = [Sample(exposure(event), exposure(0.0004), 0.05)] * 5
    result = Result("primitives")
    report(result, "scale-in", Outcome(samples, 4, 0.5, entries=[(0.4, 0.1)]), bounded=True)
    found = [f.name for f in result.figures if f.ok is False]
    assert len(found) == missed
    assert all("beyond its control, p50" in name for name in found)
    values = {f.name: f.value for f in result.figures}
    assert values["scale-in: exposed delay beyond its control, p99"] == pytest.approx(event - 0.0004)
    assert values["scale-in: control, p50"] == pytest.approx(0.0004)
    report(free := Result("primitives"), "scale-in", Outcome(samples, 4, 0.5), bounded=False)
    assert [f.name for f in free.figures if f.bound is not None] == ["scale-in: runs after which states differ"]


def test_a_machine_that_is_not_idle_is_said() -> None:
    outcome = Outcome([Sample(exposure(i / 1e3), exposure(0.0), 0.05) for i in range(9)], 4, 0.9, 0.4)
    report(result := Result("primitives"), "scale-in", outcome, bounded=True)
    (note,) = result.notes
    assert "too wide to tell 1 ms; other work took 40% of the processors" in note


def test_processors_know_their_own_work_from_others() -> None:
    own, nobody = primitives.Processors([os.getpid()]), primitives.Processors([])
    until = time.process_time() + 0.3
    while time.process_time() < until:
        sum(range(10000))
    busy, foreign = own.read()
    assert nobody.read()[1] > foreign
    assert 0.0 < busy <= 1.0
    assert 0.0 <= foreign < busy


def test_states_that_differ_are_a_miss() -> None:
    outcome = Outcome([Sample(exposure(0.0), exposure(0.0), 0.05)] * 3)
    report(result := Result("primitives"), "scale-in", replace(outcome, unequal=1), bounded=True)
    assert [f.name for f in result.figures if f.ok is False] == ["scale-in: runs after which states differ"]


def test_its_help_tells_what_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["primitives", "--help"])
    with pytest.raises(SystemExit) as end:
        main.main()
    told = capsys.readouterr().out
    assert end.value.code == 0
    assert all(
        words in told for words in ("--out", "--quick", "--check", "What is charged", "Control", "disconnect-link")
    )


def test_too_few_members_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["primitives", "--members", "2"])
    with pytest.raises(SystemExit):
        main.main()
    assert "--members 2" in capsys.readouterr().err


@pytest.mark.slow
def test_real_members_change_links_and_leave() -> None:
    work = Work(grad_mib=0.1, layers=2, device_s=0.002)
    found = links(4, work, 2, random.Random(5)) | primitives.leaves(3, work, 2, random.Random(5))
    assert {k: len(o.samples) for k, o in found.items()} == {"connect-link": 2, "disconnect-link": 2, "scale-in": 2}
    assert all(not o.unequal for o in found.values())
    assert all(s.waited_s > 0 and s.event.steps >= 3 for o in found.values() for s in o.samples)
    assert [ready > 0 for ready, _ in found["scale-in"].entries] == [True, True]
