"""State machine of a follower: decides which leader to obey, and what to stage, compute, save and delete.

Theory of operation. A follower holds one shard of the outer state. It computes versions one by one, each from the one
before, so its state always *stands* at one version of the chain (O1). It holds three kinds of bytes beside that:

- *staged* pushes, fetched from their clusters. They stay until a version that holds them is the second newest durable
  one, or until the leader says that no round will take them (O5);
- *files*, each a copy of the state at one version. They are made while the next version is computed. A file goes on
  the word of a durable mark only, never because the chain does not name it (O7);
- the *entries* that make the versions since the older of the two durable ones.

After a start it knows nothing but its files. It says what they are and obeys only a leader that shows it its own start
out of the chain (O7). It loads the newest durable version whose file is whole, or the one before, fetches the pushes
that the versions since need, and computes these again: the same bits, whoever of the server died. If a mark passes the
version at which it stands, it loads the marked one instead, if its file is there.

One thing is under way at a time with the state itself: loading or computing. Fetches and saves go on beside it.
"""

from __future__ import annotations

from dataclasses import replace

from chaos_lightning.errors import StateError
from chaos_lightning.outer.rules.effects import (
    Compute,
    Computed,
    Connected,
    Delete,
    Disconnected,
    DiskTrouble,
    Empty,
    Fetched,
    FetchPush,
    FollowerEffect,
    FollowerEvent,
    Forget,
    HoldShard,
    HoldVersion,
    JobOver,
    Load,
    Loaded,
    NotFetched,
    OuterNote,
    Progressed,
    Save,
    Say,
    StateSaved,
    Told,
    TurnedAway,
)
from chaos_lightning.outer.rules.messages import (
    Applied,
    Apply,
    Dismissed,
    DropPush,
    FollowerHello,
    FromFollower,
    Hold,
    JobFinished,
    Keep,
    LineKey,
    Marked,
    Missing,
    Obey,
    OnItsWay,
    PushProduct,
    ShardFile,
    Stage,
    Staged,
    ToFollower,
    Trouble,
    Written,
)
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Entry,
    Offer,
    ProcessPlace,
    PushId,
    RolledBack,
    Round,
    VersionId,
)


class FollowerMachine:
    """State machine of one follower.

    Args:
        name: Name of this follower.
        nonce: Random text, drawn at its start.
        disk: Versions whose file lies whole on the disk, oldest first.
        endpoint: HOST:PORT where its data connections are taken.
        process: Process of this follower.

    Attributes:
        term: Highest term that it has heard of.
        version: Version of its state; NO_VERSION: there is no state.
        disk: Files of its shard; of a version that was cut anew there are two.
        shard: Number of the shard that it holds; -1: none yet.
        agreement: Agreement of the job; None before its first cluster has come.
        lost: Reason for which its shard cannot be had any more; "" as long as it can.
        job_id: Id of the job whose leader it obeys; "": none yet.
    """

    def __init__(
        self,
        name: str,
        nonce: str,
        disk: tuple[ShardFile, ...] = (),
        endpoint: str = "",
        process: ProcessPlace = ProcessPlace(),
    ) -> None:
        self.name = name
        self.nonce = nonce
        self.endpoint = endpoint
        self.process = process
        self.term = 0
        self.version = NO_VERSION
        self.disk = {*disk}
        self.shard = -1
        self.shards = 0
        self.agreement: Agreement | None = None
        self.lost = ""
        self.job_id = ""
        self._obeys = False
        """Whether the leader of this term has shown the follower its own start."""
        self._connected = False
        self._durable: tuple[ShardFile, ...] = ()
        """Files of the durable versions, with this shard's digests, oldest first; both come before the newest
        version.
        """
        self._base = NO_VERSION
        """Newest version whose pushes are never needed again; NO_VERSION: the first version is computed from nothing.
        """
        self._entries: list[Entry] = []
        """Entries that made the versions since the base, oldest first, with those that were rolled back."""
        self._offers: dict[PushId, Offer] = {}
        """Pushes that the follower has to fetch or hold."""
        self._staged: dict[PushId, Fetched] = {}
        self._fetching: set[PushId] = set()
        self._busy = False
        """Whether the state is being loaded or computed."""
        self._keep = NO_VERSION
        """Version to be saved when the state is at it."""
        self._saving = NO_VERSION
        self._momentum: tuple[PushProduct, ...] = ()
        """Products of staged pushes with the momentum of the present state."""
        self._differs = NO_VERSION
        """Version with which this process began to compute other bits than were durable."""
        self._out: list[FollowerEffect] = []

    @property
    def decided(self) -> frozenset[PushId]:
        """Pushes that versions after the base contain, and that no round can take, unless a rollback reopens them."""
        return frozenset(self._needed())

    def marked(self, version: VersionId) -> str:
        """Returns the digest of this shard at a durable version; "" if the version is not durable."""
        return next((file.digest for file in self._durable if file.version == version), "")

    # ------------------------------------------------------------------ events

    def on(self, event: FollowerEvent) -> list[FollowerEffect]:
        """Handles one event; returns the effects in order.

        Raises:
            StateError: The leader says what no chain can hold.
        """
        self._out = []
        match event:
            case Connected():
                self._connected = True
                self._say(self._hello())
            case Disconnected():
                self._connected = False
            case Told(message):
                if self._heeds(message):  # type: ignore[arg-type]
                    self._hear(message)  # type: ignore[arg-type]
            case Fetched(push):
                self._fetching.discard(push)
                if push in self._offers:
                    self._staged[push] = event
                    self._tell_staged(event)
                else:
                    self._out.append(Forget(push))
            case Progressed(push, left_s):
                self._say(OnItsWay(self.name, push, left_s))
            case DiskTrouble(reason):
                self._say(Trouble(self.name, reason))
            case NotFetched(push):
                self._fetching.discard(push)
                if push in self._lacking():
                    self._say(Missing(self.name, push))
            case Computed(version, momentum, differs):
                self._differs = version if differs and self._differs == NO_VERSION else self._differs
                self._stand(version, momentum)
            case StateSaved(version, digest):
                self._saving = NO_VERSION
                self.disk.add(ShardFile(version, digest))
                self._say(Written(self.name, version, digest))
            case Loaded():
                self._on_loaded(event)
        self._turn()
        return self._out

    def _hello(self) -> FollowerHello:
        """Returns the first message on a stream to a leader."""
        files = tuple(sorted(self.disk, key=lambda file: file.version))
        place, process = self.endpoint, self.process
        return FollowerHello(self.name, self.nonce, self.term, files, self.version, place, process, self.job_id)

    def _say(self, message: FromFollower) -> None:
        if self._connected:
            self._out.append(Say(message))

    def _tell_staged(self, fetched: Fetched) -> None:
        self._say(
            Staged(
                self.name,
                fetched.push,
                fetched.manifest,
                fetched.products,
                fetched.finite,
                fetched.momentum,
                fetched.at,
            )
        )

    def _stand(self, version: VersionId, momentum: tuple[PushProduct, ...]) -> None:
        self._busy, self.version, self._momentum = False, version, momentum
        for product in momentum:
            if product.push in self._staged:
                self._staged[product.push] = replace(self._staged[product.push], momentum=product.sum, at=version)
        self._say(Applied(self.name, version, momentum, self._differs))

    def _on_loaded(self, loaded: Loaded) -> None:
        if loaded.ok:
            self._differs = NO_VERSION
            self._stand(loaded.version, loaded.momentum)
            return
        self._busy = False
        self.disk = {file for file in self.disk if file.version != loaded.version}
        self._out.append(OuterNote("file_damaged", (("version", str(loaded.version)), ("reason", loaded.reason))))

    # ------------------------------------------------------------------ the leader's word

    def _heeds(self, message: ToFollower) -> bool:
        """Returns whether this leader must be obeyed: its term is the highest so far, and it has shown this follower's
        start in the chain (O7).
        """
        if message.term < self.term:
            self._out.append(OuterNote("late_leader", (("term", message.term), ("known", self.term))))
            return False
        if isinstance(message, JobFinished | Dismissed):
            return True  # the end is in the chain, where a late leader cannot put it
        if isinstance(message, Obey):
            return message.nonce == self.nonce
        return self._obeys and message.term == self.term

    def _hear(self, message: ToFollower) -> None:
        match message:
            case Obey():
                self._obey(message)
            case Stage(_, offer):
                fetched = self._staged.get(offer.push)
                if fetched is not None and fetched.manifest == offer.manifest:
                    self._tell_staged(fetched)
                else:
                    self._offers[offer.push] = offer
            case Apply(_, entry):
                self._append(entry)
            case Hold(_, version):
                self._out.append(HoldVersion(version))
            case Keep(_, version):
                self._keep = version
            case Marked(_, durable, base):
                self._mark(durable, base)
            case DropPush(_, push, later):
                who, number = push.incarnation, push.number
                here = [p for p in self._known() if p.incarnation == who and p.number >= number] if later else [push]
                for dropped in sorted({*here} - self._needed()):
                    self._forget(dropped)
            case JobFinished(_, version, reason):
                self._out.append(JobOver(version, reason))
            case Dismissed(_, reason):
                self._out.append(TurnedAway(reason))
            case LineKey():
                pass  # the shell's

    def _obey(self, message: Obey) -> None:
        self.term, self._obeys, self.job_id = message.term, True, message.job_id
        self._hold(message)
        before = self._needed()
        self._entries, self._base = [], message.base
        for entry in message.entries:
            self._append(entry)
        self._mark(message.durable, message.base)
        for push in sorted(before - self._needed()):
            self._forget(push)  # of versions that are twice durable, or taken back: then it is offered anew
        first = {push.incarnation: push.number for push in message.open}
        for push in sorted(self._known() - self._needed()):
            if push.number < first.get(push.incarnation, push.number + 1):
                self._forget(push)  # answered, or of somebody who is over: told while it had no stream
        for _, fetched in sorted(self._staged.items()):  # a leader that is new has not heard of them
            self._tell_staged(fetched)
        if self.version != NO_VERSION:
            self._say(Applied(self.name, self.version, self._momentum, self._differs))
        if self.lost:
            self._say(Trouble(self.name, self.lost))

    def _hold(self, message: Obey) -> None:
        """Orders to hold the shard that the leader names, if it is another one than before."""
        place = message.agreement, message.shard, message.shards
        if place == (self.agreement, self.shard, self.shards):
            return
        self.agreement, self.shard, self.shards = place
        if message.agreement is not None and message.shard >= 0:
            self._out.append(HoldShard(message.agreement, message.shard, message.shards))

    def _append(self, entry: Entry) -> None:
        if entry.version == NO_VERSION:
            kind = type(entry.body).__name__
            raise StateError(f"the leader has entry {entry.position} applied, and its kind, {kind}, makes no version")
        made = (0, self._base.number, *(e.version.number for e in self._entries))
        if entry.version.number <= max(made):
            return  # told twice: computed again, it would never lie behind the state
        self._entries.append(entry)
        for offer in entry.offers:
            self._offers.setdefault(offer.push, offer)
        if isinstance(entry.body, Round):
            for refusal in entry.body.rejected:
                self._forget(refusal.offer.push)

    def _mark(self, durable: tuple[ShardFile, ...], base: VersionId) -> None:
        """Notes which versions are durable, and drops files and pushes that neither these nor later versions need (O5,
        O6).
        """
        self._durable, self._base = durable, base
        gone = {file.version for file in self.disk if file.version < base}
        self.disk = {file for file in self.disk if file.version not in gone}
        self._out += [Delete(version) for version in sorted(gone)]
        made = [e.version for e in self._entries]
        if base in made:
            before = self._needed()
            self._entries = self._entries[made.index(base) + 1 :]
            for push in sorted(before - self._needed()):
                self._forget(push)

    def _needed(self) -> set[PushId]:
        """Returns the pushes that are needed to compute the newest version from the base."""
        return {offer.push for entry in self._line() for offer in entry.offers}

    def _known(self) -> set[PushId]:
        """Returns the pushes that the follower has, or has been told to fetch."""
        return {*self._offers, *self._staged}

    def _forget(self, push: PushId) -> None:
        self._offers.pop(push, None)
        if self._staged.pop(push, None) is not None:
            self._out.append(Forget(push))

    # ------------------------------------------------------------------ what comes next

    def _line(self) -> list[Entry]:
        """Returns the entries that lead from the older durable version to the newest version, without those that were
        rolled back.
        """
        found: list[Entry] = []
        limit = None
        for entry in reversed(self._entries):
            if limit is not None and entry.version.number > limit:
                continue
            found.append(entry)
            if isinstance(entry.body, RolledBack):
                limit = entry.body.to.number
        return found[::-1]

    def _turn(self) -> None:
        if not self._obeys or self.shard < 0 or self.agreement is None:
            return
        for push, offer in self._offers.items():
            if push not in self._staged and push not in self._fetching:
                self._fetching.add(push)
                self._out.append(FetchPush(offer))
        if self._busy:
            return
        saved = any(file.version == self.version for file in self.disk)
        if self._keep == self.version != NO_VERSION and not saved and self._saving != self.version:
            if self._saving != NO_VERSION:
                return  # one that was rolled back since is still being written: this one waits for its turn
            self._saving = self.version
            self._out.append(Save(self.version))  # before the state moves on: the shell copies it at once
        self._advance()

    def _start(self) -> tuple[int, ShardFile | None, list[Entry]]:
        """Returns the version from which the follower can compute the newest one: its present state, or a durable file.

        Returns:
            How many entries of the way lie behind it; -1: it has nothing to begin with. The file to load for that;
            None: the state as it stands will do. The way.
        """
        line = self._line()
        places = {e.version: i + 1 for i, e in enumerate(line)} | {self._base: 0}
        place = places.get(self.version, -1 if self._base != NO_VERSION else 0)  # the first is computed from nothing
        load = None
        for file in self._durable:
            at = places.get(file.version, -1)
            if at > place and file in self.disk:
                place, load = at, file
        return place, load, line

    def _lacking(self) -> set[PushId]:
        """Returns the pushes that the follower still needs to compute the newest version."""
        place, _, line = self._start()
        return {o.push for entry in line[max(0, place) :] for o in entry.offers if o.push not in self._staged}

    def _give_up(self) -> None:
        """Reports the shard as lost: the files of both durable versions are damaged or gone, and nobody else has this
        shard (O6).
        """
        names = " and ".join(str(file.version) for file in self._durable)
        self.lost = (
            f"shard {self.shard} is lost: at {self.name} its files of the durable versions {names} are damaged or "
            "gone, and nobody else has them; put a copy of one back and start it again, or begin a new job"
        )
        self._out.append(OuterNote("shard_lost", (("shard", self.shard), ("reason", self.lost))))
        self._say(Trouble(self.name, self.lost))

    def _advance(self) -> None:
        """Makes one step towards the newest version: orders to compute the next version, or to load a durable one."""
        place, load, line = self._start()
        if place >= 0 and self.lost:  # a mark came that its disk has
            self.lost = ""
            self._say(Trouble(self.name, ""))
        if load is not None:
            self._busy = True
            self._out.append(Load(load.version, load.digest))
            return
        if place < 0 and not self.lost:
            self._give_up()
        if place < 0 or place == len(line):
            return
        entry = line[place]
        if isinstance(entry.body, RolledBack) and entry.body.to == NO_VERSION:
            self._busy = True
            self._out.append(Empty(entry.version))
        elif all(offer.push in self._staged for offer in entry.offers):
            self._busy = True
            self._out.append(Compute(entry))
