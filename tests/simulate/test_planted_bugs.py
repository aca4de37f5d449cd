"""Tests that the simulator notices each starred rule of protocol.md that is broken on purpose, and reports nothing
without the bug.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from simulate_support import BOUND, showing

from lab.simulate.bugs import BUGS, fixed, learners, links, members, schedulers, staged
from lab.simulate.world import Hooks, simulate

STARRED = {"1", "2", "3", "4", "4a", "7", "8", "9", "10", "12", "12a", "12b", "14a", "15", "19", "25", "28", "31"}
STARRED |= {f"P{number}" for number in range(1, 18)} - {"P16"}  # randomness: tests/pipeline/test_randomness.py
STARRED |= {"B1", "B2", "B3", "B4"}
LONG = {"7-reissued", "links-own-ways", "1-mixed"}
"""Bugs that take many seeds to be found."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in BUGS])
def test_planted_bug_is_noticed(name: str) -> None:
    assert any(showing(name)), f"not within {BOUND} seeds"


@pytest.mark.slow  # the seeds of test_simulated_*.py show the same in the ordinary run
@pytest.mark.parametrize("name", BUGS)
def test_without_the_bug_the_same_jobs_are_well(name: str) -> None:
    """The same seeds run clean without the bug, so that neither the plan nor a disabled guard causes its violation."""
    bug = BUGS[name]
    found, _ = next(showing(name))
    for seed in range(max(found + 1, 10)):
        outcome = simulate(bug.plan(seed), bug.control or Hooks)
        assert outcome.violation == "", f"seed {seed}"


@pytest.mark.parametrize("module", [members, learners, links, schedulers, staged, fixed])
def test_each_planted_behaviour_replaces_one_that_is_there(module: object) -> None:
    """Each method of a planted bug overrides an existing one; it would plant nothing if that was renamed in the
    product.
    """
    own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == getattr(module, "__name__", "")]
    assert own
    for kind in own:
        names = [name for name in vars(kind) if not name.startswith("__")] or ["__init__"]
        assert any(hasattr(base, name) for base in kind.__mro__[1:] for name in names), kind


def test_every_starred_rule_of_these_machines_has_a_bug() -> None:
    assert {bug.rule for bug in BUGS.values()} >= STARRED


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("letter", "heading", "least"), [("P", "### Where they are tested", 15), ("B", "| B1 |", 2)])
def test_tables_of_rules_name_what_there_is(letter: str, heading: str, least: int) -> None:
    """The tables of rules of pipelines and of a fixed batch in protocol.md name all their planted bugs, and only tests
    that exist.
    """
    text = (ROOT / "docs/protocol.md").read_text()
    table = text.partition(heading)[2].partition("\n## ")[0]
    planted = set(re.findall(rf"`({letter}\d+-[a-z-]+)`", table))
    assert planted == {name for name in BUGS if name.startswith(letter)}
    ids = re.findall(r"`([a-z_/]+\.py)::(\w+)`", table)
    assert len(ids) > least
    for file, test in ids:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1-mixed", "different contributors"),
        ("4-hasty", "left the job twice"),
        ("7-hasty", "left the job twice"),
        ("10-first-only", "is empty"),
        ("11-stubborn", "with a state that no donor has"),
        ("12a-impatient", "founds the job again although"),
        ("12-rash", "lives and answered in time"),
        ("19-trusting", "with a state that no donor has"),
        ("28-double-vote", "vote"),
        ("P4-bare", "lacks parts"),
        ("P4-restless", "lacks parts"),
        ("P6-eager", "so the job ends"),
        ("P6-one-sided", "do not hold all parts of the state without it"),
        ("P11-own", "and they are others'"),
        ("P13-own-header", "begins again from nothing"),
        ("P13-hasty", "begins again from nothing"),
        ("P14-copies", "and they are others'"),
        ("P17-counting-unchecked", "metrics have counted"),
        ("B1-own-order", "not that of one process"),
        ("B1-number", "one process uses"),
        ("B2-left-out", "in the sum of no member"),
        ("B2-unchecked", "one process uses"),
        ("B3-sums", "sums what was made in"),
        ("B3-buffers", "on another state"),
        ("B4-own-split", "in the sum"),
        ("B4-restless", "divides the batch anew"),
        ("B4-unstored", "stored is"),
    ],
)
def test_bug_does_the_harm_that_its_rule_prevents(name: str, words: str) -> None:
    assert any(words in violation for _, violation in showing(name))
