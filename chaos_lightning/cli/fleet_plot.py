"""Draws a comparison of policies on one fleet: devices and throughput over time, and how the time was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError, MissingExtraError
from chaos_lightning.observe.charts import (
    BLUE,
    DONORS,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    figure,
    legend,
    missing,
    style,
)
from chaos_lightning.planning.fleet.simulator import CAUSES, Outcome
from chaos_lightning.planning.quantities import HOUR_S

_COLOURS = dict(zip(CAUSES, (BLUE, SKY, ORANGE, PINK, RED, GREY), strict=True))


def check_kind(path: Path) -> None:
    """Refuses to plot if matplotlib is missing or cannot write this kind of file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigurationError: matplotlib knows no such kind of file.
    """
    if words := missing():
        raise MissingExtraError(words)
    known, kind = figure(1, 1).canvas.get_supported_filetypes(), path.suffix[1:].lower()
    if kind and kind not in known:
        raise ConfigurationError(f"--plot {path}: no pictures are of kind {kind!r}; expected one of {', '.join(known)}")


def plot(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draws the runs of each policy into a file; the first run of each policy must have a recorded history."""
    sheet = figure(10, 8)
    devices, throughput, causes = sheet.subplots(3, 1, height_ratios=[1, 1.4, 1])
    style(devices, "Devices", grid="y")
    style(throughput, "Samples per second", grid="y")
    style(causes, "Time of all runs, %")
    first = next(iter(outcomes.values()))[0]
    _steps(devices, first, [s.devices for s in first.history], label="there", color=INK)
    for colour, (name, runs) in zip(DONORS * 3, outcomes.items(), strict=False):
        run = runs[0]
        _steps(devices, run, [s.active for s in run.history], label=name, color=colour, linewidth=1)
        _steps(throughput, run, [s.throughput for s in run.history], label=name, color=colour, linewidth=1.2)
    throughput.set_xlabel("hours")
    legend(devices, len(outcomes) + 1)
    legend(throughput, len(outcomes))
    _causes(causes, outcomes)
    sheet.savefig(path, dpi=144)


def _steps(axes: Any, run: Outcome, values: Sequence[float], **options: Any) -> None:
    hours = [s.hours for s in run.history]
    axes.step([*hours, run.hours], [*values, values[-1]], where="post", **options)
    axes.set_xlim(0, run.hours)
    axes.set_ylim(bottom=0)


def _causes(axes: Any, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    names = list(outcomes)
    length = {name: sum(o.hours for o in runs) * HOUR_S for name, runs in outcomes.items()}
    left = [0.0] * len(names)
    for cause in CAUSES:
        shares = [100 * sum(o.seconds[cause] for o in outcomes[n]) / length[n] for n in names]
        axes.barh(names, shares, left=left, color=_COLOURS[cause], label=cause)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    legend(axes, len(CAUSES))
