"""Fixtures for tests of the docs: an environment in which the wheel is installed, made once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from installed_support import Installed, install

from chaos_lightning.service.sqlite_store import FileLock


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Environment with the wheel, installed by the commands of docs/install.md; one test process makes it for all."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed"
    told = folder.with_suffix(".json")
    lock = FileLock(folder)
    assert lock.take(600.0)
    try:
        if not told.exists():
            folder.mkdir()
            made = install(folder)
            told.write_text(json.dumps([str(made.bin), str(made.wheel), made.said]))
    finally:
        lock.close()
    programs, wheel, said = json.loads(told.read_text())
    return Installed(Path(programs), Path(wheel), said)
