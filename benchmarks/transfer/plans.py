"""Transfer plans of other systems, for comparison with planning/shards.py.

    greedy       Chaos, Algorithms 1 and 2: equal shards, each to the neighbour that would have it first; the shard's
                 size by binary search between the smallest and the largest layer.
    optimal      equal shards of a given size, exactly: the K smallest of all completion times.
    even         the same to each neighbour.
    single       all from the neighbour that alone is fastest (EDL+).
    multi_source the same from every node, over shortest paths of the overlay (Autoscaling): shared links carry the sum.

In the model shards are alike, so only how many of them a neighbour sends matters. A plan made for shards is therefore
carried out as one run of bytes for each neighbour.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.shards import Neighbour, SharePlan, check, mib, predict_s, words_of

SHARD_NBYTES = 1 << 20
"""Default shard of `optimal`, and of `greedy` where no layers are given: the piece that is hashed and sent as one."""
_LITERAL = 1 << 17
"""Number of shards up to which they are handed out one by one; of more, all but the last few are counted at once."""

Links = Mapping[tuple[str, str], tuple[float, float]]
"""(latency in seconds, seconds per byte) of each link; one that is given in one direction only is the same in both."""


@dataclass(frozen=True, kw_only=True)
class ComparedPlan(SharePlan):
    """A plan of shares by another system's rule."""

    shard_nbytes: int = 0
    """Size of a shard where the policy has one."""
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes on the way of a request, by source: the one that the newcomer asks, those that forward it, and the source
    itself; sources that are asked directly are absent.
    """


def greedy_counts(count: int, shard_nbytes: int, neighbours: Sequence[Neighbour]) -> tuple[list[int], int]:
    """Returns the number of shards of each neighbour, and the index of the neighbour that got the last one (Chaos,
    Algorithm 2, for its problem P3).

    Each shard goes to the neighbour u with the least load l_u + s * t_u; the first one of equals. A neighbour's next
    load changes only when it is chosen, so a heap finds the least one.
    """
    counts, costs = [0] * len(neighbours), [shard_nbytes * n.s_per_byte for n in neighbours]
    if count > _LITERAL:  # the first shards go to neighbours that complete them before some time: count those at once
        low, high = 0.0, max(n.delay_s for n in neighbours) + count * min(costs)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(_until(middle, neighbours, costs)) <= count - 1 else (low, middle)
        counts = _until(low, neighbours, costs)
    heap = [(n.delay_s + (counts[i] + 1) * costs[i], i) for i, n in enumerate(neighbours)]
    heapq.heapify(heap)
    last = 0
    for _ in range(count - sum(counts)):
        last = heap[0][1]
        counts[last] += 1
        heapq.heapreplace(heap, (neighbours[last].delay_s + (counts[last] + 1) * costs[last], last))
    return counts, last


def _until(moment: float, neighbours: Sequence[Neighbour], costs: Sequence[float]) -> list[int]:
    """Returns the number of shards that each neighbour has sent by a time (s), corrected for rounding errors."""
    counts = []
    for n, cost in zip(neighbours, costs, strict=True):
        count = max(0, int((moment - n.delay_s) / cost))
        while n.delay_s + (count + 1) * cost <= moment:
            count += 1
        while count and n.delay_s + count * cost > moment:
            count -= 1
        counts.append(count)
    return counts


def _objective(counts: Sequence[int], shard_nbytes: int, neighbours: Sequence[Neighbour]) -> float:
    """Returns the seconds until the last neighbour has sent its shards: theta in the paper's problem P2."""
    pairs = zip(counts, neighbours, strict=True)
    return max((n.seconds(count * shard_nbytes) for count, n in pairs if count), default=0.0)


def _bytes_of(
    nbytes: int, counts: Sequence[int], last: int, shard_nbytes: int, neighbours: Sequence[Neighbour]
) -> dict[str, int]:
    """Returns the bytes that each neighbour sends, given its number of shards; the last shard may be shorter."""
    sizes = [count * shard_nbytes for count in counts]
    sizes[last] -= sum(sizes) - nbytes
    return {n.member: size for n, size in zip(neighbours, sizes, strict=True) if size}


def greedy(
    nbytes: int,
    neighbours: Sequence[Neighbour],
    *,
    layer_nbytes: Sequence[int] = (),
    shard_nbytes: int = 0,
    ingress_s_per_byte: float = 0.0,
) -> ComparedPlan:
    """Returns a plan by Algorithms 1 and 2 of Chaos, exactly as published.

    Args:
        nbytes: Size of the state.
        neighbours: Neighbours that can send.
        layer_nbytes: Sizes of the layers (tensors): Algorithm 1 searches the shard size between their extremes.
        shard_nbytes: The shard size instead of a search; 1 MiB if neither is given.
        ingress_s_per_byte: Seconds per byte on the newcomer's own access link, for the prediction only: the paper does
            not know of it.
    """
    check(nbytes, neighbours, ingress_s_per_byte)
    if not nbytes:
        return ComparedPlan(policy="greedy", shares={}, seconds=0.0, reason="nothing is missing")
    sizes = [size for size in layer_nbytes if size > 0]
    low, high = (min(sizes), max(sizes)) if sizes and not shard_nbytes else (shard_nbytes or SHARD_NBYTES,) * 2
    if low < 1:
        raise ValueError(f"shard_nbytes must be positive, got {shard_nbytes}")
    searched = f"sizes from {low} to {high} bytes searched" if high > low else "size as given"
    best, theta, rounds = (0, [0], 0), math.inf, 0
    while low <= high:
        size = (low + high) // 2
        counts, last = greedy_counts(-(-nbytes // size), size, neighbours)
        found = _objective(counts, size, neighbours)
        rounds += 1
        if found < theta:
            theta, best = found, (size, counts, last)
            high = size - 1
        else:
            low = size + 1
    size, counts, last = best
    shares = _bytes_of(nbytes, counts, last, size, neighbours)
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    reason = (
        f"Algorithms 1 and 2: {sum(counts)} shards of {size} bytes ({searched}, {rounds} rounds), {seconds:.3f} s: "
        f"{words_of(shares)}"
    )
    return ComparedPlan(policy="greedy", shares=shares, seconds=seconds, reason=reason, shard_nbytes=size)


def optimal(
    nbytes: int, neighbours: Sequence[Neighbour], *, shard_nbytes: int = SHARD_NBYTES, ingress_s_per_byte: float = 0.0
) -> ComparedPlan:
    """Returns the plan of equal shards with the least time, found by bisection over the time."""
    check(nbytes, neighbours, ingress_s_per_byte)
    if shard_nbytes < 1:
        raise ValueError(f"shard_nbytes must be positive, got {shard_nbytes}")
    if not nbytes:
        return ComparedPlan(policy="optimal", shares={}, seconds=0.0, reason="nothing is missing")
    count = -(-nbytes // shard_nbytes)
    costs = [shard_nbytes * n.s_per_byte for n in neighbours]
    low, high = 0.0, min(n.delay_s + count * cost for n, cost in zip(neighbours, costs, strict=True))
    while low < (middle := (low + high) / 2) < high:  # until there is no number between the two
        low, high = (middle, high) if sum(_until(middle, neighbours, costs)) < count else (low, middle)
    counts = _until(high, neighbours, costs)
    ends = [n.delay_s + c * cost for n, c, cost in zip(neighbours, counts, costs, strict=True)]
    order = sorted((i for i, c in enumerate(counts) if c), key=lambda i: -ends[i])
    for i in order[: sum(counts) - count]:  # several are complete at the very end: not all of them are needed
        counts[i] -= 1
    last = next(i for i in order if counts[i])
    shares = _bytes_of(nbytes, counts, last, shard_nbytes, neighbours)
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    reason = (
        f"the {count} smallest completion times of shards of {shard_nbytes} bytes, {seconds:.3f} s: {words_of(shares)}"
    )
    return ComparedPlan(policy="optimal", shares=shares, seconds=seconds, reason=reason, shard_nbytes=shard_nbytes)


# --- what others do --------------------------------------------------------------------------------------------------


def _split(nbytes: int, members: Sequence[str]) -> dict[str, int]:
    each, more = divmod(nbytes, len(members))
    shares = {m: each + (1 if i < more else 0) for i, m in enumerate(members)}
    return {m: share for m, share in shares.items() if share}


def even(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> ComparedPlan:
    """Returns a plan in which each neighbour sends the same number of bytes, whatever its link."""
    check(nbytes, neighbours, ingress_s_per_byte)
    shares = _split(nbytes, [n.member for n in neighbours])
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    reason = f"the same from each of {len(neighbours)} neighbours, {seconds:.3f} s"
    return ComparedPlan(policy="even", shares=shares, seconds=seconds, reason=reason)


def single(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> ComparedPlan:
    """Returns a plan in which one neighbour sends everything: the one that takes the least time (EDL+)."""
    check(nbytes, neighbours, ingress_s_per_byte)
    best = min(neighbours, key=lambda n: (n.seconds(nbytes), n.member))
    shares = {best.member: nbytes} if nbytes else {}
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    reason = f"all from {best.member}, the fastest of {len(neighbours)} neighbours, {seconds:.3f} s"
    return ComparedPlan(policy="single", shares=shares, seconds=seconds, reason=reason)


def shortest_routes(links: Links, newcomer: str, unit_nbytes: float) -> dict[str, tuple[str, ...]]:
    """Returns the fastest route to the newcomer from each node that has one: its hops, beginning at the newcomer."""
    beside: dict[str, dict[str, float]] = {}
    for (a, b), (latency_s, s_per_byte) in links.items():
        if a == b:
            raise PlanError(f"a link from {a} to itself: a link has two ends")
        for x, y in ((a, b), (b, a)):
            if (x, y) == (a, b) or (b, a) not in links:
                beside.setdefault(y, {})[x] = latency_s + unit_nbytes * s_per_byte  # data flows from x to y
    # Not packing.nearest: links have a direction here, and of ways that are alike the names of all their hops decide.
    routes: dict[str, tuple[str, ...]] = {}
    heap: list[tuple[float, int, tuple[str, ...]]] = [(0.0, 0, ())]
    while heap:
        seconds, hops, path = heapq.heappop(heap)
        here = path[-1] if path else newcomer
        if here in routes or (path and here == newcomer):
            continue
        if path:
            routes[here] = path
        for node, cost in beside.get(here, {}).items():
            if node not in routes and node != newcomer:
                heapq.heappush(heap, (seconds + cost, hops + 1, (*path, node)))
    return routes


def multi_source(nbytes: int, links: Links, newcomer: str, *, ingress_s_per_byte: float = 0.0) -> ComparedPlan:
    """Returns a plan in which every node of the overlay sends the same number of bytes over its shortest path
    (Autoscaling).

    A link that several paths share carries the sum of their bytes; the slowest such sum is what the transfer takes.

    Args:
        nbytes: Size of the state.
        links: All links of the overlay, the newcomer's among them.
        newcomer: Member that pulls the state.
        ingress_s_per_byte: Seconds per byte on the newcomer's own access link.
    """
    nodes = sorted({end for link in links for end in link} - {newcomer})
    if not nodes:
        raise PlanError(f"{newcomer} has no link in the overlay: give at least one")
    routes = shortest_routes(links, newcomer, nbytes / len(nodes))
    lost = [node for node in nodes if node not in routes]
    if lost:
        raise PlanError(f"no path leads from {', '.join(lost)} to {newcomer}: connect the overlay first")
    shares = _split(nbytes, nodes)
    load: dict[tuple[str, str], int] = {}
    for source, share in shares.items():
        for edge in _edges(routes[source], newcomer):
            load[edge] = load.get(edge, 0) + share
    cost = {edge: links[edge] if edge in links else links[edge[1], edge[0]] for edge in load}
    ends = [
        sum(cost[e][0] for e in path) + max(load[e] * cost[e][1] for e in path)
        for path in (_edges(routes[source], newcomer) for source in shares)
    ]
    seconds = max([nbytes * ingress_s_per_byte, *ends])
    worst = max(load, key=lambda e: load[e] * cost[e][1], default=None)
    relayed = sum(share for source, share in shares.items() if len(routes[source]) > 1)
    busiest = f"; the link {worst[0]} to {worst[1]} carries {mib(load[worst])}" if worst else ""
    reason = f"the same from each of {len(nodes)} nodes, {mib(relayed)} of it relayed, {seconds:.3f} s{busiest}"
    return ComparedPlan(policy="multi_source", shares=shares, seconds=seconds, reason=reason, routes=routes)


def _edges(route: Sequence[str], newcomer: str) -> list[tuple[str, str]]:
    """Returns (sender, receiver) of each hop of a route."""
    return list(zip(route, (newcomer, *route[:-1]), strict=True))
