"""Tests the table of the paper's claims with our results: the parts of a claim, the saved results, and the text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos_paper
from benchmarks.paper.figure import Claim, FigureResult, Scale, settled, span
from benchmarks.paper.tables import anchor, kinds, markdown, rounded, terminal

HOLDS = Claim("delays are < 1 s", "0.5 s | median", "real", True)
DIFFERS = Claim("it grows", "it falls", "simulated", False, "More neighbours, more links. " * 8)
RESULT = FigureResult("9", "Connect-link delay", "Really executed.", [HOLDS, DIFFERS], {"delays": {"7": [0.5]}}, 12.0)
ABOUT = {"when": "2026-01-01", "cores": 2, "memory_gib": 24, "python": "3.11", "seed": 1, "quick": False}


def test_a_difference_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="says not why"):
        Claim("paper", "ours", "real", False, "  ")


def test_a_claim_that_holds_loses_the_reason_why_it_would_not() -> None:
    assert settled(Claim("paper", "ours", "real", True, "because")).why == ""
    assert settled(DIFFERS) is DIFFERS


def test_scales_differ_in_size_and_keep_the_seed() -> None:
    assert Scale.small(3).pick("small", "large") == "small"
    assert Scale.full(3).pick("small", "large") == "large"
    assert Scale.small(3).seed == Scale.full(3).seed == 3
    assert Scale.small().budget_s < Scale.full().budget_s


@pytest.mark.parametrize(
    ("values", "text"), [([1.0, 2.5], "1 to 2.5 s"), ([3.0], "3 s"), ([1234.0, 5.0], "5 to 1234 s")]
)
def test_spans_read_well(values: list[float], text: str) -> None:
    assert span(values) == text


def test_results_survive_being_kept(tmp_path: Path) -> None:
    path = tmp_path / "paper" / "results.json"
    chaos_paper.keep(path, {"9": RESULT}, ABOUT)
    results, about = chaos_paper.load(path)
    assert results == {"9": RESULT}
    assert about == ABOUT
    assert chaos_paper.load(tmp_path / "none.json") == ({}, {})


def test_a_strange_file_of_results_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"figures": {"9": {"title": "no such field", "colour": 1}}, "about": {}}))
    with pytest.raises(ValueError, match=r"results\.json is no file of results.*delete it"):
        chaos_paper.load(path)


def test_floats_are_kept_to_a_few_digits() -> None:
    assert rounded({"a": (1.23456789, 2), 3: [1e-9 / 3]}) == {"a": [1.2346, 2], "3": [3.3333e-10]}


def test_the_page_tells_each_claim_its_verdict_and_each_difference_its_reason() -> None:
    page = markdown({"9": RESULT}, ABOUT, chaos_paper.picture)
    assert "![Fig. 9](paper/fig9.png)" in page
    assert "| delays are < 1 s | 0.5 s \\| median | real | holds |" in page
    assert "| it grows | it falls | simulated | **differs** |" in page
    assert "- *it grows*: More neighbours" in page
    assert "Of 2 claims 1 hold" in page
    rows = [line for line in page.splitlines() if line.startswith("| [Fig. 9]")]
    assert rows == ["| [Fig. 9](#fig-9-connect-link-delay) | Connect-link delay | 1 of 2 | 1 real, 1 simulated | 12 |"]


def test_links_to_sections_lead_to_headings() -> None:
    page = markdown({"9": RESULT}, ABOUT, chaos_paper.picture)
    targets = set(re.findall(r"\(#([^)]+)\)", page))
    headings = [line[3:].lower() for line in page.splitlines() if line.startswith("## ")]
    assert targets == {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    assert anchor("9", RESULT) in targets


def test_the_terminal_shows_both_sides_within_its_width() -> None:
    text = terminal({"9": RESULT}, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert " = paper delays are < 1 s" in text
    assert " ! paper it grows" in text
    assert "why" in text


def test_kinds_are_counted() -> None:
    assert kinds([HOLDS, HOLDS, DIFFERS]) == "2 real, 1 simulated"


def test_every_figure_has_a_function_and_a_picture() -> None:
    for number in chaos_paper.FIGURES:
        assert callable(chaos_paper.function(number))
        assert callable(chaos_paper.function(number, "plot_"))
    assert len({chaos_paper.picture(number) for number in chaos_paper.FIGURES}) == len(chaos_paper.FIGURES)


def test_a_figure_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(number: str, prefix: str = "") -> Any:
        def make(scale: Scale) -> FigureResult:
            if number == "8":
                raise RuntimeError("no room")
            return FigureResult(number, "title", "how", [HOLDS])

        return make

    monkeypatch.setattr(chaos_paper, "function", function)
    written: list[list[str]] = []
    made, failed = chaos_paper.make(["7", "8", "9"], Scale.small(), lambda made: written.append(list(made)))
    assert list(made) == ["7", "9"]
    assert written == [["7"], ["7", "9"]], "what is made is written at once"
    assert failed == {"8": "RuntimeError: no room"}


def test_what_was_not_run_is_kept_from_before_and_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(chaos_paper, "function", lambda number, prefix="": lambda result, path: drawn.append(path))
    chaos_paper.merge(tmp_path, {"16": FigureResult("16", "Assignment", "Planned.", [HOLDS])}, ABOUT)
    chaos_paper.merge(tmp_path, {"9": RESULT}, {**ABOUT, "seed": 2})
    chaos_paper.merge(tmp_path, {}, {**ABOUT, "seed": 3})
    assert list(chaos_paper.write_docs(tmp_path)) == ["9", "16"]
    assert [path.name for path in drawn] == ["fig9.png", "fig16.png"]
    assert "seed 2" in (tmp_path / "paper.md").read_text(), "a run that made nothing has measured nothing"
    assert "Fig. 16: Assignment" in (tmp_path / "paper.md").read_text()


def test_it_tells_its_flags_and_refuses_to_draw_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos_paper"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in ("--figure", "--docs", "--draw", "--quick", "--check", "--out"))
    done = subprocess.run([*command, "--draw"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--draw needs --docs" in done.stderr


def test_quick_and_full_figures_are_not_put_on_one_page(tmp_path: Path) -> None:
    chaos_paper.merge(tmp_path, {"9": RESULT}, ABOUT)
    assert "holds figures 9 made with full size" in chaos_paper.mixed(tmp_path, ["16"], quick=True)
    assert chaos_paper.mixed(tmp_path, ["9", "16"], quick=True) == "", "nothing is left of the other kind"
    assert chaos_paper.mixed(tmp_path, ["16"], quick=False) == ""
    assert chaos_paper.mixed(tmp_path / "elsewhere", ["16"], quick=True) == ""
