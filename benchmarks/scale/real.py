"""Trains 24 real processes in one job, of which ten are killed while ten join, on the default graph; measures their
all-reduces.

Processes train as in the soak (benchmarks/soak/member.py: scikit-learn's digits, with a journal each), 24 at first.
Every so many steps, in turn, one that trains is killed and one is started. Judged are the contract's points, by
the journals and by the audit of the event logs, and how many TCP connections a member has beyond the links of its view
and its control stream, while nothing happens. All-reduces over the default graph are compared with those over a link
between every pair (reduces.py).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.common import Options, Result, run
from benchmarks.scale import reduces
from benchmarks.soak.crew import Crew
from benchmarks.soak.member import QUOTA, training_length
from benchmarks.soak.runs import Standstill, gather
from benchmarks.workers import Scheduler, scratch
from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.events.events import EventLog
from chaos_lightning.membership.topology import neighbours
from chaos_lightning.observe.audit import NOT_SHOWN, audit, verdict, violations
from chaos_lightning.protocol.types import View
from chaos_lightning.service.sqlite_store import SqliteStore

FLOOR = 2 / 3
"""Share of the members with which the job begins, and below which it would wait."""
STUCK_S = 120.0
BESIDE_LINKS = 2
"""Connections besides links: the control stream, and a transfer that ends just then."""
MINUTES, MINUTES_QUICK = 6.0, 2.0
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED = "01"


def connections(pid: int) -> int:
    """Returns the number of open TCP connections of a process."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    standing = {row[9] for row in rows if row[3] == _ESTABLISHED}
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = _SOCKET.fullmatch(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
        if found:
            mine.add(found[1])
    return len(mine & standing)


def beyond_links(samples: Iterable[Mapping[str, int]], views: Sequence[View]) -> tuple[list[int], list[int]]:
    """Returns (connections beyond the view's links, links of the view) of each member in each sample that fits a view.

    Args:
        samples: Number of connections of each member at one time, by name.
        views: Views of the chain, oldest first.
    """
    beyond: list[int] = []
    degrees: list[int] = []
    for sample in samples:
        view = next((v for v in reversed(views) if {m.name for m in v.members} == set(sample)), None)
        for member in view.members if view is not None else ():
            degree = len(neighbours(view, member.id))  # type: ignore[arg-type]
            degrees.append(degree)
            beyond.append(sample[member.name] - degree)
    return beyond, degrees


class Driver:
    """Kills one process and starts one, in turn, each time after a number of steps.

    Args:
        crew: All processes.
        log: Event log of the benchmark.
        size: Number of members at first.
        events: Number of kills, and also of joins.
        every: Steps between one kill or join and the next.
        seed: Seed by which the killed processes are drawn.
    """

    def __init__(self, crew: Crew, log: EventLog, size: int, events: int, every: int, seed: int) -> None:
        self._crew, self._log, self._every = crew, log, every
        self._size, self._left = size, 2 * events
        self._names = (f"n{number}" for number in range(size, size + events))
        self._rng = random.Random(seed)
        self._next = every
        self.samples: list[dict[str, int]] = []

    @property
    def left(self) -> int:
        """Number of kills and joins that are yet to come."""
        return self._left

    def turn(self) -> None:
        """Makes the next kill or join if it is due, all processes are in the job, and they have trained for a while."""
        crew = self._crew
        if not self._left or crew.step < self._next or len(crew.able()) < len(crew.alive):
            return
        self.samples.append({p.name: connections(p.pid) for p in crew.able()})
        if self._left % 2 == 0:
            one = self._rng.choice(crew.able())
            one.may_die = True
            self._log.emit("fault_injected", kind="sigkill", node=one.name)
            os.kill(one.pid, signal.SIGKILL)
        else:
            crew.start(next(self._names))
        self._left -= 1
        self._next = crew.step + self._every


def job(folder: Path, args: argparse.Namespace) -> tuple[Crew, Driver]:
    """Trains until all epochs are over; returns the processes and the driver of faults."""
    logs = str(folder / "events")
    steps = args.epochs * training_length() / (args.members * QUOTA)
    every = max(2, int(steps / (2 * args.events + 4)))
    scheduler = Scheduler(str(folder / "chain.sqlite"), log_dir=logs)
    scheduler.start(int(args.members * FLOOR))
    crew = Crew(scheduler.endpoint, folder, args.seed, args.epochs, args.pace_s)
    with EventLog.in_directory(logs, "scale", role="harness") as log:
        driver = Driver(crew, log, args.members, args.events, every, args.seed)
        watch = Standstill(STUCK_S)
        try:
            for number in range(args.members):
                crew.start(f"n{number}")
            while crew.alive:
                crew.turn()
                if not crew.over:
                    driver.turn()
                if watch.lasts(time.monotonic(), crew.over, len(crew.alive) if crew.over else crew.step):
                    crew.undeclared.append(f"no progress for {STUCK_S:g} s at step {crew.step}")
                    break
        finally:
            crew.close()
            scheduler.stop()
    return crew, driver


def judge(result: Result, crew: Crew, driver: Driver, args: argparse.Namespace) -> None:
    """Adds the results of checks on the job's journals, event logs and chain."""
    title = f"{args.members} processes"
    seen = gather(crew, training_length()).verdict
    result.add(f"kills and joins that did not occur, {title}", driver.left, "count", 0)
    result.add(f"processes that ended undeclared, {title}", len(crew.undeclared), "count", 0)
    result.add(f"steps, {title}", seen.looked_at.get("steps", 0), "count")
    for point, problems in seen.problems.items():
        result.add(f"journals: violations of contract point {point}, {title}", len(problems), "count", 0)
        for line in problems[:3]:
            print(f"    {line}")
    findings = audit(crew.folder / "events", lengths={("", epoch): training_length() for epoch in range(args.epochs)})
    result.add(f"audit: violations, {title}", len(violations(findings)), "count", 0)
    result.add(f"audit: points not shown, {title}", sum(f.verdict == NOT_SHOWN for f in findings), "count", 0)
    result.details["audit"] = verdict(findings).splitlines()
    result.details["problems"] = seen.problems
    with JobChain(SqliteStore(crew.folder / "chain.sqlite", "default", read_only=True)) as chain:
        loaded = chain.load()
    if gone := len(loaded.past.views):
        result.remark(f"the chain was cut behind the first {gone} views: samples of these are not looked at")
    beyond, degrees = beyond_links(driver.samples, loaded.views)
    if not degrees:
        result.leave_out("connections beyond links", "no sample was taken while a view stood")
        return
    result.add(f"links of a member in its view, mean, {title}", sum(degrees) / len(degrees), "count")
    result.add(f"links of a member in its view, most, {title}", max(degrees), "count")
    result.add(f"connections beyond links of the view, most, {title}", max(beyond), "count", BESIDE_LINKS)


def measure(result: Result, args: argparse.Namespace) -> None:
    """Measures the job of real processes, and all-reduces."""
    print(f" {args.members} processes, {args.events} kills and joins", flush=True)
    with scratch() as folder:
        crew, driver = job(folder, args)
        judge(result, crew, driver, args)
    reduces.measure(result, args)


def minutes(args: argparse.Namespace) -> float:
    """Returns the minutes that this part of the benchmark should take."""
    return MINUTES_QUICK if args.quick else MINUTES


def options(p: Options) -> None:
    """Adds the command-line options of this part of the benchmark."""
    p.add_count("--members", 24, 17, "processes at first")
    p.add_count("--events", 10, 2, "processes that are killed, and as many that come")
    p.add_count("--epochs", 45, 10, "of training")
    p.add_argument("--pace-s", type=float, default=0.1, help="pause in each step")
    reduces.options(p)


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_seed("of model, data order and who is killed")
    options(p)
    args = p.parse_args()
    result = Result("scale, real")
    measure(result, args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
