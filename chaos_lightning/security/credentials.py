"""Credentials with which this process identifies itself and checks others: a bare token, or a folder of keys.

Theory of operation. Everything that talks to a scheduler is given `Credentials`, or just a token. With a folder of keys
(security/keyfiles.py) control channels are mutual TLS and the token travels inside; without, the token is all there is,
and travels as it is. The folder is looked at whenever a connection is made or taken, and read again when its files have
changed; while they are being replaced, or if they do not fit together, the last ones that did stay in use. So keys are
rotated under a running job by copying files.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError, RefusedError, WireError
from chaos_lightning.machine.addresses import is_loopback
from chaos_lightning.security.access import MIN_TOKEN_NBYTES, TOKEN_KEY, load_token
from chaos_lightning.security.certificates import Facts, facts_of, when
from chaos_lightning.security.keyfiles import CHAIN, KEY, TOKEN, TRUSTED
from chaos_lightning.security.roles import shows_token

logger = logging.getLogger("chaos_lightning.security")

_FILES = (TRUSTED, CHAIN, KEY, TOKEN)
_PATIENCE_S = 2.0
"""Seconds within which files that are being replaced fit together again."""
_RETRY_S = 0.05
_SOON = timedelta(days=14)
_WARN_AGAIN_S = 86400.0
"""Seconds after which a process that runs for weeks says again that its certificate is about to end."""


@dataclass(frozen=True)
class Keys:
    """Keys read from a node's folder, at one moment. Secrets stay out of `repr`.

    Attributes:
        facts: Facts of this node's certificate.
        trusted: Certificates of the authorities that are believed (PEM).
        chain: This node's certificate (PEM).
        key: Key of this node (PEM).
        tokens: Cluster token, and during a rotation the old one; none unless the node's role shows it.
        server: TLS context for incoming connections.
        client: TLS context for a look at a server's certificate; does not check its host name.
        curious: TLS context that trusts any server, to read what a certificate says that is not valid.
    """

    facts: Facts
    trusted: bytes
    chain: bytes
    key: bytes = field(repr=False)
    tokens: tuple[bytes, ...] = field(repr=False)
    server: ssl.SSLContext = field(repr=False)
    client: ssl.SSLContext = field(repr=False)
    curious: ssl.SSLContext = field(repr=False)


class KeyFolder:
    """Folder of a node's keys, which is read again when files change. Methods may be called from any thread.

    Args:
        folder: With ca.crt, node.crt, node.key and, where its role shows it, token.

    Raises:
        ConfigurationError: A file is missing or does not fit the others, or the certificate does not count now.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self._lock = threading.Lock()
        self._seen: object = None
        self._complained: object = None
        self._warned_at = 0.0
        self._warned_of: tuple[Facts, str] | None = None
        """Certificate that was looked at then, and what was wrong with it."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._seen = self._signature()
            try:
                self._keys = self._read()
                break
            except ConfigurationError:
                if self._signature() == self._seen or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)  # somebody is replacing the files
        facts = self._keys.facts
        if facts.trouble:
            raise ConfigurationError(
                f"the certificate of {facts.name} in {self.folder} does not count: {facts.trouble}; make another one "
                f"with `chaos-lightning keys node {facts.name} --renew` and copy it here"
            )
        self._warn_of_end(facts)

    def __repr__(self) -> str:
        return f"KeyFolder({str(self.folder)!r})"

    def current(self) -> Keys:
        """Returns the present keys; while the files do not fit together, the last ones that did."""
        with self._lock:
            signature = self._signature()
            if signature not in (self._seen, self._complained):
                try:
                    self._keys, self._seen = self._read(), signature
                except ConfigurationError as error:
                    logger.warning("the keys in %s have changed and cannot be used: %s", self.folder, error)
                    self._complained = signature
            self._warn_of_end(self._keys.facts)
            return self._keys

    def _signature(self) -> tuple[object, ...]:
        found: list[object] = []
        for name in _FILES:
            try:
                status = (self.folder / name).stat()
                found.append((status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)

    def _read(self) -> Keys:
        before = self._signature()
        contents = {name: self._bytes(name) for name in (TRUSTED, CHAIN, KEY)}
        facts = self._facts()
        tokens: tuple[bytes, ...] = ()
        if shows_token(facts.role):
            tokens = tuple(self._bytes(TOKEN).split())
            if not tokens or any(len(token) < MIN_TOKEN_NBYTES for token in tokens):
                raise ConfigurationError(f"{self.folder / TOKEN}: expected a token of {MIN_TOKEN_NBYTES} bytes or more")
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0  # a session that is resumed would outlive the keys it began with
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        curious = self._context(ssl.PROTOCOL_TLS_CLIENT)
        curious.verify_mode = ssl.CERT_NONE
        if self._signature() != before:
            raise ConfigurationError(f"the files in {self.folder} are being replaced")
        self._warn_of_readers()
        return Keys(facts, contents[TRUSTED], contents[CHAIN], contents[KEY], tokens, server, client, curious)

    def _warn_of_end(self, facts: Facts) -> None:
        """Warns if the certificate is invalid or expires soon: once when it changes or expires, and then daily."""
        found = (facts, facts.trouble)
        if found == self._warned_of and time.monotonic() - self._warned_at < _WARN_AGAIN_S:
            return
        self._warned_at, self._warned_of, how = time.monotonic(), found, ""
        if facts.trouble:
            how = f"does not count: {facts.trouble}; nobody lets this process in, nor comes in here"
        elif (left := facts.until - datetime.now(UTC)) < _SOON:
            how = f"ends in {left / timedelta(days=1):.1f} days, on {when(facts.until)}"
        if how:
            logger.warning(
                "the certificate of %s %s; renew it: chaos-lightning keys node %s --renew", facts.name, how, facts.name
            )

    def _facts(self) -> Facts:
        try:
            return facts_of(self.folder / CHAIN)
        except WireError as error:
            raise ConfigurationError(f"{self.folder / CHAIN}: {error}") from error

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{self.folder / name} cannot be read ({error.strerror}); keys_dir is a folder DIR/nodes/NAME that "
                f"`chaos-lightning keys` has made, with {TRUSTED}, {CHAIN}, {KEY} and {TOKEN} where the role shows it"
            ) from error

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        try:
            context.load_cert_chain(self.folder / CHAIN, self.folder / KEY)
            context.load_verify_locations(self.folder / TRUSTED)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(
                f"{CHAIN}, {KEY} and {TRUSTED} in {self.folder} do not fit together ({error}); copy the whole folder "
                "again"
            ) from error
        return context

    def _warn_of_readers(self) -> None:
        for name in (KEY, TOKEN):
            try:
                mode = (self.folder / name).stat().st_mode
            except OSError:
                continue
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                logger.warning(
                    "%s can be read by others (mode %o); chmod 600 it", self.folder / name, stat.S_IMODE(mode)
                )


class Credentials:
    """Credentials of this process: a token, or a folder of keys.

    Args:
        token: A bare cluster token, b"" for none.
        keys: A folder of keys, which holds the token too.
    """

    def __init__(self, token: bytes = b"", keys: KeyFolder | None = None) -> None:
        self._token = token
        self.keys = keys

    @classmethod
    def of(cls, secret: Secret) -> Credentials:
        """Wraps a bare token into credentials; returns credentials unchanged."""
        return cls(secret) if isinstance(secret, bytes) else secret

    @classmethod
    def load(cls, keys_dir: str = "", token_file: str = "", environ: Mapping[str, str] = os.environ) -> Credentials:
        """Loads the user's credentials: keys_dir, else token_file, else CHAOS_KEYS_DIR, else a token from the
        environment.

        Raises:
            ConfigurationError: Both are given, or what is given cannot be used.
        """
        if keys_dir and token_file:
            raise ConfigurationError(
                f"keys_dir={keys_dir} and token_file={token_file}: give one of them; a folder of keys has its own token"
            )
        folder = keys_dir or ("" if token_file else environ.get("CHAOS_KEYS_DIR", ""))
        return cls(keys=KeyFolder(folder)) if folder else cls(load_token(token_file, environ))

    def __bool__(self) -> bool:
        """Returns whether these credentials keep strangers out."""
        return bool(self._token) or self.keys is not None

    def __repr__(self) -> str:
        return f"Credentials({self.keys or ('a token' if self._token else 'none')})"

    @property
    def secret_channel(self) -> bool:
        """Whether control channels are encrypted and authenticated."""
        return self.keys is not None

    @property
    def keys_dir(self) -> str:
        """Path of the folder of keys; "" if there is none."""
        return str(self.keys.folder) if self.keys is not None else ""

    @property
    def bare_token(self) -> bytes:
        """Token that was given without a folder of keys; b"" if there is none."""
        return self._token

    def tokens(self) -> tuple[bytes, ...]:
        """Returns the tokens that this process shows and accepts, newest first."""
        if self.keys is not None:
            return self.keys.current().tokens
        return (self._token,) if self._token else ()

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Returns gRPC metadata with the tokens; during a rotation with the old one too, which the scheduler may still
        expect.
        """
        return tuple((TOKEN_KEY, token) for token in self.tokens())


Secret = bytes | Credentials
"""Bare token, or credentials."""


def known(shown: Sequence[bytes], accepted: Sequence[bytes]) -> bool:
    """Returns whether one of the shown tokens is accepted; takes the same time wherever they differ."""
    matches = [hmac.compare_digest(one, other) for one in shown for other in accepted]
    return any(matches)


def open_channel(endpoint: str, secret: Secret, options: list[tuple[str, Any]]) -> Any:
    """Opens a gRPC channel to `endpoint`: mutual TLS with the present keys, or plain if there are none; returns it.

    Raises:
        RefusedError: This process's certificate does not count (any more).
    """
    import grpc

    keys = Credentials.of(secret).keys
    if keys is None:
        return grpc.insecure_channel(endpoint, options=options)
    now = keys.current()
    if now.facts.trouble:
        raise RefusedError(
            f"the certificate of {now.facts.name} in {keys.folder} does not count: {now.facts.trouble}; renew it "
            f"(`chaos-lightning keys node {now.facts.name} --renew`) and copy it here, this process will see it"
        )
    shown = grpc.ssl_channel_credentials(now.trusted, now.key, now.chain)
    return grpc.secure_channel(endpoint, shown, options=options)


def check_bind(host: str, token: Secret) -> None:
    """Refuses to listen beyond loopback without a token or keys."""
    if not token and not is_loopback(host):
        raise ConfigurationError(
            f"listening on {host} would let everybody in who can reach it: give a folder of keys (`chaos-lightning "
            "keys init`, then --keys-dir, keys_dir= or CHAOS_KEYS_DIR), or at least a cluster token (--token-file, "
            "token_file= or CHAOS_TOKEN_FILE / CHAOS_TOKEN, the same on all nodes), or bind to 127.0.0.1"
        )
