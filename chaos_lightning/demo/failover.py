"""`chaos-lightning demo-failover`: schedulers and etcd servers are killed while nodes train, join and die.

Theory of operation. Three etcd servers; four nodes, each a real torchrun, the first three with a candidate of their own
(`--rdzv-conf store=etcd://...`). Then, each as soon as the one before has been got over: the leading scheduler gets
SIGKILL while a node joins; etcd's leader gets SIGKILL and comes back; both get SIGKILL at once, and with them a node.
What became of it is judged from the event logs alone, as in `demo`. Exit codes are those of `demo`.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from chaos_lightning.demo.cast import Cast, free_port
from chaos_lightning.demo.command import prepare, tidy
from chaos_lightning.demo.proof import Check, audited, table
from chaos_lightning.demo.screen import Screen
from chaos_lightning.demo.story import FOUNDERS, FULL, QUICK, Story
from chaos_lightning.errors import ChaosError
from chaos_lightning.observe.events import Event, Record, read_events
from chaos_lightning.observe.timeline import Slot, Timeline
from chaos_lightning.observe.units import duration
from chaos_lightning.runtime.channel import fetch_status
from chaos_lightning.runtime.etcd_servers import EtcdServers

JOINS, KILLED = "edge-4", "edge-2"


@dataclass(slots=True)
class Candidates(Cast):
    """Nodes that host a candidate each, but for those beyond the first three."""

    etcd: str = ""
    places: dict[str, str] = field(default_factory=lambda: {n: f"127.0.0.1:{free_port()}" for n in FOUNDERS})

    def command(self, name: str = FOUNDERS[0]) -> list[str]:
        own = self.places.get(name, self.places[FOUNDERS[0]])
        others = [place for place in self.places.values() if place != own]
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend=chaos", f"--rdzv-endpoint={','.join((own, *others))}", f"--nnodes={self.min_nodes}:8"),
            *("--max-restarts=3", f"--rdzv-conf=idle_timeout_s=30,store={self.etcd.replace(',', '+')}"),
            *("-m", "chaos_lightning.demo.train", "--folder", str(self.folder), *self.arguments),
        ]


class FailoverStory(Story):
    """See the module."""

    cast: Candidates
    servers: EtcdServers

    def tell(self) -> None:
        self._start()
        self._say("good", f"{self._leading()} leads; etcd's leader is {self.servers.leader().name}")
        self._leader_dies_while_one_joins()
        self._etcds_leader_dies()
        self._both_die_and_a_node()
        self._finish()

    def _leader_dies_while_one_joins(self) -> None:
        self._say("do", f"{JOINS} starts; as it knocks, kill -9 for the leading scheduler")
        self.cast.start(JOINS)
        self._event(Event.OPENED, JOINS, self.plot.start_deadline_s)
        at, term = self._kill_scheduler(self._status())
        self._elected(at, term)
        joined = self._event(Event.JOINED, JOINS, self.plot.start_deadline_s)
        self._say("good", f"{JOINS} joined at step {joined.get('step')}, {duration(joined.t - at)} after the kill")
        self._rest()

    def _etcds_leader_dies(self) -> None:
        dead = self.servers.leader()
        self._say("do", f"kill -9 for {dead.name}, which leads etcd")
        self.cast.note("etcd_sigkill", dead.name)
        self.servers.kill(dead)
        self._rest()
        self.servers.run(dead)
        self.servers.wait_ready(60.0)
        self._say("good", f"steps went on; {self.servers.leader().name} leads etcd now, {dead.name} is back")

    def _both_die_and_a_node(self) -> None:
        dead = self.servers.leader()
        worker, member = self._worker(KILLED)
        self._say("do", f"kill -9 for {dead.name}, for the leading scheduler, and for {KILLED}, all at once")
        leading = self._status()
        self.cast.note("etcd_sigkill", dead.name)
        self.servers.kill(dead)
        at, term = self._kill_scheduler(leading)
        self.cast.kill(KILLED, worker)
        self._elected(at, term)
        self._without(member)
        slot = self._wait(
            f"a step after the death of {KILLED}",
            lambda: next((s for s in self.timeline.recent(50) if s.first > at and member not in s.who), None),
        )
        self._say("good", f"step {slot.step} was committed by the others {duration(slot.first - at)} after the kill")
        self._rest()

    def _status(self) -> dict[str, object]:
        return fetch_status(",".join(self.cast.places.values()), timeout_s=20.0)

    def _leading(self) -> str:
        place = self._status()["endpoint"]
        return next((f"the candidate of {n}" for n, p in self.cast.places.items() if p == place), str(place))

    def _kill_scheduler(self, facts: dict[str, object]) -> tuple[float, int]:
        if facts["role"] != "leader":
            raise ChaosError(f"no scheduler leads: {facts}")
        pid, term = int(str(facts["pid"])), int(str(facts["term"]))
        self.cast.kill_scheduler(pid)
        return time.time(), term

    def _elected(self, at: float, term: int) -> None:
        def found() -> Record | None:
            return next((r for r in self._records if r.name == "scheduler_started" and r["term"] > term), None)

        started = self._wait("another scheduler's lead", found)
        self._say("good", f"another one leads, term {started['term']}, {duration(started.t - at)} after the kill")


def demo_failover(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for logs and report; default: a new one in ./runs.", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and shorter rests; the same story.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoints and outputs, too.")] = False,
) -> None:
    """Kill schedulers and etcd servers while nodes train, join and die; then prove that nothing was lost."""
    plot = QUICK if quick else FULL
    folder = prepare(directory)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    problem, began = "", time.monotonic()
    servers = EtcdServers(folder / "etcd", 3)
    cast = Candidates(folder, plot.arguments, etcd=servers.address)
    try:
        with servers, Screen(console) as screen:
            story = FailoverStory(cast, screen, plot)
            story.servers = servers
            try:
                story.tell()
            except ChaosError as error:
                problem = str(error)
                screen.say("bad", problem)
            codes = cast.exit_codes()
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in {folder}", soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        cast.close()
        servers.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    checks = prove(folder, codes)
    console.print(table(checks, f"\nWhat this proves ({time.monotonic() - began:.0f} s)"))
    failed = [check for check in checks if not check.ok]
    if problem or failed:
        console.print(f"FAILED: {len(failed)} of {len(checks)} lines; all logs are in {folder}", soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"ALL {len(checks)} LINES HOLD; logs are in {folder / 'events'}", style="bold green", soft_wrap=True)
    if not keep:
        tidy(folder)
    raise typer.Exit(0)


def prove(folder: Path, codes: dict[str, int | None]) -> list[Check]:
    """From the event logs of all members and schedulers, and the exit codes."""
    records = list(read_events(folder / "events"))
    timeline = Timeline.of(records)
    kills = [r for r in records if r.name == Event.FAULT_INJECTED and r["kind"] == "scheduler_sigkill"]
    started = [r for r in records if r.name == "scheduler_started"]
    chain = timeline.chain()
    steps = sorted({slot.step for slot in chain if slot.kind == "step"})
    lost = (steps[-1] - steps[0] + 1 - len(steps)) if steps else 1
    good_codes = {name: code for name, code in codes.items() if name != KILLED}
    return [
        Check(
            "two leading schedulers get SIGKILL, each time another one leads",
            _elections(kills, started),
            _led(kills, started),
        ),
        Check(f"{JOINS} joins though the leading scheduler died as it knocked", *_joined(records, kills)),
        Check(
            "no step is lost",
            f"steps {steps[0] if steps else '-'} to {steps[-1] if steps else '-'}, lost {lost}",
            lost == 0,
        ),
        Check("training does not wait for a scheduler", *_longest(chain, kills)),
        Check(
            "all others end with exit code 0",
            ", ".join(f"{name} {code}" for name, code in codes.items()),
            all(code == 0 for code in good_codes.values()),
        ),
        *audited(folder / "events"),
    ]


def _elections(kills: Sequence[Record], started: Sequence[Record]) -> str:
    times = []
    for kill in kills:
        after = [r for r in started if r.t > kill.t]
        times.append(f"term {after[0]['term']} after {duration(after[0].t - kill.t)}" if after else "nobody led after")
    return "; ".join(times) or "none was killed"


def _led(kills: Sequence[Record], started: Sequence[Record]) -> bool:
    terms = [r["term"] for r in started]
    return (
        len(kills) == 2 and len(set(terms)) == len(terms) >= 3 and all(any(r.t > k.t for r in started) for k in kills)
    )


def _joined(records: Sequence[Record], kills: Sequence[Record]) -> tuple[str, bool]:
    joined = [r for r in records if r.name == Event.JOINED and r.node == f"{JOINS}-0" and r.source.startswith("member")]
    if not joined or not kills:
        return "it did not", False
    after = joined[0].t - kills[0].t
    return f"{duration(after)} after the kill, at step {joined[0]['step']}", after > 0


def _longest(chain: Sequence[Slot], kills: Sequence[Record]) -> tuple[str, bool]:
    """The longest pause between steps within 10 s after the first kill, when nobody else died, beside the median."""
    times = [slot.first for slot in chain if slot.kind == "step"]
    pauses = sorted(b - a for a, b in itertools.pairwise(times))
    if not pauses or not kills:
        return "no steps", False
    median, longest = pauses[len(pauses) // 2], 0.0
    for a, b in itertools.pairwise(times):
        if kills[0].t - 0.5 <= b <= kills[0].t + 10.0:
            longest = max(longest, b - a)
    overall = pauses[-1]
    text = (
        f"after the first kill at most {duration(longest)} from step to step, median {duration(median)}; "
        f"with the death of a node {duration(overall)}"
    )
    return text, 0 < longest < median + 2.0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
