"""Compares undisturbed steps of a pipeline with torch's own 1F1B and with the simulated schedule, and measures their
memory.

Real layers: two processes train four blocks as two stages with eight micro-batches and AdamW, by `chaos_pipeline` and
by torch.distributed.pipelining (`Schedule1F1B` over gloo). Both are there all the time and take turns, some steps each,
so what else the machine does hits both. Ours has Lightning around it, a loader, and a commit of each step.

Timed layers: six processes as three pipelines of two stages, against the planner's simulation of that schedule. What a
commit adds is told: from the last contribution to the header at that member. Tensors that forward passes keep are
counted, and compared with the bytes by which the plan was chosen.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.pipeline_members import pipeline_job
from benchmarks.workers import Worker, context, scheduler, scratch
from chaos_lightning.machine.listener import free_port
from chaos_lightning.planning.pipelines.job import Layer, TrainingJob, stage_memory
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.planning.pipelines.schedules import in_flight
from lab.timed_layers import TimedModel, alike

SIZES = {"small": (256, 48), "middle": (384, 72), "large": (512, 96)}
"""Number of features, and of rows of a micro-batch, by name of the size."""
BOUNDS = {"small": 1.10, "middle": 1.05, "large": 1.05}
BLOCKS, MICRO_BATCHES = 4, 8
TIMED, TIMED_BATCH = {"layers": 6, "width": 64, "forward_s": 0.03, "backward_s": 0.06}, 2
SIMULATED, KEPT = 1.05, 0.1


# ------------------------------------------------------------------------------------------------ real layers


def block(width: int) -> Any:
    """Returns one layer: an MLP with a residual connection."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    return Block()


def batches(width: int, rows: int) -> Any:
    """Returns the inputs and targets of one step."""
    import torch

    return torch.randn(2, MICRO_BATCHES * rows, width, generator=torch.Generator().manual_seed(1))


def profile_of(width: int, rows: int) -> TrainingJob:
    """Returns a profile of equal layers, of which three of the four fit on a device."""
    numbers, wide = 8 * width * width + 7 * width, 4 * rows * width
    layer = Layer(
        name="blocks",
        forward_s=0.01,
        backward_s=0.02,
        parameter_nbytes=4 * numbers,
        gradient_nbytes=4 * numbers,
        optimizer_nbytes=8 * numbers,
        activation_nbytes=10 * wide,
        output_nbytes=wide,
    )
    return alike(layer, BLOCKS, micro_batches=MICRO_BATCHES, samples=rows, owned=3.0)


class Turns:
    """Step counter of a process that the benchmark orders to run steps: ("run", count), answered by the times of their
    ends; ("end",).

    Args:
        pipe: Connection to the benchmark.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._left, self._ends = pipe, 0, list[float]()

    def wait(self) -> bool:
        """Waits for the next order if the last one is carried out, before a step; returns False at the end."""
        if not self._left:
            self._pipe.send(("done", self._ends))
            word, *count = self._pipe.recv()
            if word == "end":
                return False
            self._left, self._ends = count[0], []
        return True

    def ended(self, now_s: float) -> None:
        """Notes that a step has ended."""
        self._left -= 1
        self._ends.append(now_s)


def ours(pipe: Connection, endpoint: str, name: str, width: int, rows: int, profile: str) -> None:
    """Runs a member of this product."""
    import time

    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from chaos_lightning.strategies import ChaosPipelineStrategy

    class Model(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "blocks"):
                self.blocks = nn.ModuleList(block(width) for _ in range(BLOCKS))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            for layer in self.blocks:
                x = layer(x)
            return nn.functional.mse_loss(x, y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Paced(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if not trainer.should_stop:
                trainer.should_stop = not turns.wait()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            turns.ended(time.monotonic())

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    turns, (x, y) = Turns(pipe), batches(width, rows)
    strategy = ChaosPipelineStrategy(
        micro_batches=MICRO_BATCHES, profile=profile, chain="blocks", endpoint=endpoint, name=name, min_nodes=2,
        log_dir="none", options={"host_scheduler": False},
        device_memory=profile_of(width, rows).devices[0].memory_nbytes,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=-1, callbacks=[Paced()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(x.repeat(64, 1), y.repeat(64, 1))
    trainer.fit(Model(), DataLoader(data, batch_size=rows, shuffle=False))
    pipe.send(("bye", []))


def theirs(pipe: Connection, rank: int, port: int, width: int, rows: int) -> None:
    """Runs one process that trains by torch.distributed.pipelining."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    half = nn.Sequential(*(block(width) for _ in range(BLOCKS // 2)))
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    turns, (x, y) = Turns(pipe), batches(width, rows)
    data = TensorDataset(x.repeat(64, 1), y.repeat(64, 1))  # read as ours are: each process reads its own
    steps = itertools.chain.from_iterable(itertools.repeat(DataLoader(data, MICRO_BATCHES * rows)))
    while turns.wait():
        x, y = next(steps)
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        turns.ended(time.monotonic())
    dist.destroy_process_group()
    pipe.send(("bye", []))


def turn(workers: list[Worker], count: int) -> float:
    """Makes these workers run `count` steps; returns the median step, s."""
    for worker in workers:
        worker.pipe.send(("run", count))
    ends = [worker.receive(300.0)[1] for worker in workers]
    last = [max(row) for row in zip(*ends, strict=True)]
    return median([b - a for a, b in itertools.pairwise(last)])


def real(result: Result, size: str, pairs: int, count: int) -> None:
    """Compares this product with torch.distributed.pipelining at one size, in turns."""
    from json import dumps

    from chaos_lightning.planning.pipelines.files import to_dict

    width, rows = SIZES[size]
    print(f" {size}: width {width}, {rows} rows in each of {MICRO_BATCHES} micro-batches", flush=True)
    ctx, port = context("lightning.pytorch", "chaos_lightning.strategies"), free_port()
    with scratch() as folder, scheduler(2) as endpoint:
        file = folder / "profile.json"
        file.write_text(dumps(to_dict(profile_of(width, rows))))
        mine = [Worker(ctx, ours, endpoint, name, width, rows, str(file)) for name in "ab"]
        peer = [Worker(ctx, theirs, rank, port, width, rows) for rank in range(2)]
        try:
            for worker in (*mine, *peer):
                worker.receive(180.0)
            turn(mine, 3)
            turn(peer, 3)
            times = [(turn(mine, count), turn(peer, count)) for _ in range(pairs)]
            for worker in (*mine, *peer):
                worker.pipe.send(("end",))
            for worker in (*mine, *peer):  # the last step takes all of them
                worker.receive(120.0)
        finally:
            for worker in (*mine, *peer):
                worker.kill()
    a, b = zip(*times, strict=True)
    result.add(f"{size}: torch's 1F1B over gloo, median step of {pairs} turns", median(b), "s")
    result.ratio(f"{size}: ours over torch's, median of {pairs} pairs", a, b, BOUNDS[size])


# ------------------------------------------------------------------------------------------------ timed layers


def timed(result: Result, steps: int) -> None:
    """Compares the steps of six devices with the simulated schedule."""
    model = TimedModel(**TIMED)  # type: ignore[arg-type]
    profile = model.job(micro_batches=6, samples=TIMED_BATCH, owned=4.2)
    about = {"model": {"kind": "timed", **TIMED}, "batch": TIMED_BATCH, "micro_batches": 6, "steps": steps}
    memory = profile.devices[0].memory_nbytes
    with pipeline_job(profile=profile, device_memory=memory, **about) as job:
        job.found("abcdef")
        for name in "abcdef":
            if job.harness.wait_exit(name, 300.0):
                raise RuntimeError(job.harness.dump())
        records = job.harness.records
    commits, waits = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for r in records:
        if r.name == "committed" and r.get("kind") == "step":
            commits[r["step"]].append(r.mono)
            waits[r["step"]].append(float(r["wait_s"]))
    ends = [max(at) for _, at in sorted(commits.items())][3:]
    step_s = median([b - a for a, b in itertools.pairwise(ends)])
    choice = next(r for r in records if r.name == "pipelines" and r.get("shape"))
    simulated_s = float(choice["candidates"][choice["chosen"]]["step_s"])
    result.add(f"timed layers, {choice['shape']}: step over the simulated {simulated_s:.3f} s", step_s / simulated_s,
               "ratio", SIMULATED)  # fmt: skip
    commit_s = median([min(row) for _, row in sorted(waits.items())][3:])
    result.add("timed layers: from the last contribution to its header", 1e3 * commit_s, "ms")
    result.add("timed layers: beyond the simulated schedule", 1e3 * (step_s - simulated_s), "ms")


def kept(result: Result, steps: int) -> None:
    """Compares the bytes of tensors that real layers keep with those that the planner predicted."""
    model = {"kind": "gpt", "layers": 6, "width": 64, "block": 64}
    about: dict[str, Any] = {"model": model, "batch": 4, "micro_batches": 6, "text": 60_000, "steps": steps}
    with pipeline_job(device_memory=round(7.5 * MIB), counted=True, **about) as job:
        job.found("abcd")
        for name in "abcd":
            if job.harness.wait_exit(name, 300.0):
                raise RuntimeError(job.harness.dump())
        reports = {name: job.report(name) for name in "abcd"}
        choice = [r for r in job.harness.records if r.name == "pipelines" and r.get("shape")][-1]
    told = PipelineRequest.from_json(reports["a"]["request"]).job
    pipelines, stages = map(int, str(choice["shape"]).split(" x "))
    firsts = sorted({first for [(first, _)] in choice["layers"].values()})
    for member, [(first, end)] in choice["layers"].items():
        share = told.micro_batches // pipelines
        flight = in_flight(stages, firsts.index(first), share)
        planned = stage_memory(told, first, end, flight, share).activations
        ratio = reports[member.partition("~")[0]]["peak_nbytes"] / planned
        title = f"kept tensors of layers {first} to {end - 1}: distance of counted over predicted from 1"
        result.add(title, abs(ratio - 1), "1", KEPT)


def main() -> int:
    p = Options(__doc__)
    p.add_count("--pairs", 8, 3, "turns of ours and of torch's, for each size")
    p.add_count("--steps", 8, 4, "of a turn")
    args = p.parse_args()
    result = Result("pipeline_steady")
    for size in list(SIZES)[:1] if args.quick else SIZES:
        real(result, size, args.pairs, args.steps)
    timed(result, 15 if args.quick else 60)
    kept(result, 4)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
