"""Gives every test of the rendezvous chains, tokens and settings of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos_lightning.machine.listener import free_port


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("CHAOS_", "PET_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"
