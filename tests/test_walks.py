"""Checks the walks through the code in docs/architecture.md: files exist, and functions call each other in that
order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "chaos_lightning"
ROW = re.compile(r"\| `(?P<file>[\w/]+\.py)` \| `(?P<function>\w+)` \| (?P<calls>.+) \|")
CALL = re.compile(r"`(?P<name>\w+)`(, given `(?P<given>\w+)`)?$")
MOST_FILES = {"A gradient": 13, "A byte range": 15, "A control message, and the view that answers it": 18, "A push": 34}


@dataclass(frozen=True)
class Stop:
    """Step of a walk through the code: one function.

    Attributes:
        calls: Name that the function calls; "" where something else comes between it and the next function.
        given: Name of the function that `calls` stands for, if it was passed in when the caller was made; otherwise "".
    """

    file: str
    function: str
    calls: str
    given: str


def walks() -> dict[str, list[Stop]]:
    found: dict[str, list[Stop]] = {}
    text = (ROOT / "docs" / "architecture.md").read_text()
    for line in text.partition("## Four walks")[2].partition("\n## ")[0].splitlines():
        if title := re.match(r"\*\*(.+?)\*\*", line):
            found[title[1]] = []
        elif row := ROW.match(line):
            call = CALL.match(row["calls"])
            words = (call["name"], call["given"] or "") if call else ("", "")
            assert call or row["calls"].startswith("*"), line
            found[list(found)[-1]].append(Stop(row["file"], row["function"], *words))
    return found


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def functions(stop: Stop) -> list[ast.AST]:
    """Returns all functions with the name of this stop in its file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [n for n in ast.walk(parsed(stop.file)) if isinstance(n, kinds) and n.name == stop.function]


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called(function: ast.AST) -> set[str]:
    """Returns the names that a function calls, or passes to other calls, as in `in_thread(chain.append, ...)`."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    return {name_of(n) for call in calls for n in (call.func, *call.args)}


@cache
def handed() -> frozenset[str]:
    """Returns all names that are passed as arguments to calls in the package, also within lambdas."""
    return frozenset(
        name
        for path in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for argument in (*call.args, *(k.value for k in call.keywords))
        for name in names_in(argument)
    )


def names_in(argument: ast.expr) -> Iterator[str]:
    body = argument.body.func if isinstance(argument, ast.Lambda) and isinstance(argument.body, ast.Call) else argument
    yield name_of(body)


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_walk_goes_through_these_files_in_this_order(title: str) -> None:
    stops = walks()[title]
    assert len(stops) > 10
    for here, following in zip(stops, [*stops[1:], None], strict=True):
        found = functions(here)
        assert found, f"{here.file} has no function {here.function}"
        if not here.calls:
            continue
        assert any(here.calls in called(f) for f in found), f"{here.function} ({here.file}) does not call {here.calls}"
        assert following is not None
        assert following.function == (here.given or here.calls), here
        assert not here.given or here.given in handed(), f"nobody is given {here.given}"


@pytest.mark.parametrize(("title", "most"), MOST_FILES.items())
def test_a_walk_is_short(title: str, most: int) -> None:
    """A walk passes through at most as many files as recorded; remove steps that only pass a call on before raising a
    number.
    """
    assert len({stop.file for stop in walks()[title]}) <= most


def test_the_page_for_new_engineers_names_what_is_there() -> None:
    text = (ROOT / "docs" / "reading.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", text)
    assert len({file for file, _ in named}) > 20
    for file, function in named:
        path = ROOT / file if file.startswith(("lab/", "tests/")) else PACKAGE / file
        assert path.is_file(), file
        names = {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}
        assert not function or function in names, f"{file} has no function {function}"
