"""Closes file descriptors and connections in forked children that only the parent should hold.

Theory of operation. A DataLoader worker is a forked child and inherits every socket. As long as one process holds a
socket, the other end sees no end of file: a SIGKILLed member whose workers live on for seconds would look alive for so
long. So a child closes, first thing, the descriptors registered here, and every connection to a registered address
(gRPC does not tell its descriptors). Closing in the child does not disturb the parent's connection. Programs started
with exec are no concern: all these descriptors are close-on-exec.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator

from chaos_lightning.machine.addresses import addresses, split_endpoint

_lock = threading.Lock()
_descriptors: dict[int, tuple[int, int]] = {}
_peers: Counter[tuple[str, int]] = Counter()
"""Number of connections that talk to each address and port."""
_installed = False


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def close_in_children(fd: int) -> None:
    """Makes forked children close `fd`, if it is still the same file or socket then."""
    with _lock:
        _descriptors[fd] = _identity(fd)
        _install()


def keep_in_children(fd: int) -> None:
    """Stops closing `fd` in forked children, since the parent closes it."""
    with _lock:
        _descriptors.pop(fd, None)


@contextlib.contextmanager
def only_here(endpoint: str) -> Iterator[None]:
    """Makes children forked within the block close every TCP connection to this endpoint.

    Args:
        endpoint: HOST:PORT.

    Raises:
        ConfigurationError: The endpoint is not HOST:PORT, or its name cannot be resolved.
    """
    host, port = split_endpoint(endpoint)
    here = [(_plain(address), port) for address in addresses(host)]
    with _lock:
        _peers.update(here)
        _install()
    try:
        yield
    finally:
        with _lock:
            for peer in here:
                _peers[peer] -= 1
                if _peers[peer] <= 0:
                    del _peers[peer]


def _plain(address: str) -> str:
    return address.partition("%")[0].removeprefix("::ffff:")


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


def _in_child() -> None:
    _lock.release()
    for fd, identity in list(_descriptors.items()):
        with contextlib.suppress(OSError):
            if _identity(fd) == identity:
                os.close(fd)
    _descriptors.clear()
    if _peers:
        for fd in _connections():
            with contextlib.suppress(OSError):
                os.close(fd)
    _peers.clear()


def _connections() -> list[int]:
    """Returns the descriptors of open TCP connections to registered peers."""
    found: list[int] = []
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        fd = int(name)
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            # Detached again: this object must not close the descriptor when it is collected.
            sock = socket.socket(fileno=fd)
            try:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    address, port = sock.getpeername()[:2]
                    if (_plain(address), port) in _peers:
                        found.append(fd)
            finally:
                sock.detach()
        except OSError:
            continue
    return found
