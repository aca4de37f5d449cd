"""Runs members in network namespaces: each process enters its namespace before it opens a socket."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_members
import forked_support

_CLONE_NEWNET = 0x40000000


def train(space: str, spec: dict[str, Any]) -> None:
    """Runs a member in a network namespace."""
    _move(space)
    engine_members.train(spec)


def run(space: str, module: str, arguments: Sequence[str]) -> None:
    """Runs a command of the product in a network namespace."""
    _move(space)
    forked_support.run(module, arguments)


def _move(space: str) -> None:
    with Path("/run/netns", space).open() as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to the namespace {space}")
