"""Measures a real scheduler with 64 to 512 connections: heartbeats, a founding, deaths, its own death, and status
requests.

The scheduler is a process as users start it; two further ones hold stand-ins for members (crowd.py), each with a
connection of its own. Measured are: the founding, from the first hello until the last member stands in the view that
has all; heartbeats, as the share of a core that the scheduler takes while nothing happens, in which time nobody may be
put out and no stream may break; deaths, from the closing of a connection until the last member has the Decide of the
view that follows, where the links of the dead are closed at once; the scheduler's own death together with a member's,
until all are back at the next one, which is started at once, and have the Decide of the view without that member; and
status. The peer is an older version (`--before`, a folder with its sources): its scheduler and stand-ins in the same
places.

The largest job has the five minutes in which nobody may be put out, others have less. All
processes share this machine's cores, so times to the last of hundreds contain their turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Options, Result, median, run
from benchmarks.workers import Scheduler, at, scratch
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.errors import ChaosError
from chaos_lightning.security import keyfiles
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.security.roles import MEMBER, OPERATOR
from chaos_lightning.service.etcd_servers import EtcdServers, find_etcd

CROWDS = 2
SIZES = (64, 256, 512)
CORE = 0.25
DEATH_S = {64: 0.3, 256: 0.8, 512: 2.0}
FOUNDING_S = {256: 30.0}
RESTART_AT, RESTART_S = 512, 10.0
STATUS_S = 0.3
DEATHS = 3
PATIENCE_S = 120.0
LOOK_S = 0.05
QUIET_S = 3.0
"""Between a founding and what is measured next."""
OTHERS_MINUTES = 0.75
"""Most quiet minutes of a case that has not the most members."""
BESIDE = 32
"""Number of members that both versions are measured with, if there is a peer: it may found no larger job."""
PEER_MINUTES = 0.25
"""Quiet minutes of a case of the peer, in which nothing is held against it."""
CASE_MINUTES = 0.7
"""Minutes that a case takes besides the quiet ones."""
TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parents[2]


class TooLateError(Exception):
    """Error: an awaited event did not come in time."""


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used in all its threads."""
    text = Path(f"/proc/{pid}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def place(source: str, folder: Path) -> dict[str, Any]:
    """Returns the folder and environment in which stand-ins run: with this product, or with the one in `source`."""
    if not source:
        found = at(str(HERE))
    else:
        with contextlib.suppress(FileExistsError):
            (folder / "benchmarks").symlink_to(HERE / "benchmarks")
        found = {"cwd": str(folder), "env": {**os.environ, "PYTHONPATH": source}}
    found["env"]["GRPC_VERBOSITY"] = "NONE"  # it tells of connections that were closed
    return found


class Crowd:
    """A process with many stand-ins for members.

    Args:
        endpoint: Endpoint of the scheduler.
        first: Number of the first stand-in.
        count: Number of stand-ins.
        sockets: Names of this crowd's socket and of the other crowds'.
        keys_dir: Folder of keys; "" for none.
        where: Folder and environment of the process, as `place` returns them.
    """

    def __init__(
        self, endpoint: str, first: int, count: int, sockets: list[str], keys_dir: str, where: dict[str, Any]
    ) -> None:
        self.names = [f"n{n}" for n in range(first, first + count)]
        options = ["--keys-dir", keys_dir] if keys_dir else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.crowd", endpoint, str(first), str(count), *sockets, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **where,
        )

    def ask(self, order: str, value: Any = True) -> dict[str, Any]:
        """Sends an order to the process; returns its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({order: value}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        if not answer:
            raise RuntimeError(f"stand-ins ended (exit status {self.process.poll()})")
        return answer

    def close(self) -> None:
        self.process.kill()
        with self.process:  # closes its pipes
            self.process.wait(10)


class Told(NamedTuple):
    """One view that stand-ins entered, and how many of them have.

    Attributes:
        members: Number of members that it has.
        decided: A Decide told of it, no header.
        count: Number of stand-ins that entered it.
        last: When the last of them did (ns).
    """

    members: int
    decided: bool
    count: int
    last: int


@dataclass
class Seen:
    """Observations of the stand-ins in all processes."""

    talk: int = 0
    """Number of stand-ins that have a stream on which they were welcomed."""
    broken: int = 0
    fenced: list[str] = field(default_factory=list)
    views: dict[tuple[int, int], Told] = field(default_factory=dict)
    now: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of stand-ins in each view, by (term, number) of the view."""

    def add(self, facts: dict[str, Any]) -> None:
        self.talk += facts["talk"]
        self.broken += facts["broken"]
        self.fenced += facts["fenced"]
        for term, number, members, decided, count, last in facts["views"]:
            before = self.views.get((term, number), Told(members, decided, 0, 0))
            self.views[term, number] = Told(members, decided, before.count + count, max(before.last, last))
        for term, number in facts["now"]:
            self.now[term, number] = self.now.get((term, number), 0) + 1

    def told(self, count: int, since_ns: int) -> int:
        """Returns when (ns) the last of `count` members got the Decide of a view with just these, after `since_ns`; 0
        if not yet.
        """
        views = (v for v in self.views.values() if v.decided and v.members == count)
        return max((v.last for v in views if v.count >= count and v.last > since_ns), default=0)


@dataclass(frozen=True)
class Kind:
    """Settings of a measured job: its keys, and the version of the product."""

    title: str
    keys: bool = False
    """Mutual TLS, keys of links, and a store in etcd."""
    source: str = ""
    """Folder of another version; "" for this one."""

    @property
    def peer(self) -> bool:
        return bool(self.source)


class Job:
    """A scheduler and its stand-ins for members."""

    def __init__(self, scheduler: Scheduler, crowds: list[Crowd], size: int) -> None:
        self.scheduler, self.crowds, self.size = scheduler, crowds, size

    @property
    def floor(self) -> int:
        """Number of members with which the job begins and below which it waits; it allows for some deaths."""
        return max(1, self.size - max(DEATHS + 1, self.size // 8))

    def look(self) -> Seen:
        seen = Seen()
        for crowd in self.crowds:
            seen.add(crowd.ask("look"))
        return seen

    def until(self, ready: Callable[[Seen], int], what: str) -> int:
        """Waits until `ready` returns something other than 0 for the stand-ins' observations; returns that.

        Raises:
            TooLateError: Not within PATIENCE_S.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            if found := ready(self.look()):
                return found
            if time.monotonic() > end:
                raise TooLateError(f"over {PATIENCE_S:g} s: {what}")
            time.sleep(LOOK_S)

    def found(self) -> float:
        """Starts the job; returns the seconds until all members are in one view."""
        began = time.monotonic_ns()
        for crowd in self.crowds:
            crowd.ask("start")

        def all_in(seen: Seen) -> int:
            full = [view for view, count in seen.now.items() if count >= self.size and view in seen.views]
            return max((seen.views[view].last for view in full), default=0)

        return (self.until(all_in, f"a founding of {self.size}") - began) / 1e9

    def kill(self) -> int:
        """Kills one member and closes its links; returns when (ns)."""
        crowd = max(self.crowds, key=lambda c: len(c.names))
        answer = crowd.ask("kill", crowd.names.pop())
        for other in self.crowds:
            other.ask("dead", answer["id"])
        self.size -= 1
        return int(answer["ns"])

    def death(self) -> float:
        """Kills one member; returns the seconds until the last of the other members gets the Decide of the view without
        it.
        """
        since = self.kill()
        return (self.until(lambda seen: seen.told(self.size, since), f"a death among {self.size + 1}") - since) / 1e9

    def restart(self) -> float:
        """Kills the scheduler and one member; returns the seconds until the next scheduler has all others back and has
        told them of a view without it.
        """
        began = time.monotonic_ns()
        self.scheduler.kill()
        since = self.kill()
        self.scheduler.start(self.floor)

        def back(seen: Seen) -> int:
            return seen.told(self.size, since) if seen.talk >= self.size else 0

        return (self.until(back, f"{self.size} members at another scheduler") - began) / 1e9

    def quiet(self, seconds: float) -> tuple[float, int]:
        """Returns (share of a core that the scheduler uses, members removed plus streams broken) during an undisturbed
        time.
        """
        before, cpu, began = self.look(), cpu_s(self.scheduler.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_s(self.scheduler.pid) - cpu) / (time.monotonic() - began)
        after = self.look()
        return share, after.broken - before.broken + len(after.fenced) - len(before.fenced)


@contextlib.contextmanager
def job(kind: Kind, size: int, folder: Path) -> Iterator[Job]:
    """Yields a scheduler that listens, and stand-ins that have not connected yet."""
    with contextlib.ExitStack() as stack:
        store, keys_dir = str(folder / f"chain-{size}.sqlite"), ""
        if kind.keys:
            store = stack.enter_context(EtcdServers(folder / "etcd", 1).start()).address
            holders = [keyfiles.KeyHolder("machine", MEMBER, ("127.0.0.1", "localhost"))]
            keyfiles.init(folder / "keys", holders)
            keys_dir = str(folder / "keys" / keyfiles.NODES / "machine")
        scheduler = Scheduler(store, keys_dir=keys_dir, source=kind.source, max_nodes=size + 1)
        stack.callback(scheduler.stop)
        made = Job(scheduler, [], size)
        scheduler.start(made.floor)
        share, where = size // CROWDS, place(kind.source, folder)
        sockets = [f"chaos-crowd-{os.getpid()}-{scheduler.endpoint}-{index}" for index in range(CROWDS)]
        for index in range(CROWDS):
            count = share if index < CROWDS - 1 else size - share * (CROWDS - 1)
            named = [sockets[index], *sockets[:index], *sockets[index + 1 :]]
            crowd = Crowd(scheduler.endpoint, 1 + index * share, count, named, keys_dir, where)
            stack.callback(crowd.close)
            made.crowds.append(crowd)
        yield made


def status_s(job: Job, folder: Path, kind: Kind) -> float:
    """Returns the seconds until the scheduler has answered a status request."""
    operator = folder / "keys" / keyfiles.NODES / OPERATOR
    secret = Credentials.load(str(operator), environ={}) if kind.keys else b""
    began = time.monotonic()
    fetch_status(job.scheduler.endpoint, secret, timeout_s=PATIENCE_S)
    return time.monotonic() - began


class Case(NamedTuple):
    """One job to be measured: its kind, its size, and its undisturbed minutes.

    Attributes:
        kind: Keys and product version of the job.
        size: Number of members.
        minutes: Minutes in which nothing happens and no member may be put out.
    """

    kind: Kind
    size: int
    minutes: float

    @property
    def title(self) -> str:
        return f"{self.size} members, {self.kind.title}"


def measure_case(result: Result, case: Case, folder: Path) -> int:
    """Adds all measurements of one job; returns how many members were removed or disconnected in the
    undisturbed time.
    """
    kind, size, title = case.kind, case.size, case.title
    bound: Callable[[float | None], float | None] = (lambda _: None) if kind.peer else (lambda value: value)
    with job(kind, size, folder) as made:
        result.add(f"founding, {title}", made.found(), "s", bound(FOUNDING_S.get(size)))
        time.sleep(QUIET_S)
        share, hurt = made.quiet(60 * case.minutes)
        result.add(f"heartbeats, {title}", share, "cores", bound(CORE))
        result.add(f"put out or parted in {case.minutes:.2g} min, {title}", hurt, "count", bound(0))
        result.add(f"status, {title}", status_s(made, folder, kind), "s", bound(STATUS_S))
        deaths = [made.death() for _ in range(DEATHS)]
        result.add(f"death to the last Decide, {title}", median(deaths), "s", bound(DEATH_S.get(size)))
        result.add(f"death to the last Decide, slowest of {DEATHS}, {title}", max(deaths), "s")
        if not kind.keys:
            limit = RESTART_S if size == RESTART_AT else None
            result.add(f"scheduler killed: all back and told, {title}", made.restart(), "s", bound(limit))
        fenced = made.look().fenced
        result.add(f"living members put out in all, {title}", len(fenced), "count", bound(0))
        result.details[f"put out, {title}"] = fenced
    return hurt


def cases(args: argparse.Namespace) -> list[Case]:
    """Returns all jobs in order; the largest one gets all of `minutes`."""
    complete(args)
    sizes = [*([BESIDE] if args.before and BESIDE not in args.connections else []), *args.connections]
    own = [(Kind("plain"), size) for size in sizes]
    own += [(Kind("mutual TLS, keys and etcd", keys=True), size) for size in args.keyed]
    largest = max(range(len(own)), key=lambda i: own[i][1])
    others = min(args.minutes, OTHERS_MINUTES)
    found = [Case(kind, size, args.minutes if i == largest else others) for i, (kind, size) in enumerate(own)]
    if args.before:
        peer = Kind("plain, before", source=str(Path(args.before).resolve()))
        found += [Case(peer, size, PEER_MINUTES) for size in sizes]
    return found


def minutes(args: argparse.Namespace) -> float:
    """Returns the minutes that this part of the benchmark should take."""
    return sum(case.minutes + CASE_MINUTES for case in cases(args))


def measure(result: Result, args: argparse.Namespace) -> None:
    """Measures all jobs; larger ones of a compared version are not tried once one has failed."""
    quiet_min, hurt, failed = 0.0, 0, False
    for case in cases(args):
        try:
            if case.kind.keys:
                find_etcd()
            if case.kind.peer and failed:
                continue
            print(f" {case.title}", flush=True)
            with scratch() as folder:
                found = measure_case(result, case, folder)
        except (TooLateError, RuntimeError, ChaosError) as error:
            if case.kind.peer:
                failed = True
                result.remark(f"{case.title}: {error}; larger ones are not tried")
            else:
                result.leave_out(case.title, str(error))
            continue
        if not case.kind.peer:
            quiet_min, hurt = quiet_min + case.minutes, hurt + found
    result.add(f"put out or parted in {quiet_min:.2g} min, all sizes together", hurt, "count", 0)


def options(p: Options) -> None:
    """Adds the command-line options of this part of the benchmark."""
    words = "numbers of members; none: 64 256 512, or 64 with --quick"
    p.add_argument("--connections", type=int, nargs="*", default=[], help=words)
    p.add_argument("--keyed", type=int, nargs="*", default=[], help="the same with keys; none: 256, or 64 with --quick")
    words = "in which nobody may be put out, at the largest size; 0: 5, or 0.2 with --quick"
    p.add_argument("--minutes", type=float, default=0.0, help=words)
    p.add_argument("--before", default="", help="folder with the sources of another version, to compare with")


def complete(args: argparse.Namespace) -> None:
    """Sets the defaults of options that were not given."""
    args.connections = args.connections or ([64] if args.quick else list(SIZES))
    args.keyed = args.keyed or ([64] if args.quick else [256])
    args.minutes = args.minutes or (0.2 if args.quick else 5.0)


def main() -> int:
    p = Options(__doc__, raw=True)
    options(p)
    args = p.parse_args()
    result = Result("scale, processes")
    print(f"about {minutes(args):.0f} minutes", flush=True)
    measure(result, args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
