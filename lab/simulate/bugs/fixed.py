"""Planted bugs in jobs whose batch has a fixed size: who computes which samples, what a recovery drops, and which split
rules (B1 to B4).

Theory of operation. Coverage masks some of them: units that no sum has are refused by the root before they do harm,
which is a finding, too, since members of one attempt have one split. These are planted with that check off, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.sharing import Sharing
from chaos_lightning.planning.batch import Split, divided, read_split
from chaos_lightning.protocol.types import Contribution, Differs, View, ViewId
from lab.simulate.bugs.frame import Bug, planted
from lab.simulate.bugs.staged import KeepingMachine, UncheckedKeepingMachine, UncheckedMachine
from lab.simulate.fixed import FixedNode, ShareRun
from lab.simulate.fixed_hooks import BriskScheduler, FixedHooks
from lab.simulate.fixed_training import Step, step_of
from lab.simulate.node import Node
from lab.simulate.plan import Plan
from lab.simulate.plans.fixed import announced_plan, changing_plan, rerun_plan, straying_plan
from lab.simulate.training import Attempt
from lab.simulate.world import Hooks


def hooks(
    *,
    node: type[FixedNode] = FixedNode,
    machine: type[MemberMachine] = MemberMachine,
    scheduler: type[SchedulerMachine] = BriskScheduler,
) -> type[Hooks]:
    """Returns a class of hooks in which the given classes replace the right ones."""
    node_with: type[Node] = type(node.__name__, (node,), {"machine_class": machine})
    return type("BugHooks", (FixedHooks,), {"node_class": node_with, "scheduler_class": scheduler})


# ------------------------------------------------------------------ B1: the header alone says which samples


class OrderingNode(FixedNode):
    """Planted bug: every second process numbers the units of a step backwards."""

    def step(self) -> Step:
        step = super().step()
        return replace(step, units=step.units[::-1]) if self.number % 2 == 0 else step


class GrowingNode(FixedNode):
    """Planted bug: processes take more samples in a step the more members there are, all of them alike."""

    def step(self) -> Step:
        rule, view = self.world.program.rule, self.machine.view
        more = len(view.members) - 1 if view is not None else 0
        return step_of(self.world.program, self.header.ledger, rule.samples + more * rule.unit)


# ------------------------------------------------------------------ B2: all units, once


class ShrinkingNode(FixedNode):
    """Planted bug: a process computes only its share of the attempt before when a step begins anew, so that the share
    of a dead member is left out.
    """

    def _new_run(self, attempt: Attempt, view: View) -> ShareRun:
        before, run = self.last_run, super()._new_run(attempt, view)
        if before is None or before.attempt.base != attempt.base:
            return run
        return replace(run, share=before.share, pieces=self._pieces(before.share))


class ForgivingMachine(UncheckedMachine):
    """Planted bug: the root closes a step although a member has left its loop with its share undone."""

    def _differing_in(self, view: View, box: Mapping[str, Contribution]) -> tuple[Differs, ...]:
        return super()._differing_in(replace(view, batch=""), box)


# ------------------------------------------------------------------ B3: a step begins anew


class KeepingNode(FixedNode):
    """Planted bug: the sum that a process has made in one attempt counts in the next one, too."""

    def sum_view(self, run: ShareRun) -> ViewId | None:
        return None


class RememberingNode(FixedNode):
    """Planted bug: a process begins a step anew with the buffers that the attempt before has changed."""

    def _new_run(self, attempt: Attempt, view: View) -> ShareRun:
        before, live = self.last_run, self.live
        run = super()._new_run(attempt, view)
        again = before is not None and before.attempt.base == attempt.base
        return replace(run, state=live) if again else run


class BelievingMachine(MemberMachine):
    """Planted bug: a member takes its thread's contribution for one of the present attempt, whichever it was made
    in.
    """

    def _on_own(self, contribution: Contribution) -> None:
        super()._on_own(replace(contribution, view=self._entered_id))


# ------------------------------------------------------------------ B4: stored splits alone, with a header


class ForeseeingNode(FixedNode):
    """Planted bug: a process divides a step by an announced view of the same members before it has entered that
    view.
    """

    def split(self, view: View) -> Split:
        waiting = self.machine.waiting_view
        return super().split(waiting if waiting is not None and waiting.ids() == view.ids() else view)


class MeasuringNode(FixedNode):
    """Planted bug: a process divides a step by the speed that it has measured of itself."""

    def split(self, view: View) -> Split:
        split = super().split(view)
        usual_s = self.world.program.work_s / split.rule.samples
        mine = usual_s / (self.heartbeat().sample_s or usual_s)
        speeds = [mine if m == self.me else 1.0 for m in view.ids()]
        return Split(split.rule, divided(split.rule.units, speeds))


class RestlessSharing(Sharing):
    """Planted bug: the scheduler looks for a better split after every step."""

    def turn(self, latest: View) -> tuple[str, str] | None:
        self.pause_steps = 0
        return super().turn(latest)


class ChangingScheduler(BriskScheduler):
    """Planted bug: the scheduler announces a view with another split than the one it has stored."""

    def _announce(self, view: View) -> None:
        split = read_split(view.batch, len(view.members))
        assert split is not None
        super()._announce(replace(view, batch=str(Split(split.rule, split.shares[::-1]))))


_UNCHECKED = hooks(machine=UncheckedMachine)

_BUGS: dict[str, tuple[str, Callable[[int], Plan], type[Hooks]]] = {
    "B1-own-order": ("a member numbers units by its own rule", changing_plan, hooks(node=OrderingNode)),
    "B1-number": ("the more members, the more samples", changing_plan, hooks(node=GrowingNode)),
    "B2-left-out": ("a dead member's share is left out", rerun_plan, hooks(node=ShrinkingNode)),
    "B2-unchecked": (
        "nobody checks which units sums cover, and a dead member's share is left out", rerun_plan,
        hooks(node=ShrinkingNode, machine=UncheckedMachine),
    ),
    "B2-strayed-unchecked": (
        "nobody checks which units sums cover, and a leaver's share stays undone", straying_plan,
        hooks(machine=ForgivingMachine),
    ),
    "B3-kept": (
        "a step's contribution and sum are sent again", rerun_plan, hooks(node=KeepingNode, machine=KeepingMachine)
    ),
    "B3-kept-unchecked": (
        "a step's contribution and sum are sent again, unchecked", rerun_plan,
        hooks(node=KeepingNode, machine=UncheckedKeepingMachine),
    ),
    "B3-sums": ("a sum survives its attempt", rerun_plan, hooks(node=KeepingNode)),
    "B3-buffers": ("buffers survive an attempt", rerun_plan, hooks(node=RememberingNode)),
    "B3-late": ("a contribution that comes late counts", rerun_plan, hooks(machine=BelievingMachine)),
    "B4-announced": ("an announced split rules before a header carries it", announced_plan, hooks(node=ForeseeingNode)),
    "B4-own-split": ("a member divides by the speed that it measures", changing_plan, hooks(node=MeasuringNode)),
    "B4-restless": (
        "splits follow each other at once", changing_plan,
        hooks(scheduler=planted(BriskScheduler, sharing=RestlessSharing)),
    ),
    "B4-unstored": ("a split is announced that is not stored", changing_plan, hooks(scheduler=ChangingScheduler)),
}  # fmt: skip
"""Bugs by name, which begins with the rule: in words, the runs in which it must show, and the broken behaviour."""

FIXED_BUGS = {
    name: Bug(
        rule=name.partition("-")[0],
        what=what,
        hooks=made,
        plan=plan,
        control=_UNCHECKED if name.endswith("unchecked") else FixedHooks,
    )
    for name, (what, plan, made) in _BUGS.items()
}
"""Planted bugs about batches of fixed size, by name; without the bug their jobs need the classes of such jobs, too."""
