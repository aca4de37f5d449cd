"""`chaos-lightning lab TOPOLOGY -- COMMAND`: runs a command on every node of an emulated network.

Theory of operation. `Lab` starts each node's command in a session of its own, with its output in a file, so a Ctrl+C at
the lab reaches only the lab, which passes it on: the commands leave politely, as they would on a real machine. `poll`
is called again and again by the caller that shows the lab; it starts the nodes whose time has come, begins the
schedule, and returns what was printed since. When the last command has ended, what they left running (a hosted
scheduler) is ended by the lab's mark (testing/processes.py). Should the lab itself be killed, the kernel kills its
commands; workers notice that their agent is gone, a scheduler that it has no members, and namespaces are removed by the
next lab.

The command line is a shell around it: it prints what the nodes print, each line behind its node's name, and what
happens to the links. Ctrl+C (or SIGTERM) is passed on once; the second one ends everything. The exit code is that of
the commands.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, Tail
from chaos_lightning.machine.signals import ends
from chaos_lightning.machine.units import duration
from chaos_lightning.testing.edge.network import Edge, choose_backend
from chaos_lightning.testing.edge.topology import Topology, rate_text, story
from chaos_lightning.testing.edge.topology_file import load_topology
from chaos_lightning.testing.processes import Child, Mark, start_command

PLACES = ("node", "index", "endpoint", "neighbours", "nodes", "folder")
"""Placeholders in braces that a command may have: {node}, {index} (from 0), {endpoint}, {neighbours} (by commas),
{nodes} (how many), {folder}."""


def fill(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Returns the command with its placeholders, such as {node}, replaced; unknown ones stay as they are."""
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace("{" + name + "}", value)
        filled.append(word)
    return filled


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """Configuration of a lab: an emulated network, and a command to run on each of its nodes.

    Attributes:
        topology: Network to emulate.
        command: Command to run on each node, with placeholders.
        folder: Folder of outputs, event logs and the chain of views.
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
    """Emulated network with a command on each node. Use it as a context manager.

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
        """Returns the values of the command's placeholders on a node."""
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
        """Returns the command line that is started on a node."""
        return self.edge.command(node, fill(self.config.command, self.values(node)))

    def settings(self, node: str) -> dict[str, str]:
        """Returns the environment variables that a node's command gets in addition to this process's own."""
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
        """Starts the commands of all nodes that have no later start time."""
        self._begun = time.monotonic()
        self._start_due()

    def poll(self) -> list[tuple[str, str]]:
        """Starts nodes that are due; returns new lines as (node, line that it printed) or ("", line of the lab's
        own).
        """
        self._start_due()
        self._begin_schedule()
        lines = [(name, line) for name in self.children for line in self._new_lines(name)]
        told, self._told = self._told, []
        return [*lines, *(("", f"{t_s:7.1f} s  {text}") for t_s, text in told)]

    @property
    def running(self) -> bool:
        """Whether some node's command runs, or is still to be started."""
        return any(c.running for c in self.children.values()) or bool(self._waiting)

    def interrupt(self) -> None:
        """Sends SIGINT (Ctrl+C) to every node's command, and starts no further ones."""
        self._waiting = []
        for name, child in self.children.items():
            self._log.emit("fault_injected", kind="sigint", node=name, pid=child.pid)
            child.send(signal.SIGINT)

    def exit_codes(self) -> dict[str, int | None]:
        """Returns the exit codes of all started commands; None while one runs, negative for a signal."""
        return {name: child.poll() for name, child in self.children.items()}

    def exit_code(self) -> int:
        """Returns 0 if all commands ended well, else the first other exit code; 128 plus its number for a signal."""
        codes = [code for code in self.exit_codes().values() if code]
        return 0 if not codes else codes[0] if codes[0] > 0 else 128 - codes[0]

    def close(self, polite_s: float = 4.0) -> int:
        """Ends all commands that still run, and the network; returns how many processes had to be ended."""
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
        """Returns the complete lines that a node's command has printed since the last call; after its end, an
        incomplete one too.
        """
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


_TURN_S = 0.1
_SHOWN_CHANGES = 20
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def lab(
    topology: Annotated[
        Path, typer.Argument(help="Nodes, links and their schedule (YAML or JSON).", metavar="TOPOLOGY")
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(help=f"After --; may say {', '.join('{' + p + '}' for p in PLACES)}.", metavar="-- COMMAND"),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="relay (no privileges), namespaces (root, shapes all traffic) or auto.")
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for outputs and event logs; default: a new one in ./runs.", metavar="DIR"),
    ] = None,
    schedule_at: Annotated[
        str, typer.Option(help="When the schedule's time 0 is: start, or joined (all first nodes are in the job).")
    ] = "start",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the topology and its schedule.", metavar="FILE.png")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print what the nodes print.")] = False,
) -> None:
    """Run a command once per node of an emulated network.

    For example: chaos-lightning lab examples/topologies/triangle.yaml -- python train.py

    The commands find endpoint, node name and neighbours in their environment (CHAOS_ENDPOINT, CHAOS_NODE,
    CHAOS_NEIGHBOURS), which strategies and Trainer read. For torchrun write --rdzv-endpoint={endpoint}.
    """
    network = load_topology(topology)
    console = Console()
    if plot is not None:
        from chaos_lightning.testing.edge.plot import plot as draw

        console.print(f"picture  {draw(network, plot)}", soft_wrap=True, markup=False, highlight=False)
        if not command and not dry_run:
            return
    if dry_run:
        explain(console, network, tuple(command or ()), backend)
        return
    config = LabConfig(
        topology=network,
        command=tuple(command or ()),
        folder=prepare(directory, "lab"),
        backend=backend,
        schedule_at=schedule_at,
    )
    raise typer.Exit(_run(console, config, quiet=quiet))


def prepare(directory: Path | None, kind: str) -> Path:
    """Makes the folder of a lab or a demo, or takes an empty one; by default its name has `kind` and the time.

    Raises:
        ConfigurationError: The folder holds something: logs of two runs must not mix.
    """
    folder = directory or Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"--dir {folder}: expected an empty or a new folder; logs of two runs must not mix")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _run(console: Console, config: LabConfig, *, quiet: bool) -> int:
    asked = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked or number != signal.SIGHUP:  # shell and kernel both send it
            asked += 1

    # Explicitly for SIGINT, too: a shell's background job comes with it ignored.
    before = {number: signal.signal(number, on_signal) for number in ends()}
    code, passed_on = 1, False
    try:
        with Lab(config) as running:
            choice = running.edge.choice
            say(console, "", f"backend {choice.backend}: {choice.reason}", config.topology)
            for note in running.edge.backend.notes:
                say(console, "", f"note: {note}", config.topology)
            say(console, "", f"outputs, event logs: {config.folder}", config.topology)
            running.start()
            more = True
            while more and asked < 2:
                more = running.running
                if asked and not passed_on:
                    passed_on = True
                    say(console, "", "asked to end: the nodes leave politely (once more ends them)", config.topology)
                    running.interrupt()
                for node, line in running.poll():
                    if not (node and quiet):
                        say(console, node, line, config.topology)
                if more:
                    time.sleep(_TURN_S)
            code = running.exit_code() if asked < 2 else 130
            codes = running.exit_codes()
            for number in before:
                signal.signal(number, signal.SIG_IGN)  # cleaning up takes some seconds at most
        words = ", ".join(f"{node} {'was ended' if c is None else c}" for node, c in codes.items())
        say(console, "", f"exit codes: {words or 'nothing was started'}", config.topology)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def say(console: Console, node: str, line: str, topology: Topology) -> None:
    """Prints a line of a node's output, or of the lab's own."""
    width = max(len(n) for n in (*topology.names, "lab"))
    colour = _COLOURS[topology.names.index(node) % len(_COLOURS)] if node else "bold"
    text = Text(f"{node or 'lab':<{width}} | ", style=colour)
    text.append(line, style="" if node else "bold")
    console.print(text, soft_wrap=True)


def explain(console: Console, topology: Topology, command: tuple[str, ...], backend: str) -> None:
    """Prints what a lab would do, without doing it."""
    choice = choose_backend(topology, backend)
    console.print(f"{topology.name}: backend {choice.backend}: {choice.reason}", soft_wrap=True, highlight=False)
    nodes = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("node", "neighbours", "access", "starts", "command"):
        nodes.add_column(column, overflow="fold")
    for index, node in enumerate(topology.nodes):
        values = {"node": node.name, "index": str(index), "nodes": str(len(topology.nodes))}
        values["neighbours"] = ",".join(topology.neighbours(node.name))
        access = "-" if node.access_bps is None else rate_text(node.access_bps)
        words = Text(" ".join(fill(command, values)) or "-")
        nodes.add_row(node.name, values["neighbours"], access, duration(node.starts_s), words)
    console.print(nodes)
    links = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("link", "rate", "latency"):
        links.add_column(column)
    for link in topology.links:
        latency = duration(link.latency_s) if link.latency_s else "-"
        links.add_row(f"{link.a} - {link.b}", rate_text(link.rate_bps), latency)
    console.print(links)
    for change in topology.schedule:
        console.print(Text(f"schedule: {change}"), soft_wrap=True)
    from chaos_lightning.testing.edge.plot import horizon_s

    for shown, (t_s, text) in enumerate(story(topology, horizon_s(topology))):
        if shown == _SHOWN_CHANGES:
            console.print("  ...")
            break
        console.print(Text(f"  {duration(t_s):>8}  {text}"), soft_wrap=True)
