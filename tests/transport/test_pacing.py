"""Tests that the kernel accepts a limit on a socket's sending rate."""

from __future__ import annotations

import socket
import struct

from chaos_lightning.transport.pacing import pace


def pacing_of(sock: socket.socket) -> int:
    """Returns the rate to which the kernel paces this socket, in bytes per second (struct tcp_info)."""
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
