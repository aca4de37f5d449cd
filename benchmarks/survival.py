"""Kills or freezes one of three members, and measures how long until the others have committed without it.

The parent hurts one, waits for the survivors, has the third place filled again and lets all three compare their states.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import Result, median
from benchmarks.victims import WAYS
from benchmarks.world import World, lost_or_repeated

BOUND_SPREAD = 2.0


@dataclass
class Case:
    """Outcomes of all runs with one kind of fault."""

    seconds: list[float] = field(default_factory=list)
    """Seconds from the blow to a step without the victim, committed on all survivors."""
    usual: list[float] = field(default_factory=list)
    """Median step before each blow, s."""
    thrown: int = 0
    lost: int = 0
    fenced: int = 0
    unequal: int = 0
    back: list[float] = field(default_factory=list)
    """Seconds from thaw, or start of the new process, to the first step of three members."""
    ranks: list[int] = field(default_factory=list)
    handed: int = 0


def blow(world: World, case: Case, rank: int, kind: str, log: Any = None, chosen: int = 0) -> None:
    """Kills or freezes one member, measures the recovery, and waits until three members have the same state again.

    Args:
        world: Three members.
        case: Takes the outcome.
        rank: The victim's.
        kind: "kill", "freeze", or one of WAYS.
        log: The parent's event log, if the members write any.
        chosen: For WAYS: which survivor gets the header.
    """
    world.settle()
    usual, victim = world.usual(), world.by_rank(rank)
    survivors = {n: s for n, s in world.members.items() if n != victim}
    before = {n: (len(s.steps), s.steps[-1].thrown, len(s.fenced)) for n, s in survivors.items()}
    struck = strike(world, victim, kind, log, chosen, usual)
    case.seconds.append(world.recovered(victim, struck))
    case.usual.append(usual)
    case.ranks.append(rank)
    trapped = world.members[victim].said("trap")
    resumed = time.monotonic_ns()
    back = come_back(world, victim, kind, log, struck)
    world.pump(
        lambda: any(s.contributors == 3 and s.ns > resumed for s in world.members[back].steps),
        f"the first step of {back}",
    )
    first = next(s for s in world.members[back].steps if s.contributors == 3 and s.ns > resumed)
    case.back.append((first.ns - resumed) / 1e9)
    case.unequal += len(world.hashes()) != 1
    for name, (count, thrown, fenced) in before.items():
        later = survivors[name].steps[count - 1 :]
        case.lost += lost_or_repeated(later)
        case.thrown += later[-1].thrown - thrown
        case.fenced += len(survivors[name].fenced) - fenced
    if trapped is not None:
        _, seq, _, head = trapped
        slots = [next((s for s in m.steps if s.seq == seq), None) for m in survivors.values()]
        # Verbatim: the dead member's own header, and so its gradient, stands in the survivors' chain.
        case.handed += all(s is not None and s.head == head and s.contributors == 3 for s in slots)


def strike(world: World, victim: str, kind: str, log: Any, chosen: int, usual: float) -> int:
    """Kills or freezes a member at a random moment of a step, or at the place of a trap; returns when (CLOCK_MONOTONIC,
    ns).
    """
    seen = world.members[victim]
    if kind != "freeze":
        world.doomed.add(victim)
    if kind in WAYS:
        seen.worker.pipe.send(("trap", kind, chosen))
        world.pump(lambda: seen.said("trap"), f"the trap in {victim}")
        return int(seen.words["trap"][-1][0])
    time.sleep(world.rng.uniform(0.0, 1.5) * usual)
    if log is not None:
        log.emit("fault_injected", kind="sigkill" if kind == "kill" else "sigstop", node=victim)
    struck = time.monotonic_ns()
    os.kill(seen.worker.process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    return struck


def come_back(world: World, victim: str, kind: str, log: Any, struck: int) -> str:
    """Wakes a frozen member until it is in the job again, or starts a new process; returns the member's name."""
    if kind != "freeze":
        world.bury(victim)
        return world.start()
    seen = world.members[victim]
    if log is not None:
        log.emit("fault_injected", kind="sigcont", node=victim)
    os.kill(seen.worker.process.pid, signal.SIGCONT)
    world.pump(lambda: seen.fenced and seen.entries[-1] > seen.fenced[-1] > struck, f"{victim}'s way back")
    return victim


def report(result: Result, title: str, case: Case, *, bound_s: float | None = None, strict: bool = False) -> None:
    """Adds the figures of one kind of fault."""
    if not case.seconds:
        return
    middle = median(case.seconds)
    n = len(case.seconds)
    result.add(f"{title}: to the survivors' next step, median of {n}", middle, "s", bound_s)
    if strict:
        result.add(f"{title}: slowest / median", max(case.seconds) / middle, "ratio", BOUND_SPREAD if n > 2 else None)
    zero = 0 if strict else None
    result.add(f"{title}: survivors' gradients thrown away", case.thrown, "count", zero)
    if strict:
        result.add(f"{title}: steps lost or repeated", case.lost, "count", 0)
        result.add(f"{title}: living members fenced", case.fenced, "count", 0)
        result.add(f"{title}: runs after which states differ", case.unequal, "count", 0)
    result.add(f"{title}: newcomer's start or thaw to its first step, median", median(case.back), "s")
    result.details[title] = {
        "seconds": case.seconds, "usual_step_s": case.usual, "rank": case.ranks, "back_s": case.back,
    }  # fmt: skip
