"""Checks that a plan has all links that it needs, if not every pair of devices has one; if links are missing, exchanges
devices.

Theory of operation. A micro-batch goes from the device of one stage to that of the next, so these need a link. The
owners of a layer reduce its gradient among themselves, as do those of layers that share a parameter, so links must
connect them. Devices of one kind are equal to a plan otherwise: where a link is missing they are seated anew, place by
place, each beside one that it has a link with. The search ends after a number of steps, since it may find nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

from chaos_lightning.planning.graph import connected_parts, neighbours
from chaos_lightning.planning.pipelines.plan import PipelinePlan

Links = Collection[frozenset[str]]
"""Pairs of devices that have a link."""
_STEPS = 2000
"""Most devices that a search puts into a place."""


def missing_link(plan: PipelinePlan, links: Links, shared: Mapping[str, tuple[int, ...]]) -> str:
    """Returns in words the link that a plan needs and that does not exist; "" if it has all links.

    Args:
        plan: The plan.
        links: Links of its devices.
        shared: Layers that use a parameter together, by its name.
    """
    for route in {plan.route(j) for j in range(plan.micro_batches)}:
        for a, b in pairwise(route):
            if a.device != b.device and frozenset((a.device, b.device)) not in links:
                return f"{a.device} and {b.device} have no link, and would run layers that follow each other"
    groups = {frozenset(owners) for owners in plan.owners}
    holders = plan.holders() if shared else []
    groups |= {frozenset(x for layer in layers for x in holders[layer]) for layers in shared.values()}
    for owners in sorted(map(sorted, groups)):
        pairs = [(a, b) for a, b in combinations(owners, 2) if frozenset((a, b)) in links]
        if len(connected_parts(owners, neighbours(owners, pairs))) > 1:
            return f"no links connect {', '.join(owners)} with each other, and they would own the same layers"
    return ""


def seated_by_links(
    plan: PipelinePlan, kinds: Mapping[str, object], links: Links, shared: Mapping[str, tuple[int, ...]]
) -> PipelinePlan:
    """Returns the plan with devices of the same kind exchanged so that no link is missing; the plan unchanged if no
    exchange helps.

    Args:
        plan: The plan.
        kinds: Kind of each device.
        links: Links of its devices.
        shared: Layers that use a parameter together, by its name.
    """
    if plan.detours or plan.vacant or not missing_link(plan, links, shared):
        return plan
    places = [(k > 0, s.device) for p in plan.pipelines for k, s in enumerate(p.stages)]
    left = _STEPS

    def seated(chosen: list[str]) -> Iterator[list[str]]:
        nonlocal left
        if len(chosen) == len(places):
            yield chosen
            return
        follows, planned = places[len(chosen)]
        free = [x for x in plan.devices if kinds[x] == kinds[planned] and x not in chosen]
        for name in sorted(free, key=lambda x: x != planned):
            left -= 1
            if left < 0:
                return
            if not follows or frozenset((chosen[-1], name)) in links:
                yield from seated([*chosen, name])

    for names in seated([]):
        found = _with_devices(plan, names)
        left -= len(names)  # it is looked at as a whole
        if not missing_link(found, links, shared):
            return found
    return plan


def _with_devices(plan: PipelinePlan, names: list[str]) -> PipelinePlan:
    """Returns the plan with its places given to these devices in order; all other devices become idle."""
    there = iter(names)
    rows = tuple(replace(p, stages=tuple(s._replace(device=next(there)) for s in p.stages)) for p in plan.pipelines)
    return replace(plan, pipelines=rows, idle=tuple(x for x in plan.devices if x not in names))
