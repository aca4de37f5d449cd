"""Parts that the paper's figures share: the size of runs, results and claims, and how they are drawn.

Every figure N of the paper is two functions of one module of this package:

    def figN(scale: Scale) -> FigureResult        # measures; prints progress with `progress`, never to stdout
    def plot_figN(result: FigureResult, path: Path) -> None   # draws `result.data` alone, with `canvas`

(`table1`, `plot_table1` for Table I). `plot_figN` reads nothing but `result.data`, which holds plain JSON types (dicts
with string keys, lists, numbers, strings, None), so pictures can be drawn again from a saved run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

Kind = Literal["real", "scaled down", "simulated"]
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """Size of the runs for the figures: full or quick, with a seed and a time budget.

    Attributes:
        quick: all figures together under two minutes; else under 40 minutes on two slow cores.
        seed: seed of every random choice (topologies, rates, data, initial weights).
        budget_s: what one figure may take at most, in seconds; a figure that would take longer runs fewer repetitions
            and says so in `how`.
    """

    quick: bool = False
    seed: int = 20260
    budget_s: float = 180.0

    @staticmethod
    def full(seed: int = 20260) -> Scale:
        return Scale(seed=seed)

    @staticmethod
    def small(seed: int = 20260) -> Scale:
        return Scale(quick=True, seed=seed, budget_s=15.0)

    def pick(self, quick: T, full: T) -> T:
        """Returns `quick` in a quick run, else `full`."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, and the result of this benchmark.

    Attributes:
        paper: what the paper says, with its numbers.
        ours: what came out here, with units.
        kind: "real": the product at the paper's sizes and rates; "scaled down": the product really executed on smaller
            sizes, shorter times or fewer nodes; "simulated": computed from a model in virtual time.
        agrees: whether the paper's statement holds here.
        why: why it differs, and what was scaled or simulated, in words; must say something where `agrees` is false.
    """

    paper: str
    ours: str
    kind: Kind
    agrees: bool
    why: str = ""

    def __post_init__(self) -> None:
        if not self.agrees and not self.why.strip():
            raise ValueError(
                f"claim {self.paper!r} does not agree and says not why: give `why`, the reason for the difference"
            )


@dataclass
class FigureResult:
    """One figure: how it was made, its claims and the data that its picture is drawn from.

    Attributes:
        number: "3", "16" or "I".
        title: what it shows.
        how: what is real, scaled down or simulated, and how large, in a sentence or two.
        claims: the paper's statements, each beside ours.
        data: JSON types alone; everything that `plot_figN` draws.
        seconds: wall-clock time of making it; `benchmarks.chaos_paper` fills it in.
    """

    number: str
    title: str
    how: str
    claims: list[Claim] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> FigureResult:
        """Returns the result that a JSON record of `as_json` describes.

        Raises:
            TypeError: the record lacks a field or has one that is unknown.
        """
        return FigureResult(**record | {"claims": [Claim(**claim) for claim in record["claims"]]})


def settled(claim: Claim) -> Claim:
    """Returns the claim, without its reason for a difference if it agrees with the paper."""
    return Claim(claim.paper, claim.ours, claim.kind, claim.agrees) if claim.agrees else claim


def span(values: Sequence[float], unit: str = "s") -> str:
    """Describes the range of values, from the least to the greatest."""
    low, high = (f"{v:.0f}" if v >= 9.95 else f"{v:.2g}" for v in (min(values), max(values)))
    return f"{low} to {high} {unit}" if low != high else f"{low} {unit}"


def progress(number: str, text: str) -> None:
    """Prints a line on stderr about the progress of figure `number`."""
    print(f"[{time.strftime('%H:%M:%S')}] fig {number}: {text}", file=sys.stderr, flush=True)


def need_matplotlib() -> None:
    """Raises an error if matplotlib is not installed, before hours of measuring.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "pictures need matplotlib, which is not installed; run: pip install 'chaos-lightning[report]'"
        )


@contextlib.contextmanager
def canvas(
    path: Path, rows: int = 1, columns: int = 1, width_in: float = 4.2, height_in: float = 3.0
) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a figure of `rows` x `columns` axes, saved as a PNG at `path` on leaving.

    Args:
        path: file to write; its folder is made.
        rows: rows of axes.
        columns: columns of axes.
        width_in: width of one of the axes, in inches.
        height_in: height of one of the axes, in inches.

    Yields:
        matplotlib's figure and the flat list of its axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    picture, axes = plt.subplots(
        rows, columns, figsize=(width_in * columns, height_in * rows), squeeze=False, layout="constrained"
    )
    try:
        yield picture, list(axes.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=110)
    finally:
        plt.close(picture)
