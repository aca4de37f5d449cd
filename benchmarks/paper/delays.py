"""Measures how long each system takes to bring a newcomer in (Figs. 7, 8 and 15).

The joins of Figs. 7, 10 and 15 are the same ones (`sweep.py`); they are run once and shown three times.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import clusters, emulated, sweep
from benchmarks.paper.figure import Claim, FigureResult, Scale, canvas, settled, span
from benchmarks.paper.states import GPT2, GPT2_LARGE, IMAGES, RESNET101, TEXTS, VGG11
from benchmarks.paper.sweep import Plan, Point, chosen, fidelity, growth_of, middle, share, teller
from benchmarks.workers import restart_s

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


# --- the joins of Figs. 7, 10 and 15 ----------------------------------------------------------------------------------


@functools.cache
def image_joins(scale: Scale) -> tuple[Point, ...]:
    """Returns the joins of the image models by all systems, executed on emulated links and simulated."""
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
        scale.pick(2, 8),
        emulated.Factors(),
        scale.seed,
    )
    return (*sweep.emulate(executed, say), *sweep.simulate(computed, say))


def how_joins(points: Sequence[Point], factors: emulated.Factors, what: str = "ResNet101, AlexNet and VGG11") -> str:
    """Describes which joins were executed and which simulated."""
    executed = chosen(points, kind="scaled down")
    largest = max(p.size for p in points)
    repeats = len({p.repeat for p in executed})
    return (
        f"{what}. Clusters of up to {max(p.size for p in executed) + 1} nodes: pulls really executed between "
        f"processes over emulated links of 100 to 1000 Mbps that change every 3 minutes, {factors.words()}, times "
        f"brought back to the paper's sizes; random histories: {repeats}. A newcomer has links with 40% of the nodes, "
        f"2 to {clusters.MOST} of them. Up to {largest + 1} nodes: the same policies at full size in "
        "virtual time, in more such histories. Where both exist, executed takes "
        f"{fidelity(points):.2f} times what is simulated (median): hashing, votes and processors. Pollux: one node's "
        "write and one read executed, the reads of the others from the same disk (100 MB/s) and a restart added."
    )


def lines(points: Sequence[Point]) -> dict[str, Any]:
    """Returns delays in the form that pictures need: by model, kind, system and size."""
    table: dict[str, Any] = {}
    for p in points:
        by_size = table.setdefault(p.model, {}).setdefault(p.kind, {}).setdefault(p.system, {})
        by_size.setdefault(str(p.size), []).append(p.seconds)
    return table


def draw(axes: Any, table: dict[str, Any], systems: Sequence[str]) -> None:
    """Draws delay over cluster size: executed joins as dots on a line, simulated ones dashed, full-size ones as
    stars.
    """
    sizes = sorted({int(size) for kind in table.values() for by_size in kind.values() for size in by_size})
    for system in systems:
        for kind, style in (("scaled down", "o-"), ("simulated", "--"), ("real", "*")):
            by_size = table.get(kind, {}).get(system, {})
            places = [place for place, size in enumerate(sizes) if str(size) in by_size]
            axes.plot(
                places,
                [statistics.median(by_size[str(sizes[place])]) for place in places],
                style,
                color=COLOURS[system],
                label=LABELS.get(system, system) if kind == "scaled down" else None,
                markersize=9 if kind == "real" else 4,
                linewidth=1.2,
            )
    log_scale(axes, sizes)
    axes.set_ylabel("delay, s")


def log_scale(axes: Any, sizes: Sequence[int]) -> None:
    """Sets one tick for each cluster size, and a logarithmic axis for the values."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axes.set_xticks(range(len(sizes)), [str(size + 1) for size in sizes])
    axes.set_xlabel("nodes after the join")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _plot(result: FigureResult, path: Path, systems: Sequence[str]) -> None:
    table = result.data["lines"]
    with canvas(path, 1, len(table)) as (picture, axes):
        for ax, (model, rows) in zip(axes, table.items(), strict=True):
            draw(ax, rows, systems)
            ax.set_title(f"{model} (dots executed, dashed simulated, stars at full size)", fontsize=8)
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(systems), fontsize=8)


# --- Fig. 7 -----------------------------------------------------------------------------------------------------------

_FIG7 = ("Pollux", "EDL+", "Autoscaling", "Chaos", "adaptive")
_ALWAYS = 3
"""Neighbours of every newcomer where it is asked what a growing number of them does."""


@functools.cache
def full_size(scale: Scale) -> tuple[Point, ...]:
    """Returns executed joins of one cluster at the paper's sizes and rates; none in a quick run."""
    if scale.quick:
        return ()
    plan = Plan(
        (RESNET101, VGG11), (6,), ("EDL+", "Autoscaling", "Chaos", "adaptive"), 1, emulated.Factors(), scale.seed
    )
    return tuple(sweep.emulate(plan, teller("7, full size")))


def always(scale: Scale, sizes: Sequence[int]) -> list[Point]:
    """Returns simulated joins by EDL+ and Autoscaling, whose newcomers have as many neighbours in large clusters as in
    small ones.
    """
    plan = Plan(
        (VGG11,),
        tuple(sizes),
        ("EDL+", "Autoscaling"),
        scale.pick(2, 8),
        emulated.Factors(),
        scale.seed,
        neighbours=_ALWAYS,
    )
    return sweep.simulate(plan, teller("7"))


def fig7(scale: Scale) -> FigureResult:
    """Makes Fig. 7: the delay of a scale-out by system, model and cluster size."""
    points = [p for p in (*image_joins(scale), *full_size(scale)) if p.system in (*_FIG7, sweep.HOP_BY_HOP)]
    executed, computed = chosen(points, kind="scaled down"), chosen(points, kind="simulated")
    claims = [*_delays(executed), *_growths(scale, executed, computed), *_ours(points)]
    return FigureResult(
        "7",
        "Scale-out delay by system, model and cluster size",
        how_joins(points, scale.pick(QUICK, TIGHT)),
        [settled(c) for c in claims],
        {"lines": lines(points)},
    )


def _delays(executed: Sequence[Point]) -> list[Claim]:
    """Returns the paper's claims on how long a scale-out takes."""
    delays = {system: [p.seconds for p in chosen(executed, system=system)] for system in _FIG7}
    vgg = [p.seconds for p in chosen(executed, system="EDL+", model="VGG11")]
    wins, of = map(sum, zip(*(share(executed, system, "Pollux") for system in _FIG7[1:]), strict=True))
    middle_s = statistics.median(delays["Chaos"])
    return [
        Claim(
            "Pollux has the highest delay, over 100 s",
            f"{span(delays['Pollux'])}; the highest in {wins} of {of} comparisons",
            "scaled down",
            wins == of and min(delays["Pollux"]) > 100,
            "The order holds, the size does not: a disk of 100 MB/s is shared by all nodes here, and a restart is one "
            f"fresh interpreter ({restart_s():.0f} s). Over 100 s for 178 MiB need a slower disk or slower "
            "restarts; the paper names neither.",
        ),
        Claim(
            "EDL+ takes above 10 s for larger models",
            f"{span(vgg)} for VGG11, from the fastest neighbour",
            "scaled down",
            max(vgg) > 10,
            "528 MiB take 10 s at 443 Mbps; the fastest of several random links of 100 to 1000 Mbps is rarely as slow.",
        ),
        Claim(
            "Chaos takes about 1 s (Table I: 0.5 to 5 s)",
            f"{span(delays['Chaos'])}, median {middle_s:.2g} s",
            "scaled down",
            min(delays["Chaos"]) >= 0.4 and max(delays["Chaos"]) <= 5.5 and middle_s < 3,
            "A delay is the state over the sum of the newcomer's links: 528 MiB in 1 s take 4.4 Gbps, eight links of "
            "550 Mbps. With two to four neighbours it is longer than the paper's.",
        ),
    ]


def _growths(scale: Scale, executed: Sequence[Point], computed: Sequence[Point]) -> list[Claim]:
    """Returns the paper's claims on how the delay grows with the cluster."""
    few, many = min(p.size for p in executed), max(p.size for p in computed)

    def against_one(system: str, size: int) -> float:
        return middle(computed, system=system, size=size) / middle(computed, system="EDL+", size=size)

    small, large = against_one("Autoscaling", few), against_one("Autoscaling", many)
    waiting = against_one(sweep.HOP_BY_HOP, few), against_one(sweep.HOP_BY_HOP, many)
    grown = {system: growth_of(computed, system=system) for system in _FIG7}
    within = growth_of(executed, system="Chaos")
    same = always(scale, sorted({p.size for p in computed}))
    fixed = {system: growth_of(same, system=system) for system in ("EDL+", "Autoscaling", sweep.HOP_BY_HOP)}
    return [
        Claim(
            "Autoscaling is faster than EDL+ in small clusters, slower in large ones",
            f"{small:.2f} times EDL+'s delay at {few + 1} nodes, {large:.2f} times at {many + 1}",
            "simulated",
            small < 1 < large,
            "Its shares come in over all of the newcomer's links, and relays forward while they receive. With relays "
            f"that wait for whole shares it would be {waiting[0]:.2f} times at {few + 1} nodes and {waiting[1]:.2f} at "
            f"{many + 1}.",
        ),
        Claim(
            "Delays of Pollux, EDL+ and Autoscaling grow with the cluster",
            f"from {few + 1} to {many + 1} nodes times {grown['Pollux']:.2f}, {grown['EDL+']:.2f} and "
            f"{grown['Autoscaling']:.2f}",
            "simulated",
            min(grown["Pollux"], grown["EDL+"], grown["Autoscaling"]) > 1.05,
            "Pollux's does, since all nodes read one disk. The others gain from links: a newcomer to a larger cluster "
            f"has more neighbours. With {_ALWAYS} in every cluster EDL+ takes {fixed['EDL+']:.2f} times as long in the "
            f"large ones, Autoscaling {fixed['Autoscaling']:.2f} times, and with relays that wait for whole shares "
            f"{fixed[sweep.HOP_BY_HOP]:.2f} times.",
        ),
        Claim(
            "Chaos's delay stays flat as the cluster grows and even drops beyond 10 nodes",
            f"times {within:.2f} within the emulated sizes, {grown['Chaos']:.2f} up to {many + 1} nodes (simulated)",
            "scaled down",
            within < 1.1 and grown["Chaos"] < 1.0,
            "A few random histories; in single ones slow links hide what more neighbours gain.",
        ),
    ]


def _ours(points: Sequence[Point]) -> list[Claim]:
    """Returns our own claims, which are not in the paper."""
    executed, whole = chosen(points, kind="scaled down"), chosen(points, kind="real")
    wins, of = share(executed, "adaptive", "Chaos", 1.02)
    ratio = middle(executed, system="adaptive") / middle(executed, system="Chaos")
    claims = [
        Claim(
            "(ours) The adaptive policy is as fast as Chaos's",
            f"at most 2% slower in {wins} of {of} joins; median delay {ratio:.2f} times Chaos's",
            "scaled down",
            ratio <= 1.02,
            "While links stay as they were measured Algorithm 2's shares are as good as any. What is corrected while "
            "it runs pays when they do not (docs/transfer.md).",
        )
    ]
    if whole:
        close = fidelity(points, "real", "scaled down")
        told = ", ".join(f"{LABELS.get(p.system, p.system)} {p.seconds:.1f} s" for p in chosen(whole, model="VGG11"))
        claims.append(
            Claim(
                "(ours) Scaled-down joins stand for full ones",
                f"6 to 7 nodes at full size and rates take {close:.2f} times what is told of the scaled-down ones "
                f"(median); VGG11: {told}",
                "real",
                0.85 <= close <= 1.15,
                "Two cores that hash, send and receive at over a gigabit per second are themselves a bottleneck.",
            )
        )
    return claims


def plot_fig7(result: FigureResult, path: Path) -> None:
    """Draws Fig. 7 with a panel for each model."""
    _plot(result, path, _FIG7)


# --- Fig. 8 -----------------------------------------------------------------------------------------------------------


def fig8(scale: Scale) -> FigureResult:
    """Makes Fig. 8: the delay of a scale-out by Chaos and by this package on GPT-2, medium and large."""
    say = teller("8")
    systems = ("Chaos", "adaptive")
    sizes = scale.pick((6, 11), tuple(range(6, 12)))
    factors = scale.pick(emulated.Factors(smaller=48, slower=4), TIGHT_TEXTS)
    models = scale.pick((GPT2, GPT2_LARGE), TEXTS)
    executed_plan = Plan(models, sizes, systems, scale.pick(1, 3), factors, scale.seed, scale.budget_s)
    computed_plan = Plan(
        models,
        (*sizes, *scale.pick((23,), SIMULATED_BEYOND)),
        systems,
        scale.pick(1, 4),
        emulated.Factors(),
        scale.seed,
    )
    points = [*sweep.emulate(executed_plan, say), *sweep.simulate(computed_plan, say)]
    executed, computed = chosen(points, kind="scaled down"), chosen(points, kind="simulated")
    per_gib = {
        model.name: middle(executed, system="Chaos", model=model.name) / (model.size_mib / 1024) for model in models
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
            "They fall: a newcomer to a larger cluster has more neighbours, whose links add up. They would be stable "
            "if the number of neighbours were.",
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
    """Draws Fig. 8 with a panel for each model."""
    _plot(result, path, ("Chaos", "adaptive"))


# --- Fig. 15 ----------------------------------------------------------------------------------------------------------

_FIG15 = {"EDL+": "single source", "Autoscaling": "multi-source, even", "even": "multi-neighbour, even"}


def fig15(scale: Scale) -> FigureResult:
    """Makes Fig. 15: replication from one source, many sources and many neighbours, the latter two with equal
    shares.
    """
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
            "state, and where it is k times slower than the fastest, one source alone is as fast. Shares must follow "
            "the links, as Algorithm 2's and the adaptive ones do.",
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
            "Several links carry the sum, and relays forward while they receive, so hops do not add up (Fig. 7 has "
            "the delays with relays that wait for whole shares).",
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
    """Draws Fig. 15 with a panel for each model."""
    _plot(result, path, (*_FIG15, "adaptive"))
