"""Every test keeps its chains, tokens and settings to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_for_tests import each_client, servers

from chaos_lightning.control.etcd_servers import EtcdServers

__all__ = ["each_client"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("CHAOS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One real server for all tests that do not kill it; each of them has a job of its own."""
    with servers(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@pytest.fixture
def etcd_of_three(tmp_path: Path) -> Iterator[EtcdServers]:
    with servers(tmp_path / "etcd", 3) as started:
        yield started
