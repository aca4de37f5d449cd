"""Tests that pages generated from the code are up to date: the commands' help and the events of logs.

`CHAOS_REWRITE=1 pytest tests/docs/test_generated_pages.py` writes them again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos_lightning.cli import COMMANDS, app
from chaos_lightning.events.registry import FORMAT, Event, known
from chaos_lightning.outer.commands.ps import SUBCOMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND_WORDS = """\
# Commands

What each command says with `--help`, made from the commands themselves (`CHAOS_REWRITE=1 pytest
tests/docs/test_generated_pages.py` writes it again). `python -m chaos_lightning` is the same program.
"""
EVENT_WORDS = """\
# Events in logs

What members, schedulers and servers write into their event logs (`log_dir`), made from where it is declared, the
`events.py` of each room (`CHAOS_REWRITE=1 pytest tests/docs/test_generated_pages.py` writes it again). A log has a line
of JSON for each event; `status`, `top`, `report` and `audit` are folded from them. Format {format}. Fields in brackets
are not in every such event. Seconds unless said otherwise.
"""


def _compare(page: str, text: str) -> None:
    path = DOCS / page
    if os.environ.get("CHAOS_REWRITE"):
        path.write_text(text)
    assert path.read_text() == text, f"docs/{page} is of yesterday; CHAOS_REWRITE=1 writes it again"


def _help(runner: CliRunner, *words: str) -> str:
    said = runner.invoke(app, [*words, "--help"], prog_name="chaos-lightning")
    assert said.exit_code == 0, said.output
    return "\n".join(line.rstrip() for line in said.stdout.strip("\n").splitlines())


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse of another Python sets help otherwise")
def test_the_page_has_each_commands_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("CHAOS_", "PET_")) and name != "CHAOS_REWRITE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    runner, parts = CliRunner(), [COMMAND_WORDS]
    commands = [()] + [(name,) for name in COMMANDS]
    commands[commands.index(("ps",)) + 1 : commands.index(("ps",)) + 1] = [("ps", name) for name in SUBCOMMANDS]
    for words in commands:
        said = _help(runner, *words)
        parts.append(f"\n## {' '.join(('chaos-lightning', *words))}\n\n```text\n{said}\n```\n")
    _compare("commands.md", "".join(parts))


def _fields(event: Event) -> str:
    def words(given: Mapping[str, str], form: str) -> list[str]:
        return [
            f"{form.format(f'`{name}`')} {meaning}".translate({ord(c): f"\\{c}" for c in "|["})
            for name, meaning in given.items()
        ]

    return "; ".join([*words(event.fields, "{}"), *words(event.also, "[{}]")])


def test_the_page_has_each_event() -> None:
    rows = [f"| `{e.name}` | {e.meaning} | {_fields(e)} |\n" for e in sorted(known().values(), key=lambda e: e.name)]
    table = "\n| event | what happened | fields |\n|---|---|---|\n"
    _compare("events.md", EVENT_WORDS.format(format=FORMAT) + table + "".join(rows))
