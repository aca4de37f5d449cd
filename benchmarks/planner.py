"""Compares the planner of pipelines with enumeration and with the paper's search: how good its plans are, and how fast.

Small fleets are planned by trying everything as well: all multisets of lengths, all splits of the micro-batches and all
cuts for equal devices; all rows of devices in any order, too, for unequal ones. Large fleets train a decoder of 80
blocks of width 8,192 between an embedding and a head, on cards of 141 GiB, with four micro-batches for each. The first
answer from a cold start is timed in a process of its own, from the call on; with the table of pipeline times there it
is the median of five.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations, product
from random import Random

from benchmarks.common import Options, Result, median, percentile, run
from chaos_lightning.planning.pipelines.decoder import Decoder
from chaos_lightning.planning.pipelines.equal import Shapes
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, MemoryRules, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import NoPlanError, Planner
from chaos_lightning.planning.pipelines.unequal import Mixed, partitions

AMPLE = 10**9
GIB = 1 << 30
SAME = 1e-9
COLD_S, WARM_S = 0.3, 0.02
EXACT_S = {1024: 0.5, 2048: 1.0, 8192: 1.0}
NINE_S = 1.5
PAPER_S = {256: 1.152, 1024: 19.25, 2048: 40.48}
FIRST = 1.025
"""Bound over the exact answer's time."""
UNEQUAL_S = 5.0


def main() -> int:
    options = Options(__doc__)
    options.add_count("--cases", 320, 30, "small fleets of equal devices")
    options.add_count("--fleets", 120, 10, "small fleets of unequal devices")
    options.add_count("--hosted", 40, 5, "small fleets on hosts")
    options.add_seed("of the small fleets")
    options.add_argument(
        "--cold", type=int, default=0, help="for the benchmark itself: time a first answer and print it"
    )
    args = options.parse_args()
    if args.cold:
        print(json.dumps(cold(args.cold)))
        return 0
    result = Result("planner")
    equal_cases(result, args.cases, args.seed)
    hosted_cases(result, args.hosted, args.seed, unequal=False)
    hosted_cases(result, args.hosted, args.seed, unequal=True)
    unequal_cases(result, args.fleets, args.seed)
    large(result, [256, 1024] if args.quick else [256, 1024, 2048, 8192])
    for n in (256,) if args.quick else (256, 1024):
        others(result, n)
    large_unequal(result, 1024)
    return result.finish(args)


# ------------------------------------------------------------------------------------------------ small, equal


def small_job(draw: Random, layers: int, devices: int, micro_batches: int) -> TrainingJob:
    """Returns a random job with unequal layers, links that cost time, and sometimes little memory."""
    alike = draw.random() < 0.4
    found = []
    for i in range(layers):
        forward = 1.0 if alike and 0 < i < layers - 1 else draw.uniform(0.3, 3)
        backward = 2 * forward if draw.random() < 0.7 else draw.uniform(0.5, 4)
        found.append(
            Layer(
                name=f"l{i}",
                forward_s=forward,
                backward_s=backward,
                parameter_nbytes=draw.randint(1, 10),
                gradient_nbytes=draw.randint(1, 10),
                optimizer_nbytes=20,
                activation_nbytes=draw.randint(1, 10),
                workspace_nbytes=draw.randint(0, 5),
                output_nbytes=2 if alike else draw.randint(1, 4),
                optimizer_s=draw.uniform(0, 0.5),
            )
        )
    memory = draw.choice([AMPLE, draw.randint(100, 600)])
    return TrainingJob(
        layers=tuple(found),
        devices=tuple(Device(name=f"d{i}", memory_nbytes=memory) for i in range(devices)),
        micro_batches=micro_batches,
        within_host=LinkRate(rate_bps=80.0),
        between_hosts=LinkRate(rate_bps=draw.choice([80.0, 200.0])),
        overheads=Overheads(hop_s=draw.choice([0.0, 0.1]), unit_s=draw.choice([0.0, 0.05])),
        memory=MemoryRules(boundaries=True, in_flight_extra=draw.choice([0, 0, 0, 1])),
    )


def enumerated_s(shapes: Shapes, devices: int) -> float:
    """Returns the planner's least seconds over all pipeline lengths, splits of micro-batches and cuts of layers, by
    trying all; infinity if none fits.
    """
    cutter, total = shapes.cutter, shapes.total

    @cache
    def time_s(stages: int, m: int, pipelines: int) -> float:
        row, best = cutter.row(stages), math.inf
        for inner in combinations(range(1, cutter.count), stages - 1):
            at = (0, *inner, cutter.count)
            if row.fits(at, m):
                best = min(best, row.charge(at, m, pipelines).charged_s)
        return best

    @cache
    def split_s(lengths: tuple[int, ...], left: int, pipelines: int) -> float:
        if len(lengths) == 1:
            return time_s(lengths[0], left, pipelines)
        return min(
            (
                max(time_s(lengths[0], m, pipelines), split_s(lengths[1:], left - m, pipelines))
                for m in range(1, left - len(lengths) + 2)
            ),
            default=math.inf,
        )

    sets = {x for used in range(1, devices + 1) for x in partitions(used, min(devices, cutter.count), total)}
    return min(split_s(lengths, total, len(lengths)) for lengths in sorted(sets))


def equal_cases(result: Result, cases: int, seed: int) -> None:
    """Compares the planner's plans for equal devices with the best ones found by enumeration."""
    same, none = 0, 0
    for case in range(cases):
        draw = Random(f"{seed}:{case}")
        devices = draw.randint(7, 10) if case % 5 == 0 else draw.randint(2, 6)
        most = 8 if devices > 6 else 12
        job = small_job(draw, draw.randint(2, 12), devices, draw.randint(1, most))
        shapes = Planner(job).shapes
        best_s, exact = enumerated_s(shapes, devices), shapes.exact(devices)
        if exact is None or math.isinf(best_s):
            same += exact is None and math.isinf(best_s)
            none += 1
            continue
        same += exact.exact and abs(exact.charged_s - best_s) <= SAME * best_s
    result.remark(f"{cases} small fleets of equal devices, {none} of which no plan fits")
    result.add("cases that differ from enumeration", cases - same, "count", 0)


# ------------------------------------------------------------------------------------------------ small, on hosts


def small_hosts(draw: Random, *, unequal: bool = False) -> TrainingJob:
    """Returns a random job with three to five devices (four, if unequal) on two or three hosts with slow links between
    them.
    """
    devices = draw.randint(3, 4 if unequal else 5)
    job = small_job(draw, draw.randint(2, 6), devices, draw.randint(2, 4))
    hosts = draw.randint(2, 3)
    fleet = [replace(d, host=f"h{i % hosts}") for i, d in enumerate(job.devices)]
    if unequal:
        fleet = [replace(d, speed=draw.choice([0.5, 1.0, 1.0, 2.0])) for d in fleet]
    fast, slow = LinkRate(rate_bps=draw.choice([80.0, 1e9])), LinkRate(rate_bps=draw.choice([20.0, 80.0]))
    return replace(job, devices=tuple(fleet), within_host=fast, between_hosts=slow)


def placed_s(job: TrainingJob) -> float:
    """Returns the least simulated step over all plans and placements on devices; infinity if none fits."""
    there: dict[Kind, list[str]] = defaultdict(list)
    for d in job.devices:
        there[d.host, d.kind].append(d.name)
    best = math.inf
    for used in range(1, len(job.devices) + 1):
        orders = sorted(set(permutations([(d.host, d.kind) for d in job.devices], used)))
        for lengths in partitions(used, min(used, job.costs.count), job.micro_batches):
            cuts = [list(combinations(range(1, job.costs.count), p - 1)) for p in lengths]
            for cut in product(*cuts):
                for split in product(range(1, job.micro_batches + 1), repeat=len(lengths)):
                    if sum(split) == job.micro_batches:
                        best = min(best, *(placed(job, there, order, cut, split) for order in orders))
    return best


Kind = tuple[str, tuple[float, int]]
"""A host and a kind of device."""


def placed(
    job: TrainingJob,
    there: dict[Kind, list[str]],
    order: tuple[Kind, ...],
    cuts: tuple[tuple[int, ...], ...],
    split: tuple[int, ...],
) -> float:
    """Returns the simulated step of one plan, whose stages are placed on devices of these kinds in order; infinity if
    it does not fit.
    """
    left, pipelines = {kind: iter(names) for kind, names in there.items()}, []
    places = iter(order)
    for inner, m in zip(cuts, split, strict=True):
        borders = pairwise((0, *inner, job.costs.count))
        pipelines.append(Pipeline(tuple(PlanStage(next(left[next(places)]), x, y) for x, y in borders), m))
    extra = job.memory.in_flight_extra
    plan = PipelinePlan(job.costs.count, tuple(pipelines), in_flight_extra=extra)
    cost = estimate(job, plan)
    return math.inf if cost.over(job) else cost.step_s


def hosted_cases(result: Result, cases: int, seed: int, *, unequal: bool) -> None:
    """Compares the planner's plans, placed on devices and simulated, with the best ones found by enumeration."""
    title = "unequal, on hosts" if unequal else "on hosts"
    ratios, wrong, differ, sure = [], 0, 0, 0
    for case in range(cases):
        job = small_hosts(Random(f"{seed}:{title}:{case}"), unequal=unequal)
        best_s = placed_s(job)
        try:
            found = Planner(job).exact()
        except NoPlanError:
            differ += not math.isinf(best_s)
            continue
        ratio = found.estimate.step_s / best_s
        sure += found.exact
        wrong += found.exact and ratio > 1 + SAME
        wrong += found.estimate.step_s * (1 - found.gap) > best_s * (1 + SAME)
        ratios.append(ratio)
    result.remark(f"{len(ratios)} small fleets {title}, {sure} of whose plans are called the best")
    result.add(f"{title}: plans called better than they are", wrong, "count", 0)
    result.add(f"{title}: fleets where one of the two finds no plan", differ, "count", 0)
    result.add(f"{title}: simulated step / enumeration, median", median(ratios), "ratio", 1.05)
    result.add(f"{title}: simulated step / enumeration, of 95% of the fleets", percentile(ratios, 95), "ratio")
    result.add(f"{title}: simulated step / enumeration, at worst", max(ratios), "ratio")


# ------------------------------------------------------------------------------------------------ small, unequal


def small_fleet(draw: Random, case: int) -> TrainingJob:
    """Returns a job with up to eight devices of several speeds and memory sizes; all different if that can be
    enumerated.
    """
    devices = draw.choice([3, 4, 5, 6, 8])
    kinds = 2 if devices == 8 else draw.choice([2, 3]) if devices > 4 else draw.choice([2, 3, devices])
    job = small_job(draw, draw.randint(max(3, devices - 2), 8), devices, draw.randint(4, 8))
    little = draw.choice([AMPLE, 300, 600])
    given = [(draw.choice([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]), draw.choice([AMPLE, little])) for _ in range(kinds)]
    if kinds == devices:
        given = [(draw.uniform(0.3, 3.0), AMPLE) for _ in range(kinds)]
    fleet = tuple(
        Device(name=f"d{i}", speed=given[i % kinds][0], memory_nbytes=given[i % kinds][1], host=f"h{i // 2}")
        for i in range(devices)
    )
    # One rate for all links, so that times of devices depend on their kinds alone.
    return replace(job, devices=fleet, within_host=job.between_hosts)


def sequences(counts: Counter[tuple[float, int]]) -> Iterator[tuple[tuple[float, int], ...]]:
    """Yields all sequences of devices that these numbers of each kind allow."""
    yield ()
    for kind in sorted(counts):
        if counts[kind]:
            for rest in sequences(counts - Counter([kind])):
                yield (kind, *rest)


def enumerated_unequal_s(job: TrainingJob) -> float:
    """Returns the least seconds over all sets of pipelines of unequal devices in any order, with all splits and
    cuts.
    """
    mixed, total = Mixed(job), job.micro_batches
    reduce = mixed.reduce([tuple(job.by_name)])
    names: dict[tuple[float, int], list[str]] = defaultdict(list)
    for d in job.devices:
        names[d.kind].append(d.name)
    kinds, there = sorted(names), Counter(d.kind for d in job.devices)
    rows = {}
    for order in set(sequences(there)):
        if 0 < len(order) <= job.costs.count:
            taken = {kind: iter(names[kind]) for kind in kinds}
            rows[order] = mixed.row(tuple(next(taken[kind]) for kind in order), reduce)
    full, best = tuple(there[k] for k in kinds), math.inf
    for pipelines in range(1, min(len(job.devices), total) + 1):
        # By devices used and micro-batches: the best row, and then the best sets of rows.
        one: dict[tuple[tuple[int, ...], int], float] = {}
        for order, row in rows.items():
            used = tuple(order.count(k) for k in kinds)
            for m in range(1, total - pipelines + 2):
                cut = row.best(m, pipelines)
                if cut is not None and cut.charged_s < min(best, one.get((used, m), math.inf)):
                    one[used, m] = cut.charged_s
        sets = {(tuple(0 for _ in kinds), 0): 0.0}
        for _ in range(pipelines):
            sets = joined(sets, one, full, total)
        best = min([best, *(time_s for (_, m), time_s in sets.items() if m == total)])
    return best


Sets = dict[tuple[tuple[int, ...], int], float]


def joined(sets: Sets, one: Sets, full: tuple[int, ...], total: int) -> Sets:
    """Returns sets of pipelines extended by one more pipeline, with the best time of each."""
    found: Sets = {}
    for (used, m), time_s in sets.items():
        for (more, n), row_s in one.items():
            both = tuple(a + b for a, b in zip(used, more, strict=True))
            if m + n <= total and all(a <= b for a, b in zip(both, full, strict=True)):
                slower = max(time_s, row_s)
                if slower < found.get((both, m + n), math.inf):
                    found[both, m + n] = slower
    return found


def unequal_cases(result: Result, fleets: int, seed: int) -> None:
    """Compares the planner's plans for unequal devices with the best ones found by enumeration."""
    ratios, lower, differ, none = [], 0, 0, 0
    for case in range(fleets):
        job = small_fleet(Random(f"{seed}:unequal:{case}"), case)
        best_s, mixed = enumerated_unequal_s(job), Mixed(job)
        found = mixed.search()
        if not found or math.isinf(best_s):
            differ += (not found) != math.isinf(best_s)
            none += 1
            continue
        charged_s, plan = found[0]
        plan.check()
        lower += mixed.bound_s() > best_s * (1 + SAME)
        ratios.append(charged_s / best_s)
    result.remark(
        f"{fleets} fleets of 3 to 8 unequal devices, {none} of which no plan fits; "
        f"{sum(x <= 1 + SAME for x in ratios)} plans are the best there is"
    )
    result.add("unequal: plan / enumeration, of 95% of the fleets", percentile(ratios, 95), "ratio", 1.05)
    result.add("unequal: plan / enumeration, at worst", max(ratios), "ratio", 1.15)
    result.add("unequal: fleets where one of the two finds no plan", differ, "count", 0)
    result.add("unequal: lower bounds above the best plan", lower, "count", 0)


# ------------------------------------------------------------------------------------------------ large


def large_job(devices: int, blocks: int = 80, width: int = 8192) -> TrainingJob:
    """Returns a job with a decoder, by default of 65 billion parameters, on cards in hosts of eight."""
    return TrainingJob(
        layers=Decoder(layers=blocks, width=width).made(),
        devices=tuple(Device(name=f"d{i:05}", memory_nbytes=141 * GIB, host=f"h{i // 8:04}") for i in range(devices)),
        micro_batches=4 * devices,
        within_host=LinkRate(rate_bps=2.4e12, latency_s=5e-6),
        between_hosts=LinkRate(rate_bps=4e11, latency_s=1e-5),
    )


def cold(devices: int) -> float:
    """Returns the seconds of the planner's very first answer in this process."""
    job = large_job(devices)
    start = time.perf_counter()
    Planner(job).shapes.first(devices)
    return time.perf_counter() - start


def timed(work: Callable[[int], object], devices: int) -> float:
    start = time.perf_counter()
    work(devices)
    return time.perf_counter() - start


def large(result: Result, sizes: list[int]) -> None:
    """Measures the planner's answers for large fleets of equal devices."""
    for n in sizes:
        command = [sys.executable, "-m", "benchmarks.planner", "--cold", str(n)]
        cold_s = median(
            [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)]
        )
        result.add(f"{n} devices: first answer, cold", cold_s, "s", COLD_S if n <= 1024 else None)
        planner = Planner(large_job(n))
        shapes = planner.shapes
        shapes.warm()
        first = shapes.first(n)
        warm_s = median([timed(shapes.first, n) for _ in range(5)])
        result.add(f"{n} devices: first answer, with the table", warm_s, "s", WARM_S if n <= 1024 else None)
        start = time.perf_counter()
        exact = shapes.exact(n)
        paper = f" (paper: {PAPER_S[n]:g})" if n in PAPER_S else ""
        result.add(f"{n} devices: exact{paper}", time.perf_counter() - start, "s", EXACT_S.get(n))
        assert first is not None
        assert exact is not None
        result.add(f"{n} devices: first / exact", first.charged_s / exact.charged_s, "ratio", FIRST)
        result.add(f"{n} devices: by how much a better shape might be faster", exact.gap, "share", 0.001)
        start = time.perf_counter()
        planner.exact()
        took = time.perf_counter() - start
        result.add(f"{n} devices: exact, seated, simulated and bounded, with the table", took, "s")
        if n == 1024:
            others = sum(timed(shapes.exact, k) for k in range(1015, 1024))
            result.add("1024 devices: exact, the nine counts below", others, "s", NINE_S)


def others(result: Result, devices: int) -> None:
    """Measures the paper's search after one loss, for a model whose pipelines of 16 stages fit into memory, and for one
    where they do not.
    """
    for title, blocks, width in (("7B", 32, 4096), ("65B", 80, 8192)):
        shapes = Planner(large_job(devices, blocks, width)).shapes
        was, lost = shapes.exact(devices), shapes.exact(devices - 1)
        start = time.perf_counter()
        theirs = algorithm1(shapes, devices - 1, was)
        took = time.perf_counter() - start
        result.add(f"{devices - 1} devices, {title}: Algorithm 1", took, "s")
        assert lost is not None
        if theirs is not None:
            result.add(
                f"{devices - 1} devices, {title}: Algorithm 1 / exact", theirs.charged_s / lost.charged_s, "ratio"
            )
        else:
            result.remark(f"{devices - 1} devices, {title}: Algorithm 1 finds no plan of pipelines of up to 16 stages")


def large_unequal(result: Result, devices: int) -> None:
    """Measures answers for large fleets of unequal devices: one in ten at half speed, or all of different speeds."""
    job, draw = large_job(devices), Random(1)
    for title, speed in (
        ("one in ten at half speed", lambda i: 0.5 if i % 10 == 0 else 1.0),
        ("all of different speeds", lambda i: draw.uniform(0.5, 1.5)),
    ):
        fleet = tuple(replace(d, speed=speed(i)) for i, d in enumerate(job.devices))
        start = time.perf_counter()
        mixed = Mixed(replace(job, devices=fleet))
        charged_s, plan = mixed.search()[0]
        bound_s = mixed.bound_s()
        took = time.perf_counter() - start
        result.add(f"{devices} unequal devices, {title}", took, "s", UNEQUAL_S)
        plan.check()
        result.add(f"{devices} unequal devices, {title}: gap to the lower bound", 1 - bound_s / charged_s, "share")


if __name__ == "__main__":
    run(main)
