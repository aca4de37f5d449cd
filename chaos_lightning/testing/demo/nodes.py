"""The demo's nodes: real torchrun agents with real workers, started, hurt and ended by their own process ids.

Theory of operation. A node is what a user starts on one machine: a torchrun agent in a session of its own, whose worker
trains; a node with several workers is started by `chaos-lightning run`. All of them, and the scheduler that the first
one starts, inherit a mark in their environment that only this demo knows. Whatever happens, `close` ends exactly the
processes that bear it (testing/processes.py). Should the demo itself be killed, the kernel ends the agents
(PR_SET_PDEATHSIG), workers notice that their agent is gone, and the scheduler ends when it has been without members for
a while.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.emulation import RATES
from chaos_lightning.testing.far_server import surroundings
from chaos_lightning.testing.processes import Child, Mark, start_command

MARK = "CHAOS_DEMO"
NEWCOMER = "edge-4"
LINK_RATES_BPS = {"edge-1": 600e6, "edge-2": 100e6, "edge-3": 300e6}
"""The newcomer's links are uneven, as edge networks are: their sockets are paced (testing/emulation.py)."""
POLITE_S = 4.0
"""Between SIGTERM and SIGKILL at the end, s."""
HASHES = {"CHAOS_STATE_HASH_EVERY": "5"}
"""Steps between two state hashes are few, since a node may be killed soon after it joined."""


class NodeDied(ChaosError):
    """A node ended that nobody had touched."""


def places_for(*names: str) -> dict[str, str]:
    """Each of these nodes may start a scheduler, at a port of this machine that nobody uses."""
    return {name: f"127.0.0.1:{free_port()}" for name in names}


def before(name: str) -> str:
    """Under which name the exit code stands of a node that was started again since then."""
    return f"{name} before"


def rates_of(node: str) -> dict[str, float]:
    """Returns the rates at which this node may send to others, bit/s; to nodes not named it sends as fast as it can."""
    if node == NEWCOMER:
        return dict(LINK_RATES_BPS)
    return {NEWCOMER: LINK_RATES_BPS[node]} if node in LINK_RATES_BPS else {}


def last_words(child: Child, lines: int = 12) -> str:
    """The end of the worker's last traceback if there is one: torchrun's own summary after it names no reason."""
    said = child.tail(400).splitlines()
    begins = [i for i, line in enumerate(said) if line.startswith("Traceback")]
    for begin in reversed(begins):
        own = list(itertools.takewhile(lambda line: not re.match(r"[EWI]\d{4} ", line), said[begin:]))
        if not any("ChildFailedError" in line for line in own):
            return "\n".join(own[-lines:])
    return "\n".join(said[-lines:])


@dataclass(slots=True)
class Cast:
    """All processes of one demo, by name; the first worker of node "edge-1" is the member "edge-1-0".

    Attributes:
        folder: Everything is written below it.
        arguments: For the training script.
        min_nodes: torchrun's --nnodes=MIN:8.
        workers: How many workers these nodes have; all others have one.
        places: By node: where it may start a scheduler. All others ask the first of these first, then the others.
        store: Of the chain; "": a file in the folder.
        script: Module that workers run.
        others: Returns processes that others have started, and that are not to end either.
        nodes: Agents by node name; of a node that was started again, the one that was started last.
        earlier: The agents before them.
        fallen: Nodes that were killed on purpose.
        left: Nodes that were asked to leave, and were not started again.
        mark: Borne by all processes.
        log: Takes what is done to them.
    """

    folder: Path
    arguments: tuple[str, ...] = ()
    min_nodes: int = 2
    workers: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=lambda: places_for("edge-1"))
    store: str = ""
    script: str = "chaos_lightning.testing.demo.train"
    others: Callable[[], Mapping[str, Child]] = dict
    nodes: dict[str, Child] = field(default_factory=dict)
    earlier: dict[str, Child] = field(default_factory=dict)
    fallen: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    mark: Mark = field(default_factory=lambda: Mark(name=MARK))
    log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.events.mkdir(parents=True, exist_ok=True)
        self.log = EventLog.in_directory(self.events, "demo", role="harness")

    @property
    def events(self) -> Path:
        """Folder in which all members write their event logs."""
        return self.folder / "events"

    @property
    def endpoint(self) -> str:
        """Endpoints of all places in which a scheduler may be."""
        return ",".join(self.places.values())

    # ------------------------------------------------------------------------------------------------ starting

    def workers_of(self, name: str) -> int:
        """How many workers this node has."""
        return self.workers.get(name, 1)

    def options(self, name: str) -> list[str]:
        """Returns the options of this node's agent."""
        several = [f"--nproc-per-node={self.workers_of(name)}"] if self.workers_of(name) > 1 else []
        own = self.places.get(name, next(iter(self.places.values())))
        endpoint = ",".join([own, *(place for place in self.places.values() if place != own)])
        hosts = "" if name in self.places else ",host_scheduler=0"
        store = self.store.replace(",", "+") or self.folder / "chain.sqlite"
        return [
            *("--rdzv-backend=chaos", f"--rdzv-endpoint={endpoint}", f"--nnodes={self.min_nodes}:8", *several),
            *("--max-restarts=3", f"--rdzv-conf=idle_timeout_s=30,store={store}{hosts}"),
        ]

    def words(self, name: str) -> str:
        """Returns what a user would type on this machine."""
        program = "torchrun" if self.workers_of(name) == 1 else "chaos-lightning run"
        # Shorter, and the same place from the folder in which the demo was started.
        return " ".join([program, *self.options(name), "train.py"]).replace(f"{Path.cwd()}/", "")

    def command(self, name: str) -> list[str]:
        """The same, but for programs being called by their modules."""
        program = ["torch.distributed.run"] if self.workers_of(name) == 1 else ["chaos_lightning.cli", "run"]
        return [sys.executable, "-m", *program, *self.options(name), "-m", *self.training()]

    def training(self) -> list[str]:
        """Returns the training script's module and its arguments."""
        return [self.script, f"--folder={self.folder}", *self.arguments]

    def start(self, name: str) -> None:
        """Starts a node of this name, perhaps again after it has ended."""
        if name in self.nodes:
            self.earlier[name] = self.nodes[name]
            self.left.discard(name)
            self.fallen.discard(name)
        self.run(name, self.command(name), {"CHAOS_NODE": name, **HASHES, RATES: json.dumps(rates_of(name))})

    def run(self, name: str, command: Sequence[str], more: Mapping[str, str], events: Path | None = None) -> None:
        """Starts a command with `more` in its environment; its events go where all go, or to a folder of their own."""
        environment = {**surroundings(events or self.events), **more, **self.mark.environment()}
        log = self.folder / "out" / f"{name}.log"
        self.nodes[name] = start_command(name, command, log, env=environment, cwd=self.folder)

    # ------------------------------------------------------------------------------------------------ hurting

    def note(self, kind: str, node: str, **fields: object) -> None:
        """Writes down what is about to be done to this member or process."""
        self.log.emit("fault_injected", kind=kind, node=node, **fields)

    def strike(self, number: signal.Signals, node: str, pid: int, kind: str = "", **fields: object) -> None:
        """Sends a signal to one process; the log calls it `kind`, or as the signal."""
        self.note(kind or number.name.lower(), node, pid=pid, **fields)
        if not self.mark.send(pid, number):
            raise NodeDied(f"process {pid} is not there any more, so it cannot get {number.name}")

    def kill(self, name: str, worker: int) -> None:
        """SIGKILL for worker and agent at once: as if the machine were gone. The worker first, or its agent's death
        would ask it to leave."""
        self.fallen.add(name)
        self.strike(signal.SIGKILL, f"{name}-0", worker)
        self.nodes[name].send(signal.SIGKILL)

    def kill_agent(self, name: str) -> None:
        """SIGKILL for the agent, whose worker has killed itself, or for a process that has no agent."""
        self.fallen.add(name)
        self.nodes[name].send(signal.SIGKILL)

    def freeze(self, name: str, worker: int, seconds: float) -> None:
        """SIGSTOP for the worker, to be followed by `thaw` after so many seconds."""
        self.strike(signal.SIGSTOP, f"{name}-0", worker, seconds=seconds)

    def thaw(self, name: str, worker: int) -> None:
        """SIGCONT."""
        self.strike(signal.SIGCONT, f"{name}-0", worker)

    def ask(self, name: str, number: signal.Signals) -> None:
        """Asks the node to leave, by Ctrl+C (SIGINT) or SIGTERM at its agent."""
        self.left.add(name)
        self.note(number.name.lower(), f"{name}-0", pid=self.nodes[name].pid)
        self.nodes[name].send(number)

    def runs(self, pid: int) -> bool:
        """Whether this process of the demo's has not ended."""
        return pid in self.mark.alive()

    # ------------------------------------------------------------------------------------------------ watching

    def poll(self) -> Iterable[str]:
        """They go on by themselves, and say nothing in between."""
        return ()

    def check(self) -> None:
        """Raises:
        NodeDied: One ended with an error that is no part of the plot.
        """
        for name, child in {**self.nodes, **self.others()}.items():
            if child.poll() not in (None, 0) and name not in self.fallen:
                raise NodeDied(f"{child.words()}; all that it said is in {child.log}; at last:\n{last_words(child)}")

    def exit_codes(self) -> dict[str, int | None]:
        """Returns the exit codes of all agents; None while one runs, negative for a signal."""
        codes = {name: child.poll() for name, child in self.nodes.items()}
        return codes | {before(name): child.poll() for name, child in self.earlier.items()}

    # ------------------------------------------------------------------------------------------------ ending

    def close(self) -> int:
        """Ends everything that bears the mark; returns how many processes had to be ended."""
        ended = self.mark.end(POLITE_S)
        for child in (*self.nodes.values(), *self.earlier.values()):
            if not child.running:
                child.release()
        self.log.close()
        return ended
