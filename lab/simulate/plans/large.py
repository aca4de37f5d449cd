"""Makes random plans for large jobs: few links for each member, headers go down a tree, and the scheduler handles many
events only at ticks.

Theory of operation. All that differs beyond 16 members is drawn together here: founders that come at once, waves of
newcomers, deaths one by one and by the dozen, nodes of several workers that die as one, links that are cut, and a
scheduler that dies. Steps are few, for each takes a message of everybody.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from chaos_lightning.protocol.types import Settings
from lab.simulate.plan import Fault, NodeSpec, Plan
from lab.simulate.training import Program

WORKERS = 4
"""Number of members that share a host."""


def large_plan(seed: int, count: int = 20, degree: int = 8) -> Plan:
    """Returns a plan of a job that `count` members found, most of which stay.

    Args:
        seed: Seed of all chance.
        count: Number of founders.
        degree: Number of partners that a newcomer is given.
    """
    random = Random(seed * 6151 + 5)
    names = [f"n{i}" for i in range(count)]
    joins = [f"j{i}" for i in range(random.choice((0, 1, count // 4)))]
    wave = random.uniform(0.3, 0.9)
    starts = [random.uniform(0.0, 0.2) for _ in names] + [wave + random.uniform(0.0, 0.3) for _ in joins]
    return Plan(
        seed=seed,
        settings=Settings(
            job="sim",
            min_nodes=count // 2,
            max_nodes=2 * count,
            link_degree=degree,
            hang_timeout_s=8.0,
            last_holder_timeout_s=20.0,
            reconnect_grace_s=4.0,
            observe_timeout_s=4.0,
        ),
        program=Program(epochs=1, length=8 * count, gather_every=random.choice((0, 3)), work_s=0.05),
        nodes=tuple(
            NodeSpec(name=n, host=f"h{i // WORKERS}", replay=seed % 2 > 0) for i, n in enumerate([*names, *joins])
        ),
        starts=tuple(starts),
        faults=tuple(_faults(random, names)),
        limit_s=120.0,
    )


def _faults(random: Random, names: list[str]) -> list[Fault]:
    """Draws the deaths of up to a quarter of these members, and other faults that are soon over."""
    at = random.uniform(0.4, 1.2)
    mortal = random.sample(names, len(names) // 4)
    faults = [Fault(action="kill", node=mortal[0], at=at)]
    match random.choice(("all at once", "one by one", "a node", "cut", "scheduler")):
        case "all at once":
            faults += [Fault(action="kill", node=n, at=at + random.uniform(0.0, 0.02)) for n in mortal[1:]]
        case "one by one":
            faults += [Fault(action="kill", node=n, at=at + 0.15 * (i + 1)) for i, n in enumerate(mortal[1:4])]
        case "a node":
            first = random.randrange(len(names) // WORKERS) * WORKERS
            faults = [Fault(action="kill", node=n, at=at) for n in names[first : first + WORKERS]]
        case "cut":
            for _ in range(3):
                one, other = random.sample(names, 2)
                faults.append(Fault(action="cut", node=one, other=other, at=at, lasts=random.choice((0.2, 1.5, 6.0))))
        case _:
            faults.append(Fault(action="sched-crash", at=at, lasts=random.choice((0.05, 0.3, 1.0))))
    return faults


def thin_plan(seed: int) -> Plan:
    """Returns a plan with so few links that each one is needed, if the scheduler did not add some against the loss of a
    node.
    """
    return replace(large_plan(seed, 20, 1), faults=())
