"""Tests the division of a batch of fixed size: rules and splits as text, shares by speed, units that are whole and
disjoint.
"""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError, PlanError
from chaos_lightning.planning.batch import (
    MOST_SAMPLES,
    WORTH,
    BatchRule,
    Split,
    better,
    check_rule,
    check_scaling,
    divided,
    read_rule,
    read_setting,
    read_split,
    samples_of_rate,
    span_of,
    speeds_of,
)
from chaos_lightning.settings import EngineConfig

speeds = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


@st.composite
def rules(draw: st.DrawFn) -> BatchRule:
    unit = draw(st.integers(0, 9))
    return BatchRule(draw(st.integers(1, 200)) * max(unit, 1), unit)


@st.composite
def divisions(draw: st.DrawFn) -> Split:
    rule = draw(rules())
    borders = sorted(draw(st.lists(st.integers(0, rule.units), max_size=8)))
    return Split(rule, tuple(b - a for a, b in pairwise([0, *borders, rule.units])))


# ------------------------------------------------------------------ settings and rules


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("member", None),
        ("fixed", BatchRule(32)),
        ("fixed:256", BatchRule(256)),
        ("fixed:256/16", BatchRule(256, 16)),
        ("fixed:1/1", BatchRule(1, 1)),
        (f"fixed:{MOST_SAMPLES}", BatchRule(MOST_SAMPLES)),
    ],
)
def test_a_setting_names_a_rule(text: str, rule: BatchRule | None) -> None:
    assert read_setting(text, 32) == rule
    assert check_rule(text) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected member"),
        ("fix", "expected member"),
        ("member:3", "expected member"),
        ("fixed:", "expected member"),
        ("fixed:3.5", "expected member"),
        ("fixed:-3", "expected member"),
        ("fixed: 3", "expected member"),
        ("fixed:12/", "expected member"),
        ("fixed:12/3/1", "expected member"),
        ("fixed:12345678901", "expected member"),
        ("fixed:0", "1 or more"),
        ("fixed:12/0", "1 or more"),
        (f"fixed:{MOST_SAMPLES + 1}", f"{MOST_SAMPLES} at most"),
        ("fixed:100/32", "N = 96 or 128"),
        ("fixed:3/32", "N = 32, or"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_write_in_its_place(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read_setting(text, 32)
    assert words in check_rule(text)
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig(batch=text)
    assert re.findall("batch='.*?'", str(caught.value)) == [f"batch={text!r}"], "each name is said once"


@pytest.mark.parametrize(("text", "samples"), [("none", 0), ("linear:1", 1), ("linear:64", 64)])
def test_the_learning_rate_is_chosen_for_a_number_of_samples(text: str, samples: int) -> None:
    assert check_scaling(text) == ""
    assert samples_of_rate(text) == samples
    assert EngineConfig(lr_scaling=text).lr_scaling == text


@pytest.mark.parametrize(
    "text", ["", "linear", "linear:", "linear:0", "linear:-2", "linear:1.5", "linear:two", "linear:2:3", "sqrt:2", "2"]
)
def test_a_wrong_scaling_is_refused_with_what_is_expected(text: str) -> None:
    words = (
        f"lr_scaling={text!r}: expected none, or linear:M0 with M0 the samples of a step that the rate was chosen for"
    )
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        EngineConfig(lr_scaling=text)


def test_the_rate_of_a_batch_that_stays_is_not_scaled() -> None:
    with pytest.raises(ConfigurationError, match=r"lr_scaling='linear:2' with batch='fixed:8'.*or take batch=member"):
        EngineConfig(lr_scaling="linear:2", batch="fixed:8")


def test_the_loaders_batch_must_be_one_that_a_rule_can_have() -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        read_setting("fixed", 0)


@given(rules())
def test_a_rule_is_read_as_it_was_written(rule: BatchRule) -> None:
    assert read_rule(str(rule)) == rule
    assert read_setting(f"fixed:{rule}", 1) == rule
    assert rule.units * rule.unit == rule.samples


def test_no_text_is_the_rule_of_members_batches() -> None:
    assert read_rule("") is None
    assert read_split("", 3) is None


@pytest.mark.parametrize("text", ["member", "0", "012", "12/0", "12/5", "12/", " 12", "12 ", "12/03", "٣", "9" * 5000])
def test_a_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no rule"):
        read_rule(text)


@given(rules(), st.integers(0, 400))
def test_a_short_step_has_as_many_units_as_its_samples_fill(rule: BatchRule, samples: int) -> None:
    units = rule.present(samples)
    assert (units - 1) * rule.unit < samples or units == samples == 0
    assert units * rule.unit >= samples
    assert rule.present(rule.samples) == rule.units


# ------------------------------------------------------------------ splits


@given(divisions())
@example(Split(BatchRule(6), (0, 6)))
@example(Split(BatchRule(12, 3), (1, 1, 1, 1)))
def test_a_split_is_read_as_it_was_written(split: Split) -> None:
    assert read_split(str(split), len(split.shares)) == split
    assert sum(split.samples()) == split.rule.samples


@given(divisions(), st.data())
def test_units_are_disjoint_and_whole_however_many_a_step_has(split: Split, data: st.DataObject) -> None:
    present = data.draw(st.integers(0, split.rule.units))
    units = [split.units(rank, present) for rank in range(len(split.shares))]
    assert [unit for first, stop in units for unit in range(first, stop)] == list(range(present))
    if present == split.rule.units:
        assert tuple(stop - first for first, stop in units) == split.shares
    for (first, stop), share in zip(units, split.shares, strict=True):
        assert abs((stop - first) - share * present / split.rule.units) < 1, "a short step is divided alike"


def test_a_split_of_many_members_is_short() -> None:
    split = Split(BatchRule(512), (2,) * 255 + (1, 1))
    assert str(split) == "512:2x255,1x2"
    assert read_split("512:2x255,1x2", 257) == split


@pytest.mark.parametrize(
    "text",
    [
        "12",
        "12:",
        ":12",
        "12:6",
        "12:6,6,0",
        "12:5,6",
        "12:6,x",
        "12:6x2,",
        "12:6,6",
        "12:6x",
        "12:6x1,6",
        "12:6x02",
        "12:-6,18",
        "12:+6x2",
        "12:٦x2",
        "12/5:6x2",
        "12:6x2\n",
        "12:6x2x1",
        "12:6x9999999999",
        f"12:{'9' * 5000}x2",
        f"12:6x{'9' * 5000}",
        "12:" + "0," * 100_000 + "12",
    ],
)
def test_a_text_that_does_not_divide_a_batch_among_two_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        read_split(text, 2)


@given(st.text(alphabet="0123456789/:,x-+ \n", max_size=12), st.integers(0, 4))
def test_any_text_is_read_or_refused(text: str, members: int) -> None:
    try:
        split = read_split(text, members)
    except PlanError:
        return
    assert str(split or "") == text


# ------------------------------------------------------------------ shares by speed


@given(st.integers(0, 300), speeds)
def test_all_units_are_given(units: int, speed: list[float]) -> None:
    shares = divided(units, speed)
    assert sum(shares) == units
    assert all(share >= 0 for share in shares)


@given(st.integers(1, 7), st.lists(st.integers(1, 9).map(float), min_size=1, max_size=4))
def test_the_last_member_ends_as_early_as_whole_units_allow(units: int, speed: list[float]) -> None:
    every = (shares for shares in product(range(units + 1), repeat=len(speed)) if sum(shares) == units)
    assert span_of(divided(units, speed), speed) == min(span_of(shares, speed) for shares in every)


def test_shares_follow_speeds() -> None:
    assert divided(12, [1.0, 1.0]) == (6, 6)
    assert divided(12, [2.0, 1.0]) == (8, 4)
    assert divided(8, [1.0, 1.0, 1.0]) == (3, 3, 2)
    assert divided(10, [20.0, 1.0]) == (10, 0), "one unit would take the slow one longer than ten the fast one"
    assert divided(2, [1.0, 1.0, 1.0]) == (1, 1, 0)
    assert divided(MOST_SAMPLES, [1e-12, 1e12]) == (0, MOST_SAMPLES)


def test_equal_members_of_a_large_batch_get_equal_shares() -> None:
    assert len(set(divided(256 * 7, [0.1] * 256))) == 1


@given(st.integers(1, 100), speeds)
def test_the_best_split_stays(units: int, speed: list[float]) -> None:
    assert better(divided(units, speed), speed) is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_another_split_pays_or_is_not_made(before: list[int], data: st.DataObject) -> None:
    before[0] += 1
    speed = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(before), max_size=len(before)))
    after = better(before, speed)
    if after is None:
        assert span_of(divided(sum(before), speed), speed) > (1 - WORTH) * span_of(before, speed)
    else:
        assert sum(after) == sum(before)
        assert span_of(after, speed) <= (1 - WORTH) * span_of(before, speed)


def test_small_changes_of_speed_change_nothing() -> None:
    assert better((50, 50), [1.0, 1.15]) is None
    assert better((50, 50), [1.0, 2.0]) == (33, 67)


def test_a_member_that_has_told_nothing_counts_as_the_median() -> None:
    assert speeds_of("abcd", {"a": 0.5, "b": 0.25, "c": 0.1, "d": 0.0}) == [2.0, 4.0, 10.0, 4.0]
    assert speeds_of("ab", {}) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
@example([5e-324, 1e6])
def test_any_times_that_members_may_tell_divide_a_batch(seconds: list[float]) -> None:
    names = [str(i) for i in range(len(seconds))]
    speed = speeds_of(names, dict(zip(names, seconds, strict=True)))
    assert sum(divided(1000, speed)) == 1000
    better([1000, *(0 for _ in seconds[1:])], speed)
