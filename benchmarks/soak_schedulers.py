"""Schedulers and etcd servers that die and freeze during a soak, and come back.

Three candidates stand by for each other on three etcd servers. Every few seconds a card is drawn from a shuffled deck:
the leading scheduler gets SIGKILL, or SIGSTOP for some seconds; an etcd server that does not lead, or the one that
does, gets SIGKILL. Each comes back after a while, and only then is the next card drawn: etcd keeps its majority, and
somebody can lead. Members must notice nothing of it but that joins and recoveries wait for moments.

Members that are to lose all schedulers (`island` in soak_links.py) reach these by doors that can be shut for each of
them; the schedulers advertise their doors.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.candidates import Candidates
from benchmarks.soak_door import Door, SharedDoor, Ways
from benchmarks.workers import context, scheduler
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.runtime.etcd_servers import EtcdServer, EtcdServers

SCHEDULER_KINDS = ("scheduler_sigkill", "scheduler_sigstop", "etcd_sigkill", "etcd_leader_sigkill")
AWAY_S = {
    "scheduler_sigkill": (0.5, 4.0),
    "scheduler_sigstop": (1.0, 6.0),
    "etcd_sigkill": (1.0, 4.0),
    "etcd_leader_sigkill": (1.0, 4.0),
}
"""How long each is gone."""
SETTLED_S = 2.0
"""Whoever came back takes so long to be as good as before."""


@dataclass
class Away:
    """Who is gone, and until when (CLOCK_MONOTONIC, s)."""

    kind: str
    until: float
    name: str = ""
    server: EtcdServer | None = None


class Control:
    """The control plane of a soak; here a single scheduler that nobody touches.

    Args:
        endpoint: Where the parent reaches it.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.done: list[tuple[int, str, str]] = []
        """(ns, kind, who)."""

    def way(self, name: str) -> Door | Ways:
        """A member's way to it, that can be shut."""
        return Door(self.endpoint)

    def know(self, pids: Mapping[int, str]) -> None:
        """These are the members' processes."""

    def turn(self) -> None:
        """Brings back who is due, strikes the next one."""

    def calm(self) -> None:
        """Nobody is struck any more, and all come back."""

    def counts(self) -> Counter[str]:
        return Counter(kind for _, kind, _ in self.done)


class Several(Control):
    """See the module. All methods belong to the parent's loop."""

    kinds = SCHEDULER_KINDS

    def __init__(self, candidates: Candidates, servers: EtcdServers, log: Any, seed: int, every_s: float) -> None:
        super().__init__(candidates.endpoint)
        self.doors: list[SharedDoor] = []
        self.pids: dict[int, str] = {}
        self._candidates, self._servers, self._log, self._every_s = candidates, servers, log, every_s
        self._rng = random.Random(seed)
        self._deck: list[str] = []
        self._next_at = time.monotonic() + every_s
        self._away: Away | None = None

    def way(self, name: str) -> Door | Ways:
        return Ways(self.doors, name)

    def know(self, pids: Mapping[int, str]) -> None:
        self.pids.clear()
        self.pids.update(pids)

    def turn(self) -> None:
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
        try:
            self._strike(self._deck[-1])
        except ChaosError as error:  # an election is under way
            self._log.emit("notice", text=f"nobody was struck: {error}")
            self._next_at = now + 1.0
            return
        self._deck.pop()

    def calm(self) -> None:
        self._every_s = 0.0
        if self._away is not None:
            self._bring_back(self._away)

    def _strike(self, kind: str) -> None:
        away = Away(kind, time.monotonic() + self._rng.uniform(*AWAY_S[kind]))
        if kind.startswith("etcd"):
            leader = self._servers.leader()
            others = [server for server in self._servers.servers if server is not leader]
            away.server = leader if kind == "etcd_leader_sigkill" else self._rng.choice(others)
            who = away.server.name
            self._log.emit("fault_injected", kind=kind, node=who, pid=away.server.pid)
            self._servers.kill(away.server)
        else:
            from chaos_lightning.runtime.channel import fetch_status

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
        if away.server is not None:
            self._servers.run(away.server)
        else:
            self._candidates.wake(away.name)
        self._log.emit("fault_injected", kind="comes_back", node=away.server.name if away.server else away.name)
        self._away = None
        self._next_at = time.monotonic() + SETTLED_S + self._every_s * self._rng.uniform(0.5, 1.5)


@contextlib.contextmanager
def control(args: Any, folder: Path, log: Any, *, doors: bool) -> Iterator[Control]:
    """What schedules the members of a soak.

    Args:
        args: The soak's (`etcd`, `plan`, `seed`, `schedulers_every_s`).
        folder: For etcd's data and event logs.
        log: The harness's event log.
        doors: Members are to be cut off from it.
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
        if doors:
            made.doors = [SharedDoor(place, lambda: made.pids) for place in candidates.places.values()]
            for door in made.doors:
                stack.callback(door.close)
            candidates.advertised = dict(zip(candidates.places, (d.endpoint for d in made.doors), strict=True))
        candidates.start_all()
        yield made


def etcd_is_here() -> bool:
    """Whether etcd servers can be started on this machine."""
    from chaos_lightning.runtime.etcd_servers import find_etcd

    try:
        return bool(find_etcd())
    except ConfigurationError:
        return False
