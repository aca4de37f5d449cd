"""Checks jobs whose batch has a fixed size: each step's samples and state are those of one process that nothing
disturbs.

Theory of operation. The number of a step says which samples one process would have used in it, and what its state would
be afterwards (fixed_training.undisturbed). So a sum that lacks a unit, has one twice, or has one of another attempt or
another state shows at the first commit, and so does a step with other samples. What rules must be stored, too: a view
that divides another batch, or divides it otherwise than the store has it, is found when it comes into force, and so is
a split that follows too soon on another one of the same members.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.batch import read_split
from chaos_lightning.protocol.types import GENESIS, Header, View, ViewId
from lab.simulate.dataplane import Result
from lab.simulate.fixed_training import PAUSE_STEPS, after_step, undisturbed
from lab.simulate.oracle import Oracle, Violation, positions_in
from lab.simulate.training import State


@dataclass(slots=True)
class FixedOracle(Oracle):
    """Checker of a job with a batch of fixed size that sees the state of all processes."""

    alone: dict[tuple[str, int], State] = field(default_factory=dict)
    """State of one process after so many steps, by lineage and number of steps."""
    entered: dict[ViewId, int] = field(default_factory=dict)
    """Number of steps that were committed when the first slot was committed in a view."""
    splits: int = 0
    """Number of splits that headers have carried to the same members."""

    def gradients(self, result: Result) -> Collection[int]:
        """Returns the gradients of all units that are summed, also such as are there twice."""
        return tuple(gradient for uid in result for gradient in self.made[uid].gradients)

    def committed(
        self,
        who: str,
        lineage: str,
        before: Header,
        header: Header,
        contributors: tuple[str, ...],
        state: State,
        results: Sequence[Result] | None,
    ) -> None:
        """Checks that member `who` committed `header` with the right state and results."""
        first = (lineage, header.hash) not in self.states
        Oracle.committed(self, who, lineage, before, header, contributors, state, results)
        if first:
            self._check_split(before, header)
        if state != self._state(lineage, header.step):
            raise Violation(
                f"{who} committed slot {header.seq}, and its state is not that of one process after {header.step} steps"
                " (B1, B3)"
            )

    def _state(self, lineage: str, step: int) -> State:
        """Returns the state of one process after so many steps from this founding."""
        last = max((s for of, s in self.alone if of == lineage and s <= step), default=-1)
        if last < 0:
            last, self.alone[lineage, 0] = 0, self.states[lineage, GENESIS.hash]
        for number in range(last + 1, step + 1):
            state = self.alone[lineage, number - 1]
            self.alone[lineage, number] = after_step(self.program, state, undisturbed(self.program, number))
        return self.alone[lineage, step]

    def _check_progress(self, lineage: str, before: Header, header: Header) -> None:
        """Checks that the step has spent exactly the samples that one process uses in the step of this number (B1)."""
        due, epoch = undisturbed(self.program, header.step), self.program.epoch(before.ledger)
        left = [self.program.unspent(ledger, epoch) for ledger in (before.ledger, header.ledger)]
        spent = sorted(set(positions_in(left[0])) - set(positions_in(left[1])))
        expected = positions_in(due.spans(due.all_units))
        if (epoch, spent) != (due.epoch, expected) or header.total_weight != len(expected):
            raise Violation(
                f"slot {header.seq} is step {header.step}, spends {spent} of epoch {epoch} and weighs "
                f"{header.total_weight:g}; one process uses {expected} of epoch {due.epoch} in it (B1)"
            )

    # ------------------------------------------------------------------ splits

    def _check_split(self, before: Header, header: Header) -> None:
        """Checks the split of the view in which a slot was closed, and that of the view that its header carries, if
        any.
        """
        view = self._checked(self.view(header.view))
        self.entered.setdefault(view.id, before.step)
        change = header.view_change
        if change is None:
            return
        stored = self._checked(self.view(change.id))
        if stored.batch != change.batch:
            raise Violation(f"a header carries split {change.batch} of view {change.id}; stored is {stored.batch} (B4)")
        if change.ids() != view.ids() or change.batch == view.batch:
            return
        self.splits += 1
        steps = header.step - self._since(view)
        if steps < PAUSE_STEPS:
            raise Violation(f"view {change.id} divides the batch anew {steps} steps after the split before (B4)")

    def _checked(self, view: View) -> View:
        """Returns this view if its split divides the job's batch among its members."""
        try:
            split = read_split(view.batch, len(view.members))
        except PlanError as error:
            raise Violation(f"view {view.id}: {error} (B2)") from error
        if split is None or str(split.rule) != self.program.batch:
            raise Violation(f"view {view.id} divides {view.batch!r}; the batch is {self.program.batch} (B2)")
        return view

    def _since(self, view: View) -> int:
        """Returns how many steps were committed when the present members were given this split."""
        found = self.entered[view.id]
        while (older := self.ever.get(view.predecessor)) is not None:
            if (older.ids(), older.batch) != (view.ids(), view.batch):
                break
            view, found = older, min(found, self.entered.get(older.id, found))
        return found
