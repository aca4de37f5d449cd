"""Tests the messages about etcd's faults: addresses, passwords, certificates, disks and clocks."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import json
import os
import queue
import signal
import socket
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from chain_support import decide, etcd_chain
from etcd_certificates import Authority, etcd_with_tls, words_of
from etcd_for_tests import servers

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.protocol.types import NO_VIEW, ViewId
from chaos_lightning.service import election as election_module
from chaos_lightning.service import etcd_client, etcd_store
from chaos_lightning.service.election import Candidate, Election, now
from chaos_lightning.service.etcd_address import EtcdAddress, read_address
from chaos_lightning.service.etcd_client import EtcdClient, delete, open_client, put
from chaos_lightning.service.etcd_servers import EtcdServers

PATIENCE_S = 30.0


@pytest.fixture
def job() -> str:
    return f"job-{os.urandom(4).hex()}"


# ------------------------------------------------------------------------------------------------ who is there


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Yields HOST:PORT of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_nobody_listens_at_a_wrong_port() -> None:
    (port,) = free_ports(1)
    assert "nobody listens there (connection refused)" in words_of(f"etcd://127.0.0.1:{port}", 0.5)


def test_a_name_that_nobody_knows() -> None:
    assert "nowhere.invalid:2379: this name is not known" in words_of("etcd://nowhere.invalid", 0.5)


def test_a_web_server_is_no_etcd() -> None:
    class Page(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert "a web server answers there, no etcd" in words_of(f"etcd://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_another_grpc_service_is_no_etcd() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "another kind of service listens, no etcd" in words_of(f"etcd://127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


@pytest.mark.slow
def test_each_server_is_told_of_by_name() -> None:
    (port,) = free_ports(1)
    with black_hole() as frozen:
        words = words_of(f"etcd://{frozen},127.0.0.1:{port}", 2.5)
    assert f"127.0.0.1:{port}: nobody listens" in words
    assert f"{frozen}: no answer" in words
    assert "it is frozen or cut off, or no etcd" in words


@pytest.mark.usefixtures("each_client")
def test_servers_that_accept_and_never_answer_are_passed_by(etcd: EtcdServers, job: str, each_client: str) -> None:
    with black_hole() as one, black_hole() as other:
        address = EtcdAddress(servers=(one, etcd.servers[0].endpoint, other), client=each_client)
        client = open_client(address)
        client._servers.sort(key=lambda s: s.name != one)
        with etcd_chain(client, job) as chain:
            chain.take_term()
            client._now = 0
            began = time.monotonic()
            assert chain.append(decide(ViewId(1, 1))).ok
            assert time.monotonic() - began < 2.5, "a part of the deadline for each of two servers at most"
            _, revision = client.get_all(f"{job}/")
            client._now = 0
            stop = threading.Event()
            seen: list[bytes] = []

            def watch() -> None:
                for events in client.watch(f"{job}/", revision + 1, stop):
                    seen.extend(e.kv.key for e in events)
                    if seen:
                        return

            watcher = threading.Thread(target=watch)
            watcher.start()
            with contextlib.closing(etcd.client()) as writer:
                writer.transact([], [put(f"{job}/hole", b"seen")])
            watcher.join(PATIENCE_S)
            stop.set()
            assert seen == [f"{job}/hole".encode()]


@pytest.mark.usefixtures("each_client")
def test_a_watch_leaves_a_server_that_froze(etcd_of_three: EtcdServers, each_client: str) -> None:
    """A watch leaves a frozen server soon, once another call has noticed it, and not only after gRPC's keepalive."""
    client = etcd_of_three.client()
    stop, began, seen = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        for events in client.watch("thaw/", revision + 1, stop, every_s=0.05):
            began.set()
            if events:
                seen.set()
                return

    with contextlib.closing(client):
        client._servers.sort(key=lambda s: s.name != etcd_of_three.servers[0].endpoint)
        leader = etcd_of_three.leader()
        client._servers.sort(key=lambda s: s.name == leader.endpoint)  # no election is needed in this test
        first = next(s for s in etcd_of_three.servers if s.endpoint == client._servers[0].name)
        _, revision = client.get_all("thaw/")
        watcher = threading.Thread(target=watch)
        watcher.start()
        assert began.wait(PATIENCE_S)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            frozen = time.monotonic()
            client.transact([], [put("thaw/it", b"")])
            assert seen.wait(PATIENCE_S)
            assert time.monotonic() - frozen < 6.0
        finally:
            stop.set()
            os.kill(first.pid, signal.SIGCONT)
            watcher.join(PATIENCE_S)


# ------------------------------------------------------------------------------------------------ passwords


def auth(server: str, what: str, **fields: str) -> None:
    """Sends a request about users and roles to etcd's JSON gateway."""
    request = urllib.request.Request(f"http://{server}/v3/auth/{what}", json.dumps(fields).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Etcd server with passwords: user root may do everything, user ann nothing."""
    with servers(tmp_path_factory.mktemp("locked"), 1) as made:
        server = made.servers[0].endpoint
        for user in ("root", "ann"):
            auth(server, "user/add", name=user, password=f"{user}'s")
        auth(server, "role/add", name="root")
        auth(server, "user/grant", user="root", role="root")
        auth(server, "enable")
        yield server


def with_password(server: str, user: str, password: str, folder: Path) -> str:
    (folder / "password").write_text(password + "\n")
    return f"etcd://{user}@{server}/mine?password-file={folder / 'password'}"


@pytest.mark.parametrize("kind", ["own", pytest.param("etcd3", marks=pytest.mark.slow)])
def test_the_right_password_lets_in_and_tokens_are_renewed(locked: str, tmp_path: Path, job: str, kind: str) -> None:
    from etcd_for_tests import need_client

    address = with_password(locked, "root", "root's", tmp_path) + f"&client={need_client(kind)}"
    client = open_client(read_address(address))
    with etcd_chain(client, job) as chain:
        chain.take_term()
        assert chain.append(decide(ViewId(1, 1))).ok
        if kind == "own":
            client._first._token = "no-token.7"  # type: ignore[attr-defined]
        assert [v.id for v in chain.load().views] == [ViewId(1, 1)]
        lease, _ = client.grant(5)
        assert client.keep_alive(lease, 5.0) > 0
        assert chain.store.wait(0, 1.0)
        client.revoke(lease)


@pytest.mark.parametrize("kind", ["own", pytest.param("etcd3", marks=pytest.mark.slow)])
def test_a_watch_with_a_token_that_is_no_longer_valid_gets_another(
    locked: str, tmp_path: Path, job: str, kind: str
) -> None:
    """A watch whose token has expired gets a new token by itself, although etcd only reports it as cancelled."""
    from etcd_for_tests import need_client

    address = with_password(locked, "root", "root's", tmp_path) + f"&client={need_client(kind)}"
    client, writer = open_client(read_address(address)), open_client(read_address(address))
    with contextlib.closing(client), contextlib.closing(writer):
        _, revision = client.get_all(f"mine/{job}")
        if kind == "own":
            client._first._token = "no-token.7"  # type: ignore[attr-defined]
        else:
            client._first._open().metadata = (("token", "no-token.7"),)  # type: ignore[attr-defined]
        writer.transact([], [put(f"mine/{job}", b"seen")])
        stop, deadline = threading.Event(), time.monotonic() + PATIENCE_S
        for events in client.watch(f"mine/{job}", revision + 1, stop):
            if events or time.monotonic() > deadline:
                break
        assert [e.kv.value for e in events] == [b"seen"]


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("root", "wrong", "does not let user 'root' in; look at the password in"),
        ("bob", "root's", "does not let user 'bob' in; look at the password in"),
        ("ann", "ann's", "user 'ann' may not read and write keys below mine/; grant it: etcdctl role grant-permission"),
    ],
)
def test_a_wrong_password_is_told_at_once(locked: str, tmp_path: Path, user: str, password: str, words: str) -> None:
    began = time.monotonic()
    said = words_of(with_password(locked, user, password, tmp_path), 20.0)
    assert words in said
    assert password not in said.replace(str(tmp_path), "").replace(user, "")
    assert time.monotonic() - began < 5


def test_no_password_where_one_is_demanded_and_one_where_none_is(
    locked: str, etcd: EtcdServers, tmp_path: Path
) -> None:
    assert "demands a password; write etcd://USER@" in words_of(f"etcd://{locked}")
    said = words_of(with_password(etcd.servers[0].endpoint, "ann", "ann's", tmp_path))
    assert "it has no passwords, and lets everybody in; leave ann@ and password-file= out" in said


def test_a_password_file_that_holds_no_text(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="holds no text"):
        EtcdClient(read_address(f"etcd://ann@a?password-file={tmp_path / 'password'}"))


# ------------------------------------------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def day(offset: int) -> str:
    return f"{datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=offset):%Y-%m-%d}"


@pytest.mark.parametrize("kind", ["own", pytest.param("etcd3", marks=pytest.mark.slow)])
def test_tls_both_ways(tmp_path: Path, authority: Authority, job: str, kind: str) -> None:
    from etcd_for_tests import need_client

    need_client(kind)
    mine = authority.issue("me")
    mutual = ("--client-cert-auth", "--trusted-ca-file", str(authority.file))
    with etcd_with_tls(tmp_path, authority.issue("server"), *mutual) as server:
        given = f"ca={authority.file}&cert={mine}&key={mine.with_suffix('.key')}&client={kind}"
        with etcd_chain(open_client(read_address(f"etcd://{server}?{given}")), job) as chain:
            chain.take_term()
            assert chain.append(decide(ViewId(1, 1))).ok
            assert chain.store.wait(0, 1.0)
        assert "it demands a client's certificate: write &cert=" in words_of(f"etcd://{server}?ca={authority.file}")
        stranger = Authority(tmp_path, "stranger").issue("guest")
        given = f"ca={authority.file}&cert={stranger}&key={stranger.with_suffix('.key')}"
        assert f"does not accept the certificate in {stranger}" in words_of(f"etcd://{server}?{given}")


def test_a_servers_certificate_that_expired_is_told_with_its_day(tmp_path: Path, authority: Authority) -> None:
    with etcd_with_tls(tmp_path, authority.issue("old", days=(-30, -3))) as server:
        words = words_of(f"etcd://{server}?ca={authority.file}")
    assert f"{server}: its certificate expired on {day(-3)}" in words


@pytest.mark.slow
def test_a_servers_certificate_for_other_names_or_of_another_authority(tmp_path: Path, authority: Authority) -> None:
    certificate = authority.issue("elsewhere", names=("db.example.org", "10.9.8.7"))
    with etcd_with_tls(tmp_path, certificate) as server:
        words = words_of(f"etcd://{server}?ca={authority.file}")
    assert "its certificate is made for db.example.org, 10.9.8.7, not for 127.0.0.1" in words
    other = Authority(tmp_path, "other")
    with etcd_with_tls(tmp_path / "other-etcd", authority.issue("server")) as server:
        assert f"not signed by the certificate authority in {other.file}" in words_of(
            f"etcd://{server}?ca={other.file}"
        )
        assert "it speaks TLS: write ?ca=FILE" in words_of(f"etcd://{server}")


def test_tls_where_etcd_speaks_none(etcd: EtcdServers, authority: Authority) -> None:
    words = words_of(f"etcd://{etcd.servers[0].endpoint}?ca={authority.file}")
    assert "it does not speak TLS: leave ca=, cert= and key= out of the address" in words


def test_ones_own_certificate_is_looked_at_before_anything_starts(tmp_path: Path, authority: Authority) -> None:
    def refused(certificate: Path, words: str) -> None:
        key = certificate.with_suffix(".key")
        address = read_address(f"etcd://a?ca={authority.file}&cert={certificate}&key={key}")
        with pytest.raises(ConfigurationError, match=words):
            EtcdClient(address)

    refused(
        authority.issue("mine-old", days=(-30, -2)), f"mine-old.crt expired on {day(-2)} ..:.. UTC: have it renewed"
    )
    refused(authority.issue("mine-new", days=(2, 30)), f"not valid before {day(2)} ..:.. UTC: is the clock")
    (tmp_path / "no.crt").write_text("hello")
    (tmp_path / "no.key").write_text("hello")
    refused(tmp_path / "no.crt", "holds no certificate in PEM form")


# ------------------------------------------------------------------------------------------------ disks


def maintain(server: str, what: str, **fields: str) -> dict[str, Any]:
    """Sends a maintenance request to etcd's JSON gateway; returns the answer."""
    body = json.dumps(fields).encode()
    request = urllib.request.Request(f"http://{server}/v3/maintenance/{what}", body, method="POST")
    with urllib.request.urlopen(request, timeout=10) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


@pytest.mark.usefixtures("each_client")
def test_a_full_disk_is_told_with_what_to_do_and_after_that_it_goes_on(tmp_path: Path, job: str) -> None:
    try:
        small = EtcdServers(tmp_path / "etcd", 1, options=["--quota-backend-bytes", str(2 << 20)])
    except ConfigurationError as error:
        pytest.skip(str(error))
    with small, contextlib.closing(small.client()) as client, etcd_chain(small.client(), job) as chain:
        chain.take_term()
        last = decide(ViewId(1, 1))
        assert chain.append(last).ok
        with contextlib.suppress(StoreError):
            while True:
                client.transact([], [put("filler", os.urandom(100_000))])
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"training goes on\. Compact its history and defragment") as caught:
            chain.append(decide(ViewId(1, 2), ViewId(1, 1)))
        assert "etcdctl alarm disarm" in str(caught.value)
        assert time.monotonic() - began < 2, "it is told at once, not after all retries"
        assert [v.id.number for v in chain.load().views] == [1]
        _, revision = client.transact([], [delete("filler")])
        client.compact(revision)
        maintain(small.servers[0].endpoint, "defragment")
        for alarm in maintain(small.servers[0].endpoint, "alarm")["alarms"]:
            maintain(small.servers[0].endpoint, "alarm", action="DEACTIVATE", **alarm)
        assert chain.append(decide(ViewId(1, 2), ViewId(1, 1))).ok


# ------------------------------------------------------------------------------------------------ what was missed


@pytest.mark.slow
def test_a_watch_that_catches_up_in_parts_loses_nothing_when_it_breaks(tmp_path: Path) -> None:
    """A watch that is interrupted between two parts of a long history resumes without losing a change."""
    count = 2500
    with servers(tmp_path / "etcd", 1) as one, contextlib.closing(one.client()) as client:
        for number in range(count):
            _, revision = client.transact([], [put(f"many/{number:05d}", b"x")])
        seen: list[bytes] = []
        stop = threading.Event()
        for events in client.watch("many/", revision - count + 1, stop):
            if events and not seen:
                assert len(events) < count, "it came in one part; the test shows nothing"
                one.kill(one.servers[0])
                one.run(one.servers[0])
            seen += [e.kv.key for e in events]
            if seen and seen[-1] == f"many/{count - 1:05d}".encode():
                break
        assert sorted(set(seen)) == [f"many/{n:05d}".encode() for n in range(count)]


# ------------------------------------------------------------------------------------------------ clocks


def test_a_wall_clock_that_jumps_changes_nothing(etcd: EtcdServers, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jumps of the wall clock neither end a lease nor stop the chain, since both use other clocks and revisions."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    with contextlib.closing(etcd.client()) as client, etcd_chain(etcd.client(), job) as chain:
        election = Election(
            client,
            job,
            Candidate.here("a:1"),
            on_elected=lambda guard: said.put("elected"),
            on_lost=lambda reason: said.put(reason),
        )
        election.start()
        try:
            assert said.get(timeout=PATIENCE_S) == "elected"
            chain.take_term()
            for number, jump_s in enumerate((+1e9, -1e9, 0.0), 1):
                jumped = types.SimpleNamespace(**{**vars(time), "time": lambda jump_s=jump_s: time.time() + jump_s})
                for module in (etcd_store, etcd_client, election_module):  # gRPC asks Python's clock and C's
                    monkeypatch.setattr(module, "time", jumped)
                assert chain.append(decide(ViewId(1, number), ViewId(1, number - 1) if number > 1 else NO_VIEW)).ok
                granted_s = election._granted_s
                deadline = time.monotonic() + PATIENCE_S
                prolonged = election._until
                while election._until == prolonged and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert 0 < election._until - now() <= granted_s
            assert election.leads
            assert said.empty()
            assert [v.id.number for v in chain.load().views] == [1, 2, 3]
        finally:
            election.resign(PATIENCE_S)
