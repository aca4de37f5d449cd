"""Runs a parameter server on several emulated machines, as a user would start it, for demos and benchmarks that kill
parts of it.

Theory of operation. `chaos-lightning ps up` runs on the first machine (a leader, the followers and a warm spare),
`chaos-lightning ps leader` on the others, which share the chain in etcd. All its processes inherit a mark, so that all
of them can be killed at one instant, also those that the supervisor has started since.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lightning.events.events import EventLog
from chaos_lightning.testing.emulation import HOST
from chaos_lightning.testing.processes import Child, Mark, importable, start_command

MARK = "CHAOS_FAR_SERVER"


def surroundings(events: Path) -> dict[str, str]:
    """Returns this process's environment for processes of a lab, without variables that other jobs have left in it."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("CHAOS_", "TORCHELASTIC_"))},
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": importable(),
        # All share this machine: one thread each.
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "CHAOS_LOG_DIR": str(events),
    }


@dataclass(slots=True)
class FarServer:
    """Parameter server spread over several emulated machines.

    Attributes:
        folder: Folder of files and outputs.
        events: Folder in which all processes write their event logs.
        places: HOST:PORT of the leader on each machine, by the machine's name.
        log: Event log of the faults that are injected into it.
        store: Store that leaders are given by --store; "": one file on the first machine, which is the only one then.
        followers: Number of followers.
        environment: Further environment of all processes.
        apart: Whether each machine counts as one of its own, or all as this one.
        machines: First process of each machine, as started last.
        down: Machines whose first process was killed.
    """

    folder: Path
    events: Path
    places: Mapping[str, str]
    log: EventLog
    store: str = ""
    followers: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    machines: dict[str, Child] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    _mark: Mark = field(default_factory=lambda: Mark(name=MARK))

    @property
    def endpoints(self) -> str:
        """Endpoints of possible leaders, separated by commas."""
        return ",".join(self.places.values())

    @property
    def first(self) -> str:
        """Name of the machine that runs the followers."""
        return next(iter(self.places))

    def words(self, name: str) -> list[str]:
        """Returns the arguments after `chaos-lightning` that start the server's processes on a machine."""
        words = ["ps", "up" if name == self.first else "leader", f"--listen={self.places[name]}"]
        words += [f"--followers={self.followers}", f"--log-dir={self.events}"]
        words += [f"--dir={self.folder / 'server'}"] if name == self.first else []
        return [*words, *([f"--store={self.store}"] if self.store else [])]

    def start(self, name: str) -> None:
        """Starts the server's processes on a machine; they may have run before and ended."""
        if name in self.machines:
            self.machines[name].release()
        environment = {
            **surroundings(self.events),
            **self.environment,
            **self._mark.environment(),
            **({HOST: name} if self.apart else {}),
        }
        command = [sys.executable, "-m", "chaos_lightning.cli", *self.words(name)]
        log = self.folder / "out" / f"{name}.log"
        self.machines[name] = start_command(name, command, log, env=environment, cwd=self.folder)
        self.down.discard(name)

    def start_all(self) -> None:
        """Starts the server's processes on all machines."""
        for name in self.places:
            self.start(name)

    def strike(self, kind: str, name: str, pid: int, number: int = signal.SIGKILL) -> bool:
        """Sends a signal to one process, and logs the fault; returns whether the process existed.

        Args:
            kind: Name of this fault in the log.
            name: Name of the machine, whose supervisor goes on unless it is struck itself.
            pid: Process id.
            number: Number of the signal.
        """
        if self.machines[name].pid == pid:
            self.down.add(name)
        self.log.emit("fault_injected", kind=kind, node=name, pid=pid)
        return self._mark.send(pid, number)

    def kill_all(self) -> int:
        """Sends SIGKILL to all processes of the server at once; returns how many there were."""
        self.down |= set(self.machines)
        self.log.emit("fault_injected", kind="server_sigkill", node="server")
        struck: set[int] = set()
        while alive := self._mark.alive():  # one that dies may just have started another
            for pid in alive:
                self._mark.send(pid, signal.SIGKILL)
            struck |= alive
        return len(struck)

    def alive(self) -> set[int]:
        """Returns the ids of all processes of the server."""
        return self._mark.alive()

    def close(self) -> None:
        """Ends all processes of the server."""
        self._mark.end()
        for child in self.machines.values():
            if not child.running:
                child.release()
