"""Limits the sending rate of one TCP socket, by the kernel's pacing, which needs no privilege.

Theory of operation. SO_MAX_PACING_RATE bounds what one TCP socket sends; it is exact to a few percent from 100 to 1000
Mbit/s, costs no CPU and can be changed while bytes flow. It bounds one socket in one direction, so each end of a link
sets its own.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 64) - 1


def pace(sock: socket.socket, rate_bps: float | None) -> None:
    """Limits the rate at which `sock` sends to `rate_bps` bits per second; None removes the limit. No effect on sockets
    other than TCP.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    bytes_per_s = _UNLIMITED if rate_bps is None else max(1, min(_UNLIMITED - 1, round(rate_bps / 8)))
    # Packed: as a Python int the option overflows above 2^31 bytes per second.
    with contextlib.suppress(OSError):  # a kernel without the option: the link is as fast as it is
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_s))
