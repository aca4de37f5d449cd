"""Which neighbour sends a newcomer how many bytes of the state, and how long that takes.

Theory of operation. Neighbour u can begin `delay_s` after the start (its latency, and the time until it has finished
its all-reduce) and then needs `s_per_byte` for each byte. With n bytes it is done at delay_s + n * s_per_byte; a
transfer takes as long as the last neighbour. The newcomer's own access link may be a limit for all together
(`ingress_s_per_byte`, 0: none). Every planner returns a `SharePlan`: bytes by neighbour, predicted seconds, and the
reason in words.

    closed_form  byte ranges: all neighbours worth using end at once, at
                 T = (W + sum delay/s_per_byte) / sum 1/s_per_byte. No plan is faster (Chaos calls this problem NP-hard;
                 with byte ranges, or equal shards, it is not).
    greedy       Chaos, Algorithms 1 and 2: equal shards, each to the neighbour that would have it first; the shard's
                 size by binary search between the smallest and the largest layer.
    optimal      equal shards of a given size, exactly: the K smallest of all completion times.
    even         the same to each neighbour.
    single       all from the neighbour that alone is fastest (EDL+).
    multi_source the same from every node, over shortest paths of the overlay (Autoscaling): shared links carry the sum.
    stop_resume  through a checkpoint on a disk, and everybody starts again (Pollux).

In the model shards are alike, so only how many of them a neighbour sends matters. A plan made for shards is therefore
carried out as one run of bytes for each neighbour.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.errors import PlanError

POLICIES = ("adaptive", "greedy", "optimal", "even", "single", "multi_source", "stop_resume", "shared")
"""What the setting `transfer` may be; replication/policies.py carries each of them out."""
SHARD_NBYTES = 1 << 20
"""Default shard of `optimal`, and of `greedy` where no layers are given: the piece that is hashed and sent as one."""
_LITERAL = 1 << 17
"""Up to so many shards are handed out one by one; beyond, all but the last few are counted at once."""

Links = Mapping[tuple[str, str], tuple[float, float]]
"""(latency in seconds, seconds per byte) of each link; one that is given in one direction only is the same in both."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A source with a direct link to the newcomer."""

    member: str
    delay_s: float
    """Until its first byte can arrive: propagation, and what it has to finish before."""
    s_per_byte: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ValueError(f"neighbour {self.member}: delay_s must be finite and not negative, got {self.delay_s}")
        if not (math.isfinite(self.s_per_byte) and self.s_per_byte > 0):
            raise ValueError(f"neighbour {self.member}: s_per_byte must be finite and positive, got {self.s_per_byte}")

    def seconds(self, nbytes: float) -> float:
        """When it has sent so many bytes, undisturbed by others."""
        return self.delay_s + nbytes * self.s_per_byte


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """Who sends how much."""

    policy: str
    shares: Mapping[str, int]
    """Bytes by source; their sum is the state's size. Who sends nothing is absent."""
    seconds: float
    """Predicted, from the start of the transfer to the last byte."""
    reason: str
    shard_nbytes: int = 0
    """Size of a shard where the policy has one."""
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each source: whom the newcomer asks, and who forwards the request, up to the source itself. Absent: direct."""
    barrier: bool = False
    """Whether everybody waits for the end of the transfer."""


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def _words(shares: Mapping[str, int]) -> str:
    shown = [f"{member} {_mib(nbytes)}" for member, nbytes in list(shares.items())[:8]]
    return ", ".join(shown) + (f" and {len(shares) - 8} more" if len(shares) > 8 else "")


def _check(nbytes: int, neighbours: Sequence[Neighbour], ingress_s_per_byte: float) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    if not neighbours:
        raise PlanError("a state can only be planned to come from at least one neighbour, none was given")
    names = [n.member for n in neighbours]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise PlanError(f"neighbour {twice} is given twice: give each neighbour once")
    if not (math.isfinite(ingress_s_per_byte) and ingress_s_per_byte >= 0):
        raise ValueError(f"ingress_s_per_byte must be finite and not negative, got {ingress_s_per_byte}")


# --- byte ranges: the bound ------------------------------------------------------------------------------------------


def _fluid(nbytes: int, neighbours: Sequence[Neighbour], ingress_s_per_byte: float) -> tuple[float, list[float]]:
    """When the last byte can be there at the earliest, and fractional shares, aligned, that get it there."""
    order = sorted(range(len(neighbours)), key=lambda i: (neighbours[i].delay_s, i))
    limit = 1 / ingress_s_per_byte if ingress_s_per_byte else math.inf
    shares = [0.0] * len(neighbours)
    left, total = float(nbytes), 0.0
    for position, index in enumerate(order):
        begin = neighbours[index].delay_s
        total += 1 / neighbours[index].s_per_byte
        rate = min(total, limit)
        last = position + 1 == len(order)
        rest = left / rate
        span = rest if last else min(rest, neighbours[order[position + 1]].delay_s - begin)
        for i in order[: position + 1]:  # a full access link is shared in proportion to the links behind it
            shares[i] += span * rate / total / neighbours[i].s_per_byte
        if span == rest:
            return begin + rest, shares
        left -= span * rate
    raise AssertionError("neighbours were checked not to be empty")


def bound_s(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> float:
    """No plan is faster than this many seconds; byte ranges reach it."""
    _check(nbytes, neighbours, ingress_s_per_byte)
    return _fluid(nbytes, neighbours, ingress_s_per_byte)[0] if nbytes else 0.0


def closed_form(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> SharePlan:
    """All neighbours worth using end at the same time.

    Args:
        nbytes: Size of the state.
        neighbours: Who can send, each with its delay and cost.
        ingress_s_per_byte: Seconds per byte of the newcomer's own access link; 0: no limit of its own.
    """
    _check(nbytes, neighbours, ingress_s_per_byte)
    if not nbytes:
        return SharePlan(policy="adaptive", shares={}, seconds=0.0, reason="nothing is missing")
    seconds, exact = _fluid(nbytes, neighbours, ingress_s_per_byte)
    shares = _whole(nbytes, exact, neighbours)
    capped = ingress_s_per_byte > 0 and sum(1 / n.s_per_byte for n in neighbours) > 1 / ingress_s_per_byte
    slow = f", held back by the newcomer's own {8e-6 / ingress_s_per_byte:.0f} Mbps" if capped else ""
    reason = (
        f"closed form: {_mib(nbytes)} in {seconds:.3f} s from {len(shares)} of {len(neighbours)} neighbours{slow}: "
        f"{_words(shares)}"
    )
    return SharePlan(policy="adaptive", shares=shares, seconds=seconds, reason=reason)


def _whole(nbytes: int, exact: Sequence[float], neighbours: Sequence[Neighbour]) -> dict[str, int]:
    """Whole bytes with the same sum: rounded down, what is left goes to the largest fractions."""
    floors = [int(x) for x in exact]
    surplus = nbytes - sum(floors)
    order = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    index = 0
    while surplus:  # more than one round, or a negative surplus, only where floating point has lost the last bytes
        i = order[index % len(order)]
        step = max(1, surplus // len(order)) if surplus > 0 else -min(floors[i], -surplus)
        floors[i] += step
        surplus -= step
        index += 1
    return {n.member: floor for n, floor in zip(neighbours, floors, strict=True) if floor}


def predict_s(shares: Mapping[str, int], neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> float:
    """How long these shares take if nobody deviates from them; a full access link is shared fairly, as TCP does."""
    known = {n.member: n for n in neighbours}
    unknown = next((member for member in shares if member not in known), None)
    if unknown is not None:
        raise PlanError(f"a share is planned for {unknown}, who is none of the neighbours {', '.join(known)}")
    sending = {m: known[m] for m, nbytes in shares.items() if nbytes}
    if not ingress_s_per_byte:
        return max((n.seconds(shares[m]) for m, n in sending.items()), default=0.0)
    now, left = 0.0, {m: float(shares[m]) for m in sending}
    while left:
        active = [m for m in left if sending[m].delay_s <= now]
        later = min((sending[m].delay_s for m in left if sending[m].delay_s > now), default=math.inf)
        rates = _fair({m: 1 / sending[m].s_per_byte for m in active}, 1 / ingress_s_per_byte)
        first = min((left[m] / rates[m] for m in active), default=math.inf)
        step = min(first, later - now)
        done = [m for m in active if left[m] / rates[m] <= step]
        for m in active:
            left[m] -= rates[m] * step
        for m in done:
            del left[m]
        now = later if step == later - now else now + step
    return now


def _fair(caps: Mapping[str, float], limit: float) -> dict[str, float]:
    """Max-min fair rates under one common limit."""
    rates: dict[str, float] = {}
    for count, member in zip(range(len(caps), 0, -1), sorted(caps, key=lambda m: caps[m]), strict=True):
        rates[member] = min(caps[member], limit / count)
        limit -= rates[member]
    return rates


# --- equal shards ----------------------------------------------------------------------------------------------------


def greedy_counts(count: int, shard_nbytes: int, neighbours: Sequence[Neighbour]) -> tuple[list[int], int]:
    """Chaos, Algorithm 2 (P3): shards by neighbour, aligned, and the index of who got the last one.

    Each shard goes to the neighbour u with the least load l_u + s * t_u; the first one of equals. A neighbour's next
    load changes only when it is chosen, so a heap finds the least one.
    """
    counts, costs = [0] * len(neighbours), [shard_nbytes * n.s_per_byte for n in neighbours]
    if count > _LITERAL:  # the first shards go to whoever completes them before some time: count those at once
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
    """How many shards each neighbour has completed by then; exact in spite of rounding."""
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
    """P2's theta; of neighbours that are used."""
    pairs = zip(counts, neighbours, strict=True)
    return max((n.seconds(count * shard_nbytes) for count, n in pairs if count), default=0.0)


def _bytes_of(
    nbytes: int, counts: Sequence[int], last: int, shard_nbytes: int, neighbours: Sequence[Neighbour]
) -> dict[str, int]:
    """Shards become bytes; the last shard is as short as the state is."""
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
) -> SharePlan:
    """Chaos, Algorithms 1 and 2, to the letter.

    Args:
        nbytes: Size of the state.
        neighbours: Who can send.
        layer_nbytes: Sizes of the layers (tensors): Algorithm 1 searches the shard size between their extremes.
        shard_nbytes: The shard size instead of a search; 1 MiB if neither is given.
        ingress_s_per_byte: For the prediction only: the paper does not know of it.
    """
    _check(nbytes, neighbours, ingress_s_per_byte)
    if not nbytes:
        return SharePlan(policy="greedy", shares={}, seconds=0.0, reason="nothing is missing")
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
        f"{_words(shares)}"
    )
    return SharePlan(policy="greedy", shares=shares, seconds=seconds, reason=reason, shard_nbytes=size)


def optimal(
    nbytes: int, neighbours: Sequence[Neighbour], *, shard_nbytes: int = SHARD_NBYTES, ingress_s_per_byte: float = 0.0
) -> SharePlan:
    """Equal shards, exactly: the least time by which K shards are complete, by bisection over the completion times."""
    _check(nbytes, neighbours, ingress_s_per_byte)
    if shard_nbytes < 1:
        raise ValueError(f"shard_nbytes must be positive, got {shard_nbytes}")
    if not nbytes:
        return SharePlan(policy="optimal", shares={}, seconds=0.0, reason="nothing is missing")
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
        f"the {count} smallest completion times of shards of {shard_nbytes} bytes, {seconds:.3f} s: {_words(shares)}"
    )
    return SharePlan(policy="optimal", shares=shares, seconds=seconds, reason=reason, shard_nbytes=shard_nbytes)


# --- what others do --------------------------------------------------------------------------------------------------


def _split(nbytes: int, members: Sequence[str]) -> dict[str, int]:
    each, more = divmod(nbytes, len(members))
    shares = {m: each + (1 if i < more else 0) for i, m in enumerate(members)}
    return {m: share for m, share in shares.items() if share}


def even(nbytes: int, neighbours: Sequence[Neighbour], *, ingress_s_per_byte: float = 0.0) -> SharePlan:
    """The same from each neighbour, whatever its link."""
    _check(nbytes, neighbours, ingress_s_per_byte)
    shares = _split(nbytes, [n.member for n in neighbours])
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    reason = f"the same from each of {len(neighbours)} neighbours, {seconds:.3f} s"
    return SharePlan(policy="even", shares=shares, seconds=seconds, reason=reason)


def single(
    nbytes: int, neighbours: Sequence[Neighbour], *, barrier: bool = False, ingress_s_per_byte: float = 0.0
) -> SharePlan:
    """All from the neighbour that alone is done first (EDL+).

    Args:
        nbytes: Size of the state.
        neighbours: Who can send.
        barrier: EDL+ has everybody wait until the transfer is over; recorded in the plan.
        ingress_s_per_byte: The newcomer's own access link.
    """
    _check(nbytes, neighbours, ingress_s_per_byte)
    best = min(neighbours, key=lambda n: (n.seconds(nbytes), n.member))
    shares = {best.member: nbytes} if nbytes else {}
    seconds = predict_s(shares, neighbours, ingress_s_per_byte=ingress_s_per_byte)
    waits = "; everybody waits for it" if barrier else ""
    reason = f"all from {best.member}, the fastest of {len(neighbours)} neighbours, {seconds:.3f} s{waits}"
    return SharePlan(policy="single", shares=shares, seconds=seconds, reason=reason, barrier=barrier)


def shortest_routes(links: Links, newcomer: str, unit_nbytes: float) -> dict[str, tuple[str, ...]]:
    """How a unit of data gets to the newcomer soonest from each node that has a path: hops from the newcomer's side."""
    beside: dict[str, dict[str, float]] = {}
    for (a, b), (latency_s, s_per_byte) in links.items():
        if a == b:
            raise PlanError(f"a link from {a} to itself: a link has two ends")
        for x, y in ((a, b), (b, a)):
            if (x, y) == (a, b) or (b, a) not in links:
                beside.setdefault(y, {})[x] = latency_s + unit_nbytes * s_per_byte  # data flows from x to y
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


def multi_source(nbytes: int, links: Links, newcomer: str, *, ingress_s_per_byte: float = 0.0) -> SharePlan:
    """The same from every node of the overlay, each over its shortest path (Autoscaling).

    A link that several paths share carries the sum of their bytes; the slowest such sum is what the transfer takes.

    Args:
        nbytes: Size of the state.
        links: All links of the overlay, the newcomer's among them.
        newcomer: Who pulls.
        ingress_s_per_byte: The newcomer's own access link.
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
    busiest = f"; the link {worst[0]} to {worst[1]} carries {_mib(load[worst])}" if worst else ""
    reason = f"the same from each of {len(nodes)} nodes, {_mib(relayed)} of it relayed, {seconds:.3f} s{busiest}"
    return SharePlan(policy="multi_source", shares=shares, seconds=seconds, reason=reason, routes=routes)


def _edges(route: Sequence[str], newcomer: str) -> list[tuple[str, str]]:
    """(sender, receiver) of each hop."""
    return list(zip(route, (newcomer, *route[:-1]), strict=True))


def stop_resume(
    nbytes: int, *, write_s_per_byte: float, read_s_per_byte: float, restart_s: float = 0.0, writer: str = ""
) -> SharePlan:
    """Checkpoint to a disk, read it, start everybody again (Pollux).

    Args:
        nbytes: Size of the state.
        write_s_per_byte: Of the disk.
        read_s_per_byte: Of the disk.
        restart_s: Seconds until all processes are back.
        writer: Who writes the checkpoint.
    """
    for name, value in (("write", write_s_per_byte), ("read", read_s_per_byte), ("restart", restart_s)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"stop_resume: the {name} cost must be finite and not negative, got {value}")
    seconds = nbytes * (write_s_per_byte + read_s_per_byte) + restart_s
    shares = {writer: nbytes} if nbytes else {}
    reason = f"{_mib(nbytes)} to a disk and back, then {restart_s:g} s until all are started again: {seconds:.3f} s"
    return SharePlan(policy="stop_resume", shares=shares, seconds=seconds, reason=reason, barrier=True)
