"""Tests FaultPlans in simulation: each action and phase is carried out, and impossible ones are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.testing.faults import Action, FaultPlan, parse_line
from lab.simulate.__main__ import main
from lab.simulate.fault_plans import PlannedWorld, founders, job, translate
from lab.simulate.narrate import narrate
from lab.simulate.plan import Fault


def told(text: str, seed: int = 0) -> tuple[PlannedWorld, str]:
    """Simulates this FaultPlan; returns the world afterwards, and the run's description."""
    faults = FaultPlan.parse(text)
    plan = job(faults, seed)
    world = PlannedWorld(plan, faults)
    lines, outcome = narrate(plan, given=world)
    assert outcome.violation == "", "\n".join(lines)
    return world, "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("at step 3: join edge-4", Fault(action="join", node="edge-4")),
        ("at step 3: leave edge-1", Fault(action="leave", node="edge-1")),
        ("at step 3: sigterm edge-1", Fault(action="leave", node="edge-1")),
        ("at step 3: sigkill edge-1", Fault(action="kill", node="edge-1")),
        ("after 2 s: sigkill rank 1", Fault(action="kill")),
        ("at step 3: sigstop edge-1 for 2 s", Fault(action="freeze", node="edge-1", lasts=2.0)),
        ("at step 3: cut edge-1 edge-2 for 2 s", Fault(action="link", node="edge-1", other="edge-2", lasts=2.0)),
    ],
)
def test_actions_become_faults_of_the_simulator(line: str, fault: Fault) -> None:
    assert translate(parse_line(line)) == fault


def test_no_action_is_forgotten() -> None:
    refused = {Action.STALL}
    for action in set(Action) - refused:
        peer = {"peer": "b"} if action is Action.CUT else {}
        seconds = {"for_s": 1} if action in (Action.CUT, Action.SIGSTOP) else {}
        plan = FaultPlan.load([{"do": action, "node": "a", "at_step": 1, **peer, **seconds}])
        assert translate(plan.faults[0]).action


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("at step 3: stall a b for 2 s", "swallow nothing"),
        ("at step 3: cut a b", "for how long"),
        ("at step 3: sigstop a", "for how long"),
        ("at step 3 in validation: sigkill a", "no validation"),
        ("at step 3 in checkpoint: sigkill a", "no checkpoint"),
        ("at step 3 in train_end: leave a", "no train_end"),
        ("on published a: sigkill b", "no event 'published'"),
    ],
)
def test_what_simulation_cannot_do_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        job(FaultPlan.parse(line))
    assert line in str(caught.value)


def test_founders_are_those_that_are_hurt_before_they_join() -> None:
    plan = FaultPlan.parse("at step 1: sigkill a\nat step 2: join a\nat step 3: join d\nat step 4: leave d\n")
    assert set(founders(plan)) == {"a", "n0", "n1"}
    assert len(founders(FaultPlan.parse("at step 1: sigkill rank 4"))) == 5
    assert len(founders(FaultPlan.parse("\n".join(f"at step {i}: sigkill v{i}" for i in range(6))))) == 7


@pytest.mark.parametrize("phase", ["", " in forward", " in backward", " in allreduce", " in optimizer"])
@pytest.mark.parametrize("what", ["sigkill b", "sigkill rank 0", "leave b", "sigstop b for 1 s"])
def test_faults_strike_in_their_phase(phase: str, what: str) -> None:
    world, text = told(f"at step 5{phase}: {what}")
    assert world.undone == []
    assert f"as planned: at step 5{phase}: {what}" in text
    before = text.partition("as planned")[0]
    assert "commits 6 " in before, "five steps and a collective come first"
    assert "commits 9 " not in before


def test_a_member_killed_in_the_optimizer_phase_never_applied_the_slot_that_others_have() -> None:
    world, text = told("at step 5 in optimizer: sigkill b", seed=0)
    assert world.undone == []
    assert "kill b (b~" in text
    victim = text.partition("kill b (")[2].partition(")")[0]
    slot = max(int(n) for n in re.findall(r"commits (\d+) ", text.partition("as planned")[0]))
    assert f"{victim} commits {slot - 1} " in text
    assert f"{victim} commits {slot} " not in text
    assert f"n0~2 commits {slot} " in text


def test_who_joins_comes_then_and_not_before() -> None:
    world, text = told("at step 10: join late\non joined late: sigkill late\nat step 30: join late")
    assert world.undone == []
    before, _, after = text.partition("as planned: at step 10: join late")
    assert "late~" not in before
    assert "late~" in after
    assert world.oracle.joins == len(founders(world.course.schedule.plan)) - 1 + 2
    assert sorted(n.outcome.partition(":")[0] for n in world.nodes.values() if n.name == "late") == ["killed", "left"]


def test_a_cut_link_cannot_be_made_again_before_its_time() -> None:
    world, _ = told("at step 5: cut n0 n1 for 1.5 s")
    assert world.undone == []
    assert world.fabric.blocked
    assert world.oracle.commits > 0


def test_virtual_time_and_events_trigger_too() -> None:
    world, text = told("after 0.6 s: leave b\non left b: join c\non death a: join d\nat step 30: sigkill a")
    assert world.undone == []
    order = [text.index(f"as planned: {x}") for x in ("after 0.6 s", "on left b")]
    assert order == sorted(order)
    assert text.index("scheduler death member=a~") < text.index("as planned: on death a: join d")


def test_what_did_not_happen_is_told() -> None:
    world, _ = told("at step 3: sigkill b\nat step 6: leave b\non refused: join c")
    assert world.undone == [
        "at step 6: leave b: it is not there",
        "on refused: join c: its time never came",
    ]


@pytest.mark.parametrize("seed", range(8))
def test_random_plans_hold_in_simulation(seed: int) -> None:
    faults = FaultPlan.random(seed, nodes=["a", "b", "c", "d"], spares=["e", "f"], steps=40, count=6)
    told(str(faults), seed)


def test_command_tells_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("at step 4: join late\nat step 9 in allreduce: sigkill rank 1\n")
    assert main(["--plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "as planned: at step 9 in allreduce: sigkill rank 1" in out
    assert out.splitlines()[-1].endswith("all is well")
    path.write_text("at step 4: sigkill a\nat step 9: leave a\n")
    assert main(["--plan", str(path)]) == 1
    assert "did not happen: at step 9: leave a: it is not there" in capsys.readouterr().out
    path.write_text("at step 4: stall a b\n")
    assert main(["--plan", str(path)]) == 2
    assert main(["--plan", str(tmp_path / "none.txt")]) == 2
    assert "cannot be simulated" in capsys.readouterr().err
