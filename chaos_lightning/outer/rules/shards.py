"""Part of the leader that knows its followers: which hold a shard, and what each has staged, computed and saved;
decides what follows from that (O6).

Theory of operation. A follower's word is what it said last; a new leader hears all of it again. A follower that starts
is entered in the chain first, and is then shown its start and all that it needs (`obey`, rule O7). A version is
*served* once all shards have computed it. One version at a time is saved, by all shards the same; once all have it on
disk, it is marked durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from chaos_lightning.outer.rules.chain import Version
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.leader_desk import LeaderDesk
from chaos_lightning.outer.rules.messages import (
    Applied,
    FollowerHello,
    Hold,
    Holder,
    Holders,
    Keep,
    Marked,
    Obey,
    ShardFile,
    Stage,
    Staged,
    ToFollower,
)
from chaos_lightning.outer.rules.types import NO_VERSION, Cut, Durable, Offer, PushId, Started, VersionId

HOLD_S = 3600.0
"""Longest time, s, for which a version is served for clusters that fetch it, while others wait to fetch one."""


@dataclass(slots=True)
class Follower:
    """State of one follower, as the leader has last heard."""

    conn: int | None
    nonce: str
    endpoint: str = ""
    obeys: bool = False
    trouble: str = ""
    differs: VersionId = NO_VERSION
    version: VersionId = NO_VERSION
    disk: dict[VersionId, str] = field(default_factory=dict)
    staged: dict[PushId, Staged] = field(default_factory=dict)
    missing: set[PushId] = field(default_factory=set)


class Shards:
    """Followers and shards, as the leader knows them.

    Args:
        desk: Desk of the leader.
        wanted: Number of followers that were asked for; 0: as many as hold shards, one in a new job.

    Attributes:
        followers: State of each follower, by name; of those that stand by, too.
        served: Newest version that all shards serve.
    """

    def __init__(self, desk: LeaderDesk, wanted: int) -> None:
        self._desk = desk
        self._wanted = wanted
        self._conns: dict[int, str] = {}
        self._keep = NO_VERSION
        self._held: VersionId | None = None
        """Version that is served for clusters that fetch it; None: nobody has been told anything, and an earlier
        leader's word holds.
        """
        self._held_since = 0.0
        self.followers: dict[str, Follower] = {}
        self.served = NO_VERSION

    # ------------------------------------------------------------------ questions

    def up(self) -> list[Follower]:
        """Returns the connected followers that obey this leader, in shard order."""
        found = [self.followers[name] for name in self._desk.chain.cut if name in self.followers]
        return [f for f in found if f.obeys and f.conn is not None]

    @property
    def complete(self) -> bool:
        """Whether every shard has a follower that is connected and obeys."""
        return bool(self._desk.chain.cut) and len(self.up()) == len(self._desk.chain.cut)

    @property
    def wanted(self) -> int:
        """Number of followers that should hold a shard each."""
        return self._wanted or len(self._desk.chain.cut) or 1

    @property
    def unheeded(self) -> str:
        """Words that say why another number of followers holds shards than was asked for; "" if the numbers agree
        (O15).
        """
        cut, wanted = self._desk.chain.cut, self.wanted
        if not cut or wanted == len(cut):
            return ""
        asked = f"{wanted} followers were asked for, and"
        if len(cut) == min(wanted, self._blocks):
            return f"{asked} this model can be cut for {len(cut)} at most: the others stand by"
        return (
            f"{asked} the shards of this job are cut for {len(cut)} ({', '.join(cut)}); that stays. Only `ps up "
            f"--followers {wanted}` cuts them anew, while the server stands, with the chain in a file and all of these "
            "followers' folders on one machine"
        )

    @property
    def _blocks(self) -> int:
        """Number of blocks of the model, which is the largest possible number of shards."""
        agreed = self._desk.chain.agreement
        assert agreed is not None
        return Grid(tuple(tensor.elements for tensor in agreed.tensors), agreed.block).blocks

    def holders(self) -> Holders:
        """Returns the followers of all shards, for clusters to connect to; a follower that is away has no endpoint."""
        here = {name: f.endpoint for name, f in self.followers.items() if f.conn is not None}
        return Holders(self._desk.term, tuple(Holder(name, here.get(name, "")) for name in self._desk.chain.cut))

    def lack(self, pushes: Iterable[PushId]) -> bool:
        """Returns whether a shard lacks one of these pushes, or is away and may lack it."""
        shards = self.up()
        return not self.complete or any(push not in f.staged for f in shards for push in pushes)

    def have(self, offer: Offer) -> bool:
        """Returns whether all connected shards have staged this offer's bytes."""
        here = [f.staged.get(offer.push) for f in self.up()]
        return all(s is not None and s.manifest == offer.manifest for s in here)

    # ------------------------------------------------------------------ hearing

    def on_hello(self, conn: int, hello: FollowerHello) -> None:
        """Notes a follower that has sent its first message."""
        before = self.followers.get(hello.follower)
        if before is not None and before.conn is not None:
            self._conns.pop(before.conn, None)
        disk = {file.version: file.digest for file in hello.disk}
        self.followers[hello.follower] = Follower(conn, hello.nonce, hello.endpoint, version=hello.version, disk=disk)
        self._conns[conn] = hello.follower

    def on_staged(self, staged: Staged) -> None:
        """Notes that a follower has all bytes of its piece of a push."""
        follower = self.followers[staged.follower]
        follower.staged[staged.push] = staged
        follower.missing.discard(staged.push)

    def on_applied(self, applied: Applied) -> None:
        """Notes that a follower's state is at this version."""
        follower = self.followers[applied.follower]
        follower.version, follower.differs = applied.version, applied.differs
        for product in applied.momentum:
            if (staged := follower.staged.get(product.push)) is not None:
                follower.staged[product.push] = replace(staged, momentum=product.sum, at=applied.version)

    def closed(self, conn: int) -> str:
        """Notes that a stream has ended; returns the follower that used it, "" if none did."""
        name = self._conns.pop(conn, "")
        if not name or self.followers[name].conn != conn:
            return ""
        self.followers[name].conn = None
        return name

    # ------------------------------------------------------------------ decisions

    def next_start(self, offers: Iterable[Offer]) -> Started | None:
        """Returns the entry for the next follower start that the chain lacks; a follower whose start is in the chain is
        sent its orders (O7).

        Args:
            offers: Open pushes, which it is to stage.
        """
        for name, follower in self.followers.items():
            if follower.conn is None or follower.obeys:
                continue
            if self._desk.chain.starts.get(name) != follower.nonce:
                return Started(name, follower.nonce)
            self.obey(name, offers)
        return None

    def obey(self, name: str, offers: Iterable[Offer]) -> None:
        """Sends a follower the proof that its start is in the chain, and all that it needs to go on."""
        follower, chain, term = self.followers[name], self._desk.chain, self._desk.term
        shard = chain.cut.index(name) if name in chain.cut else -1
        told = tuple(v.entry for v in chain.since(chain.safe))
        follower.obeys = True
        durable = self._durable_of(shard)
        place = shard, len(chain.cut), chain.agreement
        said = Obey(term, follower.nonce, *place, durable, chain.safe, told, chain.job_id, chain.open())
        self._desk.send(follower.conn, said)
        for offer in offers:
            self._desk.send(follower.conn, Stage(term, offer))
        if self._keep != NO_VERSION:
            self._desk.send(follower.conn, Keep(term, self._keep))
        if self._held is not None:
            self._desk.send(follower.conn, Hold(term, self._held))

    def _durable_of(self, shard: int) -> tuple[ShardFile, ...]:
        return tuple(ShardFile(v, digests[shard]) for v, digests in self._desk.chain.durable) if shard >= 0 else ()

    def next_cut(self) -> Cut | None:
        """Returns the entry that cuts the shards, once enough followers are connected; else None."""
        if self._desk.chain.cut or self._desk.chain.agreement is None:
            return None
        here = sorted(name for name, f in self.followers.items() if f.conn is not None and f.obeys)
        shards = min(self.wanted, self._blocks)
        return Cut(tuple(here[:shards])) if len(here) >= shards else None

    def unsaved(self) -> str:
        """Returns in words which followers have not saved the next durable version yet."""
        found = []
        for name in self._desk.chain.cut:
            follower = self.followers.get(name)
            if follower is None or follower.conn is None:
                found.append(f"{name}, which is away")
            elif self._keep not in follower.disk:
                found.append(f"{name} to save {self._keep}" + (f" ({follower.trouble})" if follower.trouble else ""))
        return "; ".join(found) or "the store to take the durable mark"

    def next_mark(self) -> Durable | None:
        """Returns the entry that marks a version as durable, if all shards have one on disk that is newer than the last
        marked one (O6).
        """
        chain, shards = self._desk.chain, self.up()
        if not self.complete:
            return None
        newest = chain.durable[-1][0] if chain.durable else NO_VERSION
        for version in chain.line():
            if version.id == newest:
                return None
            digests = [f.disk.get(version.id) for f in shards]
            if all(d is not None for d in digests):
                return Durable(version.id, tuple(d for d in digests if d is not None))
        return None

    # ------------------------------------------------------------------ what follows

    def tell(self, message: ToFollower) -> None:
        """Sends a message to all connected followers that hold a shard."""
        for follower in self.up():
            self._desk.send(follower.conn, message)

    def stage(self, offer: Offer) -> None:
        """Orders the followers that lack the bytes of this push to fetch them."""
        for follower in self.up():
            staged = follower.staged.get(offer.push)
            if staged is None or staged.manifest != offer.manifest:
                self._desk.send(follower.conn, Stage(self._desk.term, offer))

    def marked(self) -> None:
        """Tells followers that another version is durable, so that they may drop files and pushes that nobody needs."""
        chain, needed = self._desk.chain, self._desk.chain.needed()
        for shard, name in enumerate(chain.cut):
            follower = self.followers.get(name)
            if follower is not None:
                follower.disk = {version: digest for version, digest in follower.disk.items() if version >= chain.safe}
                follower.staged = {p: s for p, s in follower.staged.items() if p in needed or chain.unanswered(p)}
            if follower is not None and follower.obeys:
                marked = Marked(self._desk.term, self._durable_of(shard), chain.safe)
                self._desk.send(follower.conn, marked)

    def save(self) -> None:
        """Orders followers to save the newest version, unless they are saving one already."""
        chain = self._desk.chain
        newest = chain.durable[-1][0] if chain.durable else NO_VERSION
        if not self.complete or (self._keep > newest and chain.stands(self._keep)):
            return
        if chain.newest > newest and chain.founded:
            self._keep = chain.newest
            self.tell(Keep(self._desk.term, self._keep))

    def hold(self, fetched: Sequence[VersionId]) -> None:
        """Orders followers to serve a version that a cluster is fetching, until it is fetched, but for at most `HOLD_S`
        (O8c).

        Args:
            fetched: Such versions; the first is the most urgent one.
        """
        now, held = self._desk.now, self._held
        others = [version for version in fetched if version != held]
        if held in fetched and (now - self._held_since < HOLD_S or not others):
            return
        new = others[0] if others else NO_VERSION
        self._held, self._held_since = new, now
        if new != held:
            self.tell(Hold(self._desk.term, new))

    def newly_served(self) -> VersionId | None:
        """Returns the newest version that all shards have computed, unless it was returned before."""
        shards = self.up()
        if not self._desk.chain.founded:  # or not any more
            self.served = NO_VERSION
            return None
        if not self.complete:
            return None
        served = next((v for v in self._desk.chain.line() if all(self._has(f, v) for f in shards)), None)
        if served is None or served.id <= self.served:
            return None
        self.served = served.id
        return served.id

    def _has(self, follower: Follower, version: Version) -> bool:
        """Returns whether a follower serves this version: it serves its newest, and beside it an older one that is held
        for a fetch, else the one before.
        """
        newest = [v.id for v in islice(self._desk.chain.line(follower.version), 2)]
        free = self._held in (None, NO_VERSION, *newest)
        return version.id in (newest if free else newest[:1])
