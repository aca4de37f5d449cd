"""Judges points 6 to 11 of an outer job's contract, from the logs of leaders, followers and clusters alone.

Theory of operation. As in `observe/audit.py`, no single witness is trusted. The leaders' entries are folded into one
chain (`entries.py`) and held against themselves: hashes, predecessors, numbers, leases. What clusters froze,
heard and adopted, and what followers computed and saved, is then held against that chain. Within one file the order of
events counts; times of different machines are never compared.

What an entry that no log has may explain is a doubt and no contradiction, and what depends on all entries is not shown
then. A process that wrote no log here is named.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from chaos_lightning.events.reader import Logs
from chaos_lightning.observe.audit import NOT_SHOWN, OK, VIOLATED, Finding, judge, together
from chaos_lightning.observe.evidence import EvidenceFold
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer.entries import JobEntries, MadeVersion
from chaos_lightning.observe.outer.fold import (
    Adoption,
    ClusterLog,
    Fetch,
    FollowerLog,
    FrozenPush,
    Happening,
    HeardAnswer,
    InnerSteps,
    OuterRun,
    TookLast,
)
from chaos_lightning.observe.spans import size
from chaos_lightning.outer.rules.types import NO_VERSION, PushAnswer

_Kind = TypeVar("_Kind", bound=Happening)

KILLED_AT = 1
"""Number of pushes that the log of a process lacks if it is killed between a push and its line."""
SHOWN = 6
"""Number of remarks of one sort that are told; of the rest their number is."""


@dataclass(frozen=True, slots=True)
class JudgedJobs:
    """Verdicts on an outer job or on one elastic cluster, named by `title`; "" if the folder has a single job of
    members.
    """

    title: str
    findings: list[Finding]


def audit_folder(where: str | os.PathLike[str], *, expected_deaths: Collection[str] | None = None) -> list[JudgedJobs]:
    """Judges all jobs in a directory of event logs.

    Args:
        where: Log directory.
        expected_deaths: Members whose deaths were planned, as for `audit.audit`.

    Returns:
        For outer jobs points 6 to 11, and for each job of members, such as an elastic cluster, points 1 to 5.

    Raises:
        FileNotFoundError: There are no logs.
    """
    jobs = fold_jobs(Logs(where), EvidenceFold, OuterRun)
    found = [
        JudgedJobs(f"outer job{f' {number}' if len(jobs.outer) > 1 else ''}", audit_outer(run))
        for number, run in enumerate(jobs.outer, 1)
    ]
    for label, each in jobs.inner:
        judged = [judge(one.conclude(), expected_deaths=expected_deaths) for one in each]
        found.append(JudgedJobs(f"elastic cluster {label}" if jobs.outer else "", together(judged)))
    return found


def audit_outer(run: OuterRun) -> list[Finding]:
    """Judges one outer job."""
    one = _OuterJudge(run)
    return [one.chained(), one.pushes(), one.samples(), one.durable(), one.adopted(), one.progress()]


@dataclass(slots=True)
class _OuterJudge:
    run: OuterRun
    chain: JobEntries = field(init=False)
    names: dict[str, MadeVersion] = field(init=False)
    numbers: dict[int, str] = field(init=False)
    answers: dict[str, list[tuple[str, str]]] = field(init=False)
    """Answers of each push as the chain has them, as (answer, version)."""

    def __post_init__(self) -> None:
        self.chain = JobEntries.of(self.run.entries)
        self.names = self.chain.names()
        self.numbers = {made.id.number: name for name, made in self.names.items()}
        self.answers = {
            str(push): [(one.answer.value, str(one.version)) for one in each]
            for push, each in self.chain.answers.items()
        }

    def _finding(self, point: int, shown: bool, text: str, bad: Sequence[str], remarks: Sequence[str]) -> Finding:
        if bad:
            return Finding(point, VIOLATED, text, tuple(bad))
        return Finding(point, OK if shown else NOT_SHOWN, text, tuple(remarks))

    def _bad(self, topic: str) -> list[str]:
        return [text for what, text in self.chain.contradictions if what == topic]

    def _gaps(self) -> list[str]:
        return [
            f"entry {first} is in no log" if first == last else f"entries {first} to {last} are in no log"
            for first, last in self.chain.gaps
        ]

    def _foreign(self, version: str) -> str:
        """Returns what is wrong with a version that a process names; "" if the chain has it or may have it in a gap of
        the logs.
        """
        known = self.numbers.get(_number(version))
        if version in self.names or known is None:
            return ""
        return f"{version}, and the chain's version {_number(version)} is {known}"

    def _unknown(self, version: str) -> bool:
        return version not in self.names and not self._foreign(version)

    # ------------------------------------------------------------------ the leaders' own words

    def chained(self) -> Finding:
        """Judges point 6 of the contract: versions form one chain."""
        chain, bad = self.chain, self._bad("chain")
        wrote = {(told.source, told.entry.term) for told in chain.told.values() if told.entry is not None}
        led: dict[tuple[str, int], str] = {}
        idle = []
        for leader in self.run.leaders:
            if (leader.source, leader.term) not in wrote:
                idle.append(leader)
                continue
            other = led.setdefault((leader.job, leader.term), leader.source)
            if other != leader.source:
                bad.append(f"{other} and {leader.source} both led job {leader.job} in term {leader.term} (O7)")
        beside = [one.source for one in idle if led.get((one.job, one.term), one.source) != one.source]
        named = {one.version for _, _, one in self._told(Adoption)}
        named |= {step.version for one in self.run.followers.values() for step in one.states if step.version}
        late = sorted({v for v in named if self._unknown(v) and _number(v) > chain.newest.number}, key=_number)
        remarks = [*self._gaps(), *_few(chain.doubts), *_few(chain.strays)]
        remarks += [f"{source} led on another store, and decided nothing that counts" for source in beside]
        if late:
            remarks.append(f"entries that made {', '.join(_few(late))} are in no log; others tell of these versions")
        remarks += [f"{count} lines of {source} were lost" for source, count in self.run.lost.items()]
        files = {told.source for told in self.run.entries}
        text = f"{len(chain.told)} entries, {len(chain.versions)} versions, in {len(files)} leaders' logs"
        return self._finding(6, bool(chain.told) and not chain.gaps and not late, text, bad, remarks)

    def samples(self) -> Finding:
        """Judges point 8 of the contract: every sample counts once per epoch."""
        chain, bad = self.chain, self._bad("samples")
        newest = chain.versions.get(chain.newest)
        counted = newest.counters.samples if newest is not None and newest.counters is not None else 0
        remarks = self._gaps()
        whole = chain.leases.length
        for epoch, spans in sorted(chain.leases.spent.items()):
            count = size(spans)
            remarks.append(
                f"epoch {epoch}: {count} samples{' (whole)' if count == whole else f' of {whole}'}, each once"
            )
        if not whole:
            remarks.append("each cluster has its own data: only the sums of its pushes are shown")
        back = sum(offer.samples for rollback in chain.rollbacks for offer in rollback.pushes)
        text = f"{counted} samples of accepted pushes" + (f"; {back} were taken back by rollbacks" if back else "")
        shown = counted > 0 and not chain.gaps
        return self._finding(8, shown, text, bad, [*_few(remarks)])

    # ------------------------------------------------------------------ pushes

    def pushes(self) -> Finding:
        """Judges point 7 of the contract: every push is answered once, and counts at most once."""
        bad, silent, heard = self._bad("pushes"), [], 0
        for cluster, _, one in self._told(HeardAnswer):
            given = self.answers.get(one.push)
            if given is None:
                silent.append(f"{cluster.name} heard that {one.push} is {one.answer}; no log has the entry")
            elif not any(_agrees(one, answer, version) for answer, version in given):
                said = " and then ".join(f"{answer} by {version}" for answer, version in given)
                bad.append(f"{cluster.name} heard that {one.push} is {one.answer} by {one.version}; the chain: {said}")
            else:
                heard += 1
        frozen: dict[str, FrozenPush] = {}
        for cluster, source, push in self._told(FrozenPush):
            first = frozen.setdefault(push.push, push)
            if (first.base, first.steps, first.samples) != (push.base, push.steps, push.samples):
                bad.append(f"{cluster.name} froze {push.push} twice, and not the same ({source})")
        untold: dict[str, list[str]] = {}
        for name, (offer, position) in self.chain.offers.items():
            mine = frozen.get(str(name))
            if mine is None:
                untold.setdefault(str(name.incarnation), []).append(str(name))
                continue
            froze, has = (mine.base, mine.steps, mine.samples), (str(offer.base), offer.steps, offer.samples)
            if mine.manifest and mine.manifest != offer.manifest:
                bad.append(f"{name} was frozen with manifest {mine.manifest}; entry {position} has {offer.manifest}")
            if froze != has:
                bad.append(f"{name} was frozen on {_of(froze)}; entry {position} has it on {_of(has)}")
        short = [
            f"the log of {who} lacks {len(names)} pushes that the chain has, from {names[0]} on: it was cut off"
            for who, names in untold.items()
            if who in self.run.clusters and len(names) > KILLED_AT
        ]
        count = {a: sum(s.answer is a for s in self.chain.standing.values()) for a in PushAnswer}
        text = ", ".join(f"{n} {answer.value}" for answer, n in count.items()) + f"; clusters heard {heard} answers"
        shown = count[PushAnswer.ACCEPTED] > 0 and not self.chain.gaps and not silent and not short
        return self._finding(7, shown, text, bad, [*self._gaps(), *_few(silent), *_few(short)])

    # ------------------------------------------------------------------ followers

    def durable(self) -> Finding:
        """Judges point 9 of the contract: followers computed what the durable marks say."""
        bad, remarks = self._bad("durable"), []
        matched = missing = 0
        for mark in self.chain.marks:
            version = str(mark.version)
            for shard, (name, digest) in enumerate(zip(mark.followers, mark.digests, strict=False)):
                follower = self.run.followers.get(name)
                saved = {one.digest for one in follower.saved if one.version == version} if follower else set()
                others = {one for one in saved - {digest} if (version, one) not in self.chain.recut}
                if others and not mark.recut:  # else they may be of the shard that it held before
                    other = ", ".join(sorted(others))
                    bad.append(f"follower {name} saved shard {shard} of {version} as {other}; the mark says {digest}")
                matched += digest in saved
                missing += not saved
        bad += self._unstaged()
        for follower in self.run.followers.values():
            bad += self._computed(follower)
            if follower.damaged:
                remarks.append(f"files at {follower.name} were damaged: {', '.join(follower.damaged)}")
        if missing:
            remarks.append(f"of {missing} marked shards no follower's log tells that they were saved")
        strange = {step.version for one in self.run.followers.values() for step in one.states if step.version}
        strange = {version for version in strange if self._unknown(version)}
        if strange:
            remarks.append(f"followers stood at {', '.join(_few(sorted(strange)))}, of which no log has the entry")
        text = f"{matched} of {matched + missing} digests in {len(self.chain.marks)} durable marks seen at followers"
        return self._finding(9, matched > 0 and not missing, text, bad, remarks)

    def _unstaged(self) -> list[str]:
        """Returns, in words, versions decided before a shard had their pushes; only for a follower on the leader's host
        (one clock).
        """
        bad: list[str] = []
        for name, made in self.names.items():
            host = self.run.hosts.get(made.told.source)
            for follower in (self.run.followers[x] for x in made.shards if x in self.run.followers):
                files = {step.source for step in follower.states}
                if host is None or {self.run.hosts.get(x) for x in files} != {host} or files & self.run.lost.keys():
                    continue
                for offer in made.pushes:
                    staged = follower.staged.get(str(offer.push), [])
                    if staged and min(t for t, _, _ in staged) > made.told.t:
                        bad.append(f"{name} was decided before follower {follower.name} had staged {offer.push} (O2)")
        return bad

    def _computed(self, follower: FollowerLog) -> list[str]:
        """Returns what is wrong with a follower's versions: each must be computed from its predecessor, with staged
        pushes only.
        """
        bad: list[str] = []
        at, begun, source = "", 0.0, ""
        for step in follower.states:
            if step.how == "started" or step.source != source:
                at, begun, source = "", step.t, step.source
            if wrong := self._foreign(step.version):
                bad.append(f"follower {follower.name} {step.how} {wrong}")
            made = self.names.get(step.version)
            if step.how == "computed" and made is not None and source not in self.run.lost:
                if made.before != NO_VERSION and str(made.before) != at:
                    text = f"follower {follower.name} computed {step.version} from {at or 'nothing'}"
                    bad.append(f"{text}; the chain makes it of {made.before} (O1)")
                for offer in made.pushes:
                    staged = follower.staged.get(str(offer.push), [])
                    if not any(begun <= t <= step.t for t, _, _ in staged):
                        text = f"follower {follower.name} computed {step.version}"
                        bad.append(f"{text} and had not staged {offer.push} (O2)")
            at = step.version or at
        return bad

    # ------------------------------------------------------------------ clusters

    def _told(self, kind: type[_Kind]) -> list[tuple[ClusterLog, str, _Kind]]:
        """Returns all events of one kind that clusters logged, as (cluster, file, event)."""
        return [
            (cluster, source, one)
            for cluster in self.run.clusters.values()
            for source, told in cluster.told.items()
            for one in told
            if isinstance(one, kind)
        ]

    def adopted(self) -> Finding:
        """Judges point 10 of the contract: clusters adopted only versions of the chain."""
        bad, unknown = [], set()
        versions = [one.version for _, _, one in self._told(Adoption)]
        for cluster in self.run.clusters.values():
            for source, told in cluster.told.items():
                if source not in self.run.lost:
                    bad += [f"{cluster.name}: {text}" for text in _sequence(_once(told))]
        named = [(cluster.name, "adopted", one.version) for cluster, _, one in self._told(Adoption)]
        named += [(cluster.name, "fetched", one.version) for cluster, _, one in self._told(Fetch)]
        for who, did, version in named:
            if wrong := self._foreign(version):
                bad.append(f"{who} {did} {wrong}")
            elif self._unknown(version):
                unknown.add(version)
        remarks = [f"no log has the entry that made {name}, which was adopted" for name in sorted(unknown, key=_number)]
        silent = [str(who) for who in self.chain.members if str(who) not in self.run.clusters]
        if silent:
            remarks.append(f"{', '.join(_few(silent))} joined and wrote no log here")
        text = f"{len(versions)} adoptions of {len(set(versions))} versions by {len(self.run.clusters)} incarnations"
        return self._finding(10, bool(versions) and not unknown, text, bad, _few(remarks))

    def progress(self) -> Finding:
        """Judges point 11 of the contract: each inner step's progress is in exactly one push."""
        bad: list[str] = []
        remarks: list[str] = []
        compared = steps = discarded = 0
        for cluster in self.run.clusters.values():
            for source, all_told in cluster.told.items():
                told = _once(all_told)
                if source in self.run.lost:
                    remarks.append(f"{source} lacks lines: what {cluster.name} pushed cannot be counted")
                    continue
                if not any(isinstance(one, InnerSteps) for one in told):
                    remarks.append(f"{source} tells of no inner steps")
                elif any(isinstance(one, FrozenPush) for one in told):
                    found = _counted(told)
                    compared, steps = compared + found.compared, steps + found.steps
                    discarded += found.discarded + found.at_end
                    bad += [f"{cluster.name}: {text}" for text in found.bad]
        text = f"{steps} inner steps in {compared} pushes, each in one"
        text += f"; rejections and the job's end discarded {discarded} that were in none" if discarded else ""
        return self._finding(11, compared > 0, text if not bad else "see below", bad, remarks)


def discarded_steps(cluster: ClusterLog) -> int:
    """Returns how many inner steps rejections discarded before any push contained them, according to the cluster's own
    log.
    """
    return _counted(_once(cluster.history)).discarded


def _agrees(heard: HeardAnswer, answer: str, version: str) -> bool:
    return heard.answer == answer and (heard.version == version or answer == PushAnswer.VOID.value)


def _of(content: tuple[str, int, int]) -> str:
    base, steps, samples = content
    return f"{base} with {steps} steps and {samples} samples"


def _number(version: str) -> int:
    """Returns the number in a version's name such as "v12-..."; 0 if it has none."""
    digits = version.removeprefix("v").partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _few(lines: Sequence[str]) -> list[str]:
    if len(lines) <= SHOWN:
        return list(lines)
    return [*lines[: SHOWN - 1], f"and {len(lines) - SHOWN + 1} more"]


def _once(told: Sequence[Happening]) -> list[Happening]:
    """Returns the events without answers that only repeat an earlier one, as after a push was offered again."""
    heard: set[tuple[str, str, str]] = set()
    found: list[Happening] = []
    for one in told:
        if isinstance(one, HeardAnswer):
            if (said := (one.push, one.answer, one.version)) in heard:
                continue
            heard.add(said)
        found.append(one)
    return found


def _sequence(told: Sequence[Happening]) -> list[str]:
    """Returns what is wrong with the order in which one process adopted versions, froze pushes and heard answers (O8,
    O10).
    """
    bad: list[str] = []
    base: str | None = None
    answered = 0
    waiting: set[str] = set()
    rejected = False
    for one in told:
        match one:
            case FrozenPush():
                if base is not None and one.base != base:
                    bad.append(f"{one.push} is a delta to {one.base}, and {base} was adopted last (O9)")
                waiting.add(one.push)
            case HeardAnswer():
                waiting.discard(one.push)
                answered = max(answered, _number(one.version))
                rejected |= one.answer == PushAnswer.REJECTED.value
            case Adoption():
                what = f"{one.version} was adopted"
                if waiting:
                    bad.append(f"{what} while {', '.join(sorted(waiting))} had no answer (O8)")
                if base is not None and _number(one.version) < _number(base):
                    bad.append(f"{what} after {base}, which is newer (O8)")
                if _number(one.version) < answered:
                    bad.append(f"{what} after an answer by version {answered}, which is newer (O8)")
                if rejected and not one.outright:
                    bad.append(f"{what} after a rejection, and not outright (O10)")
                base, rejected = one.version, False
            case _:
                pass
    return bad


@dataclass(slots=True)
class _Counted:
    """Inner steps that one process trained, compared with those that its pushes cover.

    Attributes:
        compared: Pushes that could be compared.
        steps: Inner steps that these pushes cover.
        discarded: Steps in no push that rejections discarded.
        at_end: Steps in no push that the job's end discarded.
        bad: Contradictions in words.
    """

    compared: int = 0
    steps: int = 0
    discarded: int = 0
    at_end: int = 0
    bad: list[str] = field(default_factory=list)


def _counted(told: Sequence[Happening]) -> _Counted:
    """Checks that each push covers the steps trained since the previous one was frozen, and those of void pushes (O9,
    O10); returns counts.
    """
    found = _Counted()
    left: tuple[int, int] | None = None
    """Steps and samples that no push covers; None: not known yet."""
    recent: list[InnerSteps] = []
    """Inner steps since the last push was frozen."""
    pushes: dict[str, FrozenPush] = {}
    for one in told:
        match one:
            case InnerSteps():
                recent.append(one)
                left = (left[0] + one.steps, left[1] + one.samples) if left is not None else None
            case FrozenPush():
                late = [each for each in recent if each.t > one.t - one.seconds]
                later = sum(each.steps for each in late), sum(each.samples for each in late)
                if left is not None:
                    found.compared, found.steps = found.compared + 1, found.steps + one.steps
                    rest = left[0] - one.steps, left[1] - one.samples
                    if not (0 <= rest[0] <= later[0] and 0 <= rest[1] <= later[1]):
                        text = f"{one.push} covers {one.steps} steps and {one.samples} samples; {left[0]} and {left[1]}"
                        how = "two pushes" if min(rest) < 0 else "none"
                        found.bad.append(f"{text} were trained and in no push: some are in {how}")
                        rest = later
                    left = rest
                else:
                    left = later
                recent, pushes[one.push] = late, one
            case HeardAnswer(answer=PushAnswer.VOID.value):
                void = pushes.pop(one.push, None)
                if void is not None and left is not None:
                    left = left[0] + void.steps, left[1] + void.samples
            case HeardAnswer(answer=PushAnswer.REJECTED.value) | Adoption(outright=True):
                found.discarded += left[0] if left is not None else 0
                left, recent = (0, 0), []
            case TookLast():
                found.at_end += left[0] if left is not None else 0
                left, recent = (0, 0), []
            case _:
                pass
    return found
