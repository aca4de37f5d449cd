"""Tests FaultInjectorCallback: it strikes its own process only, in the planned phase, and logs the fault first."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import callback_support
import pytest
from callback_support import FakeEngine, Tiny, fit, trainer

from chaos_lightning.callbacks import FaultInjectorCallback
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.testing.faults import FaultInjector, FaultPlan
from chaos_lightning.testing.harness import Harness

PHASES = ["forward", "backward", "allreduce", "optimizer", "validation", "checkpoint", "train_end"]


@pytest.mark.slow
def test_each_phase_is_struck_and_told_before(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        for phase in PHASES:
            plan = f"at step 2 in {phase}: sigkill {phase}"
            harness.declare(phase)
            harness.start_function(
                phase,
                callback_support.victim,
                str(tmp_path / phase),
                plan,
                phase,
                0,
                phase == "validation",
                phase == "checkpoint",
            )
            assert harness.wait_exit(phase, 120) == -signal.SIGKILL, harness.children[phase].tail()
            fault = harness.wait_for("fault_injected", node=phase)
            assert (fault["kind"], fault["phase"]) == ("sigkill", phase)
            # The optimizer phase sees the count before this step's commit by the pretended engine.
            expected = {"validation": 6, "train_end": 6}.get(phase, 2)
            assert fault["step"] == expected, phase


@pytest.mark.slow
def test_a_freeze_ends_by_itself_and_training_goes_on(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        harness.start_function("a", callback_support.victim, str(tmp_path), "at step 2: sigstop a for 0.3 s")
        assert harness.wait_exit("a", 120) == 0
        fault = harness.wait_for("fault_injected")
        done = harness.wait_for("finished")
        assert fault["seconds"] == 0.3
        assert done.mono - fault.mono >= 0.3
        assert done["step"] == 6


class Recorder(FaultInjectorCallback):
    """Fault injector that only records its faults."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.struck: list[str] = []

    def _strike(self, trainer: Any, fault: Any) -> None:
        self.struck.append(f"{self._who(trainer)[0]} {fault}")


def struck(tmp_path: Path, plan: FaultPlan | str, engine: FakeEngine | None = None, **options: Any) -> list[str]:
    callback = Recorder(plan, **options)
    fit(trainer(engine or FakeEngine(), callback, root=str(tmp_path)))
    return callback.struck


def test_only_own_faults_each_once(tmp_path: Path) -> None:
    plan = """
        at step 1: sigterm a
        at step 1: sigkill b
        at step 3 in backward: sigkill rank 0
        at step 3 in forward: sigkill rank 1
        at step 4 in allreduce: sigkill a
        at step 9: sigkill a
    """
    assert struck(tmp_path, plan) == [
        "1 at step 1: sigterm a",
        "3 at step 3 in backward: sigkill rank 0",
        "4 at step 4 in allreduce: sigkill a",
    ]


def test_a_restarted_victim_does_not_die_again(tmp_path: Path) -> None:
    engine = FakeEngine(role="joiner")
    for _ in range(4):
        engine.commit()
    plan = "at step 4: sigkill a\nat step 2 in forward: sigkill a\nat step 6: sigkill a"
    assert struck(tmp_path, plan, engine) == ["6 at step 6: sigkill a"]


def test_a_founder_may_be_hurt_at_step_0(tmp_path: Path) -> None:
    assert struck(tmp_path, "at step 0 in forward: sigkill a") == ["0 at step 0 in forward: sigkill a"]


def test_who_inherits_a_rank_does_not_inherit_its_fault(tmp_path: Path) -> None:
    engine = FakeEngine(name="b", rank=1)

    class Promoting(Recorder):
        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            super().on_before_optimizer_step(trainer, *args)
            if engine.header.step == 2:
                engine.rank = 0  # rank 0 died in this step's forward pass

    callback = Promoting("at step 2 in forward: sigkill rank 0")
    fit(trainer(engine, callback, root=str(tmp_path)))
    assert callback.struck == []


def test_only_phases_leaves_the_rest_to_a_harness(tmp_path: Path) -> None:
    plan = "at step 1: sigkill a\nat step 1 in optimizer: sigkill a\non joined b: sigkill a"
    assert struck(tmp_path, plan, only_phases=True) == ["1 at step 1 in optimizer: sigkill a"]
    with pytest.raises(ConfigurationError, match="let a harness drive this plan"):
        FaultInjectorCallback(plan)


def test_leave_and_sigterm(tmp_path: Path) -> None:
    engine = FakeEngine(events=EventLog(tmp_path / "x.jsonl"))
    made = trainer(engine, FaultInjectorCallback("at step 2: leave a"), root=str(tmp_path))
    fit(made)
    assert engine.left == ["fault plan: at step 2: leave a"]
    assert made.global_step in (3, 4)  # the thread that tells the engine may be a step late
    (fault,) = [r for r in read_events(tmp_path / "x.jsonl") if r.name == "fault_injected"]
    assert fault["kind"] == "leave"
    engine.events.close()


def test_the_builder_is_a_plan_too(tmp_path: Path) -> None:
    plan = FaultInjector().fail_at(0, 1, "backward").plan()
    assert struck(tmp_path, plan) == ["1 at step 1 in backward: sigkill rank 0"]


def test_it_does_not_look_like_somebody_who_changes_gradients() -> None:
    from lightning.pytorch.utilities.model_helpers import is_overridden

    assert not is_overridden("on_after_backward", FaultInjectorCallback())


def test_a_module_without_trained_parameters(tmp_path: Path) -> None:
    callback = Recorder("at step 0 in backward: sigkill a")
    module = Tiny()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    made = trainer(FakeEngine(), root=str(tmp_path))
    made.strategy._lightning_module = module
    callback._arm_backward(made, module, callback.plan.faults[0])
    assert callback.struck == ["0 at step 0 in backward: sigkill a"]
