"""Parses endpoints as people write them, and resolves addresses on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from functools import cache

from chaos_lightning.errors import ConfigurationError

logger = logging.getLogger("chaos_lightning.machine")

DEFAULT_PORT = 29400
WILDCARDS = ("0.0.0.0", "::", "")
"""Addresses to listen at that nobody can call."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns (host, port) of "HOST:PORT", "HOST" (port 29400) or "[IPv6]:PORT", without brackets.

    This machine's own name becomes the address at which others reach it, where it resolves to loopback here.
    """
    host, port = _parse(endpoint)
    return _beyond_loopback(host), port


def _parse(endpoint: str) -> tuple[str, int]:
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


def split_announced(text: str) -> tuple[str, int]:
    """Parses a process's own address to be announced: "HOST" or "HOST:PORT"; returns (host, port), with port 0 if none
    is given.

    Raises:
        ConfigurationError: The text is neither, or the address cannot be called.
    """
    bare = text.strip()
    bare = f"[{bare}]" if bare.count(":") > 1 and "[" not in bare else bare
    named = not bare.endswith("]") and ":" in bare
    host, port = _parse(bare if named else f"{bare}:0")
    if host in WILDCARDS or (named and not port):
        raise ConfigurationError(f"nobody can call {text!r}; name an address that other members reach, as HOST[:PORT]")
    return host, port


def split_endpoints(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of scheduler endpoints; returns each as "HOST:PORT"."""
    parts = [split_endpoint(part) for part in text.split(",") if part.strip()]
    found = tuple(join_endpoint(*part) for part in parts)
    if not all(port for _, port in parts):
        raise ConfigurationError(f"endpoint {text!r}: nobody can be called at port 0; name the port")
    if not found:
        raise ConfigurationError(f"endpoint {text!r} is no HOST:PORT; write for example 10.0.0.5:{DEFAULT_PORT}")
    return tuple(dict.fromkeys(found))


def join_endpoint(host: str, port: int) -> str:
    """Returns "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_ports(text: str) -> range:
    """Parses a port "29500" or range "29500-29599"; "" gives port 0, which stands for any.

    Raises:
        ConfigurationError: The text is no port and no range.
    """
    low, dash, high = text.strip().partition("-")
    ends = [low, high if dash else low]
    if not text.strip():
        return range(1)
    if all(end.isascii() and end.isdigit() and 0 < int(end) < 65536 for end in ends) and int(ends[0]) <= int(ends[1]):
        return range(int(ends[0]), int(ends[1]) + 1)
    raise ConfigurationError(f"{text!r} is no port and no range of ports; write for example 29500 or 29500-29599")


def addresses(host: str) -> tuple[str, ...]:
    """Returns the IP addresses of `host`; raises ConfigurationError if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"host {host!r} cannot be resolved ({error}); give an address or a known name"
        ) from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


@cache
def _beyond_loopback(host: str) -> str:
    """Returns `host`, or this machine's network address if `host` is its own name and resolves to loopback.

    Debian writes the own name into /etc/hosts at 127.0.1.1; other machines look it up elsewhere, and dial the network.
    """
    own = socket.gethostname().lower()
    if host.lower() not in (own, own.partition(".")[0]) or own.partition(".")[0] == "localhost":
        return host
    with contextlib.suppress(ConfigurationError):
        if not is_loopback(host):
            return host
        here = ", ".join(addresses(host))
        try:
            found = _source("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): takes the default route
        except OSError:
            logger.warning(
                "this machine's own name %s resolves to %s here, which no other machine reaches, and there is no route "
                "to others: only processes of this machine can join. Give the endpoint as an address if that is wrong",
                host,
                here,
            )
            return host
        logger.warning(
            "this machine's own name %s resolves to %s here (see /etc/hosts), which no other machine reaches; %s is "
            "taken in its place. For another address, give the endpoint as that address; for this machine alone, as "
            "127.0.0.1",
            host,
            here,
            found,
        )
        return found
    return host


def is_loopback(host: str) -> bool:
    """Returns whether every address of `host` is reachable from this machine only."""
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses(host))


def facing(host: str, port: int, advice: str) -> str:
    """Returns this machine's address that peers near `host` can reach: loopback for loopback, else by the routing
    table.

    Args:
        host: Name or address. If it has several addresses, an IPv4 one is used, since members listen on IPv4.
        port: Port of the endpoint, for the error.
        advice: Text on what to do where no route leads there, for the error.

    Raises:
        ConfigurationError: No route leads there, or the name cannot be resolved.
    """
    if is_loopback(host):
        return "127.0.0.1"
    try:
        return _source(min(addresses(host), key=lambda address: ":" in address), port)
    except OSError as error:
        raise ConfigurationError(f"no route to the endpoint {join_endpoint(host, port)} ({error}); {advice}") from error


def _source(address: str, port: int) -> str:
    """Returns this machine's source address for packets to an address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: the routing table names our address
        return str(probe.getsockname()[0])


def is_local(host: str) -> bool:
    """Returns whether `host` is this machine, that is, whether one of its addresses can be bound."""
    for address in addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False
