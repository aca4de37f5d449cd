"""A leader's state machine in a test: its entries are stored at once, and its one follower carries out all orders at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos_lightning.outer.follower.snapshot import snapshot
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Covered,
    Entry,
    IncarnationId,
    Offer,
    PushId,
)
from chaos_lightning.protocol.spans import count
from lab.outer.processes import agreement, product

SETTINGS = OuterSettings(policy="async", heartbeat_s=1.0, last_holder_timeout_s=500.0, lease_ahead_s=2.0)


class Rig:
    """Leader with one follower, whose disk may be full, and clusters that a test adds."""

    def __init__(self, length: int = 0, *, full: bool = False) -> None:
        self.full = full
        self.now = 1.0
        self.stores: Callable[[Entry], fx.EntryStored] = lambda entry: fx.EntryStored(True)
        self.agreed = agreement(SETTINGS, length)
        self.machine = LeaderMachine(OuterChain(), 1, 1)
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.keep = NO_VERSION
        self.dismissed: dict[int, say.Dismissed] = {}
        self.granted: dict[int, tuple[Covered, ...]] = {}
        self.feed(fx.Heard(1, say.FollowerHello("f", "n", 0, (), NO_VERSION)))

    def feed(self, event: fx.LeaderEvent) -> None:
        waiting = [event]
        while waiting:
            for effect in self.machine.on(self.now, waiting.pop(0)):
                match effect:
                    case fx.StoreEntry(entry):
                        waiting.append(self.stores(entry))
                    case fx.OuterNote(name, fields):
                        self.notes.append((name, dict(fields)))
                    case fx.SendTo(_, say.Keep(_, version)):
                        self.keep = version
                        waiting += [] if self.full else [fx.Heard(1, say.Written("f", version, "digest"))]
                    case fx.SendTo(conn, say.Dismissed() as said):
                        self.dismissed.setdefault(conn, said)
                    case fx.SendTo(conn, say.Granted(_, leased)):
                        self.granted[conn] = leased
                    case fx.SendTo(conn, say.Apply(_, entry)):
                        waiting.append(fx.Heard(conn, say.Applied("f", entry.version)))

    def comes(self, name: str, conn: int) -> IncarnationId:
        self.feed(fx.Heard(conn, say.ClusterHello(name, "here", name, 0, None, NO_VERSION, NO_VERSION, self.agreed)))
        return max(who for who in self.machine.clusters if who.cluster == name)

    def push(self, who: IncarnationId, number: int, *, finite: bool = True, covers: tuple[Covered, ...] = ()) -> None:
        push, base = PushId(who, number), self.machine.chain.newest
        many = sum(count(each.spans) for each in covers) or 8
        samples, conn = (many, self.machine.clusters[who].conn or 0) if base != NO_VERSION else (0, 2)
        self.feed(fx.Heard(conn, say.Beat(who, 1.0, 1.0, base, 0, 0, False)))
        self.feed(fx.Heard(conn, say.Offered(Offer(push, base, f"{push}", samples, 1 if samples else 0, covers))))
        products = (say.PushProduct(push, product(push, push)),) if finite else ()
        self.feed(fx.Heard(1, say.Staged("f", push, f"{push}", products, finite, at=base)))

    @property
    def shown(self) -> dict[str, Any]:
        return snapshot(self.machine, self.now)
