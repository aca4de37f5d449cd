"""Tests that a server asked to end waits for members that leave at the same moment, and for no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from chaos_lightning.service import server_life
from chaos_lightning.service.server_life import ServerLife

PATIENCE_S = 30.0


def ends(scenario: Callable[[ServerLife, list[bool]], None], here: list[bool]) -> str:
    """Returns the reason for a server's end; `here` has for each connected member whether it leaves, and `scenario` may
    change it at each look.
    """

    async def live() -> str:
        life = ServerLife(lambda *_, **__: None, lambda *_: None)
        life.start()

        def leaving() -> list[bool]:
            scenario(life, here)
            return list(here)

        life.asked("stopped", leaving)
        try:
            return await asyncio.wait_for(life.ended(), PATIENCE_S)
        finally:
            await life.stop()

    return asyncio.run(live())


def test_it_ends_at_once_where_nobody_is() -> None:
    assert ends(lambda life, here: None, []) == "stopped"


def test_it_ends_once_those_who_leave_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends once the leaving member is gone, also if it began to leave a moment later; others do not delay
    it.
    """
    monkeypatch.setattr(server_life, "_LOOK_S", 0.0)
    looks: list[list[bool]] = []

    def scenario(life: ServerLife, here: list[bool]) -> None:
        looks.append(list(here))
        if len(looks) == 3:
            here[0] = True
        elif len(looks) == 6:
            here.pop(0)

    assert ends(scenario, [False, False]) == "stopped"
    assert looks == [[False] * 2] * 3 + [[True, False]] * 3


def test_it_does_not_wait_for_those_who_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_life, "_LOOK_S", 0.0)
    monkeypatch.setattr(server_life, "ASK_S", 0.01)
    assert ends(lambda life, here: None, [False]) == "stopped"


@pytest.mark.parametrize("way", ["asked again", "patience"])
def test_one_that_never_gets_away_does_not_hold_it(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(server_life, "_LOOK_S", 0.0)
    looks: list[bool] = []
    if way == "patience":
        monkeypatch.setattr(server_life, "LEAVERS_S", 0.01)

    def scenario(life: ServerLife, here: list[bool]) -> None:
        looks.extend(here)
        if way == "asked again" and len(looks) == 3:
            life.asked("asked again", lambda: here)

    assert ends(scenario, [True]) == ("asked again" if way == "asked again" else "stopped")
