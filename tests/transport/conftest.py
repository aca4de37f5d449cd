"""Fixtures for tests of transport: every test has its own chains, tokens and settings, and members that consist of
links only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from environment_support import own_environment
from links_support import Build, Node

__all__ = ["own_environment"]


@pytest.fixture
def build() -> Iterator[Build]:
    """Function that makes a member for each letter of a text; they are closed when the test ends."""
    made: dict[str, Node] = {}

    def build(names: str) -> dict[str, Node]:
        for number, name in enumerate(names, 1):
            made[name] = Node(f"{name}~{number}")
        return made

    yield build
    for node in made.values():
        node.close()
