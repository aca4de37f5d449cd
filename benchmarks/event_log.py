"""Measures the event log: bytes of a step, time of a step with logs and without, and files under the daily size limit.

Two members train in real processes, in blocks of steps that are logged and of steps that are not, in turns: the same
processes, the same minute. With logs a step may take as long as in the slowest block without. A step costs what
the files grew by in logged blocks, and in one of slow steps, of which losses and links are a larger part. Then one
process writes commits as fast as it can, with a limit of 2 MB a day: what lies in the folder is looked at all the
while. A day at the measured step time is reckoned from that.
"""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, median, run
from benchmarks.members import compute_alone
from benchmarks.workers import context, scheduler, scratch, several
from chaos_lightning.events.events import EventLog
from chaos_lightning.events.reader import log_files, part_of, read_events

NAMES = ("a", "b")
BATCH = 32
WIDTH = 256
DAY_S = 86400
LIMIT_NBYTES = 2_000_000
BOUND_STEP_NBYTES = 200
SLOW_S, SLOW_STEPS = 0.35, 50


def member(pipe: Connection, endpoint: str, name: str, logs: str, block: int, blocks: int) -> None:
    """Runs a member; sends for each block whether logs were on, its seconds a step and its log's growth, then the bytes
    of a slow step.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from chaos_lightning.trainer import Trainer

    compute_alone()
    trainer = Trainer(name=name, endpoint=endpoint, log_dir=logs, min_nodes=len(NAMES), host_scheduler=False)
    events = trainer.engine.events
    log: Any = events
    emit = log.emit
    data = TensorDataset(torch.randn(50_000, WIDTH))
    with trainer:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = iter(trainer.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True), epochs=1_000))

        def train(steps: int, pause_s: float = 0.0) -> tuple[float, int]:
            began, size = time.monotonic(), _size(events)
            for (x,) in itertools.islice(batches, steps):
                optimizer.zero_grad()
                trainer.backward((model(x) - x).square().mean())
                trainer.update()
                time.sleep(pause_s)
            return (time.monotonic() - began) / steps, _size(events) - size

        train(block)  # warms up
        for at in range(blocks):
            log.emit = _nothing if at % 2 else emit
            pipe.send((at % 2 == 0, *train(block)))
        log.emit = emit
        pipe.send(train(SLOW_STEPS, SLOW_S)[1] / SLOW_STEPS)


def _size(events: EventLog) -> int:
    return events.path.stat().st_size if events.path is not None else 0


def _nothing(name: str, /, **fields: object) -> None: ...


def trained(result: Result, folder: Path, block: int, blocks: int) -> float:
    """Trains in alternating blocks with and without logs; returns the seconds of a step with logs."""
    logs = folder / "events"
    told: list[tuple[bool, float, int]] = []
    with (
        scheduler(len(NAMES), log_dir=str(logs)) as endpoint,
        several(context(), member, [(endpoint, name, str(logs), block, blocks) for name in NAMES]) as workers,
    ):
        for _ in range(blocks):
            told += [worker.receive() for worker in workers]
        slow = [worker.receive() for worker in workers]
    with_ms, without_ms = ([s * 1e3 for on, s, _ in told if on is wanted] for wanted in (True, False))
    result.details |= {"ms a step with logs": with_ms, "without": without_ms}
    result.add("step with logs", median(with_ms), "ms")
    result.add("step without logs", median(without_ms), "ms")
    result.add("step with logs / slowest block without", median(with_ms) / max(without_ms), "ratio", 1.0)
    grown = [nbytes / block for on, _, nbytes in told if on]
    result.add("bytes a step and member", median(grown), "bytes", BOUND_STEP_NBYTES)
    result.add("the worst block's", max(grown), "bytes", BOUND_STEP_NBYTES)
    result.add(f"of steps of {SLOW_S} s", max(slow), "bytes", BOUND_STEP_NBYTES)
    return median(with_ms) / 1e3


def limited(result: Result, folder: Path, lines: int) -> None:
    """Writes many commits to an event log with a daily size limit, and measures its processor time and size."""
    head = {"view": "1.1", "next_view": "1.1", "contributors": [["a~1", 32.0], ["b~2", 32.0]]}
    worst, began, looking_s = 0, time.process_time(), 0.0
    with EventLog.in_directory(folder, "a", day_nbytes=LIMIT_NBYTES) as log:
        log.identify("a~1")
        for seq in range(1, lines + 1):
            here = f"{seq * 0x9E3779B97F4A7C15 % (1 << 64):016x}"
            before = f"{(seq - 1) * 0x9E3779B97F4A7C15 % (1 << 64):016x}"
            spent = [{"stream": "", "epoch": 0, "spans": [[seq * 64, seq * 64 + 32]]}]
            ledger = [{"stream": "", "epoch": 0, "spans": [[0, seq * 64 + 64]]}]
            times = {"duration_s": 0.012345 + seq % 7 / 1e3, "wait_s": 0.001234}
            log.emit(
                "committed", seq=seq, kind="step", step=seq, header=here, prev=before, spent=spent, ledger=ledger,
                **head, **times,
            )  # fmt: skip
            if seq % 500 == 0:
                looked = time.process_time()
                worst = max(worst, sum(path.stat().st_size for path in log_files(folder)))
                looking_s += time.process_time() - looked
        line_us = (time.process_time() - began - looking_s) / lines * 1e6
        written = sum(path.stat().st_size for path in log_files(folder))
    result.add("processor time of a line", line_us, "us")
    result.add("bytes in the folder / limit, at worst", worst / LIMIT_NBYTES, "ratio", 1.0)
    records, files = list(read_events(folder)), log_files(folder)
    kept = sum(r.name == "committed" for r in records)
    gone = sum(r["count"] for r in records if r.name == "lost")
    opened = part_of(files[-1])[1] + 1 - len(files)  # each file that is gone began with a line of its own
    result.remark(f"{lines} commits under {LIMIT_NBYTES} bytes: {kept} kept in {written} bytes, {gone} lines told lost")
    result.add("lines that are neither kept nor told", abs(lines + opened - gone - kept), "count", 0)


def main() -> int:
    parser = Options(__doc__)
    parser.add_count("--block", 200, 100, "steps of a block")
    parser.add_count("--blocks", 20, 8, "blocks, half of them logged")
    parser.add_count("--lines", 200_000, 50_000, "commits that are written under a limit")
    args = parser.parse_args()
    result = Result("event_log")
    with scratch() as folder:
        step_s = trained(result, folder / "run", args.block, args.blocks)
        limited(result, folder / "limit", args.lines)
    nbytes = next(f.value for f in result.figures if f.name == "bytes a step and member")
    result.add("a day at this rate, if all were kept", DAY_S / step_s * nbytes / 1e6, "MB")
    result.headline.append(f"{nbytes:.0f} bytes a step")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
