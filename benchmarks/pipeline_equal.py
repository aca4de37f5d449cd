"""Checks that pipelines compute the same as one process, whatever member dies and whatever layers move.

Six members train a small GPT with tied weights as three pipelines of two stages, from a first view of all six. Then one
of them dies in the middle of a backward pass: its micro-batches are rerouted, or its layers move to others; or a device
comes back and gets layers again. Each training is compared with one that nobody disturbs: without dropout with plain
Lightning in one process (accumulate_grad_batches), with dropout with `chaos_pipeline` in one process. Compared are the
gradient of the first step, that of the step which ran twice (with the one of undisturbed pipelines), losses and
parameters at the end, and what was logged. Differences of gradients are relative to the largest number of their tensor
in 64 bits. In 32 bits they are relative to the largest of all: where a tensor's own numbers are sums that nearly cancel
out, their last digits depend on the order of the sums, here and in plain Lightning. Biases of attention keys are left
out of the parameters: softmax cancels them, so their gradient is rounding alone, which AdamW makes into steps. Owners
of a tensor must have equal bits after each step. The same death at the same unit, twice, must give equal bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks.common import MIB, Options, Result, run
from benchmarks.pipeline_members import PipelineJob, alone, pipeline_job
from chaos_lightning.testing.demo.stages import gpt_job

NAMES = "abcdef"
VICTIM, BACK = "b", "g"
MICRO_BATCHES, BATCH, BLOCK = 6, 2, 16
STRUCK, GATE = 4, 7
"""The step in which the victim dies, and the one before which the job waits for who comes back."""
FAULTS = {
    "faultless": ("reroute", False, False),
    "rerouted": ("reroute", True, False),
    "moved": ("dynamic", True, False),
    "grown again": ("dynamic", True, True),
}
"""Policy, whether a member dies, and whether a device comes back, by name of the case."""
CASES: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"clip": 0.3}, "dropout": {"dropout": 0.1, "clip": 0.3}}
GRADIENT = {False: 1e-6, True: 1e-13}
PARAMETERS = {False: 1e-4, True: 1e-10}
LOSS = 1e-5
"""Bounds; by whether numbers are of 64 bits."""


def about(case: dict[str, Any], double: bool, steps: int) -> dict[str, Any]:
    """Returns the settings of a case in the form that its members take."""
    model = {"kind": "gpt", "layers": 6, "width": 32, "block": BLOCK, "dropout": case.get("dropout", 0.0)}
    return {
        "model": model,
        "batch": BATCH,
        "micro_batches": MICRO_BATCHES,
        "text": 40_000,
        "steps": steps,
        "double": double,
        "hashes": True,
        "gradients": [1, STRUCK],
        **({"clip": case["clip"]} if "clip" in case else {}),
    }


def trained(spec: dict[str, Any], fault: str) -> dict[str, dict[str, Any]]:
    """Trains six members with this fault; returns the reports of those that live to the end."""
    policy, dies, back = FAULTS[fault]
    itemsize = 8 if spec["double"] else 4
    profile = gpt_job(6, spec["model"]["width"], BLOCK, BATCH, MICRO_BATCHES, round(0.55 * MIB * itemsize), itemsize)
    with pipeline_job(policy=policy, profile=profile, device_memory=profile.devices[0].memory_nbytes, **spec) as job:
        if dies:
            job.strike(VICTIM, "backward", step=STRUCK, unit=1)
        with gated(job, back):
            job.found(NAMES)
            if dies:
                job.struck(VICTIM)
            if back:
                job.start(BACK)
                job.harness.wait_admitted(BACK, "default")
        living = [*(n for n in NAMES if not dies or n != VICTIM), *([BACK] if back else [])]
        codes = {name: job.harness.wait_exit(name, 600.0) for name in living}
        if any(codes.values()):
            raise RuntimeError(f"exit codes {codes}\n{job.harness.dump()}")
        shapes = [str(r["shape"]) for r in job.harness.records if r.name == "pipelines" and r.get("shape")]
        print(f"    {fault}: {' -> '.join(shapes)}", flush=True)
        job.harness.audit()
        return {name: job.report(name) for name in living}


@contextlib.contextmanager
def gated(job: PipelineJob, closed: bool) -> Iterator[None]:
    """Makes all members wait before the step that follows `GATE` while the block runs, if `closed`."""
    gate = job.harness.directory / f"gate-{GATE}"
    if closed:
        gate.touch()
    yield
    gate.unlink(missing_ok=True)


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Returns by name the largest absolute difference between equally named tensors."""
    return {name: float((ours[name] - theirs[name]).abs().max()) for name in ours.keys() & theirs.keys()}


def gradients_apart(ours: dict[str, Any], theirs: dict[str, Any], double: bool) -> float:
    """Returns the largest difference of gradients: in 64 bits relative to the tensor's largest value, in 32 bits to
    that of all tensors.
    """
    largest = {name: float(tensor.abs().max()) for name, tensor in theirs.items()}
    most = max(largest.values())
    return max(x / max(1e-30, largest[name] if double else most) for name, x in apart(ours, theirs).items())


def without_key_biases(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors with the biases of attention keys set to zero."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in (n for n in kept if n.endswith("in_proj_bias")):
        third = len(kept[name]) // 3
        kept[name][third : 2 * third] = 0
    return kept


def union(reports: dict[str, dict[str, Any]], key: str, step: int | None = None) -> dict[str, Any]:
    """Returns the tensors (or the gradients of a step) of all members together, by name."""
    parts = (r[key] if step is None else r[key].get(step, {}) for r in reports.values())
    return {name: value for part in parts for name, value in part.items()}


def owners_unequal(reports: dict[str, dict[str, Any]]) -> int:
    """Returns how many tensors differ between the members that own them, summed over all steps."""
    seen: dict[tuple[int, str], set[str]] = defaultdict(set)
    for report in reports.values():
        for step, row in report["rows"].items():
            for name, value in row["hashes"].items():
                seen[step, name].add(value)
    return sum(len(values) > 1 for values in seen.values())


def logged_apart(rows: dict[int, Any], theirs: dict[int, Any]) -> float:
    """Returns the largest relative difference between the values that two trainings logged."""
    pairs = [(rows[s]["logged"][k], v) for s in rows for k, v in theirs[s]["logged"].items()]
    return max(abs(a - b) / max(1e-12, abs(b)) for a, b in pairs)


def compare(
    result: Result,
    title: str,
    reports: dict[str, dict[str, Any]],
    one: dict[str, Any],
    logs: dict[str, Any],
    faultless: dict[str, dict[str, Any]] | None,
    double: bool,
) -> None:
    """Adds the figures of one training compared with that of one process.

    Args:
        result: Result to which the figures are added.
        title: Title of the case.
        reports: Reports of the members, by name.
        one: Report of the training in one process.
        logs: Report of the same training by `chaos_pipeline` in one process, whose logged values are compared.
        faultless: Reports of the members of the same pipelines without a fault, by name; None: not compared.
        double: Whether numbers are of 64 bits.
    """
    first = union(reports, "gradients", 1)
    whole = union(reports, "tensors")
    assert whole.keys() == one["tensors"].keys(), "some tensors are at no member"
    gradient = gradients_apart(first, one["gradients"][1], double)
    result.add(f"{title}: gradient of step 1, relative", gradient, "1", GRADIENT[double])
    if faultless is not None:
        ran_once = union(faultless, "gradients", STRUCK)
        same = gradients_apart(union(reports, "gradients", STRUCK), ran_once, double)
        result.add(f"{title}: gradient of the step that ran twice, relative", same, "1", GRADIENT[double])
    rows = next(iter(reports.values()))["rows"]
    losses = max(abs(row["loss"] - one["rows"][step]["loss"]) for step, row in rows.items())
    result.add(f"{title}: losses of {len(rows)} steps", losses, "nats", LOSS)
    ends = apart(without_key_biases(whole), without_key_biases(one["tensors"]))
    result.add(f"{title}: parameters at the end", max(ends.values()), "1", PARAMETERS[double])
    result.add(f"{title}: logged values, relative", logged_apart(rows, logs["rows"]), "1", LOSS)
    result.add(f"{title}: tensors that differ between owners", owners_unequal(reports), "count", 0)


def family(result: Result, name: str, double: bool, faults: list[str], steps: int) -> None:
    """Compares all trainings of one model in one precision."""
    spec = about(CASES[name], double, steps)
    print(f" {name}, fp{64 if double else 32}", flush=True)
    logs = alone(**spec)
    one = logs if "dropout" in CASES[name] else alone(strategy="auto", **spec)
    faultless: dict[str, dict[str, Any]] | None = None
    for fault in faults:
        reports = trained(spec, fault)
        title = f"{name}, fp{64 if double else 32}, {fault}"
        compare(result, title, reports, one, logs, faultless if fault != "faultless" else None, double)
        faultless = reports if fault == "faultless" else faultless


def twice(result: Result, steps: int) -> None:
    """Compares two runs in which the same member dies at the same unit."""
    spec = about(CASES["dropout"], False, steps)
    one, two = (trained(spec, "rerouted") for _ in range(2))
    pairs = itertools.product(one, range(1, steps + 1))
    unequal = sum(one[n]["rows"][s]["hashes"] != two[n]["rows"][s]["hashes"] for n, s in pairs)
    result.add("the same death twice: states that differ, by member and step", unequal, "count", 0)


def main() -> int:
    p = Options(__doc__)
    p.add_count("--steps", 60, 12, "of each training")
    args = p.parse_args()
    result = Result("pipeline_equal")
    if args.quick:
        family(result, "dropout", False, ["faultless", "rerouted", "grown again"], args.steps)
        family(result, "plain", True, ["faultless", "moved"], args.steps)
    else:
        for name, double in itertools.product(CASES, (False, True)):
            family(result, name, double, list(FAULTS), args.steps)
    twice(result, args.steps)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
