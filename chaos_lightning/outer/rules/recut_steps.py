"""Steps, in order, by which a job's shards are cut anew for other followers (O15); yields orders, and does no input or
output itself.

Theory of operation. `recut_steps` is a generator: it yields one step after the other, and is sent what came of each.
Who drives it does the steps on real files (outer/commands/recut.py), or on simulated ones (lab/outer/starting.py). It
decides on the chain as it is once nobody else can write to it, and removes nothing before the record is stored: until
then all files of the old shards lie where they lay.

Behind the record, files of versions that it does not name go from the folders of those who hold shards now: a leader
marks versions on the word of followers that say what they have, and these files are of other shards. Whoever died
before that leaves a chain that ends with the record, since each follower that starts is entered behind it. So the next
start knows that this is still to be done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_lightning.errors import ConfigurationError, StateError, StoreError
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import NO_VERSION, Cut, Durable, VersionId


@dataclass(frozen=True, slots=True)
class ReadChain:
    """Step that makes sure that no earlier leader can write any more, and then reads the chain; its result is that
    chain.
    """


@dataclass(frozen=True, slots=True)
class Find:
    """Step that looks for a follower's folder; its result is the expected path if the folder is missing, else ""."""

    follower: str


@dataclass(frozen=True, slots=True)
class OldShard:
    """File in a follower's folder with a shard of the old cut."""

    follower: str
    shard: Shard
    version: VersionId
    digest: str


@dataclass(frozen=True, slots=True)
class Check:
    """Step that reads a file; its result says what is wrong with it, "" if it is undamaged."""

    source: OldShard


@dataclass(frozen=True, slots=True)
class Write:
    """Step that assembles a shard of a version from old files and writes it durably; its result is the digest.

    Attributes:
        follower: Follower in whose folder to write; the files that lie there stay.
        version: Version to write.
        shard: Shard to write.
        sources: All old files that hold something of the shard, in the order of shards.
    """

    follower: str
    version: VersionId
    shard: Shard
    sources: tuple[OldShard, ...]


@dataclass(frozen=True, slots=True)
class StoreCut:
    """Step that stores the entry with the new cut; its result is "", or why the store refused it."""

    cut: Cut


@dataclass(frozen=True, slots=True)
class DeleteBeyond:
    """Step that deletes a follower's files of all versions above this number, durably."""

    follower: str
    number: int


Step = ReadChain | Find | Check | Write | StoreCut | DeleteBeyond
Steps = Generator[Step, Any, str]


def must_recut(chain: OuterChain, names: Sequence[str]) -> bool:
    """Returns whether the shards must be cut anew, or an interrupted cut completed, before these followers start."""
    return bool(chain.cut) and chain.agreement is not None and chain.ended is None and _undone(chain, names)


def _undone(chain: OuterChain, names: Sequence[str]) -> bool:
    """Returns whether the shards are cut for other followers, or were cut anew just now, so that files of the former
    cut may be left.
    """
    assert chain.last is not None
    return not chain.cut_for(names) or (isinstance(chain.last.body, Cut) and chain.newest != NO_VERSION)


def needless(chain: OuterChain, name: str, newest: int) -> bool:
    """Returns whether a follower's files, of versions up to this number, are useless: it has no shard, and no durable
    version needs them.
    """
    return name not in chain.cut and newest < chain.safe.number


def recut_steps(job: str, names: Sequence[str]) -> Steps:
    """Yields the steps that cut a job's shards anew for these followers; returns what was done, or "".

    Args:
        job: Name of the job.
        names: Names of the followers from now on; if there are fewer blocks than followers, the last ones get no shard.

    Raises:
        ConfigurationError: Files of a follower that holds a shard are not here.
        StateError: No durable version is whole.
        StoreError: The record is not taken.
    """
    chain: OuterChain = yield ReadChain()
    if not must_recut(chain, names):
        return ""
    if chain.cut_for(names):
        yield from _clear(chain.cut, chain.durable[-1][0].number if chain.durable else 0)
        return "files of the former shards were removed"
    assert chain.agreement is not None
    grid = Grid(tuple(tensor.elements for tensor in chain.agreement.tensors), chain.agreement.block)
    wanted = tuple(names[: grid.blocks])
    durable = []
    for version, sources in (yield from _whole(job, chain, grid)):
        digests = []
        for name, shard in zip(wanted, grid.cut(len(wanted)), strict=True):
            digests.append((yield Write(name, version, shard, _of(sources, shard))))
        durable.append(Durable(version, tuple(digests)))
    if refused := (yield StoreCut(Cut(wanted, tuple(durable)))):
        raise StoreError(f"the shards of job {job} cannot be cut anew: {refused}")
    yield from _clear(wanted, durable[-1].version.number if durable else 0)
    spare = (
        f" ({', '.join(names[grid.blocks :])} stand by: there are {grid.blocks} blocks)" if names[grid.blocks :] else ""
    )
    versions = ", ".join(str(mark.version) for mark in durable) or "nothing, for nothing is durable yet"
    return f"{len(chain.cut)} shards of {', '.join(chain.cut)} were cut anew for {', '.join(wanted)}{spare}: {versions}"


def _whole(
    job: str, chain: OuterChain, grid: Grid
) -> Generator[Step, Any, list[tuple[VersionId, tuple[OldShard, ...]]]]:
    """Returns, oldest first, the durable versions whose files are all undamaged, with these files."""
    old = [*zip(chain.cut, grid.cut(len(chain.cut)), strict=True)]
    for number, (name, _) in enumerate(old):
        if chain.durable and (place := (yield Find(name))):
            raise ConfigurationError(
                f"the shards of job {job} cannot be cut anew: follower {name} holds shard {number} of {len(old)}, and "
                f"there is no folder {place}; copy it here, or go on with {len(old)} followers"
            )
    found, trouble = [], ""
    for version, digests in chain.durable:
        sources = tuple(OldShard(*held, version, digest) for held, digest in zip(old, digests, strict=True))
        for source in sources:
            if wrong := (yield Check(source)):
                trouble = wrong
                break
        else:
            found.append((version, sources))
    if chain.durable and not found:
        raise StateError(f"the shards of job {job} cannot be cut anew: {trouble}")
    return found


def _of(sources: Sequence[OldShard], shard: Shard) -> tuple[OldShard, ...]:
    """Returns the old shards that overlap this shard."""
    return tuple(each for each in sources if each.shard.first < shard.stop and shard.first < each.shard.stop)


def _clear(names: Sequence[str], newest: int) -> Generator[Step, Any, None]:
    """Deletes the files of versions after the cut, which have the old shard boundaries."""
    for name in names:
        if not (yield Find(name)):
            yield DeleteBeyond(name, newest)
