"""Draws a topology: its graph, and the rates of its links over time. The only module here that imports matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.units import duration, time_unit
from chaos_lightning.observe.charts import figure
from chaos_lightning.testing.edge.topology import Pair, Topology, links_of, next_change_s, rate_text

_DPI = 120
_MAX_CHANGES = 400


def horizon_s(topology: Topology) -> float:
    """Returns the length of schedule worth drawing, s: up to its last entry, and three periods of each repeated
    entry.
    """
    ends = [c.at_s + c.for_s + 3 * c.every_s for c in topology.schedule]
    return max(ends, default=0.0) * 1.1


def history(topology: Topology, until_s: float) -> tuple[list[float], dict[Pair, list[float]]]:
    """Returns the times of all changes, and each link's rate from each of them on (bit/s; 0 while it is cut or
    stalled).
    """
    times: list[float] = []
    rates: dict[Pair, list[float]] = {(x.a, x.b): [] for x in topology.links}
    t_s: float | None = 0.0
    while t_s is not None and t_s <= until_s and len(times) < _MAX_CHANGES:
        times.append(t_s)
        for pair, state in links_of(topology, t_s).items():
            rates[pair].append(state.rate_bps if state.usable else 0.0)
        t_s = next_change_s(topology, t_s)
    return times, rates


def plot(topology: Topology, path: Path) -> Path:
    """Draws a topology into a file; returns its path.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file's kind is unknown to it.
    """
    until_s = horizon_s(topology)
    sheet = figure(8, 9 if until_s else 6.5)
    axes = sheet.subplots(2 if until_s else 1, 1, height_ratios=[2, 1] if until_s else [1], squeeze=False)[:, 0]
    _graph(axes[0], topology)
    if until_s:
        _rates(axes[1], topology, until_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        sheet.savefig(path, dpi=_DPI)
    except ValueError as error:
        raise ConfigurationError(f"--plot {path}: {error}") from error
    return path


def _graph(axes: Any, topology: Topology) -> None:
    count = len(topology.nodes)
    places = {
        node.name: (math.sin(2 * math.pi * i / count), math.cos(2 * math.pi * i / count))
        for i, node in enumerate(topology.nodes)
    }
    fastest = max((link.rate_bps for link in topology.links), default=1.0)
    for index, link in enumerate(topology.links):
        (x1, y1), (x2, y2) = places[link.a], places[link.b]
        axes.plot([x1, x2], [y1, y2], color="0.6", linewidth=0.8 + 5 * link.rate_bps / fastest, zorder=1)
        text = rate_text(link.rate_bps) + (f"\n{duration(link.latency_s)}" if link.latency_s else "")
        # Lines that cross in the middle would have their labels on top of each other.
        near = 0.38 if index % 2 else 0.5
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        axes.text(x1 + near * (x2 - x1), y1 + near * (y2 - y1), text, ha="center", va="center", fontsize=8, bbox=box)
    for node in topology.nodes:
        x, y = places[node.name]
        axes.scatter([x], [y], s=900, color="#2b6cb0", zorder=2)
        axes.text(x, y, node.name, ha="center", va="center", color="white", fontsize=7, zorder=3)
        if node.access_bps is not None:
            axes.text(1.22 * x, 1.22 * y, f"access {rate_text(node.access_bps)}", ha="center", va="center", fontsize=8)
    axes.set_title(topology.name)
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.4, 1.4)
    axes.set_aspect("equal")
    axes.axis("off")


def _rates(axes: Any, topology: Topology, until_s: float) -> None:
    times, rates = history(topology, until_s)
    divisor, unit = time_unit(until_s)
    ends = [*times, until_s]
    for pair, values in rates.items():
        mbps = [v / 1e6 for v in values]
        axes.step([t / divisor for t in ends], [*mbps, mbps[-1]], where="post", label=f"{pair[0]} - {pair[1]}")
    axes.set_xlabel(f"time, {unit}")
    axes.set_ylabel("rate, Mbps")
    axes.set_ylim(bottom=0)
    axes.figure.legend(fontsize=7, ncols=4, loc="outside lower center")
