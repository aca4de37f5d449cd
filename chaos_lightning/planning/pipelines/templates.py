"""Makes plans as Oobleck (pipeline templates) and Varuna (equal pipelines) do, as policies to compare with.

Theory of operation. Oobleck ("Resilient Distributed Training of Large Models Using Pipeline Templates", arXiv
2309.08125, section 4) makes templates of n0, n0 + 1, ... devices beforehand, n0 being the fewest that the model fits
on, and builds each plan of instances of these, with two rules: all devices are used, and there are at least f + 1
pipelines, so that f losses leave a copy of each layer. If there are at least n0 templates of consecutive sizes, every
number from (f + 1) n0 on can be made: f pipelines of n0, and what is left is at least n0 and a sum of such sizes (the
Frobenius number of n0 .. 2 n0 - 1 is n0 - 1). It tries all ways to do so, splits the micro-batches of each by an
integer program that makes the slowest pipeline fastest, and takes the best. Here the same is found by a knapsack
without trying all ways. A template's layers are cut as `cuts` does.

Varuna ("Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys 2022) runs equal pipelines only;
devices beyond a rectangle are idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from chaos_lightning.planning.pipelines.cuts import CLOSE
from chaos_lightning.planning.pipelines.equal import Alike, PlanShape, Shapes

MORE = 1.1
"""Factor by which the time is raised until some plan keeps to it."""
FAULTS = 1
"""Losses at once for which policies take templates."""
ROUNDS = 8
"""Most repetitions of the search because the number of pipelines, which the all-reduce needs, was another."""


def templates(shapes: Shapes, devices: int, faults: int) -> range:
    """Returns the lengths of Oobleck's pipeline templates; empty if this many devices cannot hold `faults` + 1 copies
    of the model.

    Args:
        shapes: Shapes of such devices.
        devices: Number of devices.
        faults: Losses at once after which each layer must be left: f.
    """
    fewest = next((p for p in range(1, shapes.longest + 1) if math.isfinite(shapes.time_s(p, 1, 1))), 0)
    if not fewest:
        return range(0)
    return range(fewest, min(shapes.longest, devices - faults * fewest) + 1)


def oobleck(shapes: Shapes, devices: int, faults: int) -> PlanShape | None:
    """Returns Oobleck's best plan: pipelines of template lengths that use all devices, at least `faults` + 1 of them.

    Args:
        shapes: Shapes of such devices.
        devices: Number of devices that are left.
        faults: Losses at once after which each layer must be left: f.

    Returns:
        None where there is no such plan: too few devices, or fewer micro-batches than pipelines.
    """
    sizes = templates(shapes, devices, faults)
    best: PlanShape | None = None
    pipelines, tried = faults + 1, set[int]()
    while sizes and pipelines not in tried and len(tried) < ROUNDS:
        tried.add(pipelines)
        found = _best_of(shapes, devices, sizes, faults + 1, pipelines)
        if found is None:
            return best
        if best is None or found.charged_s < best.charged_s:
            best = found
        pipelines = found.pipelines
    return best


def _best_of(shapes: Shapes, devices: int, sizes: Sequence[int], least: int, charged: int) -> PlanShape | None:
    """Returns the best combination of template lengths, searched with all-reduces priced for `charged` pipelines; its
    own time is for its real number.
    """
    total = shapes.total
    splitter = shapes.splitter
    low, high, best = total * shapes.cutter.row(1).fastest.both[-1] / devices * (1 - CLOSE), math.inf, None
    while low < high * (1 - CLOSE):
        middle = (low + high) / 2 if best else MORE * low
        lengths = _all_used(splitter.capacities(sizes, middle, charged), devices, total, least)
        if lengths is not None:
            best = lengths
            high = min(middle, max(shapes.time_s(p, m, charged) for p, m in split(shapes, lengths, charged)))
        else:
            low = max(middle, splitter.next_s(sizes, middle, charged))
    return _shape_of(shapes, devices, best) if best else None


def _all_used(caps: Mapping[int, int], devices: int, total: int, least: int) -> list[int] | None:
    """Returns between `least` and `total` lengths of pipelines that use exactly `devices` and do at least `total`
    micro-batches.

    Returns:
        None if there are none. Of the best sets those with the fewest lengths; only where these are too many for the
        work are all numbers of lengths tried.
    """
    found = _knapsack(caps, devices, total, least, more=True)
    if found is not None and len(found) > total:
        tried = (_knapsack(caps, devices, total, k, more=False) for k in range(least, total + 1))
        found = next((x for x in tried if x is not None), None)
    return found


def _knapsack(caps: Mapping[int, int], devices: int, total: int, least: int, *, more: bool) -> list[int] | None:
    """Returns `least` lengths of pipelines (or more, if `more`) that use all devices and do at least `total`
    micro-batches, as few as possible; None if there are none.
    """
    base = devices + 1
    items = [(p, c * base - 1) for p, c in sorted(caps.items())]
    never = -base * (1 + devices * max(caps.values(), default=0))
    rows = [[0] + [never] * devices]
    for k in range(1, least + 1):
        last, row = rows[-1], [never] * base
        for n in range(1, base):
            best = never
            for p, w in items:
                if p > n:
                    break
                before = last[n - p] if k < least or not more else max(last[n - p], row[n - p])
                if before >= 0 and before + w > best:
                    best = before + w
            row[n] = best
        rows.append(row)
    if rows[least][devices] <= (total - 1) * base:
        return None
    lengths, k, n = [], least, devices
    while n:
        from_rows = [k - 1, k] if k == least and more else [k - 1]
        k, p = next((j, p) for j in from_rows for p, w in items if p <= n and rows[j][n - p] + w == rows[k][n])
        lengths.append(p)
        n -= p
    return lengths


def split(shapes: Shapes, lengths: Sequence[int], pipelines: int) -> list[tuple[int, int]]:
    """Returns (length, micro-batches) of each pipeline: gives one micro-batch to each, and each further one to the
    pipeline that ends earliest.

    That makes the slowest pipeline fastest, as more micro-batches never take less time.
    """
    heap = [(shapes.time_s(p, 2, pipelines), p, 1) for p in lengths]
    heapify(heap)
    for _ in range(shapes.total - len(heap)):
        _, p, m = heap[0]
        heapreplace(heap, (shapes.time_s(p, m + 2, pipelines), p, m + 1))
    return [(p, m) for _, p, m in heap]


def _shape_of(shapes: Shapes, devices: int, lengths: Sequence[int]) -> PlanShape:
    """Returns the plan shape of pipelines with given lengths, with the micro-batches split over them."""
    counts = Counter(split(shapes, lengths, len(lengths)))
    rows = tuple(Alike(p, m, k) for (p, m), k in sorted(counts.items(), reverse=True))
    return PlanShape(devices, rows, max(shapes.time_s(p, m, len(lengths)) for p, m in counts), 0.0, False)


def symmetric(shapes: Shapes, devices: int) -> PlanShape | None:
    """Returns Varuna's best plan: pipelines of one length, with the remaining devices idle.

    Micro-batches are split as evenly as they go. None where no length fits.
    """
    found = []
    for p in range(1, min(shapes.longest, devices) + 1):
        pipelines = min(devices // p, shapes.total)
        # Fewer pipelines with as many micro-batches each do the same with less to reduce.
        most = -(-shapes.total // pipelines)
        fewest = -(-shapes.total // most)
        for k in {pipelines, fewest}:
            time_s = shapes.time_s(p, -(-shapes.total // k), k)
            if math.isfinite(time_s):
                found.append((time_s, -k * p, p, k))
    if not found:
        return None
    time_s, _, p, k = min(found)
    each, more = divmod(shapes.total, k)
    rows = tuple(Alike(p, m, n) for m, n in ((each + 1, more), (each, k - more)) if n)
    return PlanShape(devices, rows, time_s, 0.0, False)
