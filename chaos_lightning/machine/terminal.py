"""Texts from outside, as a terminal may show them."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, and those that turn the direction of writing."""


def print_json(facts: Any) -> None:
    """One JSON object for scripts, the only thing that a command with --json prints on stdout."""
    print(json.dumps(facts, indent=2, default=str))


def printable(value: Any) -> Any:
    """A text from outside, for a terminal: what would command it is shown as a mark. Also all texts in a structure."""
    if isinstance(value, str):
        return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return type(value)(printable(v) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: printable(getattr(value, f.name)) for f in fields(value) if f.init})
    return value
