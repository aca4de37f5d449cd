"""When the leader decides a round on the staged pushes."""

from __future__ import annotations

from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import (
    Applied,
    ClusterHello,
    FollowerHello,
    FromCluster,
    FromFollower,
    Offered,
    PushProduct,
    Staged,
)
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, Entry, Founded, IncarnationId, Offer, PushId, Round
from lab.outer.processes import agreement


def sum_of(value: float) -> str:
    return ExactSum.of((value,)).encode()


class Led:
    """Leader with one follower and one cluster, and the entries that it has stored."""

    def __init__(self, settings: OuterSettings) -> None:
        self.machine, self.stored = LeaderMachine(OuterChain(), 1, 1), list[Entry]()
        self.agreement = agreement(settings, 0)

    def hear(self, conn: int, message: FromCluster | FromFollower) -> None:
        waiting: list[fx.LeaderEvent] = [fx.Heard(conn, message)]
        while waiting:
            for effect in self.machine.on(1.0, waiting.pop(0)):
                if isinstance(effect, fx.StoreEntry):
                    self.stored.append(effect.entry)
                    waiting.append(fx.EntryStored(True))

    def rounds(self) -> list[Round]:
        return [entry.body for entry in self.stored if isinstance(entry.body, Round)]


def test_where_pushes_hold_parameters_a_round_waits_for_the_version_that_they_are_subtracted_from() -> None:
    led = Led(OuterSettings(policy="di_ps"))
    led.hear(1, FollowerHello("f", "n", 0, (), NO_VERSION))
    led.hear(2, ClusterHello("a", "here", "n", 0, None, NO_VERSION, NO_VERSION, led.agreement))
    first, second = (PushId(IncarnationId("a", 1), number) for number in (1, 2))
    led.hear(2, Offered(Offer(first, NO_VERSION, "founds", 0, 0)))
    led.hear(1, Staged("f", first, "founds", (PushProduct(first, sum_of(4.0)),), True))
    assert isinstance(led.stored[-1].body, Founded)
    version = led.stored[-1].version
    led.hear(2, Offered(Offer(second, version, "parameters", 64, 2)))
    led.hear(1, Staged("f", second, "parameters", (PushProduct(second, sum_of(9.0)),), True))
    assert led.rounds() == []
    assert led.machine.rounds.waits == f"{version} is being computed, from which pushes are subtracted"
    led.hear(1, Applied("f", version, (PushProduct(second, sum_of(-5.0)),)))
    (decided,) = led.rounds()
    assert decided.factors.rate == 0.7 / 2, "the difference has the norm 2, and is clipped to 1"
