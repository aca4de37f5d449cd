"""FaultInjectorCallback: carries out a fault plan from inside the process that is to fail, in the very phase that the
plan names.

Theory of operation. Only the process itself knows that it is in its backward pass, so faults with a phase can only
strike from inside. Each hook asks the plan's schedule what is due here and now; what it gives out is written to the
event log first (one `write`, which survives the SIGKILL that follows) and then done. Where a phase strikes:

- forward: before the batch's training_step;
- backward: in the middle of the pass, when the gradient of the middle parameter is there and part of them is sent;
- allreduce: all own gradients are on their way, the step's contribution is not sent yet;
- optimizer: the step is committed, the optimizer has not written;
- validation, checkpoint, train_end: where the hooks of these names are.

A fault whose step a process had already behind it when it came in is not its own: a restarted victim does not die
again. A victim named by rank is the process that has that rank when the phase is first passed from that step on.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from chaos_lightning.callbacks.member import engine_of
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog
from chaos_lightning.testing.faults import LINK_ACTIONS, Action, Fault, FaultPlan, LoopPhase, Schedule

log = logging.getLogger("chaos_lightning.callbacks")


class FaultInjectorCallback(Callback):
    """Callback that hurts its own process as a fault plan says.

    Args:
        plan: A plan, its text, a file or a list of entries (see `chaos_lightning.testing.faults`).
        only_phases: Whether to leave faults without a phase to others, such as a harness that drives the same plan.
        name: This node's name in the plan; default: the engine's.
    """

    def __init__(
        self, plan: FaultPlan | str | Path | list[Any] | None = None, only_phases: bool = False, name: str = ""
    ):
        self.plan = FaultPlan.load(plan)
        self.only_phases = only_phases
        self.name = name
        needless = [
            f for f in self.plan if f.event and not only_phases and f.action not in (Action.JOIN, *LINK_ACTIONS)
        ]
        if needless:
            raise ConfigurationError(
                f"fault {needless[0]}: a process does not read the others' events; let a harness drive this plan and "
                "set only_phases=True here"
            )
        self._anywhere: Schedule | None = None
        """Faults without a phase: they strike between two batches."""
        self._inside = Schedule(FaultPlan())
        self._began = 0.0
        self._armed: list[tuple[Fault, Any]] = []

    # ------------------------------------------------------------------ hooks

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._disarm()
        self._pass(trainer, None)
        self._pass(trainer, LoopPhase.FORWARD)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # No on_after_backward here: overriding it tells the strategy that somebody looks at gradients there, so that it
        # averages them before that hook.
        for fault in self._due(trainer, LoopPhase.BACKWARD):
            self._arm_backward(trainer, pl_module, fault)
        if any(f.phase is LoopPhase.ALLREDUCE for f in self._inside.open):
            self._wrap_step(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._pass(trainer, LoopPhase.OPTIMIZER)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._pass(trainer, LoopPhase.VALIDATION)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pass(trainer, LoopPhase.CHECKPOINT)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._disarm()
        self._pass(trainer, LoopPhase.TRAIN_END)

    # ------------------------------------------------------------------ what is due

    def _pass(self, trainer: Trainer, phase: LoopPhase | None) -> None:
        for fault in self._due(trainer, phase):
            self._strike(trainer, fault)

    def _due(self, trainer: Trainer, phase: LoopPhase | None) -> list[Fault]:
        """Returns the faults of this process that are due now; due faults of other processes are dropped."""
        step, name, rank = self._who(trainer)
        if self._anywhere is None:
            own = self._own(trainer, name, step)
            self._began = time.monotonic()
            self._anywhere = Schedule(FaultPlan(tuple(f for f in own if f.phase is None)))
            self._inside = Schedule(FaultPlan(tuple(f for f in own if f.phase is not None)))
        schedule = self._anywhere if phase is None else self._inside
        due = schedule.due(step=step, elapsed_s=time.monotonic() - self._began, phase=phase)
        return [f for f in due if f.victim in (name, f"rank {rank}")]

    def _who(self, trainer: Trainer) -> tuple[int, str, int]:
        engine = engine_of(trainer)
        if engine is None:
            return trainer.global_step, self.name or os.environ.get("CHAOS_NAME", ""), trainer.global_rank
        return engine.header.step, self.name or engine.name, engine.rank

    def _own(self, trainer: Trainer, name: str, step: int) -> list[Fault]:
        engine = engine_of(trainer)
        joined = engine is not None and engine.role == "joiner"
        return [
            f
            for f in self.plan.inside(name)
            if not (self.only_phases and f.phase is None)
            and not (f.step is not None and (f.step < step or (joined and f.step == step)))
        ]

    # ------------------------------------------------------------------ places inside a step

    def _arm_backward(self, trainer: Trainer, module: LightningModule, fault: Fault) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            self._strike(trainer, fault)
            return
        middle = trained[len(trained) // 2]
        handle = middle.register_hook(lambda _: self._struck_in_backward(trainer, fault))  # type: ignore[no-untyped-call]
        self._armed.append((fault, handle))

    def _struck_in_backward(self, trainer: Trainer, fault: Fault) -> None:
        self._armed, armed = [x for x in self._armed if x[0] is not fault], self._armed
        for other, handle in armed:
            if other is fault:
                handle.remove()
                self._strike(trainer, fault)

    def _disarm(self) -> None:
        for _, handle in self._armed:
            handle.remove()
        self._armed.clear()

    def _wrap_step(self, trainer: Trainer) -> None:
        engine: Any = engine_of(trainer)
        if engine is None or "step" in vars(engine):
            return
        real: Callable[..., Any] = engine.step

        @functools.wraps(real)
        def step(**fields: Any) -> Any:
            del engine.step
            self._pass(trainer, LoopPhase.ALLREDUCE)
            return real(**fields)

        engine.step = step

    # ------------------------------------------------------------------ striking

    def _strike(self, trainer: Trainer, fault: Fault) -> None:
        engine = engine_of(trainer)
        events = engine.events if engine is not None else EventLog(None)
        step, name, rank = self._who(trainer)
        events.emit(
            "fault_injected",
            kind=fault.action.value,
            phase=fault.phase.value if fault.phase is not None else "",
            step=step,
            rank=rank,
            seconds=fault.seconds,
            plan=str(fault),
        )
        log.warning("%s (rank %d): fault injected: %s", name, rank, fault)
        pid = os.getpid()
        if fault.action is Action.SIGKILL:
            os.kill(pid, signal.SIGKILL)
        elif fault.action is Action.SIGSTOP:
            if fault.seconds > 0:
                # Another process must wake it; the shell ends at once, its background job after the sleep.
                wake = f"(sleep {fault.seconds:g}; kill -CONT {pid}) </dev/null >/dev/null 2>&1 &"
                subprocess.run(["/bin/sh", "-c", wake], check=True, start_new_session=True)
            os.kill(pid, signal.SIGSTOP)
        elif fault.action is Action.SIGTERM:
            os.kill(pid, signal.SIGTERM)
        elif fault.action is Action.LEAVE:
            if engine is not None:
                threading.Thread(target=engine.leave, args=(f"fault plan: {fault}",), daemon=True).start()
            else:
                trainer.should_stop = True
