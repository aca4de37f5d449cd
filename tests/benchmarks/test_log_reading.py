"""Tests that the made-up logs of `benchmarks/log_reading.py` are those of a job that fulfils the contract."""

from __future__ import annotations

from pathlib import Path

from benchmarks.log_reading import write_logs
from chaos_lightning.events.reader import read_events
from chaos_lightning.observe.audit import OK, audit


def test_the_made_up_job_holds_all_points_and_its_lines_are_short(tmp_path: Path) -> None:
    write_logs(tmp_path, 5, 30)
    assert [finding.verdict for finding in audit(tmp_path)] == [OK] * 5
    records = list(read_events(tmp_path))
    assert not [r for r in records if r.name == "lost"]
    texts = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    commits = sum(r.name == "committed" for r in records)
    assert sum('"member"' not in line for line in texts) > commits / 2 > 50
