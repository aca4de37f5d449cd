"""Fixtures: every test keeps its chains, tokens and settings to itself; and members that have only links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from environment_support import own_environment
from links_support import Build, Node

__all__ = ["own_environment"]


@pytest.fixture
def build() -> Iterator[Build]:
    """Function that makes a member of each letter; they end with the test."""
    made: dict[str, Node] = {}

    def build(names: str) -> dict[str, Node]:
        for number, name in enumerate(names, 1):
            made[name] = Node(f"{name}~{number}")
        return made

    yield build
    for node in made.values():
        node.close()
