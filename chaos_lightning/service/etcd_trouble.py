"""Explains errors of etcd to the user, with advice.

Theory of operation. gRPC says of a connection that failed little more than that it did. Where its words are not enough
this module looks for itself, once, before the error is raised: it opens a TLS connection of its own, and reads the
server's certificate without trusting it. So the message can say when a certificate expired, or for which names it was
made. A client's own certificate is looked at when its file is read, for a server says only "bad certificate" about it.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.x509.oid import NameOID

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.service.etcd_address import EtcdAddress

_LOOK_S = 0.5
"""Seconds for each look at a server."""
_PAGE_NBYTES = 4096
_PLAIN = "it does not speak TLS: leave ca=, cert= and key= out of the address, or have etcd use TLS"
_WEB = "a web server answers there, no etcd: look at the port"


@dataclass(frozen=True, slots=True)
class FailedCall:
    """Failure of a call at one server of etcd: gRPC's message, and how long the server was silent, s (0: it
    answered).
    """

    words: str
    silent_s: float = 0.0


# ------------------------------------------------------------------ certificates


def check_certificate(file: str, data: bytes) -> None:
    """Checks that a PEM file of the user's holds a certificate that is valid now.

    Raises:
        ConfigurationError: The file holds no certificate, or the first one has expired or is not valid yet; says when.
    """
    try:
        found = x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise ConfigurationError(f"etcd's certificate file {file} holds no certificate in PEM form: {error}") from error
    words = _out_of_time(found)
    if words:
        raise ConfigurationError(f"the certificate in {file} {words}")


def _out_of_time(certificate: x509.Certificate) -> str:
    """Returns why a certificate is not valid now, by the wall clock; "" if it is."""
    now = datetime.datetime.now(datetime.UTC)
    until, since = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if now > until:
        return f"expired on {until:%Y-%m-%d %H:%M} UTC: have it renewed"
    if now < since:
        return f"is not valid before {since:%Y-%m-%d %H:%M} UTC: is the clock of this machine right ({now:%Y-%m-%d})?"
    return ""


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return [str(a.value) for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return [str(n.value) for n in found if isinstance(n, x509.DNSName | x509.IPAddress)]


def _look(address: EtcdAddress, server: str) -> tuple[x509.Certificate | None, str]:
    """Returns an etcd server's certificate, unverified, and its complaint about ours ("" if none)."""
    host, _, port = server.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    certificate = None
    try:
        if address.cert_file:
            context.load_cert_chain(address.cert_file, address.key_file)
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S) as plain,
            context.wrap_socket(plain) as sock,
        ):
            data = sock.getpeercert(binary_form=True)
            certificate = x509.load_der_x509_certificate(data) if data else None
            sock.settimeout(_LOOK_S)
            with contextlib.suppress(TimeoutError):
                sock.recv(1)  # with TLS 1.3 a client hears here that its certificate is not wanted
    except ssl.SSLError as error:
        return certificate, error.reason or str(error)
    except (OSError, ValueError):
        return certificate, ""
    return certificate, ""


def _page(server: str) -> str:
    """Returns a server's answer to a plain HTTP request for etcd's version; "" if it gives none."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S) as sock:
            sock.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            said = b""
            while len(said) < _PAGE_NBYTES and (part := sock.recv(_PAGE_NBYTES)):
                said += part
    except (OSError, ValueError):
        return ""
    text = said.decode(errors="replace")
    return text if text.startswith("HTTP/1.") else ""


def _about_page(address: EtcdAddress, server: str) -> str:
    """Returns what is wrong if a server answers plain HTTP: it is no etcd, or etcd without TLS; "" if nothing is."""
    found = _page(server)
    if found and "etcdserver" not in found:
        return _WEB
    return _PLAIN if found and _secure(address) else ""


def _about_connection(address: EtcdAddress, server: str) -> str:
    """Returns what seems to be wrong with the connection to a server of etcd; "" if nothing."""
    certificate, refusal = _look(address, server)
    if certificate is None:
        return _about_page(address, server)
    if not _secure(address):
        return "it speaks TLS: write ?ca=FILE, the certificate authority that signed its certificate"
    expired = _out_of_time(certificate)
    if expired:
        return f"its certificate {expired}"
    if refusal and ("CERTIFICATE" in refusal or "UNKNOWN_CA" in refusal or "HANDSHAKE" in refusal):
        if not address.cert_file:
            return "it demands a client's certificate: write &cert=FILE&key=FILE"
        return f"it does not accept the certificate in {address.cert_file} ({refusal.lower().replace('_', ' ')})"
    host, names = server.rpartition(":")[0].strip("[]"), _names(certificate)
    if not any(_matches(host, name) for name in names):
        return (
            f"its certificate is made for {', '.join(names) or 'no name'}, not for {host}: write one of those names "
            "into the address, or have a certificate made that names this one"
        )
    return f"its certificate was not signed by the certificate authority in {address.ca_file or 'this system'}"


def _matches(host: str, name: str) -> bool:
    if name.startswith("*."):
        return host.partition(".")[2].lower() == name[2:].lower()
    return host.lower() == name.lower()


# ------------------------------------------------------------------ words


def explain_silence(address: EtcdAddress, failed: Mapping[str, FailedCall], deadline_s: float) -> str:
    """Returns a message for the user after no server of etcd has answered a call within its deadline."""
    each = [f"{server}: {_why(address, server, attempt)}" for server, attempt in sorted(failed.items())]
    unasked = [server for server in address.servers if server not in failed]
    each += [f"{server}: there was no time to ask it" for server in unasked]
    return (
        f"etcd at {', '.join(address.servers)} did not answer within {deadline_s:g} s ({'; '.join(each)}): is a "
        "majority of its servers up, and are addresses and certificates right?"
    )


def _why(address: EtcdAddress, server: str, attempt: FailedCall) -> str:
    words = attempt.words
    lower = words.lower()
    if "no leader" in lower or "request timed out" in lower or "context deadline exceeded" in lower:
        return "it waits for the majority of its cluster"
    if "connection refused" in lower:
        return "nobody listens there (connection refused): does etcd run there, and on this port?"
    if "dns resolution" in lower or "domain name" in lower or "name or service" in lower:
        return "this name is not known"
    if attempt.silent_s or "settings frame" in lower or "timed out" in lower:
        waited = f" for {attempt.silent_s:.2g} s" if attempt.silent_s else ""
        return _about_page(address, server) or f"no answer{waited}: it is frozen or cut off, or no etcd"
    return _about_connection(address, server) or words[:300] or "it closed the connection"


def _secure(address: EtcdAddress) -> bool:
    return bool(address.ca_file or address.cert_file)


def explain_refusal(address: EtcdAddress, server: str, code: str, words: str) -> str:
    """Returns a message for the user after a server of etcd has refused a request."""
    lower = words.lower()
    said = f"etcd at {server} says {words!r}"
    if "space exceeded" in lower:
        return (
            f"{said}: its disk quota is used up, and nothing can be decided until there is room; training goes on. "
            "Compact its history and defragment every server (etcdctl compact REVISION; etcdctl defrag --cluster), "
            "give it more by --quota-backend-bytes if it is full of what is needed, then lift the alarm: etcdctl alarm "
            "disarm"
        )
    if "authentication failed" in lower:
        return (
            f"{said}: it does not let user {address.user!r} in; look at the password in {address.password_file}, and "
            f"whether there is such a user (etcdctl user list)"
        )
    if "authentication is not enabled" in lower:
        return (
            f"{said}: it has no passwords, and lets everybody in; leave {address.user}@ and password-file= out of the "
            "address, or enable them: etcdctl auth enable"
        )
    if "user name is empty" in lower or "invalid auth token" in lower:
        return f"{said}: it demands a password; write etcd://USER@...?password-file=FILE"
    if "permission denied" in lower:
        return (
            f"{said}: user {address.user!r} may not read and write keys below {address.prefix}/; grant it: "
            f"etcdctl role grant-permission ROLE --prefix=true readwrite {address.prefix}/"
        )
    if code == "UNIMPLEMENTED":
        return f"at {server} another kind of service listens, no etcd ({words[:200]}): look at the port"
    return f"{address} refused: {code}: {words[:500]} (said by {server})"
