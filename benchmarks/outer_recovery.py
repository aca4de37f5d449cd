"""Measures the recovery of outer sync's server from a killed or stopped process, and how clusters are disturbed
meanwhile.

Three clusters train by themselves (benchmarks/outer_clusters.py), the server is what `chaos-lightning ps up` and `ps
leader` start. The parent notes CLOCK_MONOTONIC, strikes at a drawn instant, and reads the event logs of all. All times
are seconds from the strike.

In *sqlite* there is one machine with a leader, two followers and a warm spare, the chain in a file. A follower gets
SIGKILL, or SIGSTOP: *noticed* is the first word of the supervisor or of the leader that it is gone, *served again* is
when a process in its place stands at the version that was the newest one at the strike. *Cold*, the spare is killed
with it, so torch is imported first. The leader is killed, and all processes of the server at once, which are then
started again by hand, at once; these are given without a bound. A cluster is killed while its push is under way: the
others lose nothing.

In *shared* three leaders stand by for each other on etcd, all on one machine, where a standby sees that the leading
process is gone. In *apart* each counts as on a machine of its own (CHAOS_HOST): SIGKILL is a process that dies on a
machine that lives, and refuses connections from then on; SIGSTOP stands for a machine that falls silent, and nothing
but the end of its lease tells, unless the supervisor beside it kills it first. *Another decides* with its first entry.
That has a bound after SIGKILL; after SIGSTOP, when clusters and followers only notice by silence, that it leads has.
When it leads, and its first round, are given, and how far two entries lie apart while nobody is struck: a leader has
nothing to decide before a push or a saved version comes.

Training must notice nothing of the server's death: the longest inner step of any cluster from the strike until two
rounds after the recovery is compared, run by run, with one in as long a time in which nobody is struck, while a process
of its own uses the processor for as long as the server did beyond its usual part. Inner steps contain what a cluster
does anyhow: it copies its parameters and adopts versions. Two cases have no such bound, since they have no control.
Where all of the server is started by hand, several processes import torch at the same time, and one process that uses
as much of the processor is no equal load. Where a cluster dies, a part of the load is gone with it, and comes back with
the one that starts in its place. Their longest steps are given.

What cannot run here counts as missed with --check: scenes on etcd without etcd, torchft's DiLoCo without torchft. Not
so with --quick, and what --scenes and --no-peers leave out does not count.

The peer, in the same run: torchft's DiLoCo (benchmarks/peers/torchft_diloco.py), three replicas, one of them killed at
a drawn instant, or while they exchange.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import Options, Result, median, run
from benchmarks.outer_clusters import FOLLOWERS, OuterScene, burn, outer_scene
from benchmarks.peers import torchft_diloco
from benchmarks.workers import Worker, context, scratch
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import Record
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.service.election import WATCHED_S
from chaos_lightning.service.etcd_servers import EtcdServers, find_etcd
from chaos_lightning.service.options import ETCD

INNER_STEPS = 32
PACE_S = 0.04
BOUND_NOTICED_S = 1.0
BOUND_SERVED_S = 2.0
BOUND_DECIDES_S = {"shared": 1.0, "apart": 3.0}
BOUND_BEYOND_S = 0.030
TAIL_ROUNDS = 2
QUIET_S = 5.0
WATCHES_S = WATCHED_S + 1.0
"""A standby that is started anew, or follows a new leader, has watched it by then."""
Times = dict[str, float]


@dataclass
class OuterCase:
    """Outcomes of all runs of one kind; durations in s from the fault."""

    times: dict[str, list[float]] = field(default_factory=dict)
    longest: list[float] = field(default_factory=list)
    """Longest inner step of any living cluster."""
    control: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between two entries while nobody is struck."""
    extra_cpu: list[float] = field(default_factory=list)
    """Processor time of the server beyond its usual part, which the control uses too."""
    versions: list[int] = field(default_factory=list)
    """Decided from the strike to the end of the run."""


Strike = Callable[[OuterScene, random.Random], Times]


def number(record: Record) -> int:
    """Returns the number of the version that a follower's event names."""
    return int(str(record["version"]).partition("-")[0].removeprefix("v") or 0)


def stands(scene: OuterScene, since: int, names: list[str], newest: int) -> float:
    """Waits until restarted followers have this version or a later one; returns the seconds up to then."""

    def at(name: str) -> float:
        events = ("version_loaded", "version_computed")
        return scene.first(since, lambda r: r.name in events and r.node == name and number(r) >= newest)

    return float(scene.until(lambda: all(at(n) for n in names) and max(at(n) for n in names), "followers at work"))


def follower_dies(how: int, *, cold: bool = False) -> Strike:
    """Returns a function that sends SIGKILL or SIGSTOP to one follower, and measures the recovery."""

    def strike(scene: OuterScene, rng: random.Random) -> Times:
        server = scene.server
        victim = f"follower-{rng.randrange(FOLLOWERS)}"
        pid, spare = scene.child(victim), scene.child("spare")
        newest = scene.decided()
        since = time.monotonic_ns()
        if cold:
            server.strike("spare_sigkill", server.first, spare)
        server.strike(f"follower_{signal.Signals(how).name.lower()}", server.first, pid, how)

        def gone(r: Record) -> bool:
            child = r.name == "server_child" and r["child"] == victim
            return not r.get("up", True) and (child or (r.name == "follower_stream" and r["of"] == victim))

        noticed = scene.wait_first(since, gone, f"the death of {victim}")
        return {"noticed": noticed, "served again": stands(scene, since, [victim], newest)}

    return strike


def led(scene: OuterScene, since: int, term: int) -> Times:
    """Returns the seconds from a leader's death until another one leads, writes its first entry, and decides its first
    round.
    """

    def of(name: str, kind: str = "") -> Callable[[Record], bool]:
        return lambda r: r.name == name and r["term"] > term and kind in ("", r.get("kind"))

    return {
        "another leads": scene.wait_first(since, of("outer_leader_started"), "another leader"),
        "another decides": scene.wait_first(since, of("entry"), "an entry of the next leader"),
        "its first round": scene.wait_first(since, of("entry", "Round"), "a round of the next leader"),
    }


def leader_dies(how: int) -> Strike:
    """Returns a function that sends SIGKILL or SIGSTOP to the leader, and measures the recovery; the leader then
    returns as a new process.
    """

    def strike(scene: OuterScene, rng: random.Random) -> Times:
        server = scene.server
        if len(server.places) > 1:
            time.sleep(WATCHES_S)
        facts = fetch_facts(server.endpoints, b"", 20.0)
        name, pid = next(n for n, place in server.places.items() if place == facts["endpoint"]), int(facts["pid"])
        term = scene.term()
        since = time.monotonic_ns()
        server.strike(f"leader_{signal.Signals(how).name.lower()}", name, pid, how)
        found = led(scene, since, term)
        if name in server.down:
            server.strike("leader_sigkill", name, pid)
            server.start(name)
        return found

    return strike


def all_die(scene: OuterScene, rng: random.Random) -> Times:
    """Kills all processes of the server by SIGKILL, and starts them again at once; returns the times of their
    recovery.
    """
    newest, term = scene.decided(), scene.term()
    since = time.monotonic_ns()
    scene.server.kill_all()
    scene.server.start_all()
    found = led(scene, since, term)
    names = [f"follower-{number}" for number in range(FOLLOWERS)]
    return {**found, "shards served again": stands(scene, since, names, newest)}


def cluster_dies(scene: OuterScene, rng: random.Random) -> Times:
    """Kills a cluster by SIGKILL as soon as its next push is frozen; returns the times of its removal and of the
    others' next round.
    """
    victim = sorted(scene.clusters)[rng.randrange(len(scene.clusters))]
    begun = time.monotonic_ns()

    def freezes(r: Record) -> bool:
        return r.name == "push_frozen" and r.node == victim

    scene.wait_first(begun, freezes, f"a push of {victim}")
    since = time.monotonic_ns()
    scene.kill_cluster(victim)

    def out(r: Record) -> bool:
        return r.name == "entry" and r["kind"] == "Removed" and r["body"]["incarnation"]["cluster"] == victim

    return {
        "removed": scene.wait_first(since, out, f"the removal of {victim}"),
        "next round of the others": scene.wait_first(
            since, lambda r: r.name == "entry" and r["kind"] == "Round", "a round of the others"
        ),
    }


CASES: dict[str, dict[str, Strike]] = {
    "sqlite": {
        "follower SIGKILL": follower_dies(signal.SIGKILL),
        "follower SIGSTOP": follower_dies(signal.SIGSTOP),
        "follower SIGKILL, cold": follower_dies(signal.SIGKILL, cold=True),
        "leader SIGKILL": leader_dies(signal.SIGKILL),
        "all at once SIGKILL": all_die,
        "cluster SIGKILL in mid-push": cluster_dies,
    },
    **{
        name: {"leader SIGKILL": leader_dies(signal.SIGKILL), "leader SIGSTOP": leader_dies(signal.SIGSTOP)}
        for name in ("shared", "apart")
    },
}
ALONE = ("cluster SIGKILL in mid-push", "all at once SIGKILL")
"""No control: see the module."""


def one_run(scene: OuterScene, case: OuterCase, title: str, strike: Strike, rng: random.Random, usual: float) -> None:
    """Injects one fault, waits for the recovery, and runs the control; `usual` is the processor time that the server
    uses per second.
    """
    scene.all_train()
    scene.rounds(1)
    time.sleep(rng.uniform(0.0, 1.0))
    scene.collect()
    before, began, version = scene.cpu(), time.monotonic_ns(), scene.decided()
    times = strike(scene, rng)
    scene.rounds(TAIL_ROUNDS)
    end = time.monotonic_ns()
    used = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in scene.cpu().items())
    scene.collect()
    for what, seconds in times.items():
        case.times.setdefault(what, []).append(seconds)
    case.longest.append(scene.longest(began, end))
    case.versions.append(scene.decided() - version)
    if title not in ALONE:
        took_s = (end - began) / 1e9
        extra = max(0.0, used - usual * took_s)
        case.extra_cpu.append(extra)
        control(scene, case, took_s, extra)


def control(scene: OuterScene, case: OuterCase, seconds: float, cpu_s: float) -> None:
    """Measures the longest inner step and the gaps between entries in a time without faults, while a process uses as
    much processor time.
    """
    scene.rounds(1)
    scene.collect()
    since = time.monotonic_ns()
    burner = Worker(scene.context, burn, cpu_s)
    try:
        scene.until(lambda: time.monotonic_ns() - since > seconds * 1e9, "the end of a quiet time")
    finally:
        burner.kill(0.0)
    end = time.monotonic_ns()
    scene.collect()
    case.control.append(scene.longest(since, end))
    entries = sorted(r.mono for r in scene.watch.records if r.name == "entry" and since < r.mono * 1e9 < end)
    case.gaps += [after - before for before, after in pairwise(entries)]


def usual_cpu(scene: OuterScene) -> float:
    """Returns the share of a processor that the server's processes use in a time without faults."""
    before, since = scene.cpu(), time.monotonic()
    scene.until(lambda: time.monotonic() - since > QUIET_S, "some seconds in peace")
    return sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in scene.cpu().items()) / (time.monotonic() - since)


def measure(result: Result, name: str, folder: Path, ctx: Any, args: Any) -> None:
    """Measures all cases of one setting, and checks its logs for lost versions and removed clusters."""
    rng = random.Random(args.seed)
    print(f" {name}: {', '.join(CASES[name])}", flush=True)
    with ExitStack() as stack:
        store = ""
        if name != "sqlite":
            store = stack.enter_context(EtcdServers(folder / "etcd", 3)).address
            assert store.startswith(ETCD)
        told = {"params_mib": args.params_mib, "pace_s": PACE_S, "inner_steps": INNER_STEPS, "heartbeat_s": 1.0}
        scene = stack.enter_context(outer_scene(name, folder, ctx, store=store, apart=name == "apart", **told))
        usual = usual_cpu(scene)
        for title, strike in CASES[name].items():
            case = OuterCase()
            for _ in range(args.runs):
                one_run(scene, case, title, strike, rng, usual)
            report(result, name, title, case)
        kept(result, scene)
    result.audit(folder / "events", f"{name}: audit of the event logs, violations", name)


def report(result: Result, scene_name: str, title: str, case: OuterCase) -> None:
    """Adds the figures of one kind of fault."""
    key, n = f"{scene_name}, {title}", len(case.longest)
    warm = "cold" not in title
    bounds = {"noticed": BOUND_NOTICED_S, "served again": BOUND_SERVED_S} if warm else {}
    if scene_name in BOUND_DECIDES_S:
        bounds["another decides" if "SIGKILL" in title else "another leads"] = BOUND_DECIDES_S[scene_name]
    for what, seconds in case.times.items():
        result.add(f"{key}: {what}, median of {n}", median(seconds), "s")
        result.add(f"{key}: {what}, slowest of {n}", max(seconds), "s", bounds.get(what))
    result.add(f"{key}: longest inner step, worst of {n}", max(case.longest), "s")
    if "leader" in title and case.gaps:
        result.add(f"{key}, control: from one entry to the next, mean of {len(case.gaps)}", mean(case.gaps), "s")
        result.add(f"{key}, control: from one entry to the next, longest", max(case.gaps), "s")
    if case.control:
        result.add(f"{key}, control: longest inner step, worst of {n}", max(case.control), "s")
        beyond = [struck - quiet for struck, quiet in zip(case.longest, case.control, strict=True)]
        for what, take in (("median", median), ("worst", max)):
            words = f"{key}: longest inner step beyond its control's, {what} of {n}"
            result.add(words, take(beyond), "s", BOUND_BEYOND_S)
    result.details[key] = vars(case)


def kept(result: Result, scene: OuterScene) -> None:
    """Adds the numbers of versions lost, of rollbacks and of living clusters removed; each must be 0."""
    facts = scene.facts()
    gone = [str(row.version) for row in facts.versions if not row.stands]
    result.add(f"{scene.name}: versions lost, of {len(facts.versions)}", len(gone), "count", 0)
    result.add(f"{scene.name}: rollbacks", len(facts.chain.rollbacks), "count", 0)
    removed = scene.removed()
    for words in removed:
        result.remark(f"{scene.name}: removed {words}")
    result.add(f"{scene.name}: living clusters removed", len(removed), "count", 0)
    lost = 0
    for row in facts.clusters:
        if row.name.partition("~")[0] not in scene.struck:
            lost += steps_lost(facts, row.name)
    result.add(f"{scene.name}: inner steps of living clusters thrown away", lost, "count", 0)


def steps_lost(facts: Any, incarnation: str) -> int:
    """Returns the number of inner steps in rejected pushes of one incarnation of a cluster."""
    answers = [s for push, s in facts.chain.standing.items() if str(push.incarnation) == incarnation]
    return sum(s.offer.steps for s in answers if s.answer == "rejected")


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_count("--runs", 20, 1, "of each case")
    p.add_count("--params-mib", 50, 12, "MiB of fp32 parameters")
    p.add_seed("of the moments at which the blows fall")
    p.add_argument("--scenes", nargs="*", default=[], choices=list(CASES), help="default: all; sqlite with --quick")
    p.add_argument("--no-peers", action="store_true", help="without torchft's DiLoCo")
    p.add_argument("--keep", default="", help="folder that keeps event logs and files")
    args = p.parse_args()
    result = Result("outer_recovery")
    ctx = context("benchmarks.outer_clusters", "chaos_lightning.diloco", "benchmarks.peers.torchft_diloco")
    scenes = args.scenes or (["sqlite"] if args.quick else list(CASES))
    with scratch() as scratched:
        for name in scenes:
            try:
                if name != "sqlite":
                    find_etcd()
            except ConfigurationError as error:
                result.leave_out(name, str(error))
                continue
            measure(result, name, Path(args.keep or scratched) / name, ctx, args)
    if not args.no_peers:
        torchft_diloco.measure(result, ctx, args)
    summary(result)
    return result.finish(args)


def summary(result: Result) -> None:
    """Adds the main figures to the summary line."""
    figures = {figure.name: figure.value for figure in result.figures}
    for name, value in figures.items():
        if (
            name.startswith("sqlite, follower SIG")
            and "cold" not in name
            and ("noticed, slowest" in name or "again, slowest" in name)
        ):
            result.headline.append(f"{name.removeprefix('sqlite, ').partition(' of ')[0]} {value:.2f} s")
        elif "another decides, slowest" in name and not name.startswith("sqlite"):
            result.headline.append(f"{name.partition(' of ')[0]} {value:.2f} s")
        elif "survivors throw away, mean" in name:
            result.headline.append(f"{name.partition(', mean')[0]}: {value:g}")


if __name__ == "__main__":
    run(main)
