"""Repeats the evaluation of the paper "Chaos", figure by figure, and compares the paper's claims with the results.

    python -m benchmarks.chaos_paper                      all figures, under 40 minutes on two slow cores with 24 GiB
    python -m benchmarks.chaos_paper --quick              all of them, smaller, under 2 minutes
    python -m benchmarks.chaos_paper --figure 7 16        some of them (3, 7 to 16, and I for Table I)
    python -m benchmarks.chaos_paper --docs docs/         writes docs/paper.md, docs/paper/*.png and paper/results.json
    python -m benchmarks.chaos_paper --docs docs/ --draw  draws and writes again what results.json holds; runs nothing

Every figure says what is *real* (the package at the paper's sizes and rates, over emulated links), *scaled down* (the
package really executed, on smaller states, slower links or shorter training) and *simulated* (computed in virtual time
by the package's own decision code). Where a result differs from the paper's the table says why. With --docs, figures
that were not run keep what results.json has of them. Pictures need matplotlib (extra "report").

Measured by itself on an idle machine; what else runs here takes part in the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, run
from benchmarks.paper.figure import Claim, FigureResult, Scale, need_matplotlib, progress
from benchmarks.paper.tables import markdown, rounded, terminal

FIGURES = {
    "3": ("parts", "fig3"),
    "7": ("delays", "fig7"),
    "8": ("delays", "fig8"),
    "9": ("links", "fig9"),
    "I": ("links", "table1"),
    "10": ("idle", "fig10"),
    "11": ("convergence.figures", "fig11"),
    "12": ("convergence.figures", "fig12"),
    "13": ("convergence.figures", "fig13"),
    "14": ("convergence.figures", "fig14"),
    "15": ("delays", "fig15"),
    "16": ("assignment", "fig16"),
}
"""Module of benchmarks.paper and function of each figure, in the order in which they are run and shown."""
BOUND_S = {True: 120.0, False: 2400.0}
"""Most seconds for all figures together, by whether they are quick."""


def function(number: str, prefix: str = "") -> Callable[..., Any]:
    """Returns the function that computes a figure, or with the prefix "plot_" the one that draws it."""
    module, name = FIGURES[number]
    found: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.paper.{module}"), prefix + name)
    return found


def picture(number: str) -> str:
    """Returns the file name of a figure's picture."""
    return "table1.png" if number == "I" else f"fig{number}.png"


def make(
    numbers: Sequence[str], scale: Scale, made_one: Callable[[dict[str, FigureResult]], Any] = lambda made: None
) -> tuple[dict[str, FigureResult], dict[str, str]]:
    """Computes figures one after the other; one that fails does not stop the others.

    Args:
        numbers: Numbers of the figures.
        scale: Size of the runs.
        made_one: Called after each figure with the results so far, so that they are not lost if a long run is ended.

    Returns:
        Results, and errors in words, both by number.
    """
    made: dict[str, FigureResult] = {}
    failed: dict[str, str] = {}
    for place, number in enumerate(numbers, 1):
        progress(number, f"begins ({place} of {len(numbers)})")
        began = time.monotonic()
        try:
            result: FigureResult = function(number)(scale)
        except Exception as error:
            traceback.print_exc()
            failed[number] = f"{type(error).__name__}: {error}"
            continue
        result.seconds = time.monotonic() - began
        made[number] = result
        agree = sum(claim.agrees for claim in result.claims)
        progress(number, f"{agree} of {len(result.claims)} claims hold here; {result.seconds:.0f} s")
        made_one(made)
    return made, failed


def draw(results: dict[str, FigureResult], folder: Path) -> None:
    """Draws a picture of each figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, result in results.items():
        function(number, "plot_")(result, folder / picture(number))


def load(path: Path) -> tuple[dict[str, FigureResult], dict[str, Any]]:
    """Loads the saved results of an earlier run and the description of its machine; empty if there was no earlier run.

    Raises:
        ValueError: The file is not one of ours.
    """
    if not path.exists():
        return {}, {}
    try:
        record = json.loads(path.read_text())
        return {n: FigureResult.from_json(r) for n, r in record["figures"].items()}, record["about"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no file of results ({error!r}); expected what --docs writes: delete it and run all figures"
        ) from error


def keep(path: Path, results: dict[str, FigureResult], about: dict[str, Any]) -> None:
    """Saves everything that pictures and text are made from as a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "figures": {n: rounded(r.as_json()) for n, r in results.items()}}
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")


def about(scale: Scale) -> dict[str, Any]:
    """Returns a description of the machine and of the versions with which figures were made."""
    return {
        "when": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "python": platform.python_version(),
        "system": platform.system(),
        "quick": scale.quick,
        "seed": scale.seed,
    }


def ordered(results: dict[str, FigureResult]) -> dict[str, FigureResult]:
    """Returns the results in the order of FIGURES."""
    return {number: results[number] for number in FIGURES if number in results}


def merge(folder: Path, made: dict[str, FigureResult], here: dict[str, Any]) -> None:
    """Saves the figures of this run together with figures saved earlier that this run did not make."""
    store = folder / "paper" / "results.json"
    before, earlier = load(store)
    keep(store, ordered({**before, **made}), here if made else earlier)


def mixed(folder: Path, numbers: Sequence[str], quick: bool) -> str:
    """Returns why these figures cannot be mixed with the ones saved in the folder; empty if they can.

    Raises:
        ValueError: The results in the folder are of another format.
    """
    before, earlier = load(folder / "paper" / "results.json")
    others = [number for number in before if number not in numbers]
    if not others or earlier.get("quick") is quick:
        return ""
    kept, wanted = ("full size", "--quick") if quick else ("--quick", "full size")
    return (
        f"{folder} holds figures {', '.join(others)} made with {kept}, and these are to be made with {wanted}: "
        "make all figures, or name another folder"
    )


def write_docs(folder: Path) -> dict[str, FigureResult]:
    """Writes the text and pictures of all results saved in the folder; returns the results."""
    results, machine = load(folder / "paper" / "results.json")
    draw(results, folder / "paper")
    if results:
        (folder / "paper.md").write_text(markdown(results, machine, picture))
    return results


def tell(result: Result, made: dict[str, FigureResult], failed: dict[str, str], args: argparse.Namespace) -> None:
    """Adds counts of claims that hold, claims that differ and figures that failed, and the total time."""
    claims: list[Claim] = [claim for figure in made.values() for claim in figure.claims]
    result.add("claims that hold here", sum(c.agrees for c in claims), "count")
    result.add("claims that differ, with a reason", sum(not c.agrees for c in claims), "count")
    result.add("figures that failed", len(failed), "count", 0)
    if made:
        whole = set(made) | set(failed) == set(FIGURES)
        total = sum(figure.seconds for figure in made.values())
        result.add("time of all figures", total, "s", BOUND_S[args.quick] if whole else None)
    result.details["failed"] = failed
    result.details["figures"] = {n: rounded(r.as_json()) for n, r in made.items()}


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument(
        "--figure", nargs="+", default=[], choices=list(FIGURES), metavar="N", help="only these: " + ", ".join(FIGURES)
    )
    p.add_argument("--docs", default="", metavar="DIR", help="write paper.md, paper/*.png and paper/results.json there")
    p.add_argument("--draw", action="store_true", help="with --docs: run nothing, draw again what is kept there")
    p.add_argument("--seed", type=int, default=Scale().seed, help="of every random choice")
    args = p.parse_args()
    if args.draw and not args.docs:
        p.error("--draw needs --docs DIR, the folder whose paper/results.json is to be drawn")
    scale = Scale.small(args.seed) if args.quick else Scale.full(args.seed)
    numbers = [number for number in FIGURES if number in (args.figure or FIGURES)]
    if args.docs:
        try:
            need_matplotlib()
            problem = "" if args.draw else mixed(Path(args.docs), numbers, args.quick)
        except (ImportError, ValueError) as error:
            problem = str(error)
        if problem:
            p.error(problem)
    folder, here = Path(args.docs), about(scale)

    def kept(made: dict[str, FigureResult]) -> None:
        if args.docs:
            merge(folder, made, here)

    made, failed = make([] if args.draw else numbers, scale, kept)
    shown = made
    if args.docs:
        results = write_docs(folder)
        shown = results if args.draw else made
        print(f"wrote {folder / 'paper.md'} and {len(results)} pictures", file=sys.stderr)
    print(terminal(shown))
    for number, words in failed.items():
        print(f"figure {number} failed: {words}", file=sys.stderr)
    result = Result("chaos_paper")
    tell(result, shown, failed, args)
    status = result.finish(args)
    return 1 if failed else status


if __name__ == "__main__":
    run(main)
