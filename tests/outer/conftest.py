"""Fixtures: every test keeps its chains, tokens and settings to itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from environment_support import own_environment
from outer_cluster_support import Clusters

from chaos_lightning.testing.harness import Harness


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Switches the garbage collector off, as in a process that makes few objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    with Harness(tmp_path, deadline_s=90) as harness, ExitStack() as meanwhile:
        yield Clusters(harness, meanwhile)


__all__ = ["clusters", "own_environment", "uncollected"]
