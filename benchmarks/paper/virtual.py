"""Simulates a newcomer's pull in virtual time: the product's own work queue and policies, with computed links.

Theory of operation. Who is asked for which bytes, and when, is decided by the very code that runs in production
(`replication/work_queue.py`, `replication/policies.py`), or by a policy to compare with;
only sockets and clocks are replaced. A source sends what it
was asked for in order. Its bytes flow at the rate that the links of its route leave it: each link is shared max-min
fair among the routes that use it, as long TCP flows do; each way has a rate of its own, and a relay forwards while it
receives. A request and its first bytes each take the route's latency. Between two events (a request is complete, one
begins to arrive, rates change, somebody idle looks for work again) all rates are constant, so time leaps from event to
event.

Not modelled: hashing, the vote on the state, TCP's own start, processors. What those cost is in the emulated runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.paper.clusters import LATENCY_S, Join
from benchmarks.transfer import plans
from benchmarks.transfer.policies import policy_of
from chaos_lightning.planning import shards
from chaos_lightning.replication import Job, PolicyOptions
from chaos_lightning.replication.policy import Request, TransferPolicy
from chaos_lightning.replication.table import PIECE_NBYTES
from chaos_lightning.replication.work_queue import WorkQueue

DEPTH = 2
REQUEST_NBYTES = 4 << 20
_TOO_LONG_S = 1e5
_NONE_NBYTES = 1e-3
"""Less than this is left only where floating point has lost something."""

Edge = tuple[str, str]
"""Sender and receiver."""


@dataclass
class Source:
    """A source of bytes in a simulated pull, with the links of its route and its requests."""

    edges: tuple[Edge, ...]
    requests: deque[tuple[float, Request]] = field(default_factory=deque)
    """With the moment from which each can arrive."""
    sent: float = 0.0
    """Bytes of the first request that have been sent."""
    served_s: float = 0.0
    """Time during which something was asked of it."""

    @property
    def latency_s(self) -> float:
        return LATENCY_S * len(self.edges)


@dataclass(frozen=True)
class Pulled:
    """Outcome of a simulated pull: seconds and bytes, by source."""

    seconds: float
    served_s: Mapping[str, float]
    """Seconds in which requests to the source were under way, by source."""
    nbytes: Mapping[str, int]
    """Bytes that came from the source, by source."""
    duplicated: int


def fair_rates(ways: Mapping[str, Sequence[Edge]], capacity: Mapping[Edge, float]) -> dict[str, float]:
    """Returns the max-min fair rates of flows that share links.

    Args:
        ways: Links of each flow, by flow.
        capacity: Capacity of each link, in any unit of rate.

    Returns:
        The rate of each flow, in that unit.
    """
    left = dict(capacity)
    users: dict[Edge, set[str]] = {}
    for flow, edges in ways.items():
        for edge in edges:
            users.setdefault(edge, set()).add(flow)
    rates: dict[str, float] = {}
    while users:
        tightest = min(users, key=lambda e: left[e] / len(users[e]))
        each = left[tightest] / len(users[tightest])
        for flow in list(users[tightest]):
            rates[flow] = each
            for edge in ways[flow]:
                left[edge] -= each
                users[edge].discard(flow)
                if not users[edge]:
                    del users[edge]
    return rates


class Pull:
    """One pull of `nbytes` by the newcomer of a join, in virtual time."""

    def __init__(self, join: Join, nbytes: int, policy: TransferPolicy, routes: Mapping[str, Sequence[str]]) -> None:
        """Prepares the pull; `routes` lists for each source the hops from the newcomer to it, the source last."""
        self.join = join
        self.now = 0.0
        self.policy = policy
        self.sources = {
            name: Source(tuple(zip(route, (join.newcomer, *route[:-1]), strict=True))) for name, route in routes.items()
        }
        grain = policy.grain_nbytes(nbytes, len(routes), REQUEST_NBYTES)
        jobs = [Job(at, min(at + grain, nbytes)) for at in range(0, nbytes, grain)]
        self.work_queue = WorkQueue(jobs, policy, clock=lambda: self.now, request_nbytes=REQUEST_NBYTES)
        for name in routes:
            self.work_queue.join(name)
        self.work_queue.assign(list(routes))
        self._epoch()
        self._rates: dict[str, float] = {}
        self._flowing: frozenset[str] = frozenset()

    def _epoch(self) -> None:
        """Takes the links' present rates, which are valid until they next change."""
        self._capacity = {}
        for (a, b), rate_bps in self.join.rates(self.now).items():
            self._capacity[a, b] = self._capacity[b, a] = rate_bps / 8
        self._until = self.join.changes_after_s(self.now)
        self._flowing = frozenset()

    def run(self) -> Pulled:
        """Advances virtual time until the last byte has arrived.

        Raises:
            RuntimeError: The pull does not end in the longest virtual time that is allowed.
        """
        for name in self.sources:
            self._ask(name)
        while not self.work_queue.over:
            if self.now > _TOO_LONG_S:
                raise RuntimeError(f"a pull by {self.policy.name} of {self.join.label} nodes does not end")
            self._leap()
        everybody = self.work_queue.everybody()
        return Pulled(
            seconds=self.now,
            served_s={n: s.served_s for n, s in self.sources.items()},
            nbytes={n: s.nbytes for n, s in everybody.items() if s.nbytes},
            duplicated=sum(s.duplicated for s in everybody.values()),
        )

    def _ask(self, name: str) -> None:
        source = self.sources[name]
        while request := self.work_queue.take(name, depth=DEPTH, wait=not source.requests, deadline=self.now):
            source.requests.append((self.now + 2 * source.latency_s, request))

    def _leap(self) -> None:
        """Advances virtual time to the next event."""
        busy = {n: s for n, s in self.sources.items() if s.requests}
        flowing = frozenset(n for n, s in busy.items() if s.requests[0][0] <= self.now)
        if flowing != self._flowing:
            self._rates = fair_rates({n: self.sources[n].edges for n in flowing}, self._capacity)
            self._flowing = flowing
        until = self._until - self.now
        ends = {}
        for name, source in busy.items():
            ready, request = source.requests[0]
            if name in flowing:
                ends[name] = (request.job.nbytes - source.sent) / self._rates[name]
            else:
                until = min(until, ready - self.now)
        if len(busy) < len(self.sources):
            until = min(until, self.policy.recheck_s)
        span = max(0.0, min(until, min(ends.values(), default=math.inf)))
        change = span == self._until - self.now
        self.now = self._until if change else self.now + span
        for source in busy.values():
            source.served_s += span
        done = [n for n in flowing if self._flow(n, span)]
        if change:
            self._epoch()
        for name, source in self.sources.items():
            if name in done or not source.requests:
                self._ask(name)

    def _flow(self, name: str, span: float) -> bool:
        """Takes in the bytes that a source sent in the last span of time; returns whether its first request is
        complete.
        """
        source = self.sources[name]
        request = source.requests[0][1]
        source.sent += self._rates[name] * span
        complete = source.sent >= request.job.nbytes - _NONE_NBYTES
        whole = request.job.nbytes if complete else int(source.sent)
        if whole > request.got:
            self.work_queue.arrived(request, whole - request.got)
        if complete:
            source.requests.popleft()
            source.sent = 0.0
            self.work_queue.done(request, [])
        return complete


def pull(join: Join, nbytes: int, policy: str, *, layer_nbytes: Sequence[int] = ()) -> Pulled:
    """Simulates a pull by the named policy, with link estimates as a probe measures them when the newcomer comes.

    Args:
        join: The cluster, and when.
        nbytes: Size of the state.
        policy: A name as `policy_of` takes it, but not stop_resume.
        layer_nbytes: greedy: sizes of the layers.
    """
    links = {pair: (LATENCY_S, 8 / rate) for pair, rate in join.rates().items()}
    several = policy == "multi_source"
    options = PolicyOptions(layer_nbytes=tuple(layer_nbytes), newcomer=join.newcomer)
    made = policy_of(policy, join.estimates(), options, **({"links": links} if several else {}))
    routes: Mapping[str, Sequence[str]] = {name: (name,) for name in join.near}
    if several:
        routes = plans.shortest_routes(links, join.newcomer, PIECE_NBYTES)
    return Pull(join, nbytes, made, routes).run()


def bound_s(join: Join, nbytes: int) -> float:
    """Returns the seconds of a pull that keeps all the newcomer's links busy to its end, at the rates that the links
    have when the newcomer comes.
    """
    near = [shards.Neighbour(n, 2 * latency, 8 / rate) for n, (latency, rate) in join.estimates().items()]
    return shards.bound_s(nbytes, near)


def hop_by_hop_s(join: Join, nbytes: int) -> float:
    """Returns the seconds of a multi-source pull whose relays forward a share only once they have all of it: an upper
    bound.

    The same shares and routes as the policy's; each link on a route carries all that uses it before the next begins.
    """
    links = {pair: (LATENCY_S, 8 / rate) for pair, rate in join.rates().items()}
    plan = plans.multi_source(nbytes, links, join.newcomer)
    ways = {
        source: list(zip(plan.routes[source], (join.newcomer, *plan.routes[source][:-1]), strict=True))
        for source in plan.shares
    }
    load: dict[Edge, int] = {}
    for source, edges in ways.items():
        for edge in edges:
            load[edge] = load.get(edge, 0) + plan.shares[source]
    cost = {**links, **{(b, a): value for (a, b), value in links.items()}}
    return max(sum(cost[e][0] + load[e] * cost[e][1] for e in edges) for edges in ways.values())
