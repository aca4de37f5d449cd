"""Rules of docs/outer.md, each broken on purpose: the simulator must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chaos_lightning.lab.outer.processes import Machines
from chaos_lightning.outer.attendance import Attendance
from chaos_lightning.outer.chain import OuterChain
from chaos_lightning.outer.cluster import ClusterMachine
from chaos_lightning.outer.effects import Connected
from chaos_lightning.outer.ending import Ending
from chaos_lightning.outer.leader import LeaderMachine
from chaos_lightning.outer.messages import ClusterHello, Freed, PushAnswered
from chaos_lightning.outer.pushes import Pushes
from chaos_lightning.outer.types import NO_VERSION, Ended, IncarnationId, Offer, PushAnswer, Round


class EarlyLeader(LeaderMachine):
    """It tells answers before they are stored."""

    def _turn(self) -> None:
        super()._turn()
        entry = self.desk.persisting
        if entry is not None and isinstance(entry.body, Round):
            for weighed in entry.body.accepted:
                push = weighed.offer.push
                said = PushAnswered(self.term, push, PushAnswer.ACCEPTED, entry.version, "")
                self.attendance.tell(push.incarnation, said)


class OneShardPushes(Pushes):
    """It takes a push that one shard has for one that all have."""

    def staged(self) -> list[Offer]:
        if not self._desk.chain.founded:
            return super().staged()
        offers = [o for o in self._attendance.offers() if o.base != NO_VERSION]
        here = [o for o in offers if o.push.number == self._desk.chain.incarnations[o.push.incarnation].next]
        shards = self._shards.up()
        found = [o for o in here if any(o.push in f.staged for f in shards)]
        for offer in found:  # what the others would have said
            staged = next(f.staged[offer.push] for f in shards if offer.push in f.staged)
            for follower in shards:
                follower.staged.setdefault(offer.push, staged)
        return sorted(found, key=lambda o: o.push)


class FreeingPushes(Pushes):
    """It frees pushes once a round has them."""

    def free(self, whom: Iterable[IncarnationId]) -> None:
        for who in whom:
            pushes = tuple(self._desk.chain.incarnations[who].accepted(1000))
            if pushes:
                self._attendance.tell(who, Freed(self._desk.term, pushes))


class HastyAttendance(Attendance):
    """After a takeover it waits for nobody."""

    def _patience_s(self, who: IncarnationId) -> float:
        return 0.0


class ForgetfulCluster(ClusterMachine):
    """It gives its open push up when its stream breaks."""

    def on(self, event: object) -> list:  # type: ignore[override,type-arg]
        if isinstance(event, Connected):
            self.open = None
        return super().on(event)  # type: ignore[arg-type]


class EarlyEnding(Ending):
    """It does not wait for the disks."""

    def next_end(self) -> Ended | None:
        super().next_end()
        return Ended(self._desk.chain.newest, self.reason) if self.reason else None


class OpenAttendance(Attendance):
    """Who waited before the job was opened is not compared with it."""

    def again(self) -> list[tuple[int, ClusterHello]]:
        return []


def _with(**parts: type) -> Callable[[OuterChain, int, int], LeaderMachine]:
    """Leaders with these parts in place of their own."""

    def made(chain: OuterChain, term: int, followers: int) -> LeaderMachine:
        machine = LeaderMachine(chain, term, followers)
        for name, part in parts.items():
            getattr(machine, name).__class__ = part
        return machine

    return made


@dataclass(frozen=True, slots=True)
class Bug:
    """A rule that is broken, how, and by what."""

    rule: str
    what: str
    machines: Machines
    family: str = "any"


BUGS = {
    "O3a-strangers": Bug(
        "O3a", "a cluster with another model comes in", Machines(leader=_with(attendance=OpenAttendance)), "strange"
    ),
    "O9-merged": Bug("O9", "the base is the merged parameters", Machines(merges=False)),
    "O16-early": Bug("O16", "the end does not wait for the disks", Machines(leader=_with(end=EarlyEnding))),
    "O1-early": Bug("O1", "answers are told before they are stored", Machines(leader=EarlyLeader)),
    "O2-one-shard": Bug(
        "O2", "a round takes a push that one shard has", Machines(leader=_with(pushes=OneShardPushes)), "fragile"
    ),
    "O5-freed": Bug("O5", "pushes are freed when a round has them", Machines(leader=_with(pushes=FreeingPushes))),
    "O6-unsynced": Bug(
        "O6",
        "a file is reported before it is on disk",
        Machines(saving=("write", "report", "sync", "rename", "sync-folder")),
    ),
    "O10-kept": Bug(
        "O10", "what was trained before a rejection is pushed all the same", Machines(discards=False), "poisoned"
    ),
    "O10a-given-up": Bug("O10a", "a push is given up when the stream breaks", Machines(cluster=ForgetfulCluster)),
    "O14-hasty": Bug(
        "O14", "after a takeover everybody is removed", Machines(leader=_with(attendance=HastyAttendance)), "frozen"
    ),
}
"""By name."""
