"""For tests of what a report says: the pictures in it take most of its time."""

from __future__ import annotations

import pytest

from chaos_lightning.observe import charts


@pytest.fixture
def unpictured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no pictures."""
    monkeypatch.setattr(charts, "DRAWERS", {})
    monkeypatch.setattr(charts, "overview", lambda timeline: b"")
