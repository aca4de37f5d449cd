"""Tests that a user who asks for another number of followers than a job has shards is told so, with the followers that
hold the shards (O15).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outer_served import ScriptedCluster, ScriptedFollower, at_once, outer_serving
from recut_support import Stopped
from until_support import until

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.outer.cluster.server_start import ensure_server
from chaos_lightning.outer.commands import ps
from chaos_lightning.outer.commands.server_main import followers_of
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.exchange.server_options import ServerOptions
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.server import standing
from chaos_lightning.service.memory_store import MemoryStore, Shelf

CUT = "the shards of this job are cut for 2 (follower-0, follower-1); that stays"


def stopped(folder: Path) -> tuple[Stopped, Shelf]:
    """Returns a stopped job of two followers, whose chain is in a store that several processes can open, like etcd."""
    shelf = Shelf()
    return Stopped(folder, 2, lambda: MemoryStore(shelf=shelf)), shelf


def test_a_leader_that_is_given_another_number_than_its_chain_has_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Former bug: a leader that was started for another number of followers than the job's chain has ignored that, and
    told nobody.
    """
    job, shelf = stopped(tmp_path / "files")
    assert [LeaderMachine(job.now, 9, asked).shards.unheeded for asked in (0, 2)] == ["", ""]
    with (
        EventLog.in_directory(str(tmp_path / "log"), "job", role="leader") as log,
        outer_serving(lambda: MemoryStore(shelf=shelf), log=log, followers=3) as served,
    ):
        assert f"3 followers were asked for, and {CUT}" in caplog.text
        assert ps.status([f"--server={served.endpoint}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"note: 3 followers were asked for, and {CUT}" in shown
        assert "waits for follower-0, follower-1: start each where its files are, or copy its folder" in shown
        caplog.clear()
        assert ensure_server(ServerOptions(listen=served.endpoint, followers=3)) is None
        assert caplog.text == ""
        assert ensure_server(ServerOptions(listen=served.endpoint, followers=4)) is None
        assert "with 2 followers and not 4 as asked for here; that stays" in caplog.text
    assert any(CUT in event.get("text", "") for event in read_events(tmp_path / "log") if event.name == "notice")


def test_more_followers_than_the_model_has_blocks_are_told_of(tmp_path: Path) -> None:
    words = "3 followers were asked for, and this model can be cut for 1 at most: the others stand by"
    with (
        EventLog.in_directory(str(tmp_path), "job", role="leader") as log,
        outer_serving(log=log, followers=3) as served,
        at_once(ScriptedFollower(served.endpoint), ScriptedCluster(served.endpoint)),
    ):
        until(lambda: fetch_facts(served.endpoint, b"")["unheeded"] == words, "word of it")
    assert any(words in event.get("text", "") for event in read_events(tmp_path) if event.name == "notice")


def test_with_the_chain_in_etcd_a_follower_with_files_here_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Former bug: with `--followers` below a job's number of shards one follower was not started though its files were
    on the machine, and the job waited for ever.
    """
    _, shelf = stopped(tmp_path)
    monkeypatch.setattr(standing, "open_outer_store", lambda address, job: MemoryStore(shelf=shelf))

    def names(followers: int, folder: Path = tmp_path, name: str = "follower") -> list[str]:
        return followers_of(
            ServerOptions(store="etcd://127.0.0.1:1", dir=str(folder), followers=followers, name=name, job="job")
        )

    with pytest.raises(ConfigurationError, match=r"--followers 1: .* and follower-1, whose files are in"):
        names(1)
    assert names(0) == names(2) == ["follower-0", "follower-1"]
    assert names(3) == ["follower-0", "follower-1", "follower-2"]
    assert names(1, tmp_path / "elsewhere", "b") == names(0, tmp_path / "elsewhere", "b") == ["b-0"]

    def silent(address: str, job: str) -> MemoryStore:
        raise StoreError("etcd does not answer")

    monkeypatch.setattr(standing, "open_outer_store", silent)
    assert names(1) == ["follower-0"]
    assert names(0) == ["follower-0", "follower-1"]
