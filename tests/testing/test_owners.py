"""Who dialled: by the kernel's tables of sockets."""

from __future__ import annotations

import os
import socket

import pytest

from chaos_lightning.testing.owners import owner_of_port


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv4 by a socket of IPv6"])
def test_the_process_that_dialled_is_found(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as dialler:
        host, port = listener.getsockname()
        dialler.connect((host if family == socket.AF_INET else f"::ffff:{host}", port))
        with listener.accept()[0] as near:
            from_port = near.getpeername()[1]
            assert owner_of_port(from_port, {os.getpid(): "me", 1: "init"}) == "me"
            assert owner_of_port(from_port, {1: "init", 2**22 + 1: "nobody"}) == ""
            assert owner_of_port(port, {}) == ""
