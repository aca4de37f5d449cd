"""Tests the parts of the training state, and their owners."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_script import member, pipelines_of

from chaos_lightning.errors import PlanError
from chaos_lightning.membership.parts import Division, common, division, numbers
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import NO_VIEW, WHOLE, View, ViewId

IDS = ("a~1", "b~2", "c~3", "d~4")
VIEW = View(ViewId(1, 1), NO_VIEW, tuple(map(member, IDS)))
TEXT = pipelines_of("a~1:2+b~2:2,c~3:4", shared="wte:0.3,bias:1.2")


def test_without_pipelines_all_own_the_one_part() -> None:
    parts = division(VIEW)
    assert (parts.names, parts.everything, parts.layer_count) == (("state",), WHOLE, 0)
    assert parts.owners == (IDS,)
    assert [parts.owned(m) for m in (*IDS, "x~9")] == [WHOLE] * 4 + [()]
    assert [parts.made(m) for m in IDS] == [WHOLE, (), (), ()]
    assert parts.coverage_error([(0, 3)], {}) == ""


def test_layers_shared_parameters_and_the_rest_have_numbers_and_owners() -> None:
    parts = division(replace(VIEW, pipelines=TEXT))
    assert parts.names == ("layer.0", "layer.1", "layer.2", "layer.3", "shared.bias", "shared.wte", "rest")
    assert parts.owners == (
        *(("a~1", "c~3"),) * 2,
        *(("b~2", "c~3"),) * 2,
        ("a~1", "b~2", "c~3"),  # layers 1 and 2
        ("a~1", "b~2", "c~3"),  # layers 0 and 3
        IDS,
    )
    assert parts.owned("a~1") == ((0, 2), (4, 7))
    assert parts.owned("c~3") == parts.everything
    assert parts.owned("d~4") == ((6, 7),), "who stands by owns the rest"
    assert parts.words(((0, 1), (2, 4), (5, 7))) == "layer.0, layer.2, layer.3, shared.wte, rest"
    assert parts.words(((0, 4),)) == "layer.0 to layer.3"
    assert parts.words(()) == "nothing"


def test_the_oldest_owner_makes_a_part() -> None:
    parts = division(replace(VIEW, pipelines=TEXT))
    made = [parts.made(m) for m in IDS]
    assert made == [((0, 2), (4, 7)), ((2, 4),), (), ()]
    later = division(replace(VIEW, members=VIEW.members[1:], pipelines=pipelines_of("c~3:4")))
    assert [later.made(m) for m in ("b~2", "c~3")] == [((4, 5),), ((0, 4),)]


def test_a_text_that_names_strangers_is_refused() -> None:
    with pytest.raises(PlanError, match="name 'c~3', who is no member"):
        division(replace(VIEW, members=VIEW.members[:2], pipelines=TEXT))
    with pytest.raises(PlanError, match="cannot be read"):
        division(replace(VIEW, pipelines="{}"))


@pytest.mark.parametrize("layers", ["0", "3.1", "0.0", "0.4"])
def test_shared_parameters_are_of_several_layers(layers: str) -> None:
    with pytest.raises(PlanError, match="parameter 'w' is shared by layers"):
        ViewPipelines.from_json(TEXT.replace('"wte":[0,3]', f'"w":[{layers.replace(".", ",")}]'))


def test_shared_parameters_come_back_in_the_order_of_names() -> None:
    again = ViewPipelines.from_json(TEXT)
    assert list(again.shared) == ["bias", "wte"]
    assert again.to_json() == TEXT


@given(st.integers(0, 1 << 30))
def test_every_part_has_owners_and_owners_add_up(seed: int) -> None:
    """The owners of random pipelines' parts equal those of a simple reference that goes through the layers one by
    one.
    """
    chance = random.Random(seed)
    layers, members = chance.randint(1, 6), [f"m~{i}" for i in range(chance.randint(1, 6))]
    left, rows = list(members), []
    chance.shuffle(left)
    while left and (not rows or chance.random() < 0.8):
        count = min(chance.randint(1, 3), len(left), layers)
        cuts = [0, *sorted(chance.sample(range(1, layers), count - 1)), layers]
        rows.append("+".join(f"{left.pop()}:{b - a}" for a, b in pairwise(cuts)))
    shared = {f"p{i}": sorted(chance.sample(range(layers), 2)) for i in range(2 if layers > 1 else 0)}
    text = pipelines_of(",".join(rows), ",".join(f"{name}:{a}.{b}" for name, (a, b) in shared.items()))
    parts = Division(tuple(members), ViewPipelines.from_json(text))
    holds: dict[str, set[int]] = {m: {len(parts.names) - 1} for m in members}
    for row in rows:
        layer = 0
        for stage in row.split("+"):
            name, count_text = stage.split(":")
            mine = range(layer, layer := layer + int(count_text))
            holds[name] |= {*mine, *(layers + i for i, users in enumerate(shared.values()) if set(users) & set(mine))}
    assert {m: set(numbers(parts.owned(m))) for m in members} == holds
    assert parts.owners == tuple(tuple(m for m in members if part in holds[m]) for part in range(len(parts.names)))
    assert union(span for m in members for span in parts.made(m)) == parts.everything
    assert sum(len(numbers(parts.made(m))) for m in members) == len(parts.names), "each is made once"
    due = [(0, parts.pipelines.plan.micro_batches)] if parts.pipelines else []
    given_by = {m: coverage(ViewPipelines.from_json(text).units(m)) for m in members}
    assert parts.coverage_error(due, given_by) == ""
    busy = [m for m in members if given_by[m]]
    assert parts.coverage_error(due, {m: given_by[m] for m in busy[1:]}) != ""


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_common_is_what_both_have(these: set[int], those: set[int]) -> None:
    spans = [union((n, n + 1) for n in some) for some in (these, those)]
    assert set(numbers(common(*spans))) == these & those
