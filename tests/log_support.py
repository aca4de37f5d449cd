"""Reads event logs as lists of lines, for tests that falsify some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaos_lightning.events.reader import read_events


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of an event log as complete records, which can be changed independently of each other."""
    return [{"t": r.t, "mono": r.mono, "member": r.member, "name": r.name, **r.fields} for r in read_events(path)]
