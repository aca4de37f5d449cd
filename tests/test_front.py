"""Tests a user's first contact: the command's options, and messages about missing extras."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import chaos_lightning
from chaos_lightning import cli
from chaos_lightning.errors import EXTRAS


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_version_is_an_option_and_a_command_and_the_package_can_be_run() -> None:
    option, command = (python("-m", "chaos_lightning", word) for word in ("--version", "version"))
    assert option.returncode == 0, option.stderr
    assert option.stdout == command.stdout
    assert option.stdout.splitlines()[0] == f"chaos-lightning {chaos_lightning.__version__}"
    assert "__version__" in dir(chaos_lightning)


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


WITHOUT = """
from importlib.machinery import PathFinder
def hide(package, find=PathFinder.find_spec):
    PathFinder.find_spec = lambda name, *rest: None if name == package else find(name, *rest)
hide("""
"""Python code that makes a package be as if it were not installed; its name and a bracket are to follow."""
EXPORTER = "from chaos_lightning.observe import exporter as e"
PUSHED = f"{EXPORTER}; e.pushed(dict, 'http://[::1]:4317', 15).__enter__()"


@pytest.mark.parametrize(
    ("absent", "code", "what"),
    [
        ("lightning", "from chaos_lightning import ChaosStrategy", "ChaosStrategy"),
        ("lightning", "import chaos_lightning; chaos_lightning.DiLoCoStrategy", "DiLoCoStrategy"),
        ("lightning", "from chaos_lightning._register import make_strategy as m; m('chaos')", "ChaosStrategy"),
        ("lightning", "import chaos_lightning.callbacks", "chaos_lightning.callbacks"),
        ("hydra", "import chaos_lightning.configs", "chaos_lightning.configs"),
        ("prometheus_client", f"{EXPORTER}; e.served(dict, '[::1]:0').__enter__()", "chaos-lightning metrics"),
        ("opentelemetry", PUSHED, "--otlp"),
        ("opentelemetry.exporter", PUSHED, "--otlp"),
        ("opentelemetry.exporter.otlp.proto.grpc", PUSHED, "--otlp"),
    ],
)
def test_what_needs_an_extra_says_which(absent: str, code: str, what: str) -> None:
    """A missing optional package gives an error that names the extra, and that `except ImportError` catches."""
    done = python("-c", f"{WITHOUT}{absent!r})\ntry:\n    {code}\nexcept ImportError as e:\n    print(repr(e))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MissingExtraError")
    assert what in done.stdout
    assert f"needs the package {absent}" in done.stdout
    assert f'pip install "chaos-lightning[{EXTRAS[absent]}]"' in done.stdout


@pytest.mark.slow
def test_names_of_the_package_come_when_they_are_asked_for() -> None:
    code = "import sys, chaos_lightning as c; assert 'torch' not in sys.modules; print(*map(c.__getattr__, c.__all__))"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "<class 'chaos_lightning.trainer.Trainer'>" in done.stdout


def test_other_missing_modules_are_not_laid_to_an_extra() -> None:
    done = python("-c", "from chaos_lightning.errors import needing\nwith needing('it'): import no_such_module")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_demo_without_lightning_says_so_before_it_starts_nodes(tmp_path: Path) -> None:
    code = (
        f"{WITHOUT}'lightning')\nimport sys; sys.argv[0] = 'chaos-lightning'\nimport chaos_lightning.cli as c; c.main()"
    )
    done = python("-c", code, "demo", "--quick", "--dir", str(tmp_path / "demo"))
    assert done.returncode == 2
    needs = "chaos-lightning demo needs the package lightning, which is not installed; run: "
    assert done.stderr == f'error: {needs}pip install "chaos-lightning[lightning]"\n'
