"""Certificate authorities and TLS certificates for tests, including expired ones."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_client import EtcdClient
from chaos_lightning.service.etcd_servers import EtcdServers

DAY = datetime.timedelta(days=1)


@dataclass
class Authority:
    """A certificate authority that writes the certificates it signs into `folder`."""

    folder: Path
    name: str = "ca"

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = _builder(self._subject, self._subject, self._key, now - 1000 * DAY, now + DAY)
        made = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = self.folder / f"{self.name}.crt"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, names: tuple[str, ...] = ("127.0.0.1",), days: tuple[int, int] = (-1, 1)) -> Path:
        """Writes a certificate NAME.crt and its key NAME.key, valid from days[0] to days[1] days from now; returns the
        former's path.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self._subject, key, now + days[0] * DAY, now + days[1] * DAY)
        made = builder.add_extension(x509.SubjectAlternativeName([_name(n) for n in names]), critical=False)
        file = self.folder / f"{name}.crt"
        file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        file.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        return file


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    since: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@contextlib.contextmanager
def etcd_with_tls(folder: Path, certificate: Path, *options: str) -> Iterator[str]:
    """Starts one etcd server with TLS; yields its HOST:PORT once it serves."""
    try:
        made = EtcdServers(folder, 1)
    except ConfigurationError as error:
        pytest.skip(str(error))
    server = made.servers[0]
    url = f"https://{server.endpoint}"
    tls = ("--cert-file", str(certificate), "--key-file", str(certificate.with_suffix(".key")))
    made.options = ["--listen-client-urls", url, "--advertise-client-urls", url, *tls, *options]
    made.run(server)
    try:
        deadline = time.monotonic() + 30
        while "ready to serve client requests" not in server.log.read_text(errors="replace"):
            assert server.running(), server.last_words()
            assert time.monotonic() < deadline, server.last_words()
            time.sleep(0.01)
        yield server.endpoint
    finally:
        made.kill(server)


def words_of(address: str, deadline_s: float = 1.5) -> str:
    """Returns the error text of a client that cannot read a key from this address."""
    client = EtcdClient(read_address(address), deadline_s=deadline_s)
    with contextlib.closing(client), pytest.raises(StoreError) as caught:
        client.get("key")
    return str(caught.value)
