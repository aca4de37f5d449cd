"""Tests the TLS proxy: bytes that are no handshake, slow and many and long connections, and changed keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from keys_support import CHAIN, KEY, TRUSTED, Keys, Refusals, Shown, call, write_keys
from served import PATIENCE_S, Facts, Served, attending, serving
from until_support import until

from chaos_lightning.control.hosting import ensure_scheduler, look
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ConfigurationError, RefusedError
from chaos_lightning.machine.listener import free_port
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Decide, Member, Report, Verdict, View, ViewId, Welcome
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.security.keyfiles import KeyHolder
from chaos_lightning.security.tls_trouble import tls_trouble
from chaos_lightning.service import tls_proxy
from chaos_lightning.service.options import MEMORY


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def scheduler(keys: Keys, refusals: Refusals) -> Iterator[Served]:
    with serving(token=keys.of("a"), log=refusals) as served:
        yield served


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.server.port), timeout=PATIENCE_S)


def context(folder: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(folder / TRUSTED)
    made.load_cert_chain(folder / CHAIN, folder / KEY)
    return made


# ------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it speaks no TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "it speaks no TLS"),
        (b"\x00" * 4096, "it speaks no TLS|TLS: "),
        (b"\x16\x03\x01\x40\x00" + b"\xff" * 0x4000, "TLS: "),
    ],
)
def test_bytes_that_are_no_handshake(said: bytes, reason: str, scheduler: Served, refusals: Refusals) -> None:
    with connect(scheduler) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # ends: the TLS proxy closes
            pass
    ((peer, why),) = refusals.take(some=True)
    assert peer.startswith("ipv4:127.0.0.1:")
    assert any(part in why for part in reason.split("|")), why


def test_who_looks_whether_somebody_listens_is_no_stranger(scheduler: Served, keys: Keys, refusals: Refusals) -> None:
    connect(scheduler).close()
    assert fetch_status(scheduler.endpoint, keys.of("a"))["role"] == "leader"
    assert refusals.take() == []


def test_who_says_nothing_is_not_waited_for(
    scheduler: Served, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_proxy, "HANDSHAKE_TIMEOUT_S", 0.1)
    with connect(scheduler) as sock:
        sock.sendall(b"\x16")
        assert sock.recv(1) == b""
    assert refusals.take(some=True)[0][1] == "no TLS handshake within 0.1 s"


def test_few_handshakes_at_a_time(
    scheduler: Served, keys: Keys, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_proxy, "MAX_HANDSHAKES", 2)
    with connect(scheduler) as first, connect(scheduler) as second, connect(scheduler) as third:
        assert third.recv(1) == b""
        assert refusals.take(some=True)[0][1] == "more than 2 handshakes at once; closed unheard"
        first.close()
        second.close()
    assert fetch_status(scheduler.endpoint, keys.of("a"))["role"] == "leader"


def test_old_tls_is_not_spoken(scheduler: Served, keys: Keys, refusals: Refusals) -> None:
    old = context(keys.at("b"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), connect(scheduler) as sock:
        old.wrap_socket(sock).close()
    assert refusals.take(some=True)[0][1] == "it speaks no TLS 1.3"


def test_tls_that_is_not_grpc_is_turned_away(scheduler: Served, keys: Keys, refusals: Refusals) -> None:
    with connect(scheduler) as sock, context(keys.at("b")).wrap_socket(sock) as tls:
        assert tls.recv(1) == b""
    assert refusals.take(some=True)[0][1] == "it speaks TLS, but is no gRPC client"


# ------------------------------------------------------------------------------------------------ members


def test_long_messages_pass_both_ways_and_the_end_is_noticed(keys: Keys) -> None:
    header = replace(GENESIS, answers=(b"x" * (3 << 20),))
    view = View(ViewId(1, 1), NO_VIEW, (Member("a~1", "a", "host", "127.0.0.1", 1),))
    heard: Facts[str] = Facts()

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if isinstance(event, fx.MessageIn) and isinstance(event.message, Report) and event.message.last is not None:
            heard.add(event.message.last.hash)
            return [fx.Send(event.conn, Decide(view, event.message.last))]
        return None

    with serving(rule, token=keys.of("a")) as served:
        with attending(served.endpoint, token=keys.of("b")) as client:
            client.messages.wait_for(Welcome)
            client.agent.send(Report(ViewId(1, 2), NO_VIEW, 0, header.hash, last=header))
            assert heard.wait(lambda said: True) == header.hash
            assert client.messages.wait_for(Decide).base.hash == header.hash
        assert served.events.wait_for(fx.Closed).abrupt is False


DYING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from served import Client
from chaos_lightning.protocol.types import Welcome
from chaos_lightning.security.credentials import Credentials, KeyFolder
from chaos_lightning.machine.listener import free_port
client = Client(sys.argv[2], token=Credentials(keys=KeyFolder(sys.argv[3])))
client.messages.wait_for(Welcome)
os.kill(os.getpid(), 9)
"""


def test_a_member_that_is_killed_is_noticed_at_once(keys: Keys, scheduler: Served) -> None:
    here = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", DYING, here, scheduler.endpoint, str(keys.at("b"))]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert scheduler.events.wait_for(fx.Closed).abrupt is True


def test_the_scheduler_stops_with_streams_open(keys: Keys) -> None:
    with serving(token=keys.of("a")) as served:
        client = attending(served.endpoint, token=keys.of("b"))
        with client as attended:
            attended.messages.wait_for(Welcome)
            served.stop()
            attended.states.wait(lambda state: state.startswith("lost"))


def test_a_connection_that_comes_while_the_proxy_is_shut_is_closed(keys: Keys) -> None:
    """Connections that were accepted or queued when the proxy was shut are closed."""
    with serving(token=keys.of("a")) as served:
        callers = [connect(served) for _ in range(20)]
        served.stop()
    for caller in callers:
        with caller, contextlib.suppress(ConnectionResetError):  # reset if it was still in the kernel's queue
            assert caller.recv(1) == b""


def test_a_port_that_is_taken_is_named(keys: Keys, scheduler: Served) -> None:
    with (
        pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1:{scheduler.server.port}: the port"),
        serving(token=keys.of("b"), port=scheduler.server.port),
    ):
        pass


def test_every_address_of_a_name_is_listened_on(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_proxy, "addresses", lambda host: ("127.0.0.1", "127.0.0.3"))
    keyfiles.add(keys.folder, KeyHolder("a", hosts=("127.0.0.3",)), renew=True)
    with serving(token=keys.of("a"), host="localhost") as served:
        for address in ("127.0.0.1", "127.0.0.3"):
            assert fetch_status(f"{address}:{served.server.port}", keys.of("b"))["role"] == "leader"


# ------------------------------------------------------------------------------------------------ what callers are told


def test_names_that_the_certificate_is_not_made_for(keys: Keys) -> None:
    with serving(token=keys.of("a"), host="127.0.0.2") as served:
        place = f"127.0.0.2:{served.server.port}"
        with pytest.raises(
            RefusedError,
            match=r"is a's and made for localhost, 127\.0\.0\.1, ::1, not for 127\.0\.0\.2: .*a=127\.0\.0\.2 --renew",
        ):
            fetch_status(place, keys.of("b"))
        with attending(place, token=keys.of("b")) as client:
            assert "not for 127.0.0.2" in client.states.wait(lambda state: state.startswith("failed"))
        keyfiles.add(keys.folder, KeyHolder("a", hosts=("127.0.0.2",)), renew=True)
        assert fetch_status(place, keys.of("b"))["role"] == "leader"  # nobody was started again


@pytest.mark.parametrize(("server", "words"), [("o", "o, observer"), ("p", "p, operator")])
def test_whoever_is_no_member_cannot_play_the_scheduler(server: str, words: str, keys: Keys) -> None:
    with (
        serving(token=keys.of(server)) as served,
        pytest.raises(RefusedError, match=rf"does not count: .*purpose \(it says to be {words}\)"),
    ):
        fetch_status(served.endpoint, keys.of("b"))


def test_a_scheduler_of_another_cluster(keys: Keys, tmp_path: Path) -> None:
    others = Keys(tmp_path / "others")
    with (
        serving(token=others.of("a")) as served,
        pytest.raises(RefusedError, match=r"does not count: .*it says to be a, member\); it must be of this cluster's"),
    ):
        fetch_status(served.endpoint, keys.of("b"))


def test_a_scheduler_whose_certificate_has_expired(keys: Keys, tmp_path: Path) -> None:
    folder = write_keys(tmp_path / "odd", keys.issued("member", 1))
    credentials = Credentials(keys=KeyFolder(folder))
    write_keys(folder, keys.issued("member", -0.001))
    with (
        serving(token=credentials) as served,
        pytest.raises(RefusedError, match=r"certificate has expired \(it says to be odd, member; it expired on 2"),
    ):
        fetch_status(served.endpoint, keys.of("b"))


def test_who_has_no_keys_is_told_to_give_them(scheduler: Served) -> None:
    for token in (b"", b"a bare token"):
        with pytest.raises(RefusedError, match=r"demands a certificate: give keys_dir \(--keys-dir, CHAOS_KEYS_DIR\)"):
            fetch_status(scheduler.endpoint, token)


def test_a_scheduler_without_keys(keys: Keys) -> None:
    with serving() as served, pytest.raises(RefusedError, match="speaks no TLS; its scheduler has no keys"):
        fetch_status(served.endpoint, keys.of("b"))


def test_where_tls_is_not_to_blame_nothing_is_said(keys: Keys, scheduler: Served) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
        assert tls_trouble(nobody, keys.of("a")) == ""
        listener.listen()  # it takes connections, and says nothing
        assert tls_trouble(nobody, keys.of("a"), 0.2) == ""
        assert tls_trouble(nobody, b"", 0.2) == ""
    assert tls_trouble(scheduler.endpoint, keys.of("b")) == ""


@pytest.mark.parametrize("goodbye", ["a FIN", "a reset"])
def test_a_connection_that_is_merely_closed_is_no_trouble_with_tls(keys: Keys, goodbye: str) -> None:
    """A connection that is closed during the handshake, as by a dying scheduler, is not reported as a TLS error."""
    read: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def read_the_hello_and_close() -> None:
            sock, _ = listener.accept()
            with sock:
                read.append(sock.recv(1 << 16))
                if goodbye == "a reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=read_the_hello_and_close)
        thread.start()
        assert tls_trouble(f"127.0.0.1:{listener.getsockname()[1]}", keys.of("a"), PATIENCE_S) == ""
        thread.join(PATIENCE_S)
    assert read[0][:1] == b"\x16", "a ClientHello"


def test_a_full_proxy_does_not_look_at_the_keys(
    scheduler: Served, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(tls_proxy, "MAX_HANDSHAKES", 0)
    monkeypatch.setattr(KeyFolder, "current", looked.append)
    with connect(scheduler) as sock:
        assert sock.recv(1) == b""
    ((_, reason),) = refusals.take(some=True)
    assert reason == "more than 0 handshakes at once; closed unheard"
    assert looked == []


# ------------------------------------------------------------------------------------------------ new keys


def test_keys_are_rotated_under_a_scheduler_that_serves(keys: Keys, refusals: Refusals, tmp_path: Path) -> None:
    old = Shown(keys.files("b"), keys.cluster.tokens[0])
    with serving(token=keys.of("a"), log=refusals) as served, attending(served.endpoint, token=keys.of("b")) as client:
        client.messages.wait_for(Welcome)
        turned = keyfiles.rotate(keys.folder)
        new = Shown(keys.files("b"), turned.tokens[0])
        for shown in (old, new):
            assert call(served.endpoint, "Attend", shown) == "ok"
        half_old = Shown(keys.files("b"), old.token)
        assert call(served.endpoint, "Attend", half_old) == "ok"
        assert refusals.take() == []
        assert keyfiles.finish(keys.folder).tokens == turned.tokens[:1]
        assert call(served.endpoint, "Attend", new) == "ok"
        assert call(served.endpoint, "Attend", half_old) == "UNAUTHENTICATED"
        assert "wrong cluster token" in refusals.take(some=True)[0][1]
        assert old.files is not None
        stolen = {**old.files, TRUSTED: keys.files("b")[TRUSTED]}
        for files, reason in ((old.files, "broke the TLS handshake off"), (stolen, "certificate does not count")):
            assert call(served.endpoint, "Attend", Shown(files, new.token)) == "UNAVAILABLE"
            assert any(reason in why for _, why in refusals.take(some=True))
        # A member whose connection was made with the old keys comes in again by itself, as the member that it was.
        client.messages.wait_for(Welcome, 2)
        assert client.states.seen.count("connected") == 2


def test_a_scheduler_that_has_not_got_its_new_keys_yet_lets_new_ones_in(keys: Keys, tmp_path: Path) -> None:
    late = write_keys(tmp_path / "late", keys.files("a"))
    credentials = Credentials(keys=KeyFolder(late))
    with serving(token=credentials) as served:
        keyfiles.rotate(keys.folder)
        with attending(served.endpoint, token=keys.of("b")) as client:
            client.messages.wait_for(Welcome)
        write_keys(late, keys.files("a"))
        keyfiles.finish(keys.folder)
        with attending(served.endpoint, token=keys.of("b")) as client:
            client.messages.wait_for(Welcome)


# ------------------------------------------------------------------------------------------------ who is in


def seconds(number: float) -> float:
    """Converts seconds to days."""
    return number / 86400


def put_out(refusals: Refusals, words: str) -> str:
    """Waits for a refusal whose reason contains `words`; returns the refused peer."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for peer, why in refusals.take(some=True):
            if words in why:
                return peer
    raise AssertionError(f"no refusal says {words!r}")


def test_a_connection_ends_with_its_certificate_and_comes_back_with_the_next_one(
    keys: Keys, scheduler: Served, refusals: Refusals, tmp_path: Path
) -> None:
    folder = write_keys(tmp_path / "odd", keys.issued("member", seconds(4)))
    with attending(scheduler.endpoint, token=Credentials(keys=KeyFolder(folder))) as client:
        client.messages.wait_for(Welcome)
        write_keys(folder, keys.issued("member", 1))
        assert put_out(refusals, "its certificate has expired on 2").endswith("odd (member)")
        client.messages.wait_for(Welcome, 2)
        assert client.resume
    assert [state for state in client.states.seen if state.startswith("failed")] == []


def test_who_has_no_new_certificate_when_its_own_ends_stays_outside(
    keys: Keys, scheduler: Served, refusals: Refusals, tmp_path: Path
) -> None:
    folder = write_keys(tmp_path / "odd", keys.issued("member", seconds(3)))
    with (
        attending(scheduler.endpoint, token=keys.of("b")) as other,
        attending(scheduler.endpoint, "odd", token=Credentials(keys=KeyFolder(folder))) as client,
    ):
        client.messages.wait_for(Welcome)
        assert put_out(refusals, "its certificate has expired on 2").endswith("odd (member)")
        client.states.wait(lambda state: "does not count: it expired on" in state)
        assert len([m for m in client.messages.seen if isinstance(m, Welcome)]) == 1
        assert other.states.seen == ["connected"], "nobody else is disturbed"


def test_an_authority_that_is_believed_no_longer_takes_its_connections_with_it(
    keys: Keys, scheduler: Served, refusals: Refusals, tmp_path: Path
) -> None:
    """After a rotation of keys, connections made with the old authority are closed; owners of new keys reconnect,
    others cannot.
    """
    stolen = write_keys(tmp_path / "stolen", keys.files("b"))
    with (
        attending(scheduler.endpoint, "b", token=keys.of("b")) as b,
        attending(scheduler.endpoint, "thief", token=Credentials(keys=KeyFolder(stolen))) as thief,
    ):
        for client in (b, thief):
            client.messages.wait_for(Welcome)
        keyfiles.rotate(keys.folder)
        with attending(scheduler.endpoint, "late", token=keys.of("b")) as late:
            late.messages.wait_for(Welcome)
            keyfiles.finish(keys.folder)
            thief.states.wait(lambda state: state.startswith("lost"))
            b.messages.wait_for(Welcome, 2)
            late.agent.send(Verdict("a~1", True, "here"))
            scheduler.events.wait(lambda e: isinstance(e, fx.MessageIn) and isinstance(e.message, Verdict))
            assert late.states.seen == ["connected"]
        assert b.states.seen.count("connected") == 2
        assert thief.states.seen.count("connected") == 1
    ended = [peer.split()[0] for peer, why in refusals.take() if "authority is believed no longer" in why]
    assert len(ended) == 2, "one line each, though who has only old keys knocks more often than the log takes lines"
    with pytest.raises(RefusedError, match="certificate"):
        fetch_status(scheduler.endpoint, Credentials(keys=KeyFolder(stolen)))


def test_new_keys_of_the_same_authority_disturb_nobody(keys: Keys, scheduler: Served, refusals: Refusals) -> None:
    """Neither a renewed certificate nor the first half of a key rotation closes a connection."""
    with attending(scheduler.endpoint, token=keys.of("b")) as client:
        client.messages.wait_for(Welcome)
        keyfiles.add(keys.folder, KeyHolder("a"), renew=True)
        keyfiles.rotate(keys.folder)
        trusted = keys.of("a").keys.current().trusted  # type: ignore[union-attr]
        until(lambda: {g.trusted for g in the_proxy(scheduler)._inside} == {trusted}, "a look at who is in")
        assert client.states.seen == ["connected"]
    assert refusals.take() == []


def test_a_look_that_fails_is_told_once_and_is_not_the_last_one(
    keys: Keys, scheduler: Served, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    believed, tries = tls_proxy._still_believed, itertools.count()

    def fails_twice(inside: Any, trusted: bytes) -> bool:
        if next(tries) < 2:
            raise ValueError("no certificate")
        return believed(inside, trusted)

    monkeypatch.setattr(tls_proxy, "_still_believed", fails_twice)
    with attending(scheduler.endpoint, token=keys.of("b")) as client:
        client.messages.wait_for(Welcome)
        keyfiles.rotate(keys.folder)
        trusted = keys.of("a").keys.current().trusted  # type: ignore[union-attr]
        until(lambda: {g.trusted for g in the_proxy(scheduler)._inside} == {trusted}, "a look at who is in")
    (why,) = [why for _, why in refusals.take()]
    assert why == "certificates of those who are in cannot be compared with the keys: no certificate"


def the_proxy(served: Served) -> tls_proxy.TlsProxy:
    found = served.server._frame.auth._tls_proxy
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ hosted schedulers


def test_a_hosted_scheduler_gets_the_folder_and_no_secret(keys: Keys, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = SchedulerOptions(listen=endpoint, store=MEMORY, log_dir=str(tmp_path / "logs"))
    started = ensure_scheduler(options, keys.of("a"))
    assert started is not None
    try:
        assert look(endpoint, "default", keys.of("b")) == "serves"
        assert ensure_scheduler(options, keys.of("b")) is None
        with pytest.raises(RefusedError, match="demands a certificate"):
            ensure_scheduler(options, b"a bare token")
        process = Path(f"/proc/{started.pid}")
        told = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes()
        assert str(keys.at("a")).encode() in told
        told += json.dumps(fetch_status(endpoint, keys.of("o"))).encode()
        for secret in keys.secrets().values():
            assert secret.encode() not in told
    finally:
        assert started.stop()
