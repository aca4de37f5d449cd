"""What a user meets first: the command's options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from chaos_lightning import cli


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_version_is_an_option_and_a_command_and_the_package_can_be_run() -> None:
    option, command = (python("-m", "chaos_lightning", word) for word in ("--version", "version"))
    assert option.returncode == 0, option.stderr
    assert option.stdout == command.stdout
    assert option.stdout.startswith("chaos-lightning ")


@pytest.mark.parametrize("command", [(), *((name,) for name, entry in cli.COMMANDS.items() if not entry.whole)])
def test_flags_take_no_value_in_the_help(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli.app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "--help" in shown.output
    assert "<bool>" not in shown.output


@pytest.mark.parametrize(("words", "offered"), [("st", "status"), ("status --end", "--endpoint")])
def test_shells_complete_commands_and_their_options(words: str, offered: str) -> None:
    asked = {"COMP_WORDS": f"chaos-lightning {words}", "COMP_CWORD": str(len(words.split()))}
    code = "import sys; sys.argv = ['chaos-lightning']; from chaos_lightning.cli import main; main()"
    done = python("-c", code, _CHAOS_LIGHTNING_COMPLETE="complete_bash", **asked)
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()
