"""A small client of etcd's v3 API with what a store needs: deadlines, several servers, TLS and passwords.

Theory of operation. Every call has one deadline. It is tried at the server that answered last; where that one is not
there, has no leader or does not answer within its part of the deadline, the next one is tried, round and round until
the deadline. So a call may have been carried out although an earlier attempt seemed to fail: callers write by
transactions that succeed once and can be recognised afterwards. A watch is a stream that breaks with its server; it is
resumed at the next one from the revision after the last one seen, so that nothing is lost; if that revision was
compacted meanwhile, the caller is told to read anew (`CompactedError`).

A server that accepts calls and never answers costs one part of the deadline; then the next one is asked. Likewise a
watch goes on at another server when this one does not confirm it, or when calls have left this one.

What is asked of one server goes over a `Connection`: `OwnConnection`, or the package etcd3 (service/etcd3_client.py)
where the address says `?client=etcd3`. gRPC is used without asyncio, for the reason given in control/agent.py.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.channel import CLIENT_OPTIONS, RECONNECT_SOON
from chaos_lightning.service.etcd_address import EtcdAddress, read_file
from chaos_lightning.service.etcd_methods import ATTEMPT_S, STREAMED, method
from chaos_lightning.service.etcd_trouble import FailedCall, check_certificate, explain_refusal, explain_silence

import grpc  # isort: skip  (after channel, which sets gRPC's environment)


DEADLINE_S = 5.0
_PAUSE_S = 0.05
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_OWN_DEADLINE = "context deadline exceeded"
"""Words by which a server says, as UNKNOWN, that a call ended while it waited for the others."""
_NO_SPACE = "space exceeded"
PAGE = 500


class UnansweredError(StoreError):
    """Error of a call that no server of etcd answered within the deadline; a later one may succeed."""


class CompactedError(StoreError):
    """Error of a watch that begins at revisions etcd has compacted: read the keys again, and watch from there."""


# ------------------------------------------------------------------ one server


class Connection(Protocol):
    """Connection to one server of etcd. Methods raise gRPC's errors, and ValueError after `close`."""

    name: str
    """HOST:PORT of the server."""

    def ask(self, request: Any, limit_s: float) -> Any:
        """Sends a request to etcd; returns its answer, of a keep-alive stream the first one."""

    def watch(self, requests: Iterator[Any]) -> Any:
        """Opens a watch; returns the stream of its responses, which has a method `cancel`."""

    def forget_token(self) -> None:
        """Forgets an expired token, so that the next call logs in again."""

    def close(self) -> None:
        """Closes the connection. Idempotent."""


class OwnConnection:
    """Connection to one server of etcd, made directly with gRPC at the first call.

    Args:
        server: HOST:PORT of the server.
        address: Address of etcd, with the name of the user who logs in.
        password: Password of that user.
        credentials: TLS credentials; None: without TLS.
    """

    def __init__(
        self, server: str, address: EtcdAddress, password: str, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self.name = server
        self._user, self._password = address.user, password
        self._credentials = credentials
        self._token = ""
        self._channel: grpc.Channel | None = None
        self._closed = False
        self._methods: dict[Any, Any] = {}

    def ask(self, request: Any, limit_s: float) -> Any:
        made = self._method(type(request))
        metadata = self._metadata(limit_s)
        if type(request) not in STREAMED:
            return made(request, timeout=limit_s, metadata=metadata)
        call = made(iter([request]), timeout=limit_s, metadata=metadata)
        try:
            return next(call)
        finally:
            call.cancel()

    def watch(self, requests: Iterator[Any]) -> Any:
        metadata = (*self._metadata(ATTEMPT_S), ("hasleader", "true"))
        return self._method(pb.WatchRequest)(requests, metadata=metadata)

    def _method(self, request: Any) -> Any:
        if self._closed:
            raise ValueError("closed")
        if self._channel is None:
            options = [*CLIENT_OPTIONS, *RECONNECT_SOON]
            if self._credentials is not None:
                self._channel = grpc.secure_channel(self.name, self._credentials, options=options)
            else:
                self._channel = grpc.insecure_channel(self.name, options=options)
        if request not in self._methods:
            self._methods[request] = method(self._channel, request)
        return self._methods[request]

    def _metadata(self, timeout_s: float) -> tuple[tuple[str, str], ...]:
        if not self._user:
            return ()
        if not self._token:
            request = pb.AuthenticateRequest(name=self._user, password=self._password)
            self._token = self._method(pb.AuthenticateRequest)(request, timeout=timeout_s).token
        return (("token", self._token),)

    def forget_token(self) -> None:
        self._token = ""

    def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            self._channel.close()


Connect = Callable[[str, EtcdAddress, str, grpc.ChannelCredentials | None], Connection]


# ------------------------------------------------------------------ all servers


class EtcdClient:
    """Client of etcd with one or more servers. Any thread may call it; `close` ends all calls.

    Args:
        address: Servers of etcd, and how to authenticate.
        deadline_s: Deadline of each call, s.
        connect: Makes the connection to one server.

    Raises:
        ConfigurationError: A file of the address cannot be read.
    """

    def __init__(self, address: EtcdAddress, deadline_s: float = DEADLINE_S, connect: Connect = OwnConnection) -> None:
        self.address = address
        self.deadline_s = deadline_s
        credentials, password = self._tls(), ""
        if address.user:
            try:
                password = read_file(address.password_file, "password file").decode().strip()
            except UnicodeError as error:
                raise ConfigurationError(f"etcd's password file {address.password_file} holds no text") from error
        self._lock = threading.Lock()
        self._servers = [connect(name, address, password, credentials) for name in address.servers]
        random.shuffle(self._servers)  # candidates that all begin with the same one would all lose it at once
        self._now = 0
        self._closed = False

    @property
    def server(self) -> str:
        """HOST:PORT of the server that is asked first."""
        return self._first.name

    @property
    def _first(self) -> Connection:
        return self._servers[self._now % len(self._servers)]

    def _tls(self) -> grpc.ChannelCredentials | None:
        a = self.address
        if not a.ca_file and not a.cert_file:
            return None
        ca = read_file(a.ca_file, "CA") if a.ca_file else None
        key = read_file(a.key_file, "key") if a.key_file else None
        cert = read_file(a.cert_file, "certificate") if a.cert_file else None
        for file, data in ((a.ca_file, ca), (a.cert_file, cert)):
            if data is not None:
                check_certificate(file, data)
        return grpc.ssl_channel_credentials(ca, key, cert)

    def close(self) -> None:
        """Closes all connections; unfinished calls raise StoreError. Idempotent."""
        self._closed = True
        for server in self._servers:
            server.close()

    # ------------------------------------------------------------------ calls

    def call(self, request: Any, *, deadline_s: float | None = None, attempt_s: float = ATTEMPT_S) -> Any:
        """Sends a request to one server after the other until one answers.

        Raises:
            StoreError: No server answered within the deadline, or etcd refused; says which and what to do.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        renewed = False
        failed: dict[str, FailedCall] = {}
        while True:
            if self._closed:
                raise StoreError(f"the connection to {self.address} is closed")
            server = self._first
            limit_s = max(0.05, min(until - time.monotonic(), attempt_s))
            try:
                return server.ask(request, limit_s)
            except (grpc.RpcError, StopIteration) as error:
                code, words = grpc.StatusCode.UNAVAILABLE, "the stream ended without an answer"
                if isinstance(error, grpc.RpcError):
                    code, words = error.code(), error.details() or ""
                if code == grpc.StatusCode.UNAUTHENTICATED and self.address.user and not renewed:
                    renewed = True  # tokens end, or the server was restarted
                    server.forget_token()
                    continue
                again = code in _AGAIN or (code == grpc.StatusCode.UNKNOWN and _OWN_DEADLINE in words)
                if not again or _NO_SPACE in words:
                    raise self._refused(server, code, words) from error
                self._next(server)
                silent_s = limit_s if code == grpc.StatusCode.DEADLINE_EXCEEDED else 0.0
                if server.name not in failed or silent_s >= failed[server.name].silent_s:
                    failed[server.name] = FailedCall(words, silent_s)
                if time.monotonic() + _PAUSE_S >= until:
                    raise UnansweredError(explain_silence(self.address, failed, deadline_s)) from error
                time.sleep(_PAUSE_S)
            except ValueError as error:  # the channel was closed meanwhile
                raise StoreError(f"the connection to {self.address} is closed") from error

    def _next(self, server: Connection) -> None:
        with self._lock:
            if self._first is server:
                self._now += 1

    def _refused(self, server: Connection, code: grpc.StatusCode, words: str) -> StoreError:
        if "compacted" in words:
            return CompactedError(f"{self.address}: {words}")
        return StoreError(explain_refusal(self.address, server.name, code.name, words))

    # ------------------------------------------------------------------ keys

    def get(self, key: str) -> pb.KeyValue | None:
        """Returns a key as a majority of servers has it now (linearizable); None if it does not exist."""
        found = self.call(pb.RangeRequest(key=key.encode())).kvs
        return found[0] if found else None

    def get_all(self, prefix: str, *, deadline_s: float | None = None) -> tuple[list[pb.KeyValue], int]:
        """Returns all keys that begin with `prefix`, in order, as of one revision, and the revision."""
        found: list[pb.KeyValue] = []
        start, revision = prefix.encode(), 0
        while True:
            request = pb.RangeRequest(key=start, range_end=after_prefix(prefix), limit=PAGE, revision=revision)
            reply = self.call(request, deadline_s=deadline_s)
            revision = revision or reply.header.revision
            found += reply.kvs
            if not reply.more:
                return found, revision
            start = reply.kvs[-1].key + b"\0"

    def transact(self, compare: Sequence[pb.Compare], writes: Sequence[pb.RequestOp]) -> tuple[bool, int]:
        """Does all writes if all comparisons are true, else none; returns whether they were, and the revision."""
        reply = self.call(pb.TxnRequest(compare=compare, success=writes))
        return bool(reply.succeeded), int(reply.header.revision)

    def compact(self, revision: int) -> None:
        """Discards the history before this revision; watches that begin there end."""
        self.call(pb.CompactionRequest(revision=revision, physical=True))

    def status(self) -> pb.StatusResponse:
        """Returns the status of whichever server answers."""
        return self.call(pb.StatusRequest())

    # ------------------------------------------------------------------ leases

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """Makes a lease; returns its id and duration (s), which etcd may have raised to its minimum."""
        reply = self.call(pb.LeaseGrantRequest(TTL=ttl_s))
        return int(reply.ID), int(reply.TTL)

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes all its keys; it is no error if the lease has expired already."""
        try:
            self.call(pb.LeaseRevokeRequest(ID=lease))
        except StoreError as error:
            if "not found" not in str(error):
                raise

    def keep_alive(self, lease: int, deadline_s: float) -> int:
        """Prolongs a lease once; returns its remaining seconds, 0 if it has expired.

        Raises:
            StoreError: No server answered within the deadline.
        """
        return int(self.call(pb.LeaseKeepAliveRequest(ID=lease), deadline_s=deadline_s, attempt_s=ATTEMPT_S / 2).TTL)

    # ------------------------------------------------------------------ watches

    def watch(
        self, prefix: str, revision: int, stop: threading.Event, *, every_s: float = ATTEMPT_S / 4
    ) -> Iterator[list[pb.Event]]:
        """Yields changes of keys that begin with `prefix`, from `revision` on, until `stop`; yields [] at least every
        `every_s`.

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
                            if not confirmed and time.monotonic() - begun > ATTEMPT_S:
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
                            server.forget_token()  # so etcd says that it is no longer valid, and not by a status
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
    def _watching(
        self, server: Connection, prefix: str, revision: int, replies: queue.SimpleQueue[Any]
    ) -> Iterator[None]:
        """Runs a watch within the block, and puts its replies into `replies`; None is its end."""
        ended = threading.Event()
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=after_prefix(prefix), start_revision=revision, progress_notify=True
        )

        def requests() -> Iterator[Any]:
            yield pb.WatchRequest(create_request=create)
            ended.wait()

        stream = server.watch(requests())

        def read() -> None:
            try:
                for reply in stream:
                    replies.put(reply)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    server.forget_token()
            replies.put(None)

        reader = threading.Thread(target=read, name="chaos-etcd-watch", daemon=True)
        reader.start()
        try:
            yield
        finally:
            ended.set()
            stream.cancel()


def after_prefix(prefix: str) -> bytes:
    """Returns the first key that sorts after all keys that begin with `prefix`."""
    data = prefix.encode().rstrip(b"\xff")
    return data[:-1] + bytes([data[-1] + 1])


def same_revision(key: str, revision: int) -> pb.Compare:
    """Returns a comparison for a transaction: the key was last changed at this revision, or does not exist (0)."""
    return pb.Compare(target=pb.Compare.MOD, key=key.encode(), mod_revision=revision)


def put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Returns an operation for a transaction that sets a key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(prefix: str, until: str = "") -> pb.RequestOp:
    """Returns an operation for a transaction that deletes all keys that begin with `prefix` and, if given, sort before
    `until`.
    """
    end = until.encode() if until else after_prefix(prefix)
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=prefix.encode(), range_end=end))


def open_client(address: EtcdAddress, deadline_s: float = DEADLINE_S) -> EtcdClient:
    """Returns a client for an address of etcd.

    Raises:
        ConfigurationError: A file of the address cannot be read or has expired, or the package etcd3 is not installed.
    """
    if address.client == "etcd3":
        from chaos_lightning.service.etcd3_client import Etcd3Connection

        return EtcdClient(address, deadline_s, Etcd3Connection)
    return EtcdClient(address, deadline_s)
