"""Parts that all benchmarks share: options, figures with bounds, the summary line, JSON, and a few statistics."""

from __future__ import annotations

import argparse
import json
import math
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
    """One measured number of a benchmark, with its bound; `ok` is None if it has no bound."""

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
    """Figures, notes and details of one benchmark, which prints them and writes them as JSON."""

    benchmark: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    headline: list[str] = field(default_factory=list)
    """Words of the summary line beside how many bounds held."""
    left_out: list[str] = field(default_factory=list)
    """Cases that could not run."""

    def add(self, name: str, value: float, unit: str, bound: float | None = None) -> Figure:
        figure = Figure(name, float(f"{value:.12g}"), unit, bound)
        self.figures.append(figure)
        limit = "" if bound is None else f"  (bound {bound:g}: {'ok' if figure.ok else 'MISSED'})"
        print(f"  {name}: {value:.4g} {unit}{limit}", flush=True)
        return figure

    def ratio(self, name: str, ours: Sequence[float], theirs: Sequence[float], bound: float | None = None) -> Figure:
        """Adds the median of the pairwise ratios of two series that were measured in turns; saves all ratios in the
        details.
        """
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        self.details[f"ratios, {name}"] = ratios
        return self.add(name, median(ratios), "ratio", bound)

    def remark(self, text: str) -> None:
        """Prints a note on the figures, and saves it for the JSON."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def leave_out(self, case: str, why: str) -> None:
        """Notes that a case cannot run on this machine; with --check it counts as missed if bounds depend on it.

        Not so with --quick, which leaves out cases itself.
        """
        self.left_out.append(case)
        self.remark(f"{case} is left out: {why}")

    def audit(self, logs: str | Path, title: str, about: str) -> None:
        """Audits the members' event logs; adds the number of violations of the contract.

        Args:
            logs: Folder of the event logs.
            title: Title of the figure.
            about: The run, for the details.
        """
        from chaos_lightning.observe.audit import audit, verdict, violations

        findings = audit(logs)
        self.details[f"audit, {about}"] = verdict(findings).splitlines()
        for line in violations(findings)[:10]:
            print(f"    audit: {line}")
        self.add(title, len(violations(findings)), "count", 0)

    def finish(self, args: argparse.Namespace) -> int:
        """Prints the summary line, writes JSON, returns the exit status."""
        missed = [f.name for f in self.figures if f.ok is False]
        bounded = sum(f.ok is not None for f in self.figures)
        parts = [f"{len(self.figures)} figures, {bounded - len(missed)} of {bounded} bounds held", *self.headline]
        missed += [f"{case}, which was left out" for case in self.left_out if not args.quick]
        if missed:
            parts.append(f"missed: {', '.join(missed)}")
        print(f"{self.benchmark}: {'; '.join(parts)}", flush=True)
        if args.out:
            machine = {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "system": platform.platform(),
            }
            about = {"missed": missed, "when_unix_s": time.time(), "machine": machine, "quick": args.quick}
            Path(args.out).write_text(json.dumps(asdict(self) | about, indent=1, default=str))
        return 1 if args.check and missed else 0


class Options(argparse.ArgumentParser):
    """Parser with the flags that every benchmark has; counts and series of values can be smaller with --quick.

    Args:
        description: The benchmark's docstring.
        raw: Its lines are kept as they are.
    """

    def __init__(self, description: str | None, *, raw: bool = False) -> None:
        kept = argparse.RawDescriptionHelpFormatter
        super().__init__(
            description=description, formatter_class=kept if raw else argparse.ArgumentDefaultsHelpFormatter
        )
        self._counts: dict[str, tuple[int, int]] = {}
        self._series: list[str] = []
        self.add_argument("--out", default="", help="write all figures as JSON to this file")
        self.add_argument("--quick", action="store_true", help="under two minutes: fewer repetitions and cases")
        self.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bound")

    def add_count(self, flag: str, full: int, quick: int, what: str) -> None:
        """Adds a flag for a number of repetitions, whose default is `full`, or `quick` with --quick."""
        action = self.add_argument(flag, type=int, default=0, help=f"{what}; 0: {full}, or {quick} with --quick")
        self._counts[action.dest] = (full, quick)

    def add_series(self, flag: str, default: Sequence[float], what: str) -> None:
        """Adds an option for a list of numbers, of which only the first one is used with --quick."""
        kind = float if any(isinstance(x, float) for x in default) else int
        action = self.add_argument(flag, type=kind, nargs="*", default=list(default), help=what)
        self._series.append(action.dest)

    def add_seed(self, what: str) -> None:
        self.add_argument("--seed", type=int, default=1, help=what)

    def parse_args(self, *given: Any) -> argparse.Namespace:  # type: ignore[override]
        args: argparse.Namespace = super().parse_args(*given)
        for name, (full, quick) in self._counts.items():
            setattr(args, name, getattr(args, name) or (quick if args.quick else full))
        for name in self._series if args.quick else ():
            setattr(args, name, getattr(args, name)[:1])
        return args


def run(main: Any) -> None:
    """Runs the `main` of a benchmark module and exits with its status."""
    sys.exit(main())


# ------------------------------------------------------------------------------------------------ numbers


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile (0 the least, 100 the greatest value) by linear interpolation between the sorted values.

    Raises:
        ValueError: No values, or `percent` is not within 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent:g} of {len(values)} values: expected 0 to 100, of at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
