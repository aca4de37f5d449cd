"""Turns measured links into a plan: the trees of the all-reduce, the reason for them, and the predicted seconds.

Theory of operation. A *planner* draws a plan (`PlanSpec`) for a network (`planning/network.py`); `plan` looks one up by
name, checks what it drew, and predicts its time. Planners:
    rotating, star: two hops. Rotating needs a link between every pair, a star one member with links to all others.
    chain: a line through all members over the widest links.
    widest: the widest spanning tree, of those as wide the fastest.
    packed: several trees that share the links so that together they carry as much as any trees can.
    local: the ranks of one machine hang below one of them; machines among themselves go by `packed` or `widest`.
    fapt: like NetStorm's policy of fastest aggregation paths, which the paper of Chaos names as its all-reduce
        scheduler, as far as its text lets one understand it: each root's tree takes the fastest ways to it, and several
        roots, each with a part of the buffer in proportion to its tree's width, share the work.
    spread: several trees that spread their work evenly over network cards and links, drawn in milliseconds
        (planning/quick.py). Where a search is hopeless, among many members, they are as a rule the best.
    auto: that of the above with the least predicted time; the simpler one where it is as good.
    MODULE:FUNCTION, or the name of an entry point in the group `chaos_lightning.planners`: a planner of the user's own.

Links change all the time, and changing trees costs little, but not nothing. So `replan` changes a plan that still works
only if the prediction says that this pays.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import NamedTuple

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.graph import Pair, connected_parts, neighbours
from chaos_lightning.planning.network import INFINITE, Edge, Network, Rank
from chaos_lightning.planning.packing import bottleneck_bps, nearest, pack, weigh, widest
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import PLANNERS_GROUP, chunk_of, misfit
from chaos_lightning.protocol.types import SMALL_JOB, PlanSpec

Links = Mapping[Pair, tuple[float, float, float]]
"""Measured links: latency in seconds, bps from a to b and bps from b to a, by (a, b)."""
Access = Mapping[str, tuple[float, float]]
"""Rates (bps in, bps out) that all links of a member share, by its id; 0: not known."""
Planner = Callable[[Network, int], tuple[PlanSpec, str]]
"""Function of (network, bytes of the buffer) that returns a plan and the reason in words; raises PlanError if it can
draw none.
"""

TYPICAL_NBYTES = 64 << 20
"""Bytes of gradients for which trees are planned where their number is not given."""

_EVEN = 1.25
"""Ratio of rates below which links count as alike: measuring again would give as much of a difference."""
_AS_GOOD = 1.03
_MOST_TREES = 16
_TOO_MANY = 256
"""Number of members beyond which `auto` does not search: a search would take up to a minute and hardly pay."""


class Planned(NamedTuple):
    spec: PlanSpec
    reason: str
    seconds: float
    """Predicted seconds of one all-reduce."""


class Bound(NamedTuple):
    """Lower bounds of an all-reduce's seconds, by the bytes that must cross links, without latencies: for one tree, and
    for several.
    """

    one_tree_s: float
    several_trees_s: float


def plan(
    members: Sequence[Rank],
    links: Links,
    *,
    policy: str | Planner = "auto",
    nbytes: int = TYPICAL_NBYTES,
    access: Access | None = None,
) -> Planned:
    """Returns the all-reduce plan for these members and measured links.

    Args:
        members: Members in rank order.
        links: Measured links; pairs without a link are absent or have a rate of 0.
        policy: A planner, or its name (see the module).
        nbytes: Bytes of one all-reduce.
        access: Rates that all links of a member share, where they are known.

    Raises:
        PlanError: The links do not connect the members (names the parts) or are no links, or the planner is unknown or
            drew what does not fit.
    """
    network = Network(members, links, access)
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "planner")
    draw = planner(policy) if isinstance(policy, str) else policy
    spec, reason = draw(network, nbytes)
    wrong = misfit(spec, network.ids, network.links) if len(network) > 1 else misfit(spec, network.ids)
    if wrong:
        raise PlanError(f"planner {name!r} drew a plan that does not fit: {wrong}")
    return Planned(spec, reason, network.seconds(spec, nbytes))


def replan(
    old: PlanSpec,
    members: Sequence[Rank],
    links: Links,
    *,
    policy: str | Planner = "auto",
    nbytes: int = TYPICAL_NBYTES,
    access: Access | None = None,
    gain: float = 0.15,
    cost_s: float = 0.05,
    steps: int = 100,
) -> tuple[PlanSpec | None, str]:
    """Returns another plan if a change pays off, else None; and the reason in words.

    A plan that no longer fits is always replaced. One that does is replaced where an all-reduce is predicted to take at
    least `gain` (a fraction) less than with it, and the time saved in `steps` steps exceeds `cost_s`, the seconds that
    a change costs: so that noise in what was measured does not move the trees to and fro.

    Raises:
        PlanError: `plan` raises it for these arguments.
    """
    network = Network(members, links, access)
    wrong = misfit(old, network.ids, network.links)
    new = plan(members, links, policy=policy, nbytes=nbytes, access=access)
    if wrong:
        return new.spec, f"the plan no longer fits: {wrong}; {new.reason}"
    before = network.seconds(old, nbytes)
    change = f"{before:.3g} s with the present trees, {new.seconds:.3g} s with others"
    saved = before - new.seconds
    if new.spec == old or saved <= gain * before:
        return None, f"kept: {change}, not {gain:.0%} less"
    if saved * steps <= cost_s:
        return None, f"kept: {change}; {steps} steps would save {saved * steps:.3g} s, a change costs {cost_s:g} s"
    return new.spec, f"{change}; {new.reason}"


def bound(members: Sequence[Rank], links: Links, nbytes: int, access: Access | None = None) -> Bound:
    """Returns lower bounds of the seconds of an all-reduce over these links.

    One tree takes as long as the buffer over the narrowest link of the widest spanning tree; for several trees see
    `planning/packing.py`.
    """
    network = Network(members, links, access)
    several_s = 8 * nbytes / pack(network).bound_bps
    return Bound(max(8 * nbytes / bottleneck_bps(network), several_s), several_s)


# --- planners by name --------------------------------------------------------------------------------------------


def planner(name: str) -> Planner:
    """Returns the planner of a name: a built-in one, MODULE:FUNCTION, or an installed entry point.

    Raises:
        PlanError: There is no such planner; lists those there are.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise PlanError(f"planner {name!r} cannot be loaded: {error}; expected MODULE:FUNCTION") from error
        return _callable(found, name)
    installed = {entry.name: entry for entry in entry_points(group=PLANNERS_GROUP)}
    if name not in installed:
        known = ", ".join([*PLANNERS, *sorted(installed)])
        raise PlanError(f"planner {name!r} is unknown; expected one of {known}, or MODULE:FUNCTION")
    try:
        found = installed[name].load()
    except Exception as error:
        raise PlanError(f"planner {name!r} ({installed[name].value}) cannot be loaded: {error}") from error
    return _callable(found, name)


def _callable(found: object, name: str) -> Planner:
    if not callable(found):
        raise PlanError(f"planner {name!r} is a {type(found).__name__}; expected a function of (Network, int)")
    return found


# --- planners ----------------------------------------------------------------------------------------------------


def _rotating(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    missing = len(network) * (len(network) - 1) // 2 - len(network.edges)
    if missing:
        raise PlanError(f"plan 'rotating' needs a link between every pair; {missing} are missing")
    return PlanSpec(), "rotating: every pair has a link"


def _widest(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    parents = widest(network, nbytes, _chunk(network, nbytes))
    return network.spec([(parents, 1.0)]), f"the widest spanning tree, {_bps(_narrowest(network, parents))}"


def _packed(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    if len(network) == 1:
        return _widest(network, nbytes)
    chunk = _chunk(network, nbytes)
    packing = pack(network)
    best: tuple[tuple[int, ...], ...] = (widest(network, nbytes, chunk),)
    parts: tuple[float, ...] = (1.0,)
    best_s = network.time_s([(best[0], 1.0)], nbytes, chunk)
    most = min(len(packing.trees), _MOST_TREES)
    hung = [network.rooted(tree, chunk) for tree, _ in packing.trees[:most]]
    for count in range(1, most + 1):
        rates = weigh(network, [tree for tree, _ in packing.trees[:count]])
        kept = [(parents, rate) for parents, rate in zip(hung, rates, strict=False) if rate > 0.01 * sum(rates)]
        whole = sum(rate for _, rate in kept)
        trees = [(parents, rate / whole) for parents, rate in kept]
        seconds = network.time_s(trees, nbytes, chunk)
        if seconds < best_s * 0.995:  # another tree must bring more than its handling costs
            best, parts, best_s = tuple(p for p, _ in trees), tuple(r for _, r in trees), seconds
    return network.spec(list(zip(best, parts, strict=True))), (
        f"{len(best)} {'trees that share' if len(best) > 1 else 'tree over'} the links; any number of trees together "
        f"could carry at most {_bps(packing.bound_bps)}"
    )


def _chain(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    order = _line(network)
    parents = network.rooted(((min(a, b), max(a, b)) for a, b in pairwise(order)), _chunk(network, nbytes))
    return network.spec([(parents, 1.0)]), f"a chain over links of {_bps(_narrowest(network, parents))} and more"


def _star(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    size = len(network)
    centres = [i for i in range(size) if len(network.near[i]) == size - 1]
    if not centres:
        raise PlanError("plan 'star' needs a member with links to all others; there is none")
    stars = [tuple(-1 if i == root else root for i in range(size)) for root in centres]
    parents = min(stars, key=lambda p: network.time_s([(p, 1.0)], nbytes, _chunk(network, nbytes)))
    return network.spec([(parents, 1.0)]), f"a star around {network.ids[parents.index(-1)]}"


def _fapt(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    chunk = _chunk(network, nbytes)
    trees = [nearest(network, root, chunk) for root in range(len(network))]
    trees.sort(key=lambda parents: network.time_s([(parents, 1.0)], nbytes, chunk))
    widths = [_narrowest(network, parents) for parents in trees]
    options = []
    for count in range(1, min(len(trees), _MOST_TREES) + 1):
        whole = sum(widths[:count])
        options.append([(p, w / whole if count > 1 else 1.0) for p, w in zip(trees[:count], widths, strict=False)])
    best = min(options, key=lambda parts: (network.time_s(parts, nbytes, chunk), len(parts)))
    roots = ", ".join(network.ids[parents.index(-1)] for parents, _ in best)
    return network.spec(best), f"fastest aggregation paths to {roots}"


def _local(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    """Plans trees among one rank of each machine (its head), and attaches the machine's other ranks below the head."""
    heads = _heads(network)
    chunk = _chunk(network, nbytes)
    if len(heads) in (1, len(network)):
        spec, reason = _packed(network, nbytes)
        return spec, f"{'all on one machine' if len(heads) == 1 else 'every rank on its own'}: {reason}"
    links = _links(network, [(i, j) for i, j in network.edges if i in heads and j in heads])
    access = {network.ids[i]: (bps, bps) for i, bps in network.access.items() if i in heads}
    members = [_Rank(network.ids[i], network.hosts[i]) for i in heads]
    above = Network(members, links, access, network.cards)
    inner, reason = _packed(above, nbytes)
    below = _below(network, heads, chunk)
    trees = []
    for tree in inner.trees:
        parents = list(below)
        for name, parent in zip(tree.members, tree.parents, strict=True):
            parents[network.rank[name]] = network.rank[parent] if parent else -1
        trees.append((tuple(parents), tree.weight))
    names = ", ".join(network.ids[i] for i in heads)
    return network.spec(trees), f"other ranks of each machine below {names}; among these {reason}"


def _spread(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    members = [_Rank(name, host) for name, host in zip(network.ids, network.hosts, strict=True)]
    return quick(members, _links(network, network.edges))


def _auto(network: Network, nbytes: int) -> tuple[PlanSpec, str]:
    """Runs all planners, and returns the plan with the least predicted time."""
    ranks_share = 1 < len(set(network.hosts)) < len(network)
    rates = [network.worth(e) for e in network.edges]
    if network.complete and not ranks_share and max(rates, default=1.0) <= _EVEN * min(rates, default=1.0):
        return PlanSpec(), "auto: rotating, since every pair has a link and all links are alike"
    found: dict[str, tuple[PlanSpec, str, float]] = {}
    unable: dict[str, str] = {}
    local = ("local",) if ranks_share else ()
    spread = ("spread",) if len(network) > SMALL_JOB else ()
    searched = ("widest", *local, "packed", "fapt", "chain", "star") if len(network) <= _TOO_MANY else ()
    for name in ("rotating", *spread, *searched):
        try:
            spec, reason = PLANNERS[name](network, nbytes)
        except PlanError as error:
            unable[name] = str(error)
            continue
        found[name] = (spec, reason, network.seconds(spec, nbytes))
    least = min(seconds for _, _, seconds in found.values())
    chosen = next(name for name, (_, _, seconds) in found.items() if seconds <= least * _AS_GOOD)
    others = ", ".join(f"{name} {seconds:.3g} s" for name, (_, _, seconds) in found.items() if name != chosen)
    spec, reason, seconds = found[chosen]
    return spec, f"auto: {chosen}, {seconds:.3g} s for {nbytes / 2**20:.4g} MiB (others: {others}); {reason}"


PLANNERS: Mapping[str, Planner] = {
    "auto": _auto,
    "widest": _widest,
    "packed": _packed,
    "chain": _chain,
    "star": _star,
    "rotating": _rotating,
    "fapt": _fapt,
    "local": _local,
    "spread": _spread,
}


# --- what they share ---------------------------------------------------------------------------------------------


class _Rank(NamedTuple):
    id: str
    host: str


def _links(network: Network, edges: Iterable[Edge]) -> dict[Pair, tuple[float, float, float]]:
    return {
        (network.ids[i], network.ids[j]): (network.latency[i, j], network.rate[i, j], network.rate[j, i])
        for i, j in edges
    }


def _chunk(network: Network, nbytes: int) -> int:
    return chunk_of(PlanSpec("trees"), nbytes, len(network.ids))


def _narrowest(network: Network, parents: Sequence[int]) -> float:
    return min(
        (network.worth((min(i, p), max(i, p))) for i, p in enumerate(parents) if p >= 0),
        default=INFINITE,
    )


def _bps(rate: float) -> str:
    return "any rate" if rate == INFINITE else f"{rate / 1e6:.4g} Mbps"


def _line(network: Network) -> list[int]:
    """Returns a path through all members whose narrowest link is as wide as a bounded search finds."""
    size = len(network)
    if size == 1:
        return [0]
    widths = sorted({network.worth(e) for e in network.edges}, reverse=True)
    low, high, best = 0, len(widths) - 1, None
    while low <= high:  # the more links are allowed, the sooner there is a way
        middle = (low + high) // 2
        way = _way_through(network, widths[middle])
        if way is None:
            low = middle + 1
        else:
            best, high = way, middle - 1
    if best is None:
        raise PlanError("plan 'chain' found no way through all members over these links")
    return best


def _way_through(network: Network, limit_bps: float) -> list[int] | None:
    """Returns a path through all members over links of at least `limit_bps`, found by backtracking; None if a bounded
    number of tries finds none.
    """
    near = [
        [j for j in there if network.worth((min(i, j), max(i, j))) >= limit_bps] for i, there in enumerate(network.near)
    ]
    tries = 20_000
    for start in sorted(range(len(near)), key=lambda i: (len(near[i]), i)):
        way, seen = [start], {start}
        options = [_onward(near, start, seen)]
        while way and tries:
            tries -= 1
            if len(way) == len(near):
                return way
            if options[-1]:
                step = options[-1].pop()
                way.append(step)
                seen.add(step)
                options.append(_onward(near, step, seen))
            else:
                seen.discard(way.pop())
                options.pop()
    return None


def _onward(near: Sequence[Sequence[int]], at: int, seen: set[int]) -> list[int]:
    """Returns the unvisited neighbours of a member, the most promising one last: that with the fewest unvisited
    neighbours of its own.
    """
    return sorted((j for j in near[at] if j not in seen), key=lambda j: (-sum(k not in seen for k in near[j]), -j))


def _heads(network: Network) -> list[int]:
    """Returns the head of each machine (of each part, if the machine's links do not connect it): the rank with the
    widest links to other machines; all ranks if heads are not connected.
    """
    heads, outside = [], [0.0] * len(network)
    for i, j in network.edges:
        if not network.local((i, j)):
            outside[i] += network.worth((i, j))
            outside[j] += network.worth((i, j))
    ranks = range(len(network))
    for part in connected_parts(ranks, neighbours(ranks, filter(network.local, network.edges))):
        heads.append(max(part, key=lambda i: (outside[i], -i)))
    heads.sort()
    if len(connected_parts(heads, neighbours(heads, network.edges))) == 1:
        return heads
    return list(range(len(network)))


def _below(network: Network, heads: Sequence[int], chunk_nbytes: int) -> list[int]:
    """Returns the parent of each rank in a tree of fastest paths to the head of its machine; -1 for heads."""
    parents = [-1] * len(network)
    reached = list(heads)
    while len(reached) < len(network):
        options = [
            (sum(network.hop_s(j, i, chunk_nbytes)), i, j)
            for i in reached
            for j in network.near[i]
            if j not in reached and network.local((i, j))
        ]
        _, i, j = min(options, key=lambda option: (option[1] not in heads, option))
        parents[j] = i
        reached.append(j)
    return parents
