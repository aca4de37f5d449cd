"""Tests that a listener gets the first free port of its range, or an error that names the processes that have the
ports.
"""

from __future__ import annotations

import os
import socket

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import read_ports
from chaos_lightning.machine.listener import free_ports, open_listener


def test_the_first_free_port_is_taken() -> None:
    first, second = free_ports(2)
    with socket.create_server(("127.0.0.1", first)), open_listener("127.0.0.1", [first, second]) as found:
        assert found.getsockname() == ("127.0.0.1", second)
        with pytest.raises(ConfigurationError, match=rf"port {first}-{second} is taken \({first}: pid {os.getpid()} "):
            open_listener("127.0.0.1", [first, second])
        with pytest.raises(ConfigurationError, match=rf"cannot listen at 127\.0\.0\.1:{first}: port {first} is taken"):
            open_listener("127.0.0.1", [first])


def test_any_port_of_either_family() -> None:
    with open_listener("::", read_ports("")) as both, open_listener("::1", [0]) as six:
        for family, host, port in ((4, "127.0.0.1", both), (6, "::1", both), (6, "::1", six)):
            with socket.create_connection((host, port.getsockname()[1]), timeout=10) as dialled:
                assert dialled.family == (socket.AF_INET if family == 4 else socket.AF_INET6)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen at 192\.0\.2\.7:0: .*give an address of this machine"):
        open_listener("192.0.2.7", [0])


@pytest.mark.parametrize(("text", "ports"), [("", [0]), ("29500", [29500]), (" 29500-29502 ", [29500, 29501, 29502])])
def test_ranges(text: str, ports: list[int]) -> None:
    assert [*read_ports(text)] == ports
