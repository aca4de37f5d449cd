"""Tests the figures that benchmarks of pipelines read in event logs, and the checks of their soak."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pipeline_policies as policies
from benchmarks import pipeline_recovery as recovery
from benchmarks.pipeline_steps import committed, plan_of, runs
from benchmarks.soak import fixed
from benchmarks.soak import pipelines as soak
from chaos_lightning.errors import PlanError
from chaos_lightning.events.events import Record
from chaos_lightning.planning.pipelines.formation import Pauses
from lab.timed_layers import TimedModel

TWO = {"a~1": [(0, 3, [(0, 2)])], "b~1": [(3, 6, [(0, 2)])], "c~1": [(0, 6, [(2, 3)])]}


def record(mono: float, name: str, member: str = "", **fields: Any) -> Record:
    return Record(0.0, mono, member, name, fields)


def step(seq: int, at: float, members: str, view: str = "1.1") -> list[Record]:
    """Returns the `committed` events of a step by these members, the last one at time `at`."""
    who = [[f"{m}~1", 2.0] for m in members]
    return [
        record(at - 0.01 * i, "committed", f"{m}~1", seq=seq, kind="step", step=seq, header=f"{view}/{seq}", view=view,
               contributors=who, coverage=TWO.get(f"{m}~1", []))
        for i, m in enumerate(members)
    ]  # fmt: skip


def plan(mono: float, view: str, way: str, step_s: float = 0.5, detours: int = 0) -> Record:
    return record(mono, "pipelines", view=view, shape="1 x 2 + 1 x 1", step_s=step_s, detours=detours, chosen=0,
                  candidates=[{"name": f"adaptive: {way}"}])  # fmt: skip


# ------------------------------------------------------------------------------------------------ steps and plans


def test_a_plan_is_what_sums_held():
    found = plan_of(TWO)
    assert [(p.micro_batches, [s.device for s in p.stages]) for p in found.pipelines] == [
        (2, ["a~1", "b~1"]),
        (1, ["c~1"]),
    ]
    assert found.layer_count == 6


def test_rerouted_micro_batches_are_no_plan():
    rerouted = {"a~1": [(0, 3, [(0, 3)])], "b~1": [(3, 6, [(0, 2)])], "d~1": [(3, 6, [(2, 3)])]}
    with pytest.raises(PlanError):
        plan_of(rerouted)


def test_steps_belong_to_the_plan_of_their_view():
    records = [plan(0.0, "1.1", "move"), plan(3.0, "1.4", "reroute", 0.8, detours=2)]
    for seq, at in enumerate((1.0, 1.5, 2.0, 2.5, 3.1), 1):
        records += step(seq, at, "abc")
    records.append(plan(2.1, "1.1", "keep", 0.6))  # a search found nothing better, and steps are known by then
    records += step(6, 3.9, "ab", "1.2")  # links changed, and the pipelines did not
    records += [*step(7, 5.0, "ab", "1.4"), *step(8, 6.0, "ab", "1.4")[:1]]
    one, two = runs(records)
    assert (one.members, one.rerouted, one.ends) == (3, False, [1.0, 1.5, 2.0, 2.5, 3.1, 3.9])
    assert one.steps == pytest.approx([0.5, 0.6, 0.8])
    assert one.error == pytest.approx(0.6 / 0.5 - 1)
    assert (two.members, two.rerouted, two.predicted_s) == (2, True, 0.8)
    assert two.ends == [5.0], "the last step is not committed by all of its members"
    assert len(committed(records)) == 7


@pytest.mark.parametrize(
    ("layers", "spare"),
    [
        ({"b": [(0, 2)], "c": [(2, 3)], "d": [(3, 6)]}, []),
        ({"b": [(0, 2)], "c": [(2, 6)], "d": [(1, 4)], "e": [(0, 1)], "f": []}, ["b", "d", "e"]),
    ],
)
def test_nobody_dies_who_alone_holds_a_layer(layers: dict[str, Any], spare: list[str]):
    choice = record(1.0, "pipelines", view="1.2", layers={f"{name}~1": spans for name, spans in layers.items()})
    job: Any = SimpleNamespace(harness=SimpleNamespace(records=[choice]))
    assert recovery.Story(job, recovery.Campaign("2 x 3", "dynamic")).spare(["a"]) == spare


def test_benchmarks_of_recoveries_run_by_parts():
    parts = recovery.campaigns(3, quick=False)
    assert list(parts) == [
        "reroute-3x2", "dynamic-3x2", "reroute-2x3", "dynamic-2x3", "moves-50", "moves-200"
    ]  # fmt: skip
    blows = parts["dynamic-2x3"][1]
    assert {blows.count(blow) for blow in blows} == {3}
    assert set(recovery.campaigns(1, quick=True)) <= set(parts)


# ------------------------------------------------------------------------------------------------ policies


def test_what_came_after_a_checkpoint_is_void_at_a_restart():
    records = [r for seq in range(1, 6) for r in step(seq, float(seq), "abc")]
    records += [record(9.0, "resumed", f"{m}~1", step=3) for m in "ab"]
    records += [r for seq in range(1, 3) for r in step(seq, 9.0 + seq, "ab")]
    assert policies.trained(records, 5.5) == 5
    saved = [record(2.0, "checkpoint", path="saves/step=3.ckpt"), record(6.0, "ended", reason="restart")]
    assert policies.trained([*records, *saved], 7.0) == 3, "the job is not there again"
    records += saved
    assert policies.trained(records, 20.0) == 3 + 2
    story = policies.story_of("restart", records, 2.0, [])
    assert story.samples == (5 - 2) * policies.MICRO_BATCHES * policies.BATCH


def test_a_loss_and_a_return_cost_what_is_beyond_a_step():
    records = [plan(0.5, "1.1", "move"), plan(5.4, "1.2", "reroute"), plan(9.9, "1.3", "fill")]
    for seq in range(1, 6):
        records += step(seq, float(seq), "abc")
    records += [record(5.5, "fault_injected", node="c", kind="sigkill")]
    for seq, at in enumerate((8.0, 9.5, 11.0), 6):
        records += step(seq, at, "ab", "1.2")
    for seq, at in enumerate((14.0, 15.0, 16.0), 9):
        records += step(seq, at, "abc", "1.3")
    history = [policies.Event(3.0, "remove", "c"), policies.Event(7.5, "add", "c")]
    story = policies.story_of("adaptive", records, 2.0, history)
    assert story.pauses == {"reroute": [pytest.approx(8.0 - 5.5 - 1.5)], "fill": [pytest.approx(14.0 - 11.0 - 1.0)]}
    assert story.changes == [policies.Event(3.5, "remove", "c"), policies.Event(9.0, "add", "c")]
    assert [x.members for x in story.plans] == [3, 2, 3]


def test_the_simulated_fleet_has_the_real_history(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(policies.policies.POLICIES, policies.AS_A_JOB, policies.restarts)
    profile = TimedModel(layers=6, width=64, forward_s=0.01, backward_s=0.02)
    job = policies.measured_job(profile.job(micro_batches=6, samples=2, owned=4.2), 0.0)
    pauses = Pauses(reroute_s=0.2, fill_s=0.5, move_s=0.5, reload_s=5.0, checkpoint_s=2.0)
    history = [policies.Event(10.0, "remove", "b"), policies.Event(40.0, "add", "b")]
    whole = policies.simulated(policies.Story("reroute"), job, pauses, 60.0).samples
    assert whole == pytest.approx(60.0 * 24 / 0.45, rel=0.01), "three pipelines of two stages, four micro-batches each"
    found = {}
    for name in ("adaptive", "dynamic", "reroute", "restart"):
        out = policies.simulated(policies.Story(name, changes=history), job, pauses, 60.0)
        found[name] = out.samples
        assert (out.losses, out.fatal, out.seconds["wait"]) == (1, 0, 0.0)
    assert whole > found["adaptive"] >= 0.99 * max(found.values())
    assert found["restart"] < found["dynamic"] - 4 * 24 / 0.63, (
        "some five seconds are lost, and steps since a checkpoint"
    )


# ------------------------------------------------------------------------------------------------ the soak


def journal(*losses: float, first: int = 1, **hashes: str) -> list[dict[str, Any]]:
    return [{"what": "step", "step": first + i, "loss": loss, "hashes": hashes} for i, loss in enumerate(losses)]


def test_members_that_agree_have_no_problem():
    losses, problems = soak.check(
        {"a-1": journal(3.0, 2.0, 1.0, x="1"), "b-2": journal(2.0, 1.0, first=2, y="2")}, set()
    )
    assert (losses, problems) == ({1: 3.0, 2: 2.0, 3: 1.0}, [])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (journal(3.0, 2.5, x="1"), "b-2 has loss 2.5 in step 2; others have 2.0"),
        (journal(3.0, 2.0, x="7"), "b-2 has another x than others after step 1"),
        (journal(1.0, first=4), "nobody wrote down step 3"),
    ],
)
def test_members_that_do_not_agree_are_told(other: list[dict[str, Any]], says: str):
    assert says in soak.check({"a-1": journal(3.0, 2.0, x="1"), "b-2": other}, set())[1]


def test_the_last_word_of_the_dead_does_not_count():
    journals = {"a-1": journal(3.0, 2.0), "b-2": journal(3.0, 2.5)}
    assert soak.check(journals, {"b-2"}) == ({1: 3.0, 2: 2.0}, [])


def test_nobody_is_hurt_whose_layers_are_nowhere_else(tmp_path: Path):
    crew = soak.PipelineCrew("127.0.0.1:1", tmp_path / "soak", 1, 0, 0.0)
    assert json.loads((tmp_path / "soak" / "about.json").read_text())["micro_batches"] == soak.MICRO_BATCHES
    now = time.monotonic()
    for name in "abcd":
        crew.alive[name] = SimpleNamespace(name=name, inside=True, thaw_ns=0, may_die=False, step=0, shaken=now - 60)  # type: ignore[assignment]
    crew.take({"a~1": [(0, 3)], "b~1": [(3, 6)], "c~1": [(0, 3)], "d~1": []})
    assert [crew.spares(name) for name in "abcd"] == [True, False, True, True]
    crew.take({"a~1": [(0, 2), (4, 6)], "b~1": [(2, 4)], "c~1": [(0, 4)], "d~1": [(4, 6)]})
    assert [crew.spares(name) for name in "abcd"] == [True] * 4
    crew.alive["a"].may_die = True
    assert [crew.spares(name) for name in "bcd"] == [True, False, False]
    crew._settled_at = now + 60
    assert not crew.spares("b")


def test_a_crew_without_pipelines_spares_anybody(tmp_path: Path):
    assert soak.Crew("127.0.0.1:1", tmp_path, 1, 1, 0.0).spares("a")


# ------------------------------------------------------------------------------------------------ a fixed batch


def share(step: int, who: dict[str, float], member: str, used: int, kind: str = "step") -> dict[str, Any]:
    """Returns the line in which a member says what it used of a step that these members shared."""
    spent = [{"stream": "", "epoch": 0, "spans": [[0, 2], [2, used]]}] if used else []
    facts = {"kind": kind, "step": step, "header": f"h{step}", "member": member, "spent": spent}
    return {"name": "committed", "contributors": [list(row) for row in who.items()], **facts}


def test_steps_with_the_chosen_batch_are_counted_by_members():
    two = {"a~1": 16.0, "b~2": 8.0}
    lines = [share(1, two, "a~1", 16), share(1, two, "b~2", 8), share(2, {"a~1": 24.0, "b~2": 0.0}, "b~2", 0)]
    lines += [share(3, {}, "a~1", 0, kind="gather"), share(3, two, "a~1", 16), {"name": "view", "reason": "a joins"}]
    assert fixed.check_batches(lines) == ({1: 1, 2: 2}, [])


@pytest.mark.parametrize(
    ("who", "used", "says"),
    [
        ({"a~1": 16.0, "b~2": 6.0}, 16, "step 5 by a~1 16, b~2 6: not 24 samples"),
        ({"a~1": 24.0, "b~2": 24.0}, 24, "step 5 by a~1 24, b~2 24: not 24 samples"),
        ({"a~1": 15.0, "b~2": 9.0}, 15, "step 5 by a~1 15, b~2 9: no whole micro-batches of 2"),
        ({"a~1": 16.0, "b~2": 8.0}, 14, "step 5 by a~1 16, b~2 8: a~1 used 14"),
    ],
)
def test_a_step_without_the_chosen_batch_is_told_once(who: dict[str, float], used: int, says: str):
    lines = [share(5, who, "a~1", used), share(5, who, "a~1", used)]
    assert fixed.check_batches(lines) == ({2: 1}, [says])


def test_members_of_a_fixed_batch_have_unequal_speeds_and_any_may_be_lost(tmp_path: Path):
    crew = fixed.FixedCrew("127.0.0.1:1", tmp_path / "soak", 1, 0, 0.0)
    about = json.loads((tmp_path / "soak" / "about.json").read_text())
    assert (about["rule"], about["samples"] % fixed.SAMPLES) == ("fixed:24/2", 0)
    assert about["sample_s"] > 0 == fixed.ABOUT.get("sample_s", 0)
    assert crew.spares("a")
    assert {"split", "island"} <= set(crew.deck)
    words = [{"reason": "samples of a step by measured speed: a 20, b 4"}, {"reason": "b joins"}]
    assert [value for _, value, _ in crew.figures({"view": words})] == [1]
