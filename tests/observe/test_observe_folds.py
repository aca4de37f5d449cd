"""Folds of the logs of a made-up run in which each number is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from observe_synthetic import Script, story

from chaos_lightning.events.events import read_events
from chaos_lightning.observe import folds
from chaos_lightning.observe.spans import intersect, merge, overlaps, size, subtract, words
from chaos_lightning.observe.timeline import Timeline


def timeline(run: Script, where: Path) -> Timeline:
    return Timeline.of(read_events(run.write(where)))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    return timeline(story(), tmp_path_factory.mktemp("story"))


def test_lives_have_their_beginnings_and_ends(told: Timeline) -> None:
    ends = {life.member: (life.role, life.end) for life in told.lives.values()}
    assert ends == {
        "alpha~1": ("founder", "left"),
        "bravo~1": ("founder", "killed"),
        "charlie~1": ("founder", "fenced"),
        "delta~1": ("joiner", "finished"),
        "charlie~2": ("joiner", "finished"),
    }
    assert told.nodes() == ["alpha", "bravo", "charlie", "delta"]
    (freeze,) = told.lives["charlie~1"].freezes
    assert freeze[1] is not None
    assert freeze[1] - freeze[0] == pytest.approx(3.0)
    # A life that begins with a rejoin begins where the last one ended, not where the process did.
    assert told.lives["charlie~2"].born == told.lives["charlie~1"].ended


def test_chain_is_contiguous_and_complete(told: Timeline) -> None:
    chain = told.chain()
    assert [slot.seq for slot in chain] == list(range(1, len(chain) + 1))
    assert chain[-1].kind == "closing"


def test_joins_name_their_donors(told: Timeline) -> None:
    first, again = folds.joins(told)
    assert (first.node, first.again, again.node, again.again) == ("delta", False, "charlie", True)
    assert [(d, n) for d, n, _ in first.sources] == [
        ("alpha~1", 24 << 20),
        ("bravo~1", int((48 << 20) * 0.3)),
        ("charlie~1", int((48 << 20) * 0.2)),
    ]
    assert first.skipped == 2 << 20
    assert first.rate == pytest.approx(first.nbytes / (0.35 * 0.95))
    assert first.pause == pytest.approx(0.35, abs=0.02)


def test_the_way_in_that_the_scheduler_chose_is_the_joins_own(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(3)
    joiner = run.join("c")
    line = run.say("", "way_in", file="scheduler-s-1.jsonl", way="replay", reason="steps can be replayed")
    line["member"] = joiner
    (join,) = folds.joins(timeline(run, tmp_path))
    assert (join.way, join.why) == ("replay", "steps can be replayed")


def test_recoveries_measure_from_the_blow_to_the_next_slot_on_all_survivors(told: Timeline) -> None:
    killed, frozen = folds.recoveries(told)
    assert (killed.member, killed.kind, killed.phase, killed.how) == ("bravo~1", "sigkill", "allreduce", "redo")
    assert killed.survivors == 3
    assert killed.seconds == pytest.approx(0.071, abs=1e-4)
    assert killed.noticed is not None
    assert killed.noticed - killed.at == pytest.approx(0.004, abs=1e-4)
    assert (frozen.member, frozen.kind, frozen.how) == ("charlie~1", "sigstop", "next")
    assert frozen.seconds == pytest.approx(0.671, abs=1e-4)


def test_goodput_books_every_second_once(told: Timeline) -> None:
    good = folds.goodput(told)
    assert good.useful + sum(good.lost.values()) == pytest.approx(good.total)
    assert good.lost["join"] == pytest.approx(0.7, abs=0.05)
    assert good.lost["recovery"] == pytest.approx(0.6, abs=0.05)
    assert good.lost["waiting"] == 0
    assert good.usual == pytest.approx(0.106, abs=0.003)
    assert 0.85 < good.share < 0.95
    assert good.steps == 122


def test_samples_are_counted_per_epoch(told: Timeline) -> None:
    uses = folds.samples(told)
    assert uses["", 0].complete is True
    assert uses["", 1].complete is True
    assert uses["", 2].complete is None  # the log does not say how long it is
    assert all(use.twice == () for use in uses.values())


def test_hashes_of_all_members_are_gathered(told: Timeline) -> None:
    assert len(told.hashes) >= 12
    assert all(len(set(hashes.values())) == 1 for hashes in told.hashes.values())
    assert max(len(hashes) for hashes in told.hashes.values()) == 4


def test_an_empty_log_folds_to_nothing() -> None:
    empty = Timeline.of([])
    assert folds.intervals(empty) == folds.joins(empty) == folds.recoveries(empty) == []
    assert folds.goodput(empty).share == 1.0
    assert empty.chain() == []


def test_handed_on_slot_counts_as_recovered_when_the_last_survivor_has_it(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    run.steps(5)
    # a (the root) commits slot 6 together with b, dies, and c gets it handed on 0.2 s later.
    before = run.head
    head = run.slot(only=["a~1", "b~1"])
    run.say("a~1", "fault_injected", kind="sigkill", phase="optimizer", at=run.now + 0.01)
    run.now += 0.2
    contributed = run.lines["member-b-1.jsonl"][-1]
    run.view(["b~1", "c~1"], "a~1 died")
    run.say("c~1", "hand_on", view=run.view_id, base=run.seq, reason="a~1 died")
    run.say(
        "c~1",
        "committed",
        **{k: contributed[k] for k in contributed if k not in ("t", "mono", "member", "node", "name")},
    )
    assert before != head
    run.now += 0.02
    run.steps(3)
    run.close()
    (recovery,) = folds.recoveries(timeline(run, tmp_path))
    assert (recovery.how, recovery.seq) == ("hand-on", 6)
    assert recovery.seconds == pytest.approx(0.19, abs=1e-3)


def test_a_short_freeze_that_nobody_minded_is_recovered_at_the_next_slot(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(5)
    run.process("h", "harness-h-1.jsonl", role="harness")
    run.say("", "fault_injected", file="harness-h-1.jsonl", node="b", kind="sigstop", seconds=0.2)
    run.now += 0.21
    run.steps(5)
    (recovery,) = folds.recoveries(timeline(run, tmp_path))
    assert recovery.how == "stayed"
    assert recovery.seconds == pytest.approx(0.31, abs=0.02)


def test_a_death_that_nobody_declared_is_a_recovery_too(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(5)
    run.kill("b~1")
    run.steps(2)
    run.lines["member-b-1.jsonl"] = [x for x in run.lines["member-b-1.jsonl"] if x["name"] != "fault_injected"]
    (recovery,) = folds.recoveries(timeline(run, tmp_path))
    assert (recovery.kind, recovery.member) == ("death", "b~1")


def test_waiting_below_the_minimum_is_booked_as_waiting(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(8)
    run.say("a~1", "notice", text="waiting for 1 more member", waiting=True)
    run.now += 2.0
    run.steps(8)
    good = folds.goodput(timeline(run, tmp_path))
    assert good.lost["waiting"] == pytest.approx(2.0, abs=0.02)


def test_a_job_that_went_on_from_a_checkpoint_takes_back_what_came_after_it(tmp_path: Path) -> None:
    run = Script(length=1000)
    run.found(["a", "b"])
    run.steps(10)
    # The whole job stops; the checkpoint is that of step 6.
    again = Script(length=1000, now=run.now + 5, step=6, used=6 * 16)
    again.lines, again.number = run.lines, run.number
    again.found(["a", "b"])
    again.steps(4)
    uses = folds.samples(timeline(again, tmp_path))
    assert (uses["", 0].used, uses["", 0].twice) == (160, ())


def test_mixed_clocks_do_not_enter_step_times(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(20)
    for line in run.lines["member-b-1.jsonl"]:
        line["t"] += 0.04  # b's wall clock is ahead
    cut = folds.intervals(timeline(run, tmp_path))
    assert all(0.09 < i.seconds < 0.2 for i in cut)


def test_span_arithmetic() -> None:
    assert merge([(3, 5), (0, 2), (2, 3), (7, 7)]) == ((0, 5),)
    assert overlaps([(0, 4), (2, 3), (3, 6)]) == ((2, 4),)
    assert intersect(((0, 4), (6, 9)), ((3, 7),)) == ((3, 4), (6, 7))
    assert subtract(((0, 10),), ((2, 3), (5, 6))) == ((0, 2), (3, 5), (6, 10))
    assert size([(0, 2), (1, 3)]) == 4
    assert words(tuple((i, i + 1) for i in range(0, 20, 2))) == "[0, 1), [2, 3), [4, 5), [6, 7) and 6 more"


def test_the_end_of_a_finished_member_is_no_death(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(8)
    run.close()
    run.now += 1
    run.say("", "death", file="scheduler-s-1.jsonl", evidence="it closed its control stream in good order")[
        "member"
    ] = "b~1"
    told = timeline(run, tmp_path)
    assert folds.recoveries(told) == []
    assert told.lives["b~1"].end == "finished"
    assert not any("dead" in note.text for note in told.notes)


def test_founders_that_take_over_the_first_state_are_no_joins(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.say("b~1", "pull_started", seq=0, head=run.head, sources=["a~1"])
    run.say("b~1", "pull_done", nbytes=100, skipped=0, seconds=0.01, hash="x")
    run.steps(8)
    told = timeline(run, tmp_path)
    assert folds.joins(told) == []
    assert folds.goodput(told).lost["join"] == 0


def test_a_scheduler_that_waited_for_hours_does_not_stretch_the_picture(tmp_path: Path) -> None:
    run = Script()
    run.process("s", "scheduler-s-1.jsonl", role="scheduler")
    run.now += 7200
    run.lines["member-late-1.jsonl"] = []
    source = run.process("late")
    run.welcome("late~1", source, "founder")
    told = timeline(run, tmp_path)
    assert told.origin - told.start == pytest.approx(7200)


def told_losses(run: Script, where: Path) -> Timeline:
    run.found(["a", "b"])
    run.steps(3)
    run.say("a~1", "train_loss", step=1, loss=4.0, weight=4)
    run.say("b~1", "train_loss", step=1, loss=1.0, weight=12)
    run.say("a~1", "train_loss", step=3, loss="nan", weight=4)
    run.say("b~1", "train_loss", step=3, loss=0.5, weight=12)
    run.say("b~1", "train_loss", step=3, loss="no number", weight=12)
    return timeline(run, where)


def test_losses_are_weighed_by_samples_and_a_diverged_one_shows(tmp_path: Path) -> None:
    told = told_losses(Script(), tmp_path)
    (step, loss), (last_step, last) = folds.losses(told)
    assert (step, loss, last_step) == (1, 1.75, 3)
    assert math.isnan(last)
    assert math.isnan(folds.latest_loss(told) or 0.0)
    assert [count for count, _ in folds.losses(told, bins=1)] == [2]
    assert folds.losses(Timeline()) == []
    assert folds.latest_loss(Timeline()) is None


def test_a_slow_jobs_latest_loss_is_that_of_all_members_but_the_dead(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b", "c"])
    for member, step, loss in [("c~1", 1, 9.0), ("a~1", 31, 2.0), ("b~1", 40, 1.0)]:
        run.now += 60
        run.say(member, "train_loss", step=step, loss=loss, weight=1)
    assert folds.latest_loss(timeline(run, tmp_path)) == 1.5


def test_losses_after_the_checkpoint_that_a_job_went_on_from_are_told_anew(tmp_path: Path) -> None:
    run = Script()
    run.found(["a"])
    for step, loss in [(1, 3.0), (2, 2.0), (3, 9.0), (2, 1.5)]:
        run.say("a~1", "train_loss", step=step, loss=loss, weight=1)
    assert folds.losses(timeline(run, tmp_path)) == [(1, 3.0), (2, 1.5)]
