"""Prints the paper's claims with our results, for terminals and as markdown."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.paper.figure import Claim, FigureResult

_DIGITS = 5
_LINE = 120


def rounded(value: Any) -> Any:
    """Rounds floats to a few digits and turns tuples into lists, for files that people compare."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


def name_of(number: str) -> str:
    """Returns a figure's name as used in sentences."""
    return "Table I" if number == "I" else f"Fig. {number}"


def kinds(claims: Sequence[Claim]) -> str:
    """Describes how many of the claims were measured for real, scaled down and simulated."""
    counts = Counter(claim.kind for claim in claims)
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("real", "scaled down", "simulated") if counts[kind])


def terminal(results: Mapping[str, FigureResult], width: int = 0) -> str:
    """Returns all claims as text, wrapped.

    Args:
        results: Results of the figures, by number.
        width: Width of the text in characters; 0: the terminal's.
    """
    width = width or min(_LINE, shutil.get_terminal_size((_LINE, 24)).columns)
    lines = []
    for number, result in results.items():
        lines += ["", f"{name_of(number)}  {result.title}  ({result.seconds:.0f} s)"]
        for claim in result.claims:
            sign = "=" if claim.agrees else "!"
            pairs = [("paper", claim.paper), ("ours", f"{claim.ours} [{claim.kind}]")]
            if claim.why:
                pairs.append(("why" if not claim.agrees else "note", claim.why))
            for index, (word, text) in enumerate(pairs):
                start = f" {sign if not index else ' '} {word:6}"
                lines += textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escapes a text for a cell of a markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _row(*cells: str) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def summary(results: Mapping[str, FigureResult]) -> list[str]:
    """Returns a table with one row for each figure."""
    lines = ["| figure | what it shows | claims that hold here | made how | s |", "|---|---|---|---|---|"]
    for number, result in results.items():
        agree = sum(claim.agrees for claim in result.claims)
        link = f"[{name_of(number)}](#{anchor(number, result)})"
        claims = f"{agree} of {len(result.claims)}"
        lines.append(_row(link, result.title, claims, kinds(result.claims), f"{result.seconds:.0f}"))
    return lines


def heading(number: str, result: FigureResult) -> str:
    """Returns the heading of a figure's section."""
    return f"{name_of(number)}: {result.title}"


def anchor(number: str, result: FigureResult) -> str:
    """Returns the anchor of a figure's section, for links."""
    text = heading(number, result).lower()
    return "".join(c for c in text if c.isalnum() or c in " -_").replace(" ", "-")


def markdown(results: Mapping[str, FigureResult], about: Mapping[str, Any], picture: Callable[[str], str]) -> str:
    """Returns the whole comparison as a page.

    Args:
        results: Results of the figures, by number, in the order in which they are shown.
        about: Facts on the run: its time, machine, seed and size.
        picture: Function that returns the file name of a figure's picture, in the folder paper/.
    """
    claims = [claim for result in results.values() for claim in result.claims]
    agree = sum(claim.agrees for claim in claims)
    total = sum(result.seconds for result in results.values())
    quick = " --quick" if about["quick"] else ""
    lines = [
        '# The evaluation of the paper "Chaos", repeated',
        "",
        f"Written by `python -m benchmarks.chaos_paper{quick} --docs docs/` on {about['when']}, not by hand: "
        f"{about['cores']} cores, {about['memory_gib']} GiB, Python {about['python']}, seed {about['seed']}, "
        f"{total / 60:.0f} minutes in all.",
        "",
        f"Of {len(claims)} claims {agree} hold here. The others are told with the reason why they differ. What begins "
        "with (ours) the paper does not say.",
        "",
        "- *real*: the package at the paper's sizes and rates. Links are emulated, as the paper's are.",
        "- *scaled down*: the package really executed, on smaller states, slower links, fewer nodes, or for a shorter",
        "  time. Where the text says so, numbers are brought back to the paper's sizes.",
        "- *simulated*: computed in virtual time, by the package's own decision code where it decides.",
        "",
        *summary(results),
    ]
    for number, result in results.items():
        lines += ["", f"## {heading(number, result)}", "", *textwrap.wrap(result.how, _LINE), ""]
        lines += [f"![{name_of(number)}](paper/{picture(number)})", ""]
        lines += ["| the paper | here | | |", "|---|---|---|---|"]
        for claim in result.claims:
            verdict = "holds" if claim.agrees else "**differs**"
            lines.append(_row(claim.paper, claim.ours, claim.kind, verdict))
        reasons = [claim for claim in result.claims if claim.why]
        if reasons:
            lines += ["", "Why:" if any(not c.agrees for c in reasons) else "Notes:", ""]
            for claim in reasons:
                text = f"*{claim.paper}*: {claim.why}" if not claim.agrees else f"*{claim.paper}* (holds): {claim.why}"
                lines += textwrap.wrap(text, _LINE, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"
