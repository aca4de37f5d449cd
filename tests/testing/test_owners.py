"""Tests which process a connection is attributed to, by the kernel's socket tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from chaos_lightning.testing.processes import owner_of

DIALS_FROM_THE_SAME_PORT = """
import socket, sys
own, port = map(int, sys.argv[1:])
dialler = socket.socket()
dialler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
dialler.bind(("127.0.0.1", own))
dialler.connect(("127.0.0.1", port))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv4 by a socket of IPv6"])
def test_the_process_that_dialled_is_found(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as dialler:
        host, port = listener.getsockname()
        dialler.connect((host if family == socket.AF_INET else f"::ffff:{host}", port))
        with listener.accept()[0] as near:
            assert owner_of(near, {os.getpid(): "me", 1: "init"}) == "me"
            assert owner_of(near, {1: "init", 2**22 + 1: "nobody"}) == ""
            assert owner_of(near, {}) == ""


def test_a_process_that_dials_somebody_else_from_the_same_port_is_not_taken_for_it() -> None:
    """A connection is attributed to its own process, even if another process connects elsewhere from the same local
    port.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as elsewhere,
        socket.socket() as dialler,
    ):
        dialler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialler.bind(("127.0.0.1", 0))
        dialler.connect(listener.getsockname())
        ports = [str(dialler.getsockname()[1]), str(elsewhere.getsockname()[1])]
        command = [sys.executable, "-c", DIALS_FROM_THE_SAME_PORT, *ports]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
            listener.accept()[0] as near,
        ):
            assert other.stdout is not None
            assert other.stdout.readline() == "connected\n"
            assert owner_of(near, {other.pid: "other", os.getpid(): "me"}) == "me"
            other.communicate()
