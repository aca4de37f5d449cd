"""Which of some processes of this machine dialled a TCP connection that was accepted here.

Relays that stand in front of one server for several clients tell them apart by it (Linux; IPv4 and IPv6). A connection
that was accepted stands in the kernel's tables until its dialler closes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""gRPC dials IPv4 addresses by sockets of IPv6."""


def owner_of(near: socket.socket, pids: Mapping[int, str]) -> str:
    """The name of the process, of these, that dialled this connection; "" if none has.

    Args:
        near: The end that was accepted.
        pids: Names by process id.
    """
    # Both ports tell: a dialler's alone is given out again for connections to other places.
    dialled, wanted, inodes = near.getsockname()[1], near.getpeername()[1], set()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{wanted:04X}") and fields[2].endswith(f":{dialled:04X}"):
                    inodes.add(f"socket:[{fields[9]}]")
    for pid, name in pids.items():
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{entry}") in inodes:
                        return name
    return ""


__all__ = ["owner_of"]
