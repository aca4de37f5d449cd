"""A parameter server and clusters of an outer job, as real processes that benchmarks kill and stop.

The server is what a user starts (testing/far_server.py). Clusters are children of a fork server that has torch
imported; each runs the plain loop (chaos_lightning.DiLoCo) over batches that it draws, with a pause that stands for
heavier computing. They keep the times of their steps to themselves until they are asked, so that telling costs no
training.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.candidates import Watch
from benchmarks.common import MIB
from benchmarks.workers import Worker
from chaos_lightning.events.events import EventLog, Record
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer.fold import OuterRun
from chaos_lightning.observe.outer.tables import OuterFacts
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.outer.rules.types import Removed
from chaos_lightning.testing.far_server import FarServer

CLUSTERS = 3
FOLLOWERS = 2
LAYERS = 4
PATIENCE_S = 90.0
_LOOK_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


def model_of(params_mib: float) -> Any:
    """Returns linear layers with `params_mib` MiB of fp32 parameters, the same in all processes, and their width."""
    import torch

    width = round((params_mib * MIB / 4 / LAYERS) ** 0.5)
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))), width


def cluster(pipe: Connection, told: dict[str, Any], host: str) -> None:
    """Trains a cluster until its pipe ends. On "times" it sends (end in ns of CLOCK_MONOTONIC, seconds) of each step
    since the last one.

    Args:
        pipe: Connection to the benchmark.
        told: Settings "name", "params_mib" and "pace_s"; all others are arguments of `DiLoCo`, as is "name".
        host: Machine on which the process counts as running; "" for this one.
    """
    import torch

    from chaos_lightning.diloco import DiLoCo
    from chaos_lightning.testing.emulation import HOST, install_from
    from chaos_lightning.testing.processes import die_with_parent

    die_with_parent()
    install_from({HOST: host} if host else {})
    torch.set_num_threads(1)
    told = dict(told)
    model, width = model_of(told.pop("params_mib"))
    pace_s = told.pop("pace_s")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(sum(map(ord, told["name"])))
    times: list[tuple[int, float]] = []
    with DiLoCo(model, optimizer, data="local", host_server=False, batch=1, **told) as diloco:
        before = 0
        for batch in diloco.prepare(_Endless(width, draw), epochs=1, timeout_s=PATIENCE_S):
            time.sleep(pace_s)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            diloco.step()
            now = time.monotonic_ns()
            if before:
                times.append((now, (now - before) / 1e9))
            before = now
            while pipe.poll():
                pipe.recv()
                pipe.send(times)
                times = []


class _Endless:
    """Endless random batches of one sample."""

    def __init__(self, width: int, draw: Any) -> None:
        self._width, self._draw = width, draw

    def __iter__(self) -> Iterator[Any]:
        import torch

        while True:
            yield torch.randn(1, self._width, generator=self._draw)


def burn(pipe: Connection, cpu_s: float) -> None:
    """Uses this much processor time at once, and ends."""
    while time.process_time() < cpu_s:
        pass
    pipe.send(time.process_time())


def cpu_of(pids: set[int]) -> dict[int, float]:
    """Returns the CPU seconds that each process has used; leaves out processes that have ended."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


@dataclass
class OuterScene:
    """A running outer job: its server, its clusters and their events.

    Attributes:
        name: Name of the scene.
        server: Parameter server, whose processes are struck.
        clusters: Processes of the clusters, by name.
        context: Multiprocessing context of the fork server.
        watch: All events.
        times: Steps that each cluster reported, by name: (end in ns, duration in s).
        struck: Clusters that were killed.
    """

    name: str
    server: FarServer
    clusters: dict[str, Worker]
    context: Any
    watch: Watch
    told: dict[str, Any]
    times: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    struck: set[str] = field(default_factory=set)
    _number: int = 0

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """Takes in events until `ready` returns a true value; returns that value.

        Raises:
            TimeoutError: `ready` returns no true value in time.
            RuntimeError: A cluster ended that nobody struck.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            self.watch.look()
            if found := ready():
                return found
            for name, worker in self.clusters.items():
                if worker.process.exitcode is not None:
                    raise RuntimeError(f"cluster {name} ended with {worker.process.exitcode}")
            if time.monotonic() > end:
                last = "; ".join(str(r)[:150] for r in self.watch.records[-5:])
                raise TimeoutError(f"{self.name}: waited {PATIENCE_S:g} s for {what}; the last events: {last}")
            time.sleep(_LOOK_S)

    def first(self, since_ns: int, fits: Callable[[Record], bool]) -> float:
        """Returns the seconds from `since_ns` to the first later event that fits; 0.0 if there is none yet."""
        later = (r.mono - since_ns / 1e9 for r in self.watch.records if r.mono * 1e9 > since_ns and fits(r))
        return min(later, default=0.0)

    def wait_first(self, since_ns: int, fits: Callable[[Record], bool], what: str) -> float:
        """Waits for the first event after `since_ns` that fits; returns the seconds from `since_ns` to it."""
        return float(self.until(lambda: self.first(since_ns, fits), what))

    def decided(self) -> int:
        """Returns the number of the newest decided version."""
        rounds = (r for r in reversed(self.watch.records) if r.name == "entry" and r["kind"] in ("Founded", "Round"))
        return next((int(r["body"]["number"]) for r in rounds), 0)

    def term(self) -> int:
        """Returns the term of the last leader."""
        return max((int(r["term"]) for r in self.watch.records if r.name == "outer_leader_started"), default=0)

    def rounds(self, count: int) -> None:
        """Waits until `count` more rounds are decided."""
        goal = self.decided() + count
        self.until(lambda: self.decided() >= goal, f"version {goal}")

    def child(self, name: str) -> int:
        """Waits until the supervisor has started its child process of this name; returns the child's process id."""

        def found() -> int:
            told = (r for r in reversed(self.watch.records) if r.name == "server_child" and r["child"] == name)
            return int(next((r["pid"] for r in told), 0))

        return int(self.until(found, f"the child {name}"))

    def start_cluster(self) -> str:
        """Starts one more cluster; returns its name."""
        self._number += 1
        name = f"c{self._number}"
        host = name if self.server.apart else ""
        self.clusters[name] = Worker(self.context, cluster, {**self.told, "name": name}, host)
        return name

    def all_train(self, clusters: int = CLUSTERS) -> None:
        """Starts clusters up to this number; waits for a round with a push of each."""
        while len(self.clusters) < clusters:
            self.start_cluster()
        names = set(self.clusters)

        def together() -> bool:
            rounds = (r for r in reversed(self.watch.records) if r.name == "entry" and r["kind"] == "Round")
            newest = next(rounds, None)
            if newest is None:
                return False
            return {w["offer"]["push"]["incarnation"]["cluster"] for w in newest["body"]["accepted"]} >= names

        self.until(together, f"a round of {', '.join(sorted(names))}")

    def kill_cluster(self, name: str) -> None:
        """Kills a cluster by SIGKILL."""
        self.struck.add(name)
        self.clusters.pop(name).kill()

    def collect(self) -> None:
        """Takes in the times of all steps since the last call."""
        for worker in self.clusters.values():
            worker.pipe.send("times")
        for name, worker in self.clusters.items():
            self.times.setdefault(name, []).extend(worker.receive(PATIENCE_S))

    def longest(self, since_ns: int, until_ns: int) -> float:
        """Returns the longest step of a living cluster that ended in the interval, s; one that began before it counts
        in full.
        """
        return max(
            (s for name in self.clusters for end, s in self.times.get(name, ()) if since_ns < end < until_ns),
            default=0.0,
        )

    def cpu(self) -> dict[int, float]:
        """Returns the CPU seconds of the server's processes."""
        return cpu_of(self.server.alive())

    def facts(self) -> OuterFacts:
        """Returns the facts read from the logs so far."""
        self.watch.look()
        return OuterFacts.of(fold_jobs(sorted(self.watch.records, key=lambda r: r.t), Timeline, OuterRun).outer[0])

    def removed(self) -> list[str]:
        """Returns the living clusters that were removed from the job, each with the reason."""
        told = self.facts().chain.told.values()
        bodies = [one.entry.body for one in told if one.entry is not None and isinstance(one.entry.body, Removed)]
        return [f"{b.incarnation}: {b.reason}" for b in bodies if b.incarnation.cluster not in self.struck]


@contextlib.contextmanager
def outer_scene(
    name: str, folder: Path, context: Any, *, store: str = "", apart: bool = False, train: bool = True, **told: Any
) -> Iterator[OuterScene]:
    """Yields a running outer job, its server on one machine with SQLite or on three with etcd.

    Args:
        name: Name of the scene.
        folder: Folder for files and logs.
        context: Multiprocessing context of the fork server.
        store: etcd's address; "": SQLite.
        apart: Whether each process counts as on a machine of its own.
        train: Whether clusters train from the beginning; otherwise the server is alone.
        told: Settings of all clusters, as `cluster` takes them.
    """
    names = ("m1", "m2", "m3") if store else ("m1",)
    places = {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(EventLog.in_directory(events, "recovery", role="harness"))
        server = FarServer(folder, events, places, log, store, FOLLOWERS, apart=apart)
        stack.callback(server.close)
        server.start_all()
        scene = OuterScene(
            name,
            server,
            {},
            context,
            Watch(str(events)),
            {**told, "server": server.endpoints, "log_dir": str(events)},
        )
        stack.callback(lambda: [worker.kill() for worker in scene.clusters.values()])
        if train:
            scene.all_train()
        yield scene
