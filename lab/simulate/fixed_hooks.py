"""Chooses the classes of simulated jobs whose batch has a fixed size."""

from __future__ import annotations

from typing import Any

from chaos_lightning.membership.scheduler import SchedulerMachine
from lab.simulate.fixed import FixedNode
from lab.simulate.fixed_oracle import FixedOracle
from lab.simulate.fixed_training import PAUSE_STEPS
from lab.simulate.node import Node
from lab.simulate.oracle import Oracle
from lab.simulate.world import Hooks


class BriskScheduler(SchedulerMachine):
    """Scheduler that divides a batch anew after fewer steps than a real one, as simulated jobs are short."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.sharing.pause_steps = PAUSE_STEPS


class FixedHooks(Hooks):
    """Hooks for jobs whose batch has a fixed size: the classes of their processes, which planted bugs may replace."""

    node_class: type[Node] = FixedNode
    scheduler_class: type[SchedulerMachine] = BriskScheduler
    oracle_class: type[Oracle] = FixedOracle
