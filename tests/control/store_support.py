"""All stores, for the tests that each of them has to pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_for_tests import need_client

from chaos_lightning.control.etcd_store import EtcdStore, job_root
from chaos_lightning.control.memory_store import MemoryStore, Shelf
from chaos_lightning.control.sqlite_store import SqliteStore
from chaos_lightning.control.store import Store

Open = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "etcd", "etcd3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Function that opens the same log once more at each call, as several writers would."""
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
