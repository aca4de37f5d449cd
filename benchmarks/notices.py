"""Measures whether members whose machines will be taken away leave in time, and what that costs the others.

Two members train in real processes, by plain loops. Again and again a third one joins, its machine gets a notice, and
at the moment that the notice names the parent kills what is still there of it, as a cloud would. Notices come the way
in which they come to users: SIGTERM with a grace time; Slurm's end of a job, told by a `squeue` that prints as Slurm's
does; spot notices and rebalance recommendations of AWS and preemptions of Google Cloud, from HTTP servers that speak
their formats (benchmarks/metadata.py); a file; a deadline. Sources are asked as often as by default. The time that a
notice gives is drawn: from the interval of looking and four steps to that and thirty.

A notice counts if it leaves three steps of time when it is heard; then the member must be out, its process's part in
the job closed, before its machine is taken. The two others must lose and repeat no step and see no death. Then all
members get a notice at once: the last one keeps the state, the next start goes on from it, and the last step of any
member must not be ahead of that.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, median, run
from benchmarks.metadata import MetadataServer
from benchmarks.noticed import member
from benchmarks.workers import Worker, context, scheduler, scratch
from benchmarks.world import World, lost_or_repeated
from chaos_lightning.machine.notice_sources import EVERY_S
from chaos_lightning.machine.notices import GOOGLES_GRACE_S

STEPS = (4, 30)
"""Steps between which the time of a notice is drawn, beyond the interval of looking."""
ENOUGH_STEPS = 3
KNOWN_S = 8.0
"""Seconds from a process's start to an end that is known from the start."""
LEAD = "lead:3s"
"""Lead of members whose end is known from the start; the default of two minutes would let none begin."""
KINDS = ("sigterm", "slurm", "aws", "aws-rebalance", "gcp", "file", "deadline")
HOSTS = 2
TROUBLE = ("death", "fenced")
"""Events of which none may come."""


@dataclass
class Case:
    """Outcomes of all notices of one kind."""

    in_time: int = 0
    late: int = 0
    too_short: int = 0
    """Notices that did not leave three steps of time when they were heard."""
    unheard: int = 0
    left_s: list[float] = field(default_factory=list)
    """Seconds from being out to the end of the machine."""
    took_s: list[float] = field(default_factory=list)
    """Seconds from the decision to leave to being out."""
    lost: int = 0


class Machines:
    """Members that stay, and machines that are taken away one after the other."""

    def __init__(self, endpoint: str, folder: Path, logs: str, rng: random.Random, server: MetadataServer) -> None:
        self.logs, self._folder, self._server, self._rng = logs, folder, server, rng
        self._told: dict[str, tuple[str, dict[str, str]]] = {}
        ctx = context("benchmarks.noticed", "chaos_lightning.trainer")
        self.world = World(lambda name: Worker(ctx, member, endpoint, name, logs, *self._told.get(name, ("", {}))), rng)

    def open(self, count: int, notice: str = "") -> list[str]:
        """Starts members and waits until all have made some steps together; returns their names."""
        names = [f"host{len(self.world.members) + len(self.world.past) + i}" for i in range(count)]
        for name in names:
            self._told[name] = (notice, {})
            self.world.start(name)
        self.world.settle(count)
        return names

    def take(self, kind: str, index: int, case: Case) -> None:
        """Has one member join, gives its machine a notice, and takes the machine away at the time that it names."""
        world, name = self.world, f"{kind}-{index}"
        usual_s = world.usual()
        known = kind in ("slurm", "deadline")
        grace_s = KNOWN_S if known else EVERY_S.get(kind, 0.0) + self._rng.uniform(*STEPS) * usual_s
        grace_s = GOOGLES_GRACE_S if kind == "gcp" else grace_s
        before = {host: len(world.members[host].steps) for host in world.members}
        taken = time.time() + grace_s
        self._told[name] = self._setting(kind, taken, grace_s, name)
        world.start(name)
        seen = world.members[name]
        if not known:
            world.pump(lambda: len(seen.steps) > ENOUGH_STEPS, f"steps of {name}")
            taken = time.time() + grace_s
            self._give(kind, taken, name)
        end_ns = time.monotonic_ns() + int((taken - time.time()) * 1e9)
        world.pump(lambda: seen.said("bye") or time.monotonic_ns() > end_ns, f"the end of {name}")
        out = seen.said("bye")
        if out is None:  # the machine is taken
            world.doomed.add(name)
            assert seen.worker.process.pid is not None
            os.kill(seen.worker.process.pid, signal.SIGKILL)
        self._server.set(spot=None, rebalance=None, preempted="FALSE")
        world.bury(name)
        self._judge(case, name, usual_s, out, end_ns)
        world.pump(
            lambda: all(world.members[host].steps[-1].contributors == HOSTS for host in before),
            "steps of those who stay",
        )
        case.lost += sum(lost_or_repeated(world.members[host].steps[max(0, n - 1) :]) for host, n in before.items())

    def _setting(self, kind: str, taken: float, grace_s: float, name: str) -> tuple[str, dict[str, str]]:
        """Returns a member's setting for this kind of notice, and its environment."""
        environment: dict[str, str] = {}
        if kind == "slurm":
            folder = self._folder / name
            folder.mkdir()
            end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(taken))
            (folder / "squeue").write_text(f"#!/bin/sh\necho {end}\n")
            (folder / "squeue").chmod(0o755)
            environment = {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
        text = {
            "sigterm": f"sigterm:{grace_s:.3f}s",
            "slurm": f"slurm+{LEAD}",
            "file": f"file:{self._folder / name}.taken",
            "deadline": f"deadline:@{taken:.3f}+{LEAD}",
        }
        return text.get(kind, f"{kind}:{self._server.base}"), environment

    def _give(self, kind: str, taken: float, name: str) -> None:
        """Gives a machine its notice."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(taken))
        if kind == "sigterm":
            pid = self.world.members[name].worker.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        elif kind == "aws":
            self._server.set(spot={"action": "terminate", "time": at})
        elif kind == "aws-rebalance":
            self._server.set(rebalance={"noticeTime": at})
        elif kind == "gcp":
            self._server.set(preempted="TRUE")
        else:
            beside = self._folder / f"{name}.written"
            beside.write_text(f"@{taken:.3f}")
            beside.rename(self._folder / f"{name}.taken")

    def _judge(self, case: Case, name: str, usual_s: float, out: tuple[Any, ...] | None, end_ns: int) -> None:
        from chaos_lightning.events.events import read_events

        taken = [r for r in read_events(self.logs) if r.name == "notice_taken" and r.node == name]
        if not taken:
            case.unheard += 1
            return
        heard_s = end_ns / 1e9 - taken[0].mono
        if heard_s < ENOUGH_STEPS * usual_s:
            case.too_short += 1
        elif out is None or out[0] > end_ns:
            case.late += 1
        else:
            case.in_time += 1
            case.left_s.append((end_ns - out[0]) / 1e9)
            case.took_s.append(out[0] / 1e9 - taken[0].mono)


@contextmanager
def machines(folder: Path, name: str, seed: int) -> Iterator[Machines]:
    """Yields machines under a scheduler and a metadata server of their own."""
    logs = str(folder / name)
    store = str(folder / f"{name}.sqlite")
    with scheduler(HOSTS, store=store, log_dir=logs) as endpoint, MetadataServer() as server:
        made = Machines(endpoint, folder, logs, random.Random(seed), server)
        with made.world:
            yield made


def one_by_one(result: Result, folder: Path, runs: int, kinds: list[str], seed: int) -> None:
    """Takes machines away one after the other, and adds the figures of each kind of notice."""
    cases = {kind: Case() for kind in kinds}
    with machines(folder, "one-by-one", seed) as made:
        made.open(HOSTS)
        for index in range(runs):
            for kind, case in cases.items():
                made.take(kind, index, case)
        made.world.end()
    for kind, case in cases.items():
        result.add(f"{kind}: not left in time, of {runs}", case.late + case.unheard, "count", 0)
        result.add(f"{kind}: steps lost or repeated by those who stay", case.lost, "count", 0)
        if case.in_time:
            result.add(f"{kind}: from the decision to being out, median", median(case.took_s), "s")
            result.add(f"{kind}: time left when out, least", min(case.left_s), "s")
        if case.too_short:
            result.remark(f"{kind}: {case.too_short} were heard when fewer than {ENOUGH_STEPS} steps were left")
        result.details[kind] = {"took_s": case.took_s, "left_s": case.left_s, "too_short": case.too_short}
    judge_logs(result, made.logs, "one by one")


def judge_logs(result: Result, logs: str, about: str) -> None:
    """Adds the deaths and recoveries that the event logs tell of, and the audit's violations."""
    from chaos_lightning.events.events import read_events

    told = list(read_events(logs))
    trouble = [r for r in told if r.name in TROUBLE]
    recoveries = {str(r["number"]): str(r["reason"]) for r in told if r.name == "prepare"}
    result.details[f"trouble, {about}"] = [f"{r.name} {r.get('reason') or r.get('evidence')}" for r in trouble]
    result.details[f"recoveries, {about}"] = recoveries
    result.add(f"deaths and exclusions, {about}", len(trouble), "count", 0)
    result.add(f"recoveries, {about}", len(recoveries), "count")
    result.audit(logs, f"audit of the event logs, violations, {about}", about)


def all_at_once(result: Result, folder: Path, runs: int, seed: int) -> None:
    """Gives all members of a job a notice at once, and starts them again, several times."""
    from chaos_lightning.events.events import read_events

    lost, kept = 0, []
    flag = folder / "all.taken"
    with machines(folder, "all", seed) as made:
        for _ in range(runs + 1):
            flag.unlink(missing_ok=True)
            names = made.open(HOSTS + 1, f"file:{flag}")
            flag.touch()
            seen = [made.world.members[name] for name in names]
            made.world.pump(lambda seen=seen: all(s.said("bye") for s in seen), "all to leave")
            last = max(s.steps[-1].step for s in seen)
            for name in names:
                made.world.bury(name)
            told = list(read_events(made.logs))
            kept.append(max((int(r["step"]) for r in told if r.name == "kept"), default=0))
            lost += max(0, last - kept[-1])
        resumed = [int(r["step"]) for r in told if r.name == "resumed_kept"]
    result.details["kept, resumed"] = [kept, resumed]
    result.add(f"all at once: steps that no file kept, of {runs + 1}", lost, "count", 0)
    wrong = len(set(kept[:-1]) - set(resumed))
    result.add(f"all at once: starts that did not go on from the last step, of {runs}", wrong, "count", 0)


def main() -> int:
    p = Options(__doc__)
    p.add_count("--runs", 20, 2, "notices of each kind")
    p.add_count("--together", 5, 1, "notices for all members at once")
    p.add_seed("of the times that notices give")
    p.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    args = p.parse_args()
    result = Result("notices")
    with scratch() as folder:
        one_by_one(result, folder, args.runs, args.kinds, args.seed)
        all_at_once(result, folder, args.together, args.seed)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
