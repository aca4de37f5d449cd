"""Measures how soon a newcomer contributes, and how its join disturbs the members that train.

Two hosts train in real processes. A third one has built everything and waits; told to go, it joins by replay or by
pause, trains with the others, and leaves politely. All processes stamp their commits with CLOCK_MONOTONIC. Per run:
  to its first contribution   from the guest's call of `join` (it has no connection to anybody yet) to the commit of the
                              first step with its gradient in it;
  longest step beyond usual   the hosts' longest time from commit to commit, from that call to the second joint step,
                              minus the median of their steps with as many members (before it, or well after);
  first joint step            the same for the first step of three alone;
  hosts' CPU                  what both spent between these moments beyond their usual share per step: serving costs;
  control                     the longest step of the hosts while an unrelated process burns as many CPU seconds as the
                              guest spent until it contributed: on few cores that is what any third process costs.
Each join is followed by its control, so both meet the same machine; figures are medians over runs. After each join a
SHA-256 of parameters and Adam state of all three, at one header, must be equal.

torchft in the same run, tuned as in `benchmarks.kill`, with the same clock and definitions; its guest has built its
`Manager` too when it is told to go, and is killed afterwards, since there is no way to leave.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Options, Result, run
from benchmarks.join.members import burner, member
from benchmarks.join.visits import House, Visits, control, report, say, table, visit
from benchmarks.peers import torchft
from benchmarks.workers import Worker, context, scheduler

TORCHFT_PATIENCE_S = 30.0
HOPELESS = 3
"""After so many failures of torchft and no success there are no more tries."""


@contextlib.contextmanager
def our_house(state_mib: float, way: str, rng: random.Random, logs: str) -> Iterator[House]:
    """Yields two members of this product that train under a scheduler with its defaults; newcomers join by `way`."""
    ctx = context("benchmarks.join.members", "chaos_lightning.replication.replay")
    with (
        scheduler(2, log_dir=logs) as endpoint,
        House(lambda name, new: Worker(ctx, member, endpoint, name, state_mib, way if new else "", logs), rng) as house,
    ):
        house.admit_hosts(["w0", "w1"])
        yield house


def ours(state_mib: float, way: str, runs: int, rng: random.Random, keep: str = "") -> Visits:
    """Measures `runs` joins by one way; after each one, a process without a job burns as much CPU, as a control."""
    visits = Visits()
    logs = str(Path(keep) / f"join-{way}-{state_mib:g}") if keep else ""
    stranger = Worker(context(), burner)
    try:
        with our_house(state_mib, way, rng, logs) as house:
            assert stranger.receive()[0] == "ready"
            visit(house)  # warms up: the first snapshot and log allocate their memory
            for _ in range(runs):
                one = visit(house)
                one.control = control(house, stranger, one.cpu)
                visits.kept.append(one)
                say(way, one)
    finally:
        stranger.kill()
    return visits


def theirs(result: Result, title: str, state_mib: float, runs: int, rng: random.Random) -> Visits:
    """Measures torchft's joins, in a new job after each failure, until `HOPELESS` failures; notes it if torchft cannot
    run on this machine.

    A newcomer cannot leave, so it is killed, and the hosts' timeouts see to the rest before the next one is let in.
    """
    visits = Visits()
    if torchft.missing(result):
        return visits
    failed = tried = 0
    while tried < runs and (visits.kept or failed < HOPELESS):
        with torchft.Lighthouse(torchft.TUNED) as lighthouse:
            spawn = torchft.spawning(lighthouse, state_mib)
            with House(spawn, rng, TORCHFT_PATIENCE_S) as house:
                try:
                    house.admit_hosts(["w0", "w1"])
                    while tried < runs:
                        tried += 1
                        visits.kept.append(visit(house, leave=False))
                        say("torchft", visits.kept[-1])
                except (TimeoutError, RuntimeError) as error:
                    failed += 1
                    result.remark(f"{title}, join {tried}: {error}")
    result.add(f"{title}: joins that came to nothing within {TORCHFT_PATIENCE_S:g} s, of {tried}", failed, "count")
    return visits


def measure(args: argparse.Namespace) -> Result:
    result = Result("join")
    rows: dict[str, Visits] = {}
    for state_mib in args.states_mib:
        rng = random.Random(args.seed)
        for way in args.ways:
            title = f"{way}, {state_mib:g} MiB"
            print(f" {title}: {args.runs} joins, seed {args.seed}", flush=True)
            rows[title] = ours(state_mib, way, args.runs, rng, args.keep_logs)
            report(result, title, rows[title], state_mib, bounded=way == "replay")
        if args.torchft:
            title = f"torchft, {state_mib:g} MiB"
            rows[title] = theirs(result, title, state_mib, min(args.runs, 5) if args.quick else args.runs, rng)
            report(result, title, rows[title], state_mib, bounded=False)
    lines = table(rows)
    result.details["table"] = lines
    print("\n".join(lines), flush=True)
    return result


def main() -> int:
    p = Options(__doc__)
    p.add_series("--states-mib", [50.0, 200.0], "parameters and Adam state")
    p.add_count("--runs", 10, 3, "joins of each kind and state size")
    p.add_argument("--ways", nargs="*", default=["replay", "pause"], choices=["replay", "pause"])
    p.add_seed("of everything that is drawn")
    p.add_argument("--keep-logs", default="", help="folder that keeps our members' event logs")
    p.add_argument("--torchft", action=argparse.BooleanOptionalAction, default=True, help="the peer in the same run")
    args = p.parse_args()
    return measure(args).finish(args)


if __name__ == "__main__":
    run(main)
