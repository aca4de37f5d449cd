"""Makes and reads the certificates of a cluster: its authority's and its nodes'.

Theory of operation. Keys are on the curve P-256, which everything that speaks TLS knows. A node's certificate carries
its role and name (security/roles.py), and for roles that serve the hosts where it is reached: only their certificates
are good for a server, so an observer cannot play the scheduler.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.security.roles import read_uris, serves, uri

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
CLOCK_SLACK = timedelta(minutes=5)
"""Time before now from which on certificates count, for clocks of nodes that are behind."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names by which every member may also be called, for jobs on one machine."""
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


def host_name(host: str) -> x509.GeneralName:
    """Returns a host's name or IP address as an entry of a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(host) or host.replace(".", "").isdigit():
        raise ConfigurationError(f"{host!r} is neither an IP address nor a host name (without port, please)")
    return x509.DNSName(host)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    days: float,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(
    subject: x509.Name, public: ec.EllipticCurvePublicKey, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    builder = _builder(subject, issuer, public, signer.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.add_extension(_usage(authority=True), critical=True).sign(signer, hashes.SHA256())


def new_authority(cluster: str) -> tuple[str, str]:
    """Makes a self-signed certificate authority; returns its certificate and key (PEM)."""
    key = _key()
    # Each authority has a name of its own: during a rotation two are believed, and verifiers look them up by name.
    mark = secrets.token_hex(4)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"chaos-lightning {cluster} {mark}")])
    return _text(_authority(subject, key.public_key(), subject, key)), _pem(key)


def _load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def bridge(authority: tuple[str, str], old: tuple[str, str]) -> str:
    """Signs a new authority's certificate by the old one, so that whoever trusts the old one trusts the new; returns it
    (PEM).
    """
    made, signer = x509.load_pem_x509_certificate(old[0].encode()), _load_key(old[1])
    ours = x509.load_pem_x509_certificate(authority[0].encode())
    return _text(_authority(ours.subject, _load_key(authority[1]).public_key(), made.subject, signer))


def certify(
    authority: tuple[str, str], cluster: str, name: str, role: str, hosts: Iterable[str] = (), days: float = NODE_DAYS
) -> tuple[str, str]:
    """Makes a node's key and its certificate, signed by the authority; returns certificate and key (PEM).

    Args:
        authority: Certificate and key (PEM).
        cluster: The cluster's name.
        name: Name of the node.
        role: A registered role (roles.register_role).
        hosts: Host names and addresses at which the node is reached; only for a role that serves.
        days: Days for which the certificate is valid.
    """
    above, signer = x509.load_pem_x509_certificate(authority[0].encode()), _load_key(authority[1])
    key, called = _key(), serves(role)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri(cluster, role, name))]
    if called:
        names += [host_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if called else [])]
    said = ((NameOID.COMMON_NAME, name), (NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    subject = x509.Name([x509.NameAttribute(kind, text) for kind, text in said])
    certificate = (
        _builder(subject, above.subject, key.public_key(), signer.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _text(certificate), _pem(key)


def signed_by(certificate: str, authority: str) -> bool:
    """Returns whether this authority (PEM) has directly signed the certificate (PEM)."""
    try:
        x509.load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(
            x509.load_pem_x509_certificate(authority.encode())
        )
    except (ValueError, InvalidSignature):
        return False
    return True


def each_of(bundle: bytes) -> tuple[str, ...]:
    """Returns the certificates (PEM) in a file, each in the same form; raises ValueError if one is malformed."""
    return tuple(_text(certificate) for certificate in x509.load_pem_x509_certificates(bundle))


def first_of(chain: bytes) -> str:
    """Returns the first certificate (PEM) in a file; raises ValueError if there is none."""
    return _text(x509.load_pem_x509_certificates(chain)[0])


# ------------------------------------------------------------------------------------------------ facts


@dataclass(frozen=True)
class Facts:
    """Facts that a certificate states: node, role, hosts and validity."""

    name: str
    role: str
    hosts: tuple[str, ...]
    since: datetime
    until: datetime

    @property
    def trouble(self) -> str:
        """Reason why the certificate is not valid now; "" if it is."""
        now = datetime.now(UTC)
        if now > self.until:
            return f"it expired on {when(self.until)}"
        return f"it counts only from {when(self.since)} on (is this clock right?)" if now < self.since else ""


def when(moment: datetime) -> str:
    """Returns a time as text, to the minute, in UTC."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def facts(certificate: x509.Certificate) -> Facts:
    """Returns node, role, hosts and validity that a certificate states.

    Raises:
        WireError: The certificate names no role of ours.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    role, name = read_uris(names.get_values_for_type(x509.UniformResourceIdentifier))
    hosts = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    return Facts(name, role, hosts, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def facts_of(path: Path) -> Facts:
    """Returns node, role, hosts and validity from the certificate in a file.

    Raises:
        ConfigurationError: The file cannot be read; the message names it.
    """
    try:
        return facts(x509.load_pem_x509_certificates(path.read_bytes())[0])
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no certificate: {error}") from error
