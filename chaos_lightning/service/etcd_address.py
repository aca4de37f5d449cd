"""Parses etcd's address and credentials as users write them: `etcd://...`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.service.options import ETCD

DEFAULT_PORT = 2379
CLIENTS = ("own", "etcd3")


@dataclass(frozen=True, kw_only=True)
class EtcdAddress:
    """Servers of etcd, and how to authenticate; secrets come from files and the environment.

    Attributes:
        servers: HOST:PORT of each server.
        prefix: Prefix of all keys.
        user: Name of the user; empty for none.
        password_file: File with the user's password.
        ca_file: Certificate authority of the servers; empty: no TLS.
        cert_file: This client's certificate.
        key_file: Key of this client's certificate.
        client: Client library: "own" (EtcdClient) or "etcd3" (service/etcd3_client.py).
    """

    servers: tuple[str, ...]
    prefix: str = "chaos-lightning"
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    client: str = "own"

    def __str__(self) -> str:
        return f"{ETCD}{','.join(self.servers)}/{self.prefix}"


GIVEN = {
    "password-file": "password_file",
    "ca": "ca_file",
    "cert": "cert_file",
    "key": "key_file",
    "client": "client",
}
EXPECTED = (
    "etcd://[USER@]HOST:PORT[,HOST:PORT...][/PREFIX][?ca=FILE&cert=FILE&key=FILE&password-file=FILE&client=own|etcd3]"
)
"""Form of an address. In --rdzv-conf, which is split at commas, write + between the servers."""


def read_address(text: str) -> EtcdAddress:
    """Parses an address of etcd from a text of the form `EXPECTED`.

    Raises:
        ConfigurationError: Something else; a password in it is refused, since command lines can be read by others.
    """
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigurationError(f"store {text!r}: {error}; expected {EXPECTED}") from error
    user, at, servers = parts.netloc.rpartition("@")
    if parts.scheme != "etcd" or not servers:
        raise ConfigurationError(f"store {text!r}: expected {EXPECTED}")
    if ":" in user:
        raise ConfigurationError(
            "the etcd password stands in the store's address, where others can read it: put it into a file, and write "
            "?password-file=FILE"
        )
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(given) - set(GIVEN))
    if unknown:
        raise ConfigurationError(f"store {text!r}: unknown {', '.join(unknown)}; expected {EXPECTED}")
    found = {GIVEN[name]: value for name, value in given.items()}
    if found.get("client", CLIENTS[0]) not in CLIENTS:
        raise ConfigurationError(f"store {text!r}: client={found['client']}; expected {' or '.join(CLIENTS)}")
    if bool(found.get("cert_file")) != bool(found.get("key_file")):
        raise ConfigurationError(f"store {text!r}: cert and key go together")
    if at and not found.get("password_file"):
        raise ConfigurationError(f"store {text!r}: user {user!r} needs a password: write ?password-file=FILE")
    named = tuple(_server(server, text) for server in re.split("[,+]", servers))
    prefix = parts.path.strip("/")
    return EtcdAddress(servers=named, user=unquote(user), **({"prefix": prefix} if prefix else {}), **found)


def _server(server: str, text: str) -> str:
    host, colon, port = server.rpartition(":")
    if not colon or server.endswith("]"):
        host, port = server, str(DEFAULT_PORT)
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        raise ConfigurationError(f"store {text!r}: {server!r} is no HOST:PORT; expected {EXPECTED}")
    return f"{host}:{port}"


def read_file(path: str, what: str) -> bytes:
    """Reads a file that etcd's address names; returns its content."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"etcd's {what} {path} cannot be read: {error.strerror}") from error
