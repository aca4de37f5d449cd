"""Measures restarts from a checkpoint by torchrun with torch's own pipelining, on the same timed layers as our
benchmark.

One torchrun has six workers, three pipelines of two stages. Each pipeline runs `Schedule1F1B` over gloo, and the three
workers of a stage all-reduce its gradients. Every 20 steps the first pipeline saves its stages. In the middle of a step
one worker gets SIGKILL; torchrun sees that it has ended, ends the others, starts six anew, and they load the newest
checkpoint that has both stages. Deaths are spread evenly between two checkpoints.

Measured from the workers' own logs of steps, by CLOCK_MONOTONIC: the time from the blow until all six have done a step
again, and until they have done the one that was under way. The steps in between are done a second time.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Result, median
from benchmarks.peers import torchrun
from benchmarks.peers.torchrun import SAVE_EVERY

MODULE = "benchmarks.peers.torchrun_pipeline"
PIPELINES, STAGES = 3, 2
WORKERS = PIPELINES * STAGES
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Setting that gives workers a store of their own: in the store that they share with torchrun by default they find
ports of the dead, and no restart succeeds (pytorch issue 135712)."""
DEFAULTS = (
    "torchrun --standalone (one agent, c10d rendezvous), else its defaults: looks every 0.1 s whether a worker has "
    "ended (--monitor-interval), gives the others 30 s after SIGTERM (--shutdown-timeout). One thread a worker, and "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which no restart succeeded"
)


def worker(folder: Path, model: Mapping[str, Any], rows: int, parts: int) -> None:
    """Runs one stage of one pipeline; appends "ns step world" to its file after every step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from benchmarks.members import compute_alone
    from lab.timed_layer import TimedLayer

    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}.{os.getpid()}.steps"
    out = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    compute_alone()
    dist.init_process_group("gloo")
    pipeline, stage = divmod(dist.get_rank(), STAGES)
    across = [dist.new_group([p * STAGES + s for p in range(PIPELINES)]) for s in range(STAGES)][stage]
    along = [dist.new_group([p * STAGES + s for s in range(STAGES)]) for p in range(PIPELINES)][pipeline]
    torch.manual_seed(7)
    layers, width = model["layers"], model["width"]
    chain = [TimedLayer(width, model["forward_s"], model["backward_s"]) for _ in range(layers)]
    mine = nn.Sequential(*chain[stage * layers // STAGES : (stage + 1) * layers // STAGES])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-4)
    if step := newest(folder):
        state = torch.load(folder / f"{step}-{stage}.pt", weights_only=True)
        mine.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    share, stages = parts // PIPELINES, PipelineStage(mine, stage, STAGES, torch.device("cpu"), group=along)
    schedule = Schedule1F1B(stages, share, loss_fn=lambda output, target: output.square().mean())
    data = torch.randn(4096, width, generator=torch.Generator().manual_seed(3))
    while True:
        first = (step * parts + pipeline * share) * rows
        batch = data[[i % len(data) for i in range(first, first + share * rows)]]
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*([batch] if stage == 0 else []), target=batch)
        for parameter in mine.parameters():
            dist.all_reduce(parameter.grad, group=across)
            parameter.grad /= PIPELINES
        optimizer.step()
        step += 1
        os.write(out, f"{time.monotonic_ns()} {step} {dist.get_world_size()}\n".encode())
        if step % SAVE_EVERY == 0 and pipeline == 0:
            saved = folder / f"{step}-{stage}.pt"
            torch.save({"model": mine.state_dict(), "optimizer": optimizer.state_dict()}, saved.with_suffix(".part"))
            saved.with_suffix(".part").rename(saved)


def newest(folder: Path) -> int:
    """Returns the last step for which all stages have a checkpoint; 0 if there is none."""
    stages = Counter(int(path.name.partition("-")[0]) for path in folder.glob("*-*.pt"))
    return max((step for step, count in stages.items() if count == STAGES), default=0)


@dataclass(frozen=True)
class Death:
    """Costs of one worker's death and of the restart after it.

    Attributes:
        first_s: Seconds from the blow until all have done a step again.
        newer_s: Seconds from the blow until all have done the step that was under way at the blow.
        redone: Number of steps done a second time before that one.
        step_s: Median duration of the steps before the blow, in seconds.
    """

    first_s: float
    newer_s: float
    redone: int
    step_s: float


def deaths(job: torchrun.Job, count: int) -> Iterator[Death]:
    """Kills `count` workers one after the other; yields the costs of each restart."""
    for n in range(count):
        before, after = ([f"{start}-{rank}" for rank in range(WORKERS)] for start in (n, n + 1))
        phase = SAVE_EVERY * (n + 1) // (count + 1)
        victim = job.wait(before, WORKERS, 0, SAVE_EVERY + phase)[n % WORKERS]
        lines = [x for x in job.lines(before[n % WORKERS]) if x.step <= victim.step]
        step_s = median([b.ns - a.ns for a, b in itertools.pairwise(lines)]) / 1e9
        time.sleep(max(0.0, victim.ns / 1e9 + step_s / 2 - time.monotonic()))
        struck = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        first = job.wait(after, WORKERS, struck, 1)
        done = min(job.lines(name)[-1].step for name in before)
        redone = done + 1 - first[0].step
        newer = job.wait(after, WORKERS, struck, redone + 1)
        first_s, newer_s = ((max(x.ns for x in those) - struck) / 1e9 for those in (first, newer))
        yield Death(first_s, newer_s, redone, step_s)


def measure(
    result: Result, model: Mapping[str, Any], rows: int, parts: int, count: int, ours_s: Mapping[str, float]
) -> None:
    """Adds the costs of `count` restarts, and their ratio to our recoveries, given in s by campaign.

    `model` are arguments of `TimedModel`; a step has `parts` micro-batches of `rows` samples in all pipelines together.
    """
    title = f"torchrun, torch's 1F1B {PIPELINES} x {STAGES}, checkpoint every {SAVE_EVERY} steps"
    print(f" {title}: {count} deaths", flush=True)
    result.remark(DEFAULTS)
    found: list[Death] = []
    with torchrun.running() as job:
        words = [json.dumps({"model": model, "rows": rows, "parts": parts})]
        job.start("all", "--standalone", f"--nproc-per-node={WORKERS}", module=MODULE, words=words, **OWN_STORE)
        try:
            found.extend(deaths(job, count))
        except TimeoutError as error:
            result.remark(f"{title}: {error}")
    result.details[title] = [asdict(x) for x in found]
    if found:
        newer_s = median([x.newer_s for x in found])
        result.add(f"{title}: SIGKILL to a step that is new, median of {len(found)}", newer_s, "s")
        result.add(f"{title}: SIGKILL to a step at all, median", median([x.first_s for x in found]), "s")
        result.add(f"{title}: steps redone, median", median([x.redone for x in found]), "steps")
        result.add(f"{title}: a step, median", median([x.step_s for x in found]), "s")
        for campaign, seconds in ours_s.items():
            result.add(f"{campaign}: SIGKILL to the next step, over torchrun's", seconds / newer_s, "ratio")


if "TORCHELASTIC_RUN_ID" in os.environ and __name__ == "__main__":  # torchrun starts this module as its worker
    worker(Path(sys.argv[1]), **json.loads(sys.argv[2]))
