"""Runs a scheduler: it opens its port, leads at once or once elected, serves members, and decides when to end.

Theory of operation. It is put together of parts: a service's frame and driver (service/server.py, service/driver.py),
the streams of members (member_streams.py), the effects of the state machine (scheduler_effects.py), the writer to the
store (chain_writer.py) and the calls (scheduler_calls.py). Here is what they are for: when members are let in, when
another one begins anew, when it ends.

A scheduler that lost its term (another one took the chain) or whose store fails for good ends itself; members go on
training without it until one is back (protocol.md 13).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from chaos_lightning.control import scheduler_calls
from chaos_lightning.control.chain_writer import ChainWriter
from chaos_lightning.control.claims import Claims
from chaos_lightning.control.link_keys import KeyIssuer
from chaos_lightning.control.member_streams import MemberStreams
from chaos_lightning.control.options import GAVE_WAY, Owed, SchedulerServerConfig
from chaos_lightning.control.requests import SERVICE
from chaos_lightning.control.scheduler_effects import SchedulerEffects
from chaos_lightning.control.service_pb2_grpc import add_SchedulerServicer_to_server
from chaos_lightning.events.events import EventLog
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.batches import next_batch
from chaos_lightning.membership.leader_search import hears_s
from chaos_lightning.membership.showing import SHOWN
from chaos_lightning.protocol.pace import heartbeat_timeout_s
from chaos_lightning.protocol.types import SMALL_JOB, Heartbeat, Settings
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.auth_interceptor import Service
from chaos_lightning.service.candidacy import Candidacy
from chaos_lightning.service.driver import Driver
from chaos_lightning.service.server import ListenPlace, ServerFrame
from chaos_lightning.service.store import StoreFactory

_NOT_THE_JOBS = ("chain_lost", "chain_foreign", "chain_stale")
"""Events of the machine when a member knows more than the store (membership/identity.py)."""
HEARS_EMPTY_S = 0.7
"""Seconds that a scheduler listens where there is no chain: newcomers wait for it, and members of another one lose
nothing if a job is founded here.
"""


class Machine(Protocol):
    """Interface of the scheduler's state machine: membership.scheduler.SchedulerMachine, or a test double."""

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]: ...

    def snapshot(self, page: int = 0) -> dict[str, Any]: ...


MachineFactory = Callable[[Settings, fx.Chain], Machine]


def real_machine(settings: Settings, chain: fx.Chain) -> Machine:
    from chaos_lightning.membership.scheduler import SchedulerMachine

    return SchedulerMachine(settings, chain)


class SchedulerServer:
    """Server of one scheduler. `start` and `stop` belong to one asyncio loop.

    Args:
        config: Configuration of the server.
        open_store: Opens the store that decisions go to; called in `start`, once the port is ours.
        events: The scheduler's event log.
        machine: Makes the state machine.
        candidacy: Candidacy in the election among several schedulers; None if this one alone can lead.
        services: Other gRPC services on the same port.
        rules: Returns the settings that the job follows, given those of this process; called once the store is open.
    """

    def __init__(
        self,
        config: SchedulerServerConfig,
        open_store: StoreFactory,
        events: EventLog,
        machine: MachineFactory = real_machine,
        candidacy: Candidacy | None = None,
        services: Sequence[Service] = (),
        rules: Callable[[Settings], Settings] = lambda given: given,
    ) -> None:
        self.config = config
        self._events = events
        self._make_machine = machine
        self._candidacy = candidacy
        self._services = services
        self._rules_of_job = rules
        self._started = time.time()
        self._idle_since = time.monotonic()
        self._done_reason = ""
        self._ending: asyncio.TimerHandle | None = None
        """Timer that ends this process once its job is finished."""
        self._gives_way_at = math.inf
        """Time (monotonic, s) at which this scheduler ends, unless members of its own chain are here by then."""
        self._stays = False
        """Whether a finished scheduler answers for `linger_timeout_s` also while nobody is connected."""
        self._frame = ServerFrame(
            ListenPlace(config.host, config.port, config.advertise, config.token),
            events.emit,
            "scheduler_ended",
            self._begin,
            candidacy=candidacy,
            present=self._present,
        )
        self.life = self._frame.life
        self._claims = Claims(config.settings.job, config.hello_timeout_s)
        self._writer = ChainWriter(open_store, events.emit, config.owed)
        self._driver = Driver[fx.SchedulerEvent, fx.SchedulerEffect](
            fx.SchedulerTick, batch=next_batch, waits=self._waits
        )
        self._streams = MemberStreams(
            self._driver.feed,
            events.emit,
            self._frame.auth.note,
            hello_timeout_s=config.hello_timeout_s,
            pulses=candidacy is not None,
        )
        self._effects = SchedulerEffects(self._writer, self._streams, self._driver.feed, events.emit, self)
        self._machine: Machine | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> int:
        """Opens the port, then (a candidate: once elected) the chain, then admits members; returns the port.

        Raises:
            ConfigurationError: The port is taken, or the address may not be listened on.
            StoreError: The store cannot be used.
        """
        port = await self._frame.start(lambda: (self._scheduling(), *self._services))
        self.life.begin(self._tick(), "ticks")
        return port

    @property
    def port(self) -> int:
        """Port on which the scheduler listens."""
        return self._frame.port

    def _scheduling(self) -> Service:
        """Returns the scheduler's gRPC scheduler_calls, with the roles that may make each call."""
        calls = scheduler_calls.SchedulerService(
            streams=self._streams,
            driver=self._driver,
            effects=self._effects,
            claims=self._claims,
            candidacy=self._candidacy,
            status=self.status,
            peer=self._frame.auth.peer,
            emit=self._events.emit,
            port=self.port,
        )
        return Service(
            SERVICE,
            scheduler_calls.RIGHTS,
            lambda server: add_SchedulerServicer_to_server(calls, server),
            raw=scheduler_calls.RAW,
        )

    @property
    def endpoint(self) -> str:
        """Address at which members and other candidates reach this scheduler."""
        return self._frame.endpoint

    @property
    def owed(self) -> Owed | None:
        """End of the job that its store has not accepted yet; None if there is none."""
        return self._writer.owed

    async def stop(self) -> None:
        """Closes all streams and the port; members train on without a scheduler."""
        await self._frame.stop()
        await self._writer.close()

    # ------------------------------------------------------------------ leading

    def _present(self) -> set[str]:
        return self._streams.present(heartbeat_timeout_s(self.config.settings, len(self._streams.standing)))

    async def _begin(self) -> None:
        """Leads for the first time; tells those who come about a job that is finished already."""
        chain = await self._lead()
        if self._candidacy is None:
            if chain.tells_s and not chain.for_good:
                self._stays = True
                self._done("newcomers were told that the job is finished")
            return
        self.life.begin(self._pulse(), "pulses")
        if self._candidacy.waited() and chain.finished:
            # Members that were cut off, and newcomers that are still starting, are to hear of it from somebody.
            self._stays = True
            self._done("the job was finished while this scheduler stood by")

    async def _lead(self) -> fx.Chain:
        """Opens the chain and starts the state machine; from now on members are admitted."""
        chain = await self._writer.in_thread(self._take)
        self._events.emit(
            "scheduler_started",
            endpoint=self.endpoint,
            job=self.config.settings.job,
            term=chain.term,
            chain=chain.id,
            views=len(chain.past.views) + len(chain.views),
            finished=chain.finished,
            store=self._writer.chain.place,
        )
        secret_channel = Credentials.of(self.config.token).secret_channel
        met = {*chain.past.members, *(member for view in chain.views for member in view.ids())}
        self._streams.keys = KeyIssuer(self.config.settings, secret_channel=secret_channel, members=met)
        self._machine = machine = self._make_machine(self.config.settings, chain)
        self._driver.on = machine.on
        self._frame.drive(self._drive(), "scheduler machine")
        return chain

    def _take(self) -> fx.Chain:
        """Opens the chain, and adds what the state machine must know besides it. Runs in the store's thread."""
        found, candidacy = self._writer.take(self._rules), self._candidacy
        # The operator's word was about what lay there then, not about what others have led by since.
        watched = candidacy is not None and candidacy.watched()
        rebuild = self.config.rebuild and not (found.views and watched)
        tip = self._writer.chain.tip()
        return replace(
            found,
            rebuild=rebuild,
            hears_s=self._hears_s(found),
            tells_s=tip.tells_s(self.config.settings.finished_s, time.time()),
            for_good=self.config.keep_finished or (candidacy is not None and candidacy.waited() and found.finished),
        )

    def _rules(self) -> None:
        """Adopts the settings of the job, which the scheduler that first led it has stored."""
        self.config = replace(self.config, settings=self._rules_of_job(self.config.settings))

    def _hears_s(self, chain: fx.Chain) -> float:
        """Returns for how long a new leader must listen for members that know more than its chain, s (protocol.md
        14a).
        """
        several = self._candidacy is not None
        if self._candidacy is not None and self._candidacy.watched():
            return 0.0
        if chain.views:
            return hears_s(len(chain.views[-1].members), several=several)
        return HEARS_EMPTY_S if several or self.config.port else 0.0  # nobody looks for a port that was just given

    async def _drive(self) -> None:
        try:
            await self._driver.drive(self._effects.carry_out)
        finally:
            await self._effects.close()
        await self._begin_again()

    async def _begin_again(self) -> None:
        """Archives the chain after an operator has ended the job; all members connect again, and find an empty
        chain.
        """
        self._streams.close_all()
        # Messages that come until the streams end are ignored by the next machine.
        place = await self._writer.in_thread(self._writer.chain.begin_again)
        self._events.emit("notice", text=f"the job is over; its chain is {place}")
        if self._ending is not None:  # it was finished before, and this process would have ended
            self._ending.cancel()
            self._ending, self._done_reason, self._stays = None, "", False
            if self.config.gives_way:  # the next job goes by the settings of those who begin it
                self.life.end("the job begins anew, with a scheduler of its own")
                return
        self.config = replace(self.config, rebuild=False)  # that word was about the chain that is put away
        await self._lead()

    # ------------------------------------------------------------------ reasons to end

    def asked_to_end(self, reason: str) -> None:
        """Ends the server after a signal; a server that a member has started first lets members leave."""
        if self.config.outlives:
            self.life.asked(reason, self._leaving)
        else:
            self.life.end(reason)

    def _leaving(self) -> list[bool]:
        machine = self._machine
        counts: Any = machine.snapshot()["counts"] if machine is not None else {"here": 0, "leaving": 0}
        return [True] * counts["leaving"] + [False] * (counts["here"] - counts["leaving"])

    def machine_is_done(self, effect: fx.SchedulerDone) -> None:
        if effect.again:
            self._driver.stop()
        elif effect.deposed:
            self.life.end(effect.reason, failed=True)
        else:
            self._stays = self._stays or effect.tells_s > 0
            self._done(effect.reason, effect.tells_s)

    def snapshot(self) -> dict[str, Any]:
        """Returns the machine's facts."""
        assert self._machine is not None
        return self._machine.snapshot()

    def refused(self, why: str) -> None:
        """Ends the server after a decision that its store did not accept."""
        self.life.end(why, failed=True)

    def _done(self, reason: str, tells_s: float = 0.0) -> None:
        if not self._done_reason:
            self._done_reason = reason
            lingers_s = max(tells_s, self.config.settings.linger_timeout_s)
            self._ending = asyncio.get_running_loop().call_later(lingers_s, self.life.end, reason)

    def noted(self, name: str) -> None:
        """Prepares to give up the endpoint after an event that shows that members know what this store lacks."""
        if self.config.gives_way and name in _NOT_THE_JOBS:
            # Members of the store's own chain may take so long to come back.
            returning_s = self.config.settings.reconnect_grace_s if name == "chain_foreign" else 0.0
            self._gives_way_at = time.monotonic() + returning_s

    def _give_way_if_due(self) -> None:
        if time.monotonic() < self._gives_way_at:
            return
        self._gives_way_at = math.inf
        assert self._machine is not None
        counts = self._machine.snapshot().get("counts", {})
        if not counts.get("connected"):
            self.life.end(
                f"{GAVE_WAY}: members know what {self._writer.chain.place} lacks; start a scheduler on the "
                "store that holds it",
                failed=True,
            )

    def _look_for_idleness(self) -> None:
        now = time.monotonic()
        needed = self._candidacy is not None and self._candidacy.stands_by()
        if self._streams.standing or self._claims or self.owed or needed:
            self._idle_since = now
        idle = now - self._idle_since
        if self._done_reason and not self._streams.standing and not self._stays:
            self.life.end(self._done_reason)
        elif self.config.idle_timeout_s and idle > self.config.idle_timeout_s:
            chain = self._writer.opened
            place = chain.place if chain is not None else "its store"  # it may never have led
            self.life.end(f"no member for {self.config.idle_timeout_s:g} s; the chain stays in {place}")

    # ------------------------------------------------------------------ time, and facts

    def _large(self) -> bool:
        return len(self._streams.standing) > SMALL_JOB

    def _waits(self, event: fx.SchedulerEvent) -> bool:
        """Returns whether an event may wait for the next one: a heartbeat of a large job."""
        return isinstance(event, fx.MessageIn) and isinstance(event.message, Heartbeat) and self._large()

    async def _tick(self) -> None:
        usual = min(0.05, max(0.01, self.config.settings.heartbeat_interval_s / 4))
        while True:
            # A tick looks at all members once: in a large job it comes as often as the machine needs it, no oftener.
            await asyncio.sleep(self.config.tick_s or (2 * usual if self._large() else usual))
            self._driver.feed(fx.SchedulerTick())
            self._look_for_idleness()
            self._give_way_if_due()

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._streams.pulse())

    def status(self, page: int = 0) -> dict[str, Any]:
        """Returns facts of this server, with the machine's snapshot under "machine"; of a large job, one page of it."""
        settings, chain, machine, owed = self.config.settings, self._writer.opened, self._machine, self.owed
        streams = self._streams.standing.values()
        return {
            "job": settings.job,
            "endpoint": self.endpoint,
            "pid": os.getpid(),
            "term": chain.term if chain is not None else 0,
            "store": chain.place if chain is not None else "",
            "role": "leader" if machine is not None else "standby",
            "uptime_s": round(time.time() - self._started, 3),
            "streams": [{"peer": s.peer, "name": s.name} for s in islice(streams, None if page == 1 else SHOWN)],
            "stream_count": len(streams),
            "finished": bool(self._done_reason),
            "hosted": self.config.gives_way,
            "owed": f"the end of the job, which its store has not taken: {owed.reason or 'no answer yet'}"
            if owed
            else "",
            "min_nodes": settings.min_nodes,
            "max_nodes": settings.max_nodes,
            "machine": machine.snapshot(page) if machine is not None else {},
        }
