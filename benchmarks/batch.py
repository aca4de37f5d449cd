"""Checks that a batch of fixed size is trained as in one process whoever is there, and measures what that costs.

Members are real processes whose layers take a given time for each sample (lab/timed_layer.py), so that they behave as
machines of their own.

  churn   One to four unequal members train; every few seconds one joins, leaves or gets SIGKILL at a random moment, at
          times while another one is coming in. Each step is compared with plain Lightning in one process: the numbers
          of the samples that the committed attempts were given, by the user's own code, and the losses, in 32 and in
          64 bits. Each epoch must have had each sample once.
  speed   One of two members takes twice as long for a sample. The job is founded with equal shares, since nobody has
          told a time yet, and gets others 30 steps later; the steps before and after that are compared. Ideal is 2/3.
  death   One of three members gets SIGKILL at a random moment; ranks take turns. Counted is the time from the signal to
          the commit of the next step at both survivors, less a whole step of these two. So that the death is noticed,
          that the micro-batch under way is ended, and that the state is put back, all count; the step that runs again
          does not. As long as a kill is not within a step, the rest of what was committed with the victim counts, too.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.batch_members import BATCH, ROWS, SAMPLES, member
from benchmarks.common import Options, Result, median, run
from benchmarks.pipeline_members import PipelineJob, alone, pipeline_job
from benchmarks.pipeline_steps import UNSETTLED, committed
from chaos_lightning.events.events import Record
from chaos_lightning.observe.fields import node_of

PARTS = ("churn", "speed", "death")
MOST_MEMBERS = 4
LOSS = {False: 1e-5, True: 1e-10}
"""Bound of the relative difference of losses, by whether numbers are of 64 bits."""
SPEED = 0.75
BEYOND_S = 0.15
CHURN_SAMPLE_S = 0.008
"""Seconds of a sample in the churn: a step of one member takes 0.4 s, so that 300 steps last for a minute."""
EVERY_S = (0.5, 3.0)
"""Seconds between two changes of the members."""
OVERLAP = 0.3
"""Probability that a member is killed while another one comes in."""
LAST_STEPS = 25
"""Steps at the end without changes: the job would be over before a newcomer was in."""
SPEED_SAMPLE_S = 0.006
SPEED_STEPS = 75
"""Steps with a slow member: 30 by the first split, the others by the one that follows."""
DEATH_SAMPLE_S, DEATH_FITS = 0.005, 4
AFTER = 6
"""Steps of the survivors whose median is taken off."""
LEFT = (0, 128 + signal.SIGTERM)
"""Exit codes of a member that has left politely."""

Row = dict[str, Any]


def rows_of(job: PipelineJob) -> list[Row]:
    """Returns all that members have written down, those that are dead included."""
    files = sorted(job.harness.directory.glob(f"*.{ROWS}"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def steps_of(records: Iterable[Record]) -> dict[int, Record]:
    """Returns a `committed` event of each step; which member's does not matter."""
    return {int(r["step"]): r for r in records if r.name == "committed" and r.get("kind") == "step"}


def contributors(record: Record) -> list[str]:
    """Returns the names of those that contributed to a step, in rank order."""
    return [node_of(m) for m, _ in record["contributors"]]


def shares(rows: Iterable[Row], steps: dict[int, Record]) -> dict[int, dict[str, list[int]]]:
    """Returns the samples that each contributor computed in the attempt that was committed, by step."""
    found: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        record = steps.get(row["step"]) if "samples" in row else None
        if record is not None and row["view"] == record["view"] and row["name"] in contributors(record):
            found[row["step"]][row["name"]] += row["samples"]
    return found


def finished(job: PipelineJob, names: Iterable[str]) -> list[Record]:
    """Waits for the end of members that train to the job's end; returns all events."""
    if any((codes := {name: job.harness.wait_exit(name, 600.0) for name in names}).values()):
        raise RuntimeError(f"exit codes {codes}\n{job.harness.dump()}")
    return job.harness.records


# ------------------------------------------------------------------------------------------------ churn


@dataclass
class Churn:
    """Changes of the members of a running job: up to four, down to one, and so on.

    Attributes:
        job: The job, founded by its first member.
        last: Step after which nothing changes any more.
        rng: Random numbers of moments and victims.
    """

    job: PipelineJob
    last: int
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    """Number of changes made, by kind."""
    living: list[str] = field(default_factory=lambda: ["m0"])
    """Names of members that were started and not sent away."""

    def latest(self) -> list[str]:
        """Returns the names of those that contributed to the latest step."""
        steps = steps_of(self.job.harness.records)
        return contributors(steps[max(steps)]) if steps else []

    @property
    def present(self) -> list[str]:
        """Names of living members that contributed to the latest step."""
        return [name for name in self.latest() if name in self.living]

    def over(self) -> bool:
        return max(steps_of(self.job.harness.records), default=0) >= self.last

    def stir(self) -> None:
        """Changes the members every few seconds until the last steps begin."""
        ways = itertools.cycle(("kill", "leave", "kill"))
        while not self.over():
            while len(self.living) < MOST_MEMBERS and not self.over():
                self.join()
                if len(self.present) > 1 and self.rng.random() < OVERLAP:
                    self.strike("kill")
            self._until(lambda: len(self.present) == MOST_MEMBERS)
            while len(self.living) > 1 and not self.over():
                self.strike(next(ways))

    def join(self) -> None:
        self.done["join"] += 1
        name = f"m{self.done['join']}"
        self.living.append(name)
        self.job.start(name)
        self._pause()

    def strike(self, way: str) -> None:
        """Kills a present member or has it leave, and waits until the others have made a step without it."""
        victim, harness = self.rng.choice(self.present), self.job.harness
        self.living.remove(victim)
        self.done[way] += 1
        harness.declare(victim)
        if way == "kill":
            harness.kill(victim)
        else:
            harness.terminate(victim)
            if (code := harness.wait_exit(victim)) not in LEFT:
                raise RuntimeError(f"{victim} was to leave, and ended with {code}\n{harness.dump()}")
        self._until(lambda: bool(self.present) and victim not in self.latest())
        self._pause()

    def _until(self, ready: Callable[[], bool]) -> None:
        self.job.harness.wait_until(lambda: ready() or self.over(), "a change of the members")

    def _pause(self) -> None:
        end = time.monotonic() + self.rng.uniform(*EVERY_S)
        self._until(lambda: time.monotonic() > end)

    def end(self) -> list[Record]:
        """Waits for the end of the training; returns all events."""
        came = {r.node for r in self.job.harness.records if r.name == "joined"}
        for name in set(self.living) - came:
            self.job.harness.kill(name)  # it would wait for a job that is over
        return finished(self.job, [name for name in self.living if name in came])


def churn(result: Result, double: bool, steps: int, seed: int) -> None:
    """Trains under churn and in one process, and adds the differences."""
    title = f"churn, fp{64 if double else 32}"
    print(f" {title}: {steps} steps, seed {seed}", flush=True)
    about: dict[str, Any] = {"entry": member, "steps": steps, "double": double}
    plain: list[Row] = alone(strategy="auto", **about)  # type: ignore[assignment]
    times = {f"m{number}": 1 + number % 2 for number in range(steps)}
    with pipeline_job(sample_s=CHURN_SAMPLE_S, times=times, **about) as job:
        job.found(["m0"], 1)
        changes = Churn(job, steps - LAST_STEPS, random.Random(seed))
        changes.stir()
        records = changes.end()
        rows = rows_of(job)
        result.audit(job.harness.logs, f"{title}: audit, violations", title)
    compare(result, title, steps, rows, steps_of(records), plain, LOSS[double])
    redone = {(r.get("view"), r.get("base")) for r in records if r.name == "redo"}
    worlds = Counter(len(contributors(record)) for record in steps_of(records).values())
    told = {"changes": dict(changes.done), "steps by members": dict(sorted(worlds.items())), "redone": len(redone)}
    result.details[title] = told
    result.remark(f"{title}: {told}")
    if steps > LAST_STEPS * 8:
        missing = set(range(1, MOST_MEMBERS + 1)) - worlds.keys()
        result.add(f"{title}: worlds of 1 to {MOST_MEMBERS} that made no step", len(missing), "count", 0)


def compare(
    result: Result, title: str, steps: int, rows: list[Row], done: dict[int, Record], plain: list[Row], loss: float
) -> None:
    """Adds how the steps of a job differ from those of one process.

    Args:
        result: Result to which the figures are added.
        title: Title of the case.
        steps: Steps of the training.
        rows: Words of all members.
        done: A `committed` event of each step.
        plain: Words of plain Lightning.
        loss: Bound of the relative difference of losses.
    """
    wanted = {row["step"]: (row["epoch"], sorted(row["samples"])) for row in plain if "samples" in row}
    ours = {s: sorted(itertools.chain(*of.values())) for s, of in shares(rows, done).items()}
    unequal = [s for s in range(1, steps + 1) if ours.get(s) != wanted[s][1]]
    result.add(f"{title}: steps with other samples, of {steps}", len(unequal), "count", 0)
    times = Counter((wanted[s][0], number) for s, numbers in ours.items() for number in numbers)
    whole = max(epoch for epoch, _ in wanted.values())
    never = whole * SAMPLES - sum(epoch < whole for epoch, _ in times)
    twice = sum(count - 1 for count in times.values())
    result.add(f"{title}: samples missing or twice in {whole} epochs and a part", never + twice, "count", 0)
    losses = {row["step"]: row["loss"] for row in plain if "loss" in row}
    told = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    lost = set(losses) - {step for step, _ in told}
    result.add(f"{title}: steps without a loss", len(lost), "count", 0)
    apart = max(math.inf if math.isnan(x) else abs(x - losses[step]) / abs(losses[step]) for step, x in told)
    result.add(f"{title}: losses of {len(losses)} steps at all members, relative", apart, "1", loss)


# ------------------------------------------------------------------------------------------------ speed, death


def speed(result: Result) -> None:
    """Trains with a member of half the speed, and adds a step's time by measured speed over that by equal shares."""
    print(" one of two members has half the speed", flush=True)
    about = {"entry": member, "steps": SPEED_STEPS, "sample_s": SPEED_SAMPLE_S, "times": {"b": 2}}
    with pipeline_job(**about) as job:
        job.found("ab", 2)
        records = finished(job, "ab")
        split = shares(rows_of(job), steps_of(records))
    seconds: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for (before, _), (at, by) in itertools.pairwise(committed(records)):
        step = int(next(iter(by.values()))["step"])
        seconds[tuple(len(split[step][name]) for name in "ab")].append(at - before)
    whole = {shares: times[UNSETTLED:] for shares, times in seconds.items() if sum(shares) == BATCH}
    result.details["speed: seconds of steps by shares"] = {str(shares): times for shares, times in whole.items()}
    equal, last = (BATCH // 2, BATCH // 2), tuple(len(split[SPEED_STEPS][name]) for name in "ab")
    if last == equal or len(whole.get(last, ())) < AFTER or not whole.get(equal):
        raise RuntimeError(f"shares and numbers of steps: { {s: len(times) for s, times in seconds.items()} }")
    title = f"half the speed: step by shares of {last[0]} and {last[1]} over equal ones"
    result.add(title, median(whole[last]) / median(whole[equal]), "ratio", SPEED)


def death(result: Result, kills: int, seed: int) -> None:
    """Kills one of three members again and again, and adds how much longer the step took that ran again."""
    print(f" {kills} kills among three members, seed {seed}", flush=True)
    rng, blows = random.Random(seed), []
    about = {"entry": member, "sample_s": DEATH_SAMPLE_S, "options": {"fits": DEATH_FITS}}
    with pipeline_job(**about) as job:
        job.found("abc", 2)
        for turn in range(kills):
            ranked = settled(job, 3)
            blows.append(blow(job, ranked[turn % 3], rng))
            print(f"    {blows[-1]['victim']}: {blows[-1]['beyond_s']:.3f} s beyond", flush=True)
            job.start(ranked[turn % 3])
        settled(job, 3)
        job.end(20)
        finished(job, "abc")
        result.audit(job.harness.logs, "kills: audit, violations", "kills")
    result.details["kills"] = blows
    for key, words, bound in (
        ("total_s", "from the signal to the survivors' next step", None),
        ("noticed_s", "from the signal to the recovery at the last survivor", None),
        ("beyond_s", "beyond the step that runs again", BEYOND_S),
    ):
        result.add(f"kills: {words}, median of {kills}", median([one[key] for one in blows]), "s", bound)


def settled(job: PipelineJob, size: int) -> list[str]:
    """Waits until the latest steps were made by so many members; returns their names in rank order."""

    def calm() -> list[str] | None:
        steps = steps_of(job.harness.records)
        latest = [contributors(steps[s]) for s in sorted(steps)[-AFTER:]]
        return latest[-1] if len(latest) == AFTER and all(len(who) == size for who in latest) else None

    return job.harness.wait_until(calm, f"{AFTER} steps of {size} members")


def blow(job: PipelineJob, victim: str, rng: random.Random) -> dict[str, Any]:
    """Kills a member at a random moment of a step; returns what the survivors' next steps took, in seconds."""
    ends = [at for at, _ in committed(job.harness.records)[-AFTER:]]
    time.sleep(rng.uniform(0.0, 1.5) * median([b - a for a, b in itertools.pairwise(ends)]))
    struck = time.monotonic()
    job.harness.kill(victim)

    def after() -> Sequence[float] | None:
        found = [at for at, by in committed(job.harness.records) if at > struck and len(by) == 2]
        return found if len(found) > AFTER else None

    first, *later = job.harness.wait_until(after, f"{AFTER} steps without {victim}")
    step_s = median([b - a for a, b in itertools.pairwise([first, *later])])
    noticed = [r.mono for r in job.harness.records if r.name == "redo" and struck < r.mono <= first]
    return {
        "victim": victim,
        "total_s": first - struck,
        "noticed_s": max(noticed, default=struck) - struck,
        "step_s": step_s,
        "beyond_s": first - struck - step_s,
    }


def main() -> int:
    p = Options(__doc__, raw=True)
    p.add_count("--steps", 300, 100, "of each training under churn")
    p.add_count("--kills", 12, 6, "of one of three members")
    p.add_seed("of moments and victims")
    p.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    args = p.parse_args()
    result = Result("batch")
    if "churn" in args.only:
        for double in (True,) if args.quick else (False, True):
            churn(result, double, args.steps, args.seed)
    if "speed" in args.only:
        speed(result)
    if "death" in args.only:
        death(result, args.kills, args.seed)
    return result.finish(args)


if __name__ == "__main__":
    run(main)
