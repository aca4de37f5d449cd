"""Which of some processes of this machine has a TCP socket on a local port: who has just dialled.

Relays that stand in front of one server for several clients tell them apart by it (Linux; IPv4 and IPv6). A connection
that was accepted stands in the kernel's tables until its dialler closes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""gRPC dials IPv4 addresses by sockets of IPv6."""


def owner_of_port(port: int, pids: Mapping[int, str]) -> str:
    """The name of the process, of these, that has a socket on this port; "" if none has.

    Args:
        port: The dialler's.
        pids: Names by process id.
    """
    wanted, inodes = f":{port:04X}", set()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted):
                    inodes.add(f"socket:[{fields[9]}]")
    for pid, name in pids.items():
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{entry}") in inodes:
                        return name
    return ""


__all__ = ["owner_of_port"]
