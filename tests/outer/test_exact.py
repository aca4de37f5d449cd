"""Exact sums: the same for any order and grouping of additions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import WireError
from chaos_lightning.outer.rules.exact import ExactSum

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(finite, max_size=30), st.randoms(use_true_random=False), st.integers(1, 6))
def test_any_cut_into_shards_and_any_order_give_the_same_sum(
    values: list[float], chance: random.Random, shards: int
) -> None:
    whole = ExactSum.of(values)
    shuffled = chance.sample(values, len(values))
    parts = [ExactSum.of(shuffled[shard::shards]) for shard in range(shards)]
    chance.shuffle(parts)
    assert sum(parts, start=ExactSum()) == whole
    assert sum(parts, start=ExactSum()).encode() == whole.encode()
    assert Fraction(whole.mantissa) * Fraction(2) ** whole.exponent == sum(map(Fraction, values), start=Fraction())


@given(st.lists(st.floats(-1e300, 1e300), max_size=30))
def test_it_is_rounded_once_to_the_nearest_float(values: list[float]) -> None:
    assert float(ExactSum.of(values)) == math.fsum(values)


@given(finite)
def test_a_single_float_comes_back(value: float) -> None:
    assert float(ExactSum.of([value])) == value
    assert float(ExactSum.decode(ExactSum.of([value]).encode())) == value


def test_what_floats_forget_is_kept() -> None:
    assert float(ExactSum.of([1e300, 1.0, -1e300])) == 1.0
    assert float(ExactSum.of([5e-324] * 3)) == 1.5e-323
    assert float(ExactSum.of([2.0**53, 1.0]) + ExactSum.of([2.0**-60])) == 2.0**53 + 2, "above the tie"
    assert float(ExactSum.of([2.0**53, 1.0])) == 2.0**53, "ties go to even"


def test_a_sum_beyond_all_floats_is_infinite_until_it_comes_back() -> None:
    largest = 1.7976931348623157e308
    sums = [ExactSum.of([sign * largest] * 3) for sign in (1, -1)]
    assert [float(one) for one in sums] == [math.inf, -math.inf]
    assert float(sums[0] + sums[1] + ExactSum.of([0.5])) == 0.5
    assert [ExactSum.decode(one.encode()) for one in sums] == sums


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_spoils_the_sum_in_any_order(bad: float) -> None:
    spoiled = ExactSum.of([1.0, bad, 2.0])
    assert not spoiled.finite
    assert spoiled == spoiled + ExactSum.of([1.0]) == ExactSum.of([1.0]) + spoiled == ExactSum.of([-bad])
    assert math.isnan(float(spoiled))
    assert ExactSum.decode(spoiled.encode()) == spoiled


@given(st.lists(finite, max_size=8))
def test_text_is_read_back_and_short(values: list[float]) -> None:
    made = ExactSum.of(values)
    assert ExactSum.decode(made.encode()) == made
    assert len(made.encode()) < 540
    assert len(ExactSum.of([0.1 * number for number in range(1000)]).encode()) < 25


def test_equal_values_are_equal_however_they_were_written() -> None:
    assert ExactSum(4, 0) == ExactSum(1, 2) == ExactSum.of([4.0])
    assert ExactSum(0, 17) == ExactSum() == ExactSum.of([1.0, -1.0])
    assert ExactSum(5, 1, finite=False) == ExactSum.of([math.nan])


@pytest.mark.parametrize(
    "garbage",
    ["", "p", "1", "1p", "p1", "2p0", "0p0", "-0p0", "01p0", "1p01", "1p+1", "1P0", "Ap0", "1p-1075", "1p1088",
     "1p99999", " 1p0", "1p0\n", "\u0661p0", "inf", "-nan", "f" * 601 + "p0", "1.5", None, 1, 1.5, b"1p0", ["1p0"]],
)  # fmt: skip
def test_garbage_is_refused_with_what_was_expected(garbage: object) -> None:
    with pytest.raises(WireError, match="expected"):
        ExactSum.decode(garbage)


@given(st.text(alphabet="-0123456789abcdefpn", max_size=20))
def test_what_is_read_has_one_form(text: str) -> None:
    try:
        read = ExactSum.decode(text)
    except WireError:
        return
    assert read.encode() == text


def test_a_hundred_thousand_numbers_of_all_sizes() -> None:
    chance = random.Random(5)
    values = [chance.gauss(0, 1) * 2.0 ** chance.randint(-300, 300) for _ in range(100_000)]
    assert float(ExactSum.of(values)) == math.fsum(values)
