"""Fixture with all kinds of stores, for tests that each kind must pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_for_tests import need_client

from chaos_lightning.service.etcd_store import EtcdStore, job_root
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import Store

Open = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "etcd", "etcd3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Function that opens the same log again at each call, as several writers would; tests run with each kind of
    store.
    """
    shelf, job = Shelf(), f"job-{os.urandom(4).hex()}"
    with ExitStack() as stack:

        def another() -> Store:
            store: Store
            if request.param == "memory":
                store = MemoryStore("job", shelf)
            elif request.param == "sqlite":
                store = SqliteStore(tmp_path / "chain", "job")
            else:
                kind = "own" if request.param == "etcd" else need_client(request.param)
                client = request.getfixturevalue("etcd").client(kind)
                store = EtcdStore(client, job_root(client.address.prefix, job))
            return stack.enter_context(store)

        yield another
