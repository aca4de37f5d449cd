"""Finds out why TLS to a server fails, since gRPC only reports that the handshake did.

Theory of operation. After a call that failed without an answer, the endpoint is tried once with Python's own ssl and
the same keys: the certificate at the other end, the names it is made for, and what the other end thinks of ours. The
answer "" means that nothing is wrong with TLS; then the server is away, or was.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time

from cryptography import x509

from chaos_lightning.errors import WireError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.security.certificates import Facts, facts
from chaos_lightning.security.credentials import Credentials, Keys, Secret
from chaos_lightning.security.roles import serves

_TIMEOUT_S = 1.0
_LISTEN_S = 0.3
"""Seconds to listen: a refusal of our certificate follows the handshake within a round trip."""


def tls_trouble(endpoint: str, secret: Secret, timeout_s: float = _TIMEOUT_S, what: str = "scheduler") -> str:
    """Returns what is wrong with TLS at an endpoint, as text; "" if nothing is.

    Args:
        endpoint: HOST:PORT.
        secret: Credentials of this process.
        timeout_s: Seconds for all checks together.
        what: The service that was called there, for the message.
    """
    host, port = split_endpoint(endpoint)
    keys = Credentials.of(secret).keys
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            if keys is None:
                return _without_keys(sock, endpoint, what)
            return _with_keys(sock, endpoint, keys.current(), deadline, what)
    except OSError:
        return ""


def _without_keys(sock: socket.socket, endpoint: str, what: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), context.wrap_socket(sock):
        return f"the {what} at {endpoint} demands a certificate: give keys_dir (--keys-dir, CHAOS_KEYS_DIR)"
    return ""


def _with_keys(sock: socket.socket, endpoint: str, keys: Keys, deadline: float, what: str) -> str:
    host, _ = split_endpoint(endpoint)
    try:
        tls = keys.client.wrap_socket(sock)
    except ssl.SSLCertVerificationError as error:
        shown = _shown(endpoint, keys, max(0.1, deadline - time.monotonic()))
        said = f" (it says to be {shown.name}, {shown.role}{_until(shown)})" if shown is not None else ""
        name = shown.name if shown is not None else "NAME"
        return (
            f"the certificate of the {what} at {endpoint} does not count: {error.verify_message}{said}; it must be of "
            "this cluster's authority, of a role that serves, and not expired: renew it there "
            f"(`chaos-lightning keys node {name} --renew`)"
        )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return ""  # closed in the middle: it is ending, or has too much to do; the next attempt may succeed
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"at {endpoint} something listens that speaks no TLS; its {what} has no keys, or it is none"
        return f"TLS with {endpoint} failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    with tls:
        found = _read(tls.getpeercert(binary_form=True))
        if found is not None and not _names(found, host):
            return (
                f"the certificate of the {what} at {endpoint} is {found.name}'s and made for "
                f"{', '.join(found.hosts) or 'no host'}, not for {host}: renew it "
                f"(`chaos-lightning keys node {found.name}={host} --renew`), or use one of these names"
            )
        tls.settimeout(min(_LISTEN_S, max(0.05, deadline - time.monotonic())))
        try:
            tls.recv(1)
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                why = str(error.reason).rpartition("ALERT_")[2].replace("_", " ").lower()
                mine = keys.facts
                return (
                    f"the {what} at {endpoint} refused the certificate of {mine.name} ({mine.role}{_until(mine)}): "
                    f"{why}; its own log says more"
                )
        except OSError:
            pass
    return ""


def _until(said: Facts) -> str:
    return f"; {said.trouble}" if said.trouble else ""


def _names(found: Facts, host: str) -> bool:
    """Returns whether a certificate is for this host, and of a role that serves."""
    if not serves(found.role):
        return False
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.rstrip(".").lower() in {name.rstrip(".").lower() for name in found.hosts}
    return str(wanted) in found.hosts


def _shown(endpoint: str, keys: Keys, timeout_s: float) -> Facts | None:
    """Returns the facts from the certificate that a server shows, without verifying it."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(split_endpoint(endpoint), timeout=timeout_s) as sock,
        keys.curious.wrap_socket(sock) as tls,
    ):
        return _read(tls.getpeercert(binary_form=True))
    return None


def _read(der: bytes | None) -> Facts | None:
    try:
        return facts(x509.load_der_x509_certificate(der)) if der else None
    except (ValueError, WireError):
        return None
