"""What all benchmarks share: arguments, figures with bounds, the summary line, JSON, and a model of a given size."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass
class Figure:
    """One measured number. `ok` is None where no bound was set."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    ok: bool | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.ok is None:
            self.ok = self.value <= self.bound


@dataclass
class Result:
    """Everything a benchmark says."""

    benchmark: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, bound: float | None = None) -> Figure:
        figure = Figure(name, round(value, 6), unit, bound)
        self.figures.append(figure)
        limit = "" if bound is None else f"  (bound {bound:g}: {'ok' if figure.ok else 'MISSED'})"
        print(f"  {name}: {value:.4g} {unit}{limit}", flush=True)
        return figure

    def finish(self, args: argparse.Namespace) -> int:
        """Prints the summary line, writes JSON, returns the exit status."""
        missed = [f.name for f in self.figures if f.ok is False]
        bounded = sum(f.ok is not None for f in self.figures)
        print(
            f"{self.benchmark}: {len(self.figures)} figures, {bounded - len(missed)} of {bounded} bounds held"
            + (f"; missed: {', '.join(missed)}" if missed else ""),
            flush=True,
        )
        if args.out:
            record = asdict(self) | {
                "missed": missed,
                "when_unix_s": time.time(),
                "machine": {
                    "cores": os.cpu_count(),
                    "python": platform.python_version(),
                    "system": platform.platform(),
                },
                "quick": args.quick,
            }
            Path(args.out).write_text(json.dumps(record, indent=1, default=str))
        return 1 if args.check and missed else 0


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--out", default="", help="write all figures as JSON to this file")
    p.add_argument("--quick", action="store_true", help="under two minutes: fewer repetitions and cases")
    p.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bound")
    return p


def run(main: Any) -> None:
    """Entry point of a benchmark module."""
    sys.exit(main())


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def compute_alone() -> None:
    """This process computes in one thread, and numbers too small for a normal float count as zero.

    Networks that learn nothing lose neurons; Adam's averages of these decay for some hundred steps, and then are
    denormal: a step of 50 MiB takes 60 ms instead of 7, whatever is being compared.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def state_model(state_mib: float, layers: int = 8) -> Any:
    """An MLP whose parameters and Adam state together take `state_mib` MiB (so parameters a third of it)."""
    from torch import nn

    numel = state_mib * MIB / 3 / 4
    width = int((numel / layers) ** 0.5)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*blocks)
