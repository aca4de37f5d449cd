"""The processes of `demo-diloco`: a parameter server on several machines, and clusters far apart.

Theory of operation. Everything is what a user would start: the server's commands (testing/far_server.py), and for each
cluster the training script, or a torchrun of it for each node of an elastic one. All processes inherit a mark, by which
`close` finds them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.demo.nodes import MARK, POLITE_S, NodeDied, last_words
from chaos_lightning.testing.far_server import FarServer, surroundings
from chaos_lightning.testing.processes import Child, Mark, start_command

_SCRIPT = "chaos_lightning.testing.demo.train_apart"


@dataclass(frozen=True, kw_only=True)
class FarCluster:
    """A cluster.

    Attributes:
        name: Its own.
        pause_s: Added to each of its steps, s.
        nodes: Of an elastic one, the first ones of which found it; else none.
    """

    name: str
    pause_s: float
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class FarNodes:
    """All processes of one demo, by name: machines of the server, clusters, nodes of the elastic cluster.

    Attributes:
        folder: For logs, outputs, and what the processes write.
        clusters: Those that train.
        arguments: For the training script.
        places: HOST:PORT of each machine of the server, by name; the first one has the followers, too.
        store: What leaders are told of their store; "": one file on the first machine.
        server: All of it.
        running: Clusters and nodes that were started.
        fallen: Those that are to die.
    """

    folder: Path
    clusters: Sequence[FarCluster]
    arguments: tuple[str, ...]
    places: Mapping[str, str]
    store: str = ""
    running: dict[str, Child] = field(default_factory=dict)
    fallen: set[str] = field(default_factory=set)
    rendezvous: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    server: FarServer = field(init=False)
    _mark: Mark = field(default_factory=lambda: Mark(name=MARK))
    _log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.events.mkdir(parents=True, exist_ok=True)
        self._log = EventLog.in_directory(self.events, "demo", role="harness")
        mark = self._mark.environment()
        self.server = FarServer(self.folder, self.events, self.places, self._log, self.store, environment=mark)

    @property
    def events(self) -> Path:
        """Folder in which all processes write their event logs."""
        return self.folder / "events"

    # ------------------------------------------------------------------ starting

    def cluster_words(self, cluster: FarCluster, node: str = "") -> list[str]:
        """Returns what is typed for this cluster, or on a node of it, after `python -m`."""
        script = [_SCRIPT, f"--folder={self.folder}", f"--name={cluster.name}", f"--pause={cluster.pause_s:g}"]
        script += self.arguments
        if not node:
            return script
        script += ["--inner=chaos"]
        chain = self.folder / f"{cluster.name}.sqlite"
        return [
            *("torch.distributed.run", "--rdzv-backend=chaos", f"--rdzv-endpoint={self.rendezvous}", "--nnodes=1:4"),
            *("--max-restarts=0", f"--rdzv-conf=idle_timeout_s=30,store={chain}", "-m", *script),
        ]

    def start_cluster(self, cluster: FarCluster) -> None:
        """All nodes that found it."""
        for node in cluster.nodes[:2] or ("",):
            self.start_node(cluster, node)

    def start_node(self, cluster: FarCluster, node: str = "") -> None:
        """A node of it, or all of a cluster of one process."""
        own = {"CHAOS_PS": self.server.endpoints}
        if node:  # a node may be killed soon after it joined, and its join is to be proved
            own |= {"CHAOS_NODE": node, "CHAOS_STATE_HASH_EVERY": "5"}
        self._start(node or cluster.name, [sys.executable, "-m", *self.cluster_words(cluster, node)], own)

    def _start(self, name: str, command: list[str], own: Mapping[str, str]) -> None:
        environment = {**surroundings(self.events), **self._mark.environment(), **own}
        log = self.folder / "out" / f"{name}.log"
        self.running[name] = start_command(name, command, log, env=environment, cwd=self.folder)

    # ------------------------------------------------------------------ hurting

    def kill(self, name: str, *workers: int) -> None:
        """SIGKILL for this cluster or node and its workers at once: as if the machine were gone."""
        self.fallen.add(name)
        self._log.emit("fault_injected", kind="sigkill", node=f"{name}-0" if workers else name)
        for pid in workers:
            self._signal(pid)
        self.running[name].send(signal.SIGKILL)

    def _signal(self, pid: int) -> None:
        if not self._mark.send(pid, signal.SIGKILL):
            raise NodeDied(f"process {pid} is not there any more, so it cannot be killed")

    # ------------------------------------------------------------------ watching

    def poll(self) -> Iterable[str]:
        """They go on by themselves, and say nothing in between."""
        return ()

    def check(self) -> None:
        """Raises:
        NodeDied: One ended with an error that is no part of the plot.
        """
        for name, child in (*self.running.items(), *self.server.machines.items()):
            if child.poll() not in (None, 0) and name not in self.fallen | self.server.down:
                raise NodeDied(f"{child.words()}; all that it said is in {child.log}; at last:\n{last_words(child)}")

    def exit_codes(self) -> dict[str, int | None]:
        """Returns the exit codes of clusters and nodes; None while one runs, negative for a signal."""
        return {name: child.poll() for name, child in self.running.items()}

    # ------------------------------------------------------------------ ending

    def close(self) -> int:
        """Ends everything that bears the mark; returns how many processes had to be ended."""
        ended = self._mark.end(POLITE_S)
        self.server.close()
        for child in self.running.values():
            if not child.running:
                child.release()
        self._log.close()
        return ended
