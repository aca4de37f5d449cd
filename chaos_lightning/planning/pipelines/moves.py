"""Assigns devices to the places of a new plan, and lists the bytes that must move from device to device.

Theory of operation. A device of the new plan needs its layers' weights and optimizer state, and has those of the layers
that it owned under the old one. Devices are exchanged only within a *kind* (speed, memory), since the planner chose
each place for a device of its kind. Devices of one kind that hold the same layers form a class, and so do places that
need the same layers: this is a transportation problem of some tens of classes, which is solved exactly (`flows`). Its
cost is one number that orders two goals: the bytes that move in all, then those that the busiest receiver gets.

The bytes of a layer may come from all that hold it, in parts. What the busiest source sends is then the largest ratio,
over all sets of missing layers, of their bytes to the number of their holders. It is found as the least capacity of
each source with which a flow carries everything: a flow that does not carry everything names such a set, whose ratio is
the next capacity to try. Capacities in whole bytes lose nothing, as the flow is in whole bytes then, too. If some
source sends more than any device receives, the assignment is searched again with a higher cost for the layers of that
set; the bytes in all still come first. The search ends when that no longer helps. So the bytes in all are the fewest.
The bytes of the busiest card are the fewest that were found, and surely the fewest possible if that card is a
receiver's.

Devices of one class are alike in all this, but not in their links. So a device keeps the place that the new plan gave
it if it can; else a place goes to the host of the stage before it, or to the host that the new plan put it on. Then
devices of one class are exchanged if owners that the new plan had on several hosts would be on one host. Hops between
hosts can still be more than in the new plan as it was given: `estimate` tells what that costs a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.flows import FlowNetwork
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.planning.pipelines.plan import VACANT, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.rerouting import FatalLossError

ROUNDS = 8
"""Most assignments that are tried for a busiest source that sends less."""
LEVELS = 64
"""Levels of the number of bytes that a receiver lacks, in one search."""

Layers = int
"""Set of layers: bit l is layer l."""
Held = Mapping[str, Collection[int]]
"""Numbers of the layers whose state each device has."""
Class = tuple[tuple[float, int], Layers]
"""Kind of device, and the layers that it holds or needs."""


class Move(NamedTuple):
    """Bytes [start, stop) of a layer's weights and optimizer state that one device sends to another."""

    layer: int
    start: int
    stop: int
    source: str
    target: str


class LinkUse(NamedTuple):
    """Bytes that one device sends to another, and the seconds they take."""

    source: str
    target: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Moves:
    """All transfers between devices that a new plan needs before it can run."""

    moves: tuple[Move, ...]
    links: tuple[LinkUse, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.links)

    @cached_property
    def sends(self) -> dict[str, int]:
        """Bytes that each device sends."""
        found: Counter[str] = Counter()
        for x in self.links:
            found[x.source] += x.nbytes
        return dict(found)

    @property
    def busiest_source_nbytes(self) -> int:
        return max(self.sends.values(), default=0)

    @property
    def busiest_source(self) -> str | None:
        return max(self.sends, key=lambda name: self.sends[name], default=None)

    @cached_property
    def seconds(self) -> float:
        """Seconds of all transfers; the transfers that a device sends follow one another, and so do those that it
        receives.
        """
        busy: dict[tuple[str, str], float] = defaultdict(float)
        for x in self.links:
            busy["sends", x.source] += x.seconds
            busy["receives", x.target] += x.seconds
        return max(busy.values(), default=0.0)


# ------------------------------------------------------------------------------------------------ who holds, who needs


def _mask(stages: Iterable[PlanStage]) -> Layers:
    found = 0
    for s in stages:
        found |= (1 << s.end) - (1 << s.first)
    return found


def _bits(layers: Layers) -> Iterator[int]:
    while layers:
        low = layers & -layers
        yield low.bit_length() - 1
        layers ^= low


class _Change:
    """Change from one plan to another: the layers that each device holds, and the layers that each new place needs.

    Args:
        job: Job with all devices of the new plan and all that hold layers.
        old: Plan before; its owners hold their layers, if they are devices of the new plan.
        new: The plan that is to run.
        held: Layers that each device holds; None: as `old` says. Devices outside of the new plan serve, too.
    """

    def __init__(self, job: TrainingJob, old: PipelinePlan, new: PipelinePlan, held: Held | None = None) -> None:
        if not old.layer_count == new.layer_count == job.costs.count:
            raise PlanError(
                f"the old plan has {old.layer_count} layers, the new one {new.layer_count}, the job {job.costs.count}; "
                "expected the same number"
            )
        unknown = [name for name in new.devices if name not in job.by_name]
        if unknown:
            raise PlanError(f"the new plan has devices that the job has not: {', '.join(unknown[:8])}")
        self.job = job
        self.state = [job.costs.state(x, x + 1) for x in range(job.costs.count)]
        sized = sum(1 << x for x, nbytes in enumerate(self.state) if nbytes)
        if held is None:
            serves = {name: sized & _mask(old.stages.get(name, ())) for name in new.devices}
        else:
            serves = {name: sized & sum(1 << x for x in set(layers)) for name, layers in held.items()}
        self.serves = {**dict.fromkeys(new.devices, 0), **serves}
        self.holds = {name: self.serves[name] for name in new.devices}
        self.needs = {name: sized & _mask(new.stages.get(name, ())) for name in new.devices}
        there = 0
        for layers in self.serves.values():
            there |= layers
        lost = list(_bits(sized & ~there))
        if lost:
            raise FatalLossError(lost)
        self.sources = Counter(self.serves.values())
        """Number of devices that hold exactly each set of layers."""
        self._sizes: dict[Layers, int] = {}

    def nbytes(self, layers: Layers) -> int:
        if layers not in self._sizes:
            self._sizes[layers] = sum(self.state[x] for x in _bits(layers))
        return self._sizes[layers]

    def classes(self, layers: Mapping[str, Layers]) -> dict[Class, list[str]]:
        found: dict[Class, list[str]] = defaultdict(list)
        for name in sorted(layers):
            found[self.job.by_name[name].kind, layers[name]].append(name)
        return dict(sorted(found.items()))

    def demand(self, missing: Mapping[Layers, int]) -> dict[int, int]:
        """Returns the bytes of each layer that must be sent.

        Args:
            missing: Number of devices that lack exactly each set of layers.
        """
        found: dict[int, int] = defaultdict(int)
        for layers, times in missing.items():
            for x in _bits(layers) if times else ():
                found[x] += times * self.state[x]
        return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------------ balanced sources


class _Shares(NamedTuple):
    busiest: int
    """Bytes of the busiest source."""
    tight: Layers
    """Layers whose holders all send as much as the busiest source, but for rounding."""
    sent: dict[tuple[int, Layers], int]
    """Bytes of each layer that the devices with exactly a set of layers send together, by (layer, set)."""


def _balance(demand: Mapping[int, int], sources: Mapping[Layers, int]) -> _Shares:
    """Divides the bytes to send of each layer among its holders so that the busiest sender sends the least."""
    held = sorted(x for x in sources if any(x >> layer & 1 for layer in demand))
    layer_at = {x: 1 + i for i, x in enumerate(demand)}
    net = FlowNetwork(1 + len(demand) + len(held))
    arcs: dict[tuple[int, Layers], int] = {}
    doors, tight = [], list[int]()
    for node, mask in enumerate(held, 1 + len(demand)):
        arcs |= {(x, mask): net.arc(layer_at[x], node, demand[x]) for x in demand if mask >> x & 1}
        doors.append((net.arc(node, 0, 0), node, sources[mask]))
    left = dict(demand)
    busiest, reached = 0, set(range(1 + len(demand) + len(held)))
    while left:
        # At first of all layers, then of those that are too much for their holders.
        tight = [x for x in demand if layer_at[x] in reached]
        holders = sum(many for _, node, many in doors if node in reached)
        least = -(-sum(demand[x] for x in tight) // holders)
        for door, _, many in doors:
            net.widen(door, (least - busiest) * many)
        busiest, reached = least, set()
        for x in list(left):
            left[x] -= net.send(layer_at[x], 0, left[x])
            if left[x]:
                reached |= net.reached
            else:
                left.pop(x)
    return _Shares(
        busiest, sum(1 << x for x in tight), {key: net.sent(arc) for key, arc in arcs.items() if net.sent(arc)}
    )


def move_list(job: TrainingJob, old: PipelinePlan, new: PipelinePlan, held: Held | None = None) -> Moves:
    """Returns the transfers that give the devices of a new plan their layers.

    Args:
        job: Job with all devices of the new plan, and all that hold layers.
        old: Plan before; its owners hold their layers, if they are devices of the new plan.
        new: New plan with its devices in their places (`assign`).
        held: Layers that each device holds and serves, also if it is no device of the new plan; None: as `old`
            says.

    Raises:
        FatalLossError: No device holds some layer.
        PlanError: The plans and the job do not belong together.
    """
    change = _Change(job, old, new, held)
    missing = {name: need & ~change.holds[name] for name, need in change.needs.items()}
    shares = _balance(change.demand(Counter(missing.values())), change.sources)
    pieces = _pieces(change, shares)
    moves: list[Move] = []
    for layer in sorted(pieces):
        takers = {name: change.state[layer] for name in sorted(missing) if missing[name] >> layer & 1}
        at = dict.fromkeys(takers, 0)
        for source, target, nbytes in _meet(job, pieces[layer], takers):
            moves.append(Move(layer, at[target], at[target] + nbytes, source, target))
            at[target] += nbytes
    over: Counter[tuple[str, str]] = Counter()
    for m in moves:
        over[m.source, m.target] += m.stop - m.start
    return Moves(tuple(moves), tuple(LinkUse(*ends, n, job.link(*ends).time_s(n)) for ends, n in sorted(over.items())))


def _pieces(change: _Change, shares: _Shares) -> dict[int, dict[str, int]]:
    """Returns the bytes of each layer that each holder sends; holders of the same layers send equal amounts."""
    left: dict[str, int] = {}
    of: dict[Layers, list[str]] = defaultdict(list)
    loads: Counter[Layers] = Counter()
    for (_, mask), nbytes in shares.sent.items():
        loads[mask] += nbytes
    for name in sorted(change.serves):
        mask = change.serves[name]
        if loads[mask]:
            of[mask].append(name)
            left[name] = -(-loads[mask] // change.sources[mask])
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for (layer, mask), nbytes in sorted(shares.sent.items()):
        while nbytes:
            name = of[mask][-1]
            part = min(nbytes, left[name])
            if part:
                found[layer][name] = part
            nbytes -= part
            left[name] -= part
            if not left[name]:
                of[mask].pop()
    return found


def _meet(job: TrainingJob, gives: dict[str, int], takes: dict[str, int]) -> Iterator[tuple[str, str, int]]:
    """Yields (source, target, bytes) transfers of one layer, with those within a host first."""
    for near in (True, False):
        waiting: dict[str, list[str]] = defaultdict(list)
        for source in sorted(gives, reverse=True):
            if gives[source]:
                waiting[job.by_name[source].place if near else ""].append(source)
        for target in takes:
            queue = waiting[job.by_name[target].place if near else ""]
            while takes[target] and queue:
                source = queue[-1]
                part = min(gives[source], takes[target])
                gives[source] -= part
                takes[target] -= part
                if not gives[source]:
                    queue.pop()
                yield source, target, part


# ------------------------------------------------------------------------------------------------ who takes what

Pairs = dict[tuple[Class, Class], int]
"""Number of devices of one class that take places of another."""


def assign(job: TrainingJob, old: PipelinePlan, new: PipelinePlan, held: Held | None = None) -> PipelinePlan:
    """Returns the new plan with its devices assigned to places so that the fewest bytes have to move.

    Args:
        job: Job with all devices of the new plan, and all that hold layers.
        old: Plan before, whose owners hold their layers.
        new: New plan; its devices, idle ones among them, are those that are left.
        held: Layers that each device holds and serves, also if it is no device of the new plan; None: as
            `old` says.

    Raises:
        FatalLossError: No device holds some layer.
        PlanError: The plans and the job do not belong together.
    """
    change = _Change(job, old, new, held)
    rows, columns = change.classes(change.holds), change.classes(change.needs)
    names = _Seats(job, new, rows, columns, _pairs(change, rows, columns)).taken()
    _part_hosts(job, new, change.holds, names)
    return renamed(new, names)


def renamed(plan: PipelinePlan, names: Mapping[str, str]) -> PipelinePlan:
    """Returns the plan with its devices replaced by others, as `names` maps them."""
    names = {VACANT: VACANT, **names}

    def moved(stages: Iterable[PlanStage]) -> tuple[PlanStage, ...]:
        return tuple(s._replace(device=names[s.device]) for s in stages)

    return replace(
        plan,
        pipelines=tuple(replace(p, stages=moved(p.stages)) for p in plan.pipelines),
        detours=tuple(d._replace(device=names[d.device]) for d in plan.detours),
        idle=tuple(sorted(names[name] for name in plan.idle)),
    )


def _pairs(change: _Change, rows: Mapping[Class, list[str]], columns: Mapping[Class, list[str]]) -> Pairs:
    """Returns how many devices of each class (layers held) take places of each class (layers needed), with the fewest
    bytes to move.

    Pairs that share no layer are left out: devices and places that are in no other pair make them, in any way.
    """
    dear: list[Layers] = []
    found: list[tuple[int, int, Pairs]] = []
    while len(dear) < ROUNDS:
        pairs = _transport(change, rows, columns, dear)
        missing = _missing(columns, pairs)
        shares = _balance(change.demand(missing), change.sources)
        receives = max(map(change.nbytes, missing), default=0)
        found.append((max(shares.busiest, receives), shares.busiest, pairs))
        if shares.busiest <= receives or shares.tight in dear:
            break
        dear.append(shares.tight)
    return min(found, key=lambda x: x[:2])[2]


def _missing(columns: Mapping[Class, list[str]], pairs: Pairs) -> Counter[Layers]:
    """Returns the number of devices that lack each exact set of layers."""
    found: Counter[Layers] = Counter()
    for column, names in columns.items():
        found[column[1]] += len(names)
    for (row, column), times in pairs.items():
        found[column[1]] -= times
        found[column[1] & ~row[1]] += times
    return +found


def _transport(
    change: _Change, rows: Mapping[Class, list[str]], columns: Mapping[Class, list[str]], dear: Sequence[Layers]
) -> Pairs:
    """Returns the pairs of device and place classes that move the fewest bytes; ties go to fewest bytes of `dear`
    layers, then to the least for the busiest receiver.

    All numbers of bytes that some device may lack are divided by size into levels. With n receivers one of level k
    costs (n + 1) ** k, more than all those of lower levels, so none is of a higher level than need be. If that level
    has several sizes it is divided in turn.
    """
    shared = {(a, b): b[1] & ~a[1] for a in rows for b in columns if a[0] == b[0] and a[1] & b[1]}
    sizes = sorted({change.nbytes(x) for x in {*shared.values(), *(b[1] for b in columns)}} - {0})
    base = 1 + sum(map(len, columns.values()))
    most = 1 + base * sum(map(change.nbytes, dear))
    low, step = 0, len(sizes)
    while True:
        step = max(1, -(-step // LEVELS))
        level = {nbytes: min(1 + (k - low) // step, LEVELS + 1) for k, nbytes in enumerate(sizes) if k >= low}
        top = base ** (LEVELS + 2)

        def cost(missing: Layers, level: dict[int, int] = level, top: int = top) -> int:
            nbytes = change.nbytes(missing)
            price = sum(change.nbytes(missing & x) for x in dear)
            return (nbytes * most + price) * top + (base ** level[nbytes] if nbytes in level else 0)

        pairs = _cheapest(rows, columns, shared, cost)
        if step == 1:
            return pairs
        low += (bisect_left(sizes, max(map(change.nbytes, _missing(columns, pairs)), default=0)) - low) // step * step


def _cheapest(
    rows: Mapping[Class, list[str]],
    columns: Mapping[Class, list[str]],
    shared: Mapping[tuple[Class, Class], Layers],
    cost: Callable[[Layers], int],
) -> Pairs:
    places = {b: 1 + i for i, b in enumerate(columns)}
    devices = {a: 1 + len(columns) + i for i, a in enumerate(rows)}
    net = FlowNetwork(1 + len(columns) + len(rows))
    arcs = {
        (a, b): net.arc(places[b], devices[a], min(len(rows[a]), len(columns[b])), cost(missing))
        for (a, b), missing in shared.items()
    }
    for a, names in rows.items():
        net.arc(devices[a], 0, len(names))
    for b, names in columns.items():
        net.arc(places[b], 0, len(names), cost(b[1]))  # a device that is left takes the place
        net.send(places[b], 0, len(names))
    return {pair: net.sent(arc) for pair, arc in arcs.items() if net.sent(arc)}


class _Seats:
    """Assignment of devices to places, given how many devices of each class go to places of each class; prefers devices
    on the host of the stage before.
    """

    def __init__(
        self,
        job: TrainingJob,
        new: PipelinePlan,
        rows: Mapping[Class, list[str]],
        columns: Mapping[Class, list[str]],
        pairs: Pairs,
    ) -> None:
        self.job, self.new = job, new
        self.row = {name: key for key, names in rows.items() for name in names}
        self.column = {name: key for key, names in columns.items() for name in names}
        self.pairs = dict(pairs)
        self.spare: Counter[tuple[str, Class]] = Counter()
        for key, names in rows.items():
            self.spare["row", key] += len(names)
        for key, names in columns.items():
            self.spare["column", key] += len(names)
        for (a, b), times in pairs.items():
            self.spare["row", a] -= times
            self.spare["column", b] -= times
        self.partners: dict[Class, list[Class]] = defaultdict(list)
        for a, b in pairs:
            self.partners[b].append(a)
        self.free: dict[Class, dict[str, list[str]]] = {key: defaultdict(list) for key in rows}

    def taken(self) -> dict[str, str]:
        """Returns the new device for each device of the new plan."""
        places = [*self.new.stages, *(x for x in self.new.devices if x not in self.new.stages)]
        found = {name: name for name in places if self._pair(self.row[name], self.column[name])}
        for name in sorted(self.row, reverse=True):
            if name not in found:
                self.free[self.row[name]][self.job.by_name[name].place].append(name)
        host = ""
        for name in places:
            if name not in found:
                found[name] = self._next(self.column[name], (host, self.job.by_name[name].place))
            host = self.job.by_name[found[name]].place
        return found

    def _pair(self, row: Class, column: Class) -> bool:
        """Uses up one planned pair of a device class and a place class; returns whether there was one."""
        if self.pairs.get((row, column)):
            self.pairs[row, column] -= 1
            return True
        ends = (("row", row), ("column", column))
        if row[0] == column[0] and not row[1] & column[1] and all(self.spare[x] for x in ends):
            self.spare.subtract(ends)
            return True
        return False

    def _next(self, column: Class, hosts: Sequence[str]) -> str:
        """Returns a free device for a place of this class, on one of the given hosts if possible."""
        rows = [a for a in self.partners[column] if self.pairs[a, column]]
        if self.spare["column", column]:
            rows += [a for a in self.free if a[0] == column[0] and not a[1] & column[1] and self.spare["row", a]]
        row, host = next(
            ((a, host) for host in hosts for a in rows if self.free[a].get(host)),
            (rows[0], ""),
        )
        queues = self.free[row]
        host = host or min(queues)
        name = queues[host].pop()
        if not queues[host]:
            del queues[host]
        self._pair(row, column)
        return name


def _part_hosts(job: TrainingJob, new: PipelinePlan, holds: Mapping[str, Layers], names: dict[str, str]) -> None:
    """Exchanges devices that hold the same layers, where all owners of a layer would be on one host and the new plan
    had them on several.
    """

    def together(owners: Iterable[str]) -> bool:
        return len({job.by_name[names[x]].place for x in owners}) == 1

    apart = sorted({x for x in new.owners if len({job.by_name[name].place for name in x}) > 1})
    groups: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for owners in apart:
        for name in owners:
            groups[name].append(owners)

    def worse(*places: str) -> int:
        return sum(map(together, {owners for name in places for owners in groups[name]}))

    alike: dict[Class, list[str]] = defaultdict(list)
    for place in sorted(names):
        alike[job.by_name[names[place]].kind, holds[names[place]]].append(place)
    for owners in filter(together, apart):
        for a in owners:
            for b in alike[job.by_name[names[a]].kind, holds[names[a]]]:
                before = worse(a, b)
                names[a], names[b] = names[b], names[a]
                if worse(a, b) >= before:
                    names[a], names[b] = names[b], names[a]
            if not together(owners):
                break
