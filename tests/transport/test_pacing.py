"""Rates that are set on purpose: whose they are, what is refused, and that the kernel takes them."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.transport.pacing import IDLE_PART, Shares, checked, pace, rate_to, rates_from


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
        one.sendall(b"as before")
        assert other.recv(16) == b"as before"


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


# ---------------------------------------------------------------------- one rate for several connections


class Wires:
    """Connections to one peer, and the bounds that each has; the sum is looked at after each change."""

    def __init__(self, rate_bps: float | None) -> None:
        self.shares = Shares(rate_bps)
        self.bounds: dict[object, float | None] = {}
        self.sums: list[float] = []

    def join(self, name: object, now: float) -> None:
        def bound(rate_bps: float | None) -> None:
            self.bounds[name] = rate_bps
            self.sums.append(sum(r for r in self.bounds.values() if r is not None))

        self.shares.join(name, bound, now)  # type: ignore[arg-type]

    def leave(self, name: object, now: float) -> None:
        self.bounds.pop(name, None)
        self.shares.leave(name, now)  # type: ignore[arg-type]

    def settle(self, now: float, *waiting: object) -> None:
        self.shares.settle(now, waiting)  # type: ignore[arg-type]


def test_a_connection_alone_has_the_whole_rate() -> None:
    wires = Wires(80e6)
    wires.join("link", 0.0)
    assert wires.bounds == {"link": 80e6}
    wires.settle(100.0)
    assert wires.sums == [80e6], "what does not change is not set again"


def test_who_has_bytes_to_send_gets_what_others_do_not_need() -> None:
    wires = Wires(80e6)
    wires.join("link", 0.0)
    wires.join("bulk", 1.0)
    assert wires.bounds == {"link": 80e6 * IDLE_PART, "bulk": 80e6 * (1 - IDLE_PART)}, "a new one is about to begin"
    wires.settle(1.1, "link", "bulk")
    assert wires.bounds == {"link": 40e6, "bulk": 40e6}
    wires.settle(1.2, "link")
    assert wires.bounds == {"link": 40e6, "bulk": 40e6}, "between two requests"
    wires.settle(1.4, "link")
    assert wires.bounds == {"link": 80e6 * (1 - IDLE_PART), "bulk": 80e6 * IDLE_PART}
    wires.settle(9.0)
    assert wires.bounds["link"] == 80e6 * (1 - IDLE_PART), "of idle ones the link comes first"
    wires.leave("bulk", 9.0)
    wires.leave("nobody", 9.0)
    assert wires.bounds == {"link": 80e6}


def test_many_idle_connections_leave_most_of_the_rate() -> None:
    wires = Wires(80e6)
    for number in range(10):
        wires.join(number, 0.0)
    wires.settle(1.0, 3)
    assert wires.bounds[3] == pytest.approx(60e6)
    assert [wires.bounds[n] for n in range(10) if n != 3] == pytest.approx([20e6 / 9] * 9)


def test_a_rate_comes_and_goes() -> None:
    wires = Wires(None)
    wires.join("link", 0.0)
    wires.join("bulk", 0.0)
    assert wires.bounds == {}
    wires.shares.rate_bps = 10e6
    wires.settle(0.0)
    assert wires.bounds == {"link": 5e6, "bulk": 5e6}
    wires.shares.rate_bps = None
    wires.settle(0.0)
    assert wires.bounds == {"link": None, "bulk": None}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["join", "leave", "waits"]), st.floats(0, 0.3))))
def test_the_sum_never_exceeds_the_rate_and_nobody_is_shut_out(moves: list[tuple[int, str, float]]) -> None:
    wires, now = Wires(80e6), 0.0
    for name, move, seconds in moves:
        now += seconds
        if move == "join" and name not in wires.bounds:
            wires.join(name, now)
        elif move == "leave":
            wires.leave(name, now)
        else:
            wires.settle(now, name)
        total = sum(rate for rate in wires.bounds.values() if rate is not None)
        assert not wires.bounds or total == pytest.approx(80e6), "nor is any of it lost"
        assert all(rate for rate in wires.bounds.values())
    assert max(wires.sums, default=0.0) <= 80e6 * (1 + 1e-9)
