"""Compares how policies of outer sync converge: the product's leader, followers and clusters in virtual time, with real
training.

Four clusters train one character model. The slowest takes 1 + eta / 100 times as long for a step as the fastest, legs
jitter by 20%, and one in twenty takes four times as long. Modes are compared at equal samples, and by the time that
they take to a loss: data-parallel, sync (DiLoCo), async (naive), Delayed Nesterov alone, di_ps (the paper to the
letter, its Algorithm 1), robust. A cluster of robust begins anew with a cold inner optimizer. Then 5% of the pushes are
poisoned. With --out, beside the JSON: NAME-samples.png and NAME-time.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.common import Options, Result, run
from benchmarks.outer_convergence.curves import Curve, at_time, time_to
from benchmarks.outer_convergence.job import HEARTBEAT_S, Mode, Track, VirtualJob
from benchmarks.outer_convergence.learners import MLP, SMALL_GPT, Task
from benchmarks.outer_convergence.parallel import data_parallel
from benchmarks.outer_convergence.plots import draw
from benchmarks.outer_convergence.poison import KINDS, Verdicts
from chaos_lightning.outer.rules.settings import OuterSettings

INNER_STEPS = 16
MOST_CPU_S = 25 * 60.0
POISONED = 0.05
PARALLEL, SYNC, ROBUST = "data-parallel", "sync", "robust"
ASYNCHRONOUS = ("async", "Delayed Nesterov alone", "di_ps")

Cases = dict[str, dict[str, list[Track]]]
"""Outcomes of the runs with all seeds, by title and by mode."""


def modes(task: Task) -> list[Mode]:
    """Returns all modes that have a server; only in mode `robust` do clusters train on during a push, as the other
    modes were published without it.
    """
    rules = OuterSettings(
        inner_steps=INNER_STEPS,
        batch=task.batch,
        outer_lr=0.7,
        outer_momentum=0.8,
        heartbeat_s=HEARTBEAT_S,
        lease_ahead_s=120.0,
    )
    naive = replace(rules, policy="async")
    return [
        Mode(SYNC, replace(rules, policy="sync"), overlap=False),
        Mode("async", naive, overlap=False),
        Mode("Delayed Nesterov alone", replace(naive, optimizer="delayed_nesterov"), overlap=False),
        Mode("di_ps", replace(rules, policy="di_ps"), overlap=False),
        Mode(ROBUST, rules, overlap=True),
    ]


def title(task: Task, eta: int) -> str:
    return f"{task.name}, eta {eta}"


def told(name: str, seed: int, track: Track, began: float) -> None:
    """Prints one line on stderr about a finished run."""
    end = track.curve[-1]
    print(
        f"{name}, seed {seed}: loss {end.loss:.3f} after {end.time_s:.0f} virtual s; "
        f"{time.process_time() - began:.0f} s of processor time",
        file=sys.stderr,
        flush=True,
    )


def clean_runs(result: Result, task: Task, etas: Sequence[int], seeds: int, steps: int) -> Cases:
    """Runs every mode at every eta (spread of cluster speeds, in %); prints a table for each eta as soon as it
    is done.
    """
    cases: Cases = {}
    total = steps * task.batch
    for eta in etas:
        case = cases[title(task, eta)] = {}
        case[PARALLEL] = [Track(data_parallel(task, eta, seed, total, INNER_STEPS)) for seed in range(seeds)]
        for mode in modes(task):
            case[mode.name] = several(task, mode, eta, seeds, total)
        table(result, title(task, eta), case)
    return cases


def several(task: Task, mode: Mode, eta: int, seeds: int, total: int, poison: float = 0.0) -> list[Track]:
    """Runs one mode with each seed; returns the outcomes."""
    tracks = []
    for seed in range(seeds):
        began = time.process_time()
        tracks.append(VirtualJob(task, mode, eta, seed, total, poison).run())
        told(f"{title(task, eta)}, {mode.name}{', poisoned' if poison else ''}", seed, tracks[-1], began)
    return tracks


# ------------------------------------------------------------------------------------------------ what is read


def final(tracks: Sequence[Track]) -> float:
    """Returns the mean of the runs' final losses."""
    return fmean(track.curve[-1].loss for track in tracks)


def part_of_time(ours: Curve, theirs: Curve) -> float:
    """Returns when our curve reaches a loss, relative to when theirs does; the loss is theirs at 60% of its time."""
    then_s = 0.6 * theirs[-1].time_s
    return time_to(ours, at_time(theirs, then_s)) / then_s


def sooner(ours: Sequence[Track], theirs: Sequence[Track]) -> float:
    """Returns the mean of `part_of_time` (how soon our curve reaches a loss of theirs, relative to theirs) over the
    seeds.
    """
    return fmean(part_of_time(one.curve, two.curve) for one, two in zip(ours, theirs, strict=True))


def table(result: Result, name: str, case: Mapping[str, Sequence[Track]]) -> None:
    """Prints a table with one line for each mode."""
    columns = (
        "final loss",
        "virtual s",
        "part of time",
        "pushes a round",
        "staleness",
        "fetched a push",
        "idle",
        "refused",
    )
    print(f"\n  {name}: seeds {len(case[SYNC])}\n  {'':24}" + "".join(f"{column:>16}" for column in columns))
    for mode, tracks in case.items():
        good = sum(track.verdicts.good for track in tracks)
        refused = sum(track.verdicts.good_rejected for track in tracks)
        numbers = [final(tracks), fmean(t.curve[-1].time_s for t in tracks), sooner(tracks, case[SYNC])]
        numbers += [fmean(getattr(t, key) for t in tracks) for key in ("window", "staleness", "fetched", "idle")]
        print(f"  {mode:24}" + "".join(f"{n:16.4g}" for n in numbers) + f"{f'{refused} of {good}':>16}", flush=True)
        result.details[f"{name}, {mode}"] = {
            "numbers": dict(zip(columns, numbers, strict=False)),
            "refused": refused,
            "of": good,
            "curves": [track.curve for track in tracks],
            "steps": [track.steps for track in tracks],
        }


def claims(result: Result, cases: Cases, *, strict: bool) -> None:
    """Adds the claims on mode `robust`; without bounds if the runs are too short."""
    for name, case in cases.items():
        robust, sync = case[ROBUST], case[SYNC]
        if name.endswith("eta 200"):
            part = sooner(robust, sync)
            result.add(
                f"{name}: robust's time to sync's loss at 60% / that time", part, "ratio", 0.85 if strict else None
            )
            ahead = final(robust) / min(final(case[mode]) for mode in ASYNCHRONOUS)
            result.add(f"{name}: final loss, robust / best asynchronous", ahead, "ratio", 1.0 if strict else None)
            result.headline.append(f"{name}: sync's loss at 60% after {part:.2f} of that time")
        most = {"eta 0": 1.02, "eta 200": 1.04}.get(name.split(", ")[1]) if strict else None
        result.add(f"{name}: final loss, robust / sync", final(robust) / final(sync), "ratio", most)
    judged = [track.verdicts for case in cases.values() for track in case[ROBUST]]
    silent = sum(not verdicts.good for verdicts in judged)
    result.add(f"runs of robust in which no push was answered, of {len(judged)}", silent, "count", 0)
    result.add("good pushes that robust rejected", sum(v.good_rejected for v in judged), "count", 0)


def newcomer(result: Result, task: Task, seeds: int, total: int) -> None:
    """Measures the pushes of a cluster in mode `robust` that restarts in mid-training with an empty inner optimizer."""
    refused, others = [], 0
    for seed in range(seeds):
        mode = next(mode for mode in modes(task) if mode.name == ROBUST)
        job = VirtualJob(task, mode, 200, seed, total)
        job.kernel.after(total / task.batch / 8, job.clusters[1].begin_cold)
        reasons = job.run().verdicts.reasons
        refused.append(sum(reason.startswith("c1~") for reason in reasons))
        others += len(reasons) - refused[-1]
    most = OuterSettings().gate_patience
    result.add(f"a cold newcomer: pushes of it that robust rejected, worst of {seeds}", max(refused), "count", most)
    result.add("a cold newcomer: good pushes of the others that robust rejected", others, "count", 0)


# ------------------------------------------------------------------------------------------------ poison


def poisoned_runs(result: Result, task: Task, etas: Sequence[int], seeds: int, total: int, clean: Cases) -> Verdicts:
    """Runs mode `robust` with poisoned pushes at each eta, and the other modes with the same ones at the first eta.

    Returns:
        Counts of the verdicts of mode `robust`.
    """
    whole = Verdicts()
    for eta in etas:
        for mode in modes(task):
            if mode.name != ROBUST and (eta != etas[0] or task is not MLP):
                continue
            tracks = several(task, mode, eta, seeds, total, POISONED)
            verdicts = Verdicts()
            for track in tracks:
                verdicts.add(track.verdicts)
            ratio = final(tracks) / final(clean[title(task, eta)][mode.name])
            words = ", ".join(f"{verdicts.caught[kind]} of {verdicts.made[kind]} {kind}" for kind in KINDS)
            anew = sum(track.anew for track in tracks)
            result.remark(
                f"poisoned, {title(task, eta)}, {mode.name}: final loss {final(tracks):.4g}, {ratio:.3f} of clean; "
                f"caught {words}; good refused {verdicts.good_rejected} of {verdicts.good}; "
                f"clusters that came anew {anew}"
            )
            result.details[f"poisoned, {title(task, eta)}, {mode.name}"] = {
                "final": [track.curve[-1].loss for track in tracks],
                "clean": [track.curve[-1].loss for track in clean[title(task, eta)][mode.name]],
                "verdicts": verdicts.as_json(),
                "curves": [track.curve for track in tracks],
            }
            if mode.name == ROBUST:
                whole.add(verdicts)
                result.details.setdefault("poisoned / clean", {})[title(task, eta)] = ratio
    return whole


def missed(made: int, caught: int) -> float:
    """Returns the share of poisoned pushes that were not caught; 1 if none was made, since that proves nothing."""
    return (made - caught) / made if made else 1.0


def poison_claims(result: Result, verdicts: Verdicts, *, strict: bool) -> None:
    """Adds the claims on how mode `robust` treats poisoned pushes."""
    for kind in KINDS[:2]:
        made = verdicts.made[kind]
        result.add(
            f"poison: missed, {kind}", missed(made, verdicts.caught[kind]), f"of {made}", 0.05 if strict else None
        )
    company, caught = verdicts.flipped_in_company, verdicts.flipped_caught
    most = 0.1 if strict else None
    result.add("poison: missed, flipped, in windows of 3 and more", missed(company, caught), f"of {company}", most)
    others, found = verdicts.made["flipped"] - company, verdicts.caught["flipped"] - caught
    result.add("poison: caught, flipped, in smaller windows", found, f"of {others}, {verdicts.alone} of them alone")
    refused = missed(verdicts.good, verdicts.good - verdicts.good_rejected)
    result.add("poison: good ones rejected", refused, f"of {verdicts.good}", 0.005 if strict else None)
    for name, ratio in result.details["poisoned / clean"].items():
        result.add(f"poison: final loss / clean, robust, {name}", ratio, "ratio", 1.02 if strict else None)


# ------------------------------------------------------------------------------------------------ the whole


def pictures(cases: Mapping[str, Mapping[str, Sequence[Track]]], out: str) -> None:
    """Draws loss over samples and loss over time, beside the JSON file."""
    curves = {n: {mode: [t.curve for t in tracks] for mode, tracks in case.items()} for n, case in cases.items()}
    for axis, over_time in (("samples", False), ("time", True)):
        draw(curves, Path(out).with_name(f"{Path(out).stem}-{axis}.png"), over_time=over_time)


def options() -> argparse.Namespace:
    p = Options(__doc__)
    p.add_count("--seeds", 5, 1, "seeds of the MLP")
    p.add_count("--gpt-seeds", 2, 1, "seeds of the GPT")
    p.add_count("--steps", 3200, 640, "inner steps of all clusters together")
    p.add_count("--gpt-steps", 3200, 128, "the same for the GPT")
    p.add_series("--etas", [200, 0, 50], "what the slowest cluster is slower by, in percent")
    return p.parse_args()


def main() -> int:
    args = options()
    torch.set_num_threads(1)
    result, strict = Result("outer_convergence"), not args.quick
    etas = args.etas
    cases = clean_runs(result, MLP, etas, args.seeds, args.steps)
    cases |= clean_runs(result, SMALL_GPT, [200], args.gpt_seeds, args.gpt_steps)
    claims(result, cases, strict=strict)
    newcomer(result, MLP, args.seeds, args.steps * MLP.batch)
    verdicts = poisoned_runs(result, MLP, etas, args.seeds, args.steps * MLP.batch, cases)
    if strict:
        verdicts.add(poisoned_runs(result, SMALL_GPT, [200], args.gpt_seeds, args.gpt_steps * SMALL_GPT.batch, cases))
    poison_claims(result, verdicts, strict=strict)
    result.add("processor time", time.process_time(), "s", MOST_CPU_S)
    if args.out:
        pictures(cases, args.out)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
