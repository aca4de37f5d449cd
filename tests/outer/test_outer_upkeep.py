"""When the folders of ended outer jobs are deleted (outer/server/ended_folders.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from outer_served import AGREEMENT

from chaos_lightning.events.events import FORGOTTEN_S
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Body,
    Cut,
    Ended,
    IncarnationId,
    JobOpened,
    Joined,
    ProcessPlace,
    Started,
)
from chaos_lightning.outer.server.ended_folders import CHAIN, clean_up, ended_folders
from chaos_lightning.service.sqlite_store import FileLock, SqliteStore

JOB = "outer-default-29470"


def folder(path: Path, *, process: ProcessPlace | None = None, ended: bool = True, days: float = 31.0) -> Path:
    """Makes the folder of a job with one follower and one cluster, last written `days` days ago."""
    bodies: list[Body] = [
        JobOpened(AGREEMENT, "home at a test", "n"),
        Started("f0", "n"),
        Cut(("f0",)),
        Joined(IncarnationId("home", 1), "a test", process=process),
    ]
    chain = OuterChain()
    shards = path / "f0" / "default"
    shards.mkdir(parents=True)
    (shards / "v1-abc.safetensors").write_bytes(b"shard" * 1000)
    with SqliteStore(path / CHAIN) as store:
        end = store.take_term()
        for body in [*bodies, Ended(NO_VERSION, "it is over")] if ended else bodies:
            end = store.append(type(body).__name__, body_bytes(body), end).end
            chain.follow(chain.entry(store.term, body))
    then = time.time() - days * 86400.0
    for each in path.rglob("*"):
        os.utime(each, (then, then))
    return path


def own(tmp_path: Path) -> Path:
    place = tmp_path / "chaos-lightning" / JOB
    place.mkdir(parents=True)
    return place


def test_an_ended_jobs_folder_goes_after_a_month_and_is_told_before(tmp_path: Path) -> None:
    """Former bug: folders of ended jobs, with 24 bytes a parameter, were never removed. Now they go after a month, and
    it is announced.
    """
    mine = own(tmp_path)
    old = folder(mine.with_name(f"{JOB}-ended-20260101-000000"))
    young = folder(mine.with_name("outer-default-31000"), days=29.0)
    told = {one.path: one for one in ended_folders(mine)}
    assert told.keys() == {old, young}
    assert told[young].nbytes > 5000
    assert 0 < told[young].goes_at - time.time() < 2 * 86400.0
    assert "of a job that has ended is removed on 20" in told[young].words
    assert [one.path for one in clean_up(mine, time.time())] == [old]
    assert not old.exists()
    assert young.exists()
    assert [one.path for one in clean_up(mine, time.time() + FORGOTTEN_S)] == [young]


def with_an_export(path: Path) -> Path:
    (folder(path) / "model.ckpt").write_bytes(b"exported")
    return path


def with_an_export_among_shards(path: Path) -> Path:
    (folder(path) / "f0" / "default" / "model.ckpt").write_bytes(b"exported")
    return path


def unreadable(path: Path) -> Path:
    (folder(path) / CHAIN).write_bytes(b"no chain")
    return path


@pytest.mark.parametrize(
    "made",
    [
        lambda path: folder(path, ended=False),
        lambda path: folder(path, process=ProcessPlace(host_identity(), os.getpid(), start_time(os.getpid()))),
        with_an_export,
        with_an_export_among_shards,
        unreadable,
    ],
    ids=["a job that goes on", "a cluster that lives", "an export", "an export among shards", "no chain"],
)
def test_what_somebody_may_need_stays(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    mine = own(tmp_path)
    kept = made(mine.with_name("outer-default-31000"))
    assert ended_folders(mine) == []
    assert clean_up(mine, time.time() + 10 * FORGOTTEN_S) == []
    assert kept.exists()


def test_a_cluster_that_is_dead_needs_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        place = ProcessPlace(host_identity(), child.pid, start_time(child.pid))
        mine = own(tmp_path)
        old = folder(mine.with_name("outer-default-31000"), process=place)
        assert ended_folders(mine) == []
        child.kill()
    assert [one.path for one in clean_up(mine, time.time())] == [old]


def test_a_folder_that_is_served_stays(tmp_path: Path) -> None:
    mine = own(tmp_path)
    served = folder(mine.with_name("outer-default-31000"))
    lock = FileLock(served / CHAIN)
    assert lock.take()
    assert clean_up(mine, time.time() + 10 * FORGOTTEN_S) == []
    lock.close()
    assert served.exists()


def test_beside_a_folder_of_the_users_own_only_what_it_put_away_goes(tmp_path: Path) -> None:
    mine = tmp_path / "server"
    mine.mkdir()
    away, other = folder(tmp_path / "server-ended-20260101-000000"), folder(tmp_path / "outer-other-31000")
    assert [one.path for one in clean_up(mine, time.time())] == [away]
    assert other.exists()
