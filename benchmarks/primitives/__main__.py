"""Measures by how much scale-in, connect-link and disconnect-link delay training. (The paper: less than 1 ms.)

Members train in real processes, over real sockets, under a real scheduler, and stamp every commit with CLOCK_MONOTONIC.
At a random moment of a step
  connect-link     an operator asks for a link between two random members that have none;
  disconnect-link  an operator asks that a random link goes;
  scale-in         one member, each in its turn, asks to leave, and leaves on the ordinary way. (Afterwards it comes in
                   again by a pause, which is shown and not counted.)

What is charged. The step under way at the request and all that follow, until the change is over: past the step whose
header carries the new view there are always two more (the first over new trees, and the next one, in which links are
given up), and always one more than that in which the last trace of the change was seen (a link that has not closed,
sockets of the one who left). A new link must stand for a second before a view uses it; what lies in between is not
charged, as nothing happens then. From the duration of each of these steps the usual one is taken off: the median of
the 15 undisturbed steps just before for steps up to the header (they ran in the old view), of the 15 just after for the
others (they ran in the new one, with other trees or fewer members, and may be faster or slower for good). The exposed
delay is the sum of what is left: how much later training is than if the new view had ruled without any change.
Steps that are shorter count against longer ones only in so far as training made up for them.
  "longest step"   is the largest single difference instead, against which nothing counts.
  "against ..."    takes off one median throughout: that before, that after, or the slower of both.
Always the worst value over the members.

Control. Each event has one: the same computation, on as many steps in a row, at a random place of the undisturbed
stretch before or after it (in turn), as if something had happened there. Bounded is the median of the
differences event - control; its 95 % interval is given, and with it what this machine can tell at all. In the same way
the CPU seconds are given that the members spent beyond the usual ones, which a busy machine changes less.

The machine. All members share its processors with scheduler and operator, which in a real job have their own. If
members computed all the time, every microsecond of work anywhere would make somebody's step longer. So in each step a
member's thread sleeps for --device-ms, like one that waits for an accelerator, and computes for the rest; how busy the
processors were is one of the figures. What happens during that sleep does not show, as it would not with an
accelerator: that is the paper's claim. With --full-processors there is no sleep, so all work shows; no bounds then.
"""

from __future__ import annotations

import argparse
import random

from benchmarks.common import Options, Result, run
from benchmarks.primitives.events import Outcome, leaves, links, report
from benchmarks.primitives.member import Work

KINDS = ("connect-link", "disconnect-link", "scale-in")


def case(size: int, work: Work, events: dict[str, int], seed: int) -> dict[str, Outcome]:
    """Returns the outcomes of all events of the requested kinds; connect-link and disconnect-link take turns, as many
    of each.
    """
    found: dict[str, Outcome] = {}
    rng = random.Random(seed)
    changes = max(events.get("connect-link", 0), events.get("disconnect-link", 0))
    if changes:
        found |= {k: o for k, o in links(size, work, changes, rng).items() if events.get(k)}
    if events.get("scale-in"):
        found |= leaves(size, work, events["scale-in"], rng)
    return found


def measure(args: argparse.Namespace) -> Result:
    result = Result("primitives")
    cases = [("", args.device_ms, args.events, True)]
    if args.full_processors or not args.quick:
        cases.append(("no sleep, ", 0.0, max(6, args.events // 5), False))
    for words, device_ms, events, bounded in cases:
        work = Work(grad_mib=args.grad_mib, device_s=device_ms / 1e3, by_reference=args.by_reference)
        print(
            f" {words}{args.members} members, {args.grad_mib:g} MiB of gradients, {device_ms:g} ms of sleep in a step, "
            f"{events} events of each kind, seed {args.seed}",
            flush=True,
        )
        for kind, outcome in case(args.members, work, dict.fromkeys(args.kinds, events), args.seed).items():
            report(result, f"{words}{kind}", outcome, bounded=bounded)
    return result


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: all")
    p.add_count("--events", 40, 12, "of each kind")
    p.add_argument("--members", type=int, default=4, help="processes that train, at least 3; default 4")
    p.add_argument("--grad-mib", type=float, default=0.5, help="size of the gradients, MiB; default 0.5")
    p.add_argument("--device-ms", type=float, default=20.0, help="sleep in each step, ms; default 20")
    p.add_argument(
        "--full-processors", action="store_true", help="with --quick: also without sleep, as the full form always does"
    )
    p.add_argument(
        "--by-reference", action="store_true", help="members read each other's memory in place of using sockets"
    )
    p.add_seed("of moments, links and controls' places; default 1")
    args = p.parse_args()
    if args.members < 3 or args.events < 0:
        p.error(
            f"--members {args.members} --events {args.events}: expected at least 3 members, and no fewer than 0 events"
        )
    return measure(args).finish(args)


if __name__ == "__main__":
    run(main)
