"""`chaos-lightning demo-edge`: six nodes train over links that change, fail and return; then the logs prove it.

Theory of operation. The network is a topology file beside this module; the nodes are processes of a lab
(testing/edge_lab.py), their links go through its relay. The schedule begins when all nodes have joined. Nothing in here
reacts to it: the story is only told from the members' event logs. When the schedule is over and some steps have passed
in peace, the job is told that it is enough. Exit codes are those of `demo`: 0 if every line of the proof holds, 1 if
one does not, 130 if interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from chaos_lightning.demo import edge_proof
from chaos_lightning.demo.command import prepare, tidy
from chaos_lightning.demo.proof import table
from chaos_lightning.demo.screen import Screen
from chaos_lightning.errors import ChaosError, ConfigurationError, DeadlineError
from chaos_lightning.observe.events import Event, Tail
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.testing.edge_file import load_topology
from chaos_lightning.testing.edge_lab import Lab, LabConfig
from chaos_lightning.testing.topology import next_change_s

TOPOLOGY = Path(__file__).with_name("edge_topology.json")
REST_S = 12.0
"""After the last change, s."""
START_DEADLINE_S = 300.0
END_DEADLINE_S = 120.0
_TURN_S = 0.05
ARGUMENTS = ("--layers=3", "--width=128", "--batch-size=2", "--text=60000", "--pause=0.02")


def demo_edge(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for logs and report; default: a new one in ./runs.", metavar="DIR"),
    ] = None,
    topology: Annotated[
        Path,
        typer.Option(help="Another topology file; every check of the proof is about its schedule.", metavar="FILE"),
    ] = TOPOLOGY,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoints and outputs, too.")] = False,
) -> None:
    """Train on an emulated network whose links change, fail and return; then prove that nothing was lost."""
    network = load_topology(topology)
    folder = prepare(directory)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    config = LabConfig(
        topology=network,
        command=(sys.executable, "-m", "chaos_lightning.demo.train", "--folder", "{folder}", *ARGUMENTS),
        folder=folder,
        backend="relay",
        schedule_at="joined",
        environment={
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "CUDA_VISIBLE_DEVICES": "",
            "CHAOS_STATE_HASH_EVERY": "5",
        },
    )
    # Explicitly for both: a shell's background job comes with SIGINT ignored.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    problem, began = "", time.monotonic()
    codes: dict[str, int | None] = {}
    try:
        with Lab(config) as lab:
            try:
                with Screen(console) as screen:
                    try:
                        _Story(lab, screen).tell()
                    except ChaosError as error:
                        problem = str(error)
                        screen.say("bad", problem)
                codes = lab.exit_codes()
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)  # ending the nodes must not be cut off
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in {folder}", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    good = _conclude(console, folder, config, codes, problem, time.monotonic() - began)
    if good and not keep:
        tidy(folder)
    raise typer.Exit(0 if good else 1)


class _Story:
    """Shows what happens, in the order in which it is logged."""

    def __init__(self, lab: Lab, screen: Screen) -> None:
        self.lab = lab
        self.screen = screen
        self.timeline = Timeline()
        self._tail = Tail(lab.events)
        self._views: set[str] = set()
        self._joined: set[str] = set()

    def tell(self) -> None:
        """From the start to the end of all commands."""
        topology = self.lab.config.topology
        self.screen.say("do", f"{len(topology.names)} nodes start, each with links to its neighbours only")
        self.lab.start()
        self._wait(lambda: self.lab.edge.elapsed_s > 0, START_DEADLINE_S, "all nodes to join")
        last, coming = 0.0, next_change_s(topology, 0.0)
        while coming is not None and len(topology.schedule) and coming < 3600.0:
            last, coming = coming, next_change_s(topology, coming)
        over = last + REST_S
        self._wait(lambda: self.lab.edge.elapsed_s > over, over + END_DEADLINE_S, "the end of the schedule")
        self.screen.say("do", "enough: the job ends with this epoch")
        (self.lab.config.folder / "enough").touch()
        self._wait(lambda: not self.lab.running, END_DEADLINE_S, "the end of the job", ending=True)

    def _wait(self, ready: Callable[[], bool], deadline_s: float, what: str, *, ending: bool = False) -> None:
        end = time.monotonic() + deadline_s
        while not ready():
            self._look()
            for name, code in self.lab.exit_codes().items():
                if code or (code == 0 and not ending):
                    words = self.lab.children[name].tail(12)
                    raise DeadlineError(f"{name} ended with exit code {code} while waiting for {what}:\n{words}")
            if time.monotonic() > end:
                raise DeadlineError(f"waited {deadline_s:g} s for {what}; the logs are in {self.lab.config.folder}")
            time.sleep(_TURN_S)
        self._look()

    def _look(self) -> None:
        for node, line in self.lab.poll():
            if not node and "started:" not in line:
                self.screen.say("do", line.partition(" s  ")[2])
        for record in self._tail.poll():
            self.timeline.add(record)
            if record.name == Event.JOINED and record.node not in self._joined:
                self._joined.add(record.node)
                self.screen.say("seen", f"{record.node} is in as {record.get('role')}")
            elif record.name == Event.VIEW and record.get("links") is None and str(record.get("id")) not in self._views:
                self._views.add(str(record.get("id")))
                self.screen.say("seen", f"view {record.get('id')}: {str(record.get('reason'))[:230]}")
        self.screen.refresh(self.timeline)


def _conclude(
    console: Console, folder: Path, config: LabConfig, codes: dict[str, int | None], problem: str, seconds: float
) -> bool:
    """Prints the proof, draws the network, writes the report; whether everything is fine."""
    from chaos_lightning.observe.report import write_report
    from chaos_lightning.testing.edge_plot import plot

    checks = edge_proof.prove(folder, config.topology, codes)
    console.print(table(checks, f"\nWhat this proves ({seconds:.0f} s)"))
    try:
        written = write_report(folder / "events", folder, title="chaos-lightning demo-edge")
        console.print(f"\n{written.summary}", soft_wrap=True)
        console.print(
            f"report   {written.page}\nnetwork  {plot(config.topology, folder / 'network.png')}", soft_wrap=True
        )
        console.print(f"logs     {folder / 'events'}  (chaos-lightning audit judges them anew)", soft_wrap=True)
    except ConfigurationError as error:
        console.print(f"no report: {error}", soft_wrap=True)
    failed = [check for check in checks if not check.ok]
    if problem or failed:
        console.print(f"FAILED: {len(failed)} of {len(checks)} lines; all logs are in {folder}", soft_wrap=True)
        if problem:
            console.print(f"the story broke off: {problem.splitlines()[0]}", soft_wrap=True, markup=False)
        return False
    console.print(f"ALL {len(checks)} LINES HOLD", style="bold green")
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
