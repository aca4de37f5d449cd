"""The audit of an outer job: a correct job passes, and each planted error is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from observe_synthetic import Script
from outer_synthetic import OuterScript, begun, one_round, outer_story
from typer.testing import CliRunner

from chaos_lightning.cli import app
from chaos_lightning.events.reader import read_events
from chaos_lightning.events.registry import problems
from chaos_lightning.observe.audit import NOT_SHOWN, OK, VIOLATED, Finding
from chaos_lightning.observe.outer.audit import audit_folder
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Counters,
    Durable,
    Ended,
    Entry,
    Factors,
    Founded,
    GateState,
    Joined,
    PushAnswer,
    PushId,
    Removed,
    RolledBack,
    Round,
    Started,
    VersionId,
    Weighed,
)


def findings(run: OuterScript, where: Path) -> dict[int, Finding]:
    (judged,) = audit_folder(run.write(where))
    return {finding.point: finding for finding in judged.findings}


def test_a_sound_job_holds_all_points(tmp_path: Path) -> None:
    found = findings(outer_story(), tmp_path)
    assert {point: finding.verdict for point, finding in found.items()} == dict.fromkeys(range(6, 12), OK), found
    assert "epoch 0: 400 samples (whole), each once" in found[8].details
    assert "40 were taken back by rollbacks" in found[8].text
    assert found[7].text.startswith("6 accepted, 1 rejected, 2 void")


def test_the_made_up_job_is_one_that_the_product_may_write(tmp_path: Path) -> None:
    records = read_events(outer_story().write(tmp_path))
    assert [text for r in records for text in problems(r.name, r.fields)] == []


def test_clusters_with_their_own_data_are_judged_by_sums(tmp_path: Path) -> None:
    run = begun(length=0)
    for cluster in ("home", "near"):
        run.train(cluster, 0, 60)
    home, near = run.freeze("home"), run.freeze("near")
    version = run.round(replace(home, covers=()), replace(near, covers=()))
    run.adopt("home", version)
    found = findings(run, tmp_path)
    assert found[8].verdict == OK
    assert "only the sums" in " ".join(found[8].details)


def test_an_answer_that_is_heard_again_counts_once(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.train("near", 140, 150)
    void = run.freeze("near")
    run.void(void)
    again = run.lines[run.member("near")][-1]
    run.train("near", 150, 160)
    offer = run.freeze("near")
    run.lines[run.member("near")].insert(-1, again)
    run.adopt("near", run.round(offer))
    assert {finding.verdict for finding in findings(run, tmp_path).values()} == {OK}


def test_a_cluster_that_tells_of_no_inner_steps_shows_nothing_of_them(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.drop("inner_steps")
    found = findings(run, tmp_path)[11]
    assert found.verdict == NOT_SHOWN
    assert "tells of no inner steps" in found.details[0]


# ------------------------------------------------------------------------------------------------ planted wrongs


def wrong_hash(run: OuterScript) -> None:
    run.change("entry", lambda line: line["kind"] == "Round", hash="0" * 32)


def wrong_body(run: OuterScript) -> None:
    line = run.change("entry", lambda line: line["kind"] == "Round")
    line["body"]["counters"]["samples"] += 1


def unreadable(run: OuterScript) -> None:
    del run.change("entry", lambda line: line["kind"] == "Round")["body"]["reason"]


def unknown_kind(run: OuterScript) -> None:
    run.change("entry", lambda line: line["kind"] == "Leased", kind="Lunch")


def wrong_name(run: OuterScript) -> None:
    run.change("entry", lambda line: line["kind"] == "Round", version="v2-000000")


def other_chain(run: OuterScript) -> None:
    """Plants an entry of a deposed leader, at a position of the chain that another entry has."""
    last = run.entries[-1]
    run.tell(
        Entry(last.position, last.term - 1, Removed(run.trainers["near"].who, "silent"), last.before), "late.jsonl"
    )


def broken_link(run: OuterScript) -> None:
    last = run.entries[-1]
    run.tell(Entry(last.position + 1, last.term, Removed(run.trainers["near"].who, "silent"), "f" * 32))


def older_term(run: OuterScript) -> None:
    run.term = 0
    run.enter(Removed(run.trainers["near"].who, "silent"))


def one_term_twice(run: OuterScript) -> None:
    line = run.change("outer_leader_started")
    run.say("leader-other-9.jsonl", "outer_leader_started", **{k: line[k] for k in LED}, position=11)
    last = run.entries[-1]
    gone = Removed(run.trainers["near"].who, "silent")
    run.tell(Entry(last.position + 1, last.term, gone, last.hash), "leader-other-9.jsonl")


def number_left_out(run: OuterScript) -> None:
    run.newest = VersionId(run.newest.number + 1, run.newest.hash)
    run.train("home", 80, 90)
    run.round(run.freeze("home"))


def made_of_an_older(run: OuterScript) -> None:
    first = next(e for e in run.entries if e.version.number == 1).version
    run.train("home", 80, 90)
    offer = run.freeze("home")
    weighed, counters = (Weighed(offer, 1.0, 0),), Counters(0, run.counters.samples + offer.samples, 0)
    run.enter(Round(3, first, weighed, (), Factors(0.7, 1.0, 0.9), counters, GateState(), ""))


def founded_twice(run: OuterScript) -> None:
    offer = run.freeze("near")
    run.enter(Founded(run.newest.number + 1, replace(offer, base=NO_VERSION, samples=0, covers=())))


def after_the_end(run: OuterScript) -> None:
    run.mark(run.newest)
    run.enter(Ended(run.newest, "it is enough"))
    run.train("home", 80, 90)
    run.round(run.freeze("home"))


def back_to_nowhere(run: OuterScript) -> None:
    run.enter(RolledBack(run.newest.number + 1, VersionId(1, "ab" * 16), (), "lost"))


LED = ("endpoint", "job", "term", "store")

CHAIN: dict[Callable[[OuterScript], None], str] = {
    wrong_hash: "has hash 00000000000000000000000000000000, its content",
    wrong_body: "its content",
    unreadable: "cannot be read: expected a Round with number",
    unknown_kind: "there is no kind 'Lunch'",
    wrong_name: "is said to make v2-000000, and makes v2-",
    other_chain: "two entries at position 11: late.jsonl has",
    broken_link: "follows ffffffff",
    older_term: "is of term 0, entry 11 before it of 1",
    one_term_twice: "leader-alpha-1.jsonl and leader-other-9.jsonl both led job chars in term 1",
    number_left_out: "follows v2-",
    made_of_an_older: "was the newest",
    founded_twice: "founds the job a second time",
    after_the_end: "was stored after the job had ended",
    back_to_nowhere: "goes back to v1-ababab, from which v2-",
}


def counted_twice(run: OuterScript) -> None:
    offer = next(w.offer for e in run.entries if isinstance(e.body, Round) for w in e.body.accepted)
    run.round(offer)


def other_bytes(run: OuterScript) -> None:
    run.train("near", 140, 150)
    offer = run.freeze("near")
    run.void(offer)
    run.round(replace(offer, manifest="other"))


def out_of_turn(run: OuterScript) -> None:
    run.trainers["near"].number += 1
    run.train("near", 140, 150)
    run.round(run.freeze("near"))


def of_a_stranger(run: OuterScript) -> None:
    run.train("near", 140, 150)
    offer = run.freeze("near")
    run.round(replace(offer, push=PushId(replace(offer.push.incarnation, number=9), 1)))


def of_one_that_is_over(run: OuterScript) -> None:
    run.train("near", 140, 150)
    offer = run.freeze("near")
    run.enter(Removed(offer.push.incarnation, "it was silent"))
    run.round(offer)


def base_of_another_chain(run: OuterScript) -> None:
    run.train("near", 140, 150)
    run.round(replace(run.freeze("near"), base=VersionId(2, "ee" * 16)))


def base_without_its_pushes(run: OuterScript) -> None:
    first = next(e for e in run.entries if e.version.number == 1).version
    run.train("near", 140, 150)
    run.round(replace(run.freeze("near"), base=first))


def heard_otherwise(run: OuterScript) -> None:
    run.change("push_answered", lambda line: line["push"] == "near~2/1", answer="rejected")


def frozen_otherwise(run: OuterScript) -> None:
    run.change("push_frozen", lambda line: line["push"] == "near~2/1", samples=41)


def other_manifest(run: OuterScript) -> None:
    """Plants a round that names other bytes than the cluster froze, though all hashes in the chain are right."""
    run.train("home", 80, 90)
    run.round(replace(run.freeze("home"), manifest="f" * 32))


PUSHES: dict[Callable[[OuterScript], None], str] = {
    other_manifest: "home~1/3 was frozen with manifest mhome~1/3; entry 12 has ffff",
    counted_twice: "home~1/2 is accepted at entry 12, and was accepted at entry 11: it is answered twice (O3)",
    other_bytes: "is not the push that entry 12 names so",
    out_of_turn: "2 is the next number of near~2: out of turn",
    of_a_stranger: "and near~9 never joined",
    of_one_that_is_over: "after near~2 was over: it was silent",
    base_of_another_chain: "whose base v2-eeeeee is of no chain",
    base_without_its_pushes: "does not hold the pushes of near~2 that stand (O3)",
    heard_otherwise: "near~2 heard that near~2/1 is rejected by v2-",
    frozen_otherwise: "near~2/1 was frozen on v1-",
}


def spent_twice(run: OuterScript) -> None:
    run.train("near", 130, 150)
    run.round(run.freeze("near"))


def not_leased(run: OuterScript) -> None:
    run.train("near", 190, 210)
    run.round(run.freeze("near"))


def leased_twice(run: OuterScript) -> None:
    run.lease("home", 150, 160)


def leased_when_spent(run: OuterScript) -> None:
    run.lease("home", 50, 60)


def epoch_left(run: OuterScript) -> None:
    run.lease("home", 0, 10, epoch=1)


def wrong_sum(run: OuterScript) -> None:
    run.counters = replace(run.counters, samples=run.counters.samples + 5)
    run.train("near", 140, 150)
    run.round(run.freeze("near"))


def more_than_it_covers(run: OuterScript) -> None:
    run.train("near", 140, 150)
    run.round(replace(run.freeze("near"), samples=20))


def with_another(change: Callable[[Round], Round]) -> Callable[[OuterScript], None]:
    """Returns a function that plants a round changed by `change`, with all hashes in the chain right."""

    def plant(run: OuterScript) -> None:
        run.train("home", 80, 90)
        run.train("near", 140, 160)
        run.round(run.freeze("home"), run.freeze("near"), changed=change)

    return plant


def weighing(body: Round, **changed: object) -> Round:
    first, *others = body.accepted
    return replace(body, accepted=(replace(first, **changed), *others))  # type: ignore[arg-type]


double_weight = with_another(lambda body: weighing(body, factor=2 * body.accepted[0].factor))
wrong_age = with_another(lambda body: weighing(body, staleness=7))
lengthened = with_another(lambda body: weighing(body, part=1.5))
triple_rate = with_another(lambda body: replace(body, factors=replace(body.factors, rate=3 * body.factors.rate)))
other_momentum = with_another(lambda body: replace(body, factors=replace(body.factors, momentum=0.5)))
fast_clock = with_another(
    lambda body: replace(body, counters=replace(body.counters, ticks=body.counters.ticks + 10**9))
)
pending_lost = with_another(lambda body: replace(body, counters=replace(body.counters, pending=1)))


SAMPLES: dict[Callable[[OuterScript], None], str] = {
    double_weight: "home~1/3 weighs 1.2: by its samples and those of the others 0.6",
    wrong_age: "home~1/3 is said to be 7 versions old, its base is 0 versions old",
    lengthened: "home~1/3 is shortened to 1.5 of its length; expected more than 0, and at most 1",
    triple_rate: "its rate is",
    other_momentum: "its factor momentum is 0.5, expected",
    fast_clock: "its clock goes from",
    pending_lost: "samples wait for the momentum, expected",
    spent_twice: "near~2/2 spends positions [130, 140) of epoch 0, which near~2/1 spent",
    not_leased: "near~2/2 spends positions [200, 210) of epoch 0, not leased to near~2",
    leased_twice: "leases positions [150, 160) of epoch 0 to home~1, which are leased to near~2",
    leased_when_spent: "leases positions [50, 60) of epoch 0 to home~1, which home~1/2 spent",
    epoch_left: "leases epoch 1 while positions [60, 100), [140, 400) of epoch 0 have not counted",
    wrong_sum: "counts 115 samples: its pushes cover 10, and v2-",
    more_than_it_covers: "near~2/2 covers 10 positions and counts 20 samples",
}


def other_digest(run: OuterScript) -> None:
    run.change("version_saved", digest="odd")


def marked_and_not_standing(run: OuterScript) -> None:
    run.enter(Durable(VersionId(2, "cd" * 16), ("a", "b")))


def marked_backwards(run: OuterScript) -> None:
    first = next(e for e in run.entries if e.version.number == 1).version
    run.mark(run.newest)
    run.mark(first)


def one_digest_short(run: OuterScript) -> None:
    run.enter(Durable(run.newest, (run.digest(run.newest, 0),)))


def too_far_ahead(run: OuterScript) -> None:
    for start in (140, 150, 160):
        run.train("near", start, start + 10)
        run.adopt("near", run.round(run.freeze("near")))


def ended_in_the_air(run: OuterScript) -> None:
    run.enter(Ended(run.newest, "it is enough"))


def too_far_back(run: OuterScript) -> None:
    first = next(e for e in run.entries if e.version.number == 1).version
    run.mark(run.newest)
    run.train("near", 140, 150)
    offer = run.freeze("near")
    run.mark(run.round(offer))
    run.roll_back(first, Counters(), offer.push)


def one_left_out(run: OuterScript) -> None:
    name = str(run.newest)
    run.train("near", 140, 150)
    run.round(run.freeze("near"))
    source = run.file("f1")
    lines = run.lines[source]
    run.lines[source] = [x for x in lines if x["name"] != "version_computed" or x["version"] != name]


def not_staged(run: OuterScript) -> None:
    run.drop("push_staged", lambda line: line["push"] == "near~2/1")


def decided_before_it_was_staged(run: OuterScript) -> None:
    lines = run.lines[run.file("f0")]
    decided = next(x for x in run.lines[run.leader] if x["name"] == "entry" and x["version"].startswith("v2"))
    run.change("push_staged", lambda line: line["push"] == "near~2/1" and line in lines, t=decided["t"] + 0.005)
    lines.sort(key=lambda line: line["t"])


def computed_elsewhere(run: OuterScript) -> None:
    run.say(run.file("f0"), "version_computed", version="v2-123456", seconds=0.1, nbytes=1)


DURABLE: dict[Callable[[OuterScript], None], str] = {
    other_digest: "follower f0 saved shard 0 of v1-",
    marked_and_not_standing: "v2-cdcdcd is marked at entry 12 and does not stand",
    marked_backwards: "is marked at entry 13 after v2-",
    one_digest_short: "is marked with 1 digests of 2 shards",
    too_far_ahead: "is decided more than 3 versions ahead of the newest durable one (O5)",
    ended_in_the_air: "which is not durable (O16)",
    too_far_back: "the second newest durable one (O5a)",
    one_left_out: "follower f1 computed v3-",
    not_staged: "follower f0 computed v2-",
    decided_before_it_was_staged: "was decided before follower f0 had staged near~2/1 (O2)",
    computed_elsewhere: "follower f0 computed v2-123456, and the chain's version 2 is v2-",
}


def adopted_elsewhere(run: OuterScript) -> None:
    run.change("version_adopted", lambda line: line["version"].startswith("v2"), version="v2-123456")


def fetched_elsewhere(run: OuterScript) -> None:
    run.change("version_fetched", lambda line: line["version"].startswith("v2"), version="v2-123456")


def adopted_unanswered(run: OuterScript) -> None:
    run.train("near", 140, 150)
    offer = run.freeze("near")
    run.adopt("near", run.newest)
    run.round(offer)


def adopted_an_older(run: OuterScript) -> None:
    run.adopt("near", next(e for e in run.entries if e.version.number == 1).version)


def adopted_before_its_answer(run: OuterScript) -> None:
    old = run.newest
    run.train("near", 140, 150)
    run.round(run.freeze("near"))
    run.adopt("near", old)


def kept_after_a_rejection(run: OuterScript) -> None:
    run.train("near", 140, 150)
    run.adopt("near", run.round(rejected=(run.freeze("near"),)))


def delta_to_another_base(run: OuterScript) -> None:
    run.train("near", 140, 150)
    run.trainers["near"].base = next(e for e in run.entries if e.version.number == 1).version
    run.void(run.freeze("near"))


ADOPTED: dict[Callable[[OuterScript], None], str] = {
    adopted_elsewhere: "adopted v2-123456, and the chain's version 2 is v2-",
    fetched_elsewhere: "fetched v2-123456, and the chain's version 2 is v2-",
    adopted_unanswered: "was adopted while near~2/2 had no answer (O8)",
    adopted_an_older: "which is newer (O8)",
    adopted_before_its_answer: "was adopted after an answer by version 3, which is newer (O8)",
    kept_after_a_rejection: "was adopted after a rejection, and not outright (O10)",
    delta_to_another_base: "was adopted last (O9)",
}


def pushed_twice(run: OuterScript) -> None:
    """Plants a push that covers a step which an earlier push covers already."""
    home = run.trainers["home"]
    home.steps += 1
    run.void(run.freeze("home"))


def pushed_never(run: OuterScript) -> None:
    run.trainers["home"].steps -= 1
    run.void(run.freeze("home"))


def void_and_forgotten(run: OuterScript) -> None:
    run.train("near", 140, 150)
    run.void(run.freeze("near"))
    run.trainers["near"].steps = 0
    run.trainers["near"].spans = []
    run.train("near", 150, 160)
    run.round(run.freeze("near"))


def kept_what_a_rejection_discards(run: OuterScript) -> None:
    run.train("near", 140, 150)
    bad = run.freeze("near")
    run.train("near", 150, 160)
    near = run.trainers["near"]
    steps, spans = near.steps, list(near.spans)
    run.adopt("near", run.round(rejected=(bad,)), outright=True)
    near.steps, near.spans = steps, spans
    run.void(run.freeze("near"))


PROGRESS: dict[Callable[[OuterScript], None], str] = {
    pushed_twice: "home~1/3 covers 3 steps and 20 samples; 2 and 20 were trained and in no push: some are in two",
    pushed_never: "some are in none",
    void_and_forgotten: "some are in none",
    kept_what_a_rejection_discards: "near~2/3 covers 1 steps and 10 samples; 0 and 0 were trained",
}

PLANTED = [
    pytest.param(point, plant, words, id=f"{point}-{plant.__name__}")
    for point, plants in {6: CHAIN, 7: PUSHES, 8: SAMPLES, 9: DURABLE, 10: ADOPTED, 11: PROGRESS}.items()
    for plant, words in plants.items()
]


@pytest.mark.parametrize(("point", "plant", "words"), PLANTED)
def test_a_planted_wrong_is_named(point: int, plant: Callable[[OuterScript], None], words: str, tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    assert {f.verdict for f in findings(run, tmp_path / "sound").values()} == {OK}
    plant(run)
    found = findings(run, tmp_path / "wrong")[point]
    assert found.verdict == VIOLATED, found
    assert any(words in line for line in found.details), found.details


# ------------------------------------------------------------------------------------------------ gaps


def test_an_entry_that_no_log_has_is_named_and_proves_nothing(tmp_path: Path) -> None:
    run = outer_story()
    gone = next(e for e in run.entries if isinstance(e.body, RolledBack))
    run.drop("entry", lambda line: line["position"] == gone.position)
    found = findings(run, tmp_path)
    assert {point: finding.verdict for point, finding in found.items() if point < 9} == {
        6: NOT_SHOWN,
        7: NOT_SHOWN,
        8: NOT_SHOWN,
    }
    assert f"entry {gone.position} is in no log" in found[6].details
    assert found[10].verdict == NOT_SHOWN, "what was adopted is not known"


def test_a_double_count_that_a_gap_may_explain_is_a_doubt(tmp_path: Path) -> None:
    run = begun()
    _, near = one_round(run)
    run.logged = False
    run.enter(Removed(run.trainers["home"].who, "a rollback may stand here as well"))
    run.logged = True
    run.round(near)
    found = findings(run, tmp_path)
    assert found[7].verdict == NOT_SHOWN
    assert any("near~2/1 is accepted at entry 13" in line and "explains it" in line for line in found[6].details)


def test_what_comes_after_the_last_entry_is_not_shown(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.logged = False
    run.train("near", 140, 150)
    run.adopt("near", run.round(run.freeze("near")))
    found = findings(run, tmp_path)
    assert {point: finding.verdict for point, finding in found.items()} == {
        6: NOT_SHOWN, 7: NOT_SHOWN, 8: OK, 9: OK, 10: NOT_SHOWN, 11: OK,
    }  # fmt: skip
    assert "near~2 heard that near~2/2 is accepted; no log has the entry" in found[7].details
    assert any("entries that made v3-" in line for line in found[6].details)


def test_lines_that_a_full_disk_took_are_said_and_count_for_nothing(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    near = run.member("near")
    run.say(near, "lost", count=3, since=run.now)
    run.change("inner_steps", lambda line: line["samples"] == 40, samples=10)
    found = findings(run, tmp_path)
    assert {finding.verdict for finding in found.values()} == {OK}
    assert f"3 lines of {near} were lost" in found[6].details
    assert f"{near} lacks lines" in " ".join(found[11].details)


def test_a_cluster_that_wrote_no_log_here_is_named(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    del run.lines[run.member("near")]
    assert "near~2 joined and wrote no log here" in findings(run, tmp_path)[10].details


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("there", [0, 5], ids=["empty", "an older copy"])
def test_a_leader_on_another_store_that_decides_nothing_is_no_second_leader(tmp_path: Path, there: int) -> None:
    run = begun()
    one_round(run)
    line = next(line for line in run.lines["leader-alpha-1.jsonl"] if line["name"] == "outer_leader_started")
    other = "leader-other-9.jsonl"
    run.opened(other, "leader")
    run.say(other, "outer_leader_started", **{k: line[k] for k in LED}, position=there)
    if there:
        run.tell(run.entries[there - 1], other)
    run.tell(Entry(there + 1, 1, Started("f0", "feed"), run.entries[there - 1].hash if there else ""), other)
    run.train("near", 140, 160)
    run.adopt("near", run.round(run.freeze("near")))
    found = findings(run, tmp_path)
    assert {finding.verdict for finding in found.values()} == {OK}
    assert f"{other} led on another store, and decided nothing that counts" in found[6].details


def test_a_server_that_is_started_on_another_jobs_folder_is_a_job_of_its_own(tmp_path: Path) -> None:
    run = outer_story()
    line = next(line for line in run.lines["leader-alpha-1.jsonl"] if line["name"] == "outer_leader_started")
    other, follower = "leader-other-9.jsonl", "follower-other-9.jsonl"
    run.opened(other, "leader")
    run.say(other, "outer_leader_started", **{k: line[k] for k in LED}, position=5, chain="c0ffee")
    run.tell(Entry(5, 1, Joined(PushId(run.trainers["near"].who, 9).incarnation, "far", 1), "dead"), other)
    run.opened(follower, "follower")
    run.say(follower, "follower_started", follower="one", endpoint="one:4000", files=[])
    run.say(follower, "version_loaded", version="v2-abcdef", seconds=0.1, chain="c0ffee")
    own, apart = audit_folder(run.write(tmp_path))
    assert {finding.verdict for finding in own.findings} == {OK}
    assert VIOLATED not in {finding.verdict for finding in apart.findings}


def test_two_leaders_tell_the_same_entries_once(tmp_path: Path) -> None:
    run = outer_story()
    run.tell(run.entries[4], run.leader)
    assert {f.verdict for f in findings(run, tmp_path).values()} == {OK}


def test_jobs_one_after_the_other_are_told_apart(tmp_path: Path) -> None:
    first, second = outer_story(), begun()
    second.pid = 2
    for lines in second.lines.values():
        for line in lines:
            line["t"] += 100
    first.write(tmp_path)
    second.lines = {name.replace("-1.jsonl", "-2.jsonl"): lines for name, lines in second.lines.items()}
    judged = audit_folder(second.write(tmp_path))
    assert [one.title for one in judged] == ["outer job 1", "outer job 2"]
    assert {f.verdict for f in judged[0].findings} == {OK}


def test_a_lost_store_is_no_new_job_while_anybody_of_the_old_one_goes_on(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    run.entries, run.term = [], 0
    run.lead("gamma")
    run.enter(Removed(run.trainers["near"].who, "silent"))
    run.train("home", 80, 90)
    found = findings(run, tmp_path)
    assert found[6].verdict == VIOLATED
    assert "two entries at position 1" in found[6].details[0]


@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_folder_with_an_elastic_cluster_is_judged_both_ways(tmp_path: Path, in_one_file: bool) -> None:
    """An elastic cluster's logs are audited as an elastic job and as a cluster of the outer job, whether its outer
    events are in the inner job's log file or in one of their own.
    """
    run, inner = outer_story(), Script()
    inner.found(["a", "b"])
    inner.steps(20)
    inner.close()
    source = inner.sources["a~1"]
    home = run.lines.pop(run.member("home"))
    if in_one_file:
        inner.lines[source] += [line for line in home if line["name"] != "opened"]
    else:
        home[0]["pid"] = inner.pid
        run.lines["cluster-home.jsonl"] = home
    run.write(tmp_path)
    outer, members = audit_folder(inner.write(tmp_path))
    assert (outer.title, {f.verdict for f in outer.findings}) == ("outer job", {OK})
    assert members.title == "elastic cluster home"
    assert {f.point: f.verdict for f in members.findings} == {1: OK, 2: OK, 3: OK, 4: NOT_SHOWN, 5: NOT_SHOWN}


def test_the_command_says_both_and_ends_as_it_should(tmp_path: Path) -> None:
    run = begun()
    one_round(run)
    done = CliRunner().invoke(app, ["audit", str(run.write(tmp_path))])
    assert done.exit_code == 0, done.output
    assert "6  OK         versions form one chain: 11 entries, 2 versions, in 1 leaders' logs" in done.output
    run.answer(run.freeze("near"), PushAnswer.ACCEPTED, NO_VERSION)
    counted_twice(run)
    done = CliRunner().invoke(app, ["audit", str(run.write(tmp_path))])
    assert done.exit_code == 1
    assert "outer job" in done.output
    assert "VIOLATED: 2 of 6 points" in done.output


def test_a_clusters_log_that_was_cut_off_shows_less(tmp_path: Path) -> None:
    """Former bug: with half of a cluster's log missing, the audit still said that all points hold; now it says what it
    cannot show.
    """
    run = outer_story()
    source = run.member("home")
    frozen = [number for number, line in enumerate(run.lines[source]) if line["name"] == "push_frozen"]
    del run.lines[source][frozen[-2] :]
    found = findings(run, tmp_path)[7]
    assert found.verdict == NOT_SHOWN
    assert any("the log of home~1 lacks 2 pushes that the chain has, from home~1/" in line for line in found.details)


def test_an_older_copy_that_decided_nothing_is_no_fork(tmp_path: Path) -> None:
    """A leader on an older copy of the chain that wrote starts of followers only, before the newest copy was put back,
    is no second branch.
    """
    run = outer_story()
    older = next(entry for entry in run.entries if isinstance(entry.body, Joined) and entry.position > 5)
    stray = Entry(older.position + 1, 9, Started("f0", "again"), older.hash)
    run.tell(stray, "leader-older-7.jsonl")
    run.tell(Entry(stray.position + 1, 9, Started("f1", "again"), stray.hash), "leader-older-7.jsonl")
    found = findings(run, tmp_path)
    assert {point.verdict for point in found.values()} == {OK}
    assert any("behind an older copy of the chain" in line for line in found[6].details)
