"""Talks to an etcd server by the package etcd3 (0.12.0) instead of our own client: `etcd://...?client=etcd3`.

Theory of operation. etcd3 as published does not import with protobuf 4 or newer, because its stubs were generated in
2020. It imports them by their name, `etcd3.etcdrpc`, while it is imported itself, and offers no other way to be given
any. So a module of that name is made here from stubs of ours (etcd.proto has the names that etcd3 uses), and put in its
place before etcd3 is imported; nothing else of the package is touched.

Its client does the work where it gives what the store needs: channels, TLS, logging in, reading, leases. Underneath
lies what it lacks:

- it knows one server and gives up with it: there is one of its clients per server, and `EtcdClient` goes from one to
  the next within the deadline of a call;
- its transactions do not tell at which revision they were carried out: they are made on its KV stub;
- its watch dies with the stream, does not resume, and then asks the same server again and again at full speed: a watch
  is a plain stream on its channel, which the loop of `EtcdClient.watch` resumes elsewhere;
- with a password and no TLS it hands gRPC credentials that gRPC refuses to send: the token goes as metadata, which it
  also sends.

It reads a range in one piece, so a chain may take 64 MiB at most. Both connections pass the same tests; the own one is
the default, since what is left of etcd3 is a layer between two that are needed anyway (`benchmarks/stores.py` has
figures).
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.channel import CLIENT_OPTIONS, RECONNECT_SOON
from chaos_lightning.service.etcd_address import EtcdAddress
from chaos_lightning.service.etcd_methods import ATTEMPT_S, METHODS, method

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_SERVICES = ("KV", "Watch", "Lease", "Auth", "Cluster", "Maintenance")
"""Services of which etcd3 makes a stub each, also of one that nothing is asked of."""


def _stub(service: str) -> type:
    """Makes the gRPC stub class that grpcio-tools would generate for this service of etcd."""

    def connect(self: Any, channel: grpc.Channel) -> None:
        for request, (path, _) in METHODS.items():
            of, _, name = path.partition("/")
            if of == service:
                setattr(self, name, method(channel, request))

    return type(f"{service}Stub", (), {"__init__": connect, "__doc__": f"etcd's service {service}."})


def load_etcd3() -> ModuleType:
    """Imports the package etcd3 with stubs that work with today's protobuf; returns it.

    Raises:
        ConfigurationError: The package is not installed, or was imported before with stubs of its own.
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
        vars(made).update({f"{service}Stub": _stub(service) for service in _SERVICES})
        sys.modules["etcd3.etcdrpc"] = made
    try:
        return importlib.import_module("etcd3")
    except ImportError as error:
        sys.modules.pop("etcd3.etcdrpc", None)
        raise ConfigurationError(
            f"client=etcd3: the package etcd3 cannot be imported ({error}); pip install 'chaos-lightning[etcd]', or "
            "leave client=etcd3 out of the store's address"
        ) from error


def _granted(client: Any, request: Any) -> Any:
    lease = client.lease(request.TTL)
    return pb.LeaseGrantResponse(ID=lease.id, TTL=lease.ttl)


def _range(client: Any, request: Any) -> Any:
    if request.range_end:
        return client.get_range_response(request.key, request.range_end)
    return client.get_response(request.key)


_ANSWERS: dict[Any, Callable[[Any, Any], Any]] = {
    pb.RangeRequest: _range,
    pb.TxnRequest: lambda c, r: c.kvstub.Txn(r, c.timeout, metadata=c.metadata),
    pb.CompactionRequest: lambda c, r: c.compact(r.revision, physical=r.physical),
    pb.StatusRequest: lambda c, r: c.maintenancestub.Status(r, c.timeout, metadata=c.metadata),
    pb.LeaseGrantRequest: _granted,
    pb.LeaseRevokeRequest: lambda c, r: c.revoke_lease(r.ID),
    pb.LeaseKeepAliveRequest: lambda c, r: next(c.refresh_lease(r.ID)),
}
"""Functions by which etcd3's client answers each request."""


class Etcd3Connection:
    """Connection to one server by the package etcd3; like etcd_client.OwnConnection, but with one time limit for all
    calls.

    Raises:
        ConfigurationError: The package is not installed, or cannot do what the address asks for.
    """

    def __init__(
        self, server: str, address: EtcdAddress, password: str, _credentials: grpc.ChannelCredentials | None
    ) -> None:
        if address.cert_file and not address.ca_file:
            raise ConfigurationError("client=etcd3 needs ca= where cert= is given")
        self.name = server
        self._address, self._password = address, password
        self._etcd3: Any = load_etcd3()
        self._client: Any = None
        self._closed = False
        self._opening = threading.Lock()

    def _open(self) -> Any:
        """Returns etcd3's client for this server; connects and logs in at the first call."""
        with self._opening:
            if self._closed:
                raise ValueError("closed")
            if self._client is None:
                host, _, port = self.name.rpartition(":")
                a = self._address
                self._client = self._etcd3.Etcd3Client(
                    host=host,
                    port=int(port),
                    ca_cert=a.ca_file or None,
                    cert_key=a.key_file or None,
                    cert_cert=a.cert_file or None,
                    timeout=ATTEMPT_S,
                    user=a.user or None,
                    password=self._password if a.user else None,
                    grpc_options=[*CLIENT_OPTIONS, *RECONNECT_SOON],
                )
                self._client.call_credentials = None
            return self._client

    def ask(self, request: Any, _limit_s: float) -> Any:
        client = self._open()
        try:
            return _ANSWERS[type(request)](client, request)
        except self._etcd3.exceptions.Etcd3Exception as error:
            # It puts errors without words into the place of gRPC's; here is the original.
            if isinstance(error.__context__, grpc.RpcError):
                raise error.__context__ from None
            raise StoreError(f"{self._address}: {type(error).__name__}: {error}") from error

    def watch(self, requests: Iterator[Any]) -> Any:
        client = self._open()
        stub = self._etcd3.etcdrpc.WatchStub(client.channel)
        return stub.Watch(requests, metadata=(*(client.metadata or ()), ("hasleader", "true")))

    def forget_token(self) -> None:
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        self._closed = True
        self.forget_token()
