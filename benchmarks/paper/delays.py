"""Where a newcomer's time goes (Fig. 3) and how long each system takes to bring it in (Figs. 7, 8 and 15).

The joins of Figs. 7, 10 and 15 are the same ones (`sweep.py`); they are run once and shown three times.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper import clusters, emulated, sweep
from benchmarks.paper.figure import Claim, FigureResult, Scale, canvas
from benchmarks.paper.states import ALEXNET, GPT2, IMAGES, RESNET101, TEXTS, VGG11, Model
from benchmarks.paper.sweep import Plan, Point, chosen, fidelity, growth_of, middle, share, teller
from benchmarks.workers import scratch

FIG3_BPS = 200e6
TIGHT = emulated.Factors(smaller=8, slower=4)
TIGHT_TEXTS = emulated.Factors(smaller=16, slower=4)
QUICK = emulated.Factors(smaller=32, slower=4)
SIMULATED_BEYOND = (15, 23, 47)
COLOURS = {
    "Pollux": "tab:red",
    "EDL+": "tab:orange",
    "Autoscaling": "tab:purple",
    "even": "tab:olive",
    "Chaos": "tab:blue",
    "adaptive": "tab:green",
}
LABELS = {
    "even": "multi-neighbour, even shares",
    "Chaos": "Chaos (Algorithms 1 and 2)",
    "adaptive": "this package (adaptive)",
}


def span(values: Sequence[float], unit: str = "s") -> str:
    """Least to most, in words."""
    low, high = min(values), max(values)
    return f"{low:.2g} to {high:.2g} {unit}" if low != high else f"{low:.2g} {unit}"


# --- Fig. 3 -----------------------------------------------------------------------------------------------------------


def fig3(scale: Scale) -> FigureResult:
    """Where the time goes when one neighbour sends everything over 200 Mbps."""
    say = teller("3")
    factors = scale.pick(emulated.Factors(smaller=40), emulated.Factors())
    models = scale.pick((RESNET101, GPT2), (RESNET101, ALEXNET, VGG11, GPT2))
    rows: dict[str, dict[str, float]] = {}
    with (
        scratch() as folder,
        emulated.cluster(clusters.pair(FIG3_BPS), factors, folder, sweep.DISK_BPS) as cluster,
    ):
        for model in models:
            rows[model.name] = _components(cluster, model)
            say(f"{model.name}: {rows[model.name]['total']:.1f} s at the paper's size")
    parts = [(r["weights"] + r["optimizer state"]) / r["total"] for r in rows.values()]
    longest = max(rows, key=lambda name: rows[name]["total"])
    total = rows[longest]["total"]
    kind = scale.pick("scaled down", "real")
    size = scale.pick("at 1/40 of its size", "at full size")
    return FigureResult(
        "3",
        "Where the time goes: one neighbour, one link of 200 Mbps",
        f"Real pulls {size} by the package's own server and client over one emulated link of 200 Mbps: weights, then the "
        "optimizer's state (momentum for the image models, Adam's two moments for GPT-2). What the job counts (epoch, "
        "step, hyperparameters) comes with the vote on the state and the table of hashes, before the first byte.",
        [
            Claim(
                "Model weights and optimizer states take up most of the size",
                f"they take {span([100 * p for p in parts], '%')} of the delay",
                kind,
                min(parts) > 0.9,
                ""
                if min(parts) > 0.9
                else "At this scale the fixed parts of a pull weigh more than they do at full size.",
            ),
            Claim(
                "Even pulling from a neighbour can take up to one minute",
                f"{total:.0f} s for {longest} with its optimizer's state",
                kind,
                45 <= total <= 75,
                "" if 45 <= total <= 75 else "Bytes over 200 Mbps; the paper does not say which model took its minute.",
            ),
        ],
        {"rows": rows, "rate_bps": FIG3_BPS},
    )


def _components(cluster: emulated.Cluster, model: Model) -> dict[str, float]:
    """Seconds of each part of a pull, at the paper's size."""
    smaller = cluster.factors.smaller
    weights = model.layout(model.nbytes / smaller)
    cluster.load(weights * (1 + model.moments))
    marks: list[tuple[float, int]] = []
    moved = cluster.pull("single", lambda now, nbytes: marks.append((now, nbytes)))
    begun = marks[0][0]
    half = next(now for now, nbytes in marks if nbytes >= sum(weights))
    end = marks[-1][0]
    parts = {
        "vote, counters, table of hashes": begun,
        "weights": half - begun,
        "optimizer state": end - half,
        "proof": max(0.0, moved.wall_s - end),
    }
    parts = {name: seconds * smaller for name, seconds in parts.items()}
    return {**parts, "total": sum(parts.values()), "mib": model.size_mib * (1 + model.moments)}


def plot_fig3(result: FigureResult, path: Path) -> None:
    """Bars of parts, one for each model."""
    rows = result.data["rows"]
    with canvas(path, width_in=6.4, height_in=3.4) as (_, (ax,)):
        names = list(rows)
        left = [0.0] * len(names)
        for part in ("vote, counters, table of hashes", "weights", "optimizer state", "proof"):
            widths = [rows[name][part] for name in names]
            ax.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for name, end in zip(names, left, strict=True):
            ax.annotate(f" {end:.1f} s, {rows[name]['mib']:.0f} MiB", (end, name), va="center", fontsize=8)
        ax.set_xlim(0, max(left) * 1.3)
        ax.set_xlabel("s, from one neighbour over 200 Mbps")
        ax.legend(fontsize=7)


# --- the joins of Figs. 7, 10 and 15 ----------------------------------------------------------------------------------


@functools.cache
def image_joins(scale: Scale) -> tuple[Point, ...]:
    """All systems, the image models, emulated and simulated."""
    say = teller("7, 10, 15")
    names = tuple(sweep.SYSTEMS)
    sizes = scale.pick((6, 11), tuple(range(6, 12)))
    executed = Plan(
        scale.pick((RESNET101, VGG11), IMAGES),
        sizes,
        names,
        scale.pick(1, 4),
        scale.pick(QUICK, TIGHT),
        scale.seed,
        2.0 * scale.budget_s,  # three figures
    )
    computed = Plan(
        executed.models,
        (*sizes, *scale.pick((23,), SIMULATED_BEYOND)),
        names,
        scale.pick(1, 4),
        emulated.Factors(),
        scale.seed,
    )
    return (*sweep.emulate(executed, say), *sweep.simulate(computed, say))


def how_joins(points: Sequence[Point], factors: emulated.Factors, what: str = "ResNet101, AlexNet and VGG11") -> str:
    """What is real about them."""
    executed = chosen(points, kind="scaled down")
    largest = max(p.size for p in points)
    repeats = len({p.repeat for p in executed})
    return (
        f"{what}. Clusters of up to {max(p.size for p in executed) + 1} nodes: pulls really executed between processes "
        f"over emulated links of 100 to 1000 Mbps that change every 3 minutes, {factors.words()}, times brought back to "
        f"the paper's sizes, {repeats} random histories. Up to {largest + 1} nodes: the same policies at full size in "
        "virtual time. Where both exist, executed takes "
        f"{fidelity(points):.2f} times what is simulated (median): hashing, votes and processors. Pollux: one node's "
        "write and one read executed, the reads of the others from the same disk (100 MB/s) and a restart added."
    )


def lines(points: Sequence[Point]) -> dict[str, Any]:
    """Delays as pictures want them: by model, kind, system and size."""
    table: dict[str, Any] = {}
    for p in points:
        by_size = table.setdefault(p.model, {}).setdefault(p.kind, {}).setdefault(p.system, {})
        by_size.setdefault(str(p.size), []).append(p.seconds)
    return table


def draw(axes: Any, table: dict[str, Any], systems: Sequence[str]) -> None:
    """Delay over cluster size: executed as dots on a line, simulated dashed."""
    for system in systems:
        for kind, style in (("scaled down", "o-"), ("simulated", "--")):
            by_size = table.get(kind, {}).get(system, {})
            if by_size:
                label = LABELS.get(system, system) if style != "--" else None
                sizes = sorted(map(int, by_size))
                values = [statistics.median(by_size[str(size)]) for size in sizes]
                axes.plot(
                    [s + 1 for s in sizes],
                    values,
                    style,
                    color=COLOURS[system],
                    label=label,
                    markersize=4,
                    linewidth=1.2,
                )
    axes.set_xlabel("nodes after the join")
    axes.set_ylabel("delay, s")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")


def _plot(result: FigureResult, path: Path, systems: Sequence[str]) -> None:
    table = result.data["lines"]
    with canvas(path, 1, len(table)) as (_, axes):
        for ax, (model, rows) in zip(axes, table.items(), strict=True):
            draw(ax, rows, systems)
            ax.set_title(f"{model} (dots executed, dashed simulated)", fontsize=8)
        axes[0].legend(fontsize=7)


# --- Fig. 7 -----------------------------------------------------------------------------------------------------------

_FIG7 = ("Pollux", "EDL+", "Autoscaling", "Chaos", "adaptive")


def fig7(scale: Scale) -> FigureResult:
    """Scale-out delay of all systems by model and cluster size."""
    points = [p for p in image_joins(scale) if p.system in _FIG7]
    executed, computed = chosen(points, kind="scaled down"), chosen(points, kind="simulated")
    delays = {system: [p.seconds for p in chosen(executed, system=system)] for system in _FIG7}
    vgg = [p.seconds for p in chosen(executed, system="EDL+", model="VGG11")]
    pollux_last = all(
        share(executed, system, "Pollux")[0] == share(executed, system, "Pollux")[1] for system in _FIG7[1:]
    )
    few, many = min(p.size for p in executed), max(p.size for p in computed)
    small = middle(executed, system="Autoscaling", size=few) / middle(executed, system="EDL+", size=few)
    large = middle(computed, system="Autoscaling", size=many) / middle(computed, system="EDL+", size=many)
    grown = {system: growth_of(computed, system=system) for system in _FIG7}
    within = growth_of(executed, system="Chaos")
    wins, of = share(points, "adaptive", "Chaos", 1.02)
    chaos = statistics.median(delays["Chaos"])
    claims = [
        Claim(
            "Pollux has the highest delay, over 100 s",
            f"{span(delays['Pollux'])}; {'always' if pollux_last else 'not always'} the highest",
            "scaled down",
            pollux_last and min(delays["Pollux"]) > 100,
            "Its order holds, its size does not: a disk of 100 MB/s is shared by all nodes here, and a restart is one fresh "
            "interpreter. Over 100 s for 178 MiB need a slower disk, or restarts of half a minute and more, neither of "
            "which the paper names. At 10 MB/s it would be ten times what its disk part is.",
        ),
        Claim(
            "EDL+ takes above 10 s for larger models",
            f"{span(vgg)} for VGG11, from the fastest neighbour",
            "scaled down",
            max(vgg) > 10,
            "528 MiB at 1000 Mbps take 4.4 s, at 443 Mbps 10 s: it depends on how fast the fastest of several random links "
            "is, which is rarely below that.",
        ),
        Claim(
            "Autoscaling is faster than EDL+ in small setups, slower in large ones",
            f"{small:.2f} times EDL+'s delay at {few + 1} nodes, {large:.2f} times at {many + 1} (simulated)",
            "simulated",
            small < 1 < large,
            "Shortest paths spread over all of the newcomer's links, and a relay forwards while it receives, so many hops "
            "cost little. What the paper describes, each hop adding its own transfer, is a store-and-forward relay.",
        ),
        Claim(
            "Chaos takes about 1 s (Table I: 0.5 to 5 s)",
            f"{span(delays['Chaos'])}, median {chaos:.2g} s",
            "scaled down",
            0.5 <= min(delays["Chaos"]) and max(delays["Chaos"]) <= 5.5 and chaos < 3,
            "With two neighbours behind slow links a large model takes longer than the paper's slowest: bytes over rates.",
        ),
        Claim(
            "Delays of Pollux, EDL+ and Autoscaling grow with the cluster",
            f"from {few + 1} to {many + 1} nodes times {grown['Pollux']:.1f}, {grown['EDL+']:.2f} and "
            f"{grown['Autoscaling']:.2f} (simulated)",
            "simulated",
            min(grown["Pollux"], grown["EDL+"], grown["Autoscaling"]) > 1.05,
            "Pollux's grows, since all nodes read one disk. A larger cluster gives a newcomer more links to choose from: "
            "EDL+ finds a faster fastest one, and Autoscaling's paths enter over more links. They could only grow if the "
            "number of neighbours did not.",
        ),
        Claim(
            "Chaos's delay stays flat as the cluster grows and even drops beyond 10 nodes",
            f"times {within:.2f} within the emulated sizes, {grown['Chaos']:.2f} up to {many + 1} nodes (simulated)",
            "scaled down",
            within < 1.1 and grown["Chaos"] < 1.0,
            "One random draw of links may hide what more neighbours gain.",
        ),
        Claim(
            "(not in the paper) this package's own policy against Chaos's",
            f"at most 2% slower in {wins} of {of} joins; median "
            f"{statistics.median(delays['adaptive']) / chaos:.2f} of Chaos's delay",
            "scaled down",
            wins >= 0.9 * of,
            "While links stay as they were measured, Algorithm 2's shares are as good as any; what is corrected while it "
            "runs pays when they change (docs/transfer.md).",
        ),
    ]
    return FigureResult(
        "7",
        "Scale-out delay by system, model and cluster size",
        how_joins(points, scale.pick(QUICK, TIGHT)),
        [settled(c) for c in claims],
        {"lines": lines(points), "points": [asdict(p) for p in points]},
    )


def settled(claim: Claim) -> Claim:
    """A claim that holds needs no reason for a difference."""
    return Claim(claim.paper, claim.ours, claim.kind, claim.agrees) if claim.agrees else claim


def plot_fig7(result: FigureResult, path: Path) -> None:
    """A panel for each model."""
    _plot(result, path, _FIG7)


# --- Fig. 8 -----------------------------------------------------------------------------------------------------------


def fig8(scale: Scale) -> FigureResult:
    """Scale-out delay of Chaos and of this package on GPT-2, medium and large."""
    say = teller("8")
    systems = ("Chaos", "adaptive")
    sizes = scale.pick((6, 11), tuple(range(6, 12)))
    factors = scale.pick(emulated.Factors(smaller=128, slower=4), TIGHT_TEXTS)
    executed_plan = Plan(TEXTS, sizes, systems, scale.pick(1, 3), factors, scale.seed, scale.budget_s)
    computed_plan = Plan(
        TEXTS, (*sizes, *scale.pick((23,), SIMULATED_BEYOND)), systems, scale.pick(1, 4), emulated.Factors(), scale.seed
    )
    points = [*sweep.emulate(executed_plan, say), *sweep.simulate(computed_plan, say)]
    executed, computed = chosen(points, kind="scaled down"), chosen(points, kind="simulated")
    per_gib = {
        model.name: middle(executed, system="Chaos", model=model.name) / (model.size_mib / 1024) for model in TEXTS
    }
    straight = max(per_gib.values()) / min(per_gib.values())
    within, beyond = growth_of(executed, system="Chaos"), growth_of(computed, system="Chaos")
    claims = [
        Claim(
            "Delays increase linearly with the model",
            "Chaos takes " + ", ".join(f"{v:.2f} s/GiB for {n}" for n, v in per_gib.items()),
            "scaled down",
            straight < 1.25,
            "The fixed parts of a pull weigh more in the smaller states.",
        ),
        Claim(
            "Delays stay stable as the cluster grows",
            f"times {within:.2f} from the smallest to the largest emulated clusters, times {beyond:.2f} up to "
            f"{max(p.size for p in computed) + 1} nodes (simulated)",
            "scaled down",
            0.8 <= within <= 1.2,
            "They fall: a newcomer to a larger cluster has more neighbours, whose links add up. They would be stable if "
            "the number of neighbours were.",
        ),
    ]
    what = "GPT-2 (468 MiB), medium (1354 MiB) and large (3050 MiB)"
    return FigureResult(
        "8",
        "Scale-out delay on GPT-2 models",
        how_joins(points, factors, what).partition(" Pollux:")[0],
        [settled(c) for c in claims],
        {"lines": lines(points), "s_per_gib": per_gib},
    )


def plot_fig8(result: FigureResult, path: Path) -> None:
    """A panel for each model."""
    _plot(result, path, ("Chaos", "adaptive"))


# --- Fig. 15 ----------------------------------------------------------------------------------------------------------

_FIG15 = {"EDL+": "single source", "Autoscaling": "multi-source, even", "even": "multi-neighbour, even"}


def fig15(scale: Scale) -> FigureResult:
    """Single-source, multi-source and multi-neighbour replication, the latter two with equal shares."""
    points = [p for p in image_joins(scale) if p.system in (*_FIG15, "adaptive")]
    executed = chosen(points, kind="scaled down")
    over = {
        system: statistics.median(p.seconds / p.bound_s for p in chosen(executed, system=system))
        for system in (*_FIG15, "adaptive")
    }
    beats_one, of = share(executed, "even", "EDL+")
    beats_all, _ = share(executed, "even", "Autoscaling")
    one_beats_all, _ = share(executed, "EDL+", "Autoscaling")
    times = ", ".join(f"{_FIG15.get(s, 'adaptive')} {v:.2f}" for s, v in over.items())
    claims = [
        Claim(
            "Multi-neighbour replication with equal shares is much faster than a single source",
            f"it is in {beats_one} of {of} joins; medians over the bound: {times}",
            "scaled down",
            beats_one > 0.8 * of,
            "Equal shares end with the slowest link: over k links of 100 to 1000 Mbps the slowest carries 1/k of the "
            "state, and where it is k times slower than the fastest, one source alone is as fast. Shares must follow the "
            "links, as Algorithm 2's and the adaptive ones do.",
        ),
        Claim(
            "Multi-neighbour replication with equal shares is much faster than multi-source",
            f"it is in {beats_all} of {of} joins",
            "scaled down",
            beats_all > 0.8 * of,
            "Shortest paths avoid slow links: what multi-source sends comes over few and fast ones, while equal shares "
            "wait for the slowest neighbour.",
        ),
        Claim(
            "In most cases multi-source is even slower than a single source",
            f"it is in {one_beats_all} of {of} joins",
            "scaled down",
            one_beats_all > 0.5 * of,
            "Relays forward while they receive, so hops do not add up, and several links carry the sum. Fig. 1's example "
            "comes out as printed only with hops that wait for whole shards (docs/transfer.md).",
        ),
    ]
    return FigureResult(
        "15",
        "Single-source, multi-source and multi-neighbour replication",
        how_joins(points, scale.pick(QUICK, TIGHT)).partition(" Pollux:")[0],
        [settled(c) for c in claims],
        {"lines": lines(points), "over_bound": over},
    )


def plot_fig15(result: FigureResult, path: Path) -> None:
    """A panel for each model."""
    _plot(result, path, (*_FIG15, "adaptive"))
