"""A command on every node of an emulated network: started, watched, asked to leave, and ended without a trace.

Theory of operation. Each node's command runs in a session of its own and writes to its own file, so a Ctrl+C at the
lab reaches only the lab, which passes it on: the commands leave politely, as they would on a real machine. `poll` is
called again and again by whoever shows the lab; it starts the nodes whose time has come, begins the schedule, and
returns what was printed since. When the last command has ended, what they left running (a hosted scheduler) is ended
by the lab's mark (edge_marks.py). Should the lab itself be killed, the kernel kills its commands; workers notice that
their agent is gone, a scheduler that it has no members, and namespaces are removed by the next lab.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, Tail
from chaos_lightning.lab.edge import Edge
from chaos_lightning.lab.edge_marks import Mark
from chaos_lightning.lab.processes import Child, start_command
from chaos_lightning.lab.topology import Topology

PLACES = ("node", "index", "endpoint", "neighbours", "nodes", "folder")
"""What may stand in braces in a command: {node}, {index} (from 0), {endpoint}, {neighbours} (by commas), {nodes}
(how many), {folder}."""


def fill(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with its placeholders replaced; other braces stay as they are."""
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace("{" + name + "}", value)
        filled.append(word)
    return filled


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """What a lab runs.

    Attributes:
        topology: On which network.
        command: On each node, with placeholders.
        folder: Outputs, event logs and the chain of views go here.
        backend: "auto", "relay" or "namespaces".
        schedule_at: "start": the schedule's time 0 is when the first commands are started; "joined": when every node
            that starts at once has joined the job.
        environment: Further variables for the commands.
    """

    topology: Topology
    command: tuple[str, ...]
    folder: Path
    backend: str = "auto"
    schedule_at: str = "start"
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError("no command to run; write it after --, such as: lab FILE -- python train.py")
        if self.schedule_at not in ("start", "joined"):
            raise ConfigurationError(f"schedule at {self.schedule_at!r}: expected start or joined")


class Lab:
    """See the module. Use it as a context manager.

    Attributes:
        edge: The network.
        children: Commands by node, as far as they have been started.
    """

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.events = config.folder / "events"
        self.events.mkdir(parents=True, exist_ok=True)
        self._log = EventLog.in_directory(self.events, "lab", role="harness")
        self._mark = Mark()
        self._told: list[tuple[float, str]] = []
        try:
            self.edge = Edge(config.topology, config.backend, told=self._tell, events=self._log)
        except BaseException:
            self._log.close()
            raise
        self.children: dict[str, Child] = {}
        self._waiting = sorted(config.topology.nodes, key=lambda n: n.starts_s)
        self._read: dict[str, int] = {}
        self._tail = Tail(self.events)
        self._joined: set[str] = set()
        self._begun = 0.0
        self._scheduled = False

    # ------------------------------------------------------------------ what is run

    def values(self, node: str) -> dict[str, str]:
        """What stands for the placeholders on this node."""
        topology = self.config.topology
        return {
            "node": node,
            "index": str(topology.names.index(node)),
            "endpoint": self.edge.backend.endpoint,
            "neighbours": ",".join(topology.neighbours(node)),
            "nodes": str(len(topology.names)),
            "folder": str(self.config.folder),
        }

    def command(self, node: str) -> list[str]:
        """What is started for this node."""
        return self.edge.command(node, fill(self.config.command, self.values(node)))

    def settings(self, node: str) -> dict[str, str]:
        """What its environment says beside the lab's own."""
        own = {
            "PYTHONUNBUFFERED": "1",
            "CHAOS_LOG_DIR": str(self.events),
            "CHAOS_STORE": str(self.config.folder / "chain.sqlite"),
            "CHAOS_IDLE_TIMEOUT_S": "30",
        }
        # Nodes share this machine's processors.
        threads = {k: "1" for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k not in os.environ}
        return {**threads, **own, **self.edge.environment(node), **self.config.environment}

    # ------------------------------------------------------------------ running

    def start(self) -> None:
        """Starts the nodes that start at once."""
        self._begun = time.monotonic()
        self._start_due()

    def poll(self) -> list[tuple[str, str]]:
        """Goes on; returns what happened since: (node, a line that it printed), or ("", what the lab has to say)."""
        self._start_due()
        self._begin_schedule()
        lines = [(name, line) for name in self.children for line in self._new_lines(name)]
        told, self._told = self._told, []
        return [*lines, *(("", f"{t_s:7.1f} s  {text}") for t_s, text in told)]

    @property
    def running(self) -> bool:
        """Some command runs, or is still to be started."""
        return any(c.running for c in self.children.values()) or bool(self._waiting)

    def interrupt(self) -> None:
        """Ctrl+C at every node; no further node is started."""
        self._waiting = []
        for name, child in self.children.items():
            self._log.emit("fault_injected", kind="sigint", node=name, pid=child.pid)
            child.send(signal.SIGINT)

    def exit_codes(self) -> dict[str, int | None]:
        """Of the commands that were started; None while one runs, negative for a signal."""
        return {name: child.poll() for name, child in self.children.items()}

    def exit_code(self) -> int:
        """0 if all commands ended well, else the first other code; a signal's is 128 more than its number."""
        codes = [code for code in self.exit_codes().values() if code]
        return 0 if not codes else codes[0] if codes[0] > 0 else 128 - codes[0]

    def close(self, polite_s: float = 4.0) -> int:
        """Ends what still runs, and the network; how many processes had to be ended."""
        ended = self._mark.end(polite_s)
        for child in self.children.values():
            if not child.running:
                child.release()
        self.edge.close()
        self._log.close()
        return ended

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _tell(self, t_s: float, text: str) -> None:
        self._told.append((t_s, text))

    def _start_due(self) -> None:
        now = time.monotonic() - self._begun
        while self._waiting and self._waiting[0].starts_s <= now:
            node = self._waiting.pop(0).name
            environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
            self.children[node] = start_command(
                node,
                self.command(node),
                self.config.folder / "out" / f"{node}.log",
                env={**environment, **self.settings(node), **self._mark.environment()},
            )
            self._told.append((now, f"{node} started: {shlex.join(fill(self.config.command, self.values(node)))}"))

    def _begin_schedule(self) -> None:
        if self._scheduled:
            return
        if self.config.schedule_at == "joined":
            for record in self._tail.poll():
                node = self.config.topology.node_of(record.node) if record.name == "joined" else None
                self._joined |= {node} if node else set()
            if not {n.name for n in self.config.topology.nodes if not n.starts_s} <= self._joined:
                return
        self._scheduled = True
        self.edge.start()
        if self.config.topology.schedule:
            self._told.append((0.0, "the schedule begins"))

    def _new_lines(self, node: str) -> list[str]:
        """Whole lines that this node's command has printed since the last call; at its end also a broken one."""
        child = self.children[node]
        ended = not child.running
        try:
            with child.log.open("rb") as file:
                file.seek(self._read.get(node, 0))
                data = file.read(1 << 20)
        except OSError:
            return []
        whole = data if ended else data[: data.rfind(b"\n") + 1]
        self._read[node] = self._read.get(node, 0) + len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()
