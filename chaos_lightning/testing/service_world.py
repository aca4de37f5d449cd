"""Simulates a service in virtual time: its machine, a store, clients, and what goes wrong.

Theory of operation. The machine, the vocabulary and the rule of the store are the real ones; time, network and
processes are simulated, and drawn from a seed, so that a run that fails can be run again. The process that leads is
killed between any two effects, or frozen until another one leads; writes reach the store after their writer has died,
or their answers get lost; streams are cut, with what is on its way. When all clients are done, the author's check says
what is wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_lightning.planning.fleet.kernel import Kernel
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.spec import (
    ClientLeft,
    ClientSaid,
    EndService,
    EndStream,
    PutRecord,
    RecordStored,
    ServiceEffect,
    ServiceEvent,
    ServiceSpec,
    SpecClient,
    TellClient,
    TimePasses,
)
from chaos_lightning.service.store import Appended
from chaos_lightning.testing.world import SimClient, SimHost, SimStream

FAULTS = ("kill", "kill at an effect", "freeze", "cut", "lose answers")
ENDED_S = 120.0
"""Virtual time (s) after which a job that has not ended is stuck."""
_TICK_S, _LEASE_S, _AGAIN_S = 0.1, 1.0, 0.05
_FAULTS_S = 8.0
"""Virtual time (s) in which faults strike."""


@dataclass(slots=True)
class ServiceOutcome:
    """Outcome of one simulated job.

    Attributes:
        seed: Seed of the run.
        problem: What is wrong, in words; "" if nothing is.
        ended_s: Virtual time at the end, s.
        struck: Number of faults of each kind.
        log: What happened, for a reader.
    """

    seed: int
    problem: str = ""
    ended_s: float = 0.0
    struck: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    log: list[str] = field(default_factory=list)


class _Host(SimHost):
    """Process that leads: the machine, and its effects in order, each possibly its last."""

    def __init__(self, world: ServiceWorld) -> None:
        super().__init__(world.kernel, "host")
        self.world, self.spec = world, world.spec
        self.store = MemoryStore("simulated", world.shelf)
        self.store.take_term()
        self._end, records = self.store.read()
        self._machine = self.spec.machine([self.spec.read_record(record.body) for record in records])
        self._events: deque[ServiceEvent] = deque()
        self._outcomes: deque[ServiceEvent] = deque()
        self._effects: deque[ServiceEffect] = deque()
        self._writing = False
        self.timer(_TICK_S, self._tick)

    def _tick(self) -> None:
        self.feed(TimePasses())
        self.timer(_TICK_S, self._tick)

    def feed(self, event: ServiceEvent) -> None:
        self._events.append(event)
        self._drive()

    def _drive(self) -> None:
        while self.alive and not self._writing and (self._effects or self._outcomes or self._events):
            if not self._effects:
                event = (self._outcomes or self._events).popleft()
                self._effects.extend(self._machine.on(self.kernel.now, event))
            elif not self.dies():
                self._apply(self._effects.popleft())

    def _apply(self, effect: ServiceEffect) -> None:
        match effect:
            case PutRecord():
                self._writing = True
                self.kernel.after(self.kernel.between(0.001, 0.02), lambda: self._write(effect))
            case TellClient(conn, message):
                self.tell(conn, self.spec.write_told(message))
            case EndStream(conn) if conn in self.streams:
                self.streams[conn].cut()
            case EndService(reason):
                self.world.over(reason)

    def _write(self, effect: PutRecord) -> None:
        """Writes a record; if its writer has died meanwhile, the write may still arrive."""
        if not self.alive and self.kernel.random.random() < 0.5:
            return
        body, kind = self.spec.write_record(effect.record), type(effect.record).__name__
        outcome = self.store.append(kind, body, self._end, cut=effect.sums_up)
        if self.world.loses_answers and self.kernel.random.random() < 0.5:
            self.kernel.after(_AGAIN_S, lambda: self._write(effect))
            return
        self.deliver(lambda: self._wrote(effect, outcome))

    def _wrote(self, effect: PutRecord, outcome: Appended) -> None:
        self._writing = False
        if not outcome.ok:
            self.world.say(f"a host is deposed: {outcome.detail}")
            self.kill()
            return
        self._end = outcome.end
        self._outcomes.append(RecordStored(effect.record))
        self._drive()

    def heard(self, stream: SimStream, message: Any) -> None:
        self.feed(ClientSaid(stream.conn, stream.client.name, self.spec.read_said(message)))

    def left(self, stream: SimStream, proof: bool) -> None:
        self.feed(ClientLeft(stream.conn, abrupt=True))

    def killed(self) -> None:
        self.world.died(self)


class _ClientProcess(SimClient):
    """Process of a client."""

    def __init__(self, world: ServiceWorld, own: SpecClient) -> None:
        super().__init__(world.kernel, own.name, world)
        self.own, self._spec = own, world.spec
        self.timer(0.0, self.connect)

    def begun(self) -> None:
        self._say(self.own.connected())

    def hear(self, message: Any) -> None:
        self._say(self.own.heard(self._spec.read_told(message)))

    def _say(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self.say(self._spec.write_said(message))


class ServiceWorld:
    """One simulated job of a service.

    Args:
        spec: The service.
        clients: Its clients.
        seed: Seed of all chance.
        faults: Number of faults.
    """

    def __init__(self, spec: ServiceSpec, clients: Sequence[SpecClient], seed: int, faults: int) -> None:
        self.spec = spec
        self.kernel = Kernel(seed)
        self.shelf = Shelf()
        self.host: _Host | None = None
        self.loses_answers = False
        self.outcome = ServiceOutcome(seed)
        self._number = 0
        self._over = ""
        self._faults = faults
        self._clients = [_ClientProcess(self, client) for client in clients]
        self.kernel.at(0.0, self._lead)
        for _ in range(faults):
            self.kernel.at(self.kernel.between(0.0, _FAULTS_S), self._strike)

    def number(self) -> int:
        """Returns a number that no earlier call returned."""
        self._number += 1
        return self._number

    def say(self, words: str) -> None:
        """Notes what happens, for a reader."""
        self.outcome.log.append(f"{self.kernel.now:8.3f} {words}")

    def records(self) -> list[Any]:
        """Returns the records that are in the store."""
        return [self.spec.read_record(record.body) for record in MemoryStore("reader", self.shelf).read()[1]]

    def over(self, reason: str) -> None:
        """Takes that the service has ended by itself."""
        self._over = reason

    def died(self, host: _Host) -> None:
        """Has another host lead after a while."""
        if host is self.host:
            self.host = None
            self.kernel.after(self.kernel.between(0.05, 1.0), self._lead)

    def _lead(self) -> None:
        if self.host is None:
            self.host = _Host(self)
            self.say(f"a host leads, term {self.host.store.term}, {len(self.records())} records")

    def _strike(self) -> None:
        self._faults -= 1
        host, chance = self.host, self.kernel.random
        fault, lasts_s = chance.choice(FAULTS), self.kernel.between(0.1, 3.0)
        if host is None or host.frozen:
            return
        self.outcome.struck[fault] += 1
        self.say(fault)
        match fault:
            case "kill":
                host.kill()
            case "kill at an effect":
                host.die_at_effect = chance.randrange(12)
            case "freeze":
                host.freeze()
                self.kernel.after(lasts_s, host.thaw)
                self.kernel.after(_LEASE_S, lambda: self._replace(host))
            case "cut":
                if host.streams:
                    chance.choice(list(host.streams.values())).cut()
            case "lose answers":
                self.loses_answers = True
                self.kernel.after(lasts_s, self._answers_again)

    def _answers_again(self) -> None:
        self.loses_answers = False

    def _replace(self, host: _Host) -> None:
        """Elects another host in place of a frozen one, whose clients have left it."""
        if host.frozen and host is self.host:
            self.host = None
            for stream in list(host.streams.values()):
                stream.cut()
            self._lead()

    def run(self) -> bool:
        """Runs until all clients are done and nothing more goes wrong; returns whether that came about."""
        finished = self.kernel.run(
            ENDED_S, lambda: bool(self._over) or (not self._faults and all(c.own.done for c in self._clients))
        )
        self.outcome.ended_s = self.kernel.now
        return finished


def simulate(
    spec: ServiceSpec,
    clients: Callable[[Random], Sequence[SpecClient]],
    check: Callable[[Sequence[Any], Sequence[Any]], str],
    seed: int,
    most_faults: int = 12,
) -> ServiceOutcome:
    """Runs one simulated job of a service, from a seed to a verdict.

    Args:
        spec: The service.
        clients: Makes its clients, given a source of chance.
        check: Takes the clients and the records at the end; returns what is wrong, or "".
        seed: Seed of the run.
        most_faults: Largest number of faults.
    """
    random = Random(seed)
    made = clients(random)
    world = ServiceWorld(spec, made, random.getrandbits(32), random.randrange(most_faults + 1))
    world.outcome.seed = seed
    finished = world.run()
    world.outcome.problem = check(made, world.records()) if finished else f"not done after {ENDED_S:g} s"
    return world.outcome


def simulate_many(
    spec: ServiceSpec,
    clients: Callable[[Random], Sequence[SpecClient]],
    check: Callable[[Sequence[Any], Sequence[Any]], str],
    seeds: Iterable[int],
) -> list[ServiceOutcome]:
    """Runs a simulated job for each seed; prints how many had a problem, and the first ones; returns those."""
    count, bad = 0, list[ServiceOutcome]()
    struck: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(spec, clients, check, seed)
        count += 1
        struck.update(outcome.struck)
        if outcome.problem:
            bad.append(outcome)
            if len(bad) <= 3:
                print(f"seed {seed}: {outcome.problem}", *outcome.log, sep="\n  ")
    print(
        f"{count} jobs, {len(bad)} with a problem; faults: {', '.join(f'{n} x {what}' for what, n in struck.items())}"
    )
    return bad
