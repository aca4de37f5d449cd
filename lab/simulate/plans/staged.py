"""Makes random plans for jobs with pipelines: deaths anywhere in a step, and parts of the state that move between
members.

Theory of operation. What goes wrong is drawn as for other jobs (members.py); traps strike in units, too. Members are
few, so that the owners of a part often die together, and layers few, so that runs are fast. Some orders of events are
aimed at: a death while parts move, a header that is through to one member only, an only holder that freezes, members
that are too few for any plan before newcomers come, members in two parts of which none holds the whole state, parts
that drift, all that leave and come back. Members and schedulers also die before any effect of theirs at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.plans.members import KINDS, random_plan
from lab.simulate.training import Program

TRAPS = (
    "forward", "backward", "backward", "header", "header", "contribution", "committed", "entered", "report", "pull",
    "any", "any",
)  # fmt: skip
"""Kinds of effects, in a step or in a recovery, at which a process is struck."""
_DEATHS = ("kill-trap", "kill-trap", "kill-trap", "kill-too", "freeze-trap", "slow-link")


def staged_program(random: Random) -> Program:
    """Returns a program with a model of a few layers and a few training steps."""
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
        shared=random.random() < 0.5,
        evaluates=random.random() < 0.5,
    )


def staged_plan(seed: int, kinds: tuple[str, ...] = (*KINDS, *_DEATHS)) -> Plan:
    """Returns a plan of two to five members with up to four faults of these kinds."""
    random = Random(seed * 104_729 + 7)
    plan = random_plan(seed, kinds, damage=0.02)
    return replace(
        plan,
        program=staged_program(random),
        faults=tuple(_aimed(random, fault) for fault in plan.faults),
        nodes=tuple(replace(node, replay=False) for node in plan.nodes),
        drift=random.choice((0.0, 0.0, 0.05)),
    )


def _aimed(random: Random, fault: Fault) -> Fault:
    """Returns the same fault aimed at another effect, if it is aimed at one; a scheduler's fault may hit any of its
    effects.
    """
    if fault.action in ("sched-crash", "sched-freeze") and random.random() < 0.8:
        return replace(fault, trap=("any", 0, random.randint(0, 20)))
    if fault.trap is None:
        return fault
    _, seq, skip = fault.trap
    kind = random.choice(TRAPS)
    skips = {"forward": random.randint(0, 6), "backward": random.randint(0, 6), "any": random.randint(0, 40)}
    return replace(fault, trap=(kind, seq, skips.get(kind, skip)))


def _job(seed: int, count: int, *, stages: int = 2, min_nodes: int = 1, faults: tuple[Fault, ...] = ()) -> Plan:
    """Returns a plan of `count` members that start together, each on a machine of its own."""
    random = Random(seed * 7907 + 11)
    plan = random_plan(seed, ("join",), damage=0.0)
    program = Program(
        epochs=2, length=40, gather_every=random.choice((0, 2)), work_s=0.03, layers=4, stages=stages, micro_batches=4,
        shared=random.random() < 0.5, evaluates=random.random() < 0.5,
    )  # fmt: skip
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
        limit_s=28.0,
    )


def _trap(random: Random, kind: str) -> tuple[str, int, int]:
    return (kind, random.randint(2, 8), random.randint(0, 5) if kind in ("forward", "backward") else 0)


def _slow(random: Random, count: int, lags_s: tuple[float, ...]) -> tuple[tuple[str, str, float], ...]:
    pairs = [(f"n{a}", f"n{b}") for a in range(count) for b in range(a + 1, count)]
    return tuple((one, other, random.choice(lags_s)) for one, other in pairs)


def rerun_plan(seed: int) -> Plan:
    """Returns a plan in which one member dies or freezes anywhere in a step, while others own its layers, too."""
    random = Random(seed * 31 + 1)
    count = random.choice((4, 5, 6))
    who = f"n{random.randrange(count)}"
    kind = random.choice(("forward", "backward", "contribution", "committed", "header"))
    action = random.choice(("kill", "kill", "freeze"))
    fault = Fault(action=action, node=who, lasts=1.5, trap=_trap(random, kind))
    return _job(seed, count, min_nodes=count - 1, faults=(fault,))


def founding_plan(seed: int) -> Plan:
    """Returns a plan with faults of founders before the first slot is committed."""
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
    """Returns a plan in which the only owner of some layers leaves, their new owners are slow, and others may leave or
    die.
    """
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


def let_go_plan(seed: int) -> Plan:
    """Returns a plan in which the only owner of some layers leaves, their new owner is slow, and a link breaks once or
    twice.
    """
    random = Random(seed * 83 + 13)
    plan = _job(seed, 3, stages=3, min_nodes=2)
    going, one, other = (f"n{i}" for i in random.sample(range(3), 3))
    at = random.uniform(1.0, 1.5)
    later = [at + random.uniform(1.05, 1.4), at + random.uniform(1.4, 2.0)]
    faults = (
        Fault(action="leave", node=going, at=at),
        *(Fault(action="link", node=one, other=other, at=moment) for moment in later),
    )
    return replace(plan, faults=faults, program=replace(plan.program, length=160), damage=0.92, limit_s=150.0)


def announced_plan(seed: int) -> Plan:
    """Returns a plan in which a view is announced while an earlier header is still under way, so that members open a
    slot in the old view.
    """
    random = Random(seed * 43 + 4)
    count = random.choice((3, 4, 5))
    plan = _job(seed, count, min_nodes=1)
    faults = [Fault(action="leave", node=f"n{random.randrange(count)}", at=random.uniform(0.1, 0.3))]
    slow = tuple(("n0", f"n{i}", 0.15) for i in range(1, count))
    return replace(plan, faults=tuple(faults), slow_links=slow)


def torn_plan(seed: int) -> Plan:
    """Returns a plan in which a header has arrived at only some members when its sender dies; another member may die,
    or links break.
    """
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
    """Returns a plan in which a member dies while delayed tensors are under way, some of them for the next slot."""
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
    """Returns a plan in which a recovery has moved parts, and then two members die when the next step's header has
    arrived at only some.
    """
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
    """Returns a plan in which the only member with some layers freezes for long and wakes; other members hold the other
    layers.
    """
    random = Random(seed * 59 + 7)
    count = random.choice((2, 3))
    plan = _job(seed, count, stages=count, min_nodes=1)
    who = f"n{random.randrange(count)}"
    kind = random.choice(("forward", "backward", "committed", "contribution"))
    lasts = random.choice((3.0, 6.0, 9.5, 14.0))
    fault = Fault(action="freeze", node=who, lasts=lasts, trap=_trap(random, kind))
    program = replace(plan.program, on_lost_parts=random.choice(("wait", "end")))
    return replace(plan, faults=(fault,), program=program)


def crowded_plan(seed: int) -> Plan:
    """Returns a plan in which a member dies, and no pipelines fit the remaining members until newcomers come."""
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


def sides_plan(seed: int) -> Plan:
    """Returns a plan in which broken links divide the members into two groups for a while; one group may hold all parts
    of the state.
    """
    random = Random(seed * 71 + 10)
    count = random.choice((3, 4, 5))
    plan = _job(seed, count, min_nodes=1)
    some = random.sample(range(count), random.randint(1, count // 2))
    at, lasts = random.uniform(0.15, 0.5), random.choice((3.0, 6.0, 9.0))
    fault = Fault(action="split", node=",".join(f"n{i}" for i in some), at=at, lasts=lasts)
    return replace(plan, faults=(fault,), limit_s=60.0)


def drifting_plan(seed: int) -> Plan:
    """Returns a plan in which some members' copies of parts drift; one member may die, too."""
    random = Random(seed * 73 + 11)
    plan = rerun_plan(seed)
    return replace(plan, drift=random.choice((0.05, 0.3)), faults=plan.faults if random.random() < 0.7 else ())


def parting_plan(seed: int) -> Plan:
    """Returns a plan in which all members leave at about the same time and others are started in their places; one or
    two may die.
    """
    random = Random(seed * 79 + 12)
    count = random.choice((2, 3, 4))
    plan = _job(seed, count, stages=random.randint(1, min(count, 3)), min_nodes=1)
    at = random.uniform(0.2, 0.6)
    names = [f"n{i}" for i in range(count)]
    faults = [Fault(action="leave", node=n, at=at + random.choice((0.0, random.uniform(0.0, 0.9)))) for n in names]
    dying = random.sample(names, random.choice((0, 0, 1, 2)))
    faults += [Fault(action="kill", node=n, trap=(k, 0, 0)) for n, k in zip(dying, ("kept", "keeps"), strict=False)]
    places = tuple(NodeSpec(name=f"r{i}", host=f"h{i}", after=f"n{i}") for i in range(count))
    return replace(
        plan,
        nodes=(*plan.nodes, *places),
        starts=(*plan.starts, *(0.01 for _ in places)),
        faults=tuple(faults),
        program=replace(plan.program, length=80),
        limit_s=90.0,
    )


def with_program(plan: Callable[[int], Plan], **fields: Any) -> Callable[[int], Plan]:
    """Returns a maker of the same plans with these fields of the program changed."""

    def changed(seed: int) -> Plan:
        made = plan(seed)
        return replace(made, program=replace(made.program, **fields))

    return changed


rounds_plan = with_program(rerun_plan, gather_every=1, evaluates=True)
tied_plan = with_program(rerun_plan, shared=True)

STAGED: tuple[Callable[[int], Plan], ...] = (
    *(staged_plan,) * 12,
    rerun_plan,
    rounds_plan,
    founding_plan,
    leaving_plan,
    let_go_plan,
    announced_plan,
    torn_plan,
    early_plan,
    moved_plan,
    frozen_plan,
    crowded_plan,
    sides_plan,
    drifting_plan,
    parting_plan,
)
"""Plans from which a long run of the family draws."""


def staged_family(seed: int) -> Plan:
    """Returns a plan with pipelines; the seed also chooses the kind of plan."""
    return STAGED[seed % len(STAGED)](seed)
