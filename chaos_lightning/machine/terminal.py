"""Makes outside text harmless for a terminal, and discards output once the terminal has been closed."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import termios
from dataclasses import fields, is_dataclass, replace
from typing import Any

_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, and those that turn the direction of writing."""


def print_json(facts: Any) -> None:
    """Prints a value as JSON, the only output of a command with --json."""
    print(json.dumps(facts, indent=2, default=str))


def printable(value: Any) -> Any:
    """Replaces characters that control a terminal by a mark, in a text or in all texts of a structure; returns the
    result.
    """
    if isinstance(value, str):
        return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return type(value)(printable(v) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: printable(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def silence_dead_terminals() -> bool:
    """Redirects standard streams whose terminal was closed to the null device; returns whether there was one."""
    dead = [descriptor for descriptor in (0, 1, 2) if _is_hung_up(descriptor)]
    if dead:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in dead:
            os.dup2(null, descriptor)
        if null not in dead:
            os.close(null)
    return bool(dead)


def _is_hung_up(descriptor: int) -> bool:
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False


class _Unbroken(io.FileIO):
    """Terminal file that discards output after the terminal was closed, where an error would end a progress bar."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO or not silence_dead_terminals():
                raise
            return memoryview(data).nbytes


class TerminalGuard:
    """Protects `sys.stdout` and `sys.stderr` from `open` until `close`: once their terminal is closed, output is
    discarded.

    The kernel closes the terminal before it sends SIGHUP, and a background job gets SIGHUP from its shell later, or
    never: whoever prints meanwhile meets EIO. Streams that are no terminal, or somebody's own, are left alone.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def open(self) -> None:
        """Replaces `sys.stdout` and `sys.stderr` by protected streams. Idempotent."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if type(stream) is not io.TextIOWrapper or not stream.isatty():
                continue
            below: Any = stream.buffer  # under PYTHONUNBUFFERED the descriptor itself
            if type(getattr(below, "raw", below)) is not io.FileIO:
                continue
            stream.flush()
            raw: Any = _Unbroken(stream.fileno(), "w", closefd=False)
            ours = io.TextIOWrapper(
                io.BufferedWriter(raw) if hasattr(below, "raw") else raw,
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            self._replaced[name] = (stream, ours)
            setattr(sys, name, ours)

    def close(self) -> None:
        """Restores the former streams, unless other code has replaced ours. Idempotent."""
        silence_dead_terminals()  # what was there would not survive it
        for name, (stream, ours) in self._replaced.items():
            ours.flush()
            if getattr(sys, name) is ours:
                setattr(sys, name, stream)
        self._replaced.clear()
