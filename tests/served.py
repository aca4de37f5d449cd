"""Helpers to run a scheduler in this process for tests, with a scripted or real state machine, and to wait for
events.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from chaos_lightning.control.agent import Agent
from chaos_lightning.control.options import SchedulerServerConfig
from chaos_lightning.control.scheduler_server import SchedulerServer
from chaos_lightning.events.events import EventLog
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import (
    NO_VIEW,
    FromMember,
    Heartbeat,
    Hello,
    LinkKeys,
    Member,
    Settings,
    ToMember,
    Welcome,
)
from chaos_lightning.service.auth_interceptor import Service
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.store import Store

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 30.0
T = TypeVar("T")


class Facts(Generic[T]):
    """List of facts that tests can wait for."""

    def __init__(self) -> None:
        self.seen: list[T] = []
        self._changed = threading.Condition()

    def add(self, fact: T) -> None:
        with self._changed:
            self.seen.append(fact)
            self._changed.notify_all()

    def wait(self, test: Callable[[T], bool], count: int = 1) -> T:
        """Waits for and returns the `count`th fact that passes the test; the AssertionError at the deadline shows all
        facts.
        """

        def found() -> list[T]:
            return [f for f in self.seen if test(f)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, PATIENCE_S), (
                f"waited in vain; seen: {self.seen}"
            )
            return found()[count - 1]

    def wait_for(self, kind: type, count: int = 1) -> Any:
        return self.wait(lambda f: isinstance(f, kind), count)


class ScriptedMachine:
    """Stand-in for the scheduler's state machine: welcomes every Hello, unless the test's rule answers an event
    otherwise.
    """

    def __init__(self, settings: Settings, chain: fx.Chain, served: Served) -> None:
        self.settings, self.chain, self.served = settings, chain, served
        self.names: dict[int, str] = {}

    def on(self, now: float, *events: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        return [effect for event in events for effect in self._on(event)]

    def _on(self, event: fx.SchedulerEvent) -> list[fx.SchedulerEffect]:
        effects = self.served.rule(event) if self.served.rule is not None else None
        if effects is None:
            effects = []
            if isinstance(event, fx.MessageIn) and isinstance(event.message, Hello):
                self.names[event.conn] = event.message.name
                effects = [fx.Send(event.conn, welcome(event.message.name, event.conn))]
        if not isinstance(event, fx.SchedulerTick):
            self.served.events.add(event)
        return effects

    def snapshot(self, page: int = 0) -> dict[str, Any]:
        return {"names": sorted(self.names.values())}


def welcome(name: str, number: int = 1) -> Welcome:
    member = Member(f"{name}~{number}", name, "host", "127.0.0.1", 1)
    return Welcome(member, 1, "founder", "", heartbeat_interval_s=0.02, heartbeat_timeout_s=0.1)


def hello(name: str = "a", **changes: Any) -> Hello:
    values: dict[str, Any] = {"job": "default", "host": "host", "address": "127.0.0.1", "port": 1, "pid": 1}
    values |= {"pid_start": 0, "quota": 1, "accumulate": 1, "package": "0", "fingerprint": ()}
    return Hello(name=name, **{**values, **changes})


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop shared by all servers of this process, which is never closed, since grpc.aio needs one
    loop for all.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="served", daemon=True).start()
    return loop


class Served:
    """Scheduler server in this process."""

    def __init__(
        self,
        rule: Callable[[fx.SchedulerEvent], list[fx.SchedulerEffect] | None] | None = None,
        *,
        machine: Callable[[Settings, fx.Chain], Any] | None = None,
        open_store: Callable[[], Store] = MemoryStore,
        log: EventLog | None = None,
        candidacy: Any = None,
        services: Sequence[Service] = (),
        rules_of_job: Callable[[Settings], Settings] = lambda given: given,
        **config: Any,
    ) -> None:
        rules = replace(config.get("settings", Settings()), linger_timeout_s=config.pop("linger_s", 0.2))
        config["settings"] = rules
        self.rule = rule
        self.events: Facts[fx.SchedulerEvent] = Facts()
        self.outcome: tuple[str, bool] | None = None
        self.failure: BaseException | None = None
        self.loop = shared_loop()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._stop = asyncio.Event()
        factory = machine or (lambda settings, chain: ScriptedMachine(settings, chain, self))
        self.server = SchedulerServer(
            SchedulerServerConfig(**{"port": 0, **config}),
            open_store,
            log or EventLog(None),
            factory,
            candidacy,
            services,
            rules_of_job,
        )
        asyncio.run_coroutine_threadsafe(self._run(), self.loop)
        assert self._ready.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure

    async def _run(self) -> None:
        try:
            await self._serve()
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()
            self._ended.set()

    async def _serve(self) -> None:
        try:
            await self.server.start()
            self._ready.set()
            ended = asyncio.ensure_future(self.server.life.ended())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.outcome = (ended.result(), self.server.life.failed)
            for task in (ended, stopped):
                task.cancel()
        finally:
            await self.server.stop()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def feed(self, event: fx.SchedulerEvent) -> None:
        self.loop.call_soon_threadsafe(self.server._driver.feed, event)

    def wait_ended(self) -> tuple[str, bool]:
        assert self._ended.wait(PATIENCE_S)
        assert self.outcome is not None, self.failure
        return self.outcome

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        assert self._ended.wait(PATIENCE_S)


@contextmanager
def serving(*args: Any, **kwargs: Any) -> Iterator[Served]:
    served = Served(*args, **kwargs)
    try:
        yield served
    finally:
        served.stop()


SCHEDULER = (sys.executable, "-m", "chaos_lightning.control.scheduler_main")


@contextmanager
def scheduler_process(
    *arguments: str, program: Sequence[str] = SCHEDULER, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Runs a scheduler as a user starts it; at a free port, unless the arguments name one."""
    command = [*program, "--listen", "127.0.0.1:0", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def first_words(process: subprocess.Popen[str]) -> str:
    """Returns the first line that a scheduler process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def place_of(process: subprocess.Popen[str]) -> str:
    """Returns the endpoint from the first line that a scheduler process prints."""
    return first_words(process).partition(" at ")[2].split()[0]


class Client:
    """Client of a scheduler (an agent) that records the messages it receives."""

    def __init__(
        self,
        endpoint: str,
        name: str = "a",
        token: bytes = b"",
        job: str = "default",
        *,
        resumes: bool = True,
        **changes: Any,
    ) -> None:
        self.messages: Facts[ToMember] = Facts()
        self.keys: Facts[LinkKeys] = Facts()
        self.states: Facts[str] = Facts()
        self.resume = ""
        self._resumes = resumes
        self.answer: Callable[[ToMember], list[FromMember]] = lambda message: []
        options: dict[str, Any] = {"connect_timeout_s": PATIENCE_S, **changes}
        self.agent = Agent(
            endpoints=(endpoint,),
            token=token,
            hello_factory=options.pop("hello_factory", lambda: hello(name, resume=self.resume, job=job)),
            on_message=self._on_message,
            on_state=self.states.add,
            heartbeat=options.pop("heartbeat", lambda: Heartbeat(NO_VIEW, 0, 0)),
            **options,
        )
        self.agent.start()

    def _on_message(self, message: ToMember) -> None:
        if isinstance(message, Welcome) and self._resumes:
            self.resume = message.member.id
        if isinstance(message, LinkKeys):  # of no interest to most; they come before others
            self.keys.add(message)
            return
        self.messages.add(message)
        for answer in self.answer(message):
            self.agent.send(answer)

    def close(self) -> None:
        self.agent.close()


@contextmanager
def attending(*args: Any, **kwargs: Any) -> Iterator[Client]:
    client = Client(*args, **kwargs)
    try:
        yield client
    finally:
        client.close()
        client.agent.join(PATIENCE_S)
        assert not client.agent.is_alive()
