"""Carries out a `FaultPlan`, as used on real processes, in a simulated job and in virtual time.

Theory of operation. `testing/faults.py` says who is hurt, how and when, in steps, seconds or events. What is done
becomes a `world.Fault` (`translate`); when it is due the plan's own `Schedule` tells, which is fed with what the
simulated members commit and the scheduler notes. A phase of the training loop is a moment of a simulated slot:
`forward` early in the work of a step, `backward` while its ranges become ready, `allreduce` right after the own
contribution was sent, `optimizer` between the commit and its application. Who joins is a process of its own that says
hello then. What a simulated job does not have is refused by name before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberPhase
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.testing.faults import LINK_ACTIONS, Action, Fault, FaultPlan, LoopPhase, Schedule
from lab.simulate import plan as sim
from lab.simulate.host import SchedulerHost
from lab.simulate.node import Node, Trap
from lab.simulate.script import Script
from lab.simulate.training import Program
from lab.simulate.world import Hooks, World

_DONE_BY = {
    Action.LEAVE: "leave",
    Action.SIGTERM: "leave",  # machine/signals.py: as Ctrl+C
    Action.SIGKILL: "kill",
    Action.SIGSTOP: "freeze",
    Action.CUT: "link",
}
PHASES = frozenset({LoopPhase.FORWARD, LoopPhase.BACKWARD, LoopPhase.ALLREDUCE, LoopPhase.OPTIMIZER})
EVENTS = frozenset(
    {"welcomed", "joined", "committed", "attempt", "pull_started", "fenced", "leave"}
    | {"way_in", "observing", "caught_up"}
    | {"left", "refused", "view", "prepare", "decide", "suspect", "death"}
)
"""Events of simulated jobs that a fault may wait for."""
_PLACES = {LoopPhase.FORWARD: 0.05, LoopPhase.BACKWARD: 0.35}
"""Place of each phase in a step's work, as a part of its mean duration (the shortest takes 0.4 of it)."""
_MEMBERS = 3


def translate(fault: Fault) -> sim.Fault:
    """Returns the simulation's fault for a plan's fault, without its trigger; the victim is "" if it is given by rank
    or is yet to join.

    Raises:
        ConfigurationError: Simulation cannot do this; the message names the fault and what there is instead.
    """

    def cannot(text: str) -> ConfigurationError:
        return ConfigurationError(f"fault '{fault}' cannot be simulated: {text}")

    if fault.action is Action.STALL:
        raise cannot("links of simulated jobs break, but swallow nothing; cut it instead")
    if fault.action in (Action.SIGSTOP, Action.CUT) and not fault.seconds:
        raise cannot(f"a simulated job must be able to end; say for how long it is to last ({fault} for 1 s)")
    if fault.phase is not None and fault.phase not in PHASES:
        raise cannot(f"simulated training has no {fault.phase}; expected one of {sorted(PHASES)}")
    if fault.event and fault.event not in EVENTS:
        raise cannot(f"it has no event {fault.event!r}; expected one of {sorted(EVENTS)}")
    if fault.action is Action.JOIN:
        return sim.Fault(action="join", node=fault.node)
    return sim.Fault(action=_DONE_BY[fault.action], node=fault.node, other=fault.peer, lasts=fault.seconds)


def founders(plan: FaultPlan) -> tuple[str, ...]:
    """Returns the names of the founders: nodes that the plan names before they join, and enough others that one
    survives.
    """
    named: list[str] = []
    joining: set[str] = set()
    hurt: set[str] = set()
    ranks = 0
    for fault in plan:
        if fault.action is Action.JOIN:
            joining |= {fault.node} - set(named)
            continue
        for name in filter(None, (fault.node, fault.peer)):
            if name not in joining and name not in named:
                named.append(name)
        if fault.rank is not None:
            ranks = max(ranks, fault.rank + 1)
        if fault.action not in LINK_ACTIONS and fault.action is not Action.SIGSTOP:
            hurt.add(fault.victim)
    others = max(_MEMBERS, ranks, len(hurt) + 1) - len(named)
    spare = (f"n{i}" for i in range(len(named) + len(joining) + max(0, others) + 1))
    free = [name for name in spare if name not in named and name not in joining]
    return (*free[: max(0, others)], *named)


def job(plan: FaultPlan, seed: int = 0) -> sim.Plan:
    """Returns a simulated job in which this fault plan can be carried out: with its founders, and steps beyond its last
    trigger.

    Raises:
        ConfigurationError: A fault cannot be simulated.
    """
    for fault in plan:
        translate(fault)
    names = founders(plan)
    steps = max((f.step or 0 for f in plan), default=0) + 20
    seconds = max((f.after_s or 0.0 for f in plan), default=0.0) + sum(f.seconds for f in plan)
    program = Program()
    steps += int(seconds / program.work_s) + 20 * sum(bool(f.event) for f in plan)
    return sim.Plan(
        seed=seed,
        settings=Script().settings,
        program=Program(epochs=2, length=(steps * (len(names) + len(plan.joiners)) + 1) // 2),
        nodes=tuple(sim.NodeSpec(name=name) for name in names),
        starts=tuple(0.001 * (i + 1) for i in range(len(names))),
        limit_s=90.0 + 10.0 * seconds + 0.2 * steps,
    )


class PlannedNode(Node):
    """Process that reports to the simulated world what it does and which phase of the training loop it is in, to
    trigger faults.
    """

    world: PlannedWorld

    def welcomed(self, member_id: str) -> None:
        super().welcomed(member_id)
        self.world.saw("welcomed", self.name)

    def _start(self, header: Header) -> None:
        super()._start(header)
        self.world.saw("joined", self.name)

    def _begin(self) -> None:
        super()._begin()
        if not self.alive or self.next_kind() is not Kind.STEP:
            return
        life, step = self.life, self.header.step
        for phase, part in _PLACES.items():
            delay = part * self.world.program.work_s * self.spec.pace
            self.timer(delay, lambda p=phase: self._passes(p, step, life))  # type: ignore[misc]
        for fault in self.world.due_inside(self, LoopPhase.OPTIMIZER, step):
            self.traps.append(Trap("committed", 0, 0, lambda f=fault: self.world.carry_out(f, self)))  # type: ignore[misc]

    def _passes(self, phase: LoopPhase, step: int, life: int) -> None:
        if life == self.life and self.header.step == step:
            for fault in self.world.due_inside(self, phase, step):
                self.world.carry_out(fault, self)

    def _step(self, uid: int, epoch: int, spans: tuple[tuple[int, int], ...], life: int) -> None:
        super()._step(uid, epoch, spans, life)
        if self.alive:
            self._passes(LoopPhase.ALLREDUCE, self.header.step, life)

    def _apply(self, effect: fx.MemberEffect, phase: MemberPhase) -> None:
        super()._apply(effect, phase)
        match effect:
            case fx.Committed(header):
                self.world.stepped(header.step)
                self.world.saw("committed", self.name)
            case fx.Observe():
                self.world.saw("observing", self.name)
            case fx.PullState():
                self.world.saw("pull_started", self.name)
            case fx.Note(name, _):
                self.world.saw(name, self.name)
            case _:
                pass


@dataclass(slots=True)
class _Course:
    """Progress of a FaultPlan during a run."""

    schedule: Schedule
    step: int = 0
    missed: list[str] = field(default_factory=list)


class PlannedWorld(World):
    """Simulated world that carries out a FaultPlan."""

    def __init__(self, plan: sim.Plan, faults: FaultPlan) -> None:
        self.course = _Course(Schedule(faults))
        hooks = Hooks()
        hooks.node_class = PlannedNode
        super().__init__(plan, hooks)
        for time in sorted({0.0, *(f.after_s for f in faults if f.after_s is not None)}):
            self.kernel.at(time, self._look)

    def heed(self, host: SchedulerHost, note: fx.Note) -> None:
        super().heed(host, note)
        self.saw(note.name, str(dict(note.fields).get("member", "")).rpartition("~")[0])

    def saw(self, event: str, node: str) -> None:
        """Notes an event that may trigger a fault."""
        self.course.schedule.saw(event, node)
        self.kernel.after(0.0, self._look)

    def stepped(self, step: int) -> None:
        """Notes how many optimizer steps are committed."""
        self.course.step = max(self.course.step, step)

    def _look(self) -> None:
        for fault in self.course.schedule.due(step=self.course.step, elapsed_s=self.kernel.now):
            self.carry_out(fault, self._victim(fault))

    def _rank(self, rank: int) -> Node | None:
        """Returns the node with this rank in the latest view."""
        members = self.store.views[-1].members if self.store.views else ()
        process = self.fabric.nodes.get(members[rank].id) if rank < len(members) else None
        return next((n for n in self.nodes.values() if n is process), None)

    def _victim(self, fault: Fault) -> Node | None:
        return self._rank(fault.rank) if fault.rank is not None else self.nodes.get(fault.node)

    def due_inside(self, node: Node, phase: LoopPhase, step: int) -> list[Fault]:
        """Returns the faults to carry out at this node, in this phase of its training loop."""
        view = node.machine.view
        ids = view.ids() if view is not None else ()
        ranks = {f"rank {ids.index(node.machine.member_id)}"} if node.machine.member_id in ids else set()
        inside = [f for f in self.course.schedule.open if f.phase is phase]
        if not inside:
            return []
        return self.course.schedule.due(step=step, phase=phase, victims={node.name, *ranks})

    def carry_out(self, fault: Fault, victim: Node | None) -> None:
        """Carries out a fault immediately."""
        told = translate(fault)
        if told.action == "join":
            self._join(fault)
        elif victim is None or not victim.alive:
            self._miss(fault, "it is not there")
        else:
            self.say(f"as planned: {fault}")
            if told.action == "link":
                self.fabric.block(victim.name, told.other, told.lasts)
            self._hit(told, victim)

    def _miss(self, fault: Fault, why: str) -> None:
        self.course.missed.append(f"{fault}: {why}")
        self.say(f"not done: {fault}: {why}")

    def _join(self, fault: Fault) -> None:
        old = self.nodes.get(fault.node)
        if old is not None and old.alive:
            self._miss(fault, "it is there already")
            return
        number = len(self.nodes) + 1
        if old is not None:
            self.nodes[f"{fault.node} (number {old.number})"] = old
        self.say(f"as planned: {fault}")
        node = self.nodes[fault.node] = PlannedNode(self, sim.NodeSpec(name=fault.node, replay=True), number)
        node.connect()

    @property
    def undone(self) -> list[str]:
        """Faults of the plan that were not carried out, with the reason."""
        return [*self.course.missed, *(f"{f}: its time never came" for f in self.course.schedule.open)]
