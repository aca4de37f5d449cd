"""Tests how a round's pushes are judged: weights, momentum, the job's clock, and the gate that rejects outliers."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.exchange.codec import Part, codec_named
from chaos_lightning.outer.rules import settings as outer_settings
from chaos_lightning.outer.rules.gates import GATES, HALF, LITTLE, ROWS, STD_FLOOR, MeasuredPush, Products
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.judging import Judgement, judge
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    TICKS,
    Counters,
    GateState,
    IncarnationId,
    Offer,
    PushAnswer,
    PushId,
    RefusedRow,
)

SIZE = 8
H, B = 4, 2
FULL = H * B
Vector = list[float]


def rules(**given: object) -> OuterSettings:
    return OuterSettings(**({"inner_steps": H, "batch": B, "policy": "sync"} | given))  # type: ignore[arg-type]


def offer(cluster: str, number: int = 1, *, samples: int = FULL, steps: int = H) -> Offer:
    return Offer(PushId(IncarnationId(cluster, 1), number), NO_VERSION, f"hash of {cluster}", samples, steps)


def product(one: Vector, other: Vector) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


@dataclass
class Server:
    """Judges rounds as the leader does, and applies their factors to a vector as followers do."""

    settings: OuterSettings
    theta: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    m: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    b: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    counters: Counters = field(default_factory=Counters)
    gate: GateState = field(default_factory=GateState)
    number: int = 0

    def measured(self, offered: Offer, delta: Vector, staleness: int = 0) -> MeasuredPush:
        finite = all(map(math.isfinite, delta))
        norm2 = product(delta, delta) if finite else math.nan
        return MeasuredPush(offered, staleness, finite, product(delta, self.m.tolist()) if finite else math.nan, norm2)

    def judge(self, deltas: Mapping[Offer, Vector], usual: int, order: Sequence[Offer] = ()) -> Judgement:
        products: dict[tuple[PushId, PushId], float] = {}
        for one, d in deltas.items():
            for other, e in deltas.items():
                if one.push < other.push and all(map(math.isfinite, (*d, *e))):
                    products[one.push, other.push] = product(d, e)
        pushes = [self.measured(one, deltas[one]) for one in order or deltas]
        return judge(pushes, products, usual, self.counters, self.gate, self.settings, "it is time")

    def round(self, deltas: Mapping[Offer, Vector], usual: int) -> Judgement:
        made = self.judge(deltas, usual)
        factors = made.factors
        delta = torch.zeros(SIZE, dtype=torch.float64)
        for weighed in made.accepted:
            delta += weighed.factor * torch.tensor(deltas[weighed.offer], dtype=torch.float64)
        self.b += factors.buffer * delta
        if factors.outer:
            self.m.mul_(factors.momentum).add_(self.b, alpha=factors.outer)
            self.b.zero_()
        self.theta -= factors.rate * delta
        self.theta -= factors.step * self.m
        self.counters, self.gate = made.counters, made.gate
        return made

    def push(self, *deltas: Vector, usual: int = 0) -> Judgement:
        """Makes a round with one push of each of the clusters c0, c1, and so on."""
        self.number += 1
        offers = {offer(f"c{place}", self.number): delta for place, delta in enumerate(deltas)}
        return self.round(offers, usual or len(deltas))


def alike(seed: int, count: int = 4, size: float = 1.0, likeness: float = 1.0) -> list[Vector]:
    """Returns good pushes: a common direction plus noise, as in real training."""
    chance = random.Random(seed)
    common = [chance.gauss(0, 1) for _ in range(SIZE)]
    common = scaled(common, (SIZE / product(common, common)) ** 0.5)
    return [[size * (likeness * x + chance.gauss(0, 0.4)) for x in common] for _ in range(count)]


def warm(server: Server, rounds: int = 4, size: float = 1.0) -> None:
    for number in range(rounds):
        assert not server.push(*alike(100 + number, size=size)).rejected


def turned(delta: Vector) -> Vector:
    return [-x for x in delta]


def scaled(delta: Vector, factor: float) -> Vector:
    return [factor * x for x in delta]


vectors = st.lists(st.floats(-100, 100), min_size=SIZE, max_size=SIZE)

# ------------------------------------------------------------------------------------------------ the optimizer


@given(
    st.lists(st.lists(vectors, min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from(["delayed_nesterov", "nesterov"]),
    st.floats(0.01, 1.5),
    st.floats(0.0, 0.99),
)
def test_full_rounds_are_synchronous_diloco(rounds: list[list[Vector]], optimizer: str, eta: float, mu: float) -> None:
    server = Server(rules(optimizer=optimizer, outer_lr=eta, outer_momentum=mu))
    theirs = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    nesterov = torch.optim.SGD([theirs], lr=eta, momentum=mu, nesterov=mu > 0)
    for deltas in rounds:
        made = server.push(*deltas)
        assert made.factors.outer == 1.0
        theirs.grad = torch.tensor(deltas, dtype=torch.float64).mean(0)
        nesterov.step()
        assert torch.allclose(server.theta, theirs.detach(), rtol=1e-9, atol=1e-7)
    assert server.counters == Counters(0, len(rounds) * 3 * FULL, len(rounds) * H * TICKS)


@given(st.integers(1, 5), st.lists(vectors, min_size=1, max_size=12))
def test_pushes_one_by_one_are_delayed_nesterov(clusters: int, deltas: list[Vector]) -> None:
    """Rounds of a single push each equal Delayed Nesterov (Liu et al., Asynchronous Local-SGD, algorithm 3 with c =
    0).
    """
    server = Server(rules())
    eta, mu = server.settings.outer_lr, server.settings.outer_momentum
    theta = m = gathered = torch.zeros(SIZE, dtype=torch.float64)
    for number, delta in enumerate(deltas, 1):
        made = server.round({offer(f"c{number % clusters}", number): delta}, clusters)
        g = torch.tensor(delta, dtype=torch.float64)
        gathered = gathered + g
        if number % clusters == 0:
            m = mu * m + gathered / clusters
            theta = theta - eta * (mu * m + g / clusters)
            gathered = torch.zeros_like(gathered)
        else:
            theta = theta - eta * g / clusters
        assert bool(made.factors.outer) == (number % clusters == 0)
        assert torch.allclose(server.theta, theta, rtol=1e-9, atol=1e-7)
    assert server.counters.ticks == len(deltas) * H * TICKS // clusters


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 6))
def test_momentum_moves_by_the_average_of_what_came_since(samples: list[int], clusters: int) -> None:
    """However the samples are spread over rounds, the momentum moves by the average of all pushes since it last
    moved.
    """
    server, full = Server(rules()), FULL * clusters
    gathered, pending = Fraction(), 0
    for number, covered in enumerate(samples, 1):
        delta = [float(number)] * SIZE
        made = server.judge({offer("c", number, samples=covered): delta}, clusters)
        counted = min(covered, full)
        gathered, pending = gathered + Fraction(counted, full) * number, pending + counted
        before = server.m.clone()
        server.round({offer("c", number, samples=covered): delta}, clusters)
        if pending >= full:
            average = float(gathered * Fraction(full, pending))
            assert torch.allclose(server.m, 0.8 * before + average, rtol=1e-9)
            assert made.counters.pending == 0
            assert "the momentum moves" in made.reason or not covered
            gathered, pending = Fraction(), 0
        else:
            assert torch.equal(server.m, before)
            assert made.factors.step == made.factors.outer == 0.0
            assert made.counters.pending == pending
    assert server.counters.samples == sum(samples)


def test_ten_tenths_are_one() -> None:
    """As floats ten times 0.1 is less than 1, so that the momentum would move one round late; counted in integers it
    does not.
    """
    server = Server(rules())
    moved = [bool(server.push([1.0] * SIZE, usual=10).factors.outer) for _ in range(30)]
    assert moved == ([False] * 9 + [True]) * 3


def test_a_round_never_counts_for_more_than_a_full_one() -> None:
    made = Server(rules()).round({offer("a", samples=100 * FULL): [1.0] * SIZE}, 2)
    assert made.factors.rate == 0.7
    assert made.factors.outer == 1.0
    assert made.counters.samples == 100 * FULL


def test_more_clusters_in_a_window_than_train_count_themselves() -> None:
    """At the end of an epoch, pushes may come from more clusters than still train; the job's clock must not jump."""
    made = Server(rules()).push(*alike(1), usual=1)
    assert made.counters.ticks == H * TICKS
    assert made.factors.rate == 0.7
    assert "K = 4" in made.reason


def test_sgd_has_no_momentum_but_the_round_s_part() -> None:
    server = Server(rules(optimizer="sgd"))
    made = server.push([1.0] * SIZE, usual=4)
    assert made.factors.rate == pytest.approx(0.7 / 4)
    server.push(*[[1.0] * SIZE] * 4)
    assert server.theta.tolist() == pytest.approx([-0.7 * 1.25] * SIZE)
    assert not server.m.any()
    assert not server.b.any()


def test_nothing_accepted_moves_nothing() -> None:
    server = Server(rules())
    server.push([1.0] * SIZE, usual=2)
    theta, counters = server.theta.clone(), server.counters
    made = server.push([math.nan] * SIZE, usual=2)
    assert made.is_round
    assert torch.equal(server.theta, theta)
    assert made.counters == counters
    assert made.factors.rate == made.factors.buffer == made.factors.outer == made.factors.step == 0.0
    empty = server.judge({}, 2)
    assert not empty.is_round


@pytest.mark.parametrize("policy", outer_settings.POLICIES)
def test_pushes_of_no_samples_weigh_nothing(policy: str) -> None:
    server = Server(rules(policy=policy))
    made = server.round({offer("a", samples=0): [1.0] * SIZE, offer("b", samples=0, steps=0): [2.0] * SIZE}, 2)
    assert [weighed.factor for weighed in made.accepted] == [0.0, 0.0]
    assert not server.theta.any()
    mixed = server.judge({offer("a", 2, samples=0): [1.0] * SIZE, offer("b", 2): [2.0] * SIZE}, 2)
    assert [weighed.factor for weighed in mixed.accepted] == [0.0, 1.0]


# ------------------------------------------------------------------------------------------------ weights, clip, clock


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 16), vectors), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(outer_settings.POLICIES),
    st.booleans(),
)
def test_no_decision_depends_on_the_order_of_arrival(
    pushes: list[tuple[int, int, Vector]], chance: random.Random, policy: str, discount: bool
) -> None:
    server = Server(rules(policy=policy, discount_stale=discount, clip=3.0))
    offers = [offer(f"c{place}", samples=samples) for place, (samples, _, _) in enumerate(pushes)]
    deltas = dict(zip(offers, (delta for _, _, delta in pushes), strict=True))
    first = server.judge(deltas, len(pushes))
    assert server.judge(deltas, len(pushes), chance.sample(offers, len(offers))) == first
    names = [weighed.offer.push for weighed in first.accepted]
    assert names == sorted(names)
    assert math.fsum(weighed.factor for weighed in first.accepted) == pytest.approx(1.0)
    assert all(refusal.reason for refusal in first.rejected)


def test_weights_go_by_samples_and_if_asked_by_staleness() -> None:
    server = Server(rules(policy="robust"))
    pair = [offer("a", samples=30), offer("b", samples=10)]
    pushes = [server.measured(pair[0], [1.0] * SIZE, staleness=3), server.measured(pair[1], [1.0] * SIZE)]
    products = {(pair[0].push, pair[1].push): float(SIZE)}

    def factors(settings: OuterSettings) -> list[float]:
        made = judge(pushes, products, 2, Counters(), GateState(), settings, "")
        assert [weighed.staleness for weighed in made.accepted] == [3, 0]
        return [weighed.factor for weighed in made.accepted]

    assert factors(rules(policy="robust")) == [0.75, 0.25]
    assert factors(rules(policy="robust", discount_stale=True)) == [0.6, 0.4]
    assert factors(rules(policy="di_ps", discount_stale=True)) == [0.75, 0.25]


@given(st.lists(vectors, min_size=1, max_size=5), st.floats(0.1, 50))
def test_the_average_is_clipped_without_anybody_having_seen_it(deltas: list[Vector], clip: float) -> None:
    server = Server(rules(clip=clip, outer_lr=1.0, outer_momentum=0.0))
    made = server.push(*deltas)
    norm = float(torch.tensor(deltas, dtype=torch.float64).mean(0).norm())
    assert float(server.theta.norm()) == pytest.approx(min(norm, clip), rel=1e-6, abs=1e-6)
    assert made.factors.buffer == made.factors.rate
    if norm > clip * 1.001:
        assert "clipped to" in made.reason


def test_what_is_too_stale_is_void_unless_it_is_not_finite() -> None:
    """A push that is too stale is void, and its content comes again in the next push; one with a NaN is rejected, since
    the NaN would come again, too.
    """
    server = Server(rules(policy="robust"))
    offers = [offer(name) for name in "abc"]
    pushes = [
        server.measured(offers[0], [1.0] * SIZE, staleness=16),
        server.measured(offers[1], [1.0] * SIZE, staleness=17),
        server.measured(offers[2], [math.nan] * SIZE, staleness=17),
    ]
    made = judge(pushes, {}, 3, Counters(), GateState(), server.settings, "")
    assert [weighed.offer for weighed in made.accepted] == offers[:1]
    assert made.void == ((offers[1], "its base is 17 versions old (at most 16)"),)
    assert [refusal.offer for refusal in made.rejected] == offers[2:]
    only_void = judge(pushes[1:2], {}, 3, Counters(), GateState(), server.settings, "")
    assert not only_void.is_round
    for_ever = judge(pushes[1:2], {}, 3, Counters(), GateState(), rules(staleness_cap=0), "")
    assert len(for_ever.accepted) == 1


@pytest.mark.parametrize("clusters", range(1, 17))
def test_shares_of_the_clock_add_up(clusters: int) -> None:
    server = Server(rules())
    for _ in range(clusters):
        server.push([1.0] * SIZE, usual=clusters)
    assert server.counters.ticks == H * TICKS


def test_the_reason_tells_when_and_by_what() -> None:
    made = Server(rules(clip=0.5)).push(*alike(3), [math.inf] * SIZE, usual=5)
    assert made.reason.startswith("it is time; 4 of 5 pushes accepted; p = 32 / 40 samples (K = 5), the momentum waits")
    assert "clipped to 0.5" in made.reason


# ------------------------------------------------------------------------------------------------ gates


@pytest.mark.parametrize("policy", outer_settings.POLICIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_rejected_and_teaches_nothing(policy: str, bad: float) -> None:
    good, server = alike(7), Server(rules(policy=policy))
    warm(server)
    clean = Server(server.settings, counters=server.counters, gate=server.gate)
    poisoned = server.round({**{offer(f"c{n}", 9): d for n, d in enumerate(good)}, offer("x"): [bad] * SIZE}, 5)
    assert [(refusal.offer, refusal.reason) for refusal in poisoned.rejected] == [
        (offer("x"), "not all of it is finite")
    ]
    assert clean.round({offer(f"c{n}", 9): d for n, d in enumerate(good)}, 5).gate == poisoned.gate
    assert torch.isfinite(server.theta).all()
    alone = server.push([bad] * SIZE)
    assert alone.gate == poisoned.gate


@pytest.mark.parametrize("norm2", [math.inf, math.nan, -1.0, 1e200])
def test_a_norm_that_no_push_can_have_is_no_number(norm2: float) -> None:
    push = MeasuredPush(offer("a"), 0, True, 0.0, norm2)
    for policy in outer_settings.POLICIES:
        made = judge([push], {}, 1, Counters(), GateState(), rules(policy=policy), "")
        assert not made.accepted


def test_an_exploding_push_is_rejected_after_the_warm_up() -> None:
    server = Server(rules(policy="robust"))
    warm(server)
    good = alike(8)
    made = server.push(*good[:3], scaled(good[3], 50))
    assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == ["c3"]
    assert "standard deviations above what is usual (at most 3)" in made.rejected[0].reason
    assert len(made.accepted) == 3
    lone = server.push(scaled(good[3], 50), usual=4)
    assert not lone.accepted


def test_a_small_push_is_no_outlier() -> None:
    server = Server(rules(policy="robust"))
    warm(server)
    assert not server.push(*[scaled(delta, 1e-6) for delta in alike(9)]).rejected


def test_pushes_of_unequal_inner_steps_compare() -> None:
    """A push of four times as many steps has about twice the norm, and is no outlier."""
    server = Server(rules(policy="robust"))
    warm(server, 10)
    good = alike(10)
    many = [scaled(delta, 8) for delta in good]
    offers = {offer(f"c{n}", 99, steps=64 * H): delta for n, delta in enumerate(many)}
    assert not server.judge(offers, 4).rejected
    offers = {offer(f"c{n}", 99): delta for n, delta in enumerate(many)}
    assert len(server.judge(offers, 4).rejected) == 4


def test_a_cluster_whose_ranks_have_left_is_no_outlier() -> None:
    """A cluster that has lost three quarters of its ranks sends pushes with twice the noise: no outlier, though the
    same norm would be one from all ranks.
    """
    server = Server(rules(policy="robust"))
    warm(server, 10)
    twice = [scaled(delta, 2) for delta in alike(10)]
    left = {offer(f"c{n}", 99, samples=FULL // 4): delta for n, delta in enumerate(twice)}
    assert not server.judge(left, 4).rejected
    assert len(server.judge({offer(f"c{n}", 99): delta for n, delta in enumerate(twice)}, 4).rejected) == 4
    exploded = {offered: scaled(delta, 4) for offered, delta in left.items()}
    assert len(server.judge(exploded, 4).rejected) == 4


def test_rejected_pushes_do_not_raise_what_is_usual() -> None:
    """Planted bug: if rejected pushes counted in the gate's statistics, the same outlier would be accepted after a
    while.
    """
    server = Server(rules(policy="robust", gate_again=1000))
    warm(server)
    usual = server.gate
    for _ in range(100):
        assert not server.push(scaled(alike(11)[0], 50), usual=4).accepted
    assert (server.gate.mean, server.gate.variance, server.gate.count) == (usual.mean, usual.variance, usual.count)
    assert server.gate.in_a_row == 100


def test_after_eight_rejections_in_a_row_what_is_usual_is_learned_anew() -> None:
    server = Server(rules(policy="robust"))
    warm(server)
    said = [server.push(*[scaled(d, 20) for d in alike(20 + n, 1)], usual=4) for n in range(9)]
    assert [len(made.rejected) for made in said] == [1] * 8 + [0]
    assert ["learns anew" in made.reason for made in said] == [False] * 7 + [True, False]
    assert said[7].gate == GateState()
    assert said[8].gate.count == 1
    warm(server, size=20.0)
    assert server.push(scaled(alike(30, 1)[0], 20 * 50), usual=4).rejected


def test_an_acceptance_ends_a_row_of_rejections_of_all() -> None:
    server = Server(rules(policy="robust"))
    warm(server)
    for number in range(30):
        good = alike(40 + number)
        made = server.push(*good[:3], scaled(good[3], 50 * 2**number))
        assert len(made.rejected) == 1
        assert made.gate.in_a_row == 0
    assert server.gate.count == 16 + 90


def long(delta: Vector, size: float = 1.0) -> Vector:
    """Returns this push scaled to the norm of a usual push, times `size`."""
    return scaled(delta, size * math.sqrt(SIZE / product(delta, delta)))


def usual(seed: int, count: int = 4, size: float = 1.0) -> list[Vector]:
    """Returns pushes whose norms differ by up to a tenth, as those of a round in real training."""
    chance = random.Random(seed)
    return [long(delta, size * math.exp(chance.uniform(-0.1, 0.1))) for delta in alike(seed, count)]


def warmed_up() -> Server:
    """Returns a server after four rounds; its gate ignores directions, since those of `alike` are partly random."""
    server = Server(rules(policy="robust", gate_cosine=-1.0))
    for number in range(4):
        assert not server.push(*usual(number)).rejected
    return server


def row(server: Server, cluster: str) -> RefusedRow | None:
    return next((row for row in server.gate.rows if row.cluster == cluster), None)


@given(st.floats(1.8, 3.5), st.integers(0, 1000), st.integers(1, 5))
def test_one_cluster_too_long_is_let_in_after_a_while_and_does_no_harm(size: float, seed: int, patience: int) -> None:
    """A newcomer's pushes are too long at first, since its inner optimizer is cold: they are accepted, shortened, after
    some rejections.
    """
    server = warmed_up()
    server.settings = replace(server.settings, gate_patience=patience)
    for number in range(patience + 4):
        good = usual(seed + number)
        before = server.gate
        made = server.push(*good[:3], long(good[3], size))
        assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == ["c3"] * (number < patience)
        assert [w.part < 1.0 for w in made.accepted] == [False] * 3 + [True] * (number >= patience)
        assert row(server, "c3") == RefusedRow("c3", number + 1, pytest.approx(server.gate.rows[-1].size))
        assert server.gate.count == before.count + 3, "what is shortened teaches nothing"
        if number >= patience:
            weighed = made.accepted[-1]
            limit = math.exp(before.mean + 3 * max(math.sqrt(before.variance), STD_FLOOR)) * math.sqrt(H)
            assert weighed.part * size * math.sqrt(SIZE) == pytest.approx(limit)
            assert limit < 1.6 * math.sqrt(SIZE)
            assert weighed.factor == pytest.approx(weighed.part / 4)
            assert f"c3~1/{server.number} is shortened to {weighed.part:.3f} of its length" in made.reason
    warmed = server.push(*usual(seed + 100))
    assert [w.part for w in warmed.accepted] == [1.0] * 4
    assert server.gate.rows == (), "a push that passes ends the row"


def test_a_push_that_is_far_too_long_waits_for_longer() -> None:
    server = warmed_up()
    said = []
    for number in range(10):
        good = usual(60 + number)
        said.append(server.push(*good[:3], scaled(good[3], 10)))
    assert [len(made.rejected) for made in said] == [1] * 8 + [0, 0]
    assert said[8].accepted[-1].part < 0.3


def test_pushes_that_grow_are_never_let_in() -> None:
    server = warmed_up()
    for number in range(40):
        good = usual(60 + number)
        assert server.push(*good[:3], long(good[3], 3 * 1.6**number)).rejected
        assert row(server, "c3") == RefusedRow("c3", 1, server.gate.rows[-1].size)


def test_ten_times_the_norm_now_and_then_is_never_let_in() -> None:
    server, chance = warmed_up(), random.Random(5)
    for number in range(300):
        deltas = usual(1000 + number)
        spoiled = chance.randrange(4) if chance.random() < 0.2 else None
        made = server.push(*(scaled(d, 10) if place == spoiled else d for place, d in enumerate(deltas)))
        assert [r.offer.push.incarnation.cluster for r in made.rejected] == [f"c{spoiled}"] * (spoiled is not None)


def test_a_shortened_push_is_judged_by_its_direction_and_hides_nobody_s() -> None:
    """A push that was shortened for its length is still rejected if it points the wrong way, and does not decide how
    the others are judged.
    """
    server = Server(rules(policy="robust", gate_patience=1))
    common = [[1.0, *(0.1 if place == n else 0.0 for place in range(1, SIZE))] for n in range(1, 5)]
    for _ in range(4):
        assert not server.push(*common).rejected
    for number in range(2):
        made = server.push(*common[:3], scaled(turned(common[3]), 3.5))
        assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == ["c3"]
        assert ("its cosine with the sum" in made.rejected[0].reason) == (number > 0)
        assert not made.gate.in_a_row
    assert row(server, "c3") == RefusedRow("c3", 2, pytest.approx(server.gate.rows[-1].size))


def test_a_learning_rate_raised_for_one_and_only_cluster_is_learned_anew() -> None:
    """A lone cluster whose learning rate is raised for good: after some shortened pushes the gate learns the new usual
    norm.
    """
    server = warmed_up()
    said = [server.push(*usual(20 + n, 1, 3.0), usual=4) for n in range(9)]
    assert [len(made.rejected) for made in said] == [1, 1] + [0] * 7
    assert ["learns anew" in made.reason for made in said] == [False] * 7 + [True, False]
    assert [made.accepted[0].part < 1.0 for made in said[2:]] == [True] * 6 + [False]


def test_the_inner_optimizer_begins_anew_ever_more_rarely() -> None:
    """The inner optimizer is cleared at ever rarer rejections: cleared at each one it would stay cold, and cleared only
    once it would keep later damage.
    """
    grid = Grid((SIZE,), 64)
    content = ClusterModel(Replica([("w", torch.zeros(SIZE))]), grid, codec_named("bf16"))
    name = offer("a").push

    def rejected(times: int) -> list[int]:
        cleared = []
        for number in range(1, times + 1):
            content.settle(name, PushAnswer.REJECTED)
            cleared += [number] if content.resets_optimizer else []
        return cleared

    assert rejected(20) == [2, 4, 8, 16]
    content.settle(name, PushAnswer.ACCEPTED)
    assert not content.resets_optimizer
    assert rejected(3) == [2]


def test_a_push_is_encoded_though_its_incarnation_ends_meanwhile() -> None:
    """Former bug: a cluster that was dismissed while a push was being encoded ended with an AssertionError instead of
    joining again.
    """
    grid = Grid((SIZE,), 64)
    content = ClusterModel(Replica([("w", torch.ones(SIZE))]), grid, codec_named("fp32"))
    content.base = Part.of(grid.whole, torch.zeros(grid.elements))
    content.freeze(offer("a").push)
    encode = content.encoder()
    content.forget()
    assert torch.equal(encode().decoded()[:SIZE], -torch.ones(SIZE))


def test_shared_buffers_are_told_by_all_their_names() -> None:
    """Former bug: an exported checkpoint contained a shared buffer under its first name only."""
    shared = torch.nn.BatchNorm1d(4)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), shared, shared)
    replica = Replica.of_module(module, reduced_buffers(module))
    names = ("weight", "bias", "running_mean", "running_var")
    assert replica.tied == {f"2.{name}": f"1.{name}" for name in names}
    assert replica.averaged == 2


def test_refusals_of_a_few_clusters_only_are_remembered() -> None:
    server = warmed_up()
    for number in range(ROWS + 5):
        good = usual(80 + number)
        offers = {offer(f"c{place}", 50 + number): d for place, d in enumerate(good[:3])}
        server.round({**offers, offer(f"new{number:03}"): scaled(good[3], 50)}, 4)
    assert [row.cluster for row in server.gate.rows] == [f"new{number:03}" for number in range(5, ROWS + 5)]


def test_a_turned_push_lowers_the_others_cosines_and_is_rejected_first() -> None:
    server = Server(rules(policy="robust"))
    good = [[4.0, 3.0, 0, 0, 0, 0, 0, 0], [4.0, 0, 3.0, 0, 0, 0, 0, 0], [4.0, 0, 0, 3.0, 0, 0, 0, 0]]
    bad = [-9.0, 0, 0, 0, 1.0, 0, 0, 0]
    # Each good one is against the sum of the two others and the turned one: all four cosines are below 0.
    for one in good:
        others = [sum(parts) for parts in zip(bad, *(d for d in good if d is not one), strict=True)]
        assert product(one, others) < 0
    for place in range(4):
        deltas = [*good[:place], bad, *good[place:]]
        made = server.push(*deltas)
        assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == [f"c{place}"]
        assert "its cosine with the sum of the round's other pushes (3) is -0.9" in made.rejected[0].reason
    assert server.push(*alike(5)[:3], [0.0] * SIZE).rejected == ()
    off = Server(rules(policy="robust", gate_cosine=-1.0))
    assert not off.push(*good, bad).rejected


@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(0, 5))
def test_one_turned_push_among_good_ones_is_found(seed: int, count: int, which: int) -> None:
    deltas = alike(seed, count, likeness=1.5)
    which %= count
    deltas[which] = turned(deltas[which])
    settings = rules(policy="robust")
    if all(product(d, e) > 0 for n, d in enumerate(deltas) for k, e in enumerate(deltas) if which not in (n, k)):
        made = Server(settings).push(*deltas)
        names = [refusal.offer.push.incarnation.cluster for refusal in made.rejected]
        assert names in ([f"c{which}"], []), "never a good one"
        others = [sum(parts) for parts in zip(*(d for n, d in enumerate(deltas) if n != which), strict=True)]
        assert bool(names) == (product(deltas[which], others) < 0)


def along(seed: int, count: int = 4) -> list[Vector]:
    """Returns pushes in a direction that is the same in every round, with some noise."""
    chance = random.Random(seed)
    return [long([1.0, *(chance.uniform(-0.3, 0.3) for _ in range(SIZE - 1))]) for _ in range(count)]


def opposed(
    server: Server, good: Sequence[Vector], delta: Vector, **given: int
) -> tuple[Judgement, dict[Offer, Vector]]:
    """Makes a round with these good pushes and a push `delta` of cluster c9."""
    server.number += 1
    deltas = {offer(f"c{place}", server.number): one for place, one in enumerate(good)}
    deltas[offer("c9", server.number, **given)] = delta
    return server.round(deltas, len(deltas)), deltas


def moved_by(made: Judgement, deltas: Mapping[Offer, Vector], who: Collection[str]) -> Vector:
    """Returns how far these clusters' accepted pushes move the model: their sum, weighted by their factors."""
    said = [(w.factor, deltas[w.offer]) for w in made.accepted if w.offer.push.incarnation.cluster in who]
    return [math.fsum(factor * delta[place] for factor, delta in said) for place in range(SIZE)]


@given(st.integers(0, 1000), st.integers(2, 5), st.floats(0.01, 1.3), st.integers(1, 8), st.integers(1, 9))
def test_a_cluster_that_is_against_all_is_let_in_after_a_while_and_does_little_harm(
    seed: int, count: int, size: float, patience: int, times: int
) -> None:
    """A cluster whose pushes point against all others' may have other data or be broken: they are accepted after a
    while, with a small weight.
    """
    server = Server(rules(policy="robust", gate_again=patience, discount_stale=True))
    names = [f"c{place}" for place in range(count)]
    for number in range(4):
        assert not opposed(server, along(seed + number, count), along(seed + number, count)[0])[0].rejected
    for number in range(patience + 3):
        before, good = server.gate, along(seed + 10 + number, count)
        made, deltas = opposed(server, good, scaled(turned(good[0]), size), samples=times * FULL, steps=times * H)
        assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == ["c9"] * (number < patience)
        assert row(server, "c9") == RefusedRow("c9", number + 1, pytest.approx(server.gate.rows[-1].size))
        assert server.gate.count == before.count + count, "what is shortened teaches nothing"
        if number >= patience:
            its, theirs = moved_by(made, deltas, ["c9"]), moved_by(made, deltas, names)
            assert 0 < product(its, its) <= (LITTLE * (1 + 1e-9)) ** 2 * product(theirs, theirs)
            part = made.accepted[-1].part
            assert part <= HALF
            assert f"c9~1/{server.number} is shortened to {part:.3f} of its length: turned round" in made.reason
    assert [w.part for w in opposed(server, good, good[0])[0].accepted] == [1.0] * (count + 1)
    assert server.gate.rows == (), "a push that passes ends the row"
    assert opposed(server, good, turned(good[0]))[0].rejected


def test_several_that_are_let_in_do_no_more_harm_together() -> None:
    server = Server(rules(policy="robust", gate_again=1))
    good = along(3, 5)
    server.push(*good)
    for _ in range(2):
        bad = [turned(delta) for delta in good[3:]]
        server.number += 1
        deltas = {offer(f"c{place}", server.number): one for place, one in enumerate([*good[:3], *bad])}
        made = server.round(deltas, 5)
    assert not made.rejected
    its, theirs = moved_by(made, deltas, ["c3", "c4"]), moved_by(made, deltas, ["c0", "c1", "c2"])
    assert 0 < product(its, its) <= LITTLE**2 * product(theirs, theirs)


def test_refusals_of_both_kinds_are_one_row() -> None:
    """If a cluster's pushes are by turns too long and pointing the wrong way, both kinds of rejections count
    together.
    """
    server = Server(rules(policy="robust", gate_again=4, gate_patience=4))
    for number in range(4):
        assert not server.push(*along(number)).rejected
    reasons, parts = [], []
    for number in range(6):
        good = along(20 + number)
        made = server.push(*good[:3], long(good[3], 1.45) if number % 2 else turned(good[3]))
        reasons += [refusal.reason for refusal in made.rejected]
        parts += [weighed.part for weighed in made.accepted if weighed.part < 1.0]
    assert ["standard deviations" in reason for reason in reasons] == [False, True, False, True]
    assert len(parts) == 2
    assert row(server, "c3") == RefusedRow("c3", 6, pytest.approx(server.gate.rows[-1].size))


def test_pushes_that_are_long_now_and_then_are_not_shut_out() -> None:
    """If every second push of a cluster is too long, the long ones are rejected and the others accepted."""
    server = Server(rules(policy="robust"))
    for number in range(4):
        assert not server.push(*along(number)).rejected
    for sizes in ([1.5, 3.0], [1.0, 3.0]):
        said = []
        for number in range(24):
            good, size = along(20 + number), sizes[number % 2]
            said.append(server.push(*good[:3], long(turned(good[3]) if size == 1.0 else good[3], size)))
        assert [len(made.rejected) for made in said[-8:]] == [0, 1] * 4
        assert not server.push(*along(50)).rejected


def test_what_is_too_long_and_turned_is_shortened_for_both() -> None:
    server = Server(rules(policy="robust", gate_again=3, gate_patience=1))
    for number in range(4):
        assert not server.push(*along(number)).rejected
    said = []
    for number in range(4):
        good = along(20 + number)
        said.append(server.push(*good[:3], long(turned(good[3]), 2.5)))
    assert ["standard deviations" in made.rejected[0].reason for made in said[:3]] == [True, False, False]
    assert not said[3].rejected
    assert said[3].accepted[-1].part < LITTLE * math.sqrt(3)


def test_turned_pushes_now_and_then_are_never_let_in() -> None:
    """If one push in five, of any cluster, points the wrong way, no cluster has enough rejections in a row to get one
    accepted.
    """
    server, chance = Server(rules(policy="robust")), random.Random(5)
    assert not server.push(*along(999)).rejected
    for number in range(100):
        deltas = along(1000 + number)
        spoiled = chance.randrange(4) if chance.random() < 0.2 else None
        made = server.push(*(turned(d) if place == spoiled else d for place, d in enumerate(deltas)))
        assert all(weighed.part == 1.0 for weighed in made.accepted)


def test_of_two_pushes_the_momentum_tells_which_is_turned() -> None:
    server = Server(rules(policy="robust"))
    good = alike(2, 2, likeness=2.0)
    first = server.push(good[0], turned(good[1]))
    assert not first.rejected, "without momentum nobody can tell"
    server = Server(rules(policy="robust"))
    server.push(*good)
    for place in range(2):
        made = server.push(*(turned(d) if n == place else d for n, d in enumerate(good)))
        assert [refusal.offer.push.incarnation.cluster for refusal in made.rejected] == [f"c{place}"]
        assert made.rejected[0].reason.endswith("and it is against the momentum")


def test_a_push_against_the_others_is_no_turned_one_if_the_momentum_is_on_its_side() -> None:
    """Good pushes may point against the others' sum, above all if they are mostly noise: they are accepted if the
    momentum agrees with them.
    """
    good = [[1.0, 3.0, 0, 0, 0, 0, 0, 0], [1.0, -3.0, 0, 0, 0, 0, 0, 0], [1.0, 0, 3.0, 0, 0, 0, 0, 0]]
    common = [[1.0, 0, 0, 0, 0, 0, 0, 0]] * 3
    for count in (2, 3):
        server = Server(rules(policy="robust"))
        server.push(*common)
        assert product(good[0], [sum(parts) for parts in zip(*good[1:count], strict=True)]) < 0
        assert not server.push(*good[:count]).rejected
        bad = server.push(*good[: count - 1], turned([1.0, 0.1, 0, 0, 0, 0, 0, 0]))
        assert [refusal.offer.push.incarnation.cluster for refusal in bad.rejected] == [f"c{count - 1}"]


def test_a_push_that_is_alone_is_not_judged_by_the_momentum() -> None:
    """A round's only push is accepted even if it points against the momentum: good pushes with a cosine of -0.08 were
    seen.
    """
    server = Server(rules(policy="robust"))
    warm(server)
    assert not server.push(turned(alike(100)[0]), usual=4).rejected


@pytest.mark.parametrize("policy", outer_settings.POLICIES)
def test_an_empty_push_passes_and_teaches_nothing(policy: str) -> None:
    server = Server(rules(policy=policy))
    first = server.push([0.0] * SIZE)
    assert len(first.accepted) == 1
    assert first.gate.count == (policy == "di_ps")
    server = Server(rules(policy="robust"))
    warm(server)
    made = server.push(*alike(12)[:3], [0.0] * SIZE)
    assert len(made.accepted) == 4
    assert made.gate.count == 16 + 3


def test_good_training_is_never_refused() -> None:
    """Nothing is rejected as too long in good training: norms fall slowly, numbers of pushes vary, and noise is
    added.
    """
    server, chance = Server(rules(policy="robust")), random.Random(3)
    for number in range(200):
        deltas = alike(1000 + number, size=0.99**number)
        taken = [(n, d) for n, d in enumerate(deltas) if n == 0 or chance.random() < 0.7]
        offers = {offer(f"c{n}", number, steps=H): d for n, d in taken}
        made = server.round(offers, 4)
        too_long = [refusal for refusal in made.rejected if "standard deviations" in refusal.reason]
        assert not too_long


# ------------------------------------------------------------------------------------------------ the other policies


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_sync_and_async_trust_everybody(policy: str) -> None:
    server = Server(rules(policy=policy))
    good = alike(13)
    for _ in range(5):
        made = server.push(*good[:2], turned(good[2]), scaled(good[3], 1e6))
        assert not made.rejected
        assert made.gate == GateState()


def test_async_is_naive() -> None:
    """Under `async` a lone push gets the full learning rate and the momentum moves each time, which diverges according
    to the paper.
    """
    made = Server(rules(policy="async")).push([1.0] * SIZE, usual=4)
    assert (made.factors.rate, made.factors.outer, made.factors.step) == (0.7, 1.0, 0.7 * 0.8)
    tamed = Server(rules(policy="async", optimizer="delayed_nesterov")).push([1.0] * SIZE, usual=4)
    assert tamed.factors.rate == pytest.approx(0.7 / 4)


def of_norms(settings: OuterSettings, norms: Sequence[float], gate: GateState) -> Judgement:
    offers = [offer(f"c{place}") for place in range(len(norms))]
    pushes = [MeasuredPush(one, 0, True, 0.0, norm * norm) for one, norm in zip(offers, norms, strict=True)]
    names = [one.push for one in offers]
    products: Products = {(a, b): 0.0 for a in names for b in names if a < b}
    return judge(pushes, products, len(norms), Counters(), gate, settings, "")


def test_di_ps_is_the_paper_s_penalty_to_the_letter() -> None:
    settings = rules(policy="di_ps", di_ps_alpha=0.25, di_ps_beta=3.0)
    gate = of_norms(settings, [2.0], GateState()).gate
    assert gate == GateState(1, 2.0, 0.0)
    gate = of_norms(settings, [6.0], gate).gate
    assert gate == GateState(2, 3.0, 0.25 * 9.0), "mean first, and the deviation from the new mean"
    gate = of_norms(settings, [4.5], gate).gate
    assert gate.scores == (1.0,)
    assert gate.mean == 3.375
    assert gate.variance == pytest.approx(0.75 * 2.25 + 0.25 * 1.125**2)
    std = math.sqrt(gate.variance)
    made = of_norms(settings, [3.375 + 2.99 * std, 3.375 + 3.01 * std], gate)
    assert [refusal.offer for refusal in made.rejected] == [offer("c1")]
    assert "is above 3 times the largest recent one, 1" in made.rejected[0].reason
    assert made.gate.scores == pytest.approx((1.0, 2.99))
    assert made.gate.count == 5, "the averages as printed move with every push, refused or not"


def test_di_ps_with_negative_scores_rejects_every_push_for_ever() -> None:
    """The Di-PS paper's rule rejects every push once all recent scores are negative, as its limit beta max(E) is then
    below all of them.
    """
    settings = rules(policy="di_ps")
    gate = GateState(10, 1.0, 0.01, 0, (-0.5, -1.0))
    for number in range(1, 20):
        made = of_norms(settings, [1.0], gate)
        assert not made.accepted
        gate = made.gate
        assert gate.in_a_row == number


def test_di_ps_keeps_recent_scores_only() -> None:
    gate = GateState(10, 1.0, 1.0, 0, tuple([100.0] * 100))
    assert of_norms(rules(policy="di_ps"), [1.0, 2.0], gate).gate.scores[-2:] == (0.0, 1.0)
    assert len(of_norms(rules(policy="di_ps"), [1.0, 2.0], gate).gate.scores) == 100


def test_di_ps_clips_at_one_and_takes_each_round_in_full() -> None:
    server = Server(rules(policy="di_ps"))
    made = server.push([3.0] + [0.0] * 7, [5.0] + [0.0] * 7, usual=4)
    assert made.factors.rate == 0.7 * 0.25
    assert (made.factors.buffer, made.factors.outer) == (0.25, 1.0)
    assert server.theta[0].item() == pytest.approx(-0.7 * 1.8)


def test_each_policy_has_a_gate_with_the_same_arguments() -> None:
    assert tuple(GATES) == outer_settings.POLICIES
    assert len({tuple(inspect.signature(gate).parameters) for gate in GATES.values()}) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "brave"}, "expected one of robust, sync, async, di_ps"),
        ({"optimizer": "adam"}, "expected one of auto"),
        ({"outer_lr": 0.0}, "expected a positive number"),
        ({"outer_momentum": 1.0}, "from 0 on and below 1"),
        ({"batch": 0}, "expected a number of samples"),
        ({"gate_cosine": 1.5}, "expected a cosine"),
        ({"grace_cap": 1.5}, "from 0 to 1"),
        ({"di_ps_alpha": 0.0}, "above 0, up to 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        rules(**given)


def test_a_push_of_one_cluster_twice_counts_one_cluster() -> None:
    server = Server(rules())
    made = server.judge({offer("a", 1): [1.0] * SIZE, offer("a", 2): [1.0] * SIZE}, 1)
    assert "K = 1" in made.reason


def test_a_product_that_nobody_told_is_a_mistake_of_ours() -> None:
    pushes = [MeasuredPush(offer(name), 0, True, 0.0, 1.0) for name in "ab"]
    with pytest.raises(AssertionError, match=r"nobody has told the product of a~1/1 and b~1/1"):
        judge(pushes, {}, 2, Counters(), GateState(), rules(policy="robust"), "")
    assert replace(pushes[0], norm2=4.0).norm == 2.0
