"""Runs a soak of pipelines: members of `chaos_pipeline` suffer faults, and each step must have the loss of training in
one process.

Six to eight processes train a small GPT in stages; no device has memory for more than half of it. They are hurt as in
any soak (crew.py, links.py), with two differences. A member dies, leaves or freezes only while its layers are at others
too, and no layers move: a soak wants no job that ends. And links are cut, stalled, slowed down and removed one by one,
or blink; nobody is cut off. Deaths are at random moments and at places of a step (pipeline_members.py).

Deaths change no sample of any step, so losses are compared step by step with plain Lightning in one process, in numbers
of 64 bits: a micro-batch that was left out or counted twice would show. Members write down the loss of each step, and
hashes of the tensors that they own: equal at all. The event logs are audited: coverage, samples, moves, survival.

At last a checkpoint that the soak wrote is read by jobs with three plans, each of which writes it again before it
trains: all tensors have the same bytes. Plain Lightning goes on from one of them, to the loss that the soak had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import xxhash
from torch.utils._pytree import keystr, tree_flatten_with_path

from benchmarks import pipeline_members
from benchmarks.common import MIB, Result, median
from benchmarks.pipeline_members import alone, pipeline_job, tensors_of
from benchmarks.soak.checks import Line, read
from benchmarks.soak.crew import Crew, Driver
from benchmarks.soak.figures import ACTIONS, report_links
from benchmarks.soak.link_checks import read_lines
from benchmarks.soak.member import Journal
from benchmarks.soak.runs import disturbed
from benchmarks.workers import scratch
from chaos_lightning.events.events import Tail
from chaos_lightning.planning.pipelines.files import to_dict
from chaos_lightning.testing.demo.stages import gpt_job

LAYERS, WIDTH, BLOCK, BATCH, MICRO_BATCHES = 6, 32, 16, 2, 6
EPOCH = 50
"""Steps of an epoch, and between two checkpoints."""
ABOUT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": LAYERS, "width": WIDTH, "block": BLOCK},
    "batch": BATCH, "micro_batches": MICRO_BATCHES, "text": 24_000, "samples": EPOCH * BATCH * MICRO_BATCHES,
    "double": True, "save_every": EPOCH,
}  # fmt: skip
PLANS = ("ab", "abcd", "abcdef")
"""Members of jobs that read the checkpoint: they make a pipeline of two stages, two and three of them."""
SETTLED_S = 1.5
"""Pipelines count as settled so long after they were chosen."""
LOSS, SAME = 1e-3, 1e-6
"""Bounds (nats): of a step's loss beside that of one process, and behind a checkpoint."""
CALM, CLOSE, LEAST_CALM = 1e-10, 1e-7, 50
"""Nats to which two undisturbed runs agree up to a step that counts as calm; bound (nats) of such a step's loss beside
that of one process; and fewest calm steps of a soak. A wrong partial sum moved the next loss by 4e-6, and others by up
to 1e-3.
"""
PLACES = {
    "forward": ("forward",),
    "backward": ("backward", "between"),
    "allreduce": ("all-reduce", "contributed"),
    "optimizer": ("optimizer", "handing out"),
}
"""Places of pipeline_members.py, by phase of a fault plan."""


# ------------------------------------------------------------------------------------------------ a member


class Reporter(pl.Callback):
    """Callback that reports a member's progress to the parent, writes its journal, and takes orders to die.

    Args:
        pipe: Connection to the parent.
        journal: Journal of this process.
        strike: Path of the file that names the place of the process's death.
        pace_s: Pause in each step, in seconds.
    """

    def __init__(self, pipe: Connection, journal: Journal, strike: Path, pace_s: float) -> None:
        self._pipe, self._journal, self._strike, self._pace_s = pipe, journal, strike, pace_s
        self._struck = 0
        """Batches since it was told to die."""
        self._words = ["in"]

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._pipe.poll():
            places = PLACES[self._pipe.recv()[1]]
            self._strike.write_text(json.dumps({"place": random.choice(places), "kind": "sigkill"}))
            self._struck = 1
        elif self._struck:
            self._struck += 1
            if self._struck == 3:  # a place that this member does not pass
                self._strike.write_text(json.dumps({"place": "optimizer", "kind": "sigkill"}))
        time.sleep(self._pace_s)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.session.engine.header.step != trainer.global_step:  # type: ignore[attr-defined]
            return  # this member was put out, and the batch is void
        hashes = {n: xxhash.xxh3_64_hexdigest(t.detach().numpy()) for n, t in tensors_of(module).items()}
        self._journal.write("step", step=trainer.global_step, loss=float(outputs["loss"]), hashes=hashes)
        for word in (*self._words, "step"):
            self._pipe.send((word, trainer.global_step))
        self._words = []


def member(
    pipe: Connection, endpoint: str, name: str, folder: str, seed: int, epochs: int, pace_s: float, relay: str = ""
) -> None:
    """Trains until a file ends the training, the member is told to leave, or it is killed."""
    from chaos_lightning.testing.emulation import RELAY, install_from
    from chaos_lightning.testing.processes import die_with_parent

    die_with_parent()
    if relay:
        install_from({RELAY: relay})
    root = Path(folder)
    os.environ["CHAOS_LOG_DIR"] = str(root / "events")
    random.seed(f"{seed}, {name}, {os.getpid()}")
    for talker in ("chaos_lightning", "lightning"):
        logging.getLogger(talker).setLevel(logging.ERROR)  # it is in the event log
    about = json.loads((root / "about.json").read_text())
    about["sample_s"] = about.get("sample_s", 0.0) * (4 if sum(name.encode()) % 2 else 1)
    reporter = Reporter(pipe, Journal(root, name), root / f"strike-{name}", pace_s)
    pipeline_members.member({**about, "endpoint": endpoint, "name": name, "folder": folder}, reporter)
    pipe.send(("done", -1))


# ------------------------------------------------------------------------------------------------ its processes


class PipelineCrew(Crew):
    """All member processes of a job with pipelines; reads in event logs which layers each has."""

    founders, most, kept = 6, 8, 4
    polite = (0, 130)
    deck = ("cut", "cut", "cut", "stall", "stall", "slow", "slow", "remove", "blink")
    work = staticmethod(member)
    minutes, margin = 10.0, 25
    """Length of the soak, and steps from the order to end until the end."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._tail = Tail(self.folder / "events")
        self._layers: dict[str, set[int]] = {}
        self._settled_at = self._end_at = 0.0
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "about.json").write_text(json.dumps(self.about()))

    def about(self) -> dict[str, Any]:
        """Returns the members' settings."""
        return {**told(self.folder), "saves": str(self.folder / "saves")}

    def figures(self, events: Mapping[str, Sequence[Line]]) -> list[tuple[str, float, str]]:
        """Returns what event logs tell of pipelines, as (what, value, unit); `events` are lines by name."""
        shapes = [x["shape"] for x in events["pipelines"] if x["view"]]
        moved = sum(int(x["nbytes"]) for x in events["part_pulled"]) / MIB
        return [
            ("plans", len(shapes), "count"), ("shapes of plans", len(set(shapes)), "count"),
            ("bytes that moved", moved, "MiB"),
            ("members that began a step again", len(events["units_dropped"]), "count"),
        ]  # fmt: skip

    def turn(self, seconds: float = 0.05) -> None:
        super().turn(seconds)
        now = time.monotonic()
        for r in self._tail.poll():
            if r.name == "pipelines" and r.get("layers"):
                self.take(r["layers"])
                self._settled_at = now + SETTLED_S
        if self.step and not self._end_at:
            self._end_at = now + 60 * self.minutes
        end = self.folder / "end"
        if self._end_at and now > self._end_at and not end.exists():
            end.write_text(str(self.step + self.margin))
            self.ending = True
        if self.over and not any(p.step or p.inside for p in self.alive.values()):
            for process in self.alive.values():  # they came when the job was finished, and its scheduler has gone
                process.may_die = True
                process.worker.kill()

    def take(self, layers: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Records which members have which layers."""
        self._layers = defaultdict(set)
        for member, spans in layers.items():
            self._layers[member.rpartition("~")[0]].update(x for a, b in spans for x in range(a, b))

    def spares(self, name: str) -> bool:
        """Returns whether other training members have all layers of this one, and no layer is being moved."""
        if time.monotonic() < self._settled_at:
            return False
        others = (self._layers[p.name] for p in self.steady() if p.name != name)
        return self._layers[name] <= set[int]().union(*others)


def told(folder: Path) -> dict[str, Any]:
    """Returns the members' settings; writes the profile that they name."""
    itemsize = 8
    job = gpt_job(LAYERS, WIDTH, BLOCK, BATCH, MICRO_BATCHES, round(0.55 * MIB * itemsize), itemsize)
    (folder / "profile.json").write_text(json.dumps(to_dict(job)))
    more = {"profile": str(folder / "profile.json"), "device_memory": job.devices[0].memory_nbytes}
    return {**ABOUT, **more, "options": {"state_hash_every": EPOCH}}


# ------------------------------------------------------------------------------------------------ what is judged


def check(journals: Mapping[str, Sequence[Line]], killed: set[str]) -> tuple[dict[int, float], list[str]]:
    """Returns the loss of each step, and descriptions of all steps in which members disagree.

    Args:
        journals: Lines of each process's journal, as `read` returns them.
        killed: Processes ("name-pid") that were killed: the job may not know the step that they wrote last.
    """
    losses: dict[int, float] = {}
    hashes: dict[tuple[int, str], str] = {}
    problems = []
    for source, lines in journals.items():
        steps = [line for line in lines if line["what"] == "step"]
        for line in steps[:-1] if source in killed else steps:
            step = line["step"]
            if losses.setdefault(step, line["loss"]) != line["loss"]:
                problems.append(f"{source} has loss {line['loss']} in step {step}; others have {losses[step]}")
            for name, value in line["hashes"].items():
                if hashes.setdefault((step, name), value) != value:
                    problems.append(f"{source} has another {name} than others after step {step}")
    missing = sorted(set(range(1, max(losses, default=0) + 1)) - losses.keys())
    problems += [f"nobody wrote down step {step}" for step in missing]
    return losses, problems


def report(result: Result, crew: PipelineCrew, driver: Driver, seconds: float, *, quick: bool) -> dict[int, float]:
    """Adds the figures of the soak; returns the losses by step."""
    schedulers = driver.schedulers
    counts = Counter(action for _, action, _ in driver.done) + driver.links.counts() + schedulers.counts()
    kinds = (*ACTIONS, *(dict.fromkeys(crew.deck) if crew.relay else ()), *schedulers.kinds)
    result.add("length", seconds / 60, "min")
    result.add("events carried out", counts.total(), "count")
    for kind in kinds:
        result.add(f"events: {kind}", counts[kind], "count")
    result.add("kinds of events that did not occur", sum(not counts[k] for k in kinds), "count", None if quick else 0)
    result.add("processes that ended or stood still undeclared", len(crew.undeclared), "count", 0)
    losses, problems = check(read(crew.folder / "journals"), crew.killed)
    result.add("steps", max(losses, default=0), "count")
    result.add("journals: members that do not agree", len(problems), "count", 0)
    for line in problems[:5]:
        print(f"    {line}")
    result.audit(crew.folder / "events", "audit of the event logs: violations", "the soak")
    lines = read_lines(crew.folder / "events")
    by_name = defaultdict[str, list[Line]](list)
    for line in lines:
        by_name[line["name"]].append(line)
    ends = {x["step"]: x["mono"] for x in reversed(by_name["committed"]) if x["kind"] == "step"}
    gaps = [b - a for a, b in itertools.pairwise(sorted(ends.values()))] or [math.inf]
    for what, value, unit in (
        *crew.figures(by_name),
        ("time between steps, median", median(gaps), "s"), ("time between steps, longest", max(gaps), "s"),
    ):  # fmt: skip
        result.add(what, value, unit)
    if crew.relay:
        report_links(result, crew, driver.links, lines)
    result.details |= {"problems": problems, "undeclared": crew.undeclared, "plan": driver.plans, "losses": losses}
    return losses


def compare(result: Result, losses: Mapping[int, float], about: Mapping[str, Any] = ABOUT) -> None:
    """Adds how far the losses are from those of plain Lightning in one process.

    Training amplifies rounding: after 900 steps two undisturbed runs that add the same numbers in different orders may
    differ by more than the bound. What such runs differ by, up to the same step, is taken off. As long as they hardly
    differ, a closer bound holds.
    """
    last = max(losses)
    rows, other = alone(strategy="auto", steps=last, **about)["rows"], alone(steps=last, **about)["rows"]
    rounding = itertools.accumulate((abs(other[step]["loss"] - rows[step]["loss"]) for step in sorted(losses)), max)
    by_rounding = dict(zip(sorted(losses), rounding, strict=True))
    apart = {step: abs(loss - rows[step]["loss"]) for step, loss in losses.items()}
    beyond = {step: max(value - by_rounding[step], 0.0) for step, value in apart.items()}
    result.add("losses: largest distance of two undisturbed runs", by_rounding[last], "nats")
    result.add("losses: largest distance from the undisturbed ones", max(apart.values()), "nats")
    calm = [value for step, value in apart.items() if by_rounding[step] <= CALM]
    result.add("calm steps that are missing", max(0, min(LEAST_CALM, last) - len(calm)), "count", 0)
    result.add("losses of calm steps: largest distance", max(calm, default=0.0), "nats", CLOSE)
    result.add("loss of the last step: distance beyond that of undisturbed runs", beyond[last], "nats", LOSS)
    result.add(f"losses of {len(losses)} steps: largest distance beyond", max(beyond.values()), "nats", LOSS)


# ------------------------------------------------------------------------------------------------ checkpoints


def tensors_in(path: Path) -> dict[str, tuple[str, str]]:
    """Returns the type and a hash of each tensor in a checkpoint, of the model and of its optimizers."""
    whole = torch.load(path, weights_only=True)
    rows = tree_flatten_with_path({key: whole[key] for key in ("state_dict", "optimizer_states")})[0]
    return {
        keystr(at): (str(x.dtype), xxhash.xxh3_128_hexdigest(x.contiguous().numpy()))
        for at, x in rows if isinstance(x, torch.Tensor)
    }  # fmt: skip


def checkpoints(result: Result, crew: Crew, losses: Mapping[int, float], plans: Sequence[str]) -> None:
    """Loads a checkpoint of the soak under several plans, saves it again under each, and compares the tensors."""
    steps = sorted(int(f.stem.partition("=")[2]) for f in (crew.folder / "saves").glob("step=*.ckpt"))
    step = next(s for s in reversed(steps) if s + 1 in losses)
    first = crew.folder / "saves" / f"step={step}.ckpt"
    whole, shapes, file = tensors_in(first), set[str](), first
    for names in plans:
        file = crew.folder / f"again-{len(names)}.ckpt"
        with pipeline_job(**told(crew.folder), ckpt_path=str(first), resave=str(file), steps=step + 1) as job:
            job.found(names)
            if any(codes := [job.harness.wait_exit(name) for name in names]):
                raise RuntimeError(f"exit codes {codes}\n{job.harness.dump()}")
            shape = next(str(r["shape"]) for r in job.harness.records if r.name == "pipelines" and r.get("shape"))
        again = tensors_in(file)
        unequal = sum(whole.get(name) != again.get(name) for name in whole.keys() | again.keys())
        result.add(f"checkpoint under {shape}: tensors of {len(whole)} with other bytes", unequal, "count", 0)
        shapes.add(shape)
    result.add(f"of {len(plans)} plans that read the checkpoint: alike ones", len(plans) - len(shapes), "count", 0)
    rows = alone(strategy="auto", ckpt_path=str(file), steps=step + 1, **ABOUT)["rows"]
    off = abs(list(rows.values())[-1]["loss"] - losses[step + 1])
    result.add(f"plain Lightning from the checkpoint of step {step}: the next step's loss, distance", off, "nats", SAME)


def soak(args: argparse.Namespace) -> int:
    """Runs the soak of pipelines, its checks and its comparison; returns the exit status."""
    result = Result("soak of pipelines")
    args.etcd = False
    PipelineCrew.minutes = args.minutes
    with scratch() as scratched:
        root = Path(args.keep) if args.keep else scratched
        print(f" {args.minutes:g} min, events every {args.every_s:g} s, of links every {args.links_every_s:g} s")
        crew, driver, seconds = disturbed(root / "soak", args, 0, PipelineCrew)
        losses = report(result, crew, driver, seconds, quick=args.quick)
        compare(result, losses)
        checkpoints(result, crew, losses, PLANS[:2] if args.quick else PLANS)
    return result.finish(args)
