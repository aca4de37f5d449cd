"""Plans by chance for jobs on changing links: what goes wrong between nodes in the run with a given seed.

Theory of operation. A graph is drawn: complete, or a tree with some more edges, which the nodes either name as their
neighbours or find out about, as all other links are refused. On it links are cut and come back, flap, carry less, are
removed and added, and the graph is split in two, while members die, freeze, leave and join, and the scheduler crashes.
Whatever is cut long enough to matter is put together again in the end or leaves a part that can finish the job, so
every run must end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random

from chaos_lightning.lab.simulate.node import NodeSpec
from chaos_lightning.lab.simulate.plans import random_plan
from chaos_lightning.lab.simulate.world import Fault, Plan
from chaos_lightning.protocol.types import PlanSpec

Edge = tuple[str, str]
OTHERS = (
    "kill",
    "kill-trap",
    "kill-too",
    "freeze",
    "leave",
    "join",
    "join",
    "stream",
    "lag",
    "sched-crash",
    "sched-freeze",
    "slow-link",
)
PLANS = ("rotating", "rotating", "chain", "tree", "auto")
RATES_BPS = (1e7, 1e8, 1e9)


def random_graph(random: Random, names: list[str]) -> list[Edge]:
    """A random tree over these, each after the first below an earlier one, and some more edges."""
    edges = [(random.choice(names[:i]), name) for i, name in enumerate(names) if i]
    more = random.choice((0.0, 0.3, 0.6))
    return edges + [e for e in combinations(names, 2) if e not in edges and random.random() < more]


def _link_faults(random: Random, edges: list[Edge], names: list[str]) -> list[Fault]:
    one, other = random.choice(edges)
    at = random.uniform(0.1, 1.6)
    match random.choice(("cut", "cut", "cut-long", "flap", "split", "remove", "remove-add", "ask", "rate", "rate")):
        case "cut":
            return [Fault(action="cut", node=one, other=other, at=at, lasts=random.choice((0.02, 0.2, 0.6, 1.5)))]
        case "cut-long":
            return [Fault(action="cut", node=one, other=other, at=at, lasts=random.choice((6.0, 9.0)))]
        case "flap":
            times = [at + i * random.uniform(0.3, 0.9) for i in range(random.randint(2, 4))]
            return [Fault(action="cut", node=one, other=other, at=t, lasts=0.15) for t in times]
        case "split":
            group = random.sample(names, random.randint(1, len(names) - 1))
            lasts = random.choice((0.3, 2.0, 5.0))
            return [Fault(action="split", node=",".join(group), at=at, lasts=lasts)]
        case "remove":
            return [Fault(action="remove-link", node=one, other=other, at=at)]
        case "remove-add":
            later = at + random.uniform(0.05, 0.8)
            return [
                Fault(action="remove-link", node=one, other=other, at=at),
                Fault(action="add-link", node=one, other=other, at=later),
            ]
        case "ask":
            one, other = random.sample(names, 2)
            return [Fault(action=random.choice(("ask-remove", "ask-add")), node=one, other=other, at=at)]
        case _:
            return [Fault(action="rate", node=one, other=other, at=at, rate_bps=random.choice((*RATES_BPS, 0.0)))]


def wired_plan(seed: int, kinds: tuple[str, ...] = OTHERS) -> Plan:
    """A job on a graph of links that changes."""
    random = Random(seed * 104_729 + 3)
    plan = random_plan(seed, kinds, damage=0.02)
    names = [n.name for n in plan.nodes]
    how = random.choice(("complete", "named", "hidden"))
    edges = list(combinations(names, 2)) if how == "complete" else random_graph(random, names)
    unlinked: list[Edge] = []
    nodes = plan.nodes
    if how == "named":
        near = {n: tuple(sorted({a if b == n else b for a, b in edges if n in (a, b)})) for n in names}
        nodes = tuple(replace(n, neighbours=near[n.name]) for n in plan.nodes)
    elif how == "hidden":
        there = {frozenset(e) for e in edges}
        unlinked = [e for e in combinations(names, 2) if frozenset(e) not in there]
    faults = [f for _ in range(random.randint(1, 3)) for f in _link_faults(random, edges, names)]
    cuts = [f.at for f in faults if f.action in ("cut", "split")]
    # A stream and a link that break together are a death, whoever lives (PROTOCOL.md 12, docs/LOG.md).
    faults += [
        f
        for f in plan.faults
        if random.random() < 0.5 and not (f.action in ("stream", "lag") and any(abs(f.at - at) < 0.7 for at in cuts))
    ]
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16, plan=PlanSpec(random.choice(PLANS))),
        program=replace(plan.program, epochs=1, length=random.randint(40, 110), window_s=random.choice((0.02, 0.04))),
        nodes=nodes,
        faults=tuple(faults),
        unlinked=tuple(unlinked),
        measured=random.random() < 0.7,
        rates=tuple((a, b, random.choice(RATES_BPS)) for a, b in edges),
    )


def _job(seed: int, count: int, hosts: tuple[str, ...]) -> Plan:
    """Founders n0, n1, ... that are all well, and a job of some seconds."""
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
        program=replace(plan.program, epochs=1, length=60 * count, gather_every=random.choice((0, 3)), window_s=0.04),
        nodes=tuple(NodeSpec(name=f"n{i}", host=random.choice(hosts)) for i in range(count)),
        starts=tuple(random.uniform(0.0, 0.02) for _ in range(count)),
        faults=(),
    )


def split_plan(seed: int) -> Plan:
    """The graph falls in two, as a rule in halves, while headers are under way; often more goes wrong then."""
    random = Random(seed * 17 + 1)
    count = random.choice((2, 4, 4, 5, 6))
    plan = _job(seed, count, ("h0", "h1", "h2"))
    group = [n.name for n in random.sample(plan.nodes, count // 2)]
    at = random.uniform(0.2, 0.8)
    faults = [Fault(action="split", node=",".join(group), at=at, lasts=random.choice((1.0, 4.5, 8.0)))]
    trouble = random.choice(("", "", "sched-crash", "sched-freeze", "kill", "stream"))
    if trouble:
        victim = "" if trouble.startswith("sched") else random.choice(plan.nodes).name
        when = at + random.choice((0.0, 0.1, 3.1, 3.3))
        faults.append(Fault(action=trouble, node=victim, at=when, lasts=random.choice((0.1, 1.0))))
    slow = tuple((a.name, b.name, 0.05) for a, b in combinations(plan.nodes, 2) if random.random() < 0.3)
    return replace(plan, faults=tuple(faults), slow_links=slow)


def lost_link_plan(seed: int) -> Plan:
    """One link between two of several members is cut for good; everybody is well, and nobody is to be put out."""
    random = Random(seed * 13 + 7)
    plan = _job(seed, random.choice((3, 4, 5)), ("h0", "h1"))
    one, other = random.sample([n.name for n in plan.nodes], 2)
    at = random.uniform(0.1, 0.6)
    kill = [Fault(action="kill", node=one, at=at + 5.5)] if random.random() < 0.5 and len(plan.nodes) > 3 else []
    program = replace(plan.program, length=plan.program.length * 3)
    faults = (Fault(action="cut", node=one, other=other, at=at, lasts=80.0), *kill)
    return replace(plan, faults=faults, program=program)


def wired(*kinds: str) -> Callable[[int], Plan]:
    return lambda seed: wired_plan(seed, kinds)


def removal_plan(seed: int) -> Plan:
    """On a ring with some chords links are removed and added, often one after the other; everybody is well."""
    random = Random(seed * 19 + 11)
    count = random.choice((4, 5, 6))
    plan = _job(seed, count, ("h0", "h1"))
    names = [n.name for n in plan.nodes]
    ring = [(names[i], names[(i + 1) % count]) for i in range(count)]
    edges = ring + [
        e for e in combinations(names, 2) if e not in ring and e[::-1] not in ring and random.random() < 0.3
    ]
    there = {frozenset(e) for e in edges}
    faults = []
    for _ in range(random.randint(3, 8)):
        one, other = random.choice(edges)
        at = random.uniform(0.3, 2.5)
        faults.append(Fault(action="remove-link", node=one, other=other, at=at))
        faults.append(Fault(action="add-link", node=one, other=other, at=at + random.uniform(0.02, 0.5)))
    slow = tuple((a, b, 0.03) for a, b in edges if random.random() < 0.3)
    return replace(
        plan,
        faults=tuple(faults),
        unlinked=tuple(e for e in combinations(names, 2) if frozenset(e) not in there),
        measured=True,
        unfailing=True,
        slow_links=slow,
        program=replace(plan.program, window_s=0.02),
    )


def forgetting_plan(seed: int) -> Plan:
    """The scheduler dies when it has granted a removal, or is about to; later another view is decided."""
    random = Random(seed * 29 + 13)
    plan = _job(seed, random.choice((4, 5)), ("h0", "h1"))
    one, other, victim = random.sample([n.name for n in plan.nodes], 3)
    at = random.uniform(0.2, 0.8)
    faults = (
        Fault(action="remove-link", node=one, other=other, at=at),
        Fault(action="sched-crash", at=at + random.uniform(0.0, 0.04), lasts=random.choice((0.1, 0.5))),
        Fault(action="kill", node=victim, at=at + random.uniform(1.5, 2.5)),
    )
    newcomer = NodeSpec(name="j0", host="h2")  # while it loads, no view follows
    return replace(
        plan,
        nodes=(*plan.nodes, newcomer),
        starts=(*plan.starts, at - random.uniform(0.0, 0.15)),
        faults=faults,
        store_s=0.02,
        program=replace(plan.program, length=plan.program.length * 3),
    )


def ring_plan(seed: int) -> Plan:
    """On a ring one link is cut for good, so that most ways turn around; everybody is well."""
    random = Random(seed * 23 + 5)
    count = random.choice((4, 5, 6))
    plan = _job(seed, count, ("h0", "h1"))
    names = [n.name for n in plan.nodes]
    near = {n: (names[i - 1], names[(i + 1) % count]) for i, n in enumerate(names)}
    one = random.choice(names)
    cut = Fault(action="cut", node=one, other=near[one][1], at=random.uniform(0.3, 1.2), lasts=80.0)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=count, plan=PlanSpec("chain")),
        program=replace(plan.program, gather_every=random.choice((0, 1)), window_s=0.01),
        nodes=tuple(replace(n, neighbours=near[n.name]) for n in plan.nodes),
        starts=tuple(0.001 * (i + 1) for i in range(count)),
        faults=(cut,),
        measured=True,
    )


WIRED: tuple[Callable[[int], Plan], ...] = (
    wired_plan,
    wired_plan,
    wired_plan,
    split_plan,
    lost_link_plan,
    removal_plan,
    forgetting_plan,
)
"""What a long run draws from (plans.any_plan)."""
