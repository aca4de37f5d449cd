"""Real etcd servers, or a skip where there is no etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.runtime.etcd_servers import EtcdServers


@contextlib.contextmanager
def servers(folder: Path, count: int) -> Iterator[EtcdServers]:
    try:
        made = EtcdServers(folder, count)
    except ConfigurationError as error:
        pytest.skip(str(error))
    with made:
        yield made
