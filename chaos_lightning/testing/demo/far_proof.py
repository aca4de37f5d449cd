"""Checks of `demo-diloco`, made from the event logs of leaders, followers and clusters.

Theory of operation. As in `proof.py`: a line fails when the logs contradict it, and also when they do not tell. What
was decided is the chain's word, folded from all leaders' entries (observe/outer/entries.py); what was trained, clusters
say themselves, and what was computed, followers. The audit's points 6 to 11 stand below the demo's own lines, and
points 1 to 5 of an elastic cluster.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import amount, duration
from chaos_lightning.observe.fields import number
from chaos_lightning.observe.jobs import fold_jobs
from chaos_lightning.observe.outer import fold
from chaos_lightning.observe.outer.audit import audit_folder, discarded_steps
from chaos_lightning.observe.outer.tables import ClusterRow, OuterFacts, VersionRow, cluster_of, lost_in, spent_share
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.outer.commands.supervisor import LEADER, SPARE
from chaos_lightning.outer.rules.types import PushAnswer, Removed
from chaos_lightning.testing.demo import FINAL, LOSS, proof
from chaos_lightning.testing.demo.far import BENDS, CLUSTERS, DIES, LATE, FarCluster
from chaos_lightning.testing.demo.proof import Check, Evidence

FASTER = (2.0, 5.0)
"""Bounds of the fastest cluster's speed over the slowest one's. Pauses make it three, on a busy machine less."""
REMOVED_S = 8.0
"""Longest time from a kill to the removal, s: three heartbeats, the record in the chain, and a busy machine."""
SERVED_AGAIN_S = 8.0
LED_S = 8.0
"""Longest time from a kill to the next lead, s: an election in which standbys see that the process is gone."""
BACK_S = 60.0
"""Longest time from the kill of the whole server to a round, s: all processes are started anew and import torch."""


class Plot(NamedTuple):
    """Scale of the demo: how many machines may lead, and how long it may take in all, s (0.0: not checked)."""

    candidates: int
    most_s: float = 0.0


class FarEvidence:
    """Evidence about the outer job, from a demo's event logs."""

    def __init__(self, e: Evidence, plot: Plot) -> None:
        self.e = e
        self.plot = plot
        jobs = fold_jobs(e.records, Timeline, fold.OuterRun).outer
        self.facts = OuterFacts.of(jobs[0] if jobs else fold.OuterRun())
        self.jobs = len(jobs)
        self.chain = self.facts.chain
        self.fault, self.first = e.fault, e.first

    @cached_property
    def rows(self) -> dict[str, list[ClusterRow]]:
        """Rows of each cluster's incarnations, by the cluster's name."""
        found: dict[str, list[ClusterRow]] = {}
        for row in self.facts.clusters:
            found.setdefault(cluster_of(row.name), []).append(row)
        return found

    def log(self, cluster: FarCluster) -> fold.ClusterLog | None:
        """Returns the events of a cluster's first incarnation; None if it logged none."""
        return next((log for name, log in self.facts.run.clusters.items() if cluster_of(name) == cluster.name), None)

    def told(self, cluster: FarCluster) -> list[fold.Happening]:
        """Returns everything that this cluster's first incarnation has logged."""
        log = self.log(cluster)
        return [one for each in log.told.values() for one in each] if log is not None else []

    def rounds(self, since: float, until: float = float("inf")) -> int:
        """Returns the number of rounds that were decided between `since` and `until`."""
        return sum(row.kind == "round" and since < row.t < until for row in self.facts.versions)

    def decided(self, after: Record | None) -> VersionRow | None:
        """Returns the first round that was decided after this event; None if there is no such round or event."""
        return next((row for row in self.facts.versions if row.kind == "round" and after and row.t > after.t), None)

    def steps(self, since: float, until: float) -> int:
        """Returns the number of inner steps that all clusters together reported between `since` and `until`."""
        told = (x for log in self.facts.run.clusters.values() for x in log.inner)
        return sum(x.steps for x in told if since < x.t < until)


# ------------------------------------------------------------------ the story


def trained(f: FarEvidence) -> Check:
    """Checks that each cluster trained, without a restart, and that the fastest one was two to five times the slowest
    one.
    """
    what = f"{len(CLUSTERS)} clusters of speeds 1 to 3 train one model"
    paces = {one.name: pace for one in CLUSTERS if (log := f.log(one)) and (pace := _pace(log.inner))}
    slowest, fastest = min(paces.values(), default=1.0), max(paces.values(), default=1.0)
    text = ", ".join(f"{name} {pace:.1f} steps a second ({pace / slowest:.1f})" for name, pace in paces.items())
    all_there = sorted(row for row, each in f.rows.items() for _ in each) == sorted(one.name for one in CLUSTERS)
    apart = FASTER[0] <= fastest / slowest <= FASTER[1]
    return Check(what, text, all_there and len(paces) == len(CLUSTERS) and apart)


def _pace(told: Sequence[fold.InnerSteps]) -> float:
    """Returns a cluster's inner steps per second, the median over its reports."""
    rates = [b.steps / (b.t - a.t) for a, b in pairwise(told) if b.t > a.t]
    return statistics.median(rates) if rates else 0.0


def elastic(f: FarEvidence) -> Check:
    """Checks that the elastic cluster's founders joined before one of its ranks was killed, and all its ranks in the
    end.
    """
    (*founders, _), kill = BENDS.nodes, f.fault("sigkill", f"{BENDS.nodes[1]}-0")
    what = f'{BENDS.name} is inner="chaos" with {len(founders)} ranks at first, {len(BENDS.nodes)} in all'
    joined = {r.node.removesuffix("-0"): r.t for r in reversed(f.e.records) if r.name == "joined" and r.own}
    first = [node for node in sorted(joined) if kill is not None and joined[node] < kill.t]
    text = f"{', '.join(first) or 'nobody'} before one was killed; {', '.join(sorted(joined)) or 'nobody'} in all"
    return Check(what, text, (first, sorted(joined)) == (sorted(founders), sorted(BENDS.nodes)))


def late(f: FarEvidence) -> Check:
    what = f"{LATE.name} comes late, fetches the newest version while the others train, and its pushes count"
    log, told = f.log(LATE), f.told(LATE)
    fetched = next((one for one in told if isinstance(one, fold.Fetch)), None)
    heard = next((x.t for x in told if isinstance(x, fold.HeardAnswer) and x.answer == PushAnswer.ACCEPTED.value), None)
    if log is None or not log.adoptions or fetched is None or heard is None:
        return Check(what, "none of its pushes counted", False)
    first = log.adoptions[0]
    before = f.rounds(f.facts.origin, first.t)
    text = f"{amount(fetched.nbytes)} of {first.version}, adopted {duration(first.t - log.first)} after its welcome; "
    text += f"first push accepted after {duration(heard - log.first)}; {before} rounds were decided before it came"
    return Check(what, text, first.outright and before > 0)


def died(f: FarEvidence) -> Check:
    what = f"{DIES.name} dies, is removed, and the others go on with its samples"
    kill = f.fault("sigkill", DIES.name)
    row = next(iter(f.rows.get(DIES.name, ())), None)
    if kill is None or row is None or row.ended is None:
        return Check(what, "it was not removed", False)
    text = f"removed {duration(row.ended - kill.t)} after the kill ({row.why}); {f.rounds(row.ended)} rounds after that"
    return Check(what, text, kill.t < row.ended < kill.t + REMOVED_S and f.rounds(row.ended) > 0)


def rank(f: FarEvidence) -> Check:
    """Checks that a push counts although a rank of the elastic cluster was killed while the push was being sent."""
    _, dies, joins = BENDS.nodes
    what = f"a rank of {BENDS.name} dies in mid-push, and another joins: the push counts, and the cluster stays"
    kill, told = f.fault("sigkill", f"{dies}-0"), f.told(BENDS)
    open_ = [x for x in told if isinstance(x, fold.FrozenPush) and kill is not None and x.t < kill.t]
    if kill is None or not open_:
        return Check(what, "no rank was killed after a push", False)
    push = max(open_, key=lambda x: x.t).push
    heard = next((x for x in told if isinstance(x, fold.HeardAnswer) and x.push == push), None)
    joined = f.first("joined", kill.t, lambda r: r.node == f"{joins}-0")
    parts = [one for each in f.facts.run.followers.values() for one in each.staged.get(push, ())]
    lacking = [t for t, _, _ in parts if t > kill.t]
    if heard is None or joined is None:
        return Check(what, f"{push} was {'answered' if heard else 'not answered'}; {joins} did not join", False)
    text = f"{push} was {heard.answer} by {heard.version}, {duration(heard.t - kill.t)} after the kill; "
    text += f"{joins} joined at its step {joined.get('step')}; "
    text += f"{len(lacking)} of {len(parts)} followers lacked bytes of it at the kill"
    return Check(what, text, bool(lacking) and heard.t > kill.t and heard.answer == PushAnswer.ACCEPTED.value)


def follower(f: FarEvidence) -> Check:
    what = "a follower gets kill -9: the warm spare makes another, which computes on"
    kill = f.fault("follower_sigkill")
    children = [r for r in f.e.records if r.name == "server_child"]
    struck = next((r for r in children if kill is not None and r.get("up") and r.get("pid") == kill.get("pid")), None)
    if kill is None or struck is None:
        return Check(what, "none was killed", False)
    victim = struck.get("child")
    down = f.first("server_child", kill.t, lambda r: r.get("child") == victim and not r.get("up"))
    up = f.first("server_child", down.t, lambda r: r.get("child") == victim and bool(r.get("up"))) if down else None
    stands = ("version_loaded", "version_computed")
    began = (r for r in f.e.records if r.name in stands and r.node == victim and up is not None and r.t > up.t)
    loaded = next(began, None)
    decided = f.decided(loaded)
    if up is None or loaded is None or decided is None:
        return Check(what, "none came in its place", False)
    text = f"{victim} was started again after {duration(up.t - kill.t)}, stood at {loaded.get('version')} after "
    text += f"{duration(loaded.t - kill.t)}, in round {decided.version} after {duration(decided.t - kill.t)}"
    warm = was_warm([r for r in children if r.source == up.source], kill.t, up.t)
    text += f", by a spare that was {'warm' if warm else 'NOT warm'}"
    text += f"; {f.steps(kill.t, decided.t)} inner steps meanwhile"
    another = up.get("pid") != kill.get("pid") and loaded.source != struck.source
    return Check(what, text, another and warm and loaded.t - kill.t < SERVED_AGAIN_S)


def was_warm(children: Sequence[Record], kill: float, up: float) -> bool:
    """Returns whether a follower's replacement came from a warm spare: one that started a process before the kill
    too.
    """
    spares = [r for r in children if r.get("child") == SPARE and r.t < up]
    since = spares[-1].t if spares and spares[-1].get("up") else up
    made = [r for r in children if r.get("up") and r.get("child") not in (SPARE, LEADER)]
    return any(since < r.t < kill for r in made)


def leader(f: FarEvidence) -> Check:
    several = f.plot.candidates > 1
    what = "the leading leader gets kill -9: " + ("another one leads" if several else "it is started again and leads")
    kill, next_kill = f.fault("leader_sigkill"), f.fault("server_sigkill")
    led = f.first("outer_leader_started", kill.t) if kill is not None else None
    if kill is None or led is None or (next_kill is not None and led.t > next_kill.t):
        return Check(what, "nobody led after it", False)
    decided = f.decided(led)
    text = f"term {led.get('term')} from entry {led.get('position')} on after {duration(led.t - kill.t)}"
    text += f", the next round after {duration(decided.t - kill.t)}" if decided is not None else ", and no round"
    text += f"; {f.steps(kill.t, decided.t)} inner steps meanwhile" if decided is not None else ""
    others = led.source not in {one.source for one in f.facts.run.leaders if one.t < kill.t}
    return Check(what, text, others and decided is not None and led.t - kill.t < LED_S)


def everything(f: FarEvidence) -> Check:
    what = "all processes of the server get kill -9 at once: started again, it goes on where it was"
    kill = f.fault("server_sigkill")
    led = f.first("outer_leader_started", kill.t) if kill is not None else None
    decided = f.decided(led)
    if kill is None or led is None or decided is None:
        return Check(what, "it did not go on", False)
    text = f"the chain from entry {led.get('position')} on after {duration(led.t - kill.t)}, round {decided.version} "
    text += f"after {duration(decided.t - kill.t)}; {f.steps(kill.t, decided.t)} inner steps meanwhile"
    return Check(what, text, f.jobs == 1 and number(led.get("position")) > 0 and decided.t - kill.t < BACK_S)


# ------------------------------------------------------------------ what was kept


def versions(f: FarEvidence) -> Check:
    """Checks that no version that was decided was lost by a rollback, and that the last one is durable."""
    chain, rows = f.chain, f.facts.versions
    gone = [str(row.version) for row in rows if not row.stands]
    cost = sum(lost_in(rollback)[0] for rollback in chain.rollbacks)
    text = f"lost {len(gone)} of {len(rows)}; {len(chain.rollbacks)} rollbacks, which cost {cost} samples"
    last = chain.ended.version if chain.ended is not None else None
    marked = {mark.version for mark in chain.marks}
    text += f"; the job ended with {last}, {'durable' if last in marked else 'NOT durable'}"
    return Check("versions lost: 0", text, bool(rows) and not gone and last in marked and last == chain.newest)


def pushes(f: FarEvidence) -> Check:
    """Checks that no push was counted twice."""
    accepted = [a for each in f.chain.answers.values() for a in each if a.answer is PushAnswer.ACCEPTED]
    twice = len(accepted) - len({a.offer.push for a in accepted})
    in_rounds = [push for row in f.facts.versions if row.kind == "round" and row.stands for push, _, _ in row.accepted]
    twice += len(in_rounds) - len(set(in_rounds))
    again = sum(len(each) > 1 for each in f.chain.answers.values())
    text = f"{twice} of {len(in_rounds)} accepted ones; {again} were answered anew after a rollback"
    return Check("pushes counted twice: 0", text, bool(in_rounds) and not twice)


def samples(f: FarEvidence) -> Check:
    shares = [share for share in spent_share(f.chain) if share[1]]
    whole = [share for share in shares if share[1] == share[2]]
    spent = sum(share[1] for share in shares)
    text = f"{len(whole)} of {len(shares)} epochs whole, {f.facts.samples:,} samples counted = "
    text += f"{len(shares)} x {f.chain.leases.length:,}"
    good = bool(shares) and len(whole) == len(shares) and f.facts.samples == spent
    return Check("each sample counts exactly once per epoch", text, good)


def inner_steps(f: FarEvidence) -> Check:
    """Checks for each cluster that all its inner steps are in accepted pushes, or were discarded with a reason in the
    logs.
    """
    words, lost, bad = [], 0, []
    for name, rows in f.rows.items():
        for row in rows:
            mine = [s for p, s in f.chain.standing.items() if str(p.incarnation) == row.name]
            counted = sum(s.offer.steps for s in mine if s.answer is PushAnswer.ACCEPTED)
            rejected = [s.offer.steps for s in mine if s.answer is PushAnswer.REJECTED]
            log = f.facts.run.clusters.get(row.name)
            beside = discarded_steps(log) if log is not None and rejected else 0
            left, known = row.steps - counted, sum(rejected) + beside
            why = f"{known} of {len(rejected)} rejected pushes and beside them" if rejected else ""
            why = "died" if name == DIES.name else why
            words.append(f"{name} {left} of {row.steps}" + (f" ({why})" if why else ""))
            if name != DIES.name and left != known:
                lost += left - known
                bad.append(name)
    text = f"{lost} but for the dead cluster's and those of rejected pushes: " + ", ".join(words)
    return Check("inner steps lost: 0", text, bool(words) and not lost and not bad)


def removed(f: FarEvidence) -> Check:
    """Checks that the server removed the killed cluster and no other."""
    told = [t.entry.body for t in f.chain.told.values() if t.entry is not None and isinstance(t.entry.body, Removed)]
    wrong = [body for body in told if body.incarnation.cluster != DIES.name]
    words = "; ".join(f"{body.incarnation}: {body.reason}" for body in told)
    return Check("living clusters removed: 0", f"{len(wrong)}; {words}", bool(told) and not wrong)


def states(f: FarEvidence) -> Check:
    """Checks that followers' saved states have the digests in the chain, and that all clusters end with equal
    weights.
    """
    marks = {str(mark.version): mark for mark in f.chain.marks}
    compared = again = differ = 0
    for log in f.facts.run.followers.values():
        seen: dict[str, str] = {}
        for one in log.saved:
            mark = marks.get(one.version)
            if mark is None or log.name not in mark.followers:
                continue
            compared += 1
            again += one.version in seen
            differ += mark.digests[mark.followers.index(log.name)] != one.digest
            seen[one.version] = one.digest
    finals = [r for r in f.e.records if r.name == FINAL]
    living = [one.name for one in CLUSTERS if one is not DIES]
    hashes, ends = {str(r["hash"]) for r in finals}, {str(r["version"]) for r in finals}
    there = {r.node for r in finals}
    text = f"{differ} of {compared} digests differ from the chain's, {again} of them of files written again; "
    text += f"final weights of {', '.join(sorted(there)) or 'nobody'} at {', '.join(sorted(ends))}: sha256 "
    text += ", ".join(sorted(h[:12] for h in hashes))
    same = len(hashes) == 1 and sorted(there) == sorted(living)
    return Check("states are equal", text, compared > 0 and not differ and same)


def learned(f: FarEvidence) -> Check:
    """Checks that the validation loss of adopted versions falls; of each epoch the first report counts."""
    losses: dict[int, float] = {}
    for r in f.e.records:
        if r.name == LOSS:
            losses.setdefault(int(number(r.get("epoch"))), number(r.get("loss")))
    return proof.falls("loss falls", [losses[epoch] for epoch in sorted(losses)])


def in_time(f: FarEvidence) -> Check:
    """Checks that the demo, from its first event to its last one, took no longer than allowed."""
    seconds = f.e.records[-1].t - f.e.records[0].t if f.e.records else 0.0
    text = f"{seconds:.0f} s from the first event to the last one"
    return Check(f"it takes at most {f.plot.most_s:.0f} s", text, f.chain.ended is not None and seconds < f.plot.most_s)


def audited(f: FarEvidence) -> list[Check]:
    """Returns the audit's verdicts on the outer job, and on the elastic cluster's inner job."""
    jobs = audit_folder(f.e.folder / "events")
    return [proof.verdict(x, j.title if j.title.startswith("elastic") else "") for j in jobs for x in j.findings]


def prove(e: Evidence, plot: Plot) -> list[Check]:
    """Returns all checks of this demo."""
    f = FarEvidence(e, plot)
    story = [trained(f), elastic(f), late(f), died(f), rank(f), follower(f), leader(f), everything(f)]
    kept = [versions(f), pushes(f), samples(f), inner_steps(f), removed(f), states(f), learned(f)]
    ended = proof.ended(e, DIES.name, BENDS.nodes[1])
    return [*story, *kept, ended, *([in_time(f)] if plot.most_s else ()), *audited(f)]
