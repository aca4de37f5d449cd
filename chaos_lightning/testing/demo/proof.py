"""Checks of a demo's event logs: each says what was expected and what was found.

Theory of operation. Two witnesses are heard. The audit (observe/audit.py) judges the contract over all events, sharing
no code with the engine. A demo's own lines ask whether what it wanted to show was shown. A line is a function of the
`Evidence`: the logs, and the nodes' exit codes. Those of this module are about any training: no step is lost, every
sample is used once, all hold the same in the end. A line fails when the logs contradict it, and also when they do not
tell: nothing is taken on trust from the program that told the story but the exit codes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chaos_lightning.events.events import Record, read_events
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import folds
from chaos_lightning.observe.fields import integer, node_of, number
from chaos_lightning.observe.timeline import Life, SlotFact, Timeline
from chaos_lightning.testing.demo import ALONE, LOSS, STEP_LOSS
from chaos_lightning.testing.demo.nodes import before

CLOSE = 1e-4
"""Largest difference allowed between the loss of a step and that of the same step in one process."""


class Check(NamedTuple):
    """One check of a demo: what was expected, what was found, and whether they agree."""

    what: str
    found: str
    ok: bool


def faults_of(records: Sequence[Record], *kinds: str) -> list[Record]:
    """Returns the `fault_injected` events of the given kinds."""
    return [r for r in records if r.name == "fault_injected" and r.get("kind") in kinds]


class Evidence:
    """Evidence that a demo has left: its event logs, and the exit codes of its nodes.

    Args:
        folder: Folder of the demo, with its event logs.
        codes: Exit codes by node; None if one still ran. The key `nodes.before(name)` has that of the earlier agent of
            a node that was started again.

    Attributes:
        records: All events, in order of time.
        timeline: All events, folded into a timeline.
        steps: Optimizer steps of the chain.
    """

    def __init__(self, folder: Path, codes: Mapping[str, int | None]) -> None:
        self.folder = folder
        self.codes = codes
        self.records = list(read_events(folder / "events"))
        self.timeline = Timeline.of(self.records)

    @cached_property
    def chain(self) -> list[SlotFact]:
        """All slots that the chain has, in order."""
        return self.timeline.chain()

    @property
    def steps(self) -> list[SlotFact]:
        return [slot for slot in self.chain if slot.kind == "step"]

    def code(self, name: str) -> int | None:
        """Returns the exit code of a node's first agent; the node may have been started again since."""
        return self.codes.get(before(name), self.codes.get(name))

    def faults(self, *kinds: str) -> list[Record]:
        """Returns the `fault_injected` events of the given kinds."""
        return faults_of(self.records, *kinds)

    def fault(self, kind: str, node: str = "") -> Record | None:
        """Returns the first injected fault of a kind, at `node` if one is given; None if there is none."""
        return next((r for r in self.faults(kind) if node in ("", r.node)), None)

    def first(self, name: str, after: float = 0.0, wanted: Callable[[Record], bool] = lambda r: True) -> Record | None:
        """Returns the first event with this name after time `after` that satisfies `wanted`; None if there is none."""
        return next((r for r in self.records if r.name == name and r.t > after and wanted(r)), None)

    def lives(self, name: str, worker: int = 0) -> list[Life]:
        """Returns the incarnations of a node's worker as a member, in order of birth."""
        mine = (x for x in self.timeline.lives.values() if x.node == f"{name}-{worker}")
        return sorted(mine, key=lambda x: x.born)

    def recovery(self, name: str, kind: str, worker: int = 0) -> folds.RecoveryTimes | None:
        """Returns how the job recovered from the first fault of this kind at a node's worker; None if there is none."""
        found = folds.recoveries(self.timeline)
        return next((r for r in found if r.node == f"{name}-{worker}" and r.kind == kind), None)

    def join(self, wanted: Callable[[folds.Join], bool]) -> folds.Join | None:
        """Returns the first join that satisfies `wanted`; None if there is none."""
        return next((j for j in folds.joins(self.timeline) if wanted(j)), None)

    def pid(self, life: Life) -> object:
        return next((r.get("pid") for r in self.records if r.name == "opened" and r.source == life.source), None)

    def one(self, name: str) -> Record | None:
        """Returns the only event with this name that a member logged; None if there is none, or several."""
        found = [r for r in self.records if r.name == name and r.own]
        return found[0] if len(found) == 1 else None

    def foundings(self) -> list[Record]:
        """Returns the views by which a scheduler founded the job; they have no predecessor."""
        views = [r for r in self.records if r.name == "view" and r.source.startswith("scheduler")]
        return [r for r in views if str(r.get("reason")).startswith("founded")]

    def leads(self) -> list[Record]:
        """Returns the events by which schedulers reported that they began to lead."""
        return [r for r in self.records if r.name == "scheduler_started"]


# ------------------------------------------------------------------ lines about any training


def finished(e: Evidence, names: Collection[str], what: str) -> Check:
    """Checks that the given nodes, and no others, committed the closing slot, and ended with exit code 0."""
    codes = [e.codes.get(name) for name in names]
    closing = [s for s in e.chain if s.kind == "closing"]
    who = sorted(node_of(m).removesuffix("-0") for m in closing[-1].commits) if closing else []
    text = f"closing slot committed by {', '.join(who) or 'nobody'}; exit codes {codes}"
    return Check(what, text, who == sorted(names) and all(code == 0 for code in codes))


def ended(e: Evidence, *killed: str) -> Check:
    """Checks that all nodes but the killed ones ended with exit code 0."""
    good = bool(e.codes) and all(code == 0 for name, code in e.codes.items() if name not in killed)
    return Check("all others end with exit code 0", words_of(e.codes) or "nobody ran", good)


def no_step_lost(e: Evidence) -> Check:
    steps = [s.step for s in e.steps]
    dead = _dead(e)
    kept = {s.header for s in e.chain}
    stray = [s for s in e.timeline.slots.values() if s.header not in kept]
    lost = [s for s in stray if s.kind == "step" and not set(s.commits) <= dead]
    unbroken = steps == list(range(1, len(steps) + 1))
    text = f"{len(steps)} steps committed, numbered without a gap; {len(lost)} lost" if unbroken else f"gaps: {steps}"
    if len(stray) > len(lost):
        text += f"; {len(stray) - len(lost)} known only to a victim and reduced again by the others"
    return Check("no committed step is lost", text, bool(steps) and unbroken and not lost)


def samples(e: Evidence) -> Check:
    uses = folds.samples(e.timeline)
    whole = [use for use in uses.values() if use.complete and not use.twice and use.used == use.distinct]
    lengths = {use.length for use in uses.values()}
    text = f"{len(whole)} of {len(uses)} epochs whole, {sum(u.used for u in uses.values()):,} uses"
    text += f" = {len(uses)} x {lengths.pop():,}" if len(lengths) == 1 and None not in lengths else ""
    doubles = sum(use.used - use.distinct for use in uses.values())
    found = f"{text}; {doubles} used twice"
    return Check("every sample exactly once per epoch", found, bool(uses) and len(whole) == len(uses))


def one_chain(e: Evidence) -> Check:
    """Checks that the headers that each member committed are those of the chain, slot by slot."""
    chain = {s.seq: s.header for s in e.chain}
    dead = _dead(e)
    compared, differ, members = 0, 0, set()
    for r in e.records:
        if r.name == "committed" and r.by == r.member:
            members.add(r.member)
            compared += 1
            # Commits that only a victim had made are judged by `no_step_lost`.
            differ += chain.get(int(r["seq"])) != r["header"] and r.member not in dead
    text = f"{compared:,} commits by {len(members)} member ids agree on one chain of {len(chain):,} headers"
    if differ:
        text = f"{differ} of {compared:,} commits are not on the chain"
    return Check("all members committed the same headers", text, bool(compared) and not differ)


def equal_hashes(e: Evidence) -> Check:
    shared = {head: hashes for head, hashes in e.timeline.hashes.items() if len(hashes) > 1}
    steps = {head.partition("/")[0] for head in shared}  # "HEADER/PART" where layers lie at several members
    unequal = {head.partition("/")[0] for head, hashes in shared.items() if len(set(hashes.values())) > 1}
    members = {member for hashes in shared.values() for member in hashes}
    text = f"equal at {len(steps) - len(unequal)} of {len(steps)} steps where {len(members)} member ids took one"
    return Check("state hashes (weights and optimizer) are equal", text, bool(shared) and not unequal)


def equal_weights(e: Evidence, names: Collection[str]) -> Check:
    """Checks that the given nodes, and no others, ended with bit-identical weights."""
    found = {}
    for path in sorted(e.folder.glob("final-*.json")):
        words = json.loads(path.read_text(encoding="utf-8"))
        found[str(words["member"]).removesuffix("-0")] = str(words["weights"])
    same = len(set(found.values())) == 1
    text = f"{' and '.join(found) or 'nobody'}: sha256 " + ", ".join(sorted({v[:12] for v in found.values()}))
    return Check("final weights are bit-identical", text, same and sorted(found) == sorted(names))


def learned(e: Evidence) -> Check:
    return falls("the model learns", [number(r.get("loss")) for r in e.records if r.name == LOSS])


def falls(what: str, losses: Sequence[float]) -> Check:
    """Checks that the last validation loss is less than the first one."""
    text = "validation loss " + ", ".join(f"{loss:.3f}" for loss in losses) + " nats per byte"
    return Check(what, text, len(losses) > 1 and losses[-1] < losses[0])


def training(e: Evidence, names: Collection[str]) -> list[Check]:
    """Returns the checks that every demo must pass whose training ends on the given nodes."""
    return [no_step_lost(e), samples(e), one_chain(e), equal_hashes(e), equal_weights(e, names), learned(e)]


def losses_of(records: Iterable[Record]) -> dict[int, set[float]]:
    """Returns all losses that members reported, by step."""
    found: dict[int, set[float]] = defaultdict(set)
    for r in records:
        if r.name == STEP_LOSS:
            found[integer(r["step"])].add(float(r["loss"]))
    return found


def losses(e: Evidence) -> list[Check]:
    alone = e.folder / ALONE  # nothing is there if the story broke off before
    ours, theirs = losses_of(e.records), losses_of(read_events(alone) if any(alone.glob("*.jsonl")) else ())
    torn = [step for step, values in ours.items() if len(values) > 1]
    apart = [abs(a - b) for step in ours.keys() & theirs.keys() for a in ours[step] for b in theirs[step]]
    steps = {s.step for s in e.steps}
    text = f"{len(apart)} steps compared, largest difference {max(apart, default=0.0):.1e}"
    whole = set(ours) == steps and steps <= set(theirs)
    told = f"{len(ours)} steps, {len(torn)} with several"
    return [
        Check("each step has one loss, at all members", told, not torn and bool(ours)),
        Check(f"losses are within {CLOSE:g} of those of one process", text, whole and max(apart, default=1.0) <= CLOSE),
    ]


def audited(e: Evidence) -> list[Check]:
    """Returns the verdicts of the independent audit, one check for each of its points."""
    return [verdict(finding) for finding in auditing.audit(e.folder / "events")]


def verdict(finding: auditing.Finding, job: str = "") -> Check:
    """Returns one verdict of the audit as a check; `job` names the job if there are several."""
    good = finding.verdict == auditing.OK
    what = f"audit {finding.point}: {auditing.POINTS[finding.point]}" + (f" ({job})" if job else "")
    bad = () if good else (finding.verdict, *finding.details[:3])
    return Check(what, "; ".join([finding.text, *bad]), good)


def _dead(e: Evidence) -> set[str]:
    return {x.member for x in e.timeline.lives.values() if x.end in ("killed", "fenced", "death")}


# ------------------------------------------------------------------ words


def table(checks: Sequence[Check], title: str) -> Table:
    """Returns checks as a table for a terminal."""
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="dim", padding=(0, 1))
    grid.add_column("")
    grid.add_column("what must be", ratio=5)
    grid.add_column("what the event logs show", ratio=8)
    for check in checks:
        verdict = Text("ok", style="bold green") if check.ok else Text("FAILED", style="bold red")
        grid.add_row(verdict, escape(check.what), escape(check.found))
    return grid


def words_of(codes: Mapping[str, int | None]) -> str:
    """Returns exit codes as text: "edge-1 0, edge-2 -9"."""
    return ", ".join(f"{name} {code}" for name, code in codes.items())


def consecutive(numbers: Sequence[int]) -> bool:
    """Returns whether each number is one more than the one before it."""
    return all(b == a + 1 for a, b in pairwise(numbers))


def transfer(join: folds.Join) -> str:
    """Returns a text about one joiner's state transfer: bytes, time and sources."""
    parts = [
        f"{node_of(donor).removesuffix('-0')} {amount(n)}" + (f" at {8e-6 * n / seconds:.0f} Mbit/s" if seconds else "")
        for donor, n, seconds in join.sources
        if n
    ]
    text = f"{amount(join.nbytes)} in {duration(join.seconds)}" + (f" from {', '.join(parts)}" if parts else "")
    return text + (f" ({amount(join.skipped)} it held already)" if join.skipped else "")
