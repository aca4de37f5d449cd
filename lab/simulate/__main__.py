"""Runs `python -m lab.simulate`: many seeds, one planted bug, or one scenario."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.testing.faults import FaultPlan
from lab.outer.__main__ import main as simulate_outer
from lab.simulate.batch import behaviour, outcomes
from lab.simulate.bugs import BUGS
from lab.simulate.fault_plans import PlannedWorld, job
from lab.simulate.narrate import narrate
from lab.simulate.plan import Outcome, Plan
from lab.simulate.plans.families import FAMILIES
from lab.simulate.script import parse
from lab.simulate.world import Hooks

_COUNTED = {
    "commits": "commits",
    "hand_ons": "hand-ons",
    "joins": "joins",
    "ejections": "ejections",
    "views": "views",
    "crashes": "scheduler crashes",
    "terms": "terms",
    "store_errors": "store errors",
    "cut_streams": "cut control streams",
    "adoptions": "versions adopted",
    "passed": "passed over by replay",
    "events": "events",
}
"""Totals of all runs in the last line: fields of Outcome, and words for them."""


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.simulate",
        description="Runs the real member and scheduler machines in simulated jobs with faults, and checks that no "
        "committed step, no sample and no living member is ever lost. Exit status 1 if something was found (with "
        "--bug: if it was not found).",
    )
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many runs (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument(
        "--bug", default="", choices=["", *BUGS], metavar="NAME", help="plant this bug; see --list-bugs"
    )
    parser.add_argument(
        "--family",
        default="any",
        choices=list(FAMILIES),
        help="draw from these plans alone; failing: schedulers and their stores fail; lost: the chain is lost and "
        "rebuilt; sparse: few links, much goes wrong; outer: the members are ranks of a cluster of outer sync; "
        "pipelines: each member runs some layers; batch: the batch has a fixed size, and members' shares of it change "
        "(default any; a bug has its own)",
    )
    parser.add_argument("--list-bugs", action="store_true", help="name the planted bugs and end")
    parser.add_argument("--tell", type=int, metavar="SEED", help="tell the run with this seed line by line")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="tell the run that this file spells out")
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="tell a run with the seed --start under this fault plan, as it is given to FaultPlan.load",
    )
    parser.add_argument(
        "--outer", action="store_true", help="simulate outer jobs instead, with options of their own: --outer --help"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    return parser.parse_args(argv)


def _tell(plan: Plan, hooks: Callable[[], Hooks]) -> int:
    lines, outcome = narrate(plan, hooks)
    print("\n".join(lines))
    return 1 if outcome.violation else 0


def _planned(faults: FaultPlan, seed: int) -> int:
    plan = job(faults, seed)
    world = PlannedWorld(plan, faults)
    lines, outcome = narrate(plan, given=world)
    print("\n".join(lines))
    for words in world.undone:
        print(f"did not happen: {words}")
    return 1 if outcome.violation or world.undone else 0


def _progress(done: int, count: int, started: float, told: float) -> float:
    now = time.monotonic()
    if now - told < 2.0 and done < count:
        return told
    rate = done / max(now - started, 1e-9)
    print(f"{done}/{count} seeds, {rate:.0f} a second", file=sys.stderr)
    return now


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see `--help`."""
    given = [*(sys.argv[1:] if argv is None else argv)]
    if "--outer" in given:
        given.remove("--outer")
        return simulate_outer(given)
    options = _options(given)
    if options.list_bugs:
        for name, bug in BUGS.items():
            print(f"{name:16} {'outer.md' if bug.rule.startswith('O') else 'protocol.md'} {bug.rule:4} {bug.what}")
        return 0
    plan, hooks = behaviour(options.bug, options.family)
    if options.scenario is not None:
        try:
            return _tell(parse(options.scenario.read_text()), hooks)
        except (OSError, ConfigurationError) as error:
            print(f"{options.scenario}: {error}", file=sys.stderr)
            return 2
    if options.plan is not None:
        try:
            return _planned(FaultPlan.load(options.plan), options.start)
        except (OSError, ConfigurationError) as error:
            print(f"{options.plan}: {error}", file=sys.stderr)
            return 2
    if options.tell is not None:
        return _tell(plan(options.tell), hooks)
    return _many(options)


def _many(options: argparse.Namespace) -> int:
    started = told = time.monotonic()
    found: list[Outcome] = []
    totals = dict.fromkeys(_COUNTED, 0)
    done = failing = 0
    for chunk in outcomes(options.start, options.seeds, options.bug, options.jobs, options.family):
        for outcome in chunk:
            done += 1
            failing += bool(outcome.crashes or outcome.store_errors or outcome.terms > 1)
            for name in totals:
                totals[name] += getattr(outcome, name)
            if outcome.violation:
                found.append(outcome)
                print(f"seed {outcome.seed}: {outcome.violation}")
        told = _progress(done, options.seeds, started, told)
        if found and not options.keep_going:
            break
    counts = ", ".join(f"{value} {words}" for value, words in zip(totals.values(), _COUNTED.values(), strict=True))
    seconds = time.monotonic() - started
    print(
        f"{done} seeds ({failing} in which a scheduler or its store failed), {len(found)} violations, {counts}, "
        f"{seconds:.1f} s" + (f"; bug {options.bug}" * bool(options.bug))
    )
    return int(bool(found) != bool(options.bug))


if __name__ == "__main__":
    sys.exit(main())
