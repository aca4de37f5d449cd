"""Compares the greedy shard assignment with the optimum (Fig. 16).

Theory of operation. In the paper's model a neighbour begins after its latency and the end of its own all-reduce, and
then needs the same time for each shard. Four plans are computed for each join of the paper's clusters (`clusters.py`),
with all-reduces that end at different times: equal shares; Algorithms 1 and 2 as printed; the least that any assignment
of equal shards reaches at the shard size that Algorithm 1 has chosen (P3's optimum), and at any of many sizes between
the layers (P2's); and the closed form, which no plan beats. That the third is what brute force finds is checked on
small instances, by enumeration. Executed are the joins of Figs. 7 and 15, which have equal and greedy shares, too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.paper.clusters import Join, growth
from benchmarks.paper.delays import image_joins
from benchmarks.paper.figure import Claim, FigureResult, Scale, canvas, progress, settled
from benchmarks.paper.states import GPT2, IMAGES, MIB, TEXTS, Model
from benchmarks.paper.sweep import chosen
from benchmarks.transfer.plans import ComparedPlan, even, greedy, optimal
from chaos_lightning.planning.shards import Neighbour, bound_s

SYNC_S = 0.1
"""All-reduces end up to so much after the first, at random."""
_LEAST = 1e-3
"""Smaller excesses are drawn as this many percent."""
TRIED = 100
"""Shard sizes between the layers among which P2's optimum is looked for."""


def neighbours_of(join: Join, chance: random.Random) -> list[Neighbour]:
    """Returns the newcomer's neighbours in the planner's form, each with a random time at which its all-reduce ends."""
    return [
        Neighbour(name, 2 * latency + chance.uniform(0, SYNC_S), 8 / rate)
        for name, (latency, rate) in join.estimates().items()
    ]


def enumerated_s(count: int, shard_nbytes: int, near: Sequence[Neighbour]) -> float:
    """Returns the seconds of the best assignment of `count` equal shards to neighbours (the paper's P3), by
    trying all.
    """
    best = float("inf")
    for assignment in product(range(len(near)), repeat=count):
        ends = (n.seconds(assignment.count(i) * shard_nbytes) for i, n in enumerate(near) if i in assignment)
        best = min(best, max(ends))
    return best


def best_size_s(nbytes: int, near: Sequence[Neighbour], layers: Sequence[int], tried: int = TRIED) -> float:
    """Returns the least seconds over `tried` shard sizes between those of the layers, each assigned in the best way."""
    low, high = min(layers), max(layers)
    sizes = {max(1, round(low * (high / low) ** (i / (tried - 1)))) for i in range(tried)}
    # Much smaller shards than this one reach the bound to within a thousandth, at the price of counting more of them.
    least = max(low, nbytes // 20_000)
    return min(optimal(nbytes, near, shard_nbytes=size).seconds for size in {max(least, s) for s in sizes})


def checks(seed: int, count: int) -> tuple[int, float]:
    """Returns how many random small instances Algorithm 2 solves as well as brute force, and its worst relative
    excess.
    """
    chance = random.Random(f"brute force/{seed}")
    equal, worst = 0, 0.0
    for _ in range(count):
        near = [
            Neighbour(f"n{i}", chance.uniform(0, 0.2), 8 / chance.uniform(100e6, 1000e6))
            for i in range(chance.randint(2, 4))
        ]
        shards, size = chance.randint(1, 7), chance.randint(1, 8 * MIB)
        found = greedy(shards * size, near, shard_nbytes=size).seconds
        exact = enumerated_s(shards, size, near)
        equal += found <= exact * (1 + 1e-9)
        worst = max(worst, found / exact - 1)
    return equal, worst


def gaps(join: Join, model: Model, chance: random.Random, tried: int) -> dict[str, float]:
    """Returns the seconds of the equal, the greedy and the best assignments, the bound, and how long planning took."""
    near = neighbours_of(join, chance)
    layers = model.layout(model.nbytes)
    nbytes = sum(layers)
    began = time.thread_time()
    planned: ComparedPlan = greedy(nbytes, near, layer_nbytes=layers)
    greedy_cpu_s = time.thread_time() - began
    began = time.thread_time()
    exact = optimal(nbytes, near, shard_nbytes=planned.shard_nbytes)
    optimal_cpu_s = time.thread_time() - began
    return {
        "even": even(nbytes, near).seconds,
        "greedy": planned.seconds,
        "P3": exact.seconds,
        "P2": min(planned.seconds, best_size_s(nbytes, near, layers, tried)),
        "bound": bound_s(nbytes, near),
        "greedy_cpu_s": greedy_cpu_s,
        "optimal_cpu_s": optimal_cpu_s,
    }


def _all(scale: Scale) -> Iterator[tuple[str, int, dict[str, float]]]:
    models = scale.pick((IMAGES[0], GPT2), (*IMAGES, *TEXTS))
    for repeat in range(scale.pick(2, 8)):
        chance = random.Random(f"sync/{scale.seed}/{repeat}")
        for join in growth(scale.seed + repeat, 11):
            for model in models:
                yield model.name, join.size, gaps(join, model, chance, scale.pick(60, TRIED))


def fig16(scale: Scale) -> FigureResult:
    """Makes Fig. 16: transfer times by equal, greedy and optimal assignment of shards."""
    progress("16", "planning")
    rows = list(_all(scale))
    tried = scale.pick(100, 600)
    equal, worst = checks(scale.seed, tried)
    progress("16", f"brute force: equal in {equal} of {tried} instances")
    to_p3 = [100 * (row["greedy"] / row["P3"] - 1) for _, _, row in rows]
    to_p2 = [100 * (row["greedy"] / row["P2"] - 1) for _, _, row in rows]
    to_bound = [100 * (row["greedy"] / row["bound"] - 1) for _, _, row in rows]
    even_over = [row["even"] / row["bound"] for _, _, row in rows]
    executed = chosen(image_joins(scale), kind="scaled down")
    by = {
        system: {(p.model, p.size, p.repeat): p.seconds / p.bound_s for p in chosen(executed, system=system)}
        for system in ("even", "Chaos", "adaptive")
    }
    medians = {system: statistics.median(values.values()) for system, values in by.items()}
    faster = sum(by["Chaos"][key] <= by["even"][key] * 1.02 for key in by["Chaos"])
    planning = [1e3 * row["greedy_cpu_s"] for _, _, row in rows]
    exact = [1e3 * row["optimal_cpu_s"] for _, _, row in rows]
    claims = [
        Claim(
            "Greedy assignment (Algorithm 2) comes close to what brute force finds in P3",
            f"it is what brute force finds in {equal} of {tried} instances (worst excess {100 * worst:.2g}%), and P3's "
            f"optimum in all {len(rows)} plans to within {max(to_p3):.2g}%",
            "real",
            worst < 1e-6,
            "With equal shards the K smallest completion times are an optimum, and Algorithm 2 takes just those.",
        ),
        Claim(
            "Greedy stays within 0.5 to 29% of the optimum",
            f"{min(to_p2):.2g} to {max(to_p2):.2g}% of the best shard size's (median {statistics.median(to_p2):.2g}%), "
            f"{min(to_bound):.2g} to {max(to_bound):.2g}% of what no plan beats",
            "simulated",
            max(to_p2) <= 29,
            "What is lost is lost by Algorithm 1, whose binary search over the shard's size takes the objective for "
            "monotonic, which it is not.",
        ),
        Claim(
            "Equal shares are the upper bound",
            f"planned: {min(even_over):.2f} to {max(even_over):.2f} times the bound; executed: equal "
            f"{medians['even']:.2f}, greedy {medians['Chaos']:.2f}, adaptive {medians['adaptive']:.2f} (medians); "
            f"greedy is no slower than equal shares in {faster} of {len(by['Chaos'])} joins",
            "scaled down",
            medians["Chaos"] < medians["even"],
            "Over links that are nearly alike equal shares are as good, and shards add rounding.",
        ),
        Claim(
            "P3 is NP-hard: solving it takes seconds, with the search over sizes tens of them; greedy takes a flash",
            f"Algorithms 1 and 2 take {statistics.median(planning):.1f} ms of a processor (worst {max(planning):.0f}); "
            f"an exact solution of P3 at a given size takes {statistics.median(exact):.2f} ms (worst {max(exact):.1f})",
            "real",
            False,
            "Greedy is fast, but P3 is not hard: its shards are alike, so only how many of them each neighbour sends "
            "matters, and bisection over the time finds the optimum.",
        ),
    ]
    return FigureResult(
        "16",
        "Equal, greedy and optimal shard assignment",
        f"Plans are computed by the package's own planner at full size, for {len(rows)} joins of clusters of 7 to 12 "
        f"nodes in which all-reduces end up to {1e3 * SYNC_S:.0f} ms apart. Executed are the joins of Fig. 7, scaled "
        "down, without that.",
        [settled(c) for c in claims],
        {
            "rows": [{"model": model, "size": size, **row} for model, size, row in rows],
            "executed": medians,
        },
    )


def plot_fig16(result: FigureResult, path: Path) -> None:
    """Draws the excess of each assignment over the bound, by model."""
    rows = result.data["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    kinds = {"even": "equal shares", "greedy": "Algorithms 1 and 2", "P2": "best shard size (P2's optimum)"}
    with canvas(path, width_in=7.5, height_in=3.6) as (sheet, (ax,)):
        for offset, (kind, label) in enumerate(kinds.items()):
            values = [
                [max(_LEAST, 100 * (row[kind] / row["bound"] - 1)) for row in rows if row["model"] == model]
                for model in models
            ]
            places = [i + 0.25 * (offset - 1) for i in range(len(models))]
            boxes = ax.boxplot(values, positions=places, widths=0.2, patch_artist=True, showfliers=False)
            for box in boxes["boxes"]:
                box.set_facecolor(f"C{offset}")
            ax.plot([], [], "s", color=f"C{offset}", label=label)
        ax.set_xticks(range(len(models)), models, fontsize=8)
        ax.set_yscale("log")
        ax.set_ylabel("excess over the bound, %")
        ax.grid(alpha=0.3, axis="y")
        sheet.legend(loc="outside lower center", ncols=len(kinds), fontsize=8)
