"""Leases of samples: which cluster may train which positions of a shared epoch, and what answers, removals and
rollbacks change.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chaos_lightning.outer.rules.leases import Aside, Leases, wanted
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Covered,
    IncarnationId,
    Leased,
    Offer,
    PushId,
    RolledBack,
    VersionId,
)
from chaos_lightning.planning.batches import Batches
from chaos_lightning.protocol.spans import count, normalise, subtract

A, B, C, D = (IncarnationId(name, 1) for name in "abcd")


def spans_of(positions):
    return normalise((p, p + 1) for p in positions)


def positions_of(spans):
    return [p for start, stop in spans for p in range(start, stop)]


def offer(who, number, *spans, epoch=0, samples=None):
    samples = count(spans) if samples is None else samples
    return Offer(PushId(who, number), NO_VERSION, "m", samples, 1, (Covered(epoch, spans),))


def back(to, *lost, number=99):
    return RolledBack(number, VersionId(to, "h"), tuple(push.push for push in lost), "a disk is gone")


def again(leases):
    """Returns leases encoded into a chain's summary and decoded again."""
    return Leases.decode(json.loads(json.dumps(leases.encode())))


FOURS = Batches(4, 4)
"""Batches of all clusters, unless a test says otherwise."""


def leases_of(*clusters, length=40, kind=Leases):
    leases = kind(length)
    for who in clusters:
        leases.join(who)
    return leases


def granted(leases, who, samples, among=None, batches=FOURS):
    body = leases.grant(who, samples, batches, among) or leases.grant_rest(who, batches, among)
    if body is None:
        return ()
    leases.lease(body)
    return body.spans


# ---------------------------------------------------------------------- arithmetic


def test_a_cluster_gets_what_it_trains_in_a_while():
    assert wanted(10.0, 120.0, 0) == 1200
    assert wanted(10.0, 120.0, 1150) == 50
    assert wanted(10.0, 120.0, 5000) == 0
    assert wanted(0.0, 120.0, 0) == 1, "a newcomer without a measured rate gets something"
    assert wanted(0.0, 120.0, 1) == 0


def test_an_epoch_without_positions_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Leases(0)


# ---------------------------------------------------------------------- grants


def test_steps_go_out_whole_and_lowest_first():
    leases = leases_of(A, B)
    assert granted(leases, A, 11) == ((0, 8),), "no part of a step"
    assert granted(leases, B, 1) == ((8, 12),)
    assert granted(leases, A, 4) == ((12, 16),)
    assert leases.leased(A) == {0: ((0, 8), (12, 16))}
    assert leases.held(A) == 12
    leases.remove(A)
    assert granted(leases, B, 12) == ((0, 8), (12, 16)), "a hole that does not fill a demand does not end a grant"
    assert granted(leases, B, 100) == ((16, 40),)
    assert leases.grant(B, 1, FOURS) is None
    assert leases.left == 40


def test_what_a_dead_one_leaves_is_dealt_again_in_whole_steps():
    leases = leases_of(A, B, length=10)
    granted(leases, A, 4)
    leases.accept(offer(A, 1, (0, 3)), 1)
    leases.remove(A)
    assert granted(leases, B, 1) == ((3, 7),)
    assert granted(leases, B, 5) == ((7, 10),), "the rest, of which nobody makes a step"


@pytest.mark.parametrize(
    ("batches", "length", "leased", "taken", "aside"),
    [
        (Batches(8, 8), 17, [8, 8, 1], [8, 8, 1], 0),
        (Batches(8, 8, 2), 17, [8, 9], [8, 7, 2], 0),
        (Batches(8, 8, 2), 19, [8, 8, 3], [8, 8, 3], 0),
        (Batches(8, 8, 2), 1, [], [], 1),
        (Batches(8, 8, 8), 19, [8, 8], [8, 8], 3),
        (Batches(16, 4, 4), 39, [16, 16, 4], [4] * 9, 3),
        (Batches(16, 8, 2), 41, [16, 16, 9], [8, 8, 8, 8, 7, 2], 0),
        (Batches(16, 8, 4), 2, [], [], 2),
    ],
    ids=["any", "two at least", "a rest of three", "too few", "drop_last", "drop_last, accumulated", "both", "devices"],
)
def test_an_epoch_s_last_positions(batches, length, leased, taken, aside):
    """At the end of an epoch positions are leased in whole steps if possible, no batch is smaller than `least`, and the
    rest is set aside.
    """
    leases, found, sizes = leases_of(A, length=length), [], []
    while (body := leases.grant(A, 1, batches) or leases.grant_rest(A, batches)) is not None:
        leases.lease(body)
        found.append(count(body.spans))
        there = found[-1]
        while size := batches.next(batches.batch, there):
            sizes.append(size)
            there -= size
        assert there == 0
    assert (found, sizes) == (leased, taken)
    left = leases.left_over()
    assert (count(left.spans) if left else 0) == aside
    if left:
        leases.set_aside(left)
        assert leases.free == (length if not leased else 0), "of the next epoch, if nothing was leased"
        shown = [str(each) for each in again(leases).aside]
        assert (leases.epoch, shown == []) == ((1, True) if not leased else (0, False))
        assert not shown or shown[0].startswith(
            f"positions [{length - aside}, {length}) of epoch 0 are set aside: they"
        )
        with pytest.raises(ValueError, match=r"not free|epoch 1 is leased"):
            leases.set_aside(left)


def test_nothing_is_leased_without_a_demand_or_to_a_stranger():
    leases = leases_of(A)
    assert leases.grant(A, 0, FOURS) is None
    with pytest.raises(ValueError, match="b~1 is not in the job"):
        leases.grant(B, 1, FOURS)
    with pytest.raises(ValueError, match="b~1 is not in the job"):
        leases.lease(Leased(B, 0, ((0, 4),)))
    with pytest.raises(ValueError, match="b~1 is not in the job"):
        leases.remove(B)
    with pytest.raises(ValueError, match="a~1 is in the job already"):
        leases.join(A)


def test_a_lease_of_what_is_not_free_is_refused():
    leases = leases_of(A, B)
    granted(leases, A, 4)
    with pytest.raises(ValueError, match=r"positions \[2, 4\) of epoch 0 are leased to a~1, not free"):
        leases.lease(Leased(B, 0, ((2, 6),)))
    with pytest.raises(ValueError, match=r"positions \[40, 41\) of epoch 0 are beyond its end"):
        leases.lease(Leased(B, 0, ((40, 41),)))
    with pytest.raises(ValueError, match="a lease of epoch 1 for b~1; epoch 0 is leased"):
        leases.lease(Leased(B, 1, ((0, 4),)))


def test_work_is_linear_in_spans_not_in_positions():
    leases, large = leases_of(A, B, length=10**15), Batches(10**9, 10**9)
    assert granted(leases, A, 10**12, batches=large) == ((0, 10**12),)
    leases.reject(offer(A, 1, (0, 10**11)))
    assert granted(leases, A, 1, batches=large) == ((10**11, 10**11 + 10**9),)
    assert granted(leases, B, 10**15, batches=large) == ((0, 10**11), (10**11 + 10**9, 10**15))
    assert len(json.dumps(leases.encode())) < 1000


# ---------------------------------------------------------------------- objections


def test_objections_name_what_is_wrong():
    leases = leases_of(A, B, C)
    granted(leases, A, 8)
    granted(leases, B, 4)
    leases.accept(offer(A, 1, (0, 4)), 1)
    before = leases.encode()
    assert leases.objection(offer(A, 2, (4, 8))) == ""
    for push, words in [
        (offer(A, 2, (0, 8)), "positions [0, 4) of epoch 0 are spent by a~1/1, not leased to a~1"),
        (offer(A, 2, (6, 10)), "positions [8, 10) of epoch 0 are leased to b~1, not leased to a~1"),
        (offer(A, 2, (4, 8), (12, 14)), "positions [12, 14) of epoch 0 are free, not leased to a~1"),
        (offer(C, 1, (38, 44)), "positions [38, 40) of epoch 0 are free, not leased to c~1"),
        (offer(A, 2, (4, 8), samples=5), "it covers 4 positions and names 5 samples"),
        (offer(A, 2, (6, 8), (4, 6)), "spans ((6, 8), (4, 6)) are not normal; expected ((4, 8),)"),
        (offer(A, 2, (4, 7), (6, 8)), "push a~1/2: positions [6, 7) are named twice"),
        (offer(A, 2, (7, 5)), "push a~1/2: (7, 5) is no span"),
        (offer(A, 2, (4, 8), epoch=1), "epoch 1 is not begun; epoch 0 is leased"),
        (offer(D, 1, (4, 8)), "d~1 is not in the job"),
    ]:
        assert leases.objection(push).startswith(words)
        with pytest.raises(ValueError, match="round 2 accepts push"):
            leases.accept(push, 2)
    leases.settle(1)
    assert "are spent, not leased" in leases.objection(offer(A, 2, (0, 8)))
    assert leases.encode() != before, "what is settled is not held any more"


def test_a_thawed_cluster_has_no_lease():
    leases = leases_of(A, B)
    granted(leases, A, 4)
    leases.remove(A)
    assert leases.objection(offer(A, 1, (0, 4))) == "a~1 is not in the job"
    assert leases.reject(offer(A, 1, (0, 4))) == ()
    assert granted(leases, B, 4) == ((0, 4),)
    assert leases.grant(B, 4, FOURS) == Leased(B, 0, ((4, 8),))


def test_a_push_that_was_not_judged_says_nothing_about_its_samples():
    leases = leases_of(A, B)
    granted(leases, A, 4)
    granted(leases, B, 4)
    assert leases.reject(offer(B, 1, (0, 8))) == ()
    assert leases.leased(A) == {0: ((0, 4),)}
    assert leases.leased(B) == {}
    assert granted(leases, B, 4) == ((4, 8),)


# ---------------------------------------------------------------------- rejections


def test_a_rejection_gives_back_the_push_and_what_was_trained_since():
    leases = leases_of(A, B)
    granted(leases, A, 12)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.reject(offer(A, 2, (4, 8)))
    assert leases.leased(A) == {}
    assert granted(leases, A, 4) == ((8, 12),), "what the push did not cover is not held against it"
    assert granted(leases, B, 4) == ((4, 8),)


def test_rejected_samples_go_to_another_cluster_while_there_is_one():
    leases = leases_of(A, B, length=8)
    granted(leases, A, 4)
    leases.reject(offer(A, 1, (0, 4)))
    assert granted(leases, A, 8) == ((4, 8),)
    assert leases.grant(A, 8, FOURS, among=[A, B]) is None
    assert leases.grant(A, 8, FOURS, among=[A]) == Leased(A, 0, ((0, 4),)), "the other one does not train"
    leases.remove(A)
    leases.join(IncarnationId("a", 2))
    assert leases.grant(IncarnationId("a", 2), 4, FOURS) == Leased(IncarnationId("a", 2), 0, ((4, 8),)), (
        "the same cluster"
    )
    leases.remove(B)
    assert leases.grant(IncarnationId("a", 2), 4, FOURS) == Leased(IncarnationId("a", 2), 0, ((0, 4),))


def test_samples_that_all_have_rejected_go_to_any_but_the_last():
    leases = leases_of(A, B, C, length=4)
    for who in (A, B):
        granted(leases, who, 4)
        assert leases.reject(offer(who, 1, (0, 4))) == ()
    assert leases.grant(A, 4, FOURS) is None
    leases.remove(C)
    assert leases.grant(B, 4, FOURS) is None
    assert leases.grant(A, 4, FOURS) == Leased(A, 0, ((0, 4),))


def test_three_incarnations_set_samples_aside():
    leases = leases_of(A, B, C, D, length=8)
    found = ()
    for who in (A, B, C):
        assert found == ()
        assert granted(leases, who, 4) == ((0, 4),)
        found = leases.reject(offer(who, 1, (0, 3)))
    assert found == leases.aside == (Aside(0, ((0, 3),), (A, B, C)),)
    assert str(found[0]) == (
        "positions [0, 3) of epoch 0 are set aside: pushes that cover them were rejected at a~1, b~1, c~1"
    )
    assert leases.left == 5
    assert granted(leases, D, 8) == ((3, 7),)
    assert granted(leases, D, 8) == ((7, 8),)
    assert "are set aside" in leases.objection(offer(D, 1, (2, 4)))
    leases.accept(offer(D, 1, (3, 8)), 1)
    assert leases.over(0)
    assert leases.epoch == 1


def test_three_rejections_at_all_that_are_left_set_samples_aside():
    leases = leases_of(A, length=8)
    for number in (1, 2, 3):
        assert leases.aside == ()
        assert granted(leases, A, 4) == ((0, 4),)
        leases.reject(offer(A, number, (0, 4)))
    assert leases.aside == (Aside(0, ((0, 4),), (A, A, A)),)
    two = leases_of(A, B, length=8)
    for number, who in enumerate((A, B, A)):
        assert two.aside == ()
        assert granted(two, who, 1, among=(A, B)) == ((0, 4),)
        two.reject(offer(who, number, (0, 4)))
    assert two.aside == (Aside(0, ((0, 4),), (A, B, A)),)
    three = leases_of(A, B, C, length=8)
    for number, who in enumerate((A, B, A)):
        assert granted(three, who, 1, among=(A, B)) == ((0, 4),)
        three.reject(offer(who, number, (0, 4)))
    assert three.aside == (), "the third cluster did not train, and may think better of it"


def test_who_is_rejected_three_times_in_a_row_must_end():
    leases = leases_of(A, B, length=100)
    for number in range(1, 6):
        (start, stop) = granted(leases, A, 4)[0]
        if number == 2:
            leases.accept(offer(A, number, (start, stop)), number)
        else:
            leases.reject(offer(A, number, (start, stop)))
        assert leases.failing == ((A,) if number == 5 else ())
    assert again(leases).failing == (A,)
    leases.remove(A)
    assert leases.failing == ()
    assert leases.living == (B,)


# ---------------------------------------------------------------------- void, removal, rollback, epochs


def test_a_void_push_is_covered_by_the_next_one():
    leases = leases_of(A)
    granted(leases, A, 8)
    before = leases.encode()
    leases.void(offer(A, 1, (0, 4)))
    assert leases.encode() == before
    leases.accept(offer(A, 2, (0, 6)), 1)
    assert leases.leased(A) == {0: ((6, 8),)}


def rolled_back():
    """Returns leases after three rounds, with pushes of A in each and of B in the second; rounds 2 and 3 are rolled
    back.
    """
    leases = leases_of(A, B)
    granted(leases, A, 16)
    granted(leases, B, 4)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.accept(offer(A, 2, (4, 8)), 2)
    leases.accept(offer(B, 1, (16, 20)), 2)
    leases.accept(offer(A, 3, (8, 12)), 3)
    leases.rollback(back(1))
    return leases


def test_a_rollback_leases_again_what_can_be_offered_again():
    leases = rolled_back()
    assert leases.spent(0) == ((0, 4),)
    assert leases.leased(A) == {0: ((4, 16),)}
    assert leases.leased(B) == {0: ((16, 20),)}
    assert leases.held(A) == 4, "what its kept pushes cover it has trained"
    assert granted(leases, B, 1) == ((20, 24),)
    leases.accept(offer(A, 2, (4, 8)), 5)
    leases.accept(offer(A, 3, (8, 12)), 6)
    assert leases.held(A) == 4
    with pytest.raises(ValueError, match=r"positions \[8, 12\) of epoch 0 are spent by a~1/3, not leased to a~1"):
        leases.accept(offer(A, 3, (8, 12)), 7)


def test_a_rollback_gives_back_what_nobody_can_offer_again():
    leases = leases_of(A, B, C)
    for who in (A, B, C):
        granted(leases, who, 8)
    lost, over = offer(A, 1, (0, 4)), offer(B, 1, (8, 12))
    leases.accept(lost, 1)
    leases.accept(over, 2)
    leases.remove(B)
    leases.rollback(back(0, lost))
    assert leases.spent(0) == ()
    assert leases.leased(A) == {0: ((4, 8),)}
    assert granted(leases, C, 12) == ((0, 4), (8, 16))


def test_a_rejection_after_a_rollback_leaves_other_kept_pushes_their_leases():
    leases = rolled_back()
    leases.reject(offer(A, 2, (4, 8)))
    assert leases.leased(A) == {0: ((8, 12),)}
    assert granted(leases, B, 8) == ((4, 8), (12, 16))
    leases.void(offer(A, 3, (8, 12)))
    assert leases.leased(A) == {0: ((8, 12),)}, "the next one covers it"
    leases.reject(offer(A, 4, (8, 12)))
    assert leases.leased(A) == {}


def test_a_rejected_push_that_covers_what_a_kept_one_covers_leaves_it_alone():
    leases = rolled_back()
    leases.remove(B)
    for number in (4, 5, 6):
        leases.reject(offer(A, number, (4, 8)))
    assert leases.aside == ()
    assert leases.leased(A) == {0: ((4, 12),)}
    leases.accept(offer(A, 2, (4, 8)), 5)


def test_removal_after_a_rollback_ends_all_leases():
    leases = rolled_back()
    leases.remove(A)
    assert [name for name, *_ in leases.encode()["unanswered"]] == ["b"]
    assert granted(leases, B, 12) == ((4, 16),)
    assert leases.objection(offer(A, 2, (4, 8)))


def test_a_rollback_leaves_rejections_as_they_are():
    leases = leases_of(A, B, length=8)
    granted(leases, A, 8)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.reject(offer(A, 2, (4, 8)))
    leases.rollback(back(0))
    assert leases.leased(A) == {0: ((0, 4),)}
    assert leases.grant(A, 4, FOURS) is None
    assert leases.grant(B, 4, FOURS) == Leased(B, 0, ((4, 8),))


def test_a_rollback_does_not_go_behind_what_is_settled():
    leases = leases_of(A)
    granted(leases, A, 8)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.accept(offer(A, 2, (4, 8)), 2)
    leases.settle(1)
    with pytest.raises(ValueError, match="rounds up to 1 cannot be taken back"):
        leases.rollback(back(0))
    leases.rollback(back(1))
    assert leases.spent(0) == ((0, 4),)


def test_a_used_up_lease_ends_no_epoch():
    leases = leases_of(A, B, length=8)
    granted(leases, A, 4)
    granted(leases, B, 4)
    leases.accept(offer(A, 1, (0, 4)), 1)
    assert leases.grant(A, 4, FOURS) is None
    assert (leases.epoch, leases.left, leases.over(0)) == (0, 4, False)
    leases.accept(offer(B, 1, (4, 8)), 2)
    assert (leases.epoch, leases.left, leases.over(0)) == (1, 8, True)
    assert leases.grant(A, 4, FOURS) == Leased(A, 1, ((0, 4),))
    leases.settle(2)
    assert leases.spent(0) == ((0, 8),)
    assert leases.spent(7) == ()
    assert leases.objection(offer(A, 2, (0, 4))) == "epoch 0 is over; epoch 1 is leased"


def test_a_rollback_opens_an_epoch_again():
    leases = leases_of(A, B, length=8)
    granted(leases, A, 4)
    granted(leases, B, 4)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.accept(offer(B, 1, (4, 8)), 2)
    assert granted(leases, A, 4) == ((0, 4),)
    leases.remove(B)
    leases.rollback(back(1))
    assert leases.leased(A) == {1: ((0, 4),)}, "leases stand"
    assert leases.epoch == 0
    assert leases.grant(A, 1, FOURS) == Leased(A, 0, ((4, 8),))
    leases.accept(offer(A, 2, (0, 4), epoch=1), 4)
    granted(leases, A, 1)
    leases.accept(offer(A, 3, (4, 8)), 5)
    assert (leases.epoch, leases.left) == (1, 4)


def test_a_summary_that_names_a_position_twice_is_refused():
    plain = rolled_back().encode()
    plain["epochs"][0]["spent"] = [[0, 6]]
    with pytest.raises(ValueError, match=r"positions \[4, 6\) are named twice"):
        Leases.decode(plain)


# ---------------------------------------------------------------------- any order of events


@dataclass
class Place:
    """State of one position according to the oracle."""

    state: object = "free"
    """"free", "aside", the incarnation that holds the lease, or the push that spent it."""
    blame: list = field(default_factory=list)


@dataclass
class Trainee:
    """Simulated cluster: positions that it has trained, and its pushes."""

    trained: set = field(default_factory=set)
    number: int = 1
    open: Offer | None = None
    stands: bool = True
    """Whether the samples of the open push must still be its own: not after a rejection of an earlier one."""
    unanswered: dict = field(default_factory=dict)
    """Kept pushes that a rollback made unanswered."""

    @property
    def next(self):
        return self.unanswered[min(self.unanswered)] if self.unanswered else self.open


NAMES = "abcd"
POSITIONS = 20
VERDICTS = st.sampled_from(["accept", "accept", "reject", "void"])


class Walk(RuleBasedStateMachine):
    """Random test in which clusters train, are answered, die and rejoin, with an oracle that keeps the state of each
    position.
    """

    kind = Leases

    @initialize(length=st.integers(1, POSITIONS), step=st.integers(1, 5), clusters=st.integers(1, 4))
    def begin(self, length, step, clusters):
        self.length, self.step = length, step
        self.leases = self.kind(length)
        self.places = {}
        self.trainees = {}
        self.numbers = Counter()
        self.in_a_row = {}
        self.standing = {}
        self.set_aside = []
        self.round = self.settled = 0
        for _ in range(clusters):
            self.join(0)

    # what the oracle knows

    def epoch_places(self, epoch):
        return self.places.setdefault(epoch, [Place() for _ in range(self.length)])

    def is_over(self, epoch):
        return all(place.state == "aside" or isinstance(place.state, PushId) for place in self.epoch_places(epoch))

    @property
    def epoch(self):
        return next(epoch for epoch in range(len(self.places) + 1) if self.is_over(epoch) is False)

    def holds(self, who):
        return {(epoch, p) for epoch, all_ in self.places.items() for p, place in enumerate(all_) if place.state == who}

    def pick(self, index):
        return sorted(self.trainees)[index % len(self.trainees)]

    def some(self, indices):
        return {self.pick(index) for index in indices}

    def covered(self, push):
        return {(each.epoch, p) for each in push.covers for p in positions_of(each.spans)}

    def recent(self):
        """Returns the rounds that are not rolled back and still can be."""
        return sorted(round_ for round_, _ in self.standing.values() if round_ > self.settled)

    # what happens

    @precondition(lambda self: len(self.trainees) < len(NAMES))
    @rule(index=st.integers(0, 3))
    def join(self, index):
        free = [name for name in NAMES if name not in {who.cluster for who in self.trainees}]
        name = free[index % len(free)]
        self.numbers[name] += 1
        who = IncarnationId(name, self.numbers[name])
        self.leases.join(who)
        self.trainees[who] = Trainee()
        self.in_a_row[who] = 0

    @precondition(lambda self: self.trainees)
    @rule(index=st.integers(0, 3), samples=st.integers(0, POSITIONS), among=st.sets(st.integers(0, 3)))
    def grant(self, index, samples, among):
        who = self.pick(index)
        others = [trainee for other, trainee in self.trainees.items() if other != who]
        self.leases.staged = [trainee.open for trainee in others if trainee.open]  # a planted mistake alone reads it
        among = self.some(among) if among else None
        body = self.granted(who, samples, among)
        expected = self.expected_grant(who, samples, set(self.trainees) if among is None else among)
        assert [(body.epoch, p) for p in positions_of(body.spans)] == expected if body else expected == []
        if body:
            self.leases.lease(body)
            for epoch, p in expected:
                self.epoch_places(epoch)[p].state = who

    def granted(self, who, samples, among):
        batches = Batches(self.step, self.step)
        body = self.leases.grant(who, samples, batches, among)
        return body or (self.leases.grant_rest(who, batches, among) if samples else None)

    def expected_grant(self, who, samples, among):
        epoch, out = self.epoch, []
        clusters = {other.cluster for other in among} | {who.cluster}
        for p, place in enumerate(self.epoch_places(epoch)):
            rejected_at = [other.cluster for other in place.blame]
            fresh = clusters - set(rejected_at)
            mine = who.cluster in fresh or (not fresh and (rejected_at[-1] != who.cluster or len(clusters) == 1))
            if place.state != "free" or not mine:
                continue
            out.append((epoch, p))
        if samples == 0 or len(out) < self.step:
            return out if samples else []
        return out[: max(samples - samples % self.step, self.step)][: len(out) - len(out) % self.step]

    @precondition(lambda self: self.trainees)
    @rule(index=st.integers(0, 3), samples=st.integers(1, POSITIONS))
    def train(self, index, samples):
        who = self.pick(index)
        trainee = self.trainees[who]
        kept = {place for push in trainee.unanswered.values() for place in self.covered(push)}
        trainee.trained |= set(sorted(self.holds(who) - trainee.trained - kept)[:samples])

    @precondition(lambda self: self.trainees)
    @rule(index=st.integers(0, 3), samples=st.integers(1, POSITIONS))
    def push(self, index, samples):
        """Freezes a push with the cluster's trained positions; if it has none, trains or leases some first."""
        who = self.pick(index)
        trainee = self.trainees[who]
        if trainee.open:
            return
        if not trainee.trained:
            if not self.holds(who):
                self.grant(index, samples, set())
            self.train(index, samples)
        if trainee.trained:
            epochs = sorted({epoch for epoch, _ in trainee.trained})
            covers = tuple(Covered(e, spans_of(p for f, p in trainee.trained if f == e)) for e in epochs)
            push = PushId(who, trainee.number)
            trainee.open = Offer(push, NO_VERSION, "m", len(trainee.trained), 1, covers)
            trainee.stands = True
            trainee.number += 1

    @precondition(lambda self: self.trainees)
    @rule(
        index=st.integers(0, 3),
        samples=st.integers(1, 6),
        verdicts=st.lists(VERDICTS, min_size=1, max_size=4),
    )
    def decide(self, index, samples, verdicts):
        """Answers a cluster's unanswered pushes in order; if there is none, freezes one first."""
        who = self.pick(index)
        for verdict in verdicts:
            if not self.trainees[who].next:
                self.push(index, samples)
            if self.trainees[who].next:
                self.answer(who, verdict)

    def answer(self, who, verdict):
        push = self.trainees[who].next
        mine = self.covered(push) <= self.holds(who)
        assert (self.leases.objection(push) == "") == mine
        if not mine:
            with pytest.raises(ValueError, match="accepts push"):
                self.leases.accept(push, self.round + 1)
        if verdict == "void":
            self.leases.void(push)
            self.answered(who, push)
        elif mine and verdict == "accept":
            self.accept(who, push)
        else:
            self.reject(who, push, mine)

    def answered(self, who, push):
        trainee = self.trainees[who]
        trainee.unanswered.pop(push.push.number, None)
        if trainee.open is push:
            trainee.open = None

    def accept(self, who, push):
        self.round += 1
        self.leases.accept(push, self.round)
        self.answered(who, push)
        self.standing[push.push] = (self.round, push)
        for epoch, p in self.covered(push):
            self.epoch_places(epoch)[p].state = push.push
        self.trainees[who].trained -= self.covered(push)
        self.in_a_row[who] = 0

    def reject(self, who, push, judged):
        aside = self.leases.reject(push)
        self.answered(who, push)
        trainee = self.trainees[who]
        kept = {place for other in trainee.unanswered.values() for place in self.covered(other)}
        for epoch, p in self.holds(who) - kept:
            self.epoch_places(epoch)[p].state = "free"
        self.in_a_row[who] += 1
        trainee.trained.clear()
        trainee.stands = False
        gone = set()
        for epoch, p in sorted(self.covered(push) - kept) if judged else ():
            place = self.epoch_places(epoch)[p]
            place.blame.append(who)
            left = {other.cluster for other in self.trainees} - {other.cluster for other in place.blame}
            if len(set(place.blame)) >= 3 or (len(place.blame) >= 3 and not left):
                place.state = "aside"
                gone.add((epoch, p))
        found = [(each.epoch, p) for each in aside for p in positions_of(each.spans)]
        assert sorted(found) == sorted(gone)
        assert all(
            list(each.rejected_at) == self.places[each.epoch][p].blame
            for each in aside
            for p in positions_of(each.spans)
        )
        self.set_aside += found

    @precondition(lambda self: self.trainees)
    @rule(index=st.integers(0, 3))
    def remove(self, index):
        who = self.pick(index)
        self.leases.remove(who)
        for epoch, p in self.holds(who):
            self.epoch_places(epoch)[p].state = "free"
        del self.trainees[who], self.in_a_row[who]

    @precondition(lambda self: self.recent())
    @rule(
        index=st.integers(0, 5),
        lost=st.just(set()) | st.sets(st.integers(0, 5)),
        verdicts=st.lists(VERDICTS, max_size=4),
    )
    def roll_back(self, index, lost, verdicts):
        """Rolls back some of the last rounds, and answers some of the pushes that clusters then offer again."""
        to = self.recent()[-1 - index % len(self.recent())] - 1
        self.round += 1
        taken = sorted(push for push, (round_, _) in self.standing.items() if round_ > to)
        gone = [self.standing[push][1] for i, push in enumerate(taken) if i in lost]
        self.leases.rollback(back(to, *gone, number=self.round))
        for name in taken:
            _, push = self.standing.pop(name)
            living = name.incarnation in self.trainees and push not in gone
            for epoch, p in self.covered(push):
                self.epoch_places(epoch)[p].state = name.incarnation if living else "free"
            if living:
                self.trainees[name.incarnation].unanswered[name.number] = push
        self.what_awaits_an_answer_is_leased_to_its_cluster()
        for who, trainee in sorted(self.trainees.items()):
            while trainee.unanswered and verdicts:
                self.answer(who, verdicts.pop())

    @precondition(lambda self: len(self.recent()) > 3)
    @rule(depth=st.integers(0, 9))
    def settle(self, depth):
        self.settled = max(self.settled, self.round - depth)
        self.leases.settle(self.settled)

    @rule()
    def takeover(self):
        """Replaces the leases by those that a new leader decodes from the summary."""
        plain = self.leases.encode()
        self.leases = self.kind.decode(json.loads(json.dumps(plain)))
        assert self.leases.encode() == plain

    @precondition(lambda self: self.trainees)
    @rule(
        index=st.integers(0, 3),
        positions=st.sets(st.integers(0, POSITIONS), min_size=1),
        epoch=st.integers(0, 2),
        rejected=st.booleans(),
    )
    def stray(self, index, positions, epoch, rejected):
        """Offers a push of arbitrary positions: it is valid only if all of them are leased to the cluster, and the
        check changes nothing.
        """
        who, before = self.pick(index), self.leases.encode()
        push = offer(who, 1000, *spans_of(positions), epoch=epoch)
        mine = self.covered(push) <= self.holds(who)
        assert (self.leases.objection(push) == "") == mine
        assert self.leases.objection(replace(push, samples=push.samples + 1))
        assert self.leases.encode() == before
        if rejected and not mine:
            self.reject(who, push, False)

    # what must hold

    @invariant()
    def no_sample_is_spent_twice(self):
        spent = Counter(place for _, push in self.standing.values() for place in self.covered(push))
        assert all(times == 1 for times in spent.values())
        assert not set(spent) & set(self.set_aside)

    @invariant()
    def no_sample_is_leased_twice(self):
        leased = Counter(
            (epoch, p)
            for who in self.trainees
            for epoch, spans in self.leases.leased(who).items()
            for p in positions_of(spans)
        )
        assert all(times == 1 for times in leased.values()), "a position is leased to two"

    @invariant()
    def what_awaits_an_answer_is_leased_to_its_cluster(self):
        for who, trainee in self.trainees.items():
            mine = {(epoch, p) for epoch, spans in self.leases.leased(who).items() for p in positions_of(spans)}
            awaiting = [*trainee.unanswered.values(), *([trainee.open] if trainee.open and trainee.stands else [])]
            for push in awaiting:
                assert self.covered(push) <= mine, f"{push.push} awaits an answer and its samples are not its own"

    @invariant()
    def it_is_as_the_oracle_has_it(self):
        leases = self.leases
        assert leases.living == tuple(sorted(self.trainees))
        assert leases.failing == tuple(sorted(who for who, times in self.in_a_row.items() if times >= 3))
        assert leases.epoch == self.epoch
        places = self.epoch_places(self.epoch)
        assert leases.left == sum(not (p.state == "aside" or isinstance(p.state, PushId)) for p in places)
        for who in self.trainees:
            mine = {(epoch, p) for epoch, spans in leases.leased(who).items() for p in positions_of(spans)}
            assert mine == self.holds(who)
        aside = {(each.epoch, p) for each in leases.aside for p in positions_of(each.spans)}
        for epoch, places in self.places.items():
            assert leases.over(epoch) == self.is_over(epoch)
            spent = {p for p, place in enumerate(places) if isinstance(place.state, PushId)}
            gone = {p for p, place in enumerate(places) if place.state == "aside"}
            if set(positions_of(leases.spent(epoch))) != spent:
                assert set(positions_of(leases.spent(epoch))) == spent | gone, epoch
                assert self.is_over(epoch)
            elif not self.is_over(epoch):
                assert {(epoch, p) for p in gone} == {place for place in aside if place[0] == epoch}

    def teardown(self):
        """Trains all begun epochs to their end, and checks that no sample is lost."""
        if not hasattr(self, "leases"):
            return
        for index in range(2):
            if len(self.trainees) < 2:
                self.join(index)
        begun = max(self.places, default=0)
        for _ in range(20 * (begun + 1)):
            if self.epoch > begun:
                break
            for index, who in enumerate(sorted(self.trainees)):
                while self.trainees[who].next:
                    push = self.trainees[who].next
                    mine = self.covered(push) <= self.holds(who)
                    self.accept(who, push) if mine else self.reject(who, push, False)
                self.grant(index, POSITIONS, set())
                self.train(index, POSITIONS)
                self.push(index, POSITIONS)
        assert self.epoch > begun, "an epoch does not end"
        for epoch in range(begun + 1):
            spent = [p for _, push in self.standing.values() for e, p in self.covered(push) if e == epoch]
            aside = [p for e, p in self.set_aside if e == epoch]
            assert sorted(spent + aside) == list(range(self.length)), "a position is lost, or spent twice"
        self.it_is_as_the_oracle_has_it()


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------- planted mistakes


class LeasesStagedOnes(Leases):
    """Planted bug: positions of a staged push count as free, and are leased to another cluster."""

    staged: tuple = ()

    def _free(self, state):
        staged = spans_of({p for push in self.staged for each in push.covers for p in positions_of(each.spans)})
        return normalise((*super()._free(state), *subtract(staged, super()._free(state))))


class GivesKeptOnesBack(Leases):
    """Planted bug: a rollback frees the positions of pushes whose cluster still has them and will offer them again."""

    def rollback(self, body):
        super().rollback(RolledBack(body.number, body.to, tuple(self._accepted), body.reason))


def walk_with(mistake):
    class Mistaken(Walk):
        kind = mistake

        def it_is_as_the_oracle_has_it(self):
            """Does nothing instead of comparing with the oracle, so that the invariants alone must find the planted
            bug.
            """

        def expected_grant(self, who, samples, among):
            body = self.granted(who, samples, among)
            return [(body.epoch, p) for p in positions_of(body.spans)] if body else []

        def teardown(self):
            """Does nothing instead of ending the epochs."""

    found = settings(
        max_examples=300,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Mistaken, settings=found)


@pytest.mark.parametrize("mistake", [LeasesStagedOnes, GivesKeptOnesBack])
def test_planted_mistakes_are_found(mistake):
    shown = r"awaits an answer and its samples are not its own|is leased to two|are named twice|, not leased to "
    with pytest.raises((AssertionError, ValueError), match=shown):
        walk_with(mistake)


def test_the_lease_check_masks_a_step_that_is_leased_again():
    leases = leases_of(A, B, kind=LeasesStagedOnes)
    granted(leases, A, 4)
    leases.staged = (offer(A, 1, (0, 4)),)
    assert granted(leases, B, 4) == ((0, 4),), "the mistake"
    leases.accept(offer(A, 1, (0, 4)), 1)
    with pytest.raises(ValueError, match=r"positions \[0, 4\) of epoch 0 are spent by a~1/1"):
        leases.accept(offer(B, 1, (0, 4)), 2)


def test_the_lease_check_masks_kept_samples_that_were_given_back():
    leases = leases_of(A, B, kind=GivesKeptOnesBack)
    granted(leases, A, 4)
    leases.accept(offer(A, 1, (0, 4)), 1)
    leases.rollback(back(0))
    assert granted(leases, B, 4) == ((0, 4),), "the mistake"
    assert leases.objection(offer(A, 1, (0, 4))) == "positions [0, 4) of epoch 0 are leased to b~1, not leased to a~1"
    leases.accept(offer(B, 1, (0, 4)), 3)
    assert leases.objection(offer(A, 1, (0, 4))) == "positions [0, 4) of epoch 0 are spent by b~1/1, not leased to a~1"
