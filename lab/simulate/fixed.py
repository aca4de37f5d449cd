"""Simulates a training process of a job whose batch has a fixed size: members share the units of each step.

Theory of operation. The member's machine is the real one. For each attempt at a step (reruns.py) the training thread
finds the step's units in the last header, and its own share of them in the split of the entered view, as
pipeline/shares.py does in a real process. It computes its share piece by piece, each with as many samples as fit, and
hands the sum to the plane during the last piece. The sum, and the contribution that names the units it covers, count in
this attempt alone. A thread that is in its last piece when a recovery ends the attempt may hear of that too late: it
contributes all the same, and the machine must drop that. How long a sample takes changes as the plan says; what the
process has measured goes to the scheduler with its heartbeats.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.planning.batch import Split, read_split
from chaos_lightning.protocol.types import Contribution, Header, Heartbeat, Kind, LayersCovered, Span, View, ViewId
from lab.simulate.fixed_training import Step, gradients_of, step_of
from lab.simulate.job import Job
from lab.simulate.oracle import Made, Violation
from lab.simulate.plan import NodeSpec
from lab.simulate.reruns import AttemptRun, RerunNode
from lab.simulate.training import Attempt, State, after_forward, spent_of

IDLE_S = 0.0005
"""Seconds that an attempt takes a member without samples."""
TIMES, LEAST = 16, 3
"""Number of the latest steps whose times count, and least number (pipeline/shares.py)."""
_LATE = 0.3
"""Fraction of last pieces after whose attempt has ended the thread contributes all the same."""


@dataclass(slots=True)
class ShareRun(AttemptRun):
    """One attempt of the training thread at its share of a step."""

    step: Step
    share: Span
    """Numbers of the member's units."""
    pieces: deque[Span]
    """Units of each piece that is not over."""
    state: State
    """State on which it computes."""
    took_s: float = 0.0
    """Virtual seconds of the pieces so far."""
    busy: bool = False


class FixedNode(RerunNode[ShareRun]):
    """Simulated training process of a job whose batch has a fixed size."""

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world, spec, number)
        self._times: deque[float] = deque(maxlen=TIMES)
        """Seconds for a sample in the latest steps."""
        self._late: ShareRun | None = None
        """Run that contributes although its attempt has ended."""

    # ------------------------------------------------------------------ what it computes

    def split(self, view: View) -> Split:
        """Returns who computes which units, in an attempt in this view (B2)."""
        split = read_split(view.batch, len(view.members))
        if split is None:
            raise Violation(f"view {view.id} divides no batch (B2)")
        return split

    def step(self) -> Step:
        """Returns the samples of the open step (B1)."""
        return step_of(self.world.program, self.header.ledger)

    def share(self, view: View, step: Step) -> Span:
        """Returns the numbers of this member's units of a step."""
        return self.split(view).units(view.ids().index(self.me), len(step.units))

    def runs_units(self) -> bool:
        """Returns whether units run in the open slot; a leaver that has left its loop leaves its share undone (B2)."""
        return super().runs_units() and not self.strays()

    def _new_run(self, attempt: Attempt, view: View) -> ShareRun:
        step = self.step()
        share = self.share(view, step)
        self.live = self.state
        return ShareRun(Kind.STEP, attempt, view, step, share, self._pieces(share), self.live)

    def _pieces(self, share: Span) -> deque[Span]:
        """Returns the units that are computed at once, piece by piece; a member without a share has one empty piece."""
        first, stop = share
        most = 1 if self.world.program.rule.micro_batch else self.spec.fits
        return deque((a, min(a + most, stop)) for a in range(first, stop, most)) or deque([share])

    # ------------------------------------------------------------------ attempts

    def _apply(self, effect: fx.MemberEffect, phase: MemberPhase) -> None:
        run = self.run
        super()._apply(effect, phase)
        if isinstance(effect, fx.Rerun) and run is not None and run.busy and len(run.pieces) == 1:
            self._late = run if self.kernel.random.random() < _LATE else None
        if isinstance(effect, fx.Rerun) and run is not None and self.strays():
            self._begin()  # it left its loop in the attempt that has just ended

    def _next(self, run: ShareRun) -> None:
        if run is not self.run or run.busy or not run.pieces or not self.alive:
            return
        if self.sprung("forward") or run is not self.run:
            return
        run.busy, samples = True, run.step.samples(run.pieces[0])
        lasts = samples * self._sample_s() * self.kernel.between(0.5, 1.5) if samples else IDLE_S
        run.took_s += lasts
        self._busy_until = self.kernel.now + lasts
        self.live = after_forward(self.world.program, self.live, hash((run.step.epoch, run.pieces[0])))
        if len(run.pieces) == 1:
            self._send(run, lasts)
        self.timer(lasts, lambda: self._piece_over(run))

    def _sample_s(self) -> float:
        """Returns the seconds that a sample takes here now, on average."""
        now, spec, program = self.kernel.now, self.spec, self.world.program
        pace = [factor for at, factor in spec.paces if at <= now][-1:] or [spec.pace]
        return program.work_s / program.rule.samples * pace[0]

    def _send(self, run: ShareRun, lasts: float) -> None:
        """Lets the last piece's backward pass hand its ranges to the plane as they become final."""
        program, uid = self.world.program, 0
        if run.step.samples(run.share):
            uid, step = self.world.next_uid(), run.step
            made = Made(
                self.me, run.attempt.seq, run.attempt.base, run.state, step.epoch, step.spans(run.share),
                run.attempt.view, gradients_of(run.state, step, run.share),
            )  # fmt: skip
            self.world.oracle.contributed(uid, made)
        self.timer(lasts * 0.6, lambda: self._arm_run(run, uid))
        for index in range(program.ranges):
            self.timer(lasts * self.kernel.between(0.7, 1.15), lambda i=index: self._range_ready(run, i))  # type: ignore[misc]

    def sum_view(self, run: ShareRun) -> ViewId | None:
        """Returns the view in whose attempt alone the sum of a run counts (B3); None: it counts in any."""
        return run.attempt.view

    def _arm_run(self, run: ShareRun, uid: int) -> None:
        if run is self.run:
            self.plane.begin(run.attempt.seq, uid, self.sum_view(run))

    def _range_ready(self, run: ShareRun, index: int) -> None:
        if run is self.run:
            self.plane.ready(run.attempt.seq, index)

    def _piece_over(self, run: ShareRun) -> None:
        run.busy = False
        run.pieces.popleft()
        if run is self._late:
            self._contribute_late(run)
        if run is not self.run:
            return  # the attempt is over: what it made is dropped (B3)
        if run.pieces:
            self._next(run)
            return
        if samples := run.step.samples(run.share):
            self._times.append(run.took_s / samples)
        self._contribute(Kind.STEP, **self._result(run))

    def _result(self, run: ShareRun) -> dict[str, Any]:
        """Returns the fields of the contribution of a run whose pieces are all over."""
        step, share = run.step, run.share
        return {
            "weight": float(step.samples(share)),
            "coefficient": 1.0,
            "spent": spent_of(step.epoch, step.spans(share)),
            "name": "step",
            "prev_hash": run.attempt.base,
            "micro_batches": (step.all_units,),
            "coverage": (LayersCovered(0, 1, (share,)),) if share[0] < share[1] else (),
        }

    def _contribute_late(self, run: ShareRun) -> None:
        """Contributes to an attempt that has ended, as a thread does that has not heard of that."""
        self._late, attempt, step = None, run.attempt, self.header.step
        if self.machine.phase is MemberPhase.ACTIVE and not self.outcome:
            late = Contribution(self.me, attempt.view, attempt.seq, Kind.STEP, step, **self._result(run))  # type: ignore[arg-type]
            self.feed(fx.Contribute(late))

    # ------------------------------------------------------------------ the rest

    def heartbeat(self) -> Heartbeat:
        """Returns the next heartbeat, with the time that the process has measured for a sample."""
        return replace(
            super().heartbeat(), sample_s=statistics.median(self._times) if len(self._times) >= LEAST else 0.0
        )

    def _commit(self, header: Header, contributors: tuple[str, ...]) -> None:
        self.run = None
        super()._commit(header, contributors)

    def restart(self) -> None:
        super().restart()
        self._times.clear()
        self._late = None
