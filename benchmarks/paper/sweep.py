"""Runs joins into the paper's clusters by all its systems, executed and simulated: the data of Figs. 7, 8, 10 and 15.

Theory of operation. A *system* is a transfer policy, as `benchmarks/transfer/policies.py` has them: Pollux is
`stop_resume`, EDL+ `single` (with a barrier), Autoscaling `multi_source`, Chaos `greedy`; "even" is the paper's
multi-neighbour replication without its scheduler, and "adaptive" what the product does by itself. One random history
(`clusters.growth`) per repetition; all systems meet the same joins. `emulated` really executes them (`emulated.py`),
`simulated` computes them (`virtual.py`), at sizes and in clusters for which this machine has not the time.

Pollux needs what no transfer shows: a disk, which all share (DISK_BPS, each way), and a restart. One node writes, the
newcomer reads, both really executed where emulated; that every other node reads, too, is added as its bytes over the
disk's rate, and the restart as a fresh interpreter that imports torch, measured here, alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.paper import emulated, virtual
from benchmarks.paper.clusters import FIRST, Join, growth
from benchmarks.paper.figure import Kind, progress
from benchmarks.paper.states import Model
from benchmarks.workers import restart_s, scratch

SYSTEMS = {
    "Pollux": "stop_resume",
    "EDL+": "single",
    "Autoscaling": "multi_source",
    "even": "even",
    "Chaos": "greedy",
    "adaptive": "adaptive",
}
"""Policies by the names that the figures use."""
HOP_BY_HOP = "hop by hop"
"""Simulated beside Autoscaling: its relays wait for whole shares (`virtual.hop_by_hop_s`)."""
DISK_BPS = 800e6
"""The disk with Pollux's checkpoints, each way: 100 MB/s."""


@dataclass(frozen=True)
class Point:
    """Measurements of one join by one system.

    Attributes:
        kind: "real" or "scaled down" (executed), or "simulated".
        model: Name of the state.
        size: Number of nodes that ran before the join.
        repeat: Number of the history, from 0.
        system: One of SYSTEMS.
        seconds: Scale-out delay at the paper's sizes and rates, s.
        serving_s: Seconds in which sources had something to send, summed over the sources.
        near: Number of the newcomer's neighbours.
        bound_s: Least seconds that any transfer from neighbours takes.
        changed: Whether rates changed in mid-pull.
    """

    kind: Kind
    model: str
    size: int
    repeat: int
    system: str
    seconds: float
    serving_s: float
    near: int
    bound_s: float
    changed: bool = False


@dataclass(frozen=True)
class Plan:
    """The joins to run: models, clusters, systems and repetitions.

    Attributes:
        models: Models whose states are pulled.
        sizes: Numbers of nodes before the join.
        systems: Compared systems, of SYSTEMS.
        repeats: Number of histories.
        factors: Factors by which the emulation reduces sizes and rates.
        seed: Seed of the first history; each further history has the next one.
        budget_s: Seconds of the emulation; no repetition begins that would end later.
        neighbours: Number of neighbours of each newcomer; 0: as many as `clusters.several` says.
    """

    models: tuple[Model, ...]
    sizes: tuple[int, ...]
    systems: tuple[str, ...]
    repeats: int
    factors: emulated.Factors
    seed: int = 0
    budget_s: float = 300.0
    neighbours: int = 0


def joins(plan: Plan, repeat: int) -> list[Join]:
    """Returns the joins of one growing cluster, smallest cluster first."""
    first = min(FIRST, *plan.sizes)
    history = growth(plan.seed + repeat, max(plan.sizes), first=first, neighbours=plan.neighbours)
    return [join for join in history if join.size in plan.sizes]


def stop_resume_s(nbytes: int, size: int, one_s: float, restarted_s: float) -> float:
    """Returns for how many seconds a cluster stops for a checkpoint and a restart.

    Args:
        nbytes: Bytes of the state.
        size: Number of nodes that ran before, all of which read the checkpoint from the same disk as the newcomer does.
        one_s: Seconds in which the checkpoint is written, and read by the newcomer.
        restarted_s: Seconds until all processes are back.
    """
    return one_s + size * nbytes * 8 / DISK_BPS + restarted_s


def emulate(plan: Plan, say: Callable[[str], None]) -> list[Point]:
    """Executes all joins of a plan, on emulated links; Pollux, which takes long and varies little, once for each model
    and size.
    """
    found: list[Point] = []
    began = time.monotonic()
    with scratch() as folder:
        for repeat in range(plan.repeats):
            round_began = time.monotonic()
            for join in joins(plan, repeat):
                with emulated.cluster(join, plan.factors, folder, DISK_BPS) as cluster:
                    for model in plan.models:
                        found += _emulated(plan, cluster, model, repeat)
                say(f"repetition {repeat + 1}, {join.label} nodes, {time.monotonic() - began:.0f} s so far")
            now = time.monotonic()
            if now - began + (now - round_began) * 0.8 > plan.budget_s:
                break
    return found


def _emulated(plan: Plan, cluster: emulated.Cluster, model: Model, repeat: int) -> Iterable[Point]:
    join = cluster.join
    cluster.load(model.layout(model.nbytes / plan.factors.smaller))
    bound = virtual.bound_s(join, model.nbytes)
    for system in plan.systems:
        if system == "Pollux" and repeat:
            continue
        moved = cluster.pull(SYSTEMS[system])
        seconds, serving = moved.seconds, sum(moved.served_s.values())
        if system == "Pollux":
            seconds = stop_resume_s(model.nbytes, join.size, seconds, restart_s())
        yield Point(
            "real" if plan.factors == emulated.Factors() else "scaled down",
            model.name,
            join.size,
            repeat,
            system,
            seconds,
            serving,
            len(join.near),
            bound,
            moved.changed,
        )


def simulate(plan: Plan, say: Callable[[str], None]) -> list[Point]:
    """Simulates all joins of a plan at the paper's sizes and rates, in virtual time."""
    found: list[Point] = []
    for repeat in range(plan.repeats):
        for join in joins(plan, repeat):
            for model in plan.models:
                found += _simulated(plan, join, model, repeat)
        say(f"repetition {repeat + 1} of {plan.repeats}, simulated")
    return found


def _simulated(plan: Plan, join: Join, model: Model, repeat: int) -> Iterable[Point]:
    bound = virtual.bound_s(join, model.nbytes)
    layers = model.layout(model.nbytes)
    for system in plan.systems:
        if system == "Pollux":
            one_s = 2 * model.nbytes * 8 / DISK_BPS
            seconds, serving = stop_resume_s(model.nbytes, join.size, one_s, restart_s()), one_s / 2
        else:
            pulled = virtual.pull(join, model.nbytes, SYSTEMS[system], layer_nbytes=layers)
            seconds, serving = pulled.seconds, sum(pulled.served_s.values())
        yield Point("simulated", model.name, join.size, repeat, system, seconds, serving, len(join.near), bound)
        if system == "Autoscaling":
            waiting_s = virtual.hop_by_hop_s(join, model.nbytes)
            yield Point("simulated", model.name, join.size, repeat, HOP_BY_HOP, waiting_s, 0.0, len(join.near), bound)


# --- what points say --------------------------------------------------------------------------------------------------


def chosen(points: Iterable[Point], **wanted: object) -> list[Point]:
    """Returns the points whose attributes have these values."""
    return [p for p in points if all(getattr(p, name) == value for name, value in wanted.items())]


def middle(points: Sequence[Point], **wanted: object) -> float:
    """Returns the median delay of the points whose attributes have these values, s; NaN if there are none."""
    found = [p.seconds for p in chosen(points, **wanted)]
    return statistics.median(found) if found else float("nan")


def growth_of(points: Sequence[Point], **wanted: object) -> float:
    """Returns the median delay in the two largest clusters divided by that in the two smallest."""
    found = chosen(points, **wanted)
    sizes = sorted({p.size for p in found})
    few, many = sizes[:2], sizes[-2:]
    return statistics.median(p.seconds for p in found if p.size in many) / statistics.median(
        p.seconds for p in found if p.size in few
    )


def share(points: Sequence[Point], faster: str, slower: str, factor: float = 1.0) -> tuple[int, int]:
    """Returns in how many joins the system `faster` took less than `factor` times as long as `slower`, and the number
    of joins.
    """
    theirs = {(p.kind, p.model, p.size, p.repeat): p.seconds for p in chosen(points, system=slower)}
    mine = [(p, theirs.get((p.kind, p.model, p.size, p.repeat))) for p in chosen(points, system=faster)]
    both = [(p.seconds, other) for p, other in mine if other is not None]
    return sum(a < factor * b for a, b in both), len(both)


def fidelity(points: Sequence[Point], kind: Kind = "scaled down", to: Kind = "simulated") -> float:
    """Returns the median ratio of the delays of the same joins in two kinds of runs, without Pollux; NaN if no join has
    both.
    """
    others = {(p.model, p.size, p.repeat, p.system): p.seconds for p in chosen(points, kind=to)}
    ratios = [
        p.seconds / other
        for p in chosen(points, kind=kind)
        if p.system != "Pollux" and (other := others.get((p.model, p.size, p.repeat, p.system)))
    ]
    return statistics.median(ratios) if ratios else float("nan")


def teller(number: str) -> Callable[[str], None]:
    """Returns a function that prints the progress of one figure."""
    return functools.partial(progress, number)
