"""Simulates a training process of a job with pipelines: units, tensors between stages, parts of the state that move
between members.

Theory of operation. The member's machine is the real one. The training thread runs the units that the entered view
gives it, one after the other, each when its tensor is here (reruns.py has the attempts); it hands the raw sum of a
layer to the plane as soon as its last unit of that layer is over, and contributes when all of its units have run and it
knows the norms of the sums that it has to tell. Rounds of evaluation are forward units. Parts are pulled one by one
from those that hold them at the very header (P8). When all leave, each writes its parts down; a process that is started
in the place of another one offers what that one wrote (P13).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.planning.pipelines.units import FORWARD, BorderKey, StepUnit, closing, coverage
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kept, Kind, Span, Spent, View, ViewId, kept_header
from lab.simulate.dataplane import DataPlane
from lab.simulate.fabric import Endpoint
from lab.simulate.job import Job
from lab.simulate.oracle import Violation
from lab.simulate.part_plane import PartPlane, SumDown, SumUp
from lab.simulate.plan import NodeSpec
from lab.simulate.puller import Pull
from lab.simulate.reruns import AttemptRun, RerunNode
from lab.simulate.staged_oracle import StagedOracle
from lab.simulate.staged_training import (
    Batch,
    Parts,
    RawSum,
    backward,
    clipping,
    entering,
    forward,
    loss,
    norms,
    shared,
    stepped,
    weight,
    work_of,
)
from lab.simulate.training import Attempt

_ASKS_S = 0.03


@dataclass(frozen=True, slots=True)
class Border:
    """Message with a tensor that one stage sends to the next."""

    attempt: Attempt
    key: BorderKey
    value: int


@dataclass(slots=True)
class Run(AttemptRun):
    """One attempt of the training thread at a step or at a round of evaluation."""

    batch: Batch
    units: deque[StepUnit]
    all_units: tuple[StepUnit, ...]
    closes: deque[tuple[int, ...]]
    borders: dict[BorderKey, int] = field(default_factory=dict)
    activations: dict[tuple[int, int], int] = field(default_factory=dict)
    """Inputs of layers, by micro-batch and layer."""
    grads: dict[int, list[int]] = field(default_factory=dict)
    """Gradients of the run, by part."""
    counts: list[tuple[int, int]] = field(default_factory=list)
    """Batches that the member's metrics have counted in a round, with the tensor that left the last layer."""
    busy: bool = False
    over: bool = False
    """Whether all units have run, so that the run waits for the sums whose norms the member tells."""


class StagedNode(RerunNode[Run]):
    """Simulated training process of a job with pipelines."""

    part_plane_class: type[PartPlane] = PartPlane

    def __init__(self, world: Job, spec: NodeSpec, number: int) -> None:
        super().__init__(world, spec, number)
        assert isinstance(world.oracle, StagedOracle)
        self.truth: StagedOracle = world.oracle
        self.truth.members.append(self)
        self.state = self.live = ()
        self.values: Parts = {}
        """Parts that the process holds at `header`."""
        self._early: list[Border] = []
        self.file: tuple[Kept, Parts, str] | None = None
        """File that the process wrote when all left: with the values, and their lineage."""
        self._drifted = -1
        """Part whose hash the process has said wrongly in the open step; -1: none."""

    def _make_plane(self) -> DataPlane:
        made = self.part_plane_class
        return made(self._send_part, self._ranges_done)  # type: ignore[return-value]  # used by this class alone

    @property
    def parts_plane(self) -> PartPlane:
        plane = self.plane
        assert isinstance(plane, PartPlane)
        return plane

    def _send_part(self, peer: str, message: SumUp | SumDown) -> None:
        self.world.fabric.send(self.machine.member_id, peer, message)

    def held(self) -> tuple[Span, ...]:
        return ()

    # ------------------------------------------------------------------ effects

    def feed(self, event: fx.MemberEvent) -> None:
        super().feed(event)
        self._check_parts()

    def _check_parts(self) -> None:
        """Checks that the process has exactly the parts of the state that its state machine believes it holds."""
        machine = self.machine
        quiet = self.alive and not self.frozen and not self.outcome and machine.phase is MemberPhase.ACTIVE
        if quiet and self.training and machine.header is self.header and self._opened is machine.view:
            told = numbers(machine.parts.held)
            if sorted(self.values) != sorted(told):
                raise Violation(f"{self.me} says that it holds parts {told}, and has {sorted(self.values)} (P5)")

    def _apply(self, effect: fx.MemberEffect, phase: MemberPhase) -> None:
        match effect:
            case fx.PullState(header, view, parts) | fx.PullParts(header, view, parts):
                self.world.on_effect(self, effect)
                self._replace_pull(PartsPull(self.world, self, header, view, numbers(parts)))
            case fx.DropParts(parts):
                self.world.on_effect(self, effect)
                for part in numbers(parts):
                    self.values.pop(part, None)
            case _:
                super()._apply(effect, phase)

    def _open(self, view: View, seq: int) -> None:
        self.parts_plane.open(view, seq)
        self.timer(0.0, self.parts_plane.look)

    def frame(self, peer: str, payload: object) -> None:
        if self.outcome:
            return
        if isinstance(payload, SumUp | SumDown):
            self.parts_plane.take(payload)
        elif isinstance(payload, Border):
            self._arrived(payload)
        else:
            super().frame(peer, payload)

    # ------------------------------------------------------------------ entering

    def _viewed(self, view: View) -> None:
        self._part(view)
        if self.machine.seq > GENESIS.seq:
            self._resume(view)
            return
        founded = self.world.founding_of(view)
        if not self.lineage:
            self.lineage = founded
            if self.truth.lineage != founded:
                if self.spec.after:
                    self.truth.begins_anew()
                self.world.founds(self)
        made = numbers(division(view).made(self.me))
        self.values = {p: hash((self.name, self.life, str(view.id), p)) for p in made}
        self.truth.makes(self.lineage, view.id, self.values)
        if not self.training and self.me not in view.joiners:
            self._start(GENESIS)

    def _offered(self) -> tuple[Kept, Parts, str] | None:
        """Returns the kept-state file of the process that this one replaces; None if there is none."""
        before = self.world.nodes.get(self.spec.after)
        return before.file if isinstance(before, StagedNode) else None

    def connect(self) -> None:
        """Connects once the process that this one replaces has ended."""
        before, offered = self.world.nodes.get(self.spec.after), self._offered()
        if before is not None and before.alive:
            self.timer(self.kernel.between(0.1, 0.6), self.connect)
            return
        self.machine.parts.kept = offered[0] if offered is not None else None
        super().connect()

    def _resume(self, view: View) -> None:
        """Loads the parts in its file when the job is founded on files (14c, P13)."""
        offered, header = self._offered(), self.machine.header
        if offered is None or self.training or offered[0].header.hash != header.hash or self.lineage:
            return
        _, self.values, self.lineage = offered[0], dict(offered[1]), offered[2]
        self.truth.resumed(self.lineage, header)
        self.header = header
        if self.me not in view.joiners:
            self._start(header)

    def parts_loaded(self, header: Header, view: View, values: Parts, lineage: str) -> None:
        """Stores the parts of a complete pull, each of which equals the donors'."""
        machine = self.machine
        entered = machine.view.id if machine.view is not None else NO_VIEW
        if machine.header.hash != header.hash or (header.seq == GENESIS.seq and entered != view.id):
            return  # what it needs now, another pull brings
        values = {p: values[p] for p in numbers(machine.parts.missing) if p in values}
        self.lineage = lineage
        if not self.training:
            self.header = header
        self.values.update(values)
        self.truth.pulled(self.me, lineage, header, view.id, values)
        self.feed(fx.StateLoaded(header.hash, union((p, p + 1) for p in values), view.id))
        if self.machine.phase is MemberPhase.ACTIVE and not self.training and self.alive:
            self._start(header)
        self._go()

    # ------------------------------------------------------------------ the training thread

    def strays(self) -> bool:
        """Returns False: the others need its units, so a leaver trains on until it is let go."""
        return False

    def runs_units(self) -> bool:
        """Returns whether units run in the open slot."""
        kind = self.next_kind()
        return kind is Kind.STEP or (kind is Kind.GATHER and self.world.program.evaluates)

    def lacks(self, view: View) -> bool:
        """Returns whether the process lacks a part that it owns in this view."""
        return any(p not in self.values for p in numbers(division(view).owned(self.me)))

    def _begun(self, run: Run) -> None:
        closed = {layer for row in run.closes for layer in row}
        for part in sorted(set(run.grads) - closed):
            self.timer(0.0, lambda k=part: self._give(run, k))  # type: ignore[misc]
        for tensor in [b for b in self._early if self.takes(run, b)]:
            run.borders[tensor.key] = tensor.value
        now = (run.attempt.view, run.attempt.seq)
        self._early = [b for b in self._early if (b.attempt.view, b.attempt.seq) > now]

    def _new_run(self, attempt: Attempt, view: View) -> Run:
        kind = self.next_kind()
        batch = work_of(self.world.program, self.header, kind)
        parts = division(view)
        units = parts.pipelines.units(self.me, batch.empty) if parts.pipelines is not None else ()
        if kind is not Kind.STEP:
            units = tuple(u for u in units if u.kind == FORWARD)
        run = Run(kind, attempt, view, batch, deque(units), units, self._closes(units))
        if kind is Kind.STEP:
            run.grads.update({part: [] for part in self._reduced(parts)})
        return run

    def _closes(self, units: tuple[StepUnit, ...]) -> deque[tuple[int, ...]]:
        """Returns, for each unit, the parts whose raw sums are final once it has run."""
        rows, program = list(closing(units)), self.world.program
        last = max((i for i, row in enumerate(rows) if set(row) & set(program.users)), default=-1)
        if last >= 0:
            rows[last] = (*rows[last], program.layers)
        return deque(rows)

    def with_units(self, run: Run, units: tuple[StepUnit, ...]) -> Run:
        """Returns the same run with other units to execute."""
        return replace(run, units=deque(units), all_units=units, closes=self._closes(units))

    def _reduced(self, parts: Division) -> list[int]:
        """Returns the parts that the member owns and whose gradients are summed: all but the one that every member
        owns.
        """
        return [p for p in numbers(parts.owned(self.me)) if p < len(parts.names) - 1]

    def _give(self, run: Run, part: int) -> None:
        if run is self.run:
            self.parts_plane.give(part, tuple(sorted(run.grads[part])))

    def takes(self, run: Run, tensor: Border) -> bool:
        """Returns whether a tensor belongs to this run: only one of the same attempt does (P7)."""
        return tensor.attempt == run.attempt

    def _arrived(self, tensor: Border) -> None:
        run = self.run
        if run is not None and self.takes(run, tensor):
            run.borders[tensor.key] = tensor.value
            self._next(run)
        elif run is None or (tensor.attempt.view, tensor.attempt.seq) > (run.attempt.view, run.attempt.seq):
            self._early.append(tensor)

    def _next(self, run: Run) -> None:
        """Begins the next unit if its input has arrived; contributes after the last unit."""
        if run is not self.run or run.busy or not self.alive:
            return
        if not run.units:
            run.busy = run.over = True  # nothing follows
            self._units_over(run)
            return
        unit = run.units[0]
        if unit.taken is not None and unit.taken not in run.borders:
            return
        if self.sprung("forward" if unit.kind == FORWARD else "backward") or run is not self.run:
            return
        run.busy = True
        program = self.world.program
        each_s = program.work_s / (program.layers * program.micro_batches)
        lasts = each_s * (unit.end - unit.first) * self.spec.pace * self.kernel.between(0.5, 1.5)
        self._busy_until = self.kernel.now + lasts
        self.timer(lasts, lambda: self._unit_over(run))

    def _unit_over(self, run: Run) -> None:
        if run is not self.run:
            return  # the attempt is over: what the unit made is dropped (P7)
        unit = run.units.popleft()
        run.busy = False
        value = self._forward(run, unit) if unit.kind == FORWARD else self._backward(run, unit)
        if unit.sent is not None:
            self.world.fabric.send(self.me, unit.to, Border(run.attempt, unit.sent, value))
        for part in run.closes.popleft():
            self._give(run, part)
        self._next(run)

    def weight(self, layer: int) -> int:
        """Returns the value that stands for a layer's weights in computations."""
        return weight(self.world.program, self.values, layer)

    def _forward(self, run: Run, unit: StepUnit) -> int:
        j = unit.micro_batch
        value = run.borders[unit.taken] if unit.taken is not None else entering(run.attempt, run.batch, j)
        for layer in range(unit.first, unit.end):
            run.activations[j, layer] = value
            value = forward(value, layer, self.weight(layer))
        run.activations[j, unit.end] = value
        if run.kind is Kind.GATHER and unit.end == self.world.program.layers:
            run.counts.append((j, value))
        return value

    def _backward(self, run: Run, unit: StepUnit) -> int:
        j = unit.micro_batch
        gradient = run.borders[unit.taken] if unit.taken is not None else loss(run.activations[j, unit.end])
        for layer in reversed(range(unit.first, unit.end)):
            gradient, own = backward(gradient, run.activations[j, layer], layer, self.weight(layer))
            run.grads[layer].append(own)
            if layer in self.world.program.users:
                run.grads[self.world.program.layers].append(shared(own))
        return gradient

    def _ranges_done(self, view: ViewId, seq: int) -> None:
        super()._ranges_done(view, seq)
        if self.run is not None and self.run.over and self.run.attempt.view == view:
            self._units_over(self.run)

    def _units_over(self, run: Run) -> None:
        """Contributes once all units have run and, for a step, the sums have arrived whose norms this member
        reports.
        """
        if run.kind is Kind.GATHER:
            self._round_over(run)
            return
        parts, results = division(run.view), self.parts_plane.results(run.attempt.view, run.attempt.seq)
        told = [p for p in numbers(parts.made(self.me)) if p < len(parts.names) - 1]
        if all(p in results for p in told):
            run.over = False
            self._step_over(run, norms({p: results[p] for p in told}) if told else b"")

    def _hashes(self, run: Run) -> tuple[str, ...]:
        """Returns hashes of the member's own parts; may let one of them drift, if older owners can notice that
        (P12).
        """
        drift, parts = self.world.plan.drift, division(run.view)
        self._drifted = -1
        if not drift:
            return ()
        owned, random = numbers(parts.owned(self.me)), self.kernel.random
        youngest = [p for p in owned if parts.owners[p][0] != self.me == parts.owners[p][-1]]
        if youngest and random.random() < drift:
            self._drifted = random.choice(youngest)
        return tuple(str(self.values[p] ^ (p == self._drifted)) for p in owned)

    def _round_over(self, run: Run) -> None:
        """Contributes the metric counts of the last layers to a round of evaluation."""
        batches, payload = [j for j in range(len(run.batch.positions)) if j not in run.batch.empty], b""
        if run.counts:
            payload = json.dumps(run.counts).encode()
        self.truth.voted(self.me, run.attempt.seq, payload)
        self._contribute(
            Kind.GATHER,
            payload=payload,
            name="validation",
            prev_hash=run.attempt.base,
            coverage=coverage(run.all_units, FORWARD),
            micro_batches=union((j, j + 1) for j in batches),
        )

    def _step_over(self, run: Run, said: bytes) -> None:
        """Contributes to a step: states the layers that its sums cover, and the samples that its first and last layers
        used.
        """
        batch, layers = run.batch, self.world.program.layers
        forwards = [u for u in run.all_units if u.kind == FORWARD]
        spans = [s for u in forwards if u.first == 0 for s in batch.positions[u.micro_batch]]
        weight = sum(batch.weight(u.micro_batch) for u in forwards if u.end == layers)
        full = [j for j in range(len(batch.positions)) if j not in batch.empty]
        self._contribute(
            Kind.STEP,
            weight=weight,
            coefficient=1.0,
            spent=(Spent("", batch.epoch, union(spans)),) if spans else (),
            name="step",
            payload=said,
            state_hashes=self._hashes(run),
            prev_hash=run.attempt.base,
            coverage=coverage(run.all_units),
            micro_batches=union((j, j + 1) for j in full),
        )

    # ------------------------------------------------------------------ committing

    def _commit(self, header: Header, contributors: tuple[str, ...]) -> None:
        before, closed = self.header, self.truth.view(header.view)
        parts = division(closed)
        if header.kind is Kind.STEP and not header.error:
            results, owned = self.parts_plane.results(header.view, header.seq), numbers(parts.owned(self.me))
            if lacking := [p for p in owned if p not in self.values]:
                raise Violation(f"{self.me} commits slot {header.seq}, and lacks parts {lacking} that it owns (P4)")
            if lacking := [p for p in self._reduced(parts) if p not in results]:
                raise Violation(f"{self.me} commits slot {header.seq} without the sums of parts {lacking} (P4)")
            mine = {p: self.values[p] for p in owned}
            clipped = self.clipped(header, {p: results[p] for p in self._reduced(parts)})
            self.values.update(stepped(mine, results, len(parts.names) - 1, header, clipped))
        named = [d.part for d in header.drifted if d.member == self.me]
        if self._drifted >= 0 and header.kind is Kind.STEP and self._drifted not in named:
            self.values[self._drifted] ^= 1
        self._drifted = -1
        self.run = None
        self.truth.applied(self.me, self.lineage, before, header, contributors, self.values)
        for part in named:
            del self.values[part]
        self.header, self.assigning = header, self.machine.assigning
        self.externalise(before, header)
        if header.error:
            self.outcome = f"disagreement: {header.error}"
            self.quit()
        elif self.machine.phase is MemberPhase.ACTIVE:
            self._begin()
        self._part(header.view_change)

    def clipped(self, header: Header, results: Mapping[int, RawSum]) -> str:
        """Returns the gradient norms by which this member clips its step, from the header's payloads (P11)."""
        return clipping(header.answers)

    # ------------------------------------------------------------------ serving others

    def serve_part(self, header: Header, view: View, part: int) -> int | None:
        """Returns a part of the state at exactly this header if it is here (P8); before slot 1 only if this view has
        the part made here (P14).
        """
        if self.outcome or part not in self.values or self.header.hash != header.hash:
            return None
        if header.seq == GENESIS.seq:
            entered = self.machine.view
            if entered is None or entered.id != view.id or part not in numbers(division(view).made(self.me)):
                return None
        return self.values[part]

    # ------------------------------------------------------------------ going

    def _part(self, view: View | None) -> None:
        """Writes the member's parts to a file when all members leave, and reports that (P13)."""
        if view is not None and not view.members and any(m.id == self.me for m in view.leaving):
            self._write_down()

    def _write_down(self) -> None:
        machine = self.machine
        held = machine.parts.held if machine.seq > GENESIS.seq else ()
        kept = Kept(kept_header(machine.header, machine.header.view), self.me, machine.chain, held)
        file = kept, {p: self.values[p] for p in numbers(held)}, self.lineage
        self.timer(self.kernel.between(0.005, 0.05), lambda: self._keep(file))

    def _keep(self, file: tuple[Kept, Parts, str]) -> None:
        if self.sprung("keeps"):
            return
        self.file = file if file[1] else self.file
        self.say(file[0])

        def over() -> None:
            self.sprung("kept")

        self.timer(0.02, over)

    def _left(self, reason: str) -> None:
        if "at no member that lives" in reason:
            self.truth.goes_without(self.me, self)
        self.truth.goes(self.me, self)
        super()._left(reason)

    def _ejected(self, reason: str, rejoin: bool, phase: MemberPhase) -> None:
        if "held by nobody who answers" in reason:
            self.truth.passed_over(self.me, self.header)
            self.troubled_at = self.kernel.now
        elif (
            rejoin
            and self.silent_s() <= self.world.settings.last_holder_timeout_s
            and not self.world.store.tip.finished
        ):
            self.truth.put_out(self.me, self)
        super()._ejected(reason, rejoin, phase)

    def restart(self) -> None:
        super().restart()
        self._early = []

    def forget(self) -> None:
        self.state = self.live = ()
        self.values = {}


class PartsPull(Pull):
    """Pull of the parts of the state that a member owns and lacks, from members or leavers that hold them."""

    def __init__(self, job: Job, node: StagedNode, header: Header, view: View, parts: tuple[int, ...]) -> None:
        super().__init__(job, node, header)
        self._staged = node
        self._view = view
        self._missing = set(parts)
        self._found: Parts = {}
        self._lineage = ""

    def start(self) -> None:
        if self.stopped:
            return
        donors = [m.id for m in (*self._view.members, *self._view.leaving) if m.id != self._staged.me]
        for part in sorted(self._missing) if donors else ():
            donor = self.node.kernel.random.choice(donors)
            self._ask(donor, lambda source, p=part: self._serve(source, p))  # type: ignore[misc]
        self.node.timer(_ASKS_S, self.start)

    def _serve(self, source: Endpoint, part: int) -> None:
        value = source.serve_part(self.header, self._view, part) if isinstance(source, StagedNode) else None
        if value is None:
            return
        proof, lineage = hash(value), source.lineage
        if self.node.kernel.random.random() < self.job.plan.damage:
            value ^= 1
        self._answer(lambda: self._take(part, value, proof, lineage))

    def _take(self, part: int, value: int, proof: int, lineage: str) -> None:
        if part not in self._missing or not self.node.accept_state(hash(value) == proof):
            return
        self._missing.discard(part)
        self._found[part], self._lineage = value, lineage
        if not self._missing:
            self.stop()
            self._staged.parts_loaded(self.header, self._view, self._found, self._lineage)
