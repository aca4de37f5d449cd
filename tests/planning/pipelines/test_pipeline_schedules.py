"""Tests instruction lists: 1F1B and torch's own schedules, and the errors of the validator."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reroute_model import zero_bubble_h1
from chaos_lightning.planning.pipelines.schedules import (
    Instruction,
    ScheduleError,
    check_schedule,
    in_flight,
    one_f_one_b,
    read_instruction,
)

SCHEDULES = {"1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}
names = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 6)
counts = st.integers(1, 10)


def routes(p, m):
    return dict.fromkeys(range(m), range(p))


def most_open(row):
    """Returns the largest number of micro-batches between their forward pass and the end of their backward pass."""
    kept, most = set(), 0
    for x in row:
        kept = kept | {x.micro_batch} if x.kind == "F" else kept - {x.micro_batch} if x.kind in "BW" else kept
        most = max(most, len(kept))
    return most


@given(names, stages, counts)
def test_every_schedule_runs_everything_once(name, p, m):
    lists = SCHEDULES[name](p, m)
    check_schedule(lists, routes(p, m))
    kinds = "FIW" if name == "zb-h1" else "FB"
    assert sorted(x for row in lists for x in row) == sorted(
        Instruction(k, kind, j) for k in range(p) for kind in kinds for j in range(m)
    )


@given(stages, counts, st.integers(0, 3))
def test_1f1b_keeps_what_it_says_and_zb_h1_no_more_than_the_first_stage(p, m, extra):
    for k, row in enumerate(one_f_one_b(p, m, extra)):
        assert most_open(row) == in_flight(p, k, m, extra)
    assert max(map(most_open, zero_bubble_h1(p, m))) <= min(p, m)


@given(names, stages, counts)
def test_text_is_read_as_it_was_written(name, p, m):
    for row in SCHEDULES[name](p, m):
        assert [read_instruction(str(x)) for x in row] == row


@pytest.mark.parametrize("text", ["F0", "1SEND_F0"])
def test_a_text_that_is_no_instruction_is_named(text):
    with pytest.raises(ScheduleError, match=f"'{text}' is no instruction"):
        read_instruction(text)


# ------------------------------------------------------------------------------------------------ torch


def pipeline_stage(p):
    """Returns a stand-in for a stage, with the attributes that torch's schedules read."""
    return SimpleNamespace(num_stages=p, group_size=p, group_rank=0, stage_index=0, is_last=p == 1, has_backward=True)


def theirs(name, p, m):
    """Returns the compute instructions of one of torch's schedules, without its bubbles."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = pipeline_stage(p)
    order = getattr(schedules, name)(stage if "Looped" not in name and "Inter" not in name else [stage], m)
    rows = order.pipeline_order.values()
    return [[read_instruction(str(x)) for x in row if x is not None and x.is_compute_op] for row in rows]


@pytest.mark.parametrize("m", [4, 5, 8])
def test_what_torch_runs_is_a_schedule(m):
    for name in ("ScheduleGPipe", "ScheduleLoopedBFS", "ScheduleInterleaved1F1B"):
        check_schedule(theirs(name, 4, m), routes(4, m))


@pytest.mark.parametrize("m", [4, 5, 8])
def test_1f1b_is_that_of_torch(m):
    # The last row is left out: up to torch 2.13 its forward units are numbered from 1, which the validator finds.
    assert theirs("Schedule1F1B", 4, m)[:-1] == one_f_one_b(4, m)[:-1]


# ------------------------------------------------------------------------------------------------ what is wrong


def broken(change, p=3, m=3, name="1f1b"):
    """Returns the validator's error text for a schedule modified by `change`."""
    lists = [list(row) for row in SCHEDULES[name](p, m)]
    change(lists)
    with pytest.raises(ScheduleError) as caught:
        check_schedule(lists, routes(p, m))
    return str(caught.value)


def test_a_missing_unit_is_named():
    assert "1F2 is missing" in broken(lambda rows: rows[1].remove(Instruction(1, "F", 2)))
    assert "2B0 is missing" in broken(lambda rows: rows[2].remove(Instruction(2, "B", 0)))
    assert "0W1 is missing" in broken(lambda rows: rows[0].remove(Instruction(0, "W", 1)), name="zb-h1")
    assert "0I1 is missing" in broken(lambda rows: rows[0].remove(Instruction(0, "I", 1)), name="zb-h1")


def test_a_doubled_unit_is_named():
    assert "0F1 is there twice" in broken(lambda rows: rows[0].append(Instruction(0, "F", 1)))
    said = broken(lambda rows: rows[2].append(Instruction(2, "W", 1)))
    assert "2B1 and 2W1 are both there" in said


def test_a_unit_elsewhere_is_named():
    def swap(rows):
        rows[0].remove(Instruction(0, "B", 1))
        rows[1].append(Instruction(0, "B", 1))

    assert "0B1 is at worker 1; expected it at worker 0" in broken(swap)
    assert "7F0 is of no micro-batch or stage" in broken(lambda rows: rows[0].append(Instruction(7, "F", 0)))
    assert "0F9 is of no micro-batch or stage" in broken(lambda rows: rows[0].append(Instruction(0, "F", 9)))
    assert "'X' is no kind" in broken(lambda rows: rows[0].append(Instruction(0, "X", 0)))


def test_a_wrong_order_of_one_worker_is_named():
    assert "worker 2: 2B0 comes before 2F0" in broken(lambda rows: rows[2].sort(key=lambda x: x.kind))
    assert "worker 1: 1W0 comes before 1I0" in broken(
        lambda rows: rows[1].sort(key=lambda x: "FWI".index(x.kind)), name="zb-h1"
    )


def test_a_deadlock_is_named():
    # Each worker's own order is possible, but the last stage begins with a micro-batch that the first one holds back.
    def reverse(rows):
        rows[2].sort(key=lambda x: (-x.micro_batch, "FB".index(x.kind)))
        rows[0].sort(key=lambda x: (x.micro_batch, "FB".index(x.kind)))

    said = broken(reverse)
    assert said.startswith("deadlock: ")
    assert "worker 0 is at 0B0 and waits for 1B0" in said
    assert "worker 2 is at 2F2 and waits for 1F2" in said
