"""Tests the local etcd servers: one that ends is restarted, or given up with its last words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_for_tests import servers
from until_support import until

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service.etcd_servers import MOST_QUICK, EtcdServer, EtcdServers, find_etcd

PATIENCE_S = 60.0
ALWAYS_S = 600.0
"""Seconds within which an end counts as one at once, on the slowest machine."""


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Occupies a port within the block."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
        yield


def ends(server: EtcdServer) -> None:
    assert server.process is not None
    server.process.wait(PATIENCE_S)


def test_one_that_ends_at_once_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as one:
        (server,) = one.servers
        assert one.tend() == [], "it runs"
        one.kill(server)
        with taken(server.client_port):
            told = []
            for _ in range(MOST_QUICK - 1):
                ends(server)
                told += one.tend(ALWAYS_S)
            ends(server)
            with pytest.raises(StoreError) as caught:
                one.tend(ALWAYS_S)
        assert "etcd-1 has ended by signal 9 after" in told[0]
        assert "and is started again" in told[0]
        assert "address already in use" in told[1]
        said = str(caught.value)
        assert f"etcd-1 at {server.endpoint} has ended 3 times in a row within 600 s" in said
        assert "its last words: listen tcp" in said.lower()
        assert "address already in use. Everything that it said is in" in said
        assert str(server.log) in said
        assert not server.running()


def test_one_that_ran_well_is_started_again_however_often_it_is_killed(tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as one:
        (server,) = one.servers
        for _ in range(MOST_QUICK + 1):
            one.kill(server)
            assert len(one.tend(quick_s=0.0)) == 1
        assert server.running()
        one.kill(server)
        one.tend(ALWAYS_S)
        assert server.restarts.failures == 1
        one.kill(server)
        one.tend(quick_s=0.0)
        assert server.restarts.failures == 0, "in a row"
        one.wait_ready(PATIENCE_S)


def test_ready_means_every_one_of_them(tmp_path: Path) -> None:
    """`wait_ready` waits for every server, since a slow one may be missing from the majority when the next is
    killed.
    """
    with servers(tmp_path / "etcd", 3) as three:
        frozen = three.servers[1]
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match=r"etcd-2 did not answer within 2 s: "):
                three.wait_ready(2.0)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        three.wait_ready(PATIENCE_S)
        for server in three.servers:
            three.kill(server)
            three.run(server)
            three.wait_ready(PATIENCE_S)


def test_a_port_that_is_taken_from_the_start_is_told_in_etcds_own_words(tmp_path: Path) -> None:
    with servers(tmp_path / "etcd", 1) as one:
        port = one.servers[0].client_port
    again = EtcdServers(tmp_path / "etcd", 1)
    words = r"etcd-1 ended at once: listen tcp .*address already in use \(.*etcd.log\)"
    with taken(port), pytest.raises(StoreError, match=words), again:
        pass


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("2026-11-22 10:00:00.4 C | etcdmain: error listing data dir: d", "error listing data dir: d"),
        (json.dumps({"level": "fatal", "msg": "discovery failed", "error": "no"}), "discovery failed: no"),
        ("panic: tocommit(5) is out of range\n\ngoroutine 1 [running]:\nmain.main()", "panic: tocommit(5) is out of"),
        ("flag provided but not defined: -nosuch", "flag provided but not defined: -nosuch"),
        ("[]\n{}\nx", "[] | {} | x"),
        ("", "nothing"),
    ],
)
def test_last_words(tmp_path: Path, said: str, words: str) -> None:
    server = EtcdServer("etcd-1", tmp_path, 1, 2)
    server.log.write_text(said)
    assert server.last_words().startswith(words)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_command_gives_up_and_says_why(tmp_path: Path) -> None:
    try:
        find_etcd()
    except ConfigurationError as error:
        pytest.skip(str(error))
    folder = tmp_path / "etcd"
    command = [sys.executable, "-m", "chaos_lightning.cli", "etcd", "up", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert "Ctrl+C ends them" in process.stdout.readline()
            (server,) = children(process.pid)
            with contextlib.ExitStack() as stack:
                os.kill(server, signal.SIGKILL)
                until(lambda: server not in children(process.pid) or take(stack, folder), "the port of the dead one")
                said = process.stdout.read()
                assert process.wait(PATIENCE_S) == 1
        finally:
            process.terminate()  # which ends the servers, too
    assert "etcd-1 has ended by signal 9" in said
    assert "address already in use" in said
    assert "is not started again" in " ".join(said.split())


def take(stack: contextlib.ExitStack, folder: Path) -> bool:
    """Tries to occupy the port of the server whose folder this is; returns whether it was free."""
    with contextlib.suppress(OSError):
        stack.enter_context(taken(json.loads((folder / "ports.json").read_text())[0]))
        return True
    return False
