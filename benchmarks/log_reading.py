"""Measures processor seconds and peak memory of `chaos-lightning audit` and `report` on the event logs of a large job.

The logs are made up. All members but one found the job; one is killed at a third of the steps, and a newcomer pulls the
state at two thirds. The first founder's file and the newcomer's are written by `EventLog` with a clock of their own.
The other founders' files are the first one's lines with their names, samples and times, so that they are short where
real ones are. Each command runs in a process of its own, whose processor time and largest resident set the kernel
tells. All points of the contract must hold. With --source, another copy of the product reads the same logs, for a
comparison.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, run
from benchmarks.workers import at, scratch
from chaos_lightning.events.events import EventLog
from chaos_lightning.protocol.types import GENESIS

T0 = 1_800_000_000.0
"""Wall time at which the job begins, s."""
QUOTA = 8
"""Samples of a member in a step."""
STEP_S = 0.1
LATER_S = 1e-5
"""Seconds by which each founder is later than the one before."""
BOUND_S = 60.0
BOUND_NBYTES = 1e9


class ClockedLog(EventLog):
    """Event log whose clock is set by the benchmark: `now` is its wall time, s."""

    now = T0

    def _stamp(self) -> dict[str, Any]:
        return {"t": round(self.now, 6), "mono": round(self.now - T0 + 1_000, 6)}


@dataclass(frozen=True)
class Slot:
    """One committed slot of the made-up job."""

    seq: int
    step: int
    kind: str
    view: int
    header: str
    before: str
    members: tuple[str, ...]
    used: int
    """Samples that the job had used before it."""
    t: float

    @property
    def state(self) -> str:
        """Hash that stands for the training state at this slot."""
        return hashlib.blake2b(f"state {self.header}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Job:
    """Slots of the made-up job, the name of the member that is killed and of the one that joins."""

    slots: tuple[Slot, ...]
    victim: str
    newcomer: str
    killed_at: float
    pulled_at: Slot
    length: int
    """Samples of the only epoch."""

    @staticmethod
    def of(count: int, steps: int) -> Job:
        """Makes up a job of `count` members in all and `steps` steps."""
        members = tuple(f"m{i:04}~{i + 1}" for i in range(count - 1))
        victim, newcomer, killed_at = members[-1], f"new~{count}", 0.0
        found: list[Slot] = []
        step = used = 0
        view, t, before = 1, T0 + 5.0, GENESIS.hash
        kinds = ["step"] * steps + ["closing"]
        kinds.insert(2 * steps // 3, "boundary")
        for seq, kind in enumerate(kinds, 1):
            step += kind == "step"
            t += STEP_S * (1 + seq * 37 % 11 / 50) if kind == "step" else 0.03
            if step == steps // 3 and kind == "step":
                view, members, killed_at, t = 2, members[:-1], t, t + 0.5
            header = hashlib.blake2b(f"{seq} {before}".encode(), digest_size=8).hexdigest()
            found.append(Slot(seq, step, kind, view, header, before, members, used, t))
            before, used = header, used + QUOTA * len(members) * (kind == "step")
            if kind == "boundary":
                view, members, t = 3, (*members, newcomer), t + 0.4
        pulled = next(slot for slot in found if slot.kind == "boundary")
        return Job(tuple(found), victim, newcomer, killed_at, pulled, used)

    def views(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields the time of each view's decision, with the contents of its `view` event."""
        reasons = ("founding", f"{self.victim} died", f"{self.newcomer} joins")
        view = 0
        for before, slot in zip((None, *self.slots), self.slots, strict=False):
            if slot.view > view:
                view = slot.view
                t = T0 + 4.0 if before is None else (self.killed_at if view == 2 else before.t) + 0.02
                joiners = [self.newcomer] if view == 3 else []
                told = {"members": slot.members, "joiners": joiners, "reason": reasons[view - 1], "chain": "c0"}
                yield t, {"id": f"1.{view}", **told}


def tell(log: ClockedLog, job: Job, me: str, rank: int) -> None:
    """Writes the log of one member that trains to the end of the job."""
    founder = me != job.newcomer
    begun, pulled = 0 if founder else job.pulled_at.seq, job.pulled_at
    log.identify(me)
    log.emit("welcomed", id=me, role="founder" if founder else "joiner", reason="there is room", chain="c0")
    views = [(t, view) for t, view in job.views() if founder or me in view["members"]]
    slots = [slot for slot in job.slots if slot.seq > begun]
    happened = [(slot.t, 1, slot) for slot in slots] + [(t, 0, view) for t, view in views]
    joined = False
    for t, _, what in sorted(happened, key=lambda one: one[:2]):
        log.now = t + LATER_S * rank
        if not isinstance(what, Slot):
            log.emit("view", **what)
            if not founder and not joined:
                log.emit("pull_started", seq=pulled.seq, head=pulled.header, sources=pulled.members[:3])
                log.now += 0.2
                for donor in pulled.members[:3]:
                    log.emit("pull_source", source=donor, nbytes=1 << 24, seconds=0.19)
                log.emit("pull_done", nbytes=3 << 24, skipped=0, seconds=0.2, hash=pulled.state)
            if not joined:
                role, world = ("founder" if founder else "joiner"), len(what["members"])
                seq, step = (0, 0) if founder else (pulled.seq, pulled.step)
                log.emit("joined", id=me, role=role, job="large", endpoint="s:1", world_size=world, seq=seq, step=step)
                log.emit("epoch", stream="", epoch=0, length=job.length)
                joined = True
            if what["id"] == "1.2":
                log.emit("redo", view="1.2", base=slots[0].seq, reason=what["reason"])
            continue
        weight = float(QUOTA) if what.kind == "step" else 0.0
        first = what.used + QUOTA * rank
        log.emit(
            "committed", seq=what.seq, kind=what.kind, step=what.step, view=f"1.{what.view}", header=what.header,
            prev=what.before, contributors=[(member, weight) for member in what.members],
            spent=[{"stream": "", "epoch": 0, "spans": [[first, first + QUOTA]]}] if weight else [],
            ledger=[{"stream": "", "epoch": 0, "spans": [[0, what.used + bool(weight) * QUOTA * len(what.members)]]}],
            next_view=f"1.{what.view + (what.kind == 'boundary')}",
            duration_s=STEP_S + what.seq % 7 / 1e3, wait_s=0.01 + what.seq % 5 / 1e3,
        )  # fmt: skip
        if what.step % 10 == 0 or what.kind != "step":
            log.emit("state_hash", seq=what.seq, step=what.step, head=what.header, hash=what.state)
            log.emit("train_loss", step=what.step, loss=3 + 1 / (1 + what.step), weight=weight)
        if what.step % 50 == 0:
            rates = {"sent_bps": 10**8 + what.seq, "received_bps": 10**8 - what.seq, "rate_bps": 10**9}
            near = [f"m{i:04}~{i + 1}" for i in range(8)]
            links = [{"peer": peer, "sent_nbytes": what.seq << 20, "latency_s": 1e-3, **rates} for peer in near]
            log.emit("links", links=links, relayed=0, waiting=0)
    log.emit("finished", seq=job.slots[-1].seq, step=job.slots[-1].step)


def founders(folder: Path, lines: list[str], job: Job) -> None:
    """Writes the logs of all founders but the first one, by adapting the first one's lines; the killed member's log
    ends at its death.
    """
    names = job.slots[0].members
    mine = f'"member":"{names[0]}","node":"{names[0].partition("~")[0]}"'
    for rank, name in enumerate(names[1:], 1):
        theirs = f'"member":"{name}","node":"{name.partition("~")[0]}"'
        with (folder / f"member-{name.partition('~')[0]}-{rank + 1}.jsonl").open("w") as file:
            for text in lines:
                line = json.loads(text.replace(mine, theirs))
                if name == job.victim and line["t"] >= job.killed_at:
                    break
                for key in ("t", "mono"):
                    if key in line:
                        line[key] = round(line[key] + LATER_S * rank, 6)
                if line.get("spent"):
                    line["spent"][0]["spans"] = [[x + QUOTA * rank for x in line["spent"][0]["spans"][0]]]
                if "spent.0.spans.0" in line:
                    line["spent.0.spans.0"] = [x + QUOTA * rank for x in line["spent.0.spans.0"]]
                if "id" in line and line["id"] == names[0]:
                    line["id"] = name
                file.write(json.dumps(line, separators=(",", ":")) + "\n")


def write_logs(folder: Path, count: int, steps: int) -> Job:
    """Writes the event logs of a made-up job with given numbers of members and steps."""
    job = Job.of(count, steps)
    first = job.slots[0].members[0]
    with ClockedLog(folder / "scheduler-s-9.jsonl", role="scheduler") as log:
        log.emit("scheduler_started", endpoint="s:1", job="large", term=1, chain="c0", views=0, store="memory")
        for t, view in job.views():
            log.now = t - 0.01
            if view["id"] == "1.2":
                log.emit("death", member=job.victim, evidence="control stream closed")
            log.emit("decide", base="", hand_on=False, **view)
    with ClockedLog(folder / "harness-h-9.jsonl", role="harness") as log:
        log.now = job.killed_at
        node = job.victim.partition("~")[0]
        log.emit("fault_injected", node=node, kind="sigkill", phase="allreduce", seconds=0.0)
    for name in (first, job.newcomer):
        node = name.partition("~")[0]
        with ClockedLog(folder / f"member-{node}-1.jsonl", node=node, day_nbytes=0) as log:
            if name == job.newcomer:
                log.now = job.pulled_at.t - 1.0
            tell(log, job, name, 0 if name == first else len(job.slots[-1].members) - 1)
    written = folder / f"member-{first.partition('~')[0]}-1.jsonl"
    founders(folder, written.read_text().splitlines(), job)
    return job


def measured(command: list[str], source: str) -> tuple[float, int, str]:
    """Returns processor seconds, peak resident bytes and the output of a command of the product."""
    program = [sys.executable, "-m", "chaos_lightning", *command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, **at(source or os.getcwd())) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {process.returncode}: {told[-500:]}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, told


def main() -> int:
    parser = Options(__doc__)
    parser.add_count("--members", 512, 64, "members of the job")
    parser.add_count("--steps", 1_000, 200, "steps of the job")
    parser.add_argument("--source", default="", help="folder of the product that reads; this one if none is given")
    args = parser.parse_args()
    result = Result("log_reading")
    with scratch() as folder:
        logs = folder / "events"
        write_logs(logs, args.members, args.steps)
        nbytes = sum(path.stat().st_size for path in logs.iterdir())
        result.add("logs", nbytes / 1e6, "MB")
        for name, command in (("audit", ["audit"]), ("report", ["report", "--out", str(folder / "page")])):
            cpu_s, peak_nbytes, told = measured([*command, str(logs)], args.source)
            result.add(f"{name}: processor time", cpu_s, "s", BOUND_S)
            result.add(f"{name}: peak memory", peak_nbytes / 1e6, "MB", BOUND_NBYTES / 1e6)
            result.details[name] = told.splitlines()
            if name == "audit":
                held = sum(" OK " in line for line in told.splitlines())
                result.add("audit: points that did not hold", 5 - held, "count", 0)
    result.headline.append(f"{args.members} members, {args.steps} steps")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
