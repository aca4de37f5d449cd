"""Measures how well a small model learns through a parameter server in two clusters whose steps take a millisecond.

The model ties its embedding to its output, and learns which of 50 tokens follows which; at chance its loss is 3.91, and
1.36 is the least there is. Two processes train it by the plain loop, 500 steps each, with a push after eight. A step is
so short that a version takes many of them: a cluster that trained on without bound would send old differences. The
same is trained by hand: two copies in one process, averaged after each eighth step. Everything is done once on an idle
machine, and once beside processes that take all of its cores. Which push meets which version is chance, and moves the
loss by some hundredths; so the median of several runs is judged, and the worst is told.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Options, Result, run
from benchmarks.workers import scratch
from chaos_lightning.machine.listener import free_port

TOKENS, WIDTH, BATCH, INNER_STEPS = 50, 32, 32, 8
STEPS = 500
"""Steps of each of the two clusters."""
FOLLOWS = 0.78
"""Probability with which the usual token follows; otherwise any does."""
STEP_S = 0.001
RATE, OUTER_LR, OUTER_MOMENTUM = 3e-3, 0.7, 0.8
MOST_LOSS = 1.65
PATIENCE_S = 300.0


class TiedModel(nn.Module):
    """Model that predicts the next token, with one matrix as input and output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.hidden(self.embedding(tokens)))  # type: ignore[no-any-return]


def pairs(number: int, seed: int) -> TensorDataset:
    """Returns `number` random tokens, each with the token that follows; the rule behind them is the same for
    all seeds.
    """
    usual = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + seed)
    tokens, other = torch.randint(TOKENS, (2, number), generator=draw)
    return TensorDataset(tokens, torch.where(torch.rand(number, generator=draw) < FOLLOWS, usual[tokens], other))


def made(seed: int) -> tuple[TiedModel, torch.optim.Optimizer]:
    """Returns a model with fresh weights, and its optimizer."""
    torch.manual_seed(seed)
    model = TiedModel()
    return model, torch.optim.AdamW(model.parameters(), RATE)


def stepped(model: TiedModel, optimizer: torch.optim.Optimizer, tokens: Tensor, following: Tensor) -> Tensor:
    """Trains one step; returns its loss."""
    loss = cross_entropy(model(tokens), following)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def judged(model: TiedModel) -> float:
    """Returns the loss on pairs of tokens that are not used in training."""
    tokens, following = pairs(4096, 1000).tensors
    return float(cross_entropy(model(tokens), following))


def by_hand(seed: int) -> float:
    """Trains two copies in one process, averaged with Nesterov momentum after each round; returns the loss."""
    copies = [made(seed) for _ in range(2)]
    base = [p.detach().clone() for p in copies[0][0].parameters()]
    outer = torch.optim.SGD(base, OUTER_LR, OUTER_MOMENTUM, nesterov=True)
    batches = iter(DataLoader(pairs(2 * STEPS * BATCH, seed), BATCH))
    for number in range(STEPS):
        for model, optimizer in copies:
            stepped(model, optimizer, *next(batches))
        if (number + 1) % INNER_STEPS == 0 or number + 1 == STEPS:
            trained = [list(model.parameters()) for model, _ in copies]
            with torch.no_grad():
                for value, first, second in zip(base, *trained, strict=True):
                    value.grad = value - (first + second) / 2
                outer.step()
                for each in trained:
                    for parameter, value in zip(each, base, strict=True):
                        parameter.copy_(value)
    return judged(copies[0][0])


def cluster(server: str, name: str, seed: int, overlap: bool, ahead_steps: int, logs: str) -> None:
    """Trains one of the two clusters in a process of its own; prints its loss once the job is over."""
    from chaos_lightning.diloco import DiLoCo

    torch.set_num_threads(1)
    model, optimizer = made(seed)
    loader = DataLoader(pairs(2 * STEPS * BATCH, seed), BATCH, shuffle=True)
    with DiLoCo(
        model, optimizer, server=server, name=name, inner_steps=INNER_STEPS, overlap=overlap,
        ahead_steps=ahead_steps, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM, log_dir=logs,
    ) as diloco:  # fmt: skip
        for tokens, following in diloco.prepare(loader):
            began = time.monotonic()
            loss = stepped(model, optimizer, tokens, following)
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))
            diloco.step(loss)
    print(f"loss {judged(model)}", flush=True)


def together(seed: int, *, overlap: bool, ahead_steps: int = 0) -> tuple[float, int]:
    """Trains two clusters together; returns their final loss, and how many versions they made."""
    with scratch() as folder:
        env = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1", "CHAOS_TOKEN": "of a benchmark"}
        words = [f"127.0.0.1:{free_port()}", str(seed), str(int(overlap)), str(ahead_steps), str(folder)]
        command = [sys.executable, "-m", "benchmarks.outer_short_steps", "--cluster", *words]
        running = [subprocess.Popen([*command, name], env=env, stdout=subprocess.PIPE, text=True) for name in "ab"]
        try:
            said = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        if any(process.returncode for process in running):
            raise RuntimeError(f"a cluster ended with {[process.returncode for process in running]}")
        losses = {float(text.split("loss ")[1]) for text in said}
        assert len(losses) == 1, f"clusters end with unequal weights: {losses}"
        return losses.pop(), versions(Path(folder))


def versions(logs: Path) -> int:
    """Returns how many versions the leader made, by its event log."""
    from chaos_lightning.events.reader import read_events

    return sum(r.name == "entry" and r.fields["kind"] == "Round" for r in read_events(logs))


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keeps all cores busy with processes that only compute, while the block runs."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Options(__doc__)
    parser.add_count("--runs", 3, 1, "runs of each case")
    parser.add_argument("--cluster", nargs=6, metavar="WORD", help="be one of the two processes")
    args = parser.parse_args(arguments)
    if args.cluster:
        server, seed, overlap, ahead_steps, logs, name = args.cluster
        cluster(server, name, int(seed), bool(int(overlap)), int(ahead_steps), logs)
        return 0
    result = Result("outer_short_steps")
    seeds = range(args.runs)
    result.add("by hand", max(map(by_hand, seeds)), "loss")
    for load in ("idle", "busy"):
        for overlap in (True, False):
            with busy() if load == "busy" else contextlib.nullcontext():
                found = [together(seed, overlap=overlap) for seed in seeds]
            case = f"{load}, {'overlap' if overlap else 'no overlap'}"
            result.details[case] = found
            losses = [loss for loss, _ in found]
            result.add(f"final loss, {case}, median", statistics.median(losses), "loss", MOST_LOSS)
            result.add(f"final loss, {case}, worst", max(losses), "loss")
            result.add(f"versions, {case}", min(number for _, number in found), "count")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
