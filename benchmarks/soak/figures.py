"""Compares, prints and draws the results of a soak."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.common import Result
from benchmarks.soak.checks import Line
from benchmarks.soak.crew import MOST, Crew, Driver
from benchmarks.soak.link_checks import LinkVerdict, check_links, read_lines
from benchmarks.soak.links import KINDS, Links
from benchmarks.soak.runs import Run

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T_99 = {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250}
"""Two-sided quantiles of Student's t by degrees of freedom."""
ACTIONS = {
    "join": ("^", "tab:green"),
    "leave": ("v", "tab:blue"),
    "sigkill": ("x", "tab:red"),
    "sigstop": ("s", "tab:orange"),
}
"""Faults of processes, and how they are drawn."""


def beyond(values: list[float], value: float) -> float:
    """Returns a value's distance from the mean, in half widths of the 95 % prediction interval for one more value (1:
    at its border).
    """
    half = T_95[min(9, len(values) - 1)] * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    return abs(value - statistics.fmean(values)) / half


def beyond_line(points: list[tuple[float, float]], x: float, y: float) -> float:
    """Returns a point's distance from the line through points, in half widths of its 99 % prediction interval (1: at
    its border).

    Args:
        points: Points (x, y) that define the line, at least three, with different x.
        x: x-coordinate of the judged point.
        y: y-coordinate of the judged point.
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
    """Draws the members over time with the faults that hit them, the faults of links, and the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    headers = [run.verdict.headers[h] for h in run.verdict.chain if run.verdict.headers[h]["kind"] == "step"]
    zero = headers[0]["ns"]
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(10, 11), layout="constrained", height_ratios=(3, 2, 3)
    )
    seconds = [(h["ns"] - zero) / 1e9 for h in headers]
    top.step(seconds, [len(h["who"] or ()) for h in headers], where="post", color="0.2", linewidth=1)
    for action, (mark, color) in ACTIONS.items():
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
    """Adds how many links returned after a fault."""
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
    """Adds the figures of the soak with faults."""
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


def compare(result: Result, run: Run, others: dict[str, Run]) -> None:
    """Adds how the final losses of the soak with faults compare with those of runs without faults."""
    bad = sum(len(x) for r in others.values() for x in r.verdict.problems.values())
    result.add("journals of undisturbed runs: violations", bad, "count", 0)
    for what in ("training loss", "held-out loss"):
        values = [r.final[what] for r in others.values()]
        mine = run.final.get(what, math.inf)
        result.add(f"{what}, undisturbed, mean of {len(values)}", statistics.fmean(values), "nats")
        result.add(f"{what}, disturbed", mine, "nats")
        result.add(f"{what}: off the mean, in half widths of the 95 % interval", beyond(values, mine), "ratio", 1)
        if len(others) > 4 and run.final:
            # More members make fewer, larger steps of the same epochs: compare at the same number of steps.
            points = [(math.log(r.verdict.looked_at["steps"]), math.log(r.final[what])) for r in others.values()]
            off = beyond_line(points, math.log(run.verdict.looked_at["steps"]), math.log(mine))
            result.add(f"{what}: off what as many steps give, in half widths of the 99 % interval", off, "ratio", 1)
    result.add("held-out accuracy, disturbed", run.final.get("held-out accuracy", 0.0), "share")
    result.details["undisturbed"] = {k: {"final": r.final, "curve": r.curve} for k, r in others.items()}
