"""Tests the figures that the benchmark of outer convergence computes, and one small job of it in virtual time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks.common import Result
from benchmarks.outer_convergence.__main__ import final, modes, part_of_time, poison_claims
from benchmarks.outer_convergence.curves import Point, at_samples, at_time, time_to
from benchmarks.outer_convergence.job import Mode, Track, VirtualJob, Weather, speeds
from benchmarks.outer_convergence.learners import MLP, Learner, Samples
from benchmarks.outer_convergence.parallel import data_parallel
from benchmarks.outer_convergence.poison import KINDS, Poison, Verdicts
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Counters,
    Covered,
    Entry,
    Factors,
    GateState,
    IncarnationId,
    Offer,
    PushId,
    Rejection,
    Round,
    Weighed,
)

STEPS = 160


def push(cluster: str, number: int = 1) -> PushId:
    return PushId(IncarnationId(cluster, 1), number)


def mode(name: str) -> Mode:
    return next(each for each in modes(MLP) if each.name == name)


def job(name: str, poison: float = 0.0) -> VirtualJob:
    return VirtualJob(MLP, mode(name), 200, 0, STEPS * MLP.batch, poison)


def test_curves_are_read_between_their_points() -> None:
    curve = [Point(0.0, 0, 4.0), Point(10.0, 100, 3.0), Point(20.0, 300, 2.0)]
    assert (at_time(curve, 5.0), at_time(curve, 99.0)) == (3.5, 2.0)
    assert at_samples(curve, 200) == 2.5
    assert time_to(curve, 2.5) == 15.0
    assert time_to(curve, 1.0) == math.inf
    faster = [Point(time_s / 2, samples, loss) for time_s, samples, loss in curve]
    assert part_of_time(faster, curve) == pytest.approx(0.5)
    assert final([Track(curve), Track([Point(1.0, 1, 4.0)])]) == 3.0


def test_speeds_are_even_and_legs_are_the_same_for_all_modes() -> None:
    assert speeds(200) == pytest.approx([1.0, 5 / 3, 7 / 3, 3.0])
    assert speeds(0) == [1.0] * 4
    factors = [Weather(3).factor(1, leg) for leg in range(400)]
    assert factors == [Weather(3).factor(1, leg) for leg in range(400)]
    assert 8 <= sum(factor > 2.0 for factor in factors) <= 36  # one leg in twenty


def test_each_kind_of_poison_is_what_it_says() -> None:
    poison = Poison(1.0, seed=0, warmup=12)
    clean = torch.ones(1000)
    assert not poison.spoil(push("a"), 11, clean)
    found = {}
    for number in range(3):
        gained = clean.clone()
        assert poison.spoil(push("a", number), 12, gained)
        found[poison.kinds[push("a", number)]] = gained
    assert set(found) == set(KINDS)
    assert float((found["noise"] - clean).norm() / clean.norm()) == pytest.approx(10.0, rel=1e-3)
    assert not found["not finite"].isfinite().all()
    assert torch.equal(found["flipped"], -clean)


def test_verdicts_count_good_and_poisoned_pushes_by_window() -> None:
    offers = {name: Offer(push(name), NO_VERSION, "", 1, 1) for name in "abc"}

    def decided(accepted: str, rejected: str) -> Entry:
        weighed = tuple(Weighed(offers[name], 1.0, 0) for name in accepted)
        refused = tuple(Rejection(offers[name], "why") for name in rejected)
        return Entry(1, 1, Round(2, NO_VERSION, weighed, refused, Factors(0.0, 0.0, 0.0), Counters(), GateState(), ""))

    kinds = {push("a"): "flipped", push("b"): "noise"}
    verdicts = Verdicts()
    for accepted, rejected in (("c", "ab"), ("a", ""), ("bc", "a")):
        verdicts.read(decided(accepted, rejected), kinds)
    assert (verdicts.good, verdicts.good_rejected) == (2, 0)
    assert (verdicts.made["noise"], verdicts.caught["noise"]) == (2, 1)
    assert (verdicts.flipped_in_company, verdicts.flipped_caught, verdicts.alone) == (2, 2, 1)
    verdicts.read(decided("", "c"), kinds)
    assert verdicts.good_rejected == 1
    assert verdicts.reasons == ["c~1/1: why"]


def missed(verdicts: Verdicts) -> list[str]:
    result = Result("outer_convergence", details={"poisoned / clean": {}})
    poison_claims(result, verdicts, strict=True)
    return [figure.name for figure in result.figures if figure.ok is False]


def test_poison_that_was_never_made_shows_nothing() -> None:
    assert len(missed(Verdicts())) == 4
    made = Counter(dict.fromkeys(KINDS, 20))
    caught = Verdicts(400, 2, made, made.copy(), 20, 20)
    assert missed(caught) == []
    caught.caught["noise"], caught.flipped_caught, caught.good_rejected = 18, 17, 3
    assert missed(caught) == [
        "poison: missed, noise", "poison: missed, flipped, in windows of 3 and more", "poison: good ones rejected"
    ]  # fmt: skip


def test_an_epoch_is_one_order_of_all_places_and_a_learner_is_one_flat_tensor() -> None:
    samples = Samples(MLP, 1)
    taken = samples.take([Covered(0, ((0, 5), (9, 10))), Covered(1, ((0, 2),))])
    assert taken.shape == (8, MLP.context + 1)
    learner = Learner(samples, 0)
    assert sum(spec.elements for spec in learner.specs) == len(learner.flat) == 49145
    before = learner.loss(samples.tests)
    for step in range(20):
        learner.step(samples.take([Covered(0, ((step * 32, step * 32 + 32),))]))
    assert learner.loss(samples.tests) < before
    learner.flat.zero_()
    assert learner.loss(samples.tests) == pytest.approx(math.log(samples.vocabulary), rel=1e-5)


def test_a_synchronous_job_waits_and_one_that_overlaps_does_not() -> None:
    sync, robust = job("sync").run(), job("robust").run()
    assert sync.window == 4.0
    assert sync.staleness == 0.0
    assert sync.idle > 0.2 > 0.05 > robust.idle
    assert robust.curve[-1].time_s < sync.curve[-1].time_s
    for track in (sync, robust):
        assert track.curve[-1].samples >= STEPS * MLP.batch
        assert track.curve[-1].loss < track.curve[0].loss - 0.3
        assert track.verdicts.good_rejected == 0


def test_poisoned_pushes_are_rejected_and_the_job_goes_on() -> None:
    spoiled = job("robust", poison=0.5)
    spoiled.poison.warmup = 4
    track = spoiled.run()
    assert track.verdicts.made["not finite"] == track.verdicts.caught["not finite"] > 0
    assert math.isfinite(track.curve[-1].loss)


def test_data_parallel_steps_wait_for_the_slowest_and_for_the_link() -> None:
    even, uneven = (data_parallel(MLP, eta, 0, STEPS * MLP.batch, 16) for eta in (0, 200))
    assert [point.samples for point in even] == [0, 2048, 4096]
    assert [point.loss for point in even] == [point.loss for point in uneven], "the same steps, in another time"
    assert uneven[-1].time_s > even[-1].time_s > 40 * 2 * 0.05 * 16
