"""The package etcd3 (0.12.0) as the client of the store: `etcd://...?client=etcd3`.

Theory of operation. etcd3 as published does not import with protobuf 4 or newer, because its stubs were generated in
2020. So a module `etcd3.etcdrpc` is made here from stubs of ours (etcd.proto has the names that etcd3 uses), and put in
its place before etcd3 is imported. Its methods do the work where they give what the store needs: reading, leases,
logging in, TLS, watching. Underneath lies what it lacks:

- it knows one server and gives up with it: there is one of its clients per server, and `EtcdClient._try` goes from one
  to the next within the deadline of a call;
- its transactions do not tell at which revision they were carried out: they are made on its KV stub;
- its watch dies with the stream, does not resume, and then asks the same server again and again at full speed: each
  stream gets a Watcher of its own, which ends with it, and the loop of `EtcdClient.watch` resumes it elsewhere;
- with a password and no TLS it hands gRPC credentials that gRPC refuses to send: the token goes as metadata, which it
  also sends.

It reads a range in one piece, so a chain may take 64 MiB at most. Both clients pass the same tests; the own one is the
default, since what is left of etcd3 is a layer between two that are needed anyway (`benchmarks/stores.py` has figures).
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

from chaos_lightning.control import etcd_pb2 as pb
from chaos_lightning.control.channel import CLIENT_OPTIONS
from chaos_lightning.control.etcd_client import DEADLINE_S, EtcdAddress, EtcdClient, after_prefix
from chaos_lightning.errors import ConfigurationError, StoreError

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

R = TypeVar("R")

_ATTEMPT_S = 1.0
_STUBS: dict[str, tuple[tuple[str, Any, Any, bool], ...]] = {
    "KV": (
        ("Range", pb.RangeRequest, pb.RangeResponse, False),
        ("Txn", pb.TxnRequest, pb.TxnResponse, False),
        ("Compact", pb.CompactionRequest, pb.CompactionResponse, False),
    ),
    "Watch": (("Watch", pb.WatchRequest, pb.WatchResponse, True),),
    "Lease": (
        ("LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse, False),
        ("LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse, False),
        ("LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse, True),
    ),
    "Auth": (("Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse, False),),
    "Cluster": (),
    "Maintenance": (("Status", pb.StatusRequest, pb.StatusResponse, False),),
}
"""Service: its methods (name, request, reply, streaming both ways)."""


def _stub(service: str) -> type:
    """What grpcio-tools would generate for this service."""

    def connect(self: Any, channel: grpc.Channel) -> None:
        for name, request, reply, stream in _STUBS[service]:
            make = channel.stream_stream if stream else channel.unary_unary
            path = f"/etcdserverpb.{service}/{name}"
            called = make(path, request_serializer=request.SerializeToString, response_deserializer=reply.FromString)
            setattr(self, name, called)

    return type(f"{service}Stub", (), {"__init__": connect, "__doc__": f"etcd's service {service}."})


def load_etcd3() -> ModuleType:
    """The package etcd3, on stubs of ours.

    Raises:
        ConfigurationError: It is not installed, or was imported before with stubs of its own.
    """
    ours = sys.modules.get("etcd3.etcdrpc")
    if "etcd3" in sys.modules and not hasattr(ours, "made_by_chaos_lightning"):
        raise ConfigurationError(
            "client=etcd3: this process has imported etcd3 with its own stubs already; leave client=etcd3 out of the "
            "store's address"
        )
    if ours is None:
        made = ModuleType("etcd3.etcdrpc", "Stubs that work with today's protobuf.")
        names = {name: value for name, value in vars(pb).items() if not name.startswith("_")}
        vars(made).update(names, made_by_chaos_lightning=True)
        vars(made).update({f"{service}Stub": _stub(service) for service in _STUBS})
        sys.modules["etcd3.etcdrpc"] = made
    try:
        return importlib.import_module("etcd3")
    except ImportError as error:
        sys.modules.pop("etcd3.etcdrpc", None)
        raise ConfigurationError(
            f"client=etcd3: the package etcd3 cannot be imported ({error}); pip install 'chaos-lightning[etcd]', or "
            "leave client=etcd3 out of the store's address"
        ) from error


class Etcd3Client(EtcdClient):
    """See the module; the same as EtcdClient to who uses it."""

    def __init__(self, address: EtcdAddress, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(address, deadline_s)
        if address.cert_file and not address.ca_file:
            raise ConfigurationError("client=etcd3 needs ca= where cert= is given")
        self._etcd3: Any = load_etcd3()
        self._failures: tuple[type[Exception], ...] = (self._etcd3.exceptions.Etcd3Exception,)
        self._clients: dict[str, Any] = {}
        self._opening = threading.Lock()

    def _client(self, server: str) -> Any:
        """etcd3's client of this server; logs in when it is first needed."""
        with self._opening:
            found = self._clients.get(server)
            if found is None and not self._closed:
                host, _, port = server.rpartition(":")
                a = self.address
                options = [
                    *CLIENT_OPTIONS,
                    ("grpc.min_reconnect_backoff_ms", 50),
                    ("grpc.max_reconnect_backoff_ms", 500),
                ]
                options.append(("grpc.initial_reconnect_backoff_ms", 50))
                found = self._etcd3.Etcd3Client(
                    host=host,
                    port=int(port),
                    ca_cert=a.ca_file or None,
                    cert_key=a.key_file or None,
                    cert_cert=a.cert_file or None,
                    timeout=_ATTEMPT_S,
                    user=a.user or None,
                    password=self._password if a.user else None,
                    grpc_options=options,
                )
                found.call_credentials = None
                self._clients[server] = found
        if found is None:
            raise ValueError("closed")
        return found

    def _ask(self, do: Callable[[Any], R], deadline_s: float | None = None) -> R:
        def ask(server: Any, limit_s: float) -> R:
            return self._plainly(lambda: do(self._client(server.name)))

        return self._try(ask, deadline_s)

    def _plainly(self, do: Callable[[], R]) -> R:
        """etcd3 puts errors without words into the place of gRPC's; here is the original."""
        try:
            return do()
        except self._failures as error:
            if isinstance(error.__context__, grpc.RpcError):
                raise error.__context__ from None
            raise StoreError(f"{self.address}: {type(error).__name__}: {error}") from error

    def _forget_token(self, server: Any) -> None:
        with self._opening:
            found = self._clients.pop(server.name, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        super().close()
        with self._opening:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    # ------------------------------------------------------------------ keys

    def get(self, key: str) -> pb.KeyValue | None:
        found = self._ask(lambda c: c.get_response(key)).kvs
        return found[0] if found else None

    def get_all(self, prefix: str, *, deadline_s: float | None = None) -> tuple[list[pb.KeyValue], int]:
        reply = self._ask(lambda c: c.get_range_response(prefix, after_prefix(prefix)), deadline_s)
        return list(reply.kvs), int(reply.header.revision)

    def transact(self, compare: Sequence[pb.Compare], writes: Sequence[pb.RequestOp]) -> tuple[bool, int]:
        request = pb.TxnRequest(compare=compare, success=writes)
        reply = self._ask(lambda c: c.kvstub.Txn(request, c.timeout, metadata=c.metadata))
        return bool(reply.succeeded), int(reply.header.revision)

    def compact(self, revision: int) -> None:
        self._ask(lambda c: c.compact(revision, physical=True))

    def status(self) -> pb.StatusResponse:
        return self._ask(lambda c: c.maintenancestub.Status(pb.StatusRequest(), c.timeout, metadata=c.metadata))

    # ------------------------------------------------------------------ leases

    def grant(self, ttl_s: int) -> tuple[int, int]:
        lease = self._ask(lambda c: c.lease(ttl_s))
        return int(lease.id), int(lease.ttl)

    def revoke(self, lease: int) -> None:
        try:
            self._ask(lambda c: c.revoke_lease(lease))
        except StoreError as error:
            if "not found" not in str(error):
                raise

    def keep_alive(self, lease: int, deadline_s: float) -> int:
        return int(self._ask(lambda c: next(c.refresh_lease(lease)), deadline_s).TTL)

    # ------------------------------------------------------------------ watches

    @contextlib.contextmanager
    def _watching(self, server: Any, prefix: str, revision: int, replies: queue.SimpleQueue[Any]) -> Iterator[None]:
        client = self._plainly(lambda: self._client(server.name))
        once = _Once(
            self._etcd3.etcdrpc.WatchStub(client.channel), lambda: replies.put(pb.WatchResponse(canceled=True))
        )
        watcher = self._etcd3.watch.Watcher(once, timeout=_ATTEMPT_S, metadata=client.metadata)
        loop = watcher._run

        def run() -> None:
            with contextlib.suppress(_OverError):
                loop()

        watcher._run = run

        def take(found: Any) -> None:
            if isinstance(found, grpc.RpcError):
                self._look_at(server, found)
            replies.put(None if isinstance(found, grpc.RpcError) else self._reply(found))

        try:
            watcher.add_callback(
                prefix, take, range_end=after_prefix(prefix), start_revision=revision, progress_notify=True
            )
            replies.put(pb.WatchResponse(created=True))
        except self._failures as error:
            once.end()
            if not isinstance(error, self._etcd3.exceptions.RevisionCompactedError):
                raise ValueError(f"{server.name} accepts a watch and does not confirm it") from error
            replies.put(self._reply(error))
        except grpc.RpcError:
            once.end()
            raise
        try:
            yield
        finally:
            once.end()

    def _reply(self, found: Any) -> pb.WatchResponse:
        """As etcd sent it."""
        if isinstance(found, self._etcd3.exceptions.RevisionCompactedError):
            return pb.WatchResponse(compact_revision=found.compacted_revision)
        events = [
            pb.Event(
                type=pb.Event.PUT if isinstance(e, self._etcd3.events.PutEvent) else pb.Event.DELETE,
                kv=pb.KeyValue(
                    key=e.key,
                    value=e.value,
                    create_revision=e.create_revision,
                    mod_revision=e.mod_revision,
                    version=e.version,
                    lease=e.lease,
                ),
            )
            for e in found.events
        ]
        return pb.WatchResponse(header=found.header, events=events)


class _OverError(Exception):
    """A watch's only stream is over."""


class _Once:
    """A watch stub for one stream: etcd3's thread, which would open the next one without a pause, ends instead.

    Args:
        stub: The real one.
        canceled: Called where etcd says that it ended the watch, which etcd3 keeps to itself.
    """

    def __init__(self, stub: Any, canceled: Callable[[], None]) -> None:
        self._stub = stub
        self._canceled = canceled
        self._call: Any = None
        self._ended = False

    def Watch(self, requests: Any, *, credentials: Any = None, metadata: Any = None) -> Any:
        if self._ended or self._call is not None:
            raise _OverError
        try:
            self._call = self._stub.Watch(requests, metadata=(*(metadata or ()), ("hasleader", "true")))
        except ValueError as error:  # the channel was closed
            raise _OverError from error
        if self._ended:
            self._call.cancel()
        return self._replies(self._call)

    def _replies(self, call: Any) -> Iterator[Any]:
        for reply in call:
            yield reply
            if reply.canceled and not reply.compact_revision:
                self._canceled()

    def end(self) -> None:
        self._ended = True
        if self._call is not None:
            self._call.cancel()


__all__ = ["Etcd3Client", "load_etcd3"]
