"""Frame of a service's command: its options as arguments, the background, exit codes.

Heavy imports (gRPC) come after the detaching fork, so nothing here imports any.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chaos_lightning.declared import Setting, add_options
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.terminal import printable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def detach(log: Path) -> None:
    """Moves this process to the background, in a session of its own with output to `log`; the parent prints its id and
    ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid:
        os.write(1, f"{pid}\n".encode())
        os._exit(EXIT_OK)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    # A relative working directory must not keep a file system busy that its user wants to unmount.
    os.chdir("/")


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """Format of argparse's help that looks like that of the other commands."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


def options_parser(name: str, words: str, options: Mapping[str, Setting], epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser for a command with these options; values stay text, for `read_options`."""
    made = argparse.ArgumentParser(
        prog=f"chaos-lightning {name}",
        description=words,
        epilog=epilog or None,
        formatter_class=HelpFormat,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_options(made, options)
    return made


def exit_code(work: Callable[[], int]) -> int:
    """Runs a command's work, and prints the error that ends it; returns the exit code."""
    try:
        return work()
    except ChaosError as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED
