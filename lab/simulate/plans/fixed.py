"""Makes random plans for jobs whose batch has a fixed size: members' speeds, and so their shares, change while others
come, go and die.

Theory of operation. What goes wrong is that of other plans (`with_batch`): deaths, freezes, joins by pause and by
replay, leaves, cut links, schedulers and stores that fail. Such a job takes as many steps as before, or more, so that
splits change several times, and about as long. In its units are few or many, so that some members may be idle, or have
several pieces. Some orders of events are aimed at: deaths within a step, and within the step that runs again; a split
that is announced while a header is under way; a scheduler that dies where a split changes; a header that may carry a
split and is through to some members only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from chaos_lightning.planning.batch import BatchRule
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.plans import learners, links, members, schedulers
from lab.simulate.plans.members import random_plan
from lab.simulate.training import Program

_STEPS = 36
"""Least number of steps of a job."""
_PACES = (0.3, 0.5, 1.0, 1.0, 2.0, 4.0)


def _rule(random: Random, count: int) -> BatchRule:
    """Draws the batch of a job of so many members; in some jobs it has fewer units than members."""
    unit = random.choice((0, 0, 1, 2, 3))
    units = random.choice((1, 2, count, 3 * count, 8, 24))
    return BatchRule(units * max(unit, 1), unit)


def _paces(random: Random, last_s: float = 1.5) -> tuple[tuple[float, float], ...]:
    """Draws how much slower than usual a member is, from which moment on; once in a while very much."""
    moments = sorted(random.uniform(0.0, last_s) for _ in range(random.randint(1, 4)))
    return tuple((at, 20.0 if random.random() < 0.03 else random.choice(_PACES)) for at in moments)


def divided(random: Random, plan: Plan, rule: BatchRule | None = None) -> Plan:
    """Returns this plan with a batch of fixed size, drawn if none is given, and with members whose speeds change."""
    founders = [n for n, at in zip(plan.nodes, plan.starts, strict=True) if at < 0.03]
    rule = rule or _rule(random, len(founders))
    before, epochs = plan.program, random.choice((1, 2))
    steps = max(_STEPS, before.epochs * before.length // max(1, sum(n.quota for n in founders))) // epochs
    program = replace(
        before,
        epochs=epochs,
        length=rule.samples * steps - random.randrange(rule.samples),
        work_s=before.work_s * len(founders),
        batch=str(rule),
    )
    nodes = tuple(
        replace(n, fits=random.choice((2, 5, 64)), paces=_paces(random) if random.random() < 0.6 else ())
        for n in plan.nodes
    )
    return replace(plan, program=program, nodes=nodes, limit_s=2 * plan.limit_s)


def with_batch(under: Callable[[int], Plan]) -> Callable[[int], Plan]:
    """Returns a maker of plans in which the same goes wrong in a job whose batch has a fixed size."""
    return lambda seed: divided(Random(seed * 6113 + 29), under(seed))


def _aimed(random: Random, plan: Plan) -> Plan:
    """Returns this plan with its deaths and freezes of members aimed at the units of a step."""
    faults = tuple(
        replace(f, trap=("forward", f.trap[1], random.randint(0, 4))) if f.trap and random.random() < 0.5 else f
        for f in plan.faults
    )
    return replace(plan, faults=faults)


def fixed_plan(seed: int) -> Plan:
    """Returns a plan with any mixture of faults of members."""
    random = Random(seed * 6203 + 31)
    return _aimed(random, divided(random, random_plan(seed)))


def _job(seed: int, count: int, *faults: Fault, min_nodes: int = 1) -> tuple[Random, Plan]:
    """Returns a random generator, and a plan of `count` members that start together, each on a machine of its own, and
    change their speeds.
    """
    random = Random(seed * 6211 + 37)
    plan = random_plan(seed, ("join",), damage=0.0)
    plan = replace(
        plan,
        settings=replace(plan.settings, min_nodes=min_nodes, max_nodes=16),
        program=Program(epochs=1, length=60 * count, gather_every=random.choice((0, 3)), work_s=0.02),
        nodes=tuple(NodeSpec(name=f"n{i}", host=f"h{i}") for i in range(count)),
        starts=tuple(0.001 * (i + 1) for i in range(count)),
        faults=faults,
        slow_links=(),
        store_s=0.002,
    )
    plan = divided(random, plan)
    return random, replace(plan, nodes=tuple(replace(n, paces=_paces(random)) for n in plan.nodes))


def changing_plan(seed: int) -> Plan:
    """Returns a plan in which nothing fails, members' speeds change much, and a newcomer may come."""
    random, plan = _job(seed, 2 + seed % 4)
    if random.random() < 0.5:
        late = NodeSpec(name="j0", host="h9", replay=random.random() < 0.5, paces=_paces(random))
        plan = replace(plan, nodes=(*plan.nodes, late), starts=(*plan.starts, random.uniform(0.2, 0.9)))
    return replace(plan, unfailing=True)


def rerun_plan(seed: int) -> Plan:
    """Returns a plan in which one member dies or freezes anywhere in a step."""
    count = 3 + seed % 3
    random, plan = _job(seed, count, min_nodes=count - 1)
    kind = random.choice(("forward", "forward", "contribution", "committed", "header"))
    trap = (kind, random.randint(2, 30), random.randint(0, 3) if kind == "forward" else 0)
    how = random.choice(("kill", "kill", "freeze"))
    fault = Fault(action=how, node=f"n{random.randrange(count)}", lasts=1.5, trap=trap)
    return replace(plan, faults=(fault,))


def again_plan(seed: int) -> Plan:
    """Returns a plan in which a second member dies in the recovery from a first one's death, or in the step that runs
    again.
    """
    count = 4 + seed % 3
    random, plan = _job(seed, count, min_nodes=count - 2)
    one, other = random.sample(range(count), 2)
    slot = random.randint(2, 30)
    kind = random.choice(("report", "entered", "forward", "forward", "contribution"))
    faults = (
        Fault(action="kill", node=f"n{one}", trap=("forward", slot, random.randint(0, 2))),
        Fault(action=random.choice(("kill", "kill", "freeze")), node=f"n{other}", lasts=1.5, trap=(kind, slot, 1)),
    )
    return replace(plan, faults=faults)


def announced_plan(seed: int) -> Plan:
    """Returns a plan in which headers travel slowly, so that a split is often announced while an earlier header is
    under way; then a member may die or leave.
    """
    count = 3 + seed % 3
    random, plan = _job(seed, count)
    faults: tuple[Fault, ...] = ()
    how = random.choice(("", "kill", "kill", "leave", "freeze"))
    if how:
        node = f"n{random.randrange(1, count)}"
        faults = (Fault(action=how, node=node, at=random.uniform(0.5, 5.0), lasts=1.0),)
    slow = tuple(("n0", f"n{i}", 0.1) for i in range(1, count))
    nodes = tuple(replace(n, paces=_paces(random, 5.0)) for n in plan.nodes)
    return replace(plan, faults=faults, slow_links=slow, nodes=nodes)


def restarted_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler dies or stops just before or after it stores or announces a view, such as
    one with another split; a member may die at about that time.
    """
    count = 2 + seed % 4
    random, plan = _job(seed, count)
    kind = random.choice(("persist", "stored", "next", "next", "send"))
    skip = random.randint(0, 2 * count) if kind == "send" else random.randint(0, count + 1)
    how = random.choice(("sched-crash", "sched-crash", "sched-freeze"))
    faults = [Fault(action=how, at=random.uniform(0.2, 0.9), lasts=random.choice((0.05, 0.5)), trap=(kind, 0, skip))]
    if random.random() < 0.5:
        at = random.uniform(0.3, 1.2)
        faults.append(Fault(action=random.choice(("kill", "leave", "stream")), node=f"n{count - 1}", at=at))
    return replace(plan, faults=tuple(faults), orderly=random.random() < 0.5)


def torn_plan(seed: int) -> Plan:
    """Returns a plan in which the root dies when a header has arrived at some members only, which may carry a split."""
    count = 3 + seed % 3
    random, plan = _job(seed, count, min_nodes=count - 2)
    trap = ("header", random.randint(6, 40), random.randint(0, count - 2))
    other = f"n{random.randrange(1, count)}"
    fault = Fault(action=random.choice(("kill", "kill-too")), node="n0", other=other, trap=trap)
    slow = tuple((f"n{a}", f"n{b}", random.choice((0.0, 0.05))) for a in range(count) for b in range(a + 1, count))
    return replace(plan, faults=(fault,), slow_links=slow)


def straying_plan(seed: int) -> Plan:
    """Returns a plan in which a member leaves its loop, with its share of a step undone, mostly while the scheduler is
    away and decides no view without it; another member may die then.
    """
    count = 3 + seed % 3
    random, plan = _job(seed, count, min_nodes=count - 2)
    at = random.uniform(0.2, 0.9)
    faults = [Fault(action="leave", node=f"n{2 * random.randrange((count + 1) // 2)}", at=at)]  # see `Node.strays`
    if random.random() < 0.8:
        away = random.choice(("sched-crash", "sched-freeze"))
        faults.append(Fault(action=away, at=at - random.choice((0.0, 0.01, 0.05)), lasts=random.uniform(0.1, 0.5)))
    if random.random() < 0.4:
        after_s = random.choice((0.0, 0.05, 0.3))
        faults.append(Fault(action=random.choice(("kill", "freeze")), node="n1", at=at + after_s, lasts=1.0))
    return replace(plan, faults=tuple(faults))


_UNDER: tuple[Callable[[int], Plan], ...] = (
    members.half_sent_plan,
    members.late_plans("contribution"),
    members.last_holder_plan,
    members.parting_plan,
    members.busy_plan,
    learners.learner_plan,
    learners.learner_plan,
    learners.flapping_plan,
    learners.crowd_plan,
    learners.promise_plan,
    links.wired_plan,
    links.split_plan,
    schedulers.failing_plan,
    schedulers.aimed_plan,
    schedulers.waking_plan,
    schedulers.promised_plan,
    schedulers.lost_plan,
)
"""Plans whose faults also strike jobs with a batch of fixed size."""

FIXED: tuple[Callable[[int], Plan], ...] = (
    *(fixed_plan,) * 6,
    *map(with_batch, _UNDER),
    changing_plan,
    rerun_plan,
    rerun_plan,
    again_plan,
    announced_plan,
    restarted_plan,
    restarted_plan,
    torn_plan,
    straying_plan,
)
"""Plans from which a long run of the family draws."""


def fixed_family(seed: int) -> Plan:
    """Returns a plan with a batch of fixed size; the seed also chooses the kind of plan."""
    return FIXED[seed % len(FIXED)](seed)
