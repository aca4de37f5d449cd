"""Measures the parts of a newcomer's delay when one neighbour sends everything over 200 Mbps (Fig. 3)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper import clusters, emulated, sweep
from benchmarks.paper.figure import Claim, FigureResult, Kind, Scale, canvas, settled, span
from benchmarks.paper.states import ALEXNET, GPT2, RESNET101, VGG11, Model
from benchmarks.paper.sweep import teller
from benchmarks.workers import scratch

FIG3_BPS = 200e6


def fig3(scale: Scale) -> FigureResult:
    """Makes Fig. 3: the parts of a newcomer's delay when one neighbour sends everything over 200 Mbps."""
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
    kind: Kind = "scaled down" if scale.quick else "real"
    size = scale.pick("at 1/40 of its size", "at full size")
    claims = [
        Claim(
            "Model weights and optimizer states take up most of the size",
            f"they take {span([100 * p for p in parts], '%')} of the delay",
            kind,
            min(parts) > 0.9,
            "At this scale the fixed parts of a pull weigh more than they do at full size.",
        ),
        Claim(
            "Even pulling from a neighbour can take up to one minute",
            f"{total:.0f} s for {longest} with its optimizer's state",
            kind,
            45 <= total <= 75,
            "Bytes over 200 Mbps; the paper does not say which model took its minute.",
        ),
    ]
    return FigureResult(
        "3",
        "Where the time goes: one neighbour, one link of 200 Mbps",
        f"Real pulls {size} by the package's own server and client over one emulated link of 200 Mbps: weights, then "
        "the optimizer's state (momentum for the image models, Adam's two moments for GPT-2). What the job counts "
        "(epoch, step, hyperparameters) comes with the vote on the state and the table of hashes, before the first "
        "byte.",
        [settled(claim) for claim in claims],
        {"rows": rows, "rate_bps": FIG3_BPS},
    )


def _components(cluster: emulated.Cluster, model: Model) -> dict[str, float]:
    """Returns the seconds of each part of a pull, at the paper's size."""
    smaller = cluster.factors.smaller
    weights = model.layout(model.nbytes / smaller)
    cluster.load(weights * (1 + model.moments))
    marks: list[tuple[float, int]] = []
    moved = cluster.pull("single", lambda now, nbytes: marks.append((now, nbytes)))
    begun = marks[0][0]
    half = next(now for now, nbytes in marks if nbytes >= sum(weights))
    end = marks[-1][0]
    first = "vote, counters, table of hashes"
    parts = {
        first: begun,
        "weights": half - begun,
        "optimizer state": end - half,
        "proof": max(0.0, moved.wall_s - end),
    }
    if smaller > 1:  # what connections cost does not grow with the state
        parts = {name: seconds * (smaller if name != first else 1) for name, seconds in parts.items()}
    return {**parts, "total": sum(parts.values()), "mib": model.size_mib * (1 + model.moments)}


def plot_fig3(result: FigureResult, path: Path) -> None:
    """Draws a bar for each model, split into the parts of the delay."""
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
