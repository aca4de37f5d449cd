"""Measures how long training is disturbed when a scheduler dies or freezes, alone or with a member or etcd's leader.

Three members train in real processes; three candidates stand by for each other on three etcd servers
(benchmarks/candidates.py). The parent notes CLOCK_MONOTONIC, strikes, and follows the members' reports of their steps
over pipes and the event logs of all. A run ends when another scheduler leads, all members are connected to it, and ten
more steps are committed; then whoever was struck comes back. Where nobody but a scheduler or an etcd server is struck,
training must notice nothing: no step is lost, and the longest step between the strike and the end of the run exceeds
the median by no more than 20 ms; as long a time in which nobody is struck follows each such run, as its control. Where
a member dies at the same instant, the survivors' next step is what is measured.

In *apart*, every process counts as on a machine of its own. SIGKILL is a process that dies on a machine that lives, and
refuses connections from then on; SIGSTOP stands for a machine that falls silent, too: nothing but the end of its lease
tells of it. In *shared*, all are on one machine, where a standby sees it. In *embedded* there is no etcd: members start
the scheduler again on its file. Steps have a pause that stands for heavier computing and leaves the processors to what
else runs on this machine.

A standby that has watched a leader for three seconds knows that it follows the job's own chain, and leads at once. One
that was elected sooner first listens for members that know more than its store (protocol.md 14a). So a strike comes
when standbys have watched for as long, but for the cases "soon after an election".

Peers in the same run (benchmarks/peers/coordinators.py): torchrun with its c10d store, torchft with its lighthouse.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.candidates import Candidates, Embedded, Leaders, Watch
from benchmarks.common import Options, Result, median, run
from benchmarks.peers import coordinators
from benchmarks.victims import member
from benchmarks.workers import Worker, context, scratch
from benchmarks.world import World, intervals, lost_or_repeated
from chaos_lightning.membership.leader_search import PULSE_S
from chaos_lightning.service.election import WATCHED_S
from chaos_lightning.service.etcd_servers import EtcdServer, EtcdServers

MEMBERS = 3
STATE_MIB = 6.0
PACE_S = 0.02
BOUND_BEYOND_S = 0.020
BOUND_DEATH_S = {"apart": 3.0, "shared": 1.0}
TAIL_STEPS = 10
ETCD_WINDOW_S = 3.0
"""An election among etcd's servers, and a whole lease of the scheduler, fit into this."""
WATCHES_S = WATCHED_S + 1.0
"""A candidate that is started anew, or follows a new leader, has watched it by then."""
SOON = "scheduler and a member SIGKILL, soon after an election"
REST_S = 1.0
"""Between the return of who was struck and the control: its start takes processor time."""


@dataclass
class Case:
    """Outcomes of all runs of one kind; durations are seconds from the fault."""

    beyond: list[float] = field(default_factory=list)
    """Longest step of any survivor beyond the median step."""
    control: list[float] = field(default_factory=list)
    """Longest step of any survivor beyond the median step, in a time of the same length without a fault."""
    usual: list[float] = field(default_factory=list)
    led: list[float] = field(default_factory=list)
    """Seconds until another scheduler leads."""
    found: list[float] = field(default_factory=list)
    """Seconds until all survivors are connected to the new leader: from then on joins and recoveries work."""
    recovered: list[float] = field(default_factory=list)
    """Seconds until the next step of all survivors without the dead member."""
    joined: list[float] = field(default_factory=list)
    """Seconds until the first step of a newcomer that was started at the instant of the fault."""
    lost: int = 0
    fenced: int = 0
    replaced: int = 0
    """Schedulers that no longer led though nobody had struck them."""


@dataclass
class Scene:
    """Members, schedulers and etcd servers of one run, which the benchmark kills or freezes."""

    name: str
    world: World
    leaders: Leaders
    watch: Watch
    log: Any
    rng: random.Random
    servers: EtcdServers | None = None

    def until(self, ready: Callable[[], Any], what: str) -> None:
        """Takes in members' reports and logged events until a condition holds."""

        def look() -> bool:
            self.watch.look()
            return bool(ready())

        self.world.pump(look, what)

    def strike(self, number: int, pid: int, node: str) -> None:
        words = {signal.SIGKILL: "sigkill", signal.SIGSTOP: "sigstop"}
        self.log.emit("fault_injected", kind=words[signal.Signals(number)], node=node, pid=pid)
        os.kill(pid, number)

    def kill_member(self, name: str) -> None:
        self.world.doomed.add(name)
        self.strike(signal.SIGKILL, self.world.members[name].worker.process.pid or 0, name)

    def strike_etcd(self) -> EtcdServer:
        assert self.servers is not None
        server = self.servers.leader()
        self.log.emit("fault_injected", kind="etcd_sigkill", node=server.name)
        return server

    def longest(self, name: str, since_ns: int) -> float:
        """Returns this member's longest step that ended after `since_ns`, in seconds."""
        timed = intervals(self.world.members[name].steps)
        return max((seconds for step, seconds in timed if step.ns > since_ns), default=0.0)

    def usual(self) -> float:
        """Returns the median of the members' recent steps, in seconds."""
        return self.world.usual(60)


def quiet(scene: Scene, seconds: float) -> float:
    """Lets the job run without a fault; returns by how many seconds its longest step then exceeds the median one."""
    rested = time.monotonic_ns() + int(REST_S * 1e9)
    scene.until(lambda: time.monotonic_ns() > rested, "rest for who has just come back")
    since = time.monotonic_ns()
    scene.until(lambda: time.monotonic_ns() - since > seconds * 1e9, "quiet")
    return max(scene.longest(name, since) for name in scene.world.members) - scene.usual()


@dataclass(frozen=True)
class Strike:
    """Faults that hit schedulers, etcd servers and members at one instant.

    Attributes:
        scheduler: The signal that the leading scheduler gets; 0: none.
        etcd: The leading etcd server gets SIGKILL.
        dies: A member gets SIGKILL.
        joins: A newcomer is started.
        soon: The standbys have not watched the leader for long.
    """

    scheduler: int = 0
    etcd: bool = False
    dies: bool = False
    joins: bool = False
    soon: bool = False


def one_run(scene: Scene, case: Case, index: int, what: Strike) -> None:
    """Injects a fault once, and waits until all processes are back; adds the outcome to `case`. Member `index` modulo
    their number dies.
    """
    world = scene.world
    world.settle(MEMBERS)
    if scene.servers is not None and what.scheduler and not what.soon:
        time.sleep(WATCHES_S)
    usual = scene.usual()
    leader, pid, term = scene.leaders.leading()
    victim = world.by_rank(index % MEMBERS) if what.dies else ""
    survivors = [name for name in world.members if name != victim]
    before = {name: (len(world.members[name].steps), len(world.members[name].fenced)) for name in survivors}
    server = scene.strike_etcd() if what.etcd else None
    time.sleep(scene.rng.uniform(0.0, max(1.5 * usual, PULSE_S)))  # at any moment of a step, and between two pulses
    since = time.monotonic_ns()
    if server is not None and server.process is not None:
        server.process.kill()
    if what.scheduler:
        scene.strike(what.scheduler, pid, leader)
    if victim:
        scene.kill_member(victim)
    newcomer = world.start() if what.joins else ""
    follow(scene, case, what, survivors, (since, term, victim, newcomer))
    case.usual.append(usual)
    case.beyond.append(max(scene.longest(name, since) for name in survivors) - usual)
    took_s = (time.monotonic_ns() - since) / 1e9
    come_back(scene, leader if what.scheduler else "", server, victim, newcomer)
    for name, (count, fenced) in before.items():
        seen = world.members[name]
        case.lost += lost_or_repeated(seen.steps[count - 1 :])
        case.fenced += len(seen.fenced) - fenced
    if not victim and not newcomer:
        case.control.append(quiet(scene, took_s))


def follow(scene: Scene, case: Case, what: Strike, survivors: list[str], struck: tuple[int, int, str, str]) -> None:
    """Waits until training has recovered from a fault; `struck` has the time, the scheduler's term, the victim and the
    newcomer.
    """
    world, (since, term, victim, newcomer) = scene.world, struck
    if victim:
        case.recovered.append(world.recovered(victim, since))
    if newcomer:
        steps = world.members[newcomer].steps
        scene.until(lambda: any(s.contributors == MEMBERS + 1 for s in steps), f"a step of {newcomer}")
        case.joined.append((next(s.ns for s in steps if s.contributors == MEMBERS + 1) - since) / 1e9)
    if what.scheduler:
        wait_for_the_next(scene, case, survivors, since, term)
    else:
        scene.until(lambda: time.monotonic_ns() - since > ETCD_WINDOW_S * 1e9, "the time in which etcd elects")
        case.replaced += scene.leaders.leading()[2] != term
    counts = {name: len(world.members[name].steps) + TAIL_STEPS for name in survivors}
    scene.until(lambda: all(len(world.members[n].steps) >= c for n, c in counts.items()), f"{TAIL_STEPS} more steps")


def wait_for_the_next(scene: Scene, case: Case, survivors: list[str], since: int, term: int) -> None:
    """Waits until another scheduler leads and the survivors are connected to it; records how long both took."""
    watch = scene.watch
    led = partial(watch.first, "scheduler_started", since, lambda r: r["term"] > term)
    scene.until(led, f"another scheduler than that of term {term}")

    def connected() -> list[int]:
        # The next one welcomes nobody before it has said that it leads; whoever was struck does so no more.
        said = [
            watch.first("scheduler", led(), lambda r, n=name: r["state"] == "connected" and r.node == n)  # type: ignore[misc]
            for name in survivors
        ]
        return said if all(said) else []

    scene.until(connected, "members that are connected to it")
    case.led.append((led() - since) / 1e9)
    case.found.append((max(connected()) - since) / 1e9)


def come_back(scene: Scene, leader: str, server: EtcdServer | None, victim: str, newcomer: str) -> None:
    """Restores the members, candidates and etcd servers that there were before the fault."""
    world = scene.world
    if server is not None and scene.servers is not None:
        scene.servers.kill(server)
        scene.servers.run(server)
        scene.servers.wait_ready(30.0)
    if leader:
        scene.leaders.bring_back(leader)
    if victim:
        world.bury(victim)
        world.start()
    if newcomer:
        scene.kill_member(newcomer)
        since = time.monotonic_ns()
        world.recovered(newcomer, since)
        world.bury(newcomer)
    world.settle(MEMBERS)


# ------------------------------------------------------------------------------------------------ scenes


@contextlib.contextmanager
def scene(name: str, folder: Path, rng: random.Random) -> Iterator[Scene]:
    """Yields a running job, under candidates ("apart", "shared") or under a scheduler that its members host
    ("embedded").
    """
    from chaos_lightning.events.events import EventLog

    logs = str(folder / "events")
    ctx = context("benchmarks.victims", "benchmarks.candidates", "chaos_lightning.replication.access")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(EventLog.in_directory(logs, "failover", role="harness"))
        servers: EtcdServers | None = None
        leaders: Leaders
        shared: dict[str, str] = {}
        if name == "embedded":
            leaders = embedded = Embedded(folder)
            shared = embedded.environment
        else:
            servers = stack.enter_context(EtcdServers(folder / "etcd", 3))
            leaders = Candidates(ctx, servers, logs, apart=name == "apart", job={"min_nodes": 2})
        stack.callback(leaders.close)

        def spawn(member_name: str) -> Worker:
            environment = {**shared, **({"CHAOS_HOST": member_name} if name == "apart" else {})}
            return Worker(ctx, member, leaders.endpoint, member_name, STATE_MIB, logs, PACE_S, environment)

        world = stack.enter_context(World(spawn, rng))
        world.open(MEMBERS)
        yield Scene(name, world, leaders, Watch(logs), log, rng, servers)


KILL, STOP = Strike(scheduler=signal.SIGKILL), Strike(scheduler=signal.SIGSTOP)
KILL_BOTH = Strike(scheduler=signal.SIGKILL, dies=True)
SOON_BOTH = Strike(scheduler=signal.SIGKILL, dies=True, soon=True)
CASES: dict[str, dict[str, Strike]] = {
    "apart": {
        "scheduler SIGKILL": KILL,
        "scheduler SIGSTOP": STOP,
        "scheduler and a member SIGKILL": KILL_BOTH,
        "scheduler SIGSTOP and a member SIGKILL": Strike(scheduler=signal.SIGSTOP, dies=True),
        SOON: SOON_BOTH,
        "etcd's leader SIGKILL": Strike(etcd=True),
        "etcd's leader and scheduler SIGKILL": Strike(scheduler=signal.SIGKILL, etcd=True),
        "scheduler SIGKILL as a newcomer starts": Strike(scheduler=signal.SIGKILL, joins=True),
        "a newcomer starts, nobody is struck": Strike(joins=True),
    },
    "shared": {
        "scheduler SIGKILL": KILL,
        "scheduler SIGSTOP": STOP,
        "scheduler and a member SIGKILL": KILL_BOTH,
        SOON: SOON_BOTH,
    },
    "embedded": {"scheduler SIGKILL": KILL, "scheduler and a member SIGKILL": KILL_BOTH},
}
FEWER = ("a newcomer starts, nobody is struck", "scheduler SIGKILL as a newcomer starts", SOON)
"""A quarter of the runs: what they show differs little from one to the next."""


def measure(result: Result, name: str, folder: Path, args: Any) -> None:
    """Measures all cases of one setting, and audits its event logs."""
    print(f" {name}: {', '.join(CASES[name])}", flush=True)
    with scene(name, folder, random.Random(args.seed)) as stage:
        unequal = 0
        for title, what in CASES[name].items():
            case = Case()
            for index in range(max(1, args.runs // 4) if title in FEWER else args.runs):
                one_run(stage, case, index, what)
            unequal += len(stage.world.hashes()) != 1
            report(result, name, title, what, case)
        result.add(f"{name}: comparisons of states that differ, of {len(CASES[name])}", unequal, "count", 0)
        stage.world.end()
    result.audit(folder / "events", f"{name}: audit of the event logs, violations", name)


def report(result: Result, scene_name: str, title: str, what: Strike, case: Case) -> None:
    """Adds the figures of one kind of fault."""
    key = f"{scene_name}, {title}"
    n = len(case.usual)
    alone = not what.dies and not what.joins
    result.add(f"{key}: steps lost", case.lost, "count", 0)
    result.add(f"{key}: living members fenced", case.fenced, "count", 0)
    if alone:
        bound = BOUND_BEYOND_S if scene_name != "embedded" else None
        for which, longest in (("", case.beyond), (", control", case.control)):
            result.add(f"{key}{which}: longest step beyond the median, median of {n}", median(longest), "s")
            result.add(
                f"{key}{which}: longest step beyond the median, worst of {n}",
                max(longest),
                "s",
                None if which else bound,
            )
        more = median(case.beyond) - median(case.control)
        result.add(f"{key}: that median beyond the control's", more, "s", bound)
    if case.recovered:
        bound = BOUND_DEATH_S.get(scene_name) if not what.soon else None
        result.add(f"{key}: to the survivors' next step, slowest of {n}", max(case.recovered), "s", bound)
        result.add(f"{key}: to the survivors' next step, median of {n}", median(case.recovered), "s")
    if case.led:
        result.add(f"{key}: until another leads, median of {n}", median(case.led), "s")
        result.add(f"{key}: until joins work again, median of {n}", median(case.found), "s")
        result.add(f"{key}: until joins work again, slowest of {n}", max(case.found), "s")
    if case.joined:
        result.add(f"{key}: from its start to the newcomer's first step, median of {n}", median(case.joined), "s")
    if not what.scheduler:
        result.add(f"{key}: runs in which the scheduler stopped leading", case.replaced, "count", 0)
    result.details[key] = vars(case)


def main() -> int:
    p = Options(__doc__)
    p.add_count("--runs", 20, 3, "of each case")
    p.add_seed("of the moments at which the blows fall")
    p.add_argument("--scenes", nargs="*", default=list(CASES), choices=list(CASES))
    p.add_argument("--no-peers", action="store_true", help="without torchrun's and torchft's coordinators")
    p.add_argument("--keep", default="", help="folder that keeps event logs")
    args = p.parse_args()
    result = Result("failover")
    with scratch() as scratched:
        for name in args.scenes:
            measure(result, name, Path(args.keep or scratched) / name, args)
    if not args.no_peers:
        coordinators.measure(result, args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
