"""What a scheduler's shell drives: the pure machine, or a stand-in for it in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import Settings


class Machine(Protocol):
    """What the shell needs of membership.scheduler.SchedulerMachine."""

    def on(self, now: float, event: fx.SchedulerEvent) -> list[fx.SchedulerEffect]: ...

    def snapshot(self) -> dict[str, Any]: ...


MachineFactory = Callable[[Settings, fx.Chain], Machine]


def real_machine(settings: Settings, chain: fx.Chain) -> Machine:
    from chaos_lightning.membership.scheduler import SchedulerMachine

    return SchedulerMachine(settings, chain)


__all__ = ["Machine", "MachineFactory", "real_machine"]
