"""Fixtures for tests of reports, whose pictures take most of the time."""

from __future__ import annotations

import pytest

from chaos_lightning.observe import charts


@pytest.fixture
def unpictured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pictures from reports."""
    monkeypatch.setattr(charts, "DRAWERS", {})
    monkeypatch.setattr(charts, "overview", lambda timeline: b"")
