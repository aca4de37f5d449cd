"""Runs a leader's process: listens on its port, leads at once or when it is elected, serves, and ends after the job.

Theory of operation. It is put together of parts: the streams of clusters and followers (streams.py), the driver of the
state machine (driver.py), the chain in its store (chain_store.py), the calls (service.py) and what stands before them
(control/auth_interceptor.py). A leader that lost its term, or whose store fails for good, ends; clusters train on
without one, and say all that matters again to the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos_lightning.control.auth_interceptor import AuthInterceptor, Service
from chaos_lightning.control.server_life import ServerLife
from chaos_lightning.control.store import StoreFactory
from chaos_lightning.errors import ChaosError, StoreError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.addresses import join_endpoint
from chaos_lightning.machine.process_table import host_identity, process_state
from chaos_lightning.outer.exchange.control_client import PULSE_S
from chaos_lightning.outer.exchange.line_keys import LineKeyIssuer
from chaos_lightning.outer.exchange.options import LeaderOptions
from chaos_lightning.outer.exchange.outer_pb2_grpc import add_ParameterServerServicer_to_server
from chaos_lightning.outer.follower.snapshot import snapshot, untold
from chaos_lightning.outer.rules.effects import Done, EndAsked, ProcessDied, TimePassed
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.server import service
from chaos_lightning.outer.server.chain_store import ChainStore
from chaos_lightning.outer.server.driver import OuterDriver
from chaos_lightning.outer.server.standing import OuterCandidacy
from chaos_lightning.outer.server.streams import ClientStreams
from chaos_lightning.outer.server.upkeep import EndedFolder, ended_folders
from chaos_lightning.security.credentials import Credentials, Secret, check_bind

_log = logging.getLogger("chaos_lightning.outer")

CANNOT_LEAD = "it was elected and cannot lead"
_TICK_S = 0.1
_LOOK_S = 1.0
"""Interval, s, of looking for processes of clusters that are away."""
_ENDED_S = 600.0
"""Interval, s, of looking for folders of ended jobs, when somebody asks for facts."""
_LINGER_S = 60.0
"""Longest time, s, for which a leader waits after the end of the job for clusters that fetch its last version."""
_QUIET_S, _AWAY_S = 0.5, 5.0
"""Seconds without a cluster after which an ended job's leader ends; the second one, if a cluster that lives has not
been told.
"""
_END_TIMEOUT_S = 600.0
"""Seconds that a request for the end of a job waits for a durable version."""


@dataclass(frozen=True, kw_only=True)
class LeaderConfig:
    """Settings of a leader's process, without the job's rules, which are in its chain.

    Attributes:
        options: Options of the leader, as the user gave them.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        secret: Cluster token, or credentials with a folder of keys; b"" only on loopback.
    """

    options: LeaderOptions
    host: str
    port: int
    secret: Secret = field(default=b"", repr=False)


class OuterServer:
    """Process of one leader. `start` and `stop` may only be called in one asyncio loop.

    Args:
        config: Settings of this process.
        open_store: Opens the store of the chain; called when this process leads.
        events: Event log of this process.
        standing: Candidacy of this process, where several leaders stand by for each other: it leads once it is elected.
    """

    def __init__(
        self, config: LeaderConfig, open_store: StoreFactory, events: EventLog, standing: OuterCandidacy | None = None
    ) -> None:
        self.config, self._options = config, config.options
        self.port = config.port
        self._events = events
        self._standing = standing
        self._started = time.monotonic()
        self._ended: list[EndedFolder] = []
        self._ended_at = 0.0
        self._idle_since = time.monotonic()
        self.life = ServerLife(
            events.emit, lambda why, failed: events.emit("outer_leader_ended", reason=why, failed=failed)
        )
        self._server: Any = None
        self._over = asyncio.Event()
        """Event that the machine decides nothing more."""
        self._auth = AuthInterceptor(config.secret, events.emit)
        self._store = ChainStore(open_store, events.emit)
        keys = LineKeyIssuer(config.options.job, secret_channel=Credentials.of(config.secret).secret_channel)
        self._driver = OuterDriver(self._store, keys, events.emit)
        self._streams = ClientStreams(self._driver.feed, events.emit, self._auth.note)

    # ------------------------------------------------------------------ life

    async def start(self) -> int:
        """Listens on the port, takes over the chain (a candidate: once it is elected), and then lets others in; returns
        the port.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        check_bind(self.config.host, self.config.secret)
        self.life.start()
        self._server, self.port = await self._auth.open(self.config.host, self.config.port)
        calls = service.OuterService(
            streams=self._streams,
            waits=self._waits,
            facts=self.facts,
            end_job=self._end_job,
            peer=self._auth.peer,
        )
        self._auth.serve(
            self._server,
            Service(service.NAME, service.RIGHTS, lambda grpc: add_ParameterServerServicer_to_server(calls, grpc)),
        )
        if self._standing is None:
            await self._lead()
            await self._server.start()
        else:
            await self._server.start()
            self._stand(self._standing)
        self.life.begin(self._tick(), "ticks")
        self.life.begin(self._pulse(), "pulses")
        self.life.begin(self._look_for_dead(), "dead clusters")
        return self.port

    @property
    def endpoint(self) -> str:
        """Address at which other processes reach the leader."""
        return self._options.advertise or join_endpoint(self.config.host, self.port)

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self._driver.done is not None and self._driver.done.finished

    def asked_to_end(self, reason: str) -> None:
        """Ends this leader at its supervisor's request, but only once clusters that are leaving are done: they may have
        got the same signal as the supervisor.
        """
        self.life.asked(reason, self._leaving)

    def _leaving(self) -> list[bool]:
        machine = self._driver.machine
        if machine is None:
            return []
        return [machine.attendance.clusters[who].leaving for who in machine.attendance.living()]

    async def stop(self) -> None:
        """Closes streams and port; clusters train on without this leader."""
        await self.life.stop()
        loop = asyncio.get_running_loop()
        resigned = loop.run_in_executor(None, self._standing.close) if self._standing is not None else None
        if self._server is not None:
            await self._server.stop(0.1)
            await self._auth.close()
        if resigned is not None:
            await resigned
        await self._store.close()

    # ------------------------------------------------------------------ leading

    def _stand(self, standing: OuterCandidacy) -> None:
        loop = asyncio.get_running_loop()

        def elected() -> None:
            loop.call_soon_threadsafe(lambda: self.life.begin(self._come_to_lead(), "election"))

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(lambda: self.life.end(f"it leads no more: {reason}", failed=True))

        standing.stand(self.endpoint, elected, lost, self._events.emit)

    async def _come_to_lead(self) -> None:
        try:
            await self._lead()
        except Exception as error:  # of any kind: the election would go on prolonging a lease in vain
            words = str(error) if isinstance(error, ChaosError) else f"{type(error).__name__}: {error}"
            self.life.end(f"{CANNOT_LEAD}: {words}", failed=True)

    async def _lead(self) -> None:
        """Takes over the chain; from then on clusters and followers are let in."""
        chain, term = await self._store.take()
        self._events.emit(
            "outer_leader_started",
            endpoint=self.endpoint,
            job=self._options.job,
            term=term,
            position=chain.position,
            chain=chain.job_id,
            store=self._store.place,
        )
        if chain.last is not None:  # its leader may have been killed before it wrote of it
            self._events.emit("entry", **chain.last.fields())
        self._driver.machine = machine = LeaderMachine(chain, term, self._options.followers)
        if words := machine.shards.unheeded:
            self._events.emit("notice", text=words)
            _log.warning("job %s: %s", self._options.job, words)
        self.life.begin(self._drive(), "leader machine")

    async def _drive(self) -> None:
        try:
            await self._driver.drive(self._streams, self._machine_is_done)
        except StoreError as error:
            self.life.end(f"the store failed: {error}", failed=True)

    def _machine_is_done(self, done: Done) -> None:
        self._over.set()
        if done.finished:
            self.life.begin(self._linger(done.reason), "end of the job")
        else:
            self._streams.end_all(done.reason)
            self.life.end(done.reason, failed=True)

    async def _linger(self, reason: str) -> None:
        """Ends the leader after the job's end, once all clusters have been told and have disconnected."""
        assert self._driver.machine is not None
        away = untold(self._driver.machine)
        seen, deadline = time.monotonic(), time.monotonic() + _LINGER_S
        while time.monotonic() < min(deadline, seen + (_AWAY_S if away else _QUIET_S)):
            await asyncio.sleep(_TICK_S)
            if self._streams.count("Attend"):
                seen = time.monotonic()
        self.life.end(f"the job has ended: {reason}")

    async def _end_job(self, reason: str) -> tuple[bool, str]:
        """Ends the job for an operator, once its newest version is durable; returns whether the chain contains the end,
        and words for the operator.
        """
        assert self._driver.machine is not None
        self._driver.feed(EndAsked(reason))
        try:
            await asyncio.wait_for(self._over.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            why = f"the newest version did not become durable within {_END_TIMEOUT_S:g} s"
            return False, f"{why}; the job ends once it is: see `chaos-lightning ps status`"
        ended = self._driver.machine.chain.ended
        if ended is None:
            return False, "this leader leads no more; ask again"
        return True, f"job {self._options.job} has ended with {ended.version}: {ended.reason}"

    # ------------------------------------------------------------------ time, and facts

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._driver.machine is not None:
                self._driver.feed(TimePassed())
            self._look_for_idleness()

    async def _look_for_dead(self) -> None:
        """Looks for absent clusters on this machine whose process is dead, so that they are not waited for (O14)."""
        here = host_identity()
        while True:
            await asyncio.sleep(_LOOK_S)
            absent = self._driver.machine.attendance.absent() if self._driver.machine is not None else {}
            for who, process in absent.items():
                if process.host == here and process_state(process.pid, process.pid_start) == "gone":
                    self._driver.feed(ProcessDied(who))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._streams.pulse()

    def _look_for_idleness(self) -> None:
        now = time.monotonic()
        if self._streams.count("Attend") or self._driver.machine is None:
            self._idle_since = now
        if self._options.idle_timeout_s and now - self._idle_since > self._options.idle_timeout_s:
            self.life.end(f"no cluster for {self._options.idle_timeout_s:g} s; the chain stays in {self._store.place}")

    def _waits(self) -> tuple[str, str] | None:
        if self._driver.machine is not None:
            return None
        return self._standing.waits() if self._standing is not None else ("this leader has not begun yet", "")

    def _ended_folders(self) -> list[EndedFolder]:
        """Returns the folders of ended jobs; remembers them for a while, since finding them means reading all their
        chains.
        """
        now = time.monotonic()
        chain = self._options.store_path
        if chain is not None and now >= self._ended_at:
            self._ended_at, self._ended = now + _ENDED_S, ended_folders(chain.parent)
        return self._ended

    async def facts(self) -> dict[str, Any]:
        """Returns facts about this process, its candidacy and, if it leads, the job (outer/follower/snapshot.py)."""
        machine, standing = self._driver.machine, self._standing
        led: dict[str, Any] = {}
        if standing is not None:
            led = await asyncio.get_running_loop().run_in_executor(None, standing.facts)
        ended = await asyncio.get_running_loop().run_in_executor(None, self._ended_folders)
        own = {
            "role": "leader" if machine is not None else "standby",
            "endpoint": self.endpoint,
            "job": self._options.job,
            "pid": os.getpid(),
            "parent_pid": os.getppid(),
            "store": self._store.place,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "ended_folders": [one.words for one in ended],
        }
        return {**own, **led, **(snapshot(machine, time.monotonic()) if machine is not None else {})}


async def serve(
    config: LeaderConfig,
    open_store: StoreFactory,
    events: EventLog,
    *,
    on_started: Callable[[OuterServer], None] = lambda server: None,
    standing: OuterCandidacy | None = None,
) -> tuple[str, bool]:
    """Runs a leader until it ends; returns the reason, and whether that is a failure."""
    server = OuterServer(config, open_store, events, standing)
    try:
        await server.start()
        on_started(server)
        return await server.life.ended(), server.life.failed
    finally:
        await server.stop()
