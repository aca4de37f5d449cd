"""Tests which byte ranges of a handed-on slot a member offers to others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chaos_lightning.member.shell import Shell
from chaos_lightning.protocol.types import GENESIS, Kind, Span, ViewId

BASE = replace(GENESIS, kind=Kind.STEP, seq=7, view=ViewId(1, 2))


def offering(held: dict[tuple[ViewId, int] | None, tuple[Span, ...]]) -> tuple[Shell, list[tuple[Any, ...]]]:
    """Returns a shell whose reducer has these byte ranges, by attempt (None: the open one), and the list of what it
    publishes.
    """
    published: list[tuple[Any, ...]] = []
    shell = Shell.__new__(Shell)
    shell.reducer = SimpleNamespace(held=lambda of=None: held.get(of))  # type: ignore[assignment]
    shell.server = SimpleNamespace(publish_result=lambda *what: published.append(what))  # type: ignore[assignment]
    shell.memory = SimpleNamespace(result_bytes=("even", "odd"))  # type: ignore[assignment]
    return shell, published


def test_ranges_of_the_slot_are_offered_from_its_own_buffer() -> None:
    shell, published = offering({(BASE.view, 7): ((0, 64),)})
    shell._offer_partial(BASE)
    assert published == [(7, BASE.hash, "odd", ((0, 64),))]


@pytest.mark.parametrize("open_one", [((0, 8),), ()])
def test_who_has_gone_on_to_the_next_slot_offers_nothing_of_it(open_one: tuple[Span, ...]) -> None:
    shell, published = offering({None: open_one})
    shell._offer_partial(BASE)
    assert published == []
