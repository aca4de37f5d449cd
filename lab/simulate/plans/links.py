"""Makes random plans for jobs on graphs of links: the seed decides which faults strike which nodes and links.

Theory of operation. A graph is drawn, which the nodes either name as their neighbours or find out about, as all other
links are refused. On it links are cut and come back, flap, swallow, carry less, are removed and added, and the graph is
split in two, while members die, freeze, leave and join, and the scheduler crashes.

`wired_plan` draws complete graphs, and trees with some more edges. Whatever is cut long enough to matter is put
together again in the end or leaves a part that can finish the job, so every such run must end. `sparse_plan` draws
rows, stars, rings and trees: few links mean that each of them matters. Members that die or leave are bridges, a
newcomer may be the only way between others, a link that carries nothing cannot be done without. Up to nine faults
strike anybody, so members may be left that cannot go on; then the run must be able to say why (progress.py). Others
aim, `bridging_plan` and `flapping_link_plan` at recoveries that bring nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

from chaos_lightning.protocol.types import PlanSpec
from lab.simulate.plan import Fault, NodeSpec, Plan, Replaying
from lab.simulate.plans.members import random_plan

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
    """Returns a random tree over these nodes, in which each node but the first is linked to an earlier one, with some
    additional edges.
    """
    edges = [(random.choice(names[:i]), name) for i, name in enumerate(names) if i]
    more = random.choice((0.0, 0.3, 0.6))
    return edges + [e for e in combinations(names, 2) if e not in edges and random.random() < more]


def _near(names: Iterable[str], edges: Sequence[Edge]) -> dict[str, tuple[str, ...]]:
    """Returns, for each node, the nodes to which it has an edge."""
    return {n: tuple(sorted({a if b == n else b for a, b in edges if n in (a, b)})) for n in names}


def _unlinked(names: Iterable[str], edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Returns all pairs of these nodes that have no edge."""
    there = {frozenset(e) for e in edges}
    return tuple(e for e in combinations(names, 2) if frozenset(e) not in there)


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
    """Returns a plan of a job on a graph of links that changes during the run."""
    random = Random(seed * 104_729 + 3)
    plan = random_plan(seed, kinds, damage=0.02)
    names = [n.name for n in plan.nodes]
    how = random.choice(("complete", "named", "hidden"))
    edges = list(combinations(names, 2)) if how == "complete" else random_graph(random, names)
    nodes = plan.nodes
    if how == "named":
        near = _near(names, edges)
        nodes = tuple(replace(n, neighbours=near[n.name]) for n in plan.nodes)
    faults = [f for _ in range(random.randint(1, 3)) for f in _link_faults(random, edges, names)]
    cuts = [f.at for f in faults if f.action in ("cut", "split")]
    # A stream and a link that break together are a death, whoever lives (protocol.md 12, docs/LOG.md).
    faults += [
        f
        for f in plan.faults
        if random.random() < 0.5 and not (f.action in ("stream", "lag") and any(abs(f.at - at) < 0.7 for at in cuts))
    ]
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16, plan=PlanSpec(random.choice(PLANS))),
        program=replace(plan.program, epochs=1, length=random.randint(40, 110), work_s=random.choice((0.02, 0.04))),
        nodes=nodes,
        faults=tuple(faults),
        unlinked=_unlinked(names, edges) if how == "hidden" else (),
        measured=random.random() < 0.7,
        rates=tuple((a, b, random.choice(RATES_BPS)) for a, b in edges),
    )


def _job(seed: int, count: int, hosts: tuple[str, ...]) -> Plan:
    """Returns a plan of a job of some seconds with founders n0, n1, ... and without faults."""
    random = Random(seed)
    plan = random_plan(seed, ("join",), damage=0.0)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=1, max_nodes=16),
        program=replace(plan.program, epochs=1, length=60 * count, gather_every=random.choice((0, 3)), work_s=0.04),
        nodes=tuple(NodeSpec(name=f"n{i}", host=random.choice(hosts)) for i in range(count)),
        starts=tuple(random.uniform(0.0, 0.02) for _ in range(count)),
        faults=(),
    )


def split_plan(seed: int) -> Plan:
    """Returns a plan in which cut links divide the members into two groups while headers are under way, often with
    another fault.
    """
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
    """Returns a plan in which one link between two of several members is cut for good; no member may be put out for
    it.
    """
    random = Random(seed * 13 + 7)
    plan = _job(seed, random.choice((3, 4, 5)), ("h0", "h1"))
    one, other = random.sample([n.name for n in plan.nodes], 2)
    at = random.uniform(0.1, 0.6)
    kill = [Fault(action="kill", node=one, at=at + 5.5)] if random.random() < 0.5 and len(plan.nodes) > 3 else []
    program = replace(plan.program, length=plan.program.length * 3)
    faults = (Fault(action="cut", node=one, other=other, at=at, lasts=80.0), *kill)
    return replace(plan, faults=faults, program=program)


def removal_plan(seed: int) -> Plan:
    """Returns a plan in which an operator removes and adds links of a ring with some chords; all members stay
    healthy.
    """
    random = Random(seed * 19 + 11)
    count = random.choice((4, 5, 6))
    plan = _job(seed, count, ("h0", "h1"))
    names = [n.name for n in plan.nodes]
    ring = [(names[i], names[(i + 1) % count]) for i in range(count)]
    edges = ring + [
        e for e in combinations(names, 2) if e not in ring and e[::-1] not in ring and random.random() < 0.3
    ]
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
        unlinked=_unlinked(names, edges),
        measured=True,
        unfailing=True,
        slow_links=slow,
        program=replace(plan.program, work_s=0.02),
    )


def forgetting_plan(seed: int) -> Plan:
    """Returns a plan in which the scheduler dies just before or after it grants a link's removal, and another view is
    decided later.
    """
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
    """Returns a plan in which one link of a ring is cut for good, so that many routes must go the other way round."""
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
        program=replace(plan.program, gather_every=random.choice((0, 1)), work_s=0.01),
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
"""Plans from which a long run draws (families.any_plan)."""

SHAPES = ("row", "star", "ring", "tree", "sparse")
HOSTS = (("h0",), ("h0", "h1"), ("h0", "h1", "h2", "h3"))


def shape(random: Random, how: str, names: list[str]) -> list[Edge]:
    """Returns the links of a graph of this shape over these nodes, in the nodes' order."""
    pairs = list(pairwise(names))
    match how:
        case "row":
            return pairs
        case "ring":
            return pairs + ([(names[-1], names[0])] if len(names) > 2 else [])
        case "star":
            return [(names[0], n) for n in names[1:]]
        case "tree":
            return [(names[(i - 1) // 2], names[i]) for i in range(1, len(names))]
        case _:
            return random_graph(random, names)


def _fault(random: Random, names: list[str], edges: list[Edge]) -> list[Fault]:
    one, other = random.choice(edges)
    node, at = random.choice(names), random.uniform(0.05, 2.5)
    how = random.choice(
        ("kill", "freeze", "leave", "drain", "stream", "lag", "link", "cut", "cut", "mute", "mute", "flap", "rate",
         "rate", "remove-link", "split", "sched-crash", "sched-freeze")
    )  # fmt: skip
    match how:
        case "kill" | "leave" | "drain" | "stream":
            return [Fault(action=how, node=node, at=at)]
        case "freeze" | "lag":
            return [Fault(action=how, node=node, at=at, lasts=random.choice((0.1, 0.4, 1.5)))]
        case "link" | "remove-link":
            return [Fault(action=how, node=one, other=other, at=at)]
        case "cut":
            return [Fault(action=how, node=one, other=other, at=at, lasts=random.choice((0.02, 0.3, 1.5, 8.0, 80.0)))]
        case "mute":
            action = random.choice(("mute", "mute-one"))
            return [Fault(action=action, node=one, other=other, at=at, lasts=random.choice((0.5, 2.0, 5.0, 80.0)))]
        case "flap":
            return [Fault(action=how, node=one, other=other, at=at, lasts=random.choice((0.5, 2.0)))]
        case "rate":
            return [Fault(action=how, node=one, other=other, at=at, rate_bps=random.choice((0.0, 0.0, 1e6, 1e9)))]
        case "split":
            group = random.sample(names, random.randint(1, len(names) - 1))
            return [Fault(action=how, node=",".join(group), at=at, lasts=random.choice((0.3, 2.0, 6.0)))]
        case _:
            return [Fault(action=how, at=at, lasts=random.choice((0.1, 0.5, 1.0)))]


def _newcomers(random: Random, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Draws newcomers, each with links to all, some, one, or now and then none of the members."""
    found: dict[str, tuple[str, ...]] = {}
    for i in range(random.choice((0, 1, 1, 2, 3))):
        count = random.choice((len(names), len(names), 1, random.randint(1, len(names)), 0))
        found[f"j{i}"] = tuple(random.sample(names, count))
    return found


def _calm(faults: list[Fault]) -> list[Fault]:
    """Returns the faults without broken control streams near broken links: both together would look like a death
    (protocol.md 12).
    """
    links = [f for f in faults if f.action in ("cut", "split", "mute", "mute-one", "flap", "link")]

    def beside(fault: Fault) -> bool:
        return any(f.at - 0.7 < fault.at < f.at + max(f.lasts, 3.0) + 0.7 for f in links)

    return [f for f in faults if not (f.action in ("stream", "lag") and beside(f))]


def sparse_plan(seed: int) -> Plan:
    """Returns a plan with any kind of fault on a graph with few links."""
    random = Random(seed * 131_071 + 7)
    plan = random_plan(seed, ("join",), damage=0.02)
    names = [f"n{i}" for i in range(random.choice((2, 3, 3, 4, 4, 5, 6)))]
    edges = shape(random, random.choice(SHAPES), names)
    coming = _newcomers(random, names)
    linked = edges + [(j, n) for j, near in coming.items() for n in near]
    near = _near([*names, *coming], linked)
    named = random.random() < 0.5 and all(near.values())
    hosts = random.choice(HOSTS)
    replay = random.random() < 0.5
    slow = [
        (a, b, random.choice((0.02, 0.1, 0.3))) for a, b in linked if random.random() < random.choice((0.0, 0.0, 0.4))
    ]
    faults = [f for _ in range(random.choice((0, 1, 1, 2, 3, 4, 6, 9))) for f in _fault(random, names, linked)]
    idle = [Fault(action="rate", node=a, other=b, at=0.05, rate_bps=0.0) for a, b in linked if random.random() < 0.1]
    return replace(
        plan,
        settings=replace(
            plan.settings,
            min_nodes=random.choice((1, 1, 2, len(names))),
            max_nodes=random.choice((len(names), len(names) + 1, 16)),
            plan=PlanSpec(random.choice(PLANS)),
        ),
        program=replace(
            plan.program,
            epochs=1,
            length=random.randint(15, 30) * len(names),
            gather_every=random.choice((0, 0, 3)),
            work_s=random.choice((0.02, 0.04, 0.1)),
        ),
        nodes=tuple(
            NodeSpec(
                name=n,
                host=random.choice(hosts),
                pace=random.choice((1.0, 1.0, 1.0, 2.0)),
                replay=replay,
                neighbours=near[n] if named else (),
            )
            for n in near
        ),
        starts=tuple(
            random.uniform(0.0, 0.02) if n in names else random.choice((0.01, random.uniform(0.1, 2.0))) for n in near
        ),
        faults=tuple(_calm([*faults, *idle])),
        unlinked=() if named else _unlinked(near, linked),
        measured=random.random() < 0.7 or bool(idle),
        slow_links=tuple(slow),
        replaying=Replaying(pull_s=random.choice((0.002, 0.002, 0.4))),
        limit_s=60.0,
    )


def bridging_plan(seed: int) -> Plan:
    """Returns a plan in which a link that carries no data is needed until a newcomer with links to all members has
    come.
    """
    random = Random(seed * 151 + 3)
    plan = sparse_plan(seed)
    names = [f"n{i}" for i in range(random.choice((2, 3, 4)))]
    edges = shape(random, "row", names)
    coming = [f"j{i}" for i in range(random.choice((1, 1, 2)))]
    linked = edges + [(j, n) for j in coming for n in names]
    one, other = random.choice(edges)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=random.choice((1, len(names))), max_nodes=16),
        program=replace(plan.program, work_s=random.choice((0.02, 0.5)), length=20 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in (*names, *coming)),
        starts=tuple(0.001 * (i + 1) for i in range(len(names))) + tuple(random.uniform(0.5, 1.0) for _ in coming),
        faults=(Fault(action="rate", node=one, other=other, at=random.uniform(0.2, 0.4), rate_bps=0.0),),
        unlinked=_unlinked([*names, *coming], linked),
        measured=True,
        slow_links=(),
    )


def flapping_link_plan(seed: int) -> Plan:
    """Returns a plan in which the only link between two groups of members breaks again and again, sooner than a step
    takes.
    """
    random = Random(seed * 157 + 5)
    plan = bridging_plan(seed)
    nodes = tuple(n for n in plan.nodes if n.name.startswith("n"))
    names = [n.name for n in nodes]
    flap = Fault(action="flap", node="n0", other="n1", at=random.uniform(0.3, 0.6), lasts=3.0)
    return replace(
        plan,
        program=replace(plan.program, work_s=1.5, length=6 * len(names)),
        nodes=nodes,
        starts=plan.starts[: len(names)],
        faults=(flap,),
        unlinked=_unlinked(names, pairwise(names)),
        measured=False,
    )


def stranded_plan(seed: int) -> Plan:
    """Returns a plan with newcomers that have no link, later ones that are needed, and a small max_nodes."""
    random = Random(seed * 163 + 9)
    plan = sparse_plan(seed)
    count = random.choice((2, 3))
    names = [f"n{i}" for i in range(count)]
    lost, late = [f"l{i}" for i in range(random.choice((1, 2)))], "j0"
    founds = random.random() < 0.5
    inside = names if not founds else names[:-1]
    come = {n: 0.001 * (i + 1) for i, n in enumerate(inside)}
    come.update({n: 0.1 + 0.01 * i for i, n in enumerate(lost)})
    come.update({n: 0.3 for n in (*names, late) if n not in come})
    faults = () if founds else (Fault(action="kill", node=names[-1], at=0.6),)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=count, max_nodes=count + len(lost) if not founds else count),
        program=replace(plan.program, work_s=0.02, length=40 * count, gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in come),
        starts=tuple(come.values()),
        faults=faults,
        unlinked=tuple((a, b) for a in lost for b in come if a != b),
        measured=False,
        slow_links=(),
    )


def bridge_plan(seed: int) -> Plan:
    """Returns a plan in which a node that alone links two groups is lost, and a newcomer links both; all others are
    needed.
    """
    random = Random(seed * 167 + 11)
    plan = sparse_plan(seed)
    names = [f"n{i}" for i in range(random.choice((3, 3, 4)))]
    edges = shape(random, "row", names)
    linked = edges + [("j0", n) for n in names]
    near = _near((*names, "j0"), linked)
    at = random.uniform(0.4, 0.6)
    how = random.choice(("kill", "kill", "leave", "drain"))
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=len(names), max_nodes=16),
        program=replace(plan.program, work_s=0.03, length=30 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n, neighbours=near[n]) for n in near),
        starts=(*(0.001 * (i + 1) for i in range(len(names))), at + random.choice((-0.1, 0.0, 0.5, 5.0))),
        faults=(Fault(action=how, node=names[1], at=at),),
        unlinked=(),
        measured=False,
        slow_links=(),
    )


def needed_plan(seed: int) -> Plan:
    """Returns a plan in which a needed member is lost, and the only newcomer to replace it has no place, or only a link
    without data.
    """
    random = Random(seed * 173 + 13)
    plan = sparse_plan(seed)
    names = [f"n{i}" for i in range(random.choice((2, 3)))]
    at = random.uniform(0.4, 0.6)
    idle = random.random() < 0.5
    faults: tuple[Fault, ...]
    if idle:
        linked = [*combinations(names, 2), ("j0", names[0])]
        faults = (
            Fault(action="rate", node="j0", other=names[0], at=0.05, rate_bps=0.0),
            Fault(action=random.choice(("kill", "drain")), node=names[-1], at=at),
        )
    else:
        linked = list(pairwise(names)) + [("j0", n) for n in names]
        faults = (Fault(action="cut", node=names[0], other=names[1], at=at, lasts=80.0),)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=len(names), max_nodes=len(names) + idle),
        program=replace(plan.program, work_s=0.03, length=40 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in (*names, "j0")),
        starts=(*(0.001 * (i + 1) for i in range(len(names))), 0.2),
        faults=faults,
        unlinked=_unlinked((*names, "j0"), linked),
        measured=idle,
        slow_links=(),
    )


def crowd_plan(seed: int) -> Plan:
    """Returns a plan with more members than reduction trees are computed for at once, on few uneven links, of which
    some fail during the computation.
    """
    random = Random(seed * 179 + 17)
    names = [f"n{i}" for i in range(random.choice((17, 18, 19)))]
    plan = _job(seed, len(names), ("h0", "h1", "h2"))
    size = len(names)
    edges = [(names[i], names[(i + step) % size]) for i in range(size) for step in (1, 3, 5)]
    near = _near(names, edges)
    faults, at = [], random.uniform(0.4, 1.5)
    for how in random.sample(("kill", "leave", "remove-link", "remove-link", "sched-crash"), 2):
        one, other = random.choice(edges)
        faults.append(Fault(action=how, node="" if how == "sched-crash" else one, other=other, at=at, lasts=0.1))
        at += random.uniform(0.5, 2.0)
    return replace(
        plan,
        settings=replace(plan.settings, max_nodes=32, plan=PlanSpec(random.choice(("auto", "widest", "rotating")))),
        program=replace(plan.program, length=30 * size, work_s=0.1, gather_every=0),
        nodes=tuple(replace(n, neighbours=near[n.name]) for n in plan.nodes),
        faults=tuple(faults),
        measured=True,
        rates=tuple((a, b, random.choice(RATES_BPS)) for a, b in edges),
    )


SPARSE: tuple[Callable[[int], Plan], ...] = (
    sparse_plan,
    sparse_plan,
    sparse_plan,
    sparse_plan,
    bridging_plan,
    flapping_link_plan,
    stranded_plan,
    bridge_plan,
)
"""Plans from which a long run draws (families.any_plan)."""
