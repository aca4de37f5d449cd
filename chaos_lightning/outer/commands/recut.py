"""Divides a job's state among another number of followers, while no process of its server runs (O15).

Theory of operation. The durable versions lie in the followers' files. From these the new shards are put together and
written as files of the new followers, beside the old ones. Once all are on disk, one record names the new followers and
the digests of their shards: from then on they rule, and a moment before the old ones do. So whoever dies at whatever
instant leaves a job that goes on, by the cut that its chain has; a second try writes the same files again. What is done
in which order is decided in outer/rules/recut_steps.py; here it is done.

Versions beyond the newest durable one are computed again, as after any restart, from pushes that their clusters keep
and offer again. What followers had saved of such versions goes behind the record. The old files of durable versions go
when later marks let followers delete them (O6), and those of followers that have no shard any more at a later start of
the server (outer/commands/server_main.py), which runs this as a process of its own: that keeps torch out of the
supervisor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

import torch

from chaos_lightning.errors import ChaosError, ConfigurationError, StateError
from chaos_lightning.machine.terminal import printable
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.follower.shard_files import TENSORS, ShardFiles
from chaos_lightning.outer.rules import recut_steps as todo
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.types import Counters, Cut
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import End, Store


class _Cutter:
    """Carries out the steps of `recut_steps` on a chain's store and the followers' folders."""

    def __init__(self, store: Store, folder: Path, job: str) -> None:
        self._store, self._folder, self._job = store, folder, job
        self._end = End()
        self._files: dict[str, ShardFiles] = {}

    def do(self, step: todo.Step) -> Any:
        """Carries out one step; returns its result."""
        match step:
            case todo.ReadChain():
                return self._take_term()
            case todo.Find(follower):
                place = self._folder / follower
                return "" if place.is_dir() else str(place)
            case todo.Check(source):
                return self._check(source)
            case todo.Write(follower, version):
                state, counters = self._put_together(step)
                return self._of(follower).save(version, state, counters, beside=True)
            case todo.StoreCut(cut):
                outcome = self._store.append(Cut.__name__, body_bytes(cut), self._end)
                return "" if outcome.ok else outcome.detail
            case todo.DeleteBeyond(follower, number):
                return self._of(follower).delete_beyond(number)
            case _:
                assert_never(step)

    def _take_term(self) -> OuterChain:
        self._end = self._store.take_term()
        return load_chain(self._store)  # with what a leader that was ending wrote until then, a mark perhaps

    def _of(self, follower: str) -> ShardFiles:
        if follower not in self._files:
            self._files[follower] = ShardFiles(self._folder / follower, self._job)
        return self._files[follower]

    def _check(self, source: todo.OldShard) -> str:
        try:
            self._of(source.follower).load(source.version, source.digest)
        except StateError as error:
            return str(error)
        return ""

    def _put_together(self, write: todo.Write) -> tuple[OuterState, Counters]:
        tensors = torch.empty(len(TENSORS), write.shard.elements).unbind()
        first, stop = write.shard.span
        counters = Counters()
        for source in write.sources:
            state, counters = self._of(source.follower).load(source.version, source.digest)
            start = source.shard.span[0]
            begin, end = max(first, start), min(stop, source.shard.span[1])
            for mine, its in zip(tensors, state.tensors, strict=True):
                mine[begin - first : end - first] = its[begin - start : end - start]
        return OuterState(write.shard, *tensors), counters


def recut(store: Store, folder: Path, job: str, names: Sequence[str]) -> str:
    """Divides the job's state into shards for these followers, if the number of followers has changed; returns a
    description of what was done, else "".

    Args:
        store: Store of the job's chain; no other process writes to it.
        folder: Folder that contains each follower's folder, by its name.
        job: Name of the job.
        names: Names of the followers from now on; if there are fewer blocks than followers, the last ones get no shard.

    Raises:
        ConfigurationError: Files of a follower that holds a shard are not here.
        StateError: No durable version is whole, or the new files cannot be written.
        StoreError: The chain cannot be read, or does not take the record.
    """
    if not todo.must_recut(load_chain(store), names):
        return ""
    cutter, steps = _Cutter(store, folder, job), todo.recut_steps(job, names)
    came: Any = None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return str(end.value)
        came = cutter.do(step)


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m chaos_lightning.outer.commands.recut STORE JOB FOLDER FOLLOWER...`; returns the exit code."""
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
