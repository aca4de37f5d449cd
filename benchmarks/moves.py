"""Compares moves of layers to a new plan, and the order in which gradients are summed, with the best of all on small
cases.

*Small cases* are plans for up to six devices of two kinds, some of which are lost; every permutation of
the survivors is tried. *The paper's cases* are those of Figs. 10 and 11: eight cards as four pipelines of two stages,
one card lost, the seven others as pipelines of 2, 2 and 3 stages; its model is not told in full, so layers are those of
a decoder of 7 billion parameters on cards and links of about that kind (`CARD_FLOPS`, `LINK_BPS`). *Rank order* gives
places in the order of the ranks that survivors had. *Unbalanced* is that whoever lacks a layer asks its first holder.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from benchmarks.common import Options, Result, median, run
from benchmarks.rounds import Sending, Vertex, colour, neighbours_of, rounds_s, step_s, vertices
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, TrainingJob
from chaos_lightning.planning.pipelines.moves import Moves, assign, move_list, renamed
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.planner import Planner
from chaos_lightning.planning.pipelines.rerouting import FatalLossError

CARD_FLOPS = 1.3e14
"""Operations per second that a card reaches."""
LINK_BPS = 4.5e11
HOST_BPS = 1e11
"""Between hosts."""
TOKENS = 2048
"""Tokens of a micro-batch."""
FEW_GROUPS = 8
PAPER_TRANSFER = 32.35
"""Per cent that Fig. 10 saves of the transfer at 16 layers; it calls what is saved at 4 and 8 not significant."""
PAPER_STEP = {16: 11.44, 32: 15.44, 64: 5.52}
"""Per cent that Fig. 11 saves of a step."""
PAPER_SUMS = 35.35
DIGITS = 1e-9
"""Share by which sums in another order differ at most."""


class Case(NamedTuple):
    """A move from one plan to another; the job has the devices that are left."""

    job: TrainingJob
    old: PipelinePlan
    new: PipelinePlan

    def moves(self, plan: PipelinePlan | None = None) -> Moves:
        return move_list(self.job, self.old, plan or self.new)


def decoder_layer(name: str, parameters: float) -> Layer:
    """Returns a layer with two bytes each for weights and gradients, and twelve for optimizer state, for each
    parameter.
    """
    forward_s = 2 * parameters * TOKENS / CARD_FLOPS
    width = math.sqrt(parameters / 12)
    return Layer(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        parameter_nbytes=int(2 * parameters),
        gradient_nbytes=int(2 * parameters),
        optimizer_nbytes=int(12 * parameters),
        output_nbytes=int(2 * TOKENS * width),
    )


def pipeline(names: Sequence[str], cut: Sequence[int], micro_batches: int) -> Pipeline:
    return Pipeline(tuple(PlanStage(*x) for x in zip(names, cut, cut[1:], strict=False)), micro_batches)


def even(layers: int, stages: int) -> list[int]:
    """Returns the borders of stages of equal length; the first stages get the layers that are left over."""
    return [0, *(sum(layers // stages + (k < layers % stages) for k in range(n + 1)) for n in range(stages))]


# ------------------------------------------------------------------------------------------------ small cases


def any_plan(draw: random.Random, devices: Sequence[str], layers: int) -> PipelinePlan:
    left = draw.sample(devices, len(devices))
    pipelines = []
    while left and (not pipelines or draw.random() < 0.7):
        stages = draw.randint(1, min(len(left), layers, 3))
        cut = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
        pipelines.append(pipeline(left[:stages], cut, 1))
        left = left[stages:]
    return PipelinePlan(layers, tuple(pipelines), idle=tuple(sorted(left)))


def small_cases(seed: int, count: int) -> Iterator[Case]:
    """Yields `count` random small moves; draws again those in which some layer is lost."""
    draw = random.Random(seed)
    while count:
        names = [f"d{i}" for i in range(draw.randint(3, 6))]
        layers = tuple(decoder_layer(f"l{i}", draw.randint(1, 9)) for i in range(draw.randint(2, 6)))
        devices = [Device(name=x, memory_nbytes=1 << 40, speed=draw.choice((1, 1, 2))) for x in names]
        left = draw.sample(devices, draw.randint(2, len(names)))
        job = TrainingJob(
            layers=layers, devices=tuple(left), micro_batches=1, between_hosts=LinkRate(rate_bps=HOST_BPS)
        )
        case = Case(job, any_plan(draw, names, len(layers)), any_plan(draw, [d.name for d in left], len(layers)))
        try:
            case.moves()
        except FatalLossError:
            continue
        count -= 1
        yield case


def missing(case: Case, plan: PipelinePlan) -> Iterator[int]:
    """Yields the layers that have to move, once for each device that needs a layer and does not have it."""
    for name, stages in plan.stages.items():
        held = {x for s in case.old.stages.get(name, ()) for x in s.layers}
        yield from {x for s in stages for x in s.layers} - held


def nbytes_of(case: Case, plan: PipelinePlan) -> int:
    """Returns the bytes of all layers that have to move."""
    return sum(case.job.costs.state(x, x + 1) for x in missing(case, plan))


def busiest(moves: Moves) -> int:
    """Returns the bytes that the busiest card sends or receives, whichever is more."""
    receives: Counter[str] = Counter()
    for x in moves.links:
        receives[x.target] += x.nbytes
    return max(moves.busiest_source_nbytes, *receives.values(), 0)


def busiest_link_s(moves: Moves) -> float:
    """Returns the seconds of the busiest direction of a link between two cards."""
    return max((x.seconds for x in moves.links), default=0.0)


def rank_order(old: PipelinePlan, new: PipelinePlan) -> PipelinePlan:
    """Returns the new plan with survivors placed in the order of their old places."""
    order = {name: i for i, name in enumerate(old.stages)}
    left = sorted(new.devices, key=lambda name: (order.get(name, len(order)), name))
    return renamed(new, dict(zip([*new.stages, *new.idle], left, strict=True)))


def against_permutations(result: Result, seed: int, count: int) -> None:
    """Compares the bytes of chosen moves, in all and at the busiest card, with those of the best permutation of
    devices.
    """
    more = busier = other = 0
    for case in small_cases(seed, count):
        kinds = {d.name: d.kind for d in case.job.devices}
        places = case.new.devices
        plans = [
            renamed(case.new, dict(zip(places, order, strict=True)))
            for order in permutations(places)
            if all(kinds[a] == kinds[b] for a, b in zip(places, order, strict=True))
        ]
        nbytes = [nbytes_of(case, plan) for plan in plans]
        tried = [case.moves(plan) for plan, n in zip(plans, nbytes, strict=True) if n == min(nbytes)]
        placed = assign(*case)
        ours = case.moves(placed)
        more += nbytes_of(case, placed) != min(nbytes)
        other += ours.nbytes != nbytes_of(case, placed)
        busier += busiest(ours) > min(map(busiest, tried))
    result.add(f"moves: of {count} small cases, those with more bytes than the best permutation", more, "count", 0)
    result.add(f"moves: of {count} small cases, those with a list of more or fewer bytes", other, "count", 0)
    result.add(f"moves: of {count} small cases, those whose busiest card could be less busy", busier, "count")


# ------------------------------------------------------------------------------------------------ the paper's cases


def seven_of_eight(layers: int, lost: int, micro_batches: Sequence[int], card: str = "card{}") -> Case:
    """Returns the loss of one of eight cards on a host: four pipelines of two stages become pipelines of 2, 2 and 3
    stages.
    """
    names = [card.format(i) for i in range(8)]
    job = TrainingJob(
        layers=tuple(decoder_layer(f"block {i}", 202e6) for i in range(layers)),
        devices=tuple(Device(name=x, memory_nbytes=1 << 40, host="host") for x in names if x != names[lost]),
        micro_batches=sum(micro_batches),
        within_host=LinkRate(rate_bps=LINK_BPS),
    )
    old = PipelinePlan(layers, tuple(pipeline(names[q : q + 2], even(layers, 2), 1) for q in range(0, 8, 2)))
    left = [d.name for d in job.devices]
    rows = [(left[:2], 2), (left[2:4], 2), (left[4:], 3)]
    new = [pipeline(who, even(layers, n), m) for (who, n), m in zip(rows, micro_batches, strict=True)]
    return Case(job, old, PipelinePlan(layers, tuple(new)))


def unbalanced(case: Case, plan: PipelinePlan) -> int:
    """Returns the bytes that the busiest source sends if each layer comes from its first holder."""
    left = {d.name for d in case.job.devices}
    first = [min(who & left) for who in case.old.holders()]
    sends: Counter[str] = Counter()
    for x in missing(case, plan):
        sends[first[x]] += case.job.costs.state(x, x + 1)
    return max(sends.values(), default=0)


def transfer(result: Result) -> None:
    """Adds figures of the moves in Fig. 10: means over the loss of each card."""
    for layers in (4, 8, 16):
        cases = [seven_of_eight(layers, lost, (1, 1, 1)) for lost in range(8)]
        ours = [assign(*case) for case in cases]
        moves = [case.moves(plan) for case, plan in zip(cases, ours, strict=True)]
        ranked = [case.moves(rank_order(case.old, case.new)) for case in cases]
        name = f"moves, Fig. 10, {layers} layers"
        saved = 100 * (1 - sum(x.seconds for x in moves) / sum(x.seconds for x in ranked))
        result.add(
            f"{name}: bytes, ours over rank order",
            sum(x.nbytes for x in moves) / sum(x.nbytes for x in ranked),
            "ratio",
            1.0,
        )
        result.add(f"{name}: time saved against rank order", saved, "%")
        result.add(f"{name}: time on links of {LINK_BPS / 1e9:g} Gbit/s", sum(x.seconds for x in moves) / 8, "s")
        result.add(
            f"{name}: busiest link, ours over rank order",
            sum(map(busiest_link_s, moves)) / sum(map(busiest_link_s, ranked)),
            "ratio",
        )
        before = sum(unbalanced(case, plan) for case, plan in zip(cases, ours, strict=True))
        result.add(
            f"{name}: busiest source, balanced over unbalanced",
            sum(x.busiest_source_nbytes for x in moves) / before,
            "ratio",
            1.0,
        )
    result.remark(
        f"the paper saves {PAPER_TRANSFER}% at 16 layers and nothing significant at 4 and 8, against an order that it "
        "does not tell"
    )


def sending(result: Result) -> None:
    """Adds figures of Fig. 11: steps of pipelines of 2, 2 and 3 stages by the order of their all-reduces."""
    ways: tuple[Sending, ...] = ("rounds", "at once")
    for batch, paper in PAPER_STEP.items():
        splits = [(m, m, batch - 2 * m) for m in range(1, batch // 2)]
        job, _, plan = min(
            (seven_of_eight(32, 0, x) for x in splits),
            key=lambda case: estimate(case.job, case.new).compute_s,
        )
        done = estimate(job, plan)
        name = f"rounds, Fig. 11, batch {batch}"
        for overlap, when in ((True, "begun when ready"), (False, "begun after the pipelines")):
            in_a_row = step_s(job, plan, "row", single_layers=True, overlap=overlap)
            result.add(f"{name}, {when}: step with layers in a row", in_a_row, "s")
            result.add(f"{name}, {when}: all-reduces not hidden in that", 100 * (1 - done.compute_s / in_a_row), "%")
            for single, what in ((True, "layers"), (False, "groups")):
                for way in ways:
                    taken = step_s(job, plan, way, single_layers=single, overlap=overlap)
                    result.add(f"{name}, {when}: {what} {way}, saved of the step", 100 * (1 - taken / in_a_row), "%")
        result.add(
            f"{name}: as the estimate has it, over begun when ready in a row",
            done.step_s / step_s(job, plan, "row"),
            "ratio",
        )
        saved = in_a_row - step_s(job, plan, "rounds", single_layers=True, overlap=False)
        result.add(
            f"{name}, begun after the pipelines: saved of the all-reduces",
            100 * saved / (in_a_row - done.compute_s),
            "%",
        )
        result.remark(f"the paper saves {paper}% of the step at batch {batch}, and {PAPER_SUMS}% of its all-reduces")


# ------------------------------------------------------------------------------------------------ rounds


def shortest_s(all_of: Sequence[Vertex]) -> float:
    """Returns the shortest time of all-reduces over all ways to group them into rounds (colourings)."""
    near = neighbours_of(all_of)
    order = sorted(range(len(all_of)), key=lambda i: -all_of[i].seconds)

    def rest(k: int, rounds: list[list[int]]) -> float:
        if k == len(order):
            return 0.0
        i = order[k]
        tried = [all_of[i].seconds + rest(k + 1, [*rounds, [i]])]
        for at, r in enumerate(rounds):
            if not near[i].intersection(r):
                tried.append(rest(k + 1, [x + [i] * (at == n) for n, x in enumerate(rounds)]))
        return min(tried)

    return rest(0, [])


def against_colourings(result: Result, seed: int, count: int) -> None:
    """Compares rounds of all-reduces with the shortest ones possible, and all-reduces of single layers with those of
    groups.
    """
    draw = random.Random(seed)
    over, times, numbers = [], [], []
    while len(over) < count:
        layers = draw.randint(4, 16)
        at, rows = 0, []
        for _ in range(draw.randint(2, 5)):
            stages = draw.randint(1, 4)
            cut = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
            rows.append(pipeline([f"d{at + k}" for k in range(stages)], cut, 1))
            at += stages
        job = TrainingJob(
            layers=tuple(decoder_layer(f"l{i}", draw.choice((1e6, 1e6, 3e6, 2e7))) for i in range(layers)),
            devices=tuple(Device(name=f"d{i}", memory_nbytes=1 << 40) for i in range(at)),
            micro_batches=len(rows),
            between_hosts=LinkRate(rate_bps=HOST_BPS),
        )
        plan = PipelinePlan(layers, tuple(rows))
        groups, single = vertices(job, plan), vertices(job, plan, single_layers=True)
        if 1 < len(groups) <= FEW_GROUPS:
            by_group, by_layer = colour(groups), colour(single)
            over.append(rounds_s(by_group) / shortest_s(groups))
            times.append(rounds_s(by_layer) / rounds_s(by_group))
            numbers.append(len(by_layer) / len(by_group))
    name = f"rounds, {count} plans of up to {FEW_GROUPS} groups"
    result.add(f"{name}: those longer than the best colouring", sum(x > 1 + DIGITS for x in over), "count", 0)
    result.add(f"{name}: longest over the best colouring", max(over), "ratio")
    result.add(f"{name}: number of rounds, layers over groups, median", median(numbers), "ratio")
    result.add(f"{name}: seconds of rounds, layers over groups, median", median(times), "ratio")


# ------------------------------------------------------------------------------------------------ a large fleet


def taken_s(call: Callable[[], object], times: int = 5) -> float:
    """Returns the median seconds that a function call takes."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken)


def large(result: Result, devices: int) -> None:
    """Measures the moves of a large fleet after the loss of one device, and of one host."""
    blocks = [decoder_layer(f"block {i}", 8e8) for i in range(78)]
    job = TrainingJob(
        layers=(decoder_layer("embedding", 3e8), *blocks, decoder_layer("head", 5e8)),
        devices=tuple(Device(name=f"d{i:05}", memory_nbytes=80 << 30, host=f"h{i // 8:04}") for i in range(devices)),
        micro_batches=4 * devices,
        within_host=LinkRate(rate_bps=LINK_BPS),
        between_hosts=LinkRate(rate_bps=HOST_BPS),
    )
    planner = Planner(job)
    old = planner.first().plan
    names = [d.name for d in job.devices]
    for what, lost in (("one device", names[100:101]), ("one host", names[96:104])):
        left = job.without(lost)
        new = planner.first([d.name for d in left.devices])
        case = Case(left, old, new.plan)
        ours = assign(*case)
        moves, ranked = case.moves(ours), case.moves(rank_order(old, new.plan))
        name = f"moves, {devices} devices without {what}"
        result.add(f"{name}: to assign and list", taken_s(lambda c=case: c.moves(assign(*c))), "s", 1.0)
        result.add(f"{name}: bytes, ours over rank order", moves.nbytes / ranked.nbytes, "ratio", 1.0)
        result.add(f"{name}: time, ours over rank order", moves.seconds / ranked.seconds, "ratio")
        result.add(f"{name}: time on links of {HOST_BPS / 1e9:g} Gbit/s between hosts", moves.seconds, "s")
        result.add(
            f"{name}: busiest source, balanced over unbalanced",
            moves.busiest_source_nbytes / unbalanced(case, ours),
            "ratio",
            1.0,
        )
        slowest = busiest_link_s(moves) / busiest_link_s(ranked)
        result.add(f"{name}: busiest link, ours over rank order", slowest, "ratio")
        longer = estimate(left, ours).step_s / new.estimate.step_s
        result.add(f"{name}: step, over the same plan with hosts kept together", longer, "ratio")
        all_of = vertices(left, ours)
        result.add(f"rounds, {devices} devices without {what}: to colour", taken_s(lambda v=all_of: colour(v), 1), "s")
        busy: Counter[str] = Counter(x for v in all_of for x in v.owners)
        result.add(f"rounds, {devices} devices without {what}: rounds", len(colour(all_of)), "count")
        result.add(f"rounds, {devices} devices without {what}: most groups on one", max(busy.values()), "count")


def main() -> int:
    options = Options(__doc__, raw=True)
    options.add_seed("of the small cases")
    options.add_count("--cases", 200, 200, "small cases of moves")
    options.add_count("--plans", 500, 100, "plans to colour")
    options.add_series("--devices", (1024,), "fleets")
    args = options.parse_args()
    result = Result("moves")
    against_permutations(result, args.seed, args.cases)
    transfer(result)
    for devices in args.devices:
        large(result, devices)
    against_colourings(result, args.seed, args.plans)
    sending(result)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
