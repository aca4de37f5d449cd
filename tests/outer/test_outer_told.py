"""A cluster's console shows which clusters join, leave and are refused, and when the server is away."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from leader_rig import Rig

from chaos_lightning.events.events import EventLog
from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, JobProgress, PushAnswer, PushId, VersionId

ME = IncarnationId("paris", 2)


def news(effects: list[Any], conn: int) -> list[str]:
    """Returns the console lines that the leader sends on this stream."""
    return [e.message.text for e in effects if isinstance(e, fx.SendTo) and e.conn == conn and _is_news(e.message)]


def _is_news(message: object) -> bool:
    return isinstance(message, say.News)


class Heard(Rig):
    """Leader that records all its effects in `sent`."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        super().__init__()

    def feed(self, event: Any) -> None:
        on = self.machine.on
        self.machine.on = lambda now, event: self._kept(on(now, event))  # type: ignore[method-assign]
        try:
            super().feed(event)
        finally:
            self.machine.on = on  # type: ignore[method-assign]

    def _kept(self, effects: list[Any]) -> list[Any]:
        self.sent += effects
        return effects


def test_who_comes_leaves_and_is_refused_is_news_for_all() -> None:
    rig = Heard()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    rig.comes("paris", 3)
    assert news(rig.sent, 2)[-1] == "paris~2 joins: 2 clusters"
    other = say.ClusterHello("rome", "here", "rome", 0, None, NO_VERSION, NO_VERSION, rig.agreed, job_id="another")
    for _ in range(3):
        rig.feed(fx.Heard(4, other))
    assert len([line for line in news(rig.sent, 2) if line.startswith("rome is not let in: ")]) == 1
    rig.feed(fx.Heard(3, say.Goodbye(IncarnationId("paris", 2), "asked to")))
    assert news(rig.sent, 2)[-1] == "paris~2 is out (it left: asked to): 1 cluster"


class Machine:
    incarnation: IncarnationId | None = ME
    job = JobProgress()


@pytest.fixture
def log() -> tuple[OuterLog, list[str]]:
    """A cluster's log of which only the console output works, and the list of lines that it prints."""
    made = OuterLog.__new__(OuterLog)
    said: list[str] = []
    made.tells = True
    made._away = threading.Event()
    made._events = EventLog(None)
    made._options = type("Options", (), {"name": "paris"})()
    made._machine = lambda: Machine()  # type: ignore[assignment, return-value]
    made.say = said.append  # type: ignore[method-assign]
    return made, said


def test_the_server_away_and_back_is_said_once(log: tuple[OuterLog, list[str]]) -> None:
    made, said = log
    welcomed = say.Welcomed(1, ME, 1, NO_VERSION, True, JobProgress(), "job")
    made.heard(welcomed)
    for _ in range(3):
        made.away("connection refused")
    made.heard(welcomed)
    made.heard(say.News(1, "rome~3 joins: 2 clusters"))
    push, version = PushId(ME, 4), VersionId(3, "x" * 16)
    made.heard(say.PushAnswered(1, push, PushAnswer.ACCEPTED, version, "all agree"))
    made.heard(say.PushAnswered(1, push, PushAnswer.REJECTED, version, "its norm is 9 times the usual one"))
    assert said == [
        "I am cluster paris~2",
        "the parameter server is away (connection refused); training goes on with the samples that are leased",
        "the parameter server is back",
        "rome~3 joins: 2 clusters",
        f"push {push} does not count: its norm is 9 times the usual one",
    ]
