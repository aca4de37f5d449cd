"""Ten minutes in which members of a real job come, go, die, freeze and lose their links, and what training made of it.

Processes train scikit-learn's digits with the plain `Trainer`; every few seconds one of them is hurt, as drawn by
`FaultPlan.random` from a seed: a join, a polite leave, SIGKILL at a random place of the loop or from outside, SIGSTOP
and waking. Who stays unhurt is drawn anew for each dozen of events, so the commit root dies, too. Meanwhile links
between them, which all pass through a relay, are cut, stalled, slowed down, removed and restored (soak_links.py);
now and then a member or two lose all links to the others, with or without the scheduler, for so long that they must be
put out. Where etcd is installed, three schedulers stand by for each other on three etcd servers, and the leading
scheduler, etcd's leader and its followers are killed or frozen, too, and come back (soak_schedulers.py). Steps are
slowed down by a pause (`--pace-s`) that stands for heavier computing: events need time, not load.

Judged are DESIGN.md's points 1 to 5, twice: by the audit of the event logs, and by soak_checks.py from journals that
the members wrote on their own (states at every step, samples as the data set handed them out). soak_link_checks.py
looks whether links that were mended came back into views. The peer is training that nobody disturbed, in the same run:
the same epochs without pause, with several world sizes and seeds. The final loss must lie within the 95 % prediction
interval for one more such run, and within the 99 % interval of what as many steps would have given (log loss over log
steps: more members make fewer and larger steps of the same epochs).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Result, parser, run
from benchmarks.soak_checks import Parting, Verdict, check, read
from benchmarks.soak_crew import FOUNDERS, MOST, Crew, Driver
from benchmarks.soak_link_checks import Line, LinkVerdict, check_links, read_lines
from benchmarks.soak_links import KINDS, PARTING, Hurt, Links
from benchmarks.soak_member import HELD_OUT, QUOTA, digits, make, training_length
from benchmarks.soak_schedulers import SETTLED_S, control, etcd_is_here
from benchmarks.victims import fingerprint
from benchmarks.workers import scheduler, scratch
from chaos_lightning.control.etcd_servers import ADVICE

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T_99 = {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250}
"""Two-sided quantiles of Student's t by degrees of freedom."""
HEARD_S = 1.0
"""A scheduler that has heard a member finds it gone within this time."""
ACTIONS = ("join", "leave", "sigkill", "sigstop")


# ------------------------------------------------------------------------------------------------ runs


@dataclass
class Run:
    """What one run left behind."""

    verdict: Verdict
    curve: list[tuple[float, float]]
    """(epochs, training loss), from checkpoints."""
    final: dict[str, float]
    """Loss on training and held-out samples, and accuracy on the latter."""
    differing: int = 0
    """Members whose final checkpoint is not the others'."""


def evaluate(path: Path) -> tuple[dict[str, float], str]:
    """(losses and accuracy of a checkpoint, SHA-256 of its state)."""
    import torch
    from torch.nn.functional import cross_entropy

    model, optimizer = make(0)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    images, labels = digits()
    with torch.no_grad():
        out = model(images)
    train, held = out[:-HELD_OUT], out[-HELD_OUT:]
    return {
        "training loss": float(cross_entropy(train, labels[:-HELD_OUT])),
        "held-out loss": float(cross_entropy(held, labels[-HELD_OUT:])),
        "held-out accuracy": float((held.argmax(1) == labels[-HELD_OUT:]).float().mean()),
    }, fingerprint(model, optimizer)


def parting(hurt: Hurt, struck: Sequence[tuple[int, str, str]]) -> Parting:
    """What this fault declares, if these schedulers were struck (ns, kind, who)."""
    stop = hurt.stop or time.monotonic_ns()
    taking_over = (hurt.start - int(SETTLED_S * 1e9), hurt.start + int(HEARD_S * 1e9))
    replaced = any(kind.startswith("scheduler") and taking_over[0] < ns < taking_over[1] for ns, kind, _ in struck)
    cut_short = hurt.stop - hurt.start < hurt.seconds * 0.95e9
    return Parting(hurt.kind, hurt.part, hurt.start, stop, cut_short, hurt.kind == "island" and replaced)


def gather(crew: Crew, length: int, hurts: Sequence[Hurt] = (), struck: Sequence[tuple[int, str, str]] = ()) -> Run:
    """Judges a run and evaluates its checkpoints."""
    partings = [parting(h, struck) for h in hurts if h.kind in PARTING]
    verdict = check(read(crew.folder / "journals"), length, crew.freezes, crew.killed, partings)
    curve: dict[float, float] = {}
    finals: dict[str, dict[str, float]] = {}
    for path in sorted((crew.folder / "checkpoints").glob("*.pt")):
        label, head, _ = path.stem.split("-", 2)
        if head not in verdict.used:
            continue  # its writer's last word, which the job did not keep
        epochs = round(verdict.used[head] / length, 4)
        if label == "step" and epochs in curve:
            continue
        losses, sha = evaluate(path)
        if sha != verdict.headers[head]["sha"]:
            verdict.problems[1].append(f"checkpoint {path.name} is not the state that was hashed at its header")
        curve[epochs] = losses["training loss"]
        if label == "final":
            finals[sha] = losses
    final = next(iter(finals.values()), {})
    return Run(verdict, sorted(curve.items()), final, max(0, len(finals) - 1))


def undisturbed(folder: Path, seed: int, world: int, epochs: int, length: int) -> Run:
    """The same training with nobody hurt."""
    with scheduler(world) as endpoint:
        crew = Crew(endpoint, folder, seed, epochs, 0.0)
        try:
            for index in range(world):
                crew.start(f"u{index}")
            end = time.monotonic() + 60 + 30 * epochs
            while crew.alive:
                crew.turn()
                if time.monotonic() > end or crew.undeclared:
                    raise RuntimeError(f"undisturbed training of {world} stuck at step {crew.step}: {crew.undeclared}")
        finally:
            crew.close()
    return gather(crew, length)


class Standstill:
    """Whether nothing has happened for too long: no step, or after the job's end no end of a process."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: tuple[bool, int] | None = None
        self._since = 0.0

    def lasts(self, now: float, over: bool, count: int) -> bool:
        """`count` is the number of the last step; once the job is over, that of processes that run."""
        if (over, count) != self._seen:
            self._seen, self._since = (over, count), now
        return now - self._since > self._patience_s


def disturbed(folder: Path, args: argparse.Namespace, epochs: int) -> tuple[Crew, Driver, float]:
    """The soak itself; returns the crew, the driver and how long it took, s."""
    from chaos_lightning.events.events import EventLog
    from chaos_lightning.lab.edge.relay import LinkRelay

    logs = str(folder / "events")
    with (
        EventLog.in_directory(logs, "soak", role="harness") as log,
        LinkRelay() if args.links_every_s else nullcontext() as relay,
        control(args, folder, log, doors=relay is not None) as schedulers,
    ):
        relayed = relay.address if relay else ""
        crew = Crew(schedulers.endpoint, folder, args.seed, epochs, args.pace_s, relayed, control=schedulers)
        links = Links(relay, log, schedulers.endpoint, crew.doors, args.seed, args.links_every_s)
        try:
            for index in range(FOUNDERS):
                crew.start(f"n{index}")
            patience = time.monotonic() + 60
            while len(crew.able()) < FOUNDERS and time.monotonic() < patience:
                crew.turn()
            began, told = time.monotonic(), time.monotonic()
            driver = Driver(crew, log, links, args.seed, args.every_s)
            watch = Standstill(args.stuck_s)
            while crew.alive:
                crew.turn()
                now = time.monotonic()
                if crew.over:
                    links.calm()
                    schedulers.calm()
                    for process in crew.alive.values():
                        if process.thaw_ns:
                            crew.wake(process)
                else:
                    driver.turn()
                    schedulers.turn(calm=links.calm_now([p.name for p in crew.alive.values()]))
                if watch.lasts(now, crew.over, len(crew.alive) if crew.over else crew.step):
                    names = ", ".join(f"{p.name} ({p.pid})" for p in crew.alive.values())
                    crew.undeclared.append(f"no progress for {args.stuck_s:g} s at step {crew.step}; alive: {names}")
                    break
                if now - told > 30:
                    told = now
                    print(f"    {now - began:.0f} s: step {crew.step}, {len(crew.alive)} processes", flush=True)
            return crew, driver, time.monotonic() - began
        finally:
            crew.close()


def beyond(values: list[float], value: float) -> float:
    """Distance from the mean in half widths of the 95 % prediction interval for one more draw; 1 is its border."""
    half = T_95[min(9, len(values) - 1)] * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    return abs(value - statistics.fmean(values)) / half


def beyond_line(points: list[tuple[float, float]], x: float, y: float) -> float:
    """Distance from the line through the points, in half widths of its 99 % prediction interval at x; 1 is the border.

    Args:
        points: At least three, with different x.
        x: Where to look.
        y: What is there.
    """
    xs, ys = [a for a, _ in points], [b for _, b in points]
    slope, intercept = statistics.linear_regression(xs, ys)
    freedom = len(points) - 2
    residual = math.sqrt(sum((b - slope * a - intercept) ** 2 for a, b in points) / freedom)
    middle = statistics.fmean(xs)
    width = math.sqrt(1 + 1 / len(xs) + (x - middle) ** 2 / sum((a - middle) ** 2 for a in xs))
    return abs(y - slope * x - intercept) / (T_99[min(9, freedom)] * residual * width)


# ------------------------------------------------------------------------------------------------ figures


def draw(path: str, run: Run, others: dict[str, Run], driver: Driver) -> None:
    """Members over time with what struck them, when links were hurt, and the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    headers = [run.verdict.headers[h] for h in run.verdict.chain if run.verdict.headers[h]["kind"] == "step"]
    zero = headers[0]["ns"]
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(10, 11), layout="constrained", height_ratios=(3, 2, 3)
    )
    seconds = [(h["ns"] - zero) / 1e9 for h in headers]
    top.step(seconds, [len(h["who"]) for h in headers], where="post", color="0.2", linewidth=1)
    marks = {
        "join": ("^", "tab:green"),
        "leave": ("v", "tab:blue"),
        "sigkill": ("x", "tab:red"),
        "sigstop": ("s", "tab:orange"),
    }
    for action, (mark, color) in marks.items():
        at = [(ns - zero) / 1e9 for ns, a, _ in driver.done if a == action]
        top.plot(at, [0.4] * len(at), mark, color=color, label=f"{action} ({len(at)})", markersize=5)
    struck = [(ns - zero) / 1e9 for ns, _, _ in driver.schedulers.done]
    top.plot(struck, [0.15] * len(struck), "|", color="0.5", label=f"scheduler or etcd server ({len(struck)})")
    top.set(ylabel="members that committed the step", ylim=(0, MOST + 0.5))
    top.legend(ncols=4, loc="upper center")
    for row, kind in enumerate(KINDS):
        hurts = [h for h in driver.links.hurts if h.kind == kind]
        ends = [h.stop or headers[-1]["ns"] for h in hurts]
        spans = [((h.start - zero) / 1e9, max(0.5, (end - h.start) / 1e9)) for h, end in zip(hurts, ends, strict=True)]
        middle.broken_barh(spans, (row - 0.4, 0.8), color=f"C{row}", alpha=0.7)
    counts = driver.links.counts()
    middle.set(xlabel="seconds", ylabel="links", xlim=top.get_xlim())
    middle.set_yticks(range(len(KINDS)), [f"{kind} ({counts[kind]})" for kind in KINDS])
    middle.invert_yaxis()
    for label, other in others.items():
        bottom.plot(*zip(*other.curve, strict=True), linewidth=1, alpha=0.7, label=label)
    bottom.plot(*zip(*run.curve, strict=True), color="black", linewidth=1.5, label="with all these events")
    bottom.set(xlabel="epochs", ylabel="training loss", yscale="log")
    bottom.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def report_links(result: Result, crew: Crew, links: Links, lines: Sequence[Line]) -> LinkVerdict:
    """Adds what became of links."""
    found = check_links(lines, links.hurts, crew.freezes)
    result.add("links: mended", sum(len(h.pairs) for h in links.hurts if h.stop), "count")
    for what, count in found.counts.items():
        result.add(f"links: {what}", count, "count")
    result.add("links: from the mending to the return, median", found.median_delay_s, "s")
    result.add("links: violations", len(found.problems), "count", 0)
    for line in found.problems[:5]:
        print(f"    {line}")
    return found


def report(result: Result, crew: Crew, driver: Driver, run: Run, seconds: float, length: int) -> None:
    """Adds the figures of the disturbed run."""
    from chaos_lightning.observe.audit import NOT_SHOWN, audit, verdict, violations

    schedulers = driver.schedulers
    counts = Counter(action for _, action, _ in driver.done) + driver.links.counts() + schedulers.counts()
    kinds = (*ACTIONS, *(KINDS if crew.relay else ()), *schedulers.kinds)
    result.add("length", seconds / 60, "min")
    result.add("events carried out", counts.total(), "count")
    for kind in kinds:
        result.add(f"events: {kind}", counts[kind], "count")
    result.add("kinds of events that did not occur", sum(not counts[k] for k in kinds), "count", 0)
    result.add("processes that ended or stood still undeclared", len(crew.undeclared), "count", 0)
    seen = run.verdict
    for what, count in seen.looked_at.items():
        result.add(f"journals: {what}", count, "count", 0 if what == "steps lost" else None)
    for point, problems in seen.problems.items():
        result.add(f"journals: violations of contract point {point}", len(problems), "count", 0)
        for line in problems[:3]:
            print(f"    {line}")
    lengths = {("", epoch): length for epoch in range(crew.epochs)}
    findings = audit(crew.folder / "events", lengths=lengths)
    result.add("audit of the event logs: violations", len(violations(findings)), "count", 0)
    for line in violations(findings)[:5]:
        print(f"    {line}")
    result.add("audit of the event logs: points not shown", sum(f.verdict == NOT_SHOWN for f in findings), "count", 0)
    result.add("members whose final checkpoint differs", run.differing, "count", 0)
    lines = read_lines(crew.folder / "events")
    result.add("newcomers that caught up by replay", sum(x["name"] == "caught_up" for x in lines), "count")
    links = report_links(result, crew, driver.links, lines) if crew.relay else LinkVerdict()
    steps = [seen.headers[h]["ns"] for h in seen.chain if seen.headers[h]["kind"] == "step"]
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(steps)]
    gaps = gaps or [math.inf]
    result.add("time between steps, median", statistics.median(gaps), "s")
    result.add("time between steps, longest", max(gaps), "s")
    result.details |= {
        "audit": verdict(findings).splitlines(),
        "problems": seen.problems,
        "undeclared": crew.undeclared,
        "plan": driver.plans,
        "link problems": links.problems,
        "link events": [
            [h.kind, sorted(sorted(p) for p in h.pairs), h.start, h.stop, dict(h.detail)] for h in driver.links.hurts
        ],
        "scheduler events": schedulers.done,
        "refused": driver.links.refused,
        "skipped": dict(driver.skipped),
        "curve": run.curve,
        "final": run.final,
    }


def main() -> int:
    p = parser(__doc__ or "")
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
    p.add_argument("--plan", default="", help="how gradients travel, for the scheduler; empty: as by default")
    p.add_argument("--pace-s", type=float, default=0.1, help="pause in each step")
    p.add_argument("--stuck-s", type=float, default=60.0, help="give up after so long without a step")
    p.add_argument("--plot", default="", help="draw members over time and loss curves into this file")
    p.add_argument("--keep", default="", help="folder that keeps event logs, journals and checkpoints")
    args = p.parse_args()
    minutes = args.minutes or (0.6 if args.quick else 10.0)
    args.every_s = args.every_s or (2.0 if args.quick else 3.0)
    args.links_every_s = args.every_s if args.links_every_s < 0 else args.links_every_s
    args.schedulers_every_s = 2 * args.every_s if args.schedulers_every_s < 0 else args.schedulers_every_s
    if args.etcd and not etcd_is_here():
        p.error(f"the program etcd is not installed: {ADVICE}")
    length = training_length()
    # As measured: members on average, each with QUOTA samples a step, and the share of time in which steps go on; the
    # rest is waiting for links. Beyond its pause a step takes some 17 ms.
    members, share = (4.5, 0.7) if args.links_every_s else (4.4, 1.0)
    epochs = max(2, round(minutes * 60 * share / (args.pace_s + 0.017) * members * QUOTA / length))
    result = Result("soak")
    with scratch() as scratched:
        root = Path(args.keep) if args.keep else scratched
        rates = (
            f"{args.every_s:g} s, of links every {args.links_every_s:g} s"
            if args.links_every_s
            else f"{args.every_s:g} s"
        )
        print(f" {epochs} epochs of {length} samples, events every {rates}, seed {args.seed}", flush=True)
        crew, driver, seconds = disturbed(root / "soak", args, epochs)
        main_run = gather(crew, length, driver.links.hurts, driver.schedulers.done)
        report(result, crew, driver, main_run, seconds, length)
        others: dict[str, Run] = {}
        cases = [(2, 1), (3, 2), (5, 3)] if args.quick else [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (5, 2)]
        for world, offset in cases:
            label = f"undisturbed, {world} members, seed {args.seed + offset}"
            print(f" {label}", flush=True)
            others[label] = undisturbed(root / label.replace(" ", "-"), args.seed + offset, world, epochs, length)
    bad = sum(len(x) for r in others.values() for x in r.verdict.problems.values())
    result.add("journals of undisturbed runs: violations", bad, "count", 0)
    for what in ("training loss", "held-out loss"):
        values = [r.final[what] for r in others.values()]
        mine = main_run.final.get(what, math.inf)
        result.add(f"{what}, undisturbed, mean of {len(values)}", statistics.fmean(values), "nats")
        result.add(f"{what}, disturbed", mine, "nats")
        result.add(f"{what}: off the mean, in half widths of the 95 % interval", beyond(values, mine), "ratio", 1)
        if len(others) > 4 and main_run.final:
            # More members make fewer, larger steps of the same epochs: compare at the same number of steps.
            points = [(math.log(r.verdict.looked_at["steps"]), math.log(r.final[what])) for r in others.values()]
            off = beyond_line(points, math.log(main_run.verdict.looked_at["steps"]), math.log(mine))
            result.add(f"{what}: off what as many steps give, in half widths of the 99 % interval", off, "ratio", 1)
    result.add("held-out accuracy, disturbed", main_run.final.get("held-out accuracy", 0.0), "share")
    result.details["undisturbed"] = {k: {"final": r.final, "curve": r.curve} for k, r in others.items()}
    if args.plot:
        draw(args.plot, main_run, others, driver)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
