"""Cutting a job's shards for another number of followers: whenever a process dies meanwhile, the job goes on (O15)."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recut_support import GRID, Stopped

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.outer.commands import recut as recutting
from chaos_lightning.outer.commands.export import read_version, read_while_it_runs
from chaos_lightning.outer.commands.recut import recut
from chaos_lightning.outer.commands.server_main import followers_of
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.exchange.vocabulary import body_bytes
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.types import Durable, Started
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.sqlite_store import SqliteStore


class Killed(BaseException):
    """Stands for SIGKILL: raised at a step, and caught by no cleanup code."""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Stopped]:
    def make(followers: int) -> Stopped:
        shelf = Shelf()
        return Stopped(tmp_path / "job", followers, lambda: MemoryStore("job", shelf))

    return make


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2), (1, 100)])
def test_both_durable_versions_are_cut_anew(job: Callable[..., Stopped], before: int, after: int) -> None:
    stopped = job(before)
    first = stopped.chain.cut
    words = stopped.cut(after)
    assert f"{before} shards of follower-0" in words
    chain = stopped.check()
    assert len(chain.cut) == min(after, GRID.blocks)
    assert len(chain.durable) == 2
    for name in {*chain.cut, *first}:
        assert stopped.files(name).look().strange == ()
    assert stopped.cut(after) == "files of the former shards were removed", "if whoever cut them died before it was"
    stopped.put(Started("follower-0", "its start"))
    assert stopped.cut(after) == "", "there is nothing to do any more"
    tensors, _ = read_version(chain, stopped.folder, "job", "newest")
    newest = stopped.contents[chain.durable[-1][0]]
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), newest.theta)
    stopped.cut(before)
    assert stopped.check().cut == first, "and back again, over the files that are still there"


def test_followers_of_other_names_get_the_shards(job: Callable[..., Stopped]) -> None:
    stopped = job(2)
    with stopped.open() as store:
        words = recut(store, stopped.folder, "job", ["other-0", "other-1"])
        assert "cut anew for other-0, other-1" in words
    stopped.put(Started("other-0", "its start"))
    with stopped.open() as store:
        assert recut(store, stopped.folder, "job", ["other-0", "other-1"]) == ""
    assert stopped.now.cut == ("other-0", "other-1")


def test_whoever_dies_between_any_two_steps_leaves_a_job_that_goes_on(
    job: Callable[..., Stopped], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, left = job(2), [0]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def count() -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        def step(*given: Any, **more: Any) -> Any:
            count()
            result = real(*given, **more)
            count()
            return result

        return step

    for owner, name in ((ShardFiles, "save"), (ShardFiles, "delete_beyond"), (MemoryStore, "append")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    deaths = 0
    while True:
        left[0] = deaths + 1
        try:
            stopped.cut(3)
            break
        except Killed:
            deaths += 1
        behind = len(stopped.check(cleared=False).cut) == 3
    assert deaths > 10
    assert behind, "the last ones died behind the record, and what they left to be removed was removed"
    assert len(stopped.check().durable) == 2


def test_what_a_leader_that_was_ending_still_marked_is_cut_anew(
    job: Callable[..., Stopped], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, true = job(1), MemoryStore.take_term
    late = Durable(stopped.chain.newest, stopped.save(stopped.chain.newest, 1))

    def take_term(store: MemoryStore, *given: Any) -> Any:
        monkeypatch.setattr(MemoryStore, "take_term", true)
        assert store.append(Durable.__name__, body_bytes(late), true(store)).ok
        return true(store, *given)

    monkeypatch.setattr(MemoryStore, "take_term", take_term)
    stopped.cut(2)
    assert [version for version, _ in stopped.check().durable] == [stopped.chain.durable[-1][0], late.version]


def test_a_follower_whose_files_are_elsewhere_is_named(job: Callable[..., Stopped]) -> None:
    stopped = job(3)
    (stopped.folder / "follower-1").rename(stopped.folder.parent / "elsewhere")
    with pytest.raises(ConfigurationError, match="follower follower-1 holds shard 1 of 3"):
        stopped.cut(2)
    (stopped.folder.parent / "elsewhere").rename(stopped.folder / "follower-1")
    stopped.check()
    assert stopped.cut(2)


def test_of_a_damaged_version_the_one_before_is_cut_anew(job: Callable[..., Stopped]) -> None:
    stopped = job(2)
    (older, _), (newest, _) = stopped.chain.durable
    path = stopped.files("follower-1").path(newest)
    path.write_bytes(path.read_bytes()[:-1])
    stopped.cut(3)
    assert [version for version, _ in stopped.check().durable] == [older]
    assert newest not in {file.version for file in stopped.files("follower-0").look().whole}
    for name in stopped.now.cut:
        for file in stopped.files(name).folder.iterdir():
            file.unlink()
    with pytest.raises(StateError, match="cannot be cut anew"):
        stopped.cut(1)


def test_a_job_of_which_nothing_is_durable_yet_is_cut_anew_too(tmp_path: Path) -> None:
    shelf = Shelf()
    stopped = Stopped(tmp_path, 2, lambda: MemoryStore("job", shelf), durable=False)
    assert "nothing is durable yet" in stopped.cut(1)
    assert (stopped.check().cut, stopped.now.durable) == (("follower-0",), [])


def test_a_server_cuts_anew_only_for_a_number_that_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    stopped = Stopped(folder, 3, lambda: SqliteStore(folder / "chain.sqlite", "job"))
    given = {"dir": str(folder), "job": "job", "store": str(folder / "chain.sqlite")}
    assert followers_of(ServerOptions(**given)) == ["follower-0", "follower-1", "follower-2"]
    assert stopped.now.position == stopped.chain.position
    monkeypatch.setattr("subprocess.run", lambda command, **_: _in_this_process(command))
    assert followers_of(ServerOptions(followers=2, **given)) == ["follower-0", "follower-1"]
    assert "3 shards of follower-0, follower-1, follower-2 were cut anew" in capsys.readouterr().out
    assert stopped.check().cut == ("follower-0", "follower-1")
    stopped.save(stopped.chain.newest, 1, 3)
    assert followers_of(ServerOptions(**given)) == ["follower-0", "follower-1"]
    assert "were removed" in capsys.readouterr().out, "as if it had died behind the record"
    stopped.check()
    old = stopped.files("follower-2").folder
    assert len([*old.iterdir()]) == 2, "the old files stay"
    for _ in range(3):
        stopped.round()
        stopped.put(Durable(stopped.chain.newest, stopped.save(stopped.chain.newest, 2)))
    assert followers_of(ServerOptions(**given)) == ["follower-0", "follower-1"]
    assert [*old.iterdir()] == [], "until no durable version needs them"
    (folder / "follower-1").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="follower follower-1 holds shard 1 of 2"):
        followers_of(ServerOptions(followers=3, **given))


def _in_this_process(command: list[str]) -> Any:
    """Runs the command that cuts shards in this process, as a process of its own would import torch for seconds."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = recutting.main(command[3:])
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def test_an_export_begins_anew_where_files_went_since_the_chain_was_read(job: Callable[..., Stopped]) -> None:
    stopped = job(2)
    before = stopped.chain
    for _ in range(2):
        stopped.round()
        stopped.put(Durable(stopped.chain.newest, stopped.save(stopped.chain.newest, 2)))
    for version, _ in before.durable:
        for name in before.cut:
            stopped.files(name).delete(version)
    chains = iter([before, stopped.now])
    found, tensors, _ = read_while_it_runs(lambda: next(chains), stopped.folder, "job", "newest")
    assert found == stopped.chain.newest
    assert torch.equal(torch.cat([t.reshape(-1) for t in tensors.values()]), stopped.contents[found].theta)

    stopped.files("follower-1").delete(found)
    with pytest.raises(StateError, match="follower-1"):
        read_while_it_runs(lambda: stopped.now, stopped.folder, "job", "newest")
