"""Plans by chance for jobs on sparse graphs: rows, stars, rings and trees, on which much goes wrong at once.

Theory of operation. Few links mean that each of them matters: members that die or leave are bridges, a newcomer may be
the only way between others, a link that carries nothing cannot be done without. Up to nine faults strike anybody, so
members may be left that cannot go on; then the run must be able to say why (progress.py). `bridging_plan` and
`flapping_link_plan` aim at recoveries that bring nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

from chaos_lightning.lab.simulate.node import NodeSpec
from chaos_lightning.lab.simulate.observing import Replaying
from chaos_lightning.lab.simulate.plans import random_plan
from chaos_lightning.lab.simulate.wiring import PLANS, Edge, random_graph
from chaos_lightning.lab.simulate.world import Fault, Plan
from chaos_lightning.protocol.types import PlanSpec

SHAPES = ("row", "star", "ring", "tree", "sparse")
HOSTS = (("h0",), ("h0", "h1"), ("h0", "h1", "h2", "h3"))


def shape(random: Random, how: str, names: list[str]) -> list[Edge]:
    """The links of a graph of this shape over these nodes, in their order."""
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
    """Who comes later, and to whom each has links: to all, to some, or to one; to nobody now and then."""
    found: dict[str, tuple[str, ...]] = {}
    for i in range(random.choice((0, 1, 1, 2, 3))):
        count = random.choice((len(names), len(names), 1, random.randint(1, len(names)), 0))
        found[f"j{i}"] = tuple(random.sample(names, count))
    return found


def _calm(faults: list[Fault]) -> list[Fault]:
    """Without streams that break beside a link: both together are a death, whoever lives (PROTOCOL.md 12)."""
    links = [f for f in faults if f.action in ("cut", "split", "mute", "mute-one", "flap", "link")]

    def beside(fault: Fault) -> bool:
        return any(f.at - 0.7 < fault.at < f.at + max(f.lasts, 3.0) + 0.7 for f in links)

    return [f for f in faults if not (f.action in ("stream", "lag") and beside(f))]


def sparse_plan(seed: int) -> Plan:
    """Anything on a sparse graph."""
    random = Random(seed * 131_071 + 7)
    plan = random_plan(seed, ("join",), damage=0.02)
    names = [f"n{i}" for i in range(random.choice((2, 3, 3, 4, 4, 5, 6)))]
    edges = shape(random, random.choice(SHAPES), names)
    coming = _newcomers(random, names)
    linked = edges + [(j, n) for j, near in coming.items() for n in near]
    near = {n: tuple(sorted({a if b == n else b for a, b in linked if n in (a, b)})) for n in [*names, *coming]}
    named = random.random() < 0.5 and all(near.values())
    there = {frozenset(e) for e in linked}
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
            window_s=random.choice((0.02, 0.04, 0.1)),
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
        unlinked=() if named else tuple(e for e in combinations(near, 2) if frozenset(e) not in there),
        measured=random.random() < 0.7 or bool(idle),
        slow_links=tuple(slow),
        replaying=Replaying(pull_s=random.choice((0.002, 0.002, 0.4))),
        limit_s=60.0,
    )


def bridging_plan(seed: int) -> Plan:
    """A link carries nothing and is needed all the same, until a newcomer with links to all makes up for it."""
    random = Random(seed * 151 + 3)
    plan = sparse_plan(seed)
    names = [f"n{i}" for i in range(random.choice((2, 3, 4)))]
    edges = shape(random, "row", names)
    coming = [f"j{i}" for i in range(random.choice((1, 1, 2)))]
    linked = edges + [(j, n) for j in coming for n in names]
    there = {frozenset(e) for e in linked}
    one, other = random.choice(edges)
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=random.choice((1, len(names))), max_nodes=16),
        program=replace(plan.program, window_s=random.choice((0.02, 0.5)), length=20 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in (*names, *coming)),
        starts=tuple(0.001 * (i + 1) for i in range(len(names))) + tuple(random.uniform(0.5, 1.0) for _ in coming),
        faults=(Fault(action="rate", node=one, other=other, at=random.uniform(0.2, 0.4), rate_bps=0.0),),
        unlinked=tuple(e for e in combinations([*names, *coming], 2) if frozenset(e) not in there),
        measured=True,
        slow_links=(),
    )


def flapping_link_plan(seed: int) -> Plan:
    """The only link between two parts breaks again and again, while a step takes longer than the link stands."""
    random = Random(seed * 157 + 5)
    plan = bridging_plan(seed)
    names = [n for n in plan.nodes if n.name.startswith("n")]
    flap = Fault(action="flap", node="n0", other="n1", at=random.uniform(0.3, 0.6), lasts=3.0)
    there = [e for e in combinations([n.name for n in names], 2) if int(e[1][1:]) - int(e[0][1:]) > 1]
    return replace(
        plan,
        program=replace(plan.program, window_s=1.5, length=6 * len(names)),
        nodes=tuple(names),
        starts=plan.starts[: len(names)],
        faults=(flap,),
        unlinked=tuple(there),
        measured=False,
    )


def stranded_plan(seed: int) -> Plan:
    """Newcomers that no link leads to come first, others that are needed come after them, and max_nodes is small."""
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
        program=replace(plan.program, window_s=0.02, length=40 * count, gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in come),
        starts=tuple(come.values()),
        faults=faults,
        unlinked=tuple((a, b) for a in lost for b in come if a != b),
        measured=False,
        slow_links=(),
    )


def bridge_plan(seed: int) -> Plan:
    """A bridge dies or leaves, and a newcomer that links both sides is there, or comes; all are needed."""
    random = Random(seed * 167 + 11)
    plan = sparse_plan(seed)
    names = [f"n{i}" for i in range(random.choice((3, 3, 4)))]
    edges = shape(random, "row", names)
    linked = edges + [("j0", n) for n in names]
    near = {n: tuple(sorted({x if y == n else y for x, y in linked if n in (x, y)})) for n in (*names, "j0")}
    at = random.uniform(0.4, 0.6)
    how = random.choice(("kill", "kill", "leave", "drain"))
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=len(names), max_nodes=16),
        program=replace(plan.program, window_s=0.03, length=30 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n, neighbours=near[n]) for n in near),
        starts=(*(0.001 * (i + 1) for i in range(len(names))), at + random.choice((-0.1, 0.0, 0.5, 5.0))),
        faults=(Fault(action=how, node=names[1], at=at),),
        unlinked=(),
        measured=False,
        slow_links=(),
    )


def needed_plan(seed: int) -> Plan:
    """All that are in are needed, and one is lost; the only newcomer that can help has no place, or an idle link."""
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
    there = {frozenset(e) for e in linked}
    return replace(
        plan,
        settings=replace(plan.settings, min_nodes=len(names), max_nodes=len(names) + idle),
        program=replace(plan.program, window_s=0.03, length=40 * len(names), gather_every=0),
        nodes=tuple(NodeSpec(name=n) for n in (*names, "j0")),
        starts=(*(0.001 * (i + 1) for i in range(len(names))), 0.2),
        faults=faults,
        unlinked=tuple(e for e in combinations((*names, "j0"), 2) if frozenset(e) not in there),
        measured=idle,
        slow_links=(),
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
"""What a long run draws from (plans.any_plan)."""
