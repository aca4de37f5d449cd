"""Measures the time and memory of simulating large fleets; a run is a function of its seed.

10,000 devices for nine hours, each lost at 10% per hour and replaced within minutes: 9,000 losses, under `adaptive`.
Twice, in processes of their own: time and memory are bounded, and both write the same bytes of JSON. The same without
replacement. 1,000 devices for 30 days at 1% per hour, in groups of up to six, with repairs. Then two generated traces
of each kind run through `chaos-lightning simulate` as they are.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import MIB, Options, Result, run
from chaos_lightning.cli.fleet_command import to_json
from chaos_lightning.planning.fleet.generator import Chance, generate
from chaos_lightning.planning.fleet.simulator import FleetRun
from chaos_lightning.planning.fleet.traces import Trace
from chaos_lightning.planning.pipelines.formation import EqualFleet
from chaos_lightning.planning.pipelines.job import PLAIN_MEMORY, Device, Layer, TrainingJob
from chaos_lightning.planning.quantities import HOUR_S

GIB = 1 << 30
LARGE = Chance(devices=10_000, hours=9, rate=0.1, repair_hours=0.05)
SHRINKING = replace(LARGE, repair_hours=0.0)
LONG = Chance(devices=1000, hours=30 * 24, rate=0.01, group=6, repair_hours=4.0)


@dataclass(frozen=True)
class Cost:
    """Seconds and memory of one simulated run, its losses, and the hash of its JSON."""

    seconds: float
    nbytes: int
    """Peak of the process."""
    losses: int
    sha256: str
    """Hash of the JSON."""


def job(devices: int) -> TrainingJob:
    """Returns a job of 80 equal layers, of which a pipeline needs at least eight devices; it has two micro-batches for
    each device.
    """
    layer = Layer(name="", forward_s=0.01, backward_s=0.02, parameter_nbytes=GIB, activation_nbytes=GIB // 32)
    return TrainingJob(
        layers=tuple(replace(layer, name=f"block{i}") for i in range(80)),
        devices=tuple(Device(name=f"d{i}", memory_nbytes=14 * GIB) for i in range(devices)),
        micro_batches=2 * devices,
        memory=PLAIN_MEMORY,
    )


def simulated(chance: Chance, seed: int) -> Cost:
    """Simulates one fleet under the policy `adaptive` in this process; returns the costs."""
    began = time.perf_counter()
    fleet = EqualFleet(job(chance.devices))
    out = FleetRun(fleet, generate(chance, seed), "adaptive", seed=seed, record=True).run()
    text = to_json({"adaptive": [out]}, "benchmark")
    seconds = time.perf_counter() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost(seconds, peak, out.losses, hashlib.sha256(text.encode()).hexdigest())


def apart(chance: Chance, seed: int) -> Cost:
    """Simulates one fleet as `simulated` does, but in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(simulated, chance, seed).result()


def write_events(trace: Trace, path: Path) -> None:
    """Writes a trace as lines of `milliseconds,add|remove,node`, without its slow devices."""
    rows = [(0.0, "add", d) for d in trace.first]
    rows += [(c.at_s, c.kind, d) for c in trace.changes if c.kind in ("add", "remove") for d in c.devices]
    path.write_text("".join(f"{round(at * 1000)},{kind},node-{d}\n" for at, kind, d in rows))


def write_steps(trace: Trace, path: Path) -> None:
    """Writes a trace as lines of `hours,count`, the number of devices over time."""
    rows: list[tuple[float, int]] = []
    for at_s, count in trace.counts():
        if rows:
            rows.append((at_s, rows[-1][1]))
        rows.append((at_s, count))
    rows.append((trace.end_s, rows[-1][1]))
    path.write_text("".join(f"{at_s / HOUR_S:.9g},{count}\n" for at_s, count in rows))


def traces_run(result: Result, seed: int) -> None:
    """Checks that `chaos-lightning simulate` accepts generated traces from files, as it does a user's own."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for write in (write_events, write_steps):
            for i in range(2):
                path = Path(folder, f"{write.__name__}-{i}.csv")
                write(generate(Chance(devices=32, hours=9, rate=0.1, group=6, repair_hours=1.0), seed + i), path)
                command = ["simulate", "gpt:32,4096", "--trace", str(path), "--policy", "adaptive"]
                done = subprocess.run(
                    [sys.executable, "-m", "chaos_lightning.cli", *command], capture_output=True, text=True, check=False
                )
                failed += done.returncode != 0
                if done.returncode:
                    result.remark(done.stderr.strip()[-400:])
    result.add("traces that simulate refuses", failed, "of 4", 0)


def main() -> int:
    options = Options(__doc__)
    options.add_seed("of the histories")
    args = options.parse_args()
    result = Result("fleet")
    share = 0.1 if args.quick else 1.0
    for title, chance, bound_s, times in (
        ("10,000 devices, 9 h, replaced", LARGE, 300.0, 2),
        ("10,000 devices, 9 h, shrinking", SHRINKING, 300.0, 1),
        ("1,000 devices, 30 days, groups and repairs", LONG, 120.0, 1),
    ):
        chance = replace(chance, hours=chance.hours * share)
        costs = [apart(chance, args.seed) for _ in range(times)]
        worst = max(c.seconds for c in costs)
        result.add(f"{title}: {costs[0].losses} losses", worst, "s", bound_s)
        result.add(f"{title}: peak memory", max(c.nbytes for c in costs) / MIB, "MiB", 1024)
        if times > 1:
            result.add(
                f"{title}: other bytes of JSON from the same seed", len({c.sha256 for c in costs}) - 1, "runs", 0
            )
    traces_run(result, args.seed)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
