"""Fixtures with real etcd servers; tests are skipped if etcd is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.service.etcd_servers import EtcdServers


@contextlib.contextmanager
def servers(folder: Path, count: int) -> Iterator[EtcdServers]:
    try:
        made = EtcdServers(folder, count)
    except ConfigurationError as error:
        pytest.skip(str(error))
    with made:
        try:
            yield made
        finally:
            for server in made.servers:  # one without a majority takes its time to end politely
                made.kill(server)


def need_client(kind: str) -> str:
    """Returns the name of an etcd client; skips the test if the client's package is not installed."""
    if kind == "etcd3" and importlib.util.find_spec("etcd3") is None:
        pytest.skip("the package etcd3 is not installed (extra: etcd)")
    return kind


@pytest.fixture(params=["own", pytest.param("etcd3", marks=pytest.mark.slow)])
def each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an etcd client; tests that use it run once with each client."""
    kind = need_client(request.param)
    make = EtcdServers.client
    monkeypatch.setattr(EtcdServers, "client", lambda self, given=kind: make(self, given))
    return kind


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One real etcd server shared by all tests that do not kill it; each uses a job name of its own."""
    with servers(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@pytest.fixture
def etcd_of_three(tmp_path: Path) -> Iterator[EtcdServers]:
    with servers(tmp_path / "etcd", 3) as started:
        yield started
