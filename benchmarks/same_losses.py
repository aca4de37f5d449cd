"""Trains the same script on 1, 3 and 2 processes, and on 1, 3 and 2 in turn, and compares all that it writes.

The script is examples/fixed_batch.py: dropout, random augmentation in the loader's workers, AdamW with OneCycleLR,
validation and a checkpoint every 50 steps, under batch=fixed:64/8. In the run in turn two processes come in while it
trains, and one is killed. Without noise all are compared with Lightning alone, too. Everything is in double precision.

    python -m benchmarks.same_losses --check --figure docs/images/fixed-batch.png
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, run
from benchmarks.workers import scratch
from chaos_lightning.machine.listener import free_port
from chaos_lightning.testing.harness import Harness

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "fixed_batch.py")
DOUBLE = ("--precision", "64-true")
BOUND = 1e-10
"""Largest relative difference of losses in double precision."""
LIMIT_S = 170.0
Launch = Callable[[str], Sequence[str]]
"""Function that returns the command, without the script, by which a node of this name begins."""


@dataclass(frozen=True)
class Trained:
    """Training that is over.

    Attributes:
        values: Logged values by name and, within that, by step.
        files: Names of the checkpoints.
        samples: Samples of each step by member, in the order in which members came; none for Lightning alone.
    """

    values: dict[str, dict[int, float]]
    files: list[str]
    samples: dict[int, dict[str, float]]

    def differences(self, other: Trained, *, but: Sequence[str] = ()) -> dict[str, float]:
        """Returns the largest relative difference of the values of each name.

        Args:
            other: Training to compare with.
            but: Names that are not compared.

        Raises:
            AssertionError: One has values or files that the other lacks.
        """
        assert self.files == other.files, f"{self.files} beside {other.files}"
        found = {}
        for name in sorted((self.values.keys() | other.values.keys()) - set(but)):
            ours, theirs = self.values.get(name, {}), other.values.get(name, {})
            assert ours.keys() == theirs.keys(), f"{name} at steps {sorted(ours.keys() ^ theirs.keys())} in one only"
            found[name] = max(
                abs(value - theirs[step]) / max(abs(theirs[step]), 1e-300) for step, value in ours.items()
            )
        return found


def read(out: Path, records: Sequence[Any] = ()) -> Trained:
    """Reads what the script has written into a folder.

    Args:
        out: The folder.
        records: Events of the members.
    """
    values: dict[str, dict[int, float]] = {}
    with (out / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    values.setdefault(name, {})[int(row["step"])] = float(value)
    steps = [r for r in records if r.name == "committed" and r["kind"] == "step"]
    samples = {r["step"]: {who.partition("~")[0]: weight for who, weight in r["contributors"]} for r in steps}
    return Trained(values, sorted(path.name for path in out.glob("*.ckpt")), samples)


def alone(name: str) -> Sequence[str]:
    """Returns the command of a node that is one process, of this name."""
    return ["env", f"CHAOS_NAME={name}", sys.executable]


class Job:
    """Processes that train the script together.

    Args:
        folder: New folder of the job.
        options: Options of the script.
        launch: Command of each node; "{endpoint}" in it becomes the endpoint.
    """

    def __init__(self, folder: Path, *options: str, launch: Launch = alone) -> None:
        self.out, self.endpoint, self._options, self._launch = (
            folder / "out",
            f"127.0.0.1:{free_port()}",
            options,
            launch,
        )
        own = {"XDG_STATE_HOME": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.harness = Harness(folder, env={"CHAOS_ENDPOINT": self.endpoint, **own}, deadline_s=LIMIT_S)

    def start(self, *names: str) -> None:
        for name in names:
            command = [part.format(endpoint=self.endpoint) for part in self._launch(name)]
            command += [SCRIPT, *self._options, "--out", str(self.out)]
            self.harness.start(name, command)

    def members(self, number: int) -> None:
        """Waits until so many members have trained a step together."""
        self.harness.wait_for("committed", lambda r: r["kind"] == "step" and len(r["contributors"]) == number)

    def result(self) -> Trained:
        """Waits until all processes have ended; returns what they trained."""
        self.harness.wait_all()
        return read(self.out, self.harness.records)


def trained(folder: Path, names: str, *options: str, launch: Launch = alone) -> Trained:
    """Trains with members that have these letters for names, from the first step to the last."""
    job = Job(folder, "--min-nodes", str(len(names)), *options, launch=launch)
    with job.harness:
        job.start(*names)
        return job.result()


def in_turn(folder: Path, victim: str, *options: str) -> Trained:
    """Trains with one member, from step 10 on with three, as soon as they are there, and from step 100 on without the
    victim, which is killed.
    """
    job = Job(folder, "--min-nodes", "1", "--pause-s", "0.1", *options)
    with job.harness:
        job.start("a")
        job.harness.wait_step(10)
        job.start("b", "c")
        job.members(3)
        job.harness.wait_step(100)
        job.harness.kill(victim)
        return job.result()


def plain(folder: Path, *options: str) -> Trained:
    """Trains with Lightning alone."""
    job = Job(folder, "--plain", *options)
    with job.harness:
        job.start("plain")
        return job.result()


def draw(path: Path, runs: dict[str, Trained]) -> None:
    """Draws the losses of all runs over each other, and who computed how much of each step of the last one."""
    from chaos_lightning.observe import charts

    sheet = charts.figure(9.0, 6.4)
    losses, shares = sheet.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    looks = (("#c9d3dd", 7.0, "-"), ("#2563eb", 3.2, "-"), ("#f59e0b", 1.8, "--"), ("#111827", 1.1, ":"))
    for (title, one), (color, width, dashes) in zip(runs.items(), looks, strict=True):
        values = one.values["loss_step"]
        losses.plot([s + 1 for s in values], list(values.values()), dashes, color=color, linewidth=width, label=title)
    charts.style(losses, "Loss of each step", grid="y")
    losses.set_ylim(bottom=0)
    losses.legend(frameon=False, fontsize=9)
    title, last = list(runs.items())[-1]
    steps = sorted(last.samples)
    names = dict.fromkeys(name for step in steps for name in last.samples[step])
    rows = [[last.samples[step].get(name, 0.0) for step in steps] for name in names]
    shares.stackplot(steps, rows, labels=list(names), colors=("#93c5fd", "#fcd34d", "#86efac"), step="mid")
    charts.style(shares, f"Samples of each step by process: {title}", grid="y")
    shares.set_xlabel("step", fontsize=9)
    charts.legend(shares, len(names))
    path.write_bytes(charts.png(sheet))


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_argument("--figure", type=Path, help="draw the losses into this PNG file")
    args = p.parse_args()
    result = Result("same_losses")
    with scratch() as folder:
        one = trained(folder / "one", "a", *DOUBLE)
        runs = {"1 process": one}
        for number, names in ((3, "abc"), (2, "ab")):
            runs[f"{number} processes"] = trained(folder / names, names, *DOUBLE)
        runs["1, then 3, then 2"] = in_turn(folder / "turn", "c", *DOUBLE)
        for title, run_ in list(runs.items())[1:]:
            for name, worst in run_.differences(one).items():
                result.add(f"{title}, {name}: largest relative difference from 1 process", worst, "ratio", BOUND)
        bare = plain(folder / "plain", "--no-noise", *DOUBLE)
        quiet = trained(folder / "quiet", "abc", "--no-noise", *DOUBLE)
        # In one step Lightning logs the loss of the last micro-batch, and loss_epoch is that of all.
        for name, worst in quiet.differences(bare, but=["loss_step"]).items():
            result.add(f"3 processes without noise, {name}: from Lightning alone", worst, "ratio", BOUND)
    if args.figure:
        draw(args.figure, runs)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
