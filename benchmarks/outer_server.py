"""Measures a follower of a parameter server: from a round's pushes to the new fp32 state and its bf16 copy, on one
core.

A shard of fp32 parameters and momentum gets rounds of k pushes in bf16 through the outer kernel: pushes are decoded and
averaged, momentum and parameters are updated in place, the new version is encoded. Figures are GB of fp32 parameters
per second (4 bytes for each). With one push 20 bytes per parameter go through memory: 16 of the state, read and
written, 2 of the push, 2 of the version; each further push adds 2. Beside each, in the same round, the machine copies
so many bytes (half are read, half are written), and `torch.optim.SGD(nesterov=True, fused=True)` does its step on as
many parameters, from a gradient in fp32 and without a version.

Also: a round that only collects (the buffer is written, the momentum stays), pushes in int8, and the products of two
pushes, from which the leader has norms and cosines.

Then the codecs: bytes, rates, what they drop. The way there: 256 MiB pushed and fetched (outer_data.py), each at least
at 0.6 of a socket's rate. Control while data floods (outer_control.py). A follower's peak memory (outer_memory.py).

Torch has one thread. The order of the cases changes from turn to turn; each figure is the median over the turns, each
ratio the median of the turns' own ratios. Bounds, for one push in bf16: 2 GB/s at least, and at least half of what
copying alone would reach.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import torch

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.outer_control import control
from benchmarks.outer_data import transfers
from benchmarks.outer_memory import memory
from chaos_lightning.outer.exchange.codec import BF16, FP32, INT8, Format, Part
from chaos_lightning.outer.exchange.kernel import OuterState, RoundUpdate, freeze, products, settle
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.types import Factors

MOST_S_PER_GB = 1 / 2
MOST_TIME_OF_COPY = 1 / 0.5
ETA, MU = 0.7, 0.8
MOVES = Factors(rate=ETA, buffer=1.0, momentum=MU, outer=1.0, step=ETA * MU)
COLLECTS = Factors(rate=ETA / 4, buffer=1 / 4, momentum=MU)

FORMATS: dict[str, Format] = {format.name: format for format in (FP32, BF16, INT8)}

Case = Callable[[], object]


def nbytes_moved(pushes: int) -> int:
    """Returns the bytes of memory traffic per parameter of a round that updates the momentum, with pushes in bf16."""
    return 18 + 2 * pushes


def update_of(shard: Shard, format: Format, pushes: int, factors: Factors) -> Case:
    """Returns a function that carries out one round; repeated calls go on with the same state."""
    state = OuterState(shard, torch.randn(shard.elements))
    deltas = [Part.encoded(shard, format, 1e-3 * torch.randn(shard.elements)) for _ in range(pushes)]
    version = Part.empty(shard, BF16)
    return lambda: RoundUpdate(state, [(1 / pushes, d) for d in deltas], factors, version).run()


def copy_of(nbytes: int) -> Case:
    """Returns a function that copies memory, with `nbytes` read and written in all."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def sgd_of(elements: int) -> Case:
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = 1e-3 * torch.randn(elements)
    optimizer = torch.optim.SGD([parameter], lr=ETA, momentum=MU, nesterov=True, fused=True)
    return optimizer.step


def products_of(shard: Shard) -> Case:
    one, other = (Part.encoded(shard, BF16, 1e-3 * torch.randn(shard.elements)) for _ in range(2))
    return lambda: products(one, other)


def timed(cases: dict[str, Case], turns: int, seed: int) -> dict[str, list[float]]:
    """Returns the seconds of each case in each turn, without a first turn that warms up."""
    rng = random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name in rng.sample(list(cases), len(cases)):
            began = time.perf_counter()
            cases[name]()
            if turn:
                taken[name].append(time.perf_counter() - began)
    return taken


def updates(result: Result, shard: Shard, pushes: list[int], turns: int, seed: int) -> None:
    """Adds the rates of a follower's rounds, and of memory copies and an SGD step for comparison."""
    rounds = {f"round, pushes in bf16: {k}": (k, update_of(shard, BF16, k, MOVES)) for k in pushes}
    copies = {f"copy of {n} bytes per parameter": copy_of(n * shard.elements) for n in map(nbytes_moved, pushes)}
    others = {
        "round that only collects, pushes in bf16: 1": update_of(shard, BF16, 1, COLLECTS),
        "round, pushes in int8: 1": update_of(shard, INT8, 1, MOVES),
        "products of two pushes in bf16": products_of(shard),
        "torch.optim.SGD, nesterov, fused": sgd_of(shard.elements),
    }
    cases = {name: case for name, (_, case) in rounds.items()} | copies | others
    taken = timed(cases, turns, seed)
    gigabytes = shard.nbytes(4) / 1e9
    for name, seconds in taken.items():
        result.add(name, gigabytes / median(seconds), "GB/s")
        result.details[f"seconds, {name}"] = seconds
    for name, (k, _) in rounds.items():
        only = k == 1
        copy = f"copy of {nbytes_moved(k)} bytes per parameter"
        result.add(f"time of {name}", median(taken[name]) / gigabytes, "s per GB", MOST_S_PER_GB if only else None)
        result.ratio(f"time of {name} / {copy}", taken[name], taken[copy], MOST_TIME_OF_COPY if only else None)
        result.ratio(f"time of {name} / SGD", taken[name], taken["torch.optim.SGD, nesterov, fused"])
        if only:
            per_copy = median([b / a for a, b in zip(taken[name], taken[copy], strict=True)])
            rate = gigabytes / median(taken[name])
            result.headline.append(f"one push: {rate:.2f} GB/s of fp32 parameters per core, {per_copy:.2f} of copying")


def codecs(result: Result, shard: Shard, turns: int, seed: int) -> None:
    """Adds the figures of each number format: its bytes, how fast one core encodes and decodes it, and the loss of
    precision.

    A cluster's pushes are drawn (normal, the length of each block drawn, too), and frozen one after another as clusters
    do it, with a residual where the format has one. What is dropped is the length of the error over the length of the
    delta: of one push, and of the sum of all.
    """
    torch.manual_seed(seed)
    base = Part.encoded(shard, FP32, torch.zeros(shard.elements))
    scale = torch.empty(shard.elements)
    for place in shard.places:
        scale[place] = 1e-3 * math.exp(random.Random(place.start).gauss(0, 1))
    deltas = [torch.randn(shard.elements) * scale for _ in range(turns)]
    for name in sorted(FORMATS):
        format = FORMATS[name]
        push, residual = Part.empty(shard, format), torch.zeros(shard.elements)
        writing, reading, alone = [], [], []
        wanted, got = torch.zeros(shard.elements), torch.zeros(shard.elements)
        for delta in deltas:
            began = time.perf_counter()
            freeze(base, delta, push, residual if format.residual else None)
            frozen = time.perf_counter()
            decoded = push.decoded()
            reading.append(time.perf_counter() - frozen)
            writing.append(frozen - began)
            if format.residual:
                settle(base, delta, push, residual)
            wanted.sub_(delta)
            got.add_(decoded)
            alone.append(float((Part.encoded(shard, format, delta).decoded() - delta).norm() / delta.norm()))
        gigabytes = shard.nbytes(4) / 1e9
        result.add(f"codec {name}: bytes", push.data.numel() / shard.elements, "B/param")
        result.add(f"codec {name}: freezing a push", gigabytes / median(writing), "GB/s")
        result.add(f"codec {name}: reading it", gigabytes / median(reading), "GB/s")
        result.add(f"codec {name}: dropped of one push", median(alone), "ratio")
        dropped = float((got - wanted).norm() / wanted.norm())
        result.add(f"codec {name}: dropped of the sum of {turns} pushes", dropped, "ratio")


def main() -> int:
    p = Options(__doc__)
    p.add_count("--turns", 21, 7, "turns of all cases")
    p.add_count("--state-mib", 256, 128, "MiB of fp32 parameters; far beyond the caches, or it says nothing")
    p.add_count("--transfers", 11, 3, "turns of all transfers between two processes")
    p.add_count("--transfer-mib", 256, 256, "MiB of a transfer")
    p.add_count("--codec-mib", 64, 16, "MiB of fp32 parameters whose deltas each codec gets")
    p.add_count("--codec-pushes", 16, 4, "pushes that each codec gets")
    p.add_count("--calls", 2000, 200, "control round trips of each kind")
    p.add_count("--memory-mib", 256, 32, "MiB of fp32 parameters of the job whose followers' memory is measured")
    p.add_count("--durable", 6, 2, "durable versions of that job")
    p.add_series("--pushes", [1, 2, 4, 8], "accepted pushes in a round")
    p.add_seed("of the order of cases")
    args = p.parse_args()
    torch.set_num_threads(1)
    result = Result("outer_server")
    shard = Grid((args.state_mib * MIB // 4,)).whole
    updates(result, shard, args.pushes, args.turns, args.seed)
    codecs(result, Grid((args.codec_mib * MIB // 4,)).whole, args.codec_pushes, args.seed)
    transfers(result, args.transfer_mib, args.transfers, args.seed)
    control(result, args.calls, args.seed)
    memory(result, args.memory_mib, args.durable)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
