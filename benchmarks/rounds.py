"""Orders the all-reduces of pipelines that are cut at different layers: in rounds by colouring, in a row, or all at
once.

Theory of operation. Layers with the same owners are reduced together, as a *vertex*; its weight is the seconds of that
all-reduce. Where two vertices have an owner in common they would share its link, which is an edge. A colouring gives
rounds: what is in one round shares no link. A round takes as long as its longest all-reduce, so the sum of these is
what a colouring is to keep small. DSATUR takes the vertex whose neighbours are in most rounds, of those the heaviest,
and puts it where it adds the least time. That is best for the number of rounds; where weights differ much, the heaviest
first whatever its neighbours can be better, so both are tried and the shorter is taken. The vertices of one device are
all neighbours, so no colouring has fewer rounds than the most vertices on one device. The paper's vertices are single
layers, which makes each device a clique of all its layers: more rounds, though shorter ones.

Rounds are a model of systems whose collectives run one after the other, and an order of sending for others. The same
all-reduces all at once share the cards of their owners fairly: no rate can be raised without lowering a lower one. What
`estimate` charges is neither: there each owner sends one group after the other, in order of readiness, and no round has
to end before the next one begins. So a chain of groups, each of which shares an owner with the next, can be a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from chaos_lightning.planning.pipelines.estimate import all_reduces, estimate
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.plan import PipelinePlan

Sending = Literal["row", "rounds", "at once"]
"""One all-reduce after the other; in rounds; all at once."""

_ENDED = 1e-12
"""Share of an all-reduce; if less is left it has ended, but for rounding."""


class Vertex(NamedTuple):
    """Layers that are all-reduced together, as they have the same owners."""

    layers: tuple[int, ...]
    owners: frozenset[str]
    ready_s: float
    """When all owners have their gradients."""
    seconds: float
    """Seconds of the all-reduce, alone."""


def vertices(
    job: TrainingJob, plan: PipelinePlan, ends_s: Mapping[str, float] | None = None, *, single_layers: bool = False
) -> list[Vertex]:
    """Returns the necessary all-reduces in order of readiness: one for each set of layers with the same, several
    owners.

    Args:
        job: The job.
        plan: The plan.
        ends_s: End of each device's last backward unit in seconds, by device; None: all is ready at once.
        single_layers: Whether each layer is reduced by itself, as in the paper.
    """
    owners = {x: who for group, who in zip(plan.groups, plan.owners, strict=True) for x in group}
    groups = [(range(x, x + 1), owners[x]) for x in sorted(owners)] if single_layers else None
    found: dict[object, Vertex] = {}
    for r in all_reduces(job, plan, ends_s or {}, groups):
        if r.owners > 1:
            who, layers = frozenset(owners[r.first]), tuple(range(r.first, r.end))
            key = layers if single_layers else who
            before = found.pop(key, Vertex((), who, 0.0, 0.0))
            found[key] = Vertex(
                tuple(sorted(before.layers + layers)),
                who,
                max(before.ready_s, r.ready_s),
                before.seconds + r.alone_s,
            )
    return list(found.values())


def neighbours_of(all_of: Sequence[Vertex]) -> list[set[int]]:
    """Returns for each all-reduce the indices of the other all-reduces that have one of its owners."""
    at: dict[str, set[int]] = defaultdict(set)
    for i, v in enumerate(all_of):
        for name in v.owners:
            at[name].add(i)
    return [set[int]().union(*(at[name] for name in v.owners)) - {i} for i, v in enumerate(all_of)]


def colour(all_of: Sequence[Vertex]) -> tuple[tuple[Vertex, ...], ...]:
    """Groups all-reduces into rounds without a common owner: by DSATUR, or by weight alone if that takes less time."""
    near = neighbours_of(all_of)
    return min((_coloured(all_of, near, saturation) for saturation in (True, False)), key=rounds_s)


def _coloured(all_of: Sequence[Vertex], near: Sequence[set[int]], saturation: bool) -> tuple[tuple[Vertex, ...], ...]:
    seen: list[set[int]] = [set() for _ in all_of]
    rounds: list[list[Vertex]] = []
    lasts: list[float] = []
    left = set(range(len(all_of)))
    while left:
        i = max(left, key=lambda i: (len(seen[i]) if saturation else 0, all_of[i].seconds, len(near[i]), -i))
        left.remove(i)
        v = all_of[i]
        free = [k for k in range(len(rounds)) if k not in seen[i]]
        if not free:
            free = [len(rounds)]
            rounds.append([])
            lasts.append(0.0)
        k = min(free, key=lambda k: (max(0.0, v.seconds - lasts[k]), k))
        rounds[k].append(v)
        lasts[k] = max(lasts[k], v.seconds)
        for other in near[i]:
            seen[other].add(k)
    return tuple(map(tuple, rounds))


def rounds_s(rounds: Iterable[Iterable[Vertex]]) -> float:
    """Returns the seconds of all rounds together, if all gradients are ready."""
    return sum(max(v.seconds for v in r) for r in rounds)


# ------------------------------------------------------------------------------------------------ when all has ended


def one_by_one(rounds: Iterable[Sequence[Vertex]]) -> float:
    """Returns when the last of several rounds ends, each of which waits for the one before and for its own
    gradients.
    """
    at = 0.0
    for r in sorted(rounds, key=lambda r: max(v.ready_s for v in r)):
        at = max(at, *(v.ready_s for v in r)) + max(v.seconds for v in r)
    return at


def at_once(all_of: Sequence[Vertex]) -> float:
    """Returns when the last all-reduce ends if each begins when it is ready and all share the owners' cards fairly."""
    now = 0.0
    waiting = sorted(all_of, key=lambda v: v.ready_s, reverse=True)
    left: dict[Vertex, float] = {}
    while waiting or left:
        rates = _fair(left)
        ends = min((now + left[v] / rates[v] for v in left), default=math.inf)
        comes = waiting[-1].ready_s if waiting else math.inf
        then = max(now, min(ends, comes))
        left = {v: x - (then - now) * rates[v] for v, x in left.items()}
        left = {v: x for v, x in left.items() if x > _ENDED * v.seconds}
        now = then
        while waiting and waiting[-1].ready_s <= now:
            v = waiting.pop()
            left[v] = v.seconds
        left = {v: x for v, x in left.items() if x}
    return now


def _fair(running: Iterable[Vertex]) -> dict[Vertex, float]:
    """Returns the fair shares of full speed: the busiest card is divided equally, then the busiest of the remaining
    ones.
    """
    users: dict[str, set[Vertex]] = defaultdict(set)
    for v in running:
        for name in v.owners:
            users[name].add(v)
    room = dict.fromkeys(users, 1.0)
    rates: dict[Vertex, float] = {}
    while users:
        tight = min(users, key=lambda name: (room[name] / len(users[name]), name))
        share = room[tight] / len(users[tight])
        for v in list(users[tight]):
            rates[v] = share
            for name in v.owners:
                room[name] -= share
                users[name].discard(v)
                if not users[name]:
                    users.pop(name)
    return rates


def step_s(
    job: TrainingJob, plan: PipelinePlan, way: Sending, *, single_layers: bool = False, overlap: bool = True
) -> float:
    """Returns the step seconds of a plan if its all-reduces are sent in this way, instead of that of `estimate`.

    Args:
        job: The job.
        plan: The plan.
        way: Order in which all-reduces are sent.
        single_layers: Whether each layer is reduced by itself, as in the paper.
        overlap: Whether all-reduces begin when they are ready, not only when the last backward unit of all has ended.
    """
    done = estimate(job, plan)
    all_of = vertices(job, plan, done.ends_s, single_layers=single_layers)
    if not overlap:
        all_of = [v._replace(ready_s=done.compute_s) for v in all_of]
    match way:
        case "row":
            reduced = one_by_one([(v,) for v in all_of])
        case "rounds":
            reduced = one_by_one(colour(all_of))
        case "at once":
            reduced = at_once(all_of)
    return done.step_s - done.reduced_s + max(done.compute_s, reduced)
