"""Instruction lists: their contents, their text as torch writes and reads it, and the validator's findings."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.pipelines.schedules import (
    SCHEDULES,
    Instruction,
    ScheduleError,
    check_schedule,
    from_csv,
    in_flight,
    one_f_one_b,
    read_instruction,
    to_csv,
)

names = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 6)
counts = st.integers(1, 10)


def routes(p, m):
    return dict.fromkeys(range(m), range(p))


def most_open(row):
    """Returns the most micro-batches whose forward pass is done and whose backward pass, or both halves of it, is
    not.
    """
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
    assert max(map(most_open, SCHEDULES["zb-h1"](p, m))) <= min(p, m)
    assert all(most_open(row) == m for row in SCHEDULES["gpipe"](p, m))


@given(names, stages, counts)
def test_text_is_read_as_it_was_written(name, p, m):
    lists = SCHEDULES[name](p, m)
    assert from_csv(to_csv(lists)) == lists


def test_bubbles_are_dropped_and_a_wrong_cell_is_named():
    assert from_csv("0F0,,0B0\n,1F0,1B0\n") == [
        [Instruction(0, "F", 0), Instruction(0, "B", 0)],
        [Instruction(1, "F", 0), Instruction(1, "B", 0)],
    ]
    with pytest.raises(ScheduleError, match=r"row 2, column 3: '1SEND_F0' is no instruction"):
        from_csv("0F0,0B0\n,1F0,1SEND_F0\n")
    with pytest.raises(ScheduleError, match="no instruction"):
        read_instruction("F0")


# ------------------------------------------------------------------------------------------------ torch


def pipeline_stage(p):
    """Returns a stage with all that torch's schedules ask of it before they run."""
    return SimpleNamespace(num_stages=p, group_size=p, group_rank=0, stage_index=0, is_last=p == 1, has_backward=True)


@pytest.mark.parametrize(("name", "p", "m"), [("gpipe", 3, 5), ("1f1b", 4, 8), ("1f1b", 4, 2), ("zb-h1", 4, 8)])
def test_torch_loads_our_text(tmp_path, name, p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path = tmp_path / "lists.csv"
    path.write_text(to_csv(SCHEDULES[name](p, m)))
    loaded = schedules._PipelineScheduleRuntime([pipeline_stage(p)], m)
    loaded._load_csv(str(path), format="compute_only")
    assert [list(map(str, row)) for row in loaded.pipeline_order.values()] == [
        list(map(str, row)) for row in SCHEDULES[name](p, m)
    ]
    # Torch has added sends and receives, which it does only if the lists come to an end.
    assert sum(map(len, loaded.pipeline_order_with_comms.values())) > sum(map(len, SCHEDULES[name](p, m)))
    loaded._dump_csv(str(path), format="compute_only")
    assert from_csv(path.read_text()) == SCHEDULES[name](p, m)


def theirs(name, p, m):
    """Returns the compute instructions of one of torch's schedules, as we read them; None is a bubble there."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = pipeline_stage(p)
    order = getattr(schedules, name)(stage if "Looped" not in name and "Inter" not in name else [stage], m)
    rows = [["" if x is None or not x.is_compute_op else str(x) for x in row] for row in order.pipeline_order.values()]
    return from_csv("".join(",".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("m", [4, 5, 8])
def test_we_load_what_torch_writes(m):
    p = 4
    assert theirs("ScheduleLoopedBFS", p, m) == SCHEDULES["gpipe"](p, m)
    for name in ("ScheduleGPipe", "ScheduleInterleaved1F1B"):
        check_schedule(theirs(name, p, m), routes(p, m))


@pytest.mark.parametrize("m", [4, 5, 8])
def test_1f1b_is_that_of_torch(m):
    # The last row is left out: up to torch 2.13 its forward units are numbered from 1, which the validator finds.
    assert theirs("Schedule1F1B", 4, m)[:-1] == one_f_one_b(4, m)[:-1]


# ------------------------------------------------------------------------------------------------ what is wrong


def broken(change, p=3, m=3, name="1f1b"):
    """Returns the validator's words about a schedule in which something was changed."""
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
