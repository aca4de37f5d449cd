"""Measures how long members wait for one that holds Python's interpreter lock (GIL) or is stopped, and whether it is
removed from the job.

Three members train in real processes. One is told to hold the lock for 0.3, 1 and 3 s in one call into C, as a
collection, a fork or a long kernel does: meanwhile no thread of it says a word. The figure is the time until all others
have committed their next step; nobody may be put out. A SIGSTOP of a member is measured in the same run, since it is
what such a hold must be told from: the others go on without it.

In *apart* every process counts as on a machine of its own (CHAOS_HOST): the others cannot look into its process table,
and are told what it says by the watcher beside it. In *silent* the watchers are killed before each blow, so that
nothing but silence tells; a hold of 3 s is left out there, since it is taken for a stop and the member joins again.
*shared* is the control: all on one machine.

Besides, all members gather 1 MiB each, again and again: what their processes take afterwards, beyond what they took
before, is what is kept of slots that are over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.survival import Case, blow, report
from benchmarks.victims import member
from benchmarks.workers import Worker, context, scheduler, scratch
from benchmarks.world import World, lost_or_repeated

STATE_MIB = 6.0
PACE_S = 0.02
HOLDS_S = (0.3, 1.0, 3.0)
BOUND_BEYOND_S = 0.5
"""The next step comes so long after the lock is free again: a step and what was due meanwhile."""
BOUND_STOP_S = {"apart": 1.0, "silent": 3.0, "shared": 0.5}
GATHER_NBYTES = MIB
BOUND_MEMORY_MIB = 32


@dataclass
class Hold:
    """Outcome of all runs in which a member held the interpreter lock for one duration."""

    seconds: list[float] = field(default_factory=list)
    """Seconds from the beginning of each hold to the first step of all other members after its end."""
    fenced: int = 0
    """Members that were put out, whoever it was."""
    lost: int = 0


@contextlib.contextmanager
def members(scene: str, rng: random.Random, logs: str) -> Iterator[World]:
    ctx = context("benchmarks.victims", "chaos_lightning.replication.access")
    with scheduler(2, log_dir=logs) as endpoint:

        def spawn(name: str) -> Worker:
            environment = {} if scene == "shared" else {"CHAOS_HOST": name}
            return Worker(ctx, member, endpoint, name, STATE_MIB, logs, PACE_S, environment)

        with World(spawn, rng) as world:
            world.open()
            yield world


def watchers_of(pids: set[int]) -> list[int]:
    """Returns the ids of processes that watch these members on behalf of the other members."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(w.endswith(b"machine/watcher.py") for w in words) and {*map(bytes.decode, words)} & {
                *map(str, pids)
            }:
                found.append(int(entry.name))
    return found


def silence(world: World) -> None:
    """Kills the watchers of all members, so that nothing reports any more whether a member's process lives."""
    for pid in watchers_of({int(s.worker.process.pid or 0) for s in world.members.values()}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def hold(world: World, case: Hold, rank: int, seconds: float) -> None:
    """Makes one member hold the interpreter lock; returns once all other members have committed their next step."""
    world.settle()
    victim = world.by_rank(rank)
    seen = world.members[victim]
    others = [s for n, s in world.members.items() if n != victim]
    fenced = sum(len(s.fenced) for s in world.members.values())
    time.sleep(world.rng.uniform(0.0, 1.5) * world.usual())
    count = len(seen.words.get("held", ()))
    seen.worker.pipe.send(("hold", seconds))
    world.pump(lambda: len(seen.words.get("held", ())) > count, f"{victim} to hold the lock")
    since = seen.words["held"][-1][0]
    free = since + int(seconds * 1e9)
    # The slot under way is committed with the victim's earlier contribution; the step after that needs the victim.
    world.pump(
        lambda: all(s.steps[-1].ns > free for s in others) and seen.steps[-1].ns > free, "the step after the hold"
    )
    firsts = [max(b.ns for a, b in itertools.pairwise(s.steps) if a.ns <= free < b.ns) for s in others]
    case.seconds.append((max(firsts) - since) / 1e9)
    world.settle()
    case.fenced += sum(len(s.fenced) for s in world.members.values()) - fenced
    case.lost += sum(lost_or_repeated(s.steps) for s in others)


def measure(result: Result, scene: str, runs: int, seed: int, logs: str, gathers: int) -> None:
    """Measures all cases of one setting (apart, silent or shared), and audits its event logs."""
    from chaos_lightning.events.events import EventLog

    print(f" {scene}, {runs} runs each, seed {seed}", flush=True)
    with members(scene, random.Random(seed), logs) as world, EventLog.in_directory(logs, "busy", role="harness") as log:
        for seconds in HOLDS_S:
            if scene == "silent" and seconds == max(HOLDS_S):
                continue
            case = Hold()
            for index in range(runs):
                world.settle()
                if scene == "silent":
                    silence(world)
                hold(world, case, index % 3, seconds)
            key = f"{scene}, lock held for {seconds:g} s"
            result.add(f"{key}: to the others' next step, median of {runs}", median(case.seconds), "s")
            slowest = max(case.seconds)
            result.add(f"{key}: to the others' next step, slowest", slowest, "s", seconds + BOUND_BEYOND_S)
            result.add(f"{key}: members put out", case.fenced, "count", 0)
            result.add(f"{key}: steps lost or repeated", case.lost, "count", 0)
            result.details[key] = vars(case)
        stopped = Case()
        for index in range(runs):
            world.settle()
            if scene == "silent":
                silence(world)
            blow(world, stopped, index % 3, "freeze", log)
        report(result, f"{scene}, SIGSTOP", stopped, bound_s=BOUND_STOP_S[scene])
        result.add(f"{scene}, SIGSTOP: others put out", stopped.fenced, "count", 0)
        if gathers:
            remember(result, world, gathers)
        world.end()
    result.audit(logs, f"{scene}: audit of the event logs, violations", scene)


def remember(result: Result, world: World, gathers: int) -> None:
    """Measures the memory that members still use for finished slots in which they gathered large messages."""
    world.settle()
    at = world.last_step() + 50
    for seen in world.members.values():
        seen.worker.pipe.send(("gather", at, gathers, GATHER_NBYTES))
    world.pump(lambda: all("memory" in s.words for s in world.members.values()), f"{gathers} slots that gather")
    grown = [(after - before) / MIB for s in world.members.values() for before, after in s.words["memory"][-1:]]
    title = (
        f"memory after {gathers} slots that gathered 1 MiB of each of three members, beyond before: largest member's"
    )
    result.add(title, max(grown), "MiB", BOUND_MEMORY_MIB)


def main() -> int:
    p = Options(__doc__)
    p.add_count("--runs", 9, 3, "of each kind")
    p.add_seed("of the moments at which the blows fall")
    p.add_argument("--scenes", nargs="*", default=list(BOUND_STOP_S), choices=list(BOUND_STOP_S))
    p.add_argument("--keep-logs", default="", help="folder that keeps the members' event logs")
    args = p.parse_args()
    result = Result("busy")
    with scratch() as folder:
        for number, scene in enumerate(args.scenes):
            logs = str((Path(args.keep_logs) if args.keep_logs else folder) / f"busy-{scene}")
            gathers = (24 if args.quick else 96) if number == 0 else 0
            measure(result, scene, args.runs, args.seed, logs, gathers)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
