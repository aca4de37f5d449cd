"""Helpers to read the code blocks of documentation pages, and their rows in blocks.toml.

Theory of operation. A block is known by its page and by what it begins with. blocks.toml has one row for each: `run`, a
text that is to be printed when the block is run by itself; or `test`, the test that runs it, which asks for it by
`block`; or `why` it cannot be run. `file` names the file that a block is the content of.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("blocks.toml")
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("install", "tutorial", "checkpoints", "membership-and-batch", "ports", "access", "logs")
    ),
    *(
        f"docs/{name}.md"
        for name in (
            "failover",
            "diloco",
            "lab",
            "schedules",
            "etcd",
            "troubleshooting",
            "when-not",
            "metrics",
            "plain",
            "hydra",
            "pipelines",
            "scale",
            "extending",
        )
    ),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "recipes").glob("*.md")),
)
OUTPUT = ("text", "mermaid")
"""Kinds of fences that show what a program prints, or a picture, and nothing to copy."""


@dataclass(frozen=True)
class Row:
    """Row of blocks.toml: how one code block is tested, or why it cannot be."""

    page: str
    starts: str
    run: str = ""
    test: str = ""
    why: str = ""
    file: str = ""


@cache
def rows() -> tuple[Row, ...]:
    """Returns all rows of blocks.toml."""
    return tuple(
        Row(page=page, **row) for page, found in tomllib.loads(ROWS.read_text()).items() for row in found["block"]
    )


@cache
def blocks(page: str) -> tuple[str, ...]:
    """Returns the code blocks of a page, fenced or indented, without repetitions."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    found = [t.content for t in tokens if t.type == "code_block" or (t.type == "fence" and t.info not in OUTPUT)]
    return tuple(dict.fromkeys(found))


def block(page: str, starts: str) -> str:
    """Returns the only code block of a page that begins with `starts`."""
    (found,) = [text for text in blocks(page) if text.startswith(starts)]
    return found
