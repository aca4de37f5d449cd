"""Every test keeps its chains, tokens and settings to itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from environment_support import own_environment


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage that refers to itself stays, as it may for minutes in a process that makes few objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


__all__ = ["own_environment", "uncollected"]
