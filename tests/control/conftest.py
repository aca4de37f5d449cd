"""Fixtures of these tests: real etcd servers, and folders, tokens and settings that no two tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from environment_support import own_environment
from etcd_for_tests import each_client, servers
from store_support import opened

from chaos_lightning.service.etcd_servers import EtcdServers

__all__ = ["each_client", "opened", "own_environment"]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One real etcd server shared by all tests that do not kill it; each uses a job name of its own."""
    with servers(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@pytest.fixture
def etcd_of_three(tmp_path: Path) -> Iterator[EtcdServers]:
    with servers(tmp_path / "etcd", 3) as started:
        yield started
