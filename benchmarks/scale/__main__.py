"""Measures a thousand members: their costs for the scheduler and each other, and the correctness of a job of many real
ones.

Three parts, each of which runs alone as well: the state machines (benchmarks.scale.machine), a real scheduler with
many connections (benchmarks.scale.processes), and real members (benchmarks.scale.real). How long each should take is
told first, and how long it took at its end; all together have half an hour.
"""

from __future__ import annotations

import time

from benchmarks.common import Options, Result, run
from benchmarks.scale import machine, processes, real

PARTS = {"machine": machine, "processes": processes, "real": real}
MOST_MIN = 30.0


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), help="which parts to run")
    p.add_seed("of whatever is drawn")
    for part in PARTS.values():
        part.options(p)
    args = p.parse_args()
    planned = {name: PARTS[name].minutes(args) for name in args.only}
    words = ", ".join(f"{name} {minutes:.0f}" for name, minutes in planned.items())
    print(f"planned, in minutes: {words}; {sum(planned.values()):.0f} in all (at most {MOST_MIN:g})", flush=True)
    result, began = Result("scale"), time.monotonic()
    for name in args.only:
        print(f"{name}:", flush=True)
        since = time.monotonic()
        PARTS[name].measure(result, args)
        result.add(f"minutes of {name}, of {planned[name]:.0f} planned", (time.monotonic() - since) / 60, "min")
    result.add("minutes of all parts", (time.monotonic() - began) / 60, "min", MOST_MIN)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
