"""Finds the process that listens at a port of this machine, and why it may not answer.

A scheduler that is stopped, or has no descriptor left, still has its port: the kernel takes connections for it, and
nothing comes back. A program of another kind says something else, or hangs up. Only the latter is a reason to give up.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.process_table import process_state

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Bytes with which a client begins HTTP/2, with empty settings; a server of gRPC answers with its own."""
_SETTINGS = 4
_LISTENING = "0A"
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the range of ports that the kernel gives to connections, and to processes that ask for any."""
_FIRST = 10_000
_NAMED = 3
"""Largest number of taken ports of which an error names the owners."""
_tried = itertools.count()


def open_listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Listens at the first of several ports that is free; returns the socket. The host "::" accepts IPv4 too.

    Args:
        host: Address or name of this machine, of IPv4 or IPv6.
        ports: 0 is any.

    Raises:
        ConfigurationError: All are taken, and by whom, or it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"cannot listen at {join_endpoint(host, port)}: {error}; give an address of this machine and a "
                    "free port"
                ) from error
    holders = [f"{port}: {who_listens(port) or 'by whom cannot be seen'}" for port in ports[:_NAMED]]
    span = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise ConfigurationError(
        f"cannot listen at {join_endpoint(host, ports[0])}: port {span} is taken ({'; '.join(holders)}"
        f"{'; ...' if len(ports) > _NAMED else ''}); each process needs one free port: give a range with one for each "
        "that runs on this machine"
    )


def is_another_kind(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Returns whether a listener is no gRPC server: it hangs up, or says something else; False if it is silent."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            sock.sendall(_PREFACE)
            said = sock.recv(9)
    except (TimeoutError, ConnectionRefusedError):
        return False
    except OSError:
        return True
    return len(said) < 4 or said[3] != _SETTINGS


def who_listens(port: int) -> str:
    """Returns a text about the process that listens at a port: its command and whether it is stopped or overloaded; ""
    if unknown.
    """
    inodes = _inodes(port)
    for folder in Path("/proc").iterdir() if inodes else ():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if any(_target(fd) in inodes for fd in (folder / "fd").iterdir()):
                return _words(int(folder.name), folder)
    return ""


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:  # closed meanwhile
        return ""


def _inodes(port: int) -> set[str]:
    """Returns the inodes of sockets that listen at a port, as /proc writes them: "socket:[N]"."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == _LISTENING and int(cells[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{cells[9]}]")
    return found


def _words(pid: int, folder: Path) -> str:
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    text = f"pid {pid} ({command[:80]})"
    if process_state(pid, 0) == "stopped":
        return f"{text}, which is stopped"
    limits = (folder / "limits").read_text().splitlines()
    limit = next((line.split()[3] for line in limits if line.startswith("Max open files")), "")
    count = sum(1 for _ in (folder / "fd").iterdir())
    if limit.isdigit() and count >= int(limit):
        return f"{text}, which has {count} of {limit} files open"
    return f"{text}, which runs"


def free_ports(count: int) -> list[int]:
    """Returns unused loopback ports for servers that will be started a moment later.

    They lie below those that the kernel gives to outgoing connections, as one of these could take a port before its
    server does. Each process begins to look elsewhere, so that two that look at once find different ones.

    Raises:
        OSError: All are in use.
    """
    with contextlib.ExitStack() as stack:
        return list(itertools.islice(_bound(stack), count))


def free_port() -> int:
    """Returns an unused loopback port."""
    (port,) = free_ports(1)
    return port


def _bound(stack: contextlib.ExitStack) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        span = int(_OUTGOING.read_text().split()[0]) - _FIRST
        base = os.getpid() * 2654435761
        for _ in range(span):
            port = _FIRST + (base + next(_tried)) % span
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                yield port
    while True:  # no such range, or nothing free in it: any
        probe = stack.enter_context(socket.socket())
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]
