"""Makes random plans for jobs whose members die, freeze, leave and join.

Theory of operation. `random_plan` mixes everything. Some orders of events are too rare to wait for: a header that is
through to one member only, bytes that outlive their sender, a scheduler that dies inside a write. For each of these a
plan aims there and leaves the rest to chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random

from chaos_lightning.membership.spreading import Spread
from chaos_lightning.protocol.types import Settings
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.training import Program

TRAPS = ("header", "header", "header", "contribution", "committed", "entered", "report")
KINDS = (
    "kill", "kill-trap", "kill-too", "freeze", "freeze-trap", "leave", "join", "link", "stream", "lag", "sched-freeze",
    "sched-crash", "drain", "two-joins", "slow-link",
)  # fmt: skip


def _strikes(
    random: Random, kinds: tuple[str, ...], names: list[str], starts: list[float]
) -> tuple[list[Fault], list[tuple[str, str, float]], int, int]:
    """Chooses up to four faults of these kinds at random; returns the faults, the slow links, the number of newcomers,
    and the number of members that go.
    """
    count = len(names)
    faults: list[Fault] = []
    slow: list[tuple[str, str, float]] = []
    joins = 0
    expendable = random.sample(names, random.randint(1, count - 1))
    gone: set[str] = set()
    cuts: dict[str, float] = {}
    for _ in range(random.randint(1, 4)):
        kind = random.choice(kinds)
        at = random.uniform(0.01, 0.9)
        node = random.choice(expendable)
        trap = (random.choice(TRAPS), random.randint(0, 10), random.randint(0, count - 1))
        if kind.endswith("trap") and trap[0] == "header" and random.random() < 0.7:
            node = min(expendable, key=lambda n: starts[names.index(n)])  # the likeliest commit root
        if kind in ("kill", "kill-trap") and node not in gone:
            gone.add(node)
            faults.append(Fault(action="kill", node=node, at=at, trap=trap if kind == "kill-trap" else None))
        elif kind == "kill-too" and len(expendable) > 1 and not gone:
            other = random.choice([n for n in expendable if n != node])
            gone |= {node, other}
            how = trap if random.random() < 0.7 else None
            faults.append(Fault(action="kill-too", node=node, other=other, at=at, trap=how))
        elif kind == "slow-link":
            one, two = random.sample(names, 2)
            slow.append((one, two, random.choice((0.01, 0.03, 0.2))))
        elif kind in ("freeze", "freeze-trap") and node not in gone:
            lasts = random.choice((0.1, 0.3, 0.6, 1.5))
            faults.append(
                Fault(action="freeze", node=node, at=at, lasts=lasts, trap=trap if kind == "freeze-trap" else None)
            )
        elif kind in ("leave", "drain") and node not in gone:
            gone.add(node)
            faults.append(Fault(action=kind, node=node, at=max(at, 0.2)))
        elif kind == "join":
            joins += 1
        elif kind == "two-joins":
            joins += 2
        elif kind == "link" and count > 2:
            other = random.choice([n for n in names if n != node])
            if not any(abs(cuts.get(n, -9.0) - at) < 0.5 for n in (node, other)):
                cuts[node] = cuts[other] = at
                faults.append(Fault(action="link", node=node, other=other, at=at))
        elif kind in ("stream", "lag"):
            target = random.choice(names)
            if abs(cuts.get(target, -9.0) - at) >= 0.5:
                cuts[target] = at
                faults.append(Fault(action=kind, node=target, at=at, lasts=random.uniform(0.1, 0.6)))
        elif kind == "sched-freeze":
            faults.append(Fault(action=kind, at=at, lasts=random.choice((0.2, 0.6, 2.0))))
        elif kind == "sched-crash" and not any(f.action.startswith("sched") for f in faults):
            faults.append(Fault(action=kind, at=at, lasts=random.choice((0.05, 0.3, 1.0))))
    return faults, slow, joins, len(gone)


def random_plan(seed: int, kinds: tuple[str, ...] = KINDS, *, damage: float = 0.05) -> Plan:
    """Returns a plan of a short job of three to five members with up to four faults of these kinds.

    At least as many members as the job needs are left alone, so that it must finish.
    """
    random = Random(seed * 7919 + 1)
    if kinds is KINDS:
        kinds = (*KINDS, "kill-trap", "kill-trap", "freeze-trap", "kill-too", "slow-link")
    count = random.choice((2, 3, 3, 4, 4, 5))
    hosts = random.choice((("h0",), ("h0", "h1"), ("h0", "h1", "h2", "h3")))
    names = [f"n{i}" for i in range(count)]
    min_nodes = random.choice((1, 1, 2, count))
    starts = [random.uniform(0.0, 0.02) for _ in names]
    faults, slow, joins, gone = _strikes(random, kinds, names, starts)
    joins += max(0, min_nodes - (count - gone))
    moment = random.uniform(0.1, 0.7)
    for i in range(joins):
        names.append(f"j{i}")
        starts.append(moment if random.random() < 0.5 else random.uniform(0.05, 0.8))
    pace = {n: random.choice((1.0, 1.0, 1.0, 2.5)) for n in names}
    return Plan(
        seed=seed,
        settings=Settings(
            job="sim",
            min_nodes=min_nodes,
            max_nodes=random.choice((count, 16, 16)),
            hang_timeout_s=8.0,
            last_holder_timeout_s=20.0,
            reconnect_grace_s=4.0,
            observe_timeout_s=2.0,
        ),
        program=Program(
            epochs=random.choice((1, 2)),
            length=random.randint(14, 40),
            gather_every=random.choice((0, 2, 4)),
            work_s=random.choice((0.01, 0.03)),
        ),
        nodes=tuple(
            NodeSpec(
                name=n, host=random.choice(hosts), quota=random.choice((1, 1, 2)), pace=pace[n], replay=seed % 2 > 0
            )
            for n in names
        ),
        starts=tuple(starts),
        faults=tuple(faults),
        slow_links=tuple(slow),
        damage=damage,
        store_s=random.choice((0.002, 0.02)),
        spread=Spread(direct=1, width=1 + seed // 3 % 2) if seed % 3 == 2 else Spread(),
    )


DEATHS = ("kill", "kill-trap", "kill-trap", "kill-too", "freeze", "freeze-trap", "slow-link")


def plans_of(*kinds: str, damage: float = 0.0) -> Callable[[int], Plan]:
    return lambda seed: random_plan(seed, kinds, damage=damage)


def half_sent_plan(seed: int) -> Plan:
    """Returns a plan in which the likeliest commit root dies while it sends a header, alone or together with another
    member.
    """
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    founders = [n.name for n in plan.nodes if n.name.startswith("n")]
    first, rest = founders[0], founders[1:]
    starts = tuple(0.001 if n.name == first else max(0.004, s) for n, s in zip(plan.nodes, plan.starts, strict=True))
    trap = ("header", random.randint(3, 14), random.randint(0, len(founders) - 1))
    too = random.choice(rest) if len(rest) > 1 and random.random() < 0.7 else ""
    fault = Fault(action="kill-too" if too else "kill", node=first, other=too, trap=trap)
    pairs = [(too, n) for n in rest if n != too] if too else [tuple(random.sample(founders, 2)) for _ in range(2)]
    together = random.random() < 0.5 and any(n.name.startswith("j") for n in plan.nodes)
    settings = replace(plan.settings, max_nodes=16, min_nodes=len(founders) - bool(too) if together else 1)
    return replace(
        plan,
        starts=starts,
        faults=(fault,),
        settings=settings,
        slow_links=tuple((a, b, random.choice((0.02, 0.1))) for a, b in pairs),
        program=replace(plan.program, gather_every=random.choice((0, 2)), work_s=0.01, epochs=2),
        store_s=0.02,
    )


def late_plans(kind: str) -> Callable[[int], Plan]:
    """Returns a maker of plans in which a member dies right after it sent a slow message, which so arrives in the next
    view.
    """

    def plan(seed: int) -> Plan:
        random = Random(seed)
        plan = half_sent_plan(seed)
        first = plan.faults[0].node
        others = [n.name for n in plan.nodes if n.name != first]
        victim = first if kind == "committed" else random.choice(others)
        fault = Fault(action="kill", node=victim, trap=(kind, random.randint(4, 14), 0))
        slow = tuple((victim, n.name, 0.04) for n in plan.nodes if n.name != victim)
        if kind == "contribution":
            nodes = tuple(replace(n, pace=0.5 if n.name == victim else random.choice((1.0, 6.0))) for n in plan.nodes)
            slow = tuple((one, two, 0.15) for one, two, _ in slow)
            plan = replace(plan, nodes=nodes, program=replace(plan.program, gather_every=0), store_s=0.002)
        return replace(plan, faults=(fault,), slow_links=slow)

    return plan


def lost_range_plan(seed: int) -> Plan:
    """Returns a plan in which the commit root and a range's root die together: a header has arrived at some member,
    that range's result at none.
    """
    random = Random(seed)
    plan = half_sent_plan(seed)
    while plan.faults[0].action != "kill-too" or len(plan.starts) < 4:
        seed += 1_000_003
        plan = half_sent_plan(seed)
    too, first = plan.faults[0].other, plan.faults[0].node
    slow = tuple((too, n.name, 0.1) for n in plan.nodes if n.name not in (first, too))
    fault = replace(plan.faults[0], trap=("header", random.randint(5, 14), random.randint(1, 2)))
    return replace(plan, faults=(fault,), slow_links=slow, program=replace(plan.program, gather_every=0))


def scattered_plan(seed: int) -> Plan:
    """Returns a plan in which the commit root dies after a header has arrived at some members, none of which has all
    reduced bytes yet.
    """
    plan = half_sent_plan(seed)
    while len([n for n in plan.nodes if n.name.startswith("n")]) < 3:
        seed += 1_000_003
        plan = half_sent_plan(seed)
    random, first = Random(seed), plan.faults[0].node
    rest = [n.name for n in plan.nodes if n.name.startswith("n") and n.name != first]
    fault = Fault(action="kill", node=first, trap=("header", random.randint(3, 14), 1))
    slow = tuple((a, b, 0.1) for a, b in combinations(rest, 2))
    return replace(plan, faults=(fault,), slow_links=slow, program=replace(plan.program, gather_every=0))


def swallowed_plan(seed: int) -> Plan:
    """Returns a plan in which headers are forwarded along a chain or a tree, and a member in the middle dies before it
    forwards one.
    """
    plan = half_sent_plan(seed)
    while len([n for n in plan.nodes if n.name.startswith("n")]) < 3:
        seed += 1_000_003
        plan = half_sent_plan(seed)
    second = sorted(zip(plan.starts, plan.nodes, strict=True), key=lambda at: at[0])[1][1]
    fault = Fault(action="kill", node=second.name, trap=("header", Random(seed).randint(3, 14), 0))
    return replace(plan, faults=(fault,), spread=Spread(direct=1, width=1 + seed % 2))


def stale_plan(seed: int) -> Plan:
    """Returns a plan in which one member contributes a gradient that it computed on the state before the last
    header.
    """
    plan = random_plan(seed, ("join",), damage=0.0)
    at = 0.05 + 0.2 * Random(seed).random()
    settings = replace(plan.settings, min_nodes=1)  # the members stop; a newcomer must not wait for them
    return replace(plan, settings=settings, faults=(Fault(action="stale", node=plan.nodes[0].name, at=at),))


def sleepy_scheduler_plan(seed: int) -> Plan:
    """Returns a plan in which only the scheduler freezes; all members are well."""
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    return replace(plan, faults=(Fault(action="sched-freeze", at=random.uniform(0.05, 0.3), lasts=2.0),))


def forgetful_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler dies while it writes a view without a frozen member, which then wakes while
    the others freeze.

    Its stream breaks meanwhile, or it would find the notice of its exclusion in its socket.
    """
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    first = random.uniform(0.1, 0.2)
    excluded = plan.nodes[0].name
    faults = (
        Fault(action="freeze", node=excluded, at=first, lasts=9.0),
        Fault(action="stream", node=excluded, at=first + 0.1),
        Fault(action="sched-crash-write", node=excluded, lasts=2.0),
    )
    settings = replace(plan.settings, min_nodes=1, reconnect_grace_s=0.2)
    program = replace(plan.program, epochs=2, length=60, work_s=0.01)
    return replace(plan, faults=faults, settings=settings, program=program)


def edited_plan(seed: int) -> Plan:
    """Returns a plan in which all members die and processes with an edited script replace them; the scheduler may die,
    too (protocol.md 12b).
    """
    random = Random(seed * 37 + 19)
    plan = random_plan(seed, ("join",), damage=0.0)
    old, new = [f"n{i}" for i in range(random.choice((1, 2)))], [f"j{i}" for i in range(random.choice((1, 2)))]
    at = random.uniform(0.1, 0.3)
    faults = [Fault(action="kill", node=n, at=at) for n in old]
    if random.random() < 0.3:
        faults.append(Fault(action="sched-crash", at=at + random.uniform(0.0, 1.0), lasts=0.1))
    host = random.choice(("h0", "h1"))
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
        nodes=(*(NodeSpec(name=n, host=host) for n in old), *(NodeSpec(name=n, host=host, script="new") for n in new)),
        starts=(*(random.uniform(0.0, 0.02) for _ in old), *(at + random.uniform(0.05, 1.0) for _ in new)),
        faults=tuple(faults),
        slow_links=(),
    )


def parting_plan(seed: int) -> Plan:
    """Returns a plan in which the hyperparameters of a member, not the oldest, come to differ from the others'; another
    fault may strike.
    """
    random = Random(seed * 41 + 23)
    kinds = random.choice((("join",), ("kill", "join"), ("leave", "stream"), ("sched-crash", "link"), ("kill-trap",)))
    plan = random_plan(seed, kinds, damage=0.0)
    # Those who come later are younger. Of two by the same start either may be the oldest.
    parting = max(range(len(plan.nodes)), key=lambda i: plan.starts[i])
    starts = tuple(at + 0.05 * (i == parting) for i, at in enumerate(plan.starts))
    nodes = tuple(
        replace(node, parts_at=random.randint(2, 20)) if i == parting else node for i, node in enumerate(plan.nodes)
    )
    return replace(plan, settings=replace(plan.settings, min_nodes=1, max_nodes=16), nodes=nodes, starts=starts)


def last_holder_plan(seed: int) -> Plan:
    """Returns a plan in which all members with the state freeze or die while newcomers wait; mostly the last one wakes
    up.

    Often that is after more than hang_timeout_s, seldom after more than last_holder_timeout_s.
    """
    random = Random(seed * 31 + 5)
    plan = random_plan(seed, ("join",), damage=0.0)
    at = random.uniform(0.08, 0.35)
    lasts = random.choice((0.5, 2.0, 7.0, 9.5, 9.5, 14.0, 26.0))
    faults = [Fault(action="freeze", node="n0", at=at, lasts=lasts)]
    names = ["n0", "j0"]
    if random.random() < 0.5:
        names.insert(1, "n1")
        too = at + random.uniform(-0.05, 0.4)
        how = random.choice(("freeze", "freeze", "kill", "kill"))
        # By this trap it dies when the frozen one is taken for dead, and before a view has excluded that one.
        trap = ("report", 0, 0) if how == "kill" and random.random() < 0.7 else None
        faults.append(Fault(action=how, node="n1", at=too, lasts=random.choice((1.0, 9.5, 12.0)), trap=trap))
    if random.random() < 0.3:
        names.append("j1")
    meanwhile = at + random.uniform(0.1, 0.8) * min(lasts, 3.0)
    trouble = random.choice(("", "", "stream", "sched-crash", "sched-freeze", "kill"))
    if trouble:
        node = "" if trouble.startswith("sched") else "n0"
        faults.append(Fault(action=trouble, node=node, at=meanwhile, lasts=random.choice((0.1, 1.0))))
    waits = random.random() < 0.5
    starts = tuple(
        random.uniform(0.0, 0.01) if n.startswith("n") else random.uniform(0.02, at) if waits else at + random.random()
        for n in names
    )
    hosts = random.choice((("h0",), ("h1",), ("h0", "h1", "h2")))
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
        program=replace(plan.program, epochs=2, length=40, work_s=0.02),
        nodes=tuple(NodeSpec(name=n, host=random.choice(hosts)) for n in names),
        starts=starts,
        faults=tuple(faults),
    )


def blip_plan(seed: int) -> Plan:
    """Returns a plan in which all connections of the only member with the state break at once while a newcomer waits to
    be let in; no process fails.
    """
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    at = random.uniform(0.1, 0.6)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
        program=replace(plan.program, epochs=1, length=6, gather_every=0, work_s=2.0),
        nodes=(NodeSpec(name="n0", host="h1"), NodeSpec(name="j0", host="h2")),
        starts=(0.0, 0.05),
        faults=(Fault(action="stream", node="n0", at=at), Fault(action="link", node="n0", other="j0", at=at)),
    )


def busy_plan(seed: int) -> Plan:
    """Returns a plan in which members on separate machines compute for up to 1.3 s without sending anything, some
    during another fault.
    """
    random = Random(seed * 17 + 3)
    plan = random_plan(seed, ("join",), damage=0.0)
    names = [n.name for n in plan.nodes if n.name.startswith("n")]
    faults = []
    for name in random.sample(names, random.randint(1, len(names))):
        at = random.uniform(0.05, 0.4)
        for _ in range(random.randint(1, 3)):
            lasts = random.choice((0.3, 0.7, 1.0, 1.3))
            faults.append(Fault(action="busy", node=name, at=at, lasts=lasts))
            at += lasts + random.uniform(0.05, 0.6)
    busy = {f.node for f in faults}
    trouble = random.choice(("", "", "stream", "link", "kill", "sched-freeze", "sched-crash"))
    at = faults[0].at + random.uniform(0.0, faults[0].lasts)
    if trouble == "kill" and len(names) > 2:
        faults.append(Fault(action="kill", node=random.choice([n for n in names if n not in busy] or names), at=at))
    elif trouble == "link" and len(names) > 2:
        one, other = random.sample(names, 2)
        faults.append(Fault(action="link", node=one, other=other, at=at))
    elif trouble == "stream":
        faults.append(Fault(action="stream", node=random.choice(names), at=at))
    elif trouble.startswith("sched"):
        faults.append(Fault(action=trouble, at=at, lasts=random.choice((0.2, 0.6))))
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1),
        program=replace(plan.program, epochs=2, length=60, work_s=0.03),
        nodes=tuple(replace(n, host=f"h-{n.name}") for n in plan.nodes),
        faults=tuple(faults),
        watched=seed % 2 > 0,
    )


DYING: tuple[Callable[[int], Plan], ...] = (
    *(random_plan,) * 6,
    half_sent_plan,
    swallowed_plan,
    late_plans("committed"),
    late_plans("contribution"),
    lost_range_plan,
    forgetful_plan,
    last_holder_plan,
    last_holder_plan,
    parting_plan,
    blip_plan,
    busy_plan,
)
"""Plans from which a long run draws (families.any_plan)."""
