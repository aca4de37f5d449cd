"""Fixtures for tests of reports, which leave the pictures out, as these take most of the time."""

from __future__ import annotations

import pytest

from chaos_lightning.observe import charts


@pytest.fixture
def unpictured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reports have no pictures."""
    monkeypatch.setattr(charts, "DRAWERS", {})
    monkeypatch.setattr(charts, "overview", lambda timeline: b"")
