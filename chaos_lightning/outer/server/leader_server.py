"""Runs a leader's process: listens on its port, leads at once or when it is elected, serves, and ends after the job.

Theory of operation. It is put together of parts: a service's frame and driver (service/server.py, service/driver.py),
the streams of clusters and followers (client_streams.py), the effects of the state machine (leader_effects.py), the
chain in its store (chain_store.py) and the calls (leader_calls.py). A leader that lost its term, or whose store fails
for good, ends; clusters train on without one, and say all that matters again to the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.process_table import host_identity, process_state
from chaos_lightning.outer.exchange.control_client import SERVICE
from chaos_lightning.outer.exchange.line_keys import LineKeyIssuer
from chaos_lightning.outer.exchange.outer_pb2_grpc import add_ParameterServerServicer_to_server
from chaos_lightning.outer.exchange.server_options import LeaderOptions
from chaos_lightning.outer.follower.snapshot import snapshot, untold
from chaos_lightning.outer.rules.effects import (
    Done,
    EndAsked,
    Heard,
    LeaderEffect,
    LeaderEvent,
    ProcessDied,
    TimePassed,
)
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import ClusterHello, FollowerHello
from chaos_lightning.outer.server import leader_calls
from chaos_lightning.outer.server.chain_store import ChainStore
from chaos_lightning.outer.server.client_streams import ClientStreams
from chaos_lightning.outer.server.ended_folders import EndedFolder, ended_folders
from chaos_lightning.outer.server.leader_effects import LeaderEffects
from chaos_lightning.security.credentials import Credentials, Secret
from chaos_lightning.service.auth_interceptor import Service
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.client import PULSE_S
from chaos_lightning.service.driver import Driver
from chaos_lightning.service.server import ListenPlace, ServerFrame
from chaos_lightning.service.store import StoreFactory

_log = logging.getLogger("chaos_lightning.outer")

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
        self, config: LeaderConfig, open_store: StoreFactory, events: EventLog, standing: Candidacy | None = None
    ) -> None:
        self.config, self._options = config, config.options
        self._events = events
        self._standing = standing
        self._started = time.monotonic()
        self._ended: list[EndedFolder] = []
        self._ended_at = 0.0
        self._idle_since = time.monotonic()
        self._frame = ServerFrame(
            ListenPlace(config.host, config.port, config.options.advertise, config.secret),
            events.emit,
            "outer_leader_ended",
            self._lead,
            candidacy=standing,
        )
        self.life = self._frame.life
        self._over = asyncio.Event()
        """Event that the machine decides nothing more."""
        self._machine: LeaderMachine | None = None
        """State machine of the leader; None while this process does not lead."""
        self._done: Done | None = None
        """Reason for which the machine decides nothing more."""
        self._store = ChainStore(open_store, events.emit)
        keys = LineKeyIssuer(config.options.job, secret_channel=Credentials.of(config.secret).secret_channel)
        self._driver = Driver[LeaderEvent, LeaderEffect](TimePassed)
        self._streams = ClientStreams(self._driver.feed, events.emit, self._frame.auth.note, keys)
        self._effects = LeaderEffects(self._store, self._streams, events.emit, self._machine_is_done)

    # ------------------------------------------------------------------ life

    async def start(self) -> int:
        """Listens on the port, takes over the chain (a candidate: once it is elected), and then lets others in; returns
        the port.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        port = await self._frame.start(lambda: [self._service()])
        self.life.begin(self._tick(), "ticks")
        self.life.begin(self._pulse(), "pulses")
        self.life.begin(self._look_for_dead(), "dead clusters")
        return port

    def _service(self) -> Service:
        """Returns the leader's gRPC leader_calls, with the roles that may make each call."""
        calls = leader_calls.OuterService(
            streams=self._streams,
            waits=self._waits,
            facts=self.facts,
            end_job=self._end_job,
            peer=self._frame.auth.peer,
        )
        return Service(
            SERVICE,
            leader_calls.RIGHTS,
            lambda server: add_ParameterServerServicer_to_server(calls, server),
            raw=leader_calls.RAW,
        )

    @property
    def port(self) -> int:
        """Port on which the leader listens."""
        return self._frame.port

    @property
    def endpoint(self) -> str:
        """Address at which other processes reach the leader."""
        return self._frame.endpoint

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self._done is not None and self._done.finished

    def asked_to_end(self, reason: str) -> None:
        """Ends this leader at its supervisor's request, but only once clusters that are leaving are done: they may have
        got the same signal as the supervisor.
        """
        self.life.asked(reason, self._leaving)

    def _leaving(self) -> list[bool]:
        machine = self._machine
        if machine is None:
            return []
        return [machine.attendance.clusters[who].leaving for who in machine.attendance.living()]

    async def stop(self) -> None:
        """Closes streams and port; clusters train on without this leader."""
        await self._frame.stop()
        await self._store.close()

    # ------------------------------------------------------------------ leading

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
        self._machine = machine = LeaderMachine(chain, term, self._options.followers)
        self._driver.on = machine.on
        if words := machine.shards.unheeded:
            self._events.emit("notice", text=words)
            _log.warning("job %s: %s", self._options.job, words)
        self._frame.drive(self._driver.drive(self._effects.carry_out, self._tell_the_end), "leader machine")

    def _machine_is_done(self, done: Done) -> None:
        self._done = done
        self._driver.deaf = True
        self._over.set()
        if done.finished:
            self.life.begin(self._linger(done.reason), "end of the job")
        else:
            self._streams.end_all(done.reason)
            self.life.end(done.reason, failed=True)

    def _tell_the_end(self, events: Sequence[LeaderEvent]) -> None:
        """Tells those who come to a job that has ended, while the leader is still about."""
        if self._done is None:
            return
        assert self._machine is not None
        for event in events:
            if isinstance(event, Heard) and isinstance(event.message, ClusterHello | FollowerHello):
                for effect in self._machine.farewell(event.conn, event.message):
                    self._effects.answer(effect)

    async def _linger(self, reason: str) -> None:
        """Ends the leader after the job's end, once all clusters have been told and have disconnected."""
        assert self._machine is not None
        away = untold(self._machine)
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
        assert self._machine is not None
        self._driver.feed(EndAsked(reason))
        try:
            await asyncio.wait_for(self._over.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            why = f"the newest version did not become durable within {_END_TIMEOUT_S:g} s"
            return False, f"{why}; the job ends once it is: see `chaos-lightning ps status`"
        ended = self._machine.chain.ended
        if ended is None:
            return False, "this leader leads no more; ask again"
        return True, f"job {self._options.job} has ended with {ended.version}: {ended.reason}"

    # ------------------------------------------------------------------ time, and facts

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._machine is not None:
                self._driver.feed(TimePassed())
            self._look_for_idleness()

    async def _look_for_dead(self) -> None:
        """Looks for absent clusters on this machine whose process is dead, so that they are not waited for (O14)."""
        here = host_identity()
        while True:
            await asyncio.sleep(_LOOK_S)
            absent = self._machine.attendance.absent() if self._machine is not None else {}
            for who, process in absent.items():
                if process.host == here and process_state(process.pid, process.pid_start) == "gone":
                    self._driver.feed(ProcessDied(who))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._streams.pulse()

    def _look_for_idleness(self) -> None:
        now = time.monotonic()
        if self._streams.count("Attend") or self._machine is None:
            self._idle_since = now
        if self._options.idle_timeout_s and now - self._idle_since > self._options.idle_timeout_s:
            self.life.end(f"no cluster for {self._options.idle_timeout_s:g} s; the chain stays in {self._store.place}")

    def _waits(self) -> tuple[str, str] | None:
        if self._machine is not None:
            return None
        return self._standing.waits("leader") if self._standing is not None else ("this leader has not begun yet", "")

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
        machine, standing = self._machine, self._standing
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
