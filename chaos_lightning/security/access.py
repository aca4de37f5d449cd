"""Who may come in: endpoints, the cluster token, and where a scheduler or member may listen.

Theory of operation. A job is open to every process that can reach its ports and has its credentials: a folder of keys
(security/credentials.py), or the weaker token alone. Without any only loopback may be listened on. The token is read
from a file or from the environment, never from a command line, where every user of the machine could read it. Links
between members prove it without sending it (transport/handshake.py); on the control stream it travels as gRPC metadata,
which is encrypted only where there are keys: with a token alone, keep the scheduler's port inside a network you trust.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from chaos_lightning.security.credentials import Credentials

logger = logging.getLogger("chaos_lightning.runtime")

DEFAULT_PORT = 29400
TOKEN_KEY = "chaos-token-bin"
"""gRPC metadata key of the token; "-bin" keys may hold any bytes."""
LEADER_KEY = "chaos-leader"
"""gRPC metadata key: a scheduler that waits to lead says who does."""
MIN_TOKEN_NBYTES = 8
WILDCARDS = ("0.0.0.0", "::", "")
"""Addresses to listen at that nobody can call."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT", "HOST" (port 29400) or "[IPv6]:PORT"; brackets are taken off."""
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigurationError(
            f"endpoint {endpoint!r}: write an IPv6 address in brackets, such as [::1]:{DEFAULT_PORT}"
        )
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        raise ConfigurationError(f"endpoint {endpoint!r} is no HOST:PORT; write for example 10.0.0.5:{DEFAULT_PORT}")
    return host, int(port)


def split_endpoints(text: str) -> tuple[str, ...]:
    """Each "HOST:PORT" of a list with commas: the candidates of one job."""
    parts = [split_endpoint(part) for part in text.split(",") if part.strip()]
    found = tuple(join_endpoint(*part) for part in parts)
    if not all(port for _, port in parts):
        raise ConfigurationError(f"endpoint {text!r}: nobody can be called at port 0; name the port")
    if not found:
        raise ConfigurationError(f"endpoint {text!r} is no HOST:PORT; write for example 10.0.0.5:{DEFAULT_PORT}")
    return tuple(dict.fromkeys(found))


def join_endpoint(host: str, port: int) -> str:
    """ "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses(host: str) -> tuple[str, ...]:
    """The IP addresses that `host` stands for; a name that nobody knows is a ConfigurationError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"host {host!r} cannot be resolved ({error}); give an address or a known name"
        ) from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is reachable from this machine only."""
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses(host))


def is_local(host: str) -> bool:
    """Whether `host` is this machine: one of its addresses can be bound here."""
    for address in addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def load_token(token_file: str = "", environ: Mapping[str, str] = os.environ) -> bytes:
    """The cluster token: of this file, else of the file CHAOS_TOKEN_FILE, else CHAOS_TOKEN, else b"" (none).

    Raises:
        ConfigurationError: The file cannot be read, or the token is too short to keep anybody out.
    """
    path = token_file or environ.get("CHAOS_TOKEN_FILE", "")
    if path:
        source = f"token file {path}"
        try:
            token = Path(path).read_bytes().strip()
            mode = Path(path).stat().st_mode
        except OSError as error:
            raise ConfigurationError(
                f"{source} cannot be read: {error.strerror}; write one with, for example: "
                f"(umask 077; head -c 32 /dev/urandom | base64 > {path})"
            ) from error
        if mode & (stat.S_IRWXO | stat.S_IRWXG):
            logger.warning("%s can be read by others (mode %o); chmod 600 it", source, stat.S_IMODE(mode))
        if not token:
            raise ConfigurationError(f"{source} is empty")
    else:
        source = "the token in CHAOS_TOKEN"
        token = environ.get("CHAOS_TOKEN", "").strip().encode()
    if token and len(token) < MIN_TOKEN_NBYTES:
        raise ConfigurationError(f"{source} has {len(token)} bytes, at least {MIN_TOKEN_NBYTES} are needed")
    return token


def check_bind(host: str, token: bytes | Credentials) -> None:
    """Refuses to listen beyond loopback without a token or keys."""
    if not token and not is_loopback(host):
        raise ConfigurationError(
            f"listening on {host} would let everybody in who can reach it: give a folder of keys (`chaos-lightning "
            "keys init`, then --keys-dir, keys_dir= or CHAOS_KEYS_DIR), or at least a cluster token (--token-file, "
            "token_file= or CHAOS_TOKEN_FILE / CHAOS_TOKEN, the same on all nodes), or bind to 127.0.0.1"
        )
