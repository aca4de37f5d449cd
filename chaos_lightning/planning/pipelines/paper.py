"""Searches for a plan by Algorithm 1 of the Chameleon paper, as a policy to compare with.

Theory of operation. "Chameleon: Adaptive Fault Tolerance for Distributed Training via Real-time Policy Selection"
shares out all devices over pipelines, deals layers and micro-batches evenly, and takes the fastest candidate. Here each
candidate is charged as `cuts` does. Where the paper leaves something open, its text on complexity decides: pipelines of
up to 16 stages, and "tens to hundreds" of candidates (section IV-A). Its equations are in
`benchmarks/paper_equations.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, islice, pairwise
from weakref import WeakKeyDictionary

from chaos_lightning.planning.pipelines.cuts import Cutter, DeviceRow, LayerCut
from chaos_lightning.planning.pipelines.equal import Alike, PlanShape, Shapes
from chaos_lightning.planning.pipelines.schedules import in_flight

DEEPEST = 16
"""Most stages of a pipeline (section IV-A: "typically small, e.g. <= 16")."""
PARTITIONS = 500
"""Most ways to share out the devices that are tried for one number of pipelines; if there are more, only the most even
one is tried (section IV-A: as many candidates as the number of devices has divisors).
"""
PLACEMENTS = 1000
"""Most placements of the remaining layers that are tried, early stages first (section IV-A: "tens to hundreds")."""


def algorithm1(shapes: Shapes, devices: int, was: PlanShape | None) -> PlanShape | None:
    """Returns the best plan shape among the candidates of Algorithm 1 for a number of devices; None if none fits into
    memory.

    All devices are used, also where fewer would do better. The number of pipelines differs by less than 2 from that
    before; after several losses the best plan may be further away. Micro-batches go by the number of stages, so short
    pipelines, whose bubbles are shorter, wait for long ones. A candidate is charged as `cuts` does, hops and
    all-reduce included, with the layers split as `split_layers` does.

    Args:
        shapes: Shapes of such devices.
        devices: Number of devices that are left.
        was: The shape before the loss; None: any number of pipelines is tried.
    """
    cutter, total = shapes.cutter, shapes.total
    work_s = cutter.row(1).fastest.both[-1]
    deepest = min(DEEPEST, cutter.count, devices)
    shallow = next((p for p in range(1, deepest + 1) if split_layers(cutter, p, 1, 1)), deepest + 1)
    near = range(1, devices + 1) if was is None else range(max(1, was.pipelines - 1), was.pipelines + 2)
    candidates = []
    for pipelines in near:
        if pipelines <= min(total, devices):
            for lengths in integer_partition(devices, pipelines, shallow, deepest):
                rows = Counter(zip(lengths, distribute_batch(total, lengths), strict=True))
                candidates.append((max(m / p for p, m in rows) * work_s, pipelines, rows))
    candidates.sort(key=lambda x: x[0])
    best: PlanShape | None = None
    for least, pipelines, rows in candidates:
        if best is not None and least >= best.charged_s:
            break  # The mean stage alone works as long, here and in all that follow.
        found = [split_layers(cutter, p, m, pipelines) for p, m in rows]
        cuts = [cut.charged_s for cut in found if cut is not None]
        if len(cuts) == len(rows) and (best is None or max(cuts) < best.charged_s):
            lines = tuple(Alike(p, m, k) for (p, m), k in sorted(rows.items(), reverse=True))
            best = PlanShape(devices, lines, max(cuts), 0.0, False)
    return best


def integer_partition(devices: int, pipelines: int, shallow: int, deepest: int) -> list[tuple[int, ...]]:
    """Returns the ways to divide all devices into pipelines, as lists of lengths, longest first; only the most even one
    if there are too many.
    """
    if not shallow * pipelines <= devices <= deepest * pipelines:
        return []
    found = list(islice(_partitions(devices, pipelines, shallow, deepest), PARTITIONS + 1))
    if len(found) > PARTITIONS:
        each, longer = divmod(devices, pipelines)
        return [(each + 1,) * longer + (each,) * (pipelines - longer)]
    return found


def _partitions(devices: int, pipelines: int, low: int, high: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways to divide devices into pipelines of `low` to `high` devices, those with most pipelines of length
    `high` first.
    """
    if low == high or not pipelines:
        yield (low,) * pipelines
        return
    # With x of length `high` the others, of low to high - 1, must be able to make up the rest.
    least = max(0, devices - pipelines * (high - 1))
    most = (devices - pipelines * low) // (high - low)
    for x in range(min(most, pipelines), least - 1, -1):
        for rest in _partitions(devices - x * high, pipelines - x, low, high - 1):
            yield (high,) * x + rest


def distribute_batch(micro_batches: int, lengths: Sequence[int]) -> list[int]:
    """Returns the number of micro-batches of each pipeline: in proportion to its devices, the remainder one by one, and
    at least one each (section IV-A).
    """
    devices = sum(lengths)
    found = [micro_batches * p // devices for p in lengths]
    for i in range(micro_batches - sum(found)):
        found[i % len(found)] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return found


_SPLITS: WeakKeyDictionary[Cutter, dict[tuple[int, int, int], LayerCut | None]] = WeakKeyDictionary()


def split_layers(cutter: Cutter, stages: int, m: int, pipelines: int) -> LayerCut | None:
    """Returns the cut with equally many layers per stage, and the remaining layers at the best stages (section IV-A).

    Layers that differ (embedding, head) are counted alike, which is what the better cuts of `cuts` gain on it.

    Args:
        cutter: Cutter for these devices.
        stages: Stages of the pipeline.
        m: Micro-batches of the pipeline.
        pipelines: Number of pipelines, for the all-reduce.

    Returns:
        None where none of the first `PLACEMENTS` places fits into memory, or there are fewer layers than stages.
    """
    if stages > cutter.count:
        return None
    known = _SPLITS.setdefault(cutter, {})
    key = (stages, m, pipelines)
    if key not in known:
        best: LayerCut | None = None
        row = cutter.row(stages)
        each, more = divmod(row.count, stages)
        for longer in islice(combinations(range(stages), more), PLACEMENTS):
            at = (0, *accumulate(each + (k in longer) for k in range(stages)))
            if best is not None and _bound(row, at, m) >= best.charged_s:
                continue
            if row.fits(at, m):
                cut = row.charge(at, m, pipelines)
                best = cut if best is None or cut.charged_s < best.charged_s else best
        known[key] = best
    return known[key]


def _bound(row: DeviceRow, at: Sequence[int], m: int) -> float:
    """Returns a lower bound of the seconds of a pipeline with this cut, by the bounds `through` and `after first` of
    `cuts` without hops.
    """
    s, total = row.fastest, row.fastest.both[-1]
    found = 0.0
    for k, (x, y) in enumerate(pairwise(at)):
        forward, backward = s.forward[y] - s.forward[x], s.backward[y] - s.backward[x]
        after = total + (m - 1) * backward + (m - in_flight(row.stages, k, m, row.extra)) * forward
        found = max(found, s.both[x] + m * (forward + backward), after)
    return found
