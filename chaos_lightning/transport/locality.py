"""Determines from addresses whether a connection stays within this machine."""

from __future__ import annotations

import socket


def on_this_machine(sock: socket.socket) -> bool:
    """Returns whether both ends of a connection are on this machine, so that chunks need no checksum.

    Summing every chunk twice costs 15 to 35 % of an all-reduce over loopback (docs/LOG.md); messages are always summed.
    A connection that the other end has reset already has no addresses any more, and counts as one that leaves: whoever
    uses it next learns what became of it.
    """
    if sock.family == socket.AF_UNIX:
        return True
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False
