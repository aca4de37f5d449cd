"""Compares plans for fleets of two or three kinds of cards with the best plans of a long random search.

Twelve fleets train decoders of 1 to 13 billion parameters. The search is simulated annealing (Kirkpatrick et al., 1983)
over plans: it moves borders between stages, micro-batches between pipelines and devices between places, splits
pipelines and joins them, and prices each plan by the product's simulation. It knows nothing of how the planner
searches. Half of its time begins at random plans, half at the planner's. Two fleets have plans that were made by hand.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import Pool
from random import Random

from benchmarks.common import Options, Result
from chaos_lightning.planning.pipelines.decoder import Decoder
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner

GIB = 1 << 30
PLAN_S = 5.0
WITHIN = 1.05
"""Bound on a plan's step, as a multiple of the best known one."""

Row = tuple[tuple[str, ...], tuple[int, ...], int]
"""Devices, borders of layers, micro-batches."""
Rows = tuple[Row, ...]


def main() -> int:
    options = Options(__doc__)
    options.add_count("--seconds", 120, 5, "of the search, each fleet")
    options.add_count("--fleets", 12, 4, "of the twelve")
    options.add_seed("of the search")
    args = options.parse_args()
    result = Result("mixed_fleets")
    made = fleets()[: args.fleets]
    planned = []
    for _, job in made:
        begun = time.perf_counter()
        try:
            plan = Planner(job).exact().plan
        except NoPlanError:
            plan = None
        planned.append((plan, time.perf_counter() - begun))
    work = [
        (job, plan, args.seconds, args.seed + i)
        for i, ((_, job), (plan, _)) in enumerate(zip(made, planned, strict=True))
    ]
    with Pool(2) as pool:
        found_s = pool.starmap(searched, work)
    for (name, job), (plan, took_s), search_s in zip(made, planned, found_s, strict=True):
        best_s = min([search_s, *([by_hand_s(job)] if name in BY_HAND else [])])
        step_s = math.inf if plan is None else estimate(job, plan).step_s
        print(f"{name}: planned {step_s:.2f} s a step in {took_s:.2f} s; search {search_s:.2f} s; best {best_s:.2f} s")
        result.add(f"{name}: plan / the best that is known", step_s / best_s, "ratio", WITHIN)
        result.add(f"{name}: planned in", took_s, "s", PLAN_S)
    return result.finish(args)


# ------------------------------------------------------------------------------------------------ fleets

MODELS = {
    "1b": Decoder(
        layers=24,
        width=2048,
        heads=16,
        feed_forward=5632,
        gated=True,
        vocabulary=32000,
        sequence=2048,
        flops=312e12,
        efficiency=0.45,
        bandwidth=2.0e12,
    ),
    "7b": Decoder(
        layers=32,
        width=4096,
        heads=32,
        feed_forward=11008,
        gated=True,
        vocabulary=32000,
        sequence=4096,
        flops=312e12,
        efficiency=0.45,
        bandwidth=2.0e12,
    ),
    "13b": Decoder(
        layers=40,
        width=5120,
        heads=40,
        feed_forward=13824,
        gated=True,
        vocabulary=32000,
        sequence=4096,
        flops=312e12,
        efficiency=0.45,
        bandwidth=2.0e12,
    ),
}
A100, A40, L4, H100 = (80, 1.0), (48, 0.4), (24, 0.25), (80, 2.2)
"""GiB, and speed beside an A100."""


def cards(name: str, kind: tuple[int, float], count: int, per_host: int) -> list[Device]:
    return [
        Device(name=f"{name}{i}", memory_nbytes=kind[0] * GIB, speed=kind[1], host=f"{name}-{i // per_host}")
        for i in range(count)
    ]


def fleets() -> list[tuple[str, TrainingJob]]:
    """Returns names and jobs of the fleets; the first two are those for which plans were made by hand."""
    fast, slow = LinkRate(rate_bps=2400e9, latency_s=5e-6), LinkRate(rate_bps=100e9, latency_s=20e-6)
    thin = LinkRate(rate_bps=10e9, latency_s=100e-6)

    def job(model: str, micro_batches: int, devices: Sequence[Device], between: LinkRate = slow) -> TrainingJob:
        return TrainingJob(
            layers=MODELS[model].made(),
            devices=tuple(devices),
            micro_batches=micro_batches,
            within_host=fast,
            between_hosts=between,
        )

    big = [*cards("a100-", A100, 16, 8), *cards("a40-", A40, 8, 8)]
    return [
        ("13b, 16 A100 and 8 A40, 256 micro-batches", job("13b", 256, big)),
        ("13b, 16 A100 and 8 A40, 128 micro-batches", job("13b", 128, big)),
        ("13b, 15 A100 and 8 A40, 128 micro-batches", job("13b", 128, big[1:])),
        ("7b, 8 A100 and 8 A40", job("7b", 64, [*cards("a100-", A100, 8, 4), *cards("a40-", A40, 8, 4)])),
        (
            "7b, 4 H100, 8 A100 and 8 L4",
            job("7b", 128, [*cards("h100-", H100, 4, 4), *cards("a100-", A100, 8, 8), *cards("l4-", L4, 8, 4)]),
        ),
        (
            "7b, 8 A100 and 16 L4, thin links",
            job("7b", 96, [*cards("a100-", A100, 8, 4), *cards("l4-", L4, 16, 8)], thin),
        ),
        ("1b, 3 A100 and 10 L4", job("1b", 64, [*cards("a100-", A100, 3, 3), *cards("l4-", L4, 10, 2)])),
        ("1b, 6 A40 and 11 L4, thin links", job("1b", 48, [*cards("a40-", A40, 6, 2), *cards("l4-", L4, 11, 4)], thin)),
        (
            "13b, 8 H100, 8 A100 and 8 A40",
            job("13b", 192, [*cards("h100-", H100, 8, 8), *cards("a100-", A100, 8, 8), *cards("a40-", A40, 8, 8)]),
        ),
        ("7b, 32 A40 and 16 L4", job("7b", 256, [*cards("a40-", A40, 32, 8), *cards("l4-", L4, 16, 8)])),
        ("13b, 12 H100 and 20 A40", job("13b", 160, [*cards("h100-", H100, 12, 4), *cards("a40-", A40, 20, 4)])),
        (
            "7b, 5 H100, 7 A40 and 9 L4",
            job("7b", 100, [*cards("h100-", H100, 5, 5), *cards("a40-", A40, 7, 4), *cards("l4-", L4, 9, 3)]),
        ),
    ]


BY_HAND = "13b, 16 A100 and 8 A40, 256 micro-batches"
CUT = (4, 3, 4, 4, 4, 4, 5, 5, 2, 2, 3, 2)


def by_hand_s(job: TrainingJob) -> float:
    """Returns the step seconds of a plan made by hand: two pipelines of 8 A100 and 4 A40 each."""
    names = [d.name for d in job.devices]
    borders = [0]
    for layers in CUT:
        borders.append(borders[-1] + layers)
    rows = tuple(((*names[8 * i : 8 * i + 8], *names[16 + 4 * i : 20 + 4 * i]), tuple(borders), 128) for i in range(2))
    return priced(job, rows)


# ------------------------------------------------------------------------------------------------ the search


def plan_of(job: TrainingJob, rows: Rows) -> PipelinePlan:
    pipelines = tuple(
        Pipeline(tuple(PlanStage(n, x, y) for n, (x, y) in zip(names, pairwise(at), strict=True)), m)
        for names, at, m in rows
    )
    used = {n for names, _, _ in rows for n in names}
    idle = tuple(sorted(d.name for d in job.devices if d.name not in used))
    return PipelinePlan(job.costs.count, pipelines, idle=idle, in_flight_extra=job.memory.in_flight_extra)


def priced(job: TrainingJob, rows: Rows) -> float:
    """Returns the step seconds of a plan; those of a plan that exceeds memory grow with the excess."""
    told = estimate(job, plan_of(job, rows))
    beyond = sum(told.over(job).values())
    return told.step_s if not beyond else (told.step_s + 1000.0) * (1 + beyond / (80 * GIB))


def searched(job: TrainingJob, plan: PipelinePlan | None, seconds: float, seed: int) -> float:
    """Returns the step seconds of the best plan that a random search of `seconds` finds."""
    draw, begun = Random(seed), time.perf_counter()
    best_s = math.inf
    while (spent := time.perf_counter() - begun) < seconds:
        part = min(seconds / 6, seconds - spent)
        rows = random_rows(job, draw) if spent < seconds / 2 or plan is None else rows_of(plan)
        best_s = min(best_s, annealed(job, rows, draw, part))
    return best_s


def rows_of(plan: PipelinePlan) -> Rows:
    return tuple(
        (tuple(s.device for s in p.stages), (0, *(s.end for s in p.stages)), p.micro_batches) for p in plan.pipelines
    )


def random_rows(job: TrainingJob, draw: Random) -> Rows:
    """Returns a random plan: devices dealt, host by host or shuffled, to pipelines, with layers and micro-batches split
    by speed.
    """
    devices = list(job.devices)
    draw.shuffle(devices)
    if draw.random() < 0.5:
        devices.sort(key=lambda d: (-d.speed, d.place))
    count = draw.choice([1, 1, 2, 2, 3, 4, 6, 8])
    dealt = [devices[i::count] for i in range(count)]
    rows = [tuple(d.name for d in row)[: job.costs.count] for row in dealt if row]
    return split_evenly(job, [(names, cut_evenly(job, names), 1) for names in rows])


def cut_evenly(job: TrainingJob, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the borders between stages, in proportion to speed; each stage has at least one layer."""
    speeds = [job.by_name[n].speed for n in names]
    at, done = [0], 0.0
    for k, speed in enumerate(speeds[:-1], 1):
        done += speed
        border = round(job.costs.count * done / sum(speeds))
        at.append(max(at[-1] + 1, min(border, job.costs.count - len(speeds) + k)))
    return (*at, job.costs.count)


def split_evenly(job: TrainingJob, rows: Sequence[Row]) -> Rows:
    """Splits the micro-batches over pipelines in proportion to speed; each pipeline has at least one."""
    speeds = [sum(job.by_name[n].speed for n in names) for names, _, _ in rows]
    shares = [max(1, int(job.micro_batches * s / sum(speeds))) for s in speeds]
    while sum(shares) != job.micro_batches:
        step = 1 if sum(shares) < job.micro_batches else -1
        i = (
            max(range(len(rows)), key=lambda i: (step * (speeds[i] / shares[i]), i))
            if step > 0
            else shares.index(max(shares))
        )
        shares[i] += step
    return tuple((names, at, m) for (names, at, _), m in zip(rows, shares, strict=True))


def annealed(job: TrainingJob, rows: Rows, draw: Random, seconds: float) -> float:
    begun, now_s = time.perf_counter(), priced(job, rows)
    best_s = now_s
    while (share := (time.perf_counter() - begun) / seconds) < 1:
        other = moved(job, rows, draw)
        if other is None:
            continue
        other_s = priced(job, other)
        heat = 0.02 * (1 - share) ** 2 * now_s
        if other_s <= now_s or draw.random() < math.exp(-(other_s - now_s) / max(heat, 1e-12)):
            rows, now_s = other, other_s
            best_s = min(best_s, now_s)
    return best_s


def moved(job: TrainingJob, rows: Rows, draw: Random) -> Rows | None:
    """Returns a plan after one random change; None if the change is impossible."""
    kind = draw.choice(["border"] * 6 + ["batches"] * 3 + ["swap"] * 3 + ["idle", "leave", "go", "cut", "join"])
    found = [*rows]
    i = draw.randrange(len(rows))
    names, at, m = rows[i]
    if kind == "border" and len(names) > 1:
        k, step = draw.randrange(1, len(names)), draw.choice((1, -1))
        border = at[k] + step
        if not at[k - 1] < border < at[k + 1]:
            return None
        found[i] = (names, (*at[:k], border, *at[k + 1 :]), m)
        return tuple(found)
    if kind == "batches" and len(rows) > 1:
        j = draw.choice([x for x in range(len(rows)) if x != i])
        count = draw.choice((1, 1, 2, 4))
        if m <= count:
            return None
        found[i], found[j] = (names, at, m - count), (*rows[j][:2], rows[j][2] + count)
        return tuple(found)
    if kind == "swap":
        j = draw.randrange(len(rows))
        a, b = draw.choice(names), draw.choice(rows[j][0])
        if a == b:
            return None
        other = {a: b, b: a}
        return tuple((tuple(other.get(n, n) for n in ns), x, y) for ns, x, y in rows)
    return remade(job, rows, kind, i, draw)


def remade(job: TrainingJob, rows: Rows, kind: str, i: int, draw: Random) -> Rows | None:
    """Returns a plan after a change of one pipeline's devices; splits layers and micro-batches of changed pipelines
    anew by speed.
    """
    names = rows[i][0]
    used = {n for ns, _, _ in rows for n in ns}
    idle = [d.name for d in job.devices if d.name not in used]
    others = [*rows[:i], *rows[i + 1 :]]
    if kind == "idle" and idle:
        k = draw.randrange(len(names) + 1)
        new = [(*names[:k], draw.choice(idle), *names[k:])]
    elif kind == "leave" and len(names) > 1:
        k = draw.randrange(len(names))
        new = [(*names[:k], *names[k + 1 :])]
    elif kind == "go" and len(rows) > 1 and len(names) > 1:
        k, j = draw.randrange(len(names)), draw.randrange(len(others))
        target = others.pop(j)[0]
        p = draw.randrange(len(target) + 1)
        new = [(*names[:k], *names[k + 1 :]), (*target[:p], names[k], *target[p:])]
    elif kind == "cut" and len(names) > 1:
        k = draw.randrange(1, len(names))
        new = [names[:k], names[k:]]
    elif kind == "join" and others:
        new = [(*names, *others.pop(draw.randrange(len(others)))[0])]
    else:
        return None
    if any(len(x) > job.costs.count for x in new) or len(others) + len(new) > job.micro_batches:
        return None
    return split_evenly(job, [*others, *((x, cut_evenly(job, x), 1) for x in new)])


if __name__ == "__main__":
    sys.exit(main())
