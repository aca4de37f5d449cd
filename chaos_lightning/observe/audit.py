"""Judges from event logs alone whether a job kept points 1 to 5 of the design's contract.

Theory of operation. The engine writes down what it did; this module reads that and nothing else, shares no code with
what it judges, and trusts no single witness: headers are compared between members, ledgers with what the members say
they used, state hashes between those who took them, deaths with the faults that were declared. Each contract point
gets one verdict:

- `ok`: enough evidence, and all of it agrees; the line says how much there was.
- `violated`: at least one line of evidence contradicts the contract; each contradiction is listed.
- `not shown`: the logs do not hold what it takes to tell (no state hashes, no join, no death).

Jobs that were logged into one folder one after the other are judged apart (`jobs.py`); a point held if it held in each.
A verdict is about these logs: `ok` says that nothing in them is wrong, `not shown` is never a pass in disguise.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_lightning.events.reader import Logs
from chaos_lightning.observe import coverage, history
from chaos_lightning.observe import evidence as ev
from chaos_lightning.observe.fields import Stream, node_of
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.spans import Spans, merge, size
from chaos_lightning.protocol.types import GENESIS

OK, VIOLATED, NOT_SHOWN = "ok", "violated", "not shown"

POINTS: Mapping[int, str] = {
    1: "all contributors hold the same state",
    2: "stable steps never regress and are never redone",
    3: "every sample in exactly one committed step per epoch",
    4: "a joiner's state equals its donors' at the same step",
    5: "a death or freeze loses no committed step and no sample; nobody alive is fenced",
    6: "versions form one chain",
    7: "every push is answered once, and counts at most once",
    8: "every sample counts once per epoch",
    9: "followers computed what the durable marks say",
    10: "clusters adopted only versions of the chain",
    11: "the progress of each inner step is in one push",
}
"""Points of the contract: 1 to 5 for a job of members, 6 to 11 for an outer job (`outer/audit.py`)."""
_FROM_A_PART = frozenset({1, 4})
"""Points that a part of the logs can show; order, use of samples and survival need all of it."""
_BY_SILENCE = frozenset({"gap", "ledger", "dropped"})
"""Rules that a log can break by what it does not say."""
_OF_A_MEMBER = frozenset({"order", "entry", "skip", "missing", "parts"})
"""Rules that the log of one member can break by what it does not say."""
SHOWN = 6
"""Number of missing parts that are told one by one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict on one point of the contract (docs/architecture.md, "What must always hold")."""

    point: int
    verdict: str
    """Verdict: "ok", "violated" or "not shown"."""
    text: str
    """Evidence that was looked at, in one line."""
    details: tuple[str, ...] = ()
    """Contradictions if violated; else remarks."""

    def __str__(self) -> str:
        head = f"{self.point:<2} {self.verdict.upper():9}  {POINTS[self.point]}: {self.text}"
        return "\n".join([head, *(f"     - {line}" for line in self.details)])


def audit(
    where: str | os.PathLike[str],
    *,
    lengths: Mapping[Stream, int] | None = None,
    expected_deaths: Collection[str] | None = None,
    silence_s: float = 0.35,
) -> list[Finding]:
    """Judges the event logs in a directory.

    Args:
        where: Log directory.
        lengths: Number of samples by (stream, epoch), if the logs do not say it (`epoch` events).
        expected_deaths: Nodes whose death, freeze or exclusion was planned beyond the `fault_injected` events in the
            logs. None: if the logs hold injected faults, only those are expected; if they hold none, deaths are taken
            to be real ones and are remarks, not violations.
        silence_s: A member that wrote an event this shortly before it was excluded counts as responsive.

    Returns:
        One finding per point, 1 to 5; over all jobs, if several were logged here one after the other.
    """
    ((_, each),) = fold_jobs(Logs(where), ev.EvidenceFold).inner
    return together(
        [judge(one.conclude(), lengths=lengths, expected_deaths=expected_deaths, silence_s=silence_s) for one in each]
    )


def judge(
    facts: ev.Testimony,
    *,
    lengths: Mapping[Stream, int] | None = None,
    expected_deaths: Collection[str] | None = None,
    silence_s: float = 0.35,
) -> list[Finding]:
    """Judges the events of one job; see `audit`."""
    facts.epochs |= dict(lengths or {})
    one = _Judge(facts, expected_deaths, silence_s)
    return [one.agreement(), one.order(), one.samples(), one.joins(), one.survival()]


def together(each: Sequence[list[Finding]]) -> list[Finding]:
    """Merges the findings of several jobs into one per point: the worst verdict, or "not shown" if no job shows the
    point.
    """
    if len(each) == 1:
        return each[0]
    found: list[Finding] = []
    for same in zip(*each, strict=True):
        numbered = [(f"job {number}: ", one) for number, one in enumerate(same, 1)]
        verdicts = {one.verdict for one in same}
        worst = next(v for v in (VIOLATED, OK, NOT_SHOWN) if v in verdicts)
        told = [(label, one) for label, one in numbered if worst != VIOLATED or one.verdict == VIOLATED]
        text = "; ".join(f"{label}{one.text}" for label, one in numbered)
        details = tuple(f"{label}{line}" for label, one in told for line in one.details)
        found.append(Finding(same[0].point, worst, text, details))
    return found


def violations(findings: Collection[Finding]) -> list[str]:
    """Returns every contradiction in words; empty if the contract held as far as the logs show."""
    return [f"contract {f.point}: {line}" for f in findings if f.verdict == VIOLATED for line in f.details]


def verdict(findings: Collection[Finding]) -> str:
    """Returns all findings as lines for a terminal; the last line sums them up."""
    bad = sum(f.verdict == VIOLATED for f in findings)
    dark = sum(f.verdict == NOT_SHOWN for f in findings)
    held = len(findings) - bad - dark
    last = f"VIOLATED: {bad} of {len(findings)} points" if bad else f"HELD: {held} points" if held else "NOTHING SHOWN"
    if dark:
        last += f", {dark} not shown by these logs"
    return "\n".join([*(str(f) for f in findings), last])


@dataclass(slots=True)
class _Judge:
    facts: ev.Testimony
    expected: Collection[str] | None
    silence_s: float
    runs: list[history.JobRun] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = history.runs(self.facts.commits) if self.facts.commits else []

    def _finding(self, point: int, shown: bool, text: str, bad: list[str], remarks: list[str] | None = None) -> Finding:
        if bad:
            return Finding(point, VIOLATED, text, tuple(bad))
        missing = self.facts.missing
        if len(missing) > SHOWN:
            missing = [*missing[:SHOWN], f"... and {len(missing) - SHOWN} more"]
        whole = not missing or point in _FROM_A_PART
        return Finding(point, OK if shown and whole else NOT_SHOWN, text, (*(remarks or ()), *missing))

    def _proven(self, problems: Iterable[history.Problem], remarks: list[str]) -> list[history.Problem]:
        """Returns the problems that contradict the contract; moves those that missing log lines may explain to the
        remarks.
        """
        found = []
        for problem in problems:
            excused = self.facts.missing and (
                problem.rule in _BY_SILENCE or (problem.member in self.facts.untold and problem.rule in _OF_A_MEMBER)
            )
            if excused:
                remarks.append(problem.text)
            else:
                found.append(problem)
        return found

    # ---------------------------------------------------------------------------------------------- 1 and 4

    def agreement(self) -> Finding:
        """Judges point 1 of the contract: all contributors to a slot have the same state."""
        compared, problems = history.check_hashes([*self.facts.hashes, *self.facts.pulled_hashes])
        slots = sum(len(run.chain) for run in self.runs)
        text = f"state hashes compared at {compared} of {slots} committed slots"
        return self._finding(1, compared > 0, text, [p.text for p in problems])

    def joins(self) -> Finding:
        """Judges point 4 of the contract: a joiner's state equals its donors' at the same step."""
        bad: list[str] = []
        remarks: list[str] = []
        matched, total = 0, len(self.facts.pulls)
        compared = self._compared()
        by_head: dict[str, dict[str, str]] = {}
        for head, member, value in self.facts.hashes:
            by_head.setdefault(head, {})[member] = value
        for pull in self.facts.pulls:
            donors = {m: v for m, v in by_head.get(pull.head, {}).items() if m != pull.member}
            if not pull.head or not pull.hash:
                remarks.append(f"{pull.member} pulled its state without naming header and hash")
            elif not donors:
                # Agreement afterwards is weaker evidence: equal states a few slots on can only come from equal ones.
                if pull.member in compared:
                    matched += 1
                elif pull.member in self.facts.never_in:
                    total -= 1
                    remarks.append(f"{pull.member} pulled a state and never came in, so it was never asked to be equal")
                else:
                    remarks.append(f"{pull.member}: no donor's hash at {pull.head}, and none later to compare with")
            elif any(v != pull.hash for v in donors.values()):
                rows = ", ".join(f"{m}={v}" for m, v in sorted(donors.items()))
                bad.append(f"{pull.member} took over state {pull.hash} at {pull.head}; donors had {rows}")
            else:
                matched += 1
        for run in self.runs:
            entered = {p.member: p.head for p in self.facts.pulls if p.head}
            entries = [p for p in history.check_members(run, entered) if p.rule == "entry"]
            bad += [p.text for p in self._proven(entries, remarks)]
        said = [f"{matched} of {total} joiners' states matched"] if total or not self.facts.parts else []
        parts = sum(told.pulled for told in self.facts.parts.values())
        bad += [p.text for p in self._proven((p for told in self.facts.parts.values() for p in told.problems), remarks)]
        if self.facts.parts:
            joined = {member for member, told in self.facts.parts.items() if told.joined}
            said += [
                f"{len(joined)} joiners came in by parts, and parts of {len(joined & compared)} of them were compared "
                "with those of other owners later",
                f"{parts} parts of the state were got and proved, each before its new owner trained with it",
            ]
        return self._finding(4, (matched > 0 or parts > 0) and matched == total, "; ".join(said), bad, remarks)

    def _compared(self) -> set[str]:
        """Returns the members whose state, or a part of it, was compared with another member's, whatever the result."""
        by_head: dict[str, set[str]] = {}
        for head, who, _ in [*self.facts.hashes, *self.facts.pulled_hashes]:
            by_head.setdefault(head, set()).add(who)
        return {member for members in by_head.values() if len(members) > 1 for member in members}

    # ---------------------------------------------------------------------------------------------- 2

    def order(self) -> Finding:
        """Judges point 2 of the contract: stable steps never regress and are never redone."""
        bad: list[str] = []
        remarks: list[str] = []
        redone = 0
        for run in self.runs:
            problems = list(history.check_chain(run, genesis=GENESIS.hash))
            problems += history.check_forks(run)
            problems += history.check_members(run)
            problems += history.check_contributors(run, self.facts.views_at(run.ended))
            problems += history.check_stable(run, self.facts.left_job)
            bad += [str(p) for p in self._proven(problems, remarks)]
            redone += len(run.lost_branches)
        steps = sum(run.headers[h].kind == "step" for run in self.runs for h in run.chain)
        members = {c.member for c in self.facts.commits}
        text = f"{steps} steps in {sum(len(r.chain) for r in self.runs)} slots by {len(members)} members"
        if len(self.runs) > 1:
            text += f" in {len(self.runs)} runs"
        if redone:
            text += f"; {redone} slots were known to nobody but their dead and were reduced again"
        return self._finding(2, steps > 0, text, bad, remarks)

    # ---------------------------------------------------------------------------------------------- 3

    def samples(self) -> Finding:
        """Judges point 3 of the contract: every sample is in exactly one committed step per epoch."""
        bad: list[str] = []
        remarks: list[str] = []
        used: dict[Stream, int] = {}
        carried: dict[Stream, Spans] = {}
        for index, run in enumerate(self.runs):
            start = self._resumed(index)
            usage, problems = history.check_samples(run, start=start)
            problems += history.check_complete(usage, self.facts.epochs)
            problems += coverage.check_coverage(run)
            bad += [p.text for p in self._proven(problems, remarks)]
            for key, use in usage.items():
                used[key] = size(use.start) + use.count
                carried[key] = merge([*use.start, *use.used])
        shown = sum(used.values()) > 0
        for key, count in sorted(used.items(), key=lambda x: (x[0][1], x[0][0])):
            length = self.facts.epochs.get(key)
            label = f"epoch {key[1]}" + (f" of {key[0]}" if key[0] else "")
            if length is not None and count > length:
                bad.append(f"{label}: {count} uses of {length} samples")
            whole = "" if length is None else " (whole)" if count == length else f" of {length}"
            remarks.append(f"{label}: {count} samples{whole}, each once")
        if len(remarks) > 6:
            remarks = [*remarks[:3], f"... {len(remarks) - 6} more epochs ...", *remarks[-3:]]
        text = f"{sum(used.values())} uses in {len(used)} epochs, none twice" if not bad else "see below"
        slots, layers = max((coverage.covered(run) for run in self.runs), default=(0, 0))
        if slots and not bad:
            text += f"; each micro-batch once in each of {layers} layers, in {slots} slots"
        return self._finding(3, shown, text, bad, remarks)

    def _resumed(self, index: int) -> dict[Stream, Spans] | None:
        """Returns the used samples with which a run says it began; None if it does not say so: its first header shows
        them.
        """
        run = self.runs[index]
        before = self.runs[index - 1].ended if index else 0.0
        said = [ledger for t, ledger in self.facts.resumed if before <= t <= run.began]
        return said[-1] if said else None

    # ---------------------------------------------------------------------------------------------- 5

    def survival(self) -> Finding:
        """Judges point 5 of the contract: a death or freeze loses no committed step and no sample, and no live member
        is excluded.
        """
        bad: list[str] = []
        remarks: list[str] = []
        recovered = struck = 0
        # A reason for what happened may be in what is missing.
        strict = (self.expected is not None or self.facts.injected) and not self.facts.missing
        for run in self.runs:
            unsaid = history.check_commits_of_all(run, self.facts.gone)
            bad += [str(p) for p in self._proven(unsaid, remarks)]
            last = run.headers[run.chain[-1]]
            closed = last.kind == "closing"
            for loss in self.facts.losses:
                if not run.began <= loss.t <= run.ended:
                    continue
                struck += 1
                later = [run.headers[h] for h in run.chain if run.headers[h].t > loss.t]
                without = [s for s in later if loss.member not in s.contributors or loss.stayed]
                survivors = [m for s in later[:1] for m in s.contributors if m != loss.member]
                if without or closed or not survivors:
                    recovered += 1
                else:
                    remarks.append(f"the log ends before anybody went on after {loss.member}'s {loss.kind}")
        for out in self.facts.excluded:
            known = out.why or (node_of(out.member) in (self.expected or ()))
            if known:
                continue
            where = f"{out.member} was put out by view {out.view[0]}.{out.view[1]}"
            alive = out.silent_s is not None and out.silent_s <= self.silence_s and out.spoke_later
            if alive and not self.facts.missing:
                bad.append(
                    f"{where} though it was alive: it wrote an event {out.silent_s:.3f} s before and went on after"
                )
            elif strict:
                bad.append(f"{where}; no fault, leave or death of it was declared")
            else:
                remarks.append(f"{where}; its log says nothing of a reason")
        for member, why in self.facts.unexplained.items():
            if node_of(member) in (self.expected or ()):
                continue
            (bad if strict else remarks).append(f"{member} {why}")
        (remarks if self.facts.missing else bad).extend(self.facts.unawakened)
        text = f"training went on after {recovered} of {struck} deaths and freezes"
        return self._finding(5, struck > 0 and recovered == struck, text, bad, remarks)
