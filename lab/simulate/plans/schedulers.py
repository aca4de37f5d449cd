"""Makes random plans for jobs whose schedulers and stores fail.

Theory of operation. A short job with deaths, joins and leaves, so that the scheduler has something to decide, on which
schedulers die or stop between any two of their effects, lose their store or their lease, and are followed by the same
one on its file or by another candidate that was elected; control streams break meanwhile, and messages come twice.
`failing_plan` mixes all of that. The others aim: at what happens right after a member's death or while a newcomer is
let in (`aimed_plan`), at a leader that wakes up (`waking_plan`), or is cut off from its store (`lingering_plan`), and
goes on in the belief that it leads, at deaths while nobody leads (`orphaned_plan`), at a chain that is lost and rebuilt
(`lost_plan`), and at a store that is an older copy (`restored_plan`) or another job's (`leftover_plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.plans.members import forgetful_plan, random_plan

MEMBERS = ("kill", "kill-trap", "kill-too", "freeze", "leave", "join", "join", "stream", "lag", "slow-link", "drain")
EFFECTS = (
    "any", "any", "persist", "stored", "send", "prepare", "decide", "decide", "next", "fence", "welcome", "released"
)  # fmt: skip
LASTING_S = (0.05, 0.25, 0.5, 1.0, 2.5, 4.0)


def _trap(random: Random) -> tuple[str, int, int]:
    kind = random.choice(EFFECTS)
    return (kind, 0, random.randint(0, 20) if kind == "any" else random.randint(0, 3))


def scheduler_faults(random: Random, count: int, first: float = 0.02, last: float = 1.0) -> tuple[Fault, ...]:
    """Draws `count` faults of schedulers and their store."""
    faults = []
    for _ in range(count):
        at, lasts = random.uniform(first, last), random.choice(LASTING_S)
        match random.choice(("crash", "crash", "crash", "freeze", "freeze", "cut", "down", "lost", "slow", "streams")):
            case "crash":
                trap = _trap(random) if random.random() < 0.8 else None
                faults.append(Fault(action="sched-crash", at=at, lasts=min(lasts, 1.0), trap=trap))
            case "freeze":
                trap = _trap(random) if random.random() < 0.8 else None
                faults.append(Fault(action="sched-freeze", at=at, lasts=lasts, trap=trap))
            case "cut":
                faults.append(Fault(action="sched-cut", at=at, lasts=lasts))
            case "down":
                faults.append(Fault(action="store-down", at=at, lasts=random.choice((0.1, 0.6, 2.0, 5.5))))
            case "lost":
                faults.append(Fault(action="store-lost", at=at, lasts=random.choice((0.1, 0.6, 2.0))))
            case "slow":
                faults.append(Fault(action="store-slow", at=at, lasts=random.choice((0.6, 2.0))))
            case _:
                faults.append(Fault(action="streams", at=at))
    return tuple(faults)


def _on(random: Random, plan: Plan, *more: Fault) -> Plan:
    """Returns this plan with several candidates for the scheduler's role, and with more faults."""
    hosts = ("h0", "h1", "h2")
    return replace(
        plan,
        nodes=tuple(replace(n, host=random.choice(hosts)) for n in plan.nodes),
        faults=(*(f for f in plan.faults if not f.action.startswith("sched")), *more),
        candidates=random.choice((1, 2, 3)),
        orderly=random.random() < 0.6,
        doubled=random.choice((0.0, 0.0, 0.1)),
        store_s=random.choice((0.002, 0.02, 0.1)),
        program=replace(plan.program, epochs=1, length=random.randint(60, 200), work_s=random.choice((0.02, 0.04))),
    )


def failing_plan(seed: int) -> Plan:
    """Returns a plan with any mixture of faults of members, schedulers and stores."""
    random = Random(seed * 41 + 17)
    plan = random_plan(seed, MEMBERS, damage=0.02)
    return _on(random, plan, *scheduler_faults(random, random.randint(1, 4)))


def aimed_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler fails between the effects by which it responds to a death, a join or a
    leave.
    """
    random = Random(seed * 43 + 19)
    plan = random_plan(seed, ("kill", "kill-too", "freeze", "leave", "join", "join"), damage=0.0)
    moments = [f.at for f in plan.faults] + [s for s in plan.starts if s > 0.03] or [0.1]
    how = random.choice(("sched-crash", "sched-crash", "sched-freeze"))
    fault = Fault(action=how, at=random.choice(moments), lasts=random.choice((0.05, 0.5, 2.5)), trap=_trap(random))
    more = scheduler_faults(random, random.randint(0, 1), fault.at, fault.at + 0.8)
    return _on(random, plan, fault, *more)


def waking_plan(seed: int) -> Plan:
    """Returns a plan in which a leading scheduler freezes between two effects and wakes after another was elected,
    while some members still talk to it.
    """
    random = Random(seed * 47 + 23)
    plan = random_plan(seed, ("kill", "freeze", "join", "join", "leave", "stream", "stream"), damage=0.0)
    at = random.uniform(0.05, 0.7)
    lasts = random.choice((0.32, 0.4, 0.5, 0.6, 1.0, 2.5))
    trap = _trap(random) if random.random() < 0.7 else None
    streams = tuple(
        Fault(action="stream", node=n.name, at=at + random.uniform(0.3, 1.2), lasts=0.0)
        for n in plan.nodes
        if random.random() < 0.5
    )
    wakes = at + lasts + random.uniform(-0.05, 0.2)
    kill = [Fault(action="kill", node="n0", at=wakes)] if random.random() < 0.5 else []
    plan = _on(random, plan, Fault(action="sched-freeze", at=at, lasts=lasts, trap=trap), *streams, *kill)
    return replace(plan, candidates=random.choice((2, 3)), settings=replace(plan.settings, min_nodes=1))


def orphaned_plan(seed: int) -> Plan:
    """Returns a plan with a time without scheduler or store, in which members die, join and leave, before the job goes
    on.
    """
    random = Random(seed * 53 + 29)
    plan = random_plan(seed, ("kill", "kill-trap", "join", "leave", "freeze"), damage=0.0)
    at = min([f.at for f in plan.faults if f.trap is None] or [0.3]) - random.uniform(0.0, 0.05)
    how = random.choice(("sched-crash", "store-down", "sched-cut", "store-slow"))
    fault = Fault(action=how, at=max(0.03, at), lasts=random.choice((0.3, 1.0, 3.0)))
    again = scheduler_faults(random, random.randint(0, 2), 0.3, 2.0)
    return _on(random, plan, fault, *again)


def overlapping_plan(seed: int) -> Plan:
    """Returns a plan in which a frozen scheduler wakes just after another was elected, and a member dies at that
    moment.
    """
    random = Random(seed * 73 + 47)
    plan = random_plan(seed, ("join",), damage=0.0)
    at, lasts = random.uniform(0.1, 0.4), random.choice((0.32, 0.4, 0.5))
    kill = Fault(action="kill", node="n0", at=at + lasts + random.uniform(-0.05, 0.1))
    plan = _on(random, plan, Fault(action="sched-freeze", at=at, lasts=lasts), kill)
    program = replace(plan.program, length=40 * len(plan.nodes), work_s=0.04)
    settings = replace(plan.settings, min_nodes=1)
    return replace(plan, candidates=2, program=program, settings=settings, store_s=0.01)


def lingering_plan(seed: int) -> Plan:
    """Returns a plan in which a scheduler cannot reach its store, so that another is elected; members find now the one,
    now the other.
    """
    random = Random(seed * 59 + 31)
    plan = random_plan(seed, ("join", "join"), damage=0.0)
    at, count = random.uniform(0.05, 0.4), random.choice((1, 2))
    nodes = tuple(n for n in plan.nodes if n.name.startswith("j") or int(n.name[1:]) < count)
    nodes = (*nodes, NodeSpec(name="j9"))
    starts = tuple(0.001 if n.name.startswith("n") else at + random.uniform(1.0, 2.6) for n in nodes)
    moments = [at + 2.25 + 0.5 * i for i in range(random.randint(2, 6))]
    streams = tuple(
        Fault(action="stream", node=n.name, at=t + random.uniform(0.0, 0.2)) for t in moments for n in nodes
    )
    cut = Fault(action="sched-cut", at=at, lasts=random.choice((4.5, 6.0)))
    plan = _on(random, replace(plan, nodes=nodes, starts=starts), cut, *streams)
    return replace(
        plan,
        candidates=random.choice((2, 3)),
        program=replace(plan.program, length=50 * len(nodes), work_s=0.08, gather_every=0),
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
    )


def promised_plan(seed: int) -> Plan:
    """Returns a plan in which a link breaks and comes back, and the scheduler dies while all members wait for the view
    that they promised.
    """
    random = Random(seed * 71 + 43)
    plan = random_plan(seed, ("join",), damage=0.0)
    at = random.uniform(0.15, 0.6)
    names = [n.name for n in plan.nodes if n.name.startswith("n")]
    link = Fault(action="link", node=names[0], other=names[1], at=at)
    trap = random.choice(
        (("decide", 0, 0), ("send", 0, len(names)), ("prepare", 0, 1), ("stored", 0, 1), ("any", 0, 8))
    )
    crash = Fault(action="sched-crash", at=at, lasts=random.choice((0.05, 0.5)), trap=trap)
    return _on(random, plan, link, crash)


def forked_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler dies while its write of a view that excludes a member is under way or just
    done.

    Then the excluded one wakes, and the others, who were in that view, are frozen.
    """
    random = Random(seed * 67 + 41)
    plan = forgetful_plan(seed)
    first = min(f.at for f in plan.faults)
    down = Fault(action="store-down", at=first + random.uniform(0.3, 1.0), lasts=random.choice((0.5, 1.5)))
    return replace(plan, faults=(*plan.faults, *((down,) if random.random() < 0.3 else ())))


def lost_plan(seed: int) -> Plan:
    """Returns a plan in which the chain is lost with the scheduler's machine, some members die, freeze or leave, and
    the chain is rebuilt.

    Nobody dies whom the others cannot spare: more than half of the members of the last view stay, with the state. No
    newcomer comes while nobody rebuilds.
    """
    random = Random(seed * 79 + 53)
    plan = random_plan(seed, ("join", "two-joins"), damage=0.0)
    founders = [n for n in plan.nodes if n.name.startswith("n")]
    at, gap = random.uniform(0.4, 0.8), random.choice((0.05, 0.5, 1.5))
    again = at + gap + random.uniform(0.05, 2.0)
    starts = tuple(s if s < 0.03 else random.choice((at / 2, again + random.random())) for s in plan.starts)
    faults = [Fault(action="chain-lost", at=at, lasts=gap), Fault(action="rebuild", at=again)]
    for node in founders[: (len(founders) - 1) // 2]:
        when = random.uniform(at - 0.05, again + 0.3)
        how = random.choice(("kill-spared", "kill-spared", "freeze", "stream"))
        faults.append(Fault(action=how, node=node.name, at=when, lasts=0.4))
    if random.random() < 0.3:
        when = random.uniform(at - 0.05, again + 0.3)
        faults.append(Fault(action="leave", node=founders[-1].name, at=when))
    if random.random() < 0.3:
        faults.append(Fault(action="sched-crash", at=again + random.uniform(0.0, 1.0), lasts=0.2))
        faults.append(Fault(action="rebuild", at=again + 1.5))
    plan = _on(random, replace(plan, starts=starts), *faults)
    settings = replace(plan.settings, min_nodes=1, max_nodes=16, reconnect_grace_s=random.choice((0.5, 2.0)))
    program = replace(plan.program, length=60 * len(plan.nodes), work_s=0.05)
    candidates = random.choice((1, 1, 2))
    return replace(plan, candidates=candidates, settings=settings, program=program, store_s=0.005)


def _another_store(seed: int, kind: str) -> tuple[Random, Plan, float]:
    """Returns a plan of a few founders and newcomers whose store is copied early and later replaced, with the random
    generator and that later time (s).
    """
    random = Random(seed * 83 + 59)
    plan = random_plan(seed, ("join", "two-joins"), damage=0.0)
    founders = [n for n in plan.nodes if n.name.startswith("n")][: random.choice((1, 2, 2, 3))]
    later = [NodeSpec(name=f"j{i}") for i in range(5, 5 + random.choice((1, 2, 2)))]
    nodes = (*founders, *later)
    starts = tuple(0.001 if n in founders else random.uniform(0.45, 0.8) for n in nodes)
    at = random.uniform(2.2, 2.8)
    faults = [
        Fault(action="backup", at=random.choice((0.4, 0.4, random.uniform(0.05, at)))),
        Fault(action=kind, at=at, lasts=random.choice((0.02, 0.3))),
    ]
    plan = _on(random, replace(plan, nodes=nodes, starts=starts, unlinked=()), *faults)
    rules = replace(plan.settings, min_nodes=1, max_nodes=16, reconnect_grace_s=random.choice((0.5, 2.0)))
    program = replace(plan.program, length=100 * len(nodes), work_s=0.05)
    plan = replace(plan, settings=rules, program=program, store_s=0.005, faults=tuple(faults), doubled=0.0)
    return random, plan, at


def exchanged_plan(seed: int) -> Plan:
    """Returns a plan as `restored_plan` does, except that the leading scheduler survives when the older copy replaces
    its store.
    """
    return restored_plan(seed, "exchanged")


def restored_plan(seed: int, kind: str = "restored") -> Plan:
    """Returns a plan in which the scheduler restarts on an older copy of its store; members excluded since then may
    wake up, others may be dead.

    In the end the operator brings the job's own store, or has the rest of the older one rebuilt.
    """
    random, plan, at = _another_store(seed, kind)
    founders = [n.name for n in plan.nodes if n.name.startswith("n")]
    faults = list(plan.faults)
    frozen = random.uniform(1.0, 1.4)
    if random.random() < 0.8:
        faults.append(
            Fault(action="freeze", node=founders[0], at=frozen, lasts=at + random.uniform(-0.1, 0.4) - frozen)
        )
    how = random.choice(("brought-back", "brought-back", "rebuild"))
    again = at + random.uniform(0.4, 3.0)
    if len(founders) > 1 and random.random() < 0.6:
        kill = "kill-spared" if how == "rebuild" else "kill"
        faults.append(Fault(action=kill, node=founders[1], at=random.uniform(at - 0.1, at + 0.1)))
    if random.random() < 0.3:
        faults.append(Fault(action="sched-crash", at=at + random.uniform(0.3, 1.0), lasts=0.1))
    faults.append(Fault(action=how, at=again, lasts=0.05))
    return replace(plan, faults=tuple(faults), nodes=tuple(replace(n, host="h0") for n in plan.nodes))


def leftover_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler starts on the store of an earlier job of the same name, with the same ids
    and numbers.
    """
    random, plan, at = _another_store(seed, "leftover")
    faults = list(plan.faults)
    if random.random() < 0.4:
        faults.append(
            Fault(action="leave", node=random.choice([n.name for n in plan.nodes]), at=random.uniform(1.0, 3.5))
        )
    if random.random() < 0.4:
        faults.append(Fault(action="freeze", node=plan.nodes[-1].name, at=at - 0.2, lasts=random.choice((0.4, 1.0))))
    faults.append(Fault(action="brought-back", at=at + random.uniform(0.4, 4.0), lasts=0.05))
    return replace(plan, faults=tuple(faults))


def strange_plan(seed: int) -> Plan:
    """Returns a plan in which the control streams of all members break at once while a newcomer is there that has no
    link to them.

    With no patience for silence, which would hide what the newcomer says.
    """
    random = Random(seed * 61 + 37)
    plan = random_plan(seed, ("join",), damage=0.0)
    at = random.uniform(0.2, 0.6)
    founders = [n.name for n in plan.nodes if n.name.startswith("n")]
    streams = tuple(Fault(action="stream", node=n, at=at + random.uniform(0.0, 0.03)) for n in founders)
    plan = _on(random, plan, *streams)
    starts = tuple(
        s if n.name in founders else at - random.uniform(0.005, 0.1)
        for n, s in zip(plan.nodes, plan.starts, strict=True)
    )
    rules = replace(plan.settings, min_nodes=1, max_nodes=len(founders), silence_timeout_s=0.03)
    return replace(plan, starts=starts, settings=rules)


FAILING: tuple[Callable[[int], Plan], ...] = (
    failing_plan,
    failing_plan,
    aimed_plan,
    aimed_plan,
    waking_plan,
    overlapping_plan,
    lingering_plan,
    strange_plan,
    promised_plan,
    forked_plan,
    orphaned_plan,
    lost_plan,
    restored_plan,
    exchanged_plan,
    leftover_plan,
)
"""Plans from which a long run draws (families.any_plan)."""
