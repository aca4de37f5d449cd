"""Simulates the paper's nine hours: which policy trains most samples under losses, by the duration of a transition.

32 devices of which each is lost at 10% per hour, nine hours, the same losses for every policy (paired seeds). The job
is as large as the paper's: 32 equal layers, b = 2 f, of which a pipeline needs at least four devices; the best plan
for 32 is DP 8 x PP 4. Each transition that moves layers takes 1, 8.2 (the paper's), 60, 300, 600, or 1,200 s; rerouting
takes none. For each there are the samples of all seeds by policy, and those of `adaptive` over each, with intervals of
95% by resampling the seeds. The same with losses in groups of up to six and repairs. Then fatal losses with and
without the risk term, also where each layer has few owners.

Bounds: over all seeds `adaptive` is nowhere more than 1% below the better of `dynamic` and `reroute`, nor below
`oobleck` and `algorithm1`. The paper has 1.229 over Oobleck and 1.355 over ReCycle; here is said at which transition
these come out, or that they do not.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.common import Options, Result, percentile, run
from chaos_lightning.cli.fleet_plot import check_kind
from chaos_lightning.observe.charts import DONORS, figure, legend, style
from chaos_lightning.planning.fleet.generator import Chance, generate
from chaos_lightning.planning.fleet.simulator import FleetRun, Outcome, Rules
from chaos_lightning.planning.fleet.traces import Trace
from chaos_lightning.planning.pipelines.formation import EqualFleet, Pauses
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.policies import POLICIES

DEVICES, HOURS, RATE = 32, 9.0, 0.1
TRANSITIONS_S = (8.2, 1.0, 60.0, 300.0, 600.0, 1200.0)
PAPER = {"oobleck": 1.229, "reroute": 1.355}
OWN = {"dynamic": {8.2: 1.0, 300: 1.03, 600: 1.13, 1200: 2.01}, "reroute": {8.2: 1.78, 300: 1.5, 600: 1.28, 1200: 1.05}}
"""An earlier simulation, whose rerouting used no bubbles."""
WITHIN = 1.01
RESAMPLED = 1000
GIB = 1 << 30


def job(room: float) -> TrainingJob:
    """Returns a job of 32 equal layers of 1 GiB, of which `room` fit on a device besides its activations."""
    layer = Layer(name="", forward_s=0.022, backward_s=0.044, parameter_nbytes=GIB, activation_nbytes=GIB // 16)
    return TrainingJob(
        layers=tuple(replace(layer, name=f"block{i}") for i in range(32)),
        devices=tuple(Device(name=f"d{i}", memory_nbytes=int(room * GIB)) for i in range(DEVICES)),
        micro_batches=64,
        memory=PLAIN_MEMORY,
    )


Runs = Mapping[str, Sequence[Outcome]]


def runs(fleet: EqualFleet, traces: Sequence[Trace], names: Sequence[str], *, with_risk: bool = True) -> Runs:
    """Returns by policy the outcome of each history of losses."""
    rules = Rules(with_risk=with_risk)
    return {
        name: [FleetRun(fleet, trace, name, seed=i, rules=rules).run() for i, trace in enumerate(traces)]
        for name in names
    }


def ratio(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> tuple[float, float, float]:
    """Returns the ratio of our samples to theirs over all seeds, and its 95% interval."""
    a, b = [o.samples for o in ours], [o.samples for o in theirs]
    chance = random.Random(0)
    drawn = []
    for _ in range(RESAMPLED):
        rows = chance.choices(range(len(a)), k=len(a))
        drawn.append(sum(a[i] for i in rows) / max(1e-9, sum(b[i] for i in rows)))
    return sum(a) / max(1e-9, sum(b)), percentile(drawn, 2.5), percentile(drawn, 97.5)


def crossing(curve: Sequence[tuple[float, float]], value: float) -> float | None:
    """Returns the first duration of a transition at which a curve reaches a value, interpolated on a log scale; None if
    it never does.
    """
    for (s, x), (t, y) in pairwise(curve):
        if min(x, y) <= value <= max(x, y) and x != y:
            return math.exp(math.log(s) + (value - x) / (y - x) * (math.log(t) - math.log(s)))
    return None


Curves = dict[str, list[tuple[float, float, float, float]]]
"""Curves by policy: seconds of a transition, ratio of `adaptive` to the policy, and the ends of its interval."""


def sweep(result: Result, title: str, traces: Sequence[Trace], transitions: Sequence[float]) -> Curves:
    """Compares the policy `adaptive` with all other policies, for each duration of a transition."""
    curves: Curves = {}
    for move_s in transitions:
        found = runs(EqualFleet(job(12.0), Pauses(move_s=move_s)), traces, list(POLICIES))
        ours = found["adaptive"]
        samples = {name: sum(o.samples for o in rows) for name, rows in found.items()}
        told = []
        for name, theirs in found.items():
            mean, low, high = ratio(ours, theirs)
            curves.setdefault(name, []).append((move_s, mean, low, high))
            result.details[f"{title}, {move_s:g} s, adaptive over {name}"] = [mean, low, high]
            result.details[f"{title}, {move_s:g} s, {name}"] = summary(theirs)
            if name != "adaptive":
                told.append(f"{name} {mean:.3f} ({low:.3f} to {high:.3f})")
        result.remark(f"{title}, transition of {move_s:g} s: adaptive over {', '.join(told)}")
        best = max(samples[name] for name in ("dynamic", "reroute"))
        result.add(
            f"{title}, {move_s:g} s: the better of both over adaptive", best / samples["adaptive"], "ratio", WITHIN
        )
        prepared = max(samples[name] for name in ("oobleck", "algorithm1"))
        result.add(f"{title}, {move_s:g} s: templates over adaptive", prepared / samples["adaptive"], "ratio", 1.0)
    for name, rows in curves.items():
        curves[name] = sorted(rows)
    result.details[f"{title}, curves"] = curves
    for name, value in PAPER.items():
        at = crossing([row[:2] for row in curves[name]], value)
        most = max(row[1] for row in curves[name])
        where = f"comes out at a transition of {at:.0f} s" if at else f"does not come out; the most is {most:.3f}"
        result.remark(f"{title}: adaptive over {name} of {value} (the paper's) {where}")
    return curves


def draw(path: Path, sweeps: Mapping[str, Curves]) -> None:
    """Draws the ratios of samples over the duration of a transition, with their intervals: a picture for each sweep."""
    sheet = figure(7 * len(sweeps), 5)
    for axes, (title, curves) in zip(sheet.subplots(1, len(sweeps)), sweeps.items(), strict=True):
        style(axes, f"Samples of adaptive over those of others: {title}\n", grid="both")
        axes.set_xscale("log")
        axes.set_xlabel("seconds of a transition")
        others = [name for name in curves if name != "adaptive"]
        for i, (colour, name) in enumerate(zip(DONORS, others, strict=False)):
            at, mean, low, high = zip(*curves[name], strict=True)
            # Marks become smaller, so that curves that are equal are seen.
            axes.plot(at, mean, marker="o", markersize=11 - 1.5 * i, color=colour, label=name)
            axes.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
        legend(axes, len(others))
    sheet.savefig(path, dpi=144)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns the rate of samples, the numbers of losses, and the share of time by cause, over all seeds."""
    length = sum(o.hours for o in outcomes)
    causes = {c: sum(o.seconds[c] for o in outcomes) / 3600 / length for c in outcomes[0].seconds}
    return {
        "samples_per_s": sum(o.samples for o in outcomes) / length / 3600,
        "losses": sum(o.losses for o in outcomes),
        "fatal": sum(o.fatal for o in outcomes),
        **causes,
    }


def risks(result: Result, title: str, room: float, traces: Sequence[Trace], move_s: float) -> None:
    """Compares the policy `adaptive` with and without its term for the risk that the next loss is fatal."""
    fleet = EqualFleet(job(room), Pauses(move_s=move_s))
    shown = {}
    for words, with_risk in (("with", True), ("without", False)):
        rows = runs(fleet, traces, ["adaptive"], with_risk=with_risk)["adaptive"]
        shown[words] = rows
        about = summary(rows)
        result.add(f"{title}: fatal losses {words} the risk term", about["fatal"], f"of {about['losses']} losses")
    mean, low, high = ratio(shown["with"], shown["without"])
    result.remark(f"{title}: samples with over without the risk term {mean:.4f} ({low:.4f} to {high:.4f})")


def main() -> int:
    options = Options(__doc__)
    options.add_count("--seeds", 60, 6, "histories, the same for all policies")
    options.add_series("--transitions", TRANSITIONS_S, "seconds of a transition")
    options.add_argument("--plot", type=Path, help="draw the ratios into this file")
    args = options.parse_args()
    if args.plot:
        check_kind(args.plot)
    result = Result("policies")
    began = time.perf_counter()
    alone = [generate(Chance(devices=DEVICES, hours=HOURS, rate=RATE), seed) for seed in range(args.seeds)]
    grouped = Chance(devices=DEVICES, hours=HOURS, rate=RATE, group=6, repair_hours=1.0)
    together = [generate(grouped, seed) for seed in range(args.seeds)]
    transitions = list(args.transitions)
    sweeps = {"single losses": sweep(result, "single losses", alone, transitions)}
    for name, rows in OWN.items():
        result.remark(f"an earlier simulation had, for adaptive over {name}: {rows}")
    sweeps["groups and repairs"] = sweep(result, "groups and repairs", together, transitions)
    if args.plot:
        draw(args.plot, sweeps)
    for title, room, traces in (
        ("single losses", 12.0, alone),
        ("groups and repairs", 12.0, together),
        ("few owners, single losses", 6.0, alone),
        ("few owners, groups and repairs", 6.0, together),
    ):
        risks(result, title, room, traces, 60.0)
    result.add("all of it", time.perf_counter() - began, "s", 900.0)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
