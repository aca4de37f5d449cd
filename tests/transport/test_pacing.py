"""Rates that are set on purpose: whose they are, what is refused, and that the kernel takes them."""

from __future__ import annotations

import socket
import struct

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.transport.pacing import checked, pace, rate_to, rates_from


def pacing_of(sock: socket.socket) -> int:
    """Bytes per second, from struct tcp_info."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 120)
    return int(struct.unpack_from("=Q", info, 112)[0])


def test_the_kernel_is_told_bytes_per_second_also_above_two_to_the_31() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        pace(sock, 300e6)
        assert pacing_of(sock) == 37_500_000
        pace(sock, 80e9)
        assert pacing_of(sock) == 10_000_000_000
        pace(sock, 1.0)
        assert pacing_of(sock) == 1
        pace(sock, None)
        assert pacing_of(sock) == (1 << 64) - 1


def test_other_sockets_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        pace(one, 300e6)


def test_a_rate_is_found_by_id_name_or_node_in_this_order() -> None:
    table = {"n1": 1.0, "n1-0": 2.0, "n1-0~7": 3.0}
    assert rate_to(table, "n1-0~7") == 3.0
    assert rate_to(table, "n1-0~8") == 2.0
    assert rate_to(table, "n1-1~9") == 1.0
    assert rate_to(table, "n2-0~1") is None
    assert rate_to({"n1": 1.0}, "n1") == 1.0
    assert rate_to({"b": 5.0}, "b~2") == 5.0


def test_a_table_comes_as_json() -> None:
    assert rates_from(' {"b": 3e8, "c": 100} ') == {"b": 3e8, "c": 100.0}
    assert rates_from("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b=3", "is no JSON"),
        ("[3]", "must be an object"),
        ('{"b": 0}', "'b' has the rate 0; expected positive bits per second"),
        ('{"b": -1}', "'b' has the rate -1"),
        ('{"b": true}', "'b' has the rate True"),
        ('{"b": "300 Mbps"}', "'b' has the rate '300 Mbps'"),
        ('{"b": NaN}', "'b' has the rate nan"),
        ('{"b": Infinity}', "'b' has the rate inf"),
    ],
)
def test_a_table_that_cannot_work_is_refused_by_its_entry(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match="CHAOS_EMULATE") as error:
        rates_from(text)
    assert words in str(error.value)


def test_a_table_of_the_program_is_refused_as_well() -> None:
    with pytest.raises(ConfigurationError, match=r"emulate: 'b' has the rate None"):
        checked({"b": None})
