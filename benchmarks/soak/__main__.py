"""Runs a soak test: for ten minutes members of a real job join, leave, die, freeze and lose links; compares the
training.

Processes train scikit-learn's digits with the plain `Trainer`; every few seconds one of them is hurt, as drawn by
`FaultPlan.random` from a seed: a join, a polite leave, SIGKILL at a random place of the loop or from outside, SIGSTOP
and waking. Who stays unhurt is drawn anew for each dozen of events, so the commit root dies, too. Meanwhile links
between them, which all pass through a relay, are cut, stalled, slowed down, removed and restored (links.py);
now and then a member or two lose all links to the others, with or without the scheduler, for so long that they must be
put out. Where etcd is installed, three schedulers stand by for each other on three etcd servers, and the leading
scheduler, etcd's leader and its followers are killed or frozen, too, and come back (schedulers.py). Steps are
slowed down by a pause (`--pace-s`) that stands for heavier computing: events need time, not load.

Judged are points 1 to 5 of docs/architecture.md, twice: by the audit of the event logs, and by checks.py from journals
that the members wrote on their own (states at every step, samples as the data set handed them out). link_checks.py
looks whether links that were mended came back into views. The peer is training that nobody disturbed, in the same run:
the same epochs without pause, with several world sizes and seeds. The final loss must lie within the 95 % prediction
interval for one more such run, and within the 99 % interval of what as many steps would have given (log loss over log
steps: more members make fewer and larger steps of the same epochs).

With --pipelines members train in stages; pipelines.py says how they are hurt and judged. With --fixed a step has the
same samples whoever is there (fixed.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import Options, Result, run
from benchmarks.soak.crew import Crew
from benchmarks.soak.figures import compare, draw, report
from benchmarks.soak.member import QUOTA, training_length
from benchmarks.soak.runs import disturbed, gather, undisturbed
from benchmarks.soak.schedulers import etcd_is_here
from benchmarks.workers import scratch
from chaos_lightning.service.etcd_servers import ADVICE


def options() -> argparse.Namespace:
    p = Options(__doc__)
    p.add_argument("--minutes", type=float, default=0.0, help="of events; 0: 10, or 0.6 with --quick")
    # By seed 2 the first few events are of all kinds, as a short run needs it.
    p.add_argument("--seed", type=int, default=2, help="of model, data order and events")
    p.add_argument(
        "--every-s",
        type=float,
        default=0.0,
        help="mean time between events that strike processes; 0: 3, or 2 with --quick",
    )
    p.add_argument("--links-every-s", type=float, default=-1.0, help="the same for links; -1: as --every-s, 0: none")
    p.add_argument(
        "--etcd",
        action=argparse.BooleanOptionalAction,
        default=etcd_is_here(),
        help="schedulers stand by for each other on etcd servers, and both are killed; by default if etcd is installed",
    )
    p.add_argument(
        "--schedulers-every-s", type=float, default=-1.0, help="the same for these; -1: twice as rarely, 0: none"
    )
    p.add_argument("--pipelines", action="store_true", help="members train in stages; see benchmarks/soak/pipelines.py")
    p.add_argument("--fixed", action="store_true", help="a batch of fixed size; see benchmarks/soak/fixed.py")
    p.add_argument("--plan", default="", help="how gradients travel, for the scheduler; empty: as by default")
    p.add_argument("--pace-s", type=float, default=0.1, help="pause in each step")
    p.add_argument("--stuck-s", type=float, default=60.0, help="give up after so long without a step")
    p.add_argument("--plot", default="", help="draw members over time and loss curves into this file")
    p.add_argument("--keep", default="", help="folder that keeps event logs, journals and checkpoints")
    args = p.parse_args()
    args.minutes = args.minutes or (0.6 if args.quick else 10.0)
    args.every_s = args.every_s or (2.0 if args.quick else 3.0)
    args.links_every_s = args.every_s if args.links_every_s < 0 else args.links_every_s
    args.schedulers_every_s = 2 * args.every_s if args.schedulers_every_s < 0 else args.schedulers_every_s
    if args.pipelines and args.fixed:
        p.error("--pipelines and --fixed exclude each other; give one")
    if args.etcd and not etcd_is_here():
        p.error(f"the program etcd is not installed: {ADVICE}")
    return args


def epochs_of(args: argparse.Namespace, length: int) -> int:
    """Returns how many epochs fill the given time."""
    # As measured: members on average, each with QUOTA samples a step, and the share of time in which steps go on; the
    # rest is waiting for links. Beyond its pause a step takes some 17 ms.
    members, share = (4.5, 0.7) if args.links_every_s else (4.4, 1.0)
    return max(2, round(args.minutes * 60 * share / (args.pace_s + 0.017) * members * QUOTA / length))


def main() -> int:
    args = options()
    if args.pipelines or args.fixed:
        from benchmarks.soak import fixed, pipelines

        return (pipelines if args.pipelines else fixed).soak(args)
    length = training_length()
    epochs = epochs_of(args, length)
    result = Result("soak")
    with scratch() as scratched:
        root = Path(args.keep) if args.keep else scratched
        links = f", of links every {args.links_every_s:g} s" if args.links_every_s else ""
        print(f" {epochs} epochs of {length} samples, events every {args.every_s:g} s{links}, seed {args.seed}")
        crew, driver, seconds = disturbed(root / "soak", args, epochs, Crew)
        main_run = gather(crew, length, driver.links.hurts, driver.schedulers.done)
        report(result, crew, driver, main_run, seconds, length)
        others = {}
        cases = [(2, 1), (3, 2), (5, 3)] if args.quick else [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (5, 2)]
        for world, offset in cases:
            label = f"undisturbed, {world} members, seed {args.seed + offset}"
            print(f" {label}", flush=True)
            others[label] = undisturbed(root / label.replace(" ", "-"), args.seed + offset, world, epochs, length)
    compare(result, main_run, others)
    if args.plot:
        draw(args.plot, main_run, others, driver)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
