"""Simulates a training process that runs a slot in attempts: each belongs to one view, and the next one begins anew.

Theory of operation. The member's machine is the real one. It opens an attempt (`OpenAttempt`), and says after a
recovery that what was made for the open slot counts no more (`Rerun`). The training thread begins an attempt once it
stands on the header before and holds what it needs; then it runs unit by unit. A unit that is under way when its
attempt ends goes on to its end, and what it made is dropped (P7, B3). What a unit is, subclasses know: micro-batches of
a stage (staged.py), or pieces of a batch of fixed size (fixed.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.protocol.types import NO_VIEW, Kind, View, ViewId
from lab.simulate.job import Job
from lab.simulate.node import Node
from lab.simulate.plan import NodeSpec
from lab.simulate.training import Attempt


@dataclass(slots=True)
class AttemptRun:
    """One attempt of the training thread at a slot."""

    kind: Kind
    attempt: Attempt
    view: View


R = TypeVar("R", bound=AttemptRun)


class RerunNode(Node, Generic[R]):
    """Simulated training process some of whose slots run in attempts."""

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world, spec, number)
        self.run: R | None = None
        self.last_run: R | None = None
        """Last run that began: the present one, or the one before."""
        self._opened: View | None = None
        self._busy_until = 0.0
        """Moment (virtual s) at which the unit under way is over."""

    @property
    def me(self) -> str:
        return self.machine.member_id

    # ------------------------------------------------------------------ as subclasses have them

    def runs_units(self) -> bool:
        """Returns whether units run in the open slot."""
        return self.next_kind() is Kind.STEP

    def lacks(self, view: View) -> bool:
        """Returns whether the process lacks something that its units in this view need."""
        return False

    def _new_run(self, attempt: Attempt, view: View) -> R:
        """Returns the run of an attempt, whose units have not begun."""
        raise NotImplementedError

    def _begun(self, run: R) -> None:
        """Prepares a run that has just become the present one."""

    def _next(self, run: R) -> None:
        """Begins the next unit of a run if it can; contributes after the last one."""
        raise NotImplementedError

    # ------------------------------------------------------------------ attempts

    def _apply(self, effect: fx.MemberEffect, phase: MemberPhase) -> None:
        match effect:
            case fx.OpenAttempt(view, seq):
                self.world.on_effect(self, effect)
                self._opened = view
                self._open(view, seq)
                self._go()
            case fx.Rerun():
                self.world.on_effect(self, effect)
                self.run = None
            case _:
                super()._apply(effect, phase)

    def _open(self, view: View, seq: int) -> None:
        self.plane.open(view, seq)

    def _begin(self) -> None:
        if self.runs_units():
            self._go()
        else:
            super()._begin()

    def _go(self) -> None:
        """Begins the units of the open attempt, if all that they use is here."""
        view, header = self._opened, self.header
        if view is None or not self.training or self.outcome or self.machine.phase is not MemberPhase.ACTIVE:
            return
        if self.machine.header is not header or view is not self.machine.view or not self.runs_units():
            return
        if self.lacks(view):
            return
        attempt = Attempt(view.id, header.seq + 1, header.hash)
        if self.run is not None and self.run.attempt == attempt:
            return
        run = self._new_run(attempt, view)
        self.run = self.last_run = run
        self._begun(run)
        self.timer(max(0.0, self._busy_until - self.kernel.now), lambda: self._next(run))

    def sprung(self, kind: str) -> bool:
        """Returns whether a trap of this kind stops the process now."""
        trap = next((t for t in self.traps if t.kind == kind and self.machine.seq >= t.seq), None)
        if trap is None:
            return False
        if trap.skip > 0:
            trap.skip -= 1
            return False
        self.traps.remove(trap)
        trap.spring()
        if self.frozen and self.run is not None:
            run = self.run
            self.deliver(lambda: self._next(run))
        return not self.alive or self.frozen

    def _contribute(self, kind: Kind, view: ViewId = NO_VIEW, **fields: object) -> None:
        if self.run is not None and kind is self.run.kind and not self.outcome:
            if self.machine.phase is MemberPhase.ACTIVE and self.run.view is self.machine.view:
                super()._contribute(kind, view=self.run.attempt.view, **fields)
            return
        super()._contribute(kind, view, **fields)

    def restart(self) -> None:
        super().restart()
        self.run = self.last_run = self._opened = None
