"""A service of one's own, complete: a counter that survives `kill -9` of its host (docs/extending.md explains it).

python examples/counter.py serve --listen 127.0.0.1:29480         runs it; with --store etcd://... several stand by
python examples/counter.py add 127.0.0.1:29480 alice 3 4 5        adds three numbers, each exactly once
python examples/counter.py simulate 1000                          a thousand simulated jobs, full of faults
python examples/counter.py planted 1000                           the same with a bug, which must be found
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from chaos_lightning.service.spec import (
    ClientSaid,
    PutRecord,
    RecordStored,
    ServiceEffect,
    ServiceEvent,
    ServiceSpec,
    TellClient,
)


@dataclass(frozen=True)
class Add:
    """A client's request; its number, from 1 on, makes it safe to repeat."""

    number: int
    amount: int


@dataclass(frozen=True)
class Sum:
    """The answer: the sum after the client's request of this number."""

    number: int
    total: int


@dataclass(frozen=True)
class Added:
    """The record of a request."""

    client: str
    number: int
    amount: int


class Counter:
    """The machine: adds each request once, and tells the sum once a restart would know it, too."""

    def __init__(self, records: Sequence[Added]) -> None:
        self.total = 0
        self.last: dict[str, Sum] = {}  # answer to each client's last request
        self.asked: dict[str, int] = {}  # stream on which each client asked last
        for record in records:
            self.count(record)

    def count(self, record: Added) -> Sum:
        self.total += record.amount
        self.last[record.client] = Sum(record.number, self.total)
        return self.last[record.client]

    def on(self, now: float, event: ServiceEvent) -> list[ServiceEffect]:
        match event:
            case ClientSaid(conn, name, Add(number, amount)):
                self.asked[name] = conn
                known = self.last.get(name, Sum(0, 0))
                if number == known.number:
                    return [TellClient(conn, known)]
                if number == known.number + 1:  # nothing else is heard before its record is stored
                    return self.put(Added(name, number, amount))
            case RecordStored(record):
                return [TellClient(self.asked[record.client], self.count(record))]
        return []

    def put(self, record: Added) -> list[ServiceEffect]:
        return [PutRecord(record)]


class TooSoon(Counter):
    """A planted bug: tells the sum too soon."""

    def put(self, record: Added) -> list[ServiceEffect]:
        return [
            TellClient(self.asked[record.client], Sum(record.number, self.total + record.amount)),
            PutRecord(record),
        ]


COUNTER = ServiceSpec("counter", hears=Add, says=Sum, records=Added, machine=Counter)


class Adder:
    """A client: adds its numbers one after the other, and repeats on a new stream what is not answered."""

    def __init__(self, name: str, amounts: Sequence[int]) -> None:
        self.name, self.amounts = name, amounts
        self.sums: list[int] = []

    @property
    def done(self) -> bool:
        return len(self.sums) == len(self.amounts)

    def connected(self) -> Iterable[Add]:
        return [] if self.done else [Add(len(self.sums) + 1, self.amounts[len(self.sums)])]

    def heard(self, message: Sum) -> Iterable[Add]:
        if message.number != len(self.sums) + 1:
            return []  # an answer that came before
        self.sums.append(message.total)
        return self.connected()


def adders(random: Random) -> list[Adder]:
    return [Adder(name, [random.randrange(1, 100) for _ in range(random.randrange(1, 12))]) for name in "abc"]


def check(clients: Sequence[Adder], records: Sequence[Added]) -> str:
    """Returns what is wrong at the end: each number counts once, in the order in which it was answered."""
    total, sums = 0, dict[str, list[int]]()
    for record in records:
        total += record.amount
        sums.setdefault(record.client, []).append(total)
    wrong = [one for one in clients if one.sums != sums.get(one.name)]
    return "; ".join(f"{one.name} heard {one.sums}, and the records say {sums.get(one.name)}" for one in wrong)


def main(command: str, *given: str) -> int:
    from chaos_lightning.service import ready
    from chaos_lightning.testing.service_world import simulate_many

    if command == "serve":
        return ready.main(COUNTER, given)
    if command == "add":
        adder = Adder(f"{given[1]}-{os.getpid()}", [int(each) for each in given[2:]])
        done = ready.talk(COUNTER, adder, given[0].split(","), timeout_s=60.0)
        print(*adder.sums)
        return int(not done)
    spec = replace(COUNTER, machine=TooSoon) if command == "planted" else COUNTER
    return int(bool(simulate_many(spec, adders, check, range(int(given[0])))) != (command == "planted"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
