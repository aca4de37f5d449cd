"""Tests fault plans: all forms of writing one mean the same, and every mistake in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.testing.faults import (
    LINK_ACTIONS,
    Action,
    Fault,
    FaultInjector,
    FaultPlan,
    LoopPhase,
    Schedule,
    parse_line,
)

TEXT = """
# a busy afternoon
at step 20: join edge-4
after 3.5 s: leave edge-1
at step 40 in allreduce: sigkill rank 1
on joined edge-4: sigstop edge-2 for 3 s
on finished: sigterm edge-2
at step 60: cut edge-1 edge-3 for 2 s
expect death of edge-7, edge-8
"""

YAML = """
faults:
  - {at_step: 20, do: join, node: edge-4}
  - {after_s: 3.5, do: leave, node: edge-1}
  - {at_step: 40, in: allreduce, do: sigkill, rank: 1}
  - {on: joined, of: edge-4, do: sigstop, node: edge-2, for_s: 3}
  - "on finished: sigterm edge-2"
  - {at_step: 60, do: cut, node: edge-1, peer: edge-3, for_s: 2}
expect_deaths: [edge-7, edge-8]
"""


def built() -> FaultPlan:
    plan = FaultInjector().join_at("edge-4", 20)
    plan._add(Action.LEAVE, "edge-1", after_s=3.5)
    plan.fail_at(1, 40, "allreduce")
    plan.when("joined", "edge-4", "sigstop", "edge-2", 3.0).when("finished", "", "sigterm", "edge-2")
    return plan.cut_at("edge-1", "edge-3", 60, 2.0).expect("edge-7", "edge-8").plan()


def test_text_yaml_and_builder_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(YAML)
    (tmp_path / "plan.txt").write_text(TEXT)
    plans = [
        FaultPlan.parse(TEXT),
        FaultPlan.load(TEXT),
        FaultPlan.load(tmp_path / "plan.yaml"),
        FaultPlan.load(str(tmp_path / "plan.txt")),
        FaultPlan.load(built()),
    ]
    assert all(plan == plans[0] for plan in plans)
    assert FaultPlan.parse(str(plans[0])) == plans[0]
    assert FaultPlan.load(None) == FaultPlan.load([]) == FaultPlan()


def test_deaths_are_declared() -> None:
    plan = FaultPlan.parse(TEXT)
    assert plan.expected_deaths == {"rank 1", "edge-7", "edge-8"}
    assert plan.joiners == ("edge-4",)


names = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True).filter(lambda n: n not in ("for", "rank"))
seconds = st.floats(0.1, 999).map(lambda x: float(f"{x:.3g}"))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    action = draw(st.sampled_from(list(Action)))
    trigger = draw(st.sampled_from(["step", "after_s", "event"]))
    fields: dict[str, object] = {}
    if trigger == "step":
        fields["step"] = draw(st.integers(0, 10**6))
        if action not in (Action.JOIN, *LINK_ACTIONS):
            fields["phase"] = draw(st.none() | st.sampled_from(list(LoopPhase)))
    elif trigger == "after_s":
        fields["after_s"] = draw(seconds)
    else:
        fields["event"] = draw(st.sampled_from(["joined", "death", "boundary"]))
        fields["event_node"] = draw(st.just("") | names)
    if action is Action.JOIN or draw(st.booleans()):
        fields["node"] = draw(names)
    else:
        fields["rank"] = draw(st.integers(0, 99))
    if action in LINK_ACTIONS:
        fields["peer"] = draw(names)
    if action in (*LINK_ACTIONS, Action.SIGSTOP):
        fields["seconds"] = draw(st.just(0.0) | seconds)
    return Fault(action=action, **fields)  # type: ignore[arg-type]


@given(faults())
def test_every_fault_reads_back_from_its_own_words(fault: Fault) -> None:
    assert parse_line(str(fault)) == fault


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kill everybody", "is not understood"),
        ("at step 3 in lunch: sigkill a", r"in is 'lunch', expected one of \['forward'"),
        ("at step 3: explode a", r"do is 'explode', expected one of \['join'"),
        ("after 1 s: join rank 3", "who joins has no rank yet"),
        ("after 1 s: sigkill a for 3 s", "has no duration"),
        ("at step 3: cut a for 3 s", "a cut or a stall needs two nodes"),
        ("at step 3: sigkill a b", "a cut or a stall needs two nodes, other faults one"),
        ("at step 3 in forward: join a", "a phase is a place in the victim's own loop"),
        ("on lunch a: sigkill b", "no event is called 'lunch'"),
    ],
)
def test_wrong_lines_are_explained(line: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        FaultPlan.parse(line)


def test_wrong_structures_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exactly one trigger"):
        Fault(action=Action.SIGKILL, node="a")
    with pytest.raises(ConfigurationError, match="exactly one victim"):
        Fault(action=Action.SIGKILL, node="a", rank=1, step=1)
    with pytest.raises(ConfigurationError, match="cannot be negative"):
        Fault(action=Action.SIGKILL, node="a", step=-1)
    with pytest.raises(ConfigurationError, match="a phase needs a step"):
        Fault(action=Action.SIGKILL, node="a", after_s=1, phase=LoopPhase.FORWARD)
    with pytest.raises(ConfigurationError, match=r"unknown keys \['when'\]"):
        FaultPlan.load([{"when": 3, "do": "sigkill", "node": "a"}])
    with pytest.raises(ConfigurationError, match=r"unknown keys \['fault'\]"):
        FaultPlan.load({"fault": []})
    with pytest.raises(ConfigurationError, match="nothing to do"):
        FaultPlan.load([{"at_step": 3, "node": "a"}])
    with pytest.raises(ConfigurationError, match="at_step is 'x', expected a number"):
        FaultPlan.load([{"at_step": "x", "do": "sigkill", "node": "a"}])
    with pytest.raises(ConfigurationError, match="does not exist"):
        FaultPlan.load(tmp_path / "nowhere.yaml")


def test_inside_and_outside_share_the_plan() -> None:
    plan = FaultPlan.parse(
        "at step 1: join d\nat step 2 in forward: sigkill a\nat step 3: sigkill rank 2\nat step 4: sigkill b\n"
    )
    assert [str(f) for f in plan.inside("a")] == ["at step 2 in forward: sigkill a", "at step 3: sigkill rank 2"]
    assert [str(f) for f in plan.outside()] == [
        "at step 1: join d",
        "at step 3: sigkill rank 2",
        "at step 4: sigkill b",
    ]


def test_a_schedule_gives_each_fault_out_once_and_only_where_it_belongs() -> None:
    schedule = Schedule(
        FaultPlan.parse(
            "at step 3: sigkill a\nat step 3 in backward: sigkill b\nafter 2 s: sigkill c\non joined d: sigkill e\n"
        )
    )

    def due(**where: object) -> list[str]:
        return [f.node for f in schedule.due(**where)]  # type: ignore[arg-type]

    assert due(step=2, elapsed_s=1.0) == []
    assert due(step=4) == ["a"]  # a step that was passed over still counts
    assert due(step=4, phase=LoopPhase.FORWARD) == []
    assert due(step=4, phase=LoopPhase.BACKWARD) == ["b"]
    schedule.saw("joined", "x")
    assert due(elapsed_s=2.0) == ["c"]
    schedule.saw("joined", "d")
    assert due(victims={"f"}) == []
    assert due(victims={"e"}) == ["e"]
    assert schedule.open == ()


@given(st.integers(0, 10**6), st.integers(0, 12))
def test_random_plans_are_reproducible_and_spare_the_kept(seed: int, count: int) -> None:
    make = {"nodes": ["a", "b", "c", "d"], "spares": ["e", "f"], "steps": 100, "count": count, "keep": 1}
    plan = FaultPlan.random(seed, **make)  # type: ignore[arg-type]
    assert plan == FaultPlan.random(seed, **make)  # type: ignore[arg-type]
    assert all(f.node != "a" for f in plan)
    assert len(plan) <= count
    there = {"a", "b", "c", "d"}
    for fault in plan:
        if fault.action is Action.JOIN:
            assert fault.node not in there
            there.add(fault.node)
        else:
            assert fault.node in there, "nobody is hurt who is not there"
            there -= {fault.node} if fault.action is not Action.SIGSTOP else set()
