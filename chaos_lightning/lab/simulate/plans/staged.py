"""Plans by chance for jobs with pipelines: deaths anywhere in a step, and parts of the state that move.

Theory of operation. What goes wrong is drawn as for other jobs (members.py); traps strike in units, too. Members are
few, so that the owners of a part often die together, and layers few, so that runs are fast. Some orders of events are
aimed at: a death while parts move, a header that is through to one member only, an only holder that freezes, members
that are too few for any plan before newcomers come.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from chaos_lightning.lab.simulate.plan import Fault, NodeSpec, Plan
from chaos_lightning.lab.simulate.plans.members import KINDS, random_plan
from chaos_lightning.lab.simulate.training import Program

TRAPS = (
    "forward", "backward", "backward", "header", "header", "contribution", "committed", "entered", "report", "pull"
)  # fmt: skip
"""Where in a step, or in a recovery, a process is struck."""
_DEATHS = ("kill-trap", "kill-trap", "kill-trap", "kill-too", "freeze-trap", "slow-link")


def staged_program(random: Random) -> Program:
    """A model of a few layers, and a job of some steps."""
    micro_batches = random.randint(2, 6)
    layers = random.randint(2, 6)
    stages = random.randint(1, min(3, layers))
    return Program(
        epochs=random.choice((1, 2)),
        length=micro_batches * random.randint(5, 12) - random.randint(0, micro_batches - 1),
        gather_every=random.choice((0, 2, 4)),
        work_s=random.choice((0.02, 0.06)),
        layers=layers,
        stages=stages,
        micro_batches=micro_batches,
        most=random.choice((0, 0, -(-layers // stages))),
    )


def staged_plan(seed: int, kinds: tuple[str, ...] = (*KINDS, *_DEATHS)) -> Plan:
    """A job of two to five members with up to four faults of these kinds."""
    random = Random(seed * 104_729 + 7)
    plan = random_plan(seed, kinds, damage=0.02)
    return replace(
        plan,
        program=staged_program(random),
        faults=tuple(_aimed(random, fault) for fault in plan.faults),
        nodes=tuple(replace(node, replay=False) for node in plan.nodes),
    )


def _aimed(random: Random, fault: Fault) -> Fault:
    """The same at another place, if it is one."""
    if fault.trap is None:
        return fault
    _, seq, skip = fault.trap
    kind = random.choice(TRAPS)
    return replace(fault, trap=(kind, seq, random.randint(0, 6) if kind in ("forward", "backward") else skip))


def _job(seed: int, count: int, *, stages: int = 2, min_nodes: int = 1, faults: tuple[Fault, ...] = ()) -> Plan:
    """A job of so many members that come at once, each on a machine of its own."""
    random = Random(seed * 7907 + 11)
    plan = random_plan(seed, ("join",), damage=0.0)
    program = Program(
        epochs=2, length=40, gather_every=random.choice((0, 2)), work_s=0.03, layers=4, stages=stages, micro_batches=4
    )
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=min_nodes, max_nodes=16),
        program=program,
        nodes=tuple(NodeSpec(name=f"n{i}", host=f"h{i}") for i in range(count)),
        starts=tuple(0.001 * (i + 1) for i in range(count)),
        faults=faults,
        slow_links=(),
        damage=0.0,
        store_s=0.002,
        limit_s=40.0,
    )


def _trap(random: Random, kind: str) -> tuple[str, int, int]:
    return (kind, random.randint(2, 8), random.randint(0, 5) if kind in ("forward", "backward") else 0)


def _slow(random: Random, count: int, lags_s: tuple[float, ...]) -> tuple[tuple[str, str, float], ...]:
    pairs = [(f"n{a}", f"n{b}") for a in range(count) for b in range(a + 1, count)]
    return tuple((one, other, random.choice(lags_s)) for one, other in pairs)


def rerun_plan(seed: int) -> Plan:
    """One member dies, or freezes, anywhere in a step; others own its layers, too."""
    random = Random(seed * 31 + 1)
    count = random.choice((4, 5, 6))
    who = f"n{random.randrange(count)}"
    kind = random.choice(("forward", "backward", "contribution", "committed", "header"))
    action = random.choice(("kill", "kill", "freeze"))
    fault = Fault(action=action, node=who, lasts=1.5, trap=_trap(random, kind))
    return _job(seed, count, min_nodes=count - 1, faults=(fault,))


def founding_plan(seed: int) -> Plan:
    """Something happens to founders before the first slot is committed."""
    random = Random(seed * 37 + 2)
    count = random.choice((3, 4, 5))
    victims = random.sample(range(count), random.choice((1, 1, 2)))
    plan = _job(seed, count, min_nodes=count - len(victims))
    faults = []
    for who in victims:
        kind = random.choice(("entered", "pull", "forward", "committed"))
        faults.append(Fault(action="kill", node=f"n{who}", trap=(kind, 0, random.randint(0, 1))))
    return replace(plan, faults=tuple(faults), damage=random.choice((0.0, 0.4)))


def leaving_plan(seed: int) -> Plan:
    """An only owner of some layers leaves, and who gets them takes its time; meanwhile others may leave or die."""
    random = Random(seed * 41 + 3)
    stages = random.choice((2, 3))
    count = stages + random.choice((0, 1, 1))
    plan = _job(seed, count, stages=stages, min_nodes=1)
    first, *others = random.sample(range(count), count)
    at = random.uniform(0.2, 0.5)
    faults = [Fault(action=random.choice(("leave", "leave", "drain")), node=f"n{first}", at=at)]
    if random.random() < 0.3:
        faults.append(Fault(action="leave", node=f"n{others[-1]}", at=at + random.uniform(0.0, 1.5)))
    elif random.random() < 0.8 and len(others) > 1:
        action, later = random.choice(("kill", "freeze", "link", "link", "link")), at + random.uniform(1.0, 2.0)
        faults.append(Fault(action=action, node=f"n{others[0]}", other=f"n{others[1]}", at=later, lasts=1.0))
    program = replace(plan.program, gather_every=random.choice((0, 1, 2)), length=120)
    return replace(
        plan, faults=tuple(faults), program=program, damage=random.choice((0.0, 0.9, 0.97, 0.99)), limit_s=150.0
    )


def announced_plan(seed: int) -> Plan:
    """A view is announced while a header of the one before is under way: members open a slot that it does not rule."""
    random = Random(seed * 43 + 4)
    count = random.choice((3, 4, 5))
    plan = _job(seed, count, min_nodes=1)
    faults = [Fault(action="leave", node=f"n{random.randrange(count)}", at=random.uniform(0.1, 0.3))]
    slow = tuple(("n0", f"n{i}", 0.15) for i in range(1, count))
    return replace(plan, faults=tuple(faults), slow_links=slow)


def torn_plan(seed: int) -> Plan:
    """A header is through to some members only when its sender dies, alone or with another; or links break, too."""
    random = Random(seed * 47 + 5)
    count = random.choice((4, 5, 6))
    plan = _job(seed, count, min_nodes=count - 2)
    trap = ("header", random.randint(2, 8), random.randint(0, count - 2))
    other = f"n{random.randrange(1, count)}"
    faults = [Fault(action=random.choice(("kill", "kill-too")), node="n0", other=other, trap=trap)]
    if random.random() < 0.4:
        left = [f"n{i}" for i in range(1, count)]
        half = random.sample(left, len(left) // 2)
        at, lasts = random.uniform(0.2, 0.5), random.choice((2.0, 6.0))
        faults = [Fault(action="split", node=",".join(half), at=at, lasts=lasts)]
    return replace(plan, faults=tuple(faults), slow_links=_slow(random, count, (0.0, 0.05)))


def early_plan(seed: int) -> Plan:
    """A member dies when tensors are under way, some of the next slot, and all are late."""
    random = Random(seed * 53 + 6)
    count = random.choice((4, 5, 6))
    plan = _job(seed, count, min_nodes=count - 1)
    who, kind = f"n{random.randrange(count)}", random.choice(("header", "committed", "forward", "backward"))
    slow = tuple(
        (f"n{a}", f"n{b}", random.choice((0.0, 0.15, 0.15))) for a in range(count) for b in range(a + 1, count)
    )
    faults = (Fault(action="kill", node=who, trap=_trap(random, kind)),)
    return replace(plan, faults=faults, slow_links=slow, program=replace(plan.program, work_s=0.02, gather_every=0))


def moved_plan(seed: int) -> Plan:
    """Parts have moved with a decision, and when the first step after it is through to some only, its sender dies with
    another."""
    random = Random(seed * 67 + 9)
    count = random.choice((5, 6, 7))
    plan = _job(seed, count, min_nodes=count - 2)
    first, other = random.sample(range(1, count), 2)
    slot = random.randint(2, 8)
    faults = (
        Fault(action="kill", node=f"n{first}", trap=("forward", slot, random.randint(0, 2))),
        Fault(action="kill-too", node="n0", other=f"n{other}", trap=("header", slot, random.randint(0, count - 3))),
    )
    return replace(plan, faults=faults)


def frozen_plan(seed: int) -> Plan:
    """The only holder of some layers freezes for long, and wakes; others hold the other layers."""
    random = Random(seed * 59 + 7)
    count = random.choice((2, 3))
    plan = _job(seed, count, stages=count, min_nodes=1)
    who = f"n{random.randrange(count)}"
    kind = random.choice(("forward", "backward", "committed", "contribution"))
    lasts = random.choice((3.0, 6.0, 9.5, 14.0))
    return replace(plan, faults=(Fault(action="freeze", node=who, lasts=lasts, trap=_trap(random, kind)),))


def crowded_plan(seed: int) -> Plan:
    """A member dies, and no plan fits those who are left until newcomers come."""
    random = Random(seed * 61 + 8)
    plan = _job(seed, 3, stages=2, min_nodes=1)
    at = random.uniform(0.2, 0.4)
    faults = (Fault(action="kill", node=f"n{random.randrange(3)}", at=at),)
    return replace(
        plan,
        faults=faults,
        nodes=(*plan.nodes, NodeSpec(name="j0", host="h9")),
        starts=(*plan.starts, at + random.uniform(-0.05, 2.0)),
        program=replace(plan.program, stages=random.choice((1, 1, 2)), least=3),
    )
