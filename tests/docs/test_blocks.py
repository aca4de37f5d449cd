"""Tests that every code block a reader may copy is run by a test, or that blocks.toml says why it cannot be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from blocks_support import PAGES, ROOT, Row, block, blocks, rows
from installed_support import Installed

FOLDER = Path(__file__).parent


def test_each_block_has_one_row_and_each_row_one_block() -> None:
    wrong = [f"{row.page} is not looked at: {row.starts}" for row in rows() if row.page not in PAGES]
    for page in PAGES:
        said = [row.starts for row in rows() if row.page == page]
        for text in blocks(page):
            if (found := sum(text.startswith(starts) for starts in said)) != 1:
                wrong.append(f"{page}: {found} rows for the block that begins {text.splitlines()[0]!r}")
        for starts in said:
            if (found := sum(text.startswith(starts) for text in blocks(page))) != 1:
                wrong.append(f"{page}: {found} blocks for the row {starts!r}")
    assert wrong == []


def test_each_row_says_one_thing() -> None:
    assert [row for row in rows() if sum(map(bool, (row.run, row.test, row.why))) != 1] == []


def test_tests_that_a_reason_names_are_there() -> None:
    named = [name for row in rows() for name in re.findall(r"tests/\S+\.py", row.why)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("row", [row for row in rows() if row.test], ids=lambda row: f"{row.page} {row.starts}")
def test_the_test_that_is_named_asks_for_the_block(row: Row) -> None:
    file, _, name = row.test.partition("::")
    tree = ast.parse((FOLDER / file).read_text())
    assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert row.page in texts
    assert [text for text in texts if len(text) > 4 and (row.starts + "\n").startswith(text)], (
        f"{file} asks for no block of {row.page} that begins {row.starts!r}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in rows() if row.run], ids=lambda row: f"{row.page} {row.starts}")
def test_a_block_prints_what_it_should(row: Row, installed: Installed, tmp_path: Path) -> None:
    """Each block with expected output is run in an empty folder, with commands installed from the wheel."""
    assert row.run in installed.run(block(row.page, row.starts), tmp_path)


def test_pages_are_there() -> None:
    assert [page for page in PAGES if not (ROOT / page).is_file()] == []
