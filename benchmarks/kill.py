"""A member dies or freezes: how long until every survivor has committed a step without it, and what that cost.

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

from benchmarks.common import Result, median, parser, run
from benchmarks.survival import Case, World, blow, report
from benchmarks.victims import WAYS, member
from benchmarks.workers import Worker, context, scheduler, scratch

BOUND_KILL_S = {50: 0.150, 200: 0.300}
BOUND_FREEZE_S = 0.5


@contextlib.contextmanager
def our_world(state_mib: float, rng: random.Random, logs: str) -> Iterator[World]:
    """Three members of ours under a scheduler with its defaults."""
    ctx = context("benchmarks.victims", "torch._dynamo", "chaos_lightning.replication.access")
    with scheduler(2, log_dir=logs) as endpoint:
        world = World(lambda name: Worker(ctx, member, endpoint, name, state_mib, logs), rng)
        try:
            for _ in range(3):
                world.start()
            yield world
        finally:
            world.close()


def ours(result: Result, state_mib: float, counts: dict[str, int], seed: int, keep: str) -> dict[str, Case]:
    """All blows at one state size, then the audit of the whole run."""
    from chaos_lightning.events.events import EventLog, read_events
    from chaos_lightning.observe import evidence, history
    from chaos_lightning.observe.audit import audit, verdict, violations

    rng = random.Random(seed)
    cases = {kind: Case() for kind in counts}
    with scratch() as folder:
        logs = str((Path(keep) if keep else folder) / f"kill-{state_mib:g}")
        with our_world(state_mib, rng, logs) as world, EventLog.in_directory(logs, "kill", role="harness") as log:
            for kind, count in counts.items():
                for index in range(count):
                    if kind == "hand-on":
                        way = WAYS[index % len(WAYS)]
                        blow(world, cases[kind], 0, way, log, chosen=(index // len(WAYS)) % 2)
                    else:
                        blow(world, cases[kind], index % 3, kind, log)
            world.end()
            heads = {h for s in (*world.members.values(), *world.past) for h, _ in s.hashes.values()}
        findings = audit(logs)
        records = list(read_events(logs))
    result.details[f"audit, {state_mib:g} MiB"] = verdict(findings).splitlines()
    problems = violations(findings)
    for line in problems[:10]:
        print(f"    audit: {line}")
    size = f"{state_mib:g} MiB"
    result.add(f"audit of the event logs, violations, {size}", len(problems), "count", 0)
    chain = {h for part in history.runs(evidence.gather(records).commits) for h in part.chain}
    result.add(f"headers of compared states beside the chain in the logs, {size}", len(heads - chain), "count", 0)
    handed = {str(r.get("base")) for r in records if r.name == "hand_on" and r.by}
    result.details[f"slots handed on, {size}"] = sorted(handed, key=int)
    return cases


def measure_ours(
    result: Result, state_mib: float, counts: dict[str, int], seed: int, keep: str = ""
) -> dict[str, Case]:
    size = f"{state_mib:g} MiB"
    print(f" ours, {size}: {counts}, seed {seed}")
    cases = ours(result, state_mib, counts, seed, keep)
    bounds = {"kill": BOUND_KILL_S.get(int(state_mib)), "freeze": BOUND_FREEZE_S, "hand-on": None}
    titles = {"kill": "SIGKILL", "freeze": "SIGSTOP", "hand-on": "SIGKILL while handing out"}
    for kind, case in cases.items():
        report(result, f"{titles[kind]}, {size}", case, bound_s=bounds[kind], strict=True)
        if kind == "hand-on" and case.seconds:
            missing = len(case.seconds) - case.handed
            result.add(f"results not handed on verbatim, of {len(case.seconds)}, {size}", missing, "count", 0)
    return cases


def main() -> int:
    p = parser(__doc__ or "")
    p.add_argument("--states-mib", type=float, nargs="*", default=[50, 200])
    p.add_argument("--runs", type=int, default=0, help="kills per state size; 0: 20, or 4 with --quick")
    p.add_argument("--seed", type=int, default=1, help="of the moments at which the blows fall")
    p.add_argument("--keep-logs", default="", help="folder that keeps our members' event logs")
    p.add_argument("--peers", nargs="*", default=["torchft", "torchrun"], choices=["torchft", "torchrun"])
    args = p.parse_args()
    runs = args.runs or (4 if args.quick else 20)
    result = Result("kill")
    medians: dict[str, float] = {}
    for state_mib in args.states_mib[:1] if args.quick else args.states_mib:
        share = runs if state_mib < 100 else max(3, runs // 2)
        counts = {"kill": runs, "freeze": min(3, share) if args.quick else share, "hand-on": 3 if args.quick else 6}
        cases = measure_ours(result, state_mib, counts, args.seed, args.keep_logs)
        medians[f"{state_mib:g} MiB"] = median(cases["kill"].seconds)
        if "torchft" in args.peers:
            from benchmarks import peers_torchft

            peers_torchft.measure(result, state_mib, medians[f"{state_mib:g} MiB"], args)
    if "torchrun" in args.peers:
        from benchmarks import peers_torchrun

        peers_torchrun.measure(result, args.states_mib[0], next(iter(medians.values())), args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
