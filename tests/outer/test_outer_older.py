"""The leader's store is replaced by an older copy: any process that knows more makes the leader end before it decides
anything (O4).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from typing import TypeVar

import pytest
from outer_served import OuterServed, ScriptedCluster, ScriptedFollower, at_once, outer_serving
from until_support import until

from chaos_lightning.machine.listener import free_port
from chaos_lightning.outer.commands import leader_main, server_main
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.types import Round
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.service.sqlite_store import SqliteStore

Who = TypeVar("Who", ScriptedCluster, ScriptedFollower)


class Job:
    """Chain file and port that successive leaders of a job use."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "chain.sqlite"
        self.port = free_port()
        self.place = f"127.0.0.1:{self.port}"

    @contextmanager
    def led(self) -> Iterator[OuterServed]:
        with outer_serving(lambda: SqliteStore(self.store, "default", exclusive=True), port=self.port) as served:
            yield served

    def chain(self) -> OuterChain:
        with SqliteStore(self.store, read_only=True) as store:
            return load_chain(store)

    def has_stored(self, cluster: ScriptedCluster, number: int) -> None:
        """Pushes, and waits until version `number` exists and is durable."""
        until(lambda: cluster.number == number, "the answer to the push before")
        cluster.push()
        version = cluster.served(number)
        until(lambda: fetch_facts(self.place, b"")["versions"]["durable"][-1:] == [str(version)], "a durable mark")

    def again(self, before: Who) -> Who:
        """Returns a copy of this cluster or follower, with all that it knows, on a new stream."""
        other = type(before)(self.place)
        for name in ("nonce", "me", "base", "newest", "term", "job_id", "number", "disk", "version"):
            if hasattr(before, name):
                setattr(other, name, getattr(before, name))
        return other


@pytest.mark.parametrize("who", ["cluster", "follower", "both"])
def test_whoever_knows_more_ends_the_leader_before_it_decides_anything(tmp_path: Path, who: str) -> None:
    job = Job(tmp_path)
    older, newest = tmp_path / "older", tmp_path / "newest"
    follower, cluster = (kind(job.place) for kind in (ScriptedFollower, ScriptedCluster))
    with at_once(follower, cluster):
        with job.led():
            cluster.served(1)
            job.has_stored(cluster, 2)
        copyfile(job.store, older)
        with job.led():
            cluster.heard.wait_for(say.Welcomed, 2)
            job.has_stored(cluster, 3)
            job.has_stored(cluster, 4)
    copyfile(job.store, newest)
    copyfile(older, job.store)
    before = job.chain()
    knowing = {"cluster": (cluster,), "follower": (follower,), "both": (follower, cluster)}[who]
    back = tuple(job.again(each) for each in knowing)
    with job.led() as wrong, at_once(*back):
        reason, failed = wrong.wait_ended()
        for each in back:
            each.states.wait(lambda state: "leads no more" in state and reason in state)
    assert failed
    assert "knows version v4-" in reason
    assert "which this chain lacks: it is an older copy" in reason
    assert "put the newest one in its place" in reason
    after = job.chain()
    assert (after.position, after.hash, after.newest) == (before.position, before.hash, before.newest)

    copyfile(newest, job.store)
    follower, cluster = job.again(follower), job.again(cluster)
    with job.led(), at_once(follower, cluster):
        cluster.served(4)
        job.has_stored(cluster, 5)
    chain = job.chain()
    rounds = [version.entry.body for version in chain.line() if isinstance(version.entry.body, Round)]
    counted = sorted(push for body in rounds for push in (weighed.offer.push for weighed in body.accepted))
    assert [push.number for push in counted] == [2, 3, 4, 5]
    assert len(set(counted)) == 4


def test_a_chain_of_an_older_format_is_refused_with_both_formats_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    follower, cluster = ScriptedFollower(job.place), ScriptedCluster(job.place)
    with job.led(), at_once(follower, cluster):
        cluster.served(1)
    with contextlib.closing(sqlite3.connect(job.store)) as store:
        store.execute("UPDATE job SET format = 3")
        store.commit()
    before = job.store.read_bytes()
    for main, arguments in (
        (leader_main.main, [f"--listen={job.place}", f"--store={job.store}"]),
        (server_main.main, [f"--listen={job.place}", f"--store={job.store}", f"--dir={tmp_path / 'files'}"]),
    ):
        assert main(arguments) != 0
        said = capsys.readouterr().err
        assert f"{job.store} has format 3, this version reads 4; finish the job with the version that began it" in said
    assert job.store.read_bytes() == before
    assert not (tmp_path / "files").exists()
