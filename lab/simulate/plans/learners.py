"""Makes random plans with joins by replay: newcomers learn while faults strike members, learners and the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from chaos_lightning.protocol.types import Settings
from lab.simulate.plan import Fault, NodeSpec, Plan, Replaying
from lab.simulate.training import Program

_MEMBER_TRAPS = ("greeting", "greeting", "header", "committed", "contribution", "report")
_NEWCOMER_TRAPS = ("observe", "observe", "pull", "entered")


def _job(seed: int, founders: int, newcomers: Sequence[float], **fields: object) -> Plan:
    """Returns a plan with some founders, and with newcomers that start at these times (s) and offer to join by
    replay.
    """
    random = Random(seed * 6007 + 11)
    hosts = random.choice((("h0",), ("h0", "h1"), ("h0", "h1", "h2", "h3")))
    names = [f"n{i}" for i in range(founders)] + [f"j{i}" for i in range(len(newcomers))]
    plan = Plan(
        seed=seed,
        settings=Settings(
            job="sim",
            hang_timeout_s=2.0,
            last_holder_timeout_s=20.0,
            reconnect_grace_s=4.0,
            observe_timeout_s=1.0,
        ),
        program=Program(epochs=2, length=60, gather_every=random.choice((0, 2, 4)), work_s=0.015),
        nodes=tuple(NodeSpec(name=n, host=random.choice(hosts), replay=True) for n in names),
        starts=(*(0.002 * i for i in range(founders)), *newcomers),
    )
    return replace(plan, **fields)  # type: ignore[arg-type]


def calm_plan(seed: int) -> Plan:
    """Returns a plan without faults, in which newcomers that caught up have nothing left to pull when they are let
    in.
    """
    random = Random(seed)
    newcomers = [random.uniform(0.06, 0.4) for _ in range(random.randint(1, 3))]
    plan = _job(seed, random.randint(1, 3), newcomers)
    return replace(
        plan,
        replaying=Replaying(calm=True, pull_s=random.choice((0.0, 0.03)), copy_s=random.choice((0.002, 0.012))),
        program=replace(plan.program, length=120),
    )


def learner_plan(seed: int) -> Plan:
    """Returns a plan with up to three faults, mostly at the moments when learners are named, told, caught up, announced
    or let in.
    """
    random = Random(seed * 101 + 3)
    founders, joins = random.randint(2, 4), random.randint(1, 3)
    moment = random.uniform(0.06, 0.25)
    newcomers = [moment if random.random() < 0.4 else random.uniform(0.05, 0.6) for _ in range(joins)]
    plan = _job(seed, founders, newcomers)
    members, late = [f"n{i}" for i in range(founders)], [f"j{i}" for i in range(joins)]
    min_nodes = random.choice((1, 1, 1, 2, founders))
    expendable = random.sample(members, random.randint(1, founders - 1))
    gone: set[str] = set()
    faults: list[Fault] = []
    for _ in range(random.randint(1, 3)):
        at = random.uniform(0.06, 0.9)
        if random.random() < 0.45:
            node, trapped, seq = random.choice(late), random.choice(_NEWCOMER_TRAPS), 0
        else:
            node = "n0" if "n0" in expendable and random.random() < 0.5 else random.choice(expendable)
            trapped, seq = random.choice(_MEMBER_TRAPS), random.randint(0, 12)
        kind = random.choice(
            ("kill", "kill", "kill", "freeze", "leave", "stream", "link", "sched-crash", "sched-freeze")
        )
        trap = (trapped, seq, random.randint(0, 3) if node in members else 0)
        how = trap if random.random() < 0.7 else None
        if kind == "kill" and node not in gone and len(gone - set(late)) < founders - 1:
            gone.add(node)
            faults.append(Fault(action=kind, node=node, at=at, trap=how))
        elif kind == "freeze" and node not in gone:
            faults.append(Fault(action=kind, node=node, at=at, lasts=random.choice((0.1, 0.6, 1.5, 3.0)), trap=how))
        elif kind == "leave" and node not in gone:
            gone.add(node)
            faults.append(Fault(action=kind, node=node, at=max(at, 0.1)))
        elif kind in ("stream", "link"):
            other = random.choice([n for n in (*members, *late) if n != node])
            faults.append(Fault(action=kind, node=node, other=other if kind == "link" else "", at=at))
        elif kind.startswith("sched") and not any(f.action.startswith("sched") for f in faults):
            faults.append(Fault(action=kind, at=at, lasts=random.choice((0.05, 0.3, 1.0))))
    # Enough are left alone, or come in their stead, that the job can end.
    spare = max(0, min_nodes - len([n for n in (*members, *late) if n not in gone]))
    nodes = (*plan.nodes, *(NodeSpec(name=f"s{i}", replay=bool(i % 2)) for i in range(spare)))
    starts = (*plan.starts, *(random.uniform(0.3, 1.0) for _ in range(spare)))
    nodes = tuple(replace(n, memory=random.random() < 0.9, pace=random.choice((1.0, 1.0, 2.0))) for n in nodes)
    return replace(
        plan,
        nodes=nodes,
        starts=starts,
        faults=tuple(faults),
        settings=replace(
            plan.settings,
            min_nodes=min_nodes,
            max_nodes=random.choice((16, 16, founders + 1)),
            observe_timeout_s=random.choice((0.15, 1.0, 1.0, 300.0)),
        ),
        replaying=_any_replaying(random),
        damage=random.choice((0.0, 0.05)),
        store_s=random.choice((0.002, 0.02)),
    )


def _any_replaying(random: Random) -> Replaying:
    return Replaying(
        log_entries=random.choice((2, 5, 64, 64)),
        copy_s=random.choice((0.002, 0.02, 0.05)),
        log_s=random.choice((0.0005, 0.004)),
        pull_s=random.choice((0.0, 0.0, 0.05, 0.3)),
        apply_s=random.choice((0.0005, 0.002, 0.01, 0.04)),
        impure=random.choice((0.0, 0.0, 0.2)),
    )


def crowd_plan(seed: int) -> Plan:
    """Returns a plan with ten newcomers at once, and perhaps a death while they join."""
    random = Random(seed * 17 + 1)
    moment = random.uniform(0.06, 0.2)
    plan = _job(seed, random.randint(2, 3), [moment + random.uniform(0.0, 0.003) for _ in range(10)])
    victim = random.choice(("n0", "j0", "j7", ""))
    trap = ("greeting", 0, random.randint(0, 9)) if victim == "n0" else ("observe", 0, 0)
    faults = (Fault(action="kill", node=victim, at=moment + random.uniform(0.0, 0.2), trap=trap),) if victim else ()
    return replace(
        plan,
        faults=faults,
        program=replace(plan.program, length=100, epochs=1),
        settings=replace(plan.settings, max_nodes=random.choice((16, 6))),
        replaying=replace(_any_replaying(random), apply_s=0.001),
    )


def founding_plan(seed: int) -> Plan:
    """Returns a plan in which many processes found a job and pass its state on, some of them die, and others join by
    replay.
    """
    random = Random(seed * 19 + 5)
    founders, dead = random.choice((7, 12, 20)), random.randint(0, 3)
    plan = _job(seed, founders, [random.uniform(0.2, 0.5) for _ in range(random.randint(0, 2))])
    victims = random.sample([f"n{i}" for i in range(founders)], dead)
    return replace(
        plan,
        faults=tuple(Fault(action="kill", node=victim, at=random.uniform(0.01, 0.5)) for victim in victims),
        program=replace(plan.program, length=200, epochs=1),
        settings=replace(plan.settings, min_nodes=founders - dead, max_nodes=64),
        replaying=_any_replaying(random),
        damage=random.choice((0.0, 0.05)),
    )


def flapping_plan(seed: int) -> Plan:
    """Returns a plan in which a member joins and leaves again and again while others try to join."""
    random = Random(seed * 13 + 7)
    period = random.uniform(0.08, 0.3)
    flaps = 6
    newcomers = [0.1 + period * i for i in range(flaps)] + [0.1 + random.uniform(0.0, period) for _ in range(2)]
    plan = _job(seed, random.randint(1, 3), newcomers)
    how = random.choice(("leave", "kill"))
    faults = tuple(
        Fault(action=how, node=f"j{i}", at=0.1 + period * i + random.uniform(0.02, period)) for i in range(flaps)
    )
    return replace(
        plan,
        faults=faults,
        program=replace(plan.program, length=160, epochs=1),
        replaying=replace(_any_replaying(random), apply_s=0.001),
    )


def patient_plan(seed: int) -> Plan:
    """Returns a plan of a long job in which all surviving processes must be let in soon after the last fault."""
    random = Random(seed * 29 + 3)
    plan = learner_plan(seed)
    settings = replace(plan.settings, min_nodes=1, max_nodes=16, observe_timeout_s=1.0, reconnect_grace_s=1.0)
    settings = replace(settings, last_holder_timeout_s=6.0)
    newcomers = [n.name for n in plan.nodes if n.name.startswith("j")]
    extra: tuple[Fault, ...] = ()
    if random.random() < 0.4:
        # It observes and falls silent for long; the others must not wait for it.
        extra = (Fault(action="freeze", node=random.choice(newcomers), lasts=14.0, trap=("observe", 0, 0)),)
    replaying = plan.replaying
    return replace(
        plan,
        faults=(*(replace(f, lasts=min(f.lasts, 1.5)) for f in plan.faults), *extra),
        settings=settings,
        replaying=replace(replaying, apply_s=min(replaying.apply_s, 0.01)),
        program=Program(epochs=1, length=900 if extra else 600, gather_every=0, work_s=0.06),
        patience_s=8.0,
        limit_s=200.0,
    )


def all_leave_plan(seed: int) -> Plan:
    """Returns a plan in which all members leave while a newcomer is learning, which must still get the training
    state.
    """
    random = Random(seed * 3 + 1)
    founders = random.randint(1, 3)
    plan = _job(seed, founders, [random.uniform(0.06, 0.12)])
    at = random.uniform(0.1, 0.25)
    faults = tuple(Fault(action="leave", node=f"n{i}", at=at + random.uniform(0.0, 0.1)) for i in range(founders))
    return replace(plan, faults=faults, replaying=_any_replaying(random))


def promise_plan(seed: int) -> Plan:
    """Returns a plan in which a member dies while newcomers are learning, and some survivors' messages are delayed."""
    random = Random(seed * 7 + 2)
    founders = random.randint(3, 4)
    moment = random.uniform(0.06, 0.2)
    plan = _job(seed, founders, [moment + random.uniform(0.0, 0.02) for _ in range(3)])
    victim, slow = random.sample([f"n{i}" for i in range(founders)], 2)
    died = moment + random.uniform(0.05, 0.3)
    faults = (
        Fault(action="lag", node=slow, at=died - 0.02, lasts=1.0),
        Fault(action="kill", node=victim, at=died),
    )
    replaying = Replaying(apply_s=0.02, pull_s=0.2)
    return replace(plan, faults=faults, replaying=replaying, program=replace(plan.program, length=100))


def silent_plan(seed: int) -> Plan:
    """Returns a plan in which a learner is frozen for long, before or after it has caught up, and more learners come
    after it.
    """
    random = Random(seed * 5 + 9)
    moment = random.uniform(0.06, 0.2)
    plan = _job(seed, random.randint(1, 3), [moment, *(moment + random.uniform(0.02, 0.5) for _ in range(2))])
    trap = ("observe", 0, 0) if random.random() < 0.6 else None
    stopped = Fault(action="freeze", node="j0", lasts=9.0, at=moment + random.uniform(0.04, 0.2), trap=trap)
    return replace(
        plan,
        faults=(stopped,),
        settings=replace(plan.settings, observe_timeout_s=random.choice((1.0, 300.0))),
        program=Program(epochs=1, length=500, gather_every=0, work_s=0.08),
        patience_s=4.0,
    )


JOINING = (
    learner_plan,
    learner_plan,
    learner_plan,
    crowd_plan,
    flapping_plan,
    calm_plan,
    all_leave_plan,
    promise_plan,
    patient_plan,
    silent_plan,
)
"""Plans from which a long run draws (families.any_plan)."""
