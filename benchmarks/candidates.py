"""Schedulers that stand by for each other (candidates) on real etcd servers; benchmarks kill, freeze and restart them.

Candidates are children of the same fork server as members, so that one which was killed stands by again after a moment.
With `apart` each counts as on a machine of its own (CHAOS_HOST, testing/emulation.py): then the others cannot see
that its process is gone, and wait until its lease has ended, as between real machines. Embedded is the other way to
survive: one scheduler, its chain in a file, started again by the members that miss it (control/hosting.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workers import Worker
from chaos_lightning.errors import SchedulerUnreachableError
from chaos_lightning.events.events import Record, Tail
from chaos_lightning.machine.listener import free_port, free_ports
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.service.options import ETCD

COUNT = 3
PATIENCE_S = 30.0
LOOK_S = 0.05
_RECENT = 5000
"""Events to search: files are read in turns, so their order is not strict."""


def candidate(pipe: Connection, options: Mapping[str, Any], job: Mapping[str, Any], plan: str, host: str) -> None:
    """Runs one scheduler process, which ends when the benchmark ends or on a signal.

    Args:
        pipe: Connection to the benchmark.
        options: Arguments of `control.options.SchedulerOptions`, except `settings`.
        job: Rules of the job.
        plan: Plan by which gradients travel; "" for the default one.
        host: Machine on which the process counts as running; "" for this one.
    """
    from chaos_lightning.control.options import SchedulerOptions, change_settings
    from chaos_lightning.control.scheduler_main import run
    from chaos_lightning.planning.plans import DEFAULT_PLAN, read_plan
    from chaos_lightning.protocol.types import Settings
    from chaos_lightning.testing.emulation import HOST, install_from
    from chaos_lightning.testing.processes import die_with_parent

    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if host:
        install_from({HOST: host})
    settings = change_settings(Settings(plan=read_plan(plan or DEFAULT_PLAN)), dict(job))
    pipe.send(("exit", run(SchedulerOptions(settings=settings, **options))))


class Leaders(Protocol):
    """Interface to the schedulers of a benchmark, so that it can kill or freeze them."""

    endpoint: str

    def leading(self) -> tuple[str, int, int]: ...

    def bring_back(self, name: str) -> None: ...

    def close(self) -> None: ...


def leading(endpoint: str) -> dict[str, Any]:
    """Returns the status of the leading scheduler; asks again until there is one."""
    from chaos_lightning.control.requests import fetch_status

    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(SchedulerUnreachableError):
            facts = fetch_status(endpoint, timeout_s=5.0)
            if facts["role"] == "leader":
                return facts
        if time.monotonic() > end:
            raise TimeoutError(f"nobody has led at {endpoint} for {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


class Candidates:
    """Schedulers that compete for the lead of one job, with its chain in etcd.

    Args:
        context: Multiprocessing context of the fork server.
        servers: The etcd servers, running.
        logs: Folder of event logs.
        apart: Whether each scheduler counts as on a machine of its own.
        job: Further rules of the job.
        plan: Plan by which gradients travel; "" for the default one.
        waits: Whether schedulers start only when `start_all` is called.

    Attributes:
        places: HOST:PORT at which each scheduler listens, by name.
        advertised: HOST:PORT that others are told in place of `places`, by name; only schedulers that have one.
    """

    def __init__(
        self,
        context: Any,
        servers: EtcdServers,
        logs: str,
        *,
        apart: bool,
        job: Mapping[str, Any] | None = None,
        plan: str = "",
        waits: bool = False,
    ) -> None:
        self._context, self._servers, self._logs, self._apart = context, servers, logs, apart
        self._job, self._plan = dict(job or {}), plan
        self.places = {f"s{n}": f"127.0.0.1:{port}" for n, port in enumerate(free_ports(COUNT))}
        self.advertised: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}
        if not waits:
            self.start_all()

    def start_all(self) -> None:
        """Starts all candidates; returns when one of them leads."""
        for name in self.places:
            self.start(name)
        leading(self.endpoint)

    @property
    def endpoint(self) -> str:
        """Endpoint that members are given: the addresses of all candidates."""
        return ",".join(self.places.values())

    def start(self, name: str) -> None:
        self.workers[name] = self._on(name, self._servers.address)

    def impostor(self, name: str, store: str) -> Worker:
        """Starts a scheduler at this candidate's address, on a store that belongs to another job."""
        return self._on(name, store)

    def _on(self, name: str, store: str) -> Worker:
        options = {
            "listen": self.places[name],
            "advertise": self.advertised.get(name, "") if store.startswith(ETCD) else "",
            "store": store,
            "log_dir": self._logs,
        }
        return Worker(self._context, candidate, options, self._job, self._plan, name if self._apart else "")

    def by_pid(self, pid: int) -> str:
        """Returns the name of the candidate with this process id."""
        return next(name for name, worker in self.workers.items() if worker.process.pid == pid)

    def leading(self) -> tuple[str, int, int]:
        """Returns the name, the process id and the term of the leading candidate."""
        facts = leading(self.endpoint)
        return self.by_pid(facts["pid"]), int(facts["pid"]), int(facts["term"])

    def bring_back(self, name: str) -> None:
        """Wakes or restarts a candidate as `wake` does; returns when the candidate answers as a standby."""
        from chaos_lightning.control.requests import fetch_status

        self.wake(name)
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(SchedulerUnreachableError):
                facts = fetch_status(self.places[name], timeout_s=1.0, follow=False)
                if facts["role"] == "standby" and facts.get("leader"):
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"{name} does not stand by again within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)

    def wake(self, name: str) -> None:
        """Restarts a candidate that was killed, or continues one that is frozen."""
        worker = self.workers[name]
        if worker.process.is_alive():
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGCONT)
        else:
            worker.kill()
            self.start(name)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


class Embedded:
    """Scheduler that a member runs beside training, with its chain in a file; members that lose it start it again."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.environment = {"CHAOS_STORE": str(folder / "chain.sqlite"), "CHAOS_IDLE_TIMEOUT_S": "20"}

    def leading(self) -> tuple[str, int, int]:
        facts = leading(self.endpoint)
        return "scheduler", int(facts["pid"]), int(facts["term"])

    def bring_back(self, name: str) -> None:
        """Does nothing, since members have started the scheduler again already."""

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, SchedulerUnreachableError, ProcessLookupError):
            from chaos_lightning.control.requests import fetch_status

            os.kill(int(fetch_status(self.endpoint, timeout_s=1.0)["pid"]), signal.SIGTERM)


class Watch:
    """Reader of all processes' event logs, a few times a second; reading at every step would cost training time."""

    def __init__(self, logs: str) -> None:
        self._tail = Tail(Path(logs))
        self._next = 0.0
        self.records: list[Record] = []

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOK_S
            self.records += self._tail.poll()

    def first(self, name: str, since_ns: int, fits: Callable[[Record], bool] = lambda r: True) -> int:
        """Returns when (CLOCK_MONOTONIC, ns) an event of this name was first logged after `since_ns`; 0 if not yet."""
        found = [r.mono for r in self.records[-_RECENT:] if r.name == name and r.mono * 1e9 > since_ns and fits(r)]
        return int(min(found) * 1e9) if found else 0
