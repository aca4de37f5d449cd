"""Tests that the figures for heartbeats in docs/scale.md are those of the default settings."""

from __future__ import annotations

import re

import pytest
from blocks_support import ROOT

from chaos_lightning.protocol.pace import heartbeat_interval_s, heartbeat_timeout_s
from chaos_lightning.protocol.types import Settings

ROW = re.compile(r"^\| ([\d,]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|$", re.MULTILINE)


def test_freezes_cost_what_the_settings_say() -> None:
    settings = Settings()
    rows = ROW.findall((ROOT / "docs" / "scale.md").read_text())
    assert [count for count, *_ in rows] == ["64", "256", "1,024"]
    for count, interval, suspected, seen, silent in rows:
        members = int(count.replace(",", ""))
        after_s = heartbeat_timeout_s(settings, members)
        assert float(interval) == pytest.approx(heartbeat_interval_s(settings, members), abs=0.005)
        assert float(suspected) == pytest.approx(after_s, abs=0.006)
        assert float(seen) == pytest.approx(after_s + settings.confirm_timeout_s, abs=0.05)
        assert float(silent) == settings.silence_timeout_s
