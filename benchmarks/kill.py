"""Measures how long survivors of a killed or frozen member take to commit a step without it, and what that costs.

Three members train in real processes. The parent notes CLOCK_MONOTONIC, sends SIGKILL (or SIGSTOP) to one of them at a
random moment of its step, and waits until both survivors have reported a step whose contributors are the two of them;
members stamp their commits with the same clock. Ranks take turns as victims, so the commit root dies as often as the
others. Afterwards a fresh process joins in the dead one's place (a frozen member wakes and joins again by itself), and
all three send a SHA-256 of parameters and Adam state at one header, which must be equal and on the chain of headers
that the audit finds in the event logs.

The hand-on path (one survivor holds the result, the other does not) is rarely met by chance, so it is forced: a test
double in the victim's process kills it at the instant at which the step's header has reached one survivor only,
  header  with all reduced bytes sent to both,
  bytes   with no reduced byte of its own sent to the other one,
  split   with half of its reduced bytes sent to either one, so that neither has the whole result.
The slot must then be committed by both under the dead member's header, verbatim.

Peers in the same run, if they are at hand: torchft, as it comes and tuned; stock torchrun with checkpoints.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Options, Result, median, run
from benchmarks.peers import torchft, torchrun
from benchmarks.survival import Case, blow, report
from benchmarks.victims import WAYS, member
from benchmarks.workers import Worker, context, scheduler, scratch
from benchmarks.world import World

BOUND_KILL_S = {50: 0.150, 200: 0.300}
BOUND_FREEZE_S = 0.5


@contextlib.contextmanager
def our_world(state_mib: float, rng: random.Random, logs: str) -> Iterator[World]:
    """Yields three members of this product under a scheduler with its defaults."""
    ctx = context("benchmarks.victims", "chaos_lightning.replication.access")
    with (
        scheduler(2, log_dir=logs) as endpoint,
        World(lambda name: Worker(ctx, member, endpoint, name, state_mib, logs), rng) as world,
    ):
        world.open()
        yield world


def ours(result: Result, state_mib: float, counts: dict[str, int], seed: int, keep: str) -> dict[str, Case]:
    """Kills or freezes members in all ways at one state size, then audits the logs; returns the outcomes by kind of
    fault.
    """
    from chaos_lightning.events.events import EventLog, read_events
    from chaos_lightning.observe import evidence, history

    size = f"{state_mib:g} MiB"
    print(f" ours, {size}: {counts}, seed {seed}")
    cases = {kind: Case() for kind in counts}
    with scratch() as folder:
        logs = str((Path(keep) if keep else folder) / f"kill-{state_mib:g}")
        with (
            our_world(state_mib, random.Random(seed), logs) as world,
            EventLog.in_directory(logs, "kill", role="harness") as log,
        ):
            for kind, count in counts.items():
                for index in range(count):
                    if kind == "hand-on":
                        way = WAYS[index % len(WAYS)]
                        blow(world, cases[kind], 0, way, log, chosen=(index // len(WAYS)) % 2)
                    else:
                        blow(world, cases[kind], index % 3, kind, log)
            world.end()
            heads = {h for s in (*world.members.values(), *world.past) for h, _ in s.hashes.values()}
        result.audit(logs, f"audit of the event logs, violations, {size}", size)
        records = list(read_events(logs))
    chain = {h for part in history.runs(evidence.gather(records).commits) for h in part.chain}
    result.add(f"headers of compared states beside the chain in the logs, {size}", len(heads - chain), "count", 0)
    handed = {str(r.get("base")) for r in records if r.name == "hand_on" and r.by}
    result.details[f"slots handed on, {size}"] = sorted(handed, key=int)
    return cases


def report_ours(result: Result, state_mib: float, cases: dict[str, Case]) -> None:
    size = f"{state_mib:g} MiB"
    bounds = {"kill": BOUND_KILL_S.get(int(state_mib)), "freeze": BOUND_FREEZE_S, "hand-on": None}
    titles = {"kill": "SIGKILL", "freeze": "SIGSTOP", "hand-on": "SIGKILL while handing out"}
    for kind, case in cases.items():
        report(result, f"{titles[kind]}, {size}", case, bound_s=bounds[kind], strict=True)
        if kind == "hand-on" and case.seconds:
            missing = len(case.seconds) - case.handed
            result.add(f"results not handed on verbatim, of {len(case.seconds)}, {size}", missing, "count", 0)


def main() -> int:
    p = Options(__doc__)
    p.add_series("--states-mib", [50.0, 200.0], "of parameters and Adam")
    p.add_count("--runs", 20, 4, "kills per state size")
    p.add_seed("of the moments at which the blows fall")
    p.add_argument("--keep-logs", default="", help="folder that keeps our members' event logs")
    p.add_argument("--peers", nargs="*", default=["torchft", "torchrun"], choices=["torchft", "torchrun"])
    args = p.parse_args()
    result = Result("kill")
    medians: list[float] = []
    for state_mib in args.states_mib:
        share = args.runs if state_mib < 100 else max(3, args.runs // 2)
        freezes = min(3, share) if args.quick else share
        counts = {"kill": args.runs, "freeze": freezes, "hand-on": 3 if args.quick else 6}
        cases = ours(result, state_mib, counts, args.seed, args.keep_logs)
        report_ours(result, state_mib, cases)
        medians.append(median(cases["kill"].seconds))
        if "torchft" in args.peers:
            torchft.measure(result, state_mib, medians[-1], args)
    if "torchrun" in args.peers:
        torchrun.measure(result, args.states_mib[0], medians[0], args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
