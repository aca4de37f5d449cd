"""A TCP connection to a leader on another machine, which shows when its process has ended while its machine still runs.

Theory of operation. A lease takes two seconds to end. But when a process dies, its kernel closes what it had open at
once, and refuses who dials its port then. So a candidate that stands by keeps a connection to the leader; when that is
closed it dials again, and if the very machine on which it found the leader before now says that nobody listens there,
the leader is gone. A machine or a network that falls silent, or a process that is frozen, says nothing: these are left
to the lease. Should it be an error (a firewall that has just begun to refuse), it costs an election: a leader whose
lease was ended can write nothing, and stands by again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from chaos_lightning.errors import ChaosError
from chaos_lightning.machine.addresses import split_endpoint

_DIAL_S = 1.0
_AGAIN_S = 0.5
_READ_NBYTES = 4096


class LeaderLine(threading.Thread):
    """Thread with a TCP connection to a leader on another machine. `start` it, read `gone`, `close` it.

    Args:
        endpoint: HOST:PORT of the leader.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="chaos-leader-line", daemon=True)
        self.endpoint = endpoint
        self.gone = False
        """Whether the leader's process has ended, as its machine says."""
        self._over = threading.Event()
        self._sock: socket.socket | None = None
        self._found = False

    def run(self) -> None:
        try:
            place = split_endpoint(self.endpoint)
        except ChaosError:
            return
        while not self._over.is_set() and not self.gone:
            try:
                with socket.create_connection(place, timeout=_DIAL_S) as sock:
                    since = time.monotonic()
                    self._sock, self._found = sock, True
                    self._listen(sock)
            except ConnectionRefusedError:
                # A leader that was never reached may listen for others only.
                self.gone = self._found and not self._over.is_set()
            except OSError:  # unknown, unreachable, silent
                pass
            else:
                if time.monotonic() - since > _AGAIN_S:
                    continue
            # Also after what ended at once: something before the scheduler accepts in its place.
            self._over.wait(_AGAIN_S)

    def _listen(self, sock: socket.socket) -> None:
        """Reads from the connection until the leader closes it, or `close` is called."""
        sock.settimeout(None)
        with contextlib.suppress(OSError):
            while not self._over.is_set() and sock.recv(_READ_NBYTES):
                pass

    def close(self) -> None:
        """Asks the thread to end soon. Idempotent."""
        self._over.set()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


__all__ = ["LeaderLine"]
