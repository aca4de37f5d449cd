"""An elastic cluster of an outer job far from its parameter server: real processes, with a relay as the slow link.

The server is what a user starts (testing/far_server.py), the inner job has a scheduler of its own. Ranks are children
of a fork server that has torch and Lightning imported; each runs `Trainer.fit` with `DiLoCoStrategy(inner="chaos")`
over rows that it draws, with a pause that stands for heavier computing. What they dial at followers goes through a
relay, which bounds the rate and counts bytes; what they say to each other does not. The policy is `sync`: no gate
judges pushes of a cluster whose batches change with its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.candidates import Watch
from benchmarks.outer_clusters import PATIENCE_S, OuterScene, model_of
from benchmarks.workers import Scheduler, Worker
from chaos_lightning.events.events import EventLog, Record
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.edge.relay import LinkRelay
from chaos_lightning.testing.emulation import Emulated
from chaos_lightning.testing.far_server import FarServer
from chaos_lightning.transport.medium import Direct, Pacer, install

CLUSTER = "home"
FOLLOWERS = ("follower-0", "follower-1")
FAR_BPS = 100e6
HASH_EVERY = 4
"""Steps from one proof of equal states to the next."""


class FarLinks:
    """Network of a rank: connections to followers go through the relay, all others are direct.

    Args:
        relay: HOST:PORT.
    """

    def __init__(self, relay: str) -> None:
        self._near, self._far = Direct(), Emulated(relay, {})

    def connect(self, address: str, port: int, *, me: str, peer: str, timeout_s: float) -> socket.socket:
        way = self._far if peer in FOLLOWERS else self._near
        return way.connect(address, port, me=me, peer=peer, timeout_s=timeout_s)

    def pacer(self) -> Pacer:
        return self._near.pacer()


def rank(pipe: Connection, told: dict[str, Any]) -> None:
    """Runs one rank of a cluster: reports that it is ready, waits for its start, and trains until SIGTERM.

    Args:
        pipe: Connection to the benchmark.
        told: Settings "name", "port" (of the inner job's scheduler), "params_mib", "pace_s", "relay", "events",
            "server", "inner_steps", "overlap".
    """
    import logging
    import warnings

    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, Dataset

    from chaos_lightning.strategies import ChaosStrategy, DiLoCoStrategy
    from chaos_lightning.testing.processes import die_with_parent

    die_with_parent()
    install(FarLinks(told["relay"]))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("chaos_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    model, width = model_of(told["params_mib"])

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, place: int) -> Any:
            return torch.randn(width, generator=torch.Generator().manual_seed(place))

    class Heavy(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(told["pace_s"])
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    inner = ChaosStrategy(
        endpoint=f"127.0.0.1:{told['port']}", name=told["name"], log_dir=told["events"],
        options={
            "join_timeout_s": 60.0, "step_timeout_s": 30.0, "state_hash_every": HASH_EVERY, "on_last_exit": "none",
        },
    )  # fmt: skip
    outer = {"log_dir": told["events"], "host_server": False, "batch": 1}
    strategy = DiLoCoStrategy(
        inner=inner, name=CLUSTER, server=told["server"], data="local", inner_steps=told["inner_steps"],
        overlap=told["overlap"], policy="sync", options=outer,
    )  # fmt: skip
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    pipe.send("ready")
    pipe.recv()
    trainer.fit(Heavy(), DataLoader(Rows(), batch_size=1))


@dataclass
class NestedScene(OuterScene):
    """An elastic cluster that trains, its server, and the far link between them.

    Attributes:
        relay: The far link.
        waiting: Ranks that have not begun.
    """

    relay: LinkRelay | None = None
    waiting: dict[str, Worker] = field(default_factory=dict)

    def prepare_rank(self) -> str:
        """Starts a rank's process, which waits before it joins; returns the rank's name."""
        self._number += 1
        name = f"r{self._number}"
        self.waiting[name] = Worker(self.context, rank, {**self.told, "name": name})
        return name

    def begin_rank(self, name: str) -> None:
        """Lets a rank that waits join the cluster."""
        worker = self.waiting[name]
        worker.receive(PATIENCE_S)
        self.clusters[name] = self.waiting.pop(name)
        worker.pipe.send("go")

    def leave_rank(self, name: str) -> None:
        """Makes a rank leave politely; the cluster ends with its last rank."""
        worker = self.clusters.pop(name)
        pid = worker.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        worker.process.join(PATIENCE_S)
        if worker.process.exitcode not in (0, 128 + signal.SIGTERM):  # or by the signal, once it has left
            worker.kill()
            raise RuntimeError(f"rank {name} ended with {worker.process.exitcode} when it was asked to leave")

    def next(self, name: str, since_ns: int, **fields: Any) -> Record:
        """Waits for the first event of this name and these fields after `since_ns`, and returns it."""

        def found() -> Record | None:
            return next(
                (
                    r
                    for r in self.watch.records
                    if r.name == name and r.mono * 1e9 > since_ns and all(r.get(k) == v for k, v in fields.items())
                ),
                None,
            )

        return self.until(found, f"{name} {fields or ''}")  # type: ignore[no-any-return]

    def staged(self, push: str) -> list[Record]:
        """Waits until all followers have received a whole push; returns their events about it."""

        def found() -> list[Record]:
            told = {r.node: r for r in self.watch.records if r.name == "push_staged" and r["push"] == push}
            return list(told.values()) if len(told) == len(FOLLOWERS) else []

        return self.until(found, f"push {push} at all followers")  # type: ignore[no-any-return]

    def kill_rank(self, name: str) -> None:
        """Kills a rank by SIGKILL, and notes the fault in the log."""
        self.server.log.emit("fault_injected", kind="sigkill", node=name)
        self.kill_cluster(name)


@contextlib.contextmanager
def nested_scene(folder: Path, context: Any, ranks: int, **told: Any) -> Iterator[NestedScene]:
    """Yields a parameter server, and a cluster of ranks that has adopted a version.

    Args:
        folder: Folder for files and logs.
        context: Multiprocessing context of the fork server.
        ranks: Number of ranks, which are named r1, r2 and so on.
        told: Settings of all ranks, as `rank` takes them.
    """
    places = {"m1": f"127.0.0.1:{free_port()}"}
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(EventLog.in_directory(events, "nested", role="harness"))
        server = FarServer(folder, events, places, log, "", len(FOLLOWERS))
        stack.callback(server.close)
        server.start_all()
        scheduler = Scheduler(log_dir=str(events))
        stack.callback(scheduler.stop)
        scheduler.start(1)
        relay = stack.enter_context(LinkRelay())
        for follower in FOLLOWERS:
            relay.shape(CLUSTER, follower, rate_bps=FAR_BPS)
        relay.access(CLUSTER, FAR_BPS)
        given = {
            **told,
            "server": server.endpoints,
            "events": str(events),
            "port": int(scheduler.endpoint.rpartition(":")[2]),
            "relay": relay.address,
        }
        scene = NestedScene(CLUSTER, server, {}, context, Watch(str(events)), given, relay=relay)
        stack.callback(lambda: [w.kill() for w in (*scene.clusters.values(), *scene.waiting.values())])
        for name in [scene.prepare_rank() for _ in range(ranks)]:
            scene.begin_rank(name)
            scene.next("joined", 0, node=name)
        yield scene
