"""On which stream a leader answers a cluster."""

from __future__ import annotations

from chaos_lightning.lab.outer.processes import agreement
from chaos_lightning.outer import effects as fx
from chaos_lightning.outer.chain import OuterChain
from chaos_lightning.outer.leader import LeaderMachine
from chaos_lightning.outer.messages import Beat, ClusterHello, FollowerHello, Welcomed
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.types import NO_VERSION, IncarnationId


def fed(machine: LeaderMachine, event: fx.LeaderEvent) -> list[fx.LeaderEffect]:
    """Effects of this event and of what it has stored."""
    found, waiting = [], [event]
    while waiting:
        for effect in machine.on(1.0, waiting.pop(0)):
            found.append(effect)
            if isinstance(effect, fx.StoreEntry):
                waiting.append(fx.EntryStored(True))
    return found


def test_a_cluster_whose_last_stream_ended_is_answered_where_it_is_heard() -> None:
    """A rank that was put out says hello after the one that took its place, and goes."""
    machine, agreed = LeaderMachine(OuterChain(), 1, 1), agreement(OuterSettings(), 0)
    who = IncarnationId("e", 1)

    def hello(conn: int, resume: IncarnationId | None) -> list[fx.LeaderEffect]:
        said = ClusterHello("e", "here", "n", 0, resume, NO_VERSION, NO_VERSION, agreed)
        return fed(machine, fx.Heard(conn, said))

    fed(machine, fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
    hello(2, None)
    hello(4, who)
    hello(3, who)  # of a stream that is older
    fed(machine, fx.StreamClosed(3))
    beat = fx.Heard(4, Beat(who, 0.0, 0.0, NO_VERSION, 0, 0, False))
    told = [e for e in fed(machine, beat) if isinstance(e, fx.SendTo)]
    assert {effect.conn for effect in told} == {4}
    assert isinstance(told[0].message, Welcomed)
    assert not fed(machine, beat)
