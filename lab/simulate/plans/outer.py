"""Makes random plans in which the members are ranks of an outer-sync cluster, and adopt versions while members come, go
and die.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from chaos_lightning.protocol.types import Settings
from lab.simulate.plan import Fault, NodeSpec, OuterScript, Plan
from lab.simulate.plans.learners import calm_plan, crowd_plan, flapping_plan, learner_plan
from lab.simulate.plans.links import SPARSE
from lab.simulate.plans.members import half_sent_plan, random_plan
from lab.simulate.training import Program

_MEETINGS = 4.0
"""Factor by which a run takes longer at most: ranks that wait for a push and its version meet up to ten times per
step.
"""
_UNDER = (random_plan, learner_plan, half_sent_plan, learner_plan, crowd_plan, flapping_plan, *SPARSE[:1], calm_plan)


def _times(random: Random, most: int, last_s: float) -> tuple[float, ...]:
    return tuple(sorted(random.uniform(0.05, last_s) for _ in range(random.randint(0, most))))


def outer_plan(seed: int) -> Plan:
    """Returns a plan of a job of ranks with faults of members, and with a leader that answers but is silent now and
    then.
    """
    random = Random(seed * 7919 + 5)
    plan = _UNDER[seed % len(_UNDER)](seed)
    script = OuterScript(
        inner_steps=random.choice((1, 2, 2, 4)),
        overlap=random.random() < 0.75,
        lossy=random.random() < 0.6,
        answer_s=random.choice(((0.005, 0.03), (0.01, 0.1), (0.05, 0.3))),
        rejects=random.choice((0.0, 0.1, 0.3)),
        voids=random.choice((0.0, 0.1, 0.3)),
        versions=_times(random, 8, 1.5),
        cuts=_times(random, 3, 1.5),
        removals=_times(random, 1, 1.5) if random.random() < 0.3 else (),
        rollbacks=_times(random, 2, 1.5) if random.random() < 0.5 else (),
    )
    return replace(_later(random, plan), outer=script, limit_s=_MEETINGS * plan.limit_s)


def waiting_plan(seed: int) -> Plan:
    """Returns a plan in which the ranks wait for slow answers while all but one are asked to leave."""
    random = Random(seed * 977 + 3)
    names = [f"n{i}" for i in range(random.randint(2, 4))]
    leavers = random.sample(names, len(names) - 1)
    return Plan(
        seed=seed,
        settings=Settings(job="sim", hang_timeout_s=2.0),
        program=Program(epochs=1, length=16, gather_every=random.choice((0, 2)), work_s=0.015),
        nodes=tuple(NodeSpec(name=name, host=random.choice(("h0", "h1"))) for name in names),
        starts=tuple(0.002 * i for i in range(len(names))),
        faults=tuple(Fault(action="leave", node=name, at=random.uniform(0.3, 6.0)) for name in leavers),
        outer=OuterScript(inner_steps=4, overlap=random.random() < 0.5, answer_s=(3.0, 5.0)),
        patience_s=2.0,
    )


def _later(random: Random, plan: Plan) -> Plan:
    """Returns the plan with faults and newcomers postponed to times at which versions are adopted; the founders start
    as before.
    """
    seconds, slots = random.uniform(0.0, 0.7), random.randint(0, 30)

    def moved(fault: Fault) -> Fault:
        trap = (fault.trap[0], fault.trap[1] + slots, fault.trap[2]) if fault.trap is not None else None
        return replace(fault, at=fault.at + seconds, trap=trap)

    starts = tuple(
        at if node.name.startswith("n") else at + seconds for node, at in zip(plan.nodes, plan.starts, strict=True)
    )
    return replace(plan, faults=tuple(map(moved, plan.faults)), starts=starts)
