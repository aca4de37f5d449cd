"""Compares predicted steps with those of real pipelines of processes, as the paper's Fig. 9 does.

One process trains timed layers and is measured as `chaos-lightning profile` does it beside a job that runs: six members
train by a plan, and the file has what their units and steps take beside layers. Other jobs of six members take this
file. Each job has another number of micro-batches and another memory, so another shape; its members leave or are killed
one by one, and each time the survivors go on by another plan: twelve plans. The scheduler's prediction of each, as it
chose it, is compared with the median of its steps. From the second plan of a job on, it has measured the job's own
steps.

What the file does not know, the cost of a hop, of a unit, and of another commit, is fitted to the steps of all plans
but one, and the plan that was left out is predicted again with that, each in turn.

Real layers are told only, as ratios within one run: two processes are two devices of this machine at best, and slow
each other down. Both plans of two devices are compared with one device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.calibration import fit
from benchmarks.common import Options, Result, median, run
from benchmarks.pipeline_members import PipelineJob, module_of, pipeline_job
from benchmarks.pipeline_steps import UNSETTLED, PlanRun, runs
from benchmarks.workers import scratch
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.files import read_job, to_dict
from chaos_lightning.planning.pipelines.job import Device, Overheads, TrainingJob
from lab.timed_layers import alike

NAMES = "abcdef"
LAYERS, BATCH = 6, 2
TIMED = {"kind": "timed", "layers": LAYERS, "width": 64, "forward_s": 0.02, "backward_s": 0.04}
REAL = {"kind": "gpt", "layers": 4, "width": 128, "block": 64}
MEDIAN, WORST, PAPER = 0.04, 0.08, 0.0802
PROFILED = 12
"""Steps that the profile measures."""


@dataclass(frozen=True)
class Series:
    """A job with one policy and one size, whose members leave or are killed one by one.

    Attributes:
        policy: Under "reroute" members are killed, else they leave.
        owned: Number of layers for which a device has memory.
        members: Their numbers, of which a plan each is measured.
    """

    policy: str
    owned: float
    micro_batches: int
    members: tuple[int, ...] = (6, 5, 4)

    def __str__(self) -> str:
        return f"{self.policy}, {self.owned:g} layers a device, {self.micro_batches} micro-batches"


PROFILED_PLAN = Series("dynamic", 4.2, 6, (6,))
"""Runs beside the profile; none of those that are predicted."""
SERIES = (
    Series("dynamic", 4.2, 12, (6, 4, 3)),
    Series("reroute", 4.2, 9),
    Series("dynamic", 2.6, 8),
    Series("dynamic", 9.0, 12, (6, 4, 3)),
)


# ------------------------------------------------------------------------------------------------ the profile


def profiled(spec: dict[str, Any]) -> None:
    """Measures a model's layers in one process, and writes its profile to a file.

    Args:
        spec: Settings as of a member, and "out": path of the file.
    """
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from chaos_lightning.callbacks import PipelineProfile

    torch.set_num_threads(1)
    module, data = module_of(spec)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, accumulate_grad_batches=2, max_epochs=-1, max_steps=PROFILED + 6, logger=False,
        callbacks=[PipelineProfile(spec["out"], PROFILED)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=spec["batch"], shuffle=False, drop_last=True))


def profile_of(model: dict[str, Any], file: Path, **more: Any) -> TrainingJob:
    """Returns the profile of a model that is measured in one process, and writes it to the file."""
    with pipeline_job(model=model, batch=BATCH, out=str(file), **more) as job:
        job.harness.start_function("alone", profiled, job.about)
        if job.harness.wait_exit("alone", 120.0):
            raise RuntimeError(job.harness.dump())
    return read_job(file)


def beside_job(what: Series, profile: TrainingJob, file: Path, model: dict[str, Any], names: str, steps: int
               ) -> TrainingJob:  # fmt: skip
    """Returns the profile with the costs that a running job has measured besides its layers, and writes it to
    the file.
    """
    facts: list[dict[str, Any]] = []
    series(what, profile, file, model, names, steps, lambda job: facts.append(job.facts()))
    whole = replace(profile, overheads=Overheads(**facts[-1]["machine"]["overheads"]))
    file.write_text(json.dumps(to_dict(whole)))
    return whole


def memory_of(profile: TrainingJob, owned: float) -> int:
    """Returns the memory in bytes of a device that has room for `owned` of the profile's layers."""
    return alike(profile.layers[1], 1, micro_batches=1, samples=1, owned=owned).devices[0].memory_nbytes


# ------------------------------------------------------------------------------------------------ a series


def measured(job: PipelineJob, steps: int, members: int) -> PlanRun:
    """Waits until `steps` steps of the plan in force have run on this many members, and returns them."""

    def enough() -> PlanRun | None:
        last = runs(job.harness.records)[-1:]
        return last[0] if last and last[0].members == members and len(last[0].ends) > steps + UNSETTLED else None

    return job.harness.wait_until(enough, f"{steps} steps of {members} members by one plan", 60.0 + 3.0 * steps)


def victim(job: PipelineJob, names: Sequence[str]) -> str:
    """Returns a member all of whose layers have another owner as well."""
    choice = [r for r in job.harness.records if r.name == "pipelines" and r.get("view")][-1]
    rows = {m.rpartition("~")[0]: spans for m, spans in choice["layers"].items()}
    return next(n for n in reversed(names) if sum(rows[n] == rows[other] for other in names) > 1)


def series(
    what: Series,
    profile: TrainingJob,
    file: Path,
    model: dict[str, Any],
    names: str,
    steps: int,
    look: Callable[[PipelineJob], None] = lambda job: None,
) -> list[PlanRun]:
    """Runs a job while its members shrink from plan to plan; returns the measured steps of each plan, after which
    `look` is called.
    """
    print(f" {what}", flush=True)
    about = {"model": model, "batch": BATCH, "micro_batches": what.micro_batches, "profile": str(file)}
    about |= {"policy": what.policy, "device_memory": memory_of(profile, what.owned), "text": 60_000}
    there, found = list(names), []
    with pipeline_job(**about) as job:
        job.found(names, least=1)
        for members in what.members:
            while len(there) > members:
                if what.policy == "reroute":
                    there.remove(name := victim(job, there))
                    job.harness.kill(name)
                else:
                    job.harness.declare(name := there.pop())
                    job.harness.terminate(name)
            found.append(measured(job, steps, members))
            look(job)
        job.end()
        for name in there:
            if job.harness.wait_exit(name):
                raise RuntimeError(job.harness.dump())
    return found


def told(result: Result, what: Series, found: Sequence[PlanRun]) -> None:
    """Adds the distance of measured from predicted steps for each plan of a series."""
    for at in found:
        words = f"{at.shape}{', rerouted' if at.rerouted else ''} on {at.members}, {what.micro_batches} micro-batches"
        title = f"{words}: distance of {at.step_s:.4f} s over the predicted {at.predicted_s:.4f} s from 1"
        result.add(title, abs(at.error), "1", WORST)


# ------------------------------------------------------------------------------------------------ what is left


def explained(result: Result, profile: TrainingJob, found: Sequence[PlanRun]) -> None:
    """Adds the three costs fitted to all plans, and the errors of each plan predicted with costs fitted to the other
    plans.
    """
    rows = [(at.plan, at.step_s) for at in found if not at.rerouted]
    names = sorted({name for plan, _ in rows for name in plan.devices})
    job = replace(profile, devices=tuple(Device(name=n, memory_nbytes=1 << 40) for n in names))
    costs = fit(job, rows).overheads
    for what, seconds in (("hop", costs.hop_s), ("unit", costs.unit_s), ("commit", costs.commit_s)):
        result.add(f"fitted to all plans: a {what} costs", 1e3 * seconds, "ms")
    errors = []
    for at, (plan, step_s) in enumerate(rows):
        others = fit(job, [*rows[:at], *rows[at + 1 :]]).overheads
        errors.append(abs(step_s / estimate(replace(job, overheads=others), plan).step_s - 1))
    result.add(f"{len(rows)} plans with costs of the others: median distance from 1", median(errors), "1")
    result.add(f"{len(rows)} plans with costs of the others: largest distance from 1", max(errors), "1")


def real(result: Result, folder: Path, steps: int) -> None:
    """Adds the speed of two devices relative to one with real layers, as measured and as predicted."""
    file = folder / "real.json"
    profile = profile_of(REAL, file, text=60_000)
    profile = beside_job(Series("reroute", 9.0, 6, (2,)), profile, file, REAL, "ab", steps)
    two = series(Series("reroute", 9.0, 4, (2, 1)), profile, file, REAL, "ab", steps)
    halves = series(Series("reroute", 2.9, 4, (2,)), profile, file, REAL, "ab", steps)
    for fast in (two[0], halves[0]):
        title = f"real layers, {fast.shape} over {two[1].shape}"
        ratio, predicted = fast.step_s / two[1].step_s, fast.predicted_s / two[1].predicted_s
        result.add(f"{title}: measured", ratio, "ratio")
        result.add(f"{title}: measured over predicted", ratio / predicted, "ratio")


def main() -> int:
    p = Options(__doc__)
    p.add_count("--steps", 16, 6, "of each plan")
    args = p.parse_args()
    result = Result("estimator")
    with scratch() as folder:
        file = folder / "timed.json"
        profile = beside_job(PROFILED_PLAN, profile_of(TIMED, file), file, TIMED, NAMES, args.steps)
        for cost, seconds in asdict(profile.overheads).items():
            result.add(f"profile: {cost} as the job beside it has measured it", 1e3 * seconds, "ms")
        result.details["profile"] = json.loads(file.read_text())
        found: list[PlanRun] = []
        for what in SERIES[:1] if args.quick else SERIES:
            row = series(what, profile, file, TIMED, NAMES, args.steps)
            told(result, what, row)
            found += row
        errors = [abs(at.error) for at in found]
        result.add(f"{len(found)} plans: median distance from 1", median(errors), "1", MEDIAN)
        result.add(f"{len(found)} plans: largest distance from 1 (the paper's: {PAPER})", max(errors), "1", WORST)
        result.add(f"{len(found)} plans: mean of measured over predicted", sum(x.error for x in found) / len(found) + 1,
                   "ratio")  # fmt: skip
        result.details["plans"] = [[x.shape, x.members, x.rerouted, x.predicted_s, x.steps] for x in found]
        if len(found) > len(SERIES):
            explained(result, profile, found)
        real(result, folder, args.steps)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
