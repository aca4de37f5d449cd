"""Fixtures that keep each test's chains, tokens and settings apart from other tests and from the user's."""

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
    """Switches the garbage collector off, since a process that makes few objects never runs it either."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    with Harness(tmp_path, deadline_s=90) as harness, ExitStack() as meanwhile:
        yield Clusters(harness, meanwhile)


__all__ = ["clusters", "own_environment", "uncollected"]
