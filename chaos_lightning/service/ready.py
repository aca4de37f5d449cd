"""Runs a service that is given as a machine and its vocabulary (spec.py): its server, its client and its command.

Theory of operation. The parts are those of every service: frame, streams, driver, writer, and with etcd a candidacy.
Records are entries of the store, in order; who comes to lead reads them all, and makes the machine of them. A server
whose record is refused has been followed by another one, and ends; its process stands for election again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chaos_lightning.declared import absolute, declared, read_options
from chaos_lightning.errors import ChaosError, RefusedError, StoreError, WireError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.signals import ends
from chaos_lightning.machine.terminal import TerminalGuard, printable
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.security.credentials import Credentials, Secret
from chaos_lightning.security.roles import Right, certified
from chaos_lightning.service.auth_interceptor import Service
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.client import PULSE_S, ServiceClient, StreamCall
from chaos_lightning.service.driver import Driver
from chaos_lightning.service.etcd_address import read_address
from chaos_lightning.service.etcd_store import service_root
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, exit_code, options_parser
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.options import ServiceOptions
from chaos_lightning.service.server import CANNOT_LEAD, ListenPlace, ServerFrame, keep_standing, serve
from chaos_lightning.service.spec import (
    ClientLeft,
    ClientSaid,
    EndService,
    EndStream,
    Introduction,
    PutRecord,
    RecordStored,
    ServiceEffect,
    ServiceEvent,
    ServiceSpec,
    SpecClient,
    TellClient,
    TimePasses,
)
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import EMPTY, Appended, Store, StoreFactory
from chaos_lightning.service.streams import Encoding, LastWord, Stream, Streams
from chaos_lightning.service.writer import StoreWriter

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_TICK_S = 0.1
_log = logging.getLogger("chaos_lightning")


def read_records(spec: ServiceSpec, store: Store) -> list[Any]:
    """Returns the records that a store holds, oldest first.

    Raises:
        StoreError: The store fails, or holds something else.
    """
    try:
        return [spec.read_record(record.body) for record in store.read()[1]]
    except WireError as error:
        raise StoreError(f"{store.place} holds what is no record of {spec.name}: {error}") from error


class ServiceServer:
    """Server of a service. `start` and `stop` may only be called in one asyncio loop.

    Args:
        spec: The service.
        place: Where it listens.
        open_store: Opens the store; called when this process leads.
        events: Event log of this process.
        candidacy: Candidacy, where several servers stand by for each other.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        place: ListenPlace,
        open_store: StoreFactory,
        events: EventLog,
        candidacy: Candidacy | None = None,
    ) -> None:
        self.spec = spec
        self._open_store = open_store
        self._emit = events.emit
        self._candidacy = candidacy
        self._frame = ServerFrame(place, events.emit, "service_ended", self._lead, candidacy=candidacy)
        self.life = self._frame.life
        self._writer = StoreWriter(events.emit)
        self._store: Store | None = None
        self._end = EMPTY
        self._driver = Driver[ServiceEvent, ServiceEffect](TimePasses)
        self._streams = Streams(self, events.emit, self._frame.auth.note)
        self._encoding = Encoding(lambda data: spec.read_said(data) if data else LastWord, spec.write_told)

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return self._frame.port

    async def start(self) -> int:
        """Opens the port and leads (a candidate: once it is elected); returns the port.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        port = await self._frame.start(self._services)
        self.life.begin(self._every(_TICK_S, lambda: self._driver.feed(TimePasses())), "ticks")
        self.life.begin(self._every(PULSE_S, lambda: self._streams.pulse(None)), "pulses")
        return port

    def _services(self) -> list[Service]:
        calls = {"Attend": grpc.stream_stream_rpc_method_handler(self._attend)}
        handler = grpc.method_handlers_generic_handler(self.spec.path, calls)
        everybody = Right(certified(), with_token=certified())
        return [
            Service(
                self.spec.path,
                {"Attend": everybody},
                lambda server: server.add_generic_rpc_handlers((handler,)),
                raw=("Attend",),
            )
        ]

    async def _attend(self, _requests: Any, context: Any) -> None:
        if self._driver.on is None and self._candidacy is not None:
            words, leader = self._candidacy.waits(self.spec.name)
            await context.abort(grpc.StatusCode.UNAVAILABLE, words, ((LEADER_KEY, leader),))
        await self._streams.attend(context, self._frame.auth.peer(context), "Attend", self._encoding)

    async def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self._driver.on is not None:
                work()

    async def stop(self) -> None:
        """Closes streams, port and store."""
        await self._frame.stop()
        await self._writer.close(lambda: self._store.close() if self._store is not None else None)

    # ------------------------------------------------------------------ leading

    async def _lead(self) -> None:
        records = await self._writer.in_thread(self._take)
        assert self._store is not None
        self._emit(
            "service_started",
            endpoint=self._frame.endpoint,
            service=self.spec.name,
            term=self._store.term,
            records=len(records),
            store=self._store.place,
        )
        self._driver.on = self.spec.machine(records).on
        self._frame.drive(self._driver.drive(self._carry_out), f"{self.spec.name} machine")

    def _take(self) -> list[Any]:
        self._store = self._open_store()
        self._store.take_term()
        self._end = self._store.end()
        return read_records(self.spec, self._store)

    async def _carry_out(self, effect: ServiceEffect) -> list[ServiceEvent]:
        match effect:
            case PutRecord(record):
                kind = type(record).__name__
                outcome = await self._writer.append(lambda: self._put(effect), kind=kind, number=self._end.position + 1)
                if not outcome.ok:
                    self._driver.deaf = True
                    self.life.end(f"{kind} was not accepted by the store: {outcome.detail}", failed=True)
                    return []
                self._end = outcome.end
                return [RecordStored(record)]
            case TellClient(conn, message):
                self._streams.send(conn, message)
            case EndStream(conn, reason):
                self._streams.end(conn, grpc.StatusCode.NOT_FOUND, reason)
            case EndService(reason):
                self.life.end(reason)
        return []

    def _put(self, effect: PutRecord) -> Appended:
        assert self._store is not None
        body, kind = self.spec.write_record(effect.record), type(effect.record).__name__
        return self._store.append(kind, body, self._end, cut=effect.sums_up)

    # ------------------------------------------------------------------ streams

    def opened(self, stream: Stream) -> None:
        """Says that this server leads."""
        self._streams.send(stream.number, None)

    def heard(self, stream: Stream, message: Any) -> None:
        """Learns from the first message who speaks; passes the others to the machine.

        Raises:
            WireError: The first message is another one.
        """
        if isinstance(message, Introduction):
            stream.name = stream.name or message.name
        elif not stream.name:
            raise WireError(f"{type(message).__name__} on a stream that nobody has introduced")
        else:
            self._driver.feed(ClientSaid(stream.number, stream.name, message))

    def closed(self, stream: Stream, abrupt: bool) -> None:
        """Tells the machine that a stream has ended."""
        self._driver.feed(ClientLeft(stream.number, abrupt))


def connect(
    spec: ServiceSpec,
    name: str,
    endpoints: Sequence[str],
    secret: Secret = b"",
    *,
    on_connected: Callable[[], None],
    on_message: Callable[[Any], None],
    on_disconnected: Callable[[str], None] = lambda reason: None,
    **more: Any,
) -> ServiceClient:
    """Returns a client of a service; `start` it, `say` messages, `close` it.

    Args:
        spec: The service.
        name: Name of the client.
        endpoints: HOST:PORT of the server, or of all that stand by for each other.
        secret: Token (b"" for none), or credentials.
        on_connected: Called when a stream to the acting leader is open. What was not answered on an earlier one must be
            said again.
        on_message: Takes each message of the service.
        on_disconnected: Called with the reason when a stream has ended.
        more: Further callbacks of `ServiceClient`.
    """

    call = StreamCall(
        f"/{spec.path}/Attend",
        spec.name,
        spec.write_said,
        spec.read_told,
        goodbye=b"",
        hello=lambda: Introduction(name),
    )
    return ServiceClient(
        endpoints,
        secret,
        call,
        on_connected=on_connected,
        on_message=on_message,
        on_disconnected=on_disconnected,
        **more,
    )


def talk(
    spec: ServiceSpec, own: SpecClient, endpoints: Sequence[str], secret: Secret = b"", timeout_s: float | None = None
) -> bool:
    """Has a client that was written for the simulated world talk to a real service, until it is done.

    Args:
        spec: The service.
        own: The client; called in one thread at a time.
        endpoints: HOST:PORT of the server, or of all that stand by for each other.
        secret: Token (b"" for none), or credentials.
        timeout_s: Seconds to wait; None: for ever.

    Returns:
        Whether it is done.

    Raises:
        RefusedError: The server does not let this client in, or does not understand it.
    """
    done, refused = threading.Event(), list[RefusedError]()

    def trouble(error: ChaosError) -> None:
        _log.warning("%s waits for %s: %s", own.name, spec.name, error)
        if isinstance(error, RefusedError):
            refused.append(error)
            done.set()

    def say(messages: Iterable[Any]) -> None:
        for message in messages:
            client.say(message)
        if own.done:
            done.set()

    client = connect(
        spec,
        own.name,
        endpoints,
        secret,
        on_connected=lambda: say(own.connected()),
        on_message=lambda message: say(own.heard(message)),
        on_trouble=trouble,
    )
    client.start()
    try:
        done.wait(timeout_s)
    finally:
        client.close()
    if refused:
        raise refused[0]
    return own.done


def run(spec: ServiceSpec, options: ServiceOptions) -> int:
    """Runs a service's server until it ends, by a signal or by itself; returns the exit code."""
    host, port = split_endpoint(options.listen)
    secret = Credentials.load(options.keys_dir, options.token_file)
    place = ListenPlace(host, port, options.advertise, secret)

    def say(text: str) -> None:
        print(printable(text), flush=True)

    def on_started(server: ServiceServer) -> None:
        loop = asyncio.get_running_loop()
        for number in ends():
            loop.add_signal_handler(number, server.life.end, f"stopped by {signal.Signals(number).name}")
        say(
            f"{spec.name} {options.job} at {host}:{server.port}, store {options.store or options.store_path(spec.name)}"
        )

    def once(followed: bool) -> tuple[str, bool]:
        if not options.in_etcd:
            path = options.store_path(spec.name)
            factory = MemoryStore if path is None else lambda: SqliteStore(path, options.job, exclusive=True)
            return asyncio.run(serve(ServiceServer(spec, place, factory, events), on_started))
        etcd = read_address(options.store)
        candidacy = Candidacy(etcd, service_root(etcd.prefix, spec.name, options.job), followed=followed)
        server = ServiceServer(spec, place, lambda: candidacy.open_store(lambda store: ""), events, candidacy)
        return asyncio.run(serve(server, on_started))

    def again(reason: str) -> bool:
        if not options.in_etcd or CANNOT_LEAD in reason:
            return False
        say(f"{spec.name} {options.job} stands by again: {reason}")
        return True

    with EventLog.in_directory(options.log_folder(spec.name), options.job, role=spec.name) as events:
        reason, failed = keep_standing(once, again)
    say(f"{spec.name} {options.job} ends: {reason}")
    return EXIT_FAILED if failed else EXIT_OK


def main(spec: ServiceSpec, arguments: Sequence[str] | None = None) -> int:
    """Runs a service as the command line says; returns the exit code."""
    known = declared(ServiceOptions)
    parser = options_parser(spec.name, f"Run the service {spec.name} in the foreground.", known)
    TerminalGuard().open()
    given = parser.parse_args(arguments)
    return exit_code(lambda: run(spec, absolute(ServiceOptions(**read_options(given, known)))))
