"""Draws the two pictures of outer_convergence: loss over samples, and loss over virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.outer_convergence.curves import Curve, at_samples, at_time
from benchmarks.paper.figure import canvas

DOTS = 60
HEADROOM = 1.6
"""The axis of the loss ends at so many times the best final loss: a mode that diverges leaves the picture."""


def draw(cases: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path, *, over_time: bool) -> None:
    """Draws one picture for each case, with one line for each mode, the mean over its seeds.

    Args:
        cases: Curves of all seeds, by title of the case and by mode.
        path: Path of the PNG file.
        over_time: Whether the horizontal axis has virtual seconds; otherwise it has samples.
    """
    with canvas(path, columns=len(cases), width_in=4.6, height_in=3.6) as (_, axes):
        for axis, (title, modes) in zip(axes, cases.items(), strict=True):
            for name, curves in modes.items():
                end = min(curve[-1].time_s if over_time else curve[-1].samples for curve in curves)
                xs = [end * (dot + 1) / DOTS for dot in range(DOTS)]
                read = at_time if over_time else at_samples
                axis.plot(xs, [fmean(read(curve, x) for curve in curves) for x in xs], label=name, linewidth=1.3)
            best = min(curve[-1].loss for curves in modes.values() for curve in curves)
            axis.set_ylim(0.97 * best, HEADROOM * best)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("virtual s (one inner step of the fastest cluster)" if over_time else "samples", fontsize=8)
            axis.set_ylabel("validation loss, nats", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
