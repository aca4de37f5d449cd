"""A state transfer under way is shown with bytes, rate, remaining time and sources, on the live board and in the
report.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from observe_synthetic import Script
from rich.console import Console

from chaos_lightning.events.events import read_events
from chaos_lightning.machine.units import part
from chaos_lightning.observe.outer.report import write_reports
from chaos_lightning.observe.render import PULLS_SHOWN, Dashboard, Row, draw
from chaos_lightning.observe.timeline import ProgressFact, Timeline


def words(logs: Path) -> str:
    """Returns the report's text without HTML tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", write_reports(logs)[0].page.read_text()).split())


def pulling(progress: ProgressFact, *more: ProgressFact, width: int) -> list[str]:
    """Returns the lines of the live board that show transfers with this progress."""
    rows = [Row(f"delta{i}~1", None, "pulling", None, 0.1, progress=p) for i, p in enumerate((progress, *more))]
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(draw(Dashboard("t", rows=rows)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.partition("\n\n")[2].splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_transfer_shows_amounts_rate_time_and_sources(width: int) -> None:
    sources = tuple((f"machine-{x}~2", (9 - i) << 20) for i, x in enumerate("abcdefgh"))
    lines = pulling(ProgressFact(12 << 20, 50 << 20, 8 * (8 << 20), 5.0, sources), width=width)
    assert max(map(len, lines)) <= width
    assert re.search(r"delta0~1.*12 of 50 MiB\s+8 MiB/s\s+5 s left", lines[0])
    assert lines[1].startswith("  from machine-a 9 MiB, ")
    text = " ".join(" ".join(lines).split())
    for i, x in enumerate("abcdef"):
        assert f"machine-{x} {9 - i} MiB" in text
    assert "2 more" in text
    assert "machine-g" not in text


def test_transfers_of_which_little_is_known() -> None:
    lines = pulling(ProgressFact(3 << 20), ProgressFact(0, 50 << 20), width=80)
    assert re.search(r"delta0~1\s+3 MiB$", lines[0])
    assert re.search(r"delta1~1.*0 of 50 MiB$", lines[1])


def test_of_many_transfers_the_longest_are_shown() -> None:
    many = [ProgressFact(1 << 20, 50 << 20, 1e6, float(i)) for i in range(PULLS_SHOWN + 3)]
    lines = pulling(*many, width=80)
    assert lines[-1] == "and 3 more"
    assert [line.split()[0] for line in lines[:-1]] == [f"delta{i}~1" for i in range(3, len(many))]


@pytest.mark.parametrize("odd", [{}, {"rate_bps": 0, "remaining_s": 1e9}, {"rate_bps": None, "sources": [1]}])
def test_progress_without_a_rate_has_no_remaining_time(tmp_path: Path, odd: dict[str, Any]) -> None:
    timeline = Timeline.of(read_events(unfinished(tmp_path, nbytes=1 << 20, total=4 << 20, **odd)))
    assert timeline.lives["d~1"].pulls[-1].progress == ProgressFact(1 << 20, 4 << 20)


def unfinished(path: Path, **progress: Any) -> Path:
    """Writes the logs of a run that ends while member d is pulling the state."""
    run = Script()
    run.found(["a", "b"])
    run.steps(3)
    run.welcome("d~1", run.process("d"), "joiner")
    run.say("d~1", "pull_started", seq=run.seq, head=run.head, sources=list(run.members))
    run.say("d~1", "pull_progress", at=run.now + 1, **progress)
    return run.write(path)


@pytest.mark.usefixtures("unpictured")
def test_report_says_how_far_a_join_came_that_is_not_done(tmp_path: Path) -> None:
    given = {"a~1": 8 << 20, "b~1": 4 << 20}
    logs = unfinished(tmp_path, nbytes=12 << 20, total=50 << 20, rate_bps=8 << 23, remaining_s=4.8, sources=given)
    text = words(logs)
    assert "12 of 50 MiB 0 B not done, 4.8 s left 8 MiB/s a 8 MiB, b 4 MiB" in text


@pytest.mark.usefixtures("unpictured")
def test_report_of_a_join_that_told_nothing(tmp_path: Path) -> None:
    text = words(unfinished(tmp_path))
    assert "0 B 0 B not done - -" in text


@pytest.mark.parametrize(
    ("done", "total", "said"),
    [
        (0, 48 << 20, "0 of 48 MiB"),
        (5 << 20, 5 << 30, "5 MiB of 5 GiB"),
        (1 << 40, 2 << 40, "1024 of 2048 GiB"),
        (3, 1000, "3 of 1000 B"),
    ],
)
def test_a_part_is_told_in_the_unit_of_the_whole(done: int, total: int, said: str) -> None:
    assert part(done, total) == said
