"""The scheduler's shell: gRPC streams in, effects of the SchedulerMachine out, decisions into the store first.

Theory of operation. Everything that happens - a stream opens, says something, breaks; a tick; an operator's wish -
becomes an event in one queue, and one task feeds the machine from it, one event at a time. Effects are carried out in
their order; a Persist is on the disk (written in an own thread, so that streams are read meanwhile) before the effects
behind it are touched and before the machine hears `Stored`. So nothing is ever announced that a restart would not know.

A stream ends in one of three ways. With a goodbye and a half-close: the member meant it. Without: its process died or
its host cut the connection, and the kernel says so within milliseconds; that is `Closed(abrupt=True)`. A half-open
stream says nothing at all; heartbeats find that out. A scheduler that lost its term (another one took the chain) or
whose store fails for good ends itself; members go on training without it until one is back (PROTOCOL.md 13).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from chaos_lightning.control.channel import END_OF_STREAM, PULSE_S, SERVER_OPTIONS
from chaos_lightning.control.claims import Claims
from chaos_lightning.control.connection import Connection, present
from chaos_lightning.control.link_keys import KeyIssuer
from chaos_lightning.control.machine import Machine, MachineFactory, real_machine
from chaos_lightning.control.options import GAVE_WAY, Owed, ServerConfig
from chaos_lightning.control.seat import Seat
from chaos_lightning.control.service_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from chaos_lightning.control.store import Store, StoreFactory
from chaos_lightning.control.strangers import Strangers, name_of_caller
from chaos_lightning.errors import ChaosError, StoreError, WireError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.process_table import rebooted, same_machine_verdict
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.protocol.codec import unwrap_from_member, wrap_to_member
from chaos_lightning.protocol.types import Hello, Pulse, ToMember, Welcome
from chaos_lightning.security.access import LEADER_KEY
from chaos_lightning.security.credentials import Credentials, check_bind

import grpc  # isort: skip  (after channel, which sets gRPC's environment)

_MAX_OUTBOX = 4096
"""Messages that wait for one member; more means that it has not read for a long time, and its stream is cut."""
CANNOT_LEAD = "it was elected and cannot lead"
_NOT_THE_JOBS = ("chain_lost", "chain_foreign", "chain_stale")
"""What the machine notes when a member knows of what the store lacks (membership/identity.py)."""
_STORE_PATIENCE_S = 5.0
"""A store that takes nothing for so long ends the scheduler; the end of a job alone is owed for as long as it lives."""
_LONGEST_STORE_PAUSE_S = 5.0
HEARS_S = 1.2
"""A member that looks for its only scheduler comes within `agent.LONGEST_PAUSE_S`, and the time that a call takes."""
HEARS_SEVERAL_S = 1.5
"""One of several is asked more often, but another one that is silent may be asked first; and members that are held back
leave a scheduler that says nothing for two seconds (`agent._ANSWER_TIMEOUT_S` / 5)."""
HEARS_EMPTY_S = 0.7
"""Where there is no chain: newcomers wait for it, and members of another one lose nothing if a job is founded here."""
_ANSWER_TIMEOUT_S = 4.0
"""A request waits so long for the machine, which may be writing to its store."""


class SchedulerServer(SchedulerServicer):  # type: ignore[misc]
    """See the module. `start` and `stop` belong to one asyncio loop.

    Args:
        config: How to behave.
        open_store: Opens the store that decisions go to; called in `start`, once the port is ours.
        events: The scheduler's event log.
        machine: Makes the state machine.
        seat: Where several schedulers stand by for each other: this one leads once it is elected (control/seat.py).
    """

    def __init__(
        self,
        config: ServerConfig,
        open_store: StoreFactory,
        events: EventLog,
        machine: MachineFactory = real_machine,
        seat: Seat | None = None,
    ) -> None:
        self.config = config
        self.port = config.port
        self.failed = False
        """Whether the reason of `ended` is a failure (store lost, deposed, error of ours)."""
        self.owed = config.owed
        """The end of a job that its store has not taken yet."""
        self._open_store = open_store
        self._opened: Store | None = None
        self._events = events
        self._make_machine = machine
        self._seat = seat
        self._machine: Machine | None = None
        self._connections: dict[int, Connection] = {}
        self._count = 0
        self._inbox: asyncio.Queue[fx.SchedulerEvent] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[tuple[bool, str]]] = {}
        self._tick_waits = False
        self._idle_since = time.monotonic()
        self._started = time.time()
        self._ended: asyncio.Future[str] | None = None
        self._done_reason = ""
        self._gives_way_at = math.inf
        """When (monotonic, s) this one ends, unless members of its own chain are here by then."""
        self._renews = False
        self._stays = False
        """Whether a finished scheduler answers for `linger_timeout_s` also while nobody is connected."""
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="chaos-store")
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._strangers = Strangers(config.token, events.emit)
        self._keys: KeyIssuer | None = None
        self._claims = Claims(config.settings.job, config.hello_timeout_s)

    # ------------------------------------------------------------------ life

    async def start(self) -> int:
        """Takes the port, then the chain (with a seat: once it is elected), then lets members in; returns the port.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        check_bind(self.config.host, self.config.token)
        self._ended = asyncio.get_running_loop().create_future()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_SchedulerServicer_to_server(self, self._server)
        self.port = await self._strangers.open(self._server, self.config.host, self.config.port)
        if self._seat is None:
            await self._lead()
            await self._server.start()
        else:
            await self._server.start()
            self._contest(self._seat)
        self._begin(self._tick(), "ticks")
        return self.port

    def _begin(self, work: Coroutine[Any, Any, None], where: str) -> None:
        """A task that `stop` ends. One that fails ends the scheduler: without it the others would only seem to work."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                # The machine is void after an error of ours; the chain is not. Whoever restarts continues it.
                self._events.emit("error", text=f"{type(error).__name__}: {error}", where=where)
                self.end(f"internal error: {type(error).__name__}: {error}", failed=True)

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(look)
        self._tasks.append(task)

    @property
    def endpoint(self) -> str:
        """Where others reach it."""
        return self.config.advertise or join_endpoint(self.config.host, self.port)

    def _contest(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()

        def elected() -> None:
            loop.call_soon_threadsafe(lambda: self._begin(self._come_to_lead(), "election"))

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(lambda: self.end(f"it leads no more: {reason}", failed=True))

        def here() -> set[str]:
            return present(list(self._connections.values()), self.config.settings.heartbeat_timeout_s)

        seat.contest(self.endpoint, elected, lost, self._events.emit, here)

    async def _come_to_lead(self) -> None:
        try:
            chain = await self._lead()
            self._begin(self._pulse(), "pulses")
            if self._seat is not None and self._seat.waited() and chain.finished:
                # Members that were cut off, and newcomers that are still starting, are to hear of it from somebody.
                self._stays = True
                self._done("the job was finished while this scheduler stood by")
        except Exception as error:  # of any kind: the election would go on prolonging a lease in vain
            words = str(error) if isinstance(error, ChaosError) else f"{type(error).__name__}: {error}"
            self.end(f"{CANNOT_LEAD}: {words}", failed=True)

    async def _lead(self) -> fx.Chain:
        """Takes the chain; from now on members are let in."""

        def take() -> fx.Chain:
            store = self._opened = self._opened or self._open_store()
            store.take_term()
            if self._seat is not None:
                self.config = replace(self.config, settings=self._seat.rules(self.config.settings))
            found = self._with_owed(store, store.load())
            # The operator's word was about what lay there then, not about what others have led by since.
            watched = self._seat is not None and self._seat.watched()
            rebuild = self.config.rebuild and not (found.views and watched)
            return replace(found, rebuild=rebuild, hears_s=self._hears_s(found))

        chain = await asyncio.get_running_loop().run_in_executor(self._disk, take)
        self._events.emit(
            "scheduler_started",
            endpoint=self.endpoint,
            job=self.config.settings.job,
            term=chain.term,
            chain=chain.id,
            views=len(chain.views),
            finished=chain.finished,
            store=self._store.place,
        )
        secret_channel = Credentials.of(self.config.token).secret_channel
        met = {member for view in chain.views for member in view.ids()}
        self._keys = KeyIssuer(self.config.settings, secret_channel=secret_channel, members=met)
        self._machine = self._make_machine(self.config.settings, chain)
        self._begin(self._drive(), "scheduler machine")
        return chain

    def _with_owed(self, store: Store, found: fx.Chain) -> fx.Chain:
        """The chain with the end that this process could not write down when it led last.

        Where the chain has gone on since, others know better, and it is forgotten.
        """
        if (owed := self.owed) is None:
            return found
        last = str(found.views[-1].id) if found.views else ""
        if not found.finished and (found.id, last) == (owed.chain, owed.view):
            if not (outcome := store.append(owed.effect)).ok:
                raise StoreError(f"the end of the job was not accepted: {outcome.detail}")
            found = replace(found, finished=True)
        self.owed = None
        return found

    def _hears_s(self, chain: fx.Chain) -> float:
        """How long members that know more than this chain may take to find this scheduler (PROTOCOL.md 14a)."""
        if self._seat is not None:
            return 0.0 if self._seat.watched() else HEARS_SEVERAL_S if chain.views else HEARS_EMPTY_S
        if chain.views:
            return HEARS_S
        return HEARS_EMPTY_S if self.config.port else 0.0  # nobody looks for a port that the kernel has just given

    async def _pulse(self) -> None:
        """Members leave a leader that says nothing, for another may be elected by then."""
        while True:
            await asyncio.sleep(PULSE_S)
            for connection in self._connections.values():
                if connection.name and connection.outbox.empty():
                    connection.outbox.put_nowait(Pulse())

    @property
    def _store(self) -> Store:
        assert self._opened is not None, "start() comes first"
        return self._opened

    async def ended(self) -> str:
        """Waits until the scheduler has no reason to go on; returns why it ends."""
        assert self._ended is not None, "start() comes first"
        return await asyncio.shield(self._ended)

    def end(self, reason: str, *, failed: bool = False) -> None:
        """Makes `ended` return."""
        if self._ended is not None and not self._ended.done():
            self.failed = failed
            self._events.emit("scheduler_ended", reason=reason, failed=failed)
            self._ended.set_result(reason)

    async def stop(self) -> None:
        """Closes streams and port; members that train go on without a scheduler."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        resigned = loop.run_in_executor(None, self._seat.close) if self._seat is not None else None
        if self._server is not None:
            await self._server.stop(0.1)
            await self._strangers.close()
        if resigned is not None:
            await resigned
        await loop.run_in_executor(None, self._disk.shutdown)  # a write may be under way
        if self._opened is not None:
            self._opened.close()

    # ------------------------------------------------------------------ the machine

    async def _tick(self) -> None:
        pause = self.config.tick_s or min(0.05, max(0.01, self.config.settings.heartbeat_interval_s / 4))
        while True:
            await asyncio.sleep(pause)
            if not self._tick_waits:
                self._tick_waits = True
                self._inbox.put_nowait(fx.SchedulerTick())
            self._look_for_idleness()
            self._give_way_if_due()

    def _look_for_idleness(self) -> None:
        now = time.monotonic()
        if self._connections or self._claims or self.owed or (self._seat is not None and self._seat.stands_by()):
            self._idle_since = now
        idle = now - self._idle_since
        if self._done_reason and not self._connections and not self._stays:
            self.end(self._done_reason)
        elif self.config.idle_timeout_s and idle > self.config.idle_timeout_s:
            place = self._opened.place if self._opened is not None else "its store"  # it may never have led
            self.end(f"no member for {self.config.idle_timeout_s:g} s; the chain stays in {place}")

    async def _drive(self) -> None:
        """Feeds the machine, one event at a time."""
        try:
            while True:
                event = await self._inbox.get()
                if isinstance(event, fx.SchedulerTick):
                    self._tick_waits = False
                pending = [event]
                while pending:
                    pending += await self._feed(pending.pop(0))
                    if self._renews:
                        await self._begin_again()
                        return
        except StoreError as error:
            self.end(f"the store failed: {error}", failed=True)

    def _returning_s(self, name: str) -> float:
        """How long members of the store's own chain may take to come back."""
        return self.config.settings.reconnect_grace_s if name == "chain_foreign" else 0.0

    def _give_way_if_due(self) -> None:
        """A member has come that knows of what this store lacks."""
        if time.monotonic() < self._gives_way_at:
            return
        self._gives_way_at = math.inf
        assert self._machine is not None
        here = self._machine.snapshot().get("members", ())
        if not any(member["connected"] for member in here):  # type: ignore[attr-defined]
            self.end(
                f"{GAVE_WAY}: members know what {self._store.place} lacks; start a scheduler on the "
                "store that holds it",
                failed=True,
            )

    async def _begin_again(self) -> None:
        """An operator has ended the job: its chain is put away, and whoever is here comes again, to an empty one."""
        self._renews = False
        for connection in self._connections.values():
            connection.outbox.put_nowait(None)
        # What they say until their streams end is nobody's for the next machine.
        loop = asyncio.get_running_loop()
        place = await loop.run_in_executor(self._disk, self._store.begin_again)
        self._events.emit("notice", text=f"an operator has ended the job; its chain is {place}")
        self.config = replace(self.config, rebuild=False)  # that word was about the chain that is put away
        await self._lead()

    async def _feed(self, event: fx.SchedulerEvent) -> list[fx.SchedulerEvent]:
        assert self._machine is not None
        outcomes: list[fx.SchedulerEvent] = []
        for effect in self._machine.on(time.monotonic(), event):
            match effect:
                case fx.Persist():
                    # All members are done: nobody could decide it again. (An operator asks again.)
                    final = effect.kind == "finish" and not isinstance(event, fx.Reset)
                    outcomes.append(await self._persist(effect, final=final))
                case fx.Send(number, message):
                    self._send(number, message)
                case fx.Close(number, reason):
                    if (connection := self._connections.get(number)) is not None:
                        self._events.emit("stream_closed", peer=connection.peer, of=connection.name, reason=reason)
                        connection.outbox.put_nowait(None)
                case fx.Note(name, fields):
                    self._events.emit(name, **dict(fields))
                    if self.config.gives_way and name in _NOT_THE_JOBS:
                        self._gives_way_at = time.monotonic() + self._returning_s(name)
                case fx.Look(member):
                    sight = same_machine_verdict(member)
                    if sight.certain:
                        outcomes.append(fx.Gone(member.id, sight.evidence))
                    elif not sight.evidence and (words := rebooted(member)):
                        outcomes.append(fx.Gone(member.id, words, rebooted=True))
                case fx.TakeTerm(above, chain_id):
                    loop = asyncio.get_running_loop()
                    term = await loop.run_in_executor(self._disk, self._store.take_term, above, chain_id)
                    outcomes.append(fx.TermTaken(term))
                case fx.Answer(token, accepted, text):
                    waiting = self._answers.pop(token, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result((accepted, text))
                case fx.SchedulerDone(reason, deposed, again):
                    if again:
                        self._renews = True
                    elif deposed:
                        self.end(reason, failed=True)
                    else:
                        self._done(reason)
        return outcomes

    async def _persist(self, effect: fx.Persist, *, final: bool = False) -> fx.Stored:
        loop = asyncio.get_running_loop()
        started, pause_s, told = time.monotonic(), 0.2, ""
        while True:
            try:
                outcome = await loop.run_in_executor(self._disk, self._store.append, effect)
                break
            except StoreError as error:
                if str(error) != told or not final:
                    self._events.emit("error", text=str(error), where="store")
                    told = str(error)
                if final:
                    self._owe(effect, str(error))
                    pause_s = min(1.5 * pause_s, _LONGEST_STORE_PAUSE_S)
                elif time.monotonic() - started > _STORE_PATIENCE_S:
                    raise
                await asyncio.sleep(pause_s)
        seconds = round(time.monotonic() - started, 6)
        self._events.emit(
            "stored", kind=effect.kind, number=effect.number, ok=outcome.ok, detail=outcome.detail, seconds=seconds
        )
        if outcome.ok:
            self.owed = None
        else:
            if final:
                self._owe(effect, outcome.detail)
            self.end(f"{effect.kind} {effect.number} was not accepted by the store: {outcome.detail}", failed=True)
        return fx.Stored(effect.token, outcome.ok, outcome.detail)

    def _owe(self, effect: fx.Persist, reason: str) -> None:
        assert self._machine is not None
        now = self._machine.snapshot()
        self.owed = Owed(effect, str(now.get("chain", "")), str(now.get("view", "")), reason)

    def _send(self, number: int, message: ToMember) -> None:
        if (connection := self._connections.get(number)) is None:
            return
        if isinstance(message, Welcome):
            connection.name = message.member.name
        assert self._keys is not None, "who does not lead says nothing"
        for to, what in self._keys.with_keys(number, message, self._connections):
            self._put(self._connections[to], what)

    def _put(self, connection: Connection, message: ToMember) -> None:
        """Whoever's message it comes with: keys go to both ends of a link, and one of them may not read."""
        if connection.outbox.qsize() < _MAX_OUTBOX:
            connection.outbox.put_nowait(message)
        elif not connection.cut.is_set():
            self._events.emit("error", text=f"{connection.name or connection.peer} does not read; its stream is cut")
            connection.cut.set()

    def _done(self, reason: str) -> None:
        if not self._done_reason:
            self._done_reason = reason
            asyncio.get_running_loop().call_later(self.config.settings.linger_timeout_s, self.end, reason)

    # ------------------------------------------------------------------ rpc

    async def _admit(self, context: Any, what: str) -> None:
        """Aborts the call of a stranger; and of everybody while another scheduler leads."""
        await self._strangers.refuse(context, what)
        if self._machine is not None or self._seat is None or what in ("Status", "Claim"):
            return
        if what == "Attend":
            self._seat.asked(await name_of_caller(context))
        leader = self._seat.leader()
        words = f"this scheduler waits to lead; now {leader or 'nobody'} does. {self._seat.trouble()}".rstrip(". ")
        await context.abort(grpc.StatusCode.UNAVAILABLE, words, ((LEADER_KEY, leader),))

    async def Attend(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """One member's stream, from its Hello to its end."""
        await self._admit(context, "Attend")
        self._count += 1
        connection = Connection(self._count, self._strangers.peer(context))
        if self._seat is not None:
            connection.outbox.put_nowait(Pulse())  # from the first moment on, silence means something
        self._connections[connection.number] = connection
        self._inbox.put_nowait(fx.Opened(connection.number))
        patience_s = self.config.hello_timeout_s
        patience = asyncio.get_running_loop().call_later(patience_s, self._expect_hello, connection)
        tasks: list[asyncio.Task[Any]] = []
        abrupt = True
        try:
            # Answers at once: the member learns that it was let in before anything else is said. And before anything
            # else can be: a first message that is written meanwhile sends the same metadata, and gRPC ends the stream.
            await context.send_initial_metadata(())
            tasks += (
                asyncio.create_task(self._read(connection, context)),
                asyncio.create_task(self._write(connection, context)),
                asyncio.create_task(connection.cut.wait()),
            )
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                abrupt = not tasks[0].result()
            elif tasks[1].done():
                abrupt = tasks[1].exception() is not None
        except WireError as error:
            self._strangers.note(connection.peer, str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (asyncio.CancelledError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            raise
        finally:
            patience.cancel()
            for task in tasks:
                task.cancel()
            del self._connections[connection.number]
            self._inbox.put_nowait(fx.Closed(connection.number, abrupt))

    def _expect_hello(self, connection: Connection) -> None:
        """Whoever has not said by now who it is takes a place that somebody may need."""
        if not connection.name:
            self._strangers.note(connection.peer, f"no hello within {self.config.hello_timeout_s:g} s (Attend)")
            connection.cut.set()

    async def _read(self, connection: Connection, context: Any) -> bool:
        """Feeds what the member says; True if it said goodbye before the stream ended."""
        goodbye = False
        while True:
            envelope = await context.read()
            if envelope is END_OF_STREAM:
                return goodbye
            connection.heard = time.monotonic()
            goodbye = goodbye or envelope.goodbye
            if envelope.WhichOneof("message") is None and goodbye:
                continue
            message = unwrap_from_member(envelope)
            if isinstance(message, Hello) and not connection.name:
                connection.name = message.name
            self._inbox.put_nowait(fx.MessageIn(connection.number, message))

    async def _write(self, connection: Connection, context: Any) -> None:
        """Sends until the machine closes the stream."""
        while True:
            message = await connection.outbox.get()
            if message is None:
                return
            await context.write(wrap_to_member(message))

    async def Status(self, _request: Any, context: Any) -> Any:
        await self._admit(context, "Status")
        seat: dict[str, Any] = {}
        if self._seat is not None:
            seat = await asyncio.get_running_loop().run_in_executor(None, self._seat.facts)
            if self._machine is None and seat.get("waits_for") == "":
                seat["waits_for"] = "its store: it was elected, and takes the chain"
        return chaos_pb2.StatusReply(json=json.dumps({**self.status(), **seat}, default=str))

    def status(self) -> dict[str, Any]:
        """Facts of this server, and the machine's snapshot under "machine"."""
        settings = self.config.settings
        return {
            "job": settings.job,
            "endpoint": self.endpoint,
            "pid": os.getpid(),
            "term": self._opened.term if self._opened is not None else 0,
            "store": self._opened.place if self._opened is not None else "",
            "role": "leader" if self._machine is not None else "standby",
            "uptime_s": round(time.time() - self._started, 3),
            "streams": [{"peer": c.peer, "name": c.name} for c in self._connections.values()],
            "finished": bool(self._done_reason),
            "owed": f"the end of the job, which its store has not taken: {self.owed.reason}" if self.owed else "",
            "min_nodes": settings.min_nodes,
            "max_nodes": settings.max_nodes,
            "machine": self._machine.snapshot() if self._machine is not None else {},
        }

    async def Drain(self, request: Any, context: Any) -> Any:
        await self._admit(context, "Drain")
        names = sorted({c.name for c in self._connections.values() if c.name})
        wanted = request.name
        asked = [n for n in names if n == wanted] or [
            n for n in names if n.rpartition("-")[0] == wanted and n.rpartition("-")[2].isdigit()
        ]
        for name in asked:
            self._events.emit("drain", of=name, by=self._strangers.peer(context))
            self._inbox.put_nowait(fx.Drain(name))
        return chaos_pb2.DrainReply(asked=asked, present=names)

    async def ChangeLink(self, request: Any, context: Any) -> Any:
        """Connect-link and disconnect-link by an operator; the machine answers whether it will be so."""
        await self._admit(context, "ChangeLink")
        accepted, text = await self._ask(lambda token: fx.ChangeLink(token, request.a, request.b, request.add))
        return chaos_pb2.LinkChangeReply(text=text, accepted=accepted)

    async def Reset(self, request: Any, context: Any) -> Any:
        """An operator ends the job; the machine answers whether it may be."""
        await self._admit(context, "Reset")
        by = self._strangers.peer(context)
        self._events.emit("reset_asked", by=by, force=request.force)
        accepted, text = await self._ask(lambda token: fx.Reset(token, request.force))
        return chaos_pb2.ResetReply(text=text, accepted=accepted)

    async def Claim(self, _requests: AsyncIterator[Any], context: Any) -> None:
        """A number for one that sets up, until its stream ends; whether this scheduler leads does not matter."""
        await self._admit(context, "Claim")
        await self._claims.hold(context, self.port)

    async def _ask(self, event: Callable[[int], fx.SchedulerEvent]) -> tuple[bool, str]:
        """Feeds an operator's wish; the machine's answer."""
        self._count += 1
        token = self._count
        waiting = self._answers[token] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(event(token))
        try:
            return await asyncio.wait_for(waiting, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            return False, f"the scheduler did not get to it within {_ANSWER_TIMEOUT_S:g} s; ask again"
        finally:
            self._answers.pop(token, None)


async def serve(
    config: ServerConfig,
    open_store: StoreFactory,
    events: EventLog,
    machine: MachineFactory = real_machine,
    on_started: Callable[[SchedulerServer], None] = lambda server: None,
    seat: Seat | None = None,
) -> tuple[str, bool]:
    """Runs a scheduler until it ends; returns (why, whether that is a failure)."""
    server = SchedulerServer(config, open_store, events, machine, seat)
    try:
        await server.start()
        on_started(server)
        return await server.ended(), server.failed
    finally:
        with contextlib.suppress(ChaosError):
            await server.stop()
