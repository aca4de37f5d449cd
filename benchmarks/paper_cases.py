"""Computes the losses of Chameleon's Fig. 6 (8 -> 7, 16 -> 15 and 32 -> 24 cards) and the memory of its Fig. 12 by our
model.

Each plan after a loss is compared with four others: the one that the paper began with, the best one to begin with, the
share of that which would be linear in the devices, and the best one for what is left. The last is found by trying all
multisets of lengths, all splits of the micro-batches and all cuts, but for those that a lower bound rules out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise

from benchmarks.common import Options, Result, run
from benchmarks.paper_equations import eq9, eq11, paper_memory
from chaos_lightning.planning.pipelines.choice import Outlook, restart_worth
from chaos_lightning.planning.pipelines.decoder import Decoder
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.formation import EqualFleet, EqualOptions
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, LinkRate, MemoryUse, TrainingJob
from chaos_lightning.planning.pipelines.moves import assign
from chaos_lightning.planning.pipelines.paper import algorithm1, split_layers
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.policies import decide
from chaos_lightning.planning.pipelines.templates import oobleck

LAYERS = 32
FORWARD_S, BACKWARD_S = 1.0, 2.0
BEST = 1.001
"""Bound over the best plan's time: 0.999 of its throughput."""
ADAPTIVE = 1.01
"""Bound of the time of `adaptive` over the best plan's, where no further loss is expected."""
CLOSE = 1e-9


@dataclass(frozen=True)
class Loss:
    """A loss of devices in the paper: the plan before it, and the throughput that the paper reports after it."""

    name: str
    before: int
    """Units (cards, or groups of eight)."""
    left: int
    stages: int
    pipelines: int
    """Pipelines of the paper's original plan."""
    share: float
    """Share of the original throughput that the paper reports."""


LOSSES = (
    Loss("8 -> 7", 8, 7, 4, 2, 0.9622),
    Loss("16 -> 15", 16, 15, 4, 4, 0.8900),
    Loss("32 -> 24 (TP 8)", 4, 3, 2, 2, 0.7438),
)


def main() -> int:
    parser = Options(__doc__, raw=True)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[16, 32, 64], help="of a step")
    args = parser.parse_args()
    result = Result("paper_cases")
    for loss in LOSSES:
        for least in (2, 1) if loss.before == 4 else (2,):
            title = f"{loss.name}, at least {least} stage{'s' * (least > 1)}"
            print(f"{title}:")
            for m in args.micro_batches:
                compare(result, loss, f"{title}, {m} micro-batches", m, least)
        print(f"{loss.name}, Llama-2 7B:")
        for m in args.micro_batches:
            compare_llama(result, loss, f"{loss.name}, Llama-2 7B, {m} micro-batches", m)
    memory(result, args.micro_batches)
    return result.finish(args)


# ------------------------------------------------------------------------------------------------ step times


def equal_job(devices: int, micro_batches: int, least: int) -> TrainingJob:
    """Returns a job of equal layers; if `least` is above 1, one device cannot keep all layers, so pipelines have two
    stages or more.
    """
    layer = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "parameter_nbytes": 1}
    return TrainingJob(
        layers=tuple(Layer(name=f"block.{i}", **layer) for i in range(LAYERS)),
        devices=tuple(Device(name=f"d{i:02}", memory_nbytes=LAYERS - (least > 1)) for i in range(devices)),
        micro_batches=micro_batches,
        memory=PLAIN_MEMORY,
    )


def compare(result: Result, loss: Loss, title: str, micro_batches: int, least: int) -> None:
    """Adds the figures of one loss of devices, with one number of micro-batches."""
    job = equal_job(loss.before, micro_batches, least)
    shapes = Planner(job).shapes
    before = shapes.exact(loss.before)
    assert before is not None
    ours, adapted = (chosen_s(job, loss, policy) for policy in ("dynamic", "adaptive"))
    each = LAYERS / loss.stages
    original = eq9(loss.stages, micro_batches // loss.pipelines, each * FORWARD_S, each * BACKWARD_S)
    share = original / ours
    result.add(f"{title}: of the paper's original plan (paper: {loss.share:.2%})", share, "share")
    result.add(f"{title}: of the best original plan", before.charged_s / ours, "share")
    result.add(f"{title}: of the original plan's linear share", share * loss.before / loss.left, "share")
    best = best_s(loss.left, micro_batches, least)
    # A time that is shorter than the least of all would be as wrong as a longer one.
    apart = max(ours / best, best / ours)
    result.add(f"{title}: time over that of the best plan for what is left", apart, "ratio", BEST)
    result.add(f"{title}: adaptive, time over that of the best plan", adapted / best, "ratio", ADAPTIVE)
    for name, shape in (
        ("Algorithm 1", algorithm1(shapes, loss.left, before)),
        ("Oobleck's templates", oobleck(shapes, loss.left, 1)),
    ):
        if shape is None:
            result.remark(f"{title}: {name} finds no plan")
        else:
            result.add(f"{title}: {name}, time over ours", shape.charged_s / ours, "ratio")
    result.remark(f"{title}: {why(loss, original, before.charged_s, ours)}")


def chosen_s(job: TrainingJob, loss: Loss, policy: str) -> float:
    """Returns the step time in seconds that a policy chooses after a loss of devices if it expects no other one."""
    fleet = EqualFleet(job)
    before = fleet.formation("best", loss.before)
    assert before is not None
    lost = range(loss.before - loss.left)
    options = EqualOptions(fleet=fleet, before=before.without(lost), devices=loss.left)
    # Where no loss follows, a restart that is never needed is worth as much as going on.
    chosen = decide(policy, options, Outlook(rate=0.0, restart_worth=restart_worth(0.0, 0.0))).chosen
    assert chosen is not None
    return chosen.step_s


def why(loss: Loss, original: float, best_original: float, ours: float) -> str:
    """Describes under which assumptions the paper's share of the throughput would be right."""
    fixed = (loss.share * ours - original) / (1 - loss.share)
    if fixed <= 0:
        return (
            f"the paper's {loss.share:.2%} is less than this plan's {original / ours:.2%}: it comes out if the step "
            f"after the loss took {original / loss.share / ours - 1:.1%} longer than the best plan's"
        )
    return (
        f"the paper's {loss.share:.2%} needs fixed costs of {fixed / original:.0%} of its original plan's computing in "
        f"each step, or an original step that took {loss.share * ours / original - 1:.1%} longer than computed; that "
        f"plan takes {original / best_original:.3f} of the best original one's time"
    )


# ------------------------------------------------------------------------------------------------ trying all


def best_s(devices: int, micro_batches: int, least: int) -> float:
    """Returns the least step time in seconds over all pipeline lengths, splits of micro-batches and cuts of layers.

    The search begins with one pipeline that runs one micro-batch after the other. A multiset keeps to a time for some
    split if and only if what its pipelines do in it adds up to all micro-batches.
    """

    @cache
    def does(stages: int, time_s: float) -> int:
        low, high = 0, micro_batches + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pipeline_s(stages, middle) <= time_s * (1 + CLOSE) else (low, middle)
        return low

    ways = list(multisets(devices, devices, least))
    low, high = 0.0, micro_batches * LAYERS * (FORWARD_S + BACKWARD_S)
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        kept = any(sum(does(p, middle) for p in way) >= micro_batches for way in ways)
        low, high = (low, middle) if kept else (middle, high)
    return high


def multisets(devices: int, longest: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yields the multisets of pipeline lengths, longest first, with a sum of at most `devices`."""
    yield ()
    for p in range(least, min(devices, longest) + 1):
        for rest in multisets(devices - p, p, least):
            yield (p, *rest)


@cache
def pipeline_s(stages: int, micro_batches: int) -> float:
    """Returns the least time of one pipeline in seconds over all cuts, by branch and bound."""

    def bound(k: int, first: int, end: int) -> float:
        return stage_bound_s(k, first, end, stages, micro_batches)

    # By stage and its first layer: the largest bound of it and those behind it, for their best cut.
    rest = [[math.inf] * LAYERS + [0.0]]
    for k in reversed(range(stages)):
        ways = ((max(bound(k, x, y), rest[0][y]) for y in range(x + 1, LAYERS + 1)) for x in range(LAYERS + 1))
        rest.insert(0, [min(way, default=math.inf) for way in ways])
    best, heap = math.inf, [(rest[0][0], 0, (0,))]
    while heap and heap[0][0] < best:
        least, left, at = heappop(heap)
        k = len(at) - 1
        if k == stages:
            lengths = [y - x for x, y in pairwise(at)]
            ends = eq11([n * FORWARD_S for n in lengths], [n * BACKWARD_S for n in lengths], micro_batches)
            best = min(best, ends)
            continue
        for y in range(at[-1] + 1, LAYERS + 1):
            bounds = max(least, bound(k, at[-1], y), rest[k + 1][y])
            if bounds < best:
                heappush(heap, (bounds, left - 1, (*at, y)))
    return best


def stage_bound_s(k: int, first: int, end: int, stages: int, m: int) -> float:
    """Returns a lower bound in seconds for every pipeline that has this stage, as the largest of three bounds.

    Its own between the ways to it and back; those after the first micro-batch has come back to it, before which it
    cannot have run more forward ones than 1F1B allows; and as many times to the last stage and back as these go into m.
    """
    forward, backward, both = (end - first) * FORWARD_S, (end - first) * BACKWARD_S, FORWARD_S + BACKWARD_S
    flight = min(stages - k, m)
    turns = (m - 1) // flight
    return max(
        first * both + m * (forward + backward),
        LAYERS * both + (m - 1) * backward + (m - flight) * forward,
        first * both + (LAYERS - first) * both * (turns + 1) + (m - 1 - turns * flight) * backward,
    )


# ------------------------------------------------------------------------------------------------ memory


GIB = 1 << 30


def llama_job(devices: int, micro_batches: int, cards: int = 1, sequence: int = 4096) -> TrainingJob:
    """Returns Llama-2 7B by formula on the paper's machines of eight cards of 64 GB; gradients are summed in place."""
    return TrainingJob(
        layers=Decoder(
            layers=LAYERS, width=4096, feed_forward=11008, gated=True, vocabulary=32000, sequence=sequence,
            flops=313e12, gradient_bytes=2, cards=cards,
        ).made(),
        devices=tuple(
            Device(name=f"d{i:02}", memory_nbytes=64 * GIB * cards, host=f"h{i * cards // 8}", cards=cards)
            for i in range(devices)
        ),
        micro_batches=micro_batches,
        within_host=LinkRate(rate_bps=224e9, latency_s=10e-6),
        between_hosts=LinkRate(rate_bps=200e9, latency_s=20e-6),
        memory=replace(PLAIN_MEMORY, boundaries=True),
    )  # fmt: skip


def compare_llama(result: Result, loss: Loss, title: str, micro_batches: int) -> None:
    """Adds the figures of one loss with the paper's model, hops and all-reduces."""
    job = llama_job(loss.before, micro_batches, cards=8 if loss.before == 4 else 1)
    planner = Planner(job)
    shapes, names = planner.shapes, [d.name for d in job.devices]
    cut = split_layers(shapes.cutter, loss.stages, micro_batches // loss.pipelines, loss.pipelines)
    best, ours, after = planner.exact(), planner.exact(names[: loss.left]).estimate, shapes.exact(loss.left)
    assert after is not None
    if cut is None:
        result.remark(f"{title}: the paper's original plan does not fit")
    else:
        original_s = cut.charged_s + ours.commit_s
        share = original_s / ours.step_s
        result.add(f"{title}: of the paper's original plan (paper: {loss.share:.2%})", share, "share")
        result.add(f"{title}: of the original plan's linear share", share * loss.before / loss.left, "share")
        result.remark(f"{title}: {why(loss, original_s, best.estimate.step_s, ours.step_s)}")
    result.add(f"{title}: of the best original plan", best.estimate.step_s / ours.step_s, "share")
    result.add(f"{title}: by how much a better plan might be faster", after.gap, "share")


def memory(result: Result, micro_batches: list[int]) -> None:
    """Adds the memory figures of Fig. 12: four pipelines of two stages lose a device and become [3, 2, 2].

    Samples have 2,048 tokens: with the 4,096 that times are computed with, the model does not fit on two of its cards.
    """
    for m in micro_batches:
        print(f"Fig. 12, {m} micro-batches:")
        job = llama_job(8, m, sequence=2048)
        planner, names = Planner(job), [d.name for d in job.devices]
        four, three = planner.shapes.over(8, [2] * 4), planner.shapes.over(7, [3, 2, 2])
        assert four is not None
        assert three is not None
        was = planner.seated(four, names).plan
        now = assign(job, was, planner.seated(three, names[:7]).plan)
        before, after = estimate(job, was).memory, estimate(job, now).memory
        rows = {name: (before[name], use) for name, use in sorted(after.items())}
        title = f"Fig. 12, {m} micro-batches"
        for name, (old, new) in rows.items():
            result.remark(
                f"{name}: {old.nbytes / GIB:.2f} -> {new.nbytes / GIB:.2f} GiB, of which boundary tensors "
                f"{old.boundaries / GIB:.2f} -> {new.boundaries / GIB:.2f}"
            )
        higher = [name for name, (old, new) in rows.items() if apart(new) > apart(old)]
        result.add(f"{title}: devices whose peak rises, boundary tensors apart", len(higher), "count", 0)
        most = max(new.nbytes - old.nbytes for old, new in rows.values())
        result.add(f"{title}: largest rise of a peak, boundary tensors included", most / GIB, "GiB")
        lacking = estimate(job, was).over(job) | estimate(job, now).over(job)
        result.add(f"{title}: devices that lack memory", len(lacking), "count", 0)
        theirs = [max(use.nbytes for use in paper_memory(job, plan).values()) / GIB for plan in (was, now)]
        result.remark(f"{title}: highest peak by Eq. 14 {theirs[0]:.2f} -> {theirs[1]:.2f} GiB")


def apart(use: MemoryUse) -> int:
    """Returns the bytes of a memory use, without the boundary tensors that are kept until the step is committed."""
    return use.nbytes - use.boundaries


if __name__ == "__main__":
    run(main)
