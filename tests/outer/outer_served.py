"""A leader of outer sync in the test's process, and scripted clusters and followers that talk to it by gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from served import PATIENCE_S, Facts, shared_loop

from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.outer.exchange.control_client import control_client
from chaos_lightning.outer.exchange.server_options import LeaderOptions
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Agreement,
    IncarnationId,
    Offer,
    ProcessPlace,
    PushId,
    TensorSpec,
    VersionId,
)
from chaos_lightning.outer.server.leader_server import LeaderConfig, OuterServer
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.memory_store import MemoryStore
from chaos_lightning.service.options import MEMORY
from chaos_lightning.service.store import Store

AGREEMENT = Agreement((TensorSpec("weight", "float32", (4,)),))
ZERO = ExactSum.of(()).encode()
ONE = ExactSum.of((1.0,)).encode()
HERE = ProcessPlace(host_identity(), os.getpid(), start_time(os.getpid()))


class OuterServed:
    """OuterServer that runs in the test's process; a test must `stop` it."""

    def __init__(
        self,
        open_store: Callable[[], Store] = MemoryStore,
        *,
        log: EventLog | None = None,
        standing: Any = None,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: Secret = b"",
        **options: Any,
    ) -> None:
        self.loop = shared_loop()
        config = LeaderConfig(options=LeaderOptions(store=MEMORY, **options), host=host, port=port, secret=secret)
        self.server = OuterServer(config, open_store, log or EventLog(None), standing)
        self._ended = threading.Event()
        self.outcome: tuple[str, bool] | None = None
        self._run(self.server.start())
        asyncio.run_coroutine_threadsafe(self._watch(), self.loop)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    async def _watch(self) -> None:
        self.outcome = (await self.server.life.ended(), self.server.life.failed)
        self._ended.set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def wait_ended(self) -> tuple[str, bool]:
        """Waits for the server's end; returns why it ended, and whether that is a failure."""
        assert self._ended.wait(PATIENCE_S)
        assert self.outcome is not None
        return self.outcome

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.life.end, "stopped by the test")
        self.wait_ended()
        self._run(self.server.stop())


@contextmanager
def outer_serving(*args: Any, **kwargs: Any) -> Iterator[OuterServed]:
    served = OuterServed(*args, **kwargs)
    try:
        yield served
    finally:
        served.stop()


class Scripted:
    """Scripted cluster or follower: records the messages that it gets, and answers them; a test must `close` it."""

    def __init__(self, endpoints: str, call: Any, secret: Secret = b"", revive: Any = None) -> None:
        self.heard: Facts[Any] = Facts()
        self.states: Facts[str] = Facts()
        """ "connected", and why not any more."""
        self.troubles: Facts[ChaosError] = Facts()
        self.client = control_client(
            endpoints.split(","),
            secret,
            call=call,
            on_connected=self._connected,
            on_message=self._hear,
            on_disconnected=self.states.add,
            on_trouble=self.troubles.add,
            revive=revive,
        )

    def _connected(self) -> None:
        self.states.add("connected")
        self.hello()

    def _hear(self, message: Any) -> None:
        self.answer(message)
        self.heard.add(message)

    def hello(self) -> None:
        """Sends the hello of this cluster or follower."""

    def answer(self, message: Any) -> None:
        """Sends the answer to a message of the leader, if it needs one."""

    def start(self) -> None:
        self.client.start()

    def close(self) -> None:
        self.client.close(PATIENCE_S)
        assert not self.client.is_alive()


class ScriptedFollower(Scripted):
    """Follower that pretends to stage, compute and save as soon as it is asked."""

    def __init__(self, endpoints: str, name: str = "one", **more: Any) -> None:
        super().__init__(endpoints, "Follow", **more)
        self.name = name
        self.disk: tuple[say.ShardFile, ...] = ()
        self.version = NO_VERSION
        self.term = 0
        self.job_id = ""

    def hello(self) -> None:
        nonce = os.urandom(4).hex()
        self.client.say(
            say.FollowerHello(
                self.name, nonce, self.term, self.disk, self.version, "127.0.0.1:1", process=HERE, job_id=self.job_id
            )
        )

    def answer(self, message: Any) -> None:
        self.term = max(self.term, getattr(message, "term", 0))
        match message:
            case say.Obey(job_id=job_id):
                self.job_id = job_id
                if self.version != NO_VERSION:
                    self.client.say(say.Applied(self.name, self.version))
            case say.Stage(offer=offer):
                products = (say.PushProduct(offer.push, ONE),)
                self.client.say(say.Staged(self.name, offer.push, offer.manifest, products, True, ZERO))
            case say.Apply(entry=entry):
                self.version = entry.version
                self.client.say(say.Applied(self.name, entry.version))
            case say.Keep(version=version):
                self.disk = (*self.disk, say.ShardFile(version, "digest"))[-2:]
                self.client.say(say.Written(self.name, version, "digest"))


class ScriptedCluster(Scripted):
    """Cluster that founds the job if there is none yet, and pushes when a test says so."""

    def __init__(self, endpoints: str, name: str = "home", process: ProcessPlace = HERE, **more: Any) -> None:
        super().__init__(endpoints, "Attend", **more)
        self.name = name
        self.process = process
        self.agreement = AGREEMENT
        self.nonce = os.urandom(4).hex()
        self.me: IncarnationId | None = None
        self.base = self.newest = NO_VERSION
        self.term = 0
        self.job_id = ""
        self.number = 1

    def hello(self) -> None:
        place = "a test"
        self.client.say(
            say.ClusterHello(
                self.name, place, self.nonce, self.term, self.me, self.base, self.newest, self.agreement,
                process=self.process, job_id=self.job_id,
            )
        )  # fmt: skip

    def answer(self, message: Any) -> None:
        self.term = max(self.term, getattr(message, "term", 0))
        match message:
            case say.Welcomed(incarnation=me, first=first, version=version, founded=founded, job_id=job_id):
                self.me, self.number, self.job_id = me, first, job_id
                if not founded:
                    self.push()
                elif version != NO_VERSION:
                    self._adopt(version)
            case say.PushAnswered(push=push):
                self.number = max(self.number, push.number + 1)
            case say.Served(version=version) if self.me is not None:
                self._adopt(version)

    def _adopt(self, version: VersionId) -> None:
        self.base = self.newest = version
        self.beat()

    def push(self) -> None:
        assert self.me is not None
        push = PushId(self.me, self.number)
        done = (64, 2) if self.base != NO_VERSION else (0, 0)
        self.client.say(say.Offered(Offer(push, self.base, f"content of {push}", *done)))

    def beat(self) -> None:
        assert self.me is not None
        self.client.say(say.Beat(self.me, 100.0, 10.0, self.base, 0, 1, leaving=False))

    def served(self, number: int) -> VersionId:
        """Waits until the leader has announced version `number` or a later one; returns that version."""

        def tells(message: Any) -> bool:
            return isinstance(message, say.Served | say.Welcomed) and message.version.number >= number

        version: VersionId = self.heard.wait(tells).version
        return version


@contextmanager
def at_once(*clients: Scripted) -> Iterator[None]:
    """Starts these clients, and closes them when the block ends."""
    with ExitStack() as stack:
        for client in clients:
            client.start()
            stack.callback(client.close)
        yield
