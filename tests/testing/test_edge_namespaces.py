"""Tests links made in the kernel: who reaches whom, the effects of cuts and stalls, and the clean-up. Needs root."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.security.access import load_token
from chaos_lightning.testing.edge import namespaces
from chaos_lightning.testing.edge.namespaces import NamespaceBackend, NetworkError, own_name, remove_leftovers, run
from chaos_lightning.testing.edge.network import Edge
from chaos_lightning.testing.edge.topology import Condition, EdgeNode, Link, LinkState, Topology

pytestmark = pytest.mark.skipif(not namespaces.ability().works, reason=namespaces.ability().reason)

DEADLINE_S = 20.0
NETWORK = Topology(
    (EdgeNode("a"), EdgeNode("b"), EdgeNode("c", access_bps=200e6), EdgeNode("d")),
    (Link("a", "b", 300e6), Link("b", "c", 100e6), Link("c", "d", 50e6)),
)
SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    sock, _ = server.accept()
    while data := sock.recv(1 << 20):
        sock.sendall(data)
"""
CALL = """
import socket, sys
try:
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
    data = bytes(300_000)
    sock.sendall(data[:1])
    print("through" if sock.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def backend() -> Iterator[NamespaceBackend]:
    made = NamespaceBackend(NETWORK)
    servers = []
    try:
        for node in NETWORK.names:
            command = made.command(node, [sys.executable, "-c", SERVE, made.address(node)])
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            servers.append(server)
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], DEADLINE_S)[0]
            assert server.stdout.readline() == "ready\n"
        yield made
    finally:
        for server in servers:
            server.kill()
            server.communicate()
        made.close()


def call(backend: NamespaceBackend, one: str, other: str) -> str:
    command = backend.command(one, [sys.executable, "-c", CALL, backend.address(other), "5000"])
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.strip()


def test_neighbours_reach_each_other_and_nobody_else(backend: NamespaceBackend) -> None:
    pairs = {(link.a, link.b) for link in NETWORK.links}
    for one in NETWORK.names:
        for other in NETWORK.names:
            linked = (one, other) in pairs or (other, one) in pairs or one == other
            found = call(backend, one, other)
            assert (found == "through") == linked, (one, other, found)
            assert linked or "unreachable" in found


def test_everybody_reaches_the_scheduler(backend: NamespaceBackend) -> None:
    host, _, port = backend.endpoint.rpartition(":")
    serve = (
        "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print('ready', flush=True)\n"
    )
    serve += "while True: s.accept()[0].sendall(b'x')"
    command = backend.command("a", [sys.executable, "-c", serve, host, port])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            for node in NETWORK.names:
                command = backend.command(node, [sys.executable, "-c", CALL, host, port])
                done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
                assert done.stdout.strip() == "through"
        finally:
            server.kill()


@pytest.mark.parametrize("pair", [("a", "b"), ("b", "c")])
def test_a_cut_link_is_unreachable_until_it_is_restored(backend: NamespaceBackend, pair: tuple[str, str]) -> None:
    backend.apply(pair, LinkState(100e6, 0.0, Condition.CUT))
    for one, other in (pair, pair[::-1]):
        assert "Error" in call(backend, one, other)
    assert call(backend, "c", "d") == "through"
    backend.apply(pair, LinkState(100e6))
    for one, other in (pair, pair[::-1]):
        assert call(backend, one, other) == "through"


def test_a_stalled_link_drops_everything_and_says_nothing(backend: NamespaceBackend) -> None:
    backend.apply(("a", "b"), LinkState(100e6, 0.0, Condition.STALLED))
    assert call(backend, "a", "b").startswith("TimeoutError")
    backend.apply(("a", "b"), LinkState(100e6))
    assert call(backend, "a", "b") == "through"


def shaped(space: str, device: str) -> float:
    found = re.search(r"rate (\d+(?:\.\d+)?)([KMG]?)bit", run("tc", "-n", space, "class", "show", "dev", device))
    assert found is not None
    return float(found[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}[found[2]]


def test_rates_count_payload_and_change(backend: NamespaceBackend) -> None:
    backend.apply(("a", "b"), LinkState(70e6))
    for one, other in (("a", "b"), ("b", "a")):
        rate_bps = shaped(backend._edge(one), backend._end(other))
        assert rate_bps == pytest.approx(70e6 * namespaces.OVERHEAD, rel=0.001)
    assert shaped(backend._space("c"), "access") == pytest.approx(200e6 * namespaces.OVERHEAD, rel=0.001)
    queues = run("tc", "-n", backend._space("a"), "qdisc", "show", "dev", backend._end("b"))
    assert re.search(r"bfifo .* limit 256Kb", queues), queues


def test_a_token_is_made_since_links_listen_beyond_loopback(backend: NamespaceBackend) -> None:
    path = backend.environment("a")["CHAOS_TOKEN_FILE"]
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert len(load_token(path)) == 64


def test_nothing_is_left_and_nothing_is_made_outside() -> None:
    before = run("ip", "-o", "link")
    edge = Edge(Topology((EdgeNode("a"), EdgeNode("b")), (Link("a", "b", 1e6),)), "namespaces")
    assert edge.environment("b")["CHAOS_BIND"] == "10.77.0.2"
    assert run("ip", "-o", "link") == before
    assert isinstance(edge.backend, NamespaceBackend)
    made = list(edge.backend._made)
    assert [name.rpartition(".")[2] for name in made] == ["hub", "1", "2"]
    assert all(name.startswith(own_name("")) for name in made)
    assert set(made) <= set(run("ip", "netns", "list").split())
    folder = edge.backend._folder
    edge.close()
    assert not folder.exists()
    assert not set(made) & set(run("ip", "netns", "list").split())


def test_what_a_killed_lab_left_is_removed_with_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    name = f"{namespaces.PREFIX}-{dead.pid}-12345-1"
    run("ip", "netns", "add", name)
    sleeper = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", "print('in', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == b"in\n"
        run("ip", "netns", "add", own_name("living"))
        assert name in remove_leftovers()
        assert sleeper.wait(DEADLINE_S) == -9
        names = run("ip", "netns", "list").split()
        assert name not in names
        assert own_name("living") in names
    finally:
        sleeper.kill()
        sleeper.communicate()
        for left in (name, own_name("living")):
            run("ip", "netns", "del", left, check=False)


def test_a_failure_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(space: str, device: str, rate_bps: float) -> None:
        raise NetworkError("tc: no")

    before = run("ip", "netns", "list").split()
    monkeypatch.setattr(namespaces, "_shaper", refuse)
    with pytest.raises(NetworkError, match="tc: no"):
        NamespaceBackend(Topology((EdgeNode("x"), EdgeNode("y")), (Link("x", "y", 1e6),)))
    assert run("ip", "netns", "list").split() == before


def test_programs_that_fail_say_what_was_asked() -> None:
    with pytest.raises(NetworkError, match="ip -n chaoslab-none link: "):
        run("ip", "-n", "chaoslab-none", "link")
    with pytest.raises(NetworkError, match="no-such-program"):
        run("no-such-program")
    assert run("ip", "-n", "chaoslab-none", "link", check=False) == ""


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.ability.__wrapped__() == namespaces.Ability(False, "it needs root")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "ip and tc not found" in namespaces.ability.__wrapped__().reason
    monkeypatch.setattr(namespaces, "ability", lambda: namespaces.Ability(False, "it needs root"))
    with pytest.raises(ConfigurationError, match="cannot work here"):
        Edge(NETWORK, "namespaces")
