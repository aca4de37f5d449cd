"""Runs the `chaos-lightning` command and its sub-commands.

Sub-commands are found by name in `COMMANDS` and imported when they are asked for, so that starting the command costs
neither torch nor Lightning nor gRPC. To add one, write a function with typer annotations in a light module and add a
line here: the name, where the function is, and one line for `--help`.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from chaos_lightning.errors import ChaosError, ConfigurationError


@dataclass(frozen=True)
class Command:
    """Where a sub-command's function is (`module:function`), and its line of help."""

    place: str
    help: str
    whole: bool = False
    """Whether the function takes all arguments as they are, because it has a parser of its own."""


COMMANDS: dict[str, Command] = {
    "run": Command(
        "chaos_lightning.rendezvous.run:run",
        "Start this node's workers, as torchrun does; one's death is its own.",
        whole=True,
    ),
    "scheduler": Command(
        "chaos_lightning.control.scheduler_main:scheduler", "Run a job's scheduler in the foreground.", whole=True
    ),
    "status": Command("chaos_lightning.observe.status:status", "Show who is in a job, and what it waits for."),
    "drain": Command("chaos_lightning.control.commands:drain", "Ask a node to leave politely."),
    "reset": Command("chaos_lightning.control.commands:reset", "End a dead job, so that the next one can begin."),
    "link": Command("chaos_lightning.control.commands:link", "Add or remove a link between two members."),
    "keys": Command(
        "chaos_lightning.security.commands:keys", "Make and renew the keys of a cluster on an open network."
    ),
    "etcd": Command("chaos_lightning.control.commands:etcd", "Run etcd servers on this machine, for development."),
    "ps": Command(
        "chaos_lightning.outer.commands.ps:ps",
        "Run or look at the parameter server of clusters that train one model apart.",
        whole=True,
    ),
    "top": Command("chaos_lightning.observe.commands:top", "Watch a job live."),
    "report": Command("chaos_lightning.observe.commands:report", "Write a page about a run from its event logs."),
    "audit": Command("chaos_lightning.observe.commands:audit", "Check from the event logs that the contract held."),
    "metrics": Command("chaos_lightning.observe.exporter:metrics", "Serve a job's metrics to Prometheus."),
    "demo": Command(
        "chaos_lightning.testing.demo.members:demo", "Train here while nodes join, die, freeze, leave and return."
    ),
    "demo-edge": Command(
        "chaos_lightning.testing.demo.edge:demo_edge", "Train over links that change, fail and return."
    ),
    "demo-diloco": Command(
        "chaos_lightning.testing.demo.apart:demo_diloco", "Train in clusters far apart while they and their server die."
    ),
    "demo-failover": Command(
        "chaos_lightning.testing.demo.failover:demo_failover", "Train while schedulers and etcd servers are killed."
    ),
    "demo-pipeline": Command(
        "chaos_lightning.testing.demo.stages:demo_pipeline", "Train a model in stages while devices die and come back."
    ),
    "plan": Command(
        "chaos_lightning.cli.plan_command:plan",
        "Say who computes what when a model is split, and what after a loss.",
    ),
    "profile": Command(
        "chaos_lightning.cli.profile_command:profile",
        "Measure the layers of your own model, and write the file that `plan` takes.",
    ),
    "simulate": Command(
        "chaos_lightning.cli.fleet_command:simulate", "Simulate policies on a fleet whose devices come and go."
    ),
    "lab": Command("chaos_lightning.testing.edge.runner:lab", "Run a command on every node of an emulated network."),
    "version": Command("chaos_lightning.control.commands:version", "Print the versions that a bug report needs."),
}

EPILOG = """
A job on two machines, in three lines:

$ chaos-lightning keys init --node a=HOST --node b               # then copy keys/nodes/a and /b to their machines

$ torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --rdzv-conf keys_dir=KEYS --nnodes=1:16 train.py

$ chaos-lightning status --endpoint HOST:29400 --keys-dir keys/nodes/operator

For a node with several workers write `chaos-lightning run` instead of torchrun: one that dies takes no other one along.

The first torchrun on HOST starts the scheduler; `chaos-lightning scheduler` is for running it apart from training.
"""


class _Flags:
    """Mixin for typer commands: the help shows no type for flags, since they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Single(_Flags, TyperCommand):
    """A sub-command whose arguments typer parses."""


class _Whole(TyperCommand):
    """A sub-command whose function parses all arguments itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: Any) -> Any:
        assert self.callback is not None
        return self.callback(ctx.args)


class LazyGroup(_Flags, TyperGroup):
    """Group that lists all sub-commands without importing them, and imports only the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(cmd_name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name not in COMMANDS else load(str(name)), rest


def _function(name: str) -> Any:
    module, _, function = COMMANDS[name].place.partition(":")
    return getattr(importlib.import_module(module), function)


def load(name: str) -> Any:
    """Imports a sub-command listed in COMMANDS; returns it."""
    entry, callback = COMMANDS[name], _function(name)
    if entry.whole:
        return _Whole(name, callback=callback, help=entry.help)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=_Single, help=None if callback.__doc__ else entry.help)(callback)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    name="chaos-lightning",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    help="Training that keeps going while machines, links and servers come and go.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        _function("version")()
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help=COMMANDS["version"].help, callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Training that keeps going while machines, links and servers come and go."""


def _say(error: ChaosError) -> None:
    """Prints an error to stderr, with control characters made visible, since it may quote text from outside."""
    from chaos_lightning.machine.terminal import printable

    for line in f"error: {error}".splitlines():
        print(printable(line), file=sys.stderr)


def _warn_of_variables() -> None:
    """Warns of mistyped CHAOS_ variables in the environment."""
    if any(name.startswith("CHAOS_") for name in os.environ):
        warn_of_unknown = importlib.import_module("chaos_lightning.variables").warn_of_unknown
        warn_of_unknown()


def main() -> None:
    """Runs the command line; prints this package's errors without a traceback. Exit codes: 1 failed, 2 wrong usage."""
    try:
        _warn_of_variables()
        app()
    except ConfigurationError as error:
        _say(error)
        sys.exit(2)
    except ChaosError as error:
        _say(error)
        sys.exit(1)
