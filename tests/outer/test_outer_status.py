"""What a leader tells of a job that waits, or that is not as it should be (outer/snapshot.py)."""

from __future__ import annotations

from typing import Any

from chaos_lightning.events.registry import problems
from chaos_lightning.lab.outer.processes import agreement, product
from chaos_lightning.outer import effects as fx
from chaos_lightning.outer import messages as say
from chaos_lightning.outer.chain import OuterChain
from chaos_lightning.outer.leader import LeaderMachine
from chaos_lightning.outer.ps import _follower
from chaos_lightning.outer.settings import OuterSettings
from chaos_lightning.outer.snapshot import snapshot
from chaos_lightning.outer.types import (
    NO_VERSION,
    Covered,
    IncarnationId,
    Offer,
    PushId,
)

SETTINGS = OuterSettings(policy="async", heartbeat_s=1.0, last_holder_timeout_s=500.0, lease_ahead_s=2.0)


class Rig:
    """A leader, one follower, whose disk may be full, and clusters."""

    def __init__(self, length: int = 0, *, full: bool = False) -> None:
        self.full = full
        self.now = 1.0
        self.agreed = agreement(SETTINGS, length)
        self.machine = LeaderMachine(OuterChain(), 1, 1)
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.keep = NO_VERSION
        self.granted: dict[int, tuple[Covered, ...]] = {}
        self.feed(fx.Heard(1, say.FollowerHello("f", "n", 0, (), NO_VERSION)))

    def feed(self, event: fx.LeaderEvent) -> None:
        waiting = [event]
        while waiting:
            for effect in self.machine.on(self.now, waiting.pop(0)):
                match effect:
                    case fx.StoreEntry():
                        waiting.append(fx.EntryStored(True))
                    case fx.OuterNote(name, fields):
                        self.notes.append((name, dict(fields)))
                    case fx.SendTo(_, say.Keep(_, version)):
                        self.keep = version
                        waiting += [] if self.full else [fx.Heard(1, say.Written("f", version, "digest"))]
                    case fx.SendTo(conn, say.Granted(_, leased)):
                        self.granted[conn] = leased
                    case fx.SendTo(conn, say.Apply(_, entry)):
                        waiting.append(fx.Heard(conn, say.Applied("f", entry.version)))

    def comes(self, name: str, conn: int) -> IncarnationId:
        self.feed(fx.Heard(conn, say.ClusterHello(name, "here", name, 0, None, NO_VERSION, NO_VERSION, self.agreed)))
        return max(who for who in self.machine.clusters if who.cluster == name)

    def push(self, who: IncarnationId, number: int, *, finite: bool = True, covers: tuple[Covered, ...] = ()) -> None:
        push, base = PushId(who, number), self.machine.chain.newest
        samples, conn = (8, self.machine.clusters[who].conn or 0) if base != NO_VERSION else (0, 2)
        self.feed(fx.Heard(conn, say.Beat(who, 1.0, 1.0, base, 0, 0, False)))
        self.feed(fx.Heard(conn, say.Offered(Offer(push, base, f"{push}", samples, 1 if samples else 0, covers))))
        products = (say.PushProduct(push, product(push, push)),) if finite else ()
        self.feed(fx.Heard(1, say.Staged("f", push, f"{push}", products, finite, at=base)))

    @property
    def shown(self) -> dict[str, Any]:
        return snapshot(self.machine, self.now)


def test_windows_that_wait_for_a_disk_say_for_whose() -> None:
    rig = Rig(full=True)
    home = rig.comes("home", 2)
    for number in range(1, 5):
        rig.push(home, number)
    assert rig.machine.chain.ahead == 3
    assert rig.shown["window"] == "3 versions are ahead of the disk: waits for f to save " + str(rig.keep)
    rig.feed(fx.Heard(1, say.Trouble("f", "its disk is full")))
    rig.feed(fx.TimePassed())
    assert "(its disk is full)" in rig.shown["window"]
    for _ in range(2):
        rig.feed(fx.Heard(1, say.Written("f", rig.keep, "digest")))
    assert rig.shown["window"] == ""


def test_a_silent_cluster_that_alone_holds_a_push_is_named() -> None:
    rig = Rig()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    rig.push(home, 2)
    rig.feed(fx.StreamClosed(1))
    rig.feed(fx.Heard(3, say.FollowerHello("f", "another", 1, (), NO_VERSION)))  # it has nothing of that any more
    for _ in range(20):
        rig.now += 0.5
        rig.feed(fx.TimePassed())
    assert rig.shown["phase"] == "training"
    assert "home~1 was not heard for 10.0 s, and alone holds a push that a follower may need" in rig.shown["reason"]
    assert "until 500 s" in rig.shown["reason"]


def test_a_follower_that_computes_other_bits_is_named() -> None:
    rig = Rig()
    rig.push(rig.comes("home", 2), 1)
    newest = rig.machine.chain.newest
    assert _follower(rig.shown["followers"][0])["bits"] == ""
    rig.feed(fx.Heard(1, say.Applied("f", newest, differs=newest)))
    assert rig.shown["followers"][0]["bits_differ"] == str(newest)
    assert _follower(rig.shown["followers"][0])["bits"] == "differ from v1 on"


def test_what_is_set_aside_is_an_event() -> None:
    rig = Rig(length=64)
    rig.push(rig.comes("home", 2), 1)
    newest = rig.machine.chain.newest
    for conn in range(3, 6):
        rig.feed(fx.Heard(conn, say.Beat(rig.comes(f"c{conn}", conn), 1.0, 1.0, newest, 0, 0, False)))
    leases, covers = rig.machine.chain.leases, rig.granted[3]
    assert leases is not None
    for conn in (4, 5):  # two were rejected before
        before = next(who for who, cluster in rig.machine.clusters.items() if cluster.conn == conn)
        leases._blame(0, covers[0].spans, before)
    who = next(who for who, cluster in rig.machine.clusters.items() if cluster.conn == 3)
    rig.push(who, 1, finite=False, covers=covers)
    said = [fields for name, fields in rig.notes if name == "set_aside"]
    assert [problems(name, fields) for name, fields in rig.notes if name == "set_aside"] == [[]]
    assert said[0]["spans"] == covers[0].spans
    assert "are set aside" in said[0]["reason"]
    assert rig.shown["leases"]["aside"] == [said[0]["reason"]]
