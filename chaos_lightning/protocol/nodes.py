"""Counts nodes: `min_nodes` and `max_nodes` mean machines that a user started something on, however many workers each
has (protocol.md 14).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from chaos_lightning.protocol.types import Member

T = TypeVar("T")


def count(members: Iterable[Member]) -> int:
    """Returns the number of nodes to which these members belong."""
    return len({m.place for m in members})


def within(candidates: Sequence[Member], inside: Iterable[Member], limit: int) -> list[Member]:
    """Returns the candidates that may be admitted, in order, so that at most `limit` nodes are inside."""
    places = {m.place for m in inside}
    fitting = []
    for member in candidates:
        if member.place in places or len(places) < limit:
            places.add(member.place)
            fitting.append(member)
    return fitting


def in_words(members: Sequence[Member]) -> str:
    """Returns the number of nodes in words: "2 nodes with 4 workers", or "2 nodes" if each has one worker."""
    number = count(members)
    words = f"{number} node{'' if number == 1 else 's'}"
    return words if number == len(members) else f"{words} with {len(members)} workers"
