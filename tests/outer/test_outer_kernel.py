"""Arithmetic of outer sync: the same bits for any cut, memory address and number of threads; with all clusters in each
round it is DiLoCo.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chaos_lightning.errors import WireError
from chaos_lightning.outer.exchange import kernel
from chaos_lightning.outer.exchange.codec import BF16, FP32, INT8, Format, Part
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate, adopt, freeze, products, settle
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import Factors

GRID = Grid((333, 0, 1, 65, 200, 64), 64)
"""Blocks of odd lengths, most of which begin at odd places."""
Array = np.ndarray[Any, np.dtype[np.float32]]


def nesterov(eta: float = 0.7, mu: float = 0.8, p: float = 1.0) -> Factors:
    """Returns the factors of a round in which the momentum moves, as in plain Nesterov."""
    return Factors(rate=eta * p, buffer=p, momentum=mu, outer=1.0, step=eta * mu)


DELAYED = Factors(rate=0.7 * 0.3, buffer=0.3, momentum=0.8)
"""Factors of a round in which it does not."""
PARTLY = replace(nesterov(p=0.9), outer=0.83)
"""Factors of one in which it moves, after more samples than a round has."""


def noise(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """Returns random numbers of very different magnitudes, some of them 0.0 and -0.0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * scale
    values *= torch.exp2(torch.randint(-20, 3, (count,), generator=generator).float())
    values[torch.rand(count, generator=generator) < 0.05] = 0.0
    values[torch.rand(count, generator=generator) < 0.05] = -0.0
    return values


@dataclass(frozen=True)
class Act:
    """Round for the whole grid: pushes, weights and factors. Blocks of the tensors from number `averaged` on are
    buffers.
    """

    weights: tuple[float, ...]
    deltas: tuple[Tensor, ...]
    factors: Factors
    averaged: int = len(GRID.sizes)


def acts(grid: Grid, rounds: Sequence[Factors], pushes: int, seed: int = 0) -> list[Act]:
    rng = random.Random(seed)
    made = []
    for number, factors in enumerate(rounds):
        weights = [rng.random() for _ in range(pushes)]
        total = sum(weights) or 1.0
        deltas = tuple(noise(grid.elements, 100 * seed + 10 * number + j, 1e-2) for j in range(pushes))
        made.append(Act(tuple(w / total for w in weights), deltas, factors))
    return made


class Reference:
    """Update rule of the kernel, implemented in numpy, whose operations are never fused; for the whole state, block by
    block.
    """

    def __init__(self, grid: Grid, theta: Tensor) -> None:
        self.grid = grid
        self.theta = theta.numpy().copy()
        self.momentum, self.buffer = np.zeros_like(self.theta), np.zeros_like(self.theta)

    def round(self, act: Act, format: Format) -> None:
        deltas = [Part.encoded(self.grid.whole, format, d).decoded().numpy() for d in act.deltas]
        moved = self.grid.whole.since(act.averaged) if self.grid is GRID else self.grid.blocks
        for block, place in enumerate(self.grid.whole.places):
            self._block(place, act, [d[place] for d in deltas], averaged=block >= moved)

    def _block(self, place: slice, act: Act, deltas: list[Array], *, averaged: bool) -> None:
        f = act.factors
        rate, into, mu, outer, step = (np.float32(v) for v in (f.rate, f.buffer, f.momentum, f.outer, f.step))
        delta = np.zeros(place.stop - place.start, np.float32)
        for number, (weight, d) in enumerate(zip(act.weights, deltas, strict=True)):
            delta = delta + np.float32(weight) * d if number else np.float32(weight) * d
        theta, m, b = self.theta[place], self.momentum[place], self.buffer[place]
        if averaged:
            theta[:] = theta - delta
            return
        x = into * delta
        b[:] = b + x if b.any() else x
        used = rate * delta
        if f.outer:
            m[:] = mu * m + outer * b
            used = used + step * m
        theta[:] = theta - used
        if f.outer or not b.any():
            b[:] = 0.0

    @property
    def state(self) -> bytes:
        return b"".join(t.tobytes() for t in (self.theta, self.momentum, self.buffer))


@dataclass
class Held:
    """State of a shard in memory at odd addresses."""

    state: OuterState

    @classmethod
    def of(cls, shard: Shard, theta: Tensor, offset: int) -> Held:
        room = torch.zeros(3 * (shard.elements + offset) + 64)
        size, there = shard.elements, room[offset:]
        tensors = [there[i * (size + offset) : i * (size + offset) + size] for i in range(3)]
        tensors[0].copy_(theta[slice(*shard.span)])
        return cls(OuterState(shard, *tensors))

    def round(self, act: Act, format: Format, offset: int, order: random.Random) -> Tensor:
        shard = self.state.shard
        pushes = []
        for weight, delta in zip(act.weights, act.deltas, strict=True):
            part = Part.encoded(shard, format, delta[slice(*shard.span)])
            elsewhere = torch.empty(offset + part.data.numel(), dtype=torch.uint8)[offset:]
            pushes.append((weight, Part(shard, format, elsewhere.copy_(part.data))))
        version = Part.empty(shard, BF16)
        averaged = shard.since(act.averaged) if shard.grid is GRID else None
        update = RoundUpdate(self.state, pushes, act.factors, version, averaged)
        blocks = list(range(shard.blocks))
        order.shuffle(blocks)
        for block in blocks:
            assert not update.complete
            update.run(range(block, block + 1))
        assert update.complete
        return version.data


def computed(grid: Grid, shards: Sequence[Shard], rounds: Sequence[Act], format: Format, offset: int) -> list[Held]:
    theta = noise(grid.elements, 7)
    held = [Held.of(shard, theta, offset) for shard in shards]
    order = random.Random(offset)
    for act in rounds:
        for one in held:
            one.round(act, format, offset, order)
    return held


def bits(held: Sequence[Held]) -> bytes:
    return b"".join(torch.cat([h.state.tensors[i] for h in held]).numpy().tobytes() for i in range(3))


def expected(grid: Grid, rounds: Sequence[Act], format: Format) -> bytes:
    reference = Reference(grid, noise(grid.elements, 7))
    for act in rounds:
        reference.round(act, format)
    return reference.state


# ---------------------------------------------------------------------- bits

MIXED = (nesterov(), DELAYED, DELAYED, PARTLY, nesterov(eta=1.0), DELAYED, nesterov(mu=0.0))


@pytest.mark.parametrize("format", [FP32, BF16, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("pushes", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 2, 5, 13])
def test_bits_are_those_of_the_rule_for_any_cut_address_and_order_of_blocks(
    format: Format, pushes: int, shards: int
) -> None:
    rounds = acts(GRID, MIXED, pushes)
    for offset in (0, 1, 5):
        assert bits(computed(GRID, GRID.cut(shards), rounds, format, offset)) == expected(GRID, rounds, format)


@pytest.mark.parametrize("averaged", range(len(GRID.sizes)))
def test_reduced_buffers_are_averaged_and_nothing_else(averaged: int) -> None:
    rounds = [replace(act, averaged=averaged) for act in acts(GRID, MIXED, 2)]
    for shards in (1, 3, GRID.blocks):
        held = computed(GRID, GRID.cut(shards), rounds, BF16, 1)
        assert bits(held) == expected(GRID, rounds, BF16)
        start = GRID.start(GRID.whole.since(averaged))
        for tensor in (1, 2):
            assert not torch.cat([h.state.tensors[tensor] for h in held])[start:].any()


factors = st.builds(
    Factors,
    rate=st.floats(0.0, 2.0),
    buffer=st.floats(0.0, 1.0),
    momentum=st.floats(0.0, 1.0),
    outer=st.sampled_from([0.0, 0.0, 1.0, 0.5, 1 / 3]),
    step=st.floats(0.0, 2.0),
)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5).map(tuple).filter(any),
    block=st.integers(64, 130),
    rounds=st.lists(factors, min_size=1, max_size=4),
    pushes=st.integers(0, 3),
    offset=st.integers(0, 17),
    data=st.data(),
)
def test_bits_for_any_grid(
    sizes: tuple[int, ...], block: int, rounds: list[Factors], pushes: int, offset: int, data: st.DataObject
) -> None:
    grid = Grid(sizes, block)
    shards = grid.cut(data.draw(st.integers(1, grid.blocks)))
    done = acts(grid, rounds, pushes, seed=offset)
    assert bits(computed(grid, shards, done, BF16, offset)) == expected(grid, done, BF16)


@pytest.mark.usefixtures("threads_of_torch")
def test_bits_of_large_blocks_with_several_threads() -> None:
    """Torch divides operations on more than 2^15 elements among threads, at places that depend on their number: the
    bits must not.
    """
    grid = Grid((100_003, 33_333))
    rounds = acts(grid, (nesterov(), DELAYED, PARTLY), 2)
    found = set()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.add(bits(computed(grid, grid.cut(1), rounds, BF16, 3)))
    assert found == {expected(grid, rounds, BF16)}


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_subnormals_and_signs_of_zero_are_those_of_the_rule() -> None:
    least = 2.0**-149
    values = torch.tensor([-0.0, 0.0, least, -least, 3 * least, -5 * least, 2.0**-126, -(2.0**-126)]).repeat(9)
    grid = Grid((len(values),), 64)
    rounds = [Act((0.5, 0.5), (values, -values), f) for f in MIXED] + [Act((1.0,), (values,), f) for f in MIXED]
    assert bits(computed(grid, grid.cut(2), rounds, FP32, 1)) == expected(grid, rounds, FP32)


def test_several_threads_may_share_a_round() -> None:
    rounds = acts(GRID, (DELAYED, nesterov()), 2)
    state = Held.of(GRID.whole, noise(GRID.elements, 7), 0).state
    for act in rounds:
        pushes = [(w, Part.encoded(GRID.whole, BF16, d)) for w, d in zip(act.weights, act.deltas, strict=True)]
        update = RoundUpdate(state, pushes, act.factors)
        shares = [range(at, GRID.blocks, 4) for at in range(4)]
        crew = [threading.Thread(target=update.run, args=(share,)) for share in shares]
        for one in crew:
            one.start()
        for one in crew:
            one.join(60)
        assert update.complete
    assert bits([Held(state)]) == expected(GRID, rounds, BF16)


def test_a_state_that_was_loaded_goes_on_with_the_same_bits() -> None:
    """A state that is copied after each round, as by a restart, has the same bits later: nothing outside its tensors is
    remembered.
    """
    rounds = acts(GRID, MIXED, 2)
    rounds.insert(2, Act((1.0,), (torch.full((GRID.elements,), -0.0),), DELAYED))
    rounds.insert(0, rounds[2])
    one = [Held.of(GRID.whole, noise(GRID.elements, 7), 0)]
    for act in rounds:
        one[0].round(act, BF16, 0, random.Random(0))
        one = [Held(OuterState(GRID.whole, *(t.clone() for t in one[0].state.tensors)))]
    assert bits(one) == expected(GRID, rounds, BF16)


def test_the_version_is_the_encoded_parameters() -> None:
    (act,) = acts(GRID, [nesterov()], 2)
    whole, parts = [[Held.of(s, noise(GRID.elements, 7), 0) for s in GRID.cut(n)] for n in (1, 3)]
    versions = [torch.cat([h.round(act, BF16, 0, random.Random(0)) for h in held]) for held in (whole, parts)]
    assert torch.equal(*versions)
    assert torch.equal(versions[0], Part.encoded(GRID.whole, BF16, whole[0].state.theta).data)


def test_digests_do_not_depend_on_the_cut_and_see_each_part_of_the_state() -> None:
    rounds = acts(GRID, [DELAYED], 1)
    whole, parts = (computed(GRID, GRID.cut(n), rounds, BF16, 0) for n in (1, 4))
    assert [d for h in parts for d in h.state.digests()] == whole[0].state.digests()
    state = whole[0].state
    seen = {state.digest}
    for tensor in state.tensors:
        tensor[5] += 1
        seen.add(state.digest)
    assert len(seen) == 4


# ---------------------------------------------------------------------- DiLoCo


def test_with_everybody_in_it_is_nesterov_bit_for_bit() -> None:
    """With all clusters in each round the result has the same bits as Nesterov's momentum on whole tensors in one
    process.
    """
    eta, mu = 0.7, 0.8
    rounds = acts(GRID, [nesterov(eta, mu)] * 5, 3)
    theta = noise(GRID.elements, 7)
    momentum = torch.zeros_like(theta)
    for act in rounds:
        weighted = [torch.tensor(w) * d for w, d in zip(act.weights, act.deltas, strict=True)]
        delta = (weighted[0] + weighted[1]) + weighted[2]
        momentum = torch.tensor(mu) * momentum + delta
        theta = theta - (torch.tensor(eta) * delta + torch.tensor(eta * mu) * momentum)
    held = computed(GRID, GRID.cut(4), rounds, FP32, 1)
    assert torch.equal(torch.cat([h.state.theta for h in held]), theta)
    assert torch.equal(torch.cat([h.state.momentum for h in held]), momentum)


@pytest.mark.parametrize("fused", [False, True])
def test_with_everybody_in_it_is_the_optimizer_of_torch(fused: bool) -> None:
    eta, mu = 0.7, 0.9
    rounds = acts(GRID, [nesterov(eta, mu)] * 8, 2)
    parameter = torch.nn.Parameter(noise(GRID.elements, 7))
    optimizer = torch.optim.SGD([parameter], lr=eta, momentum=mu, nesterov=True, fused=fused)
    for act in rounds:
        parameter.grad = sum((w * d for w, d in zip(act.weights, act.deltas, strict=True)), torch.zeros(1))
        optimizer.step()
    held = computed(GRID, GRID.cut(3), rounds, FP32, 0)
    torch.testing.assert_close(torch.cat([h.state.theta for h in held]), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_alone_and_each_in_turn_it_is_delayed_nesterov() -> None:
    """With one push in each round, of the clusters in turn, the result is Delayed Nesterov (arXiv 2401.09135, Algorithm
    3 with c = 0).
    """
    eta, mu, clusters = 0.7, 0.8, 4
    p = 1 / clusters
    lone = Factors(rate=eta * p, buffer=p, momentum=mu)
    last = replace(lone, outer=1.0, step=eta * mu)
    rounds = acts(GRID, [last if n % clusters == clusters - 1 else lone for n in range(12)], 1)
    theta, m, b = noise(GRID.elements, 7).double(), torch.zeros(()).double(), torch.zeros(()).double()
    for number, act in enumerate(rounds):
        b = b + act.deltas[0] / clusters
        theta = theta - eta / clusters * act.deltas[0]
        if number % clusters == clusters - 1:
            m, b = mu * m + b, torch.zeros(()).double()
            theta = theta - eta * mu * m
    held = computed(GRID, GRID.cut(3), rounds, FP32, 0)
    torch.testing.assert_close(torch.cat([h.state.theta for h in held]).double(), theta, rtol=1e-5, atol=1e-6)


def test_a_round_without_an_accepted_push_changes_nothing() -> None:
    held = computed(GRID, GRID.cut(1), acts(GRID, [nesterov(), DELAYED], 2), BF16, 0)[0]
    before = [t.clone() for t in held.state.tensors]
    held.round(Act((), (), DELAYED), BF16, 0, random.Random(0))
    assert all(map(torch.equal, held.state.tensors, before))
    assert held.state.theta.numpy().tobytes() == before[0].numpy().tobytes()


def test_of_parameters_the_round_takes_the_difference_to_what_it_finds() -> None:
    """Pushes that hold parameters f act like pushes of theta - f, with theta of the version before the round; for any
    cut.
    """
    theta, averaged = noise(GRID.elements, 7), GRID.whole.since(4)
    first, second = (theta + noise(GRID.elements, seed, 1e-2) for seed in (1, 2))
    expected = OuterState(GRID.whole, theta.clone())
    for f in (first, second):
        delta = Part.of(GRID.whole, expected.theta - f)
        RoundUpdate(expected, [(0.75, delta), (0.25, delta)], PARTLY, None, averaged).run()
    for shard in GRID.cut(3):
        place = slice(*shard.span)
        state = OuterState(shard, theta[place].clone())
        for f in (first, second):
            push, since = Part.of(shard, f[place].clone()), shard.since(4)
            RoundUpdate(state, [(0.75, push), (0.25, push)], PARTLY, None, since, parameters=True).run()
        for mine, whole in zip(state.tensors, expected.tensors, strict=True):
            assert torch.equal(mine, whole[place])


def test_malformed_bytes_and_a_block_twice_do_not_pass() -> None:
    state = OuterState(GRID.whole, noise(GRID.elements, 7))
    push = Part.encoded(GRID.whole, INT8, noise(GRID.elements, 1))
    update = RoundUpdate(state, [(1.0, push)], DELAYED)
    update.run(range(1))
    with pytest.raises(AssertionError):
        update.run(range(1))
    push.block(1)[:4] = torch.tensor([-1.0]).view(torch.uint8)
    with pytest.raises(WireError, match="scale"):
        update.run(range(1, 2))
    assert not update.complete


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    for tensor in range(3):
        state = OuterState(GRID.whole, noise(GRID.elements, 7))
        assert state.finite()
        state.tensors[tensor][GRID.elements // 2] = bad
        assert not state.finite()


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("format", [FP32, BF16, INT8], ids=lambda f: f.name)
def test_products_are_sums_in_fp64(format: Format) -> None:
    values = [noise(GRID.elements, seed) for seed in (1, 2)]
    one, other = (Part.encoded(GRID.whole, format, v) for v in values)
    x, y = one.decoded().double(), other.decoded().double()
    exact = [math.fsum((x[p] * y[p]).tolist()) for p in GRID.whole.places]
    assert products(one, other) == pytest.approx(exact, rel=1e-12, abs=1e-15)
    assert products(one, one) == pytest.approx([math.fsum((x[p] ** 2).tolist()) for p in GRID.whole.places])
    assert products(one, other) == products(other, one)
    assert products(one, other, 3) == products(one, other)[:3]


@settings(max_examples=20)
@given(size=st.integers(64, 40_000), offset=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_product_has_the_same_bits_wherever_a_block_lies(size: int, offset: int, seed: int) -> None:
    grid = Grid((size // 3, size), size)
    pair = [noise(grid.elements, seed), noise(grid.elements, seed + 100)]
    whole = products(*(Part.of(grid.whole, v) for v in pair))
    elsewhere = [torch.cat([torch.zeros(offset), v])[offset:] for v in pair]
    parts = [products(*(Part.of(s, v[slice(*s.span)]) for v in elsewhere)) for s in grid.cut(grid.blocks)]
    assert [p for found in parts for p in found] == whole
    assert products(Part.of(grid.whole, pair[0]), Part.of(grid.whole, pair[0].clone())) == products(
        *[Part.of(grid.whole, pair[0])] * 2
    )


def test_the_order_of_the_sums_is_the_one_that_is_told() -> None:
    size = 3 * (1 << 13) + 777
    x, y = noise(size, 1), noise(size, 2)
    lanes = np.zeros(1 << 13)
    for start in range(0, size, 1 << 13):
        terms = x[start : start + (1 << 13)].double().numpy() * y[start : start + (1 << 13)].double().numpy()
        lanes[: len(terms)] += terms
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    shard = Grid((size,)).whole
    assert products(Part.of(shard, x), Part.of(shard, y)) == [lanes[0]]


@pytest.mark.parametrize("format", [FP32, BF16, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_push_that_is_not_finite_has_a_norm_that_is_not(format: Format, bad: float) -> None:
    values = noise(GRID.elements, 1)
    place = GRID.whole.places[3]
    values[place.stop - 1] = bad
    part = Part.encoded(GRID.whole, format, values)
    assert [math.isfinite(p) for p in products(part, part)] == [block != 3 for block in range(GRID.blocks)]
    largest = Part.of(GRID.whole, torch.full((GRID.elements,), 3e38))
    assert all(map(math.isfinite, products(largest, largest)))


# ---------------------------------------------------------------------- a cluster


@pytest.mark.parametrize("format", [FP32, BF16, INT8], ids=lambda f: f.name)
def test_a_push_and_the_residual_are_what_the_equations_say(format: Format) -> None:
    shard = GRID.whole
    base = Part.encoded(shard, BF16, noise(GRID.elements, 1))
    f, e = base.decoded() + noise(GRID.elements, 2, 1e-2), noise(GRID.elements, 3, 1e-4)
    before = f.clone()
    gained = base.decoded() - f + e
    push = Part.empty(shard, format)
    freeze(base, f, push, e)
    assert torch.equal(push.data, Part.encoded(shard, format, gained).data)
    left = gained - push.decoded()
    settle(base, f, push, e)
    assert torch.equal(e, left)
    assert torch.equal(f, before)
    without = Part.empty(shard, format)
    freeze(base, f, without)
    assert torch.equal(without.data, Part.encoded(shard, format, base.decoded() - f).data)


def test_int8_with_a_residual_loses_nothing_over_many_pushes() -> None:
    """One large number in a block makes int8 round the others to 0 in each push; the residual adds them to later
    pushes.
    """
    shard = Grid((64,), 64).whole
    base = Part.of(shard, torch.zeros(64))
    f = torch.full((64,), -1e-3)
    f[0] = -1.0
    e, sums = torch.zeros(64), [torch.zeros(64), torch.zeros(64)]
    for _ in range(100):
        for total, residual in zip(sums, (e, None), strict=True):
            push = Part.empty(shard, INT8)
            freeze(base, f, push, residual)
            total.add_(push.decoded())
            if residual is not None:
                settle(base, f, push, residual)
    wanted = -100 * f
    assert (sums[0] - wanted).abs().max() < 1 / 127
    assert sums[1][1] == 0.0


def test_adopting_keeps_what_was_trained_since_the_freezing() -> None:
    shard = GRID.whole
    f = noise(GRID.elements, 1)
    theta = f + noise(GRID.elements, 2, 1e-3)
    version = Part.encoded(shard, BF16, noise(GRID.elements, 3))
    wanted = version.decoded() + (theta - f)
    adopt(theta, version, Part.of(shard, f))
    assert torch.equal(theta, wanted)
    base = Part.encoded(shard, BF16, noise(GRID.elements, 4))
    wanted = version.decoded() + (theta - base.decoded())
    adopt(theta, version, base)
    assert torch.equal(theta, wanted)


def test_adopting_without_overlap_assigns_exactly() -> None:
    shard = GRID.whole
    exact = noise(GRID.elements, 3)
    version = Part.of(shard, exact)
    theta = noise(GRID.elements, 1)
    adopt(theta, version)
    assert theta.numpy().tobytes() == exact.numpy().tobytes()  # -0.0 too, which an added 0 would turn into 0.0
    adopt(theta, version, Part.of(shard, theta.clone()))
    assert torch.equal(theta, exact)
    assert theta.numpy().tobytes() != exact.numpy().tobytes()


def test_parameters_that_need_gradients_are_read_and_written() -> None:
    shard = GRID.whole
    theta = noise(GRID.elements, 1).requires_grad_()
    base, push = Part.encoded(shard, BF16, noise(GRID.elements, 2)), Part.empty(shard, BF16)
    freeze(base, theta, push)
    adopt(theta, base, Part.of(shard, theta.detach().clone()))
    assert torch.equal(theta.detach(), base.decoded())
    assert theta.grad_fn is None


@pytest.mark.slow
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(0, 2**31), st.booleans())
def test_products_of_many_short_blocks_are_those_of_each(sizes: list[int], seed: int, broken: bool) -> None:
    """Scalar products of blocks of equal length are computed together, with the same bits as one by one."""
    grid = Grid((*sizes, *sorted(sizes)), 64)
    one, other = noise(grid.elements, seed), noise(grid.elements, seed + 1)
    if broken:
        one[seed % grid.elements] = math.nan
    x, y = (Part.encoded(grid.whole, FP32, values) for values in (one, other))
    lanes = torch.empty(3, kernel._LANES, dtype=torch.float64).unbind()
    for mine, its in ((x, y), (x, x)):
        alone = [kernel._dot(mine.decoded()[place], its.decoded()[place], lanes) for place in grid.whole.places]
        assert torch.equal(exactly(products(mine, its)), exactly(alone))
    assert products(x, y, 0) == []


def exactly(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(torch.int64)
