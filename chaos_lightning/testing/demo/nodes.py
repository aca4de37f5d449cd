"""Nodes of demos: real torchrun agents with real workers, which a demo starts, kills and freezes by process id.

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
"""Rates of the newcomer's links, uneven as in edge networks; their sockets are paced (testing/emulation.py)."""
POLITE_S = 4.0
"""Seconds between SIGTERM and SIGKILL at the end."""
HASHES = {"CHAOS_STATE_HASH_EVERY": "5"}
"""Environment of nodes, which hash their state every few steps: a node may be killed soon after it joined."""


class NodeDied(ChaosError):
    """A node has ended that the demo did not end."""


def places_for(*names: str) -> dict[str, str]:
    """Returns for each node a local endpoint with a free port, at which it may start a scheduler."""
    return {name: f"127.0.0.1:{free_port()}" for name in names}


def before(name: str) -> str:
    """Returns the key of an earlier agent's exit code, for a node that was started more than once."""
    return f"{name} before"


def rates_of(node: str) -> dict[str, float]:
    """Returns the highest rates at which a node may send to the others, bit/s; nodes that are not keys are not
    limited.
    """
    if node == NEWCOMER:
        return dict(LINK_RATES_BPS)
    return {NEWCOMER: LINK_RATES_BPS[node]} if node in LINK_RATES_BPS else {}


def last_words(child: Child, lines: int = 12) -> str:
    """Returns the end of the worker's last traceback, or of its output if it has none; torchrun's summary is left
    out.
    """
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
        folder: Folder below which everything is written.
        arguments: Arguments of the training script.
        min_nodes: MIN in torchrun's --nnodes=MIN:8.
        workers: Number of workers by node; all others have one.
        places: Endpoints at which nodes may start a scheduler, by node. All other nodes ask these, in order.
        store: Store of the chain; "": a file in the folder.
        script: Module that workers run.
        conf: Further settings in --rdzv-conf, each with a comma behind it.
        own: Further arguments of the training script, by node.
        others: Returns further processes of the demo, not started here, that must not end either.
        nodes: Latest agent of each node, by name.
        earlier: Agent before the latest one, of each node that was started again.
        fallen: Nodes that were killed on purpose.
        left: Nodes that were asked to leave, and were not started again.
        mark: Environment variable that all processes inherit, by which they are found.
        log: Event log of the faults that the demo injects.
    """

    folder: Path
    arguments: tuple[str, ...] = ()
    min_nodes: int = 2
    workers: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=lambda: places_for("edge-1"))
    store: str = ""
    script: str = "chaos_lightning.testing.demo.train"
    conf: str = ""
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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
        """Folder of all members' event logs."""
        return self.folder / "events"

    @property
    def endpoint(self) -> str:
        """Endpoints of possible schedulers, separated by commas."""
        return ",".join(self.places.values())

    # ------------------------------------------------------------------------------------------------ starting

    def workers_of(self, name: str) -> int:
        """Returns the number of workers of this node."""
        return self.workers.get(name, 1)

    def options(self, name: str) -> list[str]:
        """Returns the torchrun options of this node's agent."""
        several = [f"--nproc-per-node={self.workers_of(name)}"] if self.workers_of(name) > 1 else []
        own = self.places.get(name, next(iter(self.places.values())))
        endpoint = ",".join([own, *(place for place in self.places.values() if place != own)])
        hosts = "" if name in self.places else ",host_scheduler=0"
        store = self.store.replace(",", "+") or self.folder / "chain.sqlite"
        return [
            *("--rdzv-backend=chaos", f"--rdzv-endpoint={endpoint}", f"--nnodes={self.min_nodes}:8", *several),
            *("--max-restarts=3", f"--rdzv-conf={self.conf}idle_timeout_s=30,store={store}{hosts}"),
        ]

    def words(self, name: str) -> str:
        """Returns the command, as text, that a user would type to start a node."""
        program = "torchrun" if self.workers_of(name) == 1 else "chaos-lightning run"
        # Shorter, and the same place from the folder in which the demo was started.
        return " ".join([program, *self.options(name), "train.py"]).replace(f"{Path.cwd()}/", "")

    def command(self, name: str) -> list[str]:
        """Returns the command that starts this node's agent, as arguments of this Python interpreter."""
        program = ["torch.distributed.run"] if self.workers_of(name) == 1 else ["chaos_lightning.cli", "run"]
        return [sys.executable, "-m", *program, *self.options(name), "-m", *self.training(), *self.own.get(name, ())]

    def training(self) -> list[str]:
        """Returns the training script's module and its arguments."""
        return [self.script, f"--folder={self.folder}", *self.arguments]

    def start(self, name: str) -> None:
        """Starts a node; it may have run before and ended."""
        if name in self.nodes:
            self.earlier[name] = self.nodes[name]
            self.left.discard(name)
            self.fallen.discard(name)
        self.run(name, self.command(name), {"CHAOS_NODE": name, **HASHES, RATES: json.dumps(rates_of(name))})

    def run(self, name: str, command: Sequence[str], more: Mapping[str, str], events: Path | None = None) -> None:
        """Starts a command, with the variables `more`, whose event log goes to `events` (default: the demo's own
        folder).
        """
        environment = {**surroundings(events or self.events), **more, **self.mark.environment()}
        log = self.folder / "out" / f"{name}.log"
        self.nodes[name] = start_command(name, command, log, env=environment, cwd=self.folder)

    # ------------------------------------------------------------------------------------------------ hurting

    def note(self, kind: str, node: str, **fields: object) -> None:
        """Logs a fault that is about to be injected into this member or process."""
        self.log.emit("fault_injected", kind=kind, node=node, **fields)

    def strike(self, number: signal.Signals, node: str, pid: int, kind: str = "", **fields: object) -> None:
        """Sends a signal to one process, and logs it as a fault of kind `kind` (default: the signal's name)."""
        self.note(kind or number.name.lower(), node, pid=pid, **fields)
        if not self.mark.send(pid, number):
            raise NodeDied(f"process {pid} is not there any more, so it cannot get {number.name}")

    def kill(self, name: str, worker: int) -> None:
        """Sends SIGKILL to a node's worker and agent, as if the machine were gone; to the worker first, which its
        agent's death would ask to leave.
        """
        self.fallen.add(name)
        self.strike(signal.SIGKILL, f"{name}-0", worker)
        self.nodes[name].send(signal.SIGKILL)

    def kill_agent(self, name: str) -> None:
        """Sends SIGKILL to a node's first process: to the agent of a worker that has killed itself, or to one without
        an agent.
        """
        self.fallen.add(name)
        self.nodes[name].send(signal.SIGKILL)

    def freeze(self, name: str, worker: int, seconds: float) -> None:
        """Stops a worker with SIGSTOP, and logs that it freezes for `seconds`; the caller must wake it with `thaw`."""
        self.strike(signal.SIGSTOP, f"{name}-0", worker, seconds=seconds)

    def thaw(self, name: str, worker: int) -> None:
        """Wakes a frozen worker with SIGCONT."""
        self.strike(signal.SIGCONT, f"{name}-0", worker)

    def ask(self, name: str, number: signal.Signals) -> None:
        """Asks a node to leave, with SIGINT (Ctrl+C) or SIGTERM to its agent."""
        self.left.add(name)
        self.note(number.name.lower(), f"{name}-0", pid=self.nodes[name].pid)
        self.nodes[name].send(number)

    def runs(self, pid: int) -> bool:
        """Returns whether a process of the demo still runs."""
        return pid in self.mark.alive()

    # ------------------------------------------------------------------------------------------------ watching

    def poll(self) -> Iterable[str]:
        """Returns no lines: real processes need no help to go on."""
        return ()

    def check(self) -> None:
        """Checks that no process has ended with an error, except those that the demo killed.

        Raises:
            NodeDied: A process has ended with an error; the message shows its last output.
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
        """Ends all processes of this demo; returns how many still ran."""
        ended = self.mark.end(POLITE_S)
        for child in (*self.nodes.values(), *self.earlier.values()):
            if not child.running:
                child.release()
        self.log.close()
        return ended
