"""A parameter server on several machines, as a user would start it, for demonstrations and benchmarks to strike at.

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
    """The environment of a lab's processes: this one's, without what other jobs have left in it."""
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
    """See the module.

    Attributes:
        folder: For files and outputs.
        events: Where all processes write their event logs.
        places: HOST:PORT of the leader on each machine, by the machine's name.
        log: Takes what is done to it.
        store: What leaders are told of their store; "": one file on the first machine, which is the only one then.
        followers: How many.
        environment: Of all processes, beside their own.
        apart: Each machine counts as one of its own.
        machines: What was started last on each.
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
        """All places where a leader may be."""
        return ",".join(self.places.values())

    @property
    def first(self) -> str:
        """The machine that has the followers."""
        return next(iter(self.places))

    def words(self, name: str) -> list[str]:
        """Returns what is typed on this machine, after `chaos-lightning`."""
        words = ["ps", "up" if name == self.first else "leader", f"--listen={self.places[name]}"]
        words += [f"--followers={self.followers}", f"--log-dir={self.events}"]
        words += [f"--dir={self.folder / 'server'}"] if name == self.first else []
        return [*words, *([f"--store={self.store}"] if self.store else [])]

    def start(self, name: str) -> None:
        """This machine, perhaps again."""
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
        """All machines."""
        for name in self.places:
            self.start(name)

    def strike(self, kind: str, name: str, pid: int, number: int = signal.SIGKILL) -> bool:
        """A signal for one process; whether it was there.

        Args:
            kind: What the log calls this.
            name: Of its machine, where the supervisor goes on unless it is struck itself.
            pid: Its number.
            number: Of the signal.
        """
        if self.machines[name].pid == pid:
            self.down.add(name)
        self.log.emit("fault_injected", kind=kind, node=name, pid=pid)
        return self._mark.send(pid, number)

    def kill_all(self) -> int:
        """SIGKILL for all processes at once; how many there were."""
        self.down |= set(self.machines)
        self.log.emit("fault_injected", kind="server_sigkill", node="server")
        struck: set[int] = set()
        while alive := self._mark.alive():  # one that dies may just have started another
            for pid in alive:
                self._mark.send(pid, signal.SIGKILL)
            struck |= alive
        return len(struck)

    def alive(self) -> set[int]:
        """All its processes."""
        return self._mark.alive()

    def close(self) -> None:
        """Ends them all."""
        self._mark.end()
        for child in self.machines.values():
            if not child.running:
                child.release()
