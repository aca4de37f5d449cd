"""Measures how soon the other members make a step without one that dies or freezes in a pipeline, and how fast they are
then.

Six processes train timed layers, so that they behave as six devices, as three pipelines of two stages or two of three.
One member after the other strikes itself at a place of a step: within a forward or a backward pass, between units, in
the all-reduce, between its contribution and the header, while the header is handed out, before the optimizer, when a
recovery begins, while it pulls a part. It is killed or frozen; two are killed at once. Each time a fresh process takes
its place, or the frozen one wakes, before the next blow. All of it is one job, whose logs are audited at the end.

Measured, from the event logs: the time from the blow to the commit of the next step at all survivors, less that step
(it runs again as a whole) and less the rest of the unit that was under way at a survivor. Where layers move, their
bytes must be those of the planner's list. At last two members go and nobody comes: steps of five and of four devices
are compared with the planner's best plan for so many, or with its prediction.

Beside it, without bounds: what a restart from a checkpoint costs, by torchrun around torch's own pipelining.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import MIB, Options, Result, median, run
from benchmarks.peers import torchrun_pipeline
from benchmarks.pipeline_members import PLACES, PipelineJob, pipeline_job
from chaos_lightning.events.events import Record
from chaos_lightning.planning.pipelines.job import Device, Overheads
from chaos_lightning.planning.pipelines.planner import Planner
from lab.timed_layers import TimedModel

NAMES = "abcdef"
LAYERS, MICRO_BATCHES, BATCH = 6, 6, 2
OWNED = {"3 x 2": 4.2, "2 x 3": 2.6}
"""Number of layers for which a device has memory, so that the planner chooses the shape, by shape."""
SMALL_MIB = 6.0
BOUNDS_S = {("reroute", "sigkill"): 0.15, ("reroute", "sigstop"): 0.8}
MOVE_S = {50: 0.6, 200: 1.2}
"""Most seconds beyond the step that runs again, by policy and blow, or by MiB of weights and optimizer state."""
THROUGHPUT = 0.95
RESTART = "torchrun"
"""Name of the part beside ours."""
AFTER = 4
"""Steps whose median is that of the survivors."""
SETTLED = 10
"""Steps whose median is that of the survivors where no member comes back."""


@dataclass(frozen=True)
class Campaign:
    """Settings of one job in which members are killed or frozen many times.

    Attributes:
        state_mib: MiB of weights and optimizer state, of all layers together.
        forward_s: Seconds of a layer's forward pass; its backward pass takes twice as long.
    """

    shape: str
    policy: str
    state_mib: float = SMALL_MIB
    forward_s: float = 0.03

    @property
    def model(self) -> dict[str, Any]:
        """Arguments with which members build `TimedModel`."""
        width = int((self.state_mib * MIB / LAYERS / 12) ** 0.5)
        return {"layers": LAYERS, "width": width, "forward_s": self.forward_s, "backward_s": 2 * self.forward_s}

    def __str__(self) -> str:
        return f"{self.shape}, {self.policy}, {self.state_mib:g} MiB"


@dataclass(frozen=True)
class Blow:
    """Measurements of one member's death or freeze.

    Attributes:
        total_s: Seconds from the blow to the next step at all survivors.
        unit_s: Longest time for which a survivor's unit ran on after the recovery was decided, in seconds.
        step_s: Seconds of a step of the survivors.
        planned_nbytes: Bytes to move by the planner's list; None: bytes of more than one move came.
        moved_nbytes: Bytes that survivors received.
    """

    place: str
    kind: str
    total_s: float
    unit_s: float
    step_s: float
    planned_nbytes: int | None
    moved_nbytes: int

    @property
    def beyond_s(self) -> float:
        """Delay in excess of the repeated step and of the unit that was under way."""
        return self.total_s - self.step_s - self.unit_s


class Story:
    """A running job with a campaign's settings, and the deaths and freezes so far.

    Args:
        job: The running job.
        campaign: Settings of the campaign.
    """

    def __init__(self, job: PipelineJob, campaign: Campaign) -> None:
        self.job, self.campaign, self.blows = job, campaign, list[Blow]()
        self._turn = itertools.count()

    # ------------------------------------------------------------------ looking

    def steps(self, since: float, without: Collection[str]) -> list[tuple[float, tuple[str, ...]]]:
        """Returns the steps after a time that all their contributors have committed, without these nodes: when, and who
        contributed.
        """
        found: dict[int, dict[str, float]] = defaultdict(dict)
        who: dict[int, tuple[str, ...]] = {}
        for r in self.job.harness.records:
            if r.name == "committed" and r.get("kind") == "step" and r.mono > since:
                names = tuple(m for m, _ in r["contributors"])
                if not {m.rpartition("~")[0] for m in names} & set(without):
                    found[r["seq"]][r.member] = r.mono
                    who[r["seq"]] = names
        whole = [seq for seq, at in sorted(found.items()) if set(at) >= set(who[seq])]
        return [(max(found[seq].values()), who[seq]) for seq in whole]

    def last(self, name: str, since: float = 0.0) -> list[Record]:
        return [r for r in self.job.harness.records if r.name == name and r.mono > since]

    @property
    def layers(self) -> dict[str, list[list[int]]]:
        """Layers that each node runs, by the node's name."""
        choice = [r for r in self.last("pipelines") if r.get("view")][-1]
        return {m.rpartition("~")[0]: spans for m, spans in choice["layers"].items()}

    def victim(self, other_than: Sequence[str] = ()) -> str:
        """Returns the next member, in turn, that runs layers and shares none with the given members."""
        rows = self.layers
        taken = [rows.get(name) for name in other_than]
        free = [name for name in sorted(rows) if name not in other_than and rows[name] not in taken]
        return free[next(self._turn) % len(free)]

    def spare(self, gone: Collection[str]) -> list[str]:
        """Returns the members whose layers all have another owner as well."""
        held = {n: {i for a, b in spans for i in range(a, b)} for n, spans in self.layers.items() if n not in gone}
        return [n for n, mine in held.items() if mine and mine <= set().union(*(held[m] for m in held if m != n))]

    def root(self) -> str:
        view = self.last("view")[-1]
        return str(view["members"][0]).rpartition("~")[0]

    # ------------------------------------------------------------------ acting

    def formed(self) -> None:
        """Waits until all six members run in the campaign's shape and have made two steps."""

        def whole() -> bool:
            choice = [r for r in self.last("pipelines") if r.get("view")][-1:]
            return bool(choice) and choice[0].get("shape") == self.campaign.shape

        self.job.harness.wait_until(whole, f"pipelines of shape {self.campaign.shape}")
        since = max(r.mono for r in self.job.harness.records)
        self.job.harness.wait_until(
            lambda: sum(len(who) == len(NAMES) for _, who in self.steps(since, ())) > 1, "two steps of six"
        )

    def strike(self, place: str, kind: str = "sigkill") -> None:
        """Kills or freezes a member once, measures the recovery, and brings the job back to six members."""
        harness, job = self.job.harness, self.job
        if place == "pull":
            self._in_pull()
            return
        before = harness.records[-1]
        names = [self.root() if place == "handing out" else self.victim()]
        if place in ("recovery", "two at once"):
            names.append(self.victim(names))
        # Either of two at once may be the first, and the plan after it may leave the other no units to stand between.
        at = place if place in PLACES else "between, recovery"
        job.strike(names[0], "between" if place == "recovery" else at, kind)
        struck = [job.struck(names[0], before)] if place == "recovery" else []
        for name in names[1:]:
            job.strike(name, at, kind)
        struck += [job.struck(name, before) for name in names[len(struck) :]]
        self.blows.append(self._measured(place, kind, struck, names))
        self._back(names, kind)

    def _back(self, names: Sequence[str], kind: str) -> None:
        for name in names:
            if kind == "sigstop":
                self.job.harness.cont(name)
            else:
                self.job.start(name)
        self.formed()

    def _in_pull(self) -> None:
        """Kills a newcomer in its first pull, and measures the recovery of the other members."""
        harness, job, name = self.job.harness, self.job, self.victim()
        before = harness.records[-1]
        job.strike(name, "between")
        job.struck(name, before)
        harness.wait_until(lambda: self.steps(before.mono, (name,)), f"a step without {name}")
        again = harness.records[-1]
        job.strike(name, "pull")
        job.start(name)
        struck = job.struck(name, again)
        self.blows.append(self._measured("pull", "sigkill", [struck], [name]))
        self._back([name], "sigkill")

    def _measured(self, place: str, kind: str, struck: Sequence[Record], names: Sequence[str]) -> Blow:
        at, harness = max(r.mono for r in struck), self.job.harness
        harness.wait_until(lambda: len(self.steps(at, names)) > AFTER, f"{AFTER} steps without {', '.join(names)}")
        first, *later = self.steps(at, names)
        ends = [first[0], *(t for t, who in later if who == first[1])]
        choices = [r for r in self.last("pipelines", at) if r.get("view") and r.mono <= first[0]]
        pulled = [r for r in self.last("part_pulled", at) if r.mono <= first[0] and r["part"] != "rest"]
        # A member that dies in a pull dies while a view moves parts that lets it in, so bytes are of two views.
        one_move = place != "pull" and not any(int(r["moved_nbytes"]) for r in choices[1:])
        return Blow(
            place,
            kind,
            first[0] - at,
            max(self._units(at, first[0]), default=0.0),
            median([b - a for a, b in itertools.pairwise(ends)]),
            int(choices[0]["moved_nbytes"]) if choices and one_move else None,
            sum(int(r["nbytes"]) for r in pulled),
        )

    def _units(self, since: float, until: float) -> Iterator[float]:
        """Yields the seconds for which survivors' current units ran on after the recovery was decided."""
        decided = {r.member: r.mono for r in self.last("redo", since) if r.mono <= until}
        for r in self.last("units_dropped", since):
            if r.member in decided and r.mono <= until:
                yield max(0.0, r.mono - decided[r.member])

    def shrink(self, result: Result) -> None:
        """Removes two members, by death or, if only they have some layers, by leaving; adds the speed of five and of
        four devices.
        """
        gone: list[str] = []
        for _ in range(2):
            # Members tell what steps cost beside their layers after some steps of a plan.
            self.job.harness.wait_until(lambda: "overheads" in self.job.facts()["machine"], "measured costs of steps")
            before, spare = self.job.harness.records[-1], self.spare(gone)
            overheads = Overheads(**self.job.facts()["machine"].get("overheads", {}))
            name = spare[0] if spare else self.victim(gone)
            gone.append(name)
            if spare:
                self.job.strike(name, "between")
                at = self.job.struck(name, before).mono
            else:
                self.job.harness.declare(name)
                self.job.harness.terminate(name)
                self.job.harness.wait_exit(name)
                at = self.job.harness.records[-1].mono
            self.job.harness.wait_until(lambda at=at: len(self.steps(at, gone)) > SETTLED + AFTER, "steady steps")
            ends = [t for t, _ in self.steps(at, gone)][-SETTLED:]
            step_s = median([b - a for a, b in itertools.pairwise(ends)])
            left = len(NAMES) - len(gone)
            wanted_s, words = self._wanted(left, overheads)
            shape = [r for r in self.last("pipelines") if r.get("view")][-1]["shape"]
            title = f"{self.campaign}: {left + 1} -> {left} devices ({shape}), measured step over {words}"
            result.add(title, step_s / wanted_s, "ratio", 1 / THROUGHPUT)

    def _wanted(self, devices: int, overheads: Overheads) -> tuple[float, str]:
        """Returns the step in s that `devices` devices should reach, and in words what predicted it.

        Args:
            devices: Number of devices.
            overheads: Costs as the job had measured them before the last death.
        """
        choice = [r for r in self.last("pipelines") if r.get("view")][-1]
        if self.campaign.policy == "reroute":
            return float(choice["candidates"][choice["chosen"]]["step_s"]), "its prediction"
        job = profile_of(self.campaign)
        fleet = tuple(Device(name=f"d{i}", memory_nbytes=job.devices[0].memory_nbytes) for i in range(devices))
        job = replace(job, devices=fleet, overheads=overheads)
        return Planner(job).exact().estimate.step_s, "the planner's best, with costs of the plan before"


def profile_of(campaign: Campaign) -> Any:
    """Returns the planner's description of a campaign's model, with the memory of one device."""
    model = TimedModel(**campaign.model)
    return model.job(micro_batches=MICRO_BATCHES, samples=BATCH, owned=OWNED[campaign.shape])


def play(
    result: Result, campaign: Campaign, blows: Sequence[tuple[str, str]], *, shrinks: bool, keep: str
) -> list[Blow]:
    """Runs one campaign from its founding to its audit; returns the measured deaths and freezes.

    Args:
        result: Result to which the figures are added.
        campaign: Settings of the campaign.
        blows: Place and kind of each.
        shrinks: Whether two die at the end and nobody comes.
        keep: Folder that keeps the event logs; "": none does.
    """
    profile = profile_of(campaign)
    about = {"model": {"kind": "timed", **campaign.model}, "batch": BATCH, "micro_batches": MICRO_BATCHES}
    print(f" {campaign}: {len(blows)} blows", flush=True)
    folder = f"{keep}/{campaign}".replace(" ", "").replace(",", "-") if keep else ""
    memory = profile.devices[0].memory_nbytes
    with pipeline_job(folder, profile=profile, policy=campaign.policy, device_memory=memory, **about) as job:
        job.found(NAMES)
        story = Story(job, campaign)
        story.formed()
        for place, kind in blows:
            story.strike(place, kind)
            blow = story.blows[-1]
            print(f"    {kind} in {place}: {blow.total_s:.3f} s, {blow.beyond_s:.3f} s beyond", flush=True)
        if shrinks:
            story.shrink(result)
        job.end()
        for name, child in job.harness.children.items():
            if child.running and job.harness.wait_exit(name):
                raise RuntimeError(f"{name}: {child.words()}\n{job.harness.dump()}")
        numbers = sorted({int(r["step"]) for r in job.harness.records if r.name == "committed"} - {0})
        result.add(f"{campaign}: steps lost of {len(numbers)}", numbers[-1] - len(numbers), "count", 0)
        result.audit(job.harness.logs, f"{campaign}: audit, violations", str(campaign))
    report(result, campaign, story.blows)
    return story.blows


def report(result: Result, campaign: Campaign, blows: Sequence[Blow]) -> None:
    """Adds medians of the delays, and the bytes moved."""
    for kind in ("sigkill", "sigstop"):
        moved = [b for b in blows if b.kind == kind and (b.planned_nbytes or b.moved_nbytes)]
        for words, these in (("moves", moved), ("reroute", [b for b in blows if b.kind == kind and b not in moved])):
            if not these:
                continue
            # One or two reroutes (no member had to pull a victim's layers) get no bound: they are no median.
            bound = BOUNDS_S[words, kind] if words == "reroute" and len(these) > 2 else None
            if words == "moves" and kind == "sigkill":
                bound = MOVE_S.get(int(campaign.state_mib))
            title = f"{campaign}: {kind}, {words}, beyond the step that runs again, median of {len(these)}"
            result.add(title, median([b.beyond_s for b in these]), "s", bound)
    listed = [b for b in blows if b.planned_nbytes is not None]
    if moves := [b for b in listed if b.planned_nbytes]:
        apart = sum(abs(b.moved_nbytes - (b.planned_nbytes or 0)) for b in listed)
        result.add(f"{campaign}: bytes of {len(moves)} moves beside the planner's list", apart, "bytes", 0)
    result.details[str(campaign)] = [vars(b) for b in blows]


def campaigns(times: int, quick: bool) -> dict[str, tuple[Campaign, list[tuple[str, str]], bool]]:
    """Returns the campaigns by the name that --only takes: each with its faults, and whether it loses two members at
    the end.
    """
    kills = [(place, "sigkill") for place in (*PLACES, "two at once")]
    stops = [(place, "sigstop") for place in ("forward", "backward", "all-reduce")]
    if quick:
        few = [(place, "sigkill") for place in ("backward", "contributed", "handing out", "two at once")]
        return {
            "reroute-3x2": (Campaign("3 x 2", "reroute"), [*few, stops[1]] * times, True),
            "moves-50": (Campaign("2 x 3", "dynamic", 50.0), few[:1] * times, False),
        }
    found = {
        f"{policy}-{shape.replace(' ', '')}": (Campaign(shape, policy), [*kills, *stops] * times, True)
        for shape, policy in itertools.product(OWNED, ("reroute", "dynamic"))
    }
    for state_mib in MOVE_S:
        campaign = Campaign("2 x 3", "dynamic", float(state_mib), 0.01 if state_mib < 100 else 0.02)
        found[f"moves-{state_mib}"] = campaign, [("backward", "sigkill"), ("all-reduce", "sigkill")] * times, False
    return found


def main() -> int:
    p = Options(__doc__)
    p.add_count("--times", 3, 1, "deaths at each place")
    p.add_argument("--keep-logs", default="", help="folder that keeps the members' event logs")
    p.add_argument("--only", nargs="*", default=[], help="names of parts, such as moves-50; a wrong one tells all")
    args = p.parse_args()
    result, ours_s = Result("pipeline_recovery"), dict[str, float]()
    parts = campaigns(args.times, args.quick)
    if unknown := set(args.only) - {*parts, RESTART}:
        p.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join([*parts, RESTART])}")
    for name, (campaign, blows, shrinks) in parts.items():
        if not args.only or name in args.only:
            begun = time.monotonic()
            done = play(result, campaign, blows, shrinks=shrinks, keep=args.keep_logs)
            result.details[f"{name}: took, s"] = round(time.monotonic() - begun, 1)
            if campaign.shape == "3 x 2":
                ours_s[str(campaign)] = median([b.total_s for b in done if b.kind == "sigkill"])
    if RESTART in args.only or not (args.only or args.quick):
        about = Campaign("3 x 2", "").model, BATCH, MICRO_BATCHES
        torchrun_pipeline.measure(result, *about, 2 if args.quick else 3, ours_s)
    elif not args.only:
        result.remark("no restart by torchrun under --quick: it takes two minutes (--only torchrun)")
    return result.finish(args)


if __name__ == "__main__":
    run(main)
