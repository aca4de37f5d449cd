"""Kills and freezes schedulers and etcd servers during a soak, and brings them back.

Three candidates stand by for each other on three etcd servers. Every few seconds a card is drawn from a shuffled deck:
the leading scheduler gets SIGKILL, or SIGSTOP for some seconds; an etcd server that does not lead, or the one that
does, gets SIGKILL. Each comes back after a while, and only then is the next card drawn: etcd keeps its majority, and
somebody can lead. Members must notice nothing of it but that joins and recoveries wait for moments.

Three more cards put a store in the chain's place that does not know what the job has come to (protocol.md 14a), and
take it away again. *old_snapshot*: all of etcd's data are replaced by a copy that was made some views earlier.
*old_store*: one scheduler, on a copy of the chain as it was some views earlier, in place of the candidates.
*empty_scheduler*: one scheduler, on an empty file. None of them may decide anything: members train on, and who comes or
dies meanwhile waits. Links are left alone as long, since only a scheduler can have the others go on without a member
that is cut off.

Members that are to lose all schedulers (`island` in links.py) reach these by ways that can be cut for each of
them; the schedulers advertise these ways.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.candidates import Candidates
from benchmarks.soak.ways import Ways
from benchmarks.workers import Worker, context, scheduler
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.service import etcd_pb2 as pb
from chaos_lightning.service.etcd_client import after_prefix
from chaos_lightning.service.etcd_servers import EtcdServer, EtcdServers
from chaos_lightning.testing.edge.relay import Way

STALE_KINDS = ("old_snapshot", "old_store", "empty_scheduler")
SCHEDULER_KINDS = ("scheduler_sigkill", "scheduler_sigstop", "etcd_sigkill", "etcd_leader_sigkill", *STALE_KINDS)
AWAY_S = {
    "scheduler_sigkill": (0.5, 4.0),
    "scheduler_sigstop": (1.0, 6.0),
    "etcd_sigkill": (1.0, 4.0),
    "etcd_leader_sigkill": (1.0, 4.0),
    "old_snapshot": (4.0, 7.0),
    "old_store": (4.0, 7.0),
    "empty_scheduler": (4.0, 7.0),
}
"""Least and most seconds for which a scheduler or server is gone, or other data is in the chain's place, by kind."""
JOB, OLD_PREFIX = "default", "older-copy"
AGE_S = (4.0, 9.0)
"""Least and most seconds of the age of a copy of the chain when it takes the chain's place."""
SETTLED_S = 2.0
"""Seconds that a scheduler takes after its return to be as good as before."""
HEARD_ALL_S = 6.0
"""Schedulers that start anew on the job's own store take no longer to be up and to hear all members."""


@dataclass
class Away:
    """A scheduler or server that was killed or frozen, and when it returns (CLOCK_MONOTONIC, s)."""

    kind: str
    until: float
    name: str = ""
    server: EtcdServer | None = None
    impostor: Worker | None = None


class Control:
    """Control plane of a soak; this base class has a single scheduler without faults.

    Args:
        endpoint: Endpoint at which the parent reaches the control plane.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.done: list[tuple[int, str, str]] = []
        """(ns, kind, who)."""

    def way(self, name: str) -> Way | Ways:
        """Returns a member's connection to the scheduler, which can be cut."""
        return Way(self.endpoint)

    def know(self, pids: Mapping[int, str]) -> None:
        """Learns the process ids of the members."""

    @property
    def stale(self) -> bool:
        """Whether a store without the job's chain is in use, will be, or was just now: links must not be disturbed
        then.
        """
        return False

    def turn(self, *, calm: bool) -> None:
        """Brings back each scheduler or server that is due, and kills or freezes the next one.

        Args:
            calm: Whether no link has a fault.
        """

    def calm(self) -> None:
        """Causes no more faults, and brings all schedulers and servers back."""

    def counts(self) -> Counter[str]:
        return Counter(kind for _, kind, _ in self.done)


class Several(Control):
    """Control plane with three candidates on three etcd servers. All methods are called in the parent's loop."""

    kinds = SCHEDULER_KINDS

    def __init__(self, candidates: Candidates, servers: EtcdServers, log: Any, seed: int, every_s: float) -> None:
        super().__init__(candidates.endpoint)
        self.ways: list[Way] = []
        self.pids: dict[int, str] = {}
        self._candidates, self._servers, self._log, self._every_s = candidates, servers, log, every_s
        self._rng = random.Random(seed)
        self._deck: list[str] = []
        self._next_at = time.monotonic() + every_s
        self._away: Away | None = None
        self._copied_at: float | None = None
        self._age_s = 0.0
        self._waits_for_calm = False
        self._ruled_at = 0.0
        """When the job's own schedulers rule again after a store that lacked the chain (CLOCK_MONOTONIC, s)."""
        self._empties = 0

    def way(self, name: str) -> Way | Ways:
        return Ways(self.ways, name)

    def know(self, pids: Mapping[int, str]) -> None:
        self.pids.clear()
        self.pids.update(pids)

    @property
    def stale(self) -> bool:
        taken = self._away is not None and self._away.kind in STALE_KINDS
        return taken or self._waits_for_calm or time.monotonic() < self._ruled_at

    def turn(self, *, calm: bool) -> None:
        now = time.monotonic()
        if self._away is not None:
            if now >= self._away.until:
                self._bring_back(self._away)
            return
        if not self._every_s or now < self._next_at:
            return
        if not self._deck:
            self._deck = list(SCHEDULER_KINDS)
            self._rng.shuffle(self._deck)
        kind = self._deck[-1]
        if kind in STALE_KINDS and not self._ripe(kind, calm):
            return
        try:
            self._strike(kind)
        except ChaosError as error:  # an election is under way
            self._log.emit("notice", text=f"nobody was struck: {error}")
            self._next_at = now + 1.0
            return
        self._deck.pop()

    def _ripe(self, kind: str, calm: bool) -> bool:
        """Returns whether a fault may happen: a copy of the chain is old enough, if the fault needs one, and no member
        is cut off.
        """
        if kind != "empty_scheduler" and self._copied_at is None:
            self._copy(kind)
            self._copied_at, self._age_s = time.monotonic(), self._rng.uniform(*AGE_S)
        self._waits_for_calm = self._copied_at is None or time.monotonic() - self._copied_at >= self._age_s
        return self._waits_for_calm and calm

    def calm(self) -> None:
        self._every_s = 0.0
        if self._away is not None:
            self._bring_back(self._away)

    def _strike(self, kind: str) -> None:
        away = Away(kind, time.monotonic() + self._rng.uniform(*AWAY_S[kind]))
        if kind in STALE_KINDS:
            who = self._replace_chain(away)
        elif kind.startswith("etcd"):
            leader = self._servers.leader()
            others = [server for server in self._servers.servers if server is not leader]
            away.server = leader if kind == "etcd_leader_sigkill" else self._rng.choice(others)
            who = away.server.name
            self._log.emit("fault_injected", kind=kind, node=who, pid=away.server.pid)
            self._servers.kill(away.server)
        else:
            from chaos_lightning.control.requests import fetch_status

            facts = fetch_status(self.endpoint, timeout_s=1.0)
            if facts["role"] != "leader":
                raise ConfigurationError("no scheduler leads at the moment")
            who = away.name = self._candidates.by_pid(facts["pid"])
            number = signal.SIGKILL if kind == "scheduler_sigkill" else signal.SIGSTOP
            self._log.emit("fault_injected", kind=kind, node=who, pid=facts["pid"])
            os.kill(facts["pid"], number)
        self.done.append((time.monotonic_ns(), kind, who))
        self._away = away

    def _bring_back(self, away: Away) -> None:
        if away.kind in STALE_KINDS:
            self._ruled_at = time.monotonic() + HEARD_ALL_S
        if away.kind == "old_snapshot":
            self._swap_data("newer")
        elif away.impostor is not None:
            away.impostor.kill()
            for name in self._candidates.places:
                self._candidates.start(name)
        elif away.server is not None:
            self._servers.run(away.server)
        else:
            self._candidates.wake(away.name)
        self._log.emit("fault_injected", kind="comes_back", node=away.server.name if away.server else away.name)
        self._away = None
        self._next_at = time.monotonic() + SETTLED_S + self._every_s * self._rng.uniform(0.5, 1.5)

    # ------------------------------------------------------------------ stores that lack the chain

    def _copy(self, kind: str) -> None:
        """Copies the chain: etcd's data while all servers are down, or the job's keys to another prefix in etcd."""
        if kind == "old_snapshot":
            self._swap_data("", keep="older")
            return
        with contextlib.closing(self._servers.client()) as client:
            copy_chain(client, JOB)

    def _replace_chain(self, away: Away) -> str:
        self._copied_at, self._waits_for_calm = None, False
        self._log.emit("fault_injected", kind=away.kind, node="etcd" if away.kind == "old_snapshot" else "s0")
        if away.kind == "old_snapshot":
            self._swap_data("older", keep="newer")
            return "etcd"
        stores = {"old_store": f"{self._servers.address}/{OLD_PREFIX}", "empty_scheduler": str(self._empty())}
        for worker in self._candidates.workers.values():
            worker.kill()
        away.name, away.impostor = "s0", self._candidates.impostor("s0", stores[away.kind])
        return away.name

    def _empty(self) -> Path:
        """Returns the path of a chain file that does not exist yet."""
        self._empties += 1
        return self._servers.folder / f"empty-{self._empties}.sqlite"

    def _swap_data(self, name: str, keep: str = "") -> None:
        """Stops all etcd servers, and restarts them on the data saved as `name` ("": their own data).

        Args:
            name: Name that a former call got as `keep`.
            keep: Name under which their present data is saved; "": it is not saved.
        """
        for server in self._servers.servers:
            self._servers.kill(server)
        for server in self._servers.servers:
            data = server.folder / "data"
            if keep:
                shutil.rmtree(server.folder / keep, ignore_errors=True)
                shutil.copytree(data, server.folder / keep)
            if name:
                shutil.rmtree(data)
                shutil.copytree(server.folder / name, data)
        for server in self._servers.servers:
            self._servers.run(server)


def copy_chain(client: Any, job: str) -> None:
    """Copies a job's chain to `OLD_PREFIX`, in place of an older copy, without the keys of leader and standbys."""
    from chaos_lightning.service.etcd_store import job_root

    here, there = job_root(client.address.prefix, job), job_root(OLD_PREFIX, job)
    found = {kv.key.decode().removeprefix(here): kv.value for kv in client.get_all(here)[0]}
    writes = [
        pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=there.encode(), range_end=after_prefix(there)))
    ]
    client.transact([], writes)
    for name, value in found.items():
        if name in ("tip", "rules") or name.startswith("record/"):
            put = pb.PutRequest(key=f"{there}{name}".encode(), value=value)
            client.transact([], [pb.RequestOp(request_put=put)])


@contextlib.contextmanager
def control(args: Any, folder: Path, log: Any, *, ways: bool) -> Iterator[Control]:
    """Yields the control plane of a soak.

    Args:
        args: The soak's (`etcd`, `plan`, `seed`, `schedulers_every_s`).
        folder: For etcd's data and event logs.
        log: The harness's event log.
        ways: Members are to be cut off from it.
    """
    logs = str(folder / "events")
    if not args.etcd:
        with scheduler(2, log_dir=logs, plan=args.plan) as endpoint:
            yield Control(endpoint)
        return
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(EtcdServers(folder / "etcd", 3))
        ctx = context("benchmarks.candidates")
        candidates = Candidates(ctx, servers, logs, apart=False, job={"min_nodes": 2}, plan=args.plan, waits=True)
        stack.callback(candidates.close)
        made = Several(candidates, servers, log, args.seed, args.schedulers_every_s)
        if ways:
            made.ways = [Way(place, lambda: made.pids) for place in candidates.places.values()]
            for way in made.ways:
                stack.callback(way.close)
            candidates.advertised = dict(zip(candidates.places, (w.endpoint for w in made.ways), strict=True))
        candidates.start_all()
        yield made


def etcd_is_here() -> bool:
    """Returns whether etcd servers can be started on this machine."""
    from chaos_lightning.service.etcd_servers import find_etcd

    try:
        return bool(find_etcd())
    except ConfigurationError:
        return False
