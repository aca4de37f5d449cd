"""Measures how much computing a join wastes across the cluster (Fig. 10).

Theory of operation. Two sources. *Observed*: whole joins of the product on an emulated edge (`hosts.py`); what each
host's steps take beyond the usual one is added up, whatever the cause. *Modelled*, from the pulls of Fig. 7, executed
and simulated: who stands still, times how long.

  Pollux       all running nodes, from the checkpoint's first byte until the restart is over;
  EDL+         all running nodes, as long as the pull takes: its barrier;
  Autoscaling  all running nodes, as long as the pull takes: all of them send or relay;
  Chaos        each neighbour, as long as it has bytes to send; all others train;
  adaptive     nobody: the newcomer replays what the others commit (docs/replay.md). What it costs them in processor
               time and bandwidth is in the observed joins only.

That gradients are computed while a node sends (the paper overlaps them) is not subtracted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.paper.clusters import growth
from benchmarks.paper.delays import COLOURS, QUICK, TIGHT, how_joins, image_joins, log_scale
from benchmarks.paper.figure import Claim, FigureResult, Scale, canvas, settled, span
from benchmarks.paper.hosts import DEVICE_S, Visit, Way, hosts
from benchmarks.paper.states import RESNET101
from benchmarks.paper.sweep import Point, chosen, teller

WAYS = (
    Way("EDL+", "pause", "benchmarks.transfer.policies:Single"),
    Way("Chaos", "pause", "benchmarks.transfer.policies:Greedy"),
    Way("adaptive", "replay", "adaptive"),
)
OBSERVED = {
    "EDL+": "pause,\none source (EDL+)",
    "Chaos": "pause, Chaos's\nAlgorithms 1 and 2",
    "adaptive": "replay, adaptive\n(this package)",
}
MODELLED = ("Pollux", "EDL+", "Autoscaling", "Chaos")


def idle_s(point: Point) -> float:
    """Returns the node-seconds that one join wastes, computed from its duration by a rule for each of the paper's
    systems.
    """
    if point.system == "Chaos":
        return point.serving_s
    if point.system == "adaptive":
        return 0.0
    return point.size * point.seconds


def observed(scale: Scale, size: int) -> dict[str, list[Visit]]:
    """Returns measured joins by each way into a running job, in turns."""
    say = teller("10")
    factors = scale.pick(QUICK, TIGHT)
    join = next(growth(scale.seed, size, first=size))
    seen: dict[str, list[Visit]] = {way.system: [] for way in WAYS}
    number = 0
    with hosts(join, factors, RESNET101.nbytes) as cluster:
        for _ in range(scale.pick(1, 4)):
            for way in WAYS:
                number += 1
                visit = cluster.visit(way, number)
                seen[way.system].append(visit)
                say(f"{way.system}: idle {visit.idle_s:.2f} s (calm {visit.calm_s:.2f}), delay {visit.delay_s:.2f} s")
    return seen


def fig10(scale: Scale) -> FigureResult:
    """Makes Fig. 10: the idle time of the cluster at a join, by system."""
    points = list(image_joins(scale))
    size = scale.pick(2, 6)
    seen = observed(scale, size)
    factors = scale.pick(QUICK, TIGHT)
    claims = _claims(points, seen, size)
    return FigureResult(
        "10",
        "Idle time across the cluster during a scale-out",
        "Observed: whole joins of this package into "
        f"{size} training processes on an emulated edge (ResNet101's size, {factors.words()}, seconds as they were, a "
        f"step's compute stands for a device's and takes {1e3 * DEVICE_S:.0f} ms); "
        "what each step takes beyond the usual one, added up over nodes; in the package's pause all of them wait, "
        "whatever the policy. Modelled from pulls, for the paper's systems: "
        "Pollux, EDL+ and Autoscaling stop all running nodes for the delay, Chaos each neighbour while it sends. "
        + how_joins(points, factors),
        [settled(c) for c in claims],
        {
            "modelled": [
                {"kind": p.kind, "system": p.system, "size": p.size, "model": p.model, "idle_s": idle_s(p)}
                for p in points
                if p.system in MODELLED
            ],
            "observed": {system: [asdict(v) for v in visits] for system, visits in seen.items()},
            "observed_size": size,
        },
    )


def _claims(points: Sequence[Point], seen: dict[str, list[Visit]], size: int) -> list[Claim]:
    """Returns the paper's statements with our results; `seen` are measured joins into clusters of `size`."""
    executed, computed = chosen(points, kind="scaled down"), chosen(points, kind="simulated")
    lost = {system: [idle_s(p) for p in chosen(executed, system=system)] for system in MODELLED}
    chaos = {
        n: statistics.median(idle_s(p) for p in chosen(computed, system="Chaos", size=n)) for n in _sizes(computed)
    }
    edl = {n: statistics.median(idle_s(p) for p in chosen(computed, system="EDL+", size=n)) for n in _sizes(computed)}
    multi = {n: statistics.median(idle_s(p) for p in chosen(computed, system="Autoscaling", size=n)) for n in edl}
    few, many = min(chaos), max(chaos)
    idle = {system: statistics.median(v.idle_s for v in visits) for system, visits in seen.items()}
    calm = statistics.median(v.calm_s for visits in seen.values() for v in visits)
    return [
        Claim(
            "Pollux: more than 1000 s",
            f"{span(lost['Pollux'])}",
            "scaled down",
            min(lost["Pollux"]) > 1000,
            "All nodes times its delay, as in the paper; its delay is shorter here (Fig. 7: disk and restart).",
        ),
        Claim(
            "EDL+: 50 to 100 s",
            f"{span(lost['EDL+'])}",
            "scaled down",
            max(lost["EDL+"]) >= 50 and min(lost["EDL+"]) <= 100 and statistics.median(lost["EDL+"]) >= 40,
            f"All nodes times its delay, which is {span([p.seconds for p in chosen(executed, system='EDL+')])} with "
            "the links that there are; the smaller models in the smaller clusters lose less than the paper's.",
        ),
        Claim(
            "Autoscaling is high, too, and grows with the cluster",
            f"{span(lost['Autoscaling'])}; {multi[few]:.0f} s at {few + 1} nodes, {multi[many]:.0f} s at {many + 1} "
            "(simulated)",
            "simulated",
            multi[many] > 1.5 * multi[few],
            "Its delay falls faster than the number of nodes grows.",
        ),
        Claim(
            "Chaos: under 10 s, whatever the cluster's size",
            f"{span(lost['Chaos'])}; {chaos[few]:.1f} s at {few + 1} nodes, {chaos[many]:.1f} s at {many + 1} "
            "(simulated)",
            "scaled down",
            max(lost["Chaos"]) < 10 and chaos[many] < 1.5 * chaos[few],
            "Neighbours times the time in which they send. All links end together, so it is the state's bytes over the "
            "mean rate of the links, however many they are: 528 MiB at 443 Mbps take 10 s.",
        ),
        Claim(
            "Chaos wastes least",
            f"observed at {size} to {size + 1} nodes: pause and one source (EDL+) {idle['EDL+']:.2f} s, pause and "
            f"Algorithms 1 and 2 {idle['Chaos']:.2f} s, this package's join by replay {idle['adaptive']:.2f} s; as "
            f"many steps without a join {calm:.2f} s",
            "scaled down",
            idle["Chaos"] < idle["EDL+"] and idle["adaptive"] <= idle["Chaos"],
            "On two cores the newcomer's own work slows all hosts' steps, which counts as idle time here.",
        ),
    ]


def _sizes(points: Sequence[Point]) -> list[int]:
    return sorted({p.size for p in points})


def plot_fig10(result: FigureResult, path: Path) -> None:
    """Draws Fig. 10: modelled idle time by cluster size on the left, measured joins on the right."""
    rows, seen = result.data["modelled"], result.data["observed"]
    sizes = sorted({row["size"] for row in rows})
    with canvas(path, 1, 2, width_in=4.8, height_in=3.4) as (_, (left, right)):
        for system in MODELLED:
            for kind, style in (("scaled down", "o-"), ("simulated", "--")):
                mine = [row for row in rows if row["system"] == system and row["kind"] == kind]
                places = [place for place, size in enumerate(sizes) if any(row["size"] == size for row in mine)]
                values = [
                    statistics.median(row["idle_s"] for row in mine if row["size"] == sizes[place]) for place in places
                ]
                label = system if kind == "scaled down" else None
                left.plot(places, values, style, color=COLOURS[system], label=label, markersize=4)
        log_scale(left, sizes)
        left.set_ylabel("idle node-seconds")
        left.set_title("modelled from executed (dots) and simulated pulls", fontsize=8)
        left.legend(fontsize=7)
        names = list(seen)
        right.bar(
            [OBSERVED[n] for n in names],
            [statistics.median(v["idle_s"] for v in seen[n]) for n in names],
            color=[COLOURS[n] for n in names],
        )
        right.axhline(
            statistics.median(v["calm_s"] for visits in seen.values() for v in visits),
            color="black",
            linewidth=0.8,
            linestyle=":",
        )
        right.tick_params(axis="x", labelsize=7)
        right.set_ylabel("idle node-seconds, as they were here")
        right.set_title(f"observed, {result.data['observed_size']} hosts (dotted: without a join)", fontsize=8)
