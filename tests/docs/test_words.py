"""Checks how docstrings and comments begin, and the rules that they cite (CONTRIBUTING.md, "Words")."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("chaos_lightning", "strategies", "callbacks", "configs", "examples", "lab", "benchmarks", "tests")
HEADLESS = ("What", "Of", "Who", "Whose", "Whom", "Whoever", "Nobody", "Somebody", "Where", "With which")
"""First words of a clause that has no head, so that a reader must find out what it is about."""
OPENING = re.compile(rf"(?:{'|'.join(HEADLESS)})\b")
CONDITION = re.compile(r"Where\b[^.;]*?,")
"""Begins a sentence that has a head: "Where a user has no token, links are open"."""
RULE = re.compile(r"\b(?:O|P)\d{1,2}[a-z]?\b")
NUMBERED = re.compile(r"\bprotocol\.md ((?:P?\d+[a-z]?(?:, | and |: )?)+)")
FILE = re.compile(r"(?<![\w/.<*{-])(?:[\w-]+/)*[\w-]+\.(?:py|md|proto|toml)\b")
PLACEHOLDERS = frozenset({"file.py"})
"""Stand for any file."""


@cache
def sources() -> tuple[Path, ...]:
    found = (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in p.name)
    return tuple(p for p in found if not any(q.is_symlink() for q in (p, *p.parents)))


def words_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring and comment in a source; consecutive comment lines count as one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        alone = token.line.lstrip().startswith("#")
        if lines and alone and token.start[0] == start + len(lines):
            lines.append(text)
            continue
        if lines:
            yield start, " ".join(lines)
        start, lines = token.start[0], [text]
        if not alone:
            yield start, text
            lines = []
    if lines:
        yield start, " ".join(lines)


@cache
def words() -> tuple[tuple[str, int, str], ...]:
    """Returns file, line and text of all docstrings and comments."""
    return tuple(
        (str(p.relative_to(ROOT)), line, text) for p in sources() for line, text in words_of(p.read_text("utf-8"))
    )


def is_headless(text: str) -> bool:
    return bool(OPENING.match(text)) and not CONDITION.match(text)


@pytest.mark.parametrize(
    ("text", "headless"),
    [
        ("Of each member.", True),
        ("What was sent.", True),
        ("With which a leader ends.", True),
        ("Where it begins.", True),
        ("Where a link is missing, the plan is drawn again.", False),
        ("Offers that are open.", False),
        ("Returns what was sent.", False),
    ],
)
def test_an_opening_without_a_head_is_known(text: str, *, headless: bool) -> None:
    assert is_headless(text) is headless


def test_comments_that_follow_each_other_are_one() -> None:
    source = 'x = 1  # One.\n# Two\n# of them.\n"""Three."""\n'
    assert sorted(words_of(source)) == [(1, "One."), (2, "Two of them."), (4, "Three.")]


def test_no_opening_is_without_a_head() -> None:
    found = [f"{file}:{line}: {text.splitlines()[0]}" for file, line, text in words() if is_headless(text)]
    assert found == [], "see CONTRIBUTING.md, Words"


# ------------------------------------------------------------------ citations


@cache
def rules() -> frozenset[str]:
    """Returns the names of all protocol rules in the docs, such as O1a, P9 and 12a."""
    outer, protocol = ((ROOT / "docs" / name).read_text("utf-8") for name in ("outer.md", "protocol.md"))
    found = {m[1] for m in re.finditer(r"^\*\*(O\d+[a-z]?)\.\*\*", outer, re.MULTILINE)}
    return frozenset(found | {m[1] for m in re.finditer(r"^ *(P?\d+[a-z]?)\. ", protocol, re.MULTILINE)})


def test_rules_that_are_cited_are_there() -> None:
    wrong = []
    for file, line, text in words():
        cited = set(RULE.findall(text))
        for numbers in NUMBERED.findall(text):
            cited |= set(re.findall(r"P?\d+[a-z]?", numbers))
        wrong += [f"{file}:{line}: {rule}" for rule in sorted(cited - rules())]
    assert wrong == []


def test_files_that_are_cited_are_there() -> None:
    there = {p.relative_to(ROOT).as_posix() for p in sources()}
    there |= {p.relative_to(ROOT).as_posix() for kind in ("*.md", "*.proto", "*.toml") for p in ROOT.glob(kind)}
    places = (("docs", "*.md"), ("chaos_lightning", "*.proto"), ("tests", "*.toml"), ("tests", "*.md"))
    there |= {p.relative_to(ROOT).as_posix() for folder, kind in places for p in (ROOT / folder).rglob(kind)}
    ends = {"/".join(name.split("/")[-n:]) for name in there for n in range(1, name.count("/") + 2)}
    wrong = [
        f"{file}:{line}: {name}"
        for file, line, text in words()
        for name in FILE.findall(text)
        if name not in ends and name not in PLACEHOLDERS
    ]
    assert wrong == []


def parameters(node: ast.AST) -> set[str] | None:
    """Returns the names that a docstring's "Args" may list for a function or class; None if any name may be listed."""
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not made:
            return None  # a dataclass, or made by a class that it is based on
        node = made[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    a = node.args
    return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *(y for y in (a.vararg, a.kwarg) if y))}


def told(docstring: str) -> list[str]:
    """Returns the names that a docstring lists below "Args:"."""
    part = re.search(r"^ *Args:\n(.*?)(?:\n *\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if part is None:
        return []
    lines = part[1].splitlines()
    depth = len(lines[0]) - len(lines[0].lstrip())
    heads = [line[depth:].partition(":")[0] for line in lines if line[depth : depth + 1].strip()]
    return [name.split("(")[0].strip(" *`") for head in heads for name in head.split(",")]


def test_arguments_that_are_told_of_are_there() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names, known = told(ast.get_docstring(node, clean=False) or ""), parameters(node)
            if known is not None:
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names if name not in known]
    assert wrong == []
