"""A small client of etcd's v3 API: what a coordination store needs, with deadlines, several servers, TLS and passwords.

Theory of operation. Every call has one deadline. It is tried at the server that answered last; where that one is not
there, has no leader or does not answer within its part of the deadline, the next one is tried, round and round until
the deadline. So a call may have been carried out although an earlier attempt seemed to fail: callers write by
transactions that succeed once and can be recognised afterwards. A watch is a stream that breaks with its server; it is
resumed at the next one from the revision after the last one seen, so that nothing is lost; if that revision was
compacted meanwhile, the caller is told to read anew (`CompactedError`).

A server that accepts calls and never answers costs one part of the deadline; then the next one is asked. Likewise a
watch goes on at another server when this one does not confirm it, or when calls have left this one.

gRPC is used without asyncio, for the reason given in control/agent.py. The package etcd3 can do the work instead
(control/etcd3_client.py): `?client=etcd3` in the address.
"""

from __future__ import annotations

import contextlib
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from chaos_lightning.control import etcd_pb2 as pb
from chaos_lightning.control.channel import CLIENT_OPTIONS
from chaos_lightning.control.etcd_trouble import Attempt, check_certificate, explain_refusal, explain_silence
from chaos_lightning.control.options import ETCD
from chaos_lightning.errors import ConfigurationError, StoreError

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

R = TypeVar("R")

DEFAULT_PORT = 2379
DEADLINE_S = 5.0
_ATTEMPT_S = 1.0
"""A server that does not answer within this time is left for the next one."""
_PAUSE_S = 0.05
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_OWN_DEADLINE = "context deadline exceeded"
"""So a server says, as UNKNOWN, that a call ended while it waited for the others."""
_NO_SPACE = "space exceeded"
PAGE = 500
CLIENTS = ("own", "etcd3")


class UnansweredError(StoreError):
    """No server answered within the deadline; that may pass."""


class CompactedError(StoreError):
    """etcd has compacted the revisions that were asked for: read anew, then watch from there."""


@dataclass(frozen=True, kw_only=True)
class EtcdAddress:
    """Where etcd is and how to get in; what is secret comes from files and the environment.

    Attributes:
        servers: HOST:PORT of each.
        prefix: Before all keys.
        user: Empty for none.
        password_file: Its password.
        ca_file: Certificate authority of the servers; empty: no TLS.
        cert_file: This client's certificate.
        key_file: And its key.
        client: Who does the work: "own" (EtcdClient) or "etcd3" (control/etcd3_client.py).
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
"""In --rdzv-conf, which is split at commas, write + between the servers."""


def read_address(text: str) -> EtcdAddress:
    """From `EXPECTED`.

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


def _read(path: str, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"etcd's {what} {path} cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Server:
    """One of them; its channel is made when it is first needed."""

    name: str
    connect: Callable[[str], grpc.Channel]
    channel: grpc.Channel | None = None
    methods: dict[str, Any] = field(default_factory=dict)

    def method(self, path: str, reply: Any, *, stream: bool = False) -> Any:
        if self.channel is None:
            self.channel = self.connect(self.name)
        if path not in self.methods:
            make = self.channel.stream_stream if stream else self.channel.unary_unary
            self.methods[path] = make(
                path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=reply.FromString
            )
        return self.methods[path]

    def close(self) -> None:
        self.methods.clear()
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class EtcdClient:
    """See the module. Any thread may call; `close` ends all.

    Args:
        address: Where etcd is.
        deadline_s: Of each call.

    Raises:
        ConfigurationError: A file of the address cannot be read.
    """

    def __init__(self, address: EtcdAddress, deadline_s: float = DEADLINE_S) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._credentials = self._tls()
        self._password = ""
        if address.user:
            try:
                self._password = _read(address.password_file, "password file").decode().strip()
            except UnicodeError as error:
                raise ConfigurationError(f"etcd's password file {address.password_file} holds no text") from error
        self._auth = ""
        self._lock = threading.Lock()
        self._servers = [_Server(name, self._connect) for name in address.servers]
        random.shuffle(self._servers)  # candidates that all begin with the same one would all lose it at once
        self._now = 0
        self._closed = False

    @property
    def server(self) -> str:
        """HOST:PORT of the one that is asked first."""
        return self._first.name

    @property
    def _first(self) -> _Server:
        return self._servers[self._now % len(self._servers)]

    def _tls(self) -> grpc.ChannelCredentials | None:
        a = self.address
        if not a.ca_file and not a.cert_file:
            return None
        ca = _read(a.ca_file, "CA") if a.ca_file else None
        key = _read(a.key_file, "key") if a.key_file else None
        cert = _read(a.cert_file, "certificate") if a.cert_file else None
        for file, data in ((a.ca_file, ca), (a.cert_file, cert)):
            if data is not None:
                check_certificate(file, data)
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _connect(self, server: str) -> grpc.Channel:
        options = [*CLIENT_OPTIONS, ("grpc.min_reconnect_backoff_ms", 50), ("grpc.initial_reconnect_backoff_ms", 50)]
        options.append(("grpc.max_reconnect_backoff_ms", 500))
        if self._credentials is not None:
            return grpc.secure_channel(server, self._credentials, options=options)
        return grpc.insecure_channel(server, options=options)

    def close(self) -> None:
        """Idempotent. Calls that are under way end with a StoreError."""
        self._closed = True
        for server in self._servers:
            server.close()

    # ------------------------------------------------------------------ calls

    def call(self, path: str, request: Any, reply: Any, *, deadline_s: float | None = None) -> Any:
        """One unary call.

        Raises:
            StoreError: No server answered within the deadline, or etcd refused; says which and what to do.
        """

        def ask(server: _Server, limit_s: float) -> Any:
            return server.method(path, reply)(request, timeout=limit_s, metadata=self._metadata(server, limit_s))

        return self._try(ask, deadline_s)

    def _try(
        self, ask: Callable[[_Server, float], R], deadline_s: float | None = None, *, attempt_s: float = _ATTEMPT_S
    ) -> R:
        """Asks one server after the other until one answers."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        renewed = False
        failed: dict[str, Attempt] = {}
        while True:
            if self._closed:
                raise StoreError(f"the connection to {self.address} is closed")
            server = self._first
            limit_s = max(0.05, min(until - time.monotonic(), attempt_s))
            try:
                return ask(server, limit_s)
            except (grpc.RpcError, StopIteration) as error:
                code, words = grpc.StatusCode.UNAVAILABLE, "the stream ended without an answer"
                if isinstance(error, grpc.RpcError):
                    code, words = error.code(), error.details() or ""
                if code == grpc.StatusCode.UNAUTHENTICATED and self.address.user and not renewed:
                    renewed = True  # tokens end, or the server was restarted
                    self._forget_token(server)
                    continue
                again = code in _AGAIN or (code == grpc.StatusCode.UNKNOWN and _OWN_DEADLINE in words)
                if not again or _NO_SPACE in words:
                    raise self._refused(server, code, words) from error
                self._next(server)
                silent_s = limit_s if code == grpc.StatusCode.DEADLINE_EXCEEDED else 0.0
                if server.name not in failed or silent_s >= failed[server.name].silent_s:
                    failed[server.name] = Attempt(words, silent_s)
                if time.monotonic() + _PAUSE_S >= until:
                    raise UnansweredError(explain_silence(self.address, failed, deadline_s)) from error
                time.sleep(_PAUSE_S)
            except ValueError as error:  # the channel was closed meanwhile
                raise StoreError(f"the connection to {self.address} is closed") from error

    def _forget_token(self, server: _Server) -> None:
        self._auth = ""

    def _look_at(self, server: _Server, error: grpc.RpcError) -> None:
        """Why a watch's stream ended."""
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            self._forget_token(server)

    def _next(self, server: _Server) -> None:
        with self._lock:
            if self._first is server:
                self._now += 1

    def _metadata(self, server: _Server, timeout_s: float) -> tuple[tuple[str, str], ...]:
        if not self.address.user:
            return ()
        if not self._auth:
            method = server.method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)
            request = pb.AuthenticateRequest(name=self.address.user, password=self._password)
            self._auth = method(request, timeout=timeout_s).token
        return (("token", self._auth),)

    def _refused(self, server: _Server, code: grpc.StatusCode, words: str) -> StoreError:
        if "compacted" in words:
            return CompactedError(f"{self.address}: {words}")
        return StoreError(explain_refusal(self.address, server.name, code.name, words))

    # ------------------------------------------------------------------ keys

    def get(self, key: str) -> pb.KeyValue | None:
        """Linearizable: what a majority holds now."""
        found = self.call("/etcdserverpb.KV/Range", pb.RangeRequest(key=key.encode()), pb.RangeResponse).kvs
        return found[0] if found else None

    def get_all(self, prefix: str, *, deadline_s: float | None = None) -> tuple[list[pb.KeyValue], int]:
        """All keys that begin so, in order, as of one revision; and that revision."""
        found: list[pb.KeyValue] = []
        start, revision = prefix.encode(), 0
        while True:
            request = pb.RangeRequest(key=start, range_end=after_prefix(prefix), limit=PAGE, revision=revision)
            reply = self.call("/etcdserverpb.KV/Range", request, pb.RangeResponse, deadline_s=deadline_s)
            revision = revision or reply.header.revision
            found += reply.kvs
            if not reply.more:
                return found, revision
            start = reply.kvs[-1].key + b"\0"

    def transact(self, compare: Sequence[pb.Compare], writes: Sequence[pb.RequestOp]) -> tuple[bool, int]:
        """All writes if all comparisons hold, else nothing; and the revision at which that was so."""
        request = pb.TxnRequest(compare=compare, success=writes)
        reply = self.call("/etcdserverpb.KV/Txn", request, pb.TxnResponse)
        return reply.succeeded, reply.header.revision

    def compact(self, revision: int) -> None:
        """Forgets what was before; watches from there end."""
        self.call(
            "/etcdserverpb.KV/Compact", pb.CompactionRequest(revision=revision, physical=True), pb.CompactionResponse
        )

    def status(self) -> pb.StatusResponse:
        """Of the server that answers."""
        return self.call("/etcdserverpb.Maintenance/Status", pb.StatusRequest(), pb.StatusResponse)

    # ------------------------------------------------------------------ leases

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """A lease: (id, seconds as granted; etcd has a minimum)."""
        reply = self.call("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=ttl_s), pb.LeaseGrantResponse)
        return reply.ID, reply.TTL

    def revoke(self, lease: int) -> None:
        """Ends it, with all keys that hang on it; one that has ended already is no error."""
        try:
            self.call("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)
        except StoreError as error:
            if "not found" not in str(error):
                raise

    def keep_alive(self, lease: int, deadline_s: float) -> int:
        """Prolongs it once; the seconds that it has now, 0 if it has ended.

        Raises:
            StoreError: Nobody answered within the deadline.
        """

        def ask(server: _Server, limit_s: float) -> int:
            method = server.method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse, stream=True)
            asked = iter([pb.LeaseKeepAliveRequest(ID=lease)])
            stream = method(asked, timeout=limit_s, metadata=self._metadata(server, limit_s))
            try:
                return int(next(stream).TTL)
            finally:
                stream.cancel()

        return self._try(ask, deadline_s, attempt_s=_ATTEMPT_S / 2)

    # ------------------------------------------------------------------ watches

    def watch(
        self, prefix: str, revision: int, stop: threading.Event, *, every_s: float = _ATTEMPT_S / 4
    ) -> Iterator[list[pb.Event]]:
        """Changes of keys that begin so, from this revision on, until `stop`; an empty list every `every_s`.

        Raises:
            CompactedError: Changes since `revision` are forgotten.
        """
        while not stop.is_set() and not self._closed:
            server = self._first
            replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
            begun, confirmed = time.monotonic(), False
            try:
                with self._watching(server, prefix, revision, replies):
                    while not stop.is_set():
                        try:
                            reply = replies.get(timeout=every_s)
                        except queue.Empty:
                            yield []
                            if not confirmed and time.monotonic() - begun > _ATTEMPT_S:
                                break  # it accepts, and does not answer
                            if self._first is not server:
                                break  # a call has found that it does not answer
                            continue
                        if reply is None:
                            break
                        confirmed = True
                        if reply.compact_revision:
                            raise CompactedError(
                                f"{self.address}: revisions before {reply.compact_revision} are forgotten"
                            )
                        if reply.canceled:
                            self._forget_token(server)  # so etcd says that it is no longer valid, and not by a status
                            break
                        if reply.events:
                            # Not the header's revision: a watch that catches up gets what it missed in parts.
                            revision = max(revision, reply.events[-1].kv.mod_revision + 1)
                            yield list(reply.events)
            except (grpc.RpcError, ValueError):
                pass
            self._next(server)
            stop.wait(_PAUSE_S)
            yield []

    @contextlib.contextmanager
    def _watching(self, server: _Server, prefix: str, revision: int, replies: queue.SimpleQueue[Any]) -> Iterator[None]:
        """One stream; None in `replies` is its end."""
        ended = threading.Event()
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=after_prefix(prefix), start_revision=revision, progress_notify=True
        )

        def requests() -> Iterator[Any]:
            yield pb.WatchRequest(create_request=create)
            ended.wait()

        method = server.method("/etcdserverpb.Watch/Watch", pb.WatchResponse, stream=True)
        stream = method(requests(), metadata=(*self._metadata(server, _ATTEMPT_S), ("hasleader", "true")))

        def read() -> None:
            try:
                for reply in stream:
                    replies.put(reply)
            except grpc.RpcError as error:
                self._look_at(server, error)
            replies.put(None)

        reader = threading.Thread(target=read, name="chaos-etcd-watch", daemon=True)
        reader.start()
        try:
            yield
        finally:
            ended.set()
            stream.cancel()


def after_prefix(prefix: str) -> bytes:
    """The first key after all that begin with `prefix`."""
    data = prefix.encode().rstrip(b"\xff")
    return data[:-1] + bytes([data[-1] + 1])


def same_revision(key: str, revision: int) -> pb.Compare:
    """The key was last changed then; 0: it is not there."""
    return pb.Compare(target=pb.Compare.MOD, key=key.encode(), mod_revision=revision)


def put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    """A write of a transaction."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(prefix: str) -> pb.RequestOp:
    """All keys that begin so."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=prefix.encode(), range_end=after_prefix(prefix)))


def open_client(address: EtcdAddress, deadline_s: float = DEADLINE_S) -> EtcdClient:
    """The client that the address asks for.

    Raises:
        ConfigurationError: A file of the address cannot be read or has expired, or the package etcd3 is not installed.
    """
    if address.client == "etcd3":
        from chaos_lightning.control.etcd3_client import Etcd3Client

        return Etcd3Client(address, deadline_s)
    return EtcdClient(address, deadline_s)
