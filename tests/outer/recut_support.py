"""A job whose server is stopped: its chain and its followers' files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from chaos_lightning.outer.commands.recut import recut
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    Body,
    Counters,
    Cut,
    Durable,
    Factors,
    Founded,
    GateState,
    IncarnationId,
    JobOpened,
    Joined,
    Offer,
    PushId,
    Round,
    TensorSpec,
    VersionId,
    Weighed,
)
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.store import Store

TENSORS = (TensorSpec("a", "float32", (500,)), TensorSpec("b", "float32", (70, 3)))
GRID = Grid((500, 210), 64)
HOME = IncarnationId("home", 1)
COUNTERS = Counters(3, 4, 5)


class Stopped:
    """Job whose server is stopped: it has two durable versions, and a newer one that only one follower has saved."""

    def __init__(self, folder: Path, followers: int, store: Callable[[], Store], *, durable: bool = True) -> None:
        self.folder, self.open, self.followers = folder, store, followers
        self.contents: dict[VersionId, OuterState] = {}
        self.chain = OuterChain()
        names = tuple(f"follower-{number}" for number in range(followers))
        self.put(JobOpened(Agreement(TENSORS, block=64), "a test"), Joined(HOME, "a test"), Cut(names))
        self.put(Founded(1, Offer(PushId(HOME, 1), NO_VERSION, "m", 0, 0)))
        for _ in range(2 if durable else 0):
            self.put(Durable(self.chain.newest, self.save(self.chain.newest, followers)))
            self.round()
        self.save(self.chain.newest, 1, followers)

    def put(self, *bodies: Body) -> None:
        with self.open() as store:
            end = store.take_term()
            for body in bodies:
                outcome = store.append(type(body).__name__, body_bytes(body), end)
                assert outcome.ok
                end = outcome.end
        self.chain = self.now

    @property
    def now(self) -> OuterChain:
        with self.open() as store:
            return load_chain(store)

    def round(self) -> None:
        chain = self.chain
        offer = Offer(PushId(HOME, chain.next_number), chain.newest, "m", 1, 1)
        weighed, factors = (Weighed(offer, 1.0, 0),), Factors(0.1, 1.0, 0.9)
        self.put(Round(chain.next_number, chain.newest, weighed, (), factors, Counters(), GateState(), ""))

    def save(self, version: VersionId, shards: int, of: int = 0) -> tuple[str, ...]:
        """Saves this number of shards of a version, with random content; returns their digests."""
        torch.manual_seed(version.number)
        state = OuterState(GRID.whole, *torch.randn(3, GRID.elements).unbind())
        self.contents[version] = state
        digests = []
        for number, shard in enumerate(GRID.cut(of or shards)[:shards]):
            start, stop = shard.span
            part = OuterState(shard, *(tensor[start:stop].clone() for tensor in state.tensors))
            digests.append(self.files(f"follower-{number}").save(version, part, COUNTERS))
        return tuple(digests)

    def files(self, name: str) -> ShardFiles:
        return ShardFiles(self.folder / name, "job")

    def cut(self, followers: int) -> str:
        with self.open() as store:
            return recut(store, self.folder, "job", [f"follower-{number}" for number in range(followers)])

    def check(self, *, cleared: bool = True) -> OuterChain:
        """Checks that each durable version is complete in the files of the followers that the chain names; returns the
        chain.

        Args:
            cleared: Behind a cut these have no file of a version beyond, for it would be of another shard.
        """
        chain = self.now
        if cleared and len(chain.cut) != self.followers:
            newest = chain.durable[-1][0].number if chain.durable else 0
            assert all(file.version.number <= newest for n in chain.cut for file in self.files(n).look().whole)
        shards = GRID.cut(len(chain.cut))
        for version, digests in chain.durable:
            whole = self.contents[version]
            for name, shard, digest in zip(chain.cut, shards, digests, strict=True):
                found, counters = self.files(name).load(version, digest)
                assert (found.shard, counters) == (shard, COUNTERS)
                start, stop = shard.span
                for mine, its in zip(found.tensors, whole.tensors, strict=True):
                    assert torch.equal(mine, its[start:stop])
        return chain
