"""`chaos-lightning lab TOPOLOGY -- COMMAND`: a command on every node of an emulated network.

Theory of operation. The command line is a shell around `edge_lab.Lab`: it prints what the nodes print, each line behind
its node's name, and what happens to the links. Ctrl+C (or SIGTERM) is passed on once; the second one ends everything.
The exit code is that of the commands.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.lab.edge import choose_backend
from chaos_lightning.lab.edge_file import load_topology
from chaos_lightning.lab.edge_lab import PLACES, Lab, LabConfig, fill
from chaos_lightning.lab.topology import Topology, rate_text, story
from chaos_lightning.observe.units import duration

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
        from chaos_lightning.lab.edge_plot import plot as draw

        console.print(f"picture  {draw(network, plot)}", soft_wrap=True, markup=False, highlight=False)
        if not command and not dry_run:
            return
    if dry_run:
        explain(console, network, tuple(command or ()), backend)
        return
    config = LabConfig(
        topology=network,
        command=tuple(command or ()),
        folder=prepare(directory),
        backend=backend,
        schedule_at=schedule_at,
    )
    raise typer.Exit(_run(console, config, quiet=quiet))


def prepare(directory: Path | None) -> Path:
    """The lab's folder, empty.

    Raises:
        ConfigurationError: It holds something: logs of two runs must not mix.
    """
    folder = directory or Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"--dir {folder}: expected an empty or a new folder; logs of two runs must not mix")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _run(console: Console, config: LabConfig, *, quiet: bool) -> int:
    asked = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1

    # Explicitly for both: a shell's background job comes with SIGINT ignored.
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
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
    """A line of a node, or of the lab."""
    width = max(len(n) for n in (*topology.names, "lab"))
    colour = _COLOURS[topology.names.index(node) % len(_COLOURS)] if node else "bold"
    text = Text(f"{node or 'lab':<{width}} | ", style=colour)
    text.append(line, style="" if node else "bold")
    console.print(text, soft_wrap=True)


def explain(console: Console, topology: Topology, command: tuple[str, ...], backend: str) -> None:
    """What a lab would do."""
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
    from chaos_lightning.lab.edge_plot import horizon_s

    for shown, (t_s, text) in enumerate(story(topology, horizon_s(topology))):
        if shown == _SHOWN_CHANGES:
            console.print("  ...")
            break
        console.print(Text(f"  {duration(t_s):>8}  {text}"), soft_wrap=True)
