"""Computes training with a batch of fixed size symbolically: the units of a step, their gradients, and the state that
one process reaches which nothing disturbs.

Theory of operation. Members find the samples of a step in the last header, as real loaders do (`step_of`). The oracle
counts them for one process, from the number of the step alone (`undisturbed`), so the two can only agree if each step
has had exactly the samples of its place. A unit's gradient is a number: the hash of the state, of the unit's number and
of its samples. A step adds up the gradients of its units, so the state tells which units were computed on which state,
and how often each, and tells nothing of who computed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chaos_lightning.planning.assignment import assign_micro_batches
from chaos_lightning.protocol.spans import count, union
from chaos_lightning.protocol.types import Ledger, Span
from lab.simulate.training import Program, State, apply_result

PAUSE_STEPS = 6
"""Least number of steps between two splits for the same members, in simulated jobs."""


@dataclass(frozen=True, slots=True)
class Step:
    """Samples of one step.

    Attributes:
        epoch: Epoch of the samples.
        units: Positions of each unit: a micro-batch, or a single sample.
    """

    epoch: int
    units: tuple[tuple[Span, ...], ...]

    def spans(self, units: Span) -> tuple[Span, ...]:
        """Returns the positions of these units."""
        return union(span for unit in self.units[slice(*units)] for span in unit)

    def samples(self, units: Span) -> int:
        """Returns the number of samples in these units."""
        return count(self.spans(units))

    @property
    def all_units(self) -> Span:
        """Numbers of all units."""
        return (0, len(self.units))


def step_of(program: Program, ledger: Ledger, samples: int = 0) -> Step:
    """Returns the samples of the next step, given the record of used samples in the last header (B1).

    Args:
        program: The job's script.
        ledger: Record of used samples.
        samples: Samples of a step; 0: as the rule says.
    """
    rule, epoch = program.rule, program.epoch(ledger)
    samples = samples or rule.samples
    given = assign_micro_batches(
        ledger,
        micro_batches=samples // rule.micro_batch if rule.micro_batch else 1,
        quota=rule.micro_batch or samples,
        epoch=epoch,
        length=program.length,
    )
    if rule.micro_batch:
        return Step(epoch, tuple(part for part in given.micro_batches if part))
    return Step(epoch, _singly(p for start, stop in given.spans for p in range(start, stop)))


def _singly(positions: Iterable[int]) -> tuple[tuple[Span, ...], ...]:
    return tuple(((p, p + 1),) for p in positions)


def undisturbed(program: Program, step: int) -> Step:
    """Returns the samples of a step in a job of one process that nothing disturbs; the first step is number 1."""
    rule = program.rule
    epoch, place = divmod(step - 1, -(-program.length // rule.samples))
    first = place * rule.samples
    stop = min(first + rule.samples, program.length)
    if not rule.micro_batch:
        return Step(epoch, _singly(range(first, stop)))
    borders = range(first, stop, rule.micro_batch)
    return Step(epoch, tuple(((p, min(p + rule.micro_batch, stop)),) for p in borders))


def gradients_of(state: State, step: Step, units: Span) -> tuple[int, ...]:
    """Returns the gradients of these units, each computed on this state."""
    return tuple(hash((state, step.epoch, j, step.units[j])) for j in range(*units))


def after_step(program: Program, state: State, step: Step) -> State:
    """Returns the state after a step each of whose units counts once."""
    gradients = gradients_of(state, step, step.all_units)
    return apply_result(state, [gradients] * program.ranges)
