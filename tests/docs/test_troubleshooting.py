"""Tests that the troubleshooting page quotes only messages that the package still prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
GAP = "\0"


def _words(node: ast.expr) -> str:
    """Returns a text in the code, with a mark for each part that is filled in at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]|%\.\d+f", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    return GAP


@cache
def _texts() -> frozenset[str]:
    folders = ("chaos_lightning", "strategies", "callbacks", "configs")
    trees = [ast.parse(path.read_text()) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return frozenset(
        _words(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)
    )


def _said(quote: str) -> bool:
    """Returns whether some text in the code contains the quote; "..." in it stands for parts filled in at run time."""
    parts = [re.escape(part) for part in quote.split("...") if part.strip()]
    pattern = re.compile(f"[^{GAP}]*{GAP}[{GAP}]*".join(parts) if len(parts) > 1 else parts[0])
    return any(pattern.search(text) for text in _texts())


def test_the_page_quotes() -> None:
    assert len(QUOTES) == PAGE.read_text().count("\n| `")
    assert len(QUOTES) > 30


@pytest.mark.parametrize("quote", QUOTES)
def test_what_is_quoted_is_said(quote: str) -> None:
    assert _said(quote), f"no text of the package is: {quote}"


def test_what_is_not_said_is_found_out() -> None:
    assert not _said("the certificate of ... in ... is of cheese")
    assert not _said("does not count: ...the certificate of")
