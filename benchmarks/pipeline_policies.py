"""Repeats one history of losses and returns under each policy of a running job, with real processes; the paper's Figs.
6 to 9.

Six processes train timed layers, so that they behave as six devices, from a first view of all six. The same members
are killed at the same times, and their names come back at the same times, under `adaptive`, `reroute`, `dynamic` and
`restart`. A job under `restart` ends with exit code 79 at each loss; this benchmark is its launcher and starts all that
are left again, at once, from the newest checkpoint. Those seconds count. All that is told is read in event logs.

The simulated fleet (`chaos-lightning simulate`) gets the same history, the profile of one process, and the costs that
were measured here: what a change costs beyond the step that runs again, medians by kind of change, and by how much a
step of all six is longer than the profile says. Its samples are compared with the real ones. Its `restart` is here what
a running job does: the best plan for those who are left, from the checkpoint, and newcomers are seated.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.common import Options, Result, median, run
from benchmarks.estimator import BATCH, NAMES, TIMED, memory_of, profile_of
from benchmarks.pipeline_members import PipelineJob, pipeline_job
from benchmarks.pipeline_steps import Committed, PlanRun, committed, runs
from benchmarks.workers import scratch
from chaos_lightning.errors import RESTART_CODE
from chaos_lightning.events.events import Record
from chaos_lightning.observe.fields import node_of
from chaos_lightning.planning.fleet.seats import MixedFleet
from chaos_lightning.planning.fleet.simulator import FleetRun, Outcome
from chaos_lightning.planning.fleet.traces import FleetChange, Trace
from chaos_lightning.planning.pipelines import policies
from chaos_lightning.planning.pipelines.choice import PlanCandidate
from chaos_lightning.planning.pipelines.formation import Pauses
from chaos_lightning.planning.pipelines.job import Device, TrainingJob
from chaos_lightning.planning.pipelines.pipeliner import PAUSES
from chaos_lightning.planning.pipelines.request import PIPELINE_POLICIES

MICRO_BATCHES, OWNED, SAVE_EVERY = 12, 4.2, 4
"""Micro-batches of a step, layers for which a device has memory, and steps between two checkpoints."""
LEAST, NEAR = 0.97, 0.05
"""Bounds: samples of `adaptive` over the best of the others; distance of simulated over real samples from 1."""
AFTER = 4
"""Steps whose median is that of those who are left."""
MODEL = {**TIMED, "forward_s": 0.01, "backward_s": 0.02}
PAPER = {"dynamic": 1.229, "reroute": 1.355}
AS_A_JOB = "restart, as a job does"


class Event(NamedTuple):
    """A device that is lost ("remove") or returns ("add"), and how long after the start of training by all six."""

    at_s: float
    kind: str
    name: str


HISTORY = (
    Event(12, "remove", "b"), Event(32, "remove", "e"), Event(52, "add", "b"), Event(68, "add", "e"),
    Event(90, "remove", "c"), Event(112, "add", "c"),
)  # fmt: skip
LENGTH_S = 135.0
QUICK, QUICK_S = (Event(5, "remove", "b"), Event(17, "add", "b")), 28.0


@dataclass
class Story:
    """Outcome of one history under one policy.

    Attributes:
        samples: Number of samples trained between begin and end.
        changes: Changes as they happened; times in seconds since the begin.
        pauses: Seconds that each change cost beyond a step that runs again, by kind of change.
        plans: Runs of steps, one for each plan, in order.
        ends: Ends of all steps, in seconds since the begin.
    """

    policy: str
    samples: int = 0
    changes: list[Event] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    plans: list[PlanRun] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ real processes


def play(result: Result, policy: str, history: Sequence[Event], length_s: float, about: dict[str, Any]) -> Story:
    """Runs one history of losses and returns under a policy."""
    print(f" {policy}", flush=True)
    with scratch() as saves, pipeline_job(policy=policy, saves=str(saves), save_every=SAVE_EVERY, **about) as job:
        job.harness.declare(*NAMES)
        job.found(NAMES)
        first = job.harness.wait_until(lambda: committed(job.harness.records)[1:2] or None, "two steps of all six")
        began, up = first[0][0], set(NAMES)
        for event in (*history, Event(length_s, "", "")):
            wait(job, up, began + event.at_s, saves)
            if event.kind == "remove":
                up.remove(event.name)
                job.harness.kill(event.name)
            elif event.kind == "add":
                up.add(event.name)
                job.start(event.name)
        records = [r for r in job.harness.records if r.mono <= began + length_s]
        (job.harness.directory / "end").write_text(str(trained(job.harness.records, math.inf) + 10))
        codes = {name: job.harness.wait_exit(name) for name in sorted(up)}
        if any(codes.values()):
            raise RuntimeError(f"exit codes {codes}\n{job.harness.dump()}")
        result.audit(job.harness.logs, f"{policy}: audit, violations", policy)
    return story_of(policy, records, began, history)


def wait(job: PipelineJob, up: set[str], until: float, saves: Path) -> None:
    """Waits until a monotonic time (s); starts members again if all have ended in order to restart."""

    def ended() -> bool:
        codes = [job.harness.children[name].poll() for name in up]
        return None not in codes and RESTART_CODE in codes

    while (left := until - time.monotonic()) > 0:
        job.harness.wait_until(lambda: ended() or time.monotonic() >= until, "the history's next event", left + 5)
        if ended():
            job.again(sorted(up), ckpt_path=max(map(str, saves.glob("step=*.ckpt")), key=step_of))


# ------------------------------------------------------------------------------------------------ what was seen


def step_of(path: str) -> int:
    """Returns the number of the step at which a checkpoint was saved, from its path."""
    return int(Path(path).stem.partition("=")[2])


def trained(records: Sequence[Record], until: float) -> int:
    """Returns how many steps are trained by a time (s); a restart discards the steps after its checkpoint."""
    records = [r for r in records if r.mono <= until]
    resumed = max((r for r in records if r.name == "resumed"), key=lambda r: r.mono, default=None)
    since, base = (resumed.mono, int(resumed["step"])) if resumed else (0.0, 0)
    if any(r.name == "ended" and r.mono > since for r in records):
        return max((step_of(r["path"]) for r in records if r.name == "checkpoint"), default=0)
    return base + len({r["seq"] for r in records if r.name == "committed" and r["kind"] == "step" and r.mono > since})


def story_of(policy: str, records: Sequence[Record], began: float, history: Sequence[Event]) -> Story:
    """Reads the outcome of a history from event logs."""
    steps, end = committed(records), max(r.mono for r in records)
    samples = (trained(records, end) - trained(records, began)) * MICRO_BATCHES * BATCH
    story = Story(policy, samples, ends=[t - began for t, _ in steps if t > began])
    said = [r.mono for r in records if r.name == "committed"]
    anew = {max((t for t in said if t < r.mono), default=0.0) for r in records if r.name == "resumed"}
    for a, b in itertools.pairwise([0.0, *sorted(anew), end]):  # each job's own views
        story.plans += runs(r for r in records if a < r.mono <= b)
    removed = iter(sorted(r.mono for r in records if r.name == "fault_injected"))
    for event in history:
        gone = event.kind == "remove"
        after = next(removed, end) if gone else began + event.at_s
        seen = change(steps, event.name, after, gone=gone)
        if seen is not None:
            story.pauses.setdefault(kind_of(records, seen[2], policy, event), []).append(seen[1])
        if gone or seen is not None:
            story.changes.append(event._replace(at_s=(after if seen is None else seen[0]) - began))
    return story


def nodes_of(step: Committed) -> set[str]:
    """Returns the names of the members that contributed to a step."""
    return {node_of(m) for m, _ in next(iter(step[1].values()))["contributors"]}


def change(steps: Sequence[Committed], name: str, after: float, *, gone: bool) -> tuple[float, float, Committed] | None:
    """Returns when a member's loss or return begins to cost time, how much it costs, and the first step after it; None
    if it does not show.

    That is: since when it costs time (a loss at once, a return when the last step without it has ended); for how long,
    beyond a step; and the first step after it.
    """
    at = next((i for i, s in enumerate(steps) if i and s[0] > after and (name in nodes_of(s)) is not gone), None)
    if at is None:
        return None
    later = [s[0] for s in steps[at:] if nodes_of(s) == nodes_of(steps[at])][: AFTER + 1]
    if len(later) < 2:
        return None
    since, step_s = after if gone else steps[at - 1][0], median([b - a for a, b in itertools.pairwise(later)])
    return since, max(0.0, later[0] - since - step_s), steps[at]


def kind_of(records: Sequence[Record], first: Committed, policy: str, event: Event) -> str:
    """Returns the policy's reaction to a change: "reroute", "fill" or "move", or "reload" after a restart."""
    if policy == "restart" and event.kind == "remove":
        return "reload"
    view = next(iter(first[1].values()))["view"]
    told = [r for r in records if r.name == "pipelines" and r.get("view") == view and r.get("chosen") is not None]
    return str(told[-1]["candidates"][told[-1]["chosen"]]["name"]).rpartition(": ")[2] if told else "reroute"


# ------------------------------------------------------------------------------------------------ the simulated fleet


def restarts(ways: policies.Options) -> Iterator[PlanCandidate | None]:
    """Policy that returns to a checkpoint after a loss, with the best plan, and gives newcomers work, as a running job
    does.
    """
    yield from policies.adaptive(ways) if ways.whole else [ways.restart()]


def measured_costs(stories: Sequence[Story], step_s: float) -> Pauses:
    """Returns the measured costs of changes; kinds that did not occur get the costs that the planner of a running job
    assumes.
    """
    usual = {"reroute": PAUSES.reroute_s, "fill": PAUSES.fill_s, "move": PAUSES.move_s, "reload": PAUSES.reload_s}
    seen = defaultdict[str, list[float]](list)
    for kind, values in itertools.chain.from_iterable(story.pauses.items() for story in stories):
        seen[kind] += values
    cost = {kind: median(seen[kind] or [assumed]) for kind, assumed in usual.items()}
    return Pauses(
        reroute_s=cost["reroute"], fill_s=cost["fill"], move_s=cost["move"],
        reload_s=max(0.0, cost["reload"] - cost["move"]), checkpoint_s=SAVE_EVERY * step_s,
    )  # fmt: skip


def measured_job(profile: TrainingJob, commit_s: float) -> TrainingJob:
    """Returns the job on six devices, whose steps take `commit_s` seconds beyond their layers."""
    devices = tuple(Device(name=n, memory_nbytes=memory_of(profile, OWNED)) for n in NAMES)
    overheads = replace(profile.overheads, commit_s=commit_s)
    return replace(profile, overheads=overheads, devices=devices, micro_batches=MICRO_BATCHES, samples=BATCH)


def simulated(story: Story, job: TrainingJob, pauses: Pauses, length_s: float) -> Outcome:
    """Returns the outcome of the same history on the simulated fleet."""
    changes = tuple(FleetChange(x.at_s, x.kind, (NAMES.index(x.name),)) for x in story.changes)
    policy = AS_A_JOB if story.policy == "restart" else story.policy
    return FleetRun(MixedFleet(job, pauses), Trace(tuple(range(len(NAMES))), changes, length_s), policy).run()


# ------------------------------------------------------------------------------------------------ figures


def compare(result: Result, stories: Mapping[str, Story], profile: TrainingJob, length_s: float) -> None:
    """Adds the figures of the history under each policy, real and simulated."""
    for name, story in stories.items():
        result.add(f"{name}: samples in {length_s:g} s", story.samples, "count")
    best = max((story for name, story in stories.items() if name != "adaptive"), key=lambda story: story.samples)
    ratio = best.samples / stories["adaptive"].samples
    result.add(f"the best of the others ({best.policy}) over adaptive", ratio, "ratio", 1 / LEAST)
    whole = [story.plans[0] for story in stories.values()]
    step_s = median([fmean(x.steps) for x in whole])  # checkpoints included
    predicted_s = whole[0].predicted_s
    result.add(f"a step of all six ({whole[0].shape}), measured over predicted", step_s / predicted_s, "ratio")
    commit_s = max(0.0, profile.overheads.commit_s + step_s - predicted_s)
    pauses, job = measured_costs(list(stories.values()), step_s), measured_job(profile, commit_s)
    for name, story in stories.items():
        out = simulated(story, job, pauses, length_s)
        off = abs(out.samples / story.samples - 1)
        result.add(f"{name}: distance of simulated over real samples from 1", off, "1", NEAR)
        result.details[f"simulated, {name}"] = out.to_dict(history=False)
    for what, seconds in asdict(pauses).items():
        result.add(f"measured cost: {what.removesuffix('_s')}", seconds, "s")


def beside_the_paper(result: Result, stories: Mapping[str, Story]) -> None:
    """Prints the paper's claims with our results."""
    for story in stories.values():
        six, less = story.plans[0], next((x for x in story.plans if x.members == 5 and len(x.steps) > 1), None)
        if less is not None:
            share = six.step_s / less.step_s
            result.add(f"Fig. 6: {story.policy}, throughput of 5 devices over that of 6", share, "ratio")
        result.details[story.policy] = {
            "changes": story.changes, "ends_s": story.ends, "pauses_s": story.pauses,
            "plans": [[x.shape, x.members, x.rerouted, x.predicted_s, x.steps] for x in story.plans],
        }  # fmt: skip
    result.remark("Fig. 6, the paper: 96.22% for 8 -> 7, 89.00% for 16 -> 15, 74.38% for 32 -> 24")
    result.remark("Figs. 7 and 8: devices and steps over time are in the details of --out")
    for name, claimed in PAPER.items():
        if name in stories:
            ratio = stories["adaptive"].samples / stories[name].samples
            result.add(f"Fig. 8: adaptive over {name} (the paper: {claimed})", ratio, "ratio")
    worst = max(abs(x.error) for story in stories.values() for x in story.plans if len(x.steps) > AFTER)
    result.add("Fig. 9: largest error of a prediction (the paper: 0.0802)", worst, "1")


def main() -> int:
    p = Options(__doc__)
    p.add_argument("--policies", nargs="*", default=list(PIPELINE_POLICIES), help="which; adaptive is among them")
    args = p.parse_args()
    policies.POLICIES[AS_A_JOB] = restarts
    result = Result("pipeline_policies")
    history, length_s = (QUICK, QUICK_S) if args.quick else (HISTORY, LENGTH_S)
    with scratch() as folder:
        file = folder / "profile.json"
        profile = profile_of(MODEL, file)
        about = {"model": MODEL, "batch": BATCH, "micro_batches": MICRO_BATCHES, "profile": str(file)}
        about["device_memory"] = memory_of(profile, OWNED)
        names = ["adaptive", "restart"] if args.quick else args.policies
        stories = {name: play(result, name, history, length_s, about) for name in names}
    compare(result, stories, profile, length_s)
    beside_the_paper(result, stories)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
