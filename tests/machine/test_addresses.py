"""Tests the parsing of endpoints and the resolution of addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)),
        (" host:1 ", ("host", 1)),
        ("host", ("host", 29400)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 29400)),
        ("10.0.0.5:65535", ("10.0.0.5", 65535)),
    ],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert addresses.split_endpoint(text) == expected
    assert addresses.split_endpoint(addresses.join_endpoint(*expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":1", "host:", "host:x", "host:65536", "::1:7", "host:-1", "host:²", "host:" + "9" * 5000]
)
def test_odd_endpoints_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        addresses.split_endpoint(text)


def test_loopback_and_local() -> None:
    assert addresses.is_loopback("127.0.0.1")
    assert addresses.is_loopback("127.1.2.3")
    assert addresses.is_loopback("localhost")
    assert addresses.is_loopback("::1")
    assert not addresses.is_loopback("0.0.0.0")
    assert not addresses.is_loopback("192.0.2.1")
    assert addresses.is_local("127.0.0.1")
    assert addresses.is_local("0.0.0.0")
    assert not addresses.is_local("192.0.2.1")  # TEST-NET-1: nobody's


def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses.socket, "getaddrinfo", nowhere)
    with pytest.raises(ConfigurationError, match="'nowhere' cannot be resolved"):
        addresses.is_local("nowhere")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes this machine's name edge.lan, and yields the list of addresses to which the name resolves."""
    found = ["127.0.1.1"]

    def resolved(host: str, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        known = {"edge.lan": found, "edge": found, "alias": ["127.0.0.1"]}.get(host, [host])
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "edge.lan")
    monkeypatch.setattr(addresses, "_source", lambda address, port: "10.0.0.5")
    addresses._beyond_loopback.cache_clear()
    yield found
    addresses._beyond_loopback.cache_clear()


@pytest.mark.parametrize("text", ["edge.lan:29400", "edge:29400", "edge.lan"])
def test_a_name_that_means_loopback_here_alone_becomes_an_address(
    named: list[str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert addresses.split_endpoint(text) == ("10.0.0.5", 29400)
    assert addresses.split_endpoints(f"{text},other:1") == ("10.0.0.5:29400", "other:1")
    assert len(caplog.records) == 1
    assert "resolves to 127.0.1.1 here" in caplog.text
    assert "10.0.0.5 is taken in its place" in caplog.text


def test_a_name_that_others_resolve_alike_stays(named: list[str], caplog: pytest.LogCaptureFixture) -> None:
    named[:] = ["10.0.0.7"]
    assert addresses.split_endpoint("edge:1") == ("edge", 1)
    for host in ("localhost", "127.0.0.1", "alias", "127.0.1.1"):
        assert addresses.split_endpoint(f"{host}:1") == (host, 1)
    assert not caplog.records


def test_what_is_announced_is_not_translated(named: list[str]) -> None:
    """An announced name is passed on as given and not resolved, since it may mean a gateway to others."""
    assert addresses.split_announced("edge:41000") == ("edge", 41000)


def test_a_machine_without_a_network_says_that_it_is_alone(
    named: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere(address: str, port: int) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(addresses, "_source", nowhere)
    assert addresses.split_endpoint("edge:1") == ("edge", 1)
    assert "only processes of this machine can join" in caplog.text
