"""`chaos-lightning demo-failover`: schedulers and etcd servers are killed while nodes train, join and die.

Theory of operation. Three etcd servers; four nodes, each a real torchrun, the first three with a candidate of their own
(`--rdzv-conf store=etcd://...`). Then, each as soon as the one before has been got over: the leading scheduler gets
SIGKILL while a node joins; etcd's leader gets SIGKILL while another one joins, and comes back; both get SIGKILL at
once, and with them a node. What became of it is judged from the event logs alone. Exit codes are those of `demo`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.control.channel import fetch_status
from chaos_lightning.control.etcd_servers import EtcdServer, EtcdServers
from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import Record, read_events
from chaos_lightning.lab.demo.cast import Cast
from chaos_lightning.lab.demo.command import ExitCodes, perform, prepare
from chaos_lightning.lab.demo.proof import Check, audited
from chaos_lightning.lab.demo.screen import Screen
from chaos_lightning.lab.demo.story import FOUNDERS, FULL, QUICK, Story
from chaos_lightning.machine.listener import free_port
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.observe.units import duration

JOINS, JOINS_TOO, KILLED = "edge-4", "edge-5", "edge-2"
WAITS_S = 1.0
"""A step that is so much longer than others has waited for something: a lease of etcd's takes 2 s to end."""
LEASES_S = 3.0
"""By then an election among etcd's servers is over, and a lease that was not prolonged has ended."""
RECOVERED_S = 6.0
"""Of a death at the instant of a scheduler's and of etcd's leader's: 3 s on an idle machine (benchmarks.failover)."""
JOINS_WORK_S = 10.0
"""Two elections, one of etcd's own and one of a scheduler, and a member that asks its endpoints in turn."""
JOINED_S = 20.0
"""Of a member that had just begun: beside these elections it must say hello, link to all others, pull the state."""


@dataclass(slots=True)
class Candidates(Cast):
    """Nodes that host a candidate each, but for those beyond the first three."""

    etcd: str = ""
    places: dict[str, str] = field(default_factory=lambda: {n: f"127.0.0.1:{free_port()}" for n in FOUNDERS})

    def options(self, name: str) -> list[str]:
        own = self.places.get(name, self.places[FOUNDERS[0]])
        others = [place for place in self.places.values() if place != own]
        return [
            *("--rdzv-backend=chaos", f"--rdzv-endpoint={','.join((own, *others))}", f"--nnodes={self.min_nodes}:8"),
            *("--max-restarts=3", f"--rdzv-conf=idle_timeout_s=30,store={self.etcd.replace(',', '+')}"),
        ]


class FailoverStory(Story):
    """See the module."""

    cast: Candidates
    servers: EtcdServers

    def tell(self) -> None:
        self._start()
        self._say("good", f"{self._leading()} leads; etcd's leader is {self.servers.leader().name}")
        self._leader_dies_while_one_joins()
        self._etcds_leader_dies_while_one_joins()
        self._both_die_and_a_node()
        self._finish()

    def _leader_dies_while_one_joins(self) -> None:
        self._say("do", f"{JOINS} starts; as it knocks, kill -9 for the leading scheduler")
        self._knocks(JOINS)
        at, term = self._kill_scheduler(self._status())
        self._elected(at, term)
        self._is_in(JOINS, at)
        self._rest()

    def _etcds_leader_dies_while_one_joins(self) -> None:
        self._say("do", f"{JOINS_TOO} starts; as it knocks, kill -9 for etcd's leader")
        self._knocks(JOINS_TOO)
        at, dead = time.time(), self._kill_etcds_leader()
        over = time.monotonic() + LEASES_S
        self._is_in(JOINS_TOO, at)
        self._rest()
        self._wait("the time in which all leases would end", lambda: time.monotonic() > over)
        self.servers.run(dead)
        self.servers.wait_ready(60.0)
        self._say("good", f"steps went on; {self.servers.leader().name} leads etcd now, {dead.name} is back")

    def _both_die_and_a_node(self) -> None:
        worker, member = self._worker(KILLED)
        self._say("do", f"kill -9 for etcd's leader, for the leading scheduler, and for {KILLED}, all at once")
        leading = self._status()
        self._kill_etcds_leader()
        at, term = self._kill_scheduler(leading)
        self.cast.kill(KILLED, worker)
        self._elected(at, term)
        slot = self._step_without(member, at)
        self._say("good", f"step {slot.step} was committed by the others {duration(slot.first - at)} after the kill")
        self._rest()

    def _knocks(self, name: str) -> None:
        """Starts this node, and waits until its member runs, which knocks then."""
        self.cast.start(name)
        self._event("opened", name, self.plot.start_deadline_s)

    def _is_in(self, name: str, at: float) -> None:
        joined = self._event("joined", name, self.plot.start_deadline_s)
        self._say("good", f"{name} joined at step {joined.get('step')}, {duration(joined.t - at)} after the kill")

    def _kill_etcds_leader(self) -> EtcdServer:
        dead = self.servers.leader()
        self.cast.note("etcd_sigkill", dead.name)
        self.servers.kill(dead)
        return dead

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
    accelerator: Annotated[
        str, typer.Option("--accelerator", help="Where all nodes train, as Lightning names it: cpu, gpu, auto.")
    ] = "cpu",
) -> None:
    """Kill schedulers and etcd servers while nodes train, join and die; then prove that nothing was lost."""
    plot = QUICK if quick else FULL
    folder = prepare(directory)
    servers = EtcdServers(folder / "etcd", 3)
    arguments = (*plot.arguments, f"--accelerator={accelerator}")
    cast = Candidates(folder, arguments, etcd=servers.address)

    def tell(screen: Screen) -> None:
        story = FailoverStory(cast, screen, plot)
        story.servers = servers
        story.tell()

    perform(
        "demo-failover",
        folder,
        cast,
        tell,
        lambda codes: prove(folder, codes),
        begin=servers.start,
        endings=(cast.close, servers.close),
        keep=keep,
    )


def prove(folder: Path, codes: ExitCodes) -> list[Check]:
    """From the event logs of all members and schedulers, and the exit codes."""
    return _Proof(folder, codes).checks()


class _Proof:
    """What the logs say about the three acts."""

    def __init__(self, folder: Path, codes: ExitCodes) -> None:
        self.folder = folder
        self.codes = codes
        self.records = list(read_events(folder / "events"))
        self.chain = Timeline.of(self.records).chain()
        self.faults = [r for r in self.records if r.name == "fault_injected"]
        self.kills = [r for r in self.faults if r["kind"] == "scheduler_sigkill"]
        self.etcd_kills = [r for r in self.faults if r["kind"] == "etcd_sigkill"]
        self.started = [r for r in self.records if r.name == "scheduler_started"]

    def checks(self) -> list[Check]:
        fine = all(code == 0 for name, code in self.codes.items() if name != KILLED)
        return [
            self._led(),
            self._joins_work(),
            self._joined(JOINS, self.kills, "the leading scheduler"),
            self._joined(JOINS_TOO, self.etcd_kills, "etcd's leader"),
            self._etcd(),
            self._no_step_lost(),
            self._undisturbed(),
            self._death(),
            Check(
                "all others end with exit code 0",
                ", ".join(f"{name} {code}" for name, code in self.codes.items()) or "nobody ran",
                bool(self.codes) and fine,
            ),
            *audited(self.folder / "events"),
        ]

    def _led(self) -> Check:
        """Another scheduler, of a higher term, after each kill."""
        times = []
        for kill in self.kills:
            after = [r for r in self.started if r.t > kill.t]
            times.append(f"term {after[0]['term']} after {duration(after[0].t - kill.t)}" if after else "nobody after")
        terms = [r["term"] for r in self.started]
        good = len(self.kills) == 2 and len(set(terms)) == len(terms) >= 3 and "nobody after" not in times
        return Check(
            "two leading schedulers get SIGKILL, each time another one leads", "; ".join(times) or "none was", good
        )

    def _joins_work(self) -> Check:
        """From a kill until all who train on are connected to the next leader: then it takes in newcomers, too."""
        found = []
        for kill in self.kills:
            led = next((r.t for r in self.started if r.t > kill.t), None)
            crew = next((s.who for s in self.chain if led is not None and s.kind == "step" and s.first > led + 1.0), ())
            back = [self._connected(member.partition("~")[0], led) for member in crew if led is not None]
            met = [t for t in back if t is not None]
            found.append(max(met) - kill.t if met and len(met) == len(back) else None)
        text = "; ".join(duration(x) if x is not None else "never" for x in found)
        return Check(
            "joins work again soon after each kill of a scheduler",
            f"after {text}" if found else "nobody was killed",
            len(found) == 2 and all(x is not None and x < JOINS_WORK_S for x in found),
        )

    def _connected(self, node: str, after: float) -> float | None:
        """When this node's member was connected to a scheduler for the first time after that."""
        return next(
            (
                r.t
                for r in self.records
                if r.t > after and r.node == node and r.name == "scheduler" and r.get("state") == "connected"
            ),
            None,
        )

    def _joined(self, node: str, kills: Sequence[Record], whose: str) -> Check:
        """After the first of these kills the node is let in, by a view that was written to the chain after it."""
        what = f"{whose} dies as {node} knocks, and joins work again"
        own = [r for r in self.records if r.node == f"{node}-0" and r.source.startswith("member")]
        joined = next((r for r in own if r.name == "joined"), None)
        if joined is None or not kills:
            return Check(what, "it did not join", False)
        written = [r for r in self.records if r.name == "stored" and r["ok"] and kills[0].t < r.t < joined.t]
        if not written:
            return Check(what, "nothing was written to the chain between the kill and the join", False)
        after = joined.t - kills[0].t
        return Check(
            what,
            f"the chain was written to after {duration(written[0].t - kills[0].t)}, {node} was in after "
            f"{duration(after)}, at step {joined['step']}",
            after < JOINED_S,
        )

    def _etcd(self) -> Check:
        """No other scheduler came to lead between the death of etcd's leader and the next kill of a scheduler."""
        what = "while etcd elects a leader of its own, the scheduler goes on leading"
        if len(self.etcd_kills) != 2 or len(self.kills) != 2:
            return Check(what, f"{len(self.etcd_kills)} of etcd's leaders were killed", False)
        since, until = self.etcd_kills[0].t, self.kills[1].t
        changed = [r for r in self.started if since < r.t < until]
        return Check(what, f"for {duration(until - since)}" if not changed else "another one took over", not changed)

    def _no_step_lost(self) -> Check:
        steps = sorted({slot.step for slot in self.chain if slot.kind == "step"})
        lost = (steps[-1] - steps[0] + 1 - len(steps)) if steps else 1
        ends = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        return Check("no step is lost", f"{ends}, lost {lost}", lost == 0)

    def _pauses(self, since: float, until: float) -> float:
        """The longest time from step to step that overlaps these times, s; what lies behind them does not count."""
        times = [slot.first for slot in self.chain if slot.kind == "step"]
        return max((min(b, until) - a for a, b in itertools.pairwise(times) if b > since and a < until), default=0.0)

    def _usual(self) -> float:
        times = [slot.first for slot in self.chain if slot.kind == "step"]
        return statistics.median([b - a for a, b in itertools.pairwise(times)] or [0.0])

    def _undisturbed(self) -> Check:
        """In the first two acts nobody who trains dies."""
        what = "training waits neither for a scheduler nor for etcd"
        if len(self.kills) != 2 or len(self.etcd_kills) != 2:
            return Check(what, "not all were killed", False)
        ends = [self.kills[0].t, self.etcd_kills[0].t, min(self.kills[1].t, self.etcd_kills[1].t)]
        longest = [self._pauses(a, b) for a, b in itertools.pairwise(ends)]
        usual = self._usual()
        text = (
            f"from step to step at most {duration(longest[0])} after the scheduler's kill, {duration(longest[1])} "
            f"after that of etcd's leader, each time as a node joins; median {duration(usual)}"
        )
        return Check(what, text, all(0 < x < usual + WAITS_S for x in longest))

    def _death(self) -> Check:
        what = f"{KILLED} dies with the scheduler and etcd's leader, and the others go on"
        died = [r for r in self.faults if r["kind"] == "sigkill" and r.node == f"{KILLED}-0"]
        later = [s for s in self.chain if died and s.first > died[0].t and s.kind == "step"]
        without = next((s for s in later if not any(m.startswith(f"{KILLED}-0~") for m in s.who)), None)
        if without is None:
            return Check(what, "they did not", False)
        seconds = without.first - died[0].t
        return Check(what, f"step {without.step} after {duration(seconds)}", seconds < RECOVERED_S)
