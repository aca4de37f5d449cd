"""Endpoints and addresses."""

from __future__ import annotations

import socket

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
