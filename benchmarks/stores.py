"""Measures the costs of the stores, and how etcd's two clients cope with the death of servers.

For a chain in memory, in an SQLite file, and in etcd (one server; by the own client and by the package etcd3): the
time of an append, the time to read a chain back, and the time from an append by one scheduler until another one that
waits for it is told. Then for each client of etcd: three servers, of which the one in use gets SIGKILL, a follower or
the leader, after whose death the others first elect; how long until a write works again; and whether a watch that was
under way sees what is written after its server was killed and started again.

Bounds are on the default client alone, in ratio to the other one: it must be no slower, and its watch must survive.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Options, Result, median, percentile, run
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.errors import ConfigurationError, StoreError
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import NO_VIEW, Member, View, ViewId
from chaos_lightning.service.etcd3_client import load_etcd3
from chaos_lightning.service.etcd_client import EtcdClient, put
from chaos_lightning.service.etcd_servers import EtcdServer, EtcdServers
from chaos_lightning.service.etcd_store import EtcdStore
from chaos_lightning.service.memory_store import MemoryStore, Shelf
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import Store

NO_SLOWER = 1.15
DEADLINE_S = 60.0
MEMBERS = tuple(Member(f"node-{i}~{i}", f"node-{i}", "host", "127.0.0.1", 4000 + i) for i in range(8))
Open = Callable[[], Store]


@dataclass(frozen=True)
class Timed:
    """Seconds of appends to a store, of reading it back, and until another scheduler learns of an append."""

    appends: list[float]
    read_s: float
    told: list[float]


def decision(term: int, number: int, last: ViewId) -> Persist:
    """Returns the record of a view of eight members, as a scheduler stores it."""
    return Persist(1, "view", ViewId(term, number), View(ViewId(term, number), last, MEMBERS, (), reason="measured"))


def chain(open_store: Open, entries: int, waits: int) -> Timed:
    """Measures appends, reading the whole chain by another scheduler, and how soon that one learns of further
    appends.
    """
    with JobChain(open_store()) as writer, open_store() as reader:
        term, last, appends = writer.take_term(), NO_VIEW, []
        for number in range(1, entries + 1):
            effect = decision(term, number, last)
            began = time.perf_counter()
            assert writer.append(effect).ok
            appends.append(time.perf_counter() - began)
            last = effect.number
        began = time.perf_counter()
        assert len(reader.read()[1]) == entries
        read_s = time.perf_counter() - began
        told = []
        for number in range(entries + 1, entries + 1 + waits):
            told.append(told_after(writer, reader, decision(term, number, last), number - 1))
            last = ViewId(term, number)
        return Timed(appends, read_s, told)


def told_after(writer: JobChain, reader: Store, effect: Persist, after: int) -> float:
    """Returns the seconds from the return of an append until `wait` returns at the reading scheduler."""
    woken: list[float] = []

    def wait() -> None:
        assert reader.wait(after, DEADLINE_S)
        woken.append(time.perf_counter())

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)  # it has begun to wait; what it looks at first is not measured here
    assert writer.append(effect).ok
    appended = time.perf_counter()
    waiter.join(DEADLINE_S)
    return max(0.0, woken[0] - appended)


def client_at(servers: EtcdServers, kind: str, leads: bool) -> tuple[EtcdClient, EtcdServer]:
    """Returns a client of etcd's leader (or of another server, if not `leads`), and the server that it uses."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        leader = servers.leader()
        client = servers.client(kind)
        client.transact([], [put("stores/before", b"")])
        if (client.server == leader.endpoint) is leads:
            return client, next(s for s in servers.servers if s.endpoint == client.server)
        client.close()
    raise TimeoutError(f"no client asked {leader.name} first, or another server, within {DEADLINE_S:g} s")


def written_again(servers: EtcdServers, kind: str, leads: bool) -> float:
    """Returns the seconds from the SIGKILL of the server that the client uses until a write has worked again."""
    client, victim = client_at(servers, kind, leads)
    with contextlib.closing(client):
        servers.kill(victim)
        began = time.perf_counter()
        while True:
            try:
                client.transact([], [put("stores/after", b"")])
                break
            except StoreError:
                if time.perf_counter() - began > DEADLINE_S:
                    raise
        seconds = time.perf_counter() - began
    servers.run(victim)
    servers.wait_ready(DEADLINE_S)
    return seconds


def watch_survives(servers: EtcdServers, kind: str) -> bool:
    """Returns whether a watch begun before the only server's restart sees all that is written after it."""
    server, stop, seen = servers.servers[0], threading.Event(), set[bytes]()
    begun = threading.Event()
    with contextlib.closing(servers.client(kind)) as client, contextlib.closing(servers.client()) as writer:
        _, revision = client.get_all(f"stores/{kind}/")

        def watch() -> None:
            with contextlib.suppress(StoreError):
                for events in client.watch(f"stores/{kind}/", revision + 1, stop):
                    begun.set()
                    seen.update(event.kv.key for event in events)
                    if len(seen) == 10:
                        return

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun.wait(DEADLINE_S)
        servers.kill(server)
        servers.run(server)
        servers.wait_ready(DEADLINE_S)
        for number in range(10):
            writer.transact([], [put(f"stores/{kind}/{number}", b"")])
        watcher.join(DEADLINE_S / 4)
        stop.set()
    return len(seen) == 10


@contextlib.contextmanager
def stores(folder: Path, servers: EtcdServers | None, kinds: list[str]) -> Iterator[dict[str, Open]]:
    """Yields for each store a function that opens it, which may be called several times."""
    shelf, path = Shelf(), folder / "chain"
    found: dict[str, Open] = {"memory": lambda: MemoryStore("job", shelf), "sqlite": lambda: SqliteStore(path, "job")}
    if servers is not None:
        for kind in kinds:
            found[f"etcd by {kind}"] = lambda kind=kind: EtcdStore(servers.client(kind), f"stores/job-{kind}/")  # type: ignore[misc]
    yield found


def measure(result: Result, folder: Path, quick: bool, kinds: list[str]) -> None:
    entries, waits, rounds = (200, 10, 2) if quick else (1000, 50, 10)
    figures: dict[str, Timed] = {}
    with EtcdServers(folder / "one", 1) as one:
        with stores(folder, one, kinds) as opened:
            for name, open_store in opened.items():
                timed = figures[name] = chain(open_store, entries, waits)
                result.add(f"append p50, {name}", median(timed.appends) * 1e3, "ms")
                result.add(f"append p99, {name}", percentile(timed.appends, 99) * 1e3, "ms")
                result.add(f"reading {entries} entries, {name}", timed.read_s * 1e3, "ms")
                result.add(f"told of an entry p50, {name}", median(timed.told) * 1e3, "ms")
                result.details[name] = {"appends_s": timed.appends, "told_s": timed.told}
        for kind in kinds:
            bound = 0.0 if kind == "own" else None
            lost = 0.0 if watch_survives(one, kind) else 1.0
            result.add(f"watches lost with a server's restart, etcd by {kind}", lost, "of 1", bound)
    with EtcdServers(folder / "three", 3) as three:
        for kind in kinds:
            for leads, which in ((False, "a follower"), (True, "etcd's leader")):
                took = [written_again(three, kind, leads) for _ in range(rounds)]
                title = f"write after the server in use, {which}, was killed"
                result.add(f"{title}, median, etcd by {kind}", median(took), "s")
                result.add(f"{title}, longest, etcd by {kind}", max(took), "s")
                result.details[f"killed {which}, {kind}"] = took
    if len(kinds) == 2:
        own, other = (median(figures[f"etcd by {kind}"].appends) for kind in kinds)
        result.add("append, own client / etcd3", own / other, "ratio", NO_SLOWER)


def main() -> int:
    args = Options(__doc__).parse_args()
    result = Result("stores")
    kinds = ["own", "etcd3"]
    try:
        load_etcd3()
    except ConfigurationError as error:
        result.remark(str(error))
        kinds.remove("etcd3")
    with tempfile.TemporaryDirectory(prefix="chaos-stores-") as folder:
        try:
            measure(result, Path(folder), args.quick, kinds)
        except ConfigurationError as error:
            print(f"  {error}")
            return 2
    return result.finish(args)


if __name__ == "__main__":
    run(main)
