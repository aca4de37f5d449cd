"""What the demo proves, from its event logs: a table of expectations, each with what was found.

Theory of operation. Two witnesses are heard. The audit (observe/audit.py) judges the contract over all events, sharing
no code with the engine. The checks here ask whether what the story wanted to show was shown: who joined from whom, how
long the others waited, what a death cost, whether all hold the same in the end. A check fails when the logs contradict
it, and also when they do not tell: nothing is taken on trust from the program that told the story but the exit codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chaos_lightning.events.events import Record, read_events
from chaos_lightning.lab.demo import LOSS
from chaos_lightning.lab.demo.cast import before
from chaos_lightning.observe import audit as auditing
from chaos_lightning.observe import folds
from chaos_lightning.observe.fields import node_of, number
from chaos_lightning.observe.timeline import Life, Timeline
from chaos_lightning.observe.units import amount, duration

HOW = {
    "redo": "the open step was reduced again from kept gradients",
    "hand-on": "the committed step was handed on",
    "next": "no step was open",
    "stayed": "it thawed in time",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the proof."""

    what: str
    found: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the story says it did, by node names, and how it ended.

    Attributes:
        founders, joins, killed, frozen, leaves: Who was to do what.
        exit_codes: Of the agents; None if one still ran. `before(name)` has that of a node that was started again.
        several: A founder with two workers, of which the second one is killed; "" for none.
        last: Who left as the last one; "" if nobody did.
        again: Who was started again after that.
    """

    founders: tuple[str, ...]
    joins: str
    killed: str
    frozen: str
    leaves: str
    exit_codes: Mapping[str, int | None]
    several: str = ""
    last: str = ""
    again: tuple[str, ...] = ()

    @property
    def staying(self) -> tuple[str, ...]:
        """Nodes that are there at the end."""
        return self.again or tuple(n for n in (*self.founders, self.joins) if n not in (self.killed, self.leaves))

    @property
    def founding(self) -> set[str]:
        """The founders' workers."""
        return {f"{n}-0" for n in self.founders} | ({f"{self.several}-1"} if self.several else set())

    def code(self, name: str) -> int | None:
        """With which this node's first agent ended."""
        return self.exit_codes.get(before(name), self.exit_codes.get(name))


def prove(folder: Path, expected: Expected) -> list[Check]:
    """Everything that must be true of the demo in this folder."""
    records = list(read_events(folder / "events"))
    timeline = Timeline.of(records)
    one = _Proof(folder, timeline, records, expected)
    return [
        one.founded(),
        one.sibling(),
        one.worker(),
        one.joined(),
        one.killed(),
        one.frozen(),
        one.left(),
        one.kept(),
        one.resumed(),
        one.finished(),
        one.steps(),
        one.samples(),
        one.chain(),
        one.hashes(),
        one.weights(),
        one.learned(),
        *audited(folder / "events"),
    ]


def audited(events: Path) -> list[Check]:
    """The independent audit's verdicts; here all five points must be shown."""
    return [
        Check(f"audit {f.point}: {auditing.POINTS[f.point]}", "; ".join([f.text, *_bad(f)]), f.verdict == auditing.OK)
        for f in auditing.audit(events)
    ]


def _bad(finding: auditing.Finding) -> Sequence[str]:
    return () if finding.verdict == auditing.OK else (finding.verdict, *finding.details[:3])


def table(checks: Sequence[Check], title: str) -> Table:
    """The checks for a terminal."""
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="dim", padding=(0, 1))
    grid.add_column("")
    grid.add_column("what must be", ratio=5)
    grid.add_column("what the event logs show", ratio=8)
    for check in checks:
        verdict = Text("ok", style="bold green") if check.ok else Text("FAILED", style="bold red")
        grid.add_row(verdict, escape(check.what), escape(check.found))
    return grid


@dataclass(slots=True)
class _Proof:
    folder: Path
    timeline: Timeline
    records: Sequence[Record]
    expected: Expected

    # ------------------------------------------------------------------------------------------------ the story

    def founded(self) -> Check:
        names = self.expected.founders
        lives = {name: self._lives(name) for name in names}
        slots = [s for s in self.timeline.chain() if {node_of(m) for m in s.who} == self.expected.founding]
        start = min((r.t for r in self.records), default=0.0)
        born = max((x[0].born for x in lives.values() if x), default=0.0)
        what = f"{len(names)} torchrun nodes start the job"
        if not slots:
            return Check(what, f"no step of {', '.join(names)} together", False)
        roles = [f"{name} as {x[0].role}" for name, x in lives.items() if x]
        text = f"{', '.join(roles)}; trained together {duration(slots[0].first - born)} after the last one was ready"
        return Check(what, f"{text}, {duration(slots[0].first - start)} after the start", True)

    def joined(self) -> Check:
        name = self.expected.joins
        what = f"{name} joins by replay while the others train, over links of different rates"
        join = next((j for j in folds.joins(self.timeline) if j.node == f"{name}-0"), None)
        if join is None or join.contributed is None or join.pull_done is None:
            return Check(what, "it never contributed", False)
        away = [s for s in self.timeline.chain() if s.first < join.contributed and join.member not in s.who]
        text = (
            f"{_transfer(join)}; replayed {join.replayed} steps of the others'; contributed "
            f"{duration(join.contributed - join.born)} after its hello; the others waited {duration(join.pause)} for it"
        )
        if not join.replayed:
            text += f"; no replay: {join.why}"
        return Check(what, text, join.nbytes > 0 and len(join.sources) > 1 and bool(away) and join.replayed > 0)

    def killed(self) -> Check:
        name = self.expected.killed
        what = f"SIGKILL of {name} (agent and worker) costs no step"
        recovery = self._recovery(name, "sigkill")
        if recovery is None or recovery.seconds is None:
            return Check(what, "the logs show no step after it", False)
        code = self.expected.code(name)
        noticed = "" if recovery.noticed is None else f"noticed after {duration(recovery.noticed - recovery.at)}; "
        text = f"{noticed}all {recovery.survivors} survivors held the next step after {duration(recovery.seconds)}"
        return Check(what, f"{text}: {HOW[recovery.how]}", code == -9 and recovery.survivors >= 2)

    def sibling(self) -> Check:
        name = self.expected.several
        what = f"SIGKILL of one of {name}'s two workers: its sibling trains on, and the job is not founded again"
        recovery, back = self._recovery(name, "sigkill", 1), self._back()
        if recovery is None or back is None or back.contributed is None:
            return Check(what, "the logs show no such worker that came back", False)
        chain = [s for s in self.timeline.chain() if s.kind == "step" and s.first <= back.contributed]
        steps = [s for s in chain if s.first > recovery.at]
        numbers = [s.step for s in chain[-len(steps) - 1 :]]
        mine = [x for x in self._lives(name) if x.born <= back.contributed]
        with_it = [s for s in steps if s.who and mine and mine[0].member in s.who]
        founded = [r for r in self._foundings() if recovery.at < r.t <= back.contributed]
        code = self.expected.code(name)
        text = (
            f"{', '.join(x.member for x in mine)} in process {', '.join(str(self._pid(x)) for x in mine)} was in "
            f"{len(with_it)} of {len(steps)} steps until the worker was back; "
            f"{'none' if len(numbers) > 1 and _whole(numbers) else 'SOME'} lost; {len(founded)} foundings; "
            f"{name}'s exit code {code}"
        )
        good = bool(steps) and len(with_it) == len(steps) and _whole(numbers) and len(mine) == 1
        return Check(what, text, good and not founded and code == 0)

    def worker(self) -> Check:
        name = self.expected.several
        what = f"{name}'s agent starts that worker again, and it joins the others"
        recovery, back = self._recovery(name, "sigkill", 1), self._back()
        if recovery is None or back is None or back.contributed is None:
            return Check(what, "it did not come back", False)
        first, second = (self.timeline.lives[x.member] for x in (recovery, back))
        text = (
            f"{back.member} in process {self._pid(second)} instead of {self._pid(first)}; {_transfer(back)}; "
            f"contributed {duration(back.contributed - recovery.at)} after the kill"
        )
        return Check(what, text, first.source != second.source and back.nbytes > 0)

    def frozen(self) -> Check:
        name = self.expected.frozen
        what = f"{name} freezes, is put out, wakes and joins again by itself"
        recovery = self._recovery(name, "sigstop")
        lives = self._lives(name)
        if recovery is None or recovery.decided is None or recovery.resumed is None:
            return Check(what, "it was not put out", False)
        after = [x for x in lives if x.born >= recovery.at and x.joined is not None]
        before = [x for x in lives if x.member == recovery.member]
        if not after or not before:
            return Check(what, "it did not come back", False)
        join = next((j for j in folds.joins(self.timeline) if j.member == after[0].member), None)
        same = after[0].source == before[0].source
        wakes = [r.t for r in self.records if r.name == "fault_injected" and r.get("kind") == "sigcont"]
        back = f"back {duration((after[0].joined or 0.0) - wakes[-1])} after waking" if wakes else "back"
        text = (
            f"others waited {duration(recovery.resumed - recovery.at)} until it was out; {back}, "
            f"{'in the same process' if same else 'in ANOTHER process'}"
        )
        text += f", with {_transfer(join)}" if join is not None else ", without the others' state"
        return Check(what, text, same and before[0].end == "fenced" and join is not None)

    def left(self) -> Check:
        name = self.expected.leaves
        what = f"Ctrl+C at {name}'s torchrun is a polite leave"
        lives, code = self._lives(name), self.expected.code(name)
        last = lives[0] if lives else None
        if last is None or last.end != "left" or last.ended is None or last.leaving is None:
            return Check(what, f"it ended as {last.end if last else 'nothing'!r}; torchrun's exit code {code}", False)
        text = f"out {duration(last.ended - last.leaving)} after the wish; its torchrun ended with exit code {code}"
        return Check(what, text, code == 0)

    def kept(self) -> Check:
        name = self.expected.last
        what = f"{name}, the last member, leaves, and keeps the training state in a file; the scheduler ends, too"
        kept = self._one("kept")
        life = self.timeline.lives.get(kept.member) if kept is not None else None
        if kept is None or life is None:
            return Check(what, "nobody kept it", False)
        earlier = [s for s in self.timeline.chain() if s.first <= kept.t]
        ended = [r for r in self.records if r.name == "scheduler_ended" and kept.t < r.t < self._next_lead(kept)]
        code = self.expected.code(name)
        text = f"{kept.member} at step {kept.get('step')}; it ended as {life.end!r}, its torchrun with exit code {code}"
        text += "; the scheduler ended after that" if ended else "; the scheduler did not end"
        good = bool(earlier) and earlier[-1].step == kept["step"] and set(earlier[-1].who) == {kept.member}
        return Check(what, text, good and life.node == f"{name}-0" and life.end == "left" and code == 0 and bool(ended))

    def resumed(self) -> Check:
        names = self.expected.again
        what = f"{' and '.join(names)} start again: the job goes on at that step, from that state"
        kept, resumed = self._one("kept"), self._one("resumed_kept")
        if kept is None or resumed is None:
            return Check(what, "nobody went on from it", False)
        hashes = {
            r.member: str(r["hash"])
            for r in self.records
            if r.name == "state_hash" and r["head"] == kept["head"] and r.member in (kept.member, resumed.member)
        }
        steps = [s for s in self.timeline.chain() if s.first > kept.t and s.kind == "step"]
        who = {node_of(m) for s in steps for m in s.who}
        founded = [str(r.get("reason")) for r in self._foundings()]
        text = (
            f"{resumed.member} at step {resumed.get('step')}; state hash "
            + (" and then ".join(value[:12] for value in hashes.values()) or "of nobody")
            + f"; next step {steps[0].step if steps else None}; foundings: 1 and {len(founded) - 1} from the kept state"
        )
        good = (
            resumed["step"] == kept["step"]
            and len(hashes) == 2
            and len(set(hashes.values())) == 1
            and bool(steps)
            and steps[0].step == kept["step"] + 1
            and who == {f"{n}-0" for n in names}
            and [f"kept at step {kept['step']}" in words for words in founded] == [False, True]
        )
        return Check(what, text, good)

    def finished(self) -> Check:
        names = self.expected.staying
        codes = [self.expected.exit_codes.get(name) for name in names]
        closing = [s for s in self.timeline.chain() if s.kind == "closing"]
        who = sorted(node_of(m).removesuffix("-0") for m in closing[-1].commits) if closing else []
        text = f"closing slot committed by {', '.join(who) or 'nobody'}; torchrun's exit codes {codes}"
        return Check(f"the job finishes with {' and '.join(names)}", text, who == sorted(names) and not any(codes))

    # ------------------------------------------------------------------------------------------------ the training

    def steps(self) -> Check:
        chain = self.timeline.chain()
        steps = [s.step for s in chain if s.kind == "step"]
        dead = {x.member for x in self.timeline.lives.values() if x.end in ("killed", "fenced", "death")}
        kept = {s.header for s in chain}
        stray = [s for s in self.timeline.slots.values() if s.header not in kept]
        lost = [s for s in stray if s.kind == "step" and not set(s.commits) <= dead]
        whole = steps == list(range(1, len(steps) + 1))
        text = f"{len(steps)} steps committed, numbered without a gap; {len(lost)} lost" if whole else f"gaps: {steps}"
        if len(stray) > len(lost):
            text += f"; {len(stray) - len(lost)} known only to a victim and reduced again by the others"
        return Check("no committed step is lost", text, bool(steps) and whole and not lost)

    def samples(self) -> Check:
        uses = folds.samples(self.timeline)
        whole = [use for use in uses.values() if use.complete and not use.twice and use.used == use.distinct]
        lengths = {use.length for use in uses.values()}
        text = f"{len(whole)} of {len(uses)} epochs whole, {sum(u.used for u in uses.values()):,} uses"
        text += f" = {len(uses)} x {lengths.pop():,}" if len(lengths) == 1 and None not in lengths else ""
        doubles = sum(use.used - use.distinct for use in uses.values())
        found = f"{text}; {doubles} used twice"
        return Check("every sample exactly once per epoch", found, bool(uses) and len(whole) == len(uses))

    def chain(self) -> Check:
        """Each member's own list of commits against the chain, number by number."""
        chain = {s.seq: s.header for s in self.timeline.chain()}
        dead = {x.member for x in self.timeline.lives.values() if x.end in ("killed", "fenced", "death")}
        compared, differ, members = 0, 0, set()
        for r in self.records:
            if r.name == "committed" and r.by == r.member:
                members.add(r.member)
                compared += 1
                # What only a victim had committed is in `steps`.
                differ += chain.get(int(r["seq"])) != r["header"] and r.member not in dead
        text = f"{compared:,} commits by {len(members)} member ids agree on one chain of {len(chain):,} headers"
        if differ:
            text = f"{differ} of {compared:,} commits are not on the chain"
        return Check("all members committed the same headers", text, bool(compared) and not differ)

    def hashes(self) -> Check:
        shared = [hashes for hashes in self.timeline.hashes.values() if len(hashes) > 1]
        unequal = [hashes for hashes in shared if len(set(hashes.values())) > 1]
        members = {member for hashes in shared for member in hashes}
        text = f"equal at {len(shared) - len(unequal)} of {len(shared)} steps where {len(members)} member ids took one"
        return Check("state hashes (weights and optimizer) are equal", text, bool(shared) and not unequal)

    def weights(self) -> Check:
        found = {}
        for path in sorted(self.folder.glob("final-*.json")):
            words = json.loads(path.read_text(encoding="utf-8"))
            found[str(words["member"]).removesuffix("-0")] = str(words["weights"])
        same = len(set(found.values())) == 1
        text = f"{' and '.join(found) or 'nobody'}: sha256 " + ", ".join(sorted({v[:12] for v in found.values()}))
        return Check("final weights are bit-identical", text, same and sorted(found) == sorted(self.expected.staying))

    def learned(self) -> Check:
        losses = [number(r.get("loss")) for r in self.records if r.name == LOSS]
        text = "validation loss " + ", ".join(f"{loss:.3f}" for loss in losses) + " nats per byte"
        return Check("the model learns", text, len(losses) > 1 and losses[-1] < losses[0])

    # ------------------------------------------------------------------------------------------------ helpers

    def _lives(self, name: str, worker: int = 0) -> list[Life]:
        mine = (x for x in self.timeline.lives.values() if x.node == f"{name}-{worker}")
        return sorted(mine, key=lambda x: x.born)

    def _recovery(self, name: str, kind: str, worker: int = 0) -> folds.RecoveryTimes | None:
        found = folds.recoveries(self.timeline)
        return next((r for r in found if r.node == f"{name}-{worker}" and r.kind == kind), None)

    def _back(self) -> folds.Join | None:
        """How the worker that was killed came in again."""
        return next((j for j in folds.joins(self.timeline) if j.node == f"{self.expected.several}-1" and j.again), None)

    def _pid(self, life: Life) -> object:
        return next((r.get("pid") for r in self.records if r.name == "opened" and r.source == life.source), None)

    def _one(self, name: str) -> Record | None:
        """The only event of this name from members."""
        found = [r for r in self.records if r.name == name and r.own]
        return found[0] if len(found) == 1 else None

    def _foundings(self) -> list[Record]:
        """Views that no earlier view led to."""
        views = [r for r in self.records if r.name == "view" and r.source.startswith("scheduler")]
        return [r for r in views if str(r.get("reason")).startswith("founded")]

    def _next_lead(self, after: Record) -> float:
        """When the next scheduler began to lead."""
        leads = [r.t for r in self.records if r.name == "scheduler_started" and r.t > after.t]
        return min(leads, default=float("inf"))


def _whole(numbers: Sequence[int]) -> bool:
    """Each is the one before and one."""
    return all(b == a + 1 for a, b in pairwise(numbers))


def _transfer(join: folds.Join) -> str:
    """Bytes, time and sources of one state transfer."""
    parts = [
        f"{node_of(donor).removesuffix('-0')} {amount(n)}" + (f" at {8e-6 * n / seconds:.0f} Mbit/s" if seconds else "")
        for donor, n, seconds in join.sources
        if n
    ]
    text = f"{amount(join.nbytes)} in {duration(join.seconds)}" + (f" from {', '.join(parts)}" if parts else "")
    return text + (f" ({amount(join.skipped)} it held already)" if join.skipped else "")
