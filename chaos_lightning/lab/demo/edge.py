"""`chaos-lightning demo-edge`: six nodes train over links that change, fail and return; then the logs prove it.

Theory of operation. The network is a topology file beside this module; the nodes are processes of a lab
(lab/edge/runner.py), their links go through its relay. The schedule begins when all nodes have joined. Nothing in here
reacts to it: the story is only told from the members' event logs. When the schedule is over and some steps have passed
in peace, the job is told that it is enough. Exit codes are those of `demo`: 0 if every line of the proof holds, 1 if
one does not, 130 if interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.errors import ConfigurationError, DeadlineError
from chaos_lightning.events.events import Event, Tail
from chaos_lightning.lab.demo import edge_proof
from chaos_lightning.lab.demo.command import NETWORK, ExitCodes, perform, prepare
from chaos_lightning.lab.demo.proof import Check
from chaos_lightning.lab.demo.screen import Screen
from chaos_lightning.lab.edge.runner import Lab, LabConfig
from chaos_lightning.lab.edge.topology import next_change_s
from chaos_lightning.lab.edge.topology_file import load_topology
from chaos_lightning.observe.timeline import Timeline

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
    config = LabConfig(
        topology=network,
        command=(sys.executable, "-m", "chaos_lightning.lab.demo.train", "--folder", "{folder}", *ARGUMENTS),
        folder=folder,
        backend="relay",
        schedule_at="joined",
        environment={
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "CUDA_VISIBLE_DEVICES": "",
            "CHAOS_STATE_HASH_EVERY": "5",
        },
    )
    lab = Lab(config)

    def prove(codes: ExitCodes) -> list[Check]:
        from chaos_lightning.lab.edge.plot import plot

        with contextlib.suppress(ConfigurationError):  # matplotlib is not there, and the report will say so
            plot(network, folder / NETWORK)
        return edge_proof.prove(folder, network, codes)

    perform("demo-edge", folder, lab, lambda screen: _Story(lab, screen).tell(), prove, endings=(lab.close,), keep=keep)


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
