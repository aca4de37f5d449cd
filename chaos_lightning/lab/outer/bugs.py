"""Rules of docs/outer.md, each broken on purpose: the simulator must find every one of them."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.lab.outer.processes import Machines
from chaos_lightning.outer.cluster import ClusterMachine
from chaos_lightning.outer.effects import Connected, SendTo
from chaos_lightning.outer.leader import LeaderMachine
from chaos_lightning.outer.messages import Freed, PushAnswered
from chaos_lightning.outer.types import NO_VERSION, Body, IncarnationId, Offer, PushAnswer, Round


class EarlyLeader(LeaderMachine):
    """It tells answers before they are stored."""

    def _persist(self, body: Body) -> bool:
        if isinstance(body, Round):
            for weighed in body.accepted:
                offer = weighed.offer
                cluster = self.clusters[offer.push.incarnation]
                if cluster.conn is not None:
                    version = self.chain.entry(self.term, body).version
                    said = PushAnswered(self.term, offer.push, PushAnswer.ACCEPTED, version, "")
                    self._out.append(SendTo(cluster.conn, said))
        return super()._persist(body)


class OneShardLeader(LeaderMachine):
    """It takes a push that one shard has for one that all have."""

    def _staged(self) -> list[Offer]:
        offers = [c.offer for c in self.clusters.values() if c.offer is not None and c.offer.base != NO_VERSION]
        here = [o for o in offers if o.push.number == self.chain.incarnations[o.push.incarnation].next]
        found = [o for o in here if any(o.push in f.staged for f in self._shards())]
        for offer in found:  # what the others would have said
            staged = next(f.staged[offer.push] for f in self._shards() if offer.push in f.staged)
            for follower in self._shards():
                follower.staged.setdefault(offer.push, staged)
        return sorted(found, key=lambda o: o.push) if self.chain.founded else super()._staged()


class FreeingLeader(LeaderMachine):
    """It frees pushes once a round has them."""

    def _free(self, whom: object) -> None:
        for who in self._living():
            pushes = tuple(a.offer.push for a in self.chain.incarnations[who].accepted())
            conn = self.clusters[who].conn
            if pushes and conn is not None:
                self._out.append(SendTo(conn, Freed(self.term, pushes)))


class HastyLeader(LeaderMachine):
    """After a takeover it waits for nobody."""

    def _patience_s(self, who: IncarnationId) -> float:
        return 0.0


class ForgetfulCluster(ClusterMachine):
    """It gives its open push up when its stream breaks."""

    def on(self, event: object) -> list:  # type: ignore[override,type-arg]
        if isinstance(event, Connected):
            self.open = None
        return super().on(event)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Bug:
    """A rule that is broken, how, and by what."""

    rule: str
    what: str
    machines: Machines
    family: str = "any"


BUGS = {
    "O1-early": Bug("O1", "answers are told before they are stored", Machines(leader=EarlyLeader)),
    "O2-one-shard": Bug("O2", "a round takes a push that one shard has", Machines(leader=OneShardLeader), "fragile"),
    "O5-freed": Bug("O5", "pushes are freed when a round has them", Machines(leader=FreeingLeader)),
    "O6-unsynced": Bug("O6", "a file is reported before it is on disk", Machines(syncs=False)),
    "O10-kept": Bug(
        "O10", "what was trained before a rejection is pushed all the same", Machines(discards=False), "poisoned"
    ),
    "O10a-given-up": Bug("O10a", "a push is given up when the stream breaks", Machines(cluster=ForgetfulCluster)),
    "O14-hasty": Bug("O14", "after a takeover everybody is removed", Machines(leader=HastyLeader), "frozen"),
}
"""By name."""
