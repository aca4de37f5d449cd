"""A thousand members: what they cost the scheduler and each other, and whether a job of many real ones stays right.

Three parts, each of which runs alone as well: the state machines (benchmarks.scale.machine), a real scheduler with
many connections (benchmarks.scale.processes), and real members (benchmarks.scale.real).
"""

from __future__ import annotations

from benchmarks.common import Options, Result, run
from benchmarks.scale import machine, processes, real

PARTS = {"machine": machine, "processes": processes, "real": real}


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), help="which parts to run")
    p.add_seed("of whatever is drawn")
    for part in PARTS.values():
        part.options(p)
    args = p.parse_args()
    result = Result("scale")
    for name in args.only:
        print(f"{name}:", flush=True)
        PARTS[name].measure(result, args)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
