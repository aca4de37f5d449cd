"""Runs a soak of a batch of fixed size: members suffer faults, and each step must have the samples and the loss of
training in one process.

Up to seven processes train a small GPT by `chaos` under `batch=fixed:N/B`; every other one needs four times as long for
a sample. They are hurt as in any soak (crew.py, links.py, schedulers.py), and die at random moments and at places of a
step (pipeline_members.py). What they write down, and what is compared with plain Lightning in numbers of 64 bits, is as
in the soak of pipelines (pipelines.py). In the event logs, which are audited, each step must have N samples; each
member's part of them must be as many as it says that it used, in whole micro-batches of B.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Result
from benchmarks.soak import pipelines
from benchmarks.soak.checks import Line
from benchmarks.soak.crew import Crew
from benchmarks.soak.link_checks import read_lines
from benchmarks.soak.pipelines import BATCH, EPOCH, PipelineCrew
from benchmarks.soak.runs import disturbed
from benchmarks.workers import scratch

MICRO_BATCHES = 12
SAMPLES = BATCH * MICRO_BATCHES
"""Samples of a step."""
ABOUT: dict[str, Any] = {
    **pipelines.ABOUT, "micro_batches": MICRO_BATCHES, "samples": EPOCH * SAMPLES, "rule": f"fixed:{SAMPLES}/{BATCH}",
}  # fmt: skip
SAMPLE_S = 0.002


class FixedCrew(PipelineCrew):
    """All member processes of a job with a batch of fixed size; any of them may be lost."""

    founders, most, kept, deck = Crew.founders, Crew.most, Crew.kept, Crew.deck
    spares, margin = Crew.spares, 60

    def about(self) -> dict[str, Any]:
        return {**ABOUT, "sample_s": SAMPLE_S, "options": {"state_hash_every": EPOCH}}

    def figures(self, events: Mapping[str, Sequence[Line]]) -> list[tuple[str, float, str]]:
        by_speed = sum("measured speed" in x["reason"] for x in events["view"])
        return [("splits for the same members, by measured speed", by_speed, "count")]


def check_batches(lines: Sequence[Line]) -> tuple[dict[int, int], list[str]]:
    """Returns how many steps each number of members made, and descriptions of all steps without the chosen batch.

    Args:
        lines: Lines of the event logs.
    """
    steps: dict[int, set[str]] = defaultdict(set)
    problems: dict[tuple[str, str], str] = {}
    for line in lines:
        if line["name"] != "committed" or line["kind"] != "step":
            continue
        parts, header = dict(line["contributors"]), line["header"]
        what = f"step {line['step']} by {', '.join(f'{who} {n:g}' for who, n in parts.items())}"
        steps[sum(n > 0 for n in parts.values())].add(header)
        if sum(parts.values()) != SAMPLES:
            problems[header, ""] = f"{what}: not {SAMPLES} samples"
        elif any(n % BATCH for n in parts.values()):
            problems[header, ""] = f"{what}: no whole micro-batches of {BATCH}"
        used = sum(stop - start for stream in line["spent"] for start, stop in stream["spans"])
        if line["member"] in parts and used != parts[line["member"]]:
            problems[header, line["member"]] = f"{what}: {line['member']} used {used}"
    return {members: len(headers) for members, headers in sorted(steps.items())}, list(problems.values())


def soak(args: argparse.Namespace) -> int:
    """Runs the soak of a batch of fixed size, its checks and its comparison; returns the exit status."""
    result = Result("soak of a fixed batch")
    FixedCrew.minutes = args.minutes
    with scratch() as scratched:
        root = Path(args.keep) if args.keep else scratched
        print(f" {args.minutes:g} min, events every {args.every_s:g} s, of links every {args.links_every_s:g} s")
        crew, driver, seconds = disturbed(root / "soak", args, 0, FixedCrew)
        losses = pipelines.report(result, crew, driver, seconds, quick=args.quick)
        steps, problems = check_batches(read_lines(crew.folder / "events"))
        for members, count in steps.items():
            result.add(f"steps by {members} members", count, "count")
        result.add(f"steps that do not have {SAMPLES} samples in whole micro-batches", len(problems), "count", 0)
        for line in problems[:5]:
            print(f"    {line}")
        pipelines.compare(result, losses, ABOUT)
    return result.finish(args)
