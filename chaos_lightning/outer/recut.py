"""A job's shards cut anew, for another number of followers: while no process of its server runs (O15).

Theory of operation. The durable versions lie in the followers' files. From these the new shards are put together and
written as files of the new followers, beside the old ones. Once all are on disk, one record names the new followers and
the digests of their shards: from then on they rule, and a moment before the old ones do. So whoever dies at whatever
instant leaves a job that goes on, by the cut that its chain has; a second try writes the same files again.

Versions beyond the newest durable one are computed again, as after any restart, from pushes that their clusters keep
and offer again. So files that old followers had saved of such versions go first: they are of shards that will not be
there any more. The old files of durable versions go when later marks let followers delete them (O6), and those of
followers that have no shard any more at a later start of the server (outer/server_main.py), which runs this as a
process of its own: that keeps torch out of the supervisor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from chaos_lightning.control.scheduler_main import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from chaos_lightning.control.sqlite_store import SqliteStore
from chaos_lightning.control.store import Store
from chaos_lightning.errors import ChaosError, ConfigurationError, StateError, StoreError
from chaos_lightning.machine.terminal import printable
from chaos_lightning.outer.chain import OuterChain
from chaos_lightning.outer.chain_store import load_chain
from chaos_lightning.outer.grid import Grid, Shard
from chaos_lightning.outer.kernel import OuterState
from chaos_lightning.outer.shard_files import TENSORS, ShardFiles
from chaos_lightning.outer.types import Counters, Cut, Durable, VersionId
from chaos_lightning.outer.vocabulary import body_bytes


class _OldShards:
    """What the followers so far have on this machine."""

    def __init__(self, chain: OuterChain, folder: Path, job: str, grid: Grid) -> None:
        self._shards = grid.cut(len(chain.cut))
        self.files: list[ShardFiles] = []
        for number, name in enumerate(chain.cut):
            if chain.durable and not (folder / name).is_dir():
                raise ConfigurationError(
                    f"the shards of job {job} cannot be cut anew: follower {name} holds shard {number} of "
                    f"{len(chain.cut)}, and there is no folder {folder / name}; copy it here, or go on with "
                    f"{len(chain.cut)} followers"
                )
            self.files.append(ShardFiles(folder / name, job))

    def whole(self, version: VersionId, digests: Sequence[str]) -> str:
        """Why this version cannot be had; "" if all its shards are whole."""
        try:
            for files, digest in zip(self.files, digests, strict=True):
                files.load(version, digest)
        except StateError as error:
            return str(error)
        return ""

    def shard(self, version: VersionId, digests: Sequence[str], wanted: Shard) -> tuple[OuterState, Counters]:
        """A new shard of this version, put together."""
        tensors = torch.empty(len(TENSORS), wanted.elements).unbind()
        first, stop = wanted.span
        counters = Counters()
        for files, old, digest in zip(self.files, self._shards, digests, strict=True):
            begin, end = max(first, old.span[0]), min(stop, old.span[1])
            if begin < end:
                state, counters = files.load(version, digest)
                for mine, its in zip(tensors, state.tensors, strict=True):
                    mine[begin - first : end - first] = its[begin - old.span[0] : end - old.span[0]]
        return OuterState(wanted, *tensors), counters


def recut(store: Store, folder: Path, job: str, names: Sequence[str]) -> str:
    """Cuts the shards for these followers, if there were another number of them; returns what was done, or "".

    Args:
        store: Of the job's chain; nobody else writes to it.
        folder: Has a folder for each follower, by its name.
        job: Its name.
        names: Of the followers from now on; of the last ones no shard is left if there are fewer blocks.

    Raises:
        ConfigurationError: Files of a follower that holds a shard are not here.
        StateError: No durable version is whole, or the new files cannot be written.
        StoreError: The chain cannot be read, or does not take the record.
    """
    chain = load_chain(store)
    if not chain.cut or chain.agreement is None or chain.ended is not None:
        return ""
    grid = Grid(tuple(tensor.elements for tensor in chain.agreement.tensors), chain.agreement.block)
    wanted = tuple(names[: grid.blocks])
    if chain.cut_for(names):
        return ""
    end = store.take_term()
    chain = load_chain(store)  # what a leader that was ending wrote until then, a mark perhaps
    old = _OldShards(chain, folder, job, grid)
    marks = [(version, digests, old.whole(version, digests)) for version, digests in chain.durable]
    whole = [(version, digests) for version, digests, trouble in marks if not trouble]
    if marks and not whole:
        raise StateError(f"the shards of job {job} cannot be cut anew: {marks[-1][2]}")
    new = [ShardFiles(folder / name, job) for name in wanted]
    newest = chain.durable[-1][0].number if chain.durable else 0
    for files in (*old.files, *new):
        files.delete_beyond(newest)
    durable = []
    for version, digests in whole:
        made = []
        for files, shard in zip(new, grid.cut(len(wanted)), strict=True):
            state, counters = old.shard(version, digests, shard)
            made.append(files.save(version, state, counters, beside=True))
        durable.append(Durable(version, tuple(made)))
    outcome = store.append(Cut.__name__, body_bytes(Cut(wanted, tuple(durable))), end)
    if not outcome.ok:
        raise StoreError(f"the shards of job {job} cannot be cut anew: {outcome.detail}")
    versions = ", ".join(str(mark.version) for mark in durable) or "nothing, for nothing is durable yet"
    return f"{len(chain.cut)} shards of {', '.join(chain.cut)} were cut anew for {', '.join(wanted)}: {versions}"


def main(arguments: Sequence[str]) -> int:
    """`python -m chaos_lightning.outer.recut STORE JOB FOLDER FOLLOWER...`; returns the exit code."""
    store, job, folder, *names = arguments
    try:
        with SqliteStore(store, job, exclusive=True) as opened:
            print(recut(opened, Path(folder), job, names))
    except ChaosError as error:
        print(printable(str(error)), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
