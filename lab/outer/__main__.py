"""Runs simulated outer jobs from seeds: `python -m lab.outer` (docs/outer.md)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from lab.outer.batch import outcomes
from lab.outer.bugs import BUGS
from lab.outer.plans import FAMILIES
from lab.outer.processes import Machines
from lab.outer.world import World

_COUNTED = ("rounds", "accepted", "rejected", "voids", "durable", "rollbacks", "terms")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.outer",
        description="Runs the real machines of leader, followers and clusters in simulated outer jobs with faults, and "
        "checks that each push and sample counts at most once and that no version is lost. Exit status 1 if something "
        "was found (with --bug: if it was not found).",
    )
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many runs (default 200)")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument("--family", default="all", choices=list(FAMILIES), help="draw from these plans alone")
    parser.add_argument(
        "--bug", default="", choices=["", *BUGS], metavar="NAME", help="plant this bug; see --list-bugs"
    )
    parser.add_argument("--list-bugs", action="store_true", help="name the planted bugs and end")
    parser.add_argument("--tell", type=int, metavar="SEED", help="tell the run with this seed line by line")
    return parser.parse_args(argv)


def _tell(seed: int, family: str, bug: str) -> int:
    world = World(FAMILIES[family](seed), BUGS[bug].machines if bug else Machines())
    world.on_entry = lambda entry: world.say(f"entry {entry.position} of term {entry.term}: {entry.body}")
    outcome = world.run()
    print("\n".join(outcome.log))
    print(outcome.violation or "all is well")
    return int(bool(outcome.violation))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see `--help`."""
    options = _options(argv)
    if options.list_bugs:
        for name, bug in BUGS.items():
            print(f"{name:16} docs/outer.md {bug.rule:4} {bug.what}")
        return 0
    family = BUGS[options.bug].family if options.bug else options.family
    if options.tell is not None:
        return _tell(options.tell, family, options.bug)
    started, totals, found, done = time.monotonic(), dict.fromkeys(_COUNTED, 0), 0, 0
    for chunk in outcomes(options.start, options.seeds, family, options.bug, options.jobs):
        for outcome in chunk:
            done += 1
            found += bool(outcome.violation)
            for name in totals:
                totals[name] += getattr(outcome, name)
            if outcome.violation:
                print(f"seed {outcome.seed}: {outcome.violation}")
        print(f"{done}/{options.seeds} seeds", file=sys.stderr)
        if found and options.bug:
            break
    counts = ", ".join(f"{value} {name}" for name, value in totals.items())
    print(f"{done} seeds, {found} violations, {counts}, {time.monotonic() - started:.1f} s")
    return int(bool(found) != bool(options.bug))


if __name__ == "__main__":
    sys.exit(main())
