"""Combines kinds of random plans into families: all of them, or those on one subject."""

from __future__ import annotations

from collections.abc import Callable

from lab.simulate.plan import Plan
from lab.simulate.plans.fixed import fixed_family
from lab.simulate.plans.large import large_plan
from lab.simulate.plans.learners import JOINING, founding_plan
from lab.simulate.plans.links import SPARSE, WIRED, crowd_plan
from lab.simulate.plans.members import DYING, busy_plan, random_plan
from lab.simulate.plans.outer import outer_plan, waiting_plan
from lab.simulate.plans.schedulers import FAILING, lost_plan
from lab.simulate.plans.staged import staged_family

_OTHERS: tuple[Callable[[int], Plan], ...] = (*DYING, *JOINING, *WIRED, *SPARSE)


def failing_family(number: int, seed: int | None = None) -> Plan:
    """Returns a plan with failing schedulers and stores, of kind `number` modulo the number of kinds; the seed is
    `number` by default.
    """
    return FAILING[number % len(FAILING)](number if seed is None else seed)


def sparse_family(seed: int) -> Plan:
    """Returns a plan with few links in which many faults occur together; the seed also chooses the kind of plan."""
    return SPARSE[seed % len(SPARSE)](seed)


def any_plan(seed: int) -> Plan:
    """Returns a plan for a long test: every third seed with failing schedulers, the others random or aimed at rare
    orders of events.
    """
    return failing_family(seed // 3, seed) if seed % 3 == 2 else _OTHERS[seed % len(_OTHERS)](seed)


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "any": any_plan,
    "random": random_plan,
    "failing": failing_family,
    "lost": lost_plan,
    "busy": busy_plan,
    "sparse": sparse_family,
    "crowd": crowd_plan,
    "large": large_plan,
    "founding": founding_plan,
    "outer": outer_plan,
    "waiting": waiting_plan,
    "pipelines": staged_family,
    "batch": fixed_family,
}
"""Families to which a long run may be confined, by name."""
