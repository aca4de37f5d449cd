"""Computes training symbolically: which slot comes next, which samples a member uses in it, and the state afterwards.

Theory of operation. The training state is a tuple of numbers, one per range of the result and one for buffers that
forward passes change (BatchNorm statistics); what travels beside these (outer_ranks.py) comes after them. Applying a
slot's result hashes every entry with the set of contributions that was summed for it, so two members have equal states
exactly if they applied equal results in equal order. What comes next is a function of the last header alone, as it is
for real loops: steps until the epoch's samples are spent, a collective after every few steps, a BOUNDARY whenever the
header asks for one, a CLOSING at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chaos_lightning.planning.assignment import assign_step
from chaos_lightning.planning.batch import BatchRule, read_rule
from chaos_lightning.planning.ledger import is_spent, remaining
from chaos_lightning.protocol.types import Header, Kind, Ledger, Span, Spent, View, ViewId

State = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Script of a simulated job.

    Attributes:
        epochs: Passes over the data.
        length: Samples per epoch.
        gather_every: A collective follows each so many steps; 0: none.
        ranges: Ranges of a step's result.
        work_s: Mean duration of one member's work for a step, in seconds; with layers, of all micro-batches together.
        layers: Layers of the model, if members run it in pipelines; 0: each member runs all of it.
        stages: Stages of each pipeline.
        micro_batches: Micro-batches of a step.
        micro_batch_size: Samples of a micro-batch.
        most: Layers that a member has room for; 0: all.
        least: Least number of members with which a plan fits.
        on_lost_parts: Way of the job to meet the loss of parts of the state (planning/pipelines/request.py).
        shared: Whether the first and the last layer share a parameter, which is a part of its own.
        evaluates: Whether each collective is a round of evaluation in pipelines.
        batch: Batch of a step, whoever is there, as a hello names it; "": each member adds a batch of its own.
    """

    epochs: int = 2
    length: int = 24
    gather_every: int = 3
    ranges: int = 3
    work_s: float = 0.02
    layers: int = 0
    stages: int = 2
    micro_batches: int = 4
    micro_batch_size: int = 1
    most: int = 0
    least: int = 1
    on_lost_parts: str = "wait"
    shared: bool = False
    evaluates: bool = False
    batch: str = ""

    @property
    def rule(self) -> BatchRule:
        """Batch of a step, in a job that has one of fixed size."""
        rule = read_rule(self.batch)
        assert rule is not None, "each member adds a batch of its own"
        return rule

    @property
    def needed(self) -> int:
        """Smallest number of members for which pipelines are possible; 1 without pipelines."""
        return max(self.least, -(-self.layers // self.most) if self.most else 1)

    @property
    def users(self) -> tuple[int, ...]:
        """Layers that use the shared parameter, whose part has the number after the last layer's."""
        return (0, self.layers - 1) if self.shared else ()

    @property
    def rest(self) -> int:
        """Number of the part of the state that all members own."""
        return self.layers + self.shared

    def epoch(self, ledger: Ledger) -> int:
        """Returns the epoch of the next step; `epochs` when all samples are used."""
        current = max((s.epoch for s in ledger.streams), default=0)
        return current + 1 if is_spent(ledger, "", current, self.length) else current

    def next_kind(self, header: Header) -> Kind:
        """Returns the kind of the slot that follows `header`."""
        after_step = header.kind is Kind.STEP
        if after_step and self.gather_every and header.step % self.gather_every == 0:
            return Kind.GATHER
        if header.boundary:
            return Kind.BOUNDARY
        return Kind.CLOSING if self.epoch(header.ledger) >= self.epochs else Kind.STEP

    def share(self, view: View | None, member: str, ledger: Ledger) -> tuple[int, tuple[Span, ...]]:
        """Returns (epoch, positions) of this member's samples in the next step."""
        epoch = self.epoch(ledger)
        if view is None or view.find(member) is None:
            return epoch, ()
        assignment = assign_step(view, ledger, epoch=epoch, length=self.length)[member]
        return epoch, tuple(span for part in assignment.micro_batches for span in part)

    def unspent(self, ledger: Ledger, epoch: int) -> tuple[Span, ...]:
        return remaining(ledger, "", epoch, self.length)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Identity of one attempt at a slot, by which its tensors and sums are told from others."""

    view: ViewId
    seq: int
    base: str
    """Hash of the header before."""


def initial_state(program: Program, seed: int) -> State:
    """Returns a process's own initial state, before it joins a job."""
    return tuple(hash((seed, i)) for i in range(program.ranges + 1))


def apply_result(state: State, results: Sequence[Collection[int]]) -> State:
    """Returns the state after a step, given what was summed in each range; the buffers are averaged, too."""
    new = [hash((old, tuple(sorted(result)))) for old, result in zip(state, results, strict=False)]
    buffers = len(results)
    return (*new, hash((state[buffers], new[0])), *state[buffers + 1 :])


def after_forward(program: Program, state: State, uid: int) -> State:
    """Returns the state after a forward pass, which changes only the buffers until the next commit averages them."""
    buffers = program.ranges
    return (*state[:buffers], hash((state[buffers], uid)), *state[buffers + 1 :])


def spent_of(epoch: int, spans: tuple[Span, ...]) -> tuple[Spent, ...]:
    return (Spent("", epoch, spans),) if spans else ()
