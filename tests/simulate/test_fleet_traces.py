"""Tests histories of a fleet's devices: random ones, written and read again, and refusals of impossible ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import write_events, write_steps
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.fleet.generator import SHARED, Chance, _Drawing, generate, group_sizes
from chaos_lightning.planning.fleet.traces import FleetChange, Trace, TraceError, read

BUSY = Chance(devices=40, hours=20, rate=0.1, group=6, repair_hours=1.0, slow_rate=0.02)


# ------------------------------------------------------------------------------------------------ by chance


def removals(trace: Trace) -> list[int]:
    """Returns the number of devices that each loss in this trace removes."""
    return [len(c.devices) for c in trace.changes if c.kind == "remove"]


def test_equal_seeds_draw_equal_histories() -> None:
    assert generate(BUSY, 3) == generate(BUSY, 3)
    assert generate(BUSY, 3) != generate(BUSY, 4)


def test_devices_are_lost_as_often_as_the_rate_says() -> None:
    for chance in (Chance(devices=500, hours=20, rate=0.1, repair_hours=0.01),
                   Chance(devices=500, hours=20, rate=0.1, repair_hours=0.01, group=6)):  # fmt: skip
        lost = sum(removals(generate(chance, 1)))
        assert lost == pytest.approx(500 * 20 * 0.1, rel=0.15)


def test_groups_share_time_stamps_as_often_as_in_published_traces() -> None:
    sizes = group_sizes(6)
    assert sum(sizes.values()) == pytest.approx(1)
    mean = sum(g * p for g, p in sizes.items())
    assert 1 - sizes[1] / mean == pytest.approx(SHARED)
    lost = removals(generate(Chance(devices=500, hours=20, rate=0.1, repair_hours=0.01, group=6), 1))
    assert set(lost) == {1, 2, 3, 4, 5, 6}
    assert 1 - Counter(lost)[1] / sum(lost) == pytest.approx(SHARED, abs=0.05)


def test_host_is_lost_as_a_whole() -> None:
    trace = generate(Chance(devices=32, hours=9, rate=0, per_host=8, host_rate=0.2), 2)
    lost = [c.devices for c in trace.changes]
    assert lost
    for devices in lost:
        assert list(devices) == list(range(devices[0], devices[0] + 8))
        assert devices[0] % 8 == 0


def test_hosts_are_lost_alike_however_many_devices_they_have() -> None:
    chance = Chance(devices=9, hours=0.9, rate=0, per_host=8, host_rate=5.0)
    changes = [generate(chance, seed).changes for seed in range(200)]
    firsts = [c[0].devices for c in changes if c]
    assert len(firsts) > 190
    assert firsts.count((8,)) == pytest.approx(100, abs=25)


def test_hosts_are_counted_while_devices_come_and_go() -> None:
    drawing = _Drawing(replace(BUSY, per_host=8, host_rate=0.1, arrivals=5.0), 3)
    drawing.draw()
    assert drawing.hosts == Counter(d // 8 for d in drawing.there)
    assert len(set(drawing.hosts.values())) > 1


def test_nobody_is_lost_or_added_twice() -> None:
    trace = generate(BUSY, 5)
    there, slow = set(trace.first), set()
    for c in trace.changes:
        match c.kind:
            case "remove":
                assert there >= set(c.devices)
                there -= set(c.devices)
                slow -= set(c.devices)
            case "add":
                assert not there & set(c.devices)
                there |= set(c.devices)
            case "slow":
                assert there >= set(c.devices)
                slow |= set(c.devices)
            case "well":
                assert slow >= set(c.devices)
                slow -= set(c.devices)
    assert {"remove", "add", "slow", "well"} == {c.kind for c in trace.changes}


def test_new_devices_arrive_up_to_a_limit() -> None:
    trace = generate(Chance(devices=4, hours=9, rate=0, arrivals=10, most=9), 0)
    assert max(count for _, count in trace.counts()) == 9


def test_fleet_that_is_empty_for_an_hour_is_refused() -> None:
    with pytest.raises(TraceError, match=r"--devices 3 --rate 5 --hours 9: no device is there from hour .* repairs"):
        generate(Chance(devices=3, rate=5.0), 0)


def test_history_with_no_end_of_events_is_refused() -> None:
    words = r"--devices 32 --rate 1e\+06 --hours 9: more than 300,000 events by hour 0\..*; expected lower rates"
    with pytest.raises(TraceError, match=words):
        generate(Chance(devices=32, rate=1e6, repair_hours=0.0001), 0)


def test_chance_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--rate is -1; expected a finite number at least 0"):
        Chance(devices=3, rate=-1)
    with pytest.raises(ConfigurationError, match=r"--slow-speed is 2; expected less than 1"):
        Chance(devices=3, slow_speed=2)
    with pytest.raises(ConfigurationError, match=r"--devices is 1000001; expected at most 100000"):
        Chance(devices=1_000_001)


# ------------------------------------------------------------------------------------------------ files


def by_counts(trace: Trace) -> list[tuple[float, int]]:
    """Returns the trace's number of devices as a step function: pairs of time and count."""
    found: dict[float, int] = {}
    for at, count in trace.counts():
        found[round(at, 2)] = count
    return list(found.items())


def test_events_are_written_and_read_back(tmp_path: Path) -> None:
    trace = generate(BUSY, 7)
    write_events(trace, tmp_path / "a")
    found = read(tmp_path / "a", hours=20)
    wanted = [c for c in trace.changes if c.kind in ("add", "remove")]
    assert found.first == trace.first
    assert removals(found) == removals(trace)
    assert [(round(c.at_s, 2), c.kind, len(c.devices)) for c in found.changes] == [
        (pytest.approx(c.at_s, abs=0.01), c.kind, len(c.devices)) for c in wanted
    ]


def test_steps_are_written_and_read_back(tmp_path: Path) -> None:
    trace = generate(BUSY, 7)
    write_steps(trace, tmp_path / "a")
    found = read(tmp_path / "a", seed=1)
    assert found.end_s == pytest.approx(trace.end_s)
    assert [n for _, n in by_counts(found)] == [n for _, n in by_counts(trace)]
    assert read(tmp_path / "a", seed=1) == found
    assert read(tmp_path / "a", seed=2) != found


def test_removals_of_one_time_stamp_are_one_loss(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("500,add,x\n500,add,y\n500,add,z\n1500,remove,x\n1500,remove,z\n2500,add,x\n")
    found = read(path)
    assert found == Trace(
        (0, 1, 2), (FleetChange(1.0, "remove", (0, 2)), FleetChange(2.0, "add", (0,))), 2.0, str(path)
    )


def test_node_that_goes_and_comes_at_the_first_time_stamp_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("500,add,x\n500,add,y\n500,remove,x\n500,add,x\n1500,remove,y\n")
    found = read(path)
    assert found == Trace((1, 0), (FleetChange(1.0, "remove", (1,)),), 1.0, str(path))


def test_history_that_begins_with_a_removal_begins_with_all_devices(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("60000,remove,x\n60000,remove,y\n90000,add,z\n120000,add,x\n")
    assert read(path, devices=4) == Trace(
        (0, 1, 2, 3),
        (FleetChange(60.0, "remove", (0, 1)), FleetChange(90.0, "add", (4,)), FleetChange(120.0, "add", (0,))),
        120.0,
        str(path),
    )


def test_nodes_are_the_devices_of_a_fleet_of_several_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("60000,remove,new1\n90000,add,old1\n")
    found = read(path, names=["new0", "new1", "old0", "old1"])
    assert found.first == (0, 1, 2)
    assert found.changes == (FleetChange(60.0, "remove", (1,)), FleetChange(90.0, "add", (3,)))
    path.write_text("500,add,old0\n500,add,new0\n1500,remove,old0\n")
    found = read(path, names=["new0", "new1", "old0", "old1"])
    assert (found.first, found.changes) == ((2, 0), (FleetChange(1.0, "remove", (2,)),))


def test_counts_of_a_fleet_of_several_kinds_name_its_own_devices(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("0,3\n1,3\n1,2\n2,2\n2,3\n3,3\n")
    found = read(path, names=["a", "b", "c"])
    assert found.first == (0, 1, 2)
    lost, back = found.changes
    assert back.devices == lost.devices


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,add,a\n5000,remove,x\n", "line 2: 'x' is no device of the fleet, which has several kinds; expected one"),
        ("5000,remove,x\n", "line 1: 'x' is no device of the fleet"),
        ("5000,remove,a\n6000,remove,a\n", "line 2: removes 'a', which is not there"),
        ("5000,remove,a\n6000,add,a\n7000,add,a\n", "line 3: adds 'a', which is there already"),
        ("5000,remove,a\n6000,lost,b\n", "line 2: the second field is 'lost'; expected add or remove"),
        ("1600000000000,remove,a\n", "line 1: the first removal is at 1600000000000 ms; expected milliseconds since"),
        ("0,2\n1,2\n1,4\n2,4\n", "line 3: the count is 4; the fleet has 3 devices, of several kinds; expected no more"),
    ],
)  # fmt: skip
def test_history_that_does_not_fit_a_fleet_of_several_kinds_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read(path, names=["a", "b", "c"])
    assert words in str(refused.value)


@pytest.mark.parametrize(("devices", "words"), [(1, "the fleet has 1"), (None, "how many devices there are is not")])
def test_more_removals_than_the_fleet_has_devices_are_refused(tmp_path: Path, devices: int | None, words: str) -> None:
    path = tmp_path / "a"
    path.write_text("5000,remove,a\n5000,remove,b\n6000,add,a\n")
    with pytest.raises(TraceError, match=rf"line 1: .* 2 are removed that were not added; {words}.*--devices 2 or"):
        read(path, devices=devices)


EVENTS = "0,add,a\n0,add,b\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty; expected lines"),
        ("milliseconds,event,node\n", "line 1: milliseconds is 'milliseconds'; expected a number from 0 on"),
        ("1,2,3,4\n", "line 1: it has 4 fields; expected `milliseconds,add|remove,node` (such as"),
        ("hello\n", "line 1: it has 1 fields"),
        (EVENTS + "5,3\n", "line 3: it has 2 fields where the first line has 3"),
        (EVENTS + "9000,remove,a\n8000,add,a\n", "line 4: time goes backwards, from 9000 to 8000 ms"),
        (EVENTS + "9000,remove,c\n", "line 3: removes 'c', which is not there; expected a node that was added before"),
        (EVENTS + "9000,add,b\n", "line 3: adds 'b', which is there already"),
        (EVENTS + "9000,drop,b\n", "line 3: the second field is 'drop'; expected add or remove"),
        (EVENTS + "9000,remove,\n", "line 3: the third field, the node, is empty"),
        (EVENTS + "inf,remove,a\n", "line 3: milliseconds is 'inf'; expected a number from 0 on"),
        (EVENTS, "line 2: the history has no end: all lines have the same time; expected a last line with a later one"),
        (
            EVENTS + "1000,remove,a\n1000,remove,b\n3700000,add,a\n",
            "no device is there from hour 0.0002778 to 1.028; expected a fleet that is never empty for an hour",
        ),
        ("0,8\n", "line 1: the history has no end"),
        ("0,8\n2,8\n1,7\n", "line 3: time goes backwards, from 2 to 1 h"),
        ("0,8\n2,7\n", "line 2: the count becomes 7 where it was 8 since hour 0; expected two lines where it changes: "
         "2,8 and 2,7"),
        ("0,8\n2,8\n2,7.5\n", "line 3: the count is '7.5'; expected a whole number of devices"),
        ("0,8\n2,8\n2,1e18\n", "line 3: the count is '1e18'; expected a whole number of devices, at most 100,000"),
        ("0,8\n2,8\n2,-1\n", "line 3: the count is '-1'; expected a number from 0 on"),
        ("0,8\n2,8\n2,0\n4,0\n", "no device is there from hour 2 to 4"),
    ],
)  # fmt: skip
def test_file_that_holds_no_history_is_refused_by_line_and_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere: cannot be read as text"):
        read(tmp_path / "nowhere")


def test_history_without_an_end_ends_at_the_given_hour(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("0,8\n")
    assert read(tmp_path / "a", hours=3).end_s == 3 * 3600
